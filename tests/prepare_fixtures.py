"""Small copies of the public sources in their real column layout, for tests/test_prepare.py.

Each layout below was read from a public card or loader; its place and commit stand beside it. The rows are invented, the images are drawn.
(lmms-eval 4be7ee0e, 2026, reads MME, RealWorldQA, textvqa, ChartQA and DocVQA from their new home lmms-lab-encoder.)
"""

import functools
import io
import json
import os
import random
import tarfile

import numpy as np
from PIL import Image, ImageDraw

STRING, INT32, INT64, FLOAT = "string", "int32", "int64", "float64"
LAYOUTS = {
    # huggingface.co/datasets/lmms-lab/MME/blob/main/README.md, dataset_info; read by lmms-eval 75571cf lmms_eval/tasks/mme/utils.py
    "MME": {"question_id": STRING, "image": "image", "question": STRING, "answer": STRING, "category": STRING},
    # CV-Bench's card as kept in ZTERobot/EmbodiedBrain1.0 f75bb5d evaluation/src/cv_bench/README.md (field table);
    # read by lmms-eval 75571cf lmms_eval/tasks/cv_bench/utils.py
    "CV-Bench": {
        "idx": INT64,
        "type": STRING,
        "task": STRING,
        "image": "image",
        "question": STRING,
        "choices": [STRING],
        "answer": STRING,
        "prompt": STRING,
        "filename": STRING,
        "source": STRING,
        "source_dataset": STRING,
        "source_filename": STRING,
        "target_class": STRING,
        "target_size": INT64,
        "bbox": [[FLOAT]],
    },
    # lmms-eval 75571cf lmms_eval/tasks/realworldqa/utils.py reads image, question, answer; the card (907c4e5) was listed but not readable
    "RealWorldQA": {"question": STRING, "answer": STRING, "image": "image"},
    # huggingface.co/datasets/pppop7/textvqa/blob/main/README.md 21253e8, a duplicate of lmms-lab/textvqa;
    # read by lmms-eval 75571cf lmms_eval/tasks/textvqa/utils.py
    "TextVQA": {
        "image_id": STRING,
        "question_id": INT32,
        "question": STRING,
        "question_tokens": [STRING],
        "image": "image",
        "image_width": INT32,
        "image_height": INT32,
        "flickr_original_url": STRING,
        "flickr_300k_url": STRING,
        "answers": [STRING],
        "image_classes": [STRING],
        "set_name": STRING,
        "ocr_tokens": [STRING],
    },
    # huggingface.co/datasets/echo840/OCRBench/blob/main/README.md 276bd0b; lmms-eval 75571cf tasks/ocrbench/upload_ocrbench.py
    "OCRBench": {"dataset": STRING, "question": STRING, "question_type": STRING, "answer": [STRING], "image": "image"},
    # huggingface.co/datasets/lmms-lab-encoder/ChartQA/raw/main/README.md 9e63b7d; lmms-eval 75571cf tasks/chartqa/upload_chartqa.py
    "ChartQA": {"type": STRING, "question": STRING, "answer": STRING, "image": "image"},
    # huggingface.co/datasets/lmms-lab/DocVQA/raw/700643acd865ff3ede094825df884d69d4f7cc10/README.md, DocVQA and InfographicVQA;
    # read by lmms-eval 75571cf lmms_eval/tasks/docvqa/utils.py and infovqa/utils.py
    "DocVQA": {
        "questionId": STRING,
        "question": STRING,
        "question_types": [STRING],
        "image": "image",
        "docId": INT64,
        "ucsf_document_id": STRING,
        "ucsf_document_page_no": STRING,
        "answers": [STRING],
        "data_split": STRING,
    },
    "InfographicVQA": {
        "questionId": STRING,
        "question": STRING,
        "answers": [STRING],
        "answer_type": [STRING],
        "image": "image",
        "image_url": STRING,
        "operation/reasoning": [STRING],
        "ocr": STRING,
        "data_split": STRING,
    },
    # huggingface.co/datasets/lmms-lab/LLaVA-NeXT-Data/raw/6b34794b6a37772bfb50b0bfaa5de4356fc8dba4/README.md;
    # the raw form's json (id, image, conversations) is read by LLaVA-VL/LLaVA-NeXT df17966 llava/train/train.py
    "LLaVA-NeXT": {"id": STRING, "conversations": [{"from": STRING, "value": STRING}], "data_source": STRING, "image": "image"},
}
FILES = {
    "MME": "lmms-lab/MME/data/test-{}.parquet",
    "CV-Bench": "nyu-visionx/CV-Bench/test_{}.parquet",
    "RealWorldQA": "lmms-lab/RealWorldQA/data/test-{}.parquet",
    "TextVQA": "lmms-lab/textvqa/data/validation-{}.parquet",
    "OCRBench": "echo840/OCRBench/data/test-{}.parquet",
    "ChartQA": "lmms-lab/ChartQA/data/test-{}.parquet",
    "DocVQA": "lmms-lab/DocVQA/DocVQA/validation-{}.parquet",
    "InfographicVQA": "lmms-lab/DocVQA/InfographicVQA/validation-{}.parquet",
    "LLaVA-NeXT": "lmms-lab/LLaVA-NeXT-Data/data/train-{}.parquet",
}


@functools.lru_cache(maxsize=None)
def picture(seed, size=96):
    """A picture of its own for each seed: coloured boxes on a graded ground."""
    rng = random.Random(seed)
    ramp = np.linspace(0, 1, size)[:, None, None] * np.array([rng.randrange(40, 200) for _ in range(3)]) + rng.randrange(50)
    image = Image.fromarray(np.broadcast_to(ramp, (size, size, 3)).astype(np.uint8).copy())
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        x, y, w = rng.randrange(size), rng.randrange(size), rng.randrange(8, size // 3)
        pen.rectangle((x, y, x + w, y + w), tuple(rng.randrange(256) for _ in range(3)))
    return image


def encoded(image, form="PNG", **options):
    """Bytes of a picture in a file format."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def cell(seed, form="PNG"):
    """An image cell as parquet holds it."""
    return {"bytes": encoded(picture(seed), form), "path": f"{seed}.{form.lower()}"}


def rows_of(name, count):
    """Invented rows of one source."""
    rows = []
    for i in range(count):
        if name == "MME":
            k = i // 2
            rows.append(
                {
                    "question_id": f"existence/{k:04d}.png",
                    "image": cell(f"mme{k}"),
                    "question": f"Is there a {'cat' if i % 2 else 'dog'} {k}? Please answer yes or no.",
                    "answer": "No" if i % 2 else "Yes",
                    "category": "existence",
                }
            )
        elif name == "CV-Bench":
            choices = ["0", "3", "2", "1"][: 2 + i % 3]
            question = f"How many wine glasses are in the image {i}?"
            rows.append(
                {
                    "idx": i,
                    "type": "2D",
                    "task": "Count",
                    "image": cell(f"cv{i}"),
                    "question": question,
                    "choices": choices,
                    "answer": f"({'ABCD'[i % len(choices)]})",
                    "prompt": f"{question} Select from the following choices.\n"
                    + "\n".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", choices)),
                    "filename": f"img/2D/count/coco_{i}.png",
                    "source": "COCO",
                    "source_dataset": "COCO 2017 Validation Set",
                    "source_filename": f"/coco/val2017/{i // 2:012d}.jpg",
                    "target_class": "wine glass",
                    "target_size": 1732,
                    "bbox": None,
                }
            )
        elif name == "RealWorldQA":
            question, answer = (
                f"In which direction does car {i} face?\n\nA. Left\nB. Straight\nC. Right\nPlease answer directly with only the letter of "
                "the "
                "correct option and nothing else.",
                "ABC"[i % 3],
            )
            if i % 3 == 0:
                question, answer = f"How many cars are at place {i}?\nPlease answer directly with a single word or number.", str(i)
            rows.append({"question": question, "answer": answer, "image": cell(f"rw{i}")})
        elif name == "TextVQA":
            rows.append(
                {
                    "image_id": f"img{i // 2}",
                    "question_id": 34602 + i,
                    "question": f"what is the brand of Camera {i}?",
                    "question_tokens": ["what"],
                    "image": cell(f"tv{i // 2}", "JPEG"),
                    "image_width": 96,
                    "image_height": 96,
                    "flickr_original_url": "u",
                    "flickr_300k_url": "u",
                    "answers": ["canon"] * 3 + [f"nokia {i}"] * 5 + ["", "Nokia"],
                    "image_classes": ["Camera"],
                    "set_name": "val",
                    "ocr_tokens": ["x"],
                }
            )
        elif name == "OCRBench":
            rows.append(
                {
                    "dataset": "HME100k" if i % 5 == 0 else "IIIT5K",
                    "question": f"what is written in the image {i}?",
                    "question_type": "Regular Text Recognition",
                    "answer": [f"word {i}", ""],
                    "image": cell(f"oc{i}", "JPEG"),
                }
            )
        elif name == "ChartQA":
            rows.append(
                {
                    "type": "human_test" if i % 2 else "augmented_test",
                    "question": f"What is bar {i}?",
                    "answer": str(i),
                    "image": cell(f"ch{i}"),
                }
            )
        elif name == "DocVQA":
            rows.append(
                {
                    "questionId": str(49150 + i),
                    "question": f"What is the date on page {i}?",
                    "question_types": ["form"],
                    "image": cell(f"do{i // 2}"),
                    "docId": i // 2,
                    "ucsf_document_id": f"doc{i // 2}",
                    "ucsf_document_page_no": "1",
                    "answers": [f"1/{i}/98", f"1/{i}/98", f"1/{i}/1998"],
                    "data_split": "val",
                }
            )
        elif name == "InfographicVQA":
            rows.append(
                {
                    "questionId": str(98300 + i),
                    "question": f"How many percent in figure {i}?",
                    "answers": [f"{i}%"],
                    "answer_type": ["single span"],
                    "image": cell(f"in{i // 2}"),
                    "image_url": f"http://example.org/{i // 2}.jpeg",
                    "operation/reasoning": [],
                    "ocr": "{}",
                    "data_split": "val",
                }
            )
        else:
            rows.append(conversation(i) | {"data_source": "llava-next-instruct", "image": cell(f"ll{i}", "JPEG")})
    return rows


SUBSETS = ("coco/train2017", "gqa/images", "chartqa/train/png", "vg/VG_100K")


def conversation(i):
    """One LLaVA-NeXT conversation without its image: single turns, turns that lean on earlier ones, bare regions."""
    if i % 4 == 3:
        turns = [
            ("<image>\nProvide a short description for the given region.\n[0.060,0.344,0.441,0.696]", f"A girl {i}."),
            ("[0.270,0.676,0.847,0.868]", "Candles."),
        ]
    elif i % 4 == 2:
        turns = [
            (f"<image>\nWhat is the value of bar {i}?\nAnswer the question using a single word or phrase.", str(i)),
            ("Is it the largest?", "Yes"),
            ("What is the title?", f"Sales {i}"),
        ]
    elif i % 4 == 1:
        turns = [(f"What is in picture {i}?\n<image>", f"A bus {i}.")]
    else:
        turns = [
            ("<image>\nWhat are the colors of the bus in the image?", f"Red and {i}."),
            ("What feature can be seen on the back of the bus?", "An advertisement."),
            ("Why do they do that?", "To sell."),
        ]
    return {
        "id": f"VG_100K/{i}" if i % 4 == 3 else f"{i:012d}",
        "conversations": [{"from": who, "value": value} for turn in turns for who, value in zip(("human", "gpt"), turn)],
    }


def write_parquet(name, rows, path):
    """Write rows as `datasets` writes a hub set: the features, images included, in the file's metadata."""
    import datasets

    def feature(kind):
        if kind == "image":
            return datasets.Image()
        if isinstance(kind, list):
            return datasets.List(feature(kind[0]))
        if isinstance(kind, dict):
            return {key: feature(value) for key, value in kind.items()}
        return datasets.Value(kind)

    datasets.disable_progress_bars()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    columns = [column for column in LAYOUTS[name] if not rows or column in rows[0]]
    features = datasets.Features({column: feature(LAYOUTS[name][column]) for column in columns})
    datasets.Dataset.from_dict({column: [row[column] for row in rows] for column in columns}, features=features).to_parquet(path)


def write_source(root, name, rows, files=2):
    """Write a source under root/OWNER/NAME, divided over some files."""
    step = -(-len(rows) // files)
    for part in range(files):
        label = ("2d", "3d")[part] if name == "CV-Bench" else f"{part:05d}-of-{files:05d}"
        write_parquet(name, rows[part * step : (part + 1) * step], os.path.join(root, FILES[name].format(label)))


def write_raw(root, count, archives=2, spoil=()):
    """The raw form: llava_next_raw_format_processed.json and llava_next_raw_format_images_N.tar.gz.

    File names: huggingface.co/datasets/lmms-lab/LLaVA-NeXT-Data/tree/0ea22bdc208993e73d63bb644a4678dcbe6307df/llava_next_raw_format; fields
    as LLaVA-VL/LLaVA-NeXT df17966 llava/train/train.py reads them, image paths relative to the archives' top (coco/, vg/, gqa/, ...).
    `spoil`: numbers whose picture is cut short inside the archive.
    """
    folder = os.path.join(root, "lmms-lab/LLaVA-NeXT-Data/llava_next_raw_format")
    os.makedirs(folder, exist_ok=True)
    records, images = [], []
    for i in range(count):
        name = f"{SUBSETS[i % 4]}/{i:012d}.jpg"
        records.append(conversation(i) | {"data_source": "llava_next_raw_format", "image": name})
        data = encoded(picture(f"ll{i}"), "JPEG")
        images.append((name, data[: len(data) // 2] if i in spoil else data))
    with open(os.path.join(folder, "llava_next_raw_format_processed.json"), "w") as file:
        json.dump(records, file)
    for part in range(archives):
        with tarfile.open(os.path.join(folder, f"llava_next_raw_format_images_{part + 1}.tar.gz"), "w:gz") as tar:
            for name, data in images[part::archives]:
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return records, dict(images)
