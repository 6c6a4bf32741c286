"""Hostile input, a million items, untested versions: no code of an input runs, memory stays bounded, messages name file and item.

    python -m pytest tests/test_hostile.py             # the attacks, about half a minute
    python -m pytest -m hard tests/test_hostile.py -s  # a million items, some minutes; prints what they took

Each attempt is a fork of this process that runs a script as its command line does, under a limit on memory and processor time, so that a
bomb that goes off ends the attempt with a traceback or a signal, and the test with it.
"""
import base64
import collections
import contextlib
import csv
import glob
import importlib.util
import io
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import types
import zlib

import numpy as np
import pytest
import tqdm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRIED = collections.Counter()


def load(path):
    """A script as a module, by its path: some names are also those of packages."""
    name = "attacked_" + os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, os.path.join(ROOT, path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


SCRIPTS = ("evaluate.py", "train_decoder.py", "controls.py", "extract.py", "data/prepare.py", "results/report.py")
ev, td, controls, extract, prepare, report = map(load, SCRIPTS)


@pytest.fixture(scope="module", autouse=True)
def numbers():
    """What was tried, for the closing note."""
    yield
    print(f"\nhostile: {dict(TRIED)}")


# ---- attempts ----
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")     # all but tab and line end


def attempt(module, main, folder, megabytes=400, seconds=20):
    """Run `main()` as the script's command line would, in a fork in `folder`. Returns its exit status and what it printed."""
    TRIED["attempts"] += 1
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    out, err = (os.path.join(folder, f".attempt.{name}") for name in ("out", "err"))
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if not pid:
        code = 98
        try:
            os.chdir(folder)
            tqdm.tqdm.set_lock(threading.RLock())       # its own is shared by all forks: one killed while it held it stops all others
            sys.stdout, sys.stderr = (open(path, "w", encoding="utf-8", errors=errors) for path, errors in ((out, "strict"), (err,
                    "backslashreplace")))
            resource.setrlimit(resource.RLIMIT_AS, (size + megabytes * 2 ** 20,) * 2)
            used = resource.getrusage(resource.RUSAGE_SELF)
            resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds,) * 2)
            signal.alarm(20 * seconds)                  # against waiting without end, far from what a busy machine needs
            module.run(main, "HINT")
        except SystemExit as end:
            code = end.code
        except BaseException:
            __import__("traceback").print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(out, encoding="utf-8") as o, open(err, encoding="utf-8") as e:
        return types.SimpleNamespace(status=status, out=o.read(), err=e.read())


def refused(done, *words):
    """The attempt ended with one named error: status 1, these words in it, no traceback, no control character for the terminal."""
    assert done.status == 1 and "Traceback" not in done.err, (done.status, done.err[-3000:])
    error = "\n" + done.err
    error = error[error.rindex("\nerror: ") + 1:]        # at the start of a line: data may hold the word too
    for word in words:
        assert re.search(word, error), (word, error)
    assert not CONTROL.search(done.err + done.out), repr(CONTROL.search(done.err + done.out)[0])
    assert len(error) < 4000
    TRIED["refused"] += 1


def passed(done):
    assert done.status == 0 and "Traceback" not in done.err, (done.status, done.err[-3000:])
    assert not CONTROL.search(done.err + done.out), repr(CONTROL.search(done.err + done.out)[0])
    TRIED["passed"] += 1
    return done


# ---- files ----
def item(i, **more):
    return {"id": f"q{i}", "image": f"{i}.png", "question": "What is it?", "answers": ["yes"], "source": "own", "domain": "natural_image",
            "metric": "exact", **more}


def write(folder, name, *values, raw=None):
    """Write JSON lines (a name that ends in .json: one value), or raw bytes, and return the path."""
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(raw if raw is not None else b"".join(json.dumps(value).encode() + b"\n" for value in values))
    return path


def write_trio(folder, name, keys, **more):
    array = np.random.default_rng(len(keys)).standard_normal((len(keys), 4)).astype(np.float32)
    np.save(os.path.join(folder, f"{name}.npy"), array)
    write(folder, f"{name}.ids.txt", raw="".join(f"{key}\n" for key in keys).encode())
    write(folder, f"{name}.meta.json", {"embedder": "e", "mode": "visual_only", "key": "id", "dim": 4, "normalized": True,
            "dtype": "float32"} | more)


def write_predictions(folder, name, items, texts, condition="matched", **meta):
    path = write(folder, f"{name}.jsonl", *({"id": one["id"], "prediction": text, "condition": condition, "answer_bits": None,
            "answer_tokens": 1}
                                            for one, text in zip(items, texts)))
    write(folder, f"{name}.meta.json", {"embedder": "e", "mode": "vl_joint", "condition": condition,
                                        "items_sha256": ev.sha256(os.path.join(folder, "items.jsonl"))} | meta)
    return path


def write_readout(folder, name="r", source=None, **more):
    """A readout folder whose readout.json has the right hashes; whoever makes one can compute them."""
    path = os.path.join(folder, name)
    if source:
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("resume", "last", "readout.json"))
        with open(os.path.join(source, "readout.json")) as file:
            more = json.load(file) | more
    os.makedirs(path, exist_ok=True)
    record = {"format_version": 1, "embedder": "e", "mode": "visual_only", "dim": 4, "normalized": True, "tokens": 1, "steps": [],
              "projector": {"kind": "mlp", "dim": 4}, "signature": {}, "template": {}} | more
    record = {key: value for key, value in record.items() if key not in ("content_sha256", "json_sha256", "files")}
    record["files"] = {file: td.sha256(os.path.join(path, file)) for file in sorted(os.listdir(path)) if file != "readout.json"}
    write(path, "readout.json", {"content_sha256": td.content_hash(record)} | record)
    return path


@pytest.fixture
def here(tmp_path):
    """A folder with items, vectors, predictions and a readout that all scripts accept; an attack replaces one of them."""
    folder = str(tmp_path)
    items = [item(i) for i in range(4)]
    write(folder, "items.jsonl", *items)
    write_trio(folder, "t", [one["id"] for one in items])
    write_predictions(folder, "p", items, ["yes", "no", "yes", "no"])
    write_readout(folder)
    os.makedirs(os.path.join(folder, "images"))
    return folder


def args_of(module, line):
    return module.parse_args(line.split())


FIT = "fit --train-items items.jsonl --train-embeddings t --dev-items items.jsonl --dev-embeddings t --decoder d --out o"
PREDICT = "predict --readout r --items items.jsonl --embeddings t --out o.jsonl"
EXTRACT = "--embedder clip --mode vl_joint --fuse sum --items items.jsonl --images images --out o"
RUN = "run --readout r --items items.jsonl --embeddings t --out o --controls zero"
CURVE = ("curve --items items.jsonl --embeddings t --train-items items.jsonl --train-embeddings t --dev-items items.jsonl "
         "--dev-embeddings t --decoder d --out o")
READ_ITEMS = {  # everything that a script reads before torch, the item file first
    "extract": (extract, lambda: extract.read_entries(args_of(extract, EXTRACT)) and None),
    "fit": (td, lambda: td.read_training(args_of(td, FIT)) and None),
    "predict": (td, lambda: td.read_prediction_inputs(args_of(td, PREDICT)) and None),
    "evaluate": (ev, lambda: ev.main("--items items.jsonl --predictions p.jsonl --bootstrap 100".split())),
    "controls run": (controls, lambda: controls.load_vectors(args_of(controls, RUN)) and None),
    "controls curve": (controls, lambda: controls.main(CURVE.split())),
    "prepare check": (prepare, lambda: prepare.main("check items.jsonl images --workers 1".split())),
    "report": (report, lambda: report.read_items("items.jsonl") and None),
}


@pytest.mark.parametrize("name", [name for name in READ_ITEMS if name not in ("controls curve", "prepare check")])
def test_the_files_that_are_attacked_are_good_before(here, name):
    passed(attempt(*READ_ITEMS[name], here))


# ---- items ----
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\x7f"
ITEM_LINES = {  # name: (a line of the item file, words of the error)
    "parent": (item(1, image="../1.png"), "q1.*|'image' leaves"),
    "inner parent": (item(1, image="a/../../1.png"), "q1.*|'image' leaves"),
    "absolute": (item(1, image="/etc/hostname"), "q1.*|'image' leaves"),
    "backslash": (item(1, image="..\\1.png"), "q1.*|'image' leaves"),
    "share": (item(1, image="\\\\host\\1.png"), "q1.*|'image' leaves"),
    "drive": (item(1, image="C:1.png"), "q1.*|'image' leaves"),
    "nul": (item(1, image="1.png\0.jpg"), "q1.*|'image' leaves"),
    "escape in image": (item(1, image=f"{ESCAPES}.png"), "q1.*|'image' leaves"),
    "escape in id": (item(1, id=f"q1{ESCAPES}"), r"q1\\x1b"),
    "line end in id": (item(1, id="q1\nerror: all is well"), r"q1\\n|control characters"),
    "half a surrogate pair in id": (item(1, id="q1\ud800"), r"q1\\ud800"),
    "escape in a wrong field": (item(1, metric=ESCAPES), r"q1"),
    "invalid UTF-8": (b'{"id": "q1\xff"}\n', "line 2: .*UTF-8"),
    "NaN": (b'{"id": "q1", "seen": NaN}\n', "line 2: .*NaN"),
    "infinity": (b'{"id": "q1", "seen": -Infinity}\n', "line 2: .*Infinity"),
    "a key twice": (json.dumps(item(1)).replace('"answers"', '"id": "q7", "answers"').encode() + b"\n", "line 2: .*'id' twice"),
    "a number of 5,000 digits": (b'{"id": "q1", "seen": ' + b"9" * 5000 + b"}\n", "line 2: .*5000 digits"),
    "100,000 levels": (b'{"id": "q1", "answers": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "line 2"),
    "900 levels": (json.dumps(item(1)).encode()[:-1] + b', "more": ' + b"[" * 900 + b"]" * 900 + b"}\n", "line 2: .*100 levels"),
    "100,000 objects in one": (b'{"id": "q1", "answers": {' + b'"a": {' * 100_000 + b"}" * 100_001 + b"}\n", "line 2"),
    "a line of 50 MB": (b'{"id": "q1", "question": "' + b"x" * 50_000_000 + b'"}\n', "line 2: expected at most 16,777,216 bytes"),
    "a million empty lists": (b'{"id": "q1", "answers": [' + b"[]," * 1_000_000 + b"[]]}\n", "q1|'answers'"),
    "an id of 1 MB": (item(1, id="q" * 1_000_000 + "\n"), "qqqq"),
    "a byte order mark": (b"\xef\xbb\xbf" + json.dumps(item(1)).encode() + b"\n", "line 2: .*byte order mark"),
    "a torn line": (b'{"id": "q1", "image": "1.p', "line 2: .*torn"),
}


@pytest.mark.parametrize("attack", ITEM_LINES)
def test_hostile_items_are_refused_by_every_script(here, attack):
    line, words = ITEM_LINES[attack]
    good = json.dumps(item(0)).encode() + b"\n"
    write(here, "items.jsonl", raw=good + (line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"))
    write_predictions(here, "p", [item(0), item(1)], ["yes", "no"])
    for name in ("extract", "fit", "predict", "evaluate", "controls run", "controls curve", "prepare check", "report"):
        module, main = READ_ITEMS[name]
        if len(line) > 1_000_000 and name not in ("evaluate", "prepare check"):
            continue                                    # one reader in all of them; a second of processor time each
        done = attempt(module, main, here, megabytes=1200)
        refused(done, "items.jsonl")
        assert re.search(words, done.err), (name, done.err[-2000:])
    assert sorted(os.listdir(here)) == sorted([".attempt.err", ".attempt.out", "images", "items.jsonl", "p.jsonl", "p.meta.json", "r",
            "t.ids.txt",
                                              "t.meta.json", "t.npy", *(["o"] if os.path.isdir(f"{here}/o") else [])])


def test_an_item_file_that_is_a_pipe_is_refused_by_every_script(here):
    """It could be read only once, and the hash of what is left would be that of nothing."""
    os.rename(f"{here}/items.jsonl", f"{here}/real.jsonl")
    os.mkfifo(f"{here}/items.jsonl")
    for name in READ_ITEMS:
        refused(attempt(*READ_ITEMS[name], here), "items.jsonl: expected a regular file")


@pytest.mark.parametrize("script", SCRIPTS)
def test_closed_outputs_and_no_docstrings(here, script):
    """`>&-`, `2>&-` and `python -OO` change what can be said, not the exit status."""
    python, script = sys.executable, os.path.join(ROOT, script)
    for words, status in ((f"{python} {script} --help >&-", 0), (f"{python} {script} --nonsense 2>&-", 2), (f"{python} -OO {script} --help", 0)):
        done = subprocess.run(["bash", "-c", words], cwd=here, capture_output=True, text=True)
        assert done.returncode == status and "Traceback" not in done.stderr, (words, done.returncode, done.stderr[-2000:])
    if script.endswith("evaluate.py"):
        words = f"{python} {script} --items items.jsonl --predictions p.jsonl --bootstrap 100"
        for end, status in (("--out s >&-", 0), ("--out t 2>&-", 0), (">/dev/full", 1)):
            done = subprocess.run(["bash", "-c", f"{words} {end}"], cwd=here, capture_output=True, text=True)
            assert done.returncode == status and "Traceback" not in done.stderr, (end, done.returncode, done.stderr[-2000:])
        assert os.path.exists(f"{here}/s/scores.json") and os.path.exists(f"{here}/t/scores.json")


LONG = "\n".join(["What?", "A. x", "A." + " " * 400_000 + "y", "B.\tx" + " \t" * 200_000 + "z", "blanks " + " " * 200_000])


def test_a_question_of_a_megabyte_is_read_by_every_script(here):
    assert len(LONG) > 1_000_000
    write(here, "items.jsonl", item(0, question=LONG), *(item(i) for i in range(1, 4)))
    write_predictions(here, "p", [item(i) for i in range(4)], ["yes", "no", "yes", "no"])
    for name in ("extract", "fit", "predict", "evaluate", "controls run", "report"):
        passed(attempt(*READ_ITEMS[name], here))
    write(here, "items.jsonl", item(0, question=LONG, metric="choice", options=["x", "y"], answers=["A"]))
    refused(attempt(*READ_ITEMS["prepare check"], here), "missing or unreadable image")        # its only fault; and in seconds
    turns = [{"from": "human", "value": "<image>" + " " * 500_000 + "x" + "\n" * 500_000 + "y"}, {"from": "gpt",
            "value": "z" + " " * 500_000 + "z"}]
    write(here, "raw.json", [{"id": "1", "image": "coco/1.jpg", "conversations": turns}])
    args = types.SimpleNamespace(seed=0, turns="one", limit=None, rows_check=False)
    done = passed(attempt(prepare, lambda: print(prepare.scan_raw({"rows": 1}, "raw.json", args, ".")["dropped"]), here))
    assert done.out.strip() == "{}"


def test_a_hundred_thousand_options(here):
    many = item(1, options=[f"option {i}" for i in range(100_000)], answers=["A"], metric="choice")
    write(here, "items.jsonl", item(0), many)
    write_predictions(here, "p", [item(0), item(1)], ["yes", "A"])
    refused(attempt(*READ_ITEMS["evaluate"], here), "items.jsonl line 2", "q1", "2 to 26 texts in 'options'", "100,000 options")
    refused(attempt(*READ_ITEMS["prepare check"], here), "items.jsonl", "too few or many")
    for name in ("extract", "predict", "controls run"):  # they do not look at options
        passed(attempt(*READ_ITEMS[name], here))
    write(here, "items.jsonl", item(0), many | {"metric": "exact"})
    write_predictions(here, "p", [item(0), item(1)], ["yes", "A"])
    passed(attempt(*READ_ITEMS["evaluate"], here))


def test_half_a_surrogate_pair_is_no_text(here):
    """JSON can spell "\\ud800" alone; no tokenizer and no UTF-8 file takes it. Scores do, as an escape."""
    for field in ("question", "answers"):
        write(here, "items.jsonl", item(0), item(1, **{field: "\ud800" if field == "question" else ["\udfff"]}), *(item(i) for i in (2, 3)))
        for name in ("fit", "predict"):
            refused(attempt(*READ_ITEMS[name], here), "items.jsonl: item q1: its question or answers.0. is not text")
    items = [item(0), item(1, answers=["a\ud800"], question="\ud800", domain="\udc00", source="s\ud800"), item(2), item(3)]
    write(here, "items.jsonl", *items)
    write_predictions(here, "p", items, ["\udfff", "a\ud800", "yes", "x\ud800"], note="\ud800", embedder="e\ud800")
    for form in ("", " --latex", " --csv"):
        passed(attempt(ev, lambda: ev.main(f"--items items.jsonl --predictions p.jsonl --bootstrap 100 --out s{form}".split()), here))
    rows = {line["id"]: line["score"] for _, line in ev.read_jsonl(f"{here}/s/scores.jsonl")}
    assert rows == {"q0": 0, "q1": 1, "q2": 1, "q3": 0} and ev.read_json(f"{here}/s/scores.json")["rows"][0]["embedder"] == "e\\ud800"
    passed(attempt(report, lambda: report.main("s --items items.jsonl".split()) and None, here))
    assert b"\\ud800" in open(f"{here}/s/report.html", "rb").read().replace(b"\\\\", b"\\")
    shutil.rmtree(f"{here}/s")
    write(here, "raw.json", [{"id": "1", "image": "coco/1.jpg", "conversations": [{"from": "human", "value": "\ud800"}, {"from": "gpt",
            "value": "z"}]}])
    args = types.SimpleNamespace(seed=0, turns="one", limit=None, rows_check=False)
    done = passed(attempt(prepare, lambda: print(prepare.scan_raw({"rows": 1}, "raw.json", args, ".")["dropped"]), here))
    assert "half a surrogate pair" in done.out


def test_what_cannot_be_utf8_is_written_as_an_escape(here):
    """Sidecar fields, reasons of failure and names of files that are not text end up in outputs that are still JSON in UTF-8."""
    name = os.fsdecode(b"p\xff")
    passed(attempt(td, lambda: td.write_json(f"{name}.json", {"argv": [name], "x": "\ud800"}), here))
    assert td.read_json(os.path.join(here, f"{name}.json"))["x"] == "\ud800"
    args = types.SimpleNamespace(limit=None)
    output = {"out": "o.jsonl", "condition": "matched", "signature": {"items_sha256": "a"}, "meta": {"note": "\ud800"}}
    td.versions, kept = lambda: {}, td.versions
    try:
        open(f"{here}/o.jsonl.partial", "w").close()
        device = types.SimpleNamespace(type="cpu")
        passed(attempt(td, lambda: td.finish(args, {"embedder": "e", "mode": "m", "content_sha256": "b"}, [{"id": "q0"}],
                                             {"q0": {"id": "q0", "error": "torn \udcff"}}, output, {}, device, 0.0), here))
    finally:
        td.versions = kept
    assert [line["error"] for _, line in td.read_jsonl(f"{here}/o.jsonl")] == ["torn \udcff"] and td.read_json(f"{here}/o.meta.json")
    passed(attempt(controls, lambda: controls.write_jsonl("w.jsonl", [{"error": "\ud800"}]), here))
    assert [line for _, line in td.read_jsonl(f"{here}/w.jsonl")] == [{"error": "\ud800"}]
    done = passed(attempt(ev, lambda: print(json.dumps({"out": name}, ensure_ascii=False)), here))     # the last line of fit and predict
    assert done.out == '{"out": "p\\udcff"}\n'


# ---- vectors ----
class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def npy(header, body=b"", version=1):
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY" + bytes((version, 0)) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + body


def header(shape, descr="'<f4'", order="False"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


def saved(function, *arrays, **named):
    file = io.BytesIO()
    function(file, *arrays, **named)
    return file.getvalue()


ARRAYS = {
    "claims 2 GB": npy(header("(134217728, 4)"), b"\0" * 64),
    "claims 2**62 rows": npy(header(f"({2 ** 62}, 4)"), b"\0" * 64),
    "claims 10**40 rows": npy(header(f"({10 ** 40}, 4)"), b"\0" * 64),
    "negative rows": npy(header("(-4, 4)"), b"\0" * 64),
    "negative twice": npy(header("(-4, -4)"), b"\0" * 64),
    "no shape": npy(header("None"), b"\0" * 64),
    "a shape of text": npy(header("('4', '4')"), b"\0" * 64),
    "one byte short": npy(header("(4, 4)"), b"\0" * 63),
    "one byte long": npy(header("(4, 4)"), b"\0" * 65),
    "a header of 100,000 levels": npy("(" * 60_000),
    "a header of 1 MB": npy(header("(4, 4)") + " " * 1_000_000, b"\0" * 64, version=2),
    "a header that claims 4 GB": b"\x93NUMPY\2\0" + struct.pack("<I", 2 ** 32 - 1) + b"{}",
    "a header with code": npy("__import__('os').system('touch ran')"),
    "objects": None, "an archive": saved(np.savez, a=np.zeros((4, 4), np.float32)), "half an archive": saved(np.savez, a=np.zeros(4))[:-30],
    "big endian": npy(header("(4, 4)", "'>f4'"), b"\0" * 64), "column order": npy(header("(4, 4)", order="True"), b"\0" * 64),
    "fields": npy(header("(4,)", "[('\\x1b[2J', '<f4')]"), b"\0" * 16), "no dtype": npy(header("(4, 4)", "'x' * 9"), b"\0" * 64),
    "empty": b"", "NaN": saved(np.save, np.full((4, 4), np.nan, np.float32)),
}
READ_VECTORS = {name: READ_ITEMS[name] for name in ("fit", "predict", "controls run")}


@pytest.mark.parametrize("attack", ARRAYS)
def test_hostile_arrays_are_refused_by_every_reader(here, attack):
    data = ARRAYS[attack]
    if data is None:
        data = saved(np.save, np.array([[Payload("ran")] * 4] * 4, dtype=object), allow_pickle=True)
    write(here, "t.npy", raw=data)
    for module, main in READ_VECTORS.values():
        refused(attempt(module, main, here), r"t\.npy")
    assert not os.path.exists(f"{here}/ran")


def test_hostile_shards_are_not_merged(here):
    """The row numbers of a shard as a pickle, or for another number of rows, with the hash that fits them."""
    for data in (saved(np.save, np.array([Payload("ran")] * 4, dtype=object), allow_pickle=True), saved(np.save, np.arange(3)),
                 saved(np.save, np.arange(4.0)), ARRAYS["claims 2 GB"]):
        for shard in (0, 1):
            prefix = f"s.shard-{shard}-of-2"
            write_trio(here, prefix, [f"q{i}" for i in range(shard, 8, 2)], entries=8, on_error="stop", rows_sha256=ev.sha256(
                write(here, f"{prefix}.rows.npy", raw=data)))
        refused(attempt(extract, lambda: extract.main("--merge 2 --out s".split()), here), r"s\.shard-0-of-2\.rows\.npy")
    assert not os.path.exists(f"{here}/ran") and not os.path.exists(f"{here}/s.npy")
    for shard in (0, 1):
        prefix = f"s.shard-{shard}-of-2"
        write_trio(here, prefix, [f"q{i}" for i in range(shard, 8, 2)], entries=8, on_error="stop", rows_sha256=ev.sha256(
            write(here, f"{prefix}.rows.npy", raw=saved(np.save, np.arange(shard, 8, 2)))))
    write(here, "s.shard-1-of-2.failed.jsonl", {"id": ESCAPES})
    refused(attempt(extract, lambda: extract.main("--merge 2 --out s".split()), here), r"s\.shard-1-of-2\.failed\.jsonl line 1")
    os.remove(f"{here}/s.shard-1-of-2.failed.jsonl")
    passed(attempt(extract, lambda: extract.main("--merge 2 --out s".split()), here))


@pytest.mark.parametrize("field, value", [("dtype", ESCAPES), ("dim", ESCAPES), ("dim", 10 ** 200), ("key", ESCAPES), ("embedder",
        ESCAPES), ("mode", [ESCAPES]),
                                          ("condition", ESCAPES), ("condition", ["x"]), ("condition", ""), ("weights_sha256", ESCAPES),
                                          ("normalized", ESCAPES), ("ids_sha256", ESCAPES), ("array_sha256", {"a": ESCAPES})])
def test_hostile_sidecar_fields_are_refused_and_shown_harmless(here, field, value):
    write_trio(here, "t", [f"q{i}" for i in range(4)], **{field: value})
    refused(attempt(*READ_ITEMS["predict"], here), r"t\.(meta\.json|npy|ids\.txt)")


# ---- any text file: invalid UTF-8, and what a table of text may hold ----
def scored(here):
    passed(attempt(ev, lambda: ev.main("--items items.jsonl --predictions p.jsonl --bootstrap 100 --out s".split()), here))
    return "report.main('s --items items.jsonl --curve c.json --benchmark b.csv --paper paper.json'.split()) and None"


TEXT_FILES = {  # file: (module, what reads it)
    "items.jsonl": READ_ITEMS["evaluate"], "p.jsonl": READ_ITEMS["evaluate"], "p.meta.json": READ_ITEMS["evaluate"],
    "t.ids.txt": READ_ITEMS["fit"], "t.meta.json": READ_ITEMS["controls run"], "r/readout.json": READ_ITEMS["predict"],
    "exclude.txt": (td, lambda: td.read_training(args_of(td, f"{FIT} --exclude-ids exclude.txt")) and None),
    "failed.jsonl": (td, lambda: td.read_training(args_of(td, f"{FIT} --failed failed.jsonl")) and None),
    "t.source_keys.txt": READ_ITEMS["predict"],
    "f.jsonl": (controls, lambda: controls.load_vectors(args_of(controls, f"{RUN} --failed f.jsonl")) and None),
    "v/controls.json": (controls, lambda: controls.read_visual_only(types.SimpleNamespace(
        visual_only_run="v", items="items.jsonl", limit=None), {"embedder": "e"}) and None),
    "list.csv": (prepare, lambda: prepare.main("geb --out o --official list.csv --local images".split())),
    "list.jsonl": (prepare, lambda: prepare.main("geb --out o --official list.jsonl --local images".split())),
    "images/raw.json": (prepare, lambda: list(prepare.json_array("images/raw.json"))),
    "o/manifest.json": (prepare, lambda: prepare.main("geb --out o --local images".split())),
    "s/scores.json": (report, lambda: report.main(["s"])), "s/scores.jsonl": (report, lambda: report.main(["s"])),
    "b.csv": (report, lambda: report.main("s --benchmark b.csv --examples 0".split())),
    "c.json": (report, lambda: report.main("s --curve c.json --examples 0".split())),
    "paper.json": (report, lambda: report.main("s --paper paper.json --examples 0".split())),
    "own.json": (ev, lambda: ev.main("--items items.jsonl --predictions p.jsonl --paper own.json".split())),
}


@pytest.mark.parametrize("file", TEXT_FILES)
def test_invalid_utf8_and_escapes_in_any_text_file(here, file):
    if file.startswith(("s/", "b.", "c.", "paper")):
        passed(attempt(ev, lambda: ev.main("--items items.jsonl --predictions p.jsonl --bootstrap 100 --out s".split()), here))
    module, main = TEXT_FILES[file]
    name = re.escape(os.path.basename(file))
    for raw in (b'{"id": "q0\xff\xfe", "embedder": "\xff"}\n', b"\xff", "\x1b]0;owned\x07\x9b31m\u202e\n".encode(), b"\x1b[2J\x00\r\n",
                b'{"\\u001b[2J": "\\u001b]0;x\\u0007", "id": "\\u009b31m"}\n', '{"id": "\x9b31m"}\n'.encode(), b"[" * 200_000):
        write(here, file, raw=raw)
        done = attempt(module, main, here)
        if done.status == 0 and b"\xff" not in raw and file in ("exclude.txt", "failed.jsonl", "f.jsonl", "paper.json", "p.meta.json"):
            passed(done)                                # such names may stand there; they reach no terminal
        else:
            refused(done, name)


def test_a_lock_file_that_is_no_text(here):
    write(here, "s/scores.json.lock", raw=b"\xff\xfe host \x1b[2J\x9b31m\n")
    done = passed(attempt(ev, lambda: ev.main("--items items.jsonl --predictions p.jsonl --bootstrap 100 --out s".split()), here))
    assert "was left by" in done.err and "\\x1b[2J" in done.err


# ---- images ----
def png(width, height, chunks=b""):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    extra = b"".join(chunk(kind, data) for kind, data in (chunks or ()))
    return start + extra + chunk(b"IDAT", zlib.compress(b"\0" * min(1000, (3 * width + 1) * height))) + chunk(b"IEND", b"")


ZEROS = zlib.compress(b"\0" * 200_000_000, 9)           # 200 MB in 200 kB
IMAGES = {
    "bomb.png": (png(50_000, 50_000), "decompression bomb|exceeds limit"),
    "wide.png": (png(2_147_483_647, 3), "decompression bomb|exceeds limit"),
    "text.png": (png(1, 1, [(b"zTXt", b"Comment\0\0" + ZEROS)]), "too large|MAX_TEXT"),
    "itext.png": (png(1, 1, [(b"iTXt", b"Comment\0\1\0\0\0" + ZEROS)]), "too large|MAX_TEXT"),
    "profile.png": (png(1, 1, [(b"iCCP", b"p\0\0" + ZEROS)]), None),           # a profile is not needed: read or refused, but not unpacked
    "program.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\n%%EOF\n", "EPS is a program"),
    "program.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\n%%EOF\n", "EPS is a program"),
    "page.png": (b"<svg xmlns='http://www.w3.org/2000/svg'><script>x</script></svg>", "cannot identify"),
    "empty.png": (b"", "cannot identify"),
}


@pytest.fixture
def images(here):
    """The hostile files in here/images; an interpreter named gs that leaves a trace, first in the path."""
    folder = os.path.join(here, "images")
    for name, (data, _) in IMAGES.items():
        write(folder, name, raw=data)
    write(here, "outside.png", raw=png(1, 1))
    os.mkfifo(f"{folder}/pipe.png")
    os.makedirs(f"{folder}/folder.png")
    os.symlink("../outside.png", f"{folder}/link.png")
    os.symlink("..", f"{folder}/up")
    os.symlink("loop.png", f"{folder}/loop.png")
    os.symlink("/dev/zero", f"{folder}/zero.png")
    write(here, "bin/gs", raw=b"#!/bin/sh\ntouch " + here.encode() + b"/ran\n")
    os.chmod(f"{here}/bin/gs", 0o755)
    return folder


OPENED = {name: words for name, (_, words) in IMAGES.items()} | {
    "pipe.png": "not a regular file", "folder.png": "not a regular file", "link.png": "leads out of the images folder",
        "up/outside.png": "leads out",
    "loop.png": "cannot read this image|not found", "zero.png": "leads out", "empty.png/a.png": "cannot read this image|not found",
    "n" * 300 + ".png": "cannot read this image|not found", "gone.png": "not found"}
PLAIN = types.SimpleNamespace(crop_size={"width": 8, "height": 8}, do_center_crop=True)


@pytest.mark.parametrize("name", OPENED, ids=lambda name: name[:20])
def test_hostile_images_are_refused_by_name(here, images, monkeypatch, name):
    from PIL import Image
    Image.init()                                        # loads the plugins once, here, and not in every fork
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    words, shown_name = OPENED[name], re.escape(name[:60])
    write(here, "items.jsonl", item(0, image=name))

    def measured():
        return extract.measure([("q0", name, None)], [""], "images", extract.EMBEDDERS["clip"], None, PLAIN, {}, True) and None
    opened = attempt(prepare, lambda: prepare.open_image("images", name) and None, here)
    if words is None and opened.status == 0:
        passed(opened)
    else:
        refused(opened, shown_name, words or "")
        done = attempt(*READ_ITEMS["prepare check"], here)
        refused(done, "items.jsonl", "missing or unreadable image")
        assert re.search(shown_name, done.err)
        done = attempt(extract, measured, here)         # the header alone is read here; the rest when the batch is made
        if done.status:
            refused(done, "item q0", shown_name)
        pixels, errors = extract.ImageBatches([[name]], images, lambda image: image)[0]
        assert not pixels and re.search(words or "", errors[name]), errors
    if name in IMAGES and words:                        # the same bytes as the rows of a data set
        def kept():
            try:
                prepare.write_image("kept", IMAGES[name][0], decode=True)
            except prepare.BAD_IMAGE as error:
                raise prepare.UserError(f"row 7: {prepare.shown(error)}") from None
        refused(attempt(prepare, kept, here), "row 7")
    assert not os.path.exists(f"{here}/ran"), "a program ran"


# ---- tables ----
FORMULA = "=HYPERLINK(\"http://evil\")"
EVIL = {"embedder": f"+1{ESCAPES}", "mode": "[click](http://evil)", "model": f"m{ESCAPES}"}


def evil_run(here):
    """Predictions in a file of a hostile name, with hostile texts in every field that a table shows."""
    items = [item(0, domain=FORMULA, source=f"@SUM{ESCAPES}", question=f"<b>{ESCAPES}</b>"),
             item(1, domain="a|b`*<img src=x onerror=1>\\", source="-1+1|cmd", question="](http://evil)"),
             item(2, domain="$x_1^2$ % & # ~ {}", source="\\input{/etc/passwd}"), item(3, domain="[a][b] [c](http://evil)", source="\t=1")]
    write(here, "items.jsonl", *items)
    for condition in ("matched", f"=1{ESCAPES}|x"):
        write_predictions(here, f"f/{condition[:1]}={ESCAPES}\n| x <i>", items, [f"<script>x</script>{ESCAPES}", "yes", "=1+1", "\ud800"],
                          condition, **{name: EVIL[name] for name in ("embedder", "mode")}, embeddings={"model": EVIL["model"],
                                  "dim": ESCAPES},
                          command=["x", ESCAPES], versions={ESCAPES: ESCAPES}, device=ESCAPES, seconds=ESCAPES)
    return items


def test_hostile_names_stay_inside_their_cells(here):
    evil_run(here)
    line = ["--items", "items.jsonl", "--predictions", "f/*.jsonl", "--bootstrap", "100"]
    done = passed(attempt(ev, lambda: ev.main([*line, "--out", "s"]), here))
    tables = [[row for row in block.splitlines() if row.startswith("|")] for block in done.out.split("\n\n")]
    assert sum(map(bool, tables)) >= 4
    for table in filter(None, tables):
        cells = [re.split(r"(?<!\\)\|", re.sub(r"\\\\", "", row)) for row in table]
        assert len({len(row) for row in cells}) == 1, table
        for text in (cell for row in cells for cell in row):
            assert not re.search(r"(?<!\\)[<`*]", text) and not re.search(r"(?<!\\)\]\(", text), text
    done = passed(attempt(ev, lambda: ev.main([*line, "--latex"]), here))
    for text in done.out.splitlines():
        if not text.startswith(("%", "\\begin", "\\end", "\\hline")) and text:
            assert text.endswith(r" \\") and not re.search(r"(?<!\\)[$#_^%]", text.replace(r"\textbackslash{}", "").replace("{}", "")), text
            assert "\\input" not in text
    done = passed(attempt(ev, lambda: ev.main([*line, "--csv"]), here))
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert len(rows) == 2 * (1 + 4 + 4) and all(None not in row for row in rows)
    for row in rows:
        for name, text in row.items():
            assert not text.startswith(("=", "+", "-", "@", "\t", "\r")) or re.fullmatch(r"-?[\d.e-]+", text), (name, text)
    assert {row["embedder"] for row in rows} == {"'" + ev.shown(EVIL["embedder"])} and any(row["name"] == "'" + FORMULA for row in rows)
    error = attempt(ev, lambda: ev.main(["--items", "items.jsonl", "--predictions", f"f/{ESCAPES}*.jsonl"]), here)
    refused(error, "expected a file F.jsonl")
    for path in glob.glob(f"{here}/f/=*.jsonl"):         # a fault in a file of a hostile name
        write(here, os.path.relpath(path, here), raw=b"{}\n")
    refused(attempt(ev, lambda: ev.main(line), here), "SHA-256|'id'")


def test_the_page_shows_hostile_names_as_text(here):
    evil_run(here)
    line = ["--items", "items.jsonl", "--predictions", "f/*.jsonl", "--bootstrap", "100", "--out", "s"]
    passed(attempt(ev, lambda: ev.main(line), here))
    scores = json.load(open(f"{here}/s/scores.json"))
    scores = {name: value for name, value in scores.items() if name not in ("json_sha256", "scores_sha256")}
    scores["notes"].append(f"<img src=x onerror=1>{ESCAPES}")
    write(here, "s/scores.json", scores)
    write(here, "b.csv", raw=f"embedder,mode,score\n{FORMULA},,5\n".encode())
    done = passed(attempt(report, lambda: report.main("s --items items.jsonl --benchmark b.csv".split()) and None, here))
    assert "note: <img src=x onerror=1>\\x1b" in done.err
    for name in ("report.md", "report.html"):
        with open(f"{here}/s/{name}", encoding="utf-8") as file:
            text = file.read()
        assert not CONTROL.search(text), (name, repr(text[max(0, CONTROL.search(text).start() - 80):][:160]))
        assert not re.search(r"(?<!\\)<(img src=x|script>x|i>)", text)
    markdown = open(f"{here}/s/report.md", encoding="utf-8").read()
    assert not re.search(r"(?<!\\)\[[^\]]*(?<!\\)\]\(http", markdown)


def test_controls_tables_are_harmless(here):
    group = {"n": 1, "score": 1.0, "interval": [0.0, 2.0], "difference": 1.0}
    row = {"condition": f"zero{ESCAPES}", "overall": group, "by_domain": {f"a|b<img>[x](http://evil){ESCAPES}": group}, "difference": None,
           "usable_bits": None, "verdict": "`x`*y*"}
    result = {"rows": [row], "spread": None, "leak_check": {f"c|{ESCAPES}": {f"s|<b>{ESCAPES}": group}}}
    done = passed(attempt(controls, lambda: controls.print_table(result), here))
    for table in (block for block in done.out.split("\n\n") if block.startswith("|")):
        assert len({len(re.split(r"(?<!\\)\|", re.sub(r"\\\\", "", line))) for line in table.strip().splitlines()}) == 1
        assert not re.search(r"(?<!\\)[<`*]", table) and not re.search(r"(?<!\\)\]\(", table)


# ---- models: no code of a folder runs ----
@pytest.fixture(scope="module")
def libraries():
    """torch and transformers, loaded once for this file; extract.py and train_decoder.py as their commands leave them."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    td.load_libraries()
    td.torch.set_num_threads(1)
    return extract.load_libraries()


@pytest.fixture(scope="module")
def toy(tmp_path_factory, libraries):
    """A tiny decoder, items with vectors, and a readout fitted for one step."""
    tests = load("tests/test_train_decoder.py")
    folder = tmp_path_factory.mktemp("toy")
    tests.make_decoder(folder / "decoder")
    for seed, (name, count) in enumerate((("train", 24), ("dev", 8), ("test", 8))):
        tests.make_split(folder, name, count, seed=seed)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        td.main(toy_fit(folder, folder / "decoder", folder / "readout"))
    return str(folder)


def toy_fit(toy, decoder, out, *more):
    return ["fit", "--train-items", f"{toy}/train.jsonl", "--train-embeddings", f"{toy}/train", "--dev-items", f"{toy}/dev.jsonl",
            "--dev-embeddings",
            f"{toy}/dev", "--decoder", str(decoder), "--out", str(out), "--max-steps", "1", "--batch-size", "8", *map(str, more)]


def pickled(folder, ran):
    """Replace the weights by a checkpoint that runs a command when it is unpickled, in the two layouts that torch has."""
    import torch
    for name in glob.glob(f"{folder}/*.safetensors"):
        if "projector" not in name:
            os.remove(name)
    torch.save({"model.embed_tokens.weight": Payload(ran)}, f"{folder}/pytorch_model.bin")
    write(folder, "model.pkl", raw=base64.b64encode(b"x"))


def remote(folder, ran, kind):
    """Make a folder want code of its own: a model type that nobody knows (`own`), or code beside a known one (`beside`)."""
    with open(f"{folder}/config.json") as file:
        config = json.load(file)
    config["auto_map"] = {name: "evil.X" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText")}
    write(folder, "config.json", config | ({"model_type": "evil", "architectures": ["X"]} if kind == "own" else {}))
    path = f"{folder}/tokenizer_config.json"
    tokenizer = json.load(open(path)) if os.path.exists(path) else {}
    write(folder, "tokenizer_config.json", tokenizer | {"auto_map": {"AutoTokenizer": ["evil.X", "evil.X"], "AutoProcessor": "evil.X"}} | (
        {"tokenizer_class": "X"} if kind == "own" else {}))
    for name in ("preprocessor_config.json", "processor_config.json"):
        old = json.load(open(f"{folder}/{name}")) if os.path.exists(f"{folder}/{name}") else {}
        write(folder, name, old | {"auto_map": {"AutoImageProcessor": "evil.X", "AutoProcessor": "evil.X"}})
    write(folder, "evil.py", raw=f"open({ran!r}, 'w').close()\nX = None\n".encode())


def answers_from_images(folder, model):
    args = controls.parse_args(["run", "--readout", "r", "--items", "items.jsonl", "--embeddings", "t", "--out", "o", "--controls",
            "raw_image", "--images",
                                "images", "--reference-model", str(model), "--device", "cpu", "--max-new-tokens", "2"])
    controls.load_reference(args)


@pytest.mark.parametrize("kind", ["pickle", "own", "beside"])
@pytest.mark.parametrize("step", ["fit", "predict", "raw_image"])
def test_no_code_of_a_model_folder_runs(here, toy, monkeypatch, step, kind):
    """extract.py's own tests are in test_extract.py. A question on the terminal whether to run the code would be a way to run it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    ran, model = f"{here}/ran", f"{here}/model"
    change = (lambda: pickled(model, ran)) if kind == "pickle" else lambda: remote(model, ran, kind)
    if step == "predict":
        shutil.copytree(f"{toy}/readout", model, ignore=shutil.ignore_patterns("resume", "last"))
        change()
        shutil.move(model, f"{model}.source")
        write_readout(here, "model", f"{model}.source")
        words = ["predict", "--readout", model, "--items", f"{toy}/test.jsonl", "--embeddings", f"{toy}/test", "--out", f"{here}/o.jsonl"]
        done = attempt(td, lambda: td.main(words), here, megabytes=4000, seconds=60)
    elif step == "fit":
        shutil.copytree(f"{toy}/decoder", model)
        change()
        done = attempt(td, lambda: td.main(toy_fit(toy, model, f"{here}/o")), here, megabytes=4000, seconds=60)
    else:
        shutil.copytree(f"{ROOT}/data/demo/qwen3-vl-embedding", model)
        change()
        done = attempt(controls, lambda: answers_from_images(here, model), here, megabytes=4000, seconds=60)
    assert not os.path.exists(ran), "code of the model folder ran"
    if kind == "beside":                                # a known model type: transformers' own class is used, the code left alone
        passed(done)
    else:
        refused(done, "model")
        assert not os.path.exists(f"{here}/o.jsonl") and not os.path.exists(f"{here}/o/readout.json")


def test_a_readout_that_does_not_fit_itself(here, toy):
    """Right hashes, but a projector of another shape, kind or number of tokens, or steps that are not there."""
    for change in ({"tokens": 10_000}, {"projector": {"kind": "mlp", "dim": 10 ** 6}}, {"projector": {"kind": "linear", "dim": 12}},
            {"projector": {}},
                   {"steps": ["standardize"], "projector": {"kind": "other"}}):
        name = f"m{len(glob.glob(f'{here}/m*'))}"
        write_readout(here, name, f"{toy}/readout", **change)
        words = ["predict", "--readout", name, "--items", f"{toy}/test.jsonl", "--embeddings", f"{toy}/test", "--out", "o.jsonl"]
        refused(attempt(td, lambda: td.main(words), here, megabytes=4000, seconds=60), f"{name}|test.jsonl: 8 prompts do not fit")


def test_long_questions_are_named_before_training(here, toy):
    with open(f"{toy}/train.jsonl") as file:
        lines = file.readlines()
    long = json.loads(lines[3]) | {"question": LONG}
    write(here, "train.jsonl", raw="".join([*lines[:3], json.dumps(long) + "\n", *lines[4:]]).encode())
    done = attempt(td, lambda: td.main(toy_fit(toy, f"{toy}/decoder", "o", "--train-items", f"{here}/train.jsonl")), here, megabytes=4000,
            seconds=60)
    refused(done, "train.jsonl", "train-3", "--max-length")
    words = ["predict", "--readout", f"{toy}/readout", "--items", "train.jsonl", "--embeddings", f"{toy}/train", "--out", "o.jsonl"]
    refused(attempt(td, lambda: td.main(words), here, megabytes=4000, seconds=60), "train.jsonl", "train-3", "do not fit")


# ---- versions ----
def note_of(err):
    return [line for line in err.splitlines() if " is untested here" in line]


def test_an_untested_version_is_one_line_and_no_error(here, libraries, monkeypatch, capsys):
    import platform
    import torch
    import transformers
    steps = {"extract": extract.load_libraries, "train_decoder": td.load_libraries,
             "evaluate": lambda: ev.main(f"--items {here}/items.jsonl --predictions {here}/p.jsonl --bootstrap 100".split()),
             "controls raw_image": lambda: answers_from_images(here, f"{ROOT}/data/demo/qwen3-vl-embedding")}
    for name, step in steps.items():
        step()
        assert not note_of(capsys.readouterr().err), f"{name}: a note on the tested versions"
    for module, attribute, version, said, who in (
            (platform, "python_version", lambda: "3.99.1", "python 3.99.1", steps), (platform, "python_version", lambda: "4.0.0",
                "python 4.0.0", steps),
            (torch, "__version__", "9.1.0+cpu", "torch 9.1.0", ("extract", "train_decoder", "controls raw_image")),
            (transformers, "__version__", "77.0.0", "transformers 77.0.0", ("extract", "train_decoder", "controls raw_image")),
            (np, "__version__", "9.0.0", "numpy 9.0.0", ("train_decoder", "evaluate"))):
        for name in who:
            with monkeypatch.context() as patch:
                patch.setattr(sys.modules[module.__name__], attribute, version)     # transformers replaces its own module once
                steps[name]()
            notes = note_of(capsys.readouterr().err)
            assert len(notes) == 1 and re.search(f"note: .*{said}.*untested.*tested: ", notes[0], re.I), (name, notes)
            TRIED["version notes"] += 1


# ---- a million items ----
MILLION = 1_000_000


@pytest.fixture(scope="module")
def million(tmp_path_factory):
    """1,000,000 items with vectors of 64 numbers and predictions, and 256 for development."""
    folder = str(tmp_path_factory.mktemp("million"))
    colours = ["red", "green", "blue", "a dark purple"]
    for name, count in (("train", MILLION), ("dev", 256)):
        with open(f"{folder}/{name}.jsonl", "w") as items, open(f"{folder}/{name}.ids.txt", "w") as ids:
            for i in range(count):
                answer = colours[i * 7 % 4]
                items.write(f'{{"id": "{name}-{i:07d}", "image": "{name}/{i:07d}.png", '
                            f'"question": "What colour is object {i % 50021} in the picture?", '
                            f'"answers": ["{answer}"], "source": "own", "domain": "natural_image", "metric": "exact"}}\n')
                ids.write(f"{name}-{i:07d}\n")
        array = np.lib.format.open_memmap(f"{folder}/{name}.npy", "w+", np.float32, (count, 64))
        for start in range(0, count, 65536):
            array[start:start + 65536] = np.random.default_rng(start).standard_normal((min(65536, count - start), 64), np.float32)
        array.flush()
        del array
        write(folder, f"{name}.meta.json", {"embedder": "e", "mode": "visual_only", "key": "id", "dim": 64, "normalized": False,
                "dtype": "float32"})
    with open(f"{folder}/p.jsonl", "w") as file:
        for i in range(MILLION):
            file.write(f'{{"id": "train-{i:07d}", "prediction": "{colours[i * 5 % 4]}", "condition": "matched", '
                       f'"answer_bits": {1 + i % 9 / 8}, "answer_tokens": 2}}\n')
    write(folder, "p.meta.json", {"embedder": "e", "mode": "visual_only", "condition": "matched",
            "items_sha256": ev.sha256(f"{folder}/train.jsonl")})
    yield folder
    shutil.rmtree(folder)


def measured(folder, *words):
    """Run a script as its users do; returns (kB resident at the peak, seconds of processor time, standard output)."""
    code = ("import json, resource, subprocess, sys\n"
            "done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE)\n"
            "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
            "print(done.stdout.decode() + json.dumps([done.returncode, used.ru_maxrss, used.ru_utime + used.ru_stime]))\n")
    environment = os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, "-c", code, sys.executable, os.path.join(ROOT, words[0]), *map(str, words[1:])], cwd=folder,
                          capture_output=True, text=True, env=environment)
    status, kilobytes, seconds = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr[-3000:]
    print(f"\n{words[0]} {words[1]}: {kilobytes:,} kB, {seconds:.1f} s of processor time")
    return kilobytes, seconds, done.stdout


def bounded(kilobytes, seconds):
    assert kilobytes < 2_000_000 and seconds < 120, (kilobytes, seconds)


@pytest.mark.hard
def test_evaluate_takes_a_million_predictions(million):
    kilobytes, seconds, _ = measured(million, "evaluate.py", "--items", "train.jsonl", "--predictions", "p.jsonl", "--out", "scores")
    bounded(kilobytes, seconds)
    row, = ev.read_json(f"{million}/scores/scores.json")["rows"]
    assert row["overall"]["n"] == MILLION and row["overall"]["score"] == 50.0     # i * 5 and i * 7 agree modulo 4 for every second i


@pytest.mark.hard
def test_fit_and_predict_start_on_a_million_items(million):
    fit = ["fit", "--train-items", "train.jsonl", "--train-embeddings", "train", "--dev-items", "dev.jsonl", "--dev-embeddings", "dev",
           "--decoder", f"{ROOT}/data/demo/decoder", "--out", "readout", "--max-steps", 1, "--batch-size", 64]
    kilobytes, seconds, _ = measured(million, "train_decoder.py", *fit)
    bounded(kilobytes, seconds)
    record = td.read_json(f"{million}/readout/readout.json")
    assert record["counts"]["train"]["used"] == MILLION and record["summary"]["steps"] == 1
    predict = ["predict", "--readout", "readout", "--items", "train.jsonl", "--embeddings", "train", "--out", "o.jsonl", "--limit", 64,
               "--max-new-tokens", 4]
    kilobytes, seconds, _ = measured(million, "train_decoder.py", *predict)
    bounded(kilobytes, seconds)
    assert sum(1 for _ in open(f"{million}/o.jsonl")) == 64


@pytest.mark.hard
def test_memory_does_not_grow_with_the_vectors(million):
    """The map itself stays on the disk: with vectors eight times as wide, reading and checking a million of them takes no more memory."""
    peaks = []
    for width in (8, 64):
        prefix = f"{million}/train" if width == 64 else f"{million}/narrow"
        if width != 64:
            array = np.lib.format.open_memmap(f"{prefix}.npy", "w+", np.float32, (MILLION, width))
            source = np.load(f"{million}/train.npy", mmap_mode="r")
            for start in range(0, MILLION, 65536):
                array[start:start + 65536] = source[start:start + 65536, :width]
            array.flush()
            shutil.copy(f"{million}/train.ids.txt", f"{prefix}.ids.txt")
            write(million, "narrow.meta.json", td.read_json(f"{million}/train.meta.json") | {"dim": width})
        code = ("import importlib.util, resource, sys\nspec = importlib.util.spec_from_file_location('m', sys.argv[1])\n"
                "m = importlib.util.module_from_spec(spec)\nsys.modules['m'] = m\nspec.loader.exec_module(m)\n"
                "_, keys, _ = m.read_embeddings(sys.argv[2])\nfor x in m.vector_pieces(sys.argv[2], m.np.arange(len(keys)), []): pass\n"
                "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n")
        done = subprocess.run([sys.executable, "-c", code, f"{ROOT}/train_decoder.py", prefix], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    print(f"\nreading 1,000,000 vectors of 8 and of 64 numbers: {peaks[0]:,} and {peaks[1]:,} kB")
    assert peaks[1] - peaks[0] < 60_000, peaks           # the arrays differ by 224,000 kB; the pieces in hand by up to 32,000
