"""How fast is extract.py beside the two loops people write? Not a test.

    python benchmarks/extract.py --case small        # 200 mixed-size images, a small model, a minute on 2 CPU cores
    python benchmarks/extract.py --case real         # 6 images of at most 256 pixels, a random-weight model of 2B size (about 13 GB of memory,
                                                     # 4.3 GB of temporary disk, five minutes on 2 CPU cores)

READS   nothing: images and weights are made from a seed.
WRITES  OUT.json and OUT.md (default results/benchmarks/extract-CASE): one row a system, with machine and date.

Three systems, one at a time, each in a process of its own, the same random weights, items and pixel limits, float32 on a CPU, bfloat16 on CUDA:
    single   the way model cards show it: one item at a time, transformers' own image processor, tokenizer and mm_token_type_ids
    fixed    the same in batches of a fixed size in item order, padded to the longest
    ours     extract.py: planned batches under a token budget, images prepared by workers ahead of the model
Time runs from the first item to the last vector, after the model is loaded; for ours it includes planning and writing. Padding is the share of
padded tokens; memory is the peak resident size of the process (workers not counted).
"""
import argparse
import datetime
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = ["What is in the image?", "What colour is the largest shape?", "Read the total amount on the receipt and answer with one number.",
             "Is the picture darker on the left or on the right? Answer with one word."]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PROMPT = ("<|im_start|>system\nRepresent the user's input.<|im_end|>\n<|im_start|>user\n<|vision_start|>@<|vision_end|>QUESTION<|im_end|>\n"
          "<|im_start|>assistant\n")


def make_items(folder, case, seed):
    """Images of mixed sizes (64 to 384 pixels a side, or at most 256 for the real size) and one question each."""
    from PIL import Image
    rng = np.random.default_rng(seed)
    count, least, most = (200, 64, 384) if case == "small" else (6, 128, 256)
    (folder / "images").mkdir()
    with open(folder / "items.jsonl", "w") as file:
        for i in range(count):
            width, height = (int(side) // 8 * 8 for side in np.exp(rng.uniform(np.log(least), np.log(most), 2)))
            values = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(values).resize((width, height), Image.BICUBIC).save(folder / "images" / f"{i}.jpg", quality=90)
            file.write(json.dumps(dict(id=f"i{i}", image=f"{i}.jpg", question=QUESTIONS[i % len(QUESTIONS)], answers=["-"], source="MME",
                                       domain="natural_image")) + "\n")


def make_model(folder, case, seed):
    """A Qwen3-VL-Embedding folder with random weights: 2.6 million parameters (about the demo's), or the 2B's own shape."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    torch.manual_seed(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator([*QUESTIONS, "Represent the user's input. system user assistant"] * 5, trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {f"{name}_token_id": tokenizer.token_to_id(f"<|{token}|>") for name, token in
              (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end"))}
    small = case == "small"
    rope = dict(rope_type="default", rope_theta=5e6, mrope_section=[8, 8, 8] if small else [24, 20, 20], mrope_interleaved=True)
    text = (dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=48, vocab_size=1024)
            if small else dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                               head_dim=128, vocab_size=151936))
    vision = (dict(depth=3, hidden_size=128, intermediate_size=384, num_heads=4, out_hidden_size=128, deepstack_visual_indexes=[1])
              if small else dict(depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, out_hidden_size=2048, deepstack_visual_indexes=[5, 11, 17]))
    config = transformers.Qwen3VLConfig(text_config=dict(text, rope_parameters=rope, tie_word_embeddings=True), tie_word_embeddings=True,
                                        vision_config=dict(vision, patch_size=16, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=2304),
                                        **tokens)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = transformers.Qwen3VLForConditionalGeneration(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    for name, weight in model.named_parameters():
        weight.data.normal_(0, 0.02) if weight.ndim > 1 else weight.data.fill_(float("norm" in name and name.endswith("weight")))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(
        size=dict(longest_edge=16777216, shortest_edge=65536), patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[.5] * 3,
        image_std=[.5] * 3, image_processor_type="Qwen2VLImageProcessorFast")))


def plain_loop(folder, batch_size, device):
    """The model card's loop in batches of `batch_size`. Returns (vectors (N, D), seconds, padding share)."""
    import torch
    import transformers
    from PIL import Image
    from tokenizers import Tokenizer
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        folder / "model", dtype=torch.bfloat16 if device == "cuda" else torch.float32).to(device).eval()
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder / "model", min_pixels=4096, max_pixels=1843200)
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    pad = tokenizer.token_to_id("<|image_pad|>")
    items = [json.loads(line) for line in open(folder / "items.jsonl")]
    vectors, started, padded, real = [], time.time(), 0, 0
    with torch.no_grad():
        for start in range(0, len(items), batch_size):
            batch = items[start:start + batch_size]
            inputs = processor(images=[Image.open(folder / "images" / item["image"]).convert("RGB") for item in batch], return_tensors="pt").to(device)
            rows = [tokenizer.encode(PROMPT.replace("@", "<|image_pad|>" * int(grid.prod() // 4)).replace("QUESTION", item["question"])).ids
                    for item, grid in zip(batch, inputs["image_grid_thw"])]
            length = max(map(len, rows))
            ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)      # (B, L)
            mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
            states = model.model(input_ids=ids, attention_mask=mask, mm_token_type_ids=((ids == pad) & (mask == 1)).int(), **inputs).last_hidden_state
            last = states[torch.arange(len(rows)), mask.sum(1) - 1].float()
            vectors.append(torch.nn.functional.normalize(last, dim=1).cpu())
            padded, real = padded + length * len(rows), real + sum(map(len, rows))
    return torch.cat(vectors).numpy(), time.time() - started, 1 - real / padded


def our_loop(folder, workers, device, more=()):
    """extract.py's own functions, in this process; the clock starts after the model is loaded."""
    spec = importlib.util.spec_from_file_location("extract_measured", ROOT / "extract.py")
    extract = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = extract
    spec.loader.exec_module(extract)
    versions = extract.load_libraries()
    assert extract.transformers.Qwen2VLImageProcessorPil and extract.transformers.Qwen3VLForConditionalGeneration      # imported before the clock runs
    args = extract.parse_args(["--embedder", "qwen3-vl-embedding-2b", "--mode", "vl_joint", "--items", str(folder / "items.jsonl"), "--images",
                               str(folder / "images"), "--model", str(folder / "model"), "--out", str(folder / "ours"), "--workers", str(workers),
                               "--overwrite", *more])
    args.prefix, args.shard, args.device = args.out, (0, 1), extract.torch.device(device)
    args.dtype = extract.torch.bfloat16 if device == "cuda" else extract.torch.float32
    real, times = extract.load_embedder, []

    def timed(job):                                               # loading happens inside extract(): take its time out of the clock
        started = time.time()
        result = real(job)
        times.append(time.time() - started)
        return result
    extract.load_embedder, extract.weights_sha256 = timed, lambda folders: "not hashed here"      # nor is hashing part of the loop
    started = time.time()
    meta = extract.extract(args, versions)
    seconds = time.time() - started - sum(times)
    return extract.read_embeddings(str(folder / "ours"))[0], seconds, meta["run"]["padding"]


def measure(folder, system, batch_size, workers, device):
    """Run one system in this process and print its figures as one JSON line."""
    import torch
    vectors, seconds, padding = our_loop(folder, workers, device) if system == "ours" else plain_loop(
        folder, 1 if system == "single" else batch_size, device)
    np.save(folder / f"{system}.vectors.npy", vectors)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps(dict(system=system, items=len(vectors), seconds=round(seconds, 2), items_per_second=round(len(vectors) / seconds, 3),
                          padding=round(float(padding), 4), peak_gb=round(peak, 2), threads=torch.get_num_threads(), torch=torch.__version__,
                          machine=torch.cuda.get_device_name() if device == "cuda" else f"CPU {platform.machine()}, {os.cpu_count()} cores",
                          cuda_gb=round(torch.cuda.max_memory_allocated() / 1e9, 2) if device == "cuda" else None)))


def table(facts):
    """A Markdown table for people."""
    single, fixed, _ = (run["items_per_second"] for run in facts["results"])
    first, names = facts["results"][0], {"single": "one item at a time", "fixed": f"batches of {facts['fixed_batch']}", "ours": "extract.py"}
    lines = [f"# Extraction speed, case `{facts['case']}`", "",
             f"{facts['date']}, {first['machine']}, {first['threads']} threads, torch {first['torch']}; {first['items']} items; the fastest of "
             f"{facts['repeats']} runs each; largest cosine distance between the systems' vectors {facts['cosine_distance']:.0e}. "
             f"`python benchmarks/extract.py --case {facts['case']} --repeats {facts['repeats']}`", "",
             "| system | items/s | to one at a time | to fixed batches | padding | peak memory |", "|---|---|---|---|---|---|"]
    lines += [f"| {names[run['system']]} | {run['items_per_second']:.3g} | {run['items_per_second'] / single:.2f}x | "
              f"{run['items_per_second'] / fixed:.2f}x | {run['padding']:.1%} | {run['peak_gb']:.1f} GB |" for run in facts["results"]]
    return "\n".join(lines) + "\n"


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--case", choices=["small", "real"], default="small", help="model and images (default: small)")
    parser.add_argument("--batch-size", type=int, default=8, help="batch of the fixed-batch loop, in items (default: 8; 3 for the real size)")
    parser.add_argument("--workers", type=int, default=1, help="image workers of extract.py (default: 1)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each system, the fastest counts (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of images and weights (default: 0)")
    parser.add_argument("--out", type=Path, help="result files without suffix (default: results/benchmarks/extract-CASE)")
    parser.add_argument("--measure", choices=["single", "fixed", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main():
    args = parse_args()
    if args.measure:
        import torch
        return measure(args.folder, args.measure, args.batch_size, args.workers, "cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder, results = Path(name), []
        make_items(folder, args.case, args.seed)
        (folder / "model").mkdir()
        subprocess.run([sys.executable, "-c", "import importlib.util, sys; from pathlib import Path\n"
                        f"s = importlib.util.spec_from_file_location('b', {__file__!r}); b = importlib.util.module_from_spec(s)\n"
                        f"s.loader.exec_module(b); b.make_model(Path({str(folder / 'model')!r}), {args.case!r}, {args.seed})"], check=True)
        size = args.batch_size if args.case == "small" else min(args.batch_size, 3)
        for system in ("single", "fixed", "ours"):
            runs = []
            for _ in range(args.repeats):
                done = subprocess.run([sys.executable, __file__, "--measure", system, "--folder", str(folder), "--batch-size", str(size), "--workers",
                                       str(args.workers)], check=True, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
                runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            results.append(max(runs, key=lambda run: run["items_per_second"]))
        vectors = [np.load(folder / f"{system}.vectors.npy") for system in ("single", "fixed", "ours")]
        apart = max(float(1 - (vectors[0] * other).sum(1).min()) for other in vectors[1:])
    out = args.out or ROOT / "results" / "benchmarks" / f"extract-{args.case}"
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = dict(case=args.case, date=str(datetime.date.today()), seed=args.seed, repeats=args.repeats, fixed_batch=size, workers=args.workers,
                 cosine_distance=apart, results=results)
    out.with_name(out.name + ".json").write_text(json.dumps(facts, indent=2) + "\n")
    text = table(facts)
    out.with_name(out.name + ".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
