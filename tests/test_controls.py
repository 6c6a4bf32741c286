"""controls.py: the control inputs and the machinery, without models where values can be checked by hand."""
import importlib.util
import json
import os
import signal
import shutil
import subprocess
import sys
import time
import xml.dom.minidom
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

ROOT = Path(__file__).resolve().parent.parent


def load(name):
    spec = importlib.util.spec_from_file_location(f"{name}_under_test", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


controls = load("controls")


def item(number, image, question="q?", source="s", answer="a"):
    return {"id": f"i{number}", "image": image, "question": question, "answers": [answer], "source": source, "domain": "d",
            "metric": "exact"}


# ---- derangements ----
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=60), st.integers(0, 2 ** 32 - 1))
def test_shuffled_is_a_derangement_within_source_and_image(pairs, seed):
    items = [item(n, f"{source}-{image}.png", source=f"s{source}") for n, (source, image) in enumerate(pairs)]
    donors = controls.shuffled(items, seed)
    assert donors.tolist() == controls.shuffled(items, seed).tolist()
    for source in {entry["source"] for entry in items}:
        members = [n for n, entry in enumerate(items) if entry["source"] == source]
        images = [items[n]["image"] for n in members]
        given_out = [int(donors[n]) for n in members]
        if len(set(images)) == 1:
            assert given_out == [-1] * len(members)     # a single image: nothing to exchange with
            continue
        assert all(items[d]["source"] == source and items[d]["image"] != items[n]["image"] for n, d in zip(members, given_out))
        if 2 * max(images.count(image) for image in images) <= len(members):
            assert sorted(given_out) == members         # a permutation: every vector used exactly once


def test_shuffled_depends_on_the_seed_and_shuffles_evenly():
    items = [item(n, f"{n}.png") for n in range(8)]
    seen = np.zeros((8, 8), int)
    for seed in range(700):
        seen[np.arange(8), controls.shuffled(items, seed)] += 1
    assert (np.diag(seen) == 0).all()
    assert seen[~np.eye(8, dtype=bool)].min() > 60 and seen.max() < 145  # 100 expected in each of the other 56 cells


def test_shuffled_question_keeps_the_image_and_changes_the_question():
    items = [item(0, "a", "x"), item(1, "a", "y"), item(2, "a", "y"), item(3, "b", "x"), item(4, "c", "x"), item(5, "c", "x")]
    donors = controls.shuffled_question(items, 3)
    assert donors[3] == -1 and donors[4] == donors[5] == -1  # one question only on these images
    assert donors[0] in (1, 2) and donors[1] == donors[2] == 0


# ---- vectors ----
def test_zero_mean_and_noise_have_the_statistics_they_promise():
    rng = np.random.default_rng(0)
    train = (rng.standard_normal((1000, 6)) @ rng.standard_normal((6, 6)) + 3 * rng.standard_normal(6)).astype(np.float32)
    assert (controls.zero(train) == 0).all() and controls.zero(train).shape == train.shape
    middle = controls.mean(train, 4)
    assert middle.shape == (4, 6) and np.allclose(middle, train.mean(0), atol=1e-5)
    drawn = controls.noise(train, 6000, 5)
    assert np.allclose(drawn.mean(0), train.mean(0), atol=0.1)
    want = np.linalg.eigvalsh(np.cov(train.T))
    assert np.allclose(np.linalg.eigvalsh(np.cov(drawn.T)), want, rtol=0.1)
    assert np.abs(np.cov(drawn.T) - np.cov(train.T)).max() < 0.07 * want.max()
    assert (drawn == controls.noise(train, 6000, 5)).all() and (drawn != controls.noise(train, 6000, 6)).any()
    unit = train / np.linalg.norm(train, axis=1, keepdims=True)
    assert np.square(controls.noise(unit, 3000, 1)).sum(1).mean() == pytest.approx(1, abs=0.03)


def test_nearest_takes_the_most_similar_other_image_and_agrees_with_a_plain_loop():
    rng = np.random.default_rng(1)
    vectors, images = rng.standard_normal((600, 8)).astype(np.float32), [f"{n // 3}.png" for n in range(600)]
    donors = controls.nearest(vectors, images)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for n in range(0, 600, 37):
        best = max((m for m in range(600) if images[m] != images[n]), key=lambda m: float(unit[n] @ unit[m]))
        assert donors[n] == best
    assert controls.nearest(vectors[:3], ["a", "a", "a"]).tolist() == [-1, -1, -1]
    assert controls.nearest(np.array([[1, 0], [2, 0], [0, 1], [5, 1]], np.float32), ["a", "a", "b", "c"]).tolist() == [3, 3, 3, 0]


def test_the_blank_image_has_the_commonest_size_and_one_colour(tmp_path):
    from PIL import Image
    for name, size in (("a.png", (40, 30)), ("b.png", (20, 20)), ("c.png", (20, 20))):
        Image.new("RGB", size, "red").save(tmp_path / name)
    (tmp_path / "out").mkdir()
    items = [item(0, "a.png", "x"), item(1, "b.png", "y"), item(2, "c.png"), item(3, "a.png")]
    blank = controls.blank_items(items, tmp_path, tmp_path / "out")
    assert [entry["image"] for entry in blank] == ["blank.png"] * 4 and [entry["question"] for entry in blank[:2]] == ["x", "y"]
    with Image.open(tmp_path / "out" / "blank.png") as image:
        assert image.size == (20, 20) and image.getcolors() == [(400, (128, 128, 128))]


# ---- the plot ----
def test_the_plot_is_valid_svg_that_escapes_and_shows_every_point():
    points = [{"budget": f"first {d} <&>", "family": "first", "bytes": d * 4, "score": 10.0 + d, "score_interval": [8 + d, 12 + d],
               "bits": None, "bits_interval": None} for d in (8, 16, 32)]
    points.append({"budget": "int8", "family": "int8", "bytes": 36, "score": 50.0, "score_interval": [40, 60], "bits": 0.5,
                   "bits_interval": [0.4, 0.6]})
    text = controls.plot_svg(points, 9.0, "a <script> title")
    document = xml.dom.minidom.parseString(text)
    assert len(document.getElementsByTagName("polyline")) == 1 and text.count("bytes, ") == 5  # 4 scores, 1 bits
    assert "<script>" not in text and "nan" not in text.lower()


@pytest.mark.parametrize("span,step", [(1, 0.2), (100, 20), (45, 10), (0.3, 0.05), (7, 2)])
def test_ticks_are_round(span, step):
    assert controls.tick_step(span) == pytest.approx(step)


# ---- a tiny world: items, a decoder and planted vectors; the other scripts run in this process, because torch takes seconds to load ----
LETTERS, QUESTIONS = "abcd", ["which?", "what now?", "say it"]
FIT = ["--epochs", "4", "--batch-size", "16", "--lr-decoder", "8e-3", "--lr-projector", "8e-3",
       "--eval-every", "1000", "--save-every", "1000"]


def tiny_tokenizer(folder, special):
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    tokenizer = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.save_pretrained(folder)
    return fast


def tiny_decoder(folder):
    import torch
    import transformers
    size = len(tiny_tokenizer(folder, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                      num_key_value_heads=1, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def write_items(path, items):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in items))


def write_trio(prefix, vectors, keys, **meta):
    vectors = np.asarray(vectors, np.float32)
    np.save(f"{prefix}.npy", vectors)
    Path(f"{prefix}.ids.txt").write_text("".join(f"{key}\n" for key in keys))
    Path(f"{prefix}.meta.json").write_text(json.dumps({"embedder": "planted", "mode": "vl_joint", "key": "id", "dim": vectors.shape[1],
                                                       "normalized": False, "dtype": "float32", **meta}))


def fit(folder, scripts, out, *words):
    scripts["train_decoder"].main(["fit", "--train-items", f"{folder}/train.jsonl", "--dev-items", f"{folder}/dev.jsonl",
                                   "--decoder", f"{folder}/decoder", "--out", f"{folder}/{out}", *words, *FIT])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Items of three questions an image, two sources; vectors that leak the answer, that know the question alone, that are constant."""
    folder = tmp_path_factory.mktemp("world")
    tiny_decoder(folder / "decoder")
    rng = np.random.default_rng(0)
    codes, asked = 3 * rng.standard_normal((len(LETTERS), 12)), 3 * rng.standard_normal((len(QUESTIONS), 12))
    for split, count in (("train", 270), ("dev", 30), ("test", 60)):
        answers = rng.integers(len(LETTERS), size=count)
        items = [{"id": f"{split}-{n}", "image": f"{split}-{n // 3}.png", "question": QUESTIONS[n % 3], "answers": [LETTERS[answers[n]]],
                  "source": f"s{n // 3 % 2}", "domain": f"d{n // 3 % 2}", "metric": "exact"} for n in range(count)]
        write_items(folder / f"{split}.jsonl", items)
        ids, jitter = [entry["id"] for entry in items], rng.standard_normal((count, 12))
        write_trio(folder / f"leak-{split}", codes[answers] + 0.3 * jitter, ids)
        write_trio(folder / f"question-{split}", asked[np.arange(count) % 3] + 0.05 * jitter, ids)
        write_trio(folder / f"blank-{split}", asked[np.arange(count) % 3] + 0.05 * rng.standard_normal((count, 12)), ids)
        write_trio(folder / f"constant-{split}", np.ones((count, 12)), ids)
    scripts = {name: load(name) for name in ("train_decoder", "evaluate")}
    for kind in ("leak", "question", "constant"):
        vectors = ["--train-embeddings", f"{folder}/{kind}-train", "--dev-embeddings", f"{folder}/{kind}-dev", "--allow-duplicate-vectors"]
        fit(folder, scripts, kind, *vectors)
    return folder, scripts


@pytest.fixture
def here(world, monkeypatch):
    """controls.py in this process; returns (folder, call). call(*words, fail_at=N) returns what it ran, and is interrupted at the N-th."""
    folder, scripts = world
    monkeypatch.chdir(folder)

    def run_script(args, name, *words):
        controls.save_command(args, " ".join(["python", name, *map(str, words)]))
        call.ran.append(f"{name.removesuffix('.py')} {words[0]}" if name == "train_decoder.py" else name.removesuffix(".py"))
        if len(call.ran) == call.fail_at:
            raise KeyboardInterrupt
        scripts[name.removesuffix(".py")].main([str(word) for word in words])

    def call(*words, fail_at=None):
        call.ran, call.fail_at = [], fail_at
        controls.main([str(word) for word in words])
        return call.ran
    monkeypatch.setattr(controls, "run_script", run_script)
    return folder, call


def command(kind, out, which, *more):
    return ["run", "--readout", kind, "--items", "test.jsonl", "--embeddings", f"{kind}-test", "--out", out, "--controls", which,
            "--bootstrap", "500", "--max-new-tokens", "3", *more]


TRAIN = ["--train-items", "train.jsonl", "--dev-items", "dev.jsonl", "--decoder", "decoder"]
CURVE = ["curve", "--items", "test.jsonl", "--embeddings", "leak-test", "--train-embeddings", "leak-train", "--dev-embeddings", "leak-dev",
         *TRAIN]


@pytest.fixture(scope="module")
def text_only(world):
    """The text-only readout that controls.py trains; made once."""
    folder, scripts = world
    fit(folder, scripts, "text_only", "--no-embedding")
    return "text_only"


def rows_of(out):
    return {row["condition"]: row for row in json.loads((Path(out) / "controls.json").read_text())["rows"]}


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_leaked_answer_shows_as_matched_high_and_shuffled_low(here, capsys):
    folder, call = here
    which = "text_only,text_only_ablated,zero,shuffled,shuffled_question,mean,noise,nearest,question_vector"
    words = command("leak", "leak-out", which, "--repeats", 2, "--train-embeddings", "leak-train", "--question-embeddings", "blank-test",
                    *TRAIN)
    ran = call(*words)
    # one prediction pass for all vector controls; text_only trained with the settings of the readout under test
    assert ran == ["train_decoder predict", "train_decoder fit", "train_decoder predict", "train_decoder predict", "evaluate"]
    rows = rows_of("leak-out")
    assert rows["matched"]["overall"]["score"] > 90 and rows["matched"]["usable_bits"]["mean"] > 1
    for name in which.split(",") + ["shuffled-2"]:
        if name != "nearest":                           # a vector that is nothing but the answer is found again in another image
            assert rows[name]["overall"]["score"] < 60 and rows[name]["verdict"] == "separated", name
    assert rows["nearest"]["overall"]["score"] > 90 and rows["nearest"]["verdict"] == "not separated at n=60"
    settings = json.loads(Path("leak-out/readouts/text_only/readout.json").read_text())
    tested = json.loads(Path("leak/readout.json").read_text())
    assert settings["tokens"] == 0 and all(settings["arguments"][name] == tested["arguments"][name] for name in controls.REPLAYED)

    items = {entry["id"]: entry for entry in lines("test.jsonl")}
    for entry in lines("leak-out/shuffled.jsonl"):      # nobody keeps a vector of the own image, and sources stay apart
        donor = items[entry["embedding_key"]]
        assert donor["image"] != items[entry["id"]]["image"] and donor["source"] == items[entry["id"]]["source"]
    assert all(items[entry["embedding_key"]]["image"] == items[entry["id"]]["image"] for entry in lines("leak-out/shuffled_question.jsonl"))
    meta = json.loads(Path("leak-out/embeddings/shuffled.meta.json").read_text())
    assert (meta["condition"], meta["seed"], meta["embedder"], meta["key"]) == ("shuffled", 0, "planted", "id")
    assert meta["parent_sha256"] == controls.sha256("leak-test.meta.json")

    table = capsys.readouterr().out
    result = json.loads(Path("leak-out/controls.json").read_text())
    assert result["spread"]["repeats"] == 2 and "shuffled over 2 seeds" in table and "| not separated at n=60 |" in table
    assert set(result["leak_check"]) == {"vl_joint: matched - shuffled", "vl_joint: matched - question_vector"}
    assert all(group["interval"][0] > 0 for group in result["leak_check"]["vl_joint: matched - question_vector"].values())

    # a second call keeps all; a changed seed redoes the seeded ones; a changed file redoes its condition, with the same bytes as before
    files = {path: path.read_bytes() for path in Path("leak-out").glob("*.jsonl")}
    assert call(*words) == ["evaluate"]
    Path("leak-out/zero.jsonl").write_text("")
    assert call(*words) == ["train_decoder predict", "evaluate"]
    assert {path: path.read_bytes() for path in files} == files
    assert call(*words, "--seed", 5) == ["train_decoder predict", "evaluate"]
    assert Path("leak-out/shuffled.jsonl").read_bytes() != files[Path("leak-out/shuffled.jsonl")]
    assert Path("leak-out/mean.jsonl").read_bytes() == files[Path("leak-out/mean.jsonl")]


def test_a_vector_of_the_question_alone_equals_question_vector(here, text_only):
    _, call = here
    call(*command("question", "question-out", "text_only,shuffled,question_vector", "--question-embeddings", "blank-test",
                  "--text-only-readout", text_only))
    rows = rows_of("question-out")
    assert abs(rows["question_vector"]["difference"]["difference"]) < 5 and rows["question_vector"]["verdict"] == "not separated at n=60"
    low, high = rows["text_only"]["difference"]["interval"]
    assert low <= 0 and rows["matched"]["usable_bits"]["mean"] < 0.1


def test_a_constant_embedding_shows_nothing_above_text_only(here, text_only):
    _, call = here
    call(*command("constant", "constant-out", "text_only,zero,mean", "--train-embeddings", "constant-train",
                  "--text-only-readout", text_only))
    rows = rows_of("constant-out")
    assert rows["text_only"]["difference"]["interval"][0] <= 0 and rows["matched"]["usable_bits"]["mean"] < 0.1
    assert rows["mean"]["difference"]["difference"] == 0 and rows["mean"]["verdict"] == "not separated at n=60"


def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(here, text_only):
    _, call = here
    words = command("leak", "broken-out", "text_only,text_only_ablated,shuffled", "--text-only-readout", text_only)
    for fail_at, ran in ((2, 2), (2, 2), (2, 2)):       # each call gets one step further
        with pytest.raises(KeyboardInterrupt):
            call(*words, fail_at=fail_at)
        assert len(call.ran) == ran
    assert call(*words) == ["evaluate"]
    call(*[word.replace("broken-out", "whole-out") for word in words])
    for name in ("matched", "text_only", "text_only_ablated", "shuffled", "scores"):
        broken, whole = (Path(f"{out}-out/{name}.jsonl").read_text() for out in ("broken", "whole"))
        assert broken.replace("broken-out", "whole-out") == whole


def test_what_cannot_be_shuffled_is_left_out_and_said(here, capsys):
    folder, call = here
    items = lines("test.jsonl")
    items = [{**entry, "source": "single", "domain": "single"} if entry["image"] == "test-0.png" else entry for entry in items]
    write_items(folder / "single.jsonl", items)
    call(*command("leak", "single-out", "zero,shuffled", "--items", "single.jsonl"))
    assert "shuffled: 3 of 3 items of single left out: a source with a single image cannot be shuffled" in capsys.readouterr().err
    rows = rows_of("single-out")
    assert (rows["zero"]["overall"]["n"], rows["shuffled"]["overall"]["n"], rows["shuffled"]["overall"]["failed"]) == (60, 57, 3)
    assert rows["shuffled"]["difference"]["n"] == 57
    write_items(folder / "single.jsonl", items[:3])
    with pytest.raises(controls.UserError, match="no item of single.jsonl can be given one: a source with a single image"):
        call(*command("leak", "single-out", "shuffled", "--items", "single.jsonl"))


def test_skipped_items_are_left_out_of_every_vector_condition(here):
    folder, call = here
    write_items(folder / "failed.jsonl", [{"id": "test-4", "error": "truncated image"}])
    vectors, keys = np.load("leak-test.npy"), Path("leak-test.ids.txt").read_text().split()
    write_trio("fewer", np.delete(vectors, 4, 0), [key for key in keys if key != "test-4"])
    words = command("leak", "fewer-out", "shuffled", "--embeddings", "fewer")
    with pytest.raises(controls.UserError, match="fewer.ids.txt: expected a row for each item, found none for 1 of 60, first test-4"):
        call(*words)
    call(*words, "--failed", "failed.jsonl")
    for name in ("matched", "shuffled"):
        entry = lines(f"fewer-out/{name}.jsonl")[4]
        assert entry["prediction"] is None and entry["error"] == "truncated image"


def test_the_curve_scores_each_budget_against_its_bytes(here, text_only, capsys):
    _, call = here
    words = [*CURVE, "--out", "curve-out", "--budgets", "truncate:1,truncate:8+binary,none", "--text-only-readout", text_only,
             "--bootstrap", "500", "--max-new-tokens", "3", "--fit-flags", " ".join(FIT)]
    call(*words)
    points = json.loads(Path("curve-out/curve.json").read_text())["points"]
    assert [point["budget"] for point in points] == ["text_only", "truncate:8+binary", "truncate:1", "none"]
    assert [point["bytes"] for point in points] == [0, 1, 4, 48]
    full = points[-1]
    assert full["score"] > 90 and full["bits"] > 1 and full["bits_interval"][0] > 0.5 and full["score"] - points[0]["score"] > 40
    assert points[2]["score"] < full["score"] and points[2]["verdict"] == "separated" and full["verdict"] == "the reference"
    xml.dom.minidom.parse("curve-out/curve.svg")
    assert "| truncate:1 | 4 |" in capsys.readouterr().out
    assert call(*words) == ["evaluate"]


# ---- refusals ----
@pytest.mark.parametrize("which,says", [
    ("text_only", "--train-items and --dev-items and --decoder, or --text-only-readout"), ("mean", "--train-embeddings"),
    ("noise", "--train-embeddings"), ("question_vector", "--images, or --question-embeddings"),
    ("raw_image", "--images and --reference-model"), ("zeroes", "unknown 'zeroes'"), ("zero,zero", "twice"), ("", "empty text")])
def test_a_control_without_its_inputs_names_the_flag(which, says, capsys):
    with pytest.raises(SystemExit) as stop:
        controls.parse_args(command("r", "o", which))
    assert stop.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("budgets", ["truncate", "first:3", "int8,int8", "none+int8:3", ""])
def test_unknown_budgets_are_refused(budgets, capsys):
    with pytest.raises(SystemExit) as stop:
        controls.parse_args([*CURVE, "--out", "o", "--budgets", budgets])
    assert stop.value.code == 2 and "--budgets" in capsys.readouterr().err


def test_inputs_that_do_not_belong_together_are_refused(here, text_only):
    folder, call = here
    write_trio("visual", np.load("leak-test.npy"), Path("leak-test.ids.txt").read_text().split(), mode="visual_only")
    with pytest.raises(controls.UserError, match="shuffled_question need mode vl_joint, found visual_only"):
        call(*command("leak", "x", "shuffled_question", "--embeddings", "visual"))
    write_trio("other", np.load("leak-train.npy"), Path("leak-train.ids.txt").read_text().split(), embedder="another")
    with pytest.raises(controls.UserError, match="other.meta.json: expected embedder 'planted'.*found 'another'.*--train-embeddings"):
        call(*command("leak", "x", "mean", "--train-embeddings", "other"))
    with pytest.raises(controls.UserError, match="dev.jsonl: expected the items that leak was trained on"):
        call(*command("leak", "x", "text_only", "--train-items", "dev.jsonl", "--dev-items", "dev.jsonl", "--decoder", "decoder"))
    with pytest.raises(controls.UserError, match="question: expected a readout trained with fit --no-embedding, found one with 1 soft"):
        call(*command("leak", "x", "text_only", "--text-only-readout", "question"))
    shutil.copytree("decoder", "another", dirs_exist_ok=True)
    (folder / "another" / "more.txt").write_text("x")
    with pytest.raises(controls.UserError, match="--decoder another: expected the one that leak was trained from"):
        call(*command("leak", "x", "text_only", "--train-items", "train.jsonl", "--dev-items", "dev.jsonl", "--decoder", "another"))
    record = json.loads((folder / text_only / "readout.json").read_text())
    del record["json_sha256"]
    for change, says in (({"signature": {**record["signature"], "decoder_sha256": "0"}}, "trained from another decoder than"),
                         ({"train_items_sha256": "0"}, "trained on other items than")):
        (folder / "floor").mkdir(exist_ok=True)
        (folder / "floor" / "readout.json").write_text(json.dumps({**record, **change}))
        for words in (command("leak", "x", "text_only"), [*CURVE, "--out", "x", "--budgets", "none"]):
            with pytest.raises(controls.UserError, match=f"floor: {says}"):
                call(*words, "--text-only-readout", "floor")
    with pytest.raises(controls.UserError, match="nowhere: expected a readout folder"):
        call(*command("leak", "x", "zero", "--readout", "nowhere"))
    with pytest.raises(controls.UserError, match="another process is writing"):
        with controls.locked("x"):
            call(*command("leak", "x", "zero"))


def test_a_failing_script_is_named_with_its_command_and_nothing_is_imported_for_help(tmp_path):
    script = tmp_path / "controls.py"                   # alone in a folder: the other scripts are missing, and no torch is needed to say so
    script.write_bytes((ROOT / "controls.py").read_bytes())
    write_items(tmp_path / "i.jsonl", [item(0, "a"), item(1, "b")])
    write_trio(tmp_path / "e", np.eye(2), ["i0", "i1"])
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "readout.json").write_text("{}")
    words = [sys.executable, "controls.py", *command("r", "o", "zero", "--items", "i.jsonl", "--embeddings", "e")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "error: train_decoder.py: not found" in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "train_decoder.py").write_text("import sys\nprint('broken on purpose', file=sys.stderr)\nsys.exit(1)\n")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "broken on purpose" in done.stderr and "train_decoder.py ended with status 1" in done.stderr
    saved = (tmp_path / "o" / "commands.sh").read_text().splitlines()[-1]
    assert saved.startswith("python train_decoder.py predict --items i.jsonl --readout r --embeddings e o/embeddings/zero")
    assert load("train_decoder").parse_args(saved.split()[2:]).condition == ["matched", "zero"]  # the saved line runs as it stands
    code = ("import sys; sys.argv = ['controls.py', '--help']\ntry: exec(open('controls.py').read())\n"
            "except SystemExit: print(sorted(sys.modules))")
    loaded = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True).stdout
    assert "'torch'" not in loaded and "'transformers'" not in loaded and "'numpy'" in loaded


def test_killed_or_interrupted_it_leaves_no_child_behind(tmp_path):
    (tmp_path / "controls.py").write_bytes((ROOT / "controls.py").read_bytes())
    write_items(tmp_path / "i.jsonl", [item(0, "a"), item(1, "b")])
    write_trio(tmp_path / "e", np.eye(2), ["i0", "i1"])
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "readout.json").write_text("{}")
    (tmp_path / "train_decoder.py").write_text(
        "import os, sys, time\nopen('started', 'w').write(str(os.getpid()))\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    sys.exit(130)\n")
    words = [sys.executable, "controls.py", *command("r", "o", "zero", "--items", "i.jsonl", "--embeddings", "e")]
    for number in (signal.SIGKILL, signal.SIGINT):
        (tmp_path / "started").unlink(missing_ok=True)
        parent = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
        wait_for(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text())
        child = int((tmp_path / "started").read_text())
        os.kill(parent.pid, number) if number == signal.SIGKILL else os.killpg(parent.pid, number)  # ctrl-C reaches the whole group
        said = parent.communicate(timeout=30)[1]
        assert parent.returncode == (-9 if number == signal.SIGKILL else 130)
        assert number == signal.SIGKILL or "interrupted. Finished conditions are kept" in said.splitlines()[-1]
        wait_for(lambda: not os.path.exists(f"/proc/{child}") or " Z " in Path(f"/proc/{child}/stat").read_text())
        assert not list((tmp_path / "o").glob("*.jsonl")) and not list((tmp_path / "o").glob("*.tmp"))


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.02)


def test_the_leak_check_sets_the_visual_only_run_beside_the_joint_one(here, capsys):
    folder, call = here
    column = {"visual_only: matched - shuffled": {"s0": {"n": 30, "difference": 12.5, "interval": [1.0, 20.0]}}}
    (folder / "visual-out").mkdir()
    good = {"embedder": "planted", "mode": "visual_only", "leak_check": column, "inputs": {"items": controls.sha256("test.jsonl"), "limit": None}}
    (folder / "visual-out" / "controls.json").write_text(json.dumps(good))
    words = command("leak", "pair-out", "shuffled,question_vector", "--question-embeddings", "blank-test",
                    "--visual-only-run", "visual-out")
    call(*words)
    out = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| leak check, per source |") and line.endswith(
        "| vl_joint: matched - question_vector | visual_only: matched - shuffled |") for line in out)
    assert any(line.startswith("| s0 |") and line.endswith("| 12.50 [1.00, 20.00] |") for line in out)
    for change, says in (({"embedder": "another"}, "expected a controls.py run of planted in visual_only, found another"),
                         ({"inputs": {"items": controls.sha256("dev.jsonl"), "limit": None}}, "found other items"),
                         ({"inputs": {**good["inputs"], "limit": 3}}, "found other items or --limit 3")):
        (folder / "visual-out" / "controls.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(controls.UserError, match=says):
            call(*words)


def test_question_vector_extracts_with_the_settings_in_the_sidecar(tmp_path, monkeypatch):
    from PIL import Image
    monkeypatch.chdir(tmp_path)
    os.makedirs("o/embeddings")
    Image.new("RGB", (8, 6)).save("a.png")
    meta = {"embedder": "qwen3-vl-embedding-2b", "mode": "vl_joint", "key": "id", "dim": 2, "normalized": True, "dtype": "float32",
            "model": "weights", "torch_dtype": "float32", "fuse": "none", "prompt": "p", "pooling": "last", "weights_sha256": "w"}
    seen = []

    def run_script(args, name, *words):
        seen.append([str(word) for word in words])
        write_trio("o/embeddings/blank", [[1, 0]], ["i0"], **{**meta, "prompt": "p" if "--instruction" in words else "q"})
    monkeypatch.setattr(controls, "run_script", run_script)
    data = {"live": [item(0, "a.png", "what?")], "vectors": np.ones((1, 2), np.float32), "keys": ["i0"], "meta": meta}
    words = ["run", "--readout", "r", "--items", "i", "--embeddings", "e", "--out", "o", "--controls", "question_vector", "--images", "."]
    with pytest.raises(controls.UserError, match="blank.meta.json: expected prompt 'p'.*found 'q'.*--extract-flags"):
        controls.control_vectors(controls.parse_args(words), "question_vector", 0, data)
    args = controls.parse_args(words + ["--extract-flags", "--instruction 'Look closely.'", "--device", "auto"])
    values, names, usable = controls.control_vectors(args, "question_vector", 0, data)
    assert values.tolist() == [[1, 0]] and names == ["(question_vector)"] and usable.all()
    parsed = load("extract").parse_args(seen[-1])       # extract.py itself takes the command
    assert (parsed.embedder, parsed.mode, parsed.model, parsed.instruction, parsed.overwrite) == (
        "qwen3-vl-embedding-2b", "vl_joint", "weights", "Look closely.", True)
    assert lines("o/blank/items.jsonl")[0]["image"] == "blank.png" and lines("o/blank/items.jsonl")[0]["question"] == "what?"


# ---- raw_image ----
@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    """A tiny random Qwen3-VL-Instruct in its published layout: config, safetensors, tokenizer, preprocessor_config.json."""
    import torch
    import transformers
    folder = tmp_path_factory.mktemp("vision") / "model"
    tokenizer = tiny_tokenizer(folder, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
                                        "<|image_pad|>", "<|video_pad|>"])
    token = tokenizer.convert_tokens_to_ids
    config = transformers.Qwen3VLConfig(
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"), vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"), tie_word_embeddings=True,
        text_config={"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                     "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
                     "max_position_embeddings": 4096, "tie_word_embeddings": True,
                     "eos_token_id": token("<|im_end|>"), "rope_parameters": {
                         "rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        vision_config={"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 16,
                       "num_position_embeddings": 16, "deepstack_visual_indexes": [0]})
    torch.manual_seed(0)
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "size": {"longest_edge": 16777216, "shortest_edge": 4096}, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast"}))
    return folder


def test_raw_image_answers_greedily_from_the_picture_and_goes_on_where_it_stopped(vision_model, tmp_path, monkeypatch):
    from PIL import Image
    monkeypatch.chdir(tmp_path)
    sizes = {"wide.png": (2900, 1500), "strip.png": (900, 3), "small.png": (40, 30)}
    rng = np.random.default_rng(0)
    for name, (width, height) in sizes.items():
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(name)
    items = [item(n, name, "What <|im_end|> is it?") for n, name in enumerate(list(sizes)[1:])]
    write_items(tmp_path / "i.jsonl", items)
    os.makedirs("o")
    args = controls.parse_args(command("r", "o", "raw_image", "--items", "i.jsonl", "--images", ".", "--reference-model", str(vision_model),
                                       "--max-new-tokens", "4", "--device", "cpu"))
    controls.answer_from_images(args, items, {"a": 1})
    found, meta = lines("o/raw_image.jsonl"), json.loads(Path("o/raw_image.meta.json").read_text())
    assert [entry["id"] for entry in found] == ["i0", "i1"] and not os.path.exists("o/raw_image.jsonl.partial")
    assert all(entry["answer_bits"] is None and isinstance(entry["prediction"], str) for entry in found)
    assert (meta["condition"], meta["embedder"], meta["max_pixels"]) == ("raw_image", None, 1800 * 32 * 32)

    model, tokenizer, encode = controls.load_reference(args)
    pad, end = model.config.image_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")
    with Image.open("wide.png") as image:               # capped at 1,800 patches of 32 x 32, not 4,100
        batch = encode(image.convert("RGB"), "What <|im_end|> is it?")
    count = int((batch["input_ids"] == pad).sum())
    assert 1600 < count <= 1800 and count == int(batch["image_grid_thw"].prod()) // 4 and int(batch["mm_token_type_ids"].sum()) == count
    assert int((batch["input_ids"] == end).sum()) == 1  # the question's own token is text
    text = tokenizer.decode(batch["input_ids"][0])
    assert text.startswith("<|im_start|>user\n<|vision_start|><|image_pad|>")
    assert text.endswith("<|vision_end|>What <|im_end|> is it?<|im_end|>\n<|im_start|>assistant\n")

    # the picture reaches the model, and an independent step by step greedy loop agrees with what was written
    import torch
    with Image.open("small.png") as image:
        batch = encode(image.convert("RGB"), "What <|im_end|> is it?")
        other = encode(Image.new("RGB", image.size, "white"), "What <|im_end|> is it?")
    with torch.inference_mode():
        assert (model(**batch).logits[0, -1] - model(**other).logits[0, -1]).abs().max() > 1e-4
        ids = []
        for _ in range(4):
            ids.append(int(model(**batch).logits[0, -1].argmax()))
            if ids[-1] == end:
                break
            for name, value in (("input_ids", ids[-1]), ("attention_mask", 1), ("mm_token_type_ids", 0)):
                batch[name] = torch.cat([batch[name], torch.tensor([[value]])], 1)
    assert found[1]["prediction"] == tokenizer.decode(ids, skip_special_tokens=True)

    # killed after the first answer, with a torn second line: only the second is asked again; other inputs start afresh
    whole, first = Path("o/raw_image.jsonl").read_bytes(), json.dumps(controls.sealed({**found[0], "prediction": "kept"}))
    Path("o/raw_image.jsonl.partial").write_text(json.dumps({"a": 1}) + "\n" + first + "\n" + '{"id": "i1", "pred')
    controls.answer_from_images(args, items, {"a": 1})
    assert [entry["prediction"] for entry in lines("o/raw_image.jsonl")] == ["kept", found[1]["prediction"]]
    Path("o/raw_image.jsonl.partial").write_text(json.dumps({"a": 2}) + "\n" + first + "\n")
    controls.answer_from_images(args, items, {"a": 1})
    assert Path("o/raw_image.jsonl").read_bytes() == whole


def test_a_reference_model_with_missing_weights_is_no_ceiling(vision_model, tmp_path):
    import shutil
    from safetensors.torch import load_file, save_file
    shutil.copytree(vision_model, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    del tensors[next(name for name in tensors if "q_proj" in name)]
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    args = controls.parse_args(command("r", "o", "raw_image", "--images", ".", "--reference-model", str(tmp_path / "m"), "--device", "cpu"))
    with pytest.raises(controls.UserError, match="1 weights are missing or misshapen, first .*q_proj"):
        controls.load_reference(args)
    args.reference_model = str(tmp_path / "nothing")
    with pytest.raises(controls.UserError, match="nothing: cannot load this reference model"):
        controls.load_reference(args)
