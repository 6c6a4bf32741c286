"""Attacks on the whole pipeline: kills, interruptions, full disks, two at once, rot. Each ends in a clear error or in the right result.

    python -m pytest -q -s tests/test_attacks.py                                # the fast ones, no torch
    KILLS=30 python -m pytest -q -s -m "hard or kills" tests/test_attacks.py    # in full, and with real models: the demo killed too

What is drawn at random comes from a seed that is printed; SEED=n repeats it. KILLS=n scales the kills. The attacks on one script alone
are in its own test file. Counts of what was tried are printed, so -s shows them.
"""
import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import platform
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import tqdm

ROOT = Path(__file__).resolve().parent.parent
SEED = os.environ.get("SEED") or str(int.from_bytes(os.urandom(3), "big"))
KILLS = int(os.environ.get("KILLS", 6))
FULL = KILLS >= 30                                      # `make test-hard` runs what is marked `kills` again, in full


def count(full):
    """How often something is tried: in full, or a quarter of it."""
    return full if FULL else max(3, full // 4)


def load(path):
    name = f"{Path(path).stem}_attacked"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


td, ev, controls, extract = (load(f"{name}.py") for name in ("train_decoder", "evaluate", "controls", "extract"))
prepare, report = load("data/prepare.py"), load("results/report.py")
fixtures = load("tests/prepare_fixtures.py")


def rng(name):
    print(f"{name}: SEED={SEED}")
    return random.Random(f"{SEED} {name}")


# ---- train_decoder.py without a model: its own reading, locks, signatures and files; answers come from the vectors' bytes ----
DISARM = '''
import hashlib, time, types


def disarm(td, pause=0.0):
    """Replace what needs torch. A prediction is a function of question and vector; fit hands back a digest of its data."""
    def answer(item, vector):
        digest = hashlib.sha256(item["question"].encode() + vector).hexdigest()
        return item["answers"][0] if digest < "8" else "wrong" + digest[:3]

    def predict_outputs(args, record, items, kept, failed, outputs):
        for output in outputs:
            done = td.open_partial(output, args.overwrite)
            for start in range(0, len(kept), 4):
                part = range(start, min(start + 4, len(kept)))
                if not all(kept[i]["id"] in done for i in part):
                    time.sleep(pause)
                    lines = []
                    for i in part:
                        vector = td.read_vectors(output["prefix"], output["rows"][[i]]).tobytes() if output["prefix"] else b""
                        line = {"id": kept[i]["id"], "prediction": answer(kept[i], vector), "condition": output["condition"],
                                "answer_bits": 1.5, "answer_tokens": 2}
                        source = output["sources"] and output["sources"][output["rows"][i]]
                        lines.append(line | ({"embedding_key": source} if source else {}))
                    td.append(f"{output['out']}.partial", *map(td.sealed, lines))
                    done |= {line["id"]: line for line in lines}
            td.finish(args, record, items, failed, output, done, types.SimpleNamespace(type="cpu"), 0.0)

    def train(args, splits, meta, *rest):
        digest = hashlib.sha256(repr([meta.get(name) for name in td.IDENTITY]).encode())
        for items, prefix, rows in splits.values():
            digest.update(repr(items).encode() + (td.read_vectors(prefix, rows).tobytes() if prefix else b""))
        return digest.hexdigest()
    td.predict_outputs, td.train, td.load_libraries, td.versions = predict_outputs, train, lambda: None, lambda: {}
    td.start_ranks = lambda device: (0, 1, types.SimpleNamespace(type="cpu"))
'''
exec(DISARM)


def standin(pause):
    """The text of a train_decoder.py without a model, for controls.py to run."""
    return DISARM + f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("real", {str(ROOT / "train_decoder.py")!r})
td = sys.modules["real"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(td)
disarm(td, {pause})
td.run(td.main, "HINT")
"""


disarm(td)                                              # noqa: F821, defined by the line above


# ---- a small world: items, sealed trios as extract.py writes them, readouts as fit writes them ----
def write_items(path, items):
    Path(path).write_text("".join(json.dumps(item) + "\n" for item in items))


def some_items(split, count):
    return [{"id": f"{split}-{n}", "image": f"{split}-{n // 3}.png", "question": f"which is number {n % 3}?",
             "answers": ["abcd"[n * 7 % 4]], "source": f"s{n // 3 % 2}", "domain": "natural_image", "metric": "exact"}
            for n in range(count)]


def write_trio(prefix, items, items_path, mode="vl_joint", seed=0, **more):
    key = "id" if mode == "vl_joint" else "image"
    keys = list(dict.fromkeys(item[key] for item in items))
    vectors = np.random.default_rng([seed, len(keys)]).standard_normal((len(keys), 8)).astype(np.float32)
    controls.write_embeddings(str(prefix), vectors, keys, {
        "embedder": "planted", "mode": mode, "key": key, "normalized": False, "weights_sha256": "ab" * 32, "prompt": "{question}",
        "pooling": "last", "items_sha256": controls.sha256(items_path), **more})


def write_readout(folder, trio, train_items):
    """A readout folder with every file that fit writes and all their hashes; the weights are noise."""
    folder.mkdir()
    noise = np.random.default_rng(1)
    for name, size in (("model.safetensors", 3000), ("projector.safetensors", 800)):
        (folder / name).write_bytes(noise.bytes(size))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"name": name, "list": list(range(40))}, indent=1))
    meta = {name: value for name, value in controls.read_json(f"{trio}.meta.json").items() if name in td.IDENTITY} if trio else {}
    record = {"format_version": 1, "embedder": None, "mode": None, "dim": None} | meta | {
        "tokens": 1 if trio else 0, "arguments": {"seed": 0, "lr_decoder": 0.001, "max_length": 2048}, "signature": {},
        "train_items_sha256": controls.sha256(train_items), "template": {}, "steps": [], "projector": None,
        "summary": {"steps": 3},
        "files": {path.name: td.sha256(path) for path in sorted(folder.iterdir())}, "run": {"host": "h", "seconds": 1.5}}
    td.write_json(folder / "readout.json", {"content_sha256": td.content_hash(record)} | record)


CONTROLS = ("matched", "text_only", "text_only_ablated", "zero", "shuffled")


def run_words(out, *more):
    return ["run", "--readout", "readout", "--items", "test.jsonl", "--embeddings", "test", "--out", str(out),
            "--text-only-readout", "text-only", "--controls", ",".join(CONTROLS[1:]), "--bootstrap", "200", *more]


EVALUATE = ["--items", "test.jsonl", "--predictions", "out/matched.jsonl", "out/zero.jsonl", "--bootstrap", "200"]
REPORT = ["scores", "--items", "test.jsonl", "--paper", "paper.json"]
FIT = ["fit", "--train-items", "train.jsonl", "--train-embeddings", "train", "--dev-items", "dev.jsonl", "--dev-embeddings", "dev",
       "--decoder", "readout", "--out", "new-readout"]
PREDICT = ["predict", "--readout", "readout", "--items", "test.jsonl", "--embeddings", "test", "--out", "p/p.jsonl"]


def make_world(folder):
    """Everything from items to report in `folder`, by the scripts' own code without a model."""
    for split, count in (("train", 30), ("dev", 9), ("test", 24)):
        items = some_items(split, count)
        write_items(folder / f"{split}.jsonl", items)
        write_trio(folder / split, items, folder / f"{split}.jsonl")
        write_trio(folder / f"visual-{split}", items, folder / f"{split}.jsonl", "visual_only")
    (folder / "images").mkdir()
    from PIL import Image
    for n in range(8):
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (24, 32, 3), np.uint8)).save(folder / f"images/test-{n}.png")
    write_readout(folder / "readout", folder / "train", folder / "train.jsonl")
    write_readout(folder / "text-only", None, folder / "train.jsonl")
    shutil.copy(ROOT / "results/paper.json", folder)
    with inside(folder):
        quietly(controls.main, run_words("out"))
        quietly(ev.main, [*EVALUATE, "--out", "scores"])
        quietly(report.main, REPORT)


def run_here(args, name, *words):
    """In the place of controls.run_script: the other scripts in this process."""
    controls.save_command(args, " ".join(["python", name, *map(str, words)]))
    {"train_decoder.py": td, "evaluate.py": ev}[name].main([str(word) for word in words])


controls.run_script, real_run_script = run_here, controls.run_script


@contextlib.contextmanager
def inside(folder):
    here = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)


def quietly(call, *args):
    """Call with both outputs kept. Returns (result, standard output, standard error)."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        result = call(*args)
    return result, out.getvalue(), error.getvalue()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


@pytest.fixture
def here(world, tmp_path):
    """A copy of the world to damage, as the current folder."""
    shutil.copytree(world, tmp_path / "w")
    with inside(tmp_path / "w"):
        yield tmp_path / "w"


# ---- processes: forks that run a script as its command line does, so that numpy is imported once ----
def mend_threads():
    """In a fork, before threads start: torch makes its pool anew when it is next asked for, and two threads that ask at once crash.
    tqdm's lock is shared by all forks of a process, so one that was killed while it held it would stop all others."""
    tqdm.tqdm.set_lock(threading.RLock())
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def fork(script, words, limit=None, output=None):
    """Start `python SCRIPT WORDS` as a fork. Returns (pid, file descriptor of its standard error)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        with contextlib.suppress(OSError):
            fcntl.fcntl(read, 1031, 1 << 20)            # F_SETPIPE_SZ: nobody reads until it ends
        return pid, read
    code = 99
    try:
        os.dup2(write, 2), os.dup2(os.open(output or os.devnull, os.O_WRONLY), 1)
        for stream in (sys.stdout, sys.stderr):         # pytest's own are no files
            stream.flush()
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        mend_threads()
        sys.argv = [str(script), *map(str, words)]
        runpy.run_path(str(ROOT / script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def ended(process):
    """(exit status, standard error) of a fork."""
    pid, read = process
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def without_run(path):
    """The bytes of a file under a final name; of JSON without what says when it was made and by which process."""
    if path.suffix != ".json":
        return path.read_bytes()
    drop = {"run", "json_sha256", "seconds", "argv", "command", "peak_memory_bytes", "meta_sha256"}

    def bare(value):
        return {key: bare(part) for key, part in value.items() if key not in drop} if isinstance(value, dict) else value
    return json.dumps(bare(json.loads(path.read_text())), sort_keys=True).encode()


def files_in(folder, *names):
    """{relative path: content} of what lies under final names: no temporary, staged, unfinished or lock files."""
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file() and ".work" not in path.parts]
    return {str(path.relative_to(folder)): without_run(path) for path in paths
            if not path.name.endswith((".tmp", ".staged", ".partial", ".lock")) and (not names or path.name in names)}


def kill_at_random(draw, kills, script, words, out, whole):
    """Give a command again and again, each time killed at a random moment; then once more. Checks what lies under final names after each
    kill, and that the end is `whole`, {path: content} of an unbroken run. Returns (kills, runs that ended before their kill)."""
    began = time.time()
    assert ended(fork(script, words))[0] == 0
    length = time.time() - began
    assert files_in(out) == whole
    killed = finished = 0
    shutil.rmtree(out)
    while killed < kills:
        assert finished < 20 * kills, "the kills come too late"
        process = fork(script, words)
        time.sleep(draw.random() * length)
        os.kill(process[0], signal.SIGKILL)
        status, said = ended(process)
        assert status in (0, -9), said
        killed, finished = killed + (status == -9), finished + (status == 0)
        if Path(out).exists():
            for name, content in files_in(out).items():
                assert name in whole and content == whole[name], f"{name} is partial or wrong after a kill"
        if status == 0 or draw.random() < 0.3:          # now and then from the start, so that early moments come too
            shutil.rmtree(out, ignore_errors=True)
    status, said = ended(fork(script, words))
    assert status == 0, said
    assert files_in(out) == whole
    return killed, finished


# ---- 1. kill ----
@pytest.mark.kills
def test_evaluate_killed_at_random_moments(here):
    draw, words = rng("evaluate kills"), [*EVALUATE, "--out", "again"]
    quietly(ev.main, words)
    print("evaluate: killed, finished", kill_at_random(draw, KILLS, "evaluate.py", words, "again", files_in("again")))


@pytest.mark.kills
def test_report_killed_at_random_moments(here):
    draw, words = rng("report kills"), [*REPORT, "--out", "page"]
    quietly(report.main, words)
    print("report: killed, finished", kill_at_random(draw, KILLS, "results/report.py", words, "page", files_in("page")))


@pytest.mark.kills
def test_prepare_train_killed_at_random_moments(tmp_path):
    draw = rng("prepare train kills")
    fixtures.write_raw(tmp_path / "local", 60)
    with inside(tmp_path):
        words = ["train", "--local", "local", "--out", "made", "--no-rows-check"]
        quietly(prepare.main, words)
        print("prepare train: killed, finished", kill_at_random(draw, KILLS, "data/prepare.py", words, "made", files_in("made")))


@pytest.mark.hard
def test_prepare_geb_killed_at_random_moments(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")                     # imported here, so that no fork has to
    draw = rng("prepare geb kills")
    for name in ("MME", "ChartQA"):
        fixtures.write_source(tmp_path / "local", name, fixtures.rows_of(name, 40))
    with inside(tmp_path):
        words = ["geb", "--local", "local", "--out", "made", "--sources", "MME", "ChartQA", "--test-per-source", "4", "--no-rows-check"]
        assert ended(fork("data/prepare.py", words))[0] == 0
        kills = max(2, KILLS // 3)
        print("prepare geb: killed, finished", kill_at_random(draw, kills, "data/prepare.py", words, "made", files_in("made")))


def descendants(pid):
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if os.path.exists(f"/proc/{pid}") else []:
        found += [int(child), *descendants(int(child))]
    return found


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.01)


def kill_controls(draw, kills, words, environment, out, kept):
    """Kill the real process of controls.py; its children must be gone at once; the same command again. Returns (kills, runs that ended)."""
    def start():
        return subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    began, process = time.time(), start()
    said = process.communicate()[1]
    assert process.returncode == 0, said
    length, whole = time.time() - began, files_in(out, *kept)
    shutil.rmtree(out)
    killed = finished = 0
    while killed < kills:
        process = start()
        time.sleep(draw.uniform(0.05, 0.6) * length)
        children = descendants(process.pid)
        process.kill()
        wait_for(lambda: not any(map(alive, children)))
        said = process.communicate()[1]
        assert process.returncode in (0, -9), said
        killed, finished = killed + (process.returncode == -9), finished + (process.returncode == 0)
        for name, content in files_in(out, *kept).items() if Path(out).exists() else ():
            assert content == whole[name], f"{name} is partial or wrong after a kill"
        if process.returncode == 0:
            shutil.rmtree(out)
    process = start()
    said = process.communicate()[1]
    assert process.returncode == 0, said
    assert files_in(out, *kept) == whole
    return killed, finished


KEPT = [f"{name}.jsonl" for name in (*CONTROLS, "scores")]


@pytest.mark.kills
def test_controls_killed_with_its_children(here):
    """controls.py and evaluate.py as they are; train_decoder.py with all its files and locks but no model."""
    for name in ("controls.py", "evaluate.py"):
        shutil.copy(ROOT / name, here)
    (here / "train_decoder.py").write_text(standin(0.03))
    draw, kills = rng("controls kills"), max(3, round(KILLS * 8 / 30))
    print("controls: killed, finished", kill_controls(draw, kills, ["controls.py", *run_words("again")], dict(os.environ), "again", KEPT))


# ---- interruption ----
def interrupt(script, words, lock, says):
    """SIGINT as soon as the lock is held, until one comes before the end. Checks status and words."""
    for attempt in range(40):
        process = fork(script, words)
        while not (os.path.exists(lock) and os.path.getsize(lock)) and alive(process[0]):
            time.sleep(0.001)
        time.sleep(0.002 * attempt / 4)
        os.kill(process[0], signal.SIGINT)
        status, said = ended(process)
        assert status in (0, 130), said
        if status == 130:
            assert re.search(f"interrupted. .*{says}", said), said
            assert "Traceback" not in said and not os.path.exists(lock)
            return
    raise AssertionError("it always ended before the interruption")


def test_interrupted_scripts_say_what_is_kept(here):
    whole = "No file under its final name is half written; run the same command again"
    interrupt("evaluate.py", [*EVALUATE, "--out", "again"], "again/scores.json.lock", whole)
    interrupt("results/report.py", [*REPORT, "--out", "page"], "page/report.html.lock", whole)
    fixtures.write_raw(here / "local", 30)
    interrupt("data/prepare.py", ["train", "--local", "local", "--out", "made", "--no-rows-check"], "made.lock",
              "Run the same command again: it continues")
    for name in ("controls.py", "evaluate.py"):
        shutil.copy(ROOT / name, here)
    (here / "train_decoder.py").write_text(standin(0.5))
    process = subprocess.Popen([sys.executable, "controls.py", *run_words("again")], stderr=subprocess.PIPE, text=True,
                               start_new_session=True, stdout=subprocess.DEVNULL)
    wait_for(lambda: os.path.exists("again/matched.jsonl.partial"))
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130, said
    assert "interrupted. HINT" in said and "interrupted. Finished conditions are kept; give the same command again to go on" in said, said


# ---- 2. disk ----
def limited(script, words, sizes, out, *names):
    """Run under file-size limits: each stops with 1, a path and the free bytes, and leaves what was there. Returns how many stopped."""
    before, stopped = files_in(out, *names) if os.path.isdir(out) else {}, 0
    for size in sizes:
        status, said = ended(fork(script, words, limit=size))
        assert "Traceback" not in said, said
        if status == 0:
            continue
        assert status == 1, said
        line = next(line for line in reversed(said.splitlines()) if line.startswith("error: ") and "cannot write" in line)
        assert re.search(rf"error: .*{re.escape(str(out))}.*: cannot write \(File too large\); [\d,]+ bytes free there", line), line
        assert (files_in(out, *names) if os.path.isdir(out) else {}) == before, f"{size}: earlier results changed"
        stopped += 1
    return stopped


def sizes_around(folder):
    """0, and just under the size of each file there: each of them is the first to fail once."""
    return sorted({0, 10, *(path.stat().st_size - 1 for path in Path(folder).rglob("*") if path.is_file())})


def test_no_room_for_evaluate_and_report(here):
    words = [*EVALUATE, "--out", "scores"]
    quietly(ev.main, [*words, "--seed", "1"])           # an earlier result, not the one that this run would write
    sizes = sizes_around("scores")
    stopped = limited("evaluate.py", words, sizes, "scores", "scores.json", "scores.jsonl")
    assert stopped >= 3
    quietly(ev.main, words)
    quietly(report.main, [*REPORT, "--title", "Earlier"])
    pages = limited("results/report.py", REPORT, sizes_around("scores"), "scores", "report.md", "report.html")
    assert pages >= 3 and "Earlier" in Path("scores/report.md").read_text()
    assert limited("evaluate.py", [*EVALUATE, "--out", "new"], [0], "new") == 1
    assert limited("results/report.py", [*REPORT, "--out", "page"], [0], "page") == 1
    print(f"file-size limits: evaluate {stopped + 1}, report {pages + 1} runs stopped")


def test_no_room_for_prepare(tmp_path):
    with inside(tmp_path):
        fixtures.write_raw(tmp_path / "local", 12)
        words = ["train", "--local", "local", "--out", "made", "--no-rows-check"]
        quietly(prepare.main, words)
        whole, sizes = files_in("made"), sizes_around("made")
        shutil.rmtree("made")
        stopped = 0
        for size in sizes[:: max(1, len(sizes) // 12)]:
            status, said = ended(fork("data/prepare.py", words, limit=size))
            assert status == 1 and re.search(r"error: made\S*: cannot write \(File too large\); [\d,]+ bytes free", said), (size, said)
            assert not Path("made/manifest.json").exists() and all(whole[name] == content for name, content in files_in("made").items())
            stopped += 1
        assert ended(fork("data/prepare.py", words))[0] == 0 and files_in("made") == whole
        print(f"file-size limits: prepare train {stopped} runs stopped")


@pytest.mark.hard
def test_no_room_for_prepare_geb(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")                     # imported here, so that no fork has to
    fixtures.write_source(tmp_path / "local", "ChartQA", fixtures.rows_of("ChartQA", 40))
    with inside(tmp_path):
        words = ["geb", "--local", "local", "--out", "made", "--sources", "ChartQA", "--test-per-source", "4", "--no-rows-check"]
        for size in (0, 200, 2_000, 5_000):
            status, said = ended(fork("data/prepare.py", words, limit=size))
            assert status == 1 and re.search(r"error: made\S*: cannot write \(File too large\); [\d,]+ bytes free", said), (size, said)
            assert not Path("made/manifest.json").exists()
        assert ended(fork("data/prepare.py", words))[0] == 0


def test_no_room_for_controls(here):
    for name in ("controls.py", "evaluate.py"):
        shutil.copy(ROOT / name, here)
    (here / "train_decoder.py").write_text(standin(0))
    before = files_in("out", *KEPT)
    for size in (0, 900, 2_500, 6_000, 9_000):
        done = subprocess.run([sys.executable, "controls.py", *run_words("out", "--seed", "3")], capture_output=True, text=True,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
        assert done.returncode == 1 and "Traceback" not in done.stderr, (size, done.stderr)
        assert re.search(r"error: out\S*: cannot write \(File too large\); [\d,]+ bytes free there", done.stderr), (size, done.stderr)
        now = files_in("out", *KEPT)
        assert set(now) == set(before) and all(now[name] == before[name] for name in ("matched.jsonl", "zero.jsonl", "text_only.jsonl"))
    quietly(controls.main, run_words("out", "--seed", "3"))
    quietly(controls.main, run_words("fresh", "--seed", "3"))
    assert all(Path(f"out/{name}").read_bytes() == Path(f"fresh/{name}").read_bytes() for name in KEPT[:-1])


def test_standard_output_without_room(here):
    fixtures.write_raw(here / "local", 6)
    for script, words in (("evaluate.py", EVALUATE), ("results/report.py", REPORT), ("controls.py", run_words("out")),
                          ("data/prepare.py", ["train", "--local", "local", "--out", "made", "--no-rows-check"])):
        if script == "controls.py":
            words = [*words, "--limit", "24"]
            quietly(controls.main, words)               # all conditions are kept, so no model is needed
        status, said = ended(fork(script, words, output="/dev/full"))
        assert status == 1 and re.search(r"error: standard output: cannot write \(No space left on device\)", said), (script, said)
        assert "Traceback" not in said and "Exception ignored" not in said, (script, said)


# ---- 3. two at once ----
@contextlib.contextmanager
def held(output):
    """Another living process holds the lock of `output`; yields its pid. It is killed at the end and leaves the lock's file."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            with ev.locked(output):
                os.write(write, b"x")
                time.sleep(60)
        finally:
            os._exit(0)
    try:
        os.read(read, 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read), os.close(write)


def stop(*args):
    raise td.UserError("stop here")


TWO = {"fit": (td, FIT, "new-readout"), "predict": (td, PREDICT, "p/p.jsonl"), "controls run": (controls, run_words("out"), "out"),
       "controls curve": (controls, ["curve", "--items", "test.jsonl", "--embeddings", "test", *FIT[1:-2], "--out", "curve"], "curve"),
       "prepare geb": (prepare, ["geb", "--local", "nothing", "--out", "geb"], "geb"),
       "prepare train": (prepare, ["train", "--local", "nothing", "--out", "llava"], "llava"),
       "report": (report, REPORT, "scores/report.html"), "evaluate": (ev, [*EVALUATE, "--out", "scores"], "scores/scores.json"),
       "extract": (extract, "--embedder clip --mode visual_only --items test.jsonl --images images --out x".split(), "x"),
       "merge": (extract, ["--merge", "2", "--out", "x"], "x")}


@pytest.mark.parametrize("name", TWO)
def test_the_second_stops_and_a_dead_holder_is_replaced(here, name, monkeypatch):
    module, words, output = TWO[name]
    with held(output) as pid:
        before = files_in(".")
        with pytest.raises(module.UserError, match=rf"{output}: another process is writing it \(host {platform.node()} pid {pid}\)"):
            quietly(module.main, words)
        assert files_in(".") == before
    monkeypatch.setattr(extract, "load_libraries", stop)
    monkeypatch.setattr(td, "train", stop)
    monkeypatch.setattr(controls, "run_script", stop)
    assert Path(f"{output}.lock").read_text() == f"host {platform.node()} pid {pid}\n"
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(module.UserError, td.UserError):
        module.main(words)
    assert f"{output}.lock was left by host {platform.node()} pid {pid}, which no longer runs; taking it over" in error.getvalue()
    assert not Path(f"{output}.lock").exists()


def test_a_damaged_lock_file_is_taken_over(here):
    Path("scores/scores.json.lock").write_bytes(b"host \xff\xfe\x00 pid \x1b[31m")
    _, _, said = quietly(ev.main, [*EVALUATE, "--out", "scores"])
    assert "which no longer runs; taking it over" in said and "\x1b" not in said and not Path("scores/scores.json.lock").exists()


# ---- 4. rot ----
class Tally(dict):
    def __str__(self):
        return ", ".join(f"{count} {name}" for name, count in sorted(self.items()))


def damaged(draw, content, flips):
    """Damaged copies of a file's bytes: one byte changed at random places, and, a third as often, cut at random places."""
    for _ in range(flips):
        place = draw.randrange(len(content))
        yield f"byte {place}", content[:place] + bytes([content[place] ^ draw.randrange(1, 256)]) + content[place + 1:]
    for _ in range(flips // 3):
        place = draw.randrange(len(content))
        yield f"cut at {place}", content[:place]


def replace(path, content):
    """New content under a name, as a new file: the old one may be linked under another name."""
    path.with_name("replacing").write_bytes(content)
    os.replace(path.with_name("replacing"), path)


def rot(draw, paths, consume, names=(), flips=None):
    """Damage each file in turn and let its reader run: it must stop with a UserError that names the file (or one of `names`), or give
    the very result that it gave before. Returns a Tally; every other outcome is a fault."""
    tally, faults, good, flips = Tally(refused=0, same=0), [], consume(), flips or count(24)
    for path in map(Path, paths):
        content = path.read_bytes()
        for what, bytes_ in damaged(draw, content, flips):
            replace(path, bytes_)
            try:
                result = consume()
            except (td.UserError, ev.UserError, controls.UserError, report.UserError, prepare.UserError, extract.UserError) as error:
                tally["refused"] += 1
                if not any(name in str(error) for name in [path.name, *names]):
                    faults.append(f"{path} {what}: does not name the file: {error}")
            except Exception:
                faults.append(f"{path} {what}: {traceback.format_exc()}")
            else:
                tally["same"] += result == good
                if result != good:
                    faults.append(f"{path} {what}: another result without a word")
            finally:
                replace(path, content)
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:12])
    assert consume() == good
    return tally


def consume_fit():
    shutil.rmtree("new-readout", ignore_errors=True)
    return quietly(td.main, FIT)[1]


def consume_predict(*more):
    shutil.rmtree("p", ignore_errors=True)
    quietly(td.main, [*PREDICT, *more])
    return Path("p/p.jsonl").read_bytes(), without_meta("p/p.meta.json")


def without_meta(path):
    """Of a sidecar what readers look at."""
    meta = json.loads(Path(path).read_text())
    return {name: meta[name] for name in ("embedder", "mode", "condition", "limit", "n", "failed")}


def consume_evaluate():
    shutil.rmtree("again", ignore_errors=True)
    out = quietly(ev.main, [*EVALUATE, "--out", "again"])[1]
    scores = json.loads(Path("again/scores.json").read_text())
    return out, Path("again/scores.jsonl").read_bytes(), scores["rows"], scores["pairs"]


def consume_report():
    shutil.rmtree("page", ignore_errors=True)
    quietly(report.main, [*REPORT, "--out", "page"])
    return Path("page/report.md").read_bytes(), Path("page/report.html").read_bytes()


def consume_controls(out="new"):
    if out == "new":
        shutil.rmtree(out, ignore_errors=True)
    quietly(controls.main, run_words(out))
    return files_in(out, *KEPT)


TRIO = (".npy", ".ids.txt", ".meta.json")


@pytest.mark.kills
def test_rot_in_vectors(here):
    draw = rng("rot in vectors")
    train, test = ([f"{split}{end}" for end in TRIO] for split in ("train", "test"))
    print("trio, fit:", rot(draw, train, consume_fit, train))
    print("trio, predict:", rot(draw, test, consume_predict, test))
    print("trio, controls:", rot(draw, test, consume_controls, test, count(12)))
    content = Path("test.npy").read_bytes()             # each byte of the header once
    tally = Tally(refused=0, same=0)
    for place in range(128):
        replace(Path("test.npy"), content[:place] + bytes([content[place] ^ draw.randrange(1, 256)]) + content[place + 1:])
        with pytest.raises(controls.UserError, match="test.npy"):
            controls.read_embeddings("test")
        tally["refused"] += 1
    replace(Path("test.npy"), content)
    print(".npy header:", tally)


@pytest.mark.kills
def test_rot_in_the_source_keys_of_a_control(here):
    draw = rng("rot in source keys")
    shutil.copytree("out/embeddings", "e")

    def consume():
        shutil.rmtree("p", ignore_errors=True)
        quietly(td.main, [*PREDICT[:-4], "--embeddings", "e/shuffled", "--out", "p/p.jsonl"])
        return Path("p/p.jsonl").read_bytes(), without_meta("p/p.meta.json")
    print("control trio:", rot(draw, ["e/shuffled.source_keys.txt", *(f"e/shuffled{end}" for end in TRIO)], consume,
                               [f"shuffled{end}" for end in TRIO], count(12)))


@pytest.mark.kills
def test_rot_in_items(here):
    """An item file has no hash of its own. What was made from it does: vectors with questions, readouts, predictions, scores."""
    draw = rng("rot in items")
    print("items, fit:", rot(draw, ["train.jsonl"], consume_fit))
    print("items, predict:", rot(draw, ["test.jsonl"], consume_predict))
    print("items, controls:", rot(draw, ["test.jsonl"], consume_controls, flips=count(12)))
    print("items, evaluate:", rot(draw, ["test.jsonl"], consume_evaluate, ["matched.jsonl"]))
    print("items, report:", rot(draw, ["test.jsonl"], consume_report))


@pytest.mark.kills
def test_rot_in_a_readout(here):
    draw, names = rng("rot in a readout"), sorted(path.name for path in Path("readout").iterdir())
    print("readout, predict:", rot(draw, [f"readout/{name}" for name in names], consume_predict, ["readout.json"]))
    print("readout, controls:", rot(draw, [f"readout/{name}" for name in names], consume_controls, names, 6 if FULL else 1))
    print("text-only readout, controls:", rot(draw, [f"text-only/{name}" for name in names], consume_controls, names, 6 if FULL else 1))


@pytest.mark.kills
def test_rot_in_predictions(here):
    draw, names = rng("rot in predictions"), ["matched.jsonl", "matched.meta.json"]
    print("predictions, evaluate:", rot(draw, [f"out/{name}" for name in names], consume_evaluate, names))
    print("predictions, report:", rot(draw, [f"out/{name}" for name in names], consume_report, names))


@pytest.mark.kills
def test_rot_in_scores(here):
    draw, names = rng("rot in scores"), ["scores.json", "scores.jsonl"]
    print("scores, report:", rot(draw, [f"scores/{name}" for name in names], consume_report, names, count(48)))
    print("controls.json, report:", rot(draw, ["out/controls.json"], consume_report))


@pytest.mark.kills
def test_rot_in_published_figures(here):
    """paper.json is written by hand and holds no hash; the page names the hash of what it read. No crash; a damaged structure is named."""
    draw, tally = rng("rot in paper.json"), Tally(refused=0, read=0)
    content = Path("paper.json").read_bytes()
    for _, bytes_ in damaged(draw, content, count(60)):
        replace(Path("paper.json"), bytes_)
        for call in (consume_report, lambda: quietly(ev.main, [*EVALUATE, "--paper", "paper.json"])):
            try:
                call()
                tally["read"] += 1
            except (ev.UserError, report.UserError) as error:
                assert "paper.json" in str(error)
                tally["refused"] += 1
    print("paper.json:", tally)


@pytest.mark.kills
def test_rot_in_what_controls_kept(here):
    """Damaged conditions are made again, so the result is the same; nothing damaged is taken over."""
    draw = rng("rot in kept conditions")
    names = [f"out/{condition}{end}" for condition in ("matched", "shuffled", "text_only")
             for end in (".jsonl", ".meta.json", ".inputs.json")]
    names += ["out/scores.json", "out/scores.jsonl", "out/controls.json", "out/commands.sh", "out/embeddings/shuffled.npy"]
    print("kept conditions:", rot(draw, names, lambda: consume_controls("out"), flips=9 if FULL else 1))


@pytest.mark.kills
def test_rot_in_unfinished_predictions(here):
    draw, real, tally = rng("rot in unfinished predictions"), td.append, Tally(refused=0, same=0)
    good = consume_predict()
    shutil.rmtree("p")
    calls = []

    def dying(path, *lines):
        calls.append(path)
        if len(calls) > 4:
            raise KeyboardInterrupt
        real(path, *lines)
    td.append = dying
    try:
        with pytest.raises(KeyboardInterrupt):
            quietly(td.main, PREDICT)
    finally:
        td.append = real
    content = Path("p/p.jsonl.partial").read_bytes()
    assert content.count(b"\n") == 17
    for what, bytes_ in damaged(draw, content, count(120)):
        shutil.rmtree("p")
        os.mkdir("p")
        Path("p/p.jsonl.partial").write_bytes(bytes_)
        try:
            quietly(td.main, PREDICT)
            assert (Path("p/p.jsonl").read_bytes(), without_meta("p/p.meta.json")) == good, what
            tally["same"] += 1
        except td.UserError as error:
            assert "p.jsonl.partial" in str(error)
            tally["refused"] += 1
    print("unfinished predictions:", tally)
    assert tally["same"] > count(120) // 2


@pytest.mark.kills
def test_rot_in_unfinished_answers_of_the_reference_model(here, monkeypatch):
    """raw_image keeps its answers one by one; a damaged one and those after it are asked again."""
    draw, asked, tally = rng("rot in raw_image"), [], Tally(refused=0, same=0)
    items = ev.read_items("test.jsonl")
    lines = [{"id": item["id"], "prediction": f"ä{item['id']}", "condition": "raw_image", "answer_bits": None, "answer_tokens": None}
             for item in items]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [{"a": 1}, *map(controls.sealed, lines)]).encode()

    class Asked(Exception):
        pass

    def ask(args):
        asked.append(1)
        raise Asked
    monkeypatch.setattr(controls, "load_reference", ask)
    args = controls.parse_args(run_words("r") + ["--images", "images"])
    for what, bytes_ in damaged(draw, content, count(60)):
        shutil.rmtree("r", ignore_errors=True)
        os.mkdir("r")
        Path("r/raw_image.jsonl.partial").write_bytes(bytes_)
        asked.clear()
        try:
            quietly(controls.answer_from_images, args, items, {"a": 1})
        except Asked:
            kept = [json.loads(line) for line in Path("r/raw_image.jsonl.partial").read_text().splitlines()[1:]]
            assert kept == [controls.sealed(line) for line in lines[:len(kept)]] and len(kept) < len(lines), what
            tally["same"] += 1
        else:
            assert [json.loads(line) for line in Path("r/raw_image.jsonl").read_text().splitlines()] == lines, what
            tally["same"] += 1
    print("raw_image.jsonl.partial:", tally)


@pytest.mark.kills
def test_rot_in_prepared_data(tmp_path, monkeypatch):
    """What an interrupted preparation left, and what a finished one made."""
    draw = rng("rot in prepared data")
    fixtures.write_raw(tmp_path / "local", 30)
    words = ["train", "--local", "local", "--out", "made", "--no-rows-check"]
    with inside(tmp_path):
        quietly(prepare.main, words)
        good, kept = files_in("made"), Path("kept")

        def again():
            quietly(prepare.main, words)
            return files_in("made")
        print("finished:", rot(draw, ["made/items.jsonl", "made/manifest.json"], again, ["manifest.json", "made"]))
        shutil.rmtree("made")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(prepare, "write_shuffled", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            quietly(prepare.main, words)
        shutil.move("made", kept)
        names = sorted(path.relative_to(kept) for path in (kept / ".work").rglob("*") if path.is_file())
        assert len(names) >= 5, names
        tally, faults = Tally(refused=0, same=0), []
        for name in names:
            content = (kept / name).read_bytes()
            for what, bytes_ in damaged(draw, content, count(12)) if content else ():
                shutil.rmtree("made", ignore_errors=True)
                shutil.copytree(kept, "made")
                Path("made", name).write_bytes(bytes_)
                try:
                    result = again()
                except prepare.UserError as error:
                    tally["refused"] += 1
                    if name.name not in str(error):
                        faults.append(f"{name} {what}: {error}")
                except Exception:
                    faults.append(f"{name} {what}: {traceback.format_exc()}")
                else:
                    tally["same"] += 1
                    if result != good:
                        faults.append(f"{name} {what}: another result without a word")
        assert not faults, "\n".join(faults[:8])
        print("unfinished:", tally)
        # images lie under the hash of their bytes, so `check` finds one that changed, whatever its format says about itself
        shutil.rmtree("made", ignore_errors=True)
        again()
        found = Tally(refused=0, same=0)
        for path in sorted(Path("made/images").rglob("*.*"))[:6]:
            content = path.read_bytes()
            for what, bytes_ in damaged(draw, content, count(12)):
                path.write_bytes(bytes_)
                with pytest.raises(prepare.UserError, match="missing or unreadable image|image that is not the one its name says"):
                    quietly(prepare.main, ["check", "made/items.jsonl", "made/images"])
                found["refused"] += 1
            path.write_bytes(content)
        print("images, check:", found)


@pytest.mark.hard
def test_rot_in_staged_images_of_the_benchmark(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")                     # imported here, so that no fork has to
    draw = rng("rot in staged images")
    fixtures.write_source(tmp_path / "local", "ChartQA", fixtures.rows_of("ChartQA", 40))
    words = ["geb", "--local", "local", "--out", "made", "--sources", "ChartQA", "--test-per-source", "4", "--no-rows-check"]
    with inside(tmp_path):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(prepare, "divide", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            quietly(prepare.main, words)
        shutil.copytree("made", "kept")
        quietly(prepare.main, words)
        good, tally = files_in("made"), Tally(refused=0, same=0)
        names = sorted(path.relative_to("kept") for path in Path("kept/.work").rglob("*") if path.is_file())
        for name in draw.sample([n for n in names if n.suffix != ".json"], 5) + [n for n in names if n.suffix == ".json"]:
            content = Path("kept", name).read_bytes()
            for what, bytes_ in damaged(draw, content, 6):
                shutil.rmtree("made")
                shutil.copytree("kept", "made")
                Path("made", name).write_bytes(bytes_)
                try:
                    quietly(prepare.main, words)
                    assert files_in("made") == good, (name, what)
                    tally["same"] += 1
                except prepare.UserError as error:
                    assert name.name in str(error), (name, what, error)
                    tally["refused"] += 1
        print("staged images and work files:", tally)


@pytest.mark.kills
def test_png_damage_is_found_when_an_image_is_opened(tmp_path):
    """Pillow loads a PNG whose pixels were changed by one byte without a word; open_image compares the checksums."""
    from PIL import Image, ImageDraw
    draw, tally = rng("rot in a PNG"), Tally(refused=0, same=0)
    image = Image.new("RGB", (96, 96), "white")         # drawn, so that it compresses: noise is stored as it is, and then Pillow notices
    for n in range(6):
        ImageDraw.Draw(image).ellipse((8 * n, 5 * n, 40 + 8 * n, 30 + 7 * n), fill=(40 * n, 255 - 30 * n, 90))
    image.save(tmp_path / "a.png")
    content, good = (tmp_path / "a.png").read_bytes(), np.asarray(extract.open_image(tmp_path, "a.png"))
    for what, bytes_ in damaged(draw, content, count(400)):
        (tmp_path / "a.png").write_bytes(bytes_)
        try:
            assert (np.asarray(extract.open_image(tmp_path, "a.png")) == good).all(), what
            tally["same"] += 1
        except extract.UserError as error:
            assert "a.png: cannot read this image" in str(error)
            tally["refused"] += 1
    print("PNG:", tally)
    assert tally["refused"] > count(400)


# ---- what does not belong together ----
def rewrite_ids(change):
    lines = Path("test.ids.txt").read_text().splitlines()
    change(lines)
    Path("test.ids.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("change", ["reordered", "duplicated", "one missing", "one more"])
def test_changed_ids_are_refused_by_every_reader(here, change):
    rewrite_ids({"reordered": lambda ids: ids.__setitem__(slice(0, 2), ids[1::-1]), "duplicated": lambda ids: ids.__setitem__(3, ids[4]),
                 "one missing": lambda ids: ids.pop(5), "one more": lambda ids: ids.append("new")}[change])
    for consume in (consume_predict, consume_controls):
        with pytest.raises((td.UserError, controls.UserError), match="test.ids.txt"):
            consume()
    for end in TRIO:
        shutil.copy(f"test{end}", f"train{end}")
    with pytest.raises(td.UserError, match="train.ids.txt"):
        consume_fit()


def test_vectors_of_another_embedder_of_the_same_width_are_refused(here):
    items = ev.read_items("test.jsonl")
    for field, value in (("embedder", "other"), ("weights_sha256", "cd" * 32), ("config_sha256", "ef" * 32), ("prompt", "x"),
                         ("pooling", "mean"), ("normalized", True), ("mode", "visual_only")):
        write_trio("test", items, "test.jsonl", **{"mode": "vl_joint", field: value} if field != "mode" else {"mode": value})
        with pytest.raises(td.UserError, match=rf"test.meta.json: not the kind of vectors that readout was fitted on .*{field}: exp"):
            consume_predict()
        with pytest.raises((td.UserError, controls.UserError), match="test.meta.json: "):
            consume_controls()
        dev = ev.read_items("dev.jsonl")
        write_trio("dev", dev, "dev.jsonl", **{"mode": "vl_joint", field: value} if field != "mode" else {"mode": value})
        with pytest.raises(td.UserError, match=rf"dev.meta.json: another kind of vectors than the training ones \(.*{field}:"):
            consume_fit()


@pytest.mark.parametrize("field", ["question", "answers", "image"])
def test_items_edited_after_extraction_are_refused(here, field):
    """By every reader of vectors that hold the question, and by evaluate.py for every prediction."""
    for split in ("train", "test"):
        items = ev.read_items(f"{split}.jsonl")
        items[4][field] = {"question": "what else?", "answers": ["z"], "image": items[20]["image"]}[field]
        write_items(f"{split}.jsonl", items)
    with pytest.raises(td.UserError, match="train.meta.json: made from items with SHA-256 .* the items were edited after extraction"):
        consume_fit()
    with pytest.raises(td.UserError, match="test.meta.json: made from items with SHA-256 .* the items were edited after extraction"):
        consume_predict()
    with pytest.raises((td.UserError, controls.UserError), match="edited after extraction|was trained on|trained on other items"):
        consume_controls()
    with pytest.raises((td.UserError, controls.UserError), match="edited after extraction"):
        quietly(controls.main, run_words("out"))        # the finished run: nothing of it is taken for the edited items
    with pytest.raises(ev.UserError, match="matched.jsonl: expected predictions for the items with SHA-256"):
        consume_evaluate()
    with pytest.raises(report.UserError, match="test.jsonl: expected the items that were scored"):
        consume_report()


def test_visual_vectors_and_edited_items(here):
    """A vector of the image alone serves any question on it, so an edited question is another item, not a fault; what was made from the
    items as they were is refused all the same."""
    words = [word.replace("test", "visual-test") if word == "test" else word for word in PREDICT]
    shutil.rmtree("readout")
    write_readout(here / "readout", here / "visual-train", here / "train.jsonl")
    quietly(td.main, words)
    items = ev.read_items("test.jsonl")
    items[4]["question"] = "what else?"
    write_items("test.jsonl", items)
    with pytest.raises(td.UserError, match="p.jsonl: made with other inputs or flags .*items_sha256"):
        quietly(td.main, words)
    with pytest.raises(ev.UserError, match="p/p.jsonl: expected predictions for the items with SHA-256"):
        quietly(ev.main, ["--items", "test.jsonl", "--predictions", "p/p.jsonl"])
    items[4]["image"] = "nowhere.png"
    write_items("test.jsonl", items)
    with pytest.raises(td.UserError, match="visual-test.ids.txt: 1 of 24 items .* have no vector"):
        quietly(td.main, [*words, "--overwrite"])


# ---- with the real models: torch is imported once, each attempt is a fork ----
@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with pictures, items, two tiny embedders' folders, a tiny decoder, vectors and readouts, made by the scripts."""
    folder = tmp_path_factory.mktemp("models")
    import safetensors.torch  # noqa: F401
    import torch
    import transformers
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    from PIL import Image
    (folder / "images").mkdir()
    for n in range(8):
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (40, 48, 3), np.uint8)).save(folder / f"images/{n}.png")
    for split, count in (("train", 24), ("dev", 6), ("test", 8)):
        write_items(folder / f"{split}.jsonl", [{**item, "image": f"{n % 8}.png"} for n, item in enumerate(some_items(split, count))])
    for name in ("clip", "qwen3-vl-embedding"):
        shutil.copytree(ROOT / "data/demo" / name, folder / name)
    tests = load("tests/test_controls.py")
    tests.tiny_decoder(folder / "decoder")
    with inside(folder):                                # here and not in a fork, so that what the libraries load late is loaded once
        fresh_extract, fresh_td = load("extract.py"), load("train_decoder.py")
        for split in ("train", "dev", "test"):
            quietly(fresh_extract.main, extract_words("vl_joint", split, split))
            quietly(fresh_extract.main, extract_words("visual_only", split, f"clip-{split}"))
        quietly(fresh_td.main, [*REAL_FIT, "--out", "readout", "--max-steps", "4"])
        quietly(fresh_td.main, REAL_PREDICT)
        text = [word for word in REAL_FIT if word not in ("--train-embeddings", "train", "--dev-embeddings", "dev")]
        quietly(fresh_td.main, [*text, "--no-embedding", "--out", "text-only", "--max-steps", "4"])
    return folder


def extract_words(mode, split, out):
    embedder, folder = ("clip", "clip") if mode == "visual_only" else ("qwen3-vl-embedding-2b", "qwen3-vl-embedding")
    return ["--embedder", embedder, "--model", folder, "--mode", mode, "--items", f"{split}.jsonl", "--images", "images", "--out", out,
            "--workers", "0", "--device", "cpu", "--batch-size", "1"]


REAL_FIT = ["fit", "--train-items", "train.jsonl", "--train-embeddings", "train", "--dev-items", "dev.jsonl", "--dev-embeddings", "dev",
            "--decoder", "decoder", "--batch-size", "8", "--epochs", "20", "--lr-decoder", "3e-3", "--eval-every", "4", "--save-every", "1",
            "--log-every", "1", "--device", "cpu"]
REAL_PREDICT = ["predict", "--readout", "readout", "--items", "test.jsonl", "--embeddings", "test", "--out", "p.jsonl", "--batch-size", "2",
                "--max-new-tokens", "4", "--device", "cpu"]


@pytest.fixture
def real(models, tmp_path):
    shutil.copytree(models, tmp_path / "w")
    with inside(tmp_path / "w"):
        yield tmp_path / "w"


def run_fork(script, words):
    """Run to the end; status 1 with a message becomes a UserError, anything but that and 0 fails."""
    status, said = ended(fork(script, words))
    if status == 1 and "Traceback" not in said:
        raise td.UserError(said[said.index("error: "):])
    assert status == 0, said


def kill_when(condition, script, words):
    process = fork(script, words)
    while not condition() and alive(process[0]):
        time.sleep(0.001)
    os.kill(process[0], signal.SIGKILL)
    assert ended(process)[0] == -9, "it ended before its kill"


def clear(*patterns):
    for pattern in patterns:
        for path in Path(".").glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def facts(prefix):
    """What an extraction gives, with the hashes of the model's files that it records."""
    meta = json.loads(Path(f"{prefix}.meta.json").read_text())
    return (meta["weights_sha256"], meta["config_sha256"], meta["prompt"], meta["pixel_limits"]), Path(f"{prefix}.npy").read_bytes()


@pytest.mark.hard
@pytest.mark.parametrize("mode", ["visual_only", "vl_joint"])
def test_rot_in_images_and_models(real, mode):
    """A damaged picture is named. A model folder holds no hash of its own files: a byte that no loader misses is in the sidecar's
    hashes, so the vectors do not pass for those of the whole model (`fit` and `predict` compare them, see above)."""
    draw, folder = rng(f"rot in images and models, {mode}"), {"visual_only": "clip", "vl_joint": "qwen3-vl-embedding"}[mode]

    def consume():
        clear("x.*")
        run_fork("extract.py", extract_words(mode, "test", "x"))
        return facts("x")
    print(f"images, {mode}:", rot(draw, ["images/1.png", "images/5.png"], consume, flips=6))
    good, tally, faults = consume(), Tally(refused=0, recorded=0), []
    for path in sorted(Path(folder).iterdir()):
        content = path.read_bytes()
        for what, bytes_ in damaged(draw, content, 3):
            replace(path, bytes_)
            try:
                found = consume()
                tally["recorded"] += 1
                if found[0] == good[0]:
                    faults.append(f"{path} {what}: read without a trace in the sidecar")
            except td.UserError as error:
                tally["refused"] += 1
                if folder not in str(error):
                    faults.append(f"{path} {what}: does not name the folder: {error}")
            except AssertionError as error:
                faults.append(f"{path} {what}: {str(error)[-1500:]}")
        replace(path, content)
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:10])
    print(f"model folder, {mode}:", tally)


@pytest.mark.hard
def test_rot_in_a_decoder_folder(real):
    """The same for the decoder that fit starts from: what loads is in the signature, so a resumed or repeated fit does not mix two."""
    draw, tally, faults = rng("rot in a decoder"), Tally(refused=0, recorded=0), []
    words = [*REAL_FIT, "--max-steps", "2", "--out", "r"]

    def consume():
        clear("r")
        run_fork("train_decoder.py", words)
        return json.loads(Path("r/readout.json").read_text())["signature"]["decoder_sha256"]
    good = consume()
    for path in sorted(Path("decoder").iterdir()):
        content = path.read_bytes()
        for what, bytes_ in damaged(draw, content, 3):
            replace(path, bytes_)
            try:
                tally["recorded"] += 1
                if consume() == good:
                    faults.append(f"{path} {what}: read without a trace in readout.json")
            except td.UserError as error:
                tally["refused"] += 1
                tally["recorded"] -= 1
                if "decoder" not in str(error) and "loss" not in str(error):
                    faults.append(f"{path} {what}: does not name the folder: {error}")
            except AssertionError as error:
                faults.append(f"{path} {what}: {str(error)[-1500:]}")
        replace(path, content)
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:10])
    consume()
    path = Path("decoder/config.json")
    path.write_text(path.read_text() + " ")
    with pytest.raises(td.UserError, match="r/readout.json: a finished readout made with other inputs or choices .*decoder_sha256"):
        run_fork("train_decoder.py", words)
    print("decoder folder:", tally)


@pytest.mark.hard
def test_killed_extraction_takes_its_workers_along(real):
    """Also those that wait to hand over pixels which fill the pipe: they held on to it themselves, so they waited for ever."""
    from PIL import Image
    for n in range(8):
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (300, 400, 3), np.uint8)).save(f"images/{n}.png")
    journal = Path("x.partial.jsonl")
    for batches in range(1, 7):
        process = fork("extract.py", [*extract_words("vl_joint", "train", "x"), "--workers", "2"])
        while alive(process[0]) and not (journal.exists() and journal.read_bytes().count(b"\n") > batches):
            time.sleep(0.001)
        workers = descendants(process[0])
        assert len(workers) == 2
        os.kill(process[0], signal.SIGKILL)
        wait_for(lambda: not any(map(alive, workers)), 10)
        assert ended(process)[0] == -9
    run_fork("extract.py", [*extract_words("vl_joint", "train", "x"), "--workers", "2"])


@pytest.mark.hard
def test_rot_in_unfinished_extraction(real):
    draw, words = rng("rot in unfinished extraction"), extract_words("vl_joint", "train", "x")
    journal = Path("x.partial.jsonl")
    kill_when(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 8, "extract.py", words)
    os.mkdir("state")
    for path in Path(".").glob("x.*"):
        shutil.move(path, f"state/{path.name}")

    def consume():
        clear("x.*")
        shutil.copytree("state", ".", dirs_exist_ok=True)
        run_fork("extract.py", words)
        return facts("x")
    assert consume()[1] == Path("train.npy").read_bytes()
    print("unfinished extraction:", rot(draw, ["state/x.partial.npy", "state/x.partial.jsonl"], consume, flips=21))


@pytest.mark.hard
def test_rot_in_unfinished_fit(real):
    draw, words = rng("rot in unfinished fit"), [*REAL_FIT, "--max-steps", "12", "--save-every", "4", "--resume"]
    checkpoint = Path("state/resume/checkpoint.json")
    run_fork("train_decoder.py", [*words, "--out", "whole"])
    kill_when(lambda: checkpoint.exists() and json.loads(checkpoint.read_text())["step"] == 4, "train_decoder.py",
              [*words, "--out", "state"])
    assert not Path("state/readout.json").exists()

    def weights(out):
        names = "model.safetensors projector.safetensors last/model.safetensors config.json tokenizer.json".split()
        return [td.sha256(f"{out}/{name}") for name in names]

    def consume():
        clear("r", "r.lock")
        shutil.copytree("state", "r")
        run_fork("train_decoder.py", [*words, "--out", "r"])
        return weights("r")
    began = time.time()
    assert consume() == weights("whole")
    print(f"one run: {time.time() - began:.1f} s")
    names = sorted(path for path in Path("state").rglob("*") if path.is_file() and not path.name.endswith((".tmp", ".lock")))
    assert len(names) > 8
    print("unfinished fit:", rot(draw, [name for name in names if name.stat().st_size], consume,
                                 ["checkpoint.json", "readout.json", "resume/step-", "resume/best-"], flips=3))


@pytest.mark.hard
def test_interrupted_model_scripts_say_what_is_kept_and_go_on(real):
    for script, words, out, lock, says in (
            ("extract.py", extract_words("vl_joint", "train", "x"), "x.npy", "x.lock", "Finished batches are kept beside the output as"),
            ("train_decoder.py", [*REAL_FIT, "--max-steps", "30", "--resume", "--out", "r"], "r/model.safetensors", "r.lock", ""),
            ("train_decoder.py", [*REAL_PREDICT[:-8], "--out", "q.jsonl", *REAL_PREDICT[-6:]], "q.jsonl", "q.jsonl.lock", "")):
        run_fork(script, words)
        good = Path(out).read_bytes()
        clear("x.*", "r", "q.*")
        interrupt(script, words, lock, says or "same command")
        run_fork(script, words)
        assert Path(out).read_bytes() == good


@pytest.mark.hard
def test_a_small_disk(real, tmp_path):
    """A real full disk, where this may be mounted: extract and fit say so, keep what was there, and end once there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(size):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk], capture_output=True).returncode
    tried = 0
    fit = [*REAL_FIT, "--max-steps", "3", "--resume", "--out", disk / "r"]
    for script, words, sizes in (("extract.py", extract_words("vl_joint", "train", disk / "x"), ("8k", "16k", "28k", "32k")),
                                 ("train_decoder.py", fit, ("64k", "200k", "400k"))):
        for size in sizes:
            if mount(size):
                pytest.skip("mounting is not permitted here")
            try:
                status, said = ended(fork(script, words))
                if status == 0:                         # it fitted
                    continue
                assert status == 1 and "Traceback" not in said, (script, size, status, said)
                assert re.search(rf"error: {re.escape(str(disk))}\S*: cannot write \(.*\); [\d,]+ bytes free there", said), said
                assert not (disk / "x.npy").exists() and not (disk / "r/readout.json").exists()
                subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
                run_fork(script, words)
                tried += 1
            finally:
                subprocess.run(["umount", disk], check=True)
    print("full disks:", tried)
    assert tried >= 5


@pytest.mark.hard
def test_the_real_controls_killed_with_all_children(real):
    """controls.py, train_decoder.py and evaluate.py as a user starts them, each in its own process with its own torch."""
    draw, kills = rng("real controls kills"), max(1, round(int(os.environ.get("KILLS", 30)) * 8 / 30))
    words = [str(ROOT / "controls.py"), "run", "--readout", "readout", "--items", "test.jsonl", "--embeddings", "test", "--out", "out",
             "--text-only-readout", "text-only", "--controls", "text_only,zero,shuffled", "--bootstrap", "200", "--max-new-tokens", "4",
             "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    print("real controls: killed, finished", kill_controls(draw, kills, words, environment, "out", KEPT))


def chain(copy, stop_at=None):
    """The demo's own commands on a few items, one fork each; with `stop_at` seconds the running one is killed then. True if it was."""
    began = time.time()
    for line in (ROOT / "data/demo/demo.sh").read_text().splitlines():
        if not line.startswith("python ") or "data/demo/render.py" in line:
            continue                                    # tests/test_demo.py draws the pictures
        words = shlex.split(line)
        if words[1] in ("extract.py", "controls.py") or "fit" in words:
            words += ["--limit", "12", "--device", "cpu"]
        if "fit" in words:
            words += ["--max-steps", "3"]
        process = fork(words[1], words[2:])
        while stop_at is not None and alive(process[0]) and time.time() - began < stop_at:
            time.sleep(0.002)
        if stop_at is not None and time.time() - began >= stop_at:
            children = descendants(process[0])
            os.kill(process[0], signal.SIGKILL)
            wait_for(lambda: not any(map(alive, children)))     # before reading: one left behind would hold the pipe open
            status, said = ended(process)
            assert status in (0, -9), f"{line}\n{said}"
            if status == -9:
                return True
            continue
        status, said = ended(process)
        assert status == 0, f"{line}\n{said}"
    return False


def forked_run(words, stdout=None, preexec_fn=None, **more):
    """In the place of subprocess.run inside a forked controls.py: another fork, so that torch need not be imported again. The process tree
    is the same: the child dies with its parent, and holds none of its locks."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            for number in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{number}").endswith(".lock"):
                        os.close(int(number))
            preexec_fn()
            os.dup2(stdout, 1)
            sys.stdout = open(1, "w", closefd=False)    # the old object took the file behind it for one that it can seek in
            mend_threads()
            sys.argv = [str(word) for word in words[1:]]
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(code)
    return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


@pytest.mark.hard
def test_the_demo_killed_at_random_moments(models, tmp_path, monkeypatch):
    draw, kills = rng("demo kills"), max(1, round(int(os.environ.get("KILLS", 30)) / 10))

    def copy(name):
        shutil.copytree(ROOT / "data/demo", tmp_path / name / "data/demo")
        (tmp_path / name / "results").mkdir()
        for script in ("extract.py", "train_decoder.py", "evaluate.py", "controls.py", "results/report.py", "results/paper.json"):
            shutil.copy(ROOT / script, tmp_path / name / script)
        return tmp_path / name
    monkeypatch.setitem(globals(), "ROOT", copy("whole"))
    if not (ROOT / "data/demo/items/test.jsonl").exists() or not (ROOT / "data/demo/images").exists():
        subprocess.run([sys.executable, "data/demo/render.py"], cwd=ROOT, check=True)
    monkeypatch.setattr(subprocess, "run", forked_run)
    began = time.time()
    with inside(ROOT):
        chain(ROOT)
    length, killed, whole = time.time() - began, 0, ROOT
    shutil.copytree(ROOT, tmp_path / "broken", ignore=shutil.ignore_patterns("runs", "results"))
    shutil.copytree(ROOT / "results", tmp_path / "broken/results", ignore=shutil.ignore_patterns("demo"))
    monkeypatch.setitem(globals(), "ROOT", tmp_path / "broken")
    with inside(ROOT):
        while killed < kills:
            killed += chain(ROOT, draw.uniform(0.02, 0.6) * length)
        assert not chain(ROOT)
        ends = ("vectors/*.npy", "vectors/*.ids.txt", "readouts/*/*.safetensors", "controls/*/*.jsonl")
        made = [str(path.relative_to(whole)) for end in ends for path in sorted(whole.glob(f"runs/demo/{end}"))]
        assert len(made) > 40
        for name in ("results/demo/scores.jsonl", *made):
            assert Path(whole, name).read_bytes() == Path(ROOT, name).read_bytes(), name
    print(f"demo: {killed} kills; unbroken chain {length:.0f} s")
