"""The end-to-end chain as a user types it: README's commands on a few items, each script alone, and vectors that must and must not work.

    python -m pytest -q test_smoke.py            # CPU, no network, under 3 minutes; on a CUDA machine the same commands use the GPU

Details of each script are tested in tests/. Here are the claims that need several scripts: signal is found where there is some, none where
there is none, files hash their parents, README's commands exist, and every script works without its siblings.
"""
import ast
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent
SCRIPTS = ("extract.py", "train_decoder.py", "evaluate.py", "controls.py")
LIMIT = 24
DECODER = ROOT / "data/demo/decoder"
FIT = "--decoder {decoder} --epochs 60 --batch-size 64 --lr-projector 3e-3 --lr-decoder 2e-3 --normalize standardize --eval-every 100000 --seed 0"


def run(*words, cwd=ROOT, status=0):
    """Run a command with this Python; returns (stdout, stderr) and checks the exit status."""
    words = [sys.executable if word == "python" else str(word) for word in words]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    assert done.returncode == status, f"{shlex.join(words)}\nexit {done.returncode}, expected {status}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout, done.stderr


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def readme_commands():
    """Every `python ...` line in README's code blocks, continued lines joined."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.S)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip().startswith("python ")]


def demo_commands():
    return [line for line in (ROOT / "data/demo/demo.sh").read_text().splitlines() if line.startswith("python ")]


# ---------------------------------------------------------------- help, copies, README
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_quick(script):
    """`--help` answers before torch is imported. The bound is a ratio to a bare interpreter with numpy, not a time."""
    def fastest(*words):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            run(*words)
            times.append(time.perf_counter() - start)
        return min(times)
    bare = fastest("python", "-c", "import numpy, argparse, json, subprocess")
    assert fastest("python", script, "--help") < 4 * bare + 0.2
    assert "torch" not in run("python", "-X", "importtime", script, "--help")[1]


def test_shared_blocks_are_identical():
    blocks = {}
    for path in [*(ROOT / name for name in SCRIPTS), *sorted((ROOT / "data").glob("*.py")), *sorted((ROOT / "results").glob("*.py"))]:
        found = re.findall(r"# ---- shared block: (\w+) .*?\n(.*?)# ---- end of shared block: \1 ----", path.read_text(encoding="utf-8"), re.S)
        for name, text in found:
            blocks.setdefault(name, {}).setdefault(text, []).append(path.name)
    assert set(blocks) == {"base", "embeddings", "images", "partial", "ranks", "steady"}
    for name, versions in blocks.items():
        assert len(versions) == 1, f"block {name} differs: {list(versions.values())}"
    assert all(script in next(iter(blocks["base"].values())) for script in SCRIPTS)


def test_no_script_imports_a_sibling():
    for script in SCRIPTS:
        text = (ROOT / script).read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (extract|train_decoder|evaluate|controls)\b", text, re.M), script


def test_readme_shows_the_demo_commands():
    shown = readme_commands()
    for line in demo_commands():
        assert line in shown, f"README lacks the demo's line: {line}"


def test_readme_commands_parse(tmp_path):
    """A wrong flag in README fails here: every command goes through its own script's parse_args."""
    checked = 0
    for line in readme_commands():
        words = shlex.split(line)[1:]
        if words[0] not in (*SCRIPTS, "data/prepare.py", "results/report.py"):
            continue
        code = (f"import importlib.util as u; s = u.spec_from_file_location('m', {str(ROOT / words[0])!r}); m = u.module_from_spec(s); "
                f"import sys; sys.modules['m'] = m; s.loader.exec_module(m); m.parse_args({words[1:]!r})")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, f"README: {line}\n{done.stderr[-800:]}"
        checked += 1
    assert checked >= 20


# ---------------------------------------------------------------- the demo's own commands on a few items
# Runs a script and writes how many numbers each call of a vector function on the CPU had (see steady_math).
WATCH = """
import json, runpy, sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
names, sizes = set("acos asin atan cos cosh erf erfc erfinv exp expm1 lgamma log log10 log1p log2 sin sinh sqrt tan tanh".split()), {}
class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1].removeprefix("_foreach_").rstrip("_")
        if name in names:
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if tensor.device.type == "cpu":
                    sizes.setdefault(f"{name} {tensor.dtype}", []).append(tensor.numel())
        return function(*args, **(kwargs or {}))
out, sys.argv = sys.argv[1], sys.argv[2:]
try:
    with Watch():
        runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    json.dump(sizes, open(out, "w"))
"""


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """README's demo lines, run in a copy of the repository with --limit where a script has it."""
    copy = tmp_path_factory.mktemp("demo") / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "*.lock", "demo"))
    shutil.copytree(ROOT / "data/demo", copy / "data/demo")
    for line in demo_commands():
        words = shlex.split(line)
        if words[1] == "data/demo/render.py" and (copy / "data/demo/items/test.jsonl").exists() and (copy / "data/demo/images").exists():
            continue                                    # drawn by an earlier run; tests/test_demo.py draws and compares
        if words[1] in ("extract.py", "controls.py") or "fit" in words:
            words += ["--limit", str(LIMIT)]
        if "fit" in words:
            words += ["--max-steps", "3"]
        if words[1] in ("extract.py", "train_decoder.py"):
            words[1:1] = ["-c", WATCH, str(copy / f"watched-{words[words.index('--out') + 1].replace('/', '-')}.json")]
        run(*words, cwd=copy)
    return copy


def test_demo_chain_has_every_file(demo):
    meta = json.loads((demo / "runs/demo/vectors/joint-test.meta.json").read_text())
    assert (meta["embedder"], meta["mode"], meta["key"]) == ("qwen3-vl-embedding-2b", "vl_joint", "id")
    scores = json.loads((demo / "results/demo/scores.json").read_text())
    text = json.dumps(scores)
    for condition in ("matched", "text_only", "zero", "shuffled"):
        assert f'"{condition}"' in text, condition
    rows = [json.loads(line) for line in (demo / "runs/demo/controls/joint/matched.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [json.loads(line)["id"] for line in (demo / "data/demo/items/test.jsonl").read_text().splitlines()[:LIMIT]]
    assert all(row["answer_bits"] > 0 and row["condition"] == "matched" for row in rows)


def test_sidecars_hash_their_parents(demo):
    vectors = demo / "runs/demo/vectors/joint-test"
    meta = json.loads(Path(f"{vectors}.meta.json").read_text())
    assert meta["array_sha256"] == sha256(f"{vectors}.npy") and meta["ids_sha256"] == sha256(f"{vectors}.ids.txt")
    assert meta["items_sha256"] == sha256(demo / "data/demo/items/test.jsonl")
    readout = json.loads((demo / "runs/demo/readouts/joint/readout.json").read_text())
    assert sha256(demo / "data/demo/items/train.jsonl") in json.dumps(readout)
    predictions = json.loads((demo / "runs/demo/controls/joint/matched.meta.json").read_text())
    assert predictions["items_sha256"] == sha256(demo / "data/demo/items/test.jsonl")


def test_demo_again_is_done_at_once(demo):
    """The same commands again change no file: each says that it is there."""
    def state():
        return {path: sha256(path) for folder in ("runs/demo/vectors", "runs/demo/readouts") for path in (demo / folder).rglob("*") if path.is_file()}
    before = state()
    lines = [line for line in demo_commands() if "extract.py" in line][:1] + [line for line in demo_commands() if " fit " in line][:1]
    for line in lines:
        run(*shlex.split(line), "--limit", LIMIT, *(["--max-steps", "3"] if " fit " in line else []), cwd=demo)
    assert state() == before


def test_mismatched_vectors_are_refused(demo, tmp_path):
    """Vectors of another embedder stop `predict`, by name, before it runs."""
    _, error = run("python", "train_decoder.py", "predict", "--readout", "runs/demo/readouts/visual", "--items", "data/demo/items/test.jsonl",
                   "--embeddings", "runs/demo/vectors/clip-test", "--limit", LIMIT, "--out", tmp_path / "x.jsonl", cwd=demo, status=1)
    assert "clip" in error and "qwen3-vl-embedding-2b" in error and not (tmp_path / "x.jsonl").exists()


# ---------------------------------------------------------------- the first call of a vector function (see steady_math)
STORM = """
import importlib.util, os, sys, torch
if sys.argv[1] == "script":
    spec = importlib.util.spec_from_file_location("script", sys.argv[2])
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.load_libraries()
torch.set_num_threads(1)                                # no thread may run before a fork
numbers, deviating = torch.linspace(0.001, 0.999, 1 << 17), 0
for trial in range(int(sys.argv[3])):
    child = os.fork()
    if not child:
        torch.set_num_threads(16)
        torch.ones(1 << 17).add_(1)                     # the threads stand ready
        os._exit(any(not torch.equal(function(numbers), function(numbers)) for function in (torch.cos, torch.exp, torch.log, torch.sqrt)))
    deviating += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(deviating)
"""


def test_first_vector_functions_run_on_one_thread(demo):
    """Every vector function that extract, fit or predict uses on the CPU was called there first with 8 numbers: too few for a second thread,
    so that MKL's race between first calls cannot happen."""
    run("python", "-c", WATCH, "watched-predict.json", "train_decoder.py", "predict", "--readout", "runs/demo/readouts/joint", "--limit", 8,
        "--items", "data/demo/items/test.jsonl", "--embeddings", "runs/demo/vectors/joint-test", "--out", "watched.jsonl", cwd=demo)
    watched = {path.name: json.loads(path.read_text()) for path in demo.glob("watched-*.json")}
    assert len(watched) == 1 + sum(line.split()[1] in ("extract.py", "train_decoder.py") for line in demo_commands())
    for name in ("watched-runs-demo-vectors-joint-train.json", "watched-runs-demo-readouts-joint.json", "watched-predict.json"):
        assert max(watched[name]["cos torch.float32"]) > 8, f"{name}: the watch saw nothing of the model"
    assert {(name, key): seen[0] for name, sizes in watched.items() for key, seen in sizes.items() if seen[0] != 8} == {}


def test_whoever_imports_torch_steadies_it():
    """In all scripts: the function that imports torch calls steady_math, too (raw_image's among them)."""
    found = 0
    for script in SCRIPTS:
        for node in ast.walk(ast.parse((ROOT / script).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(isinstance(part, ast.Import) and part.names[0].name == "torch" for part in ast.walk(node)):
                found += 1
                assert any(isinstance(part, ast.Call) and getattr(part.func, "id", "") == "steady_math" for part in ast.walk(node)), (script, node.name)
    assert found == 3


@pytest.mark.hard
@pytest.mark.parametrize("script", ["extract.py", "train_decoder.py"])
def test_first_calls_in_a_storm_of_threads(script):
    """400 processes of 16 threads on this machine's few cores. Without the script's load_libraries some first calls deviate, with it none."""
    bare, steadied = (int(run("python", "-c", STORM, kind, ROOT / script, 400)[0]) for kind in ("bare", "script"))
    print(f"{script}: first calls that deviate, of 400: {bare} without steady_math, {steadied} with it")
    assert steadied == 0


# ---------------------------------------------------------------- your own vectors: signal where there is some, none where there is none
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")


def bring_your_own(folder, name, rows, seed, informative):
    """Items about pictures that nobody draws, and vectors made here: informative ones carry the answer, noise ones carry nothing."""
    rng = np.random.default_rng(seed)
    answers = rng.integers(0, len(COLOURS), rows)
    with open(folder / f"{name}.jsonl", "w") as file:
        for i, answer in enumerate(answers):
            file.write(json.dumps({"id": f"{name}-{i}", "image": f"{name}-{i}.png", "question": "What colour is the star?\nAnswer with a single word.",
                                   "answers": [COLOURS[answer]], "source": "mine", "domain": "mine", "metric": "exact"}) + "\n")
    vectors = rng.normal(size=(rows, 16)).astype(np.float32)
    if informative:
        vectors[np.arange(rows), answers] += 6
    # five lines bring any vectors: an array, a text file, six facts
    np.save(folder / f"{name}.npy", vectors)
    (folder / f"{name}.ids.txt").write_text("".join(f"{name}-{i}\n" for i in range(rows)))
    facts = {"embedder": "mine", "mode": "vl_joint", "key": "id", "dim": 16, "normalized": False, "dtype": "float32"}
    (folder / f"{name}.meta.json").write_text(json.dumps(facts))


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """Controls of a readout on informative vectors and of one on noise, with scores.json read back."""
    results = {}
    shared = None
    for kind in ("signal", "noise"):
        folder = tmp_path_factory.mktemp(kind)
        for name, rows, seed in (("train", 256, 1), ("dev", 32, 2), ("test", 96, 3)):
            bring_your_own(folder, name, rows, seed, kind == "signal")
        files = ["--train-items", folder / "train.jsonl", "--dev-items", folder / "dev.jsonl"]
        vectors = ["--train-embeddings", folder / "train", "--dev-embeddings", folder / "dev"]
        flags = shlex.split(FIT.format(decoder=DECODER))
        run("python", "train_decoder.py", "fit", *files, *vectors, *flags, "--out", folder / "readout")
        if shared is None:                              # the answers are the same draw, so one text-only readout serves both
            shared = folder / "text-only"
            run("python", "train_decoder.py", "fit", "--no-embedding", *files, *flags[:-4], "--seed", "0", "--out", shared)
        run("python", "controls.py", "run", "--readout", folder / "readout", "--items", folder / "test.jsonl", "--embeddings", folder / "test",
            "--text-only-readout", shared, "--out", folder / "controls", "--max-new-tokens", "8")
        rows = [json.loads(line) for line in (folder / "controls/scores.jsonl").read_text().splitlines()]
        results[kind] = {condition: np.array([row["score"] for row in rows if row["condition"] == condition]) * 100
                         for condition in {row["condition"] for row in rows}}
        results[kind, "folder"] = folder
    return results


def test_signal_is_found_and_controls_convict(toy):
    signal = {condition: scores.mean() for condition, scores in toy["signal"].items()}
    assert signal["matched"] > 90, signal
    assert all(signal[condition] < 45 for condition in ("shuffled", "zero", "text_only")), signal


def test_noise_does_not_beat_text_only(toy):
    noise = toy["noise"]
    difference = noise["matched"] - noise["text_only"]
    assert difference.mean() < 2 * difference.std() / len(difference) ** 0.5 + 5, (noise["matched"].mean(), noise["text_only"].mean())


def test_bits_fall_when_the_vector_informs(toy):
    """answer_bits of matched lie under those of text_only where there is signal: usable information is positive."""
    folder = toy["signal", "folder"] / "controls"
    bits = {c: np.mean([json.loads(line)["answer_bits"] for line in (folder / f"{c}.jsonl").read_text().splitlines()]) for c in ("matched", "text_only")}
    assert bits["matched"] + 1 < bits["text_only"], bits


def test_each_script_alone(toy, tmp_path):
    """Copied alone into an empty folder, beside a decoy package named evaluate, each script still runs its stage."""
    folder = toy["signal", "folder"]
    for script in ("train_decoder.py", "evaluate.py"):
        home = tmp_path / script.removesuffix(".py")
        (home / "decoy").mkdir(parents=True)
        (home / "decoy/evaluate.py").write_text("raise SystemExit('the decoy was imported')\n")
        shutil.copy(ROOT / script, home)
    out = tmp_path / "again.jsonl"
    run("python", "train_decoder.py", "predict", "--readout", folder / "readout", "--items", folder / "test.jsonl", "--embeddings", folder / "test",
        "--out", out, "--max-new-tokens", "8", cwd=tmp_path / "train_decoder")
    first = [json.loads(line)["prediction"] for line in (folder / "controls/matched.jsonl").read_text().splitlines()]
    assert [json.loads(line)["prediction"] for line in out.read_text().splitlines()] == first
    table, _ = run("python", "evaluate.py", "--items", folder / "test.jsonl", "--predictions", out, cwd=tmp_path / "evaluate")
    assert "matched" in table


def test_extract_alone(demo, tmp_path):
    shutil.copy(ROOT / "extract.py", tmp_path)
    run("python", "extract.py", "--embedder", "clip", "--model", demo / "data/demo/clip", "--mode", "visual_only", "--items", demo / "data/demo/items/test.jsonl",
        "--images", demo / "data/demo/images", "--out", "v", "--limit", LIMIT, cwd=tmp_path)
    assert sha256(tmp_path / "v.npy") == sha256(demo / "runs/demo/vectors/clip-test.npy")


def test_bad_inputs_are_named(toy, tmp_path):
    """A torn vector file, a missing sidecar and a duplicated id each stop with the file's name; nothing is written."""
    folder = toy["signal", "folder"]
    def predict(prefix):
        return run("python", "train_decoder.py", "predict", "--readout", folder / "readout", "--items", folder / "test.jsonl", "--embeddings", prefix,
                   "--out", tmp_path / "out.jsonl", status=1)[1]
    for ending in (".npy", ".ids.txt", ".meta.json"):
        shutil.copy(f"{folder / 'test'}{ending}", f"{tmp_path / 'v'}{ending}")
    whole = (tmp_path / "v.npy").read_bytes()
    (tmp_path / "v.npy").write_bytes(whole[:-100])
    assert "v.npy" in predict(tmp_path / "v")
    (tmp_path / "v.npy").write_bytes(whole)
    ids = (tmp_path / "v.ids.txt").read_text().splitlines()
    (tmp_path / "v.ids.txt").write_text("\n".join([ids[0], ids[0], *ids[2:]]) + "\n")
    assert "v.ids.txt" in predict(tmp_path / "v")
    os.remove(tmp_path / "v.meta.json")
    assert "v.meta.json" in predict(tmp_path / "v")
    assert not (tmp_path / "out.jsonl").exists()
