"""The bundled scale model: same bytes every time, splits that share nothing, unseen answers, small safe files."""
import importlib.util
import json
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parent.parent / "data/demo"


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("render", DEMO / "render.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["render"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawn(render, tmp_path_factory):
    """All splits drawn afresh, compared with manifest.json by the script itself; returns items by split."""
    folder = tmp_path_factory.mktemp("drawn")
    argv, sys.argv = sys.argv, ["render.py", "--out", str(folder)]
    try:
        assert render.main() == 0
    finally:
        sys.argv = argv
    return {split: [json.loads(line) for line in (folder / f"items/{split}.jsonl").read_text().splitlines()] for split in render.SPLITS}


def test_pictures_are_the_same_bytes(render):
    for split in ("train", "dev", "embedder"):
        for index in range(6):
            first, again = render.render(split, index)[0], render.render(split, index)[0]
            assert first.tobytes() == again.tobytes() and first.size == (128, 128)
    assert render.render("dev", 0)[0].tobytes() != render.render("test", 0)[0].tobytes()


def test_splits_have_the_promised_shape(render, drawn):
    assert len(drawn["train"]) >= 6000 and len(drawn["dev"]) == 360 and len(drawn["test"]) == 360
    domains = [item["domain"] for item in drawn["test"]]
    assert {domains.count(d) for d in set(domains)} == {120}
    images = {split: {item["image"] for item in items} for split, items in drawn.items()}
    assert not (images["train"] & images["test"]) and not (images["dev"] & images["test"])


def test_a_third_of_the_open_domains_is_unseen(render, drawn):
    """Unseen means what it says: the answer is in no training answer, and no training split can draw it."""
    train = {item["answers"][0] for item in drawn["train"]}
    rows = [item for item in drawn["test"] if item["domain"] in ("scene_text", "visual_document")]
    unseen = [item for item in rows if not item["seen"]]
    assert len(unseen) * 3 >= len(rows), (len(unseen), len(rows))
    assert not any(item["answers"][0] in train for item in unseen)
    assert all(render.held_out(item["answers"][0]) for item in unseen)


@pytest.mark.parametrize("split", ["train", "embedder", "clip"])
def test_training_splits_never_draw_a_held_out_text(render, split):
    for index in range(150):
        facts = render.render(split, index)[3]
        texts = [b["text"] for b in facts.get("boards", [])] + facts.get("labels", []) + facts.get("values", [])
        assert not any(render.held_out(text) for text in texts)


def test_questions_repeat_with_different_answers(drawn):
    """A question that always had one answer would let a text-only readout win."""
    answers = {}
    for item in drawn["train"]:
        answers.setdefault(item["question"], []).append(item["answers"][0])
    frequent = {q: a for q, a in answers.items() if len(a) >= 20}
    assert len(frequent) > 50
    assert all(max(a.count(x) for x in set(a)) / len(a) < 0.9 for a in frequent.values())


def test_answers_are_right_about_the_picture(render):
    """Recompute answers of scenes from the facts, apart from the question writer."""
    checked = 0
    for index in range(0, 300, 3):
        _, _, asked, facts = render.render("dev", index)
        for q in asked:
            words = q["question"].split("\n")[0].rstrip("?").split()
            if q["kind"] == "count":
                assert q["answer"] == str(len(facts["objects"]))
            elif q["kind"] == "colour":
                assert [o["colour"] for o in facts["objects"] if o["shape"] == words[-1]] == [q["answer"]]
            elif q["kind"] == "exists":
                assert (q["answer"] == "yes") == any(o["colour"] == words[3] and o["shape"] == words[4] for o in facts["objects"])
            elif q["kind"] == "choice":
                assert [o["colour"] for o in facts["objects"] if o["shape"] == words[-1]] == [q["options"]["ABCD".index(q["answer"])]]
            else:
                continue
            checked += 1
    assert checked > 200


def test_bundled_files_are_small_and_safe():
    tracked = [path for path in DEMO.rglob("*") if path.is_file() and not {"images", "items", "__pycache__"} & set(path.relative_to(DEMO).parts)]
    assert sum(path.stat().st_size for path in tracked) <= 20e6
    assert {path.suffix for path in tracked} <= {".py", ".sh", ".json", ".jsonl", ".txt", ".safetensors", ".md"}
    for folder in ("qwen3-vl-embedding", "clip", "decoder"):
        assert (DEMO / folder / "model.safetensors").exists()


def test_kept_results_are_about_the_bundled_items():
    """results/demo was scored on the test split that render.py draws now."""
    scores = (DEMO.parent.parent / "results/demo/scores.json").read_text()
    assert json.loads((DEMO / "manifest.json").read_text())["test"]["items_sha256"] in scores
