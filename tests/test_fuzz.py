"""Fuzz tests: any bytes in any file that a script reads give a value or the named error; scores lie in [0, 1], and a gold answer scores 1.

    python -m pytest tests/test_fuzz.py -s          # -s shows how many inputs were tried, read and refused
    FUZZ=20 python -m pytest tests/test_fuzz.py     # twenty times as many inputs; those marked `hard` try more on their own

Inputs are derived from the tests' names (derandomize), so a failure comes back on every machine. No torch, no network.
"""
import collections
import contextlib
import copy
import importlib.util
import io
import json
import math
import os
import re
import shutil
import sys
import tarfile
import types

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")      # on damaged pictures, which are the point here
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCALE = int(os.environ.get("FUZZ", 1))
TRIED = collections.Counter()


def load(path):
    """A script as a module, by its path: some names are also those of packages."""
    name = "fuzzed_" + os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, os.path.join(ROOT, path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


ev, td, controls, extract, prepare, report = map(load, ("evaluate.py", "train_decoder.py", "controls.py", "extract.py", "data/prepare.py",
                                                        "results/report.py"))
ERRORS = tuple(module.UserError for module in (ev, td, controls, extract, prepare, report))


@pytest.fixture(scope="module", autouse=True)
def numbers():
    """What was tried, for the closing note."""
    yield
    print(f"\nfuzz: {dict(TRIED)}")


def search(count, strategy, check):
    """Call `check` on `count` inputs of a strategy."""
    @settings(max_examples=count * SCALE, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def searched(value):
        TRIED["inputs"] += 1
        check(value)
    searched()


# ---- damage ----
JUNK = [None, True, False, 0, -1, 1, 1.5, 1e308, -1e-320, 10 ** 30, 10 ** 290, "", "x", " x ", "\ud800", "\x1b[31m", "a\nb", "nan", "../x",
        "/x",
        [], {}, [[]], [None], [0, 1], ["x"], {"a": 1}, {"": []}, [3, 2, 1], "=1+1", "x" * 300]
RAW = [b"NaN", b"-Infinity", b"1e999", b"[" * 5000, b"9" * 5000, b'{"a": 1, "a": 2}', b'"\\ud800"', b"\xff", b"\x00", b"\xef\xbb\xbf",
        b"\r", b"\n"]


def places(value, path=()):
    """The paths of all values inside a JSON value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, part in parts for inner in places(part, (*path, key)))]


def replaced(value, path, new):
    """A JSON value with another one at a path; `...` takes it out."""
    if not path:
        return None if new is ... else new
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return value


@st.composite
def damaged(draw, valid, kind=""):
    """Bytes near a valid file: flips, cuts, insertions, lines swapped, doubled or dropped, and for JSON a value of another type."""
    lines = valid.splitlines(keepends=True) or [b""]
    ways = ["bytes", "flip", "cut", "insert", "swap", "double", "drop"] + ["value"] * 6 * (kind in ("json", "jsonl"))
    way, place = draw(st.sampled_from(ways)), draw(st.integers(0, 1 << 30))
    here = place % (len(valid) + 1)
    if way == "bytes":
        return draw(st.binary(max_size=300))
    if way == "flip":
        data = bytearray(valid)
        for spot in draw(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=4)):
            data[spot % len(data)] ^= 1 << draw(st.integers(0, 7))
        return bytes(data)
    if way == "cut":
        return valid[:here]
    if way == "insert":
        return valid[:here] + draw(st.sampled_from(RAW) | st.binary(min_size=1, max_size=8)) + valid[here:]
    i, j = place % len(lines), draw(st.integers(0, 1 << 30)) % len(lines)
    if way == "swap":
        lines[i], lines[j] = lines[j], lines[i]
    elif way == "double":
        lines.insert(j, lines[i])
    elif way == "drop":
        del lines[i]
    else:
        whole = json.loads(valid if kind == "json" else lines[i])
        spots = places(whole)
        new = draw(st.sampled_from([*JUNK, ..., *["RAW"] * 6]))
        mark = "\ufffdHERE"                             # stands for text that json.dumps would not write
        text = json.dumps(replaced(whole, spots[draw(st.integers(0, 1 << 30)) % len(spots)], mark if new == "RAW" else new)).encode()
        text = text.replace(json.dumps(mark).encode(), draw(st.sampled_from(RAW)) if new == "RAW" else b"")
        return text if kind == "json" else b"".join([*lines[:i], text + b"\n", *lines[i + 1:]])
    return b"".join(lines)


def attack(folder, name, kind, read, count, says=None, prepare_bytes=lambda data: data):
    """Damage the file `name` in `folder` and read it: a value, or a UserError that holds its name. Returns (read, refused)."""
    path = os.path.join(folder, name)
    with open(path, "rb") as file:
        valid = file.read()
    read()                                              # the file as it is must be read, else nothing is tested
    found = collections.Counter()

    def check(data):
        with open(path, "wb") as file:
            file.write(prepare_bytes(data))
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                read()
            found["read"] += 1
        except ERRORS as error:
            found["refused"] += 1
            assert (says or os.path.basename(name)) in str(error), str(error)
            assert len(str(error)) < 3000, str(error)[:3000]
    try:
        search(count, damaged(valid, kind), check)
    finally:
        with open(path, "wb") as file:
            file.write(valid)
    TRIED.update(found)
    assert found["refused"], "no damage was refused: does the reader look at the file at all?"
    return found


# ---- valid files ----
def item(i, **more):
    return {"id": f"q{i}", "image": f"i{i // 2}.png", "question": "What is it?\nA. x\nB. y", "answers": ["B", "y"], "source": "own",
            "domain": ("natural_image", "scene_text")[i % 2], "metric": "choice", "options": ["x", "y"], "seen": i % 3 == 0, **more}


def write(folder, name, *values, raw=None):
    """Write JSON lines (or one JSON value to a name that ends in .json, or raw bytes) and return the path."""
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(raw if raw is not None else b"".join(json.dumps(value).encode() + b"\n" for value in values))
    return path


def write_trio(folder, name, keys, **more):
    array = np.random.default_rng(0).standard_normal((len(keys), 4)).astype(np.float32)
    np.save(os.path.join(folder, f"{name}.npy"), array)
    write(folder, f"{name}.ids.txt", raw="".join(f"{key}\n" for key in keys).encode())
    write(folder, f"{name}.meta.json", {"embedder": "e", "mode": "visual_only", "key": "id", "dim": 4, "normalized": True,
            "dtype": "float32"} | more)


def write_run(folder):
    """Items, four prediction files with sidecars and their scores, controls.json, curve.json: what results/report.py reads."""
    items = [item(i) for i in range(8)]
    path = write(folder, "items.jsonl", *items)
    for mode, condition in (("vl_joint", "matched"), ("visual_only", "matched"), ("vl_joint", "zero"), (None, "text_only")):
        name = f"p/{mode}/{condition}"
        lines = [{"id": one["id"], "prediction": "AB"[(i + len(name)) % 2], "condition": condition, "answer_bits": 1.5, "answer_tokens": 2}
                 for i, one in enumerate(items)]
        write(folder, f"{name}.jsonl", *lines)
        write(folder, f"{name}.meta.json", {
            "embedder": mode and "e", "mode": mode, "condition": condition, "items_sha256": ev.sha256(path), "limit": None,
            "readout_sha256": "ab", "command": ["train_decoder.py", "predict", "--readout", "r"], "versions": {"torch": "2"},
                "seconds": 1.0,
            "embeddings": {"model": "m", "weights_sha256": "cd", "dim": 4, "run": {"argv": ["extract.py"]}}})
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ev.main(["--items", "items.jsonl", "--predictions", "p/**/*.jsonl", "--out", "scores", "--bootstrap", "100"])
    scores = json.load(open(os.path.join(folder, "scores/scores.json")))
    for hashes in ("json_sha256", "scores_sha256"):     # damage must reach the checks behind the hashes
        scores.pop(hashes, None)
    write(folder, "scores/scores.json", scores)
    leak = {"s": {"n": 3, "difference": 1.0, "interval": [0.5, 1.5]}}
    write(folder, "p/vl_joint/controls.json", {"embedder": "e", "mode": "visual_only", "leak_check": {"a": leak, "b": leak},
        "inputs": {"items": ev.sha256(path), "limit": None}, "spread": {
        "repeats": 2, "mean": 1.0, "sd": 0.5, "low": 0.5, "high": 1.5, "separated": 1}})
    write(folder, "scores/curve.json", {"embedder": "e", "mode": "vl_joint", "points": [
        {"budget": name, "family": family, "bytes": size, "score": 10.0 + size, "score_interval": [9.0, 20.0], "bits": 0.5,
         "bits_interval": None, "difference": {"n": 8, "difference": 1.0, "interval": None} if size else None, "verdict": "separated"}
        for name, family, size in (("text_only", "text_only", 0), ("int8", "int8", 4), ("none", "full", 16))]})
    write(folder, "paper.json", {"source": "s", "rows": [{"embedder": "e", "mode": "vl_joint", "condition": "matched", "n": 8,
            "score": 50.0,
                                                          "natural_image": None, "source": "s", "note": None}]})
    write(folder, "other.csv", raw=b"# a comment\nembedder,mode,score\ne,vl_joint,50\nf,,40.5\n")


def page(folder):
    """results/report.py from files to page, in this process."""
    with contextlib.chdir(folder):
        report.main(["scores", "--items", "items.jsonl", "--paper", "paper.json", "--benchmark", "other.csv", "--out", "page"])


def readout_json(folder):
    """readout.json of a folder whose other files are there, with its content hash: who edits it can compute that too."""
    record = {"format_version": 1, "embedder": "e", "mode": "visual_only", "dim": 4, "normalized": True, "tokens": 1, "steps": [],
              "projector": {"kind": "mlp", "dim": 4}, "signature": {"seed": 0}, "template": {"before": "a", "end": "b"},
              "files": {"config.json": td.sha256(write(folder, "r/config.json", {"model_type": "qwen3"}))}}
    write(folder, "r/readout.json", {"content_sha256": td.content_hash(record)} | record)


def hashed(data):
    """A damaged readout.json with the hash of its new content, where it is still an object."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(data)
        if isinstance(record, dict):
            return json.dumps(record | {"content_sha256": td.content_hash(record)}).encode()
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder with a valid file of every kind."""
    here = str(tmp_path_factory.mktemp("fuzz"))
    write_run(here)
    items = [item(i) for i in range(8)]
    write_trio(here, "t", [one["id"] for one in items], condition="zero")
    write(here, "t.source_keys.txt", raw=b"".join(b"k%d\n" % i for i in range(8)))
    write(here, "failed.jsonl", {"item": 1, "id": "q0", "image": "i0.png", "error": "torn"}, {"item": 2, "id": "q1", "image": "i0.png",
            "error": "x"})
    write(here, "exclude.txt", raw=b"q0\nq1\n")
    readout_json(here)
    rows = [{"source": "MME", "source_id": f"{i}", "split": "dev"} for i in range(3)]
    write(here, "list.jsonl", *rows)
    write(here, "list.csv", raw=b"source,source_id,split\nMME,1,dev\nTextVQA,2,test\n")
    write(here, "list.tsv", raw=b"source\tsource_id\tsplit\nMME\t1\tdev\nTextVQA\t2\ttest\n")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "x"}]
    write(here, "raw.json", [{"id": f"{i}", "image": f"coco/{i}.jpg", "conversations": turns} for i in range(3)])
    write(here, "out/manifest.json", {"options": {"seed": 0}, "sha256": {}})
    write(here, "o.partial.jsonl", {"seed": 1}, [0, {}, 5], [1, {"3": "torn"}, 7])
    write(here, "o.jsonl.partial", {"signature": {"seed": 0}}, {"id": "q0", "prediction": "a", "answer_bits": 1.0},
          {"id": "q1", "prediction": "b", "answer_bits": 1.0})
    write(here, "c/zero.jsonl", {"id": "q0"})
    write(here, "c/zero.meta.json", {})
    write(here, "c/zero.inputs.json", {"inputs": {"a": 1}, "commands": ["x"], "bytes": 4,
            "predictions_sha256": ev.sha256(f"{here}/c/zero.jsonl")})
    write(here, "resume/x", raw=b"")
    for name, save in IMAGES.items():
        save(os.path.join(here, name))
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        tar.add(os.path.join(here, "a.png"), "coco/a.png")
    write(here, "a.tar.gz", raw=data.getvalue())
    return here


def picture(mode="RGB"):
    values = np.random.default_rng(0).integers(0, 256, (9, 13, 4), dtype=np.uint8)
    return Image.fromarray(values, "RGBA").convert(mode)


def turned(path):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture().save(path, "JPEG", exif=exif)


IMAGES = {"a.png": lambda path: picture("RGBA").save(path), "a.jpg": turned, "a.gif": lambda path: picture("P").save(path),
          "a.webp": lambda path: picture("RGBA").save(path), "a.tif": lambda path: picture().save(path, compression="tiff_lzw"),
          "a.bmp": lambda path: picture().save(path), "deep.png": lambda path: Image.fromarray(np.arange(99, dtype=np.uint16).reshape(9,
              11)).save(path)}


def predictions(folder):
    items = [item(i) for i in range(8)]
    path = os.path.join(folder, "p/vl_joint/zero.jsonl")
    row = ev.read_predictions(path, items, {one["id"]: i for i, one in enumerate(items)}, ev.sha256(os.path.join(folder, "items.jsonl")),
            False, [])
    known = row.score[~np.isnan(row.score)]
    assert ((0 <= known) & (known <= 1)).all() and np.isfinite(row.bits[~np.isnan(row.bits)]).all()


def checked_items(folder):
    for number, one in enumerate(ev.read_items(f"{folder}/items.jsonl"), 1):
        ev.check_item(one, f"items.jsonl line {number}")


def journal(folder):
    """extract.py's resume state: notes that do not fit are done again, a damaged first line is refused."""
    settings_, rows = {"seed": 1}, {0: [0, 1], 1: [2, 3]}
    content = open(f"{folder}/o.partial.jsonl", "rb").read()
    try:
        extract.open_state(f"{folder}/o", settings_, (4, 3), rows, False)
    finally:
        write(folder, "o.partial.jsonl", raw=content)
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{folder}/o.partial.npy")


def partial(folder):
    content = open(f"{folder}/o.jsonl.partial", "rb").read()
    try:
        td.open_partial({"out": f"{folder}/o.jsonl", "signature": {"seed": 0}}, False)
    finally:
        write(folder, "o.jsonl.partial", raw=content)


def lock(folder):
    """What an earlier holder left in a lock file is shown and taken over, whatever it is."""
    content = open(f"{folder}/resume/x", "rb").read()
    shutil.copy(f"{folder}/resume/x", f"{folder}/held.lock")
    with ev.locked(f"{folder}/held"):
        pass
    if content == b"refuse me":
        raise ev.UserError("x")


def raw_json(folder):
    args = types.SimpleNamespace(seed=0, turns="one", limit=None, rows_check=False)
    with contextlib.redirect_stderr(io.StringIO()):
        prepare.scan_raw({"rows": 3}, f"{folder}/raw.json", args, folder + "/resume")


def membership(folder, name):
    args = types.SimpleNamespace(official_source_column="source", official_id_column="source_id", official_split_column="split")
    prepare.read_membership([f"{folder}/{name}"], args)


def visual_only(folder):
    args = types.SimpleNamespace(visual_only_run=f"{folder}/p/vl_joint", items=f"{folder}/items.jsonl", limit=None)
    controls.print_table({"rows": [TABLE_ROW], "spread": None, "leak_check": controls.read_visual_only(args, {"embedder": "e"})})


def made_from(folder):
    """controls.py makes a condition again whose note of its inputs is damaged."""
    if not controls.finished(types.SimpleNamespace(out=f"{folder}/c", commands=[], command="curve"), "zero", {"a": 1}):
        raise controls.UserError("zero.inputs.json: made again")


TABLE_ROW = {"condition": "matched", "overall": {"n": 1, "score": 1.0, "interval": None}, "by_domain": {}, "difference": None,
        "usable_bits": None,
             "verdict": "x"}
CURVES = types.SimpleNamespace(root=".", curve=None, run_dirs=[])
READERS = {  # name: (file that is damaged, what it is made of, reader, words that the error holds where they are not the file's name)
    "read_json": ("t.meta.json", "json", lambda f: ev.read_json(f"{f}/t.meta.json")),
    "read_jsonl": ("failed.jsonl", "jsonl", lambda f: list(ev.read_jsonl(f"{f}/failed.jsonl"))),
    "read_items": ("items.jsonl", "jsonl", lambda f: ev.read_items(f"{f}/items.jsonl")),
    "evaluate items": ("items.jsonl", "jsonl", checked_items),
    "evaluate predictions": ("p/vl_joint/zero.jsonl", "jsonl", predictions),
    "evaluate sidecar": ("p/vl_joint/zero.meta.json", "json", predictions, "p/vl_joint/zero."),
    "evaluate paper": ("paper.json", "json", lambda f: ev.build_tables({"rows": [], "pairs": [], "groups": {"domain": {}, "source": {},
        "seen": {}}},
                                                                       ev.read_paper(f"{f}/paper.json"))),
    "embeddings array": ("t.npy", "", lambda f: controls.read_embeddings(f"{f}/t")),
    "embeddings ids": ("t.ids.txt", "", lambda f: controls.read_embeddings(f"{f}/t")),
    "embeddings sidecar": ("t.meta.json", "json", lambda f: controls.read_embeddings(f"{f}/t"), "/t."),
    "train_decoder join": ("t.meta.json", "json", lambda f: td.join_embeddings(td.read_items(f"{f}/items.jsonl"), f"{f}/items.jsonl",
        f"{f}/t"), "/t."),
    "train_decoder failed": ("failed.jsonl", "jsonl", lambda f: td.read_failed(f"{f}/failed.jsonl")),
    "train_decoder exclude-ids": ("exclude.txt", "", lambda f: td.read_excluded(f"{f}/exclude.txt")),
    "train_decoder source keys": ("t.source_keys.txt", "", lambda f: td.read_sources(f"{f}/t", list("abcdefgh"), {})),
    "train_decoder readout": ("r/readout.json", "json", lambda f: td.check_readout(f"{f}/r"), "/r/"),
    "train_decoder partial": ("o.jsonl.partial", "jsonl", partial),
    "controls failed": ("failed.jsonl", "jsonl", lambda f: controls.read_failed(f"{f}/failed.jsonl")),
    "controls inputs": ("c/zero.inputs.json", "json", made_from),
    "controls visual-only run": ("p/vl_joint/controls.json", "json", visual_only),
    "extract failed": ("failed.jsonl", "jsonl", lambda f: extract.read_failed(f"{f}/failed.jsonl")),
    "extract journal": ("o.partial.jsonl", "jsonl", journal),
    "prepare list jsonl": ("list.jsonl", "jsonl", lambda f: membership(f, "list.jsonl")),
    "prepare list csv": ("list.csv", "", lambda f: membership(f, "list.csv")),
    "prepare list tsv": ("list.tsv", "", lambda f: membership(f, "list.tsv")),
    "prepare check": ("items.jsonl", "jsonl", lambda f: prepare.read_for_check(f"{f}/items.jsonl")),
    "prepare conversations": ("raw.json", "json", raw_json),
    "prepare manifest": ("out/manifest.json", "json", lambda f: prepare.finished(f"{f}/out", {"seed": 0}, (), False)),
    "prepare archive": ("a.tar.gz", "", lambda f: list(prepare.unpack(f"{f}/a.tar.gz", {"coco/a.png"}, f"{f}/resume"))),
    "report scores": ("scores/scores.json", "json", lambda f: report.read_scores(f"{f}/scores"), "/scores/scores.json"),
    "report score lines": ("scores/scores.jsonl", "jsonl", lambda f: report.read_scores(f"{f}/scores")),
    "report benchmark": ("other.csv", "", lambda f: report.read_benchmark(f"{f}/other.csv")),
}
MODEST, MANY = 20, 400


def run_reader(folder, name, count):
    file, kind, read, *says = READERS[name]
    return attack(folder, file, kind, lambda: read(folder), count, *says, prepare_bytes=hashed if "readout" in name else lambda data: data)


@pytest.mark.parametrize("name", READERS)
def test_any_file_gives_a_value_or_the_named_error(folder, name):
    run_reader(folder, name, MODEST)


@pytest.mark.hard
@pytest.mark.parametrize("name", READERS)
def test_many_more_damaged_files(folder, name):
    run_reader(folder, name, MANY)


def any_image(folder, name, count):
    return attack(folder, name, "", lambda: prepare.open_image(folder, name), count)


@pytest.mark.parametrize("name", IMAGES)
def test_any_image_is_opened_or_refused_by_name(folder, name):
    any_image(folder, name, MODEST)


@pytest.mark.hard
@pytest.mark.parametrize("name", IMAGES)
def test_many_more_damaged_images(folder, name):
    any_image(folder, name, MANY)


# ---- the page from damaged files: every figure that passes the checks can be printed ----
PAGE = {"scores/scores.json": "json", "scores/scores.jsonl": "jsonl", "scores/curve.json": "json", "p/vl_joint/controls.json": "json",
        "p/vl_joint/matched.jsonl": "jsonl", "p/vl_joint/matched.meta.json": "json", "paper.json": "json", "other.csv": ""}


def any_page(folder, name, count):
    says = {"scores/scores.json": "score", "scores/scores.jsonl": "score", "p/vl_joint/matched.meta.json": "p/vl_joint/matched."}
    return attack(folder, name, PAGE[name], lambda: page(folder), count, says.get(name))


@pytest.mark.parametrize("name", PAGE)
def test_a_page_or_the_named_error(folder, name):
    any_page(folder, name, 15)


@pytest.mark.hard
@pytest.mark.parametrize("name", PAGE)
def test_many_more_pages(folder, name):
    any_page(folder, name, 200)


# ---- records that are values already: conversations of a training set ----
VALUES = st.recursive(st.sampled_from(JUNK) | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(st.sampled_from(["from", "value", "human", "conversations"]), inner, max_size=3), max_leaves=8)
SAID = st.text(max_size=9) | st.sampled_from(["<image>", "\ud800", " ", 3])
PAIRS = st.lists(st.tuples(SAID, SAID), min_size=1, max_size=3).map(
    lambda pairs: [{"from": ("human", "gpt")[i], "value": pair[i]} for pair in pairs for i in (0, 1)])
TURNS = st.lists(st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "x", None]), "value": VALUES}), max_size=4)


def test_any_conversation_gives_items_or_is_dropped():
    args, found = types.SimpleNamespace(seed=0, turns="all"), collections.Counter()

    def check(conversations):
        try:
            items = prepare.training_items({"conversations": conversations}, 0, "coco", args)
            found["items"] += 1
            assert all(one["question"] and one["answers"][0] for one in items)
            json.dumps(items, ensure_ascii=False).encode()
        except prepare.Drop:
            found["dropped"] += 1
    search(4 * MODEST, PAIRS | TURNS | VALUES, check)
    assert found["items"] and found["dropped"]


# ---- the scorer ----
ANY = st.text(st.characters(exclude_categories=()), max_size=24)       # half surrogate pairs too
NEAR = st.sampled_from(["yes", "No.", "a", "the", "B", "(B)", "b", "12%", "0", "-0.0", "1e5", "3.", "two", "nan", "-inf%", "infinity",
        "$5", "don't", "dont",
                        "x y", "\u3000\uff21", "\u0130", "%", ". . .", " ", "answer: A", "the answer is B"])
WORD = st.from_regex(r"[b-z][a-z]{3,8}", fullmatch=True).filter(lambda text: text not in ("answer", "option", "choice"))


@st.composite
def scored_items(draw, metric):
    text = ANY | NEAR
    one = {"id": "q", "image": "i.png", "question": draw(st.sampled_from(["", ev.RR_LETTER, ev.RR_SHORT])), "source": "own", "domain": "d",
           "metric": metric, "answers": draw(st.lists(text, min_size=1, max_size=10)), "dataset": draw(st.sampled_from(["", "HME100k"]))}
    if metric in ("choice", "realworldqa") and draw(st.booleans()):
        one["options"] = draw(st.lists(text, min_size=2, max_size=26))
        one["answers"] = draw(st.lists(st.sampled_from([ev.string.ascii_uppercase[i] for i in range(len(one["options"]))]), min_size=1,
                max_size=3))
    if metric == "yes_no":
        one["answers"][0] = draw(st.sampled_from(["yes", "No", "YES.", " no ", "y", "N"]))
    try:
        ev.check_item(one, "x")
    except ev.UserError:
        assume(False)
    return one


def not_full_credit(one, answer):
    """Why a prediction equal to this gold need not score 1 by the source's own rule, or None. See scoring.md for each rule."""
    if one["metric"] == "yes_no" and answer is not one["answers"][0]:
        return "MME has one gold an item, the first"
    if one["metric"] == "vqa" and sum(ev.vqa_process(other) == ev.vqa_process(answer) for other in one["answers"]) < 4:
        return "TextVQA wants the votes of three other people: 0.3, 0.6 and 0.9 of a point for one, two and three equal answers"
    if one["metric"] == "vqa" and len(one["answers"]) < 10:
        return "its steps are made for ten answers"
    if one["metric"] == "relaxed":
        if answer != answer.strip() and number(answer) in (None, 0):
            return "ChartQA's gold is an opaque string: outer white space counts in it, while the prediction is stripped"
        if (value := number(answer)) is not None and not math.isfinite(value):
            return "a gold of nan or infinity is never within 5 percent of anything, itself included"
    return None


def number(text):
    with contextlib.suppress(ValueError):
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)


def scorer(metric, count):
    full = collections.Counter()

    def check(pair):
        one, prediction = pair
        score, parsed = ev.score_one(prediction, one)
        assert isinstance(score, float) and math.isfinite(score) and 0 <= score <= 1 and isinstance(parsed, bool)
        assert ev.score_one(prediction, one) == (score, parsed), "a second call gives another score"
        for answer in one["answers"]:
            score, _ = ev.score_one(answer, one)
            assert math.isfinite(score) and 0 <= score <= 1
            reason = not_full_credit(one, answer)
            assert score == 1 or reason, (answer, one)
            full["gold scores 1" if score == 1 else reason] += 1
        assert 0 <= ev.chance_level(one) <= 1
    search(count, st.tuples(scored_items(metric), ANY | NEAR | WORD), check)
    TRIED["golds"] += sum(full.values())
    assert full["gold scores 1"] > 5, full
    return full


@pytest.mark.parametrize("metric", ev.METRICS)
def test_scores_are_in_range_and_a_gold_answer_scores_one(metric):
    scorer(metric, 50)


@pytest.mark.hard
@pytest.mark.parametrize("metric", ev.METRICS)
def test_many_more_scores(metric):
    scorer(metric, 1500)


def test_a_gold_given_as_option_text_scores_one():
    """For options that are plain words. Others need not: a reply is read as a letter first ("B" as the text of option A), and options that
    are equal but for case, article and punctuation cannot be told apart. The sources' own golds are letters."""
    def check(options):
        for i, text in enumerate(options):
            one = {"metric": "choice", "source": "own", "question": "", "options": options, "answers": [text]}
            assert ev.score_one(text, one) == (1.0, True) and ev.score_one("ABCDEFGH"[i], one) == (1.0, True)
            assert ev.score_one(options[i - 1], one) == (0.0, True)
    search(60, st.lists(WORD, min_size=2, max_size=8, unique=True), check)


def test_the_junk_reaches_every_kind_of_damage():
    """The strategy itself: each way of damage occurs, and most of its results differ from the valid file."""
    valid, seen = b'{"a": [1, "x"]}\n{"b": {}}\n', collections.Counter()

    def count(data):
        seen["same" if data == valid else "other"] += 1
        seen["raw"] += bool(re.search(b"NaN|1e999|\xff", data))
    search(200, damaged(valid, "jsonl"), count)
    assert seen["other"] > 100 and seen["raw"] > 2
