"""How fast does train_decoder.py predict, beside `generate` one question at a time and in batches as they come?

    python benchmarks/predict.py --size demo               # a small decoder, as in `make demo`; a few minutes on 2 cores
    python benchmarks/predict.py --size real               # Qwen3-0.6B with random weights, 8 prompts of 8 new tokens; some minutes

READS   nothing: a readout with random weights, items and vectors are made from a seed.
WRITES  OUT.json and OUT.md (default results/benchmarks/predict-SIZE): one row a system, with machine and date.

All systems answer the same items from the same vectors with the same weights and greedy decoding, each in a process of its own; loading is
not timed. Ours also measures answer_bits; the two others are timed for the text alone. The table says for how many items the texts agree.
Needs torch, transformers, numpy, tqdm, and benchmarks/train.py beside it.
"""

import argparse
import datetime
import importlib.util
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

spec = importlib.util.spec_from_file_location("benchmark_train", pathlib.Path(__file__).resolve().parent / "train.py")
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)

SIZES = {"demo": {"prompts": 128, "new": 16}, "real": {"prompts": 8, "new": 8}}
SYSTEMS = {"single": "generate, one at a time", "batched": "generate, batches of 32 as they come, left padding", "ours": "train_decoder.py"}


def make_readout(td, folder, size):
    """A readout folder with random weights, as fit would write it."""
    import torch

    tokenizer, decoder = td.load_tokenizer(str(folder / "decoder")), td.load_decoder(str(folder / "decoder"), torch.float32)
    torch.manual_seed(0)
    readout = td.Readout(
        tokenizer, decoder, td.make_projector("mlp", size["dim"], size["hidden"], 1), [], torch.device("cpu"), torch.float32
    )
    record = {
        "format_version": td.FORMAT_VERSION,
        "embedder": "random",
        "mode": "visual_only",
        "dim": size["dim"],
        "normalized": False,
        "tokens": 1,
        "projector": {"kind": "mlp", "dim": size["dim"]},
        "steps": [],
        "signature": {},
        "template": {"before": td.BEFORE, "between": td.BETWEEN, "after": td.AFTER, "end": td.END},
    }
    td.write_readout(str(folder / "readout"), readout, record)


def run_generate(td, folder, size, device, dtype, batch_size):
    """transformers' generate on the same input embeddings; random weights seldom stop, so all lengths are equal."""
    import torch

    record = td.check_readout(str(folder / "readout"))
    tokenizer, decoder = td.load_tokenizer(str(folder / "readout")), td.load_decoder(str(folder / "readout"), dtype).to(device).eval()
    projector, _ = td.load_projector(str(folder / "readout"), record, size["hidden"])
    projector.to(device)
    items = td.read_items(folder / "items.jsonl", size["prompts"])
    examples = td.encode_items(items, tokenizer, record["template"], 1, str(folder / "vectors"), np.arange(len(items)))
    texts, start = [], shared.clock(device)
    for first in range(0, len(items), batch_size):
        index = np.arange(first, min(first + batch_size, len(items)))
        prompts = [examples.one(i)[: examples.prompts[i]] for i in index]
        ids, mask = td.padded(prompts, left=True)
        soft_at = examples.soft_at + ids.shape[1] - np.array([len(row) for row in prompts])
        batch = td.to_device(
            {
                "ids": ids,
                "mask": mask.astype(np.int64),
                "soft_at": soft_at,
                "vectors": td.read_vectors(examples.prefix, examples.rows[index]),
            },
            device,
        )
        with torch.inference_mode():
            embeds = td.embed(decoder, projector, batch["ids"], batch["vectors"], batch["soft_at"])
            made = decoder.generate(
                inputs_embeds=embeds,
                attention_mask=batch["mask"],
                max_new_tokens=size["new"],
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        for row in made.tolist():
            row = row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row
            texts.append(tokenizer.decode(row, skip_special_tokens=False))
    return shared.clock(device) - start, texts


def run_ours(td, folder, size, device, dtype):
    """The script through its own command line; its sidecar holds the seconds after loading."""
    out = folder / "predictions.jsonl"
    td.main(
        [
            "predict",
            "--readout",
            str(folder / "readout"),
            "--items",
            str(folder / "items.jsonl"),
            "--embeddings",
            str(folder / "vectors"),
            "--out",
            str(out),
            "--limit",
            str(size["prompts"]),
            "--max-new-tokens",
            str(size["new"]),
            "--device",
            str(device),
            "--dtype",
            str(dtype).removeprefix("torch."),
            "--overwrite",
        ]
    )
    return json.loads((folder / "predictions.meta.json").read_text())["seconds"], [json.loads(line)["prediction"] for line in open(out)]


def run_one(args, size):
    """One system in this process; prints its result as JSON."""
    import torch

    device = "cuda" if args.device == "auto" and torch.cuda.is_available() else "cpu" if args.device == "auto" else args.device
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    folder, td = pathlib.Path(args.folder), shared.load_script()
    if args.only == "make":
        return make_readout(td, folder, size)
    runs = {
        "single": lambda: run_generate(td, folder, size, device, dtype, 1),
        "batched": lambda: run_generate(td, folder, size, device, dtype, 32),
        "ours": lambda: run_ours(td, folder, size, device, dtype),
    }
    if device.startswith("cuda") or args.size == "demo":
        runs[args.only]()  # once to warm up
    seconds, texts = runs[args.only]()
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{shared.processor()}, {torch.get_num_threads()} threads"
    print(
        json.dumps(
            {
                "seconds": seconds,
                "texts": texts,
                "peak_gib": peak / 2**30,
                "device": name,
                "dtype": str(dtype).removeprefix("torch."),
                "torch": torch.__version__,
            }
        )
    )
    return 0


def main():
    """Make the readout, run each system in its own process, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--size", default="demo", choices=tuple(SIZES), help="size of decoder and data (default demo)")
    parser.add_argument("--prompts", type=int, help="items to answer (default 128 for demo, 8 for real)")
    parser.add_argument("--new", type=int, help="new tokens each (default 16 for demo, 8 for real)")
    parser.add_argument("--device", default="auto", help="auto (default: a CUDA GPU where there is one), cpu or cuda")
    parser.add_argument("--out", help="result files without suffix (default results/benchmarks/predict-SIZE)")
    parser.add_argument("--only", choices=("make", *SYSTEMS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = shared.SIZES[args.size] | SIZES[args.size] | {name: getattr(args, name) for name in ("prompts", "new") if getattr(args, name)}
    if args.only:
        return run_one(args, size)
    results, out = {}, pathlib.Path(args.out or shared.ROOT / "results" / "benchmarks" / f"predict-{args.size}")
    with tempfile.TemporaryDirectory() as folder:
        shared.make_data(pathlib.Path(folder), size, size["prompts"])
        shared.make_decoder(pathlib.Path(folder) / "decoder", size)
        for name in ("make", *SYSTEMS):
            print(f"{SYSTEMS.get(name, 'making the readout')} ...", file=sys.stderr)
            flags = [word for key in ("prompts", "new") if getattr(args, key) for word in (f"--{key}", str(getattr(args, key)))]
            done = subprocess.run(
                [sys.executable, __file__, "--size", args.size, "--only", name, "--folder", folder, "--device", args.device, *flags],
                stdout=subprocess.PIPE,
                text=True,
            )
            if done.returncode:
                raise SystemExit(f"{name}: ended with status {done.returncode}; its message is above")
            if name in SYSTEMS:
                results[name] = json.loads(done.stdout.splitlines()[-1])
    first = results["single"]
    texts = list(first["texts"])
    lines = [
        f"# Prediction speed, size `{args.size}`",
        "",
        f"{datetime.date.today()}, {first['device']}, {first['dtype']}, torch {first['torch']}: {size['layers']} layers of "
        f"width {size['hidden']}, "
        f"vocabulary {size['vocabulary']:,}, random weights; {size['prompts']} prompts, {size['new']} new tokens. "
        f"`python benchmarks/predict.py --size {args.size}`",
        "",
        "| system | items/s | to one at a time | peak memory | same text as one at a time |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        same = sum(a == b for a, b in zip(result.pop("texts"), texts))
        lines.append(
            f"| {SYSTEMS[name]} | {size['prompts'] / result['seconds']:.2f} | {first['seconds'] / result['seconds']:.2f}x | "
            f"{result['peak_gib']:.1f} GiB | {same} of {size['prompts']} |"
        )
        result["same"] = same
    lines += ["", "train_decoder.py also measures answer_bits: one more pass over each gold answer, which the other two do not make."]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(out.name + ".json").write_text(
        json.dumps({"size": args.size, "date": str(datetime.date.today()), "results": results}, indent=2) + "\n"
    )
    out.with_name(out.name + ".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    start = time.time()
    status = main()
    print(f"{time.time() - start:.0f} s", file=sys.stderr)
    sys.exit(status)
