"""Step 1: what vector does a frozen multimodal embedder give for an image, or for an image with a question?

    python extract.py --embedder qwen3-vl-embedding-2b --mode vl_joint --items test.jsonl --images images/ --out vectors/test-joint
    python extract.py --embedder clip --mode visual_only --items test.jsonl --images images/ --out vectors/test-clip --model FOLDER
    torchrun --nproc-per-node 8 extract.py ... --out PREFIX && python extract.py --merge 8 --out PREFIX     # each rank takes its shard

READS   items, one JSON object a line (id, image, question, answers, source, domain), and the images folder that `image` is relative
        to; a model from the hub, or a local folder in its published layout: config.json, *.safetensors, tokenizer.json,
        preprocessor_config.json.
WRITES  PREFIX.npy        (N, D) float32, every row of length 1, item order
        PREFIX.ids.txt    line i names row i: the item's `image` in visual_only (each image once), its `id` in vl_joint
        PREFIX.meta.json  last: embedder, mode, key, dim, normalized, dtype, prompt as sent, pooling, pixel limits, weights_sha256 ...
        PREFIX.failed.jsonl  with --on-error skip: one line for each item left out (id, image, error), empty when none was
GUARANTEES  One batch plan from the whole item list and the flags. Shards take whole planned batches and a killed run redoes whole
        planned batches, so on a CPU (same thread count, same versions) a resumed or merged result has the bytes of an unbroken one.
        PREFIX.partial.* is the resume state; give the same command again. On CUDA expect cosines of 0.999 between batch sizes.
        Images: first frame, EXIF rotation applied, transparency on white, 16 bit scaled to 8. Sides in a ratio above 200 are refused
        (vlm2vec-v2 makes them square as its authors do, clip takes up to 1000, siglip any). Unreadable or truncated files and
        prompts over the model's length are refused with their name, never cut (the text towers of --fuse sum do, and `question_cut` in
        the sidecar counts it). Text is text: <|im_end|>, <|image_pad|> or <emb> in a question are spelled out as ordinary characters,
        because questions go through a tokenizer that knows no special token. Images of other file sizes count as other settings.
        Exit status: 0 done, 1 failed, 2 wrong command line, 130 interrupted.
TIME    One 640x480 image with a question costs about 2 TFLOP with a 2B model. Memory does not grow with N, except for the keys.
REUSE   Copy this file alone. It needs Python 3.11, numpy >= 2, pillow >= 11, tqdm, torch >= 2.6, transformers >= 5.24 (which brings
        tokenizers, safetensors and huggingface_hub). No torchvision, no peft, no code from a model's folder.
"""
import argparse
import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import platform
import re
import shutil
import sys
import time
import types
import unicodedata
import zlib
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

TESTED = {"python": "3.11", "torch": "2.13", "transformers": "5.24"}
MAX_PADDING = 0.10                                      # share of padded tokens that a planned batch may have
EMBED_RL_MAX_CHARS = 512                                # the authors' script cuts the question there

# ---- the embedders: prompt, pooling and pixel limits of all of them ------------------------------------------------------------------
# In a prompt, <|...|>, <emb>, <disc_emb> and <gen_emb> are real tokens, {instruction} and {text} are plain text; <|image_pad|> stands for
# as many tokens as the image has. {text} is made by the function in `text` from the instruction and the question (None in visual_only).
LOOK = "Represent the given image."
ASK = "Represent the given image with the following question:"
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
UME_THINK = ("Represent the above input text, images, videos, or any combination of the three as embeddings. \n"
             "First output the thinking process in <think> </think> tags and then summarize the entire input in a word or sentence. \n"
             "Finally, use the <gen_emb> tag to represent the entire input.")


def question_alone(instruction, question):
    """The question as it is."""
    return question or ""


def question_after_instruction(instruction, question):
    """Instruction, space, question; an empty question keeps the space."""
    return instruction if question is None else f"{instruction} {question}"


def question_vlm2vec(instruction, question):
    """As above, but no space before an empty question, and space-newline becomes newline, in the question too (VLM2Vec evaluation code)."""
    return (f"{instruction} {question}" if question else instruction).replace(" \n", "\n")


@dataclass(frozen=True)
class Embedder:
    """One row of the table. `pool`: the output that is the vector, or the token whose state after the final norm it is."""
    family: str                                         # model_type in config.json
    hub: str
    pool: str
    prompt: str = ""
    text: object = question_alone
    instruction: tuple = ("", "")                       # visual_only, vl_joint
    pixels: tuple = None                                # least and most pixels after resizing; None: the size in preprocessor_config.json
    max_tokens: int = 32768
    positions: str = "3d"                               # '1d': the authors' code gave image tokens plain text positions


QWEN3 = dict(family="qwen3_vl", pool="last", pixels=(4 * 32 * 32, 1800 * 32 * 32), max_tokens=8192,
             instruction=("Represent the user's input.",) * 2,
             prompt="<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n" + VISION + "{text}<|im_end|>\n"
                    "<|im_start|>assistant\n")
UME = dict(family="qwen2_vl", pool="<disc_emb>", pixels=(784, 2359296), instruction=(LOOK, ASK), text=question_after_instruction,
           prompt="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n" + VISION + "{text}\n<disc_emb>\n"
                  "<|im_end|>\n<|im_start|>assistant\n")
EMBED_RL = dict(family="qwen3_vl", pool="<emb>", pixels=(128 * 32 * 32, 768 * 32 * 32),
                prompt="<|im_start|>user\n" + VISION + "{text}Summarize the above content in one word:<|im_end|>\n"
                       "<|im_start|>assistant\n<emb><|im_end|>\n")
EMBEDDERS = {
    "clip": Embedder("clip", "openai/clip-vit-large-patch14-336", "image_embeds"),
    "siglip": Embedder("siglip", "google/siglip-so400m-patch14-384", "pooler_output"),
    "qwen3-vl-embedding-2b": Embedder(hub="Qwen/Qwen3-VL-Embedding-2B", **QWEN3),
    "qwen3-vl-embedding-8b": Embedder(hub="Qwen/Qwen3-VL-Embedding-8B", **QWEN3),
    "vlm2vec-v2": Embedder("qwen2_vl", "Qwen/Qwen2-VL-2B-Instruct", "last", "<|image_pad|>\n{text}\n", question_vlm2vec, (LOOK, ASK),
                           (4 * 28 * 28, 1280 * 28 * 28), positions="1d"),
    "ume-r1-2b": Embedder(hub="zhibinlan/UME-R1-2B", **UME),
    "ume-r1-7b": Embedder(hub="zhibinlan/UME-R1-7B", **UME),
    "embed-rl-2b": Embedder(hub="ZoengHouNaam/Embed-RL-2B", **EMBED_RL),
    "embed-rl-4b": Embedder(hub="ZoengHouNaam/Embed-RL-4B", **EMBED_RL),
}
VLM2VEC_ADAPTER = "VLM2Vec/VLM2Vec-V2.0"
POOLING = {"image_embeds": "image_embeds (projected CLS)", "pooler_output": "pooler_output (attention pool)",
           "last": "final-norm state of the last token", "<gen_emb>": "final-norm state at the last generated <gen_emb>"}


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


# ---- files of a model ----------------------------------------------------------------------------------------------------------------
def load_libraries():
    """Import torch and transformers, after the command line was read: they take seconds, and --help should not."""
    global torch, tokenizers, transformers
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")      # the image workers are forked
    import tokenizers
    import torch
    import transformers
    transformers.logging.set_verbosity_error()                    # its table of unused weights; check_loaded reads the same facts
    transformers.utils.logging.disable_progress_bar()
    steady_math()
    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    for name, version in found.items():
        if version.split(".")[0] != TESTED[name].split(".")[0] or (name == "python" and not version.startswith(TESTED[name])):
            print(f"note: {name} {version} is untested here (tested: {TESTED[name]})", file=sys.stderr)
    return {**found, "numpy": np.__version__, "tokenizers": tokenizers.__version__}


def model_folder(name, revision, flag, wanted=("*.json", "*.safetensors", "*.txt", "*.jinja")):
    """The local folder of a model and its revision (None for a folder given as such); a hub id is downloaded into the hub's own cache."""
    if os.path.isdir(name):
        if revision:
            raise UserError(f"--revision {shown(revision)}: {name} is a folder, a revision is for a hub id. Leave it out")
        return name, None
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"{name}: no such folder ({flag}). Give a folder in the published layout, or a hub id (owner/name)")
    from huggingface_hub import snapshot_download
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(wanted))
        if not weight_files(folder, missing_ok=True):             # older repositories hold only pytorch_model.bin
            folder = snapshot_download(name, revision=revision, allow_patterns=[*wanted, "pytorch_model*.bin"])
    except Exception as error:
        raise UserError(f"{name}: no such folder, and the hub did not give it ({shown(type(error).__name__)}: {shown(error, 200)}). "
                        f"Check the name, or download it elsewhere and give the folder with {flag}") from error
    return folder, os.path.basename(os.path.normpath(folder))     # the hub cache names a snapshot's folder by its commit


@contextlib.contextmanager
def blamed(folder):
    """What we, tokenizers or transformers trip over while a model's files are read or used is a UserError that names its folder."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, re.error) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(f"{folder}: something in its configuration, tokenizer or weights does not fit ({type(error).__name__}: "
                        f"{shown(error, 300)}). Compare it with the published files, or download it again") from error


def weight_files(folder, missing_ok=False):
    """Names of a folder's weight files: safetensors, else pytorch_model*.bin (read by torch's weights-only loader, which runs no code)."""
    names = sorted(os.listdir(folder))
    adapter = "adapter_config.json" in names                      # a base model's folder may hold a stray adapter, which is not loaded
    files = ([name for name in names if name.endswith(".safetensors") and name.startswith("adapter_model") == adapter] or
             [name for name in names if re.fullmatch(r"pytorch_model.*\.bin", name)])
    if missing_ok:
        return files
    if not files:
        raise UserError(f"{folder}: no *.safetensors and no pytorch_model.bin in this folder. Give the folder that holds the weights")
    index = os.path.join(folder, f"{'model.safetensors' if files[0].endswith('.safetensors') else 'pytorch_model.bin'}.index.json")
    listed = read_json(index).get("weight_map", {}) if os.path.exists(index) else {}
    for name in sorted({str(name) for name in listed.values()} - {*files}):       # what is loaded is what is hashed
        raise UserError(f"{index}: lists {shown(name)}, which is no file of this folder ({', '.join(files[:3])}, ...). Download it again")
    return files


def weights_sha256(folders):
    """One hash for all weight files: what `sha256sum FILES | sha256sum` prints inside the folder (the adapter's files after the base's)."""
    lines = [f"{sha256(os.path.join(folder, name))}  {name}\n" for folder in folders for name in weight_files(folder)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def config_sha256(folders):
    """The same for the small files that shape a vector too: configuration, tokenizer, preprocessor."""
    lines = [f"{sha256(os.path.join(folder, name))}  {name}\n" for folder in folders for name in sorted(os.listdir(folder))
             if name.endswith((".json", ".txt", ".jinja")) and os.path.isfile(os.path.join(folder, name))]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_loaded(folder, info, harmless_missing, harmless_unexpected):
    """Stop unless every weight of the model came from the files and every weight of the files was used, beyond the known harmless ones."""
    wrong = {"missing": [key for key in info["missing_keys"] if not re.search(harmless_missing, key)],
             "unexpected": [key for key in info["unexpected_keys"] if not re.search(harmless_unexpected, key)],
             "of another shape": list(info["mismatched_keys"]), "unreadable": list(info.get("error_msgs") or [])}
    for what, keys in wrong.items():
        if keys:
            raise UserError(f"{folder}: {len(keys)} weights {what}, first {shown(sorted(map(str, keys))[0])}. Expected the published "
                            "layout, every weight used; check --model and --embedder")


def load_model(recipe, folder, adapter, dtype, device, text_tower, head, sides):
    """The model in eval mode on `device`, every weight accounted for. `head`: its output layer is used, so it may not be missing either."""
    kind = {"clip": "CLIPModel" if text_tower else "CLIPVisionModelWithProjection",
            "siglip": "SiglipModel" if text_tower else "SiglipVisionModel",
            "qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration"}[recipe.family]
    files = weight_files(folder)
    try:
        model, info = getattr(transformers, kind).from_pretrained(
            folder, dtype=torch.float32 if adapter else dtype, attn_implementation="sdpa", output_loading_info=True, local_files_only=True,
            use_safetensors=files[0].endswith(".safetensors"), trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{folder}: {kind} could not be loaded from {', '.join(files[:3])} ({type(error).__name__}: {shown(error, 300)}). "
                        "Download the folder again") from error
    unused = r"position_ids$|rotary_emb\.inv_freq$" + (r"|^text_model\.|^text_projection|^logit_(scale|bias)$" if not text_tower else "")
    check_loaded(folder, info, "$^" if head else r"^lm_head\.weight$", unused)      # vectors are taken below lm_head
    if adapter:
        merge_adapter(model, adapter)
    expected = getattr(model.config, "vision_config", model.config).image_size if not recipe.pixels else None
    if expected and sides != (expected, expected):
        raise UserError(f"{folder}: the model takes images of {expected}x{expected}, preprocessor_config.json makes {sides[0]}x{sides[1]}")
    if recipe.pixels:                                             # this convolution's kernel is its stride; as a product it is far faster
        proj = model.model.visual.patch_embed.proj
        proj.forward = lambda x: torch.nn.functional.linear(x.flatten(1), proj.weight.flatten(1), proj.bias)      # (P, D)
    return model.to(device, dtype).eval().requires_grad_(False)


def merge_adapter(model, folder):
    """Merge a LoRA or DoRA adapter into the model, in float32, without peft.

    LoRA: V = W + s B A with s = alpha / r (rslora: alpha / sqrt(r)). DoRA (arXiv 2402.09353): m V / |V|, norm over the input dimension.
    """
    from safetensors.torch import load_file
    config, path = read_json(os.path.join(folder, "adapter_config.json")), os.path.join(folder, "adapter_model.safetensors")
    for field, fine in (("fan_in_fan_out", False), ("bias", "none"), ("lora_bias", False), ("modules_to_save", None), ("rank_pattern", {}),
                        ("alpha_pattern", {}), ("layers_to_transform", None), ("layer_replication", None), ("peft_type", "LORA")):
        if config.get(field, fine) not in (fine, None, {}, []):
            raise UserError(f"{folder}/adapter_config.json: {field} = {shown(config[field])} is not handled here, expected {fine}")
    try:
        tensors = {key.removeprefix("base_model.model.").replace("magnitude_vector.weight", "magnitude_vector"): value.float()
                   for key, value in load_file(path).items()}
    except Exception as error:
        raise UserError(f"{path}: cannot read the adapter ({type(error).__name__}: {shown(error)}). Download it again") from error
    rank, alpha = config.get("r"), config.get("lora_alpha")
    ranks_found = {value.shape[0] for key, value in tensors.items() if key.endswith("lora_A.weight")}
    if type(rank) is not int or {rank} != ranks_found or type(alpha) not in (int, float) or not alpha > 0 or any(
            type(config.get(name, False)) is not bool for name in ("use_dora", "use_rslora")):
        raise UserError(f"{folder}/adapter_config.json: expected 'r' to be the rank of the tensors ({sorted(ranks_found)}), 'lora_alpha' a "
                        f"number above 0, 'use_dora' and 'use_rslora' true or false; found r {shown(rank)}, lora_alpha {shown(alpha)}, "
                        f"{shown(config.get('use_dora'))} and {shown(config.get('use_rslora'))}. Download it again")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    linears = [(key, module) for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    targets = config.get("target_modules")
    hit = (lambda key: re.fullmatch(targets, key)) if isinstance(targets, str) else (lambda key: key.split(".")[-1] in targets)
    for key, module in linears:
        if not hit(key):
            continue
        stem = key if f"{key}.lora_A.weight" in tensors else key.replace("model.language_model.", "model.")    # names before and after 4.52
        try:
            update = tensors.pop(f"{stem}.lora_B.weight") @ tensors.pop(f"{stem}.lora_A.weight")
            merged = module.weight.data.float() + scale * update
            if config.get("use_dora"):
                merged *= (tensors.pop(f"{stem}.lora_magnitude_vector") / merged.norm(dim=1))[:, None]
        except (KeyError, RuntimeError) as error:
            raise UserError(f"{path}: the adapter does not fit {key} of the base model ({shown(error)}). "
                            "Check that --model is the base that adapter_config.json names") from error
        module.weight.data = merged
    if tensors:
        raise UserError(f"{path}: {len(tensors)} adapter weights have no place in the base model, first {shown(sorted(tensors)[0])}. "
                        "Check that --model is the base that adapter_config.json names")


# ---- text to tokens ------------------------------------------------------------------------------------------------------------------
def load_prompt(folder, config, recipe, template, instruction):
    """Tokenise everything of the prompt but the question. Returns a namespace that `encode_texts` and `row_ids` use.

    Real special tokens of the template become ids. All other text goes through the folder's tokenizer with its added tokens taken out, so
    that no text can form one. Text between two special tokens is encoded in one piece, question included, so merges are as usual.
    """
    path = os.path.join(folder, "tokenizer.json")
    spec = read_json(path)
    special = {token["content"]: token["id"] for token in spec.get("added_tokens", [])}
    if os.path.exists(os.path.join(folder, "added_tokens.json")):
        special = {**read_json(os.path.join(folder, "added_tokens.json")), **special}
    if recipe.pool == "<emb>":                                    # the authors' script adds <emb> where the tokenizer lacks it
        row = (config.get("emb_token_ids") or [special.get("<emb>", max(special.values(), default=0) + 1)])[0]
        if "<emb>" not in special and not config.get("emb_token_ids"):
            print(f"note: neither tokenizer.json nor config.json of {folder} names <emb>; it is taken to be the next free id, {row}, as "
                  "the authors' script does. If this is not an Embed-RL model, its vectors mean nothing", file=sys.stderr)
        if special.setdefault("<emb>", row) != row:
            raise UserError(f"{folder}: <emb> is {special['<emb>']} in tokenizer.json but {row} in config.json (emb_token_ids)")
    rows, longest = (config.get("text_config", config).get(name, default) for name, default in zip(
        ("vocab_size", "max_position_embeddings"), {"clip": (49408, 77), "siglip": (32000, 64)}.get(recipe.family, (0, recipe.max_tokens))))
    end = {"clip": "<|endoftext|>", "siglip": "</s>"}.get(recipe.family)      # the text towers' last token, with --fuse sum
    for token in [*re.findall(r"<\|\w+\|>|<emb>|<disc_emb>|<gen_emb>", template), *([end] if end else [])]:
        if token not in special:
            raise UserError(f"{path}: the special token {token} is missing. Expected the tokenizer published with the model")
        if type(special[token]) is not int or not 0 <= special[token] < rows:
            raise UserError(f"{path}: expected a whole number below {rows} as the id of {token}, found {shown(repr(special[token]))}. "
                            "Expected the tokenizer published with the model")
    if "<|image_pad|>" in template and special["<|image_pad|>"] != config.get("image_token_id", special["<|image_pad|>"]):
        raise UserError(f"{folder}: <|image_pad|> is {special['<|image_pad|>']} in tokenizer.json but {config['image_token_id']} in "
                        "config.json (image_token_id)")
    spec.update(added_tokens=[], truncation=None, padding=None)
    try:
        plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:
        raise UserError(f"{path}: not a tokenizer ({shown(error)}). Download it again") from error
    prompt = types.SimpleNamespace(plain=plain, special=special, image=special.get("<|image_pad|>"), pad=special.get("<|endoftext|>", 0),
                                   end=special.get(end), head=[], tail=[], before=None, after=None,
                                   longest=min(longest, recipe.max_tokens))
    unknown = {spec["model"].get("unk_id"), special.get(spec["model"].get("unk_token"))}
    prompt.reserved = {number: token for token, number in special.items() if number not in unknown}
    for piece in re.split("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")" if special else "$^", template):
        parts = piece.split("{text}")
        ids = prompt.head if prompt.before is None else prompt.tail
        if piece in special:
            ids.append(special[piece])
        elif len(parts) == 2:
            prompt.before, prompt.after = (part.replace("{instruction}", instruction) for part in parts)
        elif piece:
            ids.extend(plain.encode(piece.replace("{instruction}", instruction), add_special_tokens=False).ids)
    return prompt


def encode_texts(prompt, texts):
    """Token ids of the piece of the prompt that holds the question, one list a text."""
    pieces = [prompt.before + text + prompt.after for text in texts]
    return [code.ids for code in prompt.plain.encode_batch(pieces, add_special_tokens=False)]


def row_ids(prompt, text_ids, image_tokens):
    """All token ids of one prompt and where its image tokens start. Returns (list of int, int)."""
    at = prompt.head.index(prompt.image)
    return prompt.head[:at] + [prompt.image] * image_tokens + prompt.head[at + 1:] + text_ids + prompt.tail, at


# ---- images to pixels ----------------------------------------------------------------------------------------------------------------
def load_processor(folder, config, recipe):
    """The folder's image processor (Pillow backend) with the recipe's pixel limits, checked. Only its numbers are used for Qwen models."""
    kind = {"clip": "CLIPImageProcessorPil", "siglip": "SiglipImageProcessorPil"}.get(recipe.family, "Qwen2VLImageProcessorPil")
    limits = dict(min_pixels=recipe.pixels[0], max_pixels=recipe.pixels[1]) if recipe.pixels else {}
    try:
        processor = getattr(transformers, kind).from_pretrained(folder, local_files_only=True, **limits)
    except Exception as error:
        raise UserError(f"{folder}: no usable preprocessor_config.json ({shown(error, 200)}). Download the folder again") from error
    asked = read_json(os.path.join(folder, "preprocessor_config.json")).get("size") if not limits else None
    found = {key: value for key, value in dict(processor.size).items() if value}
    if limits and found != {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}:
        raise UserError(f"{folder}: asked the image processor for {limits}, it uses {found}; this transformers is not usable here")
    vision = config.get("vision_config", config)
    for name, key in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size"), ("temporal_patch_size", "temporal_patch_size")):
        if recipe.pixels and getattr(processor, name) != vision.get(key, getattr(processor, name)):
            raise UserError(f"{folder}: {name} is {getattr(processor, name)} in preprocessor_config.json, but {key} is {vision[key]} in "
                            "config.json")
    numbers = [*processor.image_mean, *processor.image_std, processor.rescale_factor]
    crop = dict(processor.crop_size) if recipe.family == "clip" else {}
    if (not all(type(number) in (int, float) and math.isfinite(number) for number in numbers) or len(numbers) != 7
            or min(processor.image_std) <= 0 or not 0 < processor.rescale_factor <= 1 or processor.resample not in range(6)
            or not all((processor.do_resize, processor.do_rescale, processor.do_normalize))
            or crop and (not processor.do_center_crop or {*found.values()} != {crop["height"], crop["width"]})):
        raise UserError(f"{folder}/preprocessor_config.json: expected image_mean and image_std of three numbers, std and rescale_factor "
                        "above 0, a resample of 0 to 5, do_resize, do_rescale and do_normalize true, for CLIP do_center_crop true and "
                        f"crop_size equal to size; found {shown(numbers, 200)}, resample {shown(processor.resample)}, "
                        f"{[processor.do_resize, processor.do_rescale, processor.do_normalize]}, size {shown(found)}, crop {shown(crop)}. "
                        "Download it again")
    if isinstance(asked, dict) and found != asked or isinstance(asked, int) and asked not in found.values():
        raise UserError(f"{folder}: preprocessor_config.json asks for size {asked}, the image processor uses {found}")
    return processor


def target_size(recipe, processor, width, height):
    """Width and height after resizing, by qwen-vl-utils' rule: sides are multiples of patch x merge, pixels within the limits.

    VLM2Vec first: a side under 28 gives 56x56, a ratio above 200 a square of the longer side. ValueError where a model takes no such
    shape.
    """
    if recipe.family in ("clip", "siglip"):
        if recipe.family == "clip" and max(width, height) > 1000 * min(width, height):
            raise ValueError(f"its sides {width}x{height} are in a ratio above 1000, which fills the memory when the short side is resized")
        size = processor.crop_size if recipe.family == "clip" and processor.do_center_crop else processor.size
        return size["width"], size["height"]
    factor, (least, most) = processor.patch_size * processor.merge_size, recipe.pixels
    if recipe.positions == "1d":                                  # vlm2vec-v2
        if min(width, height) < 28:
            return 2 * factor, 2 * factor
        if max(width, height) > 200 * min(width, height):
            width = height = max(width, height)
    if max(width, height) > 200 * min(width, height):
        raise ValueError(f"its sides {width}x{height} are in a ratio above 200, which the model's authors do not embed")
    sides = [max(factor, round(side / factor) * factor) for side in (width, height)]
    if sides[0] * sides[1] > most:
        shrink = math.sqrt(width * height / most)
        sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height)]
    elif sides[0] * sides[1] < least:
        grow = math.sqrt(least / (width * height))
        sides = [math.ceil(side * grow / factor) * factor for side in (width, height)]
    return tuple(sides)


def image_tokens(recipe, processor, config, width, height):
    """Tokens that an image of this size takes in the model's longest sequence."""
    width, height = target_size(recipe, processor, width, height)
    if recipe.family in ("clip", "siglip"):
        patch = config.get("vision_config", config).get("patch_size", 14)
        return (width // patch) * (height // patch) + (recipe.family == "clip")
    return width * height // (processor.patch_size * processor.merge_size) ** 2


def image_size(folder, name):
    """(width, height) from the file's header. An unreadable file, or one outside the folder, gives the UserError of open_image."""
    from PIL import Image
    path = os.path.realpath(os.path.join(folder, name))
    if path.startswith(os.path.join(os.path.realpath(folder), "")) and os.path.isfile(path):    # a pipe would be waited for
        try:
            with Image.open(path) as image:
                return image.size
        except Exception:
            pass                                                  # open_image says what is wrong
    return open_image(folder, name).size


def prepare_image(recipe, processor, image):
    """RGB image to the uint8 pixels that the model sees: (H, W, 3) for Qwen models, (3, H, W) for CLIP and SigLIP."""
    if recipe.family in ("clip", "siglip"):
        return processor(images=image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
    return np.array(image.resize(target_size(recipe, processor, *image.size), resample=processor.resample))


class ImageBatches:
    """For torch's DataLoader: element b is ({image: uint8 pixels}, {image: error}) of planned batch b, each image decoded once."""

    def __init__(self, names, folder, prepare):
        self.names, self.folder, self.prepare = names, folder, prepare

    def __len__(self):
        return len(self.names)

    def __getitem__(self, b):
        pixels, errors = {}, {}
        for name in dict.fromkeys(self.names[b]):
            try:
                pixels[name] = self.prepare(open_image(self.folder, name))
            except UserError as error:                            # a worker cannot end the run; the loop does
                errors[name] = str(error)
            except (ValueError, MemoryError) as error:
                errors[name] = f"{os.path.join(self.folder, name)}: {error or 'no memory for it'}"
        return pixels, errors


# ---- model ---------------------------------------------------------------------------------------------------------------------------
def normalized_pixels(arrays, processor, device):
    """uint8 (..., 3, H, W) -> float32, times rescale_factor, minus mean, over standard deviation."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (processor.image_mean, processor.image_std))
    return arrays.to(device).float().mul_(processor.rescale_factor).sub_(mean).div_(std)


def patchify(arrays, processor, device):
    """Qwen's patches from (H, W, 3) uint8 arrays. Returns (pixel_values (P, 3*T*p*p), grid (B, 3) of patches: time, height, width)."""
    p, m, patches, grid = processor.patch_size, processor.merge_size, [], []
    for array in arrays:
        rows, columns = array.shape[0] // p, array.shape[1] // p
        x = torch.from_numpy(array).view(rows // m, m, p, columns // m, m, p, 3)
        patches.append(x.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, p, p))      # (P, 3, p, p), 2x2 neighbours side by side
        grid.append([1, rows, columns])
    pixels = normalized_pixels(torch.cat(patches), processor, device).unsqueeze(2)
    return pixels.expand(-1, -1, processor.temporal_patch_size, -1, -1).flatten(1), torch.tensor(grid, device=device)


def positions(length, start, rows, columns, flat):
    """Rotary positions (3, L): time, height, width. Text counts up; an image's tokens share one time step and count rows and columns.

    `flat` gives plain 1-D positions, as VLM2Vec-V2 was trained (its code looks for <|vision_start|> and its prompt has none).
    """
    result = np.tile(np.arange(length), (3, 1))
    if not flat:
        end = start + rows * columns
        result[0, start:end] = start
        result[1, start:end] = start + np.repeat(np.arange(rows), columns)
        result[2, start:end] = start + np.tile(np.arange(columns), rows)
        result[:, end:] += max(rows, columns) - rows * columns
    return result


def collate(rows, pad, side="right"):
    """Pad rows of (ids, positions) to one length. Returns ids (B, L), mask (B, L), positions (3, B, L), column of each first token (B,)."""
    length = max(len(ids) for ids, _ in rows)
    ids, mask = np.full((len(rows), length), pad), np.zeros((len(rows), length), int)
    place, offsets = np.zeros((3, len(rows), length), int), np.zeros(len(rows), int)
    for r, (row, where) in enumerate(rows):
        offsets[r] = length - len(row) if side == "left" else 0
        span = slice(offsets[r], offsets[r] + len(row))
        ids[r, span], mask[r, span], place[:, r, span] = row, 1, where
    return *(torch.from_numpy(x) for x in (ids, mask, place)), offsets


def hidden_states(e, rows, pixels, grid, side):
    """Final-norm states (B, L, D) of prompts with images, and each row's offset."""
    ids, mask, place, offsets = collate(rows, e.prompt.pad, side)
    expected = int((grid.prod(1) // e.processor.merge_size ** 2).sum())
    if int((ids == e.prompt.image).sum()) != expected:
        raise UserError(f"{int((ids == e.prompt.image).sum())} image placeholders for {expected} image features: please report this")
    states = e.model.model(input_ids=ids.to(e.device), attention_mask=mask.to(e.device), position_ids=place.to(e.device),
                           pixel_values=pixels, image_grid_thw=grid, use_cache=False).last_hidden_state
    return states, offsets


def embed_qwen(e, images, texts, side="right"):
    """Qwen family: B images (H, W, 3) uint8 and texts -> states (B, D), NaN where UME-R1 never generated <gen_emb>."""
    pixels, grid = patchify(images, e.processor, e.device)
    m, rows, flat = e.processor.merge_size, [], e.recipe.positions == "1d"
    for text_ids, (_, high, wide) in zip(encode_texts(e.prompt, texts), grid.tolist()):
        ids, start = row_ids(e.prompt, text_ids, high * wide // m ** 2)
        rows.append((ids, positions(len(ids), start, high // m, wide // m, flat)))
    if e.generate:
        rows, wanted = generate(e, rows, pixels, grid), e.prompt.special["<gen_emb>"]
    states, offsets = hidden_states(e, rows, pixels, grid, side)
    at = [len(ids) - 1 if e.pool_id is None else len(ids) - 1 - ids[::-1].index(e.pool_id) for ids, _ in rows]
    vectors = states[torch.arange(len(rows)), torch.as_tensor(offsets + at)]      # (B, D)
    if e.generate:
        vectors[[ids[-1] != wanted for ids, _ in rows]] = torch.nan
    return vectors


def generate(e, rows, pixels, grid):
    """UME-R1 generative: greedy continuation, cut after its last <gen_emb>. The vector comes from a second pass, which has the same states.

    <gen_emb> is also in the prompt, so only generated ids are searched; without one the row stays as it was and gives no vector.
    """
    ids, mask, _, _ = collate(rows, e.prompt.pad, "left")
    wanted, ends = e.prompt.special["<gen_emb>"], [e.prompt.special["<|im_end|>"], e.prompt.special["<|endoftext|>"]]
    output = e.model.generate(input_ids=ids.to(e.device), attention_mask=mask.to(e.device), pixel_values=pixels, image_grid_thw=grid,
                              mm_token_type_ids=(ids == e.prompt.image).int().to(e.device), do_sample=False, temperature=None, top_p=None,
                              top_k=None, repetition_penalty=1.0, max_new_tokens=e.generate, pad_token_id=e.prompt.pad, eos_token_id=ends)
    e.model.model.rope_deltas = None                              # left behind by generate
    result = []
    for (row, where), new in zip(rows, output[:, ids.shape[1]:].tolist()):
        new = new[:next((i for i, token in enumerate(new) if token in ends), len(new))]
        count = len(new) - new[::-1].index(wanted) if wanted in new else 0
        more = where[:, -1:].max() + 1 + np.arange(count)
        result.append((row + new[:count], np.concatenate([where, np.tile(more, (3, 1))], 1)))
    return result


def embed_clip(e, images, texts, side="right"):
    """CLIP and SigLIP: the image tower's vector; with --fuse sum plus the text tower's (mteb's sum of the raw features, then length 1)."""
    pixels = normalized_pixels(torch.from_numpy(np.stack(images)), e.processor, e.device).to(e.model.dtype)      # (B, 3, H, W)
    if not e.fuse:
        return getattr(e.model(pixel_values=pixels), e.recipe.pool)
    length = e.model.config.text_config.max_position_embeddings
    ids = np.full((len(texts), length), e.prompt.end)                # the published tokenizers pad with the end token
    for r, row in enumerate(encode_texts(e.prompt, texts)):
        row = (e.prompt.head + row)[:length - 1]                  # the end token stays when a long text is cut, as in their processors
        ids[r, :len(row)] = row
    mask = np.cumsum(ids == e.prompt.end, 1) - (ids == e.prompt.end) == 0                # up to and with the end token
    extra = {"attention_mask": torch.from_numpy(mask.astype(int)).to(e.device)} if e.recipe.family == "clip" else {}     # SigLIP: none
    text = e.model.get_text_features(input_ids=torch.from_numpy(ids).to(e.device), **extra).pooler_output
    return e.model.get_image_features(pixel_values=pixels).pooler_output + text


def embed(e, images, texts, side="right"):
    """B images and texts -> (B, D) float32 array of rows of length 1; halves the batch where the device's memory is too small for it."""
    try:
        with torch.inference_mode(), blamed(e.folder):
            vectors = (embed_clip if e.recipe.family in ("clip", "siglip") else embed_qwen)(e, images, texts, side).float()
            if vectors.shape[1] != e.width:
                raise ValueError(f"vectors have {vectors.shape[1]} dimensions, config.json says {e.width}")
            return (vectors / vectors.norm(dim=1, keepdim=True)).cpu().numpy()
    except torch.OutOfMemoryError:
        if len(images) == 1:
            raise UserError(f"{e.device}: not enough memory for one image of {images[0].shape} pixels. Use a larger device") from None
    print(f"note: {e.device} has no memory for {len(images)} rows, halving this batch; --batch-tokens sets the size", file=sys.stderr)
    half = len(images) // 2
    return np.concatenate([embed(e, images[:half], texts[:half], side), embed(e, images[half:], texts[half:], side)])


# ---- plan ----------------------------------------------------------------------------------------------------------------------------
def plan_batches(lengths, batch_size, batch_tokens):
    """Batches of row numbers, longest rows first. Pure: the same lengths and flags give the same batches on any machine and in any shard.

    A batch holds at most `batch_size` rows and `batch_tokens` padded tokens, and padding is at most MAX_PADDING of it.
    """
    batches, batch, tokens = [], [], 0
    for row in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[row])
        if batch:
            padded = int(lengths[batch[0]]) * (len(batch) + 1)
            if len(batch) == batch_size or padded > batch_tokens or tokens + length < (1 - MAX_PADDING) * padded:
                batches.append(batch)
                batch, tokens = [], 0
        batch.append(row)
        tokens += length
    return batches + [batch] if batch else batches


def measure(entries, texts, images, recipe, prompt, processor, config, stop):
    """Length in tokens of every entry, from image headers and tokenised questions. Returns (int array (N,), error by row number, rows
    whose question a text tower cuts, bytes of each image file by name).

    With `stop`, the first entry that cannot be embedded is a UserError; so nothing expensive starts before every header was read.
    """
    lengths, errors, cut, sizes, file_bytes = np.zeros(len(entries), int), {}, [], {}, {}
    for row, (key, image, _) in enumerate(tqdm(entries, desc="plan", unit="row", disable=None)):
        try:
            if image not in sizes:
                sizes[image] = image_tokens(recipe, processor, config, *image_size(images, image))
                file_bytes[image] = os.path.getsize(os.path.join(images, image))
            texts[row].encode()                                   # a lone surrogate from JSON is no text
            lengths[row] = sizes[image]
        except (UserError, ValueError) as error:
            message = str(error) if isinstance(error, UserError) else f"{os.path.join(images, image)}: {error}"
            errors[row] = message
            if stop:
                raise UserError(f"item {shown(key)}: {message}") from None
    for start in range(0, len(entries) if prompt else 0, 1024):
        rows = [row for row in range(start, min(start + 1024, len(entries))) if row not in errors]
        for row, text_ids in zip(rows, encode_texts(prompt, [texts[row] for row in rows])):
            if recipe.family in ("clip", "siglip"):               # the text tower has a sequence of its own, cut as its processor does
                cut += [row] if len(prompt.head) + len(text_ids) >= prompt.longest else []
            else:
                lengths[row] += len(text_ids) + len(prompt.head) + len(prompt.tail) - 1
                if lengths[row] > prompt.longest:
                    errors[row] = (f"its prompt has {lengths[row]:,} tokens, the model takes {prompt.longest:,}; nothing is cut here, "
                                   "so shorten the question or leave the item out")
            if spelled := prompt.reserved.keys() & {*text_ids}:   # SigLIP's vocabulary holds </s> as an ordinary piece too
                errors[row] = (f"its question holds {prompt.reserved[min(spelled)]}, which this tokenizer cannot tell from the special "
                               "token; reword the question or leave the item out")
            if stop and row in errors:
                raise UserError(f"item {shown(entries[row][0])}: {errors[row]}")
    return lengths, errors, cut, file_bytes


# ---- resume state and output ---------------------------------------------------------------------------------------------------------
def open_state(prefix, settings, shape, places, overwrite):
    """Open or begin the resume state: PREFIX.partial.npy, rows where they will stay, and PREFIX.partial.jsonl, settings then batches.

    `places`: {batch: rows of the array}. Returns {batch: {row: error}} of the finished batches whose note and vectors are as they were.
    """
    array, journal = f"{prefix}.partial.npy", f"{prefix}.partial.jsonl"
    done, lines = {}, [json.dumps(settings).encode()]
    if os.path.exists(journal):
        with open(journal, "rb") as file:
            found, *notes = file.read().split(b"\n")
        if found != lines[0] and any(notes) and not overwrite:      # with no batch done there is nothing to keep
            raise UserError(f"{journal}: an unfinished run {differences(found, settings)} is kept there. Give its command again to finish "
                            "it, --overwrite to drop it, or choose another --out")
        rows = mapped(array, shape) if found == lines[0] else None
        for line in notes[:-1] if rows is not None else []:       # what follows the last newline is torn
            try:
                batch, failed, check = json.loads(line)
                if batch in places and check == checksum(batch, failed, rows[places[batch]]):
                    done[batch] = {int(row): error for row, error in failed.items()}
                    lines.append(line)
            except (ValueError, TypeError, AttributeError, RecursionError):
                pass                                              # counted below, and the batch is done again
        if len(lines) < len(notes):
            print(f"note: {journal}: {len(notes) - len(lines)} finished batches do not match {array}; they are done again", file=sys.stderr)
    if not done:
        create_array(array, shape)
    write_atomic(journal, lambda file: file.write(b"\n".join(lines) + b"\n"))
    return done


def checksum(batch, failed, vectors):
    """CRC-32 of a finished batch: its number, what failed in it, and its vectors (B, D)."""
    return zlib.crc32(np.ascontiguousarray(vectors), zlib.crc32(json.dumps([batch, failed]).encode()))


def differences(line, settings):
    """In words: how the settings in a journal's first line differ from these."""
    try:
        found = json.loads(line)
        names = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
        return f"of other settings ({', '.join(names[:5])})"
    except (ValueError, TypeError, AttributeError):
        return "whose first line is damaged"


def create_array(path, shape):
    """A .npy file of float32 zeros, all its space reserved: a map that runs out of room later would end in a crash, not an error."""
    try:
        np.lib.format.open_memmap(path, "w+", np.float32, shape)
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(path)
        raise cannot_write(path, error) from error


def mapped(path, shape):
    """The array at `path` mapped for reading and writing, or None where it is not the whole file of that shape. Open, use, drop: so the
    pages of a large array do not stay in the process."""
    try:
        array = np.lib.format.open_memmap(path, "r+")
    except (OSError, ValueError):
        return None
    return array if array.shape == shape and array.dtype == np.float32 else None


def finish(prefix, settings, keys, failed_lines, kept, shape, run_facts, skip):
    """Publish the array, the ids, the failed list, then the sidecar. All of it is on disk as PREFIX.staged.* before the first rename, so a
    full disk leaves an earlier result as it was; killed anywhere, the resume state is still whole and the same command ends it."""
    source, staged = f"{prefix}.partial.npy", f"{prefix}.staged"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{staged}.npy")
        if len(kept) == shape[0]:
            try:
                os.link(source, f"{staged}.npy")
            except OSError:                                       # a file system without hard links
                shutil.copyfile(source, f"{staged}.npy")
        else:
            create_array(f"{staged}.npy", (len(kept), shape[1]))
            for start in range(0, len(kept), 4096):
                part = slice(start, start + 4096)
                mapped(f"{staged}.npy", (len(kept), shape[1]))[part] = mapped(source, shape)[kept[part]]
        with open(f"{staged}.npy", "rb+") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(f"{prefix}.npy", error) from error
    write_atomic(f"{staged}.ids.txt", lambda file: file.write(("\n".join(keys) + "\n").encode()))
    if skip:
        lines = "".join(json.dumps(line) + "\n" for line in failed_lines).encode()
        write_atomic(f"{staged}.failed.jsonl", lambda file: file.write(lines))
    write_json(f"{staged}.meta.json", {**settings, "rows": len(keys), "ids_sha256": sha256(f"{staged}.ids.txt"),
                                       "array_sha256": sha256(f"{staged}.npy"), "failed_items": len(failed_lines),
                                       "failed_sha256": sha256(f"{staged}.failed.jsonl") if skip else None, "run": run_facts})
    for end in ("meta.json", "failed.jsonl"):                     # an earlier result stops counting as finished while its files change
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{prefix}.{end}")
    for end in ("npy", "ids.txt", *(["failed.jsonl"] if skip else []), "meta.json"):
        os.replace(f"{staged}.{end}", f"{prefix}.{end}")
    drop_state(prefix)


def drop_state(prefix):
    """Remove the resume state, and staged.npy, which stays behind where it is already the same file as PREFIX.npy."""
    for end in ("partial.jsonl", "partial.npy", "staged.npy"):
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{prefix}.{end}")


def already_done(prefix, settings, overwrite):
    """True when the finished output of these very settings is there; a UserError when another output is in the way."""
    if overwrite or not os.path.exists(f"{prefix}.meta.json"):
        for name in (f"{prefix}.npy", f"{prefix}.ids.txt"):
            if not overwrite and os.path.exists(name) and not os.path.exists(f"{prefix}.partial.jsonl"):
                raise UserError(f"{name}: exists without its sidecar. Move it away, or give --overwrite")
        return False
    found = read_json(f"{prefix}.meta.json")
    differing = sorted(name for name, value in settings.items() if found.get(name) != value)
    if differing:
        raise UserError(f"{prefix}.meta.json: a finished output of other settings ({', '.join(differing[:5])}) is there. Give --overwrite "
                        "to replace it, or choose another --out")
    read_embeddings(prefix)
    drop_state(prefix)
    print(f"{prefix}: already done with these settings", file=sys.stderr)
    return True


# ---- one run -------------------------------------------------------------------------------------------------------------------------
def read_entries(args):
    """Returns (items, entries): what gets a row, (key, image, question) in item order; in visual_only each image once, question None."""
    items = read_items(args.items, args.limit)
    if not os.path.isdir(args.images):
        raise UserError(f"{args.images}: no such folder (--images)")
    if args.mode == "vl_joint":
        return items, [(item["id"], item["image"], item["question"]) for item in items]
    return items, [(image, image, None) for image in dict.fromkeys(item["image"] for item in items)]


def read_model_files(args, recipe):
    """Everything about the model but its weights. Returns (folder, revision, adapter folder or None, config)."""
    folder, revision = model_folder(args.model or recipe.hub, args.revision, "--model")
    config = read_json(os.path.join(folder, "config.json"))
    if config.get("model_type") not in (recipe.family, f"{recipe.family}_vision_model"):
        raise UserError(f"{folder}/config.json: expected model_type {recipe.family} for {args.embedder}, found "
                        f"{shown(config.get('model_type'))}. Give the folder of that model with --model")
    if os.path.exists(os.path.join(folder, "adapter_config.json")):
        raise UserError(f"{folder}: this is an adapter. Give its base with --model and the adapter with --adapter")
    adapter = model_folder(args.adapter or VLM2VEC_ADAPTER, None, "--adapter", ("adapter_*",))[0] if args.embedder == "vlm2vec-v2" else None
    return folder, revision, adapter, config


def prompt_template(args, recipe):
    """The prompt with {text} still open, and the instruction."""
    instruction, template = recipe.instruction[args.mode == "vl_joint"], recipe.prompt
    if args.instruction is not None:
        instruction = args.instruction.strip()
        if recipe.family == "qwen3_vl" and instruction and not unicodedata.category(instruction[-1]).startswith("P"):
            instruction += "."                                    # as Qwen's wrapper does
    if args.ume_mode == "gen":
        template = template.replace("<disc_emb>\n", f"<disc_emb>\n{UME_THINK}")
    if args.fuse == "sum":
        template = {"clip": "<|startoftext|>{text}", "siglip": "{text}"}[recipe.family]
    return template, instruction


def question_texts(args, recipe, entries, instruction):
    """What stands for {text} in each entry's prompt. Returns (list of str, keys of the entries whose question Embed-RL's rule cuts)."""
    cut = args.embed_rl_max_chars if recipe.pool == "<emb>" else 0
    texts, touched = [], []
    for key, _, question in entries:
        if recipe.pool == "<emb>" and question:
            question = question.strip()
            if cut and len(question) > cut:
                touched.append(key)
                question = question[:cut]
        texts.append(recipe.text(instruction, question))
    if touched:
        print(f"note: {len(touched)} questions are cut at {cut} characters as Embed-RL's authors do, first id {shown(touched[0])} "
              "(--embed-rl-max-chars 0 turns it off)", file=sys.stderr)
    return texts, touched


def prepare(args, versions):
    """All that comes before the weights: entries, prompts, plan and settings, as a namespace. Settings are the sidecar's fields that decide
    the vectors, so a resumed or merged run must agree on them."""
    recipe = EMBEDDERS[args.embedder]
    items, entries = read_entries(args)
    folder, revision, adapter, config = read_model_files(args, recipe)
    template, instruction = prompt_template(args, recipe)
    texts, touched = question_texts(args, recipe, entries, instruction)
    with blamed(folder):
        prompt = load_prompt(folder, config, recipe, template, instruction) if template else None
        processor = load_processor(folder, config, recipe)
        image_tokens(recipe, processor, config, 64, 64)            # what fails for any size is not the fault of an image
        vision, text = config.get("vision_config", config), config.get("text_config", config)
        width = {"clip": config.get("projection_dim"), "siglip": vision.get("hidden_size")}.get(recipe.family, text.get("hidden_size"))
        if type(width) is not int or width < 1:
            raise ValueError(f"expected the width of a vector in config.json to be a whole number above 0, found {shown(repr(width))}")
    lengths, errors, cut, file_bytes = measure(entries, texts, args.images, recipe, prompt, processor, config, args.on_error == "stop")
    if cut:
        touched = [entries[row][0] for row in cut]
        print(f"note: {len(cut)} questions are cut at the text tower's {prompt.longest} tokens, first id {shown(touched[0])}",
              file=sys.stderr)
    good = [row for row in range(len(entries)) if row not in errors]
    batches = [[good[row] for row in batch] for batch in plan_batches(lengths[good], args.batch_size, args.batch_tokens)]
    mine = range(args.shard[0], len(batches), args.shard[1])
    order = sorted(row for b in mine for row in batches[b])        # this run's rows, in item order
    place = {row: i for i, row in enumerate(order)}                # row of the whole list -> row of this run's array
    if not order:
        raise UserError(f"{args.prefix}: no rows to write ({len(errors)} of {len(entries)} entries cannot be embedded, {len(batches)} "
                        f"batches for {args.shard[1]} shards). Mend the items or use fewer shards")
    pool = "<gen_emb>" if args.ume_mode == "gen" else recipe.pool
    settings = {
        "format_version": FORMAT_VERSION, "embedder": args.embedder, "mode": args.mode,
        "key": "image" if args.mode == "visual_only" else "id", "dim": width, "normalized": True, "dtype": "float32",
        "model": args.model or recipe.hub, "revision": revision, "adapter": args.adapter or VLM2VEC_ADAPTER if adapter else None,
        "weights_sha256": weights_sha256([folder, adapter] if adapter else [folder]),
        "config_sha256": config_sha256([folder, adapter] if adapter else [folder]),
        "prompt": template.replace("{instruction}", instruction).replace(
            "{text}", recipe.text(instruction, "{question}" if args.mode == "vl_joint" else None)),
        "pooling": POOLING.get(pool, f"final-norm state at the last {pool}") + ", L2 in float32", "positions": recipe.positions,
        "pixel_limits": list(recipe.pixels or target_size(recipe, processor, 1, 1)),
        "image_policy": "first frame, EXIF rotation applied, transparency on white, 16 bit scaled to 8, Pillow bicubic",
        "question_cut": {**({"tokens": prompt.longest} if args.fuse == "sum" else {"characters": args.embed_rl_max_chars}),
                         "items": len(touched), "first_ids": touched[:10]} if recipe.pool == "<emb>" or args.fuse == "sum" else None,
        "fuse": args.fuse, "attention": "sdpa", "torch_dtype": str(args.dtype).removeprefix("torch."), "device": args.device.type,
        "max_new_tokens": args.max_new_tokens if pool == "<gen_emb>" else None,
        "items_sha256": sha256(args.items),
        "image_sizes_sha256": hashlib.sha256(json.dumps(sorted(file_bytes.items())).encode()).hexdigest(),      # file sizes
        "limit": args.limit, "entries": len(entries), "on_error": args.on_error,
        "batch_size": args.batch_size, "batch_tokens": args.batch_tokens, "shard": f"{args.shard[0]}/{args.shard[1]}",
        "plan_sha256": hashlib.sha256(json.dumps([batches, lengths.tolist()]).encode()).hexdigest(), "versions": versions}
    padded = sum(int(lengths[batch[0]]) * len(batch) for batch in batches)
    return types.SimpleNamespace(
        args=args, recipe=recipe, items=items, entries=entries, texts=texts, prompt=prompt, processor=processor, folder=folder,
        adapter=adapter, errors=errors, batches=batches, order=order, place=place,
        places={b: [place[row] for row in batches[b]] for b in mine}, shape=(len(order), width), pool=pool,
        settings=settings, padding=1 - int(lengths[good].sum()) / padded)


def load_embedder(job):
    """Load the weights; the namespace that `embed` takes."""
    args, fuse = job.args, job.args.fuse == "sum"
    sides = None if job.recipe.pixels else target_size(job.recipe, job.processor, 1, 1)
    with blamed(job.folder):
        model = load_model(job.recipe, job.folder, job.adapter, args.dtype, args.device, fuse, job.pool == "<gen_emb>", sides)
    return types.SimpleNamespace(
        model=model, folder=job.folder, width=job.shape[1], recipe=job.recipe, prompt=job.prompt, processor=job.processor,
        device=args.device, fuse=fuse,
        pool_id=job.prompt.special[job.pool] if job.pool.startswith("<") else None,
        generate=args.max_new_tokens if job.pool == "<gen_emb>" else 0)


def embed_batches(job, todo, e):
    """The loop: images come from the workers, vectors go to the mapped array, the journal notes each finished batch.

    Returns {row: error} of what was left out.
    """
    prefix, skip, failed = job.args.prefix, job.args.on_error == "skip", {}
    names = [[job.entries[row][1] for row in job.batches[b]] for b in todo]
    loader = torch.utils.data.DataLoader(                         # numpy through a pipe, so no shared memory is needed
        ImageBatches(names, job.args.images, functools.partial(prepare_image, job.recipe, job.processor)),
        batch_size=None, num_workers=min(job.args.workers, len(todo)), collate_fn=as_is,
        worker_init_fn=functools.partial(start_worker, os.getpid(), f"{prefix}.lock"))
    left = sum(map(len, names))
    progress = tqdm(total=len(job.order), initial=len(job.order) - left, desc=job.args.embedder, unit="row", disable=None)
    with open(f"{prefix}.partial.jsonl", "ab", buffering=0) as journal, progress as bar:
        for b, (pixels, unread) in zip(todo, from_workers(loader)):
            batch = job.batches[b]
            bad = {row: unread[job.entries[row][1]] for row in batch if job.entries[row][1] in unread}
            rows = [row for row in batch if row not in bad]
            vectors = np.zeros((len(batch), job.shape[1]), np.float32)      # (B, D), the failed ones stay 0 and are left out at the end
            if rows and (skip or not bad):
                found = embed(e, [pixels[job.entries[row][1]] for row in rows], [job.texts[row] for row in rows])
                for row, vector in zip(rows, found):
                    if np.isfinite(vector).all():
                        vectors[batch.index(row)] = vector
                    else:
                        bad[row] = (f"no <gen_emb> among {e.generate} generated tokens (--max-new-tokens)" if e.generate else
                                    f"the model gave NaN, infinity or a zero vector; {job.args.model or job.recipe.hub} may be damaged")
            if bad and not skip:
                raise UserError(f"item {shown(job.entries[min(bad)][0])}: {bad[min(bad)]}. Finished batches are kept; --on-error skip "
                                "leaves such items out and lists them")
            array = mapped(f"{prefix}.partial.npy", job.shape)
            if array is None:
                raise UserError(f"{prefix}.partial.npy: changed by something else while this run wrote it. Start again with --overwrite")
            array[job.places[b]] = vectors
            notes = {str(row): error for row, error in bad.items()}
            line = (json.dumps([b, notes, checksum(b, notes, vectors)]) + "\n").encode()
            try:
                if journal.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise cannot_write(f"{prefix}.partial.jsonl", error) from error
            failed.update(bad)
            bar.update(len(batch))
    return failed


def extract(args, versions):
    """Everything from items to the trio. Returns the sidecar."""
    job, prefix, started = prepare(args, versions), args.prefix, time.time()
    if already_done(prefix, job.settings, args.overwrite):
        return read_json(f"{prefix}.meta.json")
    done = open_state(prefix, job.settings, job.shape, job.places, args.overwrite)
    todo = [b for b in job.places if b not in done]
    left = sum(len(job.batches[b]) for b in todo)
    print(f"{args.embedder} {args.mode}: {len(job.order):,} rows of {job.shape[1]} (shard {job.settings['shard']} of {len(job.entries):,} "
          f"entries), {left:,} to do in {len(todo):,} batches, padding {job.padding:.1%}", file=sys.stderr)
    failed = {**job.errors, **{row: error for notes in done.values() for row, error in notes.items()}}
    try:
        if todo:
            failed.update(embed_batches(job, todo, load_embedder(job)))
    except KeyboardInterrupt:
        with open(f"{prefix}.partial.jsonl", "rb") as file:
            print(f"\nkept: {sum(1 for _ in file) - 1} of {len(job.places)} batches in {prefix}.partial.npy", file=sys.stderr)
        raise
    kept = [row for row in job.order if row not in failed]
    if not kept:
        raise UserError(f"{prefix}: every one of the {len(job.order)} rows failed, first: {failed[min(failed)]}. Nothing was written")
    field = job.settings["key"]
    by_key = {job.entries[row][0]: error for row, error in failed.items() if row in job.place or args.shard[0] == 0}
    lines = [{"item": number, "id": item["id"], "image": item["image"], "error": by_key[item[field]]}
             for number, item in enumerate(job.items, 1) if item[field] in by_key]
    settings, seconds = dict(job.settings), time.time() - started
    if args.shard[1] > 1:                                         # where this shard's rows stand among all entries, for --merge
        write_atomic(f"{prefix}.rows.npy", lambda file: np.save(file, np.array(kept, np.int64)))
        settings["rows_sha256"] = sha256(f"{prefix}.rows.npy")
    finish(prefix, settings, [job.entries[row][0] for row in kept], lines, np.array([job.place[row] for row in kept]), job.shape, {
        "argv": args.argv, "seconds": round(seconds, 1), "rows_per_second": round(left / max(seconds, 1e-9), 2),
        "padding": round(job.padding, 4), "host": platform.node(), "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else platform.machine()}, args.on_error == "skip")
    if lines:
        print(f"note: {len(lines)} items were left out and are listed in {prefix}.failed.jsonl", file=sys.stderr)
    return read_json(f"{prefix}.meta.json")


def as_is(batch):
    """DataLoader's collate step: none."""
    return batch


def from_workers(loader):
    """The loader's batches; a worker that died (most often: killed for its memory) is a UserError."""
    try:
        yield from loader
    except RuntimeError as error:
        raise UserError(f"an image worker ended ({shown(error, 200)}). Finished batches are kept: give the command again, with fewer "
                        "--workers if memory is short") from error


def start_worker(parent, lock, worker):
    """In a forked worker: end with a killed parent, which a worker that waits to hand over its pixels would never notice; and close the
    lock's file that it inherited, or the lock would outlive the run."""
    if sys.platform == "linux":
        import ctypes
        ctypes.CDLL(None).prctl(1, 9)                             # PR_SET_PDEATHSIG, SIGKILL
        if os.getppid() != parent:                                # it died before that
            os._exit(1)
    with contextlib.suppress(OSError):
        held = os.stat(lock)
    for number in range(3, 256):
        with contextlib.suppress(OSError, NameError):
            if os.path.samestat(os.fstat(number), held):
                os.close(number)


def merge(args):
    """Join PREFIX.shard-0-of-N ... into PREFIX, rows in item order. Returns the sidecar."""
    parts = []
    for shard in range(args.merge):
        part = f"{args.out}.shard-{shard}-of-{args.merge}"
        if not os.path.exists(f"{part}.meta.json"):
            raise UserError(f"{part}.meta.json: not found, shard {shard} of {args.merge} is not finished. Finish it, then merge")
        array, keys, meta = read_embeddings(part)
        if not os.path.exists(f"{part}.rows.npy") or sha256(f"{part}.rows.npy") != meta.get("rows_sha256"):
            raise UserError(f"{part}.rows.npy: missing, or its SHA-256 is not the one in the sidecar. Extract this shard again")
        if meta.get("failed_sha256") and (not os.path.exists(f"{part}.failed.jsonl")
                                          or sha256(f"{part}.failed.jsonl") != meta["failed_sha256"]):
            raise UserError(f"{part}.failed.jsonl: missing, or its SHA-256 is not the one in the sidecar. Extract this shard again")
        try:
            rows = np.lib.format.open_memmap(f"{part}.rows.npy", mode="r")
        except Exception as error:                                # a header is read by several parsers, each with errors of its own
            raise UserError(f"{part}.rows.npy: expected row numbers, found {shown(error)}. Extract this shard again") from None
        if rows.shape != (len(array),) or rows.dtype != np.int64 or type(meta.get("entries")) is not int or meta.get("on_error") not in (
                "stop", "skip"):
            raise UserError(f"{part}.rows.npy: expected {len(array)} row numbers, found {rows.dtype} {rows.shape}; or {part}.meta.json "
                            "lacks 'entries' or 'on_error'. Extract this shard again")
        parts.append((part, array, keys, meta, rows))
    own = {"shard", "rows", "rows_sha256", "ids_sha256", "array_sha256", "failed_items", "failed_sha256", "run"}
    settings = {name: value for name, value in parts[0][3].items() if name not in own}
    for part, _, _, meta, _ in parts[1:]:
        differing = sorted(name for name in {*settings, *meta} - own if settings.get(name) != meta.get(name))
        if differing:
            raise UserError(f"{part}.meta.json: made with other settings than shard 0 ({', '.join(differing[:5])}). Extract it again")
    settings["shard"] = "0/1"
    rows = np.concatenate([part[4] for part in parts])
    lines = []
    for path in (f"{part[0]}.failed.jsonl" for part in parts):
        for number, line in enumerate(read_failed(path if os.path.exists(path) else None).values(), 1):
            if type(line.get("item")) is not int or not all(isinstance(line.get(name), str) for name in ("image", "error")):
                raise UserError(f"{path} line {number}: expected item, id, image and error, found {shown(repr(line))}. Extract this shard "
                                "again")
            lines.append(line)
    lines.sort(key=lambda line: line["item"])
    lost = len({line["id" if settings["key"] == "id" else "image"] for line in lines})
    if len(np.unique(rows)) != len(rows) or len(rows) + lost != settings["entries"]:
        raise UserError(f"{args.out}: the shards hold {len(np.unique(rows)):,} distinct rows and {lost:,} failed ones, expected "
                        f"{settings['entries']:,} in all. Extract the shards again")
    if already_done(args.out, settings, args.overwrite):
        return read_json(f"{args.out}.meta.json")
    order, shape = np.argsort(rows, kind="stable"), (len(rows), settings["dim"])
    place = np.empty(len(rows), int)
    place[order] = np.arange(len(rows))                            # the final row of each row of the joined shards
    create_array(f"{args.out}.partial.npy", shape)
    keys, start = [None] * len(rows), 0
    for part, array, part_keys, _, _ in tqdm(parts, desc="merge", unit="shard", disable=None):
        for begin in range(0, len(array), 65536):
            where = place[start + begin:start + min(begin + 65536, len(array))]
            mapped(f"{args.out}.partial.npy", shape)[where] = array[begin:begin + 65536]
        for i, key in zip(place[start:start + len(array)].tolist(), part_keys):
            keys[i] = key
        start += len(array)
    if len(set(keys)) != len(keys):
        raise UserError(f"{args.out}: two shards hold the same key. Extract the shards again")
    finish(args.out, settings, keys, lines, np.arange(len(rows)), shape, {"argv": args.argv, "shards": [
        {"prefix": os.path.basename(part[0]), "sidecar_sha256": sha256(f"{part[0]}.meta.json")} for part in parts]},
        settings["on_error"] == "skip")
    return read_json(f"{args.out}.meta.json")


def parse_args(argv=None):
    """Read the command line; what it contradicts itself in is a usage error (status 2)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False,
                                     epilog="The file formats are at the top of this script.")
    add = parser.add_argument
    add("--embedder", choices=EMBEDDERS, help="which embedder's recipe to follow")
    add("--mode", choices=["visual_only", "vl_joint"], help="visual_only: the image alone, once; vl_joint: image and question together")
    add("--items", metavar="F.jsonl", help="item file, one JSON object a line")
    add("--images", metavar="DIR", help="folder that the items' image paths are relative to")
    add("--out", metavar="PREFIX", required=True, help="output prefix: PREFIX.npy, PREFIX.ids.txt, PREFIX.meta.json")
    add("--model", metavar="HUB_ID_OR_DIR", help="hub id or local folder in the published layout (default: the embedder's own hub id)")
    add("--revision", metavar="COMMIT", help="hub commit or tag of --model (default: the newest)")
    add("--adapter", metavar="HUB_ID_OR_DIR", help=f"vlm2vec-v2 only: LoRA or DoRA adapter over --model (default: {VLM2VEC_ADAPTER})")
    add("--device", metavar="D", help="torch device, such as cpu or cuda:1 (default: cuda if there is one, else cpu)")
    add("--dtype", choices=["bfloat16", "float32"], help="precision of the model (default: bfloat16 on cuda, float32 on cpu)")
    add("--batch-size", type=positive, default=64, metavar="B", help="most rows in a batch (default: 64)")
    add("--batch-tokens", type=positive, default=16384, metavar="T", help="most tokens in a batch, padding included (default: 16384)")
    add("--workers", type=int, default=min(8, max(1, (os.cpu_count() or 2) - 1)), metavar="W",
        help="processes that decode and resize images ahead of the model, 0: none (default: one less than CPUs, at most 8)")
    add("--instruction", metavar="TEXT", help="replaces the default instruction (qwen3-vl-embedding, vlm2vec-v2, ume-r1)")
    add("--ume-mode", choices=["disc", "gen"], default="disc",
        help="ume-r1: state at <disc_emb>, or at a generated <gen_emb> (default: disc)")
    add("--max-new-tokens", type=positive, default=8192, metavar="N",
        help="ume-r1 gen: most tokens to generate for an item (default: 8192, the authors')")
    add("--embed-rl-max-chars", type=int, default=EMBED_RL_MAX_CHARS, metavar="N",
        help="embed-rl: cut the question at N characters as the authors' script does, 0: never (default: 512)")
    add("--fuse", choices=["none", "sum"], default="none", help="clip and siglip in vl_joint: sum of the image's and the question's "
        "features, a choice of ours after mteb (default: none)")
    add("--shard", type=shard_of, metavar="I/N", help="take shard I of N, from 0; writes PREFIX.shard-I-of-N (default: all, and under "
        "torchrun the rank's)")
    add("--merge", type=positive, metavar="N", help="join the N shards of --out; needs no other flag")
    add("--limit", type=positive, metavar="N", help="take the first N items (default: all)")
    add("--on-error", choices=["stop", "skip"], default="stop", help="an item that cannot be embedded ends the run, or is left out and "
        "listed in PREFIX.failed.jsonl (default: stop)")
    add("--overwrite", action=argparse.BooleanOptionalAction, default=False, help="replace an earlier output (default: no)")
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    for name in ("items", "images", "model", "revision", "adapter", "device"):
        if getattr(args, name) == "":
            parser.error(f"--{name}: expected a name, found an empty text (a variable that is not set?)")
    last = re.split(r"[/\\]", args.out)[-1]
    if last in ("", ".", ".."):
        parser.error(f"--out {shown(args.out)}: expected a prefix, as in vectors/test-clip, found a folder")
    if args.merge:
        if other := [name for name, value in vars(args).items() if name not in ("merge", "out", "overwrite", "argv")
                     and value != parser.get_default(name)]:
            parser.error(f"--merge takes --out and --overwrite alone, found --{other[0].replace('_', '-')} too")
        return args
    missing = [f"--{name}" for name in ("embedder", "mode", "items", "images") if getattr(args, name) is None]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)} (or --merge N)")
    two_towers = args.embedder in ("clip", "siglip")
    if two_towers and args.mode == "vl_joint" and args.fuse == "none":
        parser.error(f"{args.embedder} embeds images alone: use --mode visual_only, or --fuse sum for image plus text tower")
    if args.fuse == "sum" and not (two_towers and args.mode == "vl_joint"):
        parser.error("--fuse sum is for clip and siglip in vl_joint")
    if args.adapter and args.embedder != "vlm2vec-v2":
        parser.error("--adapter is for vlm2vec-v2")
    if args.instruction is not None and not any(EMBEDDERS[args.embedder].instruction):
        parser.error(f"{args.embedder} takes no instruction")
    if args.instruction is not None and ("{text}" in args.instruction or "{instruction}" in args.instruction
                                         or args.instruction.encode(errors="ignore").decode() != args.instruction):
        parser.error("--instruction: expected text in UTF-8 without {text} and {instruction}, which stand for its places")
    if args.ume_mode == "gen" and not args.embedder.startswith("ume"):
        parser.error("--ume-mode gen is for ume-r1-2b and ume-r1-7b")
    if args.workers < 0 or args.embed_rl_max_chars < 0:
        parser.error("--workers and --embed-rl-max-chars take 0 or more")
    if args.shard and os.environ.get("WORLD_SIZE", "1") != "1":
        parser.error("give --shard or use torchrun, not both")
    return args


def positive(text):
    """argparse type: a whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def shard_of(text):
    """argparse type: 'I/N' with 0 <= I < N."""
    found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    if not found or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with 0 <= I < N, found {text!r}")
    return int(found[1]), int(found[2])


def main(argv=None):
    args = parse_args(argv)
    if args.merge:
        with locked(args.out):
            print(json.dumps(merge(args), indent=2, ensure_ascii=False))
        return
    rank, local, world = ranks()
    args.shard = args.shard or (rank, world)
    args.prefix = args.out if args.shard[1] == 1 else f"{args.out}.shard-{args.shard[0]}-of-{args.shard[1]}"
    if os.path.realpath(args.items) in {os.path.realpath(f"{args.prefix}.{end}") for end in ("failed.jsonl", "partial.jsonl")}:
        raise UserError(f"--out {args.out}: its output would replace the item file {args.items}. Choose another --out")
    with locked(args.prefix):
        versions = load_libraries()
        name = args.device or (f"cuda:{local % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")
        try:
            args.device = torch.device(name)
            torch.zeros(1, device=args.device).cpu()
        except Exception as error:                                # each kind of device has errors of its own
            found = shown((str(error).splitlines() or [type(error).__name__])[0], 200)
            raise UserError(f"--device {shown(name)}: not usable here ({found}). Use --device cpu") from None
        args.dtype = getattr(torch, args.dtype or ("bfloat16" if args.device.type == "cuda" else "float32"))
        print(json.dumps(extract(args, versions), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    run(main, "Finished batches are kept beside the output as .partial files: give the same command again to go on.")
