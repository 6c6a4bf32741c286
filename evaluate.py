"""Score predictions: how much of each answer came out of the embedding, and how sure is that?

    python evaluate.py --items test.jsonl --predictions 'results/**/predictions.jsonl' --out results/scores

READS   --items F.jsonl: one object a line with id, image, question, answers, source, domain; optional options, metric, dataset, seen.
        --predictions F.jsonl ...: id, prediction (raw text, or null with "error"), condition, answer_bits, answer_tokens; beside each
        F.meta.json with embedder, mode, condition, items_sha256, limit, readout_sha256 (optional: predictions_sha256). Globs are expanded
        here and take only files with their sidecar; a file named in full may lack one, which is noted under the tables.
WRITES  the tables on standard output (Markdown, --latex or --csv); with --out DIR also DIR/scores.json (all numbers below) and
        DIR/scores.jsonl (id, score in [0, 1] or null where failed, embedder, mode, condition, file). Each is replaced whole or not at all.
SAYS    per row (embedder, mode, condition, file), overall and per domain, source and, where items carry `seen`, answers seen or unseen in
        training: n, score 0-100 (mean over items; the mean of the domain means beside it), 95% interval, empty, empty_credited, unparsed,
        failed (left out of the mean; `bound` counts them as 0), distinct (share of distinct predictions), chance, majority (every item of a
        source given that source's most frequent answers[0]), bits. Per pair of rows: paired difference, interval, p, items won and lost.
        Usable information (bits) = mean over items of answer_bits(text_only) - answer_bits(condition): the estimate of predictive
        V-information (Xu et al. 2020, arXiv 2002.10689) that the vector adds to the question, for the family V of readouts of one recipe.
        Intervals: percentile bootstrap over clusters; questions on one image are one cluster. p: two-sided sign flips of the cluster
        differences, not corrected for the number of pairs. No interval is given for one cluster; a row with all items right (or wrong)
        gets an interval of width 0, which is the bootstrap's known limit.
NEVER   a random option, Python eval on data, state kept between calls. Blank predictions earn credit only where the source's own rule gives
        it, and are then counted as empty_credited: vqa and short realworldqa answers that process to nothing ("a", "the"), a blank answer
        under ocrbench, relaxed, anls, exact. yes_no and choice never credit a blank.
Joins by id. The id set must equal the items' (the first N where the sidecar says limit N) unless --partial. The same files, flags and
seed give the same scores.json except its "run" entry. Memory about 1.5 kB an item; 100,000 predictions take seconds on one core.
Exit status: 0 done, 1 failed with a line that says what and where, 2 wrong command line, 130 interrupted.
To reuse elsewhere copy this file; it needs Python >= 3.11 and numpy >= 2.0, no torch.
"""
import argparse
import collections
import contextlib
import csv
import glob
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import string
import sys
import time
import zlib

import numpy as np

# ---- constants: the rules' tables and patterns ----
MAX_TEXT = 20_000                                       # characters in one prediction or answer; longer ones are a fault of the file
RR_LETTER = "Please answer directly with only the letter of the correct option"  # RealWorldQA's own suffixes tell its two kinds apart
RR_SHORT = "Please answer directly with a single word or number"
VQA_MARKS = ";/[]\"{}()=+\\_-><@`,?!"                   # EvalAI's list; ' : ~ | ^ $ % & # * and non-ASCII marks are left alone
VQA_PERIOD, VQA_ANY_MARK = re.compile(r"\.(?!\d)"), re.compile(f"[{re.escape(VQA_MARKS)}.]")
VQA_NUMBERS = dict(zip("none zero one two three four five six seven eight nine ten".split(), "0 0 1 2 3 4 5 6 7 8 9 10".split()))
VQA_ARTICLES = ("a", "an", "the")
# EvalAI restores apostrophes: a word of this list with exactly one of its apostrophes missing becomes the word.
VQA_APOSTROPHES = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's how'd how'll
    how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock oughtn't 'ow's'at shan't
    she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's something'd
    something'd've something'll that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've
    we've weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's
    won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've""".split()
VQA_RESTORED = {word[:i] + word[i + 1:]: word for word in VQA_APOSTROPHES for i, mark in enumerate(word) if mark == "'"}
VQA_RESTORED.update({"somebody'd": "somebodyd"})        # backwards in EvalAI's table, kept so that scores stay the challenge server's
FULL_WIDTH = {0x3000: " ", **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}}
LATIN = "0-9A-Za-z\u00c0-\u024f"                       # a letter glued to one of these is part of a word; to a Chinese character it is not
LABEL = re.compile(r"\W*?(?:\(([A-Za-z])\)|([A-Za-z])[):]|([A-Za-z])\.(?!\w)|([A-Z]),)")
DECLARED = re.compile(r"(?i:\b(?:answer|option|choice)(?:\s+(?:is|was|should be|must be|would be))?)[\s:=\"'*(\[{$]*"
                      rf"(?:([A-Z])(?!['\u2019]?[{LATIN}])|([a-z])(?=\W*$))")
CAPITAL = re.compile(rf"(?<![{LATIN}])(?<![{LATIN}]['\u2019])([A-Z])(?!['\u2019]?[{LATIN}])")
ARTICLE_LIKE = re.compile(r"\s+(?!(?:and|or|but)\b)[a-z]")  # after A or I: they are words here, not letters
LARGE = 5_000                                           # distinct cluster values from which the normal limit stands in for resampling
TESTED = {"Python": "3.11.", "numpy": "2."}            # another version gets a note, no refusal
CONDITIONS = ("matched", "raw_image", "text_only", "text_only_ablated", "zero", "shuffled")  # order of the rows; others follow
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


# ---- the rules: (prediction, item) -> score in [0, 1], or None where a choice could not be read (scored 0, counted as unparsed) ----
def yes_no(prediction, item):
    """MME: lower case, outer space and every period off; y or n; else yes, then no, inside the first four characters (lmms-eval)."""
    def parse(text):
        text = text.lower().strip().replace(".", "")
        if len(text) == 1:
            return {"y": "yes", "n": "no"}.get(text)
        return "yes" if "yes" in text[:4] else "no" if "no" in text[:4] else None
    said = parse(prediction)
    return None if said is None else float(said == parse(item["answers"][0]))


def bare(text):
    """An option text for comparison: lower case, without outer punctuation and a leading article."""
    inner = re.search(r"\w(?:.*\w)?", text.lower(), re.DOTALL)
    return re.sub(r"^(?:a|an|the)\s+", "", inner[0]) if inner else text.lower().strip()


def has_words(text, words):
    """Whether `words` stands in `text` as whole words; both in lower case."""
    def inside_word(i):
        return 0 < i < len(text) and all(c.isalnum() or c == "_" for c in text[i - 1:i + 1])
    start = text.find(words) if words else -1
    while start >= 0 and (inside_word(start) or inside_word(start + len(words))):
        start = text.find(words, start + 1)
    return start >= 0


def read_choice(prediction, options):
    """CV-Bench and RealWorldQA: the index of the option that a reply names, or None. Never random; the first of six readings that holds.

    The order is the recommended one of the peers (lmms-eval, VLMEvalKit, cambrian): letter alone on the first line; leading label; last
    letter declared after answer, option or choice; the reply is one option's text; exactly one option's text is in a reply no longer than
    twice all options (VLMEvalKit's guard); exactly one stand-alone capital. Letters that no option has do not count.
    """
    letters, text = string.ascii_uppercase[:len(options)], prediction.strip()
    if not text:
        return None
    line = text.splitlines()[0]
    alone = re.sub(r"[\W_]", "", line)
    if len(alone) == 1 and alone.isascii() and alone.upper() in letters:
        return letters.index(alone.upper())
    label = LABEL.match(line)
    if label and (letter := label[label.lastindex].upper()) in letters:
        return letters.index(letter)
    declared = [letter for match in DECLARED.finditer(text) if (letter := match[match.lastindex].upper()) in letters]
    if declared:
        return letters.index(declared[-1])
    same = [i for i, option in enumerate(options) if bare(option) == bare(text)]
    if len(same) == 1:
        return same[0]
    if len(text) <= 2 * sum(map(len, options)):
        present = [i for i, option in enumerate(options) if has_words(text.lower(), option.lower().strip())]
        if len(present) == 1:
            return present[0]
    capitals = {match[1] for match in CAPITAL.finditer(text) if not (match[1] in "AI" and ARTICLE_LIKE.match(text, match.end()))}
    capitals &= set(letters)
    return letters.index(capitals.pop()) if len(capitals) == 1 else None


def gold_choice(answer, options):
    """The index of the gold option, given as its letter (`C`, `(C)`) or its text; None where it is neither."""
    letter, letters = re.sub(r"[\W_]", "", answer), string.ascii_uppercase[:len(options)]
    if len(letter) == 1 and letter in letters:
        return letters.index(letter)
    if answer in options:
        return options.index(answer)
    return next((i for i, option in enumerate(options) if bare(option) == bare(answer)), None)


def choice(prediction, item):
    """Multiple choice: the option read from the reply is one of the golds."""
    chosen = read_choice(prediction, item["options"])
    return None if chosen is None else float(chosen in [gold_choice(answer, item["options"]) for answer in item["answers"]])


def vqa_process(text):
    """EvalAI's answer processor as Pythia/MMF, LLaVA and lmms-eval have it, with its known faults (scoring.md, TextVQA).

    A mark with a space beside it anywhere is deleted, else it becomes a space; periods not before a digit go, the first 32 only.
    """
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip().replace("\n", " ").replace("\t", " ").strip()
    if VQA_ANY_MARK.search(text):
        marks = {ord(mark): "" if mark + " " in text or " " + mark in text else " " for mark in VQA_MARKS if mark in text}
        text = VQA_PERIOD.sub("", text.translate(marks), count=32)
    words = [VQA_NUMBERS.get(word, word) for word in text.split()]
    return " ".join(VQA_RESTORED.get(word, word) for word in words if word not in VQA_ARTICLES)


def vqa(prediction, item):
    """TextVQA: mean over the ten answers of min(matches among the other nine / 3, 1), after EvalAI's processing on both sides (MMF)."""
    said, total = vqa_process(prediction), len(item["answers"])
    same = {answer: vqa_process(answer) == said for answer in set(item["answers"])}
    votes = sum(same[answer] for answer in item["answers"])
    return (votes * min((votes - 1) / 3, 1) + (total - votes) * min(votes / 3, 1)) / total if votes else 0.0


def realworldqa(prediction, item):
    """RealWorldQA: multiple choice or short answer by the question's suffix; short: equality after EvalAI's processing (as molmo)."""
    if is_choice(item):
        return choice(prediction, item)
    said = vqa_process(prediction)
    return float(any(vqa_process(answer) == said for answer in item["answers"]))


def ocrbench(prediction, item):
    """OCRBench: any gold inside the prediction; lower case, newline as space, full width folded; HME100k: case, no spaces (lmms-eval)."""
    def clean(text):
        text = text.strip().replace("\n", " ")
        return text.replace(" ", "") if item.get("dataset") == "HME100k" else text.translate(FULL_WIDTH).lower().strip()
    said = clean(prediction)
    return float(any(clean(answer) in said for answer in item["answers"]))


def relaxed(prediction, item):
    """ChartQA: within 5 percent of the gold where both are numbers and the gold is not 0, else equality without case (pix2struct)."""
    def number(text):
        try:
            return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
        except ValueError:
            return None
    said, text = number(prediction.strip()), prediction.strip().lower()
    for answer in item["answers"]:
        gold = number(answer)
        right = abs(said - gold) / abs(gold) <= 0.05 if said is not None and gold else text == answer.lower()
        if right:
            return 1.0
    return 0.0


def edit_distance(a, b):
    """Levenshtein distance by Myers' bit vectors (J. ACM 46:3, 1999): a column of the table is two integers, so it costs a few steps."""
    if len(a) < len(b):
        a, b = b, a
    places, full, last = {}, (1 << len(a)) - 1, 1 << len(a) >> 1
    for i, character in enumerate(a):
        places[character] = places.get(character, 0) | 1 << i
    up, down, distance = full, 0, len(a)                # vertical differences +1 and -1 of the column; its lowest cell
    for character in b:
        equal = places.get(character, 0)
        zero = (((equal & up) + up) ^ up) | equal
        right_up, right_down = (down | ~(zero | up)) & full, up & zero
        distance += bool(right_up & last) - bool(right_down & last)
        right_up, right_down = right_up << 1 | 1, right_down << 1
        up, down = (right_down | ~(equal | down | right_up)) & full, right_up & (equal | down) & full
    return distance


def anls(prediction, item):
    """DocVQA, InfographicVQA: best 1 - distance / longer length over golds, 0 below a half; lower case, spaces collapsed (anls_star)."""
    said, best = " ".join(prediction.lower().split()), 0.0
    for answer in item["answers"]:
        gold = " ".join(answer.lower().split())
        longer = max(len(said), len(gold))
        if said == gold:
            return 1.0
        if 2 * abs(len(said) - len(gold)) <= longer:     # else the distance alone takes it below one half
            best = max(best, 1 - edit_distance(said, gold) / longer)
    return best if best >= 0.5 else 0.0


def exact(prediction, item):
    """For sets of your own: equality with any gold, case and runs of white space ignored."""
    said = prediction.lower().split()
    return float(any(answer.lower().split() == said for answer in item["answers"]))


RULES = dict(zip(METRICS, (yes_no, choice, realworldqa, vqa, ocrbench, relaxed, anls, exact)))
SOURCE_METRIC = dict(zip(SOURCES, ("yes_no", "choice", "realworldqa", "vqa", "ocrbench", "relaxed", "anls", "anls")))


def rule_of(item):
    """The name of the item's rule: its `metric`, which wins, or its source's; None for an unknown source."""
    return item.get("metric") or SOURCE_METRIC.get(item["source"])


def is_choice(item):
    """Whether the item is multiple choice; RealWorldQA by its question's suffix, without one by whether it has options."""
    short = RR_LETTER not in item["question"] and (RR_SHORT in item["question"] or "options" not in item)
    return rule_of(item) == "choice" or (rule_of(item) == "realworldqa" and not short)


def score_one(prediction, item):
    """(score in [0, 1], parsed) of one prediction text under the item's rule. Pure: nothing is kept between calls."""
    score = RULES[rule_of(item)](prediction, item)
    return (score or 0.0), score is not None


def chance_level(item):
    """The expected score of a blind guess: one in k for k options, one half for yes or no, 0 for free text."""
    return 1 / len(item["options"]) if is_choice(item) else 0.5 if rule_of(item) == "yes_no" else 0.0


def check_item(item, where):
    """Refuse an item that its rule cannot score; `where` names file and line."""
    def bad(expected, found):
        return UserError(f"{where} (id {shown(item['id'])}): expected {expected}, found {shown(repr(found))}. Mend the item file")
    if rule_of(item) is None:
        raise bad(f"a source of {', '.join(SOURCES)}, or 'metric', one of {', '.join(METRICS)}", item["source"])
    if max(map(len, item["answers"])) > MAX_TEXT:
        raise bad(f"answers of at most {MAX_TEXT:,} characters", max(map(len, item["answers"])))
    if rule_of(item) == "yes_no" and yes_no(item["answers"][0], item) is None:
        raise bad("answers[0] to be yes or no (rule yes_no)", item["answers"][0])
    if is_choice(item) and not 2 <= len(item.get("options", ())) <= len(string.ascii_uppercase):
        raise bad("2 to 26 texts in 'options' (multiple choice, letters A to Z)",
                  f"{len(item['options']):,} options" if item.get("options") else None)
    if is_choice(item) and (wrong := [answer for answer in item["answers"] if gold_choice(answer, item["options"]) is None]):
        raise bad("answers that are the letter or the text of an option", wrong[0])
    if not isinstance(item.get("seen", True), bool):
        raise bad("true or false in 'seen'", item["seen"])


# ---- data: one prediction file becomes arrays over the items ----
PRESENT, EMPTY, CREDITED, UNPARSED, FAILED = 1, 2, 4, 8, 16  # bits of Row.flags


class Row:
    """One prediction file as arrays over all N items: score and answer bits (NaN where none), flags (0 where absent), hash of the text."""

    def __init__(self, path, meta, limit, size):
        self.path, self.meta, self.limit = path, meta, limit
        self.paths = [path]                             # text-only: and every other run's file with the same bytes
        self.embedder, self.mode, self.condition = (meta.get(name) for name in ("embedder", "mode", "condition"))
        self.score, self.bits = np.full(size, np.nan), np.full(size, np.nan)
        self.flags, self.text = np.zeros(size, np.uint8), np.zeros(size, np.int64)
        self.examples = {"unparsed": [], "wrong": []}

    def names(self):
        fields = {"embedder": self.embedder, "mode": self.mode, "condition": self.condition, "file": self.path}
        return {name: text if text is None else shown(text, 1000) for name, text in fields.items()}

    def order(self):
        kind = self.condition.split("-")[0]             # shuffled-1, shuffled-2 are repeats of shuffled
        place = CONDITIONS.index(kind) if kind in CONDITIONS else len(CONDITIONS)
        return (self.embedder is None, self.embedder or "", self.mode != "visual_only", self.mode or "", place, self.condition, self.path)


def sidecar(path):
    return path.removesuffix(".jsonl") + ".meta.json"


def expand(patterns, notes):
    """Names and globs to a sorted list of prediction files, each once."""
    paths, skipped = {}, set()
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else [f for f in glob.glob(pattern, recursive=True) if f.endswith(".jsonl")]
        found = [f for f in found if f == pattern or os.path.basename(f) != "scores.jsonl"]      # controls.py scores beside its predictions
        kept = [f for f in found if f == pattern or os.path.exists(sidecar(f))]
        skipped.update(set(found) - set(kept))
        if not kept:
            raise UserError(f"--predictions {shown(pattern)}: expected a file F.jsonl, or a glob of such with F.meta.json beside them, "
                            f"found {len(found)} .jsonl files, none with a sidecar. Check the path, or name such files in full")
        for path in sorted(kept):
            known = paths.setdefault(os.path.realpath(path), path)
            if os.path.exists(sidecar(path)) and not os.path.exists(sidecar(known)):      # of two names, the one with a sidecar
                paths[os.path.realpath(path)] = path
    if skipped:
        notes.append(f"{len(skipped)} .jsonl files that the globs match have no .meta.json beside them and were left out")
    return sorted(paths.values())


def read_sidecar(path, items_hash, size, partial, notes):
    """The sidecar of a prediction file, checked against file and items. Returns (meta, limit: None where it does not bind)."""
    name = sidecar(path)
    if not os.path.exists(name):
        notes.append(f"{shown(path)} has no sidecar, so nothing shows that it was made from these items")
        return {}, None
    meta = read_json(name)
    limit, found = meta.get("limit"), meta.get("items_sha256")
    for field in ("embedder", "mode", "condition", "items_sha256", "predictions_sha256", "readout_sha256"):
        if not isinstance(meta.get(field), (str, type(None))):
            raise UserError(f"{name}: expected a text or null in '{field}', found {shown(repr(meta[field]))}. Predict again")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UserError(f"{name}: expected a whole number above 0 or null in 'limit', found {shown(repr(limit))}. Predict again")
    if meta.get("predictions_sha256") and sha256(path) != meta["predictions_sha256"]:
        raise UserError(f"{path}: its SHA-256 is not the one in its sidecar, so it was changed after predict. Predict again")
    if found is None or (found != items_hash and partial):
        notes.append(f"{shown(path)}: its sidecar names {'no items file' if found is None else 'another items file'}")
    elif found != items_hash:
        raise UserError(f"{path}: expected predictions for the items with SHA-256 {items_hash[:12]}, its sidecar says {shown(found)[:12]}. "
                        "Give the items that predict read, or predict again")
    return meta, limit if limit and limit < size else None


def read_predictions(path, items, index, items_hash, partial, notes):
    """Read and score one prediction file. Every line is checked; a fault is a UserError with file and line number. Returns a Row."""
    meta, limit = read_sidecar(path, items_hash, len(items), partial, notes)
    row, strangers = Row(path, meta, limit, len(items)), 0
    for number, line in read_jsonl(path):
        def bad(expected, found):
            return UserError(f"{path} line {number} (id {shown(line.get('id'))}): expected {expected}, found {shown(repr(found))}. "
                             "Predict again")
        if not isinstance(line.get("id"), str):
            raise bad("a text in 'id'", line.get("id"))
        text, condition, bits = line.get("prediction"), line.get("condition", row.condition), line.get("answer_bits")
        if not isinstance(text, str) and (text is not None or not isinstance(line.get("error"), str)):
            raise bad("a text in 'prediction', or null with a text in 'error'", text)
        if text is not None and len(text) > MAX_TEXT:
            raise bad(f"at most {MAX_TEXT:,} characters in 'prediction'", len(text))
        row.condition = row.condition or condition
        if condition is None:
            raise bad("a name in 'condition', for example \"matched\"", condition)
        if not condition or not isinstance(condition, str) or condition != row.condition:
            raise bad(f"the file's one condition {shown(repr(row.condition))} in 'condition'", condition)
        if bits is not None and not (type(bits) in (int, float) and -1e-6 <= bits < 1e12):
            raise bad("bits of 0 or more, or null, in 'answer_bits'", bits)
        i = index.get(line["id"])
        if i is None or (limit and i >= limit):
            if not partial:
                raise bad(f"an id of the items{f' (the first {limit})' if limit else ''}", line["id"])
            strangers += 1
            continue
        if row.flags[i]:
            raise bad("each id once", "it a second time")
        if text is None:
            row.flags[i] = PRESENT | FAILED
            continue
        score, parsed = score_one(text, items[i])
        blank = not text.strip()
        row.flags[i] = PRESENT | EMPTY * blank | CREDITED * (blank and score > 0) | UNPARSED * (not parsed and not blank)
        row.score[i], row.text[i], row.bits[i] = score, hash(text.strip()), np.nan if bits is None else bits
        kind = "wrong" if parsed else "unparsed"
        if score == 0 and not blank and len(row.examples[kind]) < 3:
            row.examples[kind].append({"id": line["id"], "prediction": shown(text)})
    missing = np.flatnonzero(row.flags[:limit] == 0)
    if len(missing) and (not partial or not row.flags.any()):
        first = ", ".join(shown(items[i]["id"], 40) for i in missing[:3])
        raise UserError(f"{path}: expected the {limit or len(items)} ids of the items, {len(missing)} are missing, first {first}. "
                        "Predict again, or score what is there with --partial")
    if strangers:
        notes.append(f"{shown(path)}: {strangers} predictions with ids that are not among the items were left out")
    return row


# ---- statistics ----
def draw_means(totals, sizes, draws, stream):
    """Bootstrap over clusters: `draws` resampled values of sum(totals) / sum(sizes), or None for one cluster. totals, sizes: (C,).

    Clusters with the same (total, size) are alike to the resampler, so it draws how often each kind comes: exact, and the cost follows
    the number of kinds, not of clusters. Past LARGE kinds the draws come from the ratio's normal limit (delta method).
    """
    clusters, rng = len(totals), np.random.default_rng(stream)
    kinds, counts = np.unique(np.round(totals, 9) + 1j * sizes, return_counts=True)
    if clusters < 2:
        return None
    if len(kinds) > LARGE:
        mean = totals.sum() / sizes.sum()
        error = np.sqrt(clusters / (clusters - 1) * ((totals - mean * sizes) ** 2).sum()) / sizes.sum()
        return rng.normal(mean, error, draws)
    step = max(1, 4_000_000 // len(kinds))              # 32 MB of counts at a time
    sums = [rng.multinomial(clusters, counts / clusters, min(step, draws - start)) @ kinds for start in range(0, draws, step)]
    return np.concatenate(sums).real / np.concatenate(sums).imag


def sign_flip_p(totals, draws, stream):
    """Two-sided p of sum(totals) if each cluster's difference could as well have the other sign: (1 + hits) / (1 + draws). totals: (C,)."""
    kinds, counts = np.unique(np.round(np.abs(totals[totals != 0]), 9), return_counts=True)
    rng, step = np.random.default_rng(stream), max(1, 4_000_000 // max(1, len(kinds)))
    if len(kinds) > LARGE:
        sums = rng.normal(0, np.sqrt((totals ** 2).sum()), draws)
    else:                                               # of `count` clusters alike, Binomial(count, 1/2) keep their sign
        sums = np.concatenate([(2 * rng.binomial(counts, 0.5, (min(step, draws - start), len(kinds))) - counts) @ kinds
                               for start in range(0, draws, step)])
    return float((1 + (np.abs(sums) >= abs(totals.sum()) - 1e-7).sum()) / (1 + draws))


def interval(draws, scale=1.0):
    """The 95% percentile interval [low, high] of bootstrap draws, or None."""
    return None if draws is None else (np.percentile(draws, (2.5, 97.5)) * scale).tolist()


def verdict(bounds, n):
    return "separated" if bounds and (bounds[0] > 0 or bounds[1] < 0) else f"not separated at n={n}"


def average(values, scale=1.0):
    return float(values.mean()) * scale if len(values) else None


class Scorer:
    """The items' side of the statistics: clusters, groups, chance and majority. Each quantity has its own stream of random numbers."""

    def __init__(self, items, seed, draws):
        self.items, self.seed, self.draws, self.everything = items, seed, draws, np.arange(len(items))
        images, answers = {}, {}
        self.clusters = np.array([images.setdefault(item["image"], len(images)) for item in items])
        self.groups = {kind: self.group(kind) for kind in ("domain", "source", "seen")}
        self.chance = np.array([chance_level(item) for item in items])
        for item in items:
            answers.setdefault((item["source"], rule_of(item)), collections.Counter())[item["answers"][0]] += 1
        common = {key: counter.most_common(1)[0][0] for key, counter in answers.items()}
        self.majority = np.array([score_one(common[item["source"], rule_of(item)], item)[0] for item in items])

    def group(self, kind):
        """Item positions by the value of a field, in the usual order of domains and sources, then by name; items without it left out."""
        found = {}
        codes = np.array([found.setdefault(item.get(kind), len(found)) for item in self.items])
        usual = ("natural_image", "scene_text", "visual_document", *SOURCES, True, False)
        names = sorted((n for n in found if n is not None), key=lambda n: (usual.index(n) if n in usual else len(usual), str(n)))
        label = {True: "seen", False: "unseen"}.get if kind == "seen" else lambda name: shown(name, 200)
        return {label(name): np.flatnonzero(codes == found[name]) for name in names}

    def cluster_draws(self, values, places, *name):
        """Totals of `values` over each cluster among the items `places`, and the bootstrap draws of their mean."""
        _, codes = np.unique(self.clusters[places], return_inverse=True)
        totals, sizes = np.bincount(codes, values), np.bincount(codes).astype(float)
        return totals, draw_means(totals, sizes, self.draws, self.stream(*name)) if len(places) else None

    def stream(self, *name):
        return [self.seed, zlib.crc32("\n".join(name).encode("utf-8", "backslashreplace"))]

    def summary(self, row, places, *name):
        """The numbers of one group of one row for scores.json, and the bootstrap draws of its mean."""
        flags = row.flags[places]
        scored = places[(flags & (PRESENT | FAILED)) == PRESENT]
        score, bits = row.score[scored], row.bits[scored][~np.isnan(row.bits[scored])]
        totals, draws = self.cluster_draws(score, scored, *name)
        counts = {word: int(((flags & bit) > 0).sum()) for word, bit in
                  (("empty", EMPTY), ("empty_credited", CREDITED), ("unparsed", UNPARSED), ("failed", FAILED))}
        tried = len(scored) + counts["failed"]
        return {"n": len(scored), "score": average(score, 100), "interval": interval(draws, 100), "clusters": len(totals), **counts,
                "bound": 100 * float(score.sum()) / tried if tried else None,
                "missing": int((places < (row.limit or len(self.items))).sum()) - tried,
                "distinct": len(np.unique(row.text[scored])) / len(scored) if len(scored) else None,
                "chance": average(self.chance[scored], 100), "majority": average(self.majority[scored], 100),
                "bits": average(bits), "bits_n": len(bits)}, draws

    def report(self, row):
        """All groups of one row as a dict for scores.json."""
        vectors = row.meta.get("embeddings") if isinstance(row.meta.get("embeddings"), dict) else {}
        weights = {name: shown(vectors[name], 1000) if vectors.get(name) else None for name in ("model", "revision")}
        result = {**row.names(), **weights, "limit": row.limit, "readout_sha256": row.meta.get("readout_sha256"),
                  "overall": self.summary(row, self.everything, "overall")[0]}
        drawn = {}
        for kind, groups in self.groups.items():
            drawn[kind] = {name: self.summary(row, places, kind, name) for name, places in groups.items()}
            result[f"by_{kind}"] = {name: group for name, (group, _) in drawn[kind].items()}
        domains = [(name, group["score"], group["n"], draws) for name, (group, draws) in drawn["domain"].items() if group["n"]]
        parts = [draws for _, _, _, draws in domains]
        known = bool(parts) and all(draws is not None for draws in parts)
        result["domain_mean"] = {"score": average(np.array([score for _, score, _, _ in domains])),
                                 "interval": interval(np.mean(parts, axis=0), 100) if known else None}
        result["domain_differences"] = []               # of different items, so unpaired: the draws of two domains are independent
        for (a, first, n, draws), (b, second, m, others) in itertools.combinations(domains[:6], 2):
            bounds = interval(draws - others, 100) if draws is not None and others is not None else None
            result["domain_differences"].append({"a": a, "b": b, "difference": first - second, "interval": bounds,
                                                 "verdict": verdict(bounds, n + m)})
        return {**result, "examples": row.examples}

    def difference(self, a, b, places, *name):
        """Paired difference a - b over those items of `places` that both rows scored."""
        both = places[~np.isnan(a.score[places] + b.score[places])]
        delta = a.score[both] - b.score[both]
        totals, draws = self.cluster_draws(delta, both, *name, "pair")
        bounds, tied = interval(draws, 100), int((np.abs(delta) <= 1e-9).sum())
        return {"n": len(both), "difference": average(delta, 100), "interval": bounds,
                "p": sign_flip_p(totals, self.draws, self.stream(*name, "flips")) if len(both) else None,
                "won": int((delta > 1e-9).sum()), "lost": int((delta < -1e-9).sum()), "tied": tied, "verdict": verdict(bounds, len(both))}

    def compare(self, a, b, why):
        """One pair of rows, overall, per domain and per source, with the usable information of `a` where `b` is text-only."""
        result = {"why": why, "a": a.names(), "b": b.names(), **self.difference(a, b, self.everything, "overall")}
        for kind in ("domain", "source"):
            result[f"by_{kind}"] = {name: self.difference(a, b, places, kind, name) for name, places in self.groups[kind].items()}
        saved = b.bits - a.bits
        both = np.flatnonzero(~np.isnan(saved))
        if b.condition == "text_only" and len(both):
            bounds = interval(self.cluster_draws(saved[both], both, "bits")[1])
            result["usable_information_bits"] = {"mean": average(saved[both]), "interval": bounds, "n": len(both)}
        return result


def pairs_of(rows, named):
    """The pairs to report, (a, b, why): matched against the controls of its embedder and mode, controls against text-only, joint against
    visual-only, and the named ones. A control without embedder or mode goes with every one; of several runs, with that of its folder."""
    def folders(row):
        return {os.path.dirname(path) for path in row.paths}

    def fits(control, row):
        rivals = {os.path.dirname(m.path) for m in rows if m.condition == "matched" and m is not row
                  and (m.embedder, m.mode) == (row.embedder, row.mode)}
        return (control.embedder in (None, row.embedder) and control.mode in (None, row.mode)
                and (folders(control) & folders(row) or not folders(control) <= rivals))
    by_path, pairs = {os.path.realpath(path): row for row in rows for path in row.paths}, []
    for a, b in itertools.product(rows, rows):
        if a.condition == "matched" and b.condition != "matched" and fits(b, a):
            pairs.append((a, b, "matched against control"))
        elif a.condition.split("-")[0] in ("zero", "shuffled") and b.condition == "text_only" and fits(b, a):
            pairs.append((a, b, "control against text-only"))
        elif (a.condition, b.condition, a.mode, b.mode) == ("matched", "matched", "vl_joint", "visual_only") and a.embedder == b.embedder:
            pairs.append((a, b, "joint against visual-only"))
    for a, b in named:
        a, b = by_path[os.path.realpath(a)], by_path[os.path.realpath(b)]
        if (a, b) not in [pair[:2] for pair in pairs]:
            pairs.append((a, b, "named by --pair"))
    return pairs


# ---- tables ----
def figure(value, bounds=None, digits=2):
    """A number with its interval for a table; a dash where it is unknown."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + (f" [{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]" if bounds else "")


def build_tables(report, paper):
    """(title, header, rows of texts) for each table that people read."""
    names, rows, groups = ["embedder", "mode", "condition"], report["rows"], report["groups"]
    label = lambda row: [row[name] or "-" for name in names]
    score = lambda group: figure(group["score"], group["interval"])

    def count(row):
        n, missing = row["overall"]["n"], row["overall"]["missing"]
        return f"{n}" + (f" of {n + missing}, PARTIAL" if missing else "") + (f", first {row['limit']} items" if row["limit"] else "")

    def overall(group):
        return score(group) + (f"; {group['bound']:.2f} with {group['failed']} failed at 0" if group["failed"] else "")
    body = [[*label(row), count(row), overall(row["overall"]), score(row["domain_mean"]), *map(score, row["by_domain"].values()),
             row["file"]] for row in rows]
    for row in paper.get("rows", []):
        domains = [None if name in PAPER_FIELDS else row.get(name) for name in groups["domain"]]
        body.append([f"{row.get('embedder') or '-'} (paper)", row.get("mode") or "-", row.get("condition") or "-",
                     figure(row.get("n"), digits=0), figure(row.get("score")), "-", *map(figure, domains),
                     f"published, {row.get('source') or paper.get('source') or 'source not given'}"])
    tables = [("Score, 0-100, with 95% interval", [*names, "n", "all items", "mean of domains", *groups["domain"], "file"], body),
              ("Score per source", [*names, *groups["source"]], [[*label(row), *map(score, row["by_source"].values())] for row in rows])]
    if groups["seen"]:
        tables.append(("Score by whether answers[0] is an answer in training", [*names, *(f"answers {name}" for name in groups["seen"])],
                       [[*label(row), *(f"{score(group)} (n={group['n']})" for group in row["by_seen"].values())] for row in rows]))
    whole, broken = ("empty", "empty_credited", "unparsed", "failed"), ("distinct", "chance", "majority", "bits")
    tables.append(("How far to trust it", [*names, *(name.replace("_", " ") for name in whole), "distinct predictions", "chance",
                                           "majority answer", "bits per answer"],
                   [[*label(row), *(str(row["overall"][name]) for name in whole), *(figure(row["overall"][name]) for name in broken)]
                    for row in rows]))
    twice = [names for names, n in collections.Counter(tuple(label(row)) for row in rows).items() if n > 1]
    side = lambda row: " ".join(text for text in label(row) if text != "-") + (f" ({row['file']})" if tuple(label(row)) in twice else "")
    body = []
    for pair in report["pairs"]:
        bits = pair.get("usable_information_bits", {"mean": None, "interval": None})
        body.append([side(pair["a"]), side(pair["b"]), str(pair["n"]), figure(pair["difference"], pair["interval"]),
                     figure(pair["p"], digits=4), f"{pair['won']} / {pair['lost']} / {pair['tied']}",
                     figure(bits["mean"], bits["interval"]), pair["verdict"]])
    if body:
        tables.append(("Paired differences, first minus second",
                       ["first", "second", "n", "difference", "p", "won / lost / tied", "usable information (bits)", "verdict"], body))
    return tables


def markdown(title, header, rows):
    cell = lambda text: re.sub(r"([|\\`*<]|\](?=[(\[]))", r"\\\1", shown(text, 160))
    lines = [map(cell, header), ["---"] * len(header), *(map(cell, row) for row in rows)]
    return f"**{title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def latex(title, header, rows):
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", **{c: "\\" + c for c in "&%$#_{}"}}
    lines = [" & ".join("".join(special.get(c, c) for c in shown(text, 160)) for text in row) + r" \\" for row in [header, *rows]]
    return "\n".join([f"% {title}", rf"\begin{{tabular}}{{{'l' * len(header)}}}", r"\hline", lines[0], r"\hline", *lines[1:], r"\hline",
                      r"\end{tabular}", ""])


def print_csv(report, paper):
    """One line a row and group, every number in its own column; paper rows last."""
    fields = ("n", "score", "empty", "empty_credited", "unparsed", "failed", "bound", "missing", "distinct", "chance", "majority", "bits")
    names = ("embedder", "mode", "condition", "file", "limit")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    plain = lambda text: "'" + text if isinstance(text, str) and text[:1] in tuple("=+-@") else text    # no formula for a spreadsheet
    writer.writerow([*names, "group", "name", "low", "high", *fields])
    for row in report["rows"]:
        groups = [("all", "all", row["overall"]), *((kind, *pair) for kind in report["groups"] for pair in row[f"by_{kind}"].items())]
        for kind, name, group in groups:
            writer.writerow([*(plain(row[field]) for field in names), kind, plain(name), *(group["interval"] or (None, None)),
                             *(group[field] for field in fields)])
    for row in paper.get("rows", []):
        label = [f"{row.get('embedder')} (paper)", row.get("mode"), row.get("condition"), row.get("source") or paper.get("source")]
        writer.writerow([*(text and plain(shown(text, 160)) for text in label), None, "all", "all", None, None, row.get("n"),
                         row.get("score")])


def read_paper(path):
    """Published figures: {"source": text, "rows": [{embedder, mode, condition, n, score, one key a domain, source}]}; unknown is null."""
    paper = read_json(path)
    if not isinstance(paper.get("rows"), list) or not all(isinstance(row, dict) for row in paper["rows"]):
        raise UserError(f"{path}: expected a list of objects in 'rows', found {shown(repr(paper.get('rows')))}")
    for number, row in enumerate([paper, *paper["rows"]]):
        for key, value in row.items():
            text = key in PAPER_FIELDS[:5]
            if not (value is None or isinstance(value, str if text else (int, float)) or number == 0 and key != "source"):
                raise UserError(f"{path} row {number}: expected {'a text' if text else 'a number'} or null in '{shown(key)}', "
                                f"found {shown(repr(value))}")
    return paper


def write_scores(path, rows, items):
    """scores.jsonl: one line an item and prediction file, in the order of the table and of the items."""
    def write(file):
        for row in rows:
            names = json.dumps(row.names())[1:-1]
            for i in np.flatnonzero(row.flags).tolist():
                flags, score = int(row.flags[i]), "null" if row.flags[i] & FAILED else repr(float(row.score[i]))
                marks = [f', "{word}": true' for word, bit in (("empty", EMPTY), ("unparsed", UNPARSED), ("failed", FAILED)) if flags & bit]
                file.write(f'{{"id": {json.dumps(items[i]["id"])}, "score": {score}, {names}{"".join(marks)}}}\n'.encode())
    write_atomic(path, write)


# ---- main ----
def parse_args(argv=None):
    def whole(low, high):
        def number(text):
            if not text.isdecimal() or len(text) > 10 or not low <= int(text) <= high:
                raise argparse.ArgumentTypeError(f"expected a whole number from {low:,} to {high:,}, found {shown(text)}")
            return int(text)
        return number
    parser = argparse.ArgumentParser(description="Score predictions, with intervals and paired differences.", allow_abbrev=False)
    parser.add_argument("--items", required=True, metavar="F.jsonl", help="item file that the predictions were made from")
    parser.add_argument("--predictions", required=True, nargs="+", metavar="F.jsonl", help="prediction files or globs (** for any depth)")
    parser.add_argument("--out", metavar="DIR", help="folder for scores.json and scores.jsonl, replaced if there (default: write no file)")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("A", "B"), help="two files: also report A - B; repeatable")
    parser.add_argument("--partial", action="store_true", help="accept files that lack items; every table says so (default: an error)")
    parser.add_argument("--seed", type=whole(0, 2 ** 32 - 1), default=0, help="seed of the resampling (default: 0)")
    parser.add_argument("--bootstrap", type=whole(100, 1_000_000), default=10_000,
                        help="resamples for intervals, sign flips for p (default: 10000)")
    parser.add_argument("--paper", metavar="FILE", help="published figures, added as marked rows, such as results/paper.json")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--latex", action="store_true", help="print the tables as LaTeX (default: Markdown)")
    form.add_argument("--csv", action="store_true", help="print one CSV with a line for each row and group (default: Markdown)")
    args = parser.parse_args(argv)
    if "" in (args.items, args.out, args.paper, *args.predictions):
        parser.error("expected a name after --items, --predictions, --out and --paper, found an empty text (a variable that is not set?)")
    return args


def main(argv=None):
    args, started, notes = parse_args(argv), time.time(), []
    for name, version in (("Python", platform.python_version()), ("numpy", np.__version__)):
        if not version.startswith(TESTED[name]):
            print(f"note: {name} {version} is untested here (tested: {TESTED[name]}x)", file=sys.stderr)
    paper = read_paper(args.paper) if args.paper else {}
    named = list(itertools.chain(*args.pair))
    for path in named:
        if not os.path.exists(path):
            raise UserError(f"--pair {shown(path)}: not found. Give two prediction files by name")
    paths = expand([*args.predictions, *named], notes)
    items = read_items(args.items)
    for number, item in enumerate(items, 1):            # an item file has one item a line
        check_item(item, f"{args.items} line {number}")
    items_hash, index = sha256(args.items), {item["id"]: i for i, item in enumerate(items)}
    few = sum(rule_of(item) == "vqa" and len(item["answers"]) < 4 for item in items)
    if few:
        notes.append(f"{few} items under the rule vqa have fewer than 4 answers, so nothing scores 1 on them; 'exact' suits such sets")
    if args.out:
        try:
            os.makedirs(args.out, exist_ok=True)
        except OSError as error:
            raise cannot_write(args.out, error) from error
    with locked(os.path.join(args.out, "scores.json")) if args.out else contextlib.nullcontext():
        rows, floors = [], {}                           # floors: text-only rows by embedder, mode and content
        for path in paths:
            row = read_predictions(path, items, index, items_hash, args.partial, notes)
            print(f"scored {shown(path)}: {np.count_nonzero(row.flags):,} rows, {time.time() - started:.1f} s", file=sys.stderr)
            if row.condition == "text_only":            # it needs no embedder, so the controls of each run hold the same one
                first = floors.setdefault((row.embedder, row.mode, sha256(path)), row)
                if first is not row:
                    first.paths.append(path)
                    continue
            rows.append(row)
        if same := sum(len(row.paths) - 1 for row in rows):
            notes.append(f"{same} text_only files have the same bytes as another and share its row")
        rows.sort(key=Row.order)
        scorer = Scorer(items, args.seed, args.bootstrap)
        images = int(scorer.clusters.max()) + 1
        report = {"format_version": FORMAT_VERSION,
                  "items": {"file": shown(args.items, 1000), "sha256": items_hash, "n": len(items), "images": images},
                  "seed": args.seed, "bootstrap": args.bootstrap, "partial": args.partial, "notes": notes,
                  "groups": {kind: {name: len(places) for name, places in groups.items()} for kind, groups in scorer.groups.items()},
                  "rows": [scorer.report(row) for row in rows], "pairs": [scorer.compare(*pair) for pair in pairs_of(rows, args.pair)]}
        if args.out:
            facts = {"argv": [shown(word, 1000) for word in (sys.argv[1:] if argv is None else argv)], "numpy": np.__version__,
                     "python": platform.python_version(), "seconds": round(time.time() - started, 1),
                     "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            lines = os.path.join(args.out, "scores.jsonl")
            write_scores(f"{lines}.staged", rows, items)  # both are on disk before either is replaced: a full disk leaves both
            write_json(os.path.join(args.out, "scores.json"), {**report, "scores_sha256": sha256(f"{lines}.staged"), "run": facts})
            os.replace(f"{lines}.staged", lines)
    if args.csv:
        return print_csv(report, paper)
    partial, comment = "PARTIAL (--partial: rows may lack items). " if args.partial else "", "% " if args.latex else ""
    for title, header, body in build_tables(report, paper):
        print((latex if args.latex else markdown)(partial + title, header, body))
    print(f"{comment}{partial}Items {shown(args.items)} (SHA-256 {items_hash[:12]}), {len(items):,} items on {images:,} images; "
          f"seed {args.seed}; {args.bootstrap:,} resamples over images; p-values not corrected for the number of pairs.")
    for note in notes + (["rows marked (paper) are published for the paper's own test split and were not run here"] if paper else []):
        print(f"{comment}Note: {note}.")


if __name__ == "__main__":
    run(main, "No file under its final name is half written; run the same command again")
