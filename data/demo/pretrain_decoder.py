"""Pretrain the demo's decoder: a tiny Qwen3 that has read the training questions and answers, so that it speaks before it sees.

    python data/demo/pretrain_decoder.py --out data/demo/decoder           # a few minutes on one core

READS   nothing but render.py (split "train") and data/demo/tokenizer.
WRITES  OUT/ in the layout of the published Qwen3 models: config.json, generation_config.json, model.safetensors (bfloat16), tokenizer files.

Plain next-word training on whole chats, question and answer, without any picture or vector. After it the decoder knows the wording and the
prior of the answers; what it does not know is any picture.
"""
import argparse
import os
import random
import shutil

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from render import QUESTIONS, SPLITS, render


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--out", required=True, help="folder for the finished model")
    parser.add_argument("--tokenizer", default=os.path.join(here, "tokenizer"), help="tokenizer folder (default: data/demo/tokenizer)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training text (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order (default: 0)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
                                         num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, rope_theta=1000000, tie_word_embeddings=True,
                                         eos_token_id=end, bos_token_id=pad, pad_token_id=pad))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    chats = []
    for index in range(SPLITS["train"]):
        for q in render("train", index)[2][:QUESTIONS["train"]]:
            chats.append(tokenizer(f"<|im_start|>user\n{q['question']}<|im_end|>\n<|im_start|>assistant\n{q['answer']}<|im_end|>").input_ids)
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.02)
    batches = len(chats) // 64
    with tqdm(total=args.epochs * batches, disable=None) as bar:
        for epoch in range(args.epochs):
            rng.shuffle(chats)
            for start in range(0, batches * 64, 64):
                rows = chats[start:start + 64]
                width = max(map(len, rows))
                ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
                labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
                logits = model(input_ids=ids).logits                       # right padding never reaches an earlier position
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
                for group in optimizer.param_groups:
                    group["lr"] = 2e-3 * min(1, (bar.n + 1) / 50) * (1 - 0.95 * bar.n / bar.total)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                bar.update()
                bar.set_postfix(loss=f"{loss.item():.3f}")
    print(f"last loss {loss.item():.3f}")
    model.generation_config.update(eos_token_id=[end, pad], pad_token_id=pad)
    model.to(torch.bfloat16).save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"):
        shutil.copy(os.path.join(args.tokenizer, name), args.out)


if __name__ == "__main__":
    main()
