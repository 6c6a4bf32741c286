"""data/prepare.py on small copies of each source's real layout: every value it writes, restarts, named errors, leakage.

    python -m pytest tests/test_prepare.py

Tests that read or write parquet need the packages of data/requirements.txt and are skipped without them.
"""

import contextlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prepare = load("prepare", os.path.join(ROOT, "data", "prepare.py"))
fixtures = load("prepare_fixtures", os.path.join(HERE, "prepare_fixtures.py"))
parquet = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("datasets", "pyarrow")),
    reason="needs the packages of data/requirements.txt: datasets and pyarrow",
)
ROWS = 40
SENTENCE = "\nAnswer the question using a single word or phrase."


def lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def data(path):
    with open(path, "rb") as file:
        return file.read()


def write_items(path, items):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(item) + "\n" for item in items)
    return str(path)


def geb(local, out, *more, size="4", rows_check="--no-rows-check"):
    return prepare.main(["geb", "--local", str(local), "--out", str(out), "--test-per-source", size, rows_check, *more])


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Every benchmark source, 40 rows each, in its real columns and file names."""
    root = tmp_path_factory.mktemp("local")
    for name in prepare.GEB:
        fixtures.write_source(root, name, fixtures.rows_of(name, ROWS))
    return root


@pytest.fixture(scope="module")
def made(local, tmp_path_factory):
    """dev and test from all eight sources."""
    out = tmp_path_factory.mktemp("made") / "geb"
    assert geb(local, out) == 0
    return out


# ---------------------------------------------------------------- geb
@parquet
def test_layout_counts_and_manifest(made):
    manifest = json.loads(data(made / "manifest.json"))
    seen = {}
    for split, each in (("test", 4), ("dev", 8)):
        items = lines(made / f"{split}.jsonl")
        assert manifest["sha256"][f"{split}.jsonl"] == prepare.sha256(made / f"{split}.jsonl")
        assert {name: sum(item["source"] == name for item in items) for name in prepare.GEB} == dict.fromkeys(prepare.GEB, each)
        assert manifest["counts"][split]["domain"] == {"natural_image": 3 * each, "scene_text": 2 * each, "visual_document": 3 * each}
        assert sum(item["dataset"] == "human" for item in items if item["source"] == "ChartQA") == each // 2
        pairs = [item["id"].rsplit("/", 1) for item in items if item["source"] == "MME"]
        assert (
            sorted(answer for _, answer in pairs) == ["no"] * (each // 2) + ["yes"] * (each // 2)
            and len({name for name, _ in pairs}) == each // 2
        )
        assert len({item["source"] for item in items[: each * 2]}) > 2, "a first part of the file must hold several sources"
        seen[split] = {item["image"] for item in items}
        assert prepare.read_items(made / f"{split}.jsonl")
    assert not seen["dev"] & seen["test"]
    assert {os.path.join(d, f) for d in os.listdir(made / "images") for f in os.listdir(made / "images" / d)} == seen["dev"] | seen["test"]
    assert not (made / ".work").exists()
    source = manifest["sources"]["CV-Bench"]
    assert source["rows"] == ROWS and source["repository"] == "nyu-visionx/CV-Bench" and source["licence"] == "Apache-2.0"
    assert source["kept"] == {"test": 4, "dev": 8} and sorted(source["files"]) == ["test_2d.parquet", "test_3d.parquet"]


@parquet
def test_every_converter(made):
    """Each item is the one its source row asks for, word for word, and its image holds the source's bytes."""
    by_id = {item["id"]: item for split in ("dev", "test") for item in lines(made / f"{split}.jsonl")}
    checked = dict.fromkeys(prepare.GEB, 0)
    for name in prepare.GEB:
        for i, row in enumerate(fixtures.rows_of(name, ROWS)):
            key = {
                "MME": f"{row.get('question_id')}/{row.get('answer', '').lower() if name == 'MME' else ''}",
                "CV-Bench": row.get("idx"),
                "TextVQA": row.get("question_id"),
                "DocVQA": row.get("questionId"),
                "InfographicVQA": row.get("questionId"),
            }.get(name, i)
            item = by_id.get(f"{name}:{key}")
            if item is None:
                continue
            checked[name] += 1
            assert data(made / "images" / item["image"]) == row["image"]["bytes"]
            expected = {
                "MME": lambda: (f"Is there a {'cat' if i % 2 else 'dog'} {i // 2}?" + SENTENCE, [row["answer"]]),
                "CV-Bench": lambda: (
                    row["prompt"] + "\nAnswer with the option's letter from the given choices directly.",
                    [row["answer"][1]],
                ),
                "RealWorldQA": lambda: (row["question"], [row["answer"]]),
                "TextVQA": lambda: (row["question"] + SENTENCE, [f"nokia {i}", *["canon"] * 3, *[f"nokia {i}"] * 4, "", "Nokia"]),
                "OCRBench": lambda: (row["question"], [f"word {i}"]),
                "ChartQA": lambda: (row["question"] + SENTENCE, [str(i)]),
                "DocVQA": lambda: (row["question"] + SENTENCE, [f"1/{i}/98", f"1/{i}/1998"]),
                "InfographicVQA": lambda: (row["question"] + SENTENCE, [f"{i}%"]),
            }[name]()
            assert (item["question"], item["answers"]) == expected
            assert item.get("options") == {
                "CV-Bench": row.get("choices"),
                "RealWorldQA": ["Left", "Straight", "Right"] if i % 3 else None,
            }.get(name)
            if name == "OCRBench":
                assert item["dataset"] == row["dataset"]
            assert "metric" not in item
    assert checked == dict.fromkeys(prepare.GEB, 12)


@parquet
def test_same_seed_same_bytes_another_seed_another_draw(made, local, tmp_path):
    # the same rows in other files and another order: the draw depends on the rows alone (row numbers are ids only for three sources)
    names = ["MME", "CV-Bench", "TextVQA", "DocVQA", "InfographicVQA"]
    for name in names:
        fixtures.write_source(tmp_path / "b", name, fixtures.rows_of(name, ROWS)[::-1])
    for out, root, seed in (("one", local, "0"), ("two", tmp_path / "b", "0"), ("three", local, "1")):
        geb(root, tmp_path / out, "--sources", *names, "--seed", seed)
    for split in ("dev.jsonl", "test.jsonl"):
        assert data(tmp_path / "one" / split) == data(tmp_path / "two" / split)
        assert data(tmp_path / "one" / split) != data(tmp_path / "three" / split)
    # leaving sources out does not move the others
    kept = {item["id"] for item in lines(made / "test.jsonl") if item["source"] in names}
    assert {item["id"] for item in lines(tmp_path / "one" / "test.jsonl")} == kept


@parquet
def test_finished_output_is_kept_and_guarded(made, local, capsys):
    before = os.stat(made / "test.jsonl").st_mtime_ns
    assert geb(local, made) == 0 and json.loads(capsys.readouterr().out)["already_there"] is True
    assert os.stat(made / "test.jsonl").st_mtime_ns == before
    with pytest.raises(prepare.UserError, match="other options.*--overwrite"):
        geb(local, made, "--seed", "5")


@parquet
def test_overwrite_and_foreign_files(local, tmp_path):
    out = tmp_path / "out"
    geb(local, out, "--sources", "ChartQA")
    first = data(out / "test.jsonl")
    (out / "test.jsonl").write_bytes(first[:-20])
    with pytest.raises(prepare.UserError, match="changed since"):
        geb(local, out, "--sources", "ChartQA")
    geb(local, out, "--sources", "ChartQA", "--overwrite")
    assert data(out / "test.jsonl") == first
    os.remove(out / "manifest.json")
    with pytest.raises(prepare.UserError, match="without a manifest"):
        geb(local, out, "--sources", "ChartQA")


@parquet
def test_an_interrupted_run_continues_with_the_source_it_was_at(made, local, tmp_path, monkeypatch):
    real, read = prepare.parquet_rows, []

    def stops(name, files, columns):
        read.append(name)
        if name == "TextVQA" and read.count(name) == 1:
            raise KeyboardInterrupt
        return real(name, files, columns)

    monkeypatch.setattr(prepare, "parquet_rows", stops)
    with pytest.raises(KeyboardInterrupt):
        geb(local, tmp_path / "out")
    assert not list(tmp_path.glob("out/*.json*"))
    geb(local, tmp_path / "out")
    assert read.count("MME") == read.count("CV-Bench") == 1 and read.count("TextVQA") == 2
    assert data(tmp_path / "out" / "dev.jsonl") == data(made / "dev.jsonl")


@parquet
def test_pictures_shared_by_two_sources_stay_in_one_split(tmp_path, monkeypatch):
    """OCRBench holds re-encoded pictures of the other sets; here every ChartQA picture comes back as a smaller JPEG."""
    chart, ocr = fixtures.rows_of("ChartQA", ROWS), fixtures.rows_of("OCRBench", ROWS)
    for a, b, i in zip(chart, ocr, range(ROWS)):
        picture = fixtures.picture(f"shared{i}", 160)
        a["image"] = {"bytes": fixtures.encoded(picture), "path": "a.png"}
        b["image"] = {"bytes": fixtures.encoded(picture.resize((120, 120)), "JPEG", quality=70), "path": "b.jpg"}
    fixtures.write_source(tmp_path, "ChartQA", chart)
    fixtures.write_source(tmp_path, "OCRBench", ocr)

    def shared(out):
        geb(tmp_path, out, "--sources", "OCRBench", "ChartQA")
        monkeypatch.undo()
        images = str(out / "images")
        test, dev = (
            prepare.examine_all(images, sorted({item["image"] for item in lines(out / f"{split}.jsonl")}), 1, "")[0]
            for split in ("test", "dev")
        )
        return prepare.find_leaks(images, test, images, dev)

    monkeypatch.setattr(prepare, "same_picture", lambda *_: False)
    assert len(shared(tmp_path / "unguarded")) > 0  # otherwise this test could not fail
    assert shared(tmp_path / "guarded") == []


@parquet
@pytest.mark.parametrize("form", ("jsonl", "csv", "parquet"))
def test_a_membership_list_selects_exactly_its_rows(local, tmp_path, form):
    members = [
        ("dev", "ChartQA", "7"),
        ("test", "cv_bench", "12"),
        ("test", "ChartQA", "3"),
        ("dev", "DocVQA", "49155"),
        ("test", "CVBench", "2"),
        ("dev", "MME", "existence/0004.png"),
        ("test", "infovqa", "98301"),
    ]
    table = {
        "jsonl": "\n".join(json.dumps({"split": s, "set": n, "qid": q}) for s, n, q in members),
        "csv": "split,set,qid\n" + "\n".join(",".join(m) for m in members),
    }.get(form, "")
    path = tmp_path / f"members.{form}"
    path.write_text(table)
    if form == "parquet":
        import datasets

        datasets.Dataset.from_dict(
            {"split": [m[0] for m in members], "set": [m[1] for m in members], "qid": [m[2] for m in members]}
        ).to_parquet(path)
    geb(local, tmp_path / "out", "--official", str(path), "--official-source-column", "set", "--official-id-column", "qid")
    assert [item["id"] for item in lines(tmp_path / "out" / "test.jsonl")] == [
        "CV-Bench:12",
        "ChartQA:3",
        "CV-Bench:2",
        "InfographicVQA:98301",
    ]
    assert [item["id"] for item in lines(tmp_path / "out" / "dev.jsonl")] == [
        "ChartQA:7",
        "DocVQA:49155",
        "MME:existence/0004.png/yes",
        "MME:existence/0004.png/no",
    ]
    assert list(json.loads(data(tmp_path / "out" / "manifest.json"))["sources"]) == [
        "MME",
        "CV-Bench",
        "ChartQA",
        "DocVQA",
        "InfographicVQA",
    ]


@parquet
def test_membership_lists_that_do_not_fit(local, tmp_path):
    path = tmp_path / "members.jsonl"
    for row, words in (
        ({"source": "ChartQA", "source_id": "999", "split": "dev"}, "1 of 1 listed rows.*ChartQA 999"),
        ({"source": "ChartQA", "id": "1", "split": "dev"}, "row 1: missing source_id; found source, id, split"),
        ({"source": "GQA", "source_id": "1", "split": "dev"}, "expected a source among"),
        ({"source": "ChartQA", "source_id": "1", "split": "train"}, "a split dev or test"),
    ):
        path.write_text(json.dumps(row))
        with pytest.raises(prepare.UserError, match=words):
            geb(local, tmp_path / "out", "--official", str(path))
    path.write_text(json.dumps({"source": "TextVQA", "source_id": 5}))  # row numbers, and the split named on the command line
    geb(local, tmp_path / "rows", "--official", f"test={path}", "--official-ids", "row")
    assert [item["id"] for item in lines(tmp_path / "rows" / "test.jsonl")] == ["TextVQA:34607"] and lines(
        tmp_path / "rows" / "dev.jsonl"
    ) == []


@parquet
def test_named_errors(local, tmp_path):
    def source(name, change):
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        rows = fixtures.rows_of(name, ROWS)
        fixtures.write_source(tmp_path / "s", name, [row for row in map(change, rows) if row])
        return lambda *more, **settings: geb(tmp_path / "s", tmp_path / "out", "--sources", name, *more, **settings)

    with pytest.raises(prepare.UserError, match=r"OCRBench: .*missing column answer; found dataset, question, question_type, image"):
        source("OCRBench", lambda row: {key: value for key, value in row.items() if key != "answer"})()
    with pytest.raises(prepare.UserError, match="ChartQA: expected 2,500 rows as published, found 40 in 2 files"):
        source("ChartQA", dict)(rows_check="--rows-check")
    with pytest.raises(
        prepare.UserError, match="ChartQA augmented: expected 8 test and 16 dev items .* found 8 and 12 among 20 candidates"
    ):
        source("ChartQA", dict)(size="16")
    for part in (0.03, 0.6):  # cut in the header, and in the picture's own data
        with pytest.raises(prepare.UserError, match=r"TextVQA row \d+ \(id \d+\): .*image"):
            source(
                "TextVQA",
                lambda row: row | {"image": {"bytes": row["image"]["bytes"][: int(part * len(row["image"]["bytes"]))], "path": "x.jpg"}},
            )()
    with pytest.raises(prepare.UserError, match=r"DocVQA row 1: the id 49150 occurs twice"):
        source("DocVQA", lambda row: row | {"questionId": "49150"})()
    path = local / "lmms-lab/MME/data/test-00000-of-00002.parquet"
    os.makedirs(tmp_path / "m/lmms-lab/MME/data")
    (tmp_path / "m/lmms-lab/MME/data/test-00000-of-00001.parquet").write_bytes(data(path)[:3000])
    with pytest.raises(prepare.UserError, match="MME: cannot read .*test-00000-of-00001.parquet.*Download the files again"):
        geb(tmp_path / "m", tmp_path / "out", "--sources", "MME")


@parquet
def test_rows_that_cannot_be_items_are_counted_by_reason(tmp_path):
    rows = fixtures.rows_of("CV-Bench", ROWS)
    rows[0]["answer"], rows[1]["prompt"], rows[2]["image"] = "(F)", " ", None
    fixtures.write_source(tmp_path, "CV-Bench", rows)
    geb(tmp_path, tmp_path / "out", "--sources", "CV-Bench")
    assert json.loads(data(tmp_path / "out/manifest.json"))["sources"]["CV-Bench"]["dropped"] == {
        "choices and answer do not fit together": 1,
        "no text in 'prompt'": 1,
        "no image bytes": 1,
    }


def test_realworldqa_options():
    row = {
        "question": "Which?\n\nA. Left\nC. Right\nPlease answer directly with only the letter of the correct option and nothing else.",
        "answer": "A",
        "image": None,
    }
    with pytest.raises(prepare.Drop, match="option lines"):
        prepare.realworldqa(row, 0)
    with pytest.raises(prepare.Drop, match="no answer-format sentence"):
        prepare.realworldqa({"question": "How many?", "answer": "2", "image": None}, 0)


def damaged_pictures():
    """Bytes on which Pillow's readers raise NotImplementedError and ZeroDivisionError: no OSError, as those of PNG and JPEG."""
    dds, emf = bytearray(fixtures.encoded(fixtures.picture("dds", 64), "DDS")), bytearray(108)
    dds[84:88] = b"ABCD"  # an unknown pixel format
    dds[80:84] = (4).to_bytes(4, "little")
    emf[:4], emf[40:44] = (1).to_bytes(4, "little"), b" EMF"  # a frame of size 0
    return {"dds": bytes(dds), "emf": bytes(emf)}


DAMAGED = damaged_pictures()


@pytest.mark.parametrize("name", DAMAGED)
def test_whatever_pillow_raises_names_the_file(tmp_path, name, capsys):
    def kind(decode):
        try:
            with Image.open(io.BytesIO(DAMAGED[name])) as image:
                image.load()
        except Exception as error:
            return type(error)

    assert kind(True) not in (OSError, ValueError, SyntaxError), "otherwise this test could not fail"
    with pytest.raises(prepare.BAD_IMAGE):
        prepare.write_image(str(tmp_path), DAMAGED[name], decode=True)
    (tmp_path / "bad.img").write_bytes(DAMAGED[name])
    with pytest.raises(prepare.UserError, match="bad.img"):
        prepare.thumbprint(str(tmp_path), "bad.img")
    with pytest.raises(prepare.UserError, match="1 x missing or unreadable image"):
        check(write_items(tmp_path / "items.jsonl", [GOOD | {"image": "bad.img"}]), tmp_path)
    assert "bad.img" in capsys.readouterr().err
    fixtures.write_raw(tmp_path / "raw", 4, archives=1)
    folder = tmp_path / "raw/lmms-lab/LLaVA-NeXT-Data/llava_next_raw_format"
    records = json.loads(data(folder / "llava_next_raw_format_processed.json"))
    for spoilt, reason in ((DAMAGED[name], {"unreadable image": 1}), (fixtures.encoded(fixtures.picture("new")), {})):
        (folder / "bad.img").write_bytes(spoilt)
        (folder / "llava_next_raw_format_processed.json").write_text(json.dumps(records + [records[0] | {"image": "bad.img"}]))
        train(tmp_path / "raw", tmp_path / f"out {bool(reason)}")
        assert json.loads(data(tmp_path / f"out {bool(reason)}/manifest.json"))["dropped"] == reason


@parquet
def test_damaged_pictures_in_parquet(tmp_path):
    for name, picture in DAMAGED.items():
        rows = fixtures.rows_of("LLaVA-NeXT", 4)
        rows[2]["image"] = {"bytes": picture, "path": "x"}
        fixtures.write_source(tmp_path / name, "LLaVA-NeXT", rows)
        train(tmp_path / name, tmp_path / f"{name} out")
        assert json.loads(data(tmp_path / f"{name} out/manifest.json"))["dropped"] == {"unreadable image": 1}
        rows = fixtures.rows_of("OCRBench", 12)
        rows[5]["image"] = {"bytes": picture, "path": "x"}
        fixtures.write_source(tmp_path / name, "OCRBench", rows)
        with pytest.raises(prepare.UserError, match=r"OCRBench row 5 \(id 5\): .*image"):
            geb(tmp_path / name, tmp_path / f"{name} geb", "--sources", "OCRBench")


def convert(name, **change):
    row = fixtures.rows_of(name, 2)[1] | change
    return prepare.GEB[name]["convert"](row, 1), prepare.image_bytes(row)


LETTERS = "Which?\nA. x\nB. y\nC. z\n" + prepare.REALWORLDQA_LETTER


@pytest.mark.parametrize(
    "name, change",
    [("CV-Bench", {"choices": ["0", "3", "2"], "answer": answer}) for answer in ("()", "AB", "(BC)", "(D)", "b", "( B )", ".")]
    + [("CV-Bench", {"choices": choices, "answer": "A"}) for choices in (["0"], [], "x", "AB", None, 5, [1, 2], ["0", ""], ["0", "0"])]
    + [("RealWorldQA", {"question": LETTERS, "answer": answer}) for answer in (".", "AB", "BC", "D", "b", "..")]
    + [("TextVQA", {"answers": answers}) for answers in ("hello", 5, None, [], [""], [1, 2], {"a": 1})]
    + [("MME", {"category": value}) for value in (None, 7, "", ["c"])]
    + [
        (name, {column: value})
        for name, column in (
            ("MME", "question_id"),
            ("CV-Bench", "idx"),
            ("TextVQA", "question_id"),
            ("DocVQA", "questionId"),
            ("InfographicVQA", "questionId"),
        )
        for value in (None, 1.5, True, "", "a\nb", " a", "a ", "a\0", "\u2028", "\ud800", ["a"])
    ]
    + [
        (name, {"image": value})
        for name in prepare.GEB
        for value in (None, 5, b"x", "x.png", [{"bytes": b"x"}], {}, {"path": "x"}, {"bytes": b""}, {"bytes": "text"})
    ],
)
def test_cells_of_another_kind_are_dropped_with_a_reason(name, change):
    item, _ = convert(name)  # the row itself is good
    assert item["answers"]
    with pytest.raises(prepare.Drop):
        convert(name, **change)


def test_single_letters_pass():
    for answer in "ABC":
        assert convert("CV-Bench", choices=["0", "3", "2"], answer=f"({answer})")[0]["answers"] == [answer]
        assert convert("RealWorldQA", question=LETTERS, answer=answer + ".")[0]["answers"] == [answer]


def test_textvqa_target_is_the_most_frequent_answer_and_ties_go_to_the_first():
    row = {"image_id": "i", "question_id": 1, "question": "q", "answers": ["b", "a", "a", "b", "", "", "", "c", "c", "d"]}
    assert prepare.textvqa(row, 0)["answers"] == ["b", "a", "a", "b", "", "", "", "c", "c", "d"]
    row["answers"][9] = "c"
    assert prepare.textvqa(row, 0)["answers"] == ["c", "b", "a", "a", "b", "", "", "", "c", "c"]


@parquet
@pytest.mark.parametrize(
    "name, column, value, reason",
    (
        ("MME", "answer", "maybe", "answer is neither yes nor no': 40"),
        ("MME", "image", None, "no image bytes': 40"),
        ("CV-Bench", "answer", "(Z)", "choices and answer do not fit together': 40"),
        ("ChartQA", "type", "human_test", "none"),
        ("ChartQA", "type", "augmented_test", "none"),
        ("ChartQA", "type", "other", "neither human_test nor augmented_test': 40"),
    ),
)
def test_no_source_or_kind_of_rows_is_missing_without_a_word(local, tmp_path, name, column, value, reason):
    rows = [row | {column: value} | ({"question_id": f"{i}"} if name == "MME" else {}) for i, row in enumerate(fixtures.rows_of(name, 40))]
    fixtures.write_source(tmp_path / "s", name, rows)
    other = "DocVQA"
    shutil.copytree(local / "lmms-lab/DocVQA", tmp_path / "s/lmms-lab/DocVQA")
    for sources in ([name], [other, name]):
        with pytest.raises(prepare.UserError, match=f"{name}: expected 4 test and 8 dev items.*found .*among 40 rows; rows dropped: .*{reason}"):
            geb(tmp_path / "s", tmp_path / "out", "--sources", *sources)
    assert not list(tmp_path.glob("out/*.json*"))


# ---------------------------------------------------------------- is it the same output?
@pytest.fixture
def chart(tmp_path):
    fixtures.write_source(tmp_path / "a", "ChartQA", fixtures.rows_of("ChartQA", ROWS))
    return tmp_path / "a", tmp_path / "a/lmms-lab/ChartQA/data/test-00000-of-00002.parquet"


def edit(path):
    """Another content of the same size and time: a byte in the middle."""
    content, times = bytearray(data(path)), os.stat(path)
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_fingerprints_notice_edits_and_not_copies(tmp_path, monkeypatch):
    for folder in "ab":
        (tmp_path / folder).mkdir()
    path, copy = tmp_path / "a/x", tmp_path / "b/x"
    path.write_bytes(bytes(5 << 20))
    found = lambda path: {"S": {"files": [[str(path), os.path.getsize(path)]]}}  # noqa: E731
    first = prepare.fingerprints(found(path), None)
    shutil.copyfile(path, copy)
    assert prepare.other_file(first, prepare.fingerprints(found(copy), first)) is None
    read = []
    real = prepare.sha256
    monkeypatch.setattr(prepare, "sha256", lambda path: read.append(path) or real(path))
    assert prepare.fingerprints(found(path), first) == first and not read  # not read again
    for odd in (None, [], 5, {"S/x": None}, {"S/x": [1]}, {"S/x": [1, 2, 3]}, {"S/x": "abc"}):
        assert prepare.fingerprints(found(path), odd) == first and prepare.other_file(odd, first) == "S/x"
    edit(path)
    assert prepare.other_file(first, prepare.fingerprints(found(path), first)) == "S/x"
    assert prepare.other_file({}, {}) is None and prepare.other_file(first, {}) == prepare.other_file({}, first) == "S/x"
    hub = {"S": {"files": [["hf://x", 5], ["hf://y", 6]], "hashes": {"hf://x": "abc", "hf://y": None}}}
    assert prepare.fingerprints(hub, None) == {"S/x": [5, None, "abc"], "S/y": [6, None, "hf://y"]}


@parquet
@pytest.mark.parametrize("stage", ("finished", "interrupted"))
def test_geb_notices_other_sources(chart, tmp_path, monkeypatch, capsys, stage):
    local, path = chart
    out = tmp_path / "out"
    if stage == "interrupted":
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(prepare, "divide", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            geb(local, out, "--sources", "ChartQA")
    else:
        geb(local, out, "--sources", "ChartQA")
        shutil.copytree(local, tmp_path / "copy", copy_function=shutil.copyfile)
        assert geb(tmp_path / "copy", out, "--sources", "ChartQA") == 0 and '"already_there": true' in capsys.readouterr().out
        assert geb(tmp_path / "gone", out, "--sources", "ChartQA") == 0
        said = capsys.readouterr()
        assert '"already_there": true' in said.out and "are not compared" in said.err
    before = {name: data(name) for name in out.glob("*.json*")}
    rows = fixtures.rows_of("ChartQA", ROWS)
    size = os.path.getsize(path)
    fixtures.write_source(local, "ChartQA", [row | {"question": row["question"].replace("What", "Whxt")} for row in rows])
    assert os.path.getsize(path) == size, "otherwise the size alone tells"
    if stage == "interrupted":
        geb(local, out, "--sources", "ChartQA")
        assert "starting afresh" in capsys.readouterr().err
    else:
        with pytest.raises(prepare.UserError, match="other files than these.*ChartQA/test-00000-of-00002.parquet.*--overwrite"):
            geb(local, out, "--sources", "ChartQA")
        assert {name: data(name) for name in out.glob("*.json*")} == before
        geb(local, out, "--sources", "ChartQA", "--overwrite")
    assert all(item["question"].startswith("Whxt") for item in lines(out / "dev.jsonl"))


@pytest.mark.parametrize("stage", ("finished", "interrupted"))
def test_train_notices_other_sources(raw, tmp_path, monkeypatch, capsys, stage):
    shutil.copytree(raw, tmp_path / "a")
    out, table = tmp_path / "out", next((tmp_path / "a").rglob("*.json"))
    if stage == "interrupted":
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(prepare, "write_shuffled", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            train(tmp_path / "a", out)
    else:
        train(tmp_path / "a", out)
        assert train(raw, out) == 0 and '"already_there": true' in capsys.readouterr().out
    table.write_text(table.read_text().replace("What", "Whxt"))
    if stage == "finished":
        with pytest.raises(prepare.UserError, match="other files than these.*processed.json"):
            train(tmp_path / "a", out)
    train(tmp_path / "a", out, *(["--overwrite"] if stage == "finished" else []))
    assert any("Whxt" in item["question"] for item in lines(out / "items.jsonl"))


def test_finished_output_without_its_images(raw, tmp_path):
    train(raw, tmp_path / "out")
    images = sorted((tmp_path / "out/images").rglob("*.*"))
    os.remove(images[3])
    with pytest.raises(prepare.UserError, match=f"1 of its images are missing, first .*{images[3].name}.*--overwrite"):
        train(raw, tmp_path / "out")
    train(raw, tmp_path / "out", "--overwrite")
    assert images[3].exists() and train(raw, tmp_path / "out") == 0


def test_overwrite_keeps_the_old_result_until_the_new_one_is_complete(raw, tmp_path):
    train(raw, tmp_path / "out")
    before = {path: data(path) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    shutil.copytree(raw, tmp_path / "none")
    for archive in (tmp_path / "none").rglob("*.tar.gz"):
        os.remove(archive)
    for out in ("out", "new"):
        with pytest.raises(prepare.UserError, match="expected training items, found none; dropped: .*image not in the archives': 24"):
            train(tmp_path / "none", tmp_path / out, "--overwrite")
    assert {path: data(path) for path in before} == before and train(raw, tmp_path / "out") == 0
    assert os.listdir(tmp_path / "new") in ([".work"], ["images", ".work"], [".work", "images"]), "nothing under a final name"


@parquet
def test_geb_overwrite_keeps_the_old_result_until_the_new_one_is_complete(chart, tmp_path):
    local, _ = chart
    geb(local, tmp_path / "out", "--sources", "ChartQA")
    before = {path: data(path) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(prepare.UserError, match="expected 30 test"):
        geb(local, tmp_path / "out", "--sources", "ChartQA", "--overwrite", size="60")
    assert {path: data(path) for path in before} == before and geb(local, tmp_path / "out", "--sources", "ChartQA") == 0


@parquet
def test_the_roles_of_membership_files_count(local, tmp_path, capsys):
    for name, row in (("a", 3), ("b", 5)):
        write_items(tmp_path / f"{name}.jsonl", [{"source": "ChartQA", "source_id": row, "split": "test"}])
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    options = ((f"dev={a}", f"test={b}"), (f"dev={b}", f"test={a}"), (f"test={b}",), (f"dev={b}",), (str(b),))
    for first in options:
        out = tmp_path / f"out {options.index(first)}"
        geb(local, out, "--official", *first)
        assert geb(local, out, "--official", *first) == 0
        for second in options:
            if second != first:
                with pytest.raises(prepare.UserError, match="other options"):
                    geb(local, out, "--official", *second)
    with pytest.raises(prepare.UserError, match="none.csv: cannot read"):
        geb(local, tmp_path / "x", "--official", f"dev={tmp_path / 'none.csv'}")
    with pytest.raises(prepare.UserError, match=r"sources in --sources \(MME\), found rows of ChartQA too.*--sources"):
        geb(local, tmp_path / "x", "--official", str(a), "--sources", "MME")


@parquet
def test_a_picture_in_both_listed_splits_is_noted(local, tmp_path, capsys):
    for rows, noted in (((0, 1), True), ((0, 2), False)):  # two rows a DocVQA page
        members = [{"source": "DocVQA", "source_id": 49150 + row, "split": split} for row, split in zip(rows, ("dev", "test"))]
        path = write_items(tmp_path / f"{noted}.jsonl", members)
        geb(local, tmp_path / f"{noted}", "--official", path)
        assert ("1 pictures are in both dev and test" in (said := capsys.readouterr().err)) == noted, said


# ---------------------------------------------------------------- the hub
def test_without_the_hub_the_message_says_what_to_download(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def refused(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(hub.HfApi, "dataset_info", refused)
    with pytest.raises(prepare.UserError) as error:
        prepare.main(["geb", "--out", str(tmp_path / "out")])
    for spec in prepare.GEB.values():
        assert f"hf download {spec['repository']} --repo-type dataset --include '{spec['files']}'" in str(error.value)
        assert f"{spec['gigabytes']} GB" in str(error.value)
    assert "--local DIR" in str(error.value) and "about 7.9 GB" in str(error.value) and "no route" in str(error.value)
    with pytest.raises(prepare.UserError, match="about 54.0 GB"):
        prepare.main(["train", "--out", str(tmp_path / "out")])
    with pytest.raises(prepare.UserError, match=r"no files of MME there: expected data/test-\*.parquet(.|\n)*hf download"):
        prepare.main(["geb", "--out", str(tmp_path / "out"), "--local", str(tmp_path)])


def test_hub_files_are_pinned_to_one_commit(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def info(self, repository, revision=None, files_metadata=False):
        asked.append((repository, revision))
        names = ["README.md", "data/train-00000-of-00001.parquet", "data/test-00010-of-00011.parquet", "data/test-00002-of-00011.parquet"]
        return types.SimpleNamespace(sha="c0ffee", siblings=[types.SimpleNamespace(rfilename=name, size=5) for name in names])

    monkeypatch.setattr(hub.HfApi, "dataset_info", info)
    args = prepare.parse_args(["geb", "--out", "x", "--repo", "MME=lmms-lab-encoder/MME@v1"])
    found = prepare.locate(prepare.GEB["MME"] | {"name": "MME"}, args, [])
    assert asked == [("lmms-lab-encoder/MME", "v1")] and found["revision"] == "c0ffee"
    assert [path for path, _ in found["files"]] == [
        f"hf://datasets/lmms-lab-encoder/MME@c0ffee/data/test-000{n}-of-00011.parquet" for n in ("02", "10")
    ]


@parquet
def test_local_layouts(local, tmp_path):
    """DIR/OWNER/NAME, DIR/NAME, the set's own folder, and a hub cache, whose snapshot names the commit, give the same items."""
    home = local / "lmms-lab/ChartQA"
    shutil.copytree(home, tmp_path / "flat/ChartQA")
    shutil.copytree(home, tmp_path / "cache/datasets--lmms-lab--ChartQA/snapshots/18bc5b1")
    for n, (root, revision) in enumerate(((local, None), (tmp_path / "flat", None), (home, None), (tmp_path / "cache", "18bc5b1"))):
        geb(root, tmp_path / f"{n}", "--sources", "ChartQA")
        assert data(tmp_path / f"{n}/dev.jsonl") == data(tmp_path / "0/dev.jsonl")
        assert json.loads(data(tmp_path / f"{n}/manifest.json"))["sources"]["ChartQA"]["revision"] == revision
    # data/test-*.parquet there could be any set's, so the folder itself only serves a single set
    with pytest.raises(prepare.UserError, match="no files of OCRBench there"):
        geb(home, tmp_path / "x", "--sources", "OCRBench", "ChartQA")


@parquet
def test_the_order_of_sources_does_not_matter(local, tmp_path):
    geb(local, tmp_path / "one", "--sources", "ChartQA", "MME")
    geb(local, tmp_path / "two", "--sources", "MME", "ChartQA", "MME")
    assert data(tmp_path / "one/test.jsonl") == data(tmp_path / "two/test.jsonl")


# ---------------------------------------------------------------- train
def train(local, out, *more):
    return prepare.main(["train", "--local", str(local), "--out", str(out), "--no-rows-check", *more])


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    root = tmp_path_factory.mktemp("raw")
    fixtures.write_raw(root, 24, archives=3)
    return root


@pytest.fixture(scope="module")
def trained(raw, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "out"
    assert train(raw, out) == 0
    return out


def test_raw_form(raw, trained, tmp_path):
    items = lines(trained / "items.jsonl")
    records = [fixtures.conversation(i) for i in range(24)]
    assert len(items) == 24 == len(prepare.read_items(trained / "items.jsonl"))
    for item in items:
        _, number, turn = item["id"].split(":")
        number, turn = int(number), int(turn)
        said = [entry["value"] for entry in records[number]["conversations"]]
        question = said[2 * turn].replace("<image>", "").strip()
        if number % 4 == 2 and turn:
            question += SENTENCE  # the format sentence of the first turn
        assert (item["question"], item["answers"]) == (question, [said[2 * turn + 1]])
        assert data(trained / "images" / item["image"]) == fixtures.encoded(fixtures.picture(f"ll{number}"), "JPEG")
        assert (
            item["dataset"] == fixtures.SUBSETS[number % 4].split("/")[0] and item["source"] == "LLaVA-NeXT" and item["metric"] == "exact"
        )
        assert item["domain"] == ("visual_document" if number % 4 == 2 else "natural_image")
        assert turn in {0: (0, 1), 1: (0,), 2: (0, 2), 3: (0,)}[number % 4], "only turns that stand alone"
    assert {item["id"].split(":")[2] for item in items} == {"0", "1", "2"}, "later turns are drawn too"
    assert [item["id"] for item in items] != sorted(item["id"] for item in items)
    manifest = json.loads(data(trained / "manifest.json"))
    assert manifest["rows"] == manifest["items"] == 24 and manifest["dropped"] == {} and manifest["source"]["form"] == "raw"
    assert manifest["counts"]["dataset"] == dict.fromkeys(("chartqa", "coco", "gqa", "vg"), 6)
    train(raw, tmp_path / "again")
    train(raw, tmp_path / "other", "--seed", "1")
    assert data(tmp_path / "again/items.jsonl") == data(trained / "items.jsonl") != data(tmp_path / "other/items.jsonl")


@pytest.mark.parametrize("ending", ["tar.gz", "tar"])
def test_an_archive_cut_or_changed_anywhere_is_refused(tmp_path, ending):
    """Cut at every length: gzip's own header, between two members, before the mark of the end. Changed: where no header guards the byte."""
    made, picture = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (4, 4), (9, 99, 9)).save(picture, "BMP")
    with tarfile.open(fileobj=made, **({"mode": "w:gz", "compresslevel": 0} if ending == "tar.gz" else {"mode": "w"})) as tar:
        for name in ("coco/a.bmp", "coco/b.bmp"):
            member = tarfile.TarInfo(name)
            member.size = len(picture.getvalue())
            tar.addfile(member, io.BytesIO(picture.getvalue()))
    whole, path = made.getvalue(), tmp_path / f"a.{ending}"

    def read(content):
        path.write_bytes(content)
        return list(prepare.unpack(str(path), {"coco/a.bmp", "coco/b.bmp"}, str(tmp_path / "images")))

    assert [line["name"] for line in read(whole)] == ["coco/a.bmp", "coco/b.bmp"]
    end = len(whole) if ending == "tar.gz" else 4 * 512 + 1   # a plain archive: two headers, two bodies, and one block of the mark
    for length in {*range(32), *range(32, end, 61), *range(0, end, 512), end - 1}:
        with pytest.raises(prepare.UserError, match=f"a.{ending}: cannot read this archive"):
            read(whole[:length])
    if ending == "tar.gz":
        pixel = whole.index(bytes((9, 99, 9)))
        with pytest.raises(prepare.UserError, match="CRC check failed"):
            read(whole[:pixel] + b"x" + whole[pixel + 1:])


def test_raw_form_unpacked_images_give_the_same_items(raw, trained, tmp_path):
    shutil.copytree(raw, tmp_path / "loose")
    folder = tmp_path / "loose/lmms-lab/LLaVA-NeXT-Data/llava_next_raw_format"
    for archive in folder.glob("*.tar.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        os.remove(archive)
    train(tmp_path / "loose", tmp_path / "out")
    assert data(tmp_path / "out/items.jsonl") == data(trained / "items.jsonl")


def test_raw_form_drops_are_counted(tmp_path):
    records, _ = fixtures.write_raw(tmp_path, 12, archives=2, spoil=(5,))
    folder = tmp_path / "lmms-lab/LLaVA-NeXT-Data/llava_next_raw_format"
    turn = lambda who, value: {"from": who, "value": value}  # noqa: E731
    strange = [
        {"id": "a", "conversations": [turn("human", "Hello"), turn("gpt", "Hi")]},
        {"id": "b", "image": ["x.jpg", "y.jpg"], "conversations": records[0]["conversations"]},
        {"id": "c", "image": "x.jpg", "conversations": [turn("human", "<image>\nWhat?")]},
        {"id": "d", "image": "x.jpg", "conversations": [turn("human", "<image>"), turn("gpt", "A bus.")]},
        {"id": "e", "image": "x.jpg", "conversations": [turn("human", "<image> and <image>"), turn("gpt", "A bus.")]},
        {"id": "f", "image": "../x.jpg", "conversations": records[1]["conversations"]},
        {"id": "g", "image": "x.jpg"},
    ]
    (folder / "llava_next_raw_format_processed.json").write_text(json.dumps(records + strange))
    train(tmp_path, tmp_path / "out")
    manifest = json.loads(data(tmp_path / "out/manifest.json"))
    assert manifest["rows"] == 19 and manifest["items"] == 11
    assert manifest["dropped"] == {
        "no image": 1,
        "more than one image": 2,
        "turns are not human and gpt by turns": 1,
        "empty question or answer": 1,
        "no conversation": 1,
        "unreadable image": 1,
        "image not in the archives": 1,
    }
    assert manifest["rows"] == manifest["items"] + sum(manifest["dropped"].values())


def test_raw_form_every_turn_and_limit(raw, tmp_path):
    train(raw, tmp_path / "all", "--turns", "all")
    assert len(lines(tmp_path / "all/items.jsonl")) == 6 * (3 + 1 + 3 + 2)
    train(raw, tmp_path / "few", "--limit", "5")
    assert sorted(item["id"].split(":")[1] for item in lines(tmp_path / "few/items.jsonl")) == list("01234")
    assert json.loads(data(tmp_path / "few/manifest.json"))["options"]["limit"] == 5


def test_raw_form_named_errors_and_restart(raw, trained, tmp_path, monkeypatch):
    shutil.copytree(raw, tmp_path / "bad")
    folder = tmp_path / "bad/lmms-lab/LLaVA-NeXT-Data/llava_next_raw_format"
    table, archive = folder / "llava_next_raw_format_processed.json", folder / "llava_next_raw_format_images_2.tar.gz"
    with pytest.raises(prepare.UserError, match="expected 738,590 conversations as published, found 24"):
        prepare.main(["train", "--local", str(raw), "--out", str(tmp_path / "n")])
    whole = data(archive)
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(prepare.UserError, match="images_2.tar.gz: cannot read this archive.*Download it again"):
        train(tmp_path / "bad", tmp_path / "out")
    assert not (tmp_path / "out/items.jsonl").exists()
    archive.write_bytes(whole)
    opened, real = [], prepare.open_binary
    monkeypatch.setattr(prepare, "open_binary", lambda path: opened.append(os.path.basename(path)) or real(path))
    monkeypatch.setattr(prepare, "other_file", lambda *_: None)  # the mended archive has another content, which alone would start afresh
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(prepare.UserError):
        train(tmp_path / "bad", tmp_path / "out2")
    archive.write_bytes(whole)
    opened.clear()
    train(tmp_path / "bad", tmp_path / "out2")
    assert opened == ["llava_next_raw_format_images_2.tar.gz", "llava_next_raw_format_images_3.tar.gz"], "finished parts are not read again"
    assert data(tmp_path / "out2/items.jsonl") == data(trained / "items.jsonl")
    text = table.read_text()
    for damaged, words in (
        (text[:-40], "cut short or damaged"),
        ("{}", "expected a JSON array"),
        (text.replace('"id"', '"id', 1), "cut short or damaged"),
    ):
        table.write_text(damaged)
        with pytest.raises(prepare.UserError, match=words):
            train(tmp_path / "bad", tmp_path / "out3")


@parquet
def test_parquet_form(tmp_path, trained, monkeypatch):
    rows = fixtures.rows_of("LLaVA-NeXT", 24)
    rows[4]["image"] = rows[9]["image"] = None  # text-only rows
    rows[6]["image"] = {"bytes": rows[6]["image"]["bytes"][:400], "path": "6.jpg"}
    fixtures.write_source(tmp_path, "LLaVA-NeXT", rows, files=3)
    train(tmp_path, tmp_path / "one")
    manifest = json.loads(data(tmp_path / "one/manifest.json"))
    assert manifest["source"]["form"] == "parquet" and manifest["rows"] == 24 and manifest["items"] == 21
    assert manifest["dropped"] == {"no image": 2, "unreadable image": 1}
    asked = {(item["question"], item["answers"][0]) for item in lines(tmp_path / "one/items.jsonl")}
    assert ("What is in picture 5?", "A bus 5.") in asked and not any("<image>" in question for question, _ in asked)
    with pytest.raises(prepare.UserError, match="expected 779,289 rows as published, found 24 in 3 files"):
        prepare.main(["train", "--local", str(tmp_path), "--out", str(tmp_path / "two")])
    train(tmp_path, tmp_path / "few", "--limit", "9")
    assert len(lines(tmp_path / "few/items.jsonl")) == 9
    # interrupted in the third shard: the first two are not read again, the result is the same
    real, read = prepare.parquet_rows, []

    def stops(name, files, columns):
        read.append(files[0][-22:])
        if len(read) == 3:
            raise KeyboardInterrupt
        return real(name, files, columns)

    monkeypatch.setattr(prepare, "parquet_rows", stops)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, tmp_path / "three")
    train(tmp_path, tmp_path / "three")
    assert len(read) == 4 and read[2] == read[3]
    assert data(tmp_path / "three/items.jsonl") == data(tmp_path / "one/items.jsonl")


def test_which_turns_stand_alone():
    first = ("What is this?" + SENTENCE, "A bus")
    for question, alone in (
        ("What is the bus's color?", True),
        ("What animal is the one that sits on the left?", True),
        ("Is it red?", False),
        ("And the left one?", False),
        ("Why?", False),
        ("What are they doing?", False),
        ("[0.27,0.67,0.84,0.86]", False),
        ("What does that mean?", False),
        ("What did you mention before?", False),
        ("Who wrote this book?", True),
    ):
        turns = prepare.usable_turns([first, (question, "x")], every=False)
        assert [number for number, _, _ in turns] == ([0, 1] if alone else [0]), question
        assert not alone or turns[1][1] == question + SENTENCE
        assert len(prepare.usable_turns([first, (question, "x")], every=True)) == 2
    letter = "\nAnswer with the option's letter from the given choices directly."
    turns = prepare.usable_turns(
        [("Which?\nA. x\nB. y" + letter, "A"), ("What is left?", "x"), ("Which color?\nA. x\nB. y", "B")], every=False
    )
    assert [question.endswith(letter) for _, question, _ in turns] == [True, False, True]


@pytest.mark.parametrize("size", (1, 7, 1 << 20))
def test_json_array_ends_with_the_file(tmp_path, size):
    path = tmp_path / "a.json"
    for rest in ("[]", "[{}]", "]", " }junk", "{", "\n" * 50 + "x", "null", "\0"):
        path.write_text('[{"a": 1}]' + rest)
        with pytest.raises(prepare.UserError, match="expected the end of the file after the JSON array"):
            list(prepare.json_array(str(path), size=size))
    path.write_text('[{"a": 1}]' + " \r\n\t" * 9)
    assert list(prepare.json_array(str(path), size=size)) == [{"a": 1}]


@pytest.mark.parametrize(
    "image, reason",
    [(image, "image path that is no text") for image in (5, 1.5, True, {"a": 1}, ["coco/x.jpg"])]
    + [(image, "no image") for image in (None, "", [])]
    + [(image, "image path that no file can have") for image in ("coco/\ud800.png", "coco/a\0b.png", "\udfff")]
    + [(["a", "b"], "more than one image"), ("a" * 5000, "image not in the archives"), ("é" * 200, "image not in the archives")],
)
@pytest.mark.parametrize("loose", (False, True))
def test_image_paths_of_every_kind(tmp_path, image, reason, loose):
    records, images = fixtures.write_raw(tmp_path, 2, archives=1)
    folder = tmp_path / "lmms-lab/LLaVA-NeXT-Data/llava_next_raw_format"
    (folder / "llava_next_raw_format_processed.json").write_text(json.dumps([*records, records[0] | {"image": image}]))
    if loose:
        os.remove(folder / "llava_next_raw_format_images_1.tar.gz")
        for name, content in images.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    train(tmp_path, tmp_path / "out")
    manifest = json.loads(data(tmp_path / "out/manifest.json"))
    assert manifest["items"] == 2 and manifest["dropped"] == {reason: 1}


@parquet
@pytest.mark.parametrize("image", (b"plain", "x.png", 5, [{"bytes": b"x"}], {"bytes": "text"}, {"path": "x.png"}))
def test_parquet_image_cells_of_every_kind(tmp_path, image):
    pyarrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / fixtures.FILES["LLaVA-NeXT"].format("0-of-1")
    path.parent.mkdir(parents=True)
    tables.write_table(pyarrow.Table.from_pylist([fixtures.conversation(i) | {"image": image} for i in range(3)]), path)
    with pytest.raises(prepare.UserError, match=r"found none; dropped: \{'no image bytes': 3\}"):
        train(tmp_path, tmp_path / "out")


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.dictionaries(st.text(max_size=5), st.text(max_size=30) | st.lists(st.text(max_size=9), max_size=3), max_size=3), max_size=6
    ),
    size=st.integers(1, 40),
    indent=st.sampled_from((None, 1)),
)
def test_json_array_equals_json_loads(tmp_path_factory, values, size, indent):
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text("[" + ",\n".join(json.dumps(value, indent=indent, ensure_ascii=False) for value in values) + "] \n", encoding="utf-8")
    assert list(prepare.json_array(str(path), size=size + 8)) == values


# ---------------------------------------------------------------- check
GOOD = {
    "id": "a",
    "image": "a.png",
    "question": "Which?\n(A) red\n(B) blue\nAnswer with the option's letter.",
    "answers": ["B"],
    "source": "Own",
    "domain": "natural_image",
    "metric": "choice",
    "options": ["red", "blue"],
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Eight different pictures: a.png to h.png."""
    folder = tmp_path_factory.mktemp("images")
    for letter in "abcdefgh":
        fixtures.picture(f"check {letter}", 160).save(folder / f"{letter}.png")
    return folder


def check(*arguments):
    return prepare.main(["check", *map(str, arguments), "--workers", "1"])


@pytest.mark.parametrize(
    "change, words",
    (
        ({"id": ""}, "'id' is not a text"),
        ({"id": " a"}, "'id' has outer white space"),
        ({"question": 3}, "'question' is not a text"),
        ({"image": "../a.png"}, "'image' leaves the images folder"),
        ({"image": "b/none.png"}, "missing or unreadable image"),
        ({"answers": []}, "'answers' is not a list"),
        ({"answers": [" "], "metric": "exact", "options": ["x", "y"], "question": "q"}, "an empty answer"),
        ({"answers": ["C"]}, "neither a letter of the options nor an option"),
        ({"options": ["red"]}, "too few"),
        ({"options": ["blue", "red"]}, "letter order"),
        ({"options": ["red", "red"]}, "options are empty, equal"),
        ({"metric": "accuracy"}, "'metric' is not one of"),
        ({"metric": "yes_no"}, "neither yes nor no"),
        ({"domain": None}, "'domain' is not a text"),
        ({"metric": "realworldqa", "answers": ["AB"]}, "neither a letter of the options nor an option"),
        ({"metric": "realworldqa", "answers": ["C"]}, "neither a letter of the options nor an option"),
        ({"metric": "realworldqa", "answers": ["red"], "options": ["red"]}, "too few"),
        ({"image": "a.png/"}, "missing or unreadable image"),
    ),
)
def test_faults_are_named(images, tmp_path, capsys, change, words):
    path = write_items(tmp_path / "items.jsonl", [GOOD | {"id": "first"}, GOOD | change])
    with pytest.raises(prepare.UserError, match=words):
        check(path, images)
    assert f"{path}" in capsys.readouterr().err


def test_more_faults(images, tmp_path, capsys):
    path = tmp_path / "items.jsonl"
    for items, words in (
        ([GOOD, GOOD], "1 x 'id' occurs twice"),
        ([{k: v for k, v in GOOD.items() if k != "metric"}], "needs 'metric'"),
        ([{k: v for k, v in GOOD.items() if k != "options"}], "multiple choice without 'options'"),
    ):
        with pytest.raises(prepare.UserError, match=words):
            check(write_items(path, items), images)
    path.write_text("")
    with pytest.raises(prepare.UserError, match="expected one item or more"):
        check(path, images)
    path.write_text('{"id": "a"')
    with pytest.raises(prepare.UserError, match="line 1.*torn"):
        check(path, images)
    (images / "cut.png").write_bytes(data(images / "a.png")[:300])
    with pytest.raises(prepare.UserError, match="1 x missing or unreadable image"):
        check(write_items(path, [GOOD | {"image": "cut.png"}]), images)
    assert "cut.png: cannot read this image" in capsys.readouterr().err
    os.remove(images / "cut.png")
    with pytest.raises(prepare.UserError, match="not a folder"):
        check(path, images / "none")


def test_whatever_read_items_refuses_check_refuses(images, tmp_path):
    for change in (
        {"id": 4},
        {"id": "a\n"},
        {"image": "/a.png"},
        {"image": "C:a.png"},
        {"answers": "B"},
        {"answers": [1]},
        {"options": []},
        {"source": ""},
        {"metric": "x"},
        {"image": "a\x00.png"},
    ):
        path = write_items(tmp_path / "items.jsonl", [GOOD | change])
        with pytest.raises(prepare.UserError):
            prepare.read_items(path)
        with pytest.raises(prepare.UserError):
            check(path, images)


def test_check_passes_and_reports(images, tmp_path, capsys):
    path = write_items(
        tmp_path / "items.jsonl",
        [
            GOOD,
            GOOD | {"id": "b", "image": "b.png", "answers": ["blue"]},
            {"id": "t", "image": "c.png", "question": "q", "answers": ["x", ""], "source": "TextVQA", "domain": "scene_text"},
        ],
    )
    assert check(path, images) == 0
    assert json.loads(capsys.readouterr().out) == {"items": 3, "images": 3, "faults": 0}


def test_leakage_finds_copies_and_no_different_pictures(images, tmp_path, capsys):
    """A planted copy, re-encodings and resizes are found; pictures that differ in one small box are not flagged."""
    training = tmp_path / "train"
    training.mkdir()
    picture = lambda letter: Image.open(images / f"{letter}.png")  # noqa: E731
    shutil.copy(images / "a.png", training / "copy.png")
    picture("b").save(training / "coded.jpg", quality=60)
    picture("c").resize((100, 100), Image.BICUBIC).save(training / "resized.png")
    picture("d").resize((240, 240), Image.LANCZOS).save(training / "both.webp", quality=70)
    near = picture("e").convert("RGB")
    near.paste((255, 0, 0), (60, 60, 74, 74))
    near.save(training / "edited.png")
    picture("f").resize((160, 80)).save(training / "squeezed.png")
    for i in range(60):
        fixtures.picture(f"other {i}", 160).save(training / f"other{i}.png")
    names = sorted(path.name for path in training.iterdir())
    item = {"question": "q", "answers": ["x"], "source": "Own", "domain": "d", "metric": "exact"}
    ours = write_items(tmp_path / "test.jsonl", [item | {"id": letter, "image": f"{letter}.png"} for letter in "abcdefgh"])
    theirs = write_items(tmp_path / "train.jsonl", [item | {"id": f"{name}-{k}", "image": name} for name in names for k in range(2)])
    assert check(ours, images, "--against", theirs, training) == 0
    report = json.loads(capsys.readouterr().out)
    expected = {
        ("a.png", "copy.png", "identical"),
        ("b.png", "coded.jpg", "near"),
        ("c.png", "resized.png", "near"),
        ("d.png", "both.webp", "near"),
    }
    assert {tuple(pair.values()) for pair in report["first"]} == expected
    assert (report["identical"], report["near_identical"], report["items_affected"], report["excluded_training_items"]) == (1, 3, 4, 8)
    listed = (tmp_path / "train.exclude-ids.txt").read_text().splitlines()
    assert sorted(listed) == sorted(f"{name}-{k}" for name in ("copy.png", "coded.jpg", "resized.png", "both.webp") for k in range(2))
    # no leak: the list is there, and empty
    assert (
        check(
            ours,
            images,
            "--against",
            write_items(tmp_path / "t2.jsonl", [item | {"id": "x", "image": "other1.png"}]),
            training,
            "--out",
            tmp_path / "none.txt",
        )
        == 0
    )
    assert (tmp_path / "none.txt").read_text() == ""


def test_near_pictures_are_searched_in_blocks():
    rng = np.random.default_rng(0)
    prints = rng.integers(0, 256, (50, 256))
    others = np.concatenate([rng.integers(0, 256, (33, 256)), (prints[[7, 31]] + rng.integers(-2, 3, (2, 256))).clip(0, 255)])
    sizes, other_sizes = [(100, 80)] * 50, [(50, 40)] * 35
    assert prepare.close_thumbs(prints, sizes, others, other_sizes, step=16) == [(7, 33), (31, 34)]
    assert prepare.close_thumbs(prints, sizes, others, [(40, 50)] * 35) == []


@parquet
def test_check_passes_on_what_is_made(made, trained, capsys):
    for split in ("dev", "test"):
        assert check(made / f"{split}.jsonl", made / "images", "--against", trained / "items.jsonl", trained / "images") == 0
        report = json.loads(capsys.readouterr().out)
        assert report["faults"] == report["identical"] == report["near_identical"] == 0 and report["training_images"] == 24
    assert check(made / "test.jsonl", made / "images", "--against", made / "dev.jsonl", made / "images") == 0
    assert json.loads(capsys.readouterr().out)["excluded_training_items"] == 0


def test_check_passes_on_the_demo(capsys, tmp_path):
    demo = os.path.join(ROOT, "data", "demo")
    if not os.path.isfile(os.path.join(demo, "items", "test.jsonl")) or not os.path.isdir(os.path.join(demo, "images")):
        pytest.skip("the demo's pictures are not drawn yet: python data/demo/render.py")
    items, images = os.path.join(demo, "items"), os.path.join(demo, "images")
    assert (
        check(os.path.join(items, "test.jsonl"), images, "--against", os.path.join(items, "dev.jsonl"), images, "--out", tmp_path / "x")
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["items"] == 360 and report["faults"] == report["identical"] == report["near_identical"] == 0


# ---------------------------------------------------------------- command line
def call(*arguments):
    return subprocess.run(
        [sys.executable, os.path.join(ROOT, "data", "prepare.py"), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_help_without_docstrings():
    words = [sys.executable, "-OO", os.path.join(ROOT, "data", "prepare.py"), "check", "--help"]
    assert subprocess.run(words, capture_output=True, timeout=120).returncode == 0


def test_command_line(images, tmp_path):
    start = time.time()
    shown = call("geb", "--help")
    assert shown.returncode == 0 and "--official-id-column" in shown.stdout and time.time() - start < 20
    assert (
        call("geb").returncode
        == call("train", "--out", "x", "--limit", "0").returncode
        == call("geb", "--out", "x", "--test-per-source", "3").returncode
        == 2
    )
    assert "expected SOURCE=" in call("geb", "--out", "x", "--repo", "VQA=a/b").stderr
    failed = call("check", tmp_path / "none.jsonl", images)
    assert (
        failed.returncode == 1
        and failed.stderr.startswith("error: ")
        and "none.jsonl" in failed.stderr
        and "Traceback" not in failed.stderr
    )
    good = call("check", write_items(tmp_path / "items.jsonl", [GOOD]), images)
    assert good.returncode == 0 and json.loads(good.stdout)["items"] == 1


def test_copied_alone_it_checks_items(images, tmp_path):
    shutil.copy(os.path.join(ROOT, "data", "prepare.py"), tmp_path / "prepare.py")
    path = write_items(tmp_path / "items.jsonl", [GOOD])
    done = subprocess.run(
        [sys.executable, "prepare.py", "check", path, str(images)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
