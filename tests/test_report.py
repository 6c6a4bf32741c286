"""results/report.py on a small run folder of the demo's layout: figures, words, escaping, order statistics, and the page in a real browser."""
import base64
import contextlib
import csv
import hashlib
import importlib.util
import io
import itertools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
VECTORS = {"joint": ("qwen3-vl-embedding-2b", "vl_joint"), "visual": ("qwen3-vl-embedding-2b", "visual_only"),
           "clip": ("clip", "visual_only")}
RIGHT = {  # chance that an answer is right: vector, condition, domain
    "joint": {"matched": (.95, .8, .7), "text_only": (.3, .1, .1), "zero": (.3, .1, .1), "shuffled": (.3, .1, .1)},
    "visual": {"matched": (.9, .3, .1), "text_only": (.3, .1, .1), "zero": (.3, .1, .1), "shuffled": (.3, .1, .1)},
    "clip": {"matched": (.6, .1, .1), "text_only": (.3, .1, .1), "zero": (.3, .1, .1), "shuffled": (.3, .1, .1)}}
DOMAINS = ("natural_image", "scene_text", "visual_document")


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


report = load(ROOT / "results/report.py", "report_under_test")


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def draw_items(folder, count):
    """Items and pictures by the demo's own renderer."""
    render = load(ROOT / "data/demo/render.py", "render_under_test")
    items = []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for index in range(-(-count // 2)):
        image, _, asked, _ = render.render("test", index)
        image.save(folder / "images" / f"test-{index:05d}.png")
        items += render.items_of("test", index, asked)
    write_lines(folder / "items/test.jsonl", items[:count])
    return items[:count]


def write_predictions(folder, items_path, items, name, condition, answers):
    embedder, mode = VECTORS[name] if condition != "text_only" else (None, None)
    path = folder / f"runs/controls/{name}/{condition}.jsonl"
    rng = random.Random(f"bits/{'' if condition == 'text_only' else name}/{condition}")
    write_lines(path, [{"id": item["id"], "prediction": answer, "condition": condition, "answer_tokens": 2,
                        "answer_bits": (1.0 if condition == "matched" else 4.0) + rng.random()} for item, answer in zip(items, answers)])
    words = ["train_decoder.py", "predict", "--readout", f"runs/readouts/{name}", "--items", "items/test.jsonl", "--out",
             f"runs/controls/{name}/{condition}.jsonl"]
    meta = {"format_version": 1, "embedder": embedder, "mode": mode, "condition": condition,
            "readout_sha256": hashlib.sha256(name.encode()).hexdigest(),
            "items_sha256": sha256(items_path), "limit": None, "command": words, "device": "cpu", "versions": {"torch": "2.13.0"},
            "seconds": 1.5,
            "embeddings": {"model": f"models/{name}", "revision": "0123abcd", "dim": 192, "weights_sha256": hashlib.sha256(b"w").hexdigest()},
            "predictions_sha256": sha256(path)}
    path.with_name(f"{condition}.meta.json").write_text(json.dumps(meta))


def make_run(folder, count=60, names=tuple(VECTORS), right=RIGHT, change=None):
    """A run folder of the demo's layout: items, images, predictions with sidecars, scores by evaluate.py. `change(items)` edits the items first."""
    folder = Path(folder)
    items = draw_items(folder, count)
    if change:
        change(items, folder)
        write_lines(folder / "items/test.jsonl", items)
    wrong = {"yes": "no", "no": "yes", "A": "B"}
    for name in names:
        for condition, chances in right[name].items():
            answers = []
            for item in items:                          # text-only does not see the vector: the same answers in each folder
                rng = random.Random(f"{'' if condition == 'text_only' else name}/{condition}/{item['id']}")
                gold = item["answers"][0]
                answers.append(gold if rng.random() < chances[DOMAINS.index(item["domain"])]
                               else wrong.get(gold, rng.choice(("A", "no", "blue", "17", "MOT"))))
            write_predictions(folder, folder / "items/test.jsonl", items, name, condition, answers)
    return score(folder, "runs/controls/*/*.jsonl")


def score(folder, pattern, out="scores"):
    done = subprocess.run([sys.executable, str(ROOT / "evaluate.py"), "--items", "items/test.jsonl", "--predictions", pattern, "--out", out,
                           "--bootstrap", "1000"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def run_report(folder, *words, status=0):
    """The command in `folder`, in this process to save the interpreter's start; returns (stdout, stderr) and checks the exit status."""
    here, out, error = os.getcwd(), io.StringIO(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), pytest.raises(SystemExit) as ended:
            report.run(lambda: report.main([str(word) for word in words]), "")
    finally:
        os.chdir(here)
    assert ended.value.code == status, error.getvalue() + out.getvalue()
    return out.getvalue(), error.getvalue()


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("run"))
    run_report(folder, "scores")
    return folder


def page_of(folder):
    return (folder / "scores/report.html").read_text(encoding="utf-8")


def data_of(folder):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page_of(folder), re.S)[1])


class Markup(HTMLParser):
    """What a browser would make of the page: its tags, with attributes, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.inside = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside not in ("script", "style"):
            self.text.append(data)


# ---------------------------------------------------------------- figures and words
def markdown_rows(folder, title):
    block = (folder / "scores/report.md").read_text(encoding="utf-8").split(f"**{title}**")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
    assert len({len(row) for row in rows}) == 1, "a Markdown table whose lines differ in cells"
    return rows


def test_main_table_holds_the_scorers_figures(run):
    scores = json.loads((run / "scores/scores.json").read_text())
    header, _, *rows = markdown_rows(run, "Scores")
    assert header == ["Embedder", "Mode", "n", "All items", "Mean of domains", "Natural images", "Scene text", "Visual documents",
                      "Usable bits"]
    for row, name in zip(rows, ("clip", "visual", "joint")):
        found = next(one for one in scores["rows"] if one["condition"] == "matched" and f"/{name}/" in one["file"])
        low, high = found["overall"]["interval"]
        assert row[3] == f"{found['overall']['score']:.2f} [{low:.2f}, {high:.2f}]" and row[2] == "60"
        assert row[6].startswith(f"{found['by_domain']['scene_text']['score']:.2f} [")
        pair = next(p for p in scores["pairs"] if p["a"]["file"] == found["file"]
                    and p["b"]["condition"] == "text_only")         # one row for all: its readout saw no vector
        assert row[8].startswith(f"{pair['usable_information_bits']['mean']:.2f} [")
    assert [row[:2] for row in rows[3:4]] == [["no vector", "text only"]], "three copies of one text-only file are one row"
    published = [row for row in rows if row[0].endswith("(paper)")]
    assert [row[3] for row in published] == ["65.56", "33.21", "28.25", "84.30"] and all(row[5:] == ["-"] * 4 for row in published)


def test_weights_from_a_folder_are_not_called_the_published_ones(tmp_path):
    folder = make_run(tmp_path / "run", 12, ("visual",))
    path = folder / "runs/controls/visual/matched.meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"embeddings": meta["embeddings"] | {"revision": None}}))
    run_report(score(folder, "runs/controls/*/*.jsonl"), "scores")
    row = next(row for row in markdown_rows(folder, "Scores") if row[1] == "visual-only")
    assert row[0] == "Qwen3-VL-Embedding-2B (local)"
    text = (folder / "scores/report.md").read_text()
    assert "weights read from a folder (Qwen3-VL-Embedding-2B from models/visual)" in text
    assert "Qwen3-VL-Embedding-2B (local)" in page_of(folder)


def test_unknown_figures_print_as_a_dash(run):
    rows = markdown_rows(run, "Published figures")
    clip = next(row for row in rows if row[0] == "CLIP")
    assert clip[4:8] == ["-"] * 4 and "null" not in (run / "scores/report.md").read_text() and ">None<" not in page_of(run)


def test_summary_in_words(run):
    text = (run / "scores/report.md").read_text()
    assert "**Which mode carries more information?** Joint, by 38.3 points." in text
    assert "**In which domain?** Joint leads in scene text and visual documents." in text and "Not separated: natural images." in text
    assert "**Do the controls support it?** For 2 of 3 vectors." in text and "CLIP visual-only: not above text only" in text
    rows = {tuple(row[:2]): row[2:] for row in markdown_rows(run, "Is matched above every control?")[2:]}
    assert rows["Qwen3-VL-Embedding-2B", "joint"] == ["yes"] * 4
    assert rows["Qwen3-VL-Embedding-2B", "visual-only"][:2] == ["yes", "yes"] and rows["Qwen3-VL-Embedding-2B", "visual-only"][2].startswith("not above")
    for answer in ("Joint, by 38.3 points", "Joint leads in scene text and visual documents", "For 2 of 3 vectors"):
        assert f"<span>{answer}</span>" in page_of(run)


def fake_pair(difference, interval, **by_domain):
    group = lambda value, bounds: {"difference": value, "interval": bounds, "n": 10, "p": .5, "won": 1, "lost": 1, "tied": 1}
    return group(difference, interval) | {"why": "joint against visual-only", "by_domain": {name: group(*value) for name,
                                                                                            value in by_domain.items()}}


def fake_vector(name, mode, score=50.0):
    return report.Vector({"overall": {"score": score, "interval": [score - 1, score + 1], "n": 10}, "domain_differences": []}, name, mode,
                         {})


@pytest.mark.parametrize("interval, answer, tone", [([2, 8], "Joint, by 5.0 points", "yes"), ([-1, 8], "No difference shown", "open"),
                                                    (None, "No difference shown", "open"),
                                                    ([0, 8], "No difference shown", "open")])
def test_mode_words_follow_the_interval(interval, answer, tone):
    a, b = fake_vector("E", "joint"), fake_vector("E", "visual-only")
    card = report.mode_card([(a, b, fake_pair(5.0, interval))], [a, b])
    assert (card["answer"], card["tone"]) == (answer, tone)


def test_mode_words_when_visual_wins_and_when_there_are_several():
    a, b = fake_vector("E", "joint"), fake_vector("E", "visual-only")
    assert report.mode_card([(a, b, fake_pair(-5.0, [-8, -2]))], [a, b])["answer"] == "Visual-only, by 5.0 points"
    three = [(a, b, fake_pair(5.0, [2, 8])), (a, b, fake_pair(4.0, [1, 8])), (a, b, fake_pair(1.0, [-1, 8]))]
    card = report.mode_card(three, [a, b])
    assert (card["answer"], card["tone"]) == ("Joint, for 2 of 3 embedders", "mixed")
    assert report.mode_card([], [b])["answer"] == "Only visual-only vectors here"


def test_domain_words():
    data = {"groups": {"domain": {"natural_image": 1, "scene_text": 1}}}
    a, b = fake_vector("E", "joint"), fake_vector("E", "visual-only")
    words = lambda **by: report.domain_card(data, [(a, b, fake_pair(5, [1, 9], **by))], [a, b])["answer"]
    assert words(natural_image=(5, [1, 9]), scene_text=(9, [2, 12])) == "Joint leads in every domain, most in scene text"
    assert words(natural_image=(5, [-1, 9]), scene_text=(9, [-2, 12])) == "No domain separates the modes"
    assert words(natural_image=(-5, [-9, -1]), scene_text=(9, [2, 12])) == "Joint leads in scene text, visual-only in natural images"


def test_without_controls_or_pairs_the_page_says_so(tmp_path):
    make_run(tmp_path, 12, names=("clip",), right={"clip": {"matched": (.9, .9, .9)}})
    run_report(tmp_path, "scores", "--paper", "none")
    text = (tmp_path / "scores/report.md").read_text()
    assert "Only visual-only vectors here" in text and "No controls here" in text and "its score may come from the question alone" in text
    assert "(paper)" not in text and "Published figures" not in text


# ---------------------------------------------------------------- one file, no network, nothing from data becomes markup
def test_page_is_self_contained(run):
    markup = Markup(page_of(run))
    for tag, attributes in markup.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img"), tag
        for name in ("src", "href", "action", "srcset"):
            assert not attributes.get(name) or attributes[name].startswith("#"), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], attributes
    style = report.STYLE + report.SCRIPT
    assert "@import" not in style and "url(" not in style and not re.search(r"\bfetch\(|XMLHttpRequest|import\(|eval\(|innerHTML", style)
    policy = next(attributes["content"] for tag, attributes in markup.tags if attributes.get("http-equiv") == "Content-Security-Policy")
    script = page_of(run).rsplit("<script>", 1)[1].split("</script>")[0]
    assert "default-src 'none'" in policy and base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert re.search(r"@media screen and \(prefers-color-scheme: dark\)", style) and "@media print" in style


BOMB = "</script><script>window.bad=1</script><!--<img src=x onerror=window.bad=2>"


def plant(items, folder):
    """Script tags in every text of the items that the page shows, an image's name included."""
    for number, item in enumerate(items):
        item["question"] = f"Q{number} {BOMB} \u202eesrever"
        item["answers"] = [f"{item['answers'][0]}", f"A {BOMB}"]
        item["kind"] = BOMB[:40]
        item["metric"] = "exact"
        item.pop("options", None)
        item["source"] = f"src{BOMB}"
        item["domain"] = ("natural_image", "scene_text", f"dom{BOMB}")[DOMAINS.index(item["domain"])] if number else f"dom{BOMB}"
    first = items[0]["image"]
    evil = "<img src=x onerror=window.bad=3>.png"
    shutil.copy(folder / "images" / first, folder / "images" / evil)
    for item in items:
        if item["image"] == first:
            item["image"] = evil


@pytest.fixture(scope="session")
def bombed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bombed")
    items = draw_items(folder, 12)
    plant(items, folder)
    write_lines(folder / "items/test.jsonl", items)
    vectors = dict(VECTORS)
    VECTORS["<b onclick=window.bad=4>&"] = (f"emb{BOMB}", "visual_only")
    try:
        for condition in ("matched", "text_only", "zero"):
            write_predictions(folder, folder / "items/test.jsonl", items, "<b onclick=window.bad=4>&", condition,
                              [f"P{i} {BOMB}" if i % 2 else item["answers"][0] for i, item in enumerate(items)])
    finally:
        VECTORS.clear()
        VECTORS.update(vectors)
    score(folder, "runs/controls/*/*.jsonl")
    run_report(folder, "scores", "--title", f"T {BOMB}", "--note", f"N {BOMB}")
    return folder


def test_planted_markup_stays_text(bombed, run):
    good, bad = Markup(page_of(run)), Markup(page_of(bombed))
    assert sum(tag == "script" for tag, _ in bad.tags) == 2 and {tag for tag, _ in bad.tags} <= {tag for tag, _ in good.tags}
    assert not [attributes for _, attributes in bad.tags if any(name.startswith("on") for name in attributes)]
    assert BOMB in "".join(bad.text), "shown as text"
    data = data_of(bombed)
    assert data["items"][0]["question"].startswith("Q") and BOMB in data["items"][0]["question"] and "\u202e" not in page_of(bombed)
    raw = page_of(bombed).split('id="data">')[1].split("</script>")[0]
    assert "<" not in raw and ">" not in raw
    text = (bombed / "scores/report.md").read_text()
    body = text.split("**Commands**")[0]
    assert not re.search(r"(?<!\\)<(?:script|img|b)\b", body), "Markdown shows markup as text"


# ---------------------------------------------------------------- examples
def test_examples_are_complete_and_sorted_by_disagreement(run):
    data, scores = data_of(run), {}
    for line in (run / "scores/scores.jsonl").read_text().splitlines():
        row = json.loads(line)
        scores[row["file"].split("/")[-2], row["condition"], row["id"]] = row["score"]
    assert len(data["items"]) == data["total"] == 60 and data["sets"][0]["name"] == "Qwen3-VL-Embedding-2B"
    chosen = data["sets"][0]
    assert chosen["columns"] == ["joint", "visual-only"]
    assert [(line["key"], line["one"]) for line in chosen["lines"]] == [("matched", False), ("text_only", True), ("zero", False),
                                                                        ("shuffled", False)]
    gaps = []
    for number in chosen["order"]:
        item = data["items"][number]
        joint, visual = (item["said"][file][1] for file in chosen["lines"][0]["cells"])
        assert joint == scores["joint", "matched", item["id"]] and visual == scores["visual", "matched", item["id"]]
        gaps.append(abs(joint - visual))
    assert gaps == sorted(gaps, reverse=True) and gaps[0] == 1 and gaps[-1] == 0
    shown = {json.loads(line)["id"]: json.loads(line)["prediction"]
             for line in (run / "runs/controls/visual/zero.jsonl").read_text().splitlines()}
    zero = chosen["lines"][2]["cells"][1]
    assert all(item["said"][zero][0] == shown[item["id"]] for item in data["items"])


def test_thumbnails_are_small_copies(run):
    from PIL import Image
    data = data_of(run)
    assert len(data["images"]) == 30 and len(page_of(run)) < 400_000
    item = data["items"][0]
    small = Image.open(io.BytesIO(base64.b64decode(data["images"][item["thumb"]].split(",")[1])))
    original = Image.open(run / "images" / item["image"]).convert("RGB")
    difference = np.abs(np.asarray(small.convert("RGB"), float) - np.asarray(original.resize(small.size), float)).mean()
    assert small.format == "WEBP" and max(small.size) <= 224 and difference < 12, difference


def test_limits_on_examples(run, tmp_path):
    run_report(run, "scores", "--out", tmp_path / "few", "--examples", "10", "--thumbnail", "32")
    text = (tmp_path / "few/report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert len(data["items"]) == 10 and data["total"] == 60 and "10 of 60 items: half of them" in text
    _, error = run_report(run, "scores", "--out", tmp_path / "small", "--max-megabytes", "0.02")
    data = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "small/report.html").read_text(), re.S)[1])
    assert sum(map(len, data["images"])) < 30_000 and any(item["thumb"] is None for item in data["items"]) and "left out to keep the page under" in error
    run_report(run, "scores", "--out", tmp_path / "none", "--examples", "0")
    assert 'id="examples"' not in (tmp_path / "none/report.html").read_text()


def test_same_files_same_bytes(run, tmp_path):
    for name in ("a", "b"):
        run_report(run, "scores", "--out", tmp_path / name)
    assert [sha256(tmp_path / "a" / name) for name in ("report.html", "report.md")] == [sha256(tmp_path / "b" / name)
                                                                                        for name in ("report.html", "report.md")]


# ---------------------------------------------------------------- refusals
def test_predictions_that_changed_after_scoring_are_refused(tmp_path):
    make_run(tmp_path, 12, names=("clip",))
    path = tmp_path / "runs/controls/clip/zero.jsonl"
    path.write_text(path.read_text().replace('"A"', '"B"') + "")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(lines[0]) | {"prediction": "changed"}), *lines[1:]]) + "\n")
    _, error = run_report(tmp_path, "scores", status=1)
    assert "zero.jsonl" in error and "Run evaluate.py again" in error and not (tmp_path / "scores/report.html").exists()
    make_run(tmp_path, 12, names=("clip",))             # the same answers by another readout than the one that was scored
    path = tmp_path / "runs/controls/clip/zero.meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"readout_sha256": "0" * 64}))
    assert "zero.jsonl" in run_report(tmp_path, "scores", status=1)[1]


def test_other_items_and_other_runs_are_refused(run, tmp_path):
    make_run(tmp_path, 12, names=("clip",))
    _, error = run_report(run, "scores", tmp_path / "scores", status=1)
    assert "different items" in error
    _, error = run_report(run, "scores", "--items", tmp_path / "items/test.jsonl", status=1)
    assert "expected the items that were scored" in error
    _, error = run_report(run, "images", status=1)
    assert "scores.json: not found" in error and "evaluate.py" in error
    scores = (tmp_path / "scores/scores.jsonl").read_text().splitlines()
    (tmp_path / "scores/scores.jsonl").write_text("\n".join(scores[:-1]) + "\n")
    _, error = run_report(tmp_path, "scores", status=1)
    assert "scores.jsonl" in error and "another run" in error


def test_missing_predictions_and_images_are_noted(tmp_path):
    make_run(tmp_path, 12, names=("clip",))
    shutil.rmtree(tmp_path / "images")
    os.remove(tmp_path / "runs/controls/clip/zero.jsonl")
    _, error = run_report(tmp_path, "scores")
    assert "zero.jsonl: not there" in error and "--images" in error
    assert "zero.jsonl: not there" in (tmp_path / "scores/report.md").read_text()
    data = data_of(tmp_path)
    assert data["images"] == [] and "zero" not in [line["key"] for line in data["sets"][0]["lines"]]


def test_two_folders_make_one_page(tmp_path):
    make_run(tmp_path, 24, names=("joint", "clip"))
    score(tmp_path, "runs/controls/joint/*.jsonl", "one")
    score(tmp_path, "runs/controls/clip/*.jsonl", "two")
    printed, _ = run_report(tmp_path, "one", "two", "--out", "both")
    assert printed == "both/report.html\n"
    text = (tmp_path / "both/report.md").read_text()
    assert "| Qwen3-VL-Embedding-2B | joint |" in text and "| CLIP | visual-only |" in text


# ---------------------------------------------------------------- rate curve, controls.json, provenance
def test_curve_spread_leaks_and_provenance(tmp_path):
    make_run(tmp_path, 12, names=("joint",))
    points = [{"budget": budget, "family": family, "bytes": size, "score": value, "score_interval": [value - 5, value + 5], "bits": bits,
               "bits_interval": None,
               "difference": None, "verdict": "not compared"} for budget, family, size, value, bits in (
                   ("text_only", "full", 0, 20.0, None), ("truncate:64", "first", 256, 40.0, 1.0), ("truncate:128", "first", 512, 55.0,
                                                                                                    1.5), ("none", "full", 768, 70.0, 2.5))]
    items = sha256(tmp_path / "items/test.jsonl")
    (tmp_path / "scores/curve.json").write_text(json.dumps({"embedder": "qwen3-vl-embedding-2b", "mode": "vl_joint", "points": points,
                                                            "inputs": {"items": items}}))
    group = {"n": 5, "difference": 12.5, "interval": [2.0, 20.0]}
    folder = tmp_path / "runs/controls/joint"
    (folder / "controls.json").write_text(json.dumps({"embedder": "qwen3-vl-embedding-2b", "mode": "vl_joint", "rows": [], "leak_check": {
        "vl_joint: matched - shuffled": {"DemoSigns": group}, "vl_joint: matched - question_vector": {"DemoSigns": group}},
        "spread": {"repeats": 3, "mean": 20.0, "sd": 1.5, "low": 18.0, "high": 22.0, "separated": 3}}))
    (folder / "commands.sh").write_text("# made by controls.py\npython train_decoder.py predict --condition 'a b' > x\n")
    readout = tmp_path / "runs/readouts/joint"
    readout.mkdir(parents=True)
    (readout / "readout.json").write_text(json.dumps({"content_sha256": hashlib.sha256(b"joint").hexdigest(), "arguments": {
        "seed": 17, "decoder": "Qwen/Qwen3-0.6B"}, "run": {"argv": ["train_decoder.py", "fit", "--train-embeddings", "vectors/train",
                                                                    "--epochs", "2"]}}))
    write_lines(tmp_path / "vectors/train.meta.json", [{"run": {"argv": ["--embedder", "x", "--limit", "9"]}}])
    run_report(tmp_path, "scores")
    text, page = (tmp_path / "scores/report.md").read_text(), page_of(tmp_path)
    assert "| truncate:128 | 512 | 55.00 [50.00, 60.00] | 1.50 |" in text and page.count('class="family first"') == 3 and "text only, 0 bytes" in page
    assert "12.50 [2.00, 20.00]" in text and "3 of 3" in text
    rows = markdown_rows(tmp_path, "Prediction files")
    assert rows[0][:5] == ["File", "Condition", "Readout", "Seed",
                           "Decoder"] and rows[2][3:5] == ["17", "Qwen/Qwen3-0.6B"] and "torch 2.13.0" in rows[2][9]
    commands = text.split("```bash\n")[1].split("```")[0].splitlines()
    assert commands[:2] == ["python extract.py --embedder x --limit 9", "python train_decoder.py fit --train-embeddings vectors/train "
                            "--epochs 2"]
    assert "python train_decoder.py predict --condition 'a b' > x" in commands and "python evaluate.py --items items/test.jsonl" in text
    (tmp_path / "scores/curve.json").write_text(json.dumps({"points": points, "inputs": {"items": "0" * 64}}))
    assert "other items" in run_report(tmp_path, "scores", status=1)[1]


# ---------------------------------------------------------------- order against another benchmark
def brute(x, y):
    """Kendall's tau-b and Spearman's rho with exact p, by their definitions and every order of y."""
    def tau(x, y):
        pairs = list(itertools.combinations(range(len(x)), 2))
        sign = lambda v: (v > 0) - (v < 0)
        s = sum(sign(x[i] - x[j]) * sign(y[i] - y[j]) for i, j in pairs)
        return s / ((sum(x[i] != x[j] for i, j in pairs) * sum(y[i] != y[j] for i, j in pairs)) ** .5)

    def rho(x, y):
        rank = lambda v: [(sum(b < a for b in v) + sum(b <= a for b in v) + 1) / 2 for a in v]
        return np.corrcoef(rank(x), rank(y))[0, 1]
    found = []
    for statistic in (tau, rho):
        value = statistic(x, y)
        values = [statistic(x, order) for order in itertools.permutations(y)]
        found += [value, np.mean([abs(v) >= abs(value) - 1e-9 for v in values])]
    return found


@pytest.mark.parametrize("x, y", [([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]), ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]),
                                  ([1, 2, 2, 3, 4], [9, 7, 7, 8, 1]), ([5, 1, 3], [1, 2, 3]),
                                  ([3.5, 1, 2, 9, 4, 7], [2, 2, 1, 8, 3, 3])])
def test_correlations_against_their_definitions(x, y):
    found = report.correlations(x, y)
    assert found["exact"] and np.allclose([found["tau"], found["tau_p"], found["rho"], found["rho_p"]], brute(x, y))


def test_correlations_known_values_and_edges():
    seven = report.correlations(range(7), range(7))
    assert seven["tau"] == pytest.approx(1) and seven["tau_p"] == pytest.approx(2 / 5040) and seven["rho_p"] == pytest.approx(2 / 5040)
    assert report.correlations([1, 1, 1], [1, 2, 3])["tau"] is None and report.correlations([1], [2])["tau"] is None
    many = report.correlations(range(14), range(14))
    assert not many["exact"] and many["tau"] == pytest.approx(1) and 0 < many["tau_p"] < 1e-3


def test_least_tau_is_the_exact_threshold():
    assert report.least_tau(4) is None and report.least_tau(5) == pytest.approx(1.0)
    for n in (5, 6, 7):
        values = [report.correlations(range(n), order) for order in itertools.islice(itertools.permutations(range(n)), 40)]
        for value in values:
            assert (value["tau_p"] <= .05) == (abs(value["tau"]) >= report.least_tau(n) - 1e-9)


def test_order_against_a_benchmark(run, tmp_path):
    with open(tmp_path / "other.csv", "w", newline="") as file:
        csv.writer(file).writerows([["embedder", "score", "source"], ["CLIP", 30, "x"], ["qwen3-vl-embedding-2b", 70, "x"],
                                    ["someone-else", 50, "x"]])
    run_report(run, "scores", "--out", tmp_path / "out", "--benchmark", tmp_path / "other.csv")
    text = (tmp_path / "out/report.md").read_text()
    assert "| visual-only | 2 | 1.00 | 1.0000 | 1.00 | 1.0000 | 2 models are few: no order of so few can reach p = 0.05. |" in text
    assert "Order of models against other" in text and 'class="chart slope"' in (tmp_path / "out/report.html").read_text()
    for body, word in (("embedder,points\nclip,1\n", "'score'"), ("embedder,score\nclip,n/a\n", "n/a"), ("embedder,score\n", "none"),
                       ("embedder,score\nclip,1\nCLIP,2\n", "again")):
        (tmp_path / "bad.csv").write_text(body)
        _, error = run_report(run, "scores", "--out", tmp_path / "out2", "--benchmark", tmp_path / "bad.csv", status=1)
        assert "bad.csv" in error and word in error


def test_command_line(run):
    """The command as a user types it; --help needs neither Pillow nor torch; a wrong flag ends with 2, an error with 1 and no traceback."""
    script = str(ROOT / "results/report.py")
    done = subprocess.run([sys.executable, "-X", "importtime", script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--benchmark" in done.stdout and "torch" not in done.stderr and "PIL" not in done.stderr
    done = subprocess.run([sys.executable, script, "scores", "--items", "items/test.jsonl", "--images", "images"], cwd=run,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (
        0, "scores/report.html\n", "note: 2 text_only files have the same bytes as another and share its row\n")
    assert subprocess.run([sys.executable, script, "--imagess", "x"], capture_output=True).returncode == 2
    done = subprocess.run([sys.executable, script, "nowhere"], cwd=run, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: nowhere/scores.json: not found") and "Traceback" not in done.stderr


def test_works_alone(run, tmp_path):
    """Copied alone into an empty folder, the script writes the same page but for the published figures, whose file is not there."""
    shutil.copy(ROOT / "results/report.py", tmp_path)
    done = subprocess.run([sys.executable, "report.py", run / "scores", "--root", run, "--out", "out"], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out/report.md").read_text()
    assert "Joint, by 38.3 points" in text and "(paper)" not in text


# ---------------------------------------------------------------- published figures; one command per paper row
def test_paper_json_holds_what_is_published_and_nothing_else():
    paper = json.loads((ROOT / "results/paper.json").read_text())
    known = {(row["embedder"], row["mode"]): row["score"] for row in paper["rows"] if row["score"] is not None}
    assert sorted(known.values()) == [28.25, 33.21, 65.56, 84.30] and known["Qwen3-VL-Embedding-8B", "vl_joint"] == 65.56
    assert all(row["source"] for row in paper["rows"]) and all(row[name] is None for row in paper["rows"] for name in DOMAINS)
    assert {row["embedder"] for row in paper["rows"]} >= {"CLIP", "SigLIP", "Qwen3-VL-Embedding-2B", "Qwen3-VL-Embedding-8B", "VLM2Vec-V2",
                                                          "UME-R1", "Embed-RL"}


def printed(*words, **settings):
    done = subprocess.run(["bash", "data/paper.sh", *words], cwd=ROOT, env=os.environ | {"PRINT": "1"} | settings, capture_output=True,
                          text=True)
    return done.returncode, done.stdout, done.stderr


PAPER_RUNS = re.findall(r"\| `make paper EMBEDDER=(\S+) MODE=(\S+)` \|(.*)\|", (ROOT / "results/PAPER_RUNS.md").read_text())


def test_paper_runs_lists_every_row():
    visual = [name for name, mode, _ in PAPER_RUNS if mode == "visual_only"]
    joint = [name for name, mode, _ in PAPER_RUNS if mode == "vl_joint"]
    assert visual == list(report.EMBEDDERS) and joint == [name for name in report.EMBEDDERS if name not in ("clip", "siglip")]


def test_paper_runs_estimates_follow_their_formula():
    rate = 990 * .175
    fit = 738_590 * 160 * 3 * (.88 + .31) / 1000 / rate / 3600
    for name, mode, cells in PAPER_RUNS:
        image, document, dimensions, weights, extract, both, memory, disk = map(float, cells.split("|"))
        hours = (738_590 * image + 2_700 * document) / rate / 3600
        assert (extract, both) == (round(hours, 1), round(hours + fit, 1)), name
        assert memory == round(weights + 4) and disk == round(738_590 * dimensions * 4 / 1e9, 1), name


def test_paper_runs_commands_are_the_scripts_own_and_parse():
    """Each row's block is what paper.sh prints, and every command goes through its own script's parse_args."""
    text, seen = (ROOT / "results/PAPER_RUNS.md").read_text(), {}
    scripts = {name: load(ROOT / name, f"paper_{Path(name).stem}") for name in
               ("extract.py", "train_decoder.py", "controls.py", "evaluate.py", "results/report.py", "data/prepare.py")}
    for name, mode, _ in PAPER_RUNS:
        status, commands, error = printed(name, mode)
        assert status == 0, error
        assert f"<details><summary>{name}, {mode}</summary>\n\n```bash\n{commands}```" in text
        for line in commands.splitlines():
            words = shlex.split(line)
            assert words[0] == "python"
            if (words[1], words[2]) not in seen or name in line:
                seen[words[1], words[2]] = scripts[words[1]].parse_args(words[2:])
    assert {script for script, _ in seen} == set(scripts)


def test_paper_script_refuses_and_takes_settings():
    assert printed("clip", "vl_joint")[0] == 2 and "no joint row" in printed("clip", "vl_joint")[2]
    assert printed("clippy", "visual_only")[0] == 2 and printed("clip", "both")[0] == 2 and printed()[0] == 2
    _, commands, _ = printed("clip", "visual_only", GPUS="8", MODEL="my folder", FIT_FLAGS="--tokens 4", RUNS="r", RESULTS="s")
    assert "torchrun --nproc-per-node 8 extract.py" in commands and "python extract.py --merge 8 --out r/vectors/clip-visual_only-test" in commands
    assert commands.count('--model "my folder"') == 3 and commands.count("--tokens 4") == 2 and "--out s\n" in commands


def test_paper_script_stops_at_the_first_failure(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\necho ran \"$@\"\ncase \"$*\" in *dev.jsonl*) exit 7;; esac\n")
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(["bash", "data/paper.sh", "clip", "visual_only"], cwd=ROOT,
                          env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
                          capture_output=True, text=True)
    assert done.returncode == 7 and done.stdout.count("ran ") == 4 and "train_decoder.py" not in done.stdout


# ---------------------------------------------------------------- the page in a real browser, over the DevTools pipe (no package needed)
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
         "--disable-sync "
         "--disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe").split()


class Browser:
    """A headless chromium driven over --remote-debugging-pipe: JSON messages that end with a zero byte, in on descriptor 3, out on 4."""

    def __init__(self, profile):
        (child_in, self.out), (self.into, child_out) = os.pipe(), os.pipe()
        high_in, high_out = os.dup(child_in), os.dup(child_out)  # out of the way of 3 and 4

        def connect():
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)
        self.process = subprocess.Popen([BROWSER, *FLAGS, f"--user-data-dir={profile}", "about:blank"], preexec_fn=connect, close_fds=False,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for descriptor in (child_in, child_out, high_in, high_out):
            os.close(descriptor)
        self.number, self.rest, self.events, self.session = 0, b"", [], None
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def read(self):
        import select
        while b"\0" not in self.rest:
            if not select.select([self.into], [], [], 300)[0]:
                raise TimeoutError("chromium does not answer")
            piece = os.read(self.into, 1 << 20)
            if not piece:
                raise EOFError("chromium ended")
            self.rest += piece
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | ({"sessionId": self.session} if self.session else {})
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path, width, dark=False, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.events = []
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.read())

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def click(self, expression):
        """A real click of the mouse in the middle of the element that the expression names."""
        x, y = self.value(f"(() => {{ const e = {expression}; e.scrollIntoView({{block: 'center', inline: 'center'}}); const b = "
                          f"e.getBoundingClientRect(); "
                          "return [b.x + b.width / 2, b.y + b.height / 2]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path=None):
        data = base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])
        if path:
            Path(path).write_bytes(data)
        return data

    def complaints(self):
        """Console errors, exceptions and requests that leave the page since the last open."""
        found = []
        for event in self.events:
            method, facts = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown" or method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
                found.append(facts)
            elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
                found.append(facts)
            elif method == "Network.requestWillBeSent" and not facts["request"]["url"].startswith(("file:", "data:")):
                found.append(facts["request"]["url"])
        return found

    def close(self):
        try:
            self.call("Browser.close")
        except (EOFError, OSError):
            pass
        self.process.wait(30)
        os.close(self.out)
        os.close(self.into)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if not BROWSER:
        pytest.skip("no chromium or chrome is installed, so the page was not opened in a browser")
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


COUNT = "document.getElementById('count').textContent"
CARDS = "document.querySelectorAll('.example').length"


def chip(name, label):
    return f"[...document.querySelectorAll('[data-filter={name}]')].find(one => one.textContent === {json.dumps(label)})"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_page_opens_and_fits(browser, run, width, dark):
    browser.open(run / "scores/report.html", width, dark)
    assert browser.value("[document.documentElement.scrollWidth, innerWidth]") == [width, width], "nothing sticks out to the side"
    cut = browser.value("""[...document.querySelectorAll('h1, .card, .card *, .panel, .chart, .example, #filters > *')].filter(e => {
        const b = e.getBoundingClientRect(); return b.width && (b.right > innerWidth + 1 || b.left < -1) && !e.closest('.chips, .scroll') }).map(e => e.outerHTML.slice(0, 80))""")
    assert cut == []
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == dark
    picture = browser.screenshot()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 50_000
    assert browser.complaints() == []


def test_filters_work_by_clicking(browser, run):
    browser.open(run / "scores/report.html", 1280)
    data = data_of(run)
    joint, visual = data["sets"][0]["lines"][0]["cells"]
    right = lambda item, file: item["said"][file][1] == 1
    assert browser.value(COUNT).startswith("60 of 60 items") and browser.value(CARDS) == 24
    browser.click(chip("domain", "scene text"))
    assert browser.value(COUNT).startswith("20 of 60") and browser.value(CARDS) == 20
    assert browser.value("[...document.querySelectorAll('.where')].every(one => one.textContent.includes('scene text'))")
    browser.click(chip("result", "wrong"))
    assert browser.value(COUNT).startswith(f"{sum(item['domain'] == 'scene text' and item['said'][joint][1] == 0 for item in data['items'])} of 60")
    browser.click(chip("cell", "visual-only, matched"))
    assert browser.value(COUNT).startswith(f"{sum(item['domain'] == 'scene text' and item['said'][visual][1] == 0 for item in data['items'])} of 60")
    browser.click(chip("result", "any"))
    browser.click(chip("domain", "all"))
    browser.click(chip("contrast", "only joint right"))
    expected = sum(right(item, joint) and not right(item, visual) for item in data["items"])
    assert browser.value(COUNT).startswith(f"{expected} of 60") and 10 < expected < 50
    browser.click(chip("contrast", "all"))
    browser.click(chip("source", "DemoSigns"))
    assert browser.value(COUNT).startswith("20 of 60")
    browser.click(chip("source", "all"))
    browser.click("document.getElementById('more')")
    assert browser.value(CARDS) == 48
    browser.click(chip("set", "CLIP"))
    assert browser.value("document.querySelector('.said thead').textContent") == "visual-only"
    browser.click("document.querySelector('.thumb')")
    assert browser.value("document.querySelector('.thumb').getAttribute('aria-expanded')") == "true"
    browser.click("document.querySelector('#provenance summary')")
    assert browser.value("document.querySelector('#provenance').open")
    assert browser.complaints() == []


def test_right_and_wrong_differ_in_shape_too(browser, run):
    browser.open(run / "scores/report.html", 1280)
    marks = browser.value("[...document.querySelectorAll('.said svg')].map(one => [one.firstChild.getAttribute('href'), "
                          "one.getAttribute('aria-label'), one.getBoundingClientRect().width])")
    assert {(shape, word) for shape, word,
            _ in marks} >= {("#right", "right"), ("#wrong", "wrong")} and all(width > 10 for _, _, width in marks)
    colours = browser.value("['.s.right', '.s.wrong'].map(one => getComputedStyle(document.querySelector('.said ' + one)).color)")
    assert colours[0] != colours[1]


def test_long_names_do_not_stick_out_on_a_phone(browser, bombed):
    browser.open(bombed / "scores/report.html", 390)
    assert browser.value("[document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    assert browser.value("[...document.querySelectorAll('.filter')].every(one => one.getBoundingClientRect().right <= 390)")


def test_planted_script_does_not_run(browser, bombed):
    browser.open(bombed / "scores/report.html", 1280)
    assert browser.value("typeof window.bad") == "undefined" and browser.value(CARDS) == 12
    assert browser.value("document.querySelectorAll('.example script, .example b b, .example "
                         "img').length") == browser.value("document.querySelectorAll('.thumb img').length")
    assert browser.value("document.querySelector('.question').textContent").count("</script>") == 2
    assert BOMB in browser.value("[...document.querySelectorAll('.said bdi')].map(one => one.textContent).join()")
    assert BOMB in browser.value("document.querySelector('h1').textContent")
    assert browser.complaints() == []


def test_page_prints(browser, run):
    browser.open(run / "scores/report.html", 1280)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.value("getComputedStyle(document.getElementById('filters')).display") == "none"
    pdf = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    browser.call("Emulation.setEmulatedMedia", media="")
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    assert pdf[:5] == b"%PDF-" and 3 <= pages <= 20
