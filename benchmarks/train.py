"""How fast does train_decoder.py train, beside a loop as tutorials write it and the Hugging Face Trainer?

    python benchmarks/train.py --size demo                 # a small decoder, as in `make demo`; a few minutes on 2 cores
    python benchmarks/train.py --size real                 # Qwen3-0.6B with random weights, 3 timed steps; about 20 GB on a CPU

READS   nothing: items, vectors and decoder are made from a seed. The Trainer needs the package accelerate; without it its row says so.
WRITES  OUT.json and OUT.md (default results/benchmarks/train-SIZE): one row a system, with machine and date.

All systems train the same decoder and projector on the same items with the same loss, AdamW and number of items a step, each in a process
of its own. Tokens are real ones: padding does no work that counts. Utilisation is the floating-point work that the task needs (6 a weight
and real token for the layers, 6 a weight of the head and supervised token, attention) over the time of forward and backward, as a share of
the rate at which this machine multiplies matrices of the same shapes in the same process. Needs torch, transformers, numpy, tqdm, accelerate.
"""

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZES = {  # decoder, vector width, items a step, padded tokens a step, timed steps, warm-up steps
    "demo": {
        "hidden": 128,
        "layers": 3,
        "heads": 4,
        "kv": 2,
        "head": 32,
        "inner": 384,
        "vocabulary": 2048,
        "dim": 64,
        "items": 64,
        "tokens": 8192,
        "steps": 40,
        "warm": 5,
        "lengths": (3.4, 0.4),
        "answer": 4,
    },
    "real": {
        "hidden": 1024,
        "layers": 28,
        "heads": 16,
        "kv": 8,
        "head": 128,
        "inner": 3072,
        "vocabulary": 151936,
        "dim": 2048,
        "items": 8,
        "tokens": 1024,
        "steps": 3,
        "warm": 1,
        "lengths": (4.1, 0.5),
        "answer": 20,
    },
}
SYSTEMS = {"plain": "plain loop: random batches, full logits", "trainer": "Hugging Face Trainer", "ours": "train_decoder.py"}


def load_script():
    """train_decoder.py as a module, from its path."""
    spec = importlib.util.spec_from_file_location("train_decoder_script", ROOT / "train_decoder.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.load_libraries()
    return module


def make_decoder(folder, size):
    """A random Qwen3 of the given size with tied embeddings and a small byte-level tokenizer that has the chat tokens."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=size["vocabulary"],
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        head_dim=size["head"],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_data(folder, size, count, seed=0):
    """Items with log-normal question lengths (a token is a letter here) and short answers, and one vector each."""
    generator = np.random.default_rng(seed)
    letters, items = np.array(list("abcdefghijklmnopqrstuvwxyz")), []
    for i in range(count):
        question, answer = (
            1 + min(400, int(generator.lognormal(*size["lengths"]))),
            1 + int(generator.geometric(1 / size["answer"])) % 120,
        )
        items.append(
            {
                "id": f"i{i}",
                "image": f"{i}.png",
                "question": "".join(generator.choice(letters, question)),
                "answers": ["".join(generator.choice(letters, answer))],
                "source": "benchmark",
                "domain": "benchmark",
                "metric": "exact",
            }
        )
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    np.save(folder / "vectors.npy", generator.standard_normal((count, size["dim"])).astype(np.float32))
    (folder / "vectors.ids.txt").write_text("".join(item["image"] + "\n" for item in items))
    (folder / "vectors.meta.json").write_text(
        json.dumps(
            {"embedder": "random", "mode": "visual_only", "key": "image", "dim": size["dim"], "normalized": False, "dtype": "float32"}
        )
    )


# ---- measures ----


def useful_flops(size, lengths, supervised):
    """Forward and backward operations that the task needs for sequences of `lengths` with `supervised` loss positions in all."""
    width, head = size["hidden"], size["head"]
    layer = width * head * (2 * size["heads"] + 2 * size["kv"]) + 3 * width * size["inner"]
    attention = sum(int(n) ** 2 for n in lengths) * size["heads"] * head  # two causal products of n x n x head, 2 operations each, halved
    return 3 * (
        2 * size["layers"] * layer * int(sum(lengths)) + size["layers"] * 2 * attention + 2 * width * size["vocabulary"] * supervised
    )


def machine_rate(size, tokens, device, dtype):
    """Operations a second of matrix products in the layers' own shapes, weighted by their share of the work; best of three runs."""
    import torch

    width, inner, total, seconds = size["hidden"], size["inner"], 0, 0.0
    for a, b in ((width, size["heads"] * size["head"]), (width, inner), (inner, width)):
        x, w = torch.randn(tokens, a, device=device, dtype=dtype), torch.randn(b, a, device=device, dtype=dtype)
        repeats, best = max(3, int(2e9 / (2 * tokens * a * b))), float("inf")
        for _ in range(4):  # the first one warms up
            start = clock(device)
            for _ in range(repeats):
                torch.nn.functional.linear(x, w)
            best = min(best, (clock(device) - start) / repeats)
        total, seconds = total + 2 * tokens * a * b, seconds + best
    return total / seconds


def clock(device):
    """Seconds, after the device has finished its work."""
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


class Timer:
    """Collects, step by step, seconds in the optimizer and in all, real and padded tokens, and the useful work."""

    def __init__(self, device, warm):
        self.device, self.warm, self.rows, self.optimizer = device, warm, [], 0.0

    def watch(self, optimizer):
        """Time optimizer.step from here on."""
        step = optimizer.step

        def timed(*args, **kwargs):
            start = clock(self.device)
            result = step(*args, **kwargs)
            self.optimizer += clock(self.device) - start
            return result

        optimizer.step = timed
        return optimizer

    def add(self, seconds, real, padded, flops):
        """One step is over."""
        self.rows.append((seconds, self.optimizer, real, padded, flops))
        self.optimizer = 0.0

    def result(self, rate):
        """Means over the timed steps."""
        seconds, optimizer, real, padded, flops = (sum(column) for column in zip(*self.rows[self.warm :]))
        import torch

        peak = (
            torch.cuda.max_memory_allocated()
            if str(self.device).startswith("cuda")
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        return {
            "tokens_per_second": real / seconds,
            "seconds_per_step": seconds / len(self.rows[self.warm :]),
            "optimizer_share": optimizer / seconds,
            "padding": 1 - real / padded,
            "peak_gib": peak / 2**30,
            "rate_gflops": rate / 1e9,
            "utilisation": flops / (seconds - optimizer) / rate,
        }


# ---- the systems ----


def setup(td, folder, size, device):
    """Examples, decoder and projector for the two other systems; the loss is the model's own over all logits."""
    import torch

    tokenizer, decoder = (
        td.load_tokenizer(str(folder / "decoder")),
        td.load_decoder(str(folder / "decoder"), torch.float32).to(device).train(),
    )
    items = td.read_items(folder / "items.jsonl")
    template = {"before": td.BEFORE, "between": td.BETWEEN, "after": td.AFTER, "end": td.END}
    examples = td.encode_items(items, tokenizer, template, 1, str(folder / "vectors"), np.arange(len(items)))

    class Model(torch.nn.Module):
        """Decoder and projector as one module with the Trainer's calling convention."""

        def __init__(self):
            super().__init__()
            self.decoder, self.projector = decoder, td.make_projector("mlp", size["dim"], size["hidden"], 1).to(device)

        def forward(self, input_ids, attention_mask, labels, vectors):
            soft_at = torch.full((len(input_ids),), examples.soft_at, device=input_ids.device)
            embeds = td.embed(self.decoder, self.projector, input_ids, vectors, soft_at)
            return {"loss": self.decoder(inputs_embeds=embeds, attention_mask=attention_mask, labels=labels).loss}

    def collate(index):
        """Pad to the longest of the batch, as the usual collator does."""
        ids, real = td.padded([examples.one(i) for i in index])
        supervised = real & (np.arange(ids.shape[1]) >= examples.prompts[index][:, None])
        return {
            name: torch.from_numpy(value)
            for name, value in (
                ("input_ids", ids),
                ("attention_mask", real.astype(np.int64)),
                ("labels", np.where(supervised, ids, -100)),
                ("vectors", td.read_vectors(examples.prefix, examples.rows[index])),
            )
        }

    return examples, Model(), collate


def run_plain(td, folder, size, device, dtype):
    """The loop of a tutorial: shuffled fixed-size batches, padding to the longest, loss over all logits."""
    import torch

    examples, model, collate = setup(td, folder, size, device)
    timer, order = Timer(device, size["warm"]), np.random.default_rng(0).permutation(len(examples.ids))
    optimizer = timer.watch(torch.optim.AdamW(model.parameters(), lr=1e-4))
    for step in range(size["warm"] + size["steps"]):
        start, index = clock(device), order[step * size["items"] : (step + 1) * size["items"]]
        batch = {name: value.to(device) for name, value in collate(index).items()}
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(**batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        lengths = examples.lengths[index]
        timer.add(
            clock(device) - start,
            int(lengths.sum()),
            batch["input_ids"].numel(),
            useful_flops(size, lengths, int((batch["labels"] >= 0).sum())),
        )
    return timer


def run_trainer(td, folder, size, device, dtype):
    """The same model and items under transformers.Trainer with its default sampler and optimizer."""
    import torch
    import transformers

    examples, model, collate = setup(td, folder, size, device)
    timer, seen = Timer(device, size["warm"]), []

    def collate_and_count(index):
        seen.append((np.array(index), collate(np.array(index))))
        return seen[-1][1]

    class Callback(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.start = clock(device)

        def on_step_end(self, args, state, control, **kwargs):
            index, batch = seen[state.global_step - 1]
            lengths = examples.lengths[index]
            timer.add(
                clock(device) - self.start,
                int(lengths.sum()),
                batch["input_ids"].numel(),
                useful_flops(size, lengths, int((batch["labels"] >= 0).sum())),
            )

    class Trainer(transformers.Trainer):
        def create_optimizer(self, *args, **kwargs):
            first = self.optimizer is None
            result = super().create_optimizer(*args, **kwargs)
            return timer.watch(result) if first else result

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=size["items"],
        max_steps=size["warm"] + size["steps"],
        learning_rate=1e-4,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        max_grad_norm=1.0,
        use_cpu=str(device) == "cpu",
        bf16=dtype == torch.bfloat16,
        dataloader_pin_memory=False,
    )
    Trainer(
        model=model, args=arguments, train_dataset=list(range(len(examples.ids))), data_collator=collate_and_count, callbacks=[Callback()]
    ).train()
    return timer


def run_ours(td, folder, size, device, dtype):
    """The script itself, through its own command line; only the saving of checkpoints is left out."""
    import torch

    timer, build, pack, packed = Timer(device, size["warm"]), td.build_optimizer, td.pack, []

    def build_and_watch(*args):
        optimizer, named = build(*args)
        timer.watch(optimizer)
        step, start = optimizer.step, [None]

        def stepped():
            step()
            optimizer_seconds[0] += timer.optimizer
            steps.append(timer.optimizer)
            timer.optimizer = 0.0

        optimizer.step = stepped
        return optimizer, named

    optimizer_seconds, steps = [0.0], []
    lengths = {}

    def pack_and_count(examples, index, *args):
        batch = pack(examples, index, *args)
        packed.append((examples.lengths[index], batch["ids"].size, len(batch["targets"])))
        return batch

    td.build_optimizer, td.pack, td.save_checkpoint, td.publish, td.evaluate_loss = (
        build_and_watch,
        pack_and_count,
        lambda *args: None,
        lambda *args: None,
        lambda *args: 0.0,
    )
    out = folder / "readout"
    td.main(
        [
            "fit",
            "--train-items",
            str(folder / "items.jsonl"),
            "--train-embeddings",
            str(folder / "vectors"),
            "--dev-items",
            str(folder / "items.jsonl"),
            "--dev-embeddings",
            str(folder / "vectors"),
            "--decoder",
            str(folder / "decoder"),
            "--out",
            str(out),
            "--max-steps",
            str(size["warm"] + size["steps"]),
            "--batch-size",
            str(size["items"]),
            "--batch-tokens",
            str(size["tokens"]),
            "--log-every",
            "1",
            "--eval-every",
            "1000000",
            "--lr-decoder",
            "1e-4",
            "--device",
            str(device),
            "--dtype",
            str(dtype).removeprefix("torch."),
        ]
    )
    for line, optimizer, (lengths, cells, supervised) in zip(map(json.loads, open(out / "metrics.jsonl")), steps, packed):
        timer.optimizer = optimizer
        timer.add(line["seconds"], line["tokens"], cells, useful_flops(size, lengths, supervised))
    return timer


def run_one(args, size):
    """One system in this process; prints its result as JSON."""
    import torch

    device = "cuda" if args.device == "auto" and torch.cuda.is_available() else "cpu" if args.device == "auto" else args.device
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    folder, td = pathlib.Path(args.folder), load_script()
    timer = {"plain": run_plain, "trainer": run_trainer, "ours": run_ours}[args.only](td, folder, size, device, dtype)
    timer_rows = timer.rows[size["warm"] :]
    rate = machine_rate(size, int(np.mean([row[2] for row in timer_rows])), device, dtype)
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{processor()}, {torch.get_num_threads()} threads"
    print(json.dumps(timer.result(rate) | {"device": name, "dtype": str(dtype).removeprefix("torch."), "torch": torch.__version__}))


def processor():
    """The processor's name."""
    try:
        return next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def table(args, size, results):
    """A Markdown table for people."""
    first = next(iter(result for result in results.values() if "tokens_per_second" in result), {})
    lines = [
        f"# Training speed, size `{args.size}`",
        "",
        f"{datetime.date.today()}, {first.get('device')}, {first.get('dtype')}, torch {first.get('torch')}: {size['layers']} layers of "
        f"width {size['hidden']}, vocabulary {size['vocabulary']:,}, random weights; {size['steps']} timed steps of up to "
        f"{size['items']} items. "
        f"`python benchmarks/train.py --size {args.size}`",
        "",
        "| system | tokens/s | to the plain loop | padding | peak memory | step | optimizer | forward and backward: utilisation "
        "| matrix product |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        if "tokens_per_second" not in result:
            lines.append(f"| {SYSTEMS[name]} | {result['error']} | | | | | | | |")
            continue
        share = (
            result["tokens_per_second"] / results["plain"]["tokens_per_second"]
            if "tokens_per_second" in results.get("plain", {})
            else float("nan")
        )
        lines.append(
            f"| {SYSTEMS[name]} | {result['tokens_per_second']:,.0f} | {share:.2f}x | {100 * result['padding']:.1f}% | "
            f"{result['peak_gib']:.1f} GiB | "
            f"{result['seconds_per_step']:.3f} s | {100 * result['optimizer_share']:.0f}% | {100 * result['utilisation']:.0f}% | "
            f"{result['rate_gflops']:,.0f} GFLOP/s |"
        )
    return "\n".join(lines) + "\n"


def main():
    """Make the data, run each system in its own process, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--size", default="demo", choices=tuple(SIZES), help="size of decoder and data (default demo)")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=tuple(SYSTEMS), help="what to run (default all three)")
    parser.add_argument("--tokens", type=int, help="padded tokens a step of ours (default 8192 for demo, 1024 for real)")
    parser.add_argument("--steps", type=int, help="timed steps (default 40 for demo, 3 for real)")
    parser.add_argument("--items", type=int, help="items a step (default 64 for demo, 8 for real)")
    parser.add_argument("--device", default="auto", help="auto (default: a CUDA GPU where there is one), cpu or cuda")
    parser.add_argument("--out", help="result files without suffix (default results/benchmarks/train-SIZE)")
    parser.add_argument("--only", choices=tuple(SYSTEMS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = SIZES[args.size] | {name: getattr(args, name) for name in ("tokens", "steps", "items") if getattr(args, name)}
    if args.only:
        return run_one(args, size)
    results, out = {}, pathlib.Path(args.out or ROOT / "results" / "benchmarks" / f"train-{args.size}")
    with tempfile.TemporaryDirectory() as folder:
        make_data(pathlib.Path(folder), size, max(512, (size["steps"] + size["warm"]) * size["items"]))
        make_decoder(pathlib.Path(folder) / "decoder", size)
        for name in args.systems:
            print(f"{SYSTEMS[name]} ...", file=sys.stderr)
            if name == "trainer" and importlib.util.find_spec("accelerate") is None:
                results[name] = {"error": "not run: needs the package accelerate"}
                continue
            flags = [word for key in ("tokens", "steps", "items") if getattr(args, key) for word in (f"--{key}", str(getattr(args, key)))]
            done = subprocess.run(
                [sys.executable, __file__, "--size", args.size, "--only", name, "--folder", folder, "--device", args.device, *flags],
                stdout=subprocess.PIPE,
                text=True,
            )
            if done.returncode:
                raise SystemExit(f"{SYSTEMS[name]}: ended with status {done.returncode}; its message is above")
            results[name] = json.loads(done.stdout.splitlines()[-1])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(out.name + ".json").write_text(
        json.dumps({"size": args.size, "date": str(datetime.date.today()), "results": results}, indent=2) + "\n"
    )
    out.with_name(out.name + ".md").write_text(table(args, size, results))
    print(table(args, size, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
