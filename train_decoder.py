"""Train a readout that answers questions from one frozen embedding, and let it answer: how much of the answer does the vector carry?

    python train_decoder.py fit --train-items train.jsonl --train-embeddings emb/train --dev-items dev.jsonl --dev-embeddings emb/dev \
        --decoder Qwen/Qwen3-0.6B --out readout                     # several GPUs: torchrun --nproc-per-node 8 train_decoder.py fit ...
    python train_decoder.py predict --readout readout --items test.jsonl --embeddings emb/test --out matched.jsonl

READS
  items        JSONL, one object a line: id, image, question, answers (answers[0] is the target), source, domain
  embeddings   PREFIX.npy float32 or float16 (N, D); PREFIX.ids.txt, line i names row i; PREFIX.meta.json with embedder, mode, key, dim,
               normalized, dtype. Rows are found by key: the item's `image` or its `id`, as the sidecar's `key` says. Extra rows are fine.
               Control trios also have `condition` in the sidecar and PREFIX.source_keys.txt.
  decoder      a hub id or a folder that transformers' AutoModelForCausalLM opens, with the Qwen chat tokens
WRITES
  OUT/         fit, when it ends: the readout with the lowest dev loss. config.json, model.safetensors, tokenizer, projector.safetensors
               and, last, readout.json (everything predict needs). OUT/last/ is the same for the last step. OUT/metrics.jsonl is the log,
               OUT/skipped.jsonl names the items that --on-long skip left out. OUT/resume/ may be deleted once the run is over.
  F.jsonl      predict: id, prediction (raw text), condition, answer_bits (-log2 of the probability of answers[0] and the end token),
               answer_tokens, embedding_key where it is not the item's own; then F.meta.json. F.jsonl.partial is unfinished work.
GUARANTEES
  The order of the data is a function of (seed, epoch) alone; the loss is the sum over supervised tokens divided by their number in the
  global batch, over all ranks and micro-steps. On a CPU with the same versions and thread count, a run that was stopped and resumed
  gives the same bytes as an unbroken one. On a GPU, and for another number of ranks, only rounding differs.
  Files appear under their final names complete; a finished output is not overwritten without --overwrite.
  Exit status: 0 done, 1 failed (the message says what to do), 2 wrong command line, 130 interrupted.

COST  Qwen3-0.6B in float32 with AdamW needs 10 GB and about 2 MB for each token of a micro-step in bfloat16 on a GPU.
REUSE  Copy this file; it needs Python 3.11, torch>=2.6, transformers>=5.24, numpy>=2.0, tqdm>=4.66 (safetensors comes with transformers).
"""
import argparse
import array
import collections
import concurrent.futures
import contextlib
import dataclasses
import glob
import hashlib
import json
import math
import os
import platform
import resource
import shutil
import sys
import time
import zlib

import numpy as np
from tqdm import tqdm

# The prompt, in Qwen3's chat format. Soft tokens stand between two pieces of text, never at the edge of the sequence. The pieces are
# encoded one by one and the user's text with special tokens switched off, so an item can neither close its turn nor move a border.
BEFORE, BETWEEN, AFTER, END = "<|im_start|>user\n", "\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
THINK = "<think>\n\n</think>\n\n"                       # Qwen3's empty think block, for --think-block
# what a vector must share with its readout
IDENTITY = ("embedder", "mode", "dim", "normalized", "weights_sha256", "config_sha256", "prompt", "pooling")
POOL = 16                                               # batches whose items are sorted by length together; more = less padding
LOGITS_AT_ONCE = 1 << 27                                # largest piece of logits, in numbers: 0.5 GB in float32
INPUTS = ("train_items", "train_embeddings", "dev_items", "dev_embeddings", "failed", "exclude_ids")     # compared by content, not by path
NO_EFFECT = {"command", "out", "resume", "overwrite", "device", "save_every", "log_every", "compile", "gradient_checkpointing",
             "accumulation", "on_long", "allow_duplicate_vectors"}      # flags that leave the data and the sums as they are
MAY_CHANGE = {"epochs", "max_steps", "eval_every"}      # what --resume may change
LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError)     # what transformers raises on a bad folder
NO_SUMS = {"loss": 0.0, "supervised": 0, "tokens": 0, "seconds": 0.0}
TESTED = {"python": "3.11.", "torch": "2.", "transformers": "5.", "numpy": "2."}


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


# ---- shared block: embeddings (identical in every script that has it; a test compares) ----
def read_embeddings(prefix):
    """Read and check an embedding trio. Returns (array (N, D) memory-mapped float32 or float16, keys: list of N str, meta: dict).

    Checked before anything expensive: the three files, the header against the file's size, shape, finite values, unique keys, and the
    hashes that the sidecar holds. One streaming pass; memory does not grow with N except for the keys.
    """
    meta = read_json(f"{prefix}.meta.json")
    missing = [name for name in ("embedder", "mode", "key", "dim", "normalized", "dtype") if name not in meta]
    if missing:
        raise UserError(f"{prefix}.meta.json: missing {', '.join(missing)}. A sidecar needs embedder, mode, key, dim, normalized, dtype")
    if meta["key"] not in ("image", "id"):
        raise UserError(f"{prefix}.meta.json: expected key to be 'image' or 'id', found {shown(repr(meta['key']))}")
    try:
        array = np.lib.format.open_memmap(f"{prefix}.npy", mode="r")    # refuses pickled objects and archives, maps at most the file
    except Exception as error:                          # a header is read by several parsers, each with errors of its own
        raise UserError(f"{prefix}.npy: expected a .npy array without pickled objects, found {shown(error)}. Extract it again") from None
    if array.ndim != 2 or array.dtype not in (np.float32, np.float16) or not array.flags.c_contiguous or 0 in array.shape:
        raise UserError(f"{prefix}.npy: expected a C-order float32 or float16 array (N, D), found {array.dtype} {array.shape}")
    if os.path.getsize(f"{prefix}.npy") != array.offset + array.nbytes:
        raise UserError(f"{prefix}.npy: expected {array.offset + array.nbytes} bytes, found {os.path.getsize(f'{prefix}.npy')}. "
                        "Extract it again")
    if (array.shape[1], str(array.dtype)) != (meta["dim"], meta["dtype"]):
        raise UserError(f"{prefix}.npy: expected dim {shown(meta['dim'])} and {shown(meta['dtype'])} as its sidecar says, found "
                        f"{array.shape[1]} and {array.dtype}")
    try:
        with open(f"{prefix}.ids.txt", encoding="utf-8", newline="\n") as file:
            keys = file.read().removesuffix("\n").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{prefix}.ids.txt: expected {len(array)} lines of UTF-8, found {shown(error)}") from None
    if len(keys) != len(array) or len(set(keys)) != len(keys) or "" in keys:
        raise UserError(f"{prefix}.ids.txt: expected {len(array)} unique lines, one for each row of the array, found {len(keys)} lines, "
                        f"{len(set(keys))} distinct{', some blank' if '' in keys else ''}")
    if "ids_sha256" in meta and sha256(f"{prefix}.ids.txt") != meta["ids_sha256"]:
        raise UserError(f"{prefix}.ids.txt: its SHA-256 is not the one in the sidecar: changed after extraction. Extract it again")
    digest = hashlib.sha256()
    with open(f"{prefix}.npy", "rb") as file:
        digest.update(file.read(array.offset))
        step = max(1, (1 << 24) // (array.shape[1] * array.itemsize))
        for start in range(0, len(array), step):
            rows = np.fromfile(file, array.dtype, min(step, len(array) - start) * array.shape[1]).reshape(-1, array.shape[1])
            digest.update(rows)
            if not np.isfinite(rows).all():
                row = start + int(np.flatnonzero(~np.isfinite(rows).all(1))[0])
                raise UserError(f"{prefix}.npy: row {row} (key {shown(keys[row])}) has NaN or infinity. Extract it again")
    if "array_sha256" in meta and digest.hexdigest() != meta["array_sha256"]:
        raise UserError(f"{prefix}.npy: its SHA-256 is not the one in the sidecar, so it was changed after extraction. Extract it again")
    return array, keys, meta


def read_failed(path):
    """The items that extraction skipped, {id: line}, from a JSONL file with `id` and `error`; none without a path."""
    failed = {}
    for number, line in read_jsonl(path) if path else ():
        if not isinstance(line.get("id"), str) or not isinstance(line.get("error", ""), str):
            raise UserError(f"{path} line {number}: expected a text in 'id' and, where there is one, in 'error', found "
                            f"{shown(repr((line.get('id'), line.get('error'))))}. Use the PREFIX.failed.jsonl that extraction wrote")
        failed[line["id"]] = line
    return failed


def write_embeddings(prefix, array, keys, meta):
    """Write an embedding trio: array (N, D), N keys, then the sidecar with dim, dtype and the hashes, last, so that it marks the end."""
    if not np.isfinite(array).all():
        raise UserError(f"{prefix}.npy: NaN or infinity in row {int(np.flatnonzero(~np.isfinite(array).all(1))[0])}; nothing was written")
    if os.path.exists(f"{prefix}.meta.json"):
        os.remove(f"{prefix}.meta.json")                # while files change, the trio must not look finished
    write_atomic(f"{prefix}.npy", lambda file: np.save(file, np.ascontiguousarray(array), allow_pickle=False))
    write_atomic(f"{prefix}.ids.txt", lambda file: file.write(("\n".join(keys) + "\n").encode()))
    write_json(f"{prefix}.meta.json", {"format_version": FORMAT_VERSION, **meta, "dim": int(array.shape[1]), "dtype": str(array.dtype),
                                       "rows": len(keys), "ids_sha256": sha256(f"{prefix}.ids.txt"),
                                       "array_sha256": sha256(f"{prefix}.npy")})
# ---- end of shared block: embeddings ----


# ---- shared block: partial (identical in every script that has it; a test compares) ----
def sealed(line):
    """A line of unfinished work with its checksum, so that a byte that changes before the run goes on is found."""
    return {**line, "crc32": zlib.crc32(json.dumps(line).encode())}


def unsealed(text):
    """The line that `sealed` made into `text`, or None where it is not as it was written: that work is done again."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
        line = json.loads(text)
        found = {name: value for name, value in line.items() if name != "crc32"}
        return found if sealed(found) == line else None


def hash_decoder(name):
    """One hash over the files of a local decoder folder; None for a hub id, whose revision is recorded once it is loaded."""
    if not os.path.isdir(name):
        return None
    digest = hashlib.sha256()
    for file in sorted(os.listdir(name)):
        if file.endswith((".safetensors", ".json", ".txt", ".jinja")) and os.path.isfile(os.path.join(name, file)):
            digest.update(f"{file} {sha256(os.path.join(name, file))}\n".encode())
    return digest.hexdigest()
# ---- end of shared block: partial ----


# ---- shared block: ranks (identical in every script that has it; a test compares) ----
def ranks():
    """(rank, rank on this machine, number of ranks) as torchrun sets them; (0, 0, 1) without it."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    found = [os.environ.get(name, default) for name, default in names.items()]
    if not all(text.isascii() and text.isdigit() for text in found) or not int(found[0]) < int(found[2]):
        raise UserError(f"environment: expected whole numbers in {', '.join(names)} with RANK below WORLD_SIZE, found "
                        f"{', '.join(shown(repr(text), 20) for text in found)}. Start with torchrun, or unset them")
    return tuple(map(int, found))
# ---- end of shared block: ranks ----


# ---- shared block: steady (identical in every script that has it; a test compares) ----
def steady_math():
    """Make the first call of each of torch's vector functions on the CPU here, with 8 numbers and so on one thread, before any model does.

    Where several threads make it, MKL 2024.2 (in torch's CPU builds) can give one of them a kernel of low accuracy for that one call: its
    share of a first batch comes from values with relative errors of 1e-4, silently (https://github.com/pytorch/pytorch/issues/188792).
    """
    for dtype in (torch.float32, torch.float64):
        for name in ("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma", "log", "log10", "log1p",
                     "log2", "sin", "sinh", "sqrt", "tan", "tanh"):
            getattr(torch, name)(torch.full((8,), 0.5, dtype=dtype))
# ---- end of shared block: steady ----


def load_libraries():
    """Import torch and transformers. They take seconds, so this waits until the command line and the cheap checks have passed."""
    global torch, transformers, safetensors
    import safetensors.torch
    import torch
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    steady_math()
    for name, version in versions().items():
        if not version.startswith(TESTED[name]):
            log(f"note: {name} {version} is untested here (tested: {TESTED[name]}x); compare a small run first")


def versions():
    """Versions of what shapes the result."""
    return {"python": platform.python_version()} | {module.__name__: module.__version__ for module in (torch, transformers, np)}


def log(text):
    """A line on standard error, from the first rank only, without tearing the progress bar."""
    if ranks()[0] == 0:
        tqdm.write(text, file=sys.stderr)


# ---- data ----

def join_embeddings(items, items_path, prefix):
    """Find each item's row by key. Returns (rows (N,), keys, meta); missing keys and items edited after extraction are errors."""
    _, keys, meta = read_embeddings(prefix)
    made_from, found = meta.get("items_sha256"), sha256(items_path)
    if meta["key"] == "id" and meta["mode"] != "visual_only" and made_from not in (None, found):
        raise UserError(f"{prefix}.meta.json: made from items with SHA-256 {shown(made_from, 16)}, but {items_path} has {found[:12]}: the "
                        "items were edited after extraction. Extract again, or use the item file of that time")
    index = {key: row for row, key in enumerate(keys)}
    missing = [item[meta["key"]] for item in items if item[meta["key"]] not in index]
    if missing:
        raise UserError(f"{prefix}.ids.txt: {len(missing)} of {len(items)} items of {items_path} have no vector under their "
                        f"'{meta['key']}', the first: {', '.join(map(shown, missing[:3]))}. Extract them, or name what extraction skipped "
                        "with --failed")
    return np.array([index[item[meta["key"]]] for item in items], np.int64), keys, meta


def embeddings_hashes(prefix, meta):
    """SHA-256 of a trio's files. A hash in the sidecar is taken from there, because `read_embeddings` has just checked it."""
    return {"embeddings_meta_sha256": sha256(f"{prefix}.meta.json"),
            "embeddings_ids_sha256": meta.get("ids_sha256") or sha256(f"{prefix}.ids.txt"),
            "embeddings_array_sha256": meta.get("array_sha256") or sha256(f"{prefix}.npy")}


def read_vectors(prefix, rows):
    """Rows of PREFIX.npy as float32 (len(rows), D). The map is opened for each call, so that pages once read do not stay in memory."""
    return np.asarray(np.load(f"{prefix}.npy", mmap_mode="r", allow_pickle=False)[rows], np.float32)


def check_texts(items, path):
    """Refuse an item whose question or target is not Unicode text: half a surrogate pair, which JSON can spell and no tokenizer reads."""
    for item in items:
        try:
            item["question"].encode(), item["answers"][0].encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{path}: item {shown(item['id'])}: its question or answers[0] is not text: {shown(error)}. Mend the item, or "
                            "leave it out with --failed") from None


def read_excluded(path):
    """Item ids from a text file, one a line."""
    try:
        with open(path, encoding="utf-8") as file:
            return {line.strip() for line in file if line.strip()}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected a UTF-8 text file with one id a line, found {shown(error)}") from None


@dataclasses.dataclass
class Examples:
    """Tokenised items. Example i is tokens[starts[i]:starts[i + 1]]; its first prompts[i] tokens are the prompt, the rest is supervised."""
    ids: list
    tokens: np.ndarray          # int32, all examples one after the other
    starts: np.ndarray          # int64 (N + 1,)
    prompts: np.ndarray         # int64 (N,)
    soft_at: int                # where the soft tokens begin in every example
    prefix: str | None          # of the embedding trio
    rows: np.ndarray | None     # int64 (N,): the example's row in PREFIX.npy

    @property
    def lengths(self):
        return np.diff(self.starts)

    def one(self, i):
        return self.tokens[self.starts[i]:self.starts[i + 1]]


def encode_text(texts, tokenizer, known):
    """Token ids of plain texts; `known` {text: ids} spares repeats. Special tokens in them stay text: `<|im_end|>` there ends nothing."""
    if len(known) > 100_000:
        known.clear()
    if new := [text for text in dict.fromkeys(texts) if text not in known]:
        backend, added = tokenizer.backend_tokenizer, list(tokenizer.get_added_vocab())
        backend.no_truncation(), backend.no_padding()
        backend.encode_special_tokens = True            # what split_special_tokens sets; the ids alone, which takes half the time
        known |= {text: code.ids for text, code in zip(new, backend.encode_batch_fast(new, add_special_tokens=False))}
        for text in new:                                # split_special_tokens still finds added tokens that are not special, as <think>
            if any(token in text for token in added):
                plain = backend.normalizer.normalize_str(text) if backend.normalizer else text
                pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(plain)] if backend.pre_tokenizer else [plain]
                known[text] = [token.id for piece in pieces for token in backend.model.tokenize(piece)]
    encoded = [known[text] for text in texts]
    for text in new:
        if len(text) > 500:                             # long ones hardly come again and would fill the memory
            del known[text]
    return encoded


def encode_items(items, tokenizer, template, soft_tokens, prefix=None, rows=None):
    """Tokenise items: before, soft tokens (id 0, replaced later), between, question, after | answers[0], end. The bar ends the prompt."""
    before, between, after, end = (tokenizer(template[name], add_special_tokens=False)["input_ids"]
                                   for name in ("before", "between", "after", "end"))
    if len(end) != 1 or end[0] not in after:
        raise UserError(f"the decoder's tokenizer cuts {template['end']} into {len(end)} tokens, expected one. Use a decoder with Qwen's "
                        "chat tokens")
    tokens, starts, prompts = array.array("i"), array.array("q", [0]), array.array("q")     # 4 or 8 bytes a number
    known = {}
    for start in range(0, len(items), 8192):
        part = items[start:start + 8192]
        for question, answer in zip(encode_text([item["question"] for item in part], tokenizer, known),
                                    encode_text([item["answers"][0] for item in part], tokenizer, known)):
            prompt = before + [0] * soft_tokens + between + question + after
            tokens.extend(prompt + answer + end)
            prompts.append(len(prompt))
            starts.append(len(tokens))
    ids = [item["id"] for item in items]
    tokens, starts, prompts = np.asarray(tokens, np.int32), np.asarray(starts, np.int64), np.asarray(prompts, np.int64)
    return Examples(ids, tokens, starts, prompts, len(before), prefix, rows)


def cut(order, lengths, batch_size, batch_tokens):
    """Cut indices sorted by length into batches of at most batch_size items and batch_tokens padded tokens (but one item or more)."""
    size = math.ceil(len(order) / max(1, math.ceil(len(order) / batch_size)))       # even batches instead of a small last one
    batches, start = [], 0
    for i in range(1, len(order) + 1):
        if i == len(order) or i - start >= size or (i - start + 1) * lengths[order[i]] > batch_tokens:
            batches.append(order[start:i])
            start = i
    return batches


def plan(lengths, seed, epoch, batch_size, batch_tokens):
    """The batches of one epoch, a list of index arrays: a function of its arguments alone, whatever the ranks, resume and evaluation do.

    A seeded permutation is cut into pools of about POOL batches; within a pool items are sorted by length and cut into batches; then the
    batches are shuffled. Pools keep batches mixed: sorting the whole epoch would put all items of one kind together.
    """
    generator, batches = np.random.default_rng([seed, epoch]), []
    order = generator.permutation(len(lengths))
    for pool in np.array_split(order, max(1, round(len(order) / (POOL * batch_size)))):
        batches += cut(pool[np.argsort(lengths[pool], kind="stable")], lengths, batch_size, batch_tokens)
    return [batches[i] for i in generator.permutation(len(batches))]


def padded(rows, left=False):
    """Token lists as (ids (B, T), real (B, T)), padded with id 0. The mask comes from lengths: id 0 is also an ordinary token."""
    lengths = np.array([len(row) for row in rows])[:, None]
    columns = np.arange(lengths.max())[None]
    real = columns >= lengths.max() - lengths if left else columns < lengths
    ids = np.zeros(real.shape, np.int64)
    ids[real] = np.concatenate(rows)
    return ids, real


def pack(examples, index, steps):
    """Arrays of one micro-batch, padded on the right. Under causal attention no real token sees the padding, so no mask is needed.

    ids (B, T); soft_at (B,); vectors (B, D) float32 or None; positions (P,) in the flattened (B * T) whose hidden states predict a
    supervised token; targets (P,).
    """
    ids, real = padded([examples.one(i) for i in index])
    supervised = np.flatnonzero(real & (np.arange(ids.shape[1]) >= examples.prompts[index][:, None]))
    vectors = None if steps is None else apply_steps(read_vectors(examples.prefix, examples.rows[index]), steps)
    return {"ids": ids, "soft_at": np.full(len(index), examples.soft_at), "vectors": vectors,
            "positions": supervised - 1, "targets": ids.reshape(-1)[supervised]}


def prefetch(make, tasks):
    """Yield make(task) for each task, prepared by a thread one task ahead, so that the next batch is ready when the step ends."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = None
        for task in tasks:
            waiting, ready = pool.submit(make, task), waiting
            if ready:
                yield ready.result()
        if waiting:
            yield waiting.result()


# ---- what a study does to the vector before the projector sees it ----

def fit_steps(transform, normalize, prefix, rows, dim):
    """Turn --transform and --normalize into steps [(kind, {name: array})], with statistics of the training rows, one pass for each.

    Returns (steps, width afterwards, bytes a stored vector takes). Ranges and matrices are shared by all vectors and do not count.
    """
    width = np.load(f"{prefix}.npy", mmap_mode="r", allow_pickle=False).dtype.itemsize
    steps = []
    for text in [*transform.split(","), normalize]:
        kind, *numbers = text.split(":")
        values = {}
        if kind == "none":
            continue
        if kind in ("truncate", "random"):
            if int(numbers[0]) > dim:
                raise UserError(f"--transform {text}: expected at most {dim}, the width of {prefix}.npy there. Choose a smaller width")
            if kind == "random":
                matrix = np.random.default_rng(int((numbers + ["0"])[1])).standard_normal((dim, int(numbers[0])))
                values = {"matrix": (matrix / math.sqrt(int(numbers[0]))).astype(np.float32)}
            dim = int(numbers[0])
            values = values or {"dim": np.array([dim])}
        elif kind in ("int8", "binary"):
            width = {"int8": 1, "binary": 1 / 8}[kind]
        if kind in ("int8", "standardize"):
            mean, std, low, high = statistics(prefix, rows, steps)
            flat = (low == high) | (std <= np.maximum(1e-9, 1e-7 * np.abs(mean)))        # what varies below float32's digits is rounding
            values = {"mean": mean, "std": np.where(flat, 1, std)} if kind == "standardize" else {
                "low": low, "step": np.maximum(high - low, 1e-12) / 255}
        steps.append((kind, {name: value if name == "dim" else value.astype(np.float32) for name, value in values.items()}))
    return steps, dim, math.ceil(dim * width)


def vector_pieces(prefix, rows, steps):
    """The given rows after `steps`, about 16 MB at a time."""
    size = max(1, (1 << 22) // np.load(f"{prefix}.npy", mmap_mode="r", allow_pickle=False).shape[1])
    for start in range(0, len(rows), size):
        yield apply_steps(read_vectors(prefix, rows[start:start + size]), steps)


def statistics(prefix, rows, steps):
    """Mean, standard deviation, minimum and maximum of each dimension, (D,) each, in float64 and one pass."""
    total, square, low, high = 0.0, 0.0, np.inf, -np.inf
    for x in vector_pieces(prefix, rows, steps):
        total, square = total + x.sum(0, dtype=np.float64), square + np.square(x, dtype=np.float64).sum(0)
        low, high = np.minimum(low, x.min(0)), np.maximum(high, x.max(0))
    return total / len(rows), np.sqrt(np.maximum(square / len(rows) - np.square(total / len(rows)), 0)), low, high


def apply_steps(x, steps):
    """Apply fitted steps to vectors x (B, D) float32; returns (B, D') float32."""
    for kind, value in steps:
        if kind == "truncate":
            x = unit(x[:, :int(value["dim"][0])])
        elif kind == "random":
            x = unit(x @ value["matrix"])
        elif kind == "binary":
            x = np.where(x >= 0, np.float32(1), np.float32(-1)) / np.float32(math.sqrt(x.shape[1]))
        elif kind == "int8":                            # one of 256 levels between the training set's extremes, dimension by dimension
            x = np.clip(np.rint((x - value["low"]) / value["step"]), 0, 255) * value["step"] + value["low"]
        elif kind == "l2":
            x = unit(x)
        elif kind == "standardize":
            x = (x - value["mean"]) / value["std"]
    return np.ascontiguousarray(x, np.float32)


def unit(x):
    """Rows at length 1; a zero row stays zero. Numbers whose squares float32 cannot hold are brought near 1 first."""
    top = np.abs(x).max(1, keepdims=True)
    x = x / np.where((top == 0) | (top > 1e-12) & (top < 1e15), np.float32(1), top)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def check_vectors(prefix, rows, images, allow):
    """Print vector statistics and stop on vectors that cannot carry anything: all the same, or equal for different images.

    rows (M,) distinct rows in use, images: the image of each. Equal vectors of one image (asked twice) are fine.
    """
    pieces = [(np.linalg.norm(x.astype(np.float64), axis=1), np.array([hash(row.tobytes()) for row in x]))
              for x in vector_pieces(prefix, rows, [])]
    norms, hashes = (np.concatenate(parts) for parts in zip(*pieces))
    _, std, low, high = statistics(prefix, rows, [])
    order = np.argsort(hashes, kind="stable")
    equal = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    same = [(images[a], images[b]) for a, b in zip(order[equal], order[equal + 1]) if images[a] != images[b]]
    log(f"vectors: {len(rows):,} rows, norm {norms.min():.4g} to {norms.max():.4g} (mean {norms.mean():.4g}), standard deviation of a "
        f"dimension {std.min():.3g} to {std.max():.3g} (median {np.median(std):.3g}), "
        f"{100 * len(same) / len(rows):.2f}% equal another image's")
    if norms.max() > 1e15 or 0 < norms.max() < 1e-12:
        raise UserError(f"{prefix}.npy: vectors of length {norms.min():.3g} to {norms.max():.3g}, expected lengths that float32 can "
                        "square and add, such as 1. Scale them")
    problem = ""
    if len(rows) > 1 and ((low == high).all() or std.max() <= 1e-6 * norms.mean()):
        problem = f"all {len(rows)} vectors are the same"
    elif same:
        problem = f"{len(same)} of {len(rows)} vectors equal that of another image, for example {shown(same[0][0])} and {shown(same[0][1])}"
    if problem and not allow:
        raise UserError(f"{prefix}.npy: {problem}; expected different vectors for different images. Look at the extraction; if it is meant "
                        "(copies of an image, a control), pass --allow-duplicate-vectors")
    if problem:
        log(f"note: {problem}; allowed by --allow-duplicate-vectors")


# ---- the model ----

@dataclasses.dataclass
class Readout:
    """What turns a vector and a question into an answer."""
    tokenizer: object
    decoder: object             # a transformers causal language model
    projector: object           # torch module, (B, D) -> (B, K * H), or None without soft tokens
    steps: list | None          # what `fit_steps` returns
    device: object
    dtype: object               # of the arithmetic; fit keeps its weights in float32


def load_tokenizer(name):
    """Load the tokenizer from a hub id or folder."""
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:                          # the tokenizers library raises bare Exceptions on a damaged file
        raise UserError(f"{name}: transformers cannot load a tokenizer from it without running its code: {shown(error, 300)}") from None


def load_decoder(name, dtype):
    """Load the decoder from a hub id or folder and check that this file's shortcuts hold for it."""
    try:
        decoder, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=False, use_safetensors=True, attn_implementation="sdpa", output_loading_info=True)
    except (*LOADING_ERRORS, safetensors.SafetensorError) as error:
        raise UserError(f"{name}: transformers cannot load it as a causal language model with safetensors weights and no code of its own: "
                        f"{shown(error, 300)}") from None
    if bad := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
        raise UserError(f"{name}: {len(bad)} weights are missing or of the wrong shape, for example {shown(bad[0])}. Fetch the model again")
    kinds = set(getattr(decoder.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UserError(f"{name}: expected full attention in every layer, found {', '.join(sorted(kinds))}. Use a Qwen3-like decoder")
    ids = torch.arange(4)[None]                         # the head is applied by hand below, so make sure that it is a plain matrix
    with torch.no_grad():
        by_hand = decoder.base_model(input_ids=ids, use_cache=False).last_hidden_state @ decoder.get_output_embeddings().weight.T
        whole = decoder(input_ids=ids, use_cache=False).logits.float()
    if not torch.allclose(by_hand.float(), whole, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
        raise UserError(f"{name}: its logits are not hidden states times a matrix (a bias, a scale or a cap?). Use a Qwen3-like decoder")
    return decoder


def make_projector(kind, dim, width, soft_tokens):
    """The only new part: a vector (B, D) becomes `soft_tokens` rows of the decoder's width, (B, K * H). None without soft tokens."""
    if not soft_tokens:
        return None
    if kind == "linear":
        return torch.nn.Sequential(torch.nn.Linear(dim, soft_tokens * width))
    return torch.nn.Sequential(torch.nn.Linear(dim, width), torch.nn.GELU(), torch.nn.Linear(width, soft_tokens * width))


def embed(decoder, projector, ids, vectors, soft_at):
    """Input embeddings (B, T, H) of ids (B, T), with the K places from soft_at (B,) on replaced by the projected vectors (B, D)."""
    embeds = decoder.get_input_embeddings()(ids)
    if projector is None:
        return embeds
    soft = projector(vectors).view(len(ids), -1, embeds.shape[-1])                  # (B, K, H)
    columns = soft_at[:, None] + torch.arange(soft.shape[1], device=ids.device)     # (B, K)
    return embeds.index_put((torch.arange(len(ids), device=ids.device)[:, None], columns), soft.to(embeds.dtype))


def hidden_states(readout, batch):
    """Hidden states (P, H) at the positions that predict a supervised token. Only these go through the language-model head."""
    with torch.autocast(readout.device.type, torch.bfloat16, enabled=readout.dtype == torch.bfloat16):
        embeds = embed(readout.decoder, readout.projector, batch["ids"], batch["vectors"], batch["soft_at"]).to(readout.dtype)
        hidden = readout.decoder.base_model(inputs_embeds=embeds, use_cache=False).last_hidden_state        # (B, T, H)
    return hidden.reshape(-1, hidden.shape[-1])[batch["positions"]]


def head_loss(hidden, weight, targets, dtype, scale=None):
    """-log p(target) in nats, (P,) float32, from hidden (P, H) and the head's weight (V, H), a piece of the positions at a time.

    With `scale`, also the gradient of scale * sum of the losses: returns (losses, gradient for hidden) and adds the head's own to
    weight.grad. Softmax minus one-hot is the derivative of the cross entropy; taken here at once, logits are neither kept nor computed
    twice, so memory for a vocabulary of 151,936 stays at one piece.
    """
    matrix, hidden = weight.detach().to(dtype), hidden.detach().to(dtype)
    losses, gradient = torch.empty(len(hidden), device=hidden.device), torch.empty_like(hidden)
    if scale is not None and weight.requires_grad and weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    piece = max(1, LOGITS_AT_ONCE // len(weight))
    for start in range(0, len(hidden), piece):
        h, t = hidden[start:start + piece], targets[start:start + piece, None]      # (C, H), (C, 1)
        logits = (h @ matrix.T).float()                                             # (C, V)
        log_sum = logits.logsumexp(1, keepdim=True)
        losses[start:start + piece] = (log_sum - logits.gather(1, t))[:, 0]
        if scale is not None:
            slope = logits.sub_(log_sum).exp_().scatter_add_(1, t, torch.full_like(t, -1, dtype=logits.dtype)).mul_(scale).to(dtype)
            gradient[start:start + piece] = slope @ matrix
            if weight.requires_grad:
                weight.grad += slope.T @ h
    return losses if scale is None else (losses, gradient)


def to_device(batch, device):
    """Arrays of a batch as tensors on the device."""
    return {name: None if value is None else torch.from_numpy(value).to(device, non_blocking=True) for name, value in batch.items()}


def compute_dtype(name, device):
    """--dtype as a torch type: auto is bfloat16 on a GPU and float32 on a CPU."""
    return torch.bfloat16 if name == "bfloat16" or (name == "auto" and device.type == "cuda") else torch.float32


def peak_memory(device):
    """Bytes: the largest allocation on the GPU, or the largest resident size of this process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- several processes: torchrun starts them, each takes its slices of every batch, gradients are summed ----

def start_ranks(device):
    """Join the process group where torchrun started several processes. Returns (rank, number of ranks, device)."""
    rank, local, world = ranks()
    if device == "auto":
        device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
        torch.zeros(1, device=device).cpu()
    except Exception as error:                          # each kind of device has errors of its own
        raise UserError(f"--device {device}: not usable here ({shown(str(error).splitlines()[0])}). Use auto or cpu") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, world, device


def sum_over_ranks(world, tensors):
    """Sum tensors over all ranks, in place; with one process nothing happens."""
    if world > 1:
        for work in [torch.distributed.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


# ---- readout folders and checkpoints: new folders first, then the small file that points to them ----

def content_hash(record):
    """SHA-256 of a JSON object's content, without the hash itself and without what a run adds (time, host, versions)."""
    content = {key: value for key, value in record.items() if key not in ("content_sha256", "run")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def save_tensors(path, tensors):
    """Write a safetensors file; a full disk is a UserError."""
    try:
        safetensors.torch.save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)
    except (OSError, safetensors.SafetensorError) as error:
        raise cannot_write(path, error if isinstance(error, OSError) else OSError(0, str(error))) from error


def write_readout(folder, readout, record):
    """Write a readout folder. Its bytes depend on the training alone; readout.json, written last, holds the hash of every other file."""
    try:
        readout.decoder.save_pretrained(folder, max_shard_size="1000GB")
        readout.tokenizer.save_pretrained(folder)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise cannot_write(folder, error if isinstance(error, OSError) else OSError(0, str(error))) from error
    tensors = {f"projector.{name}": value for name, value in readout.projector.state_dict().items()} if readout.projector else {}
    tensors |= {f"step.{i}.{name}": torch.from_numpy(value)
                for i, (_, values) in enumerate(readout.steps or []) for name, value in values.items()}
    save_tensors(os.path.join(folder, "projector.safetensors"), tensors)
    record = record | {"files": {name: sha256(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}}
    write_json(os.path.join(folder, "readout.json"), {"content_sha256": content_hash(record)} | record)


def publish(source, target, changes):
    """Put a readout folder's files under `target` too, with `changes` to readout.json, which goes first and comes last: a mixture never
    looks whole. Files are linked where the file system can, which costs no room: they are never edited in place, only replaced.
    """
    record = read_json(os.path.join(source, "readout.json")) | changes
    try:
        os.makedirs(target, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(target, "readout.json"))
        for name in record["files"]:
            temporary = os.path.join(target, f"{name}.{os.getpid()}.tmp")
            try:
                os.link(os.path.join(source, name), temporary)
            except OSError:
                shutil.copyfile(os.path.join(source, name), temporary)
            os.replace(temporary, os.path.join(target, name))
            with contextlib.suppress(FileNotFoundError):    # between two links of one file a rename does nothing and leaves both
                os.remove(temporary)
    except OSError as error:
        raise cannot_write(target, error) from error
    write_json(os.path.join(target, "readout.json"), record | {"content_sha256": content_hash(record)})


def check_readout(folder):
    """Read a readout folder's readout.json and compare every file with its hash there. Returns the record."""
    path = os.path.join(folder, "readout.json")
    if not os.path.exists(path) and os.path.isdir(os.path.join(folder, "resume")):
        raise UserError(f"{path}: not there, because fit has not finished. Run fit again with --resume")
    record = read_json(path)
    if record.get("format_version") != FORMAT_VERSION or record.get("content_sha256") != content_hash(record):
        raise UserError(f"{path}: expected format version {FORMAT_VERSION} and a content that matches its own hash, found version "
                        f"{shown(record.get('format_version'))} or an edited or damaged file. Fit the readout again")
    kinds = {"files": dict, "signature": dict, "tokens": int, "template": dict, "steps": list, "projector": (dict, type(None))}
    if wrong := [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]:
        raise UserError(f"{path}: expected what fit writes in {', '.join(wrong)}, found {shown(repr(record.get(wrong[0])))}. Fit the "
                        "readout again")
    for name, expected in record["files"].items():
        file = os.path.join(folder, os.path.basename(name))
        if not os.path.isfile(file) or sha256(file) != expected:
            raise UserError(f"{os.path.join(folder, name)}: missing, or its SHA-256 is not the one in readout.json: the folder is damaged. "
                            "Fit the readout again")
    return record


def load_projector(folder, record, width):
    """Read projector.safetensors. Returns (projector or None, steps or None) as `make_projector` and `fit_steps` made them."""
    if record["projector"] is None:
        return None, None
    path = os.path.join(folder, "projector.safetensors")
    try:
        tensors = safetensors.torch.load_file(path)
        projector = make_projector(record["projector"]["kind"], record["projector"]["dim"], width, record["tokens"])
        projector.load_state_dict({name.removeprefix("projector."): value for name, value in tensors.items()
                                   if name.startswith("projector.")})
    except (*LOADING_ERRORS, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: does not hold the projector that readout.json names ({shown(error, 200)}). Fit the readout again"
                        ) from None
    steps = [(kind, {name.removeprefix(f"step.{i}."): value.numpy() for name, value in tensors.items() if name.startswith(f"step.{i}.")})
             for i, kind in enumerate(record["steps"])]
    return projector, steps


def save_checkpoint(out, state, readout, record, optimizer, named):
    """Save a step under OUT/resume: new folders first, then checkpoint.json, which points to them, then the old folders go."""
    resume, step, folder = os.path.join(out, "resume"), state["step"], f"step-{state['step']:08d}"
    for name in os.listdir(resume):                     # left by a run that was killed after its last checkpoint
        if name.endswith((".tmp", f"-{step:08d}")):
            shutil.rmtree(os.path.join(resume, name), ignore_errors=True)
    temporary, best = os.path.join(resume, f"{folder}.tmp"), os.path.join(resume, str(state["best"]))
    write_readout(temporary, readout, record)
    if state["best_step"] == step:
        publish(temporary, f"{best}.tmp", {})
        os.rename(f"{best}.tmp", best)
    save_tensors(os.path.join(temporary, "optimizer.safetensors"), {
        f"{key}.{name}": optimizer.state[value][key] for name, value in named for key in ("exp_avg", "exp_avg_sq")})
    state = state | {"folder": folder, "optimizer_sha256": sha256(os.path.join(temporary, "optimizer.safetensors"))}
    for name in os.listdir(temporary):                  # on the disk before the pointer, so that even a power cut leaves a whole checkpoint
        with open(os.path.join(temporary, name), "rb") as file:
            os.fsync(file.fileno())
    os.rename(temporary, os.path.join(resume, folder))
    write_json(os.path.join(resume, "checkpoint.json"), {"content_sha256": content_hash(state)} | state)
    for name in os.listdir(resume):
        if name.startswith(("step-", "best-")) and name not in (folder, state["best"]):
            shutil.rmtree(os.path.join(resume, name), ignore_errors=True)


def open_checkpoint(out, signature):
    """Read OUT/resume/checkpoint.json and check that it belongs to the same data and choices; a changed length is allowed and printed."""
    path = os.path.join(out, "resume", "checkpoint.json")
    state = read_json(path)
    if state.get("content_sha256") != content_hash(state):
        raise UserError(f"{path}: its content does not match its own hash, so it was edited or damaged. Start again with --overwrite")
    changed = differences(state["signature"], signature)
    if set(changed) - MAY_CHANGE:
        raise UserError(f"{path}: made with other data or choices ({describe(changed, state['signature'], signature)}). Run the command of "
                        "that time, choose another --out, or start again with --overwrite")
    if changed:
        text = describe(changed, state["signature"], signature)
        log(f"note: the length changed ({text}); the learning rate follows the new one from here on")
    folder = os.path.join(out, "resume", state["folder"])
    check_readout(folder)
    if sha256(os.path.join(folder, "optimizer.safetensors")) != state["optimizer_sha256"]:
        raise UserError(f"{folder}/optimizer.safetensors: its SHA-256 is not the one in {path}: it is damaged. Start again with "
                        "--overwrite")
    return state


def differences(old, new):
    """Names whose values differ between two flat dicts."""
    return sorted(name for name in set(old) | set(new) if old.get(name) != new.get(name))


def describe(names, old, new):
    """'name: old, now new' for messages."""
    return "; ".join(f"{name}: {shown(old.get(name), 60)}, now {shown(new.get(name), 60)}" for name in names)


def remove_temporary(*patterns):
    """Remove what writes of a killed process left under PATTERN.PID.tmp; the lock is held, so no living process writes there."""
    for pattern in patterns:
        for path in glob.glob(f"{pattern}.*.tmp"):
            if os.path.isfile(path):
                os.remove(path)


def append(path, *lines):
    """Add JSON lines to a file in one write."""
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines))
    except OSError as error:
        raise cannot_write(path, error) from error


# ---- fit ----

def read_training(args):
    """Everything that can be read and checked before torch. Returns ({split: (items, prefix, rows)}, sidecar, hashes of inputs, counts)."""
    splits, metas, inputs, counts = {}, {}, {}, {}
    failed, excluded = read_failed(args.failed), read_excluded(args.exclude_ids) if args.exclude_ids else set()
    for split in ("train", "dev"):
        path, prefix, rows = getattr(args, f"{split}_items"), getattr(args, f"{split}_embeddings"), None
        items = read_items(path, args.limit, lambda item: {      # of what a million items hold, only what training reads
            "id": item["id"], "image": item["image"], "question": item["question"], "answers": item["answers"][:1]})
        kept = [item for item in items if item["id"] not in failed and item["id"] not in excluded]
        check_texts(kept, path)
        counts[split] = {"items": len(items), "failed": sum(item["id"] in failed for item in items),
                         "excluded": sum(item["id"] in excluded and item["id"] not in failed for item in items)}
        if not kept:
            raise UserError(f"{path}: no item is left after --failed and --exclude-ids")
        inputs[f"{split}_items_sha256"] = sha256(path)
        if prefix:
            rows, _, metas[split] = join_embeddings(kept, path, prefix)
            inputs |= {f"{split}_{name}": value for name, value in embeddings_hashes(prefix, metas[split]).items()}
        splits[split] = (kept, prefix, rows)
    for name in ("failed", "exclude_ids"):
        inputs[f"{name}_sha256"] = getattr(args, name) and sha256(getattr(args, name))
    if metas and (changed := [name for name in IDENTITY if metas["train"].get(name) != metas["dev"].get(name)]):
        raise UserError(f"{args.dev_embeddings}.meta.json: another kind of vectors than the training ones "
                        f"({describe(changed, metas['train'], metas['dev'])}). Extract both with the same embedder and mode")
    if shared := {item["image"] for item in splits["train"][0]} & {item["image"] for item in splits["dev"][0]}:
        log(f"note: {len(shared)} images are in training and in dev items, for example {shown(min(shared))}; the dev loss is too low then")
    return splits, metas.get("train", {}), inputs, counts


def look_at_output(args, signature):
    """What --out holds: None (nothing yet), a checkpoint to resume from, or the record of a finished readout with the same signature."""
    path = os.path.join(args.out, "readout.json")
    if os.path.exists(path):
        record = check_readout(args.out)
        changed = differences(record["signature"], signature)
        if not changed:
            return record
        if not args.resume or set(changed) - MAY_CHANGE:
            raise UserError(f"{path}: a finished readout made with other inputs or choices "
                            f"({describe(changed, record['signature'], signature)}). Choose another --out, or replace it with --overwrite")
    if os.path.exists(os.path.join(args.out, "resume", "checkpoint.json")):
        if not args.resume:
            raise UserError(f"{args.out}: holds an unfinished run. Continue it with --resume, or start again with --overwrite")
        return open_checkpoint(args.out, signature)
    known = ("resume", "metrics.jsonl", "skipped.jsonl")
    others = [name for name in os.listdir(args.out) if name not in known and not name.endswith(".tmp")] if os.path.isdir(args.out) else []
    if others:
        raise UserError(f"{args.out}: holds other files ({shown(', '.join(sorted(others)))}) and no checkpoint to continue from. Choose "
                        "another --out, or pass --overwrite")
    return None


def check_lengths(examples, path, args):
    """Name and count the items that cannot be trained on whole, and stop or leave them out. Returns (indices to keep, {id: reason})."""
    answers, reasons = examples.lengths - examples.prompts, {}                      # with the end token
    for bad, reason in ((answers < 2, "the answer has no token"),
                        (answers > args.max_answer_tokens, f"the answer is longer than --max-answer-tokens {args.max_answer_tokens}"),
                        (examples.lengths > args.max_length, f"prompt and answer are longer than --max-length {args.max_length}; cutting "
                         "would lose the soft tokens or the end token")):
        for i in np.flatnonzero(bad).tolist():
            reasons.setdefault(i, reason)
    if reasons:
        text = "; ".join(f"{count} items: {reason}" for reason, count in collections.Counter(reasons.values()).most_common())
        text += ". The first: " + ", ".join(f"{shown(examples.ids[i])} ({examples.lengths[i]} tokens, answer {answers[i]})"
                                            for i in sorted(reasons)[:5])
        if args.on_long == "stop" or len(reasons) == len(answers):
            raise UserError(f"{path}: {text}. Raise the limit, mend the items, or leave them out with --on-long skip")
        log(f"note: {path}: left out {text}")
    keep = np.array([i for i in range(len(answers)) if i not in reasons], np.int64)
    return keep, {examples.ids[i]: reason for i, reason in reasons.items()}


def prepare_examples(args, splits, tokenizer, template, soft_tokens, counts):
    """Tokenise both splits and check lengths. Returns ({split: Examples}, [skipped items]); adds to counts."""
    data, skipped = {}, []
    for split, (items, prefix, rows) in splits.items():
        examples = encode_items(items, tokenizer, template, soft_tokens, prefix, rows)
        keep, reasons = check_lengths(examples, getattr(args, f"{split}_items"), args)
        if reasons:
            items, rows = [items[i] for i in keep], None if rows is None else rows[keep]
            splits[split] = (items, prefix, rows)
            examples = encode_items(items, tokenizer, template, soft_tokens, prefix, rows)
        counts[split] |= {"skipped": len(reasons), "used": len(examples.ids),
                          "supervised_tokens": int((examples.lengths - examples.prompts).sum())}
        skipped += [{"id": key, "split": split, "error": reason} for key, reason in reasons.items()]
        data[split] = examples
    log(f"items: {json.dumps(counts)}")
    return data, skipped


def build_optimizer(args, readout):
    """Choose what is trained, with one learning rate for the decoder and one for the projector. Returns (AdamW, [(name, parameter)])."""
    named, groups = [], []
    for part, module, rate in (("decoder", readout.decoder, args.lr_decoder), ("projector", readout.projector, args.lr_projector)):
        if module and not (part == "decoder" and args.freeze_decoder):
            parameters = [(f"{part}.{name}", value) for name, value in module.named_parameters()]       # a tied weight comes once
            named += parameters
            groups.append({"params": [value for _, value in parameters], "lr": rate, "peak": rate})
    readout.decoder.requires_grad_(not args.freeze_decoder)
    return torch.optim.AdamW(groups, betas=(0.9, 0.999), weight_decay=args.weight_decay, fused=True), named


def load_optimizer(folder, step, optimizer, named):
    """Put back the moments that `save_checkpoint` saved, in the order of the optimizer's parameters."""
    saved, content = safetensors.torch.load_file(os.path.join(folder, "optimizer.safetensors")), optimizer.state_dict()
    content["state"] = {i: {"step": torch.tensor(float(step))} | {key: saved[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
                        for i, (name, _) in enumerate(named)}
    optimizer.load_state_dict(content)


def learning_rate(step, warmup, total):
    """Factor for step 1..total: linear up over `warmup` steps, then a cosine towards 0, which it would reach one step after the last."""
    if step <= warmup:
        return step / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup - 1) / max(1, total - warmup)))


def prepare_output(args, step, skipped):
    """Make OUT fit for a run from `step` on: results that --overwrite gives up go, and the log ends at `step`. Returns the log's path."""
    resume, metrics, lines = os.path.join(args.out, "resume"), os.path.join(args.out, "metrics.jsonl"), []
    if step == 0:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(args.out, "readout.json"))
        for folder in (resume, os.path.join(args.out, "last")):
            shutil.rmtree(folder, ignore_errors=True)
    try:
        os.makedirs(resume, exist_ok=True)
    except OSError as error:
        raise cannot_write(resume, error) from error
    remove_temporary(f"{glob.escape(args.out)}/*", f"{glob.escape(args.out)}/last/*", f"{glob.escape(resume)}/*.json")
    if step and os.path.exists(metrics):
        with open(metrics, "rb") as file:               # a line torn by a kill lies after the checkpoint
            whole = file.read().rpartition(b"\n")[0]
        write_atomic(metrics, lambda file: file.write(whole + b"\n" * bool(whole)))
        lines = [line for _, line in read_jsonl(metrics) if line.get("step", 0) <= step]
    for path, content in ((metrics, lines), (os.path.join(args.out, "skipped.jsonl"), skipped)):
        write_atomic(path, lambda file: file.write("".join(json.dumps(line) + "\n" for line in content).encode()))
    return metrics


def evaluate_loss(readout, examples, batches, rank, world):
    """Mean loss in nats a supervised token over `batches`; every rank takes every world-th batch, and sums are added up."""
    sums = torch.zeros(2, dtype=torch.float64, device=readout.device)
    readout.decoder.eval()
    with torch.no_grad():
        for index in batches[rank::world]:
            batch = to_device(pack(examples, index, readout.steps), readout.device)
            hidden, weight = hidden_states(readout, batch), readout.decoder.get_output_embeddings().weight
            losses = head_loss(hidden, weight, batch["targets"], readout.dtype)
            sums += torch.tensor([float(losses.double().sum()), len(losses)], dtype=torch.float64, device=readout.device)
    readout.decoder.train()
    sum_over_ranks(world, [sums])
    return float(sums[0] / sums[1])


def fit(args):
    """Read and check the inputs, see what the output folder holds already, then train. Returns the summary for standard output."""
    splits, meta, inputs, counts = read_training(args)
    arguments = {name: value for name, value in sorted(vars(args).items()) if name not in NO_EFFECT and name not in INPUTS}
    signature = arguments | inputs | {"decoder_sha256": hash_decoder(args.decoder)}
    if signature["decoder_sha256"]:
        del signature["decoder"]                        # the same folder under another path is the same decoder
    if os.path.realpath(args.decoder) == os.path.realpath(args.out):
        raise UserError(f"--out {args.out}: is the decoder's own folder. Choose another output")
    with locked(args.out) if ranks()[0] == 0 else contextlib.nullcontext():
        state = None if args.overwrite else look_at_output(args, signature)
        if state and "summary" in state:
            log(f"{args.out}: already fitted with these inputs and choices; nothing to do")
            return state["summary"]
        load_libraries()
        rank, world, device = start_ranks(args.device)
        try:
            return train(args, splits, meta, counts, arguments, signature, state, rank, world, device)
        finally:
            if world > 1:
                torch.distributed.destroy_process_group()


def prepare_training(args, splits, meta, counts, source, resuming, device):
    """Tokenise, check the vectors, fit the vector steps, load decoder and projector from `source`.

    Returns (Readout, {split: Examples}, [skipped items], what readout.json says about them).
    """
    tokenizer, soft_tokens = load_tokenizer(source), 0 if args.no_embedding else args.tokens
    template = {"before": BEFORE, "between": BETWEEN, "after": AFTER + (THINK if args.think_block else ""), "end": END}
    data, skipped = prepare_examples(args, splits, tokenizer, template, soft_tokens, counts)
    steps, dim, size = None, None, 0
    if soft_tokens:
        used, first = np.unique(data["train"].rows, return_index=True)
        check_vectors(args.train_embeddings, used, [splits["train"][0][i]["image"] for i in first], args.allow_duplicate_vectors)
        steps, dim, size = fit_steps(args.transform, args.normalize, args.train_embeddings, used, meta["dim"])
    splits.clear()                                      # the texts are tokens now
    decoder = load_decoder(source, torch.float32).to(device).train()
    width = decoder.get_output_embeddings().weight.shape[1]
    torch.manual_seed(args.seed)                        # here, so that nothing drawn before changes how the projector starts
    projector = make_projector(args.projector, dim, width, soft_tokens)
    if resuming:
        projector, _ = load_projector(source, read_json(os.path.join(source, "readout.json")), width)
    if args.gradient_checkpointing:
        decoder.gradient_checkpointing_enable()
    if args.compile:
        decoder.base_model.compile(dynamic=True)
    facts = {"tokens": soft_tokens, "projector": projector and {"kind": args.projector, "dim": dim}, "normalize": args.normalize,
             "transform": args.transform, "steps": [kind for kind, _ in steps or []], "bytes_per_embedding": size, "template": template,
             "decoder": args.decoder, "decoder_revision": getattr(decoder.config, "_commit_hash", None), "seed": args.seed,
             "counts": counts}
    readout = Readout(tokenizer, decoder, projector and projector.to(device), steps, device, compute_dtype(args.dtype, device))
    return readout, data, skipped, facts


def announce(args, readout, examples, batches, total, world, trainable, size):
    """Print the facts that follow from the flags; `batches` is the plan of one epoch."""
    lengths, tokens = examples.lengths, int(examples.lengths.sum())
    padding = 1 - tokens / sum(len(index) * int(lengths[index].max()) for index in batches)
    log(f"fit: {total:,} steps ({args.epochs} epochs of about {len(batches):,}); global batch up to {args.batch_size} items and "
        f"{args.batch_tokens:,} padded tokens over {world} ranks x {args.accumulation} micro-steps; {trainable:,} trainable parameters; "
        f"{tokens:,} tokens an epoch, {100 * padding:.1f}% padding; {0 if readout.projector is None else args.tokens} soft tokens, {size} "
        f"bytes an embedding; {readout.device}, {str(readout.dtype).removeprefix('torch.')}")


def train(args, splits, meta, counts, arguments, signature, state, rank, world, device):
    """Set up model, data and schedule, then the loop: forward, loss, backward, sum over ranks, clip, step. Returns the summary."""
    began, resume, share = time.time(), os.path.join(args.out, "resume"), args.accumulation * world
    source = os.path.join(resume, state["folder"]) if state else args.decoder
    readout, data, skipped, facts = prepare_training(args, splits, meta, counts, source, state is not None, device)
    examples, dev, lengths = data["train"], data["dev"], data["train"].lengths
    optimizer, named = build_optimizer(args, readout)
    parameters, weight = [value for _, value in named], readout.decoder.get_output_embeddings().weight      # weight (V, H)
    if state:
        load_optimizer(source, state["step"], optimizer, named)

    todo, first = [], plan(lengths, args.seed, 0, args.batch_size, args.batch_tokens)
    for epoch in range(args.epochs):
        todo += [(epoch, index) for index in (plan(lengths, args.seed, epoch, args.batch_size, args.batch_tokens) if epoch else first)]
        if args.max_steps and len(todo) >= args.max_steps:      # `--epochs 1000000 --max-steps N` plans no more than it takes
            break
    todo = todo[:args.max_steps]
    total, warmup, step = len(todo), round(args.warmup * len(todo)), state["step"] if state else 0
    dev_batches = cut(np.argsort(dev.lengths, kind="stable"), dev.lengths, args.batch_size, max(1, args.batch_tokens // share))
    announce(args, readout, examples, first, total, world, sum(map(torch.numel, parameters)), facts["bytes_per_embedding"])
    if step > total:
        raise UserError(f"{args.out}: its checkpoint is at step {step}, after the end of this run ({total}). Raise --epochs or --max-steps")
    progress = ("dev_loss", "best", "best_step", "best_loss", "window")             # window: sums since the last line of the log
    dev_loss, best, best_step, best_loss, window = (state[name] for name in progress) if state else (None, None, 0, None, dict(NO_SUMS))
    record = {"format_version": FORMAT_VERSION} | {"embedder": None, "mode": None, "dim": None} | {
        name: meta[name] for name in IDENTITY if name in meta} | facts | {
        "arguments": arguments, "signature": signature, "train_items_sha256": signature["train_items_sha256"],
        "train_embeddings_sha256": signature.get("train_embeddings_meta_sha256"),
        "run": {"argv": sys.argv, "versions": versions(), "host": platform.node(), "device": str(device), "ranks": world}}

    def prepare(task):
        """This rank's micro-batches of one global batch. Strided slices of a batch sorted by length are of nearly equal length."""
        epoch, index = task
        parts = [index[micro * world + rank::share] for micro in range(min(args.accumulation, len(index)))]
        return epoch, index, [pack(examples, part, readout.steps) for part in parts if len(part)]

    metrics = prepare_output(args, step, skipped) if rank == 0 else None
    bar = tqdm(total=total, initial=step, desc="fit", unit="step", disable=None if rank == 0 else True, file=sys.stderr)
    since = time.time()
    for epoch, index, micros in prefetch(prepare, todo[step:]):
        step += 1
        torch.manual_seed((args.seed * 1_000_003 + step) * 1009 + rank)     # dropout, if any, is a function of this: no state to save
        factor = learning_rate(step, warmup, total)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        supervised = int((lengths[index] - examples.prompts[index]).sum())  # of the whole global batch, which every rank knows
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for batch in micros:
            batch = to_device(batch, device)
            hidden = hidden_states(readout, batch)                          # (P, H)
            losses, gradient = head_loss(hidden, weight, batch["targets"], readout.dtype, 1 / supervised)
            hidden.backward(gradient.to(hidden.dtype))                      # on through the decoder and the projector
            loss += losses.double().sum()
        for parameter in parameters:
            if parameter.grad is None:                                      # this rank got no item of a small batch
                parameter.grad = torch.zeros_like(parameter)
        sum_over_ranks(world, [loss] + [parameter.grad for parameter in parameters])
        norm, loss = float(torch.nn.utils.clip_grad_norm_(parameters, args.clip or math.inf)), float(loss)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise UserError(f"step {step}: loss {loss / supervised} and gradient norm {norm}, expected finite numbers. The batch: "
                            f"{', '.join(shown(examples.ids[i]) for i in index)}. Nothing was saved after the last checkpoint; look at "
                            "these items and vectors, or lower the learning rates")
        optimizer.step()
        optimizer.zero_grad()
        bar.update()

        for name, value in zip(NO_SUMS, (loss, supervised, int(lengths[index].sum()), time.time() - since)):
            window[name] += value
        evaluating = step % args.eval_every == 0 or step == total
        if step % args.log_every == 0 or evaluating:
            seconds, mean = window["seconds"], window["loss"] / window["supervised"]       # evaluating and saving are not in these seconds
            line = {"step": step, "epoch": epoch, "loss": mean, "gradient_norm": norm, "lr_decoder": factor * args.lr_decoder,
                    "lr_projector": factor * args.lr_projector, "tokens": window["tokens"], "seconds": round(seconds, 3)}
            bar.set_postfix(loss=f"{mean:.3f}", tokens_per_second=f"{window['tokens'] / seconds:,.0f}")
            if evaluating:
                dev_loss = line["dev_loss"] = evaluate_loss(readout, dev, dev_batches, rank, world)
                if not math.isfinite(dev_loss):
                    raise UserError(f"step {step}: dev loss {dev_loss} on {args.dev_items}, expected a finite number. Nothing was saved "
                                    "after the last checkpoint; lower the learning rates, or look at the dev vectors")
                log(f"step {step:,} of {total:,}: loss {mean:.4f}, dev loss {dev_loss:.4f}, {window['tokens'] / seconds:,.0f} tokens/s")
            if rank == 0:
                append(metrics, line)                   # the one place to add another logger
            window = dict(NO_SUMS)
        if evaluating and (best is None or dev_loss < best_loss):
            best, best_step, best_loss = f"best-{step:08d}", step, dev_loss
        if rank == 0 and (evaluating or step % args.save_every == 0 or step == 1):      # step 1: a disk that refuses shows at once
            state = {"step": step, "signature": signature} | dict(zip(progress, (dev_loss, best, best_step, best_loss, window)))
            save_checkpoint(args.out, state, readout, record | {"step": step, "dev_loss": dev_loss}, optimizer, named)
        since = time.time()
    bar.close()
    summary = {"readout": args.out, "steps": total, "dev_loss": dev_loss, "best_step": best_step, "best_dev_loss": best_loss}
    if rank == 0:
        final = {"arguments": arguments, "signature": signature, "summary": summary, "run": record["run"] | {
            "seconds": round(time.time() - began, 1), "peak_memory_bytes": peak_memory(device)}}
        publish(os.path.join(resume, f"step-{step:08d}"), os.path.join(args.out, "last"), final)
        publish(os.path.join(resume, best), args.out, final)
        log(f"done: best dev loss {best_loss:.4f} at step {best_step:,}; peak memory {peak_memory(device) / 2**30:.2f} GiB")
    return summary


# ---- predict ----

def read_prediction_inputs(args):
    """Everything that can be read and checked before torch. Returns (record of the readout, items, items to answer, failed, outputs)."""
    record = check_readout(args.readout)
    if record["tokens"] == 0 and not args.no_embedding:
        raise UserError(f"{args.readout}: was fitted without embeddings. Pass --no-embedding instead of --embeddings")
    if record["tokens"] and args.no_embedding and not args.drop_soft_tokens:
        raise UserError(f"{args.readout}: was fitted with embeddings. Pass --embeddings, or --no-embedding and --drop-soft-tokens")
    if record["tokens"] == 0 and args.drop_soft_tokens:
        raise UserError(f"{args.readout}: has no soft tokens to drop. Leave --drop-soft-tokens away")
    items, failed = read_items(args.items, args.limit), read_failed(args.failed)
    kept = [item for item in items if item["id"] not in failed]
    check_texts(kept, args.items)
    shared = {"readout_sha256": record["content_sha256"], "items_sha256": sha256(args.items),
              "failed_sha256": args.failed and sha256(args.failed)}
    shared |= {name: getattr(args, name) for name in ("limit", "max_new_tokens", "batch_size", "batch_tokens", "dtype", "drop_soft_tokens")}
    outputs = []
    for i, out in enumerate(args.out):
        output = {"out": out, "prefix": None, "rows": None, "sources": None, "meta": None,
                  "condition": "text_only_ablated" if args.drop_soft_tokens else "text_only", "signature": dict(shared)}
        if args.embeddings:
            prefix = output["prefix"] = args.embeddings[i]
            output["rows"], keys, meta = join_embeddings(kept, args.items, prefix)
            if changed := [name for name in IDENTITY if meta.get(name) != record.get(name)]:
                text = "; ".join(f"{name}: expected {shown(record.get(name), 60)}, found {shown(meta.get(name), 60)}" for name in changed)
                raise UserError(f"{prefix}.meta.json: not the kind of vectors that {args.readout} was fitted on ({text}). Use vectors of "
                                "the same embedder and mode, or another readout")
            output |= {"meta": meta, "condition": meta.get("condition", "matched"), "sources": read_sources(prefix, keys, meta)}
            output["signature"] |= embeddings_hashes(prefix, meta)
            output["signature"]["sources_sha256"] = output["sources"] and sha256(f"{prefix}.source_keys.txt")
        if args.condition:
            output["condition"] = args.condition[i]
        if not isinstance(output["condition"], str) or not output["condition"] or not output["condition"].isprintable():
            raise UserError(f"{output['prefix']}.meta.json: expected a name without control characters in 'condition', found "
                            f"{shown(repr(output['condition']))}. Make the trio again, or name the condition with --condition")
        output["signature"]["condition"] = output["condition"]
        outputs.append(output)
    return record, items, kept, failed, outputs


def read_sources(prefix, keys, meta):
    """PREFIX.source_keys.txt of a control trio, where there is one: line i is the key whose vector row i holds."""
    path = f"{prefix}.source_keys.txt"
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            sources = file.read().removesuffix("\n").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected {len(keys)} lines of UTF-8, found {shown(error)}") from None
    if len(sources) != len(keys):
        raise UserError(f"{path}: expected {len(keys)} lines, one for each row of {prefix}.npy, found {len(sources)}. Make it again")
    if meta.get("source_keys_sha256") not in (None, sha256(path)):
        raise UserError(f"{path}: its SHA-256 is not the one in the sidecar, so it was changed since. Make it again")
    return sources


def meta_name(out):
    """F.jsonl -> F.meta.json."""
    return f"{out.removesuffix('.jsonl')}.meta.json"


def finished(output, overwrite):
    """Whether an output is there and made by the same inputs and flags; anything else under its name is an error without --overwrite."""
    out, meta_path = output["out"], meta_name(output["out"])
    if overwrite or not (os.path.exists(out) or os.path.exists(meta_path)):
        return False
    if not os.path.exists(meta_path):
        if os.path.exists(f"{out}.partial"):            # we were killed between the two final files and go on
            return False
        raise UserError(f"{out}: exists without its sidecar. Choose another --out, or replace it with --overwrite")
    meta = read_json(meta_path)
    if changed := differences(meta.get("signature", {}), output["signature"]):
        text = describe(changed, meta.get("signature", {}), output["signature"])
        raise UserError(f"{out}: made with other inputs or flags ({text}). Choose another --out, or replace it with --overwrite")
    if not os.path.exists(out) or sha256(out) != meta.get("predictions_sha256"):
        raise UserError(f"{out}: missing, or its SHA-256 is not the one in {meta_path}, so it was changed or damaged. Replace it with "
                        "--overwrite")
    return True


def open_partial(output, overwrite):
    """Read OUT.partial: a line with the signature, then predictions. Returns {id: prediction} of the lines that are as written."""
    path, content, done, whole = f"{output['out']}.partial", b"", {}, []
    header = (json.dumps({"signature": output["signature"]}) + "\n").encode()
    remove_temporary(glob.escape(output["out"]), glob.escape(path), glob.escape(meta_name(output["out"])))
    if os.path.exists(path):
        with open(path, "rb") as file:
            content = file.read()
        content = content[:content.rfind(b"\n") + 1]
        if content and not content.startswith(header):
            if not overwrite:
                raise UserError(f"{path}: unfinished predictions made with other inputs or flags. Run the command of that time, choose "
                                "another --out, or start again with --overwrite")
            content = b""
    texts = content[len(header):].split(b"\n")[:-1]
    for text in texts:
        if line := unsealed(text):                      # a damaged one is counted below, and answered again
            done[line["id"]] = line
            whole.append(text + b"\n")
    if len(whole) < len(texts):
        log(f"note: {path}: {len(texts) - len(whole)} finished predictions are damaged; their batches are done again")
    write_atomic(path, lambda file: file.write(header + b"".join(whole)))
    return done


def answer_batch(readout, prompts, answers, vectors, soft_at, stop, max_new_tokens):
    """Measure the given answers and generate greedily, with one pass over the prompts. Returns (nats (B,), ids: a list for each).

    prompts, answers: B int arrays each, answers with their end token; vectors (B, D) or None; soft_at: where the soft tokens begin in a
    prompt; stop (S,): end tokens. Prompts are padded on the left, so positions are counted from the mask. A sequence leaves the batch at
    its end token.
    """
    decoder, device = readout.decoder, readout.device
    base, matrix, cache = decoder.base_model, decoder.get_output_embeddings().weight, transformers.DynamicCache(config=decoder.config)
    ids, mask = padded(prompts, left=True)
    soft_at = soft_at + ids.shape[1] - np.array([len(row) for row in prompts])
    batch = to_device({"ids": ids, "mask": mask, "vectors": vectors, "soft_at": soft_at}, device)
    mask, places = batch["mask"], (batch["mask"].cumsum(1) - 1).clamp(min=0)        # (B, T) each
    embeds = embed(decoder, readout.projector, batch["ids"], batch["vectors"], batch["soft_at"])
    last = base(inputs_embeds=embeds, attention_mask=mask, position_ids=places, cache=cache, use_cache=True).last_hidden_state[:, -1]
    place = places[:, -1:] + 1                                                      # (B, 1): of the next token

    targets, real = (torch.from_numpy(array).to(device) for array in padded(answers))              # (B, A) each
    states, extra = last[:, None], targets.shape[1] - 1
    if extra:                                           # all answer tokens but the last, after the prompt
        longer = torch.cat([mask, mask.new_ones(len(mask), extra)], 1)
        more = base(input_ids=targets[:, :-1], attention_mask=longer, position_ids=place + torch.arange(extra, device=device), cache=cache,
                    use_cache=True).last_hidden_state
        states = torch.cat([states, more], 1)                                       # (B, A, H)
        cache.crop(-extra)                              # the cache holds the prompts alone again
    nats = torch.zeros(real.shape, dtype=torch.float64, device=device)
    nats[real] = head_loss(states[real], matrix, targets[real], readout.dtype).double()

    generated, rows = [[] for _ in prompts], torch.arange(len(prompts), device=device)
    for count in range(max_new_tokens):
        token = (last @ matrix.T).argmax(1)                                         # (B',): greedy
        going = ~torch.isin(token, stop)
        rows, token, mask, place = rows[going], token[going], mask[going], place[going]
        for row, new in zip(rows.tolist(), token.tolist()):
            generated[row].append(new)
        if not len(rows) or count == max_new_tokens - 1:
            break
        if not going.all():
            cache.batch_select_indices(going.nonzero()[:, 0])
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        states = base(input_ids=token[:, None], attention_mask=mask, position_ids=place, cache=cache, use_cache=True).last_hidden_state
        last, place = states[:, -1], place + 1
    return nats.sum(1).tolist(), generated


def predict_batch(args, readout, examples, kept, index, output, stop):
    """The prediction lines of one batch of examples."""
    prompts, answers = [examples.one(i)[:examples.prompts[i]] for i in index], [examples.one(i)[examples.prompts[i]:] for i in index]
    vectors = apply_steps(read_vectors(output["prefix"], output["rows"][index]), readout.steps) if readout.projector else None
    with torch.inference_mode():
        nats, generated = answer_batch(readout, prompts, answers, vectors, examples.soft_at, stop, args.max_new_tokens)
    texts = readout.tokenizer.batch_decode(generated, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    lines = []
    for i, nat, text, answer in zip(index, nats, texts, answers):
        if not math.isfinite(nat):
            raise UserError(f"{args.items}: item {shown(examples.ids[i])}: the answer's loss is {nat}, expected a finite number. Look at "
                            "its vector and at the readout")
        line = {"id": examples.ids[i], "prediction": text, "condition": output["condition"], "answer_bits": nat / math.log(2),
                "answer_tokens": len(answer)}
        source = output["sources"] and output["sources"][output["rows"][i]]
        if source and source != kept[i][output["meta"]["key"]]:
            line["embedding_key"] = source
        lines.append(line)
    return lines


def finish(args, record, items, failed, output, done, device, seconds):
    """Write F.jsonl in the items' order, then its sidecar, then remove the partial file."""
    out, lines = output["out"], []
    for item in items:
        lines.append(done[item["id"]] if item["id"] not in failed else {
            "id": item["id"], "prediction": None, "condition": output["condition"], "answer_bits": None, "answer_tokens": None,
            "error": failed[item["id"]].get("error", "listed by --failed")})
    with contextlib.suppress(FileNotFoundError):
        os.remove(meta_name(out))
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    write_atomic(out, lambda file: file.write(text.encode("utf-8", "backslashreplace")))      # half a surrogate pair stays an escape
    bits = [line["answer_bits"] for line in lines if line["answer_bits"] is not None]
    write_json(meta_name(out), {
        "format_version": FORMAT_VERSION, "embedder": record["embedder"], "mode": record["mode"], "condition": output["condition"],
        "readout_sha256": record["content_sha256"], "items_sha256": output["signature"]["items_sha256"], "limit": args.limit,
        "command": sys.argv, "n": len(lines), "failed": len(lines) - len(bits), "mean_answer_bits": sum(bits) / len(bits) if bits else None,
        "embeddings": output["meta"], "signature": output["signature"], "predictions_sha256": sha256(out), "device": str(device),
        "versions": versions(), "seconds": round(seconds, 3), "peak_memory_bytes": peak_memory(device)})
    os.remove(f"{out}.partial")


def predict_outputs(args, record, items, kept, failed, outputs):
    """Load the readout once, tokenise once, and write each output batch by batch."""
    _, _, device = start_ranks(args.device)
    tokenizer, dtype = load_tokenizer(args.readout), compute_dtype(args.dtype, device)
    examples = encode_items(kept, tokenizer, record["template"], 0 if args.drop_soft_tokens else record["tokens"])
    decoder = load_decoder(args.readout, dtype).to(device).eval()
    projector, steps = load_projector(args.readout, record, decoder.get_output_embeddings().weight.shape[1])
    projector = None if args.drop_soft_tokens or projector is None else projector.to(device).eval()
    readout, room = Readout(tokenizer, decoder, projector, steps, device, dtype), decoder.config.max_position_embeddings
    end = tokenizer(record["template"]["end"], add_special_tokens=False)["input_ids"]
    stop = torch.tensor(end + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]), device=device)

    sizes = examples.prompts + np.maximum(examples.lengths - examples.prompts, args.max_new_tokens)     # what a sequence may grow to
    if len(long := np.flatnonzero(sizes > room)):
        first = ", ".join(f"{shown(examples.ids[i])} ({examples.prompts[i]} tokens)" for i in long[:3])
        raise UserError(f"{args.items}: {len(long)} prompts do not fit the decoder's {room} positions together with their answer, the "
                        f"first: {first}. Shorten or remove them")
    batches = cut(np.argsort(sizes, kind="stable"), sizes, args.batch_size, args.batch_tokens)
    for output in outputs:
        began, done = time.time(), open_partial(output, args.overwrite)
        bar = tqdm(total=len(kept), desc=output["condition"], unit="item", disable=None, file=sys.stderr)
        for index in batches:
            if not all(examples.ids[i] in done for i in index):     # whole batches only: a resumed run then computes the same sums
                lines = predict_batch(args, readout, examples, kept, index, output, stop)
                append(f"{output['out']}.partial", *map(sealed, lines))
                done |= {line["id"]: line for line in lines}
            bar.update(len(index))
        bar.close()
        finish(args, record, items, failed, output, done, device, time.time() - began)
        log(f"{output['out']}: {len(items):,} items, {output['condition']}, {time.time() - began:.1f} s")


def predict(args):
    """Answer the items once for each output. Returns the summaries for standard output."""
    record, items, kept, failed, outputs = read_prediction_inputs(args)
    with contextlib.ExitStack() as stack:
        for output in outputs:
            stack.enter_context(locked(output["out"]))
        todo = [output for output in outputs if not finished(output, args.overwrite)]
        for output in outputs:
            if output not in todo:
                log(f"{output['out']}: already there, made by the same inputs and flags")
        if todo:
            load_libraries()
            predict_outputs(args, record, items, kept, failed, todo)
    metas = [read_json(meta_name(out)) for out in args.out]
    names = ("condition", "n", "failed", "mean_answer_bits")
    return [{"out": out} | {name: meta[name] for name in names} for out, meta in zip(args.out, metas)]


# ---- command line ----

def transform_text(text):
    """Check --transform: none, or steps joined by commas."""
    for step in text.split(","):
        kind, *numbers = step.split(":")
        wanted = {"none": (0,), "int8": (0,), "binary": (0,), "truncate": (1,), "random": (1, 2)}.get(kind, ())
        if len(numbers) not in wanted or not all(number.isdecimal() for number in numbers) or (numbers and int(numbers[0]) < 1):
            raise argparse.ArgumentTypeError(f"{text!r}: expected none, truncate:D, int8, binary or random:D[:SEED], joined by commas")
    return text


def positive(text):
    """A whole number from 1 to a thousand million."""
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) <= 10 ** 9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number from 1 to 1,000,000,000")
    return int(text)


def parse_args(argv=None):
    """Read the command line; combinations that make no sense end with status 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    both = argparse.ArgumentParser(add_help=False, allow_abbrev=False)

    def option(parser, name, text, **more):
        """One option with its help, and the default in it where there is one."""
        if more.get("default") not in (None, False, []) and "action" not in more:
            text += f" (default {more['default']})"
        parser.add_argument(name, help=text, **({"action": "store_true"} if not more else more))

    option(both, "--no-embedding", "text only: no embeddings are read, the prompt has no soft tokens")
    option(both, "--failed", "items that extraction skipped (PREFIX.failed.jsonl): fit leaves them out, predict writes null",
           metavar="F.jsonl")
    option(both, "--limit", "use the first N items of each item file; default all", type=positive, metavar="N")
    option(both, "--device", "auto (a CUDA GPU where there is one), cpu, cuda or cuda:N", default="auto")
    option(both, "--dtype", "arithmetic; auto is bfloat16 on a GPU and float32 on a CPU; fit keeps its weights in float32", default="auto",
           choices=("auto", "float32", "bfloat16"))
    option(both, "--overwrite", "replace an existing output")

    fit_parser = commands.add_parser("fit", parents=[both], allow_abbrev=False, help="train a readout")
    option(fit_parser, "--train-items", "training items", required=True, metavar="F.jsonl")
    option(fit_parser, "--train-embeddings", "embedding trio of the training items", metavar="PREFIX")
    option(fit_parser, "--dev-items", "development items, for the dev loss and the best step", required=True, metavar="F.jsonl")
    option(fit_parser, "--dev-embeddings", "embedding trio of the development items", metavar="PREFIX")
    option(fit_parser, "--decoder", "causal language model to start from, for example Qwen/Qwen3-0.6B", required=True,
           metavar="HUB_ID_OR_DIR")
    option(fit_parser, "--out", "readout folder to write", required=True, metavar="DIR")
    option(fit_parser, "--exclude-ids", "text file of item ids to leave out, one a line", metavar="FILE")
    option(fit_parser, "--resume", "continue an unfinished run in --out; start one where there is none")
    option(fit_parser, "--tokens", "soft tokens that an embedding becomes", type=positive, default=1, metavar="K")
    option(fit_parser, "--projector", "from the vector to the soft tokens; mlp is 2 layers with GELU", default="mlp",
           choices=("mlp", "linear"))
    option(fit_parser, "--freeze-decoder", "train the projector only")
    option(fit_parser, "--normalize", "what the projector sees: the vector as stored, at length 1 (l2), or each dimension at mean 0 and "
           "deviation 1 over the training vectors (standardize)", default="none", choices=("none", "l2", "standardize"))
    option(fit_parser, "--transform", "storage to imitate before that: none, truncate:D (first D dimensions, at length 1), int8, binary "
           "(signs), random:D[:SEED] (projection to D), or several joined by commas", default="none", type=transform_text)
    option(fit_parser, "--think-block", "put Qwen3's empty think block before the answer, in training and prediction; default no",
           action=argparse.BooleanOptionalAction, default=False)
    option(fit_parser, "--seed", "seed of the projector's start and of the data order", type=int, default=0)
    option(fit_parser, "--epochs", "passes over the training items", type=positive, default=1)
    option(fit_parser, "--max-steps", "stop after N optimizer steps; default: the end of the last epoch", type=positive, metavar="N")
    option(fit_parser, "--batch-size", "largest global batch in items: one optimizer step over all ranks", type=positive, default=256)
    option(fit_parser, "--batch-tokens", "largest global batch in padded tokens", type=positive, default=16384)
    option(fit_parser, "--accumulation", "micro-steps that each rank cuts its share of a batch into, to save memory", type=positive,
           default=1)
    option(fit_parser, "--lr-projector", "peak learning rate of the projector", type=float, default=1e-3)
    option(fit_parser, "--lr-decoder", "peak learning rate of the decoder", type=float, default=2e-5)
    option(fit_parser, "--warmup", "share of the steps in which the learning rate rises, 0 to 1; a cosine follows", type=float,
           default=0.03)
    option(fit_parser, "--weight-decay", "AdamW's decoupled weight decay", type=float, default=0.0)
    option(fit_parser, "--clip", "largest norm of the gradient; 0 = no limit", type=float, default=1.0)
    option(fit_parser, "--max-length", "longest prompt with answer, in tokens", type=positive, default=2048)
    option(fit_parser, "--max-answer-tokens", "longest answer with its end token, in tokens", type=positive, default=1024)
    option(fit_parser, "--on-long", "items over a limit or without an answer token: stop, or skip and list them in OUT/skipped.jsonl",
           default="stop", choices=("stop", "skip"))
    option(fit_parser, "--allow-duplicate-vectors", "go on although vectors of different images are equal")
    option(fit_parser, "--eval-every", "steps between dev losses, each with a checkpoint", type=positive, default=500, metavar="N")
    option(fit_parser, "--save-every", "steps between further checkpoints", type=positive, default=500, metavar="N")
    option(fit_parser, "--log-every", "steps between lines of metrics.jsonl", type=positive, default=20, metavar="N")
    option(fit_parser, "--compile", "compile the decoder with torch.compile (minutes at the start)")
    option(fit_parser, "--gradient-checkpointing", "recompute activations in the backward pass: less memory, about a third slower")

    predict_parser = commands.add_parser("predict", parents=[both], allow_abbrev=False, help="answer items with a readout")
    option(predict_parser, "--readout", "readout folder that fit wrote", required=True, metavar="DIR")
    option(predict_parser, "--items", "items to answer", required=True, metavar="F.jsonl")
    option(predict_parser, "--embeddings", "one embedding trio or several, one for each --out", nargs="+", default=[], metavar="PREFIX")
    option(predict_parser, "--out", "one prediction file for each of --embeddings", required=True, nargs="+", metavar="F.jsonl")
    option(predict_parser, "--condition", "condition of each output; default: the sidecar's, or matched; without embeddings text_only or "
           "text_only_ablated", nargs="+", default=[], metavar="NAME")
    option(predict_parser, "--drop-soft-tokens", "with --no-embedding: ask a readout fitted with embeddings without its soft tokens")
    option(predict_parser, "--max-new-tokens", "longest prediction, in tokens", type=positive, default=64)
    option(predict_parser, "--batch-size", "largest batch in items", type=positive, default=128)
    option(predict_parser, "--batch-tokens", "largest batch in padded tokens, prompt and answer", type=positive, default=32768)
    args = parser.parse_args(argv)

    for name, value in vars(args).items():
        if value == "" or isinstance(value, list) and "" in value:
            parser.error(f"--{name.replace('_', '-')}: expected a name, found an empty text (a variable that is not set?)")
    if args.command == "fit":
        given = sum(bool(prefix) for prefix in (args.train_embeddings, args.dev_embeddings))
        if given != (0 if args.no_embedding else 2):
            parser.error("fit needs --train-embeddings and --dev-embeddings, or --no-embedding and neither")
        if args.no_embedding and args.freeze_decoder:
            parser.error("--no-embedding --freeze-decoder leaves nothing to train")
        if args.resume and args.overwrite:
            parser.error("--resume continues and --overwrite starts again; choose one")
        if not 0 <= args.warmup <= 1 or not all(
                0 <= value < math.inf for value in (args.lr_projector, args.lr_decoder, args.clip, args.weight_decay)):
            parser.error("--warmup is a share from 0 to 1; learning rates, --clip and --weight-decay are finite and not negative")
        if not 0 <= args.seed < 2 ** 32:
            parser.error("--seed is a whole number from 0 to 4,294,967,295")
    else:
        if args.no_embedding == bool(args.embeddings):
            parser.error("predict needs --embeddings or --no-embedding, and not both")
        if args.drop_soft_tokens and not args.no_embedding:
            parser.error("--drop-soft-tokens goes with --no-embedding")
        if len(args.out) != (len(args.embeddings) or 1) or len(args.condition) not in (0, len(args.out)):
            parser.error("one --out for each of --embeddings (one in all without embeddings), and one --condition for each --out or none")
        if len({os.path.realpath(out) for out in args.out}) != len(args.out):
            parser.error("two --out name the same file")
        if any(name != name.strip() for name in args.condition):
            parser.error("--condition: expected a name without outer white space")
    return args


def main(argv=None):
    """Run a subcommand; the result is one line of JSON on standard output."""
    args = parse_args(argv)
    log(f"arguments: {json.dumps(vars(args))}")
    result = fit(args) if args.command == "fit" else predict(args)
    if ranks()[0] == 0:                                 # the other ranks of torchrun have nothing to add
        print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    run(main, "What has a final name is whole. The same command goes on from the last checkpoint (fit: with --resume) or batch (predict)")
