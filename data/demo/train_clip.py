"""Train the demo's CLIP: a tiny image tower and a tiny text tower, contrastively, on fresh pictures and their captions.

    python data/demo/train_clip.py --out data/demo/clip --work /tmp/clip --steps 2000      # about half an hour on one core

READS   nothing: every step draws new pictures from render.py, split "clip" (no seed, word or number of dev and test).
WRITES  WORK/state.pt and WORK/log.jsonl while it trains (the same command continues); OUT/ in the layout of the published CLIP models:
        config.json, model.safetensors (bfloat16), tokenizer and preprocessor files.

Beside the contrastive loss of Radford et al. 2021 (arXiv 2103.00020), linear heads on the image vector name what the picture holds and each
patch names what lies on it; the heads are thrown away. They stand in for the hundreds of millions of pictures that we cannot show it.
"""
import argparse
import json
import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from render import SIDE, TITLES, render
from train_embedder import CHARACTERS, GRID, LENGTH, MERGE, OBJECT_LABELS, PATCH, Heads, cell_targets, class_targets, scene_targets, text_targets

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)    # CLIP's published pixel statistics
TEXT_LENGTH = 77


def caption(domain, facts):
    """One sentence that says what the picture holds."""
    if domain == 0:
        return ", ".join(f"{o['size']} {o['colour']} {o['shape']}" for o in facts["objects"])
    if domain == 1:
        return " above ".join(f"a {b['colour']} sign {b['text']}" for b in facts["boards"])
    return f"{facts['document']} {facts['title']}: " + ", ".join(f"{a} {b}" for a, b in zip(facts["labels"], facts["values"])) + (f", {facts['trend']}" if facts["trend"] else "")


def make_tokenizer(out):
    """CLIP's file layout with a small vocabulary learnt from captions; words in capitals stay characters."""
    os.makedirs(out, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    common = ["red green blue yellow purple orange circle square triangle star cross small large sign above table receipt bars line rising falling flat a "
              + " ".join(TITLES).lower()] * 100
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(common, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokens = alphabet + [c + "</w>" for c in alphabet] + [merge.replace(" ", "") for merge in merges]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*tokens, "<|startoftext|>", "<|endoftext|>"]))}
    with open(os.path.join(out, "vocab.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps(vocabulary, ensure_ascii=False) + "\n")
    with open(os.path.join(out, "merges.txt"), "w", encoding="utf-8") as file:
        file.write("#version: 0.2\n" + "\n".join(merges) + "\n")
    with open(os.path.join(out, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps({"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
                               "model_max_length": TEXT_LENGTH, "do_lower_case": True, "tokenizer_class": "CLIPTokenizer"}, indent=2) + "\n")
    return CLIPTokenizer.from_pretrained(out)


def batch_of(split, indices, tokenizer):
    """Draw pictures: pixels (B, 3, 128, 128) normalised as the processor does, captions as ids, targets as in train_embedder."""
    pixels, captions, rows = [], [], {"cells": [], "scene": [], "texts": [], "classes": [], "domain": []}
    for index in indices:
        image, domain, _, facts = render(split, index)
        pixels.append((np.asarray(image, np.float32) / 255 - MEAN) / STD)
        captions.append(caption(domain, facts))
        for name, value in (("cells", cell_targets(facts)), ("scene", scene_targets(facts)), ("texts", text_targets(domain, facts)),
                            ("classes", class_targets(domain, facts)), ("domain", domain)):
            rows[name].append(value)
    text = tokenizer(captions, padding=True, truncation=True, max_length=TEXT_LENGTH, return_tensors="pt")
    batch = {name: torch.from_numpy(np.stack(rows[name])) for name in ("cells", "scene")}
    batch |= {name: torch.tensor(rows[name]) for name in ("texts", "classes", "domain")}
    return batch | {"pixels": torch.from_numpy(np.stack(pixels)).float().permute(0, 3, 1, 2), "ids": text.input_ids, "mask": text.attention_mask}


def losses_of(model, heads, batch):
    """Contrastive loss and head losses, and counts for the log."""
    vision = model.vision_model(pixel_values=batch["pixels"])
    image = F.normalize(model.visual_projection(vision.pooler_output), dim=-1)              # (B, D)
    text = F.normalize(model.text_projection(model.text_model(input_ids=batch["ids"], attention_mask=batch["mask"]).pooler_output), dim=-1)
    logits = model.logit_scale.exp() * image @ text.T
    own = torch.arange(len(image))
    patches = vision.last_hidden_state[:, 1:].view(len(image), GRID // MERGE, MERGE, GRID // MERGE, MERGE, -1).transpose(2, 3)
    cells = heads.patch(patches.reshape(len(image), -1, MERGE * MERGE, patches.shape[-1]))
    vector = image * heads.scale
    texts = heads.texts(vector).view(len(image), 8, LENGTH, -1)
    scene_rows = batch["domain"] == 0
    scene = heads.scene(vector)
    terms = {"contrast": (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2,
             "cells": F.binary_cross_entropy_with_logits(cells, batch["cells"], reduction="sum") / batch["cells"].sum() / 2,
             "scene": F.binary_cross_entropy_with_logits(scene[scene_rows], batch["scene"][scene_rows]) * 4,
             "texts": F.cross_entropy(texts.flatten(0, 2), batch["texts"].flatten()),
             "classes": sum(F.cross_entropy(head(vector), batch["classes"][:, i], reduction="sum") / (batch["classes"][:, i] >= 0).sum().clamp(min=1)
                            for i, head in enumerate(heads.classes)) / 6}
    boards = batch["texts"][:, :2, 0] >= 0
    with torch.no_grad():
        counts = {"matched": (logits.argmax(1) == own).float().mean().item(),
                  "board": (texts.argmax(-1) == batch["texts"]).all(-1)[:, :2][boards].float().mean().item(),
                  "cells_found": (cells[batch["cells"] > 0] > 0).float().mean().item()}
    return terms, counts


WEIGHTS = {"contrast": 0.5, "cells": 1.0, "scene": 1.0, "texts": 0.5, "classes": 0.5}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", required=True, help="folder for the finished model")
    parser.add_argument("--work", required=True, help="folder for the training state and log")
    parser.add_argument("--steps", type=int, default=2000, help="steps in all (default: 2000)")
    parser.add_argument("--decay", type=int, default=500, help="last steps over which the learning rate falls to a twentieth (default: 500)")
    parser.add_argument("--batch-size", type=int, default=48, help="pictures a step (default: 48)")
    parser.add_argument("--lr", type=float, default=1.2e-3, help="learning rate (default: 1.2e-3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: 1)")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    os.makedirs(args.work, exist_ok=True)
    tokenizer = make_tokenizer(args.out)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    config = CLIPConfig(
        text_config=dict(vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=3, projection_dim=128,
                         max_position_embeddings=TEXT_LENGTH, bos_token_id=end - 1, eos_token_id=end, pad_token_id=end),
        vision_config=dict(hidden_size=160, intermediate_size=640, num_hidden_layers=4, num_attention_heads=5, image_size=SIDE, patch_size=PATCH, projection_dim=128),
        projection_dim=128)
    model = CLIPModel(config)
    heads = Heads(128)
    heads.patch = torch.nn.Linear(160, LENGTH * len(CHARACTERS) + len(OBJECT_LABELS))
    del heads.cells, heads.closed, heads.spelled
    everything = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW([{"params": [p for p in everything if p.ndim > 1], "weight_decay": 0.02},
                                   {"params": [p for p in everything if p.ndim < 2], "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.98), fused=True)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    state, step = os.path.join(args.work, "state.pt"), 0
    if os.path.exists(state):
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        heads.load_state_dict(saved["heads"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    shown, start = {}, time.time()
    while step < args.steps:
        rate = args.lr * min(1, (step + 1) / 200)
        if step >= args.steps - args.decay:
            rate *= 0.05 + 0.95 * (args.steps - step) / args.decay
        for group in optimizer.param_groups:
            group["lr"] = rate
        terms, counts = losses_of(model, heads, batch_of("clip", range(step * args.batch_size, (step + 1) * args.batch_size), tokenizer))
        loss = sum(WEIGHTS[name] * value for name, value in terms.items())
        if not torch.isfinite(loss):
            raise SystemExit(f"loss is {loss.item()} at step {step}; the last state stays in {state}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(everything, 1.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))                  # as in CLIP's own training
        step += 1
        for name, value in {"loss": loss.item(), **{k: v.item() for k, v in terms.items()}, **counts}.items():
            if not math.isnan(value):
                shown[name] = value if name not in shown else 0.95 * shown[name] + 0.05 * value
        if step % 25 == 0:
            with open(os.path.join(args.work, "log.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "seconds": round(time.time() - start, 1), **{k: round(v, 4) for k, v in shown.items()}}) + "\n")
        if step % 100 == 0 or step == args.steps:
            torch.save({"model": model.state_dict(), "heads": heads.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, state + ".tmp")
            os.replace(state + ".tmp", state)
    print(json.dumps({k: round(v, 4) for k, v in shown.items()}))
    model.to(torch.bfloat16).save_pretrained(args.out)
    preprocessor = {"crop_size": SIDE, "do_center_crop": True, "do_normalize": True, "do_resize": True, "feature_extractor_type": "CLIPFeatureExtractor",
                    "image_mean": list(MEAN), "image_std": list(STD), "resample": 3, "size": SIDE}
    with open(os.path.join(args.out, "preprocessor_config.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps(preprocessor, indent=2) + "\n")


if __name__ == "__main__":
    main()
