"""Train the demo's embedder: a tiny Qwen3-VL whose last-token vector answers questions about the demo's pictures.

    python data/demo/train_embedder.py --out data/demo/qwen3-vl-embedding --work /tmp/embedder --steps 3000   # hours on one core

READS   nothing: every step draws new pictures from render.py, split "embedder" (no seed, word or number of dev and test).
WRITES  WORK/state.pt and WORK/log.jsonl while it trains (the same command continues); OUT/ in the layout of the published Qwen3-VL-Embedding
        models: config.json, model.safetensors (bfloat16), tokenizer and preprocessor files. The heads are thrown away.

What is trained, and how it is kept cheap (this is our choice, nothing here is the paper's):
- one sequence holds a picture, several questions about it and one empty question, each question seeing the picture and itself only;
  positions restart after the picture, so that the vectors are those of the ordinary prompts that extract.py sends (checked at the start);
- the question's vector (vl_joint) goes through linear heads that name the answer: one class for frequent answers, one head for each
  character of a spelled answer; the empty question's vector (visual_only) goes through linear heads on what the picture holds;
- each image token also predicts which characters and objects lie on it; the first steps train nothing else (--see-first), since a tower
  that cannot see gives the language model nothing to learn from and costs a third of a whole step.
"""
import argparse
import json
import math
import os
import shutil
import time

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from render import COLOURS, SHAPES, SIDE, TITLES, TRENDS, render

PATCH, MERGE, GRID = 16, 2, SIDE // 16                   # 8 x 8 patches, 4 x 4 image tokens
IMAGE_TOKENS = (GRID // MERGE) ** 2
INSTRUCTION = "Represent the user's input."
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
CLOSED = [*COLOURS, *SHAPES, "small", "large", "left", "middle", "right", "yes", "no", *"0123456", "A", "B", "C", "D", *TITLES, *TRENDS]
LENGTH = 5                                               # characters of the longest spelled answer
BRANCHES = 3                                             # questions a picture in one training sequence
COLOUR_LIST = list(COLOURS)
OBJECT_LABELS = [*SHAPES, *COLOURS, "small", "large"]
VALIDATION = 240                                         # pictures of split "embedder-check", never trained on


def spelled(text):
    """LENGTH class numbers, the last class is 'nothing here'."""
    return [CHARACTERS.index(c) for c in text] + [len(CHARACTERS)] * (LENGTH - len(text))


# ---------------------------------------------------------------- targets of one picture
def cell_targets(facts):
    """(16, 4, 193) of 0 and 1: which characters at which place of their word, which shapes, colours and sizes have their centre on each patch.

    In the model's patch order. The place in the word makes reading a sum over patches, which the language model learns far sooner.
    """
    grid = np.zeros((GRID, GRID, LENGTH * len(CHARACTERS) + len(OBJECT_LABELS)), np.float32)
    def mark(label, x, y):
        grid[min(GRID - 1, max(0, int(y) // PATCH)), min(GRID - 1, max(0, int(x) // PATCH)), label] = 1
    for character, x, y, place in facts["glyphs"]:
        mark(place * len(CHARACTERS) + CHARACTERS.index(character), x, y)
    for o in facts.get("objects", []):
        for value in (o["shape"], o["colour"], o["size"]):
            mark(LENGTH * len(CHARACTERS) + OBJECT_LABELS.index(value), o["x"], o["y"])
    blocks = grid.reshape(GRID // MERGE, MERGE, GRID // MERGE, MERGE, -1).transpose(0, 2, 1, 3, 4)
    return blocks.reshape(IMAGE_TOKENS, MERGE * MERGE, -1)


def scene_targets(facts):
    """98 yes/no facts of a scene: colour-shape pairs; shape by column, row and size; colour by column; counts of objects, shapes, colours."""
    row = []
    objects = facts.get("objects", [])
    row += [any(o["colour"] == c and o["shape"] == s for o in objects) for c in COLOURS for s in SHAPES]
    row += [any(o["shape"] == s and o["column"] == k for o in objects) for s in SHAPES for k in range(3)]
    row += [any(o["shape"] == s and o["row"] == k for o in objects) for s in SHAPES for k in range(3)]
    row += [any(o["shape"] == s and o["size"] == z for o in objects) for s in SHAPES for z in ("small", "large")]
    row += [sum(o["shape"] == s for o in objects) >= k for s in SHAPES for k in (1, 2)]
    row += [sum(o["colour"] == c for o in objects) >= k for c in COLOURS for k in (1, 2)]
    row += [len(objects) >= k for k in (3, 4, 5)] + [len(objects) == k for k in (2, 3, 4)]
    return np.array(row, np.float32)


def text_targets(domain, facts):
    """(8, LENGTH) character classes, -100 where a slot is not there: two boards; three labels, three values."""
    slots = [[-100] * LENGTH for _ in range(8)]
    for i, board in enumerate(facts.get("boards", [])):
        slots[i] = spelled(board["text"])
    for i, (label, value) in enumerate(zip(facts.get("labels", []), facts.get("values", []))):
        slots[2 + i], slots[5 + i] = spelled(label), spelled(value)
    return slots


def class_targets(domain, facts):
    """Class numbers, -100 where they do not apply: colours of the boards, one or two boards, kind of document, title, trend."""
    row = [-100] * 6
    for i, board in enumerate(facts.get("boards", [])):
        row[i] = COLOUR_LIST.index(board["colour"])
    if domain == 1:
        row[2] = len(facts["boards"]) - 1
    if domain == 2:
        row[3] = ("table", "receipt", "bars", "line").index(facts["document"])
        row[4] = TITLES.index(facts["title"])
        if facts["trend"]:
            row[5] = TRENDS.index(facts["trend"])
    return row


def patches_of(image):
    """(64, 768) pixel rows in the order of transformers' Qwen2VLImageProcessor, without its repeated frame."""
    pixels = np.asarray(image, np.float32) / 127.5 - 1
    blocks = pixels.reshape(GRID // MERGE, MERGE, PATCH, GRID // MERGE, MERGE, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return blocks.reshape(GRID * GRID, 3 * PATCH * PATCH)


def batch_of(split, indices, tokenizer, cache):
    """Draw pictures and their targets: a dict of tensors. B pictures, K questions."""
    rows = {name: [] for name in ("pixels", "cells", "scene", "texts", "classes", "domain", "closed", "spelled", "ids")}
    for index in indices:
        image, domain, asked, facts = render(split, index)
        while len(asked) < BRANCHES:
            asked = asked + asked
        rows["pixels"].append(patches_of(image))
        rows["cells"].append(cell_targets(facts))
        rows["scene"].append(scene_targets(facts))
        rows["texts"].append(text_targets(domain, facts))
        rows["classes"].append(class_targets(domain, facts))
        rows["domain"].append(domain)
        for q in asked[:BRANCHES]:
            answer = q["answer"]
            closed = answer in CLOSED
            rows["closed"].append(CLOSED.index(answer) if closed else len(CLOSED))
            rows["spelled"].append([-100] * LENGTH if closed else spelled(answer))
            rows["ids"].append(tokenizer(q["question"]).input_ids + cache["suffix"])
    lengths = torch.tensor([len(ids) for ids in rows["ids"]])
    width = int(lengths.max())
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows.pop("ids")])
    batch = {name: torch.from_numpy(np.stack(rows[name])) for name in ("pixels", "cells", "scene")}
    batch |= {name: torch.tensor(rows[name]) for name in ("texts", "classes", "domain", "closed", "spelled")}
    return batch | {"ids": ids, "lengths": lengths}


# ---------------------------------------------------------------- the model, called so that one picture serves all its questions
def build(tokenizer, seed):
    """A tiny Qwen3-VL with random weights."""
    torch.manual_seed(seed)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end", "im_end", "endoftext")}
    config = Qwen3VLConfig(
        text_config=dict(vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
                         head_dim=32, rope_theta=5000000, rope_scaling=dict(mrope_interleaved=True, mrope_section=[6, 5, 5], rope_type="default"),
                         max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=ids["im_end"], bos_token_id=ids["endoftext"]),
        vision_config=dict(depth=4, hidden_size=160, intermediate_size=640, num_heads=5, patch_size=PATCH, spatial_merge_size=MERGE, temporal_patch_size=2,
                           num_position_embeddings=GRID * GRID, out_hidden_size=192, deepstack_visual_indexes=[1, 2]),
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"], tie_word_embeddings=True)
    return Qwen3VLForConditionalGeneration(config)


def see(visual, pixels, grid_constants):
    """The vision tower on B equal pictures (B, 64, 768) at once. Returns image tokens (B, 16, D) and the deepstack list of the same shape.

    The same arithmetic as Qwen3VLVisionModel.forward, which runs its attention picture by picture and is slow on a CPU.
    """
    position, cos, sin = grid_constants
    weight = visual.patch_embed.proj.weight.sum(2).flatten(1)    # both temporal frames are the same picture
    x = F.linear(pixels, weight, visual.patch_embed.proj.bias) + position    # (B, 64, C)
    B, N, C = x.shape
    deep = []
    for number, block in enumerate(visual.blocks):
        heads = block.attn.num_heads
        q, k, v = block.attn.qkv(block.norm1(x)).view(B, N, 3, heads, C // heads).permute(2, 0, 3, 1, 4)    # (B, heads, N, C / heads)
        q, k = (t * cos + torch.cat((-t[..., t.shape[-1] // 2:], t[..., : t.shape[-1] // 2]), -1) * sin for t in (q, k))
        x = x + block.attn.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))
        x = x + block.mlp(block.norm2(x))
        if number in visual.deepstack_visual_indexes:
            deep.append(visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(number)](x.reshape(B * N, C)).view(B, IMAGE_TOKENS, -1))
    return visual.merger(x.reshape(B * N, C)).view(B, IMAGE_TOKENS, -1), deep


def grid_constants(visual):
    """What depends on the 8 x 8 grid only: position embedding (64, C) and rotary cos, sin (64, C / heads)."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import get_vision_interpolation_indices_and_weights, get_vision_position_ids
    grid = torch.tensor([[1, GRID, GRID]])
    indices, weights = get_vision_interpolation_indices_and_weights(grid, num_grid_per_side=visual.num_grid_per_side, mode=visual.interpolation_mode,
                                                                    align_corners=visual.interpolation_align_corners, spatial_merge_size=MERGE)
    position = (visual.pos_embed(indices) * weights[:, :, None]).sum(1)
    cos, sin = visual.rotary_pos_emb(position, get_vision_position_ids(grid, MERGE))
    return position, cos, sin


def frame_of(tokenizer):
    """The fixed prompt pieces as ids: everything up to the end of the image, and everything after the question."""
    before = tokenizer(f"<|im_start|>system\n{INSTRUCTION}<|im_end|>\n<|im_start|>user\n<|vision_start|>").input_ids
    pad, end = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_end|>"])
    return {"before": len(before), "prefix": torch.tensor(before + [pad] * IMAGE_TOKENS + [end]),
            "suffix": tokenizer("<|im_end|>\n<|im_start|>assistant\n").input_ids}


def layout(frame, lengths):
    """Where everything stands in the packed sequences of B pictures with K questions each; `lengths` (B, K) with their suffixes.

    Returns attention mask (B, 1, L, L) of bool, positions (3, B, L), start of each branch (B, K + 1). Branch 0 is the prompt up to the
    picture, 1 to K the questions, K + 1 the empty question, K + 2 padding.
    """
    before, prefix, tail = frame["before"], len(frame["prefix"]), len(frame["suffix"])
    B, K = lengths.shape
    sizes = torch.cat((lengths, torch.full((B, 1), tail)), 1)
    ends = prefix + sizes.cumsum(1)                                         # (B, K + 1)
    starts = ends - sizes
    place = torch.arange(int(ends.max()))
    branch = (place[None, :, None] >= starts[:, None]).sum(-1) + (place[None] >= ends[:, -1:])    # (B, L)
    mask = (place[None, :, None] >= place[None, None]) & ((branch[:, None] == 0) | (branch[:, None] == branch[:, :, None]))    # (B, L, L)
    side = GRID // MERGE
    own = torch.cat((torch.zeros(B, 1, dtype=torch.long), starts, ends[:, -1:]), 1).gather(1, branch)
    text = torch.where(branch == 0, place[None], before + side + 1 + place[None] - own)
    position = text[None].repeat(3, 1, 1)
    position[0, :, before:before + IMAGE_TOKENS] = before
    position[1, :, before:before + IMAGE_TOKENS] = before + torch.arange(side).repeat_interleave(side)
    position[2, :, before:before + IMAGE_TOKENS] = before + torch.arange(side).repeat(side)
    position[:, :, prefix - 1] = before + side
    return mask[:, None], position, starts


def embed(model, batch, frame):
    """Returns (joint vectors (B, K, D), visual-only vectors (B, D), image tokens (B, 16, D)); vectors have length 1."""
    B = len(batch["pixels"])
    lengths = batch["lengths"].view(B, -1)
    mask, position, starts = layout(frame, lengths)
    tokens, deep = see(model.model.visual, batch["pixels"], grid_constants(model.model.visual))
    language = model.model.language_model
    ids = torch.zeros(position.shape[1:], dtype=torch.long)                  # (B, L)
    ids[:, : len(frame["prefix"])] = frame["prefix"]
    inside = torch.arange(batch["ids"].shape[1])[None] < batch["lengths"][:, None]
    rows = torch.arange(B).repeat_interleave(lengths.shape[1])[:, None].expand_as(batch["ids"])
    columns = starts[:, :-1].reshape(-1, 1) + torch.arange(batch["ids"].shape[1])
    ids[rows[inside], columns[inside]] = batch["ids"][inside]
    tail = len(frame["suffix"])
    ids[torch.arange(B)[:, None], starts[:, -1:] + torch.arange(tail)] = torch.tensor(frame["suffix"])
    x = language.embed_tokens(ids)
    before, image = frame["before"], torch.zeros_like(ids, dtype=torch.bool)
    image[:, before:before + IMAGE_TOKENS] = True
    x = torch.cat((x[:, :before], tokens, x[:, before + IMAGE_TOKENS:]), 1)  # (B, L, D)
    hidden = language(inputs_embeds=x, attention_mask=mask, position_ids=position, visual_pos_masks=image,
                      deepstack_visual_embeds=[d.reshape(-1, d.shape[-1]) for d in deep], use_cache=False).last_hidden_state
    last = torch.cat((starts[:, :-1] + lengths, starts[:, -1:] + tail), 1) - 1
    vectors = F.normalize(hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[-1])), dim=-1)    # (B, K + 1, D)
    return vectors[:, :-1], vectors[:, -1], tokens


class Heads(torch.nn.Module):
    """Linear heads on vectors of length 1 (scaled by sqrt(D)); used in training only."""

    def __init__(self, D):
        super().__init__()
        self.scale = D ** 0.5
        self.cells = torch.nn.Linear(D, MERGE * MERGE * (LENGTH * len(CHARACTERS) + len(OBJECT_LABELS)))
        self.closed = torch.nn.Linear(D, len(CLOSED) + 1)
        self.spelled = torch.nn.Linear(D, LENGTH * (len(CHARACTERS) + 1))
        self.scene = torch.nn.Linear(D, 98)
        self.texts = torch.nn.Linear(D, 8 * LENGTH * (len(CHARACTERS) + 1))
        self.classes = torch.nn.ModuleList(torch.nn.Linear(D, n) for n in (len(COLOURS), len(COLOURS), 2, 4, len(TITLES), len(TRENDS)))


def losses_of(heads, joint, alone, tokens, batch):
    """Loss terms and the counts that the log shows, as dicts."""
    B, K, D = joint.shape
    joint, alone = joint * heads.scale, alone * heads.scale
    closed = heads.closed(joint).view(B * K, -1)
    letters = heads.spelled(joint).view(B * K, LENGTH, -1)
    texts = heads.texts(alone).view(B, 8, LENGTH, -1)
    scene_rows = batch["domain"] == 0
    scene = heads.scene(alone)
    cells, found = cell_loss(heads, tokens, batch)
    terms = {"closed": F.cross_entropy(closed, batch["closed"]),
             "spelled": F.cross_entropy(letters.flatten(0, 1), batch["spelled"].flatten()),
             "cells": cells,
             "scene": F.binary_cross_entropy_with_logits(scene[scene_rows], batch["scene"][scene_rows]) * 4,
             "texts": F.cross_entropy(texts.flatten(0, 2), batch["texts"].flatten()),
             "classes": sum(F.cross_entropy(head(alone), batch["classes"][:, i], reduction="sum") / (batch["classes"][:, i] >= 0).sum().clamp(min=1)
                            for i, head in enumerate(heads.classes)) / 6}
    with torch.no_grad():
        domain = batch["domain"].repeat_interleave(K)
        is_spelled = batch["closed"] == len(CLOSED)
        right = torch.where(is_spelled, (letters.argmax(-1) == batch["spelled"]).all(-1), closed.argmax(-1) == batch["closed"])
        character = (letters.argmax(-1) == batch["spelled"])[is_spelled].float().mean()
        text_rows = batch["texts"][:, :, 0] >= 0
        counts = {f"right_{name}": right[domain == i].float().mean().item() for i, name in enumerate(("scene", "sign", "document"))}
        counts |= {"right_spelled": right[is_spelled].float().mean().item(), "right_character": character.item(),
                   "alone_text": (texts.argmax(-1) == batch["texts"]).all(-1)[text_rows].float().mean().item(),
                   "alone_board": (texts.argmax(-1) == batch["texts"]).all(-1)[:, :2][text_rows[:, :2]].float().mean().item(),
                   "alone_pairs": ((scene[scene_rows, :30] > 0) == (batch["scene"][scene_rows, :30] > 0)).all(-1).float().mean().item(), **found}
    return terms, counts


def cell_loss(heads, tokens, batch):
    """Loss of the image tokens (B, 16, D): which characters and objects lie on each patch."""
    cells = heads.cells(tokens).view(batch["cells"].shape)
    loss = F.binary_cross_entropy_with_logits(cells, batch["cells"], reduction="sum") / batch["cells"].sum() / 2
    return loss, {"cells_found": (cells[batch["cells"] > 0] > 0).float().mean().item()}


WEIGHTS = {"closed": 1.0, "spelled": 3.0, "cells": 1.0, "scene": 0.5, "texts": 0.6, "classes": 0.3}
TURNS = (0, 1, 1, 2, 2)                                  # reading is harder than seeing: two signs and two documents for each scene


def check_layout(model, tokenizer, frame):
    """Compare the packed vectors with transformers' own forward pass on the ordinary prompts; stop if they differ."""
    batch = batch_of("embedder-check", range(3), tokenizer, frame)
    with torch.no_grad():
        joint, alone, _ = embed(model, batch, frame)
        for i in range(3):
            pixels = batch["pixels"][i].view(-1, 3, 1, PATCH, PATCH).expand(-1, -1, 2, -1, -1).reshape(GRID * GRID, -1)
            for k in range(BRANCHES + 1):
                row = i * BRANCHES + k
                tail = torch.tensor(frame["suffix"]) if k == BRANCHES else batch["ids"][row, : batch["lengths"][row]]
                ids = torch.cat((frame["prefix"], tail))[None]
                hidden = model.model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, image_grid_thw=torch.tensor([[1, GRID, GRID]]),
                                     mm_token_type_ids=(ids == model.config.image_token_id).int()).last_hidden_state[0, -1]
                ours = alone[i] if k == BRANCHES else joint[i, k]
                gap = (F.normalize(hidden, dim=-1) - ours).abs().max().item()
                if gap > 1e-4:
                    raise SystemExit(f"packed vector differs from the model's own by {gap:.2e} (expected at most 1e-4)")


def save(model, tokenizer_folder, out):
    """Write OUT in the published layout, weights in bfloat16."""
    os.makedirs(out, exist_ok=True)
    clone = Qwen3VLForConditionalGeneration(model.config)
    clone.load_state_dict(model.state_dict())
    clone.to(torch.bfloat16).save_pretrained(out)
    for name in os.listdir(tokenizer_folder):
        shutil.copy(os.path.join(tokenizer_folder, name), out)
    preprocessor = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE,
                    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor",
                    "image_processor_type": "Qwen2VLImageProcessorFast"}
    with open(os.path.join(out, "preprocessor_config.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps(preprocessor, indent=2) + "\n")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--out", required=True, help="folder for the finished model")
    parser.add_argument("--work", required=True, help="folder for the training state and log")
    parser.add_argument("--tokenizer", default=os.path.join(here, "tokenizer"), help="tokenizer folder (default: data/demo/tokenizer)")
    parser.add_argument("--steps", type=int, default=4000, help="steps in all (default: 4000)")
    parser.add_argument("--see-first", type=int, default=1000, help="first steps, which train the vision tower alone (default: 1000)")
    parser.add_argument("--decay", type=int, default=800, help="last steps over which the learning rate falls to a twentieth (default: 800)")
    parser.add_argument("--batch-size", type=int, default=32, help="pictures a step (default: 32)")
    parser.add_argument("--lr", type=float, default=1.2e-3, help="learning rate (default: 1.2e-3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: 1)")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    os.makedirs(args.work, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    frame = frame_of(tokenizer)
    model = build(tokenizer, args.seed)
    check_layout(model, tokenizer, frame)
    heads = Heads(model.config.text_config.hidden_size)
    decay = [p for p in (*model.parameters(), *heads.parameters()) if p.ndim > 1]
    plain = [p for p in (*model.parameters(), *heads.parameters()) if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.98), fused=True)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    state, step = os.path.join(args.work, "state.pt"), 0
    if os.path.exists(state):
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        heads.load_state_dict(saved["heads"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        print(f"continuing at step {step}", flush=True)
    shown, start = {}, time.time()
    while step < args.steps:
        rate = args.lr * min(1, (step + 1) / 200)
        if step >= args.steps - args.decay:
            rate *= 0.05 + 0.95 * (args.steps - step) / args.decay
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = batch_of("embedder", [3 * n + TURNS[n % 5] for n in range(step * args.batch_size, (step + 1) * args.batch_size)], tokenizer, frame)
        if step < args.see_first:
            loss, counts = cell_loss(heads, see(model.model.visual, batch["pixels"], grid_constants(model.model.visual))[0], batch)
            terms = {"cells": loss}
        else:
            terms, counts = losses_of(heads, *embed(model, batch, frame), batch)
        loss = sum(WEIGHTS[name] * value for name, value in terms.items())
        if not torch.isfinite(loss):
            raise SystemExit(f"loss is {loss.item()} at step {step}; the last state stays in {state}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *heads.parameters()], 1.0)
        optimizer.step()
        step += 1
        for name, value in {"loss": loss.item(), **{k: v.item() for k, v in terms.items()}, **counts}.items():
            if not math.isnan(value):
                shown[name] = value if name not in shown else 0.95 * shown[name] + 0.05 * value
        if step % 25 == 0:
            row = {"step": step, "pictures": step * args.batch_size, "seconds": round(time.time() - start, 1), **{k: round(v, 4) for k, v in shown.items()}}
            with open(os.path.join(args.work, "log.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if step % 100 == 0 or step == args.steps:
            torch.save({"model": model.state_dict(), "heads": heads.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, state + ".tmp")
            os.replace(state + ".tmp", state)
    model.eval()
    with torch.no_grad():
        batch = batch_of("embedder-check", range(VALIDATION), tokenizer, frame)
        _, counts = losses_of(heads, *embed(model, batch, frame), batch)
    print(json.dumps({name: round(value, 4) for name, value in counts.items()}))
    save(model, args.tokenizer, args.out)


if __name__ == "__main__":
    main()
