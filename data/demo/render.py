"""Draw the demo's images and questions: three kinds of picture, from a seed, byte for byte the same every time.

    python data/demo/render.py                     # writes data/demo/items/{train,dev,test}.jsonl and data/demo/images/ (about 20 s)

READS   nothing but this file; the font is the one inside Pillow.
WRITES  data/demo/items/SPLIT.jsonl   items in the toolkit's format, plus `seen`: false where answers[0] is held out of both training sets
        data/demo/images/SPLIT-NNNNN.png   128 x 128 RGB
        The digests of all pixels and of the item files are compared with data/demo/manifest.json; a difference stops with exit 1.

Every picture comes from its own generator, seeded with "SPLIT/INDEX", so splits share no seed. Words and numbers are divided by a hash:
a third of them (`held_out`) is never drawn in the splits that train anything (train, embedder, clip), and makes up most of dev and test.
"""
import argparse
import hashlib
import json
import os
import random
import sys

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 128
SPLITS = {"train": 2400, "dev": 180, "test": 180}  # pictures; a third per domain
QUESTIONS = {"train": 3, "dev": 2, "test": 2}       # questions a picture
COLOURS = {"red": (205, 40, 40), "green": (40, 150, 60), "blue": (45, 80, 210), "yellow": (235, 205, 40), "purple": (140, 50, 170), "orange": (240, 130, 30)}
SHAPES = ("circle", "square", "triangle", "star", "cross")
COLUMNS, ROWS = ("left", "middle", "right"), ("top", "middle", "bottom")
TITLES = ("Sales", "Stock", "Costs", "Hours", "Votes", "Goals", "Rain", "Mail")
TRENDS = ("rising", "falling", "flat")
CONSONANTS, VOWELS = "BDFGHKLMNPRSTVZ", "AEIOU"
WORD = "\nAnswer with a single word."
NUMBER = "\nAnswer with a number."
YES_NO = "\nAnswer yes or no."
LETTER = "\nAnswer with the option's letter."


def held_out(text):
    """True for the third of all words and numbers that no training split may show."""
    return hashlib.md5(text.encode()).digest()[0] % 3 == 0


def fresh(rng, split, draw):
    """Draw a word or number: never a held-out one in a training split, a held-out one three times out of four in dev and test."""
    wanted = split in ("dev", "test") and rng.random() < 0.75
    while held_out(text := draw()) != wanted:
        pass
    return text


def word(rng, split, length):
    """A pronounceable word of capitals, consonants and vowels by turns."""
    return fresh(rng, split, lambda: "".join(rng.choice(VOWELS if i % 2 else CONSONANTS) for i in range(length)))


def number(rng, split):
    """A number of two digits, as text."""
    return fresh(rng, split, lambda: str(rng.randrange(10, 100)))


FONTS = {}


def font(size):
    if size not in FONTS:
        FONTS[size] = ImageFont.load_default(size)
    return FONTS[size]


def write(draw, text, x, y, size, fill, glyphs):
    """Write text centred at (x, y); note each character, its centre and its place in the text for the embedder's training."""
    face = font(size)
    width = face.getlength(text)
    draw.text((x, y), text, fill, face, anchor="mm")
    for i, character in enumerate(text):
        centre = (face.getlength(text[:i]) + face.getlength(text[:i + 1])) / 2
        glyphs.append((character, x - width / 2 + centre, y, i))


def question(kind, text, answer, metric="exact", options=None):
    return {"kind": kind, "question": text, "answer": answer, "metric": metric, "options": options}


def choices(rng, kind, text, answer, others):
    """A multiple-choice question: options in a random order, the answer is the letter."""
    options = [answer, *others]
    rng.shuffle(options)
    lines = "".join(f"\n({letter}) {option}" for letter, option in zip("ABCD", options))
    return question(kind, text + lines + LETTER, "ABCD"[options.index(answer)], "choice", options)


# ---------------------------------------------------------------- natural images: coloured objects
def draw_shape(draw, shape, x, y, r, fill):
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill)
    elif shape == "square":
        draw.rectangle((x - r * 0.9, y - r * 0.9, x + r * 0.9, y + r * 0.9), fill)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill)
    elif shape == "cross":
        draw.rectangle((x - r, y - r * 0.35, x + r, y + r * 0.35), fill)
        draw.rectangle((x - r * 0.35, y - r, x + r * 0.35, y + r), fill)
    else:
        points = [(r if i % 2 == 0 else r * 0.45, -90 + 36 * i) for i in range(10)]
        draw.polygon([(x + d * np.cos(np.radians(a)), y + d * np.sin(np.radians(a))) for d, a in points], fill)


def scene(rng, split):
    """Two to five coloured shapes on a plain or graded ground. Returns image, questions, facts."""
    ground = np.array([rng.randrange(200, 256) for _ in range(3)], np.float32)
    slope = np.array([rng.randrange(-40, 1) for _ in range(3)], np.float32)
    pixels = ground + slope * np.linspace(0, 1, SIDE, dtype=np.float32)[:, None, None]
    image = Image.fromarray(np.broadcast_to(pixels, (SIDE, SIDE, 3)).clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    objects = []
    for cell in rng.sample(range(9), rng.randrange(2, 6)):
        shape, colour, size = rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice(("small", "large"))
        x, y = 22 + 42 * (cell % 3) + rng.randrange(-4, 5), 22 + 42 * (cell // 3) + rng.randrange(-4, 5)
        draw_shape(draw, shape, x, y, (9 if size == "small" else 17) + rng.randrange(-1, 2), COLOURS[colour])
        objects.append({"shape": shape, "colour": colour, "size": size, "x": x, "y": y, "column": cell % 3, "row": cell // 3})
    shapes, colours = [o["shape"] for o in objects], [o["colour"] for o in objects]
    single = [o for o in objects if shapes.count(o["shape"]) == 1]
    asked = []
    for o in single:
        asked.append(question("colour", f"What colour is the {o['shape']}?{WORD}", o["colour"]))
        asked.append(question("size", f"Is the {o['shape']} small or large?{WORD}", o["size"]))
        asked.append(question("column", f"Is the {o['shape']} left, middle or right?{WORD}", COLUMNS[o["column"]]))
        others = rng.sample([c for c in COLOURS if c != o["colour"]], 3)
        asked.append(choices(rng, "choice", f"Which colour is the {o['shape']}?", o["colour"], others))
    asked += [question("shape", f"Which shape is {o['colour']}?{WORD}", o["shape"]) for o in objects if colours.count(o["colour"]) == 1]
    asked.append(question("count", f"How many objects are there?{NUMBER}", str(len(objects))))
    kind = rng.choice(("colour", "shape"))
    thing = rng.choice(list(COLOURS) if kind == "colour" else SHAPES)
    if rng.random() < 0.7:
        thing = rng.choice(objects)[kind]
    asked.append(question("count_of", f"How many {thing} objects are there?{NUMBER}" if kind == "colour" else f"How many {thing} shapes are there?{NUMBER}",
                          str((colours if kind == "colour" else shapes).count(thing))))
    o = rng.choice(objects)
    if rng.random() < 0.5:
        asked.append(question("exists", f"Is there a {o['colour']} {o['shape']}?{YES_NO}", "yes", "yes_no"))
    else:                                               # the wrong pair shares a colour or a shape with a real object
        pairs = [(c, o["shape"]) for c in COLOURS] + [(o["colour"], s) for s in SHAPES]
        c, s = rng.choice([p for p in pairs if p not in {(q["colour"], q["shape"]) for q in objects}])
        asked.append(question("exists", f"Is there a {c} {s}?{YES_NO}", "no", "yes_no"))
    if len(single) > 1:
        a, b = rng.sample(single, 2)
        if a["column"] != b["column"]:
            asked.append(question("relation", f"Is the {a['shape']} left of the {b['shape']}?{YES_NO}", "yes" if a["column"] < b["column"] else "no", "yes_no"))
        if a["row"] != b["row"]:
            asked.append(question("relation", f"Is the {a['shape']} above the {b['shape']}?{YES_NO}", "yes" if a["row"] < b["row"] else "no", "yes_no"))
    return image, asked, {"objects": objects, "glyphs": []}


# ---------------------------------------------------------------- scene text: signs, labels, plates
def texture(rng):
    """A rough ground: noise, stripes or blotches in one muted colour."""
    noise = np.random.default_rng(rng.getrandbits(32))
    base = np.array([rng.randrange(90, 190) for _ in range(3)], np.float32)
    kind = rng.randrange(3)
    if kind == 0:
        grain = noise.normal(0, 14, (SIDE, SIDE, 1))
    elif kind == 1:
        grain = 16 * np.sign(np.sin(np.arange(SIDE) / rng.uniform(2, 6)))[None, :, None] + noise.normal(0, 5, (SIDE, SIDE, 1))
    else:
        grain = np.kron(noise.normal(0, 16, (16, 16, 1)), np.ones((8, 8, 1)))
    return Image.fromarray((base + grain).clip(0, 255).astype(np.uint8))


def put_sign(rng, image, text, colour, centre_y, size, glyphs):
    """A coloured board with text, turned by up to 12 degrees."""
    face, angle = font(size), rng.uniform(-12, 12)
    width, height = int(face.getlength(text)) + 16, size + 12
    x = SIDE / 2 + rng.uniform(-1, 1) * max(0, (SIDE - width) / 2 - 6)
    y = centre_y + rng.uniform(-4, 4)
    board = Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 0))
    draw, local = ImageDraw.Draw(board), []
    box = (64 - width / 2, 64 - height / 2, 64 + width / 2, 64 + height / 2)
    ink = (20, 20, 20) if colour in ("yellow", "orange") else (250, 250, 250)
    draw.rounded_rectangle(box, rng.choice((0, 4, 9)), COLOURS[colour], ink if rng.random() < 0.5 else None, 2)
    write(draw, text, 64, 64, size, ink, local)
    board = board.rotate(angle, Image.Resampling.BICUBIC)
    image.paste(board, (round(x - 64), round(y - 64)), board)
    turn = np.radians(-angle)
    for character, gx, gy, i in local:
        dx, dy = gx - 64, gy - 64
        glyphs.append((character, x + dx * np.cos(turn) - dy * np.sin(turn), y + dx * np.sin(turn) + dy * np.cos(turn), i))


def signs(rng, split):
    """One or two boards with a word, or a plate with a number. Returns image, questions, facts."""
    image, glyphs, boards = texture(rng), [], []
    two = rng.random() < 0.45
    for place in range(2 if two else 1):
        plate = rng.random() < 0.25
        text = number(rng, split) if plate else word(rng, split, rng.choice((3, 4, 5)))
        colour = rng.choice([c for c in COLOURS if c not in [b["colour"] for b in boards]])
        size = rng.randrange(20, 26) if two else rng.randrange(22, 29)
        put_sign(rng, image, text, colour, (36 if place == 0 else 92) if two else rng.uniform(40, 88), size, glyphs)
        boards.append({"text": text, "colour": colour, "plate": plate})
    asked = []
    for place, b in enumerate(boards):
        noun = "number" if b["plate"] else "word"
        metric, ask = ("exact", NUMBER) if b["plate"] else ("anls", WORD)
        if two:
            asked.append(question("read_place", f"What {noun} is on the {('upper', 'lower')[place]} sign?{ask}", b["text"], metric))
            asked.append(question("read_colour", f"What {noun} is on the {b['colour']} sign?{ask}", b["text"], metric))
            asked.append(question("sign_colour", f"What colour is the {('upper', 'lower')[place]} sign?{WORD}", b["colour"]))
            if b["text"] != boards[1 - place]["text"]:
                asked.append(choices(rng, "which", f"Which {noun} is on the {b['colour']} sign?", b["text"], [boards[1 - place]["text"]]))
        else:
            asked.append(question("read", f"What {noun} is on the sign?{ask}", b["text"], metric))
            asked.append(question("read", f"What does the sign say?{ask}", b["text"], metric))
            asked.append(question("sign_colour", f"What colour is the sign?{WORD}", b["colour"]))
    return image, asked, {"boards": boards, "glyphs": glyphs}


# ---------------------------------------------------------------- visual documents: tables, receipts, charts
def document(rng, split):
    """A small table, receipt, bar chart or line chart. Returns image, questions, facts."""
    paper = tuple(rng.randrange(238, 256) for _ in range(3))
    image, glyphs = Image.new("RGB", (SIDE, SIDE), paper), []
    draw = ImageDraw.Draw(image)
    kind = rng.choice(("table", "receipt", "bars", "line"))
    title, ink = rng.choice(TITLES), tuple(rng.randrange(0, 60) for _ in range(3))
    labels = []
    while len(labels) < 3:
        if (label := word(rng, split, 3)) not in labels:
            labels.append(label)
    values = []
    while len(values) < 3:
        if (value := number(rng, split)) not in values:
            values.append(value)
    trend, asked = None, []
    shift = rng.randrange(-3, 4)
    write(draw, title, 64 + shift, 12, rng.randrange(15, 19), ink, [])    # titles are few words, learnt whole
    if kind in ("table", "receipt"):
        size = rng.randrange(17, 21)
        for row, (label, value) in enumerate(zip(labels, values)):
            y = 42 + 32 * row + shift
            write(draw, label, 34 + shift, y, size, ink, glyphs)
            write(draw, value, 96 + shift, y, size, ink, glyphs)
            if kind == "table":
                draw.line((4, y + 16, 124, y + 16), ink)
        if kind == "table":
            draw.line((66, 28, 66, 124), ink)
            draw.rectangle((4, 26, 124, 125), None, ink)
        else:
            draw.line((10, 24, 118, 24), ink, 2)
    elif kind == "bars":
        for column, (label, value) in enumerate(zip(labels, values)):
            x, top = 24 + 40 * column, 104 - int(value) * 0.62
            draw.rectangle((x - 12, top, x + 12, 106), rng.choice(list(COLOURS.values())))
            write(draw, value, x, top - 9, 16, ink, glyphs)
            write(draw, label, x, 117, 15, ink, glyphs)
        draw.line((4, 106, 124, 106), ink)
    else:
        trend = rng.choice(TRENDS)
        start, step = rng.uniform(0.35, 0.65), {"rising": 1, "falling": -1, "flat": 0}[trend]
        heights = [start + step * 0.13 * (i - 1.5) * rng.uniform(0.8, 1.2) + rng.uniform(-0.02, 0.02) for i in range(4)]
        points = [(16 + 32 * i, 106 - 66 * h) for i, h in enumerate(heights)]
        draw.line(points, rng.choice(list(COLOURS.values())), 3)
        draw.line((6, 26, 6, 106, 124, 106), ink)
        labels, values = labels[:2], values[:2]                 # first and last point carry a number and a label
        for (x, y), label, value, at in zip((points[0], points[-1]), labels, values, (24, 104)):
            write(draw, value, at, y - 12, 16, ink, glyphs)
            write(draw, label, at, 117, 15, ink, glyphs)
        asked.append(question("trend", f"Is the line rising, falling or flat?{WORD}", trend))
    asked.append(question("title", f"What is the title?{WORD}", title))
    asked.append(question("first", f"What is the first label?{WORD}", labels[0], "anls"))
    asked.append(question("last", f"What is the last label?{WORD}", labels[-1], "anls"))
    asked.append(question("first_value", f"What is the first number?{NUMBER}", values[0], "relaxed"))
    for label, value in zip(labels, values):
        asked.append(question("lookup", f"What is the value of {label}?{NUMBER}", value, "relaxed"))
        asked.append(question("reverse", f"Which label has {value}?{WORD}", label, "anls"))
    if kind != "line":
        asked.append(question("largest", f"Which label has the largest number?{WORD}", max(zip(map(int, values), labels))[1], "anls"))
        asked.append(question("largest_value", f"What is the largest number?{NUMBER}", max(values, key=int), "relaxed"))
    return image, asked, {"glyphs": glyphs, "document": kind, "title": title, "labels": labels, "values": values, "trend": trend}


DOMAINS = (("natural_image", "DemoScenes", scene), ("scene_text", "DemoSigns", signs), ("visual_document", "DemoDocuments", document))


def render(split, index):
    """Picture `index` of a split. Returns (image, domain number, list of all questions in random order of kind, facts)."""
    rng = random.Random(f"{split}/{index}")
    domain = index % 3
    image, asked, facts = DOMAINS[domain][2](rng, split)
    by_kind = {}
    for q in asked:
        by_kind.setdefault(q["kind"], []).append(q)
    kinds = list(by_kind)
    rng.shuffle(kinds)                                  # first one question of each kind, so that frequent kinds do not crowd out the rest
    first = [rng.choice(by_kind[kind]) for kind in kinds]
    rest = [q for q in asked if not any(q is f for f in first)]
    rng.shuffle(rest)
    return image, domain, first + rest, facts


def items_of(split, index, asked):
    """The item-file rows of one picture."""
    domain, source, _ = DOMAINS[index % 3]
    for n, q in enumerate(asked[:QUESTIONS[split]]):
        item = {"id": f"{split}-{index:05d}-{n}", "image": f"{split}-{index:05d}.png", "question": q["question"], "answers": [q["answer"]],
                "source": source, "domain": domain, "metric": q["metric"], "kind": q["kind"]}
        if q["options"]:
            item["options"] = q["options"]
        if split != "train":
            answer = q["answer"]
            item["seen"] = not ((answer.isupper() and len(answer) > 1 or answer.isdigit() and len(answer) > 1) and held_out(answer))
        yield item


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", default=os.path.dirname(os.path.abspath(__file__)), help="folder for items/ and images/ (default: this script's folder)")
    parser.add_argument("--update-manifest", action="store_true", help="write the digests to manifest.json instead of comparing with them")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    os.makedirs(os.path.join(args.out, "items"), exist_ok=True)
    os.makedirs(os.path.join(args.out, "images"), exist_ok=True)
    manifest, digests = {}, set()
    for split, count in SPLITS.items():
        lines, pixels = [], hashlib.sha256()
        for index in range(count):
            image, _, asked, _ = render(split, index)
            raw = image.tobytes()
            if raw in digests:
                print(f"error: {split}/{index} is pixel for pixel an earlier picture; the splits must not share one", file=sys.stderr)
                return 1
            digests.add(raw)
            pixels.update(raw)
            path = os.path.join(args.out, "images", f"{split}-{index:05d}.png")
            image.save(path + ".tmp", "PNG", compress_level=1)
            os.replace(path + ".tmp", path)
            lines += [json.dumps(item) for item in items_of(split, index, asked)]
        text = "\n".join(lines) + "\n"
        path = os.path.join(args.out, "items", f"{split}.jsonl")
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(path + ".tmp", path)
        manifest[split] = {"pictures": count, "items": len(lines), "pixels_sha256": pixels.hexdigest(), "items_sha256": hashlib.sha256(text.encode()).hexdigest()}
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "manifest.json")
    if args.update_manifest:
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=2) + "\n")
    else:
        with open(path, encoding="utf-8") as file:
            expected = json.load(file)
        if expected != manifest:
            print(f"error: {path}: the drawn pictures or items differ from its digests (expected {expected}, found {manifest}). Install the "
                  "pinned Pillow of requirements.txt and draw again", file=sys.stderr)
            return 1
    print(json.dumps({split: manifest[split]["items"] for split in manifest}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
