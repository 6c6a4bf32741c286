"""Make the benchmark's item files from public data sets or local copies of them, and check any item file.

    python data/prepare.py geb   --out data/geb                 # dev.jsonl (1,800 items), test.jsonl (900), images/, manifest.json
    python data/prepare.py train --out data/llava_next          # items.jsonl (738,590 conversations), images/, manifest.json
    python data/prepare.py check data/geb/test.jsonl data/geb/images --against data/llava_next/items.jsonl data/llava_next/images

READS   `geb`: the parquet files of MME, CV-Bench, RealWorldQA, TextVQA, OCRBench, ChartQA, DocVQA and InfographicVQA, from the hub or from
        --local DIR (DIR/OWNER/NAME/..., as `hf download --local-dir` leaves them). `train`: LLaVA-NeXT-Data, json and tar.gz, or parquet.
WRITES  item files (one JSON object a line: id, image, question, answers, source, domain; optional options, metric, dataset), the images
        in their original bytes under images/ab/SHA256.ext, and manifest.json, last: where each row came from, what was dropped and why.
        `check --against` also writes the training ids that share an image with the checked items, for `train_decoder.py fit --exclude-ids`.

Same sources, same seed: the same bytes. Dev and test of our own draw share no image, neither byte for byte nor nearly; of a membership list
they are as listed, with a note where they share one. Memory stays bounded (one batch of rows, and about 0.5 KB for each conversation); an
interrupted run continues with the source, shard or archive it was at. Finished output made by the same options from the same files is
reported as done; with --overwrite the old one stays until the new one is complete. Exit status: 0 done, 1 failed, 2 wrong command line,
130 interrupted.

To reuse it elsewhere copy this file; it needs numpy >= 2.0, pillow >= 11, tqdm, and for parquet and the hub data/requirements.txt.
"""
import argparse
import bisect
import collections
import concurrent.futures
import contextlib
import csv
import fnmatch
import functools
import glob
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import struct
import sys
import tarfile
import time

import numpy as np
from tqdm import tqdm

WORD = "\nAnswer the question using a single word or phrase."                      # LLaVA-1.5, LLaVA-NeXT, lmms-eval, VLMEvalKit
LETTER = "\nAnswer with the option's letter from the given choices directly."      # LLaVA-1.5, LLaVA-NeXT, cambrian for CV-Bench
REALWORLDQA_LETTER = "Please answer directly with only the letter of the correct option and nothing else."  # in the data itself
REALWORLDQA_SHORT = "Please answer directly with a single word or number."
BAD_IMAGE = ValueError  # what `write_image` raises for bytes that are no readable picture, whatever Pillow's many readers raised
SAMPLE_FACTOR = 3      # candidates kept for each item wanted, so that near-identical images can be passed over
THUMB_SIDE = 16        # the perceptual hash: luma of a 16 x 16 thumbnail
THUMB_RMS = 5.0        # candidates: root mean square difference of two thumbnails, of 255 (copies measured up to 3.2)
FINE_LUMA = 24.0       # confirmed: largest luma difference of any cell of a fine grid (copies up to 18, other pictures from 45)
COARSE_COLOUR = 24.0   # and of any colour channel of an 8 x 8 grid (copies up to 17)

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


# ---------------------------------------------------------------- the eight sources of the benchmark
class Drop(Exception):
    """A source row that cannot become an item; its text is the reason that the manifest counts."""


def text(row, column):
    """The row's text in a column, without outer white space."""
    if not isinstance(row[column], str) or not row[column].strip():
        raise Drop(f"no text in '{column}'")
    return row[column].strip()


def texts(row, column):
    """The row's non-empty texts in a column that holds one text or a list of them, each once, in order."""
    values = row[column] if isinstance(row[column], (list, tuple)) else [row[column]]
    values = [value.strip() for value in values if isinstance(value, str) and value.strip()]
    if not values:
        raise Drop(f"no text in '{column}'")
    return list(dict.fromkeys(values))


def row_id(row, column):
    """The row's id in a column, a text or a whole number, as text; what no reader of item files would take is no id."""
    value = str(row[column]) if type(row[column]) in (str, int) else ""
    if not value or value != value.strip() or not value.isprintable():
        raise Drop(f"no printable id in '{column}'")
    return value


def image_bytes(row):
    """The bytes of the row's image cell, {"bytes", "path"} as the hub's image sets have it."""
    data = row["image"].get("bytes") if isinstance(row["image"], dict) else None
    if not isinstance(data, bytes) or not data:
        raise Drop("no image bytes")
    return data


def option_lines(question, mark):
    """[(letter, text)] of the lines that begin with an option's mark. In steps, because one pattern takes hours on a megabyte of blanks."""
    lines = (line.strip(" \t") for line in question.split("\n"))
    return [(match[1], line[match.end():].lstrip(" \t")) for line in lines if (match := re.match(mark, line)) and match.end() < len(line)]


def mme(row, index):
    """Two questions an image, one answered yes and one no; both share question_id, so the answer completes the id."""
    answer = text(row, "answer")
    if answer.lower() not in ("yes", "no"):
        raise Drop("answer is neither yes nor no")
    question = text(row, "question").removesuffix("Please answer yes or no.").rstrip() + WORD
    return {"source_id": f"{row_id(row, 'question_id')}/{answer.lower()}", "group": row_id(row, "question_id"), "question": question,
            "answers": [answer], "dataset": text(row, "category")}


def cv_bench(row, index):
    """`prompt` holds question and option lines `(A) ...`; gold `(C)` becomes the letter. One photograph may serve several rows."""
    options, answer = texts(row, "choices"), text(row, "answer").strip("()")
    if len(options) < 2 or len(options) != len(row["choices"]) or answer not in list("ABCDEFGHIJ"[:len(options)]):  # not "AB" or ""
        raise Drop("choices and answer do not fit together")
    return {"source_id": row_id(row, "idx"), "group": row["source_filename"], "question": text(row, "prompt") + LETTER,
            "answers": [answer], "options": options, "dataset": f"{row['type']} {row['task']} {row['source']}"}


def realworldqa(row, index):
    """The question holds its own answer-format sentence, which tells multiple choice from short answers."""
    question, answer = text(row, "question"), text(row, "answer")
    item = {"source_id": str(index), "question": question, "answers": [answer]}
    if REALWORLDQA_LETTER in question:
        lines = option_lines(question, r"([A-Z])[.)]")
        letters = "".join(letter for letter, _ in lines)
        if len(lines) < 2 or letters != "ABCDEFGHIJ"[:len(lines)] or answer.strip(".") not in list(letters):
            raise Drop("option lines and answer do not fit together")
        item.update(answers=[answer.strip(".")], options=[option for _, option in lines])
    elif REALWORLDQA_SHORT not in question:
        raise Drop("no answer-format sentence in the question")
    return item


def textvqa(row, index):
    """Ten answers; the most frequent comes first (ties: the earlier one), because answers[0] is the training target."""
    answers = [answer for answer in row["answers"] if isinstance(answer, str)] if isinstance(row["answers"], (list, tuple)) else []
    counts = collections.Counter(answer for answer in answers if answer.strip())
    if not counts:
        raise Drop("no text in 'answers'")
    first = answers.index(max(counts, key=counts.get))
    return {"source_id": row_id(row, "question_id"), "group": row["image_id"], "question": text(row, "question") + WORD,
            "answers": [answers[first], *answers[:first], *answers[first + 1:]]}


def ocrbench(row, index):
    """The question as it is; `dataset` selects the rule for handwritten formulas (HME100k)."""
    return {"source_id": str(index), "question": text(row, "question"), "answers": texts(row, "answer"), "dataset": text(row, "dataset")}


def chartqa(row, index):
    """Human-written and augmented questions, in equal parts."""
    stratum = text(row, "type").removesuffix("_test")
    if stratum not in ("human", "augmented"):
        raise Drop("type is neither human_test nor augmented_test")
    return {"source_id": str(index), "stratum": stratum, "question": text(row, "question") + WORD, "answers": texts(row, "answer"),
            "dataset": stratum}


def docvqa(row, index):
    """One question a document, since pages of one document share their look and often their text."""
    return {"source_id": row_id(row, "questionId"), "group": row["ucsf_document_id"], "question": text(row, "question") + WORD,
            "answers": texts(row, "answers")}


def infographicvqa(row, index):
    """One question a figure; the figure's address names it."""
    return {"source_id": row_id(row, "questionId"), "group": row["image_url"], "question": text(row, "question") + WORD,
            "answers": texts(row, "answers")}


# rows: published number of rows; test: items in the 900 (dev gets twice as many); gigabytes: of these files, from the hub's pages
GEB = {
    "MME": dict(
        convert=mme, repository="lmms-lab/MME", files="data/test-*.parquet", rows=2374, gigabytes=0.87, test=100, domain="natural_image",
        columns="question_id image question answer category", licence="none stated on the card"),
    "CV-Bench": dict(
        convert=cv_bench, repository="nyu-visionx/CV-Bench", files="test*.parquet", rows=2638, gigabytes=0.41, test=100,
        domain="natural_image", columns="idx type task image choices answer prompt source source_filename", licence="Apache-2.0"),
    "RealWorldQA": dict(
        convert=realworldqa, repository="lmms-lab/RealWorldQA", files="data/test-*.parquet", rows=765, gigabytes=0.68, test=100,
        domain="natural_image", columns="image question answer", licence="CC-BY-4.0 on the card; CC-BY-ND-4.0 in xAI's own release"),
    "TextVQA": dict(
        convert=textvqa, repository="lmms-lab/textvqa", files="data/validation-*.parquet", rows=5000, gigabytes=1.4, test=150,
        domain="scene_text", columns="image_id question_id question image answers", licence="CC-BY-4.0 (facebook/textvqa)"),
    "OCRBench": dict(
        convert=ocrbench, repository="echo840/OCRBench", files="data/test-*.parquet", rows=1000, gigabytes=0.07, test=150,
        domain="scene_text", columns="dataset question answer image", licence="none stated on the card"),
    "ChartQA": dict(
        convert=chartqa, repository="lmms-lab/ChartQA", files="data/test-*.parquet", rows=2500, gigabytes=0.07, test=100, strata=2,
        domain="visual_document", columns="type question answer image", licence="GPL-3.0 (ahmed-masry/ChartQA)"),
    "DocVQA": dict(
        convert=docvqa, repository="lmms-lab/DocVQA", files="DocVQA/validation-*.parquet", rows=5349, gigabytes=2.5, test=100,
        domain="visual_document", columns="questionId question image ucsf_document_id answers",
        licence="Apache-2.0 on the card; docvqa.org's terms"),
    "InfographicVQA": dict(
        convert=infographicvqa, repository="lmms-lab/DocVQA", files="InfographicVQA/validation-*.parquet", rows=2801, gigabytes=1.9,
        test=100, domain="visual_document", columns="questionId question image image_url answers",
        licence="Apache-2.0 on the card; docvqa.org's terms"),
}
LLAVA_NEXT = {
    "raw": dict(repository="lmms-lab/LLaVA-NeXT-Data", files="llava_next_raw_format/*", rows=738590, gigabytes=54,
                licence="Apache-2.0 on the card; the images keep their own terms"),
    "parquet": dict(repository="lmms-lab/LLaVA-NeXT-Data", files="data/train-*.parquet", rows=779289, gigabytes=92,
                    columns="id conversations image", licence="Apache-2.0 on the card; the images keep their own terms"),
}
# the 12 folders of the raw form's image paths -> domain
SUBSETS = {"coco": "natural_image", "vg": "natural_image", "gqa": "natural_image", "sharegpt4v": "natural_image",
           "laion-gpt4v-20231128": "natural_image", "llava_pretrain_lcs558k": "natural_image", "ocr_vqa": "scene_text",
           "dvqa": "visual_document", "chartqa": "visual_document", "docvqa": "visual_document", "synthdog-en": "visual_document",
           "ai2d": "visual_document"}
SUBSET_OF_ID = (("VG_100K", "vg"), ("synthdog_en_", "synthdog-en"), ("chart_qa_", "chartqa"), ("bar_train_", "dvqa"),
                ("coco2014_caps_", "coco"))             # the parquet form keeps no folder; other ids do not tell


# ---------------------------------------------------------------- finding and reading the sources
def advice(specs):
    """What to download, how large it is, and how to pass it: the message for a machine without hub access."""
    total = sum(spec["gigabytes"] for spec in specs)
    lines = [f"To go on without the hub, download the files on a machine that has it (about {total:.1f} GB) into one folder DIR:"]
    for spec in specs:
        lines.append(f"    hf download {spec['repository']} --repo-type dataset --include '{spec['files']}' "
                     f"--local-dir DIR/{spec['repository']}    # {spec['gigabytes']} GB")
    return "\n".join([*lines, "then run the same command with --local DIR"])


def natural(name):
    """Sort key that puts images_2 before images_10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def hub_errors():
    """The errors of whichever HTTP client the hub's package uses, beside OSError; none where the package is not installed."""
    try:
        import huggingface_hub.errors
    except ImportError:
        return ()
    return tuple(kind for kind in huggingface_hub.errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")


def locate(spec, args, specs):
    """Find a source's files. Returns {"repository", "revision" or None, "files": [[path or hf:// address, bytes], ...] in order of name},
    from the hub also "hashes", {address: SHA-256 or None}.

    With --local: DIR/OWNER/NAME, DIR/NAME, DIR itself, or a hub cache. Else the hub, pinned to one commit for the whole run.
    """
    repository, _, revision = dict(pair.split("=", 1) for pair in args.repo).get(spec["name"], spec["repository"]).partition("@")
    if args.local:
        cache = glob.glob(os.path.join(glob.escape(args.local), f"datasets--{repository.replace('/', '--')}", "snapshots", "*"))
        folders = [os.path.join(args.local, repository), os.path.join(args.local, repository.split("/")[1]), *sorted(cache)]
        if len({other["repository"] for other in specs}) == 1:  # with several sets, DIR/data/test-*.parquet could be any of them
            folders.append(args.local)
        for folder in folders:
            paths = glob.glob(os.path.join(glob.escape(folder), spec["files"]))
            if found := sorted((path for path in paths if os.path.isfile(path)), key=natural):
                return {"repository": repository, "revision": revision or (os.path.basename(folder) if folder in cache else None),
                        "files": [[path, os.path.getsize(path)] for path in found]}
        raise UserError(f"{args.local}: no files of {spec['name']} there: expected {spec['files']} in one of {', '.join(folders[:3])}.\n"
                        + advice(specs))
    try:
        import huggingface_hub
    except ImportError:
        raise UserError("the hub needs the package huggingface_hub: pip install -r data/requirements.txt, or pass local files.\n"
                        + advice(specs)) from None
    try:
        info = huggingface_hub.HfApi().dataset_info(repository, revision=revision or None, files_metadata=True)
    except (OSError, ValueError, *hub_errors()) as error:
        raise UserError(f"{repository}: the hub cannot be read ({type(error).__name__}: {shown(error)}).\n"
                        + advice(specs)) from None
    files = sorted((f for f in info.siblings if fnmatch.fnmatch(f.rfilename, spec["files"])), key=lambda f: natural(f.rfilename))
    if not files:
        raise UserError(f"{repository} at {info.sha}: expected files {spec['files']}, found none among {len(info.siblings)} files. "
                        f"If the set has moved, name it with --repo {spec['name']}=OWNER/NAME")
    addresses = {f"hf://datasets/{repository}@{info.sha}/{f.rfilename}": f for f in files}
    return {"repository": repository, "revision": info.sha, "files": [[address, f.size] for address, f in addresses.items()],
            "hashes": {address: getattr(getattr(f, "lfs", None), "sha256", None) for address, f in addresses.items()}}


def parquet_rows(name, files, columns):
    """Stream the named columns of parquet files (local or hf://) as dicts; an image stays {"bytes", "path"}, never decoded."""
    try:
        import datasets
        import pyarrow
    except ImportError:
        raise UserError("reading parquet needs the packages datasets and pyarrow: pip install -r data/requirements.txt") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        rows = datasets.load_dataset("parquet", data_files={"rows": list(files)}, split="rows", streaming=True)
        found = list(rows.features or ())
        if missing := [column for column in columns if column not in found]:
            raise UserError(f"{name}: {shown(files[0], 200)}: missing column {', '.join(missing)}; found {', '.join(found)}. "
                            "The set's layout has changed: pin an older commit with --repo, or mend the converter in data/prepare.py")
        yield from rows.select_columns(list(columns)).decode(False)
    except (OSError, ValueError, pyarrow.ArrowException, datasets.exceptions.DatasetsError, *hub_errors()) as error:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise UserError(f"{name}: cannot read {shown(files[0], 200)}{more} ({type(error).__name__}: {shown(error, 300)}). "
                        "Download the files again") from None


def open_binary(path):
    """A local file or an hf:// address, opened for reading bytes."""
    if path.startswith("hf://"):
        import huggingface_hub
        return huggingface_hub.HfFileSystem().open(path, "rb")
    return open(path, "rb")


def write_image(folder, data, decode):
    """Write image bytes under their own hash, once. Returns the relative path ab/SHA256.ext; damaged bytes raise BAD_IMAGE."""
    from PIL import Image
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.format == "EPS":
                raise ValueError("EPS is a program, which is not run here")
            extension = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif"}.get(image.format, image.format.lower())
            if decode:
                image.draft("L", (64, 64))              # JPEG: every bit is still read, but only an eighth of the pixels is computed
                image.load()
    except Exception as error:                          # its readers of rarer formats raise RuntimeError, ZeroDivisionError and others too
        raise BAD_IMAGE(f"{type(error).__name__}: {error}") from None
    digest = hashlib.sha256(data).hexdigest()
    name = f"{digest[:2]}/{digest}.{extension}"
    path = os.path.join(folder, name)
    if not (os.path.exists(path) and os.path.getsize(path) == len(data) and sha256(path) == digest):   # no fsync for 700,000 files, so look
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(f"{path}.{os.getpid()}.tmp", "wb") as file:
                file.write(data)
            os.replace(f"{path}.{os.getpid()}.tmp", path)
        except OSError as error:
            raise cannot_write(path, error) from error
    return name


def draw(*parts):
    """A number that only depends on its arguments, evenly spread: the seeded lot that decides every order and choice here."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


# ---------------------------------------------------------------- near-identical images
def thumbprint(folder, name):
    """A small perceptual hash: luma of a 16 x 16 thumbnail, (256,) uint8, and the image's width and height."""
    from PIL import Image
    try:
        image = open_image(folder, name)
        return np.asarray(image.convert("L").resize((THUMB_SIDE, THUMB_SIDE), Image.BILINEAR), np.uint8).reshape(-1), image.size
    except UserError:
        raise
    except Exception as error:                          # see `write_image`
        raise UserError(f"{os.path.join(folder, name)}: cannot read this image ({type(error).__name__}: {shown(error)}). Replace "
                        "it") from None


def close_thumbs(prints, sizes, others, other_sizes, step=4096):
    """Index pairs (i, j) whose thumbnails and aspect ratios nearly agree: prints (N, 256), sizes (N, 2) against others (M, 256), (M, 2)."""
    pairs = []
    ratio, other_ratio = (np.log(np.divide(*np.asarray(s, np.float64).reshape(-1, 2).T)) for s in (sizes, other_sizes))
    for row in range(0, len(prints), step):             # bounded: step x step distances at a time
        a = np.asarray(prints[row:row + step], np.float32)
        for start in range(0, len(others), step):
            b = np.asarray(others[start:start + step], np.float32)
            squared = np.square(a).sum(1)[:, None] + np.square(b).sum(1)[None] - 2 * a @ b.T  # (step, step)
            near = squared <= THUMB_RMS ** 2 * a.shape[1]
            near &= np.abs(ratio[row:row + step, None] - other_ratio[None, start:start + step]) < 0.03
            pairs += [(row + int(i), start + int(j)) for i, j in zip(*np.nonzero(near))]
    return pairs


@functools.lru_cache(maxsize=512)
def grids(folder, name, side):
    """What `same_picture` compares: luma in side x side cells and colour in 8 x 8 cells, float32."""
    from PIL import Image
    image = open_image(folder, name)
    luma = np.asarray(image.convert("L").resize((side, side), Image.BILINEAR), np.float32)
    return luma, np.asarray(image.resize((8, 8), Image.BILINEAR), np.float32)


def same_picture(folder, name, size, other_folder, other_name, other_size):
    """True where two files show one picture, re-encoded or resized: no cell of a fine grid differs. Under 64 pixels it cannot say."""
    smallest = min(*size, *other_size)
    if smallest < 64:
        return False
    side = 128 if smallest >= 512 else 64 if smallest >= 256 else 32 if smallest >= 128 else 16  # cells of at least 4 pixels
    (luma, colour), (other_luma, other_colour) = grids(folder, name, side), grids(other_folder, other_name, side)
    return bool(np.abs(luma - other_luma).max() <= FINE_LUMA and np.abs(colour - other_colour).max() <= COARSE_COLOUR)


# ---------------------------------------------------------------- geb: dev and test
def role_of(entry):
    """("dev" or "test", path) of an --official entry dev=FILE or test=FILE; (None, path) of a FILE with a split column."""
    return tuple(entry.split("=", 1)) if re.match(r"(dev|test)=", entry) else (None, entry)


def read_membership(entries, args):
    """Read --official: FILE with a split column, or dev=FILE and test=FILE. Returns [(split, source, id), ...] in the files' order."""
    names = {re.sub(r"\W|_", "", name.lower()): name for name in GEB} | {"infovqa": "InfographicVQA", "infographicsvqa": "InfographicVQA"}
    members = []
    for entry in entries:
        split, path = role_of(entry)
        columns = [args.official_source_column, args.official_id_column] + ([] if split else [args.official_split_column])
        if path.endswith(".parquet"):
            rows = parquet_rows("the membership list", [path], columns)
        elif path.endswith(".jsonl"):
            rows = (row for _, row in read_jsonl(path))
        elif path.endswith((".csv", ".tsv")):
            try:
                with open(path, newline="", encoding="utf-8-sig") as file:
                    rows = list(csv.DictReader(file, delimiter="\t" if path.endswith(".tsv") else ","))
            except (OSError, ValueError, csv.Error) as error:
                raise UserError(f"{path}: expected a table in UTF-8, found {shown(error)}. Save the list again") from None
        else:
            raise UserError(f"{path}: expected a membership list that ends in .jsonl, .csv, .tsv or .parquet")
        for number, row in enumerate(rows, 1):
            if missing := [column for column in columns if row.get(column) is None]:
                raise UserError(f"{path} row {number}: missing {', '.join(missing)}; found {shown(', '.join(map(str, row)))}. Name the "
                                "columns "
                                "with --official-source-column, --official-id-column, --official-split-column, or give dev=FILE test=FILE")
            source = names.get(re.sub(r"\W|_", "", str(row[columns[0]]).lower()))
            part = split or str(row[columns[2]]).lower()
            part = "dev" if part in ("validation", "val", "development") else part
            if source is None or part not in ("dev", "test"):
                raise UserError(f"{path} row {number}: expected a source among {', '.join(GEB)} and a split dev or test, found "
                                f"{shown(row[columns[0]])} and {shown(part)}")
            members.append((part, source, str(row[columns[1]])))
    if not members:
        raise UserError(f"{', '.join(entries)}: expected a membership list with one row or more, found none")
    return members


def shortlist(name, spec, found, args, work, wanted, units):
    """Stream one source once and keep candidates, their images staged in work/images. Returns {"rows", "dropped", "records"}.

    Each group of rows (one image or document) has a seeded lot; the groups with the `units` smallest lots of each stratum stay (bottom-k
    sampling, independent of row order, memory bounded). With `wanted` (a set of ids) exactly those rows stay instead.
    """
    strata, seen, dropped, rows = collections.defaultdict(dict), set(), collections.Counter(), 0
    ranked = collections.defaultdict(list)              # stratum -> sorted [(lot, group), ...], at most `units`
    stream = parquet_rows(name, [path for path, _ in found["files"]], spec["columns"].split())
    for rows, row in enumerate(tqdm(stream, total=spec["rows"], desc=name, unit="row", disable=None), 1):
        ids = {str(rows - 1)} if args.official_ids == "row" else None
        try:
            record, data = spec["convert"](row, rows - 1), image_bytes(row)
        except Drop as reason:
            dropped[str(reason)] += 1
            continue
        if record["source_id"] in seen:
            raise UserError(f"{name} row {rows - 1}: the id {shown(record['source_id'])} occurs twice. Download the files again")
        seen.add(record["source_id"])
        record["row"], group, stratum = rows - 1, str(record.get("group") or hashlib.sha256(data).hexdigest()), record.pop("stratum", "")
        record["lot"] = draw(args.seed, name, record["source_id"])
        if wanted is not None:
            ids = ids or {record["source_id"]} | ({group} if name == "MME" else set())  # MME lists may name the pair
            if not ids & wanted:
                continue
            record["matched"] = sorted(ids & wanted)
        else:
            place, order = (draw(args.seed, name, stratum, group), group), ranked[stratum]
            if group not in strata[stratum]:
                if len(order) >= units and place > order[-1]:
                    continue
                bisect.insort(order, place)
                if len(order) > units:
                    del strata[stratum][order.pop()[1]]
        try:
            record["image"] = write_image(os.path.join(work, "images"), data, decode=wanted is not None)  # `divide` decodes what it takes
        except BAD_IMAGE as error:
            raise UserError(f"{name} row {rows - 1} (id {shown(record['source_id'])}): unreadable image ({shown(error)}). "
                            "Download the files again") from None
        strata[stratum].setdefault(group, []).append(record)
    if args.rows_check and rows != spec["rows"]:
        raise UserError(f"{name}: expected {spec['rows']:,} rows as published, found {rows:,} in {len(found['files'])} files. Files are "
                        "missing, or the set has changed; --no-rows-check takes it as it is")
    order = {stratum: [group for _, group in ranked[stratum]] if wanted is None else list(groups)
             for stratum, groups in sorted(strata.items())}
    return {"rows": rows, "dropped": dict(dropped), "strata": {s: [strata[s][group] for group in groups] for s, groups in order.items()}}


class Split:
    """The images taken for one split so far, and its items: names tell identical bytes, thumbnails nearly identical pictures."""

    def __init__(self):
        self.prints, self.items = {}, []                # image name -> (thumbnail, size)

    def shows(self, folder, name, thumb, size):
        """True where an image taken earlier is this one, or the same picture re-encoded or resized."""
        if name in self.prints or not self.prints:
            return name in self.prints
        names, (prints, sizes) = list(self.prints), zip(*self.prints.values())
        return any(same_picture(folder, name, size, folder, names[j], sizes[j]) for _, j in close_thumbs([thumb], [size], prints, sizes))


def make_item(name, record):
    """The item-file row of a converted source row."""
    item = {"id": f"{name}:{record['source_id']}", "image": record["image"], "question": record["question"], "answers": record["answers"],
            "source": name, "domain": GEB[name]["domain"]}
    return item | {field: record[field] for field in ("options", "dataset") if field in record}


def divide(lists, quotas, images):
    """Fill test, then dev, from each source's candidates in the order of their lots; no picture is in both. Returns (splits, passed over).

    One question an image (or document), so that items are as independent as the sources allow; MME keeps its pairs of yes and no.
    """
    splits, passed = {"test": Split(), "dev": Split()}, collections.Counter()
    bar = tqdm(total=sum(sum(q.values()) for q in quotas.values()), desc="choosing", unit="item", disable=None)
    for name, candidates in lists.items():
        parts, lost = GEB[name].get("strata", 1), f"; rows dropped: {candidates['dropped'] or 'none'}"
        for stratum, groups in candidates["strata"].items():
            left = {split: quotas[name][split] // parts for split in splits}
            for group in groups:
                group.sort(key=lambda record: record["lot"])
                rows = group[:1]
                if name == "MME":
                    rows = [r for answer in ("/yes", "/no") for r in group if r["source_id"].endswith(answer)]
                    if len(rows) != 2:
                        passed[f"{name}: not one yes and one no"] += 1
                        continue
                try:
                    thumb, size = thumbprint(images, rows[0]["image"])
                except UserError as error:
                    raise UserError(f"{name} row {rows[0]['row']} (id {shown(rows[0]['source_id'])}): {error}") from None
                seen = {split: chosen.shows(images, rows[0]["image"], thumb, size) for split, chosen in splits.items()}
                for split, other in (("test", "dev"), ("dev", "test")):
                    if left[split] and not seen[other] and rows[0]["image"] not in splits[split].prints:
                        splits[split].prints[rows[0]["image"]] = thumb, size
                        splits[split].items += [make_item(name, record) for record in rows]
                        left[split] -= len(rows)
                        bar.update(len(rows))
                        break
                else:
                    passed[f"{name}: picture already used"] += any(seen.values())
                if not any(left.values()):
                    break
            if any(left.values()):
                want = {split: quotas[name][split] // parts for split in splits}
                raise UserError(f"{name} {stratum}: expected {want['test']} test and {want['dev']} dev items with no picture in both, "
                                f"found {want['test'] - left['test']} and {want['dev'] - left['dev']} among {len(groups)} candidates"
                                f"{lost}. Give all files of the source, or a smaller --test-per-source")
        if len(candidates["strata"]) != parts:          # a source without rows, or without one of its kinds of rows
            kinds = f" of {parts} kinds" if parts > 1 else ""
            found = f"only {', '.join(candidates['strata'])} ones" if candidates["strata"] else "none"
            raise UserError(f"{name}: expected {quotas[name]['test']} test and {quotas[name]['dev']} dev items{kinds}, found {found} among "
                            f"{candidates['rows']:,} rows{lost}. Give all files of the source; if its layout has changed, pin an older "
                            "commit with --repo")
    bar.close()
    return {split: chosen.items for split, chosen in splits.items()}, dict(passed)


def listed(lists, members):
    """Exactly the rows of a membership list, in its order. Returns (splits, {})."""
    splits, taken, index = {"test": [], "dev": []}, set(), {}
    for name, candidates in lists.items():
        for groups in candidates["strata"].values():
            for record in (record for group in groups for record in group):
                for match in record["matched"]:
                    index.setdefault((name, match), []).append(record)
    missing = [f"{name} {shown(member)}" for _, name, member in members if (name, member) not in index]
    if missing:
        raise UserError(f"{len(missing)} of {len(members)} listed rows are not among the sources' rows, or cannot become items: "
                        f"{', '.join(missing[:5])}. Ids are those of data/README.md; --official-ids row reads them as row numbers from 0")
    for split, name, member in members:
        for record in index[name, member]:
            item = make_item(name, record)
            if item["id"] in taken:
                raise UserError(f"the membership list names {shown(item['id'])} twice. Mend the list")
            taken.add(item["id"])
            splits[split].append(item)
    if both := {item["image"] for item in splits["test"]} & {item["image"] for item in splits["dev"]}:
        ids = [item["id"] for items in splits.values() for item in items if item["image"] in both]
        print(f"note: {len(both)} pictures are in both dev and test, as the membership list has them: {shown(', '.join(ids[:6]), 300)}",
              file=sys.stderr)
    return splits, {}


def fingerprints(found, known):
    """{"SOURCE/FILE": [bytes, time, SHA-256]} of located files: what tells them from edited ones of the same size, but not from copies.

    Size with time would take a copy on another disk for other content, and the first and last MiB miss an edit in the middle. So the whole
    content counts, and the time (the file system's own, of the last change, which no `cp -p` or `touch` sets) only spares reading 50 GB
    again: a file of the size and time that `known`, the result of an earlier call, has for it keeps its SHA-256. The hub gives its own.
    """
    known, out = known if isinstance(known, dict) else {}, {}
    files = [(f"{name}/{os.path.basename(path)}", path, size, part) for name, part in found.items() for path, size in part["files"]]
    for key, path, size, part in tqdm(files, desc="sources' files", unit="file", disable=None):
        if path.startswith("hf://"):
            out[key] = [size, None, part["hashes"].get(path) or path]       # the address holds the commit
            continue
        try:
            time_ns, before = os.stat(path).st_ctime_ns, known.get(key)
            same = isinstance(before, list) and len(before) == 3 and before[:2] == [size, time_ns]
            out[key] = before if same else [size, time_ns, sha256(path)]
        except OSError as error:
            raise UserError(f"{path}: cannot read ({error.strerror}). Mend or download the file again") from None
    return out


def other_file(before, now):
    """The name of the first file that differs between two results of `fingerprints`, times left aside; None where none does."""
    def content(files):
        return {key: [row[0], row[2]] if isinstance(row, list) and len(row) == 3 else None for key, row in files.items()}
    before, now = content(before) if isinstance(before, dict) else {}, content(now)
    return next((key for key in sorted(before.keys() | now.keys()) if key not in now or before.get(key) != now[key]), None)


def finished(out, options, names, overwrite, find=None):
    """True where `out` already holds whole files made by the same options; other content there is an error unless --overwrite.

    `find()` locates the sources. What cannot be found any more (a download removed, no hub) cannot be compared, and a note says so.
    """
    path = os.path.join(out, "manifest.json")
    if not os.path.exists(path):
        foreign = [name for name in names if os.path.exists(os.path.join(out, name))]
        if foreign and not overwrite and not os.path.exists(os.path.join(out, ".work")):
            raise UserError(f"{os.path.join(out, foreign[0])}: exists without a manifest, so this command did not make it. Choose another "
                            "--out, or give --overwrite")
        return False
    if overwrite:                                       # the old manifest goes when the new files take their places
        return False
    manifest = read_json(path)
    hashes, what = manifest.get("sha256"), None
    if manifest.get("options") != options:
        what = "it was made with other options"
    elif not isinstance(hashes, dict) or not all(
            os.path.isfile(os.path.join(out, n)) and sha256(os.path.join(out, n)) == hashes.get(n) for n in names):
        what = "its item files have changed since"
    elif missing := missing_images(out, names):
        what = f"{len(missing)} of its images are missing, first {missing[0]}"
    elif find:
        try:
            found = find()
        except UserError as error:
            print(f"note: the files it was made from are not compared: {str(error).splitlines()[0]}", file=sys.stderr)
        else:
            if other := other_file(manifest.get("fingerprints"), fingerprints(found, manifest.get("fingerprints"))):
                what = f"it was made from other files than these, or other content of them; first difference: {shown(other, 200)}"
    if what:
        raise UserError(f"{path}: {what}. Choose another --out, or give --overwrite")
    print(f"{out}: already there, made by the same options", file=sys.stderr)
    print(json.dumps({"out": out, "already_there": True, "sha256": manifest["sha256"]}))
    return True


def missing_images(out, names):
    """The image files that the item files name and that are not there."""
    images = dict.fromkeys(item.get("image") for name in names for _, item in read_jsonl(os.path.join(out, name)))
    return [image for image in images if not os.path.isfile(os.path.join(out, "images", str(image)))]


def work_folder(out, options, found):
    """The folder for what an interrupted run left, and the sources' fingerprints; what other options or files left is thrown away."""
    work = os.path.join(out, ".work")
    state = os.path.join(work, "options.json")
    kept = read_json(state) if os.path.exists(state) else {}
    prints = fingerprints(found, kept.get("fingerprints"))
    if os.path.isdir(work) and (kept.get("options") != options or other_file(kept.get("fingerprints"), prints)):
        print(f"note: {work} is from other options or other files; starting afresh", file=sys.stderr)
        shutil.rmtree(work)
    os.makedirs(os.path.join(work, "images"), exist_ok=True)
    write_json(state, {"options": options, "fingerprints": prints})
    return work, prints


def publish(work, out, names):
    """Move complete item files to their final names; an old manifest goes first, since from here on it would describe other files."""
    try:
        if os.path.exists(os.path.join(out, "manifest.json")):
            os.remove(os.path.join(out, "manifest.json"))
        for name in names:
            os.replace(os.path.join(work, name), os.path.join(out, name))
    except OSError as error:
        raise cannot_write(os.path.join(out, names[0]), error) from error


def check_kept(path, digest):
    """Stop where a work file that an interrupted run left is not as it was written."""
    if not os.path.exists(path) or sha256(path) != digest:
        raise UserError(f"{path}: missing, or its SHA-256 is not the one noted when it was written, so it was damaged. Remove "
                        f"{os.path.dirname(path)} and run the same command again")


def file_sizes(found):
    """{file name: bytes} of a located source."""
    return {os.path.basename(path): size for path, size in found["files"]}


def counts(items):
    """How many items of each source, domain and sub-set."""
    return {field: dict(sorted(collections.Counter(item[field] for item in items if field in item).items()))
            for field in ("source", "domain", "dataset")}


def write_lines(path, lines):
    """Write lines of JSON atomically; returns the file's SHA-256."""
    write_atomic(path, lambda file: file.writelines((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
                                                    for line in lines))
    return sha256(path)


def environment(args, started):
    """The manifest's fields that say how it was made; they differ from run to run, the item files do not."""
    return {"argv": sys.argv[1:], "python": platform.python_version(), "numpy": np.__version__, "script_sha256": sha256(__file__),
            "seed": args.seed, "seconds": round(time.time() - started, 1)}


def geb(args):
    """Make dev.jsonl and test.jsonl, images/ and manifest.json. Returns the exit status."""
    started = time.time()
    specs = {name: GEB[name] | {"name": name} for name in GEB if name in args.sources}  # in one order, on which the choice depends
    official = [[role or "column", sha256(path)] for role, path in map(role_of, args.official or ())]
    options = {"command": "geb", "seed": args.seed, "sources": list(specs), "repo": sorted(args.repo), "rows_check": args.rows_check,
               "test_per_source": args.test_per_source, "official": official,
               "official_columns": [args.official_source_column, args.official_id_column, args.official_split_column, args.official_ids]}
    with locked(args.out):
        members = read_membership(args.official, args) if args.official else None
        if absent := sorted({source for _, source, _ in members or ()} - specs.keys()):
            raise UserError(f"{', '.join(args.official)}: expected rows of the sources in --sources ({', '.join(specs)}), found rows of "
                            f"{', '.join(absent)} too. Name these in --sources, or take their rows out of the list")
        if members:
            specs = {name: spec for name, spec in specs.items() if any(source == name for _, source, _ in members)}

        def find():
            return {name: locate(spec, args, list(specs.values())) for name, spec in specs.items()}
        if finished(args.out, options, ("dev.jsonl", "test.jsonl"), args.overwrite, find):
            return 0
        found = find()
        work, prints = work_folder(args.out, options, found)
        quotas = {name: {"test": test, "dev": 2 * test} for name, spec in specs.items() for test in [args.test_per_source or spec["test"]]}
        lists = {}
        for name, spec in specs.items():
            state = os.path.join(work, f"{name}.json")
            if not os.path.exists(state):
                units = SAMPLE_FACTOR * sum(quotas[name].values()) // (2 if name == "MME" else spec.get("strata", 1)) + 8
                wanted = None if members is None else {member for _, source, member in members if source == name}
                write_json(state, shortlist(name, spec, found[name], args, work, wanted, units))
            lists[name] = read_json(state)
            print(f"{name}: {lists[name]['rows']:,} rows read; dropped: {lists[name]['dropped'] or 'none'}", file=sys.stderr)
        staged = os.path.join(work, "images")
        splits, passed = listed(lists, members) if members else divide(lists, quotas, staged)
        digests = {}
        for split, items in splits.items():
            if not members:                             # a mixed order, so that --limit sees every source
                items.sort(key=lambda item: draw(args.seed, "order", item["id"]))
            for name in dict.fromkeys(item["image"] for item in items):
                path, source = os.path.join(args.out, "images", name), os.path.join(staged, name)
                if not os.path.exists(source) or sha256(source) != os.path.splitext(os.path.basename(name))[0]:
                    raise UserError(f"{source}: missing, or its bytes are not those that its name says. Remove {work} and run the same "
                                    "command again")
                try:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    shutil.copyfile(source, path + ".tmp")
                    os.replace(path + ".tmp", path)
                except OSError as error:
                    raise cannot_write(path, error) from error
            digests[f"{split}.jsonl"] = write_lines(os.path.join(work, f"{split}.jsonl"), items)
        publish(work, args.out, list(digests))
        sources = {name: {"repository": found[name]["repository"], "revision": found[name]["revision"], "licence": spec["licence"],
                          "files": file_sizes(found[name]), "rows": lists[name]["rows"], "dropped": lists[name]["dropped"],
                          "kept": {split: sum(item["source"] == name for item in items) for split, items in splits.items()}}
                   for name, spec in specs.items()}
        sizes = {split: len(items) for split, items in splits.items()}
        write_json(os.path.join(args.out, "manifest.json"), {
            "format_version": FORMAT_VERSION, "options": options, "sha256": digests, "items": sizes,
            "counts": {split: counts(items) for split, items in splits.items()}, "passed_over": passed, "sources": sources,
            "fingerprints": prints, **environment(args, started)})
        shutil.rmtree(work)
    dropped = {name: part["dropped"] for name, part in sources.items() if part["dropped"]}
    print(json.dumps({"out": args.out, "items": sizes, "dropped": dropped, "passed_over": passed}, ensure_ascii=False))
    return 0


# ---------------------------------------------------------------- train: LLaVA-NeXT-Data
# A later turn stands alone unless it leans on what was said: a pronoun, an opening connective, a reference back, or bare coordinates.
LEANS = re.compile(r"""\b(it|its|they|them|their|theirs|he|him|his|she|her|hers|those|these)\b
                       | \b(is|was|does|did|do|would|could|can|of|with|about)\ that\b | \bthat\W*$
                       | ^\W*(and|but|so|also|then|why|how\ so|what\ else|anything\ else|what\ about|how\ about)\b
                       | \b(previous|earlier|aforementioned|(said|shown)\ (above|before)|you\ (say|said|mention|mentioned|described))\b
                       | ^[\W\d]*$""", re.I | re.X)
OPTION_LINE = re.compile(r"^[A-Z]\. ", re.M)


def turns_of(conversations):
    """The (question, answer) turns of a conversation, images' placeholders removed; malformed ones raise Drop."""
    if not isinstance(conversations, list) or not conversations or any(not isinstance(turn, dict) for turn in conversations):
        raise Drop("no conversation")
    speakers = [turn.get("from") for turn in conversations]
    if speakers != ["human", "gpt"] * (len(speakers) // 2):
        raise Drop("turns are not human and gpt by turns")
    if any(not isinstance(turn.get("value"), str) for turn in conversations):
        raise Drop("a turn without text")
    if any("\ud800" <= character <= "\udfff" for turn in conversations for character in set(turn["value"])):
        raise Drop("half a surrogate pair, which is no text")
    if sum(turn["value"].count("<image>") for turn in conversations) > 1:
        raise Drop("more than one image")
    said = ["\n".join(part.strip() for part in turn["value"].split("<image>")).strip() for turn in conversations]
    return list(zip(said[::2], said[1::2]))


def usable_turns(turns, every):
    """Pairs (number, question, answer) that make an item: those that stand alone, or `every` one with both texts.

    LLaVA data gives the answer-format sentence once, in the first turn; later turns of the same conversation inherit it.
    """
    usable = []
    first = turns[0][0]
    for number, (question, answer) in enumerate(turns):
        if not question or not answer:
            continue
        if number and not every and LEANS.search(question):
            continue
        for sentence, fits in ((WORD.strip(), True), (LETTER.strip(), OPTION_LINE.search(question))):
            if number and fits and first.endswith(sentence) and sentence not in question:
                question += "\n" + sentence
        usable.append((number, question, answer))
    if not usable:
        raise Drop("empty question or answer")
    return usable


def training_items(record, key, subset, args):
    """The items of one conversation, image not yet known: one seeded turn, or with --turns all each."""
    turns = usable_turns(turns_of(record.get("conversations")), args.turns == "all")
    if args.turns == "one":
        turns = [min(turns, key=lambda turn: draw(args.seed, key, turn[0]))]
    return [{"id": f"llava_next:{key}:{number}", "image": "", "question": question, "answers": [answer], "source": "LLaVA-NeXT",
             "domain": SUBSETS.get(subset, "other"), "metric": "exact", "dataset": subset} for number, question, answer in turns]


def json_array(path, size=1 << 20):
    """Stream the objects of a JSON array of any length, holding about `size` characters of it."""
    decoder = json.JSONDecoder()
    try:
        with open_binary(path) as raw:
            file = io.TextIOWrapper(raw, encoding="utf-8")
            buffer, place = file.read(size).lstrip("\ufeff \r\n\t"), 1
            if not buffer.startswith("["):
                raise UserError(f"{path}: expected a JSON array of conversations, found {shown(buffer[:20])}")
            while True:
                while place < len(buffer) and buffer[place] in " \r\n\t,":
                    place += 1
                if buffer[place:place + 1] == "]":
                    rest = buffer[place + 1:]
                    while not rest.strip() and (more := file.read(size)):
                        rest = more
                    if rest.strip():
                        raise UserError(f"{path}: expected the end of the file after the JSON array, found {shown(rest.strip()[:20])}. "
                                        "Keep one array, or download the file again")
                    return
                try:
                    value, place = decoder.raw_decode(buffer, place)
                except RecursionError:
                    raise UserError(f"{path}: an object that begins {shown(buffer[place:place + 60])} has too many levels. Download the "
                                    "file again") from None
                except ValueError:
                    more = file.read(size)
                    if not more or len(buffer) - place > 64 * size:  # no conversation is that long: the text is damaged, not unfinished
                        raise UserError(f"{path}: the JSON array is cut short or damaged in an object that begins "
                                        f"{shown(buffer[place:place + 60])}. Download the file again") from None
                    buffer, place = buffer[place:] + more, 0
                    continue
                yield value
    except (OSError, UnicodeDecodeError, *hub_errors()) as error:
        raise UserError(f"{path}: cannot read this UTF-8 text ({type(error).__name__}: {shown(error)}). Download the file again") from None


def scan_raw(spec, path, args, work):
    """First pass over the raw json: items with the source's image path, into work/raw.jsonl. Returns the counts."""
    dropped, rows, kept = collections.Counter(), 0, 0

    def lines():
        nonlocal rows, kept
        for rows, record in enumerate(tqdm(json_array(path), total=spec["rows"], desc="conversations", unit="row", disable=None), 1):
            try:
                image = record.get("image") if isinstance(record, dict) else None
                if not isinstance(image, str) or not image:
                    many = isinstance(image, list) and len(image) > 1
                    raise Drop("no image" if not image else "more than one image" if many else "image path that is no text")
                if "\0" in image or any("\ud800" <= character <= "\udfff" for character in image):
                    raise Drop("image path that no file can have")
                for item in training_items(record, rows - 1, image.split("/")[0], args):
                    yield item | {"image": image}
                    kept += 1
                    if args.limit and kept >= args.limit:
                        return
            except Drop as reason:
                dropped[str(reason)] += 1

    write_lines(os.path.join(work, "raw.jsonl"), lines())
    if args.rows_check and not args.limit and rows != spec["rows"]:
        raise UserError(f"{path}: expected {spec['rows']:,} conversations as published, found {rows:,}. --no-rows-check takes it as it is")
    return {"rows": rows, "dropped": dict(dropped)}


def unpack(archive, wanted, folder):
    """Copy the wanted images of a tar archive out under their hashes. Yields {"name", "image"} or {"name", "error"}."""
    try:
        with open_binary(archive) as file, (gzip.GzipFile(fileobj=file) if archive.endswith("gz") else file) as stream, \
                tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tqdm(tar, desc=os.path.basename(archive), unit="file", disable=None):
                name = member.name.removeprefix("./")
                if member.isfile() and name in wanted:
                    data = tar.extractfile(member).read()
                    try:
                        yield {"name": name, "image": write_image(folder, data, decode=True)}
                    except BAD_IMAGE:
                        yield {"name": name, "error": "unreadable image"}
            if tar.fileobj.tell() < tar.offset + 512:   # tarfile takes a cut header, or none, for the end of the archive
                raise tarfile.ReadError("it ends without the mark of its end")
            while stream.read(2 ** 20):                   # gzip compares its checksum only at the last byte
                pass
    except UserError:
        raise
    except Exception as error:                          # tarfile raises TypeError, OverflowError and others on damaged headers
        raise UserError(f"{archive}: cannot read this archive ({type(error).__name__}: {shown(error)}). Download it again") from None


def copy_loose(names, root, folder):
    """The same for images that were unpacked already: root/NAME. Missing ones are left out."""
    for name in tqdm(names, desc="loose images", unit="file", disable=None):
        path = os.path.realpath(os.path.join(root, name))
        if path.startswith(os.path.join(os.path.realpath(root), "")) and os.path.isfile(path):
            try:
                with open(path, "rb") as file:
                    yield {"name": name, "image": write_image(folder, file.read(), decode=True)}
            except (BAD_IMAGE, OSError):
                yield {"name": name, "error": "unreadable image"}


def raw_images(found, work, folder):
    """Second pass over the raw form: every wanted image from the archives or the unpacked folder. Returns {source path: image or None}."""
    place, wanted = {}, set()
    for _, item in read_jsonl(os.path.join(work, "raw.jsonl")):
        wanted.add(item["image"])
    archives = [path for path, _ in found["files"] if path.endswith((".tar.gz", ".tgz", ".tar"))]
    roots = dict.fromkeys(os.path.dirname(path) for path, _ in found["files"] if not path.startswith("hf://"))
    for source in [*archives, *roots]:
        left = wanted - place.keys()
        if not left:
            break
        done = os.path.join(work, f"{len(place)}-{os.path.basename(source)}.map.jsonl")
        if not os.path.exists(f"{done}.json"):          # one archive is the unit of restarting; images written before are found again
            write_json(f"{done}.json", {"sha256": write_lines(done, unpack(source, left, folder) if source in archives else
                                                              copy_loose(sorted(left), source, folder))})
        check_kept(done, read_json(f"{done}.json")["sha256"])
        for _, line in read_jsonl(done):
            place[line["name"]] = line.get("image")
        print(f"{os.path.basename(source)}: {len(place):,} of {len(wanted):,} images so far", file=sys.stderr)
    return place


def scan_parquet(spec, files, args, work, folder):
    """One pass over the parquet form, a shard at a time, into work/NNNNN.jsonl with its counts beside it. Returns the counts."""
    total, dropped, kept = 0, collections.Counter(), 0
    for shard, (path, _) in enumerate(files):
        state = os.path.join(work, f"{shard:05d}.json")
        if not os.path.exists(state):
            part = {"rows": 0, "kept": 0, "dropped": collections.Counter()}

            def lines():
                rows = parquet_rows("LLaVA-NeXT", [path], spec["columns"].split())
                for row_number, row in enumerate(tqdm(rows, desc=os.path.basename(path), unit="row", disable=None)):
                    part["rows"] += 1
                    try:
                        image = row["image"]
                        if not image or isinstance(image, dict) and not (image.get("bytes") or image.get("path")):
                            raise Drop("no image")
                        data = image_bytes(row)
                        subset = next((s for start, s in SUBSET_OF_ID if str(row["id"]).startswith(start)), "unknown")
                        items = training_items(row, f"{shard}-{row_number}", subset, args)
                        try:
                            name = write_image(folder, data, decode=True)
                        except BAD_IMAGE:
                            raise Drop("unreadable image") from None
                    except Drop as reason:
                        part["dropped"][str(reason)] += 1
                        continue
                    for item in items:
                        yield item | {"image": name}
                        part["kept"] += 1
                        if args.limit and kept + part["kept"] >= args.limit:
                            return

            digest = write_lines(os.path.join(work, f"{shard:05d}.jsonl"), lines())
            write_json(state, part | {"sha256": digest})
        part = read_json(state)
        check_kept(os.path.join(work, f"{shard:05d}.jsonl"), part["sha256"])
        total, kept = total + part["rows"], kept + part["kept"]
        dropped.update(part["dropped"])
        print(f"{os.path.basename(path)}: {kept:,} items so far, shard {shard + 1} of {len(files)}", file=sys.stderr)
        if args.limit and kept >= args.limit:
            break
    if args.rows_check and not args.limit and total != spec["rows"]:
        raise UserError(f"LLaVA-NeXT: expected {spec['rows']:,} rows as published, found {total:,} in {len(files)} files. "
                        "--no-rows-check takes them as they are")
    return {"rows": total, "dropped": dict(dropped)}


def write_shuffled(parts, place, path, seed, dropped):
    """Write the items of the part files in seeded order, so that the first N of them are a fair sample. Returns (sha256, counts, items)."""
    lots, files, tally, written = [], [open(part, "rb") for part in parts], collections.defaultdict(collections.Counter), 0
    try:
        for number, file in enumerate(files):
            offset = 0
            for line in file:
                lots.append((draw(seed, "order", json.loads(line)["id"]), number, offset))
                offset += len(line)
        lots.sort()

        def lines():
            nonlocal written
            for _, number, offset in tqdm(lots, desc="writing", unit="item", disable=None):
                files[number].seek(offset)
                item = json.loads(files[number].readline())
                if place is not None:
                    if not place.get(item["image"]):
                        dropped["unreadable image" if item["image"] in place else "image not in the archives"] += 1
                        continue
                    item["image"] = place[item["image"]]
                for field in ("domain", "dataset"):
                    tally[field][item[field]] += 1
                written += 1
                yield item

        digest = write_lines(path, lines())
    finally:
        for file in files:
            file.close()
    return digest, {field: dict(sorted(values.items())) for field, values in tally.items()}, written


def train(args):
    """Make items.jsonl, images/ and manifest.json from LLaVA-NeXT-Data. Returns the exit status."""
    started = time.time()
    options = {"command": "train", "seed": args.seed, "turns": args.turns, "limit": args.limit, "repo": sorted(args.repo),
               "rows_check": args.rows_check, "form": args.form}
    specs = {form: spec | {"name": "LLaVA-NeXT"} for form, spec in LLAVA_NEXT.items()}
    form = "raw" if args.form == "auto" else args.form

    def find():
        nonlocal form
        try:
            return {"LLaVA-NeXT": locate(specs[form], args, [specs[form]])}
        except UserError as missing:
            if args.form != "auto" or not args.local:
                raise
            try:
                found = locate(specs["parquet"], args, [specs["parquet"]])
            except UserError:
                raise missing from None
            form = "parquet"
            return {"LLaVA-NeXT": found}
    with locked(args.out):
        if finished(args.out, options, ("items.jsonl",), args.overwrite, find):
            return 0
        sources = find()
        found = sources["LLaVA-NeXT"]
        work, prints = work_folder(args.out, options | {"form": form}, sources)
        folder = os.path.join(args.out, "images")
        place = None
        if form == "raw":
            tables = [path for path, _ in found["files"] if path.endswith(".json")]
            if len(tables) != 1:
                raise UserError(f"{args.local or found['repository']}: expected one .json file of conversations beside the archives, found "
                                f"{len(tables)} ({', '.join(map(os.path.basename, tables))})")
            state = os.path.join(work, "raw.json")
            if not os.path.exists(state):
                counted = scan_raw(specs[form], tables[0], args, work)
                write_json(state, counted | {"sha256": sha256(os.path.join(work, "raw.jsonl"))})
            result, parts = read_json(state), [os.path.join(work, "raw.jsonl")]
            check_kept(parts[0], result["sha256"])
            place = raw_images(found, work, folder)
        else:
            result = scan_parquet(specs[form], found["files"], args, work, folder)
            parts = sorted(glob.glob(os.path.join(glob.escape(work), "[0-9]*.jsonl")))
        dropped = collections.Counter(result["dropped"])
        digest, tally, written = write_shuffled(parts, place, os.path.join(work, "items.jsonl"), args.seed, dropped)
        if not written:
            check = "that the archives belong to the json file" if form == "raw" else "that the parquet files are the set's own"
            raise UserError(f"{args.out}: expected training items, found none; dropped: {dict(dropped)}. Check {check}")
        publish(work, args.out, ["items.jsonl"])
        source = {"repository": found["repository"], "revision": found["revision"], "form": form, "licence": specs[form]["licence"],
                  "files": file_sizes(found)}
        write_json(os.path.join(args.out, "manifest.json"), {
            "format_version": FORMAT_VERSION, "options": options, "sha256": {"items.jsonl": digest}, "source": source,
            "rows": result["rows"], "items": written, "dropped": dict(dropped), "counts": tally, "fingerprints": prints,
            **environment(args, started)})
        shutil.rmtree(work)
    print(json.dumps({"out": args.out, "form": form, "rows": result["rows"], "items": written, "dropped": dict(dropped),
                      "domains": tally["domain"]}))
    return 0


# ---------------------------------------------------------------- check
def faults(item):
    """What is wrong with one item, as short texts; the same demands as `read_items`, and the scorer's on answers and options."""
    def is_texts(value):
        return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
    out = [f"'{field}' is not a text" for field in ("id", "image", "question", "source", "domain")
           if not isinstance(item.get(field), str) or not item[field].strip()]
    if isinstance(item.get("id"), str) and (item["id"] != item["id"].strip() or not item["id"].isprintable()):
        out.append("'id' has outer white space or control characters")
    image = item.get("image")
    if isinstance(image, str) and (image.startswith(("/", "\\")) or ":" in image[:3] or ".." in image.replace("\\", "/").split("/")
                                   or not image.isprintable()):
        out.append("'image' leaves the images folder")
    out += [f"'{field}' is not a list of one or more texts" for field in ("answers", "options")
            if (field == "answers" or field in item) and not is_texts(item.get(field))]
    metric = item.get("metric")
    if "metric" in item and metric not in METRICS:
        out.append(f"'metric' is not one of {', '.join(METRICS)}")
    if "metric" not in item and item.get("source") not in SOURCES:
        out.append("a source of your own needs 'metric'")
    if out:
        return out
    rule = metric or {"MME": "yes_no", "CV-Bench": "choice", "RealWorldQA": "realworldqa", "TextVQA": "vqa"}.get(item["source"])
    question = item["question"]
    if rule == "realworldqa" and (REALWORLDQA_LETTER in question or (REALWORLDQA_SHORT not in question and "options" in item)):
        rule = "choice"                                 # the scorer takes it for multiple choice by the same test
    answers, options = item["answers"], item.get("options")
    if not answers[0].strip() or (rule != "vqa" and not all(answer.strip() for answer in answers)):
        out.append("an empty answer")
    if rule == "yes_no" and answers[0].strip().lower() not in ("yes", "no"):
        out.append("the answer is neither yes nor no")
    if rule == "choice" and not options:
        out.append("multiple choice without 'options'")
    if options:
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:len(options)]
        if len(set(options)) != len(options) or not all(option.strip() for option in options) or len(options) < 2 or len(options) > 26:
            out.append("options are empty, equal or too few or many")
        if rule == "choice" and not (answers[0].strip() in options or (len(answers[0].strip()) == 1 and answers[0].strip() in letters)):
            out.append("the answer is neither a letter of the options nor an option")
        lines = dict(option_lines(item["question"], r"\(?([A-Z])[.):]"))
        if set(lines) == set(letters) and [lines[letter] for letter in letters] != [option.strip() for option in options]:
            out.append("the question's option lines are not 'options' in letter order")
    return out


def read_for_check(path, limit=20):
    """Read an item file for `check`. Returns ([(id, image), ...], Counter of faults, the first of them as texts)."""
    rows, kinds, shown_faults, seen = [], collections.Counter(), [], set()
    for number, item in read_jsonl(path):
        found = faults(item)
        if isinstance(item.get("id"), str) and item["id"] in seen:
            found.append("'id' occurs twice")
        for fault in found:
            kinds[fault] += 1
            if len(shown_faults) < limit:
                shown_faults.append(f"{path} line {number} (id {shown(item.get('id'))}): {fault}")
        if isinstance(item.get("id"), str):
            seen.add(item["id"])
        if isinstance(item.get("image"), str) and not any("leaves" in fault or "'image'" in fault for fault in found):
            rows.append((str(item.get("id")), item["image"]))
    if not rows and not kinds:
        raise UserError(f"{path}: expected one item or more, found none")
    return rows, kinds, shown_faults


def examine(job):
    """One image file: (name, SHA-256 of its bytes, thumbnail, size), or (name, None, message, None) where it cannot be read."""
    folder, name = job
    try:
        thumb, size = thumbprint(folder, name)
        return name, sha256(os.path.join(folder, name)), thumb, size
    except (UserError, OSError) as error:
        return name, None, str(error), None


def examine_all(folder, names, workers, label):
    """`examine` for many files, in processes of its own where there are many. Returns (good rows, messages)."""
    jobs, good, bad = [(folder, name) for name in names], [], []
    pool = concurrent.futures.ProcessPoolExecutor(workers) if workers > 1 and len(jobs) > 4000 else None
    try:
        results = pool.map(examine, jobs, chunksize=64) if pool else map(examine, jobs)
        for result in tqdm(results, total=len(jobs), desc=label, unit="image", disable=None):
            (bad if result[1] is None else good).append(result)
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    return good, [message for _, _, message, _ in bad]


def check(args):
    """Validate an item file and, with --against, look for its images among the training images. Returns the exit status."""
    pairs = [(args.items, args.images)] + ([tuple(args.against)] if args.against else [])
    files, kinds, messages = [], collections.Counter(), []
    for items, images in pairs:
        if not os.path.isdir(images):
            raise UserError(f"{images}: not a folder. Give the folder that the items' image paths are relative to")
        rows, found, texts_of = read_for_check(items)
        good, bad = examine_all(images, list(dict.fromkeys(image for _, image in rows)), args.workers, os.path.basename(items))
        changed = [f"{name}: its bytes are not those that its name says (SHA-256)" for name, digest, _, _ in good
                   if re.fullmatch("[0-9a-f]{64}", stem := os.path.splitext(os.path.basename(name))[0]) and stem != digest]
        files.append((rows, good))
        kinds += found + collections.Counter({"missing or unreadable image": len(bad)} if bad else {})
        kinds += collections.Counter({"image that is not the one its name says": len(changed)} if changed else {})
        messages += texts_of + [f"{items}: {message}" for message in [*bad, *changed][:20]]
    for message in messages[:40]:
        print(message, file=sys.stderr)
    if kinds:
        raise UserError(f"{' and '.join(items for items, _ in pairs)}: expected none, found {sum(kinds.values())} faults: "
                        + "; ".join(f"{count} x {kind}" for kind, count in kinds.items()))
    report = {"items": len(files[0][0]), "images": len(files[0][1]), "faults": 0}
    if args.against:
        (rows, good), (train_rows, train_good) = files
        leaks = find_leaks(args.images, good, args.against[1], train_good)
        leaking = {train_name for _, train_name, _ in leaks}
        excluded = [item for item, image in train_rows if image in leaking]
        out = args.out or os.path.splitext(args.against[0])[0] + ".exclude-ids.txt"
        write_atomic(out, lambda file: file.writelines(f"{item}\n".encode() for item in excluded))
        by_kind = collections.Counter(kind for _, _, kind in leaks)
        affected = {name for name, _, _ in leaks}
        report |= {"training_items": len(train_rows), "training_images": len(train_good), "identical": by_kind["identical"],
                   "near_identical": by_kind["near"], "items_affected": sum(image in affected for _, image in rows),
                   "excluded_training_items": len(excluded), "exclude_ids": out,
                   "first": [{"image": a, "training_image": b, "kind": kind} for a, b, kind in leaks[:20]]}
        if leaks:
            print(f"note: {len(excluded)} training items show an image of {args.items}; drop them with fit --exclude-ids {out}",
                  file=sys.stderr)
    print(json.dumps(report, ensure_ascii=False))
    return 0


def find_leaks(images, good, train_images, train_good):
    """Pairs (image, training image, "identical" or "near") of `examine`'s rows."""
    by_digest = collections.defaultdict(list)
    for name, digest, _, _ in train_good:
        by_digest[digest].append(name)
    leaks = [(name, other, "identical") for name, digest, _, _ in good for other in by_digest.get(digest, ())]
    taken = {(name, other) for name, other, _ in leaks}
    if good and train_good:
        prints, sizes = np.stack([g[2] for g in good]), [g[3] for g in good]
        others, other_sizes = np.stack([g[2] for g in train_good]), [g[3] for g in train_good]
        for i, j in tqdm(close_thumbs(prints, sizes, others, other_sizes), desc="near-identical", unit="pair", disable=None):
            name, other = good[i][0], train_good[j][0]
            if (name, other) not in taken and same_picture(images, name, sizes[i], train_images, other, other_sizes[j]):
                leaks.append((name, other, "near"))
    return leaks


# ---------------------------------------------------------------- command line
def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="geb|train|check")
    command = {name: commands.add_parser(name, help=text, description=text, allow_abbrev=False) for name, text in (
        ("geb", "make the benchmark's dev and test items"), ("train", "make the training items from LLaVA-NeXT-Data"),
        ("check", "validate an item file and look for training images among its images"))}
    switch = argparse.BooleanOptionalAction
    for name in ("geb", "train"):
        add = command[name].add_argument
        add("--out", required=True, metavar="DIR", help="folder for the item files, images/ and manifest.json")
        add("--local", metavar="DIR", help="folder with the downloaded sources, DIR/OWNER/NAME/... (default: read the hub)")
        add("--repo", action="append", default=[], metavar="SOURCE=OWNER/NAME[@REVISION]",
            help="another repository or commit for a source; may be repeated (default: the published one's newest commit)")
        add("--seed", type=int, default=0, help="decides membership, turns and order (default: %(default)s)")
        add("--rows-check", action=switch, default=True, help="refuse a source whose number of rows is not the published one (default: on)")
        add("--overwrite", action=switch, default=False, help="replace finished output in --out (default: off)")
    add = command["geb"].add_argument
    add("--sources", nargs="+", choices=list(GEB), default=list(GEB), metavar="SOURCE",
        help=f"sources to use (default: all of {', '.join(GEB)})")
    add("--test-per-source", type=int, metavar="N", help="test items of each source, dev gets 2N; even (default: 100, scene text 150)")
    add("--official", nargs="+", metavar="FILE",
        help="membership list (.jsonl, .csv, .tsv, .parquet) with a split column, or dev=FILE test=FILE (default: our own seeded draw)")
    add("--official-source-column", default="source", metavar="NAME", help="its column with the source's name (default: %(default)s)")
    add("--official-id-column", default="source_id", metavar="NAME", help="its column with the source's id (default: %(default)s)")
    add("--official-split-column", default="split", metavar="NAME", help="its column with dev or test (default: %(default)s)")
    add("--official-ids", choices=("source", "row"), default="source",
        help="its ids: the source's own, or row numbers from 0 (default: %(default)s)")
    add = command["train"].add_argument
    add("--turns", choices=("one", "all"), default="one",
        help="one seeded turn that stands alone, or each turn of a conversation (default: %(default)s)")
    add("--limit", type=int, metavar="N", help="only the first N items in the source's order, which is by sub-set (default: all)")
    add("--form", choices=("auto", "raw", "parquet"), default="auto",
        help="raw: 738,590 conversations; parquet: 779,289 rows, some text-only (default: raw where it is)")
    add = command["check"].add_argument
    add("items", metavar="ITEMS", help="item file, JSONL")
    add("images", metavar="IMAGES", help="folder that its image paths are relative to")
    add("--against", nargs=2, metavar=("TRAIN_ITEMS", "TRAIN_IMAGES"), help="training items and images to search (default: none)")
    add("--out", metavar="FILE", help="list of training ids for fit --exclude-ids (default: TRAIN_ITEMS' name with .exclude-ids.txt)")
    add("--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="W",
        help="processes that read images, for more than 4,000 of them (default: processors, at most 8)")
    args = parser.parse_args(argv)
    sub = command[args.command]
    names = {"geb": list(GEB), "train": ["LLaVA-NeXT"], "check": []}[args.command]
    for pair in getattr(args, "repo", []):
        if not re.fullmatch(r"[^=]+=[\w.-]+/[\w.-]+(@[\w.-]+)?", pair) or pair.split("=")[0] not in names:
            sub.error(f"--repo: expected SOURCE=OWNER/NAME[@REVISION] with SOURCE among {', '.join(names)}, found {pair}")
    if args.command == "geb" and args.test_per_source is not None and (args.test_per_source < 2 or args.test_per_source % 2):
        sub.error("--test-per-source: expected an even number from 2, because MME comes in pairs and ChartQA in two halves")
    if args.command == "train" and args.limit is not None and args.limit < 1:
        sub.error("--limit: expected a number from 1")
    return args


def main(argv=None):
    args = parse_args(argv)
    return {"geb": geb, "train": train, "check": check}[args.command](args)


if __name__ == "__main__":
    run(main, "Run the same command again: it continues with the source, shard or archive it was at.")
