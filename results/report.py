"""Results page: which mode carries more information, in which domain, and do the controls support it?

    python results/report.py results/demo --items data/demo/items/test.jsonl --images data/demo/images
    python results/report.py                                   # every folder in results/ that has a scores.json, each its own page

READS   RUN_DIR/scores.json and scores.jsonl (evaluate.py); the prediction files that they name, with their sidecars; where they are there:
        controls.json, commands.sh and curve.json beside the predictions (controls.py), readout.json (train_decoder.py), items and images,
        results/paper.json (published figures), --benchmark F.csv (columns embedder, score; optional mode, source).
WRITES  RUN_DIR/report.html, one file that needs no network (its own policy forbids any), light and dark, and RUN_DIR/report.md, the same
        tables. With several RUN_DIR the first one's folder, or --out. Each file is replaced whole or not at all.
SAYS    nothing of its own about scores: every figure, interval and verdict is evaluate.py's. Own are only the words of the summary, the
        choice of examples, and the order against another benchmark (Kendall's tau-b, Spearman's rho, exact permutation p).
        Several RUN_DIR must be scored on the same items; a prediction file that changed after scoring is an error.
NEVER   markup from data: text is escaped in HTML and Markdown, and the examples' texts are set by the page's script as text.
The same files and flags give the same bytes. Exit status: 0 done, 1 failed with a line that says what and where, 2 wrong command line.
To reuse elsewhere copy this file; it needs Python >= 3.11, numpy >= 2.0 and pillow >= 11.
"""
import argparse
import base64
import collections
import contextlib
import csv
import glob
import hashlib
import html
import io
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import struct
import sys
from typing import NamedTuple

import numpy as np

CONDITIONS = ("matched", "raw_image", "text_only", "text_only_ablated", "zero", "shuffled")  # order of the rows; others follow
CONDITION_NAMES = {"matched": "matched", "raw_image": "raw image", "text_only": "text only", "text_only_ablated": "vector removed",
                   "zero": "zero vector", "shuffled": "shuffled", "shuffled_question": "other question", "mean": "mean vector",
                   "noise": "noise", "nearest": "nearest image", "question_vector": "question only"}
CONDITION_MEANS = {
    "matched": "the readout gets the vector of the item's own image",
    "text_only": "a readout trained without any vector: what the question alone gives away",
    "text_only_ablated": "the trained readout with its vector taken out",
    "zero": "a vector of zeros", "shuffled": "the vector of another image", "mean": "the mean of all training vectors",
    "shuffled_question": "the same image embedded with another question", "noise": "a random vector of the same statistics",
    "nearest": "the vector of the most similar other image", "question_vector": "the question embedded with a blank image",
    "raw_image": "a model that sees the image itself: the ceiling, not a control"}
MODES = {"visual_only": "visual-only", "vl_joint": "joint"}
RULES = {"relaxed": "a number counts within 5%", "anls": "part marks by edit distance", "vqa": "marks by agreement of ten people"}
RULE_OF = {"ChartQA": "relaxed", "DocVQA": "anls", "InfographicVQA": "anls", "TextVQA": "vqa"}    # rules that a tick does not explain
EMBEDDERS = {"clip": "CLIP", "siglip": "SigLIP", "qwen3-vl-embedding-2b": "Qwen3-VL-Embedding-2B",
             "qwen3-vl-embedding-8b": "Qwen3-VL-Embedding-8B",
             "vlm2vec-v2": "VLM2Vec-V2", "ume-r1-2b": "UME-R1-2B", "ume-r1-7b": "UME-R1-7B", "embed-rl-2b": "Embed-RL-2B",
             "embed-rl-4b": "Embed-RL-4B"}
DOMAINS = {"natural_image": "natural images", "scene_text": "scene text", "visual_document": "visual documents"}
TEXT_SHOWN = 400                                        # characters of a question, answer or prediction on the page
EXACT = 9                                               # up to so many models the p-values enumerate all orders; above, RANDOM_ORDERS
RANDOM_ORDERS = 100_000
PAPER_FIELDS = ("embedder", "mode", "condition", "source", "note", "n", "score")      # of a row; other keys are domains


# ---- shared block: base (identical in every script that has it; a test compares) ----
FORMAT_VERSION = 1
MAX_LINE, MAX_LEVELS = 1 << 24, 100                     # bytes of one line of JSONL, levels of JSON: what goes beyond is no file of ours
METRICS = ("yes_no", "choice", "realworldqa", "vqa", "ocrbench", "relaxed", "anls", "exact")
SOURCES = ("MME", "CV-Bench", "RealWorldQA", "TextVQA", "OCRBench", "ChartQA", "DocVQA", "InfographicVQA")


class UserError(Exception):
    """A failure the user can mend: what failed, which file, expected against found, what to do. Ends the run with status 1."""


def shown(text, width=80):
    """Text from data made safe for a terminal or a table: control characters escaped, long text cut."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text)[:width + 1])
    return text if len(text) <= width else text[: width - 3] + "..."


def sha256(path):
    """SHA-256 of a file's bytes, hexadecimal, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise UserError(f"{path}: cannot read ({error.strerror}). Check the path, or make the file again") from None
    return digest.hexdigest()


def write_atomic(path, write):
    """Write a file so that its final name never shows a part: `write(file)` fills a temporary file beside it, then fsync and rename."""
    path, temporary = str(path), f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def cannot_write(path, error):
    """The UserError for a write that the system refused (disk full, file-size limit, no permission)."""
    folder = os.path.dirname(path) or "."               # not abspath: the working directory itself may be gone
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
    return UserError(f"{path}: cannot write ({error.strerror or error}); {free:,} bytes free there. Make room or choose another "
                     "output, then run the same command again; files written before are unchanged")


def write_json(path, value):
    """Write one JSON object, indented, atomically, with the hash of its own content, so that a byte that changes later is found."""
    value = {**value, "json_sha256": hashlib.sha256(json.dumps(value).encode()).hexdigest()}
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomic(path, lambda file: file.write(text.encode("utf-8", "backslashreplace")))      # half a surrogate pair stays an escape


def json_parser():
    """A function from UTF-8 bytes to a JSON value. ValueError for what could be read in two ways or not be written again: NaN, infinity
    (also as 1e999), a key given twice, more than MAX_LEVELS levels, whole numbers of 300 digits."""
    def constant(name):
        raise ValueError(f"the number {name}, which JSON does not have")

    def whole(text):
        return int(text) if len(text) < 300 else constant(f"{shown(text, 20)} of {len(text)} digits")

    def real(text):
        return float(text) if abs(float(text)) < float("inf") else constant(shown(text, 20))

    def once(pairs):
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError(f"the key {shown(repr(max(names, key=names.count)), 40)} twice in one object")
        return dict(pairs)

    def shallow(value, left=MAX_LEVELS):
        if isinstance(value, (dict, list)):
            if not left:
                raise ValueError(f"more than {MAX_LEVELS} levels of objects or lists")
            for part in value.values() if isinstance(value, dict) else value:
                shallow(part, left - 1)
    decode = json.JSONDecoder(parse_constant=constant, parse_int=whole, parse_float=real, object_pairs_hook=once).decode

    def parse(data):
        if data.startswith(b"\xef\xbb\xbf"):
            raise ValueError("a byte order mark; save the file as UTF-8 without one")
        value = decode(data.decode("utf-8"))
        if data.count(b"[") + data.count(b"{") > MAX_LEVELS:
            shallow(value)
        return value
    return parse


def read_json(path):
    """Read one JSON object; a missing, torn, non-object or (where it holds its hash) changed file is a UserError that names it."""
    try:
        with open(path, "rb") as file:
            value = json_parser()(file.read())
    except FileNotFoundError:
        raise UserError(f"{path}: not found") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected one JSON object in UTF-8, found {shown(error)}. Write the file again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected one JSON object, found {type(value).__name__}")
    name = "json_sha256" if "json_sha256" in value else next(reversed(value), "")      # ours end with it; its own name can be damaged too
    rest = {key: part for key, part in value.items() if key != name}
    same = value.get(name) == hashlib.sha256(json.dumps(rest).encode()).hexdigest()
    if same != (name == "json_sha256"):                 # files by other hands have neither
        raise UserError(f"{path}: expected the content that its own 'json_sha256' was computed from, found another: damaged or edited. "
                        "Make it again, or take that line out if the edit was meant")
    return rest if same else value


def read_jsonl(path):
    """Yield (line number, object) for each line of a JSONL file; a bad line is a UserError with file and line number."""
    parse = json_parser()
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path}: expected a regular file, which can be read twice (for its hash), found none. Write it to a file")
    try:
        file = open(path, "rb")
    except OSError as error:
        raise UserError(f"{path}: cannot read ({error.strerror})") from None
    with file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:
                raise UserError(f"{path} line {number}: expected at most {MAX_LINE:,} bytes, found more. Mend the file")
            try:
                value = parse(line)
            except (ValueError, RecursionError) as error:
                torn = "" if line.endswith(b"\n") else "; the last line is torn, so the file was cut short: make it again"
                raise UserError(f"{path} line {number}: expected one JSON object in UTF-8, found {shown(error)}{torn}") from None
            if not isinstance(value, dict):
                raise UserError(f"{path} line {number}: expected a JSON object, found {type(value).__name__}")
            yield number, value


def read_items(path, limit=None, keep=dict):
    """Read an item file (one JSON object a line: id, image, question, answers, source, domain; optional options, metric, dataset).

    Returns a list of dicts, the first `limit` of them. Every field's type is checked, ids are unique, image paths stay inside their folder.
    `keep` makes of an item what is held in memory.
    """
    items, seen = [], set()
    for number, item in read_jsonl(path):
        def bad(expected, found):
            return UserError(f"{path} line {number} (id {shown(item.get('id'))}): expected {expected}, found {shown(repr(found))}. "
                             "Mend the item file")
        for field in ("id", "image", "question", "source", "domain"):
            if not isinstance(item.get(field), str) or (field != "question" and not item[field]):
                raise bad(f"a text in '{field}'", item.get(field))
        if item["id"] != item["id"].strip() or not item["id"].isprintable():
            raise bad("an id without outer white space or control characters", item["id"])
        if item["id"] in seen:
            raise bad("an id that is unique in the file", item["id"])
        image = item["image"]
        if image.startswith(("/", "\\")) or ":" in image[:3] or ".." in image.replace("\\", "/").split("/") or not image.isprintable():
            raise bad("an image path relative to the images folder that does not leave it", image)
        for field in ("answers", "options"):
            if (field == "answers" or field in item) and not (
                    isinstance(item.get(field), list) and item[field] and all(isinstance(text, str) for text in item[field])):
                raise bad(f"a list of one or more texts in '{field}'", item.get(field))
        if "metric" in item and item["metric"] not in METRICS:
            raise bad(f"'metric' to be one of {', '.join(METRICS)}", item["metric"])
        seen.add(item["id"])
        item |= {field: sys.intern(item[field]) for field in ("source", "domain", "metric") if field in item}
        items.append(keep({sys.intern(field): value for field, value in item.items()}))     # a million items share their field names
        if limit and len(items) >= limit:
            break
    if not items:
        raise UserError(f"{path}: expected one item or more, found none")
    return items


@contextlib.contextmanager
def locked(output):
    """Hold OUTPUT.lock while an output is written, so that a second process with the same output stops instead of mixing its files in."""
    import fcntl
    path, held = f"{str(output).rstrip('/')}.lock", False
    try:
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            while not held:
                file = open(path, "a+", encoding="utf-8", errors="replace")
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    file.seek(0)
                    raise UserError(f"{output}: another process is writing it ({shown(file.read().strip()) or 'holder unknown'}). Wait for "
                                    "it, or choose another output") from None
                held = os.path.exists(path) and os.fstat(file.fileno()).st_ino == os.stat(path).st_ino
                if not held:
                    file.close()                        # the former holder removed the file between our open and our lock
            file.seek(0)
            if holder := file.read().strip():
                print(f"note: {path} was left by {shown(holder)}, which no longer runs; taking it over", file=sys.stderr)
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"host {platform.node()} pid {os.getpid()}\n".encode())
        except OSError as error:
            raise cannot_write(path, error) from error
        yield
    finally:
        if held:
            os.remove(path)
            file.close()


def run(main, resume_hint):
    """Call `main` and turn its end into an exit status: 0 done, 1 failed with a message, 130 interrupted with a word on how to go on."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:                  # closed by the caller (>&-)
            setattr(sys, name, open(os.devnull, "w"))
    with contextlib.suppress(AttributeError):           # names of files need not be text; a table should not end in a traceback for it
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = main() or 0
        sys.stdout.flush()                              # here, where a full disk or a closed pipe behind it can still be said
        sys.exit(status)
    except (UserError, OSError) as error:
        if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
            error = UserError(f"{error.filename}: {error.strerror}. Check the path")
        elif isinstance(error, OSError):                # a refusal of the system that nothing above turned into words
            if error.filename is None:                  # standard output; what is left for it would fail once more at the exit
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            error = cannot_write(error.filename or "standard output", error)
        # its lines may hold names from data: no control character reaches the terminal
        print("error: " + "\n".join(shown(line, 10_000) for line in str(error).split("\n")), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"interrupted. {resume_hint}", file=sys.stderr)
        sys.exit(130)
# ---- end of shared block: base ----


# ---- shared block: images (identical in every script that has it; a test compares) ----
def open_image(folder, name):
    """Open an image as 8-bit RGB, the same way for every model: first frame, EXIF rotation applied, alpha on white, 16 bit scaled to 8.

    The file must lie inside `folder` after links are followed. Anything unreadable is a UserError with the file's name.
    """
    from PIL import Image, ImageOps
    path = os.path.realpath(os.path.join(folder, name))
    if not path.startswith(os.path.join(os.path.realpath(folder), "")):
        raise UserError(f"{name}: leads out of the images folder {folder}. Put the file inside it")
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError("not a regular file")      # a pipe would be waited for without end
        with Image.open(path) as image:
            if image.format == "EPS":
                raise ValueError("EPS is a program, which is not run here")
            image.verify()                              # PNG: the checksum of each piece, which loading alone does not compare
        with Image.open(path) as image:
            image.load()
            image = ImageOps.exif_transpose(image)
            clear = image.info.get("transparency")
            if image.mode == "F" or image.mode.startswith("I"):  # Pillow's own conversion clips these at 255
                values = np.asarray(image).astype(np.float64)
                if not (values.min() >= 0 and values.max() <= 65535):     # NaN fails too
                    raise ValueError(f"expected numbers from 0 to 65535, found {values.min()} to {values.max()}")
                top = 1.0 if image.mode == "F" and values.max() <= 1 else 255.0 if values.max() <= 255 and image.mode in "IF" else 65535.0
                image = Image.fromarray(np.clip(values / top * 255 + 0.5, 0, 255).astype(np.uint8))
                if isinstance(clear, int):              # the one grey value that a PNG calls transparent
                    image.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
            return image.convert("RGB")
    except FileNotFoundError:
        raise UserError(f"{os.path.join(folder, name)}: image not found") from None
    except Exception as error:                          # Pillow's many readers raise errors of many kinds
        size = f"{os.path.getsize(path):,} bytes" if os.path.isfile(path) else "no file"
        raise UserError(f"{os.path.join(folder, name)}: cannot read this image ({shown(error)}); {size}. "
                        "Replace it, or skip it with --on-error skip where there is one") from None
# ---- end of shared block: images ----


# ---- the page: style, symbols and script; no character of them comes from data ----
STYLE = """
:root { --bg: #f6f6f3; --panel: #fff; --ink: #1b1c1f; --soft: #5b5e66; --line: #e1e1dc; --faint: #efefeb; --joint: #1f5fcc;
  --visual: #b4500b;
  --yes: #14703c; --no: #b3261e; --mixed: #855d00; --open: #5b5e66; }
@media screen and (prefers-color-scheme: dark) { :root { --bg: #121315; --panel: #1b1d20; --ink: #e8e8e4; --soft: #a4a8b0; --line: #33363b;
  --faint: #25282c;
  --joint: #84b2ff; --visual: #f3a361; --yes: #6fd097; --no: #ff9187; --mixed: #e5c05d; --open: #a4a8b0; } }
* { box-sizing: border-box; }
html { color-scheme: light dark; -webkit-text-size-adjust: 100%; scroll-padding-top: 1rem; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: anywhere; }
header, main { max-width: 1180px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 36px; padding-bottom: 8px; }
h1 { font-size: clamp(1.5rem, 1.1rem + 1.6vw, 2.1rem); line-height: 1.2; letter-spacing: -.015em; margin: 0 0 10px; }
header p { margin: 0; max-width: 68ch; color: var(--soft); } header p.note { margin-bottom: .5em; font-weight: 600; color: inherit; }
nav { display: flex; flex-wrap: wrap; gap: 4px 20px; margin-top: 14px; font-size: .92rem; }
a { color: var(--joint); text-underline-offset: 3px; }
h2 { font-size: 1.15rem; line-height: 1.3; margin: 0 0 10px; }
h3 { font-size: 1rem; margin: 22px 0 8px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 310px), 1fr)); gap: 16px; margin: 20px 0; }
.card, .panel { background: var(--panel); border: 1px solid var(--line); border-radius: 12px; padding: 20px; }
.panel { margin: 0 0 16px; }
.card h2 { font-size: .9rem; font-weight: 500; color: var(--soft); margin: 0 0 6px; }
.card .answer { display: flex; gap: 10px; align-items: flex-start; font-size: 1.3rem; font-weight: 650; line-height: 1.25;
  letter-spacing: -.01em; margin: 0 0 14px; }
.card p { font-size: .9rem; color: var(--soft); margin: 8px 0 0; }
.card .answer { color: var(--ink); }
.tone { width: 22px; height: 22px; flex: none; margin-top: 3px; fill: none; stroke: currentColor; stroke-width: 2; stroke-linecap: round;
  stroke-linejoin: round; }
.yes .tone { color: var(--yes); } .no .tone { color: var(--no); } .mixed .tone { color: var(--mixed); } .open .tone { color: var(--open); }
.bars { list-style: none; margin: 0 0 10px; padding: 0; font-size: .9rem; }
.bars li { display: grid; grid-template-columns: 7.8em 3.2em 1fr; gap: 10px; align-items: center; padding: 3px 0; }
.bars b { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bar { width: 100%; height: 18px; }
.bar rect { fill: currentColor; opacity: .75; } .bar .axis { stroke: var(--soft); }
.bar .whisker { stroke: var(--ink); stroke-width: 1.3; fill: none; } .bar path { vector-effect: non-scaling-stroke; }
.bar.joint { color: var(--joint); } .bar.visual { color: var(--visual); } .bar.flat { color: var(--soft); }
.grid { font-size: .84rem; margin-bottom: 10px; table-layout: fixed; }
.grid th, .grid td { padding: 5px 6px 5px 0; min-width: 0; overflow-wrap: anywhere; }
.grid thead th { white-space: normal; font-size: .62rem; line-height: 1.25; padding-right: 0; }
.grid th:first-child { width: 25%; } .grid tbody th { font-weight: 400; min-width: 0; font-size: .76rem; }
.grid td, .grid thead th + th { text-align: center; }
.grid .s { width: 16px; height: 16px; margin: 0; }
.note { color: var(--soft); font-size: .88rem; margin: 0 0 12px; max-width: 90ch; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 10px; padding: 0; font-size: .88rem;
  color: var(--soft); }
.legend li { display: flex; align-items: center; gap: 5px; }
.legend svg { width: 20px; height: 20px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 245px), 1fr)); gap: 16px 26px; margin-bottom: 24px; }
.charts.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); } .charts.wide .chart { max-width: 500px; }
.chart { width: 100%; max-width: 400px; height: auto; display: block; }
.chart text { font-size: 12px; fill: var(--soft); } .chart .t { font-size: 13px; font-weight: 650; fill: var(--ink); }
.chart .l { fill: var(--ink); }
.chart .v { font-weight: 650; fill: var(--ink); font-variant-numeric: tabular-nums; } .chart .s { font-size: 11px; fill: var(--ink); }
.chart .grid { stroke: var(--faint); fill: none; } .chart .base { stroke: var(--line); stroke-width: 1.5; }
.chart .tick { font-size: 11px; }
.chart .joint { color: var(--joint); } .chart .visual { color: var(--visual); }
.m { fill: var(--panel); stroke: var(--soft); stroke-width: 1.6; } .m.matched { fill: currentColor; stroke: var(--panel); }
.legend .m.matched { fill: var(--ink); }
.whisker { stroke: currentColor; stroke-width: 2; fill: none; }
.chart .floor { stroke: var(--soft); stroke-dasharray: 5 4; fill: none; }
.family { color: var(--soft); } .family.full { color: var(--ink); } .family.first { color: var(--joint); }
.family.random { color: var(--visual); }
.family.int8 { color: var(--yes); } .family.binary { color: var(--no); } .family.mixed { color: var(--mixed); }
.family polyline { fill: none; stroke: currentColor; stroke-width: 1.6; }
.family .dot { fill: currentColor; stroke: currentColor; stroke-width: 1.6; }
.family .whisker { stroke-width: 1.2; opacity: .7; }
.slope path { stroke: currentColor; stroke-width: 1.8; fill: none; } .slope circle { fill: currentColor; }
.slope .same { color: var(--soft); } .slope .up { color: var(--yes); } .slope .down { color: var(--no); }
.slope .down path { stroke-dasharray: 6 3; }
.scroll { overflow-x: auto; margin: 0 -20px; padding: 0 20px; background:       /* a shadow at the side where more of the table is */
  linear-gradient(to right, var(--panel) 30%, transparent) left / 40px 100% no-repeat local,
  linear-gradient(to left, var(--panel) 30%, transparent) right / 40px 100% no-repeat local,
  linear-gradient(to right, var(--line), transparent) left / 16px 100% no-repeat,
  linear-gradient(to left, var(--line), transparent) right / 16px 100% no-repeat; }
table { border-collapse: collapse; font-size: .88rem; width: 100%; }
th, td { text-align: left; padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: normal; }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; white-space: nowrap; border-bottom-color: var(--soft); }
tbody th { font-weight: 600; min-width: 9em; } td { min-width: 4em; }
td.tight { white-space: nowrap; } td.num { font-variant-numeric: tabular-nums; white-space: nowrap; }
td small, th small { display: block; color: var(--soft); font-size: .8rem; font-weight: 400; }
td.text { min-width: 9em; } td.long { min-width: 20em; }
tr.paper th, tr.paper td { color: var(--soft); font-style: italic; font-weight: 400; }
tr.floor th, tr.control th, tr.floor td, tr.control td { color: var(--soft); font-weight: 400; }
tr.group th { padding-top: 16px; } tr.group span { position: sticky; left: 0; } table .group + tr th { font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
summary { cursor: pointer; } summary h2 { display: inline; } details[open] summary { margin-bottom: 12px; }
.plain { padding-left: 1.2em; font-size: .9rem; }
pre { overflow-x: auto; background: var(--faint); padding: 14px; border-radius: 8px; font-size: .78rem; line-height: 1.55;
  max-height: 26rem; overflow-wrap: normal; }
#filters { display: grid; grid-template-columns: minmax(0, 1fr); gap: 8px; margin-bottom: 14px; }
.filter { display: flex; gap: 10px; align-items: baseline; }
.filter > span { flex: none; width: 6.2em; font-size: .85rem; color: var(--soft); }
.chips { display: flex; gap: 6px; flex-wrap: wrap; min-width: 0; }
button { font: inherit; color: inherit; }
.chips button { font-size: .85rem; line-height: 1.3; padding: 5px 12px; border: 1px solid var(--line); border-radius: 999px;
  background: none; cursor: pointer; }
.chips button:hover { border-color: var(--soft); }
.chips button[aria-pressed=true] { background: var(--ink); border-color: var(--ink); color: var(--panel); }
:focus-visible { outline: 2px solid var(--joint); outline-offset: 2px; }
#count { font-size: .88rem; color: var(--soft); margin: 0 0 12px; }
#cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 14px; align-items: start; }
.example { border: 1px solid var(--line); border-radius: 10px; padding: 14px; }
.example .top { display: flex; gap: 12px; align-items: flex-start; }
.thumb { flex: none; width: 104px; padding: 0; border: 0; background: var(--faint); border-radius: 6px; overflow: hidden; cursor: zoom-in;
  line-height: 0; }
.thumb img { width: 100%; height: auto; } .thumb[aria-expanded=true] { width: 100%; cursor: zoom-out; } .wide { flex-wrap: wrap; }
.nothumb { flex: none; width: 104px; padding: 24px 6px; text-align: center; font-size: .75rem; color: var(--soft); background: var(--faint);
  border-radius: 6px; }
.question { margin: 0; font-size: .93rem; white-space: pre-line; min-width: 0; unicode-bidi: isolate; }
.gold { margin: 8px 0 0; font-size: .9rem; unicode-bidi: isolate; } .gold b { font-weight: 650; } .gold span { color: var(--soft); }
.where { margin: 8px 0 0; font-size: .76rem; color: var(--soft); }
.said { margin-top: 10px; font-size: .86rem; table-layout: fixed; }
.said th, .said td { padding: 5px 8px 5px 0; min-width: 0; overflow-wrap: anywhere; } .said thead th { white-space: normal; }
.said tbody th { width: auto; min-width: 0; font-weight: 400; color: var(--soft); }
.said col:first-child { width: 6.4em; } .said .matched td { font-weight: 600; } .said bdi { white-space: pre-line; }
.said div { max-height: 7.5em; overflow-y: auto; }
.s { width: 1.05em; height: 1.05em; vertical-align: -.18em; margin-right: 6px; }
.right { color: var(--yes); } .wrong { color: var(--no); } .part { color: var(--mixed); } .none { color: var(--soft); }
#more { display: block; margin: 16px auto 0; padding: 8px 20px; border: 1px solid var(--soft); border-radius: 999px; background: none;
  cursor: pointer; }
#more[hidden] { display: none; }
@media (max-width: 640px) {
  header, main { padding-left: 14px; padding-right: 14px; } header { padding-top: 22px; }
  .card, .panel { padding: 16px 14px; } .scroll { margin: 0 -14px; padding: 0 14px; }
  .scroll th:first-child { position: sticky; left: -14px; z-index: 1; background: var(--panel); max-width: 9em; min-width: 7em;
    padding-left: 14px; }
  .scroll .group th:first-child { max-width: none; }
  .scroll table { margin-left: -14px; } .filter { display: block; } .filter > span { display: block; width: auto; margin-bottom: 4px; }
  .chips { flex-wrap: nowrap; overflow-x: auto; margin: 0 -14px; padding: 2px 14px; scrollbar-width: none; }
  .chips button { flex: none; padding: 7px 13px; }
}
@media print {
  @page { margin: 12mm; }
  html { font-size: 12px; } body { background: #fff; font-size: 12px; } header, main { max-width: none; padding: 0; }
  nav, #filters, #more, #count { display: none; }
  .card, .panel { border-color: #ccc; border-radius: 0; padding: 10px; } .card, .example, .chart, tr, li { break-inside: avoid; }
  h2, .legend, thead { break-after: avoid; }
  .scroll { overflow: visible; margin: 0; padding: 0; } table { font-size: 9px; }
  th, td, thead th { padding: 4px 6px 4px 0; min-width: 0 !important; white-space: normal; }
  td small, th small { font-size: 8px; white-space: nowrap; } .said, .grid { font-size: 10px; }
  .bars li { grid-template-columns: 6.5em 3em 1fr; gap: 6px; }
  .cards, #cards { grid-template-columns: repeat(3, 1fr); } .charts { grid-template-columns: repeat(4, 1fr); gap: 8px 14px; }
  .charts.wide { grid-template-columns: 1fr 1fr; }
  .chart text { font-size: 13px; } .thumb { width: 70px; } pre { max-height: none; white-space: pre-wrap; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""
SYMBOLS = """<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<symbol id="tone-yes" viewBox="0 0 20 20"><circle cx="10" cy="10" r="8.5"/><path d="M6 10.5l3 3 5.5-6.5"/></symbol>
<symbol id="tone-no" viewBox="0 0 20 20"><path d="M6 1.5h8L18.5 6v8L14 18.5H6L1.5 14V6ZM7 7l6 6M13 7l-6 6"/></symbol>
<symbol id="tone-mixed" viewBox="0 0 20 20"><path d="M10 2 19 17.5H1ZM10 8v4M10 14.6v.4"/></symbol>
<symbol id="tone-open" viewBox="0 0 20 20"><circle cx="10" cy="10" r="8.5"/><path d="M6 10h8"/></symbol>
<symbol id="right" viewBox="0 0 16 16"><circle cx="8" cy="8" r="8" fill="currentColor"/>
<path d="M4.4 8.4l2.4 2.5 4.8-5.4" fill="none" stroke="var(--panel)" stroke-width="1.9"/></symbol>
<symbol id="wrong" viewBox="0 0 16 16"><path d="M3 3l10 10M13 3L3 13" fill="none" stroke="currentColor" stroke-width="2.2"/></symbol>
<symbol id="part" viewBox="0 0 16 16"><circle cx="8" cy="8" r="7" fill="none" stroke="currentColor" stroke-width="1.8"/>
<path d="M8 1a7 7 0 0 1 0 14Z" fill="currentColor"/></symbol>
<symbol id="none" viewBox="0 0 16 16"><path d="M3 8h10" stroke="currentColor" stroke-width="2"/></symbol>
</defs></svg>"""
SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const state = { set: 0, domain: "", source: "", cell: 0, result: "", contrast: "", shown: 24 };
const STEP = 24, WORDS = { right: "right", wrong: "wrong", part: "partly right", none: "no answer" };

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);                             // strings become text nodes, never markup
  return node;
}
function kind(score) { return score === null || score === undefined ? "none" : score > 0.999 ? "right" : score > 0.001 ? "part" : "wrong"; }
function symbol(name) {
  const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg"), use = document.createElementNS(space, "use");
  svg.setAttribute("class", "s " + name); svg.setAttribute("role", "img"); svg.setAttribute("aria-label", WORDS[name]);
  use.setAttribute("href", "#" + name); svg.append(use);
  return svg;
}
function cells(set) {                                   // every answer a card of this embedder shows
  const found = [];
  for (const line of set.lines) line.cells.forEach((file, column) => {
    if (file !== null) found.push({ file, column, key: line.key, one: line.one,
      name: line.one || set.columns.length === 1 ? line.name : set.columns[column] + ", " + line.name });
  });
  return found;
}
function score(item, file) { return file === null || file === undefined ? null : item.said[file][1]; }
function keep(item, set) {
  if (state.domain && item.domain !== state.domain || state.source && item.source !== state.source) return false;
  const all = cells(set), chosen = all[state.cell];
  if (all.every(cell => item.said[cell.file].every(value => value === null))) return false;  // not scored for this embedder
  if (state.result && kind(score(item, chosen.file)) !== state.result) return false;
  const right = set.lines[0].cells.map(file => kind(score(item, file)) === "right");
  const control = all.some(cell => cell.key !== "matched" && cell.key !== "raw_image" && kind(score(item, cell.file)) === "right");
  if (state.contrast === "control" || state.contrast === "vector") return right.some(Boolean) && control === (state.contrast === "control");
  if (state.contrast !== "") return right.every((value, column) => value === (String(column) === state.contrast));
  return true;
}
function group(title, name, choices) {
  if (choices.length < 2) return;
  const chips = make("div", { class: "chips" });
  for (const [value, label] of choices) {
    const chip = make("button", { type: "button", "aria-pressed": state[name] === value, "data-filter": name, "data-value": value }, label);
    chip.addEventListener("click", () => {
      state[name] = value; state.shown = STEP;
      if (name === "set") Object.assign(state, { cell: 0, result: "", contrast: "" });
      draw();
    });
    chips.append(chip);
  }
  document.getElementById("filters").append(make("div", { class: "filter" }, make("span", {}, title), chips));
}
function choices(field) {
  const there = new Set(data.items.map(item => item[field]));
  return [["", "all"], ...data.order[field].filter(name => there.has(name)).map(name => [name, name])];
}
function card(item, set) {
  const top = make("div", { class: "top" });
  if (item.thumb === null) top.append(make("div", { class: "nothumb" }, "no picture"));
  else {
    const picture = make("img", { src: data.images[item.thumb], alt: "picture " + item.image });
    const button = make("button", { type: "button", class: "thumb", "aria-expanded": "false", title: "larger or smaller" }, picture);
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") === "false";
      button.setAttribute("aria-expanded", open); top.classList.toggle("wide", open);
    });
    top.append(button);
  }
  const gold = make("p", { class: "gold" }, make("span", {}, "Gold: "), make("b", {}, item.answers.join(" | ")));
  if (item.more) gold.append(" and " + item.more + " more");
  top.append(make("div", {}, make("p", { class: "question" }, item.question), gold));
  const head = make("tr", {}, make("th", {}, ""), ...set.columns.map(name => make("th", { scope: "col" }, name)));
  const body = make("tbody");
  for (const line of set.lines) {
    const row = make("tr", { class: line.key === "matched" ? "matched" : "" }, make("th", { scope: "row" }, line.name));
    for (const file of line.cells) {
      const cell = make("td", line.one ? { colspan: set.columns.length } : {});
      if (file !== null) {
        const [text, points] = item.said[file], name = kind(points);
        const value = text === null ? "failed" : text.trim() === "" ? "(empty)" : text;
        cell.append(make("div", {}, symbol(name), make("bdi", {}, value)));
        if (name === "part") cell.firstChild.append(" (" + points.toFixed(2) + ")");
      }
      row.append(cell);
    }
    body.append(row);
  }
  const columns = make("colgroup", {}, make("col"), ...set.columns.map(() => make("col")));
  const said = make("table", { class: "said" }, columns, make("thead", {}, head), body);
  const where = make("p", { class: "where" }, [item.source, item.domain, ...item.tags, item.id].join(" \\u00b7 "));
  return make("article", { class: "example" }, top, said, where);
}
function draw() {
  const set = data.sets[state.set], filters = document.getElementById("filters");
  const place = filters.contains(document.activeElement) ? document.activeElement.dataset : null;
  const scrolled = [...filters.querySelectorAll(".chips")].map(chips => chips.scrollLeft);
  filters.replaceChildren();
  group("Embedder", "set", data.sets.map((one, number) => [number, one.name]));
  group("Domain", "domain", choices("domain"));
  group("Source", "source", choices("source"));
  group("Condition", "cell", cells(set).map((cell, number) => [number, cell.name]));
  group("Its answer", "result", [["", "any"], ["right", "right"], ["part", "partly right"], ["wrong", "wrong"], ["none", "missing"]]);
  const contrast = [["", "all"]];
  if (set.columns.length > 1) set.columns.forEach((name, column) => contrast.push([String(column), "only " + name + " right"]));
  if (set.lines.length > 1) contrast.push(["vector", "right, and no control is"], ["control", "right, and a control too"]);
  group("Contrast", "contrast", contrast);
  filters.querySelectorAll(".chips").forEach((chips, number) => { chips.scrollLeft = scrolled[number] || 0; });
  if (place) filters.querySelector(`[data-filter="${place.filter}"][aria-pressed=true]`)?.focus({ preventScroll: true });
  const found = set.order.map(number => data.items[number]).filter(item => keep(item, set));
  document.getElementById("cards").replaceChildren(...found.slice(0, state.shown).map(item => card(item, set)));
  const part = found.length > state.shown ? ", the first " + state.shown + " shown" : "";
  document.getElementById("count").textContent = found.length + " of " + data.items.length + " items" + part;
  const more = document.getElementById("more");
  more.hidden = found.length <= state.shown;
  more.textContent = "Show " + Math.min(STEP, found.length - state.shown) + " more";
}
if (data.items) {
  document.getElementById("more").addEventListener("click", () => { state.shown += STEP; draw(); });
  draw();
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => { part.open = true; }));
"""


# ---- data: what the other scripts wrote ----
class Figure(NamedTuple):
    """A number with its interval for a table; None is unknown and prints as a dash."""
    value: float | None
    bounds: list | None = None
    digits: int = 2
    sign: bool = False

    def number(self):
        return "-" if self.value is None else f"{self.value:{'+' if self.sign else ''}.{self.digits}f}"

    def interval(self):
        return "" if self.value is None or not self.bounds else f"[{self.bounds[0]:.{self.digits}f}, {self.bounds[1]:.{self.digits}f}]"

    def __str__(self):
        return f"{self.number()} {self.interval()}".strip()


class Table(NamedTuple):
    """A table for both outputs: rows of texts and Figures; marks holds one style word a row ("paper", "floor" or "")."""
    title: str
    note: str
    header: list
    rows: list
    marks: list


class Vector(NamedTuple):
    """One matched row of scores.json, that is one kind of vector, with the rows of its controls by condition."""
    row: dict
    name: str
    mode: str
    controls: dict


def clean(text, width=TEXT_SHOWN):
    """Text from data for the page: line ends kept, other control characters (also those that turn the writing direction) escaped, cut."""
    return "\n".join(shown(line, width) for line in str(text)[:width + 1].split("\n"))[:width] + ("..." if len(str(text)) > width else "")


def nice(table, name):
    """A readable name for a known embedder, mode, condition or domain; repeats keep their number; others stay as they are."""
    kind, dash, repeat = str(name).partition("-")
    return table.get(name) or (f"{table[kind]} {repeat}" if dash and kind in table and table is CONDITION_NAMES else shown(name, 60))


def embedder_name(row):
    """The embedder of a row in words. Its name is that of a recipe, so weights read from a folder, of no hub commit, are marked."""
    local = row.get("model") and not row.get("revision")
    return nice(EMBEDDERS, row["embedder"] or "embedder not named") + (" (local)" if local else "")


def check_shape(path, value, shape, place=""):
    """Refuse JSON of another shape than a writer gives it: a type or a tuple of types, a function that says yes, [shape] for a list, and
    {name: shape} for an object, where "name?" may be missing and None stands for every name."""
    if isinstance(shape, list) and isinstance(value, list):
        for number, part in enumerate(value):
            check_shape(path, part, shape[0], f"{place}[{number}]")
    elif isinstance(shape, dict) and isinstance(value, dict):
        for name, part in shape.items():
            for found in value if name is None else [name.removesuffix("?")]:
                if found in value or name[-1] != "?":       # `...` is of no kind: a value that is missing is refused
                    check_shape(path, value.get(found, ...), part, f"{place}.{found}" if place else found)
    elif not (isinstance(value, shape) if isinstance(shape, (type, tuple)) else not isinstance(shape, (list, dict)) and shape(value)):
        raise UserError(f"{path}: expected another kind of value in {shown(place) or 'the file'}, found "
                        f"{'none' if value is ... else shown(repr(value))}: not as the toolkit's own script writes it. Make the file again")


def number(value):
    """Whether a value is a figure that can be printed and drawn, or null."""
    return value is None or isinstance(value, (int, float)) and abs(value) < 1e12


def bounds(value):
    """Whether a value is an interval [low, high] or null."""
    return value is None or isinstance(value, list) and len(value) == 2 and None not in value and all(map(number, value))


def measured(name):
    """A group of numbers whose `name` is known wherever its interval is."""
    return lambda group: bounds(group.get("interval")) and (not group.get("interval") or isinstance(group.get(name), (int, float)))


# what evaluate.py and controls.py write, as far as this page reads it
NUMBER, TEXT = number, (str, type(None))
COUNTS = {name: lambda value: isinstance(value, int) and 0 <= value < 1e12 for name in ("n", "empty", "unparsed", "failed", "missing")}
GROUP = COUNTS | {name: NUMBER for name in ("score", "bound", "distinct", "chance", "majority", "bits")} | {"interval": bounds}
DIFFERENCE = {"n": COUNTS["n"], "difference": NUMBER, "interval": bounds}
SCORES = {
    "items": {"file": str, "sha256": str, "n": int, "images": int}, "notes?": [str], "run?": (dict, type(None)),
    "groups": {"domain": {None: int}, "source": {None: int}, "seen?": {None: int}},
    "rows": [{"file": str, "embedder": TEXT, "mode": TEXT, "condition": str, "model?": TEXT, "revision?": TEXT, "limit?": NUMBER,
              "overall": GROUP, "domain_mean": {"score": NUMBER, "interval": bounds}, "by_domain": {None: GROUP},
              "by_source": {None: GROUP}, "by_seen?": {None: GROUP},
              "domain_differences?": [{"a": str, "b": str, "difference": NUMBER, "interval": bounds}]}],
    "pairs": [DIFFERENCE | {"why": str, "a": {"file": str}, "b": {"file": str}, "p": NUMBER, "won": int, "lost": int, "tied": int,
                            "by_domain": {None: DIFFERENCE}, "usable_information_bits?": {"mean": NUMBER, "interval": bounds}}]}
CONTROLS_FILE = {"embedder?": TEXT, "mode?": TEXT, "leak_check?": {None: {None: DIFFERENCE}},
                 "spread?": lambda value: value is None or isinstance(value, dict) and all(
                     value.get(name) is not None and number(value[name]) for name in ("repeats", "mean", "sd", "low", "high", "separated"))}
CURVE = {"embedder?": TEXT, "mode?": TEXT, "inputs?": {"items?": TEXT}, "points": [{
    "budget": str, "family": str, "bytes": lambda value: value == 0 or isinstance(value, (int, float)) and 0.1 <= value < 1e12,
    "score": NUMBER, "score_interval": bounds, "bits": NUMBER, "bits_interval": bounds, "verdict": str,
    "difference": lambda value: value is None or isinstance(value, dict) and number(value.get("difference"))
    and bounds(value.get("interval"))}]}
PAPER = {"source?": TEXT, "rows?": [{name: TEXT for name in ("embedder?", "mode?", "condition?", "source?", "note?")}
                                    | {name: NUMBER for name in ("n?", "score?", *(f"{name}?" for name in DOMAINS))}]}


def check_scores(path, report):
    """The demands on scores.json that go beyond the kind of each value."""
    check_shape(path, report, SCORES)
    for row in report["rows"]:
        known = {kind: set(report["groups"].get(kind, {})) for kind in ("domain", "source", "seen")}
        missing = {f"by_{kind}" for kind, names in known.items() if names - set(row.get(f"by_{kind}", {}))}
        groups = [row["overall"], row["domain_mean"], *(group for kind in known for group in row.get(f"by_{kind}", {}).values())]
        if missing or not all(map(measured("score"), groups)) or (row["overall"]["failed"] and row["overall"]["bound"] is None):
            raise UserError(f"{path}: the row of {shown(row['file'])} lacks {', '.join(sorted(missing)) or 'a score'}. Score again")
    for pair in report["pairs"]:
        parts = [pair, *pair["by_domain"].values()]
        if set(report["groups"]["domain"]) - set(pair["by_domain"]) or not all(map(measured("difference"), parts)):
            raise UserError(f"{path}: the pair of {shown(pair['a']['file'])} lacks a domain or a difference. Score again")


def local_words(vectors):
    """A sentence on the (local) in names, or "": weights from a folder need not be the published ones whose recipe they are put through."""
    rows = [vector.row for vector in vectors if vector.row.get("model") and not vector.row.get("revision")]
    folders = sorted({f"{nice(EMBEDDERS, row['embedder'])} from {shown(row['model'])}" for row in rows})
    return (f" Names with (local): weights read from a folder ({listed(folders)}); the name says which recipe made the vectors, not "
            "that these are the published weights.") if folders else ""


def read_scores(folder):
    """RUN_DIR/scores.json and scores.jsonl. Returns (report, {file: {id: score or None}})."""
    path = os.path.join(folder, "scores.json")
    if not os.path.exists(path):
        raise UserError(f"{path}: not found. Score the predictions first: python evaluate.py --items ... --predictions ... --out "
                        f"{shown(folder)}")
    report, scores = read_json(path), {}
    wrong = [name for name, kind in (("rows", list), ("pairs", list), ("items", dict), ("groups", dict))
             if not isinstance(report.get(name), kind)]
    if wrong or report.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path}: expected a scores.json of evaluate.py, format version {FORMAT_VERSION}, found one "
                        f"{'without ' + ', '.join(wrong) if wrong else 'of version ' + shown(report.get('format_version'))}. Score again")
    check_scores(path, report)
    name = os.path.join(folder, "scores.jsonl")
    if report.get("scores_sha256") is not None and (not os.path.exists(name) or sha256(name) != report["scores_sha256"]):
        raise UserError(f"{name}: missing, or its SHA-256 is not the one in {path}, so it was changed or is from another run. Score again")
    for number, line in read_jsonl(name):
        value = line.get("score")
        if not (isinstance(line.get("file"), str) and isinstance(line.get("id"), str)
                and (value is None or isinstance(value, (int, float)) and 0 <= value <= 1)):
            raise UserError(f"{name} line {number}: expected texts in 'file' and 'id', and a number from 0 to 1 or null in 'score', found "
                            f"{shown(repr(line))}. Score again")
        scores.setdefault(line["file"], {})[line["id"]] = value
    for row in report["rows"]:
        expected, found = row["overall"]["n"] + row["overall"]["failed"], len(scores.get(row["file"], ()))
        if expected != found:
            raise UserError(f"{name}: expected {expected} lines for {row['file']} as scores.json says, found {found}. Score again: one of "
                            "the two files is from another run")
    return report, scores


def read_predictions(path, row, scores):
    """Texts of one prediction file, {id: text or None}, and its sidecar. It must be the file that was scored."""
    name = path.removesuffix(".jsonl") + ".meta.json"
    meta = read_json(name) if os.path.exists(name) else {}
    stale = (meta.get("predictions_sha256") not in (None, sha256(path)) or meta.get("readout_sha256") != row.get("readout_sha256")
             or meta.get("condition", row["condition"]) != row["condition"])
    texts = {}
    for number, line in read_jsonl(path):
        if not isinstance(line.get("id"), str) or not isinstance(line.get("prediction"), TEXT):
            raise UserError(f"{path} line {number}: expected texts in 'id' and 'prediction', found {shown(repr(line))}. Predict again")
        texts[line["id"]] = line.get("prediction")
    if stale or set(scores) - set(texts):
        raise UserError(f"{path}: expected the predictions that were scored, found others (hash, readout, condition or ids differ). Run "
                        "evaluate.py again")
    return texts, meta


def read_runs(args):
    """All RUN_DIR as one dict, each prediction file once: items, groups, rows, pairs, notes and runs of scores.json; scores and texts by
    file and id; metas, the sidecars by file; beside, the controls.json by folder."""
    data = {"rows": [], "pairs": [], "notes": [], "runs": [], "scores": {}, "texts": {}, "metas": {}, "beside": {}}
    for folder in args.run_dirs:
        report, scores = read_scores(folder)
        if data["runs"] and report["items"]["sha256"] != data["items"]["sha256"]:
            raise UserError(f"{folder}: scored on items with SHA-256 {report['items']['sha256'][:12]}, {args.run_dirs[0]} on "
                            f"{data['items']['sha256'][:12]}. Scores of different items do not belong in one table: make a page for each")
        data["items"], data["groups"] = report["items"], report["groups"]
        data["runs"].append({"folder": folder, **{key: report.get(key) for key in ("run", "seed", "bootstrap", "partial")}})
        known = {row["file"] for row in data["rows"]}
        data["rows"] += [row for row in report["rows"] if row["file"] not in known]
        data["pairs"] += [pair for pair in report["pairs"] if not {pair["a"]["file"], pair["b"]["file"]} <= known]
        data["notes"] += [note for note in report.get("notes", []) if note not in data["notes"]]
        data["scores"].update({file: lines for file, lines in scores.items() if file not in known})
    for row in data["rows"]:
        path = os.path.join(args.root, row["file"])
        if not os.path.exists(path):
            data["notes"].append(f"{row['file']}: not there, so its answers are not among the examples; --root names the folder that the "
                                 "path is relative to")
            continue
        data["texts"][row["file"]], data["metas"][row["file"]] = read_predictions(path, row, data["scores"][row["file"]])
        folder = os.path.dirname(path)
        if folder not in data["beside"] and os.path.exists(os.path.join(folder, "controls.json")):
            data["beside"][folder] = read_json(os.path.join(folder, "controls.json"))
            check_shape(os.path.join(folder, "controls.json"), data["beside"][folder], CONTROLS_FILE)
    return data


def vectors_of(rows):
    """The Vectors of a table, each with its controls: of the same folder where there are several, else of the same embedder and mode."""
    matched, vectors = [row for row in rows if row["condition"] == "matched"], []
    names = [(row["embedder"], row["mode"]) for row in matched]
    for row in matched:
        name, mode = embedder_name(row), nice(MODES, row["mode"] or "mode not named")
        folder, controls = os.path.dirname(row["file"]), {}
        if names.count((row["embedder"], row["mode"])) > 1:
            name += f" ({shown(row['file'], 40)})"
        for other in rows:
            near = os.path.dirname(other["file"]) == folder
            fits = other["embedder"] in (None, row["embedder"]) and other["mode"] in (None, row["mode"])
            if other["condition"] != "matched" and fits and (near or other["condition"] not in controls):
                controls[other["condition"]] = other
        place = lambda kind: CONDITIONS.index(kind) if kind in CONDITIONS else len(CONDITIONS)
        vectors.append(Vector(row, name, mode, dict(sorted(controls.items(), key=lambda pair: (place(pair[0].split("-")[0]), pair[0])))))
    return vectors


def pair_of(data, a, b):
    """The paired difference a - b of two rows as evaluate.py reports it, or None."""
    return next((pair for pair in data["pairs"] if (pair["a"]["file"], pair["b"]["file"]) == (a["file"], b["file"])), None)


def mode_pairs(data, vectors):
    """(joint Vector, visual-only Vector, pair) for every embedder that has both."""
    return [(a, b, pair) for a in vectors for b in vectors if (pair := pair_of(data, a.row, b.row)) and pair["why"] == "joint against "
            "visual-only"]


def side_of(group):
    """1 where the whole interval of a difference lies above 0, -1 where it lies below, 0 where it holds 0 or is not known."""
    bounds = group and group["interval"]
    return 0 if not bounds else (bounds[0] > 0) - (bounds[1] < 0)


# ---- words: the summary, computed from the intervals ----
def listed(names):
    names = list(names)
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def points(group):
    """"16.7 points (95% interval 12.1 to 21.3)"."""
    low, high = (round(bound, 1) + 0.0 for bound in group["interval"] or (0, 0))  # + 0.0: no minus before a zero
    return f"{group['difference']:.1f} points" + (f" (95% interval {low:.1f} to {high:.1f})" if group["interval"] else " (no interval)")


def mode_card(pairs, vectors):
    """Which mode carries more? Returns {"question", "answer", "tone", "lines", "bars"}."""
    card = {"question": "Which mode carries more information?", "bars": []}
    if not pairs:
        modes = sorted({vector.mode for vector in vectors})
        return card | {"answer": f"Only {modes[0]} vectors here" if len(modes) == 1 else "Not compared" if modes else "No vectors here",
                       "tone": "open",
                       "lines": ["The two modes of one embedder are not paired here: score both in one call of evaluate.py."]}
    sides = [side_of(pair) for _, _, pair in pairs]
    if len(pairs) == 1:
        card["bars"] = [(vector.mode, figure(vector.row["overall"], digits=1)) for vector in pairs[0][:2]]
    else:
        card["bars"] = [(a.name, figure(pair, "difference", digits=1, sign=True)) for a, _, pair in pairs]
    lines = [f"{a.name}: joint {a.row['overall']['score']:.1f}, visual-only {b.row['overall']['score']:.1f}. The difference is "
             f"{points(pair)}."
             for a, b, pair in pairs if pair["difference"] is not None] if len(pairs) == 1 else ["Joint minus visual-only, in points, with "
                                                                                                 "95% interval."]
    if len(pairs) == 1:
        answer, tone = {1: ("Joint", "yes"), -1: ("Visual-only", "yes"), 0: ("No difference shown", "open")}[sides[0]]
        if sides[0]:
            answer += f", by {abs(pairs[0][2]['difference']):.1f} points"
    else:
        more = max((1, -1), key=sides.count)
        leader = "Joint" if more > 0 else "Visual-only"
        answer = f"{leader}, for {sides.count(more)} of {len(pairs)} embedders" if more in sides else "No difference shown"
        tone = "yes" if sides.count(more) == len(pairs) else "mixed" if more in sides else "open"
    return card | {"answer": answer, "tone": tone, "lines": lines}


def domain_card(data, pairs, vectors):
    """In which domain? With pairs: where joint leads. Without: which domain is answered best."""
    names = list(data["groups"].get("domain", {}))
    if not pairs:
        best = max((vector for vector in vectors if vector.row["overall"]["n"]), key=lambda vector: vector.row["overall"]["score"],
                   default=None)
        if not best:
            return {"question": "In which domain?", "answer": "No scores", "tone": "open", "lines": [], "bars": []}
        groups = {name: best.row["by_domain"][name] for name in names if best.row["by_domain"][name]["n"]}
        top = easiest(best)
        return {"question": "In which domain?", "answer": f"Best in {top}" if top else "No domain stands out", "tone": "yes" if top
                else "open",
                "lines": [f"Scores of {best.name} {best.mode}, with 95% interval."],
                "bars": [(nice(DOMAINS, name), Figure(group["score"], group["interval"], 1)) for name, group in groups.items()]}
    sides = {name: [side_of(pair["by_domain"].get(name)) for _, _, pair in pairs] for name in names}
    size = {name: float(np.mean([pair["by_domain"][name]["difference"] or 0 for _, _, pair in pairs])) for name in names}
    most = max(names, key=lambda name: (sum(sides[name]), size[name]))
    lead, behind = [n for n in names if sum(sides[n]) > 0], [n for n in names if sum(sides[n]) < 0]
    if not lead:
        answer, tone = ("Visual-only leads in " + listed(nice(DOMAINS, n) for n in behind),
                        "yes") if behind else ("No domain separates the modes", "open")
    elif len(lead) == len(names):
        answer, tone = f"Joint leads in every domain, most in {nice(DOMAINS, most)}", "yes"
    else:
        answer, tone = "Joint leads in " + listed(nice(DOMAINS, n) for n in lead), "yes"
        answer += f", visual-only in {listed(nice(DOMAINS, n) for n in behind)}" if behind else ""
    if len(pairs) > 1:
        counts = [f"{nice(DOMAINS, name)} {sides[name].count(1)}" + (f" (behind {sides[name].count(-1)})" if -1 in sides[name] else "")
                  for name in names]
        return {"question": "In which domain?", "answer": answer, "tone": tone,
                "lines": ["Joint minus visual-only, in points, the mean over the embedders.",
                          f"With its whole interval joint is ahead, of {len(pairs)} embedders: {', '.join(counts)}."],
                "bars": [(nice(DOMAINS, name), Figure(size[name], None, 1, True)) for name in names]}
    groups = pairs[0][2]["by_domain"]
    unclear = [nice(DOMAINS, name) for name in names if not sides[name][0]]
    return {"question": "In which domain?", "answer": answer, "tone": tone,
            "lines": ["Joint minus visual-only, in points, with 95% interval." + (f" Not separated: {listed(unclear)}." if unclear else ""),
                      *([f"Joint scores are highest in {top}."] if (top := easiest(pairs[0][0])) else [])],
            "bars": [(nice(DOMAINS, name), Figure(groups[name]["difference"], groups[name]["interval"], 1, True)) for name in names
                     if groups[name]["n"]]}


def easiest(vector):
    """The domain whose score lies above each other one's with the whole interval (of other items, so unpaired), or None."""
    found, below = vector.row.get("domain_differences", []), {}
    for entry in found:
        if side := side_of(entry):
            below.setdefault(entry["a" if side > 0 else "b"], set()).add(entry["b" if side > 0 else "a"])
    names = {entry[side] for entry in found for side in "ab"}
    return next((nice(DOMAINS, name) for name, others in below.items() if len(others) == len(names) - 1), None)


def support_of(data, vectors):
    """For each Vector: {"all": (failing, closest), DOMAIN: ...}, None in place of the two where no control was scored.
    failing: controls that matched is not above with its whole interval; closest: the (condition, pair) with the smallest lead."""
    found = []
    for vector in vectors:
        pairs = [(name, pair) for name, row in vector.controls.items() if name.split("-")[0] != "raw_image"
                 and (pair := pair_of(data, vector.row, row))]
        groups = {"all": pairs, **{domain: [(name, pair["by_domain"][domain]) for name, pair in pairs]
                                   for domain in data["groups"].get("domain", {})}}
        found.append({group: ([nice(CONDITION_NAMES, name) for name, pair in entries if side_of(pair) < 1],
                              min(entries, key=lambda entry: entry[1]["difference"])) if (entries := [e for e in known if e[1]["n"]])
                      else None
                      for group, known in groups.items()})
    return found


def controls_card(data, vectors):
    """Do the controls support it? A vector is supported where matched lies above each control, with its whole interval."""
    found, lines = support_of(data, vectors), []
    for vector, groups in zip(vectors, found):
        label = f"{vector.name} {vector.mode}"
        if not groups["all"]:
            lines.append(f"{label}: no controls were scored, so its score may come from the question alone.")
        elif failing := groups["all"][0]:
            lines.append(f"{label}: not above {listed(failing)}.")
    good = [(groups["all"][1][1]["difference"], f"{vector.name} {vector.mode}", *groups["all"][1]) for vector, groups in zip(vectors, found)
            if groups["all"] and not groups["all"][0]]
    if good:
        _, label, name, pair = min(good, key=lambda entry: entry[0])
        lines.append(f"Smallest lead of a supported vector: {label} over {nice(CONDITION_NAMES, name)}, {points(pair)}.")
    weak = [group for groups in found for group, entry in groups.items() if entry and entry[0]]
    supported = sum(bool(groups["all"]) and not groups["all"][0] for groups in found)
    if not any(groups["all"] for groups in found):
        answer, tone = "No controls here", "open"
    elif supported < len(vectors):
        answer, tone = (f"For {supported} of {len(vectors)} vectors", "mixed") if supported else ("No", "no")
    else:
        failing = {vector.mode for vector, groups in zip(vectors, found) if any(entry and entry[0] for entry in groups.values())}
        strong = list(dict.fromkeys(vector.mode for vector in vectors if vector.mode not in failing))
        answer, tone = ("Yes, in every domain", "yes") if not weak else (
            f"Yes overall, in every domain for {listed(strong)} only" if strong else "Yes overall, but not in every domain", "mixed")
    names = ["all", *data["groups"].get("domain", {})]
    rows = [(f"{vector.name} {vector.mode}", [groups.get(name) for name in names]) for vector, groups in zip(vectors, found)]
    if len(vectors) > 6:                                # too long for the top of the page: a line a mode, with counts
        rows = []
        for mode in dict.fromkeys(vector.mode for vector in vectors):
            mine = [groups for vector, groups in zip(vectors, found) if vector.mode == mode]
            rows.append((mode, [f"{sum(bool(groups.get(name)) and not groups[name][0] for groups in mine)} of {len(mine)}"
                                for name in names]))
    tested = ", ".join(dict.fromkeys(nice(CONDITION_NAMES, name.split("-")[0]) for vector in vectors for name in vector.controls))
    grid = ([nice(DOMAINS, name) if name != "all" else "all items" for name in names], rows)
    return {"question": "Do the controls support it?", "answer": answer, "tone": tone, "bars": [], "grid": grid,
            "lines": [f"Supported: matched scores above every control scored here ({tested or 'none'}), with the whole 95% interval of the "
                      "difference.", *lines[:3], *lines[3:][-1:]]}


# ---- tables, for both outputs ----
def figure(group, key="score", **style):
    return Figure(group and group.get(key), group and group.get("interval"), **style)


def counted(row):
    n, missing = row["overall"]["n"], row["overall"]["missing"]
    return f"{n}" + (f" of {n + missing}, PARTIAL" if missing else "") + (f", first {row['limit']} items" if row.get("limit") else "")


def usable(pair):
    found = (pair or {}).get("usable_information_bits") or {}
    return Figure(found.get("mean"), found.get("interval"))


def main_table(data, vectors, paper):
    """Embedder x mode x domain; below it the text-only floor, a model that saw the image, and the paper's figures, each marked."""
    domains = list(data["groups"]["domain"])
    rows, marks, floors, failed = [], [], {}, False

    def add(mark, name, mode, row, bits=Figure(None)):
        lost = row["overall"]["failed"]
        rows.append([name, mode, counted(row), f"{figure(row['overall'])}; {row['overall']['bound']:.2f} with {lost} failed at 0" if lost
                     else figure(row["overall"]), figure(row["domain_mean"]), *(figure(row["by_domain"][domain]) for domain in domains),
                     bits])
        marks.append(mark)
        return bool(lost)
    for vector in vectors:
        floor = vector.controls.get("text_only")
        failed |= add("", vector.name, vector.mode, vector.row, usable(floor and pair_of(data, vector.row, floor)))
    for row in data["rows"]:
        key = json.dumps([row["condition"], row["overall"]["score"], row["overall"]["bits"], row["domain_mean"]["score"],
                          row["overall"]["n"]])
        if row["condition"] in ("text_only", "raw_image") and key not in floors:
            floors[key] = add("floor", {"text_only": "no vector"}.get(row["condition"], nice(EMBEDDERS, row["embedder"]
                                                                                             or "reference model")),
                              nice(CONDITION_NAMES, row["condition"]), row)
    known = [row for row in paper.get("rows", []) if row.get("score") is not None]
    for row in known:
        rows.append([f"{row.get('embedder')} (paper)", nice(MODES, row["mode"]) if row.get("mode")
                     else nice(CONDITION_NAMES, row.get("condition")),
                     str(row.get("n") or "-"), Figure(row["score"]), Figure(None),
                     *(Figure(None if domain in PAPER_FIELDS else row.get(domain)) for domain in domains), Figure(None)])
        marks.append("paper")
    note = ("Score 0-100 with 95% interval. Usable bits: what the vector adds to the question alone, in bits per answer.")
    if known:
        source = paper.get("source") or "a source not given"
        note += f" Rows marked (paper): published in {source} for its own 900 test items, not run here."
    if failed:
        note += " Failed items are left out of the score; the second figure counts them as 0."
    return Table("Scores", note, ["Embedder", "Mode", "n", "All items", "Mean of domains", *(nice(DOMAINS, name).capitalize()
                                                                                             for name in domains),
                                  "Usable bits"], rows, marks)


def pairs_table(data, pairs):
    names = list(data["groups"]["domain"])
    rows = [[a.name, figure(pair, "difference", sign=True), f"{pair['p']:.4f}" if pair["p"] is not None else "-",
             *(figure(pair["by_domain"][name], "difference", sign=True) for name in names)] for a, _, pair in pairs]
    return Table("Joint minus visual-only", "Paired on the same items, in points, with 95% interval; p by sign flips, not corrected for "
                 "the number of rows.",
                 ["Embedder", "All items", "p", *(nice(DOMAINS, name).capitalize() for name in names)], rows, [""] * len(rows))


def controls_table(data, vectors):
    names, rows, marks = list(data["groups"]["domain"]), [], []
    for vector in vectors:
        for condition, row in {"matched": vector.row, **vector.controls}.items():
            pair = pair_of(data, vector.row, row)
            floor = vector.controls.get("text_only")
            won = f"{pair['won']} / {pair['lost']} / {pair['tied']}" if pair else "-"
            rows.append([vector.name, vector.mode, nice(CONDITION_NAMES, condition), figure(row["overall"]),
                         figure(pair, "difference", sign=True),
                         *(figure(pair and pair["by_domain"][name], "difference", sign=True) for name in names),
                         f"{pair['p']:.4f}" if pair and pair["p"] is not None else "-", won, usable(floor and pair_of(data, row, floor))])
            marks.append("" if condition == "matched" else "control")
    used = sorted({name.split("-")[0] for vector in vectors for name in vector.controls}, key=lambda name: list(CONDITION_MEANS).index(name)
                  if name in CONDITION_MEANS else 99)
    note = "Matched minus each control, paired, in points. " + "; ".join(f"{nice(CONDITION_NAMES, name)}: {CONDITION_MEANS[name]}"
                                                                         for name in used
                                                                         if name in CONDITION_MEANS) + "."
    return Table("Controls", note, ["Embedder", "Mode", "Condition", "Score", "Matched minus it", *(nice(DOMAINS, name).capitalize()
                                                                                                    for name in names), "p",
                                    "Won / lost / tied", "Usable bits"], rows, marks)


def support_table(data, vectors):
    """The grid of the summary in words: where matched is above every control, and which ones it is not above elsewhere."""
    words = lambda entry: "no controls" if not entry else f"not above {listed(entry[0])}" if entry[0] else "yes"
    names = ["all", *data["groups"].get("domain", {})]
    rows = [[vector.name, vector.mode, *(words(groups.get(name)) for name in names)] for vector,
            groups in zip(vectors, support_of(data, vectors))]
    return Table("Is matched above every control?", "Yes: the whole 95% interval of matched minus control lies above 0, for each control.",
                 ["Embedder", "Mode", "All items", *(nice(DOMAINS, name).capitalize() for name in names[1:])], rows, [""] * len(rows))


def group_table(data, vectors, kind, title, note, label):
    """Scores of matched and text-only rows per group of a kind (source, seen)."""
    names, rows, marks, floors = list(data["groups"].get(kind, {})), [], [], []
    for vector in vectors:
        rows.append([vector.name, vector.mode, *(figure(vector.row[f"by_{kind}"][name]) for name in names)])
        marks.append("")
        floor = vector.controls.get("text_only")
        if floor and [floor[f"by_{kind}"][name]["score"] for name in names] not in floors:
            floors.append([floor[f"by_{kind}"][name]["score"] for name in names])
            rows.append(["no vector", "text only", *(figure(floor[f"by_{kind}"][name]) for name in names)])
            marks.append("floor")
    order = sorted(range(len(rows)), key=lambda i: marks[i] == "floor")
    return Table(title, note, ["Embedder", "Mode", *(f"{label(name)} (n={data['groups'][kind][name]})" for name in names)],
                 [rows[i] for i in order],
                 [marks[i] for i in order])


def trust_table(vectors):
    rows = []
    for vector in vectors:
        for condition, row in {"matched": vector.row, **vector.controls}.items():
            all_items = row["overall"]
            rows.append([vector.name, vector.mode, nice(CONDITION_NAMES, condition),
                         *(str(all_items[name]) for name in ("empty", "unparsed", "failed")),
                         *(Figure(all_items[name]) for name in ("distinct", "chance", "majority", "bits"))])
    return Table("How far to trust it", "Counts of empty, unparsed and failed answers; share of distinct answers (near 0: the readout says "
                 "one thing to everything); "
                 "score of guessing and of always giving a source's most frequent answer; bits per answer.",
                 ["Embedder", "Mode", "Condition", "Empty", "Unparsed", "Failed", "Distinct", "Chance", "Majority answer",
                  "Bits per answer"], rows,
                 [""] * len(rows))


def leak_tables(data):
    """controls.py's leak check, per source, and the spread over repeated shuffles, where its run has them."""
    for found in data["beside"].values():
        label = f"{nice(EMBEDDERS, found.get('embedder'))} {nice(MODES, found.get('mode'))}"
        leaks = found.get("leak_check") or {}
        if len(leaks) > 1:
            names = sorted({name for column in leaks.values() for name in column})
            yield Table(f"Did the embedder answer the question itself? {label}", "Per source, in points: far above 0 without the question "
                        "and with it means the image's "
                        "content survives; only with it, that the vector carries an answer rather than a description. See controls.py, "
                        "leak_check.",
                        ["Source", *(shown(name) for name in leaks)],
                        [[shown(name), *(figure(column.get(name), "difference", sign=True) for column in leaks.values())]
                         for name in names], [""] * len(names))
        if spread := found.get("spread"):
            yield Table(f"Over {spread['repeats']} shuffles, {label}", "", ["Mean", "Standard deviation", "Lowest", "Highest",
                                                                            "Separated from matched"],
                        [[*(Figure(spread[name]) for name in ("mean", "sd", "low", "high")), f"{spread['separated']} of "
                          f"{spread['repeats']}"]], [""])


def paper_table(paper):
    names = list(DOMAINS)
    rows = [[shown(row.get("embedder") or "-", 120), nice(MODES, row["mode"]) if row.get("mode") else "-",
             nice(CONDITION_NAMES, row.get("condition") or "-"),
             str(row.get("n") or "-"), Figure(row.get("score")), *(Figure(row.get(name)) for name in names),
             shown(row.get("note") or "-", 160),
             shown(row.get("source") or paper.get("source") or "-", 120)] for row in paper.get("rows", [])]
    return Table("Published figures", "Not run here. A dash is a figure that is not published in anything that could be read.",
                 ["Embedder", "Mode", "Input", "n", "All items", *(nice(DOMAINS, name).capitalize() for name in names), "Note", "Source"],
                 rows,
                 ["paper"] * len(rows))


def curve_table(curve):
    rows = [[shown(point["budget"]), str(point["bytes"]), Figure(point["score"], point["score_interval"]),
             Figure(point["bits"], point["bits_interval"]),
             figure(point["difference"], "difference", sign=True), shown(point["verdict"], 160)] for point in curve["points"]]
    return Table(f"Score against bytes per vector: {nice(EMBEDDERS, curve.get('embedder'))} {nice(MODES, curve.get('mode'))}",
                 "One readout a budget, trained on what is left of the vector.",
                 ["Budget", "Bytes", "Score", "Usable bits", "Full vector minus it", "Verdict"], rows, [""] * len(rows))


def read_curves(args, data):
    """curve.json files: those named, else those in RUN_DIR (any depth) and beside the predictions."""
    folders = [os.path.dirname(os.path.join(args.root, row["file"])) for row in data["rows"]]
    paths = args.curve or sorted({*itertools.chain(*(glob.glob(os.path.join(glob.escape(f), "**/curve.json"), recursive=True)
                                                     for f in args.run_dirs)),
                                  *(path for f in folders if os.path.exists(path := os.path.join(f, "curve.json")))})
    curves = []
    for path in paths:
        curve = read_json(path)
        needed = ("budget", "family", "bytes", "score", "score_interval", "bits", "bits_interval", "difference", "verdict")
        if not isinstance(curve.get("points"), list) or not curve["points"] or any(name not in point for point in curve["points"]
                                                                                   for name in needed):
            raise UserError(f"{path}: expected a curve.json of controls.py curve, with points that have {', '.join(needed)}")
        check_shape(path, curve, CURVE)
        if curve.get("inputs", {}).get("items") not in (None, data["items"]["sha256"]):
            raise UserError(f"{path}: made from other items (SHA-256 {str(curve['inputs']['items'])[:12]}) than the scores. Leave it out, "
                            "or make it again")
        curves.append(curve)
    return curves


def provenance(args, data):
    """How the figures came about: (Table with a line a prediction file, list of commands in order, list of deviations)."""
    rows, stages = [], {"extract": {}, "fit": {}, "predict": {}, "score": {}}    # dicts: each command once, in order
    for row in data["rows"]:
        meta = data["metas"].get(row["file"], {})
        words = [str(word) for word in meta["command"]] if isinstance(meta.get("command"), list) else []
        vectors = meta.get("embeddings") if isinstance(meta.get("embeddings"), dict) else {}
        readout = read_beside(args, values_after(words, "--readout"), "/readout.json")
        readout = readout if readout.get("content_sha256") == row.get("readout_sha256") else {}     # another one has taken its place
        fit = argv_of(readout)
        for flag in ("--train-embeddings", "--dev-embeddings"):
            stages["extract"][command(["extract.py", *argv_of(read_beside(args, values_after(fit, flag), ".meta.json"))])] = True
        stages["extract"][command(["extract.py", *argv_of(vectors)])] = True
        stages["fit"][command(fit)] = True
        stages["predict"][command(words)] = True
        rows.append([shown(row["file"], 120), nice(CONDITION_NAMES, row["condition"]), short(row.get("readout_sha256")),
                     *(shown(inside(readout, "arguments", dict).get(name, "-"), 40) for name in ("seed", "decoder")),
                     shown(vectors.get("model") or "-", 60), short(vectors.get("weights_sha256")), shown(vectors.get("dim") or "-", 20),
                     shown(meta.get("device") or "-", 20),
                     shown(", ".join(f"{name} {version}" for name, version in inside(meta, "versions", dict).items()) or "-", 160),
                     shown(meta.get("seconds", "-"), 20)])
    for folder in data["beside"]:
        path = os.path.join(folder, "commands.sh")
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                stages["predict"].update({clean(line, 4000): True for line in file.read().splitlines() if not line.startswith("#")})
    for facts in data["runs"]:
        stages["score"][command(["evaluate.py", *argv_of(facts)])] = True
    table = Table("Prediction files", "Hashes are the first 12 digits of SHA-256; the sidecars beside the files hold all of them.",
                  ["File", "Condition", "Readout", "Seed", "Decoder", "Embedder's weights", "Hash", "Dim", "Device", "Versions", "Seconds"],
                  rows, [""] * len(rows))
    deviations = [f"{clean(note)}." for note in data["notes"]]
    limits = collections.Counter(row["limit"] for row in data["rows"] if row.get("limit"))
    deviations += [f"{count} of {len(data['rows'])} prediction files have the first {limit} items only." for limit, count in limits.items()]
    deviations.append("Adapter, prompts, learning rates, normalisation, split membership and scoring rules are not published; ours are "
                      "listed in "
                      "README.md, Deviations and choices.")
    return table, [line for commands in stages.values() for line in commands if line], deviations


def command(words):
    """A command line to paste, or "" where the words after the script's name are not known."""
    return clean("python " + shlex.join(words), 4000) if len(words) > 1 else ""


def argv_of(meta):
    """The words after the script's name that a sidecar recorded in run.argv."""
    return [str(word) for word in inside(inside(meta, "run", dict), "argv", list)]


def values_after(words, flag):
    """The word after a flag, as a list of none or one."""
    return words[words.index(flag) + 1:][:1] if flag in words else []


def read_beside(args, names, ending):
    """The JSON file NAME + ending, or {} where there is no name or no file any more."""
    paths = [os.path.join(args.root, name.rstrip("/") + ending) for name in names]
    return read_json(paths[0]) if paths and os.path.exists(paths[0]) else {}


def inside(record, name, kind):
    """The value of a name in a sidecar where it is of this kind, else an empty one: what is not known of a run is not shown."""
    value = record.get(name)
    return value if isinstance(value, kind) else kind()


def read_paper(path):
    """Published figures, as evaluate.py --paper reads them."""
    paper = read_json(path)
    check_shape(path, paper, PAPER)
    return paper


def short(digest):
    return shown(digest[:12]) if isinstance(digest, str) else "-"


# ---- order against another benchmark ----
def read_benchmark(path):
    """Scores of another benchmark from a CSV with the columns embedder and score, optional mode and source: list of dicts."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot read as CSV in UTF-8 ({shown(error)})") from None
    for number, row in enumerate(rows, 1):
        try:
            value = float(row["score"])
        except (KeyError, TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value) or not row.get("embedder"):
            raise UserError(f"{path} row {number}: expected a name in 'embedder' and a number in 'score', found {shown(dict(row))}. "
                            "Leave out models whose score is not known")
        row["score"] = value
    if not rows:
        raise UserError(f"{path}: expected a header with embedder and score, and one row or more, found none")
    names = [(row["embedder"].lower(), row.get("mode")) for row in rows]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: expected each embedder once (or once a mode), found {shown(max(names, key=names.count))} again")
    return rows


def average_ranks(values):
    """Ranks from 1 for the lowest; equal values share the mean of their ranks. (n,) -> (n,)."""
    values = np.asarray(values, float)
    return ((values[:, None] > values).sum(1) + (values[:, None] >= values).sum(1) + 1) / 2


def correlations(x, y):
    """Kendall's tau-b and Spearman's rho of n pairs with two-sided permutation p-values: exact up to EXACT pairs, else RANDOM_ORDERS draws.

    tau-b = S / sqrt((P - Tx)(P - Ty)) with S the concordant minus the discordant pairs, P = n(n-1)/2, T the tied pairs (Kendall 1945);
    rho = Pearson's correlation of average ranks. p: share of all orders of y whose |statistic| is at least as large. None where a list is
    constant.
    """
    x, y, n = np.asarray(x, float), np.asarray(y, float), len(x)
    if n < 2 or len(set(x.tolist())) < 2 or len(set(y.tolist())) < 2:
        return {"n": n, "tau": None, "tau_p": None, "rho": None, "rho_p": None, "exact": n <= EXACT}
    if n <= EXACT:
        orders = np.array(list(itertools.permutations(range(n))))
    else:
        rng = np.random.default_rng(0)
        orders = np.concatenate([np.arange(n)[None], rng.permuted(np.tile(np.arange(n), (RANDOM_ORDERS, 1)), axis=1)])
    i, j = np.triu_indices(n, 1)
    signs, other = np.sign(x[i] - x[j]), np.sign(y[:, None] - y)
    concordance = sum(sign * other[orders[:, a], orders[:, b]] for sign, a, b in zip(signs, i, j))  # (orders,); row 0 is the order found
    ranks, partner = average_ranks(x), average_ranks(y)
    products = partner[orders] @ (ranks - ranks.mean())
    share = lambda values: float((np.abs(values) >= abs(values[0]) - 1e-9).mean())
    return {"n": n, "tau": float(concordance[0] / np.sqrt(np.count_nonzero(signs) * np.count_nonzero(other[i, j]))),
            "tau_p": share(concordance),
            "rho": float(products[0] / (n * ranks.std() * partner.std())), "rho_p": share(products), "exact": n <= EXACT}


def least_tau(n):
    """The smallest |tau| of n pairs without ties that reaches an exact two-sided p of 0.05, or None; by Mahonian numbers (inversions)."""
    counts = [1]
    for size in range(2, n + 1):
        counts = [sum(counts[max(0, k - size + 1):k + 1]) for k in range(len(counts) + size - 1)]
    total, pairs, tail = math.factorial(n), n * (n - 1) // 2, 0
    least = None
    for inversions in range(pairs // 2 + 1):
        tail += 2 * counts[inversions] if 2 * inversions != pairs else counts[inversions]
        if tail / total > 0.05:
            break
        least = 1 - 2 * inversions / pairs
    return least


def orders_of(vectors, benchmark):
    """For each mode: its models with both scores, the correlations, and a sentence on how little so few models can show."""
    found = []
    for mode in dict.fromkeys(vector.row["mode"] for vector in vectors):
        models = []
        for vector in vectors:
            names = {str(vector.row["embedder"]).lower(), nice(EMBEDDERS, vector.row["embedder"]).lower(), vector.name.lower()}
            match = [row for row in benchmark if row["embedder"].lower() in names
                     and row.get("mode") in (None, "", vector.row["mode"])]
            if vector.row["mode"] == mode and match and vector.row["overall"]["score"] is not None:
                models.append((vector.name, match[0]["score"], vector.row["overall"]["score"]))
        result = correlations([model[1] for model in models], [model[2] for model in models])
        n, least = len(models), least_tau(len(models)) if len(models) > 1 else None
        words = f"{n} model{'s are' if n != 1 else ' is'} few: " + (f"without ties only |tau| of {least:.2f} or more reaches p = 0.05, and "
                                                                    "the swap of two "
                                                                    f"neighbours changes tau by {4 / (n * (n - 1)):.2f}." if least else
                                                                    "no order of so few can reach p = 0.05.")
        found.append({"mode": nice(MODES, mode), "models": models, **result, "words": words})
    return found


def order_table(orders, name):
    digits = lambda value, n=2: "-" if value is None else f"{value:.{n}f}"
    rows = [[order["mode"], str(order["n"]), digits(order["tau"]), digits(order["tau_p"], 4), digits(order["rho"]),
             digits(order["rho_p"], 4), order["words"]]
            for order in orders]
    return Table(f"Order of models against {name}", "Kendall's tau-b and Spearman's rho of the scores, with two-sided permutation p"
                 f" ({'exact' if all(order['exact'] for order in orders) else 'by random orders above ' + str(EXACT) + ' models'}).",
                 ["Mode", "n", "tau", "p", "rho", "p", "How to read it"], rows, [""] * len(rows))


# ---- Markdown ----
def markdown_table(table):
    cell = lambda text: re.sub(r"([|\\`*<_\[])", r"\\\1", shown(text, 200)) if not isinstance(text, Figure) else str(text)
    lines = [map(cell, table.header), ["---"] * len(table.header), *(map(cell, row) for row in table.rows)]
    return "\n\n".join(filter(None, [f"**{cell(table.title)}**", "\n".join("| " + " | ".join(line) + " |" for line in lines),
                                     cell_text(table.note)])) + "\n"


def cell_text(text):
    """Running text for Markdown: what could be read as markup is escaped."""
    return re.sub(r"([\\`*<_\[])", r"\\\1", text)


def write_markdown(path, page):
    parts = [f"# {cell_text(page['title'])}", *([f"**{cell_text(page['note'])}**"] if page["note"] else []), cell_text(page["lede"])]
    parts += ["\n".join(f"- **{card['question']}** {cell_text(card['answer'])}. {' '.join(map(cell_text, card['lines']))}"
                        for card in page["cards"])]
    parts += [markdown_table(table) for table in page["tables"]]
    parts += ["**Deviations and notes**\n\n" + "\n".join(f"- {cell_text(line)}" for line in page["deviations"])]
    fence = "`" * max([3, *(len(run) + 1 for line in page["commands"] for run in re.findall("`+", line))])
    parts += [f"**Commands**\n\n{fence}bash\n" + "\n".join(page["commands"]) + f"\n{fence}", cell_text(page["foot"])]
    write_atomic(path, lambda file: file.write(("\n\n".join(part.rstrip("\n") for part in parts) + "\n").encode()))


# ---- charts: inline SVG, coloured by the page's style so that they follow light and dark ----
SHAPES = {  # condition: a path around (0, 0); filled only for matched, so that shape and filling tell them apart without colour
    "matched": "M-5.5 0A5.5 5.5 0 1 0 5.5 0A5.5 5.5 0 1 0-5.5 0Z", "text_only": "M0-9V9", "zero": "M0-4.5 4.5 3.5H-4.5Z",
    "shuffled": "M-4-4H4V4H-4Z", "raw_image": "M0-6 6 0 0 6-6 0Z", "text_only_ablated": "M-4-4 4 4M-4 4 4-4"}
OTHER_SHAPE = "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0-3 0Z"


def mark(condition, x=0.0, y=0.0, title=""):
    """One marker of a condition at (x, y); `title` shows when a pointer rests on it."""
    kind = condition.split("-")[0]
    path = SHAPES.get(kind, OTHER_SHAPE)
    return (f'<path class="m {"matched" if kind == "matched" else "other"}" d="{path}" transform="translate({x:.1f} {y:.1f})">'
            f'{f"<title>{html.escape(title)}</title>" if title else ""}</path>')


def forest(vectors, title, group_of):
    """One panel: a line for each vector, matched as a filled dot with its interval, controls as open shapes, on one scale of 0 to 100."""
    width, left, right, step, top = 280, 7, 273, 44, 28
    x, height = lambda score: left + (right - left) * score / 100, top + step * len(vectors) + 22
    svg = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}: scores with intervals, also in '
           'the table">',
           f'<text class="t" x="{left}" y="16">{html.escape(shown(title, 34))}</text>']
    for tick in range(0, 101, 25):
        svg += [f'<path class="grid" d="M{x(tick):.1f} {top}V{height - 20}"/>', f'<text class="tick" x="{x(tick):.1f}" y="{height - 6}" '
                f'text-anchor="{"start" if tick == 0 else "end" if tick == 100 else "middle"}">{tick}</text>']
    for number, vector in enumerate(vectors):
        y, group = top + step * number + 30, group_of(vector.row)
        name = f"{vector.name} {vector.mode}"
        svg.append(f'<g class="{"joint" if vector.mode == "joint" else "visual"}"><text class="l" x="{left}" '
                   f'y="{y - 13}">{html.escape(f"{shown(vector.name, 33 - len(vector.mode))} {vector.mode}")}</text>')
        if group["score"] is not None:
            svg += [f'<text class="v" x="{right}" y="{y - 13}" text-anchor="end">{group["score"]:.1f}</text>',
                    f'<path class="base" d="M{left} {y}H{right}"/>']
            for condition, row in vector.controls.items():
                other = group_of(row)
                if other["score"] is not None:
                    svg.append(mark(condition, x(other["score"]), y, f"{nice(CONDITION_NAMES, condition)}: {figure(other)}"))
            if group["interval"]:
                low, high = map(x, group["interval"])
                svg.append(f'<path class="whisker" d="M{low:.1f} {y}H{high:.1f}M{low:.1f} {y - 4}v8M{high:.1f} {y - 4}v8"/>')
            svg.append(mark("matched", x(group["score"]), y, f"{name}: {figure(group)}"))
        svg.append("</g>")
    return "".join([*svg, "</svg>"])


def bars(entries):
    """Differences with whiskers on one scale around 0, as a list: name, value, bar."""
    edge = max([1.0, *(abs(value) for _, entry in entries for value in (entry.value or 0, *(entry.bounds or ())))]) * 1.05
    signed = any(entry.sign for _, entry in entries)
    x = lambda value: 4 + 192 * ((value + edge) / (2 * edge) if signed else value / 105)
    rows = []
    for name, entry in entries:
        if entry.value is None:
            continue
        low, high = entry.bounds or (entry.value, entry.value)
        kind = "joint" if (entry.value > 0 if signed else name != "visual-only") else "visual"
        kind = "flat" if signed and low <= 0 <= high else kind
        begin, end = sorted((x(0), x(entry.value)))
        whisker = f'<path class="whisker" d="M{x(low):.1f} 9H{x(high):.1f}M{x(low):.1f} 5v8M{x(high):.1f} 5v8"/>' if entry.bounds else ""
        rows.append(f'<li><span>{html.escape(name)}</span><b>{entry.number()}</b><svg class="bar {kind}" viewBox="0 0 200 18" '
                    f'preserveAspectRatio="none" role="img" aria-label="{html.escape(str(entry))}"><path class="axis" '
                    f'd="M{x(0):.1f} 0V18"/>'
                    f'<rect x="{begin:.1f}" y="4" width="{max(1, end - begin):.1f}" height="10"/>{whisker}</svg></li>')
    return f'<ul class="bars">{"".join(rows)}</ul>' if rows else ""


FAMILIES = {"full": ("M0-5 5 0 0 5-5 0Z", "full vector"), "first": ("M-4-4H4V4H-4Z", "first d dimensions"),
            "random": ("M0-5 5 4H-5Z", "random projection"),
            "int8": ("M0 5 5-4H-5Z", "int8"), "binary": ("M-4-4 4 4M-4 4 4-4", "binary signs"), "mixed": ("M-5 0H5M0-5V5", "combined")}


def curve_panel(points, name, label, floor):
    """Score or usable bits against bytes per vector (log scale) with intervals; the dashed line is text-only."""
    points = [point for point in points if point[name] is not None and point["bytes"]]
    if not points:
        return ""
    values = [value for point in points for value in (point[name], *(point[f"{name}_interval"] or ()))] + [floor]
    margin = (max(values) - min(values)) * 0.1 or 1.0
    low, high = min(values) - margin, max(values) + margin
    sizes = [math.log2(point["bytes"]) for point in points]
    first, last = min(sizes) - 0.5, max(sizes) + 0.5
    x = lambda size: 44 + (math.log2(size) - first) / (last - first) * 304
    y = lambda value: 28 + (high - value) / (high - low) * 190
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 6)
    svg = [f'<svg class="chart" viewBox="0 0 360 264" role="img" aria-label="{html.escape(label)} against bytes per vector"><text '
           f'class="t" x="12" y="16">{html.escape(label)}</text>']
    for tick in range(math.ceil(low / step), math.floor(high / step) + 1):
        svg += [f'<path class="grid" d="M44 {y(tick * step):.1f}H348"/>', f'<text class="tick" x="38" y="{y(tick * step) + 4:.1f}" '
                f'text-anchor="end">{tick * step:g}</text>']
    for exponent in range(math.ceil(first), math.floor(last) + 1, max(1, math.ceil((last - first) / 7))):
        svg.append(f'<text class="tick" x="{x(2 ** exponent):.1f}" y="236" text-anchor="middle">{2 ** exponent}</text>')
    svg += [f'<text class="tick" x="348" y="256" text-anchor="end">bytes per vector</text><path class="floor" d="M44 {y(floor):.1f}H348"/>',
            f'<text class="tick" x="346" y="{y(floor) - 5:.1f}" text-anchor="end">text only, 0 bytes</text>']
    for family, (path, _) in FAMILIES.items():
        line = sorted((point for point in points if point["family"] == family), key=lambda point: point["bytes"])
        svg.append(f'<g class="family {family}">')
        if len(line) > 1:
            corners = " ".join(f"{x(point['bytes']):.1f},{y(point[name]):.1f}" for point in line)
            svg.append(f'<polyline points="{corners}"/>')
        for point in line:
            if bounds := point[f"{name}_interval"]:
                svg.append(f'<path class="whisker" d="M{x(point["bytes"]):.1f} {y(bounds[0]):.1f}V{y(bounds[1]):.1f}"/>')
            title = f"{point['budget']}, {point['bytes']} bytes: {Figure(point[name], point[f'{name}_interval'])}"
            svg.append(f'<path class="dot" d="{path}" transform="translate({x(point["bytes"]):.1f} {y(point[name]):.1f})">'
                       f'<title>{html.escape(title)}</title></path>')
        svg.append("</g>")
    return "".join([*svg, "</svg>"])


def slope_chart(order, name):
    """Two columns of ranks, a line a model; the best stands on top."""
    models, step, here = order["models"], 26, f"here, {order['mode']}"
    left, right = (average_ranks([-model[column] for model in models]) for column in (1, 2))
    y = lambda rank: 26 + step * rank
    def text(x, y, anchor, style, words):
        return f'<text class="{style}" x="{x}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'
    svg = [f'<svg class="chart slope" viewBox="0 0 480 {step * len(models) + 46}" role="img" '
           f'aria-label="{html.escape(f"ranks in {name} and {here}")}">',
           text(182, 16, "end", "t", shown(name, 24)), text(298, 16, "start", "t", here)]
    taken = {}                                          # models that share a rank stand one under the other
    for (label, a, b), first, second in zip(models, left, right):
        kind = "same" if first == second else "up" if second < first else "down"
        svg.append(f'<g class="{kind}"><path d="M192 {y(first):.1f}L288 {y(second):.1f}"/>')
        for column, rank, value, anchor, at in ((0, first, a, "end", 182), (1, second, b, "start", 298)):
            shift = 12 * taken.setdefault((column, rank), 0)
            taken[column, rank] += 1
            svg += [f'<circle cx="{192 + 96 * column}" cy="{y(rank):.1f}" r="3.5"/>',
                    text(at, y(rank) + 4 + shift, anchor, "s", f"{shown(label, 24)} {value:.1f}")]
        svg.append("</g>")
    return "".join([*svg, "</svg>"])


# ---- examples ----
def thumbnail(folder, name, side):
    """A small copy of an image as a data URI, or None where the image cannot be opened."""
    from PIL import Image
    image = open_image(folder, name)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=60, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def example_sets(data, vectors):
    """What a card shows, a set an embedder: columns (its vectors), lines (conditions), each cell the place of a prediction file or None."""
    files, sets = {}, []
    place = lambda row: files.setdefault(row["file"], len(files)) if row["file"] in data["texts"] else None
    for name in dict.fromkeys(vector.row["embedder"] for vector in vectors):
        mine = sorted((vector for vector in vectors if vector.row["embedder"] == name), key=lambda vector: vector.row["mode"] != "vl_joint")
        conditions = list(dict.fromkeys(itertools.chain(["matched"], *(vector.controls for vector in mine))))
        lines = []
        for condition in conditions:
            rows = [vector.row if condition == "matched" else vector.controls.get(condition) for vector in mine]
            texts = [data["texts"].get(row["file"]) if row else None for row in rows]
            one = condition != "matched" and len(mine) > 1 and all(row and row["mode"] is None
                                                                   for row in rows) and all(text == texts[0] for text in texts)
            lines.append({"key": condition, "name": nice(CONDITION_NAMES, condition), "one": one,
                          "cells": [row and place(row) for row in (rows[:1] if one else rows)]})
        sets.append({"name": embedder_name(mine[0].row), "columns": [vector.mode for vector in mine],
                     "lines": [line for line in lines if any(cell is not None for cell in line["cells"])]})
    sets = [chosen for chosen in sets if chosen["lines"] and chosen["lines"][0]["key"] == "matched"]
    return sorted(sets, key=lambda chosen: -len(chosen["columns"])), list(files)  # an embedder with both modes first


def disagreement(item, chosen, files, scores):
    """How much the answers to an item differ: first between the vectors of the modes, then between these and the controls."""
    value = lambda cell: None if cell is None else scores[files[cell]].get(item["id"])
    matched = [score for cell in chosen["lines"][0]["cells"] if (score := value(cell)) is not None]
    others = [score for line in chosen["lines"][1:] for cell in line["cells"] if (score := value(cell)) is not None]
    if not matched:
        return -1.0
    return 10 * (max(matched) - min(matched)) + abs(sum(matched) / len(matched) - (sum(others) / len(others) if others else 0))


def examples_of(args, data, vectors, items, notes):
    """The examples' data for the page. Of more than --examples items, half are those with the most disagreement, half are drawn by seed."""
    sets, files = example_sets(data, vectors)
    usable_items = [item for item in items if any(item["id"] in data["scores"][file] for file in files)]
    if not sets or not usable_items:
        return None
    ranked = {item["id"]: max(disagreement(item, chosen, files, data["scores"]) for chosen in sets) for item in usable_items}
    ordered = sorted(usable_items, key=lambda item: (-ranked[item["id"]], item["id"]))
    if len(ordered) > args.examples:
        top = ordered[:args.examples // 2]
        drawn = np.random.default_rng(0).choice(len(ordered) - len(top), args.examples - len(top), replace=False)
        ordered = top + [ordered[len(top) + place] for place in sorted(drawn.tolist())]
    images, size, dropped, broken = {}, 0, 0, []
    for item in ordered:
        if args.images and item["image"] not in images:
            images[item["image"]] = None
            if size < args.max_megabytes * 1e6:
                try:
                    images[item["image"]] = thumbnail(args.images, item["image"], args.thumbnail)
                    size += len(images[item["image"]])
                except UserError as error:
                    broken.append(str(error))
            else:
                dropped += 1
    if broken:
        notes.append(f"{len(broken)} images of the examples could not be shown; the first: {broken[0]}")
    if dropped:
        notes.append(f"{dropped} images of the examples are left out to keep the page under --max-megabytes {args.max_megabytes:g}")
    places = {name: place for place, name in enumerate(name for name, uri in images.items() if uri)}
    shown_items = []
    for item in ordered:
        answers = [[None if (text := data["texts"][file].get(item["id"])) is None else clean(text), data["scores"][file].get(item["id"])]
                   for file in files]
        tags = [clean(item[key], 40) for key in ("kind", "dataset") if isinstance(item.get(key), str)] + (["answer not in training"]
                                                                                                          if item.get("seen") is False
                                                                                                          else [])
        tags += [RULES[rule] for rule in [item.get("metric") or RULE_OF.get(item["source"])] if rule in RULES]
        gold = list(dict.fromkeys(clean(text, 120) for text in item["answers"]))
        shown_items.append({"id": clean(item["id"], 80), "image": clean(item["image"], 120), "question": clean(item["question"]),
                            "answers": gold[:6], "more": max(0, len(gold) - 6),
                            "source": clean(item["source"], 60), "domain": nice(DOMAINS, item["domain"]), "tags": tags,
                            "thumb": places.get(item["image"]), "said": answers})
    for chosen in sets:
        chosen["order"] = sorted(range(len(ordered)), key=lambda i: (-disagreement(ordered[i], chosen, files, data["scores"]),
                                                                     ordered[i]["id"]))
    order = {kind: [nice(DOMAINS, name) if kind == "domain" else clean(name, 60) for name in data["groups"].get(kind, {})]
             for kind in ("domain", "source")}
    return {"sets": sets, "items": shown_items, "order": order, "images": [uri for uri in images.values() if uri],
            "total": len(usable_items)}


# ---- HTML ----
def html_table(table):
    def cell(value, first):
        if isinstance(value, Figure):
            return f'<td class="num">{value.number()}{f" <small>{value.interval()}</small>" if value.interval() else ""}</td>'
        tag = 'th scope="row"' if first else "td"
        kind = "num" if re.fullmatch(r"[-+0-9.]+", value) else "tight" if len(value) < 20 else "text" if len(value) < 80 else "long"
        return f'<{tag} class="{kind}">{html.escape(value)}</{tag.split()[0]}>'
    header, lines, group = table.header, [], None
    for kind, row in zip(table.marks, table.rows):      # embedder and mode share a cell or a heading: room for figures on a phone
        if header[:3] == ["Embedder", "Mode", "Condition"]:
            if row[:2] != group:
                lines.append(f'<tr class="group"><th scope="rowgroup" colspan="{len(header) - 2}">'
                             f'<span>{html.escape(" ".join(row[:2]))}</span></th></tr>')
            group, cells = row[:2], [cell(row[2], True), *(cell(value, False) for value in row[3:])]
        elif header[:2] == ["Embedder", "Mode"]:
            cells = [f'<th scope="row" class="text">{html.escape(row[0])} <small>{html.escape(row[1])}</small></th>',
                     *(cell(value, False) for value in row[2:])]
        else:
            cells = [cell(row[0], True), *(cell(value, False) for value in row[1:])]
        lines.append(f'<tr class="{kind}">{"".join(cells)}</tr>')
    names = header[2:] if group else ["Vector", *header[2:]] if header[:2] == ["Embedder", "Mode"] else header
    head, body = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names), "".join(lines)
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    return f'{note}<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def section(key, title, content, fold=False):
    if fold:
        return f'<details class="panel" id="{key}"><summary><h2>{html.escape(title)}</h2></summary>{content}</details>'
    return f'<section class="panel" id="{key}"><h2>{html.escape(title)}</h2>{content}</section>'


def card_html(card):
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in card["lines"])
    return (f'<article class="card {card["tone"]}"><h2>{html.escape(card["question"])}</h2><p class="answer"><svg class="tone" viewBox="0 '
            '0 20 20" aria-hidden="true">'
            f'<use href="#tone-{card["tone"]}"/></svg>'
            f'<span>{html.escape(card["answer"])}</span></p>{bars(card["bars"])}{grid_html(card.get("grid"))}{lines}</article>')


def grid_html(grid):
    """Vectors x domains, a mark each: supported by the controls or not."""
    if not grid:
        return ""
    def cell(entry):
        if isinstance(entry, str):
            return f"<td>{entry}</td>"
        name, word = ("none", "no controls") if not entry else ("right", "above every control")
        if entry and entry[0]:
            name, word = "wrong", html.escape(f"not above {listed(entry[0])}")
        return f'<td title="{word}"><svg class="s {name}" role="img" aria-label="{word}"><use href="#{name}"/></svg></td>'
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in grid[0])
    body = "".join(f'<tr><th scope="row">{html.escape(name)}</th>{"".join(map(cell, entries))}</tr>' for name, entries in grid[1])
    return f'<table class="grid"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'


def legend(vectors):
    used = list(dict.fromkeys(itertools.chain(["matched"], *(vector.controls for vector in vectors))))
    icon = lambda condition: f'<svg viewBox="-10 -10 20 20" aria-hidden="true">{mark(condition)}</svg>'
    entries = "".join(f"<li>{icon(name)}{html.escape(nice(CONDITION_NAMES, name))}</li>" for name in used if name.split("-")[0] in SHAPES)
    rest = [name for name in used if name.split("-")[0] not in SHAPES]
    entries += f"<li>{icon(rest[0])}{html.escape(', '.join(nice(CONDITION_NAMES, name) for name in rest))}</li>" if rest else ""
    return f'<ul class="legend">{entries}</ul>'


def embedded(value):
    """JSON for a script element: no character of it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[&<>\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def write_html(path, page, vectors, examples):
    domains = page["domains"]
    panels = [forest(vectors, "All items", lambda row: row["overall"])]
    panels += [forest(vectors, nice(DOMAINS, name).capitalize(), lambda row, name=name: row["by_domain"][name]) for name in domains
               if len(domains) > 1]
    chart = f'{legend(vectors)}<div class="charts">{"".join(panels)}</div>' if vectors else ""
    by_title = {table.title: table for table in page["tables"]}
    main_tables = [section("scores", "Scores", chart + html_table(by_title["Scores"]))]
    for key, table in page["middle"]:
        extra = page["charts"].get(table.title, "")
        main_tables.append(section(key, table.title, extra + html_table(table), fold=key in ("trust", "paper")))
    browse = ""
    if examples:
        total = examples["total"]
        part = (f"all {total} items" if len(examples["items"]) == total else f"{len(examples['items'])} of {total} items: half of them "
                "those with the most disagreement, half "
                "drawn at random from the rest")
        browse = section("examples", "Examples", f'<p class="note">{part[0].upper() + part[1:]}. Most disagreement first: between the '
                         'modes, then between vectors and controls.</p>'
                         '<div id="filters" role="group" aria-label="Filters"></div><p id="count" role="status"></p><div id="cards"></div>'
                         '<button id="more" type="button" hidden>'
                         '</button><noscript><p>The examples need JavaScript, which is switched off.</p></noscript>')
    deviations = "".join(f"<li>{html.escape(line)}</li>" for line in page["deviations"])
    how = section("provenance", "How these figures were made", f'<ul class="plain">{deviations}</ul>{html_table(page["files"])}'
                  '<h3>Commands</h3><pre tabindex="0">'
                  f'{html.escape(chr(10).join(page["commands"]))}</pre><p class="note">{html.escape(page["foot"])}</p>', fold=True)
    links = "".join(f'<a href="#{key}">{html.escape(name)}</a>' for key, name in (("scores", "Scores"), ("controls", "Controls"),
                                                                                  ("source", "Sources"), ("examples", "Examples"),
                                                                                 ("provenance", "How made")) if key != "examples"
                    or examples)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = ("default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
              f"script-src 'sha256-{digest}'")
    note = f'<p class="note">{html.escape(clean(page["note"], 1000))}</p>' if page["note"] else ""
    document = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(page["title"])}</title>
<style>{STYLE}</style>
</head>
<body>
{SYMBOLS}
<header><h1>{html.escape(page["title"])}</h1>{note}<p>{html.escape(page["lede"])}</p><nav>{links}</nav></header>
<main>
<div class="cards">{"".join(map(card_html, page["cards"]))}</div>
{"".join(main_tables)}
{browse}
{how}
</main>
<script type="application/json" id="data">{embedded(examples or {})}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""
    write_atomic(path, lambda file: file.write(document.encode()))


# ---- main ----
def parse_args(argv=None):
    def whole(text):
        if not text.isdecimal():
            raise argparse.ArgumentTypeError(f"expected a whole number, found {shown(text)}")
        return int(text)
    parser = argparse.ArgumentParser(description="Write report.html and report.md: tables, charts and examples of scored runs.",
                                     allow_abbrev=False)
    parser.add_argument("run_dirs", nargs="*", metavar="RUN_DIR", help="folder with scores.json (default: each such folder in results/, a "
                        "page each)")
    parser.add_argument("--items", metavar="F.jsonl", help="item file that was scored (default: the one scores.json names; no examples "
                        "where it is not there)")
    parser.add_argument("--images", metavar="DIR", help="folder that the items' image paths are relative to (default: 'images' beside the "
                        "item file or one "
                        "folder up; no pictures where neither is there)")
    parser.add_argument("--out", metavar="DIR", help="folder for report.html and report.md (default: the first RUN_DIR)")
    parser.add_argument("--root", default=".", metavar="DIR", help="folder that file names in scores.json are relative to (default: the "
                        "current one)")
    parser.add_argument("--paper", metavar="FILE", help="published figures, or 'none' (default: paper.json beside this script, if it "
                        "is there)")
    parser.add_argument("--benchmark", metavar="F.csv", help="scores of another benchmark to compare the order with: columns embedder, "
                        "score; optional mode, source")
    parser.add_argument("--curve", nargs="+", metavar="F.json", help="curve.json files of controls.py curve (default: those in RUN_DIR and "
                        "beside the predictions)")
    parser.add_argument("--title", help="title of the page (default: from the first RUN_DIR's name)")
    parser.add_argument("--note", metavar="TEXT", help="a sentence for the top of the page: what a reader must know before the figures")
    parser.add_argument("--examples", type=whole, default=300, metavar="N", help="most items among the examples, 0: none (default: 300)")
    parser.add_argument("--thumbnail", type=whole, default=224, metavar="PIXELS", help="longest side of a picture (default: 224)")
    parser.add_argument("--max-megabytes", type=float, default=4.0, metavar="MB", help="stop adding pictures at this size (default: 4)")
    return parser.parse_args(argv)


def find_items(args, data):
    """The scored items, or [] with a note where their file is not there. Sets args.images to the folder of pictures or None."""
    path = args.items or os.path.join(args.root, data["items"]["file"])
    if not args.items and not os.path.exists(path):
        data["notes"].append(f"the item file {data['items']['file']} is not there, so no examples are shown; --items names it")
        return []
    items = read_items(path)
    if sha256(path) != data["items"]["sha256"]:
        raise UserError(f"{path}: expected the items that were scored (SHA-256 {data['items']['sha256'][:12]}), found {sha256(path)[:12]}. "
                        "Give those, or score again")
    if args.images and not os.path.isdir(args.images):
        raise UserError(f"{args.images}: not a folder. --images names the folder that the items' image paths are relative to")
    folder = os.path.dirname(os.path.abspath(path))
    guesses = [os.path.join(folder, "images"), os.path.join(os.path.dirname(folder), "images")]
    args.images = args.images or next((guess for guess in guesses if os.path.isdir(guess)), None)
    if not args.images:
        data["notes"].append("no images folder was given or found, so the examples have no pictures; --images names it")
    return items


def tables_of(args, data, vectors, pairs, curves, paper):
    """The tables after the main one, as (section's key, Table), and the charts that stand above some of them, by title."""
    middle, charts = [], {}
    if pairs:
        middle.append(("modes", pairs_table(data, pairs)))
    middle += [("support", support_table(data, vectors)), ("controls", controls_table(data, vectors))]
    middle += [(f"leak-{number}", table) for number, table in enumerate(leak_tables(data))]
    middle.append(("source", group_table(data, vectors, "source", "Scores per source", "Score with 95% interval.", lambda name: name)))
    if data["groups"].get("seen"):
        middle.append(("seen", group_table(data, vectors, "seen", "Answers seen in training or not", "Whether the item's answer is an "
                                           "answer of a training item. "
                       "A vector that only names familiar answers fails on the unseen ones.", lambda name: f"Answer {name}")))
    for curve in curves:
        table = curve_table(curve)
        floor = next((point["score"] for point in curve["points"] if not point["bytes"]), 0.0) or 0.0
        families = [family for family in FAMILIES if any(point["family"] == family for point in curve["points"] if point["bytes"])]
        keys = "".join(f'<li><svg class="family {family}" viewBox="-10 -10 20 20" aria-hidden="true"><path class="dot" '
                       f'd="{FAMILIES[family][0]}"/></svg>'
                       f'{FAMILIES[family][1]}</li>' for family in families)
        charts[table.title] = (f'<ul class="legend">{keys}</ul><div class="charts '
                               f'wide">{curve_panel(curve["points"], "score", "Score", floor)}'
                               f'{curve_panel(curve["points"], "bits", "Usable bits per answer", 0.0)}</div>')
        middle.append((f"curve-{len(middle)}", table))
    if args.benchmark:
        name = os.path.splitext(os.path.basename(args.benchmark))[0]
        orders = orders_of(vectors, read_benchmark(args.benchmark))
        table = order_table(orders, shown(name, 40))
        charts[table.title] = f'<div class="charts wide">{"".join(slope_chart(order, name) for order in orders if order["models"])}</div>'
        middle.append(("order", table))
    middle.append(("trust", trust_table(vectors)))
    if paper.get("rows"):
        middle.append(("paper", paper_table(paper)))
    return middle, charts


def report(args):
    """Read one set of run folders and write its page and Markdown. Returns the page's path."""
    data = read_runs(args)
    items = find_items(args, data) if args.examples else []
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "paper.json")
    paper = args.paper or (beside if os.path.exists(beside) else "none")
    published = "" if paper == "none" else f" Published figures: {shown(os.path.basename(paper))} (SHA-256 {sha256(paper)[:12]})."
    paper = {} if paper == "none" else read_paper(paper)
    vectors = vectors_of(data["rows"])
    pairs, curves = mode_pairs(data, vectors), read_curves(args, data)
    examples = examples_of(args, data, vectors, items, data["notes"]) if items else None
    scores, (middle, charts) = main_table(data, vectors, paper), tables_of(args, data, vectors, pairs, curves, paper)
    files, commands, deviations = provenance(args, data)
    info, run_ = data["items"], data["runs"][0]
    domains = list(data["groups"]["domain"])
    finished = shown(inside(run_["run"] or {}, "finished", str)[:10])
    page = {"title": args.title or f"What survives in the embedding: {shown(os.path.basename(os.path.abspath(args.run_dirs[0])), 60)}",
            "lede": (f"{info['n']} questions on {info['images']} images" + (f" ({listed(nice(DOMAINS, name) for name in domains)})"
                                                                            if domains else "")
                     + ". A small language model answers each from one vector and the question alone; the more it gets right, the more the "
                     "vector holds."
                     + (f" Scored {finished}." if finished else "") + local_words(vectors)), "note": args.note,
            "cards": [mode_card(pairs, vectors), domain_card(data, pairs, vectors), controls_card(data, vectors)], "domains": domains,
            "tables": [scores, *(table for _, table in middle), files], "middle": middle, "charts": charts, "files": files,
            "commands": commands, "deviations": deviations,
            "foot": (f"Items {info['file']} (SHA-256 {info['sha256'][:12]}). Scoring seed {run_['seed']}, {run_['bootstrap']} resamples "
                     "over images. Each interval and p "
                     "stands alone: none is corrected for the number of comparisons. Intervals cover the choice of test items, not of the "
                     "training seed." + published)}
    out = args.out or args.run_dirs[0]
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise cannot_write(out, error) from error
    for write, name, more in ((write_markdown, "report.md", ()), (write_html, "report.html", (vectors, examples))):
        write(os.path.join(out, f"{name}.staged"), page, *more)     # both are on disk before either is replaced: a full disk leaves both
    for name in ("report.md", "report.html"):
        os.replace(os.path.join(out, f"{name}.staged"), os.path.join(out, name))
    for note in data["notes"]:
        print(f"note: {shown(note, 1000)}", file=sys.stderr)
    return os.path.join(out, "report.html")


def main(argv=None):
    args = parse_args(argv)
    folders = args.run_dirs or sorted(os.path.dirname(path) for path in glob.glob("results/*/scores.json"))
    if not folders:
        raise UserError("results/: no folder with a scores.json. Name a RUN_DIR, or score predictions with evaluate.py --out results/NAME")
    for folder in [folders] if args.run_dirs else [[folder] for folder in folders]:
        one = argparse.Namespace(**vars(args) | {"run_dirs": folder})
        with locked(os.path.join(args.out or folder[0], "report.html")):
            print(report(one))


if __name__ == "__main__":
    run(main, "No file under its final name is half written; run the same command again")
