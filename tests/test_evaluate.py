"""evaluate.py: agreement with the shared scoring cases, statistics worked out by hand, tables, and every kind of bad input."""
import csv
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
spec = importlib.util.spec_from_file_location("gebt_evaluate", os.path.join(ROOT, "evaluate.py"))
ev = importlib.util.module_from_spec(spec)              # by path: `evaluate` is also the name of a package
spec.loader.exec_module(ev)


# ---- helpers ----
def item(i, answers=("yes",), **fields):
    return {"id": f"q{i}", "image": f"img{i}.png", "question": "q?", "answers": list(answers), "source": "own", "domain": "natural_image",
            "metric": "exact", **fields}


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def predictions(path, items_path, texts, condition="matched", embedder="emb", mode="vl_joint", bits=None, **meta):
    """A prediction file with its sidecar. texts: {id: text, or None for a failed item}."""
    lines = []
    for n, (key, text) in enumerate(texts.items()):
        line = {"id": key, "prediction": text, "condition": condition, "answer_bits": bits[n] if bits else None, "answer_tokens": 2}
        lines.append(line | ({"error": "no vector"} if text is None else {}))
    write_lines(path, lines)
    sidecar = {"embedder": embedder, "mode": mode, "condition": condition, "items_sha256": ev.sha256(items_path), "limit": None, **meta}
    path.with_suffix(".meta.json").write_text(json.dumps(sidecar))
    return str(path)


def score(tmp_path, items_path, *files, flags=()):
    """Run main and return scores.json."""
    ev.main(["--items", items_path, "--predictions", *files, "--out", str(tmp_path / "out"), "--bootstrap", "2000", *flags])
    return json.loads((tmp_path / "out" / "scores.json").read_text())


def one_row(tmp_path, items, texts, **options):
    items_path = write_lines(tmp_path / "items.jsonl", items)
    return score(tmp_path, items_path, predictions(tmp_path / "p.jsonl", items_path, texts, **options))["rows"][0]


# ---- the rules ----
def disagreements(path):
    """[(id, expected, scored)] of the cases in a file that the scorer does not give to 1e-9, and how many cases there are."""
    with open(path, encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    scored = [(case["id"], case["expected"], ev.score_one(case["prediction"], case)[0]) for case in cases]
    return [row for row in scored if abs(row[1] - row[2]) > 1e-9], len(cases)


def test_cases_sample():
    assert disagreements(os.path.join(ROOT, "tests", "cases", "scorer_cases_sample.jsonl")) == ([], 136)


def test_all_shared_cases():
    path = os.path.join(ROOT, "..", "shared", "cases", "scorer_cases.jsonl")
    if not os.path.exists(path):
        pytest.skip("the shared cases are not on this machine")
    assert disagreements(path) == ([], 638)


def plain_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def test_edit_distance_equals_plain_loop():
    rng = random.Random(0)
    for alphabet in ("ab", "abcdefgh é日"):
        for _ in range(400):
            a, b = ("".join(rng.choice(alphabet) for _ in range(rng.randrange(70))) for _ in range(2))
            assert ev.edit_distance(a, b) == plain_distance(a, b), (a, b)


CHOICE = {"options": ["red", "dark green", "blue"], "answers": ["B"], "metric": "choice", "source": "own", "question": ""}


@pytest.mark.parametrize("reply, expected", [
    ("B", 1), ("b.", 1), ("(B) red", 1), ("B: red", 1), ("**B** it is", 1), ("dark green", 1), ("The dark green.", 1), ("a dark green", 1),
    ("The answer is A. No, the answer is B", 1), ("The answer is not A", 0), ("The answer is A", 0), ("Option b", 1), ("greenish", None),
    ("It is dark green", 1), ("red or blue", None), ("red and dark green", None), ("It could be B or C", None), ("Both", None), ("D", None),
    ("", None), ("...", None), ("A dog", None), ("A or nothing", 0), ("Bravo", None), ("B's", None), ("I say B, not because of A", None)])
def test_choice_reading(reply, expected):
    assert ev.choice(reply, CHOICE) == (None if expected is None else float(expected))


def test_choice_gold_as_letter_or_text():
    for gold in ("B", "(B)", "dark green", "The dark green."):
        assert ev.choice("B", {**CHOICE, "answers": [gold]}) == 1
    assert ev.choice("+5", {**CHOICE, "options": ["-5", "+5"], "answers": ["+5"]}) == 1  # bare() alone could not tell these apart


def test_a_hundred_thousand_options():
    options = [f"option text {i}" for i in range(100_000)]
    assert ev.read_choice("option text 77", options) == 77 and ev.read_choice("b", options) == 1


@pytest.mark.parametrize("text", ["." * 19_999 + "x", "answer " * 2_500, "answer" + " " * 19_000 + "?x", "A " * 9_000, "(" * 19_999,
                                  "a" * 19_999], ids=lambda text: text[:8])
def test_long_replies_take_no_quadratic_time(text):
    start = time.process_time()
    for metric in ev.METRICS:
        answers, options = ["yes" if metric == "yes_no" else "B"], ["a", "b" * 20_000]
        ev.score_one(text, {"metric": metric, "source": "own", "question": "", "answers": answers, "options": options})
    assert time.process_time() - start < 1


def test_vqa_needs_ten_answers_for_full_steps():
    answers = ["red"] * 3 + ["blue"] * 2 + ["green"] + ["x1", "x2", "x3", "x4"]
    scores = {text: ev.vqa(text, {"answers": answers}) for text in ("red", "blue", "green", "pink")}
    assert scores == pytest.approx({"red": 0.9, "blue": 0.6, "green": 0.3, "pink": 0})


@pytest.mark.parametrize("text, processed", [
    ("McDonald's", "mcdonald 's"), ("dont", "don't"), ("The 2nd.", "2nd"), ("coca-cola", "coca cola"), ("coca - cola", "coca cola"),
    ("a", ""), ("." * 33 + "b", ".b"), ("3.14", "3.14"), ("1,000", "1000"), ("somebody'd", "somebodyd"), ("yalld've", "yalld've"), ("none", "0")])
def test_vqa_processing(text, processed):
    assert ev.vqa_process(text) == processed             # 33 periods: EvalAI deletes the first 32 only


TEXT = st.text(max_size=30)


@given(metric=st.sampled_from([m for m in ev.METRICS if m not in ("yes_no", "choice")]), prediction=TEXT,
       answers=st.lists(TEXT, min_size=1, max_size=10), dataset=st.sampled_from(["", "HME100k"]))
@settings(max_examples=400, deadline=None)
def test_scores_lie_in_unit_interval(metric, prediction, answers, dataset):
    row = {"metric": metric, "answers": answers, "question": "", "dataset": dataset, "source": "own"}
    assert 0 <= ev.score_one(prediction, row)[0] <= 1
    if metric in ("anls", "ocrbench", "exact", "realworldqa"):
        assert ev.score_one(answers[-1], row)[0] == 1
    number = re.fullmatch(r"[\w\s.+-]*%*", answers[0].strip())
    if metric == "relaxed" and answers[0] == answers[0].strip() and not (number and re.search("nan|inf", answers[0].lower())):
        assert ev.score_one(answers[0], row)[0] == 1     # not with outer space (the gold is opaque), nan or infinity (its arithmetic)
    if metric == "vqa":
        assert ev.score_one(answers[0], {**row, "answers": [answers[0]] * 10})[0] == 1


@given(prediction=TEXT, options=st.lists(TEXT, min_size=2, max_size=30), gold=st.integers(0, 1))
@settings(max_examples=300, deadline=None)
def test_choice_never_fails(prediction, options, gold):
    row = {"metric": "choice", "answers": ["AB"[gold]], "options": options, "question": "", "source": "own"}
    assert ev.score_one(prediction, row)[0] in (0, 1) and ev.score_one("AB"[gold], row) == (1, True)
    assert ev.read_choice(prediction, options) is None or prediction.strip()
    assert ev.score_one(prediction, {**row, "metric": "yes_no", "answers": ["yes"]})[0] in (0, 1)


def test_scoring_keeps_no_state():
    """OCRBench's counters in lmms-eval doubled on a second call."""
    row = {"metric": "ocrbench", "answers": ["a"], "question": "", "source": "own"}
    assert [ev.score_one("a", row) for _ in range(3)] == [(1.0, True)] * 3


# ---- statistics by hand ----
def test_all_right_all_wrong_one_domain(tmp_path):
    items = [item(i) for i in range(10)]
    right = one_row(tmp_path, items, {f"q{i}": "Yes" for i in range(10)})
    assert right["overall"]["score"] == 100 and right["overall"]["interval"] == [100, 100] and right["overall"]["distinct"] == 0.1
    assert right["domain_mean"]["score"] == 100 and list(right["by_domain"]) == ["natural_image"] and right["domain_differences"] == []
    wrong = one_row(tmp_path, items, {f"q{i}": f"no {i}" for i in range(10)})
    assert wrong["overall"]["score"] == 0 and wrong["overall"]["interval"] == [0, 0] and wrong["overall"]["distinct"] == 1
    assert len(wrong["examples"]["wrong"]) == 3


def test_one_item(tmp_path):
    row = one_row(tmp_path, [item(0)], {"q0": "yes"})
    assert (row["overall"]["n"], row["overall"]["score"], row["overall"]["interval"]) == (1, 100, None)
    items_path = str(tmp_path / "items.jsonl")
    other = predictions(tmp_path / "z.jsonl", items_path, {"q0": "no"}, "zero")
    pair, = score(tmp_path, items_path, str(tmp_path / "p.jsonl"), other)["pairs"]
    assert (pair["difference"], pair["interval"], pair["p"], pair["won"], pair["verdict"]) == (100, None, 1.0, 1, "not separated at n=1")


def test_paired_difference_by_hand(tmp_path):
    items = [item(i) for i in range(8)]
    items_path = write_lines(tmp_path / "items.jsonl", items)
    a = predictions(tmp_path / "a.jsonl", items_path, {f"q{i}": "yes" if i < 6 else "no" for i in range(8)}, bits=[1.0] * 8)
    b = predictions(tmp_path / "b.jsonl", items_path, {f"q{i}": "yes" if i in (0, 7) else "no" for i in range(8)}, "text_only", None, None,
                    bits=[2.0, 3.5] * 4)
    pair, = score(tmp_path, items_path, a, b, flags=["--seed", "3"])["pairs"]
    assert (pair["n"], pair["won"], pair["lost"], pair["tied"]) == (8, 5, 1, 2)
    assert pair["difference"] == pytest.approx(50) and pair["why"] == "matched against control"
    # 6 differing items: |sum of signs| >= 4 in 2 * (1 + 6) of 64 sign patterns
    assert pair["p"] == pytest.approx(14 / 64, abs=0.03)
    assert pair["usable_information_bits"]["mean"] == pytest.approx(1.75) and pair["usable_information_bits"]["n"] == 8
    assert pair["interval"][0] < 50 < pair["interval"][1]


def test_ties_only(tmp_path):
    items_path = write_lines(tmp_path / "items.jsonl", [item(i) for i in range(4)])
    files = [predictions(tmp_path / f"{c}.jsonl", items_path, {f"q{i}": "yes" for i in range(4)}, c) for c in ("matched", "shuffled")]
    pair, = score(tmp_path, items_path, *files)["pairs"]
    assert (pair["difference"], pair["interval"], pair["p"], pair["tied"], pair["verdict"]) == (0, [0, 0], 1.0, 4, "not separated at n=4")


def test_bootstrap_matches_plain_resampling_and_theory():
    rng = np.random.default_rng(0)
    totals, sizes = rng.integers(0, 4, 60).astype(float), np.full(60, 3.0)
    fast = ev.draw_means(totals, sizes, 20_000, [0, 1])
    picks = rng.integers(0, 60, (20_000, 60))
    plain = totals[picks].sum(1) / sizes[picks].sum(1)
    assert np.percentile(fast, (2.5, 50, 97.5)) == pytest.approx(np.percentile(plain, (2.5, 50, 97.5)), abs=0.012)
    assert fast.std() == pytest.approx(totals.std() / 3 / math.sqrt(60), rel=0.03)
    assert (fast == ev.draw_means(totals, sizes, 20_000, [0, 1])).all() and (fast != ev.draw_means(totals, sizes, 20_000, [1, 1])).any()


def test_normal_limit_agrees_with_bootstrap(monkeypatch):
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 4, 3000).astype(float)
    totals = rng.random(3000) * sizes
    bootstrap = ev.draw_means(totals, sizes, 4000, [0, 0])
    p = ev.sign_flip_p(totals - 0.51 * sizes, 4000, [0, 0])
    monkeypatch.setattr(ev, "LARGE", 100)
    limit = ev.draw_means(totals, sizes, 4000, [0, 0])
    assert np.percentile(limit, (2.5, 97.5)) == pytest.approx(np.percentile(bootstrap, (2.5, 97.5)), abs=0.002)
    assert ev.sign_flip_p(totals - 0.51 * sizes, 4000, [0, 0]) == pytest.approx(p, abs=0.04)


def test_sign_flips_exact_small_cases():
    assert ev.sign_flip_p(np.ones(4), 40_000, [0, 0]) == pytest.approx(2 / 16, abs=0.01)
    assert ev.sign_flip_p(np.array([3.0, 1, 1]), 40_000, [0, 0]) == pytest.approx(2 / 8, abs=0.01)  # only all alike reach 5
    assert ev.sign_flip_p(np.zeros(5), 1000, [0, 0]) == 1


def test_questions_on_one_image_are_one_cluster(tmp_path):
    texts = {f"q{i}": "yes" if i < 20 else "no" for i in range(40)}
    single = one_row(tmp_path, [item(i) for i in range(40)], texts)["overall"]
    grouped = one_row(tmp_path, [item(i, image=f"img{i // 10}.png") for i in range(40)], texts)["overall"]
    assert single["score"] == grouped["score"] == 50 and (single["clusters"], grouped["clusters"]) == (40, 4)
    width = [group["interval"][1] - group["interval"][0] for group in (single, grouped)]
    assert width[1] > 2 * width[0]                      # 4 images that are all right or all wrong say less than 40 items
    uneven = [item(i, image=f"img{max(0, i - 30)}.png") for i in range(40)]
    assert one_row(tmp_path, uneven, {f"q{i}": "yes" for i in range(40)})["overall"]["interval"] == [100, 100]


def test_domains_sources_and_their_mean(tmp_path):
    items = [item(i, domain="scene_text" if i < 3 else "visual_document", source="s" if i % 2 else "t") for i in range(12)]
    row = one_row(tmp_path, items, {f"q{i}": "yes" if i in (0, 3, 4, 5) else "no" for i in range(12)})
    assert row["overall"]["score"] == pytest.approx(100 * 4 / 12)
    scores = {name: group["score"] for name, group in row["by_domain"].items()}
    assert scores == pytest.approx({"scene_text": 100 / 3, "visual_document": 100 / 3})
    row = one_row(tmp_path, items, {f"q{i}": "yes" if i < 3 else "no" for i in range(12)})
    assert row["domain_mean"] == {"score": 50, "interval": [50, 50]} and row["overall"]["score"] == pytest.approx(25)
    difference, = row["domain_differences"]
    assert (difference["difference"], difference["verdict"]) == (100, "separated") and sorted(row["by_source"]) == ["s", "t"]


def test_empty_unparsed_credited_failed(tmp_path):
    ten = ["a"] * 10                                    # EvalAI's processing drops the article, so blank earns the credit
    items = [item(0, ten, metric="vqa"), *(item(i, ["B"], metric="choice", options=["x", "y"]) for i in (1, 2)), item(3), item(4), item(5)]
    row = one_row(tmp_path, items, {"q0": " ", "q1": "who knows", "q2": "", "q3": "yes", "q4": None, "q5": "no\x1b[2J"})
    overall = row["overall"]
    assert {k: overall[k] for k in ("n", "empty", "empty_credited", "unparsed", "failed", "missing")} == {
        "n": 5, "empty": 2, "empty_credited": 1, "unparsed": 1, "failed": 1, "missing": 0}
    assert overall["score"] == pytest.approx(100 * 2 / 5) and overall["bound"] == pytest.approx(100 * 2 / 6)
    assert row["examples"] == {"unparsed": [{"id": "q1", "prediction": "who knows"}], "wrong": [{"id": "q5", "prediction": "no\\x1b[2J"}]}
    lines = [json.loads(line) for line in (tmp_path / "out" / "scores.jsonl").read_text().splitlines()]
    assert [line["score"] for line in lines] == [1, 0, 0, 1, None, 0] and lines[4]["failed"] and lines[1]["unparsed"]
    assert [lines[3][name] for name in ("id", "embedder", "mode", "condition")] == ["q3", "emb", "vl_joint", "matched"]


def test_chance_and_majority(tmp_path):
    items = [item(i, ["No" if i < 3 else "Yes"], metric="yes_no") for i in range(4)]
    items += [item(i, ["A"], metric="choice", options=["x", "y", "z", "w"], source="mc") for i in range(4, 8)]
    overall = one_row(tmp_path, items, {f"q{i}": "yes" for i in range(8)})["overall"]
    assert overall["chance"] == pytest.approx(100 * (4 * 0.5 + 4 * 0.25) / 8)
    assert overall["majority"] == pytest.approx(100 * (3 + 4) / 8)


def test_seen_and_unseen_answers(tmp_path, capsys):
    items = [item(i, seen=i < 4) for i in range(6)]
    row = one_row(tmp_path, items, {f"q{i}": "yes" if i < 3 else "no" for i in range(6)})
    assert {name: (group["n"], group["score"]) for name, group in row["by_seen"].items()} == {"seen": (4, 75), "unseen": (2, 0)}
    assert "answers seen" in capsys.readouterr().out


# ---- files, pairs and tables ----
def two_modes(tmp_path):
    """Items and a result folder: two modes with controls, a shared text-only file. Returns (items path, glob)."""
    domains = itertools.cycle(("natural_image", "scene_text"))
    items_path = write_lines(tmp_path / "items.jsonl", [item(i, domain=domain) for i, domain in zip(range(30), domains)])
    rng = random.Random(0)
    for mode, share in (("visual_only", 0.3), ("vl_joint", 0.9)):
        for condition, chance in (("matched", share), ("zero", 0.1), ("shuffled", 0.1)):
            texts = {f"q{i}": "yes" if rng.random() < chance else "no" for i in range(30)}
            bits = [rng.random() for _ in texts]
            predictions(tmp_path / "r" / mode / f"{condition}.jsonl", items_path, texts, condition, "emb", mode, bits)
    texts = {f"q{i}": "no" for i in range(30)}
    predictions(tmp_path / "r" / "text_only.jsonl", items_path, texts, "text_only", None, None, [2.0] * 30)
    write_lines(tmp_path / "r" / "scores.jsonl", [{"id": "q0", "score": 1}])  # no prediction file: it has no sidecar
    return items_path, str(tmp_path / "r" / "**" / "*.jsonl")


def test_glob_rows_and_pairs(tmp_path, capsys):
    items_path, pattern = two_modes(tmp_path)
    named = [str(tmp_path / "r" / "vl_joint" / f"{condition}.jsonl") for condition in ("zero", "shuffled")]
    report = score(tmp_path, items_path, pattern, pattern, flags=["--pair", *named])
    assert [(row["mode"], row["condition"]) for row in report["rows"]] == [
        ("visual_only", "matched"), ("visual_only", "zero"), ("visual_only", "shuffled"), ("vl_joint", "matched"), ("vl_joint", "zero"),
        ("vl_joint", "shuffled"), (None, "text_only")]
    pairs = {(p["a"]["mode"], p["a"]["condition"], p["b"]["mode"], p["b"]["condition"]) for p in report["pairs"]}
    assert len(report["pairs"]) == len(pairs) == 3 * 2 + 2 * 2 + 1 + 1
    assert ("vl_joint", "matched", "visual_only", "matched") in pairs and ("vl_joint", "zero", "vl_joint", "shuffled") in pairs
    assert ("vl_joint", "matched", "visual_only", "zero") not in pairs
    joint = next(p for p in report["pairs"] if p["why"] == "joint against visual-only")
    assert joint["verdict"] == "separated" and set(joint["by_domain"]) == {"natural_image", "scene_text"}
    assert all("usable_information_bits" in p for p in report["pairs"] if p["b"]["condition"] == "text_only")
    out = capsys.readouterr().out
    assert "no .meta.json" not in out and "| emb | vl_joint | matched | 30 |" in out


def test_controls_go_with_the_matched_file_of_their_folder(tmp_path):
    items_path = write_lines(tmp_path / "items.jsonl", [item(0), item(1)])
    files = [predictions(tmp_path / run / f"{condition}.jsonl", items_path, {"q0": "yes", "q1": "no"}, condition)
             for run in ("one", "two") for condition in ("matched", "zero")]
    folders = [tuple(pair[side]["file"].split(os.sep)[-2] for side in "ab") for pair in score(tmp_path, items_path, *files)["pairs"]]
    assert folders == [("one", "one"), ("two", "two")]


def test_the_same_text_only_of_several_runs_is_one_row(tmp_path, capsys):
    """Each run's controls hold text_only, from one readout: one row of the table that goes with every run; another readout's stays apart."""
    items_path = write_lines(tmp_path / "items.jsonl", [item(0), item(1)])
    texts = {"q0": "yes", "q1": "no"}
    files = [predictions(tmp_path / run / f"{condition}.jsonl", items_path, texts if run != "three" else {"q0": "no", "q1": "no"}, condition,
                         *(("emb", "vl_joint") if condition == "matched" else (None, None)))
             for run in ("one", "two", "three") for condition in ("matched", "text_only")]
    report = score(tmp_path, items_path, *files, flags=["--pair", files[3], files[5]])
    assert [row["file"].split(os.sep)[-2:] for row in report["rows"] if row["condition"] == "text_only"] == [
        ["one", "text_only.jsonl"], ["three", "text_only.jsonl"]]
    ours = [[pair[side]["file"].split(os.sep)[-2] for side in "ab"] for pair in report["pairs"] if pair["why"] == "matched against control"]
    assert sorted(ours) == [["one", "one"], ["three", "three"], ["two", "one"]]
    named = next(pair for pair in report["pairs"] if pair["why"] == "named by --pair")
    assert [named[side]["file"].split(os.sep)[-2] for side in "ab"] == ["one", "three"] and named["difference"] != 0
    assert "1 text_only files have the same bytes" in capsys.readouterr().out


def test_same_seed_same_report_in_any_order_of_files(tmp_path, capsys):
    items_path, pattern = two_modes(tmp_path)
    reports, tables = [], []
    files = sorted(str(p) for p in tmp_path.glob("r/**/*.jsonl") if p.name != "scores.jsonl")
    for order, seed in ((files, "0"), (files[::-1], "0"), (files, "1")):
        reports.append(score(tmp_path, items_path, *order, flags=["--seed", seed]))
        tables.append(capsys.readouterr().out)
        assert "seconds" in reports[-1].pop("run") and reports[-1].pop("json_sha256")
    assert reports[0] == reports[1] and tables[0] == tables[1] and reports[0] != reports[2]


def test_limit_is_the_expected_id_set(tmp_path, capsys):
    items_path = write_lines(tmp_path / "items.jsonl", [item(i) for i in range(5)])
    file = predictions(tmp_path / "p.jsonl", items_path, {f"q{i}": "yes" for i in range(3)}, limit=3)
    row = score(tmp_path, items_path, file)["rows"][0]
    assert (row["limit"], row["overall"]["n"], row["overall"]["missing"]) == (3, 3, 0) and "3, first 3 items" in capsys.readouterr().out
    predictions(tmp_path / "p.jsonl", items_path, {f"q{i}": "yes" for i in (0, 1, 4)}, limit=3)
    with pytest.raises(ev.UserError, match=r"p.jsonl line 3 \(id q4\): expected an id of the items \(the first 3\)"):
        score(tmp_path, items_path, file)


def test_partial_is_printed_in_every_table(tmp_path, capsys):
    items_path = write_lines(tmp_path / "items.jsonl", [item(i, seen=True) for i in range(5)])
    file = predictions(tmp_path / "p.jsonl", items_path, {"q1": "yes", "q3": "no", "zz": "yes"})
    with pytest.raises(ev.UserError, match="line 3"):
        score(tmp_path, items_path, file)
    predictions(tmp_path / "p.jsonl", items_path, {"q1": "yes", "q3": "no"})
    with pytest.raises(ev.UserError, match="3 are missing, first q0, q2, q4"):
        score(tmp_path, items_path, file)
    capsys.readouterr()
    report = score(tmp_path, items_path, file, flags=["--partial"])
    out = capsys.readouterr().out
    assert report["partial"] and report["rows"][0]["overall"]["missing"] == 3 and "2 of 5, PARTIAL" in out
    titles = [line for line in out.splitlines() if line.startswith("**")]
    assert len(titles) == 4 and all(title.startswith("**PARTIAL") for title in titles)


def test_sidecar_checks(tmp_path):
    items_path = write_lines(tmp_path / "items.jsonl", [item(0)])
    file = predictions(tmp_path / "p.jsonl", items_path, {"q0": "yes"}, items_sha256="0" * 64)
    with pytest.raises(ev.UserError, match="p.jsonl: expected predictions for the items with SHA-256"):
        score(tmp_path, items_path, file)
    predictions(tmp_path / "p.jsonl", items_path, {"q0": "yes"}, predictions_sha256="0" * 64)
    with pytest.raises(ev.UserError, match="changed after predict"):
        score(tmp_path, items_path, file)
    for field, value in (("limit", 0), ("limit", True), ("limit", "3"), ("embedder", 3), ("mode", ["x"]), ("items_sha256", 1)):
        predictions(tmp_path / "p.jsonl", items_path, {"q0": "yes"}, **{field: value})
        with pytest.raises(ev.UserError, match=f"p.meta.json: expected .* in '{field}'"):
            score(tmp_path, items_path, file)
    (tmp_path / "p.meta.json").unlink()
    assert "no sidecar" in score(tmp_path, items_path, file)["notes"][0]


def test_paper_rows_are_marked_and_unknown_is_a_dash(tmp_path, capsys):
    one_row(tmp_path, [item(0)], {"q0": "yes"})
    capsys.readouterr()
    flags = ["--paper", os.path.join(ROOT, "results", "paper.json")]
    ev.main(["--items", str(tmp_path / "items.jsonl"), "--predictions", str(tmp_path / "p.jsonl"), *flags])
    out = capsys.readouterr().out
    assert "| Qwen3-VL-Embedding-8B (paper) | vl_joint | matched | 900 | 65.56 | - | - | published, arXiv 2608.06972 |" in out
    assert "| CLIP (paper) | visual_only | matched | 900 | - | - | - |" in out and "were not run here" in out
    with open(os.path.join(ROOT, "results", "paper.json")) as file:
        paper = json.load(file)
    assert sorted(row["score"] for row in paper["rows"] if row["score"] is not None) == [28.25, 33.21, 65.56, 84.30]
    assert all(row[d] is None for row in paper["rows"] for d in ("natural_image", "scene_text", "visual_document"))
    assert all(entry["source"] for entry in paper["rows"] + paper["facts"])


def test_hostile_text_cannot_leave_its_cell(tmp_path, capsys):
    items_path = write_lines(tmp_path / "items.jsonl", [item(0, domain="a|b<script>\x1b[31m", source="100%_$")])
    file = predictions(tmp_path / "p.jsonl", items_path, {"q0": "x"}, "cond\x1b]0;t\x07|", "em\nb&%", "\ud800")
    score(tmp_path, items_path, file)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "a\\|b\\<script>\\\\x1b[31m" in out and "em\\\\nb&%" in out
    tables = [[line for line in block.splitlines() if line.startswith("|")] for block in out.split("**")]
    assert all(len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1 for table in tables if table)
    ev.main(["--items", items_path, "--predictions", file, "--latex"])
    out = capsys.readouterr().out
    assert r"100\%\_\$" in out and r"\textbackslash{}x1b" in out and "\x1b" not in out
    ev.main(["--items", items_path, "--predictions", file, "--csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["group"] for row in rows] == ["all", "domain", "source"] and rows[0]["score"] == "0.0" and "\x1b" not in str(rows)


# ---- bad input: one line, with file and line number ----
GOOD = {"id": "q1", "prediction": "yes", "condition": "matched", "answer_bits": 1.5, "answer_tokens": 1}
DEEP = "[" * 100_000


@pytest.mark.parametrize("line, message", [
    (json.dumps({k: v for k, v in GOOD.items() if k != "id"}), r"p.jsonl line 2 .*'id'"),
    (json.dumps(GOOD | {"id": 7}), r"p.jsonl line 2 .*'id'"),
    (json.dumps(GOOD | {"id": "q0"}), r"p.jsonl line 2 \(id q0\): expected each id once"),
    (json.dumps(GOOD | {"id": "other"}), r"p.jsonl line 2 \(id other\): expected an id of the items"),
    (json.dumps(GOOD | {"prediction": 3}), r"p.jsonl line 2 .*'prediction'"),
    (json.dumps(GOOD | {"prediction": None}), r"p.jsonl line 2 .*'prediction'"),
    (json.dumps({k: v for k, v in GOOD.items() if k != "prediction"}), r"p.jsonl line 2 .*'prediction'"),
    (json.dumps(GOOD | {"prediction": "x" * 20_001}), r"p.jsonl line 2 .*at most 20,000 characters"),
    (json.dumps(GOOD | {"condition": "zero"}), r"p.jsonl line 2 .*condition"),
    (json.dumps(GOOD | {"answer_bits": float("nan")}), r"p.jsonl line 2: .*NaN"),
    (json.dumps(GOOD).replace("1.5", "1e999"), r"p.jsonl line 2: .*the number 1e999"),
    (json.dumps(GOOD | {"answer_bits": "3"}), r"p.jsonl line 2 .*'answer_bits'"),
    (json.dumps(GOOD | {"answer_bits": -2}), r"p.jsonl line 2 .*'answer_bits'"),
    (json.dumps(GOOD | {"answer_bits": True}), r"p.jsonl line 2 .*'answer_bits'"),
    (json.dumps(GOOD)[:-20], r"p.jsonl line 2: .*torn"),
    ("", r"1 are missing, first q1"),
    ("[1, 2]\n", r"p.jsonl line 2: expected a JSON object, found list"),
    (DEEP, r"p.jsonl line 2"),
    ("\n", r"p.jsonl line 2")])
def test_bad_prediction_lines(tmp_path, line, message):
    items_path = write_lines(tmp_path / "items.jsonl", [item(0), item(1)])
    file = predictions(tmp_path / "p.jsonl", items_path, {"q0": "yes"})
    with open(file, "a") as out:
        out.write(line)
    with pytest.raises(ev.UserError, match=message) as error:
        score(tmp_path, items_path, file)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600 and "p.jsonl" in str(error.value)


def test_invalid_utf8(tmp_path):
    items_path = write_lines(tmp_path / "items.jsonl", [item(0)])
    file = predictions(tmp_path / "p.jsonl", items_path, {"q0": "yes"})
    (tmp_path / "p.jsonl").write_bytes(b'{"id": "q0", "prediction": "\xff", "condition": "matched"}\n')
    with pytest.raises(ev.UserError, match="p.jsonl line 1: expected one JSON object in UTF-8"):
        score(tmp_path, items_path, file)


@pytest.mark.parametrize("change, message", [
    ({"metric": None}, "metric"), ({"id": None}, "'id'"), ({"id": "q0"}, "unique"), ({"answers": []}, "'answers'"),
    ({"answers": "x"}, "'answers'"),
    ({"answers": ["x" * 20_001]}, "at most 20,000"), ({"source": "Elsewhere", "metric": ...}, "'metric', one of"),
    ({"metric": "choice"}, "'options'"), ({"metric": "choice", "options": ["x", "y"], "answers": ["C"]}, "letter or the text"),
    ({"metric": "yes_no", "answers": ["perhaps"]}, "yes or no"), ({"seen": 1}, "'seen'"), ({"image": "../x.png"}, "image"),
    ({"question": 3}, "'question'")])
def test_bad_items(tmp_path, change, message):
    second = {k: v for k, v in (item(1) | change).items() if v is not ...}
    items_path = write_lines(tmp_path / "items.jsonl", [item(0), second])
    write_lines(tmp_path / "p.jsonl", [GOOD])
    with pytest.raises(ev.UserError, match=message) as error:
        score(tmp_path, items_path, str(tmp_path / "p.jsonl"))
    assert "items.jsonl line 2" in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


@given(data=st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_bytes_give_scores_or_the_named_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    items_path = write_lines(folder / "items.jsonl", [item(0)])
    good = json.dumps({"id": "q0", "prediction": "yes", "condition": "matched"}).encode()
    for content in (data, good + b"\n" + data, good[:-1] + data + b"}\n"):
        (folder / "p.jsonl").write_bytes(content)
        try:
            row = ev.read_predictions(str(folder / "p.jsonl"), [item(0)], {"q0": 0}, ev.sha256(items_path), False, [])
            assert 0 <= row.score[0] <= 1
        except ev.UserError as error:
            assert "p.jsonl" in str(error)


# ---- the command ----
def command(*words, cwd=ROOT):
    return subprocess.run([sys.executable, os.path.join(ROOT, "evaluate.py"), *words], capture_output=True, text=True, cwd=cwd)


def test_help_is_quick_and_without_torch():
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert command("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5, seconds                  # processor time, so that a busy machine does not decide
    code = "import runpy, sys\nsys.argv = ['x', '--help']\ntry: runpy.run_path('evaluate.py', run_name='__main__')\n"
    code += "except SystemExit: pass\nprint(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'PIL'}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert loaded.stdout.splitlines()[-1] == "[]"


def test_exit_status_and_messages(tmp_path):
    items_path = write_lines(tmp_path / "items.jsonl", [item(0)])
    file = predictions(tmp_path / "p.jsonl", items_path, {"q0": "yes"})
    done = command("--items", items_path, "--predictions", "*.jsonl", "--bootstrap", "100", cwd=tmp_path)
    assert done.returncode == 0 and "| 1 | 100.00 |" in done.stdout and "scored p.jsonl: 1 rows" in done.stderr
    assert not (tmp_path / "out").exists()
    missing = command("--items", str(tmp_path / "none.jsonl"), "--predictions", file)
    assert missing.returncode == 1 and missing.stdout == "" and missing.stderr.startswith("error: ") and "none.jsonl" in missing.stderr
    assert "Traceback" not in missing.stderr
    for flags in (["--bootstrap", "9"], ["--seed", "x"], ["--part"], ["--latex", "--csv"]):
        assert command("--items", items_path, "--predictions", file, *flags).returncode == 2
    assert "not found" in command("--items", items_path, "--predictions", file, "--pair", file, str(tmp_path / "none.jsonl")).stderr
    (tmp_path / "plain").write_text("")
    blocked = command("--items", items_path, "--predictions", file, "--out", str(tmp_path / "plain" / "x"))
    assert blocked.returncode == 1 and "cannot write" in blocked.stderr


def test_second_process_with_the_same_output_stops(tmp_path):
    items_path = write_lines(tmp_path / "items.jsonl", [item(0)])
    file = predictions(tmp_path / "p.jsonl", items_path, {"q0": "yes"})
    (tmp_path / "out").mkdir()
    with ev.locked(str(tmp_path / "out" / "scores.json")):
        second = command("--items", items_path, "--predictions", file, "--out", str(tmp_path / "out"))
    assert second.returncode == 1 and "another process is writing it" in second.stderr and not list((tmp_path / "out").iterdir())
