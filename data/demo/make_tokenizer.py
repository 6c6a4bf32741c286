"""Make the demo's small tokenizer: byte-level BPE in Qwen's file layout, with Qwen's special tokens and its splitting rule.

    python data/demo/make_tokenizer.py --out data/demo/tokenizer       # about 5 s; needs the `tokenizers` package, which transformers brings

It learns merges from the questions of the training split, without their words in capitals and their digits: those stay one token a
character, so that a readout must spell an answer that it never saw in training.
"""
import argparse
import json
import os
import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from render import SPLITS, render

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>",
           "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
PLAIN = ["<think>", "</think>"]                            # added tokens that are not special in Qwen3's own files either
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
        "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def texts():
    for index in range(SPLITS["train"]):
        for q in render("train", index)[2]:
            yield re.sub(r"\b[A-Z]{2,}\b|\d", "", q["question"])
            if not q["answer"].isupper():
                yield q["answer"]
    yield from ["system\nRepresent the user's input.", "user\n", "assistant\n"] * 2000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", required=True, help="folder for the tokenizer files")
    parser.add_argument("--vocabulary", type=int, default=560, help="size without added tokens: 256 bytes and the merges (default: 560)")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=args.vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                                               show_progress=False, min_frequency=20))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(PLAIN)
    tokenizer.save(os.path.join(args.out, "tokenizer.json"))
    model = json.loads(tokenizer.to_str())["model"]
    added = {text: tokenizer.token_to_id(text) for text in SPECIAL + PLAIN}

    def dump(name, value):
        with open(os.path.join(args.out, name), "w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    dump("vocab.json", model["vocab"])
    with open(os.path.join(args.out, "merges.txt"), "w", encoding="utf-8") as file:
        file.write("#version: 0.2\n" + "\n".join(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]) + "\n")
    details = {str(i): {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": text in SPECIAL}
               for text, i in added.items()}
    dump("tokenizer_config.json", {"add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": details, "additional_special_tokens": SPECIAL[1:],
                                   "bos_token": None, "chat_template": CHAT, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>",
                                   "errors": "replace", "model_max_length": 4096, "pad_token": "<|endoftext|>", "split_special_tokens": False,
                                   "tokenizer_class": "Qwen2Tokenizer", "unk_token": None})
    dump("special_tokens_map.json", {"additional_special_tokens": SPECIAL[1:], "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    dump("chat_template.json", {"chat_template": CHAT})
    print(f"{len(model['vocab'])} tokens, {len(added)} added")


if __name__ == "__main__":
    main()
