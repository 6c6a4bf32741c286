"""Controls: does a readout score come from the vector, or from the question, the answer prior or chance?

Makes control vectors, lets train_decoder.py predict from them and evaluate.py score them, and prints one row a condition beside the
matched one. Each control is a function below whose docstring says which other explanation of the score it rules out.

    python controls.py run --readout READOUT_DIR --items test.jsonl --embeddings PREFIX --out OUT_DIR --text-only-readout TEXT_ONLY_DIR
    python controls.py curve --items test.jsonl --embeddings PREFIX --train-items train.jsonl --train-embeddings PREFIX \\
        --dev-items dev.jsonl --dev-embeddings PREFIX --decoder HUB_ID_OR_DIR --out OUT_DIR

READS   items (JSONL: id, image, question, answers, source, domain), embedding trios (PREFIX.npy (N, D) float32 or float16,
        PREFIX.ids.txt, PREFIX.meta.json), readout folders as train_decoder.py writes them.
WRITES  OUT/CONDITION.jsonl (predictions, one file a condition, with CONDITION.meta.json), OUT/embeddings/CONDITION.* (control vectors as
        ordinary trios with `condition`, `seed`, `parent_sha256`, and .source_keys.txt: whose vector row i holds),
        OUT/CONDITION.inputs.json (hashes a condition was made from), OUT/commands.sh (the exact commands, to rerun any by hand),
        OUT/scores.json and OUT/scores.jsonl (by evaluate.py), OUT/controls.json (the table); curve: OUT/curve.json and OUT/curve.svg.
        Conditions that could not be given to some items list them in OUT/CONDITION.failed.jsonl.
Joins by key, never by position. A second call keeps every condition whose inputs' hashes match and redoes the others. The same seed gives
the same files on CPU. Exit status: 0 done, 1 failed with a message, 2 wrong command line, 130 interrupted.
Time: one prediction pass a condition, the readout loaded once for all vector controls; text_only also trains a readout unless it is given.
To reuse elsewhere: copy this file with train_decoder.py and evaluate.py (and extract.py for question_vector) into one folder; it needs
Python 3.11, numpy 2.0, tqdm, and for raw_image also torch 2.6, transformers 5.24 and pillow.
"""
import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import zlib

import numpy as np

CONTROLS = {                                            # name: the other explanation that it tests
    "text_only": "the question and the prior over answers explain the score (a readout trained without vectors)",
    "text_only_ablated": "the readout does not need its vector (the trained readout with the soft tokens taken out)",
    "zero": "having any vector at all, whatever it says, explains the score",
    "shuffled": "the vectors' general look, not this image's own content, explains the score",
    "shuffled_question": "the image's content explains a joint score without its question (same image, another question)",
    "mean": "what all training vectors have in common explains the score",
    "noise": "anything that is distributed like a vector explains the score",
    "nearest": "looking up the most similar other image explains the score",
    "question_vector": "the embedder's reading of the question, with a blank image, explains the score",
    "raw_image": "not a control but the ceiling: a model that sees the image",
}
DEFAULT_CONTROLS = "text_only,zero,shuffled"
RAW_IMAGE_MAX_PIXELS = 1800 * 32 * 32                   # the cap of Qwen3-VL-Embedding, so that the ceiling sees what the embedder saw
COVARIANCE_ROWS = 65536                                 # `noise` estimates its statistics from at most so many training rows
VECTOR_CONTROLS = ("zero", "shuffled", "shuffled_question", "mean", "noise", "nearest", "question_vector")
SEEDED = ("shuffled", "shuffled_question", "noise")
IDENTITY = ("embedder", "mode", "dim", "normalized", "weights_sha256", "config_sha256", "prompt", "pooling")  # what `predict` compares
KEPT_FIELDS = (*IDENTITY, "model", "revision", "pixel_limits", "image_policy", "question_cut", "fuse", "torch_dtype", "items_sha256")
REPLAYED = (  # settings of the readout under test that text_only is trained with too
    "seed", "epochs", "max_steps", "batch_size", "batch_tokens", "lr_decoder", "warmup", "weight_decay", "clip", "think_block",
    "max_length", "max_answer_tokens", "eval_every", "limit", "dtype")
BUDGET = r"(truncate:\d+|random:\d+(:\d+)?|int8|binary|none)(\+(truncate:\d+|random:\d+(:\d+)?|int8|binary))*"
TESTED = {"Python": "3.11.", "torch": "2.", "transformers": "5."}      # another version gets a note, no refusal
BLANK_GREY = 128                                        # mid grey is about 0 after the Qwen processors' normalisation

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


# ---- control inputs: pure functions, one a control ----
def derange(groups, classes, seed):
    """For each item another item of the same group but another class; -1 where the group has a single class.

    groups, classes: N hashable values. Returns donors (N,), int64. Within a group the donors are a permutation (each item's vector is used
    once) unless one class holds more than half of the group: then no such permutation exists, and its items reuse the others' vectors.
    Lay the items out class by class, in a seeded order, and rotate by at least the largest class: then no item can meet its own class.
    """
    donors, rng = np.full(len(groups), -1), np.random.default_rng(seed)
    members = {}
    for number, (group, name) in enumerate(zip(groups, classes, strict=True)):
        members.setdefault(group, {}).setdefault(name, []).append(number)
    for group in sorted(members):
        names = sorted(members[group])
        if len(names) < 2:
            continue
        order = np.concatenate([rng.permutation(members[group][names[place]]) for place in rng.permutation(len(names))])
        largest = max(len(numbers) for numbers in members[group].values())
        if 2 * largest <= len(order):
            donors[order] = np.roll(order, -int(rng.integers(largest, len(order) - largest + 1)))
        else:
            for numbers in members[group].values():
                donors[numbers] = np.resize(order[~np.isin(order, numbers)], len(numbers))
    return donors


def shuffled(items, seed):
    """Each item gets the vector of another image of its source. Returns donors (N,): item numbers, -1 in a source with a single image.

    Rules out that the score comes from the vectors' general look (domain, source, style), not from this image. No item keeps a vector of
    its own image, also not through another question on it. Alarming: shuffled near matched - then the readout does not read the vector.
    Shuffled a little above text_only is normal where images of a source share content.
    """
    return derange([item["source"] for item in items], [item["image"] for item in items], seed)


def shuffled_question(items, seed):
    """Joint mode: each item gets the vector of its own image with a different question. Returns donors (N,), -1 where there is no other.

    Separates image content from question leakage: what survives was stored about the image whatever was asked. Alarming: equal to matched
    would mean that joint vectors are not question-conditioned at all; far below shuffled would mean that the readout trusts the question
    inside the vector over the one it is asked.
    """
    return derange([item["image"] for item in items], [item["question"] for item in items], seed)


def zero(vectors):
    """All zeros (N, D). Rules out that any vector at all, whatever it says, explains the score: what the readout does without a signal.

    Alarming: near matched. The readout's own --normalize still applies: with `standardize` it sees minus the mean over the deviation.
    """
    return np.zeros_like(vectors)


def mean(train, count):
    """The training vectors' mean (D,) for every item, as (count, D).

    Rules out that what all vectors share explains the score; unlike `zero` it lies amid the vectors, and with `standardize` the readout
    sees exactly zeros. Alarming: near matched.
    """
    middle = sum(np.asarray(train[start: start + 4096], np.float64).sum(0) for start in range(0, len(train), 4096)) / len(train)
    return np.repeat(middle[None].astype(np.float32), count, 0)


def noise(train, count, seed):
    """Gaussian vectors (count, D) with the training vectors' mean and covariance, so also its spectrum.

    Rules out that anything distributed like a vector helps, as a regulariser or a domain prior would. Alarming: above text_only.
    mean + sum_j z_j (x_j - mean) / sqrt(n) with standard normal z has exactly the sample's covariance; no D x D matrix is decomposed.
    Their mean squared length is that of the training vectors, so vectors of length 1 give noise of about length 1.
    """
    rows = np.unique(np.linspace(0, len(train) - 1, min(len(train), COVARIANCE_ROWS)).astype(np.int64))
    parts, rng = np.array_split(rows, math.ceil(len(rows) / 1024)), np.random.default_rng(seed)
    middle = sum(np.asarray(train[part], np.float64).sum(0) for part in parts) / len(rows)
    result = np.repeat(middle[None], count, 0)          # (count, D)
    for part in parts:
        result += rng.standard_normal((count, len(part))) @ (np.asarray(train[part], np.float64) - middle) / math.sqrt(len(rows))
    return result.astype(np.float32)


def nearest(vectors, images):
    """Each item gets the most similar vector (cosine) of another image. vectors (N, D); images: N names. Returns donors (N,).

    Shows how much of the score is retrieval of lookalikes: an embedding that only names its neighbourhood keeps its score here.
    Alarming: near matched - then the benchmark does not ask for what tells similar images apart. First of equals wins; -1 if one image.
    """
    unit = np.asarray(vectors, np.float32)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    codes = np.unique(images, return_inverse=True)[1]
    donors = np.full(len(unit), -1)
    if codes.max(initial=0) == 0:
        return donors
    for start in range(0, len(unit), 512):
        similarity = unit[start: start + 512] @ unit.T  # (512, N)
        similarity[codes[start: start + 512, None] == codes[None]] = -np.inf
        donors[start: start + 512] = similarity.argmax(1)
    return donors


def blank_items(items, folder, out):
    """Items for `question_vector`: the same questions, each on one blank mid-grey image. Writes OUT/blank.png; returns the new items.

    A joint embedder then encodes the question alone. Shows how much of the joint score is the question, re-encoded, perhaps with the
    embedder's guess of the answer. Alarming: near matched - then the joint score says nothing about images. The blank has one fixed size,
    the commonest of the items' images, because even a shape would tell documents from photographs.
    """
    from collections import Counter
    from PIL import Image
    sizes = Counter(open_image(folder, image).size for image in sorted({item["image"] for item in items}))
    size = min(sizes, key=lambda pair: (-sizes[pair], pair))
    write_atomic(os.path.join(out, "blank.png"), lambda file: Image.new("RGB", size, (BLANK_GREY,) * 3).save(file, "PNG"))
    return [{**item, "image": "blank.png"} for item in items]


# ---- the machinery: trios, subprocesses, what is finished ----
def write_jsonl(path, rows):
    """Write a list of objects, one a line, atomically."""
    write_atomic(path, lambda file: file.writelines((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
                                                    for row in rows))


def seed_of(args, condition):
    """`shuffled` has --seed, `shuffled-2` the next one, and so on."""
    return args.seed + int((condition.split("-") + ["1"])[1]) - 1


def hashes_of_folder(folder):
    """SHA-256 of the files of a model folder that decide what it says; None for a hub id."""
    if folder is None or not os.path.isdir(folder):
        return None
    names = sorted(name for name in os.listdir(folder) if name.endswith((".json", ".safetensors", ".txt")))
    return {name: sha256(os.path.join(folder, name)) for name in names}


def hashes_of_readout(folder):
    """The same for a readout: readout.json counts by its own content hash, which leaves out when and where it was made."""
    if not os.path.isfile(os.path.join(folder, "readout.json")):
        raise UserError(f"{folder}: expected a readout folder with readout.json, found none. Train it with train_decoder.py fit")
    content = read_json(os.path.join(folder, "readout.json")).get("content_sha256")
    return {**hashes_of_folder(folder), **({"readout.json": content} if content else {})}


def hashes_of_images(args):
    """One SHA-256 over the images' own, in the order of their names."""
    names = sorted({item["image"] for item in read_items(args.items, args.limit)})
    missing = [name for name in names if not os.path.isfile(os.path.join(args.images, name))]
    if missing:
        raise UserError(f"{args.images}: {len(missing)} of {len(names)} images are not there, first {shown(missing[0])}. Check --images")
    return hashlib.sha256("".join(sha256(os.path.join(args.images, name)) for name in names).encode()).hexdigest()


def hashes_of_trio(prefix):
    """SHA-256 of the three files of an embedding trio."""
    return {end: sha256(prefix + end) for end in (".npy", ".ids.txt", ".meta.json") if os.path.exists(prefix + end)}


def die_with_parent():
    """Linux: end this child when controls.py is killed, so that a second call does not meet it still writing."""
    if sys.platform == "linux":
        import ctypes
        ctypes.CDLL(None).prctl(1, 15)                  # PR_SET_PDEATHSIG, SIGTERM


def run_script(args, name, *words):
    """Run a script that lies beside this one. Its exact command is printed and saved to OUT/commands.sh; a failure is a UserError."""
    script = os.path.relpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), name))
    if not os.path.exists(script):
        raise UserError(f"{script}: not found. controls.py runs the other scripts: copy {name} into its folder")
    words = [script, *map(str, words)]
    save_command(args, shlex.join(["python", *words]))
    print(f"$ {args.commands[-1]}", file=sys.stderr, flush=True)
    # the child's result goes to our standard error, because our own standard output is the table
    status = subprocess.run([sys.executable, *words], stdout=sys.stderr.fileno(), preexec_fn=die_with_parent).returncode
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise UserError(f"{name} ended with status {status}; its own message is above, its command is the last line of "
                        f"{os.path.join(args.out, 'commands.sh')}. Mend that and run the same command again: finished conditions are kept")


def save_command(args, line):
    """Add a command to OUT/commands.sh, each line once."""
    args.commands[:] = [known for known in args.commands if known != line] + [line]
    text = ("# Made by controls.py. Run any line by hand from the folder where controls.py was started; `python` is "
            f"Python {platform.python_version()} with the toolkit's packages.\n" + "\n".join(args.commands) + "\n")
    write_atomic(os.path.join(args.out, "commands.sh"), lambda file: file.write(text.encode()))


def finished(args, condition, inputs):
    """True if a condition's predictions exist, were made from the same inputs, and are unchanged since."""
    path = os.path.join(args.out, condition)
    if not all(os.path.exists(path + end) for end in (".jsonl", ".meta.json", ".inputs.json")):
        return False
    try:
        record, _ = read_json(f"{path}.inputs.json"), read_json(f"{path}.meta.json")
    except UserError as error:
        print(f"{condition}: made again, because of {error}", file=sys.stderr)
        return False
    whole = (isinstance(record.get("commands"), list) and all(isinstance(line, str) for line in record["commands"])
             and (args.command == "run" or isinstance(record.get("bytes"), (int, float))))
    same = whole and record.get("inputs") == inputs and record.get("predictions_sha256") == sha256(f"{path}.jsonl")
    print(f"{condition}: {'kept, its inputs are the same' if same else 'its inputs or its file changed, made again'}", file=sys.stderr)
    if same:
        args.commands.extend(line for line in record["commands"] if line not in args.commands)
    return same


def mark_finished(args, condition, inputs, commands, **facts):
    """Write OUT/CONDITION.inputs.json, last of a condition's files: what it was made from, its commands, the hash of its predictions."""
    path = os.path.join(args.out, condition)
    write_json(f"{path}.inputs.json", {"inputs": inputs, "commands": commands, "predictions_sha256": sha256(f"{path}.jsonl"), **facts})


def load_vectors(args):
    """Read the inputs. Returns a dict: all `items`; `live`, those not in --failed; their `vectors` (N, D) float32 and `keys`; `meta`."""
    items = read_items(args.items, args.limit)
    reasons = {key: line.get("error", "skipped") for key, line in read_failed(args.failed).items()}
    array, keys, meta = read_embeddings(args.embeddings)
    row = {key: number for number, key in enumerate(keys)}
    live = [item for item in items if item["id"] not in reasons]
    wanted = [item[meta["key"]] for item in live]
    if missing := [key for key in wanted if key not in row]:
        raise UserError(f"{args.embeddings}.ids.txt: expected a row for each item, found none for {len(missing)} of {len(live)}, first "
                        f"{', '.join(shown(key) for key in missing[:3])}. Extract these items of "
                        f"{args.items}, or list the skipped ones with --failed")
    vectors = np.asarray(array[[row[key] for key in wanted]], np.float32)  # (N, D)
    return {"items": items, "live": live, "vectors": vectors, "keys": wanted, "meta": meta, "failed": [
        {"id": item["id"], "error": reasons[item["id"]]} for item in items if item["id"] in reasons]}


def load_beside(prefix, meta, flag):
    """Open a trio that must come from the same embedder as the vectors under test (`meta`). Returns (array (M, D), keys)."""
    array, keys, found = read_embeddings(prefix)
    for name in IDENTITY:
        if found.get(name) != meta.get(name):
            raise UserError(f"{prefix}.meta.json: expected {name} {shown(repr(meta.get(name)))} as in the sidecar of --embeddings, found "
                            f"{shown(repr(found.get(name)))}. Give {flag} as they were for --embeddings")
    return array, keys


def control_vectors(args, name, seed, data):
    """The vectors of one control. Returns (vectors (N, D) float32, source keys: N str, usable (N,) bool: which items can be given one)."""
    live, vectors, meta = data["live"], data["vectors"], data["meta"]
    if name in ("shuffled", "shuffled_question", "nearest"):
        donors = (shuffled(live, seed) if name == "shuffled" else shuffled_question(live, seed) if name == "shuffled_question"
                  else nearest(vectors, [item["image"] for item in live]))
        return vectors[donors], [data["keys"][donor] for donor in donors], donors >= 0
    if name == "zero":
        values = zero(vectors)
    elif name in ("mean", "noise"):
        train, _ = load_beside(args.train_embeddings, meta, "--train-embeddings")
        values = mean(train, len(live)) if name == "mean" else noise(train, len(live), seed)
    else:
        prefix = args.question_embeddings or extract_questions(args, data)
        array, keys = load_beside(prefix, meta, "--embedder, --model and --extract-flags")
        row = {key: number for number, key in enumerate(keys)}
        if missing := [item["id"] for item in live if item["id"] not in row]:
            raise UserError(f"{prefix}.ids.txt: expected the id of each item, found none for {len(missing)}, first "
                            f"{shown(missing[0])}. Embed every question of {args.items} with a blank image, key id")
        values = np.asarray(array[[row[item["id"]] for item in live]], np.float32)
    return values, [f"({name})"] * len(live), np.ones(len(live), bool)


def extract_questions(args, data):
    """Embed the items' questions with a blank image by extract.py, with the model of the vectors under test. Returns the trio's prefix."""
    prefix, folder, meta = os.path.join(args.out, "embeddings", "blank"), os.path.join(args.out, "blank"), data["meta"]
    os.makedirs(folder, exist_ok=True)
    write_jsonl(os.path.join(folder, "items.jsonl"), blank_items(data["live"], args.images, folder))
    settings = {"model": args.model or meta.get("model"), "revision": None if args.model else meta.get("revision"), "device": args.device,
                "dtype": meta.get("torch_dtype"), "fuse": meta.get("fuse")}  # the rest of the recipe is checked afterwards
    run_script(args, "extract.py", "--embedder", args.embedder or meta["embedder"], "--mode", "vl_joint",
               "--items", os.path.join(folder, "items.jsonl"), "--images", folder, "--out", prefix, *flags_of(settings, settings),
               *shlex.split(args.extract_flags), "--overwrite")
    return prefix


def make_control(args, condition, data):
    """Write one control's trio (key `id`). Returns the live items it cannot be given to, as [{id, error}], after saying so by source."""
    name, live = condition.split("-")[0], data["live"]
    values, names, usable = control_vectors(args, name, seed_of(args, condition), data)
    reason = {"shuffled": "a source with a single image cannot be shuffled", "nearest": "there is no other image",
              "shuffled_question": "no other question on its image"}.get(name)
    counts = {}
    for item, good in zip(live, usable):
        counts.setdefault(item["source"], []).append(good)
    for source, goods in sorted(counts.items()):
        if not all(goods):
            print(f"{condition}: {goods.count(False)} of {len(goods)} items of {shown(source)} left out: {reason}", file=sys.stderr)
    if not usable.any():
        raise UserError(f"{condition}: no item of {args.items} can be given one: {reason}. Leave it out of --controls")
    prefix, numbers = os.path.join(args.out, "embeddings", condition), np.flatnonzero(usable)
    write_atomic(f"{prefix}.source_keys.txt", lambda file: file.write("".join(f"{names[number]}\n" for number in numbers).encode()))
    write_embeddings(prefix, values[numbers], [live[number]["id"] for number in numbers], {
        **{field: data["meta"][field] for field in KEPT_FIELDS if field in data["meta"]}, "key": "id", "condition": condition,
        "seed": seed_of(args, condition) if name in SEEDED else None, "parent_sha256": sha256(f"{args.embeddings}.meta.json"),
        "source_keys_sha256": sha256(f"{prefix}.source_keys.txt"), "argv": sys.argv})
    return [{"id": item["id"], "error": f"{condition}: {reason}"} for item, good in zip(live, usable) if not good]


def predict(args, conditions, *words, failed=()):
    """One `train_decoder.py predict` call for one or more conditions; `failed`, [{id, error}], are items that it answers with null."""
    if failed:
        path = os.path.join(args.out, f"{conditions[0]}.failed.jsonl")
        write_jsonl(path, failed)
        words += ("--failed", path)
    run_script(args, "train_decoder.py", "predict", "--items", args.items, *words, "--condition", *conditions,
               "--out", *[os.path.join(args.out, f"{condition}.jsonl") for condition in conditions],
               *flags_of(vars(args), ("limit", "max_new_tokens", "batch_tokens", "device", "dtype")), "--overwrite")


def flags_of(values, names):
    """{"max_steps": 5, "think_block": True} to ["--max-steps", 5, "--think-block"]; None and False give nothing."""
    words = []
    for name in names:
        value = values.get(name)
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [value])
    return words


def fit_plan(args, *flags):
    """What a readout that is trained here depends on: hashes of its items, vectors and decoder, and its flags."""
    vectors = [] if "--no-embedding" in flags else [hashes_of_trio(args.train_embeddings), hashes_of_trio(args.dev_embeddings)]
    return {"train_items": sha256(args.train_items), "dev_items": sha256(args.dev_items), "embeddings": vectors,
            "decoder": hashes_of_folder(args.decoder) or args.decoder, "flags": [*map(str, flags), *shlex.split(args.fit_flags)]}


def text_only_plan(args):
    """The text-only readout: the same items, steps, learning rate and seed as the readout under test, which says them in readout.json."""
    record = read_json(os.path.join(args.readout, "readout.json"))
    if record.get("train_items_sha256") != sha256(args.train_items):
        raise UserError(f"{args.train_items}: expected the items that {args.readout} was trained on, found others (by SHA-256). A "
                        "text-only readout from other items is no control: give the same with --train-items")
    signature, digest = record.get("signature", {}), hash_decoder(args.decoder)
    other = signature.get("decoder_sha256", digest) != digest if digest else signature.get("decoder", args.decoder) != args.decoder
    if other:
        raise UserError(f"--decoder {args.decoder}: expected the one that {args.readout} was trained from (signature in readout.json), "
                        "found another, so their bits cannot be compared. Give the same")
    if signature.get("exclude_ids_sha256") and "--exclude-ids" not in args.fit_flags:
        raise UserError(f"{args.readout} was trained with --exclude-ids, text_only would see the items that it left out. Give the same "
                        "file: --fit-flags \"--exclude-ids FILE\"")
    return fit_plan(args, "--no-embedding", *flags_of(record.get("arguments", {}), REPLAYED))


def fit(args, name, plan):
    """Train OUT/readouts/NAME as planned: go on with an unfinished one of the same plan, replace one of another. Returns its folder."""
    folder = os.path.join(args.out, "readouts", name)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    known = os.path.exists(f"{folder}.plan.json") and read_json(f"{folder}.plan.json") == plan
    write_json(f"{folder}.plan.json", plan)
    vectors = ["--train-embeddings", args.train_embeddings, "--dev-embeddings", args.dev_embeddings] if plan["embeddings"] else []
    run_script(args, "train_decoder.py", "fit", "--train-items", args.train_items, "--dev-items", args.dev_items, *vectors,
               "--decoder", args.decoder, "--out", folder, *plan["flags"], *flags_of(vars(args), ["device"]),
               "--resume" if known else "--overwrite")
    return folder


def check_text_only(args):
    """A given text-only readout must be one, from the decoder and the items that the readout under test was trained on."""
    given = read_json(os.path.join(args.text_only_readout, "readout.json"))
    if args.command == "run":
        against, tested = args.readout, read_json(os.path.join(args.readout, "readout.json"))
    else:                                               # the curve's readouts are trained here
        against, digest = "the curve's readouts", hash_decoder(args.decoder)
        tested = {"train_items_sha256": sha256(args.train_items), "arguments": given.get("arguments", {}),
                  "signature": {"decoder_sha256": digest} if digest else {"decoder": args.decoder}}
    if given.get("tokens") != 0:
        raise UserError(f"{args.text_only_readout}: expected a readout trained with fit --no-embedding, found one with "
                        f"{shown(given.get('tokens'))} soft tokens. Check --text-only-readout")
    if given.get("train_items_sha256") != tested.get("train_items_sha256"):
        raise UserError(f"{args.text_only_readout}: trained on other items than {against} (train_items_sha256 in readout.json). "
                        "Train it on the same items")
    ours, theirs = given.get("signature", {}), tested.get("signature", {})
    if any(name in ours and name in theirs and ours[name] != theirs[name] for name in ("decoder_sha256", "decoder")):
        raise UserError(f"{args.text_only_readout}: trained from another decoder than {against} (signature in readout.json), so their bits "
                        "cannot be compared. Train it from the same --decoder")
    if args.command == "run" and (left := [name for name in ("exclude_ids", "failed") if ours.get(f"{name}_sha256") != theirs.get(
            f"{name}_sha256")]):
        print(f"note: {args.text_only_readout} was trained with another --{' and --'.join(left).replace('_', '-')} than {against}, so on "
              "other items of the same file", file=sys.stderr)
    names = [name for name in REPLAYED if given.get("arguments", {}).get(name) != tested.get("arguments", {}).get(name)]
    if names:
        print(f"note: {args.text_only_readout} was trained with another {', '.join(names)} than {args.readout}; text_only then differs in "
              "more than the vector", file=sys.stderr)


def base_inputs(args, readout):
    """What the predictions of every condition depend on."""
    return {"format_version": FORMAT_VERSION, "items": sha256(args.items), "failed": args.failed and sha256(args.failed),
            "limit": args.limit, "dtype": args.dtype, "max_new_tokens": args.max_new_tokens, "readout": readout,
            "embeddings": hashes_of_trio(args.embeddings)}


def inputs_of(args, condition, base):
    """Everything that decides a condition's predictions, as hashes and settings; while it is the same, the condition is kept."""
    name = condition.split("-")[0]
    inputs = {**base, "seed": seed_of(args, condition) if name in SEEDED else None}
    if name in ("text_only", "raw_image"):
        inputs = {**inputs, "readout": None, "embeddings": None}
    if name == "text_only" and args.text_only_readout:
        check_text_only(args)
        inputs["readout"] = hashes_of_readout(args.text_only_readout)
    elif name == "text_only":
        inputs["fit"] = text_only_plan(args)
    elif name in ("mean", "noise"):
        inputs["train_embeddings"] = hashes_of_trio(args.train_embeddings)
    elif name == "question_vector":
        inputs["question_embeddings"] = (hashes_of_trio(args.question_embeddings) if args.question_embeddings else
                                         [args.embedder, args.model, args.extract_flags, hashes_of_images(args)])
    elif name == "raw_image":
        inputs["reference"] = [args.reference_model, hashes_of_folder(args.reference_model), hashes_of_images(args)]
    return inputs


def run_controls(args):
    """All conditions of one embedder and mode: make inputs, predict, score, print the table."""
    data = load_vectors(args)
    if data["meta"]["mode"] != "vl_joint" and (joint := {"shuffled_question", "question_vector"} & set(args.controls)):
        raise UserError(f"{args.embeddings}.meta.json: {' and '.join(sorted(joint))} need mode vl_joint, found "
                        f"{shown(data['meta']['mode'])}. Leave them out of --controls")
    if args.visual_only_run:
        read_visual_only(args, data["meta"])            # a wrong folder is said before hours of work, not after
    conditions = ["matched"] + [name + (f"-{repeat}" if repeat > 1 else "") for name in args.controls
                                for repeat in range(1, (args.repeats if name == "shuffled" else 1) + 1)]
    base = base_inputs(args, hashes_of_readout(args.readout))
    inputs = {condition: inputs_of(args, condition, base) for condition in conditions}
    todo = [condition for condition in conditions if not finished(args, condition, inputs[condition])]
    os.makedirs(os.path.join(args.out, "embeddings"), exist_ok=True)
    commands, batches = {condition: [] for condition in todo}, {}
    for condition in todo:
        if condition == "matched" or condition.split("-")[0] in VECTOR_CONTROLS:
            before = len(args.commands)
            failed = data["failed"] + (make_control(args, condition, data) if condition != "matched" else [])
            commands[condition] = args.commands[before:]
            batches.setdefault(json.dumps(failed), []).append(condition)
    for failed, batch in batches.items():               # one readout load serves all conditions that were given to the same items
        prefixes = [args.embeddings if condition == "matched" else os.path.join(args.out, "embeddings", condition) for condition in batch]
        predict(args, batch, "--readout", args.readout, "--embeddings", *prefixes, failed=json.loads(failed))
        for condition in batch:
            mark_finished(args, condition, inputs[condition], commands[condition] + args.commands[-1:])
    for condition in todo:
        before = len(args.commands)
        if condition == "text_only":
            predict(args, [condition], "--readout", args.text_only_readout or fit(args, condition, inputs[condition]["fit"]),
                    "--no-embedding")
        elif condition == "text_only_ablated":
            predict(args, [condition], "--readout", args.readout, "--no-embedding", "--drop-soft-tokens")
        elif condition == "raw_image":
            answer_from_images(args, data["items"], inputs[condition])  # no subprocess: this script's one model
        else:
            continue
        mark_finished(args, condition, inputs[condition], args.commands[before:])
    others = [condition for condition in conditions[1:] if condition != "text_only"]
    report = score(args, conditions, [(other, "text_only") for other in others] if "text_only" in conditions else [])
    rows = [table_row(args, condition, report, "matched") for condition in conditions]
    result = {"format_version": FORMAT_VERSION, "command": "run", "embedder": data["meta"]["embedder"], "mode": data["meta"]["mode"],
              "rows": rows, "spread": spread(rows), "leak_check": leak_check(args, report, data["meta"]),
              "seed": args.seed, "limit": args.limit, "inputs": base, "argv": sys.argv}
    write_json(os.path.join(args.out, "controls.json"), result)
    print_table(result)


def score(args, conditions, pairs):
    """Score all conditions in one evaluate.py call; returns its scores.json. pairs: (a, b) whose difference a - b is wanted too."""
    file = {condition: os.path.join(args.out, f"{condition}.jsonl") for condition in conditions}
    words = [word for a, b in pairs for word in ("--pair", file[a], file[b])]
    words += ["--bootstrap", args.bootstrap] if args.bootstrap else []
    run_script(args, "evaluate.py", "--items", args.items, "--predictions", *file.values(), *words, "--out", args.out, "--seed", args.seed)
    return read_json(os.path.join(args.out, "scores.json"))


def find_pair(args, report, a, b):
    """The paired difference a - b of two conditions in evaluate.py's report, or None."""
    file = {"a": os.path.join(args.out, f"{a}.jsonl"), "b": os.path.join(args.out, f"{b}.jsonl")}
    return next((pair for pair in report["pairs"] if pair["a"]["file"] == file["a"] and pair["b"]["file"] == file["b"]), None)


def table_row(args, condition, report, reference):
    """One condition's row: scores with intervals, reference minus condition, usable bits over text_only, a verdict in words."""
    row = next(row for row in report["rows"] if row["file"] == os.path.join(args.out, f"{condition}.jsonl"))
    pair, bits = find_pair(args, report, reference, condition), find_pair(args, report, condition, "text_only")
    verdict = "the reference" if condition == reference else "not compared"
    if pair:
        verdict = pair["verdict"] + (f", {condition} is higher" if pair["verdict"] == "separated" and pair["difference"] < 0 else "")
    return {"condition": condition, "tests": CONTROLS.get(condition.split("-")[0], "the readout with each item's own vector"),
            "overall": row["overall"], "by_domain": row["by_domain"], "by_source": row["by_source"],
            "difference": pair and {name: pair[name] for name in ("n", "difference", "interval", "p", "by_domain")},
            "usable_bits": bits and bits.get("usable_information_bits"), "verdict": verdict}


def spread(rows):
    """Over the R shuffles of --repeats: mean, standard deviation and range of the score, how many are separated from matched; or None."""
    repeats = [row for row in rows if row["condition"].split("-")[0] == "shuffled"]
    if len(repeats) < 2:
        return None
    scores = [row["overall"]["score"] for row in repeats]
    return {"repeats": len(scores), "mean": float(np.mean(scores)), "sd": float(np.std(scores, ddof=1)), "low": min(scores),
            "high": max(scores), "separated": sum(row["verdict"] == "separated" for row in repeats)}


def leak_check(args, report, meta):
    """Did the embedder answer the question itself? Per source, two differences to read side by side.

    matched - question_vector (joint): what the joint score owes to the image. Near 0 in a source: its joint score is the question
    re-encoded, perhaps with an answer that the embedder guessed from the text alone. matched - shuffled (visual-only): what a vector that
    never saw the question holds about the image. The first far above 0 where the second is near 0 is the pattern of an embedder that looks
    up the answer while it reads the question: the vector carries an answer that the embedder computed, not a description of the image.
    That is no fault of a joint embedding, but its score then does not say how much of the image survives. Both far above 0: the image's
    content survives. matched - shuffled in joint mode stands beside them. The visual-only column needs --visual-only-run.
    """
    def by_source(pair):
        groups = (pair or {}).get("by_source", {})
        return {name: {key: group[key] for key in ("n", "difference", "interval")} for name, group in groups.items()}
    columns = {f"{meta['mode']}: matched - shuffled": by_source(find_pair(args, report, "matched", "shuffled")),
               f"{meta['mode']}: matched - question_vector": by_source(find_pair(args, report, "matched", "question_vector"))}
    if args.visual_only_run:
        columns.update(read_visual_only(args, meta))
    return {name: column for name, column in columns.items() if column}


def read_visual_only(args, meta):
    """The leak check's columns of the visual-only run in --visual-only-run, which must be of the same embedder."""
    path = os.path.join(args.visual_only_run, "controls.json")
    found = read_json(path)
    if (found.get("embedder"), found.get("mode")) != (meta["embedder"], "visual_only") or not isinstance(found.get("leak_check"), dict):
        raise UserError(f"{path}: expected a controls.py run of {shown(meta['embedder'])} in visual_only, found "
                        f"{shown(found.get('embedder'))} in {shown(found.get('mode'))}. Check --visual-only-run")
    inputs = found.get("inputs") if isinstance(found.get("inputs"), dict) else {}
    if (inputs.get("items"), inputs.get("limit")) != (sha256(args.items), args.limit):
        raise UserError(f"{path}: expected a run on the items of {args.items} with --limit {args.limit}, found other items or --limit "
                        f"{shown(inputs.get('limit'))}. Run both on the same")
    number = (int, float, type(None))
    for column in found["leak_check"].values():
        for group in column.values() if isinstance(column, dict) else [None]:
            bounds = group.get("interval") if isinstance(group, dict) else 0
            if not (isinstance(group, dict) and isinstance(group.get("difference"), number) and (bounds is None or (
                    isinstance(bounds, list) and len(bounds) == 2 and all(isinstance(bound, (int, float)) for bound in bounds)))):
                raise UserError(f"{path}: expected a difference and an interval for each source in 'leak_check', found "
                                f"{shown(repr(group))}. Run controls.py for that folder again")
    return found["leak_check"]


def cell(value, interval=None, digits=2):
    """A number with its interval for the table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def print_table(result):
    """The table on standard output, Markdown, one row a condition; below it the spread over shuffles and the leak check, if any."""
    rows, leaks = result["rows"], result["leak_check"]
    domains, body = list(rows[0]["by_domain"]), []
    for row in rows:
        difference, bits = row["difference"] or {}, row["usable_bits"] or {}
        body.append([row["condition"], str(row["overall"]["n"]), cell(row["overall"]["score"], row["overall"]["interval"]),
                     *(cell(row["by_domain"][name]["score"]) for name in domains),
                     cell(difference.get("difference"), difference.get("interval")), cell(difference.get("p"), digits=4),
                     cell(bits.get("mean"), bits.get("interval")), row["verdict"]])
    print(markdown(["condition", "n", "score", *domains, "matched minus it", "p", "usable bits", "verdict"], body))
    if found := result["spread"]:
        print(f"shuffled over {found['repeats']} seeds: mean {found['mean']:.2f}, standard deviation {found['sd']:.2f}, from "
              f"{found['low']:.2f} to {found['high']:.2f}; separated from matched in {found['separated']} of {found['repeats']}\n")
    if leaks:
        body = []
        for name in sorted({name for column in leaks.values() for name in column}):
            groups = [column.get(name, {}) for column in leaks.values()]
            body.append([name, *(cell(group.get("difference"), group.get("interval")) for group in groups)])
        print(markdown(["leak check, per source", *leaks], body))


def markdown(header, body):
    """A Markdown table; control characters and markup in names are made harmless."""
    cell = lambda text: re.sub(r"([|\\`*<]|\](?=[(\[]))", r"\\\1", shown(text, 120))
    lines = [map(cell, header), ["---"] * len(header), *(map(cell, line) for line in body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# ---- the rate curve ----
def default_budgets(dim):
    """Transforms to try: the first 64, 128, 256, ... dimensions and random projections to as many, below `dim`; int8; binary; all of it."""
    sizes = [64 * 2 ** power for power in range(20) if 64 * 2 ** power < dim] or [max(1, dim // 4), max(1, dim // 2)]
    return [f"{kind}:{size}" for kind in ("truncate", "random") for size in dict.fromkeys(sizes)] + ["binary", "int8", "none"]


def run_curve(args):
    """How many bytes does the answer need? One readout a budget, trained and scored on the same vectors; text_only stands at 0 bytes.

    A budget is a --transform of train_decoder.py: truncate:D, random:D, int8, binary, none, or several joined by +. The readout is trained
    on what is left of the vector, so the curve shows what the bytes hold, not how a readout of full vectors suffers.
    """
    read_items(args.items, args.limit)
    meta = read_embeddings(args.embeddings)[2]
    budgets = {"text_only": None, **{budget.replace(":", "-"): budget for budget in args.budgets or default_budgets(meta["dim"])}}
    os.makedirs(args.out, exist_ok=True)
    base, common = base_inputs(args, None), flags_of(vars(args), ["seed", "limit", "dtype"])
    failed = list(read_failed(args.failed).values())
    for condition, budget in budgets.items():
        before, given = len(args.commands), args.text_only_readout if budget is None else None
        if given:
            check_text_only(args)
        plan = (hashes_of_readout(given) if given else fit_plan(args, "--no-embedding", *common) if budget is None else
                fit_plan(args, "--transform", budget.replace("+", ","), *common))
        if finished(args, condition, {**base, "plan": plan}):
            continue
        folder = given or fit(args, condition, plan)
        vectors = ["--no-embedding"] if budget is None else ["--embeddings", args.embeddings]
        predict(args, [condition], "--readout", folder, *vectors, failed=failed)
        mark_finished(args, condition, {**base, "plan": plan}, args.commands[before:],
                      bytes=read_json(os.path.join(folder, "readout.json"))["bytes_per_embedding"] if budget else 0)
    pairs = [(condition, "text_only") for condition in budgets if condition != "text_only"]
    report = score(args, budgets, pairs + [("none", condition) for condition in budgets if condition != "none" and "none" in budgets])
    points = []
    for condition, budget in budgets.items():
        row = table_row(args, condition, report, "none")
        bits = row["usable_bits"] or {}
        points.append({**row, "budget": budget or condition, "family": family_of(budget), "score": row["overall"]["score"],
                       "score_interval": row["overall"]["interval"], "bits": bits.get("mean"), "bits_interval": bits.get("interval"),
                       "bytes": read_json(os.path.join(args.out, f"{condition}.inputs.json"))["bytes"]})
    points.sort(key=lambda point: (point["bytes"], point["budget"]))
    title = f"{meta['embedder']}, {meta['mode']}: how many bytes does the answer need? (n = {points[0]['overall']['n']})"
    write_json(os.path.join(args.out, "curve.json"), {
        "format_version": FORMAT_VERSION, "command": "curve", "embedder": meta["embedder"], "mode": meta["mode"], "points": points,
        "seed": args.seed, "limit": args.limit, "inputs": base, "argv": sys.argv})
    text = plot_svg([point for point in points if point["bytes"]], points[0]["score"], title)  # points[0] is text_only, at 0 bytes
    write_atomic(os.path.join(args.out, "curve.svg"), lambda file: file.write(text.encode()))
    body = []
    for point in points:
        difference = point["difference"] or {}
        body.append([point["budget"], str(point["bytes"]), cell(point["score"], point["score_interval"]),
                     cell(point["bits"], point["bits_interval"]), cell(difference.get("difference"), difference.get("interval")),
                     cell(difference.get("p"), digits=4), point["verdict"]])
    print(markdown(["budget", "bytes per vector", "score", "usable bits", "full vector minus it", "p", "verdict"], body))
    print(f"plot: {os.path.join(args.out, 'curve.svg')}")


def family_of(budget):
    """Which line of the plot a budget belongs to."""
    kinds = [part.split(":")[0] for part in (budget or "text_only").split("+")]
    return {"none": "full", "truncate": "first"}.get(kinds[0], kinds[0]) if len(kinds) == 1 else "mixed"


# ---- raw_image: the only model that this script loads ----
def load_reference(args):
    """Load the vision-language model. Returns (model, tokenizer, encode); encode(image, question) gives the inputs of `generate`, one item.

    The Qwen-VL family's own processor needs torchvision for a video part that nobody uses here, so its inputs are put together by hand:
    its image processor on Pillow, its chat format, one image token per merged patch. Other models come with AutoProcessor.
    """
    global torch, transformers                          # imported here because they cost seconds and only raw_image needs them
    import torch
    import transformers
    steady_math()
    for name, version in (("Python", platform.python_version()), ("torch", torch.__version__), ("transformers", transformers.__version__)):
        if not version.startswith(TESTED[name]):
            print(f"note: {name} {version} is untested here (tested: {TESTED[name]}x)", file=sys.stderr)
    folder, device = args.reference_model, args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = args.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    try:
        own = {"trust_remote_code": False}              # never a question on the terminal whether the folder's code may run
        config = transformers.AutoConfig.from_pretrained(folder, **own)
        model, loading = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True, **own)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **own)
        by_hand = config.model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
        processor = (transformers.Qwen2VLImageProcessorPil if by_hand else transformers.AutoProcessor).from_pretrained(
            folder, **({} if by_hand else own))
    except Exception as error:                          # each of its files has a reader of its own, with errors of its own
        raise UserError(f"{folder}: cannot load this reference model ({shown(error, 300)}). --reference-model takes a hub id, or a local "
                        "folder with config, safetensors, tokenizer and image processor, and no code of its own") from None
    if bad := [name for name in loading["missing_keys"] if name != "lm_head.weight"] or list(loading["mismatched_keys"]):
        raise UserError(f"{folder}: {len(bad)} weights are missing or misshapen, first {shown(bad[0])}; a half random model is no ceiling")
    model.to(device).eval()
    return model, tokenizer, (qwen_encoder(folder, config, processor, tokenizer) if by_hand else other_encoder(processor))


def qwen_encoder(folder, config, processor, tokenizer):
    """Inputs for one image and one question in the Qwen-VL format: no system turn, the image, then the question without a separator."""
    # size= is ignored when the saved configuration has min_pixels and max_pixels, so the two are passed by name and checked
    low, merge = processor.size["shortest_edge"], config.vision_config.spatial_merge_size
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder, min_pixels=min(low, RAW_IMAGE_MAX_PIXELS),
                                                                      max_pixels=RAW_IMAGE_MAX_PIXELS)
    if processor.size["longest_edge"] != RAW_IMAGE_MAX_PIXELS:
        raise UserError(f"{folder}: expected the image processor to take at most {RAW_IMAGE_MAX_PIXELS} pixels, found {processor.size}")

    def ids(text, special):                             # a question's "<|im_end|>" is text and must not end the turn
        return tokenizer(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]

    def encode(image, question):
        if max(image.size) > 200 * min(image.size):     # the processor refuses such strips; grey padding keeps every pixel
            from PIL import ImageOps
            side = -(-max(image.size) // 200)
            image = ImageOps.pad(image, (max(image.width, side), max(image.height, side)), color=(BLANK_GREY,) * 3)
        pixels = processor(images=[image], return_tensors="pt")
        count = int(pixels["image_grid_thw"].prod()) // merge ** 2
        tokens = torch.tensor([
            ids("<|im_start|>user\n<|vision_start|>", True) + [config.image_token_id] * count + ids("<|vision_end|>", True)
            + ids(question, False) + ids("<|im_end|>\n<|im_start|>assistant\n", True)])  # (1, T)
        types = (tokens == config.image_token_id).long()
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "mm_token_type_ids": types, **pixels}
    return encode


def other_encoder(processor):
    """Inputs from a model's own processor and chat template; larger images are scaled down to the same cap first."""
    def encode(image, question):
        scale = math.sqrt(RAW_IMAGE_MAX_PIXELS / (image.width * image.height))
        if scale < 1:
            image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))), 3)  # 3: bicubic
        text = processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}],
                                             add_generation_prompt=True)
        return processor(images=[image], text=[text], return_tensors="pt")
    return encode


def answer_from_images(args, items, inputs):
    """Write OUT/raw_image.jsonl: the reference model reads image and question and answers greedily, one item at a time.

    Each answer is added to a .partial file as it comes, so a killed run goes on from there while its inputs are the same.
    """
    path, header, done = os.path.join(args.out, "raw_image.jsonl"), json.dumps(inputs), []
    if os.path.exists(f"{path}.partial"):
        with open(f"{path}.partial", encoding="utf-8", errors="replace") as file:
            first, *lines = file.read().split("\n")[:-1] or [""]  # what follows the last line end is torn
        if first == header:
            for line in lines[: len(items)]:            # answers are in the items' order, so what follows a damaged one is asked again
                if (found := unsealed(line)) is None:
                    break
                done.append(found)
    write_jsonl(f"{path}.partial", [inputs, *map(sealed, done)])
    started, model = time.time(), None
    from tqdm import tqdm
    for number in tqdm(range(len(done), len(items)), initial=len(done), total=len(items), desc="raw_image", disable=None, file=sys.stderr):
        if model is None:
            model, tokenizer, encode = load_reference(args)
        item = items[number]
        batch = {name: value.to(model.device) for name, value in encode(open_image(args.images, item["image"]), item["question"]).items()}
        batch = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in batch.items()}
        with torch.inference_mode():
            tokens = model.generate(**batch, do_sample=False, max_new_tokens=args.max_new_tokens or 32)
        text = tokenizer.decode(tokens[0, batch["input_ids"].shape[1]:], skip_special_tokens=True)
        done.append({"id": item["id"], "prediction": text, "condition": "raw_image", "answer_bits": None, "answer_tokens": None})
        try:
            with open(f"{path}.partial", "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps(sealed(done[-1]), ensure_ascii=False) + "\n")
        except OSError as error:
            raise cannot_write(f"{path}.partial", error) from error
    write_jsonl(path, done)
    write_json(os.path.join(args.out, "raw_image.meta.json"), {
        "format_version": FORMAT_VERSION, "embedder": None, "mode": None, "condition": "raw_image", "readout_sha256": None,
        "reference_model": args.reference_model, "max_pixels": RAW_IMAGE_MAX_PIXELS, "items_sha256": sha256(args.items),
        "limit": args.limit, "predictions_sha256": sha256(path), "argv": sys.argv, "seconds": round(time.time() - started, 1)})
    os.remove(f"{path}.partial")


# ---- the curve's plot: SVG by hand, no package ----
FAMILIES = {                                            # name: colour, marker (told apart without colour), label
    "full": ("#111827", "M-5 0 0-5 5 0 0 5Z", "full vector"), "first": ("#2563eb", "M-4-4H4V4H-4Z", "first d dimensions"),
    "random": ("#d97706", "M0-5 5 4H-5Z", "random projection"), "int8": ("#059669", "M0 5 5-4H-5Z", "int8"),
    "binary": ("#b91c1c", "M-5-5 5 5M-5 5 5-5", "binary signs"), "mixed": ("#7c3aed", "M-5 0H5M0-5V5", "combined")}


def plot_svg(points, floor, title):
    """Draw score and usable bits against bytes per vector (log scale), with 95% intervals. Returns the SVG's text.

    points: dicts with budget, family, bytes, score, score_interval, bits, bits_interval (None where unknown); floor: the text-only score.
    """
    from xml.sax.saxutils import escape
    svg = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 420" font-family="sans-serif" font-size="12" fill="#374151">',
           f'<title>{escape(title)}</title><rect width="960" height="420" fill="#ffffff"/>',
           f'<text x="62" y="24" font-size="15">{escape(title)}</text>']
    panels = [("score", "score (0-100)", floor, 62), ("bits", "usable information (bits per answer)", 0.0, 532)]
    for name, label, base, left in panels:
        if known := [point for point in points if point[name] is not None]:
            svg += panel_svg(known, name, label, base, left)
    for place, family in enumerate([family for family in FAMILIES if any(point["family"] == family for point in points)]):
        svg += [marker_svg(family, 70 + 150 * place, 400), f'<text x="{82 + 150 * place}" y="404">{FAMILIES[family][2]}</text>']
    return "\n".join([*svg, "</svg>"]) + "\n"


def marker_svg(family, x, y, title=""):
    """One marker at (x, y); a pointer that rests on it shows `title`."""
    colour, path, _ = FAMILIES[family]
    return f'<path d="{path}" transform="translate({x:.1f} {y:.1f})" fill="{colour}" stroke="{colour}" stroke-width="1.5">{title}</path>'


def panel_svg(points, name, label, base, left, top=56, width=380, height=270):
    """One panel: grid, the dashed text-only line at `base`, a line for each family, markers with intervals. Returns a list of elements."""
    from xml.sax.saxutils import escape
    values = [value for point in points for value in (point[name], *(point[f"{name}_interval"] or ()))] + [base]
    margin = (max(values) - min(values)) * 0.08 or 1.0
    low, high = min(values) - margin, max(values) + margin
    sizes = [math.log2(point["bytes"]) for point in points]
    first, last = min(sizes) - 0.4, max(sizes) + 0.4

    def x(size):
        return left + (math.log2(size) - first) / (last - first) * width

    def y(value):
        return top + (high - value) / (high - low) * height
    svg, step = [f'<text x="{left}" y="{top - 10}">{label}</text>'], tick_step(high - low)
    for tick in [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]:
        svg += [f'<path d="M{left} {y(tick):.1f}h{width}" stroke="#e5e7eb"/>',
                f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>']
    for power in range(math.ceil(first), math.floor(last) + 1, max(1, round((last - first) / 8))):
        svg.append(f'<text x="{x(2 ** power):.1f}" y="{top + height + 18}" text-anchor="middle">{2 ** power}</text>')
    svg += [f'<text x="{left + width / 2}" y="{top + height + 36}" text-anchor="middle">bytes per vector (log scale)</text>',
            f'<path d="M{left} {top}v{height}h{width}" fill="none" stroke="#9ca3af"/>',
            f'<path d="M{left} {y(base):.1f}h{width}" stroke="#6b7280" stroke-dasharray="5 4"/>',
            f'<text x="{left + width - 4}" y="{y(base) - 5:.1f}" text-anchor="end">text only, 0 bytes</text>']
    for family, (colour, _, _) in FAMILIES.items():
        line = sorted((point for point in points if point["family"] == family), key=lambda point: point["bytes"])
        if len(line) > 1:
            path = " ".join(f"{x(point['bytes']):.1f},{y(point[name]):.1f}" for point in line)
            svg.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for point in line:
            place, text = x(point["bytes"]), f"<title>{escape(point['budget'])}: {point['bytes']} bytes, {point[name]:.2f}</title>"
            if bounds := point[f"{name}_interval"]:
                svg.append(f'<path d="M{place:.1f} {y(bounds[0]):.1f}V{y(bounds[1]):.1f}" stroke="{colour}"/>')
            svg.append(marker_svg(family, place, y(point[name]), text))
    return svg


def tick_step(span):
    """A round distance (1, 2 or 5 times a power of ten) that gives about five ticks over `span`."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 6)


def parse_args(argv=None):
    """The command line, checked as far as it can be without opening a file."""
    parser = argparse.ArgumentParser(prog="controls.py", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {"run": commands.add_parser("run", help="the controls of one embedder and mode", allow_abbrev=False),
               "curve": commands.add_parser("curve", help="score and usable bits against bytes per vector", allow_abbrev=False)}
    for name, sub in parsers.items():
        add, curve = sub.add_argument, name == "curve"
        add("--items", required=True, metavar="F.jsonl", help="items to predict and score")
        add("--embeddings", required=True, metavar="PREFIX", help="embedding trio of these items")
        add("--out", required=True, metavar="DIR", help="output folder; finished conditions in it are kept if their inputs are the same")
        add("--train-items", required=curve, metavar="F.jsonl", help="training items, for a readout trained here")
        add("--train-embeddings", required=curve, metavar="PREFIX", help="embedding trio of the training items")
        add("--dev-items", required=curve, metavar="F.jsonl", help="development items, for a readout trained here")
        add("--dev-embeddings", required=curve, metavar="PREFIX", help="embedding trio of the development items")
        add("--decoder", required=curve, metavar="HUB_ID_OR_DIR", help="causal language model that a readout trained here starts from")
        add("--text-only-readout", metavar="DIR", help="readout trained with fit --no-embedding (default: train it here)")
        add("--fit-flags", default="", metavar="TEXT", help="more flags for train_decoder.py fit, in one quoted text, for " + (
            "every budget" if curve else "text_only, after those of the readout under test") + " (default: none)")
        add("--failed", metavar="F.jsonl", help="items that extraction skipped, PREFIX.failed.jsonl (default: none)")
        add("--seed", type=int, default=0, help="seed of " + ("training" if curve else "shuffles, noise") + " and scoring (default: 0)")
        add("--limit", type=positive, metavar="N", help="use the first N items" + (" of each file" if curve else "") + " (default: all)")
        add("--max-new-tokens", type=positive, metavar="N", help="longest prediction in tokens (default: that of predict)")
        add("--batch-tokens", type=positive, metavar="T", help="largest batch in padded tokens (default: that of predict)")
        add("--bootstrap", type=positive, metavar="N", help="resamples for intervals and p (default: that of evaluate.py)")
        add("--device", metavar="D", help="cpu, cuda, cuda:1, ... (default: a CUDA GPU where there is one)")
        add("--dtype", choices=("float32", "bfloat16"), help="arithmetic of the models (default: bfloat16 on a GPU, float32 on a CPU)")
    add = parsers["run"].add_argument
    add("--readout", required=True, metavar="DIR", help="the readout under test")
    add("--controls", default=DEFAULT_CONTROLS, metavar="LIST", help=f"some of {', '.join(CONTROLS)}, joined by commas "
        f"(default: {DEFAULT_CONTROLS})")
    add("--repeats", type=positive, default=1, metavar="R", help="number of shuffles, with seeds --seed, --seed + 1, ... (default: 1)")
    add("--embedder", metavar="NAME", help="question_vector: extract.py's name of the embedder (default: the one in the sidecar)")
    add("--model", metavar="HUB_ID_OR_DIR", help="question_vector: the embedder's weights (default: those in the sidecar)")
    add("--extract-flags", default="", metavar="TEXT", help="question_vector: more flags for extract.py, one quoted text (default: none)")
    add("--question-embeddings", metavar="PREFIX", help="question_vector: trio of the questions with a blank image, key id "
        "(default: extract it)")
    add("--images", metavar="DIR", help="question_vector, raw_image: folder that the items' image paths are relative to")
    add("--reference-model", metavar="HUB_ID_OR_DIR", help="raw_image: vision-language model, for example Qwen/Qwen3-VL-2B-Instruct")
    add("--visual-only-run", metavar="DIR", help="leak check: --out of the visual-only run of the same embedder (default: none)")
    parsers["curve"].add_argument("--budgets", metavar="LIST", help="some of truncate:D, random:D, int8, binary, none, joined by commas, "
                                  "or by + for one budget (default: truncate and random to 64, 128, ..., binary, int8, none)")
    args = parser.parse_args(argv)
    args.commands = []                                  # the exact commands of the run, in order
    args.device = None if args.device == "auto" else args.device
    check_args(parser, args)
    return args


def check_args(parser, args):
    """End with status 2 where the command line contradicts itself or a control lacks a flag that it needs."""
    for name, value in vars(args).items():
        if value == "" and parser.get_default(name) != "" and not name.endswith("_flags"):
            parser.error(f"--{name.replace('_', '-')}: expected a name, found an empty text (a variable that is not set?)")
        if name.endswith("_flags"):
            try:
                shlex.split(value or "")
            except ValueError as error:
                parser.error(f"--{name.replace('_', '-')}: {error}")
    if not 0 <= args.seed < 2 ** 32 or args.bootstrap and not 100 <= args.bootstrap <= 1_000_000:
        parser.error("--seed is a whole number from 0 to 4,294,967,295, --bootstrap one from 100 to 1,000,000")
    if args.command == "curve":
        args.budgets = None if args.budgets is None else args.budgets.split(",")
        good = {budget for budget in args.budgets or [] if re.fullmatch(BUDGET, budget)}
        if len(good) < len(args.budgets or []):
            parser.error("--budgets: expected different ones of truncate:D, random:D[:SEED], int8, binary, none, or several joined by +")
        return
    args.controls = args.controls.split(",")
    if unknown := [name for name in args.controls if name not in CONTROLS]:
        parser.error(f"--controls: unknown {', '.join(map(repr, unknown))}; known are {', '.join(CONTROLS)}")
    if len(set(args.controls)) < len(args.controls):
        parser.error("--controls: names a control twice")
    needs = {"mean": ["train_embeddings"], "noise": ["train_embeddings"], "raw_image": ["images", "reference_model"],
             "text_only": [] if args.text_only_readout else ["train_items", "dev_items", "decoder"],
             "question_vector": [] if args.question_embeddings else ["images"]}
    instead = {"text_only": ", or --text-only-readout", "question_vector": ", or --question-embeddings"}
    for name in args.controls:
        if missing := [f"--{flag.replace('_', '-')}" for flag in needs.get(name, []) if getattr(args, flag) is None]:
            parser.error(f"--controls {name} needs {' and '.join(missing)}{instead.get(name, '')}")


def positive(text):
    """argparse type: a whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def main(argv=None):
    """Run the command under a lock on OUT, so that two runs cannot mix their conditions."""
    args = parse_args(argv)
    print(f"arguments: {json.dumps({name: value for name, value in vars(args).items() if name != 'commands'})}", file=sys.stderr)
    with locked(args.out):
        (run_controls if args.command == "run" else run_curve)(args)


if __name__ == "__main__":
    run(main, "Finished conditions are kept; give the same command again to go on")
