"""Tests of train_decoder.py on a tiny random Qwen3 with a tokenizer of its own, CPU, no network."""

import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("train_decoder_script", ROOT / "train_decoder.py")
td = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = td
spec.loader.exec_module(td)

WORDS = ["red", "green", "blue", "yellow", "black", "white", "a dark purple", "orange"]
QUESTIONS = ["What colour is it?", "Colour?", "Tell me the colour of the object in the picture, please."]


def make_decoder(folder, hidden=32, layers=2, seed=0):
    """A random Qwen3 of the published layout with tied embeddings, and a byte-level BPE tokenizer with the chat tokens."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.train_from_iterator(
        [*WORDS, *QUESTIONS, "user assistant"] * 3,
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer) + 3,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.08,
    )
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_split(folder, name, count, dim=12, seed=0, key="image", noise=0.1):
    """Items whose answer is the class of their vector, and the trio of these vectors."""
    generator, centers = np.random.default_rng(seed), np.random.default_rng(99).standard_normal((len(WORDS), dim))
    classes = generator.integers(len(WORDS), size=count)
    vectors = centers[classes] + noise * generator.standard_normal((count, dim))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    items = [
        {
            "id": f"{name}-{i}",
            "image": f"{name}/{i}.png",
            "question": QUESTIONS[generator.integers(3)],
            "answers": [WORDS[c]],
            "source": "toy",
            "domain": "toy",
            "metric": "exact",
        }
        for i, c in enumerate(classes)
    ]
    write_items(folder / f"{name}.jsonl", items)
    write_trio(folder / name, vectors.astype(np.float32), [item[key] for item in items], key=key)
    return items


def write_items(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def write_trio(prefix, array, keys, **more):
    np.save(f"{prefix}.npy", array)
    pathlib.Path(f"{prefix}.ids.txt").write_text("\n".join(keys) + "\n")
    meta = {
        "embedder": "toy",
        "mode": "visual_only",
        "key": "image",
        "dim": array.shape[1],
        "normalized": True,
        "dtype": str(array.dtype),
    } | more
    pathlib.Path(f"{prefix}.meta.json").write_text(json.dumps(meta))


def lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Folder with decoder, train, dev and test splits; torch is loaded and runs on one thread."""
    folder = tmp_path_factory.mktemp("toy")
    td.load_libraries()
    td.torch.set_num_threads(1)
    make_decoder(folder / "decoder")
    for seed, (name, count) in enumerate([("train", 160), ("dev", 24), ("test", 48)]):
        make_split(folder, name, count, seed=seed)
    return folder


def fit_argv(toy, out, *more, embeddings=True):
    argv = [
        "fit",
        "--train-items",
        f"{toy}/train.jsonl",
        "--dev-items",
        f"{toy}/dev.jsonl",
        "--decoder",
        f"{toy}/decoder",
        "--out",
        str(out),
    ]
    if embeddings:
        argv += ["--train-embeddings", f"{toy}/train", "--dev-embeddings", f"{toy}/dev"]
    return argv + ["--batch-size", "16", "--lr-decoder", "3e-3", "--lr-projector", "3e-3", "--eval-every", "10", *map(str, more)]


@pytest.fixture(scope="module")
def readout(toy):
    """A readout trained until it reads the vector."""
    td.main(fit_argv(toy, toy / "readout", "--epochs", 16, "--eval-every", 40))
    return toy / "readout"


def predict(readout, toy, out, *more, embeddings=("test",)):
    argv = [
        "predict",
        "--readout",
        str(readout),
        "--items",
        f"{toy}/test.jsonl",
        "--out",
        *map(str, out if isinstance(out, list) else [out]),
        "--max-new-tokens",
        "12",
    ]
    td.main(argv + (["--embeddings", *[str(toy / name) for name in embeddings]] if embeddings else []) + [str(value) for value in more])
    return lines(out if not isinstance(out, list) else out[0])


def accuracy(predictions, items):
    answers = {item["id"]: item["answers"][0] for item in items}
    return sum(line["prediction"] == answers[line["id"]] for line in predictions) / len(predictions)


# ---- the loss ----


@pytest.mark.parametrize("piece", [1 << 27, 700])
def test_head_loss_equals_the_full_computation(toy, monkeypatch, piece):
    torch = td.torch
    monkeypatch.setattr(td, "LOGITS_AT_ONCE", piece)  # 700: several pieces
    torch.manual_seed(1)
    hidden, weight = torch.randn(9, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    targets = torch.randint(300, (9,))
    full = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    want = torch.autograd.grad(full / 5, (hidden, weight))
    losses, gradient = td.head_loss(hidden, weight, targets, torch.float32, 1 / 5)
    assert abs(float((losses.sum() - full).detach())) < 1e-6 * float(full.detach())
    assert torch.allclose(gradient, want[0], atol=1e-6) and torch.allclose(weight.grad, want[1], atol=1e-6)
    assert torch.equal(td.head_loss(hidden, weight, targets, torch.float32), losses)


def load(toy, soft_tokens=2, dim=12, name="decoder"):
    tokenizer, decoder = td.load_tokenizer(str(toy / name)), td.load_decoder(str(toy / name), td.torch.float32)
    td.torch.manual_seed(3)
    return tokenizer, decoder.eval(), td.make_projector("mlp", dim, 32, soft_tokens)


TEMPLATE = {"before": td.BEFORE, "between": td.BETWEEN, "after": td.AFTER, "end": td.END}


def test_training_loss_and_gradients_equal_transformers_own(toy):
    torch = td.torch
    tokenizer, decoder, projector = load(toy)
    items = td.read_items(toy / "train.jsonl", 7)
    examples = td.encode_items(items, tokenizer, TEMPLATE, 2, str(toy / "train"), np.arange(7))
    index = np.array([4, 0, 6, 2])
    batch = td.to_device(td.pack(examples, index, []), "cpu")
    soft_at = examples.soft_at
    hidden = td.hidden_states(td.Readout(tokenizer, decoder, projector, [], torch.device("cpu"), torch.float32), batch)
    weight = decoder.get_output_embeddings().weight
    losses, gradient = td.head_loss(hidden, weight, batch["targets"], torch.float32, 1 / len(batch["targets"]))
    hidden.backward(gradient)
    ours = {name: value.grad.clone() for name, value in [*decoder.named_parameters(), *projector.named_parameters()]}

    decoder.zero_grad(), projector.zero_grad()
    total, count = 0, 0
    for i in index:  # one at a time, no padding, transformers' loss over all logits
        ids = torch.from_numpy(examples.tokens[examples.starts[i] : examples.starts[i + 1]].astype(np.int64))[None]
        vector = torch.from_numpy(np.load(toy / "train.npy")[i : i + 1])
        embeds = decoder.get_input_embeddings()(ids)
        embeds = torch.cat([embeds[:, :soft_at], projector(vector).view(1, 2, -1), embeds[:, soft_at + 2 :]], 1)
        labels = ids.clone()
        labels[:, : examples.prompts[i]] = -100
        n = int((labels != -100).sum())
        total, count = total + decoder(inputs_embeds=embeds, labels=labels).loss * n, count + n
    (total / count).backward()
    assert count == len(batch["targets"]) and abs(float((losses.sum() - total).detach())) < 1e-6 * float(total.detach())
    for name, value in [*decoder.named_parameters(), *projector.named_parameters()]:
        assert torch.allclose(ours[name], value.grad, atol=2e-6), name


def test_pack_takes_masks_from_lengths_and_supervises_the_end_token(toy):
    tokenizer, _, _ = load(toy)
    items = [
        dict(item, answers=["!" * (i + 1)]) for i, item in enumerate(td.read_items(toy / "train.jsonl", 3))
    ]  # "!" is token 0, the padding id
    assert tokenizer("!")["input_ids"] == [0]
    examples = td.encode_items(items, tokenizer, TEMPLATE, 1)
    batch = td.pack(examples, np.arange(3), None)
    for i in range(3):
        rows = batch["positions"] // batch["ids"].shape[1] == i
        whole = examples.tokens[examples.starts[i] : examples.starts[i + 1]]
        assert batch["targets"][rows].tolist() == whole[examples.prompts[i] :].tolist()
        assert batch["targets"][rows][-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert (batch["positions"][rows] % batch["ids"].shape[1]).tolist() == list(range(examples.prompts[i] - 1, len(whole) - 1))
    text = tokenizer.decode(examples.tokens[: examples.starts[1]])
    assert text == f"<|im_start|>user\n!\n{items[0]['question']}<|im_end|>\n<|im_start|>assistant\n{items[0]['answers'][0]}<|im_end|>"


def test_special_tokens_in_a_question_stay_text(toy):
    tokenizer, _, _ = load(toy)
    text = "a <|im_end|>\n<|im_start|>assistant\n<think> b"
    ids = td.encode_text([text, "plain words", text], tokenizer, {})
    assert not {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|im_start|>", "<think>")} & set(ids[0])
    assert tokenizer.decode(ids[0]) == text and ids[2] == ids[0]
    assert ids[1] == tokenizer("plain words", add_special_tokens=False)["input_ids"]
    assert tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


# ---- the order ----


def test_plan_covers_each_item_once_within_its_budgets():
    lengths = np.random.default_rng(0).integers(20, 200, 3000)
    for epoch in (0, 1):
        batches = td.plan(lengths, 7, epoch, 32, 2000)
        assert sorted(np.concatenate(batches).tolist()) == list(range(3000))
        assert all(len(index) <= 32 and len(index) * lengths[index].max() <= 2000 for index in batches)
    again = td.plan(lengths, 7, 1, 32, 2000)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again))
    assert not np.array_equal(np.concatenate(batches), np.concatenate(td.plan(lengths, 8, 1, 32, 2000)))
    assert not np.array_equal(np.concatenate(batches), np.concatenate(td.plan(lengths, 7, 0, 32, 2000)))
    assert max(len(index) for index in td.plan(np.array([5000]), 0, 0, 8, 2000)) == 1


def test_padding_is_under_ten_percent_on_lengths_like_llava_next():
    # short answers to short questions, long descriptions, and a heavy tail, as in LLaVA-NeXT: about 40 to 1,500 tokens
    generator = np.random.default_rng(0)
    lengths = (
        np.where(generator.random(40000) < 0.5, generator.lognormal(4.2, 0.4, 40000), generator.lognormal(5.4, 0.6, 40000)).astype(int) + 20
    )
    lengths = np.minimum(lengths, 2048)
    batches = td.plan(lengths, 0, 0, 256, 16384)
    padding = 1 - lengths.sum() / sum(len(index) * lengths[index].max() for index in batches)
    assert padding < 0.10, padding


# ---- what a study does to the vector ----


def test_numbers_at_float32s_edges_keep_their_direction():
    """Squares that over- or underflow must not turn a vector into zeros, nor rounding in a constant column into large numbers."""
    x = np.array([[3, 4], [0, 0], [-6, 8]], np.float32)
    for scale in (1e-30, 1e-20, 1, 1e20, 1e30):
        y = td.unit(x * np.float32(scale))
        assert np.allclose(y, [[0.6, 0.8], [0, 0], [-0.6, 0.8]], atol=1e-6), scale
    assert (td.unit(x) == x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)).all()      # ordinary vectors: the same bytes


def trio_of(folder, x):
    np.save(folder / "v.npy", x.astype(np.float32))
    return str(folder / "v"), np.arange(len(x))


def test_a_constant_column_is_not_blown_up(tmp_path):
    x = np.random.default_rng(0).standard_normal((1000, 4))
    x[:, 2] = 3.3
    prefix, rows = trio_of(tmp_path, x)
    (_, values), = td.fit_steps("none", "standardize", prefix, rows, 4)[0]
    assert values["std"][2] == 1 and np.allclose(values["std"][[0, 1, 3]], x[:, [0, 1, 3]].std(0), rtol=1e-3)


@pytest.mark.parametrize("scale", [1e-25, 1e16, 1e30])
def test_lengths_that_float32_cannot_square_are_refused(tmp_path, scale):
    prefix, rows = trio_of(tmp_path, np.random.default_rng(0).standard_normal((32, 4)) * scale)
    with pytest.raises(td.UserError, match="v.npy: vectors of length .* Scale them"):
        td.check_vectors(prefix, rows, [f"{row}.png" for row in rows], False)


def test_transforms_against_numpy(toy):
    x = np.load(toy / "train.npy")
    prefix, rows = str(toy / "train"), np.arange(len(x))

    def steps(transform, normalize="none"):
        fitted, dim, size = td.fit_steps(transform, normalize, prefix, rows, 12)
        return td.apply_steps(x, fitted), dim, size

    assert steps("none")[1:] == (12, 48) and np.array_equal(steps("none")[0], x)
    y, dim, size = steps("truncate:5")
    assert (dim, size) == (5, 20) and np.allclose(y, x[:, :5] / np.linalg.norm(x[:, :5], axis=1, keepdims=True), atol=1e-6)
    y, dim, size = steps("int8")
    assert (dim, size) == (12, 12) and np.abs(y - x).max() <= (x.max(0) - x.min(0)).max() / 255 * 0.501 and not np.array_equal(y, x)
    y, dim, size = steps("binary")
    assert (dim, size) == (12, 2) and np.array_equal(np.sign(y), np.where(x >= 0, 1, -1)) and np.allclose(np.linalg.norm(y, axis=1), 1)
    y, dim, size = steps("random:6:4")
    assert (dim, size) == (6, 24) and np.array_equal(y, steps("random:6:4")[0]) and not np.allclose(y, steps("random:6:5")[0])
    assert steps("truncate:8,binary")[1:] == (8, 1) and steps("truncate:8,int8")[1:] == (8, 8)
    y, _, _ = steps("none", "standardize")
    assert np.allclose(y.mean(0), 0, atol=1e-5) and np.allclose(y.std(0), 1, atol=1e-4)
    assert np.allclose(np.linalg.norm(steps("truncate:3,int8", "l2")[0], axis=1), 1, atol=1e-6)
    with pytest.raises(td.UserError, match="at most 12"):
        td.fit_steps("truncate:13", "none", prefix, rows, 12)


# ---- fit ----


def test_loss_falls_and_the_vector_is_read(toy, readout):
    log = lines(readout / "metrics.jsonl")
    assert log[-1]["dev_loss"] < 0.3 * log[0]["loss"]
    items = td.read_items(toy / "test.jsonl")
    matched = predict(readout, toy, toy / "matched.jsonl")
    assert [line["id"] for line in matched] == [item["id"] for item in items]
    assert accuracy(matched, items) > 0.9
    array, keys = np.load(toy / "test.npy"), [item["image"] for item in items]
    write_trio(toy / "rolled", np.roll(array, 1, 0), keys, condition="shuffled", parent_sha256="0" * 64)
    (toy / "rolled.source_keys.txt").write_text("\n".join(np.roll(keys, 1)) + "\n")
    shuffled = predict(readout, toy, toy / "shuffled.jsonl", embeddings=["rolled"])
    assert accuracy(shuffled, items) < 0.4
    assert all(line["condition"] == "shuffled" for line in shuffled) and shuffled[1]["embedding_key"] == keys[0]
    assert all("embedding_key" not in line for line in matched)
    ablated = predict(readout, toy, toy / "ablated.jsonl", "--no-embedding", "--drop-soft-tokens", embeddings=())
    assert ablated[0]["condition"] == "text_only_ablated" and accuracy(ablated, items) < 0.4
    bits = [sum(line["answer_bits"] for line in group) for group in (matched, shuffled, ablated)]
    assert bits[0] < 0.5 * bits[1] and bits[0] < 0.5 * bits[2]


def test_readout_opens_with_plain_transformers_and_stays_tied(toy, readout):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(readout, dtype="float32")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    from safetensors import safe_open

    with safe_open(readout / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()
    record = td.check_readout(str(readout))
    assert {
        "format_version",
        "embedder",
        "mode",
        "dim",
        "tokens",
        "projector",
        "normalize",
        "transform",
        "template",
        "decoder",
        "arguments",
        "seed",
        "step",
        "train_items_sha256",
        "train_embeddings_sha256",
    } <= set(record)
    assert record["train_items_sha256"] == td.sha256(toy / "train.jsonl") and record["train_embeddings_sha256"] == td.sha256(
        toy / "train.meta.json"
    )
    assert not [name for name in os.listdir(readout) if name.endswith((".bin", ".pt", ".pkl", ".tmp"))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(readout)
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def weights(out):
    return {
        name: td.sha256(f"{out}/{name}")
        for folder in ("", "last/")
        for name in (f"{folder}model.safetensors", f"{folder}projector.safetensors")
    }


def without_seconds(path):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines(path)]


def test_resume_from_any_step_equals_the_unbroken_run(toy, tmp_path):
    more = ["--max-steps", "14", "--epochs", "2", "--eval-every", "5", "--save-every", "3", "--log-every", "2"]
    td.main(fit_argv(toy, tmp_path / "whole", *more))
    for stop in (1, 3, 7, 10, 13):
        out = tmp_path / f"broken{stop}"

        class Stop(Exception):
            pass

        count, learning_rate = [0], td.learning_rate

        def counted(*args):
            count[0] += 1
            if count[0] > stop:
                raise Stop
            return learning_rate(*args)

        td.learning_rate = counted
        try:
            with pytest.raises(Stop):
                td.main(fit_argv(toy, out, *more))
        finally:
            td.learning_rate = learning_rate
        assert not (out / "readout.json").exists()
        with pytest.raises(td.UserError, match="--resume"):
            td.main(fit_argv(toy, out, *more))
        td.main(fit_argv(toy, out, *more, "--resume"))
        assert weights(out) == weights(tmp_path / "whole")
        assert without_seconds(out / "metrics.jsonl") == without_seconds(tmp_path / "whole" / "metrics.jsonl")
        assert td.check_readout(str(out))["content_sha256"] != "" and set(os.listdir(out)) == set(os.listdir(tmp_path / "whole"))


def test_evaluation_frequency_accumulation_and_repetition_do_not_change_the_weights(toy, tmp_path):
    td.main(fit_argv(toy, tmp_path / "a", "--max-steps", 6))
    td.main(fit_argv(toy, tmp_path / "b", "--max-steps", 6, "--eval-every", 2, "--save-every", 1))
    assert td.sha256(tmp_path / "a/last/model.safetensors") == td.sha256(tmp_path / "b/last/model.safetensors")
    td.main(fit_argv(toy, tmp_path / "c", "--max-steps", 6, "--accumulation", 3, "--log-every", 1))
    from safetensors.torch import load_file

    a, c = load_file(tmp_path / "a/last/model.safetensors"), load_file(tmp_path / "c/last/model.safetensors")
    assert all(td.torch.allclose(a[name], c[name], atol=1e-4) for name in a)
    td.main(fit_argv(toy, tmp_path / "d", "--max-steps", 6, "--seed", 1))
    assert td.sha256(tmp_path / "a/last/model.safetensors") != td.sha256(tmp_path / "d/last/model.safetensors")


def test_finished_unfinished_changed(toy, tmp_path, capsys):
    out = tmp_path / "r"
    td.main(fit_argv(toy, out, "--max-steps", 3))
    first = capsys.readouterr()
    before = os.stat(out / "model.safetensors").st_mtime_ns
    td.main(fit_argv(toy, out, "--max-steps", 3))
    again = capsys.readouterr()
    assert json.loads(again.out) == json.loads(first.out) and "nothing to do" in again.err
    assert os.stat(out / "model.safetensors").st_mtime_ns == before
    with pytest.raises(td.UserError, match="seed: 0, now 1"):
        td.main(fit_argv(toy, out, "--max-steps", 3, "--seed", 1))
    with pytest.raises(td.UserError, match="seed: 0, now 1"):
        td.main(fit_argv(toy, out, "--max-steps", 3, "--seed", 1, "--resume"))
    td.main(fit_argv(toy, out, "--max-steps", 5, "--resume"))
    assert "the length changed" in capsys.readouterr().err
    assert td.check_readout(str(out))["summary"]["steps"] == 5
    td.main(fit_argv(toy, out, "--max-steps", 2, "--seed", 1, "--overwrite"))
    assert td.check_readout(str(out))["seed"] == 1
    assert not (tmp_path / "r.lock").exists()


def test_frozen_decoder_keeps_its_weights(toy, tmp_path):
    td.main(
        fit_argv(
            toy, tmp_path / "r", "--max-steps", 4, "--epochs", 10 ** 9, "--freeze-decoder", "--projector", "linear", "--tokens", 3, "--normalize", "standardize"
        )
    )
    from safetensors.torch import load_file

    start, end = load_file(toy / "decoder/model.safetensors"), load_file(tmp_path / "r/model.safetensors")
    assert all(td.torch.equal(start[name], end[name]) for name in start)
    assert load_file(tmp_path / "r/projector.safetensors")["projector.0.weight"].shape == (96, 12)


def test_text_only_readout(toy, tmp_path):
    td.main(fit_argv(toy, tmp_path / "text", "--max-steps", 4, "--no-embedding", embeddings=False))
    got = predict(tmp_path / "text", toy, tmp_path / "text.jsonl", "--no-embedding", embeddings=())
    assert {line["condition"] for line in got} == {"text_only"} and json.loads((tmp_path / "text.meta.json").read_text())[
        "embedder"
    ] is None
    with pytest.raises(td.UserError, match="without embeddings"):
        predict(tmp_path / "text", toy, tmp_path / "x.jsonl")
    with pytest.raises(td.UserError, match="no soft tokens"):
        predict(tmp_path / "text", toy, tmp_path / "x.jsonl", "--no-embedding", "--drop-soft-tokens", embeddings=())


def test_readout_with_embeddings_wants_them(toy, readout, tmp_path):
    with pytest.raises(td.UserError, match="with embeddings"):
        predict(readout, toy, tmp_path / "x.jsonl", "--no-embedding", embeddings=())


def test_items_that_cannot_be_trained_on_are_named(toy, tmp_path, capsys):
    items = td.read_items(toy / "train.jsonl")
    items[3] = dict(items[3], answers=[""])
    items[5] = dict(items[5], answers=["blue " * 40])
    items[8] = dict(items[8], question="word " * 120)
    write_items(tmp_path / "train.jsonl", items)
    argv = fit_argv(
        toy, tmp_path / "r", "--max-steps", 2, "--max-answer-tokens", 20, "--max-length", 100, "--train-items", tmp_path / "train.jsonl"
    )
    with pytest.raises(td.UserError) as error:
        td.main(argv)
    for text in ("train-3", "train-5", "train-8", "no answer token", "--max-answer-tokens 20", "--max-length 100"):
        assert text in str(error.value).replace("the answer has no token", "no answer token")
    td.main([*argv, "--on-long", "skip"])
    assert {line["id"] for line in lines(tmp_path / "r/skipped.jsonl")} == {"train-3", "train-5", "train-8"}
    record = td.check_readout(str(tmp_path / "r"))
    assert record["counts"]["train"]["skipped"] == 3 and record["counts"]["train"]["used"] == 157


def test_exclude_failed_and_limit_are_counted(toy, tmp_path):
    (tmp_path / "exclude.txt").write_text("train-0\ntrain-1\nnot-there\n")
    (tmp_path / "failed.jsonl").write_text(json.dumps({"id": "train-2", "error": "unreadable"}) + "\n")
    td.main(
        fit_argv(
            toy,
            tmp_path / "r",
            "--max-steps",
            2,
            "--exclude-ids",
            tmp_path / "exclude.txt",
            "--failed",
            tmp_path / "failed.jsonl",
            "--limit",
            20,
        )
    )
    counts = td.check_readout(str(tmp_path / "r"))["counts"]
    assert counts["train"] | {"supervised_tokens": 0} == {
        "items": 20,
        "failed": 1,
        "excluded": 2,
        "skipped": 0,
        "used": 17,
        "supervised_tokens": 0,
    }
    assert counts["dev"]["items"] == 20


def test_vectors_without_content_stop_the_run(toy, tmp_path, capsys):
    array, keys = np.load(toy / "train.npy"), (toy / "train.ids.txt").read_text().split()
    twice = array.copy()
    twice[7] = twice[3]
    write_trio(tmp_path / "twice", twice, keys)
    write_trio(tmp_path / "constant", np.tile(array[:1], (len(array), 1)), keys)
    for name, text in (("twice", "train/3.png and train/7.png"), ("constant", "all 160 vectors are the same")):
        argv = fit_argv(toy, tmp_path / f"r-{name}", "--max-steps", 1, "--train-embeddings", tmp_path / name)
        with pytest.raises(td.UserError, match=text):
            td.main(argv)
        td.main([*argv, "--allow-duplicate-vectors"])
    items = [dict(item, image=f"same{i // 2}.png") for i, item in enumerate(td.read_items(toy / "train.jsonl"))]
    write_items(tmp_path / "joint.jsonl", items)  # two questions on one image may share a vector
    write_trio(tmp_path / "joint", np.repeat(array[::2], 2, 0), [item["id"] for item in items], key="id", mode="visual_only")
    td.main(
        fit_argv(
            toy,
            tmp_path / "r-joint",
            "--max-steps",
            1,
            "--train-items",
            tmp_path / "joint.jsonl",
            "--train-embeddings",
            tmp_path / "joint",
            "--dev-embeddings",
            toy / "dev",
        )
    )


def test_a_step_that_is_not_finite_stops_and_keeps_the_last_checkpoint(toy, tmp_path):
    with pytest.raises(td.UserError, match=r"step \d+: loss .*train-\d+"):
        td.main(fit_argv(toy, tmp_path / "r", "--max-steps", 10, "--lr-decoder", "1e30", "--warmup", 0, "--clip", 0))
    assert not (tmp_path / "r/readout.json").exists()
    state = json.loads((tmp_path / "r/resume/checkpoint.json").read_text())
    assert state["step"] == 1 and td.check_readout(str(tmp_path / "r/resume" / state["folder"]))


@pytest.mark.parametrize(
    "field, value",
    [
        ("embedder", "other"),
        ("mode", "vl_joint"),
        ("normalized", False),
        ("weights_sha256", "ab"),
        ("prompt", "x"),
        ("pooling", "last"),
        ("dim", 11),
    ],
)
def test_vectors_of_another_kind_are_refused(toy, readout, tmp_path, field, value):
    array, keys = np.load(toy / "test.npy"), (toy / "test.ids.txt").read_text().split()
    write_trio(tmp_path / "other", array[:, :11] if field == "dim" else array, keys, **{field: value})
    with pytest.raises(td.UserError, match=f"{field}: expected"):
        predict(readout, toy, tmp_path / "x.jsonl", embeddings=[tmp_path / "other"])
    with pytest.raises(td.UserError, match=f"{field}:"):
        td.main(fit_argv(toy, tmp_path / "r", "--dev-embeddings", tmp_path / "other", "--dev-items", toy / "test.jsonl"))


def test_missing_keys_and_edited_items_are_named(toy, readout, tmp_path):
    array, items = np.load(toy / "test.npy"), td.read_items(toy / "test.jsonl")
    write_trio(tmp_path / "short", array[2:], [item["image"] for item in items[2:]])
    with pytest.raises(td.UserError, match="2 of 48 items .*test/0.png, test/1.png"):
        predict(readout, toy, tmp_path / "x.jsonl", embeddings=[tmp_path / "short"])
    more = ["--failed", tmp_path / "failed.jsonl"]
    (tmp_path / "failed.jsonl").write_text("".join(json.dumps({"id": f"test-{i}", "error": "torn image"}) + "\n" for i in (0, 1)))
    got = predict(readout, toy, tmp_path / "x.jsonl", *more, embeddings=[tmp_path / "short"])
    assert got[0] == {
        "id": "test-0",
        "prediction": None,
        "condition": "matched",
        "answer_bits": None,
        "answer_tokens": None,
        "error": "torn image",
    }
    assert got[2]["prediction"] and json.loads((tmp_path / "x.meta.json").read_text())["failed"] == 2
    write_trio(tmp_path / "joint", array, [item["id"] for item in items], key="id", mode="vl_joint", items_sha256="0" * 64)
    with pytest.raises(td.UserError, match="edited after extraction"):
        predict(readout, toy, tmp_path / "y.jsonl", embeddings=[tmp_path / "joint"])


# ---- predict ----


def test_batched_equals_single_equals_transformers_generate(toy, readout, tmp_path):
    import torch
    import transformers

    batched = predict(readout, toy, tmp_path / "many.jsonl")
    single = predict(readout, toy, tmp_path / "one.jsonl", "--batch-size", 1)
    assert [line["prediction"] for line in batched] == [line["prediction"] for line in single]
    assert np.allclose([line["answer_bits"] for line in batched], [line["answer_bits"] for line in single], atol=1e-4)
    model, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(readout, dtype="float32").eval(), td.load_tokenizer(str(readout))
    projector, steps = td.load_projector(str(readout), td.check_readout(str(readout)), 32)
    items, array = td.read_items(toy / "test.jsonl"), np.load(toy / "test.npy")
    examples = td.encode_items(items, tokenizer, TEMPLATE, 1)
    for i in range(0, 48, 7):
        ids = torch.from_numpy(examples.tokens[examples.starts[i] : examples.starts[i + 1]].astype(np.int64))[None]
        with torch.no_grad():
            embeds = td.embed(
                model, projector, ids, torch.from_numpy(td.apply_steps(array[i : i + 1], steps)), torch.tensor([examples.soft_at])
            )
            n = examples.prompts[i]
            nats = torch.nn.functional.cross_entropy(model(inputs_embeds=embeds).logits[0, n - 1 : -1], ids[0, n:], reduction="sum")
            text = tokenizer.decode(
                model.generate(inputs_embeds=embeds[:, :n], max_new_tokens=12, do_sample=False)[0], skip_special_tokens=True
            )
        assert abs(float(nats) / np.log(2) - batched[i]["answer_bits"]) < 1e-4 and batched[i]["answer_tokens"] == ids.shape[1] - n
        assert text == batched[i]["prediction"]


def test_several_outputs_in_one_call_equal_one_at_a_time(toy, readout, tmp_path, capsys):
    zero = np.zeros_like(np.load(toy / "test.npy"))
    write_trio(tmp_path / "zero", zero, (toy / "test.ids.txt").read_text().split(), condition="zero", parent_sha256="0" * 64)
    outs = [tmp_path / "m.jsonl", tmp_path / "z.jsonl"]
    predict(readout, toy, outs, embeddings=["test", tmp_path / "zero"])
    assert [line["condition"] for line in json.loads(capsys.readouterr().out)] == ["matched", "zero"]
    for out, prefix in zip(outs, ["test", tmp_path / "zero"]):
        predict(readout, toy, tmp_path / f"alone-{out.name}", embeddings=[prefix])
        assert out.read_bytes() == (tmp_path / f"alone-{out.name}").read_bytes()
    predict(readout, toy, tmp_path / "named.jsonl", "--condition", "my_name")
    assert lines(tmp_path / "named.jsonl")[0]["condition"] == "my_name"


def test_predict_continues_and_refuses(toy, readout, tmp_path, monkeypatch, capsys):
    whole = predict(readout, toy, tmp_path / "whole.jsonl", "--batch-size", 8)
    real, count = td.predict_batch, [0]

    def stopped(*args):
        count[0] += 1
        if count[0] > 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(td, "predict_batch", stopped)
    out = tmp_path / "broken.jsonl"
    with pytest.raises(KeyboardInterrupt):
        predict(readout, toy, out, "--batch-size", 8)
    partial = tmp_path / "broken.jsonl.partial"
    assert not out.exists() and len(lines(partial)) == 1 + 24
    partial.write_bytes(partial.read_bytes()[:-9])  # torn in the last line
    with pytest.raises(td.UserError, match="batch_size: 8, now 4|other inputs or flags"):
        predict(readout, toy, out, "--batch-size", 4)
    monkeypatch.setattr(td, "predict_batch", lambda *args: (count.__setitem__(0, count[0] + 1), real(*args))[1])
    count[0] = 0
    predict(readout, toy, out, "--batch-size", 8)
    assert count[0] == 4 and out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes() and not partial.exists()
    predict(readout, toy, out, "--batch-size", 8)  # finished: nothing to do
    assert count[0] == 4 and "already there" in capsys.readouterr().err
    with pytest.raises(td.UserError, match="limit: None, now 5"):
        predict(readout, toy, out, "--batch-size", 8, "--limit", 5)
    assert len(predict(readout, toy, out, "--limit", 5, "--overwrite")) == 5
    out.write_text(out.read_text().replace("test-1", "test-x"))
    with pytest.raises(td.UserError, match="SHA-256"):
        predict(readout, toy, out, "--limit", 5)
    assert whole


def test_damage_is_found_before_use(toy, readout, tmp_path):
    for name, message in (
        ("model.safetensors", "model.safetensors"),
        ("projector.safetensors", "projector.safetensors"),
        ("readout.json", "readout.json"),
        ("tokenizer.json", "tokenizer.json"),
        ("config.json", "config.json"),
    ):
        copy = tmp_path / name.replace(".", "-")
        shutil.copytree(readout, copy, ignore=shutil.ignore_patterns("resume", "last"))
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(td.UserError, match=message):
            predict(copy, toy, tmp_path / "x.jsonl")
    out = tmp_path / "r"
    td.main(fit_argv(toy, out, "--max-steps", 2))
    os.remove(out / "readout.json")
    for path in (
        out / "resume/checkpoint.json",
        out / "resume/step-00000002/optimizer.safetensors",
        out / "resume/step-00000002/model.safetensors",
    ):
        content = path.read_bytes()
        os.remove(path)  # the published file may share the bytes
        path.write_bytes(content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :])
        with pytest.raises(td.UserError, match=f"{path.name}|{path.parent.name}"):
            td.main(fit_argv(toy, out, "--max-steps", 2, "--resume"))
        path.write_bytes(content)


def test_two_at_once_and_a_foreign_folder(toy, readout, tmp_path):
    with td.locked(str(tmp_path / "r")):
        with pytest.raises(td.UserError, match="another process is writing it"):
            td.main(fit_argv(toy, tmp_path / "r", "--max-steps", 1))
    with td.locked(str(tmp_path / "p.jsonl")):
        with pytest.raises(td.UserError, match="another process is writing it"):
            predict(readout, toy, tmp_path / "p.jsonl")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("mine")
    with pytest.raises(td.UserError, match="thesis.tex"):
        td.main(fit_argv(toy, tmp_path / "full", "--max-steps", 1))
    with pytest.raises(td.UserError, match="decoder's own folder"):
        td.main(fit_argv(toy, toy / "decoder", "--max-steps", 1))


def test_model_folders_that_must_not_be_opened(toy, tmp_path):
    torch = td.torch

    def folder(name):
        shutil.copytree(toy / "decoder", tmp_path / name)
        return tmp_path / name

    pickled = folder("pickled")
    from safetensors.torch import load_file

    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    os.remove(pickled / "model.safetensors")
    remote = folder("remote")
    config = json.loads((remote / "config.json").read_text()) | {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    }
    (remote / "config.json").write_text(json.dumps(config))
    (remote / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    torn = folder("torn")
    content = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(content[:-100])
    short = folder("short")
    tensors = load_file(short / "model.safetensors")
    from safetensors.torch import save_file

    save_file({name: value for name, value in tensors.items() if "layers.1.mlp" not in name}, short / "model.safetensors", {"format": "pt"})
    for name in ("pickled", "remote", "torn", "short", "absent"):
        argv = fit_argv(toy, tmp_path / "r", "--max-steps", 1)
        argv[argv.index("--decoder") + 1] = str(tmp_path / name)
        with pytest.raises(td.UserError, match=name):
            td.main(argv)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "r" / "resume" / "checkpoint.json").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["fit", "--train-items", "a", "--dev-items", "b", "--decoder", "c", "--out", "d"],
        ["fit", "--train-items", "a", "--dev-items", "b", "--decoder", "c", "--out", "d", "--no-embedding", "--freeze-decoder"],
        ["fit", "--train-items", "a", "--dev-items", "b", "--decoder", "c", "--out", "d", "--no-embedding", "--transform", "int9"],
        ["fit", "--train-items", "a", "--dev-items", "b", "--decoder", "c", "--out", "d", "--no-embedding", "--epoch", "2"],
        ["fit", "--train-items", "a", "--dev-items", "b", "--decoder", "c", "--out", "d", "--no-embedding", "--resume", "--overwrite"],
        ["fit", "--train-items", "a", "--dev-items", "b", "--decoder", "c", "--out", "d", "--no-embedding", "--seed", str(2 ** 32)],
        ["fit", "--train-items", "a", "--dev-items", "b", "--decoder", "c", "--out", "d", "--no-embedding", "--exclude-ids", ""],
        ["fit", "--train-items", "a", "--dev-items", "b", "--decoder", "c", "--out", "d", "--no-embedding", "--accumulation", "9" * 20],
        ["predict", "--readout", "a", "--items", "b", "--out", "c", "--embeddings", "d", "--max-new-tokens", "9" * 20],
        ["predict", "--readout", "a", "--items", "b", "--out", "c", "--embeddings", "d", "--condition", "matched "],
        ["predict", "--readout", "a", "--items", "b", "--out", "c"],
        ["predict", "--readout", "a", "--items", "b", "--out", "c", "--embeddings", "d", "e"],
        ["predict", "--readout", "a", "--items", "b", "--out", "c", "c", "--embeddings", "d", "e"],
        ["predict", "--readout", "a", "--items", "b", "--out", "c", "--embeddings", "d", "--drop-soft-tokens"],
    ],
)
def test_wrong_command_lines_end_with_status_2(argv, capsys):
    with pytest.raises(SystemExit) as error:
        td.parse_args(argv)
    assert error.value.code == 2 and "usage" in capsys.readouterr().err


# ---- processes: torch is imported once, then each attempt is a fork ----

DRIVER = '''
import importlib.util, json, os, pathlib, random, resource, shutil, signal, socket, sys, threading, time, traceback
script, toy, here, seed, kills = sys.argv[1:4] + [int(sys.argv[4]), int(sys.argv[5])]
spec = importlib.util.spec_from_file_location("train_decoder_script", script)
td = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = td
spec.loader.exec_module(td)
td.load_libraries()
td.torch.set_num_threads(1)
random.seed(seed)
FIT = f"fit --train-items {toy}/train.jsonl --train-embeddings {toy}/train --dev-items {toy}/dev.jsonl --dev-embeddings {toy}/dev".split()
FIT += f"--decoder {toy}/decoder --batch-size 16 --lr-decoder 3e-3 --eval-every 4 --save-every 1 --log-every 1 --max-steps".split()
PREDICT = f"predict --readout {toy}/readout --items {toy}/test.jsonl --embeddings {toy}/test --batch-size 2 --max-new-tokens 8".split()


def fork(*argv, rank=0, world=1, port=0, size=None):
    pid = os.fork()
    if pid:
        return pid
    td.tqdm.set_lock(threading.RLock())                 # its own is shared by all forks: one killed while it held it stops all others
    file = os.open(f"{here}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1), os.dup2(file, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if size:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    code = 99
    try:
        td.run(lambda: td.main(list(argv)), "HINT")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def log(rank=0):
    return pathlib.Path(f"{here}/log{rank}").read_text()


def ranks(world, *argv):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    codes = [wait(pid) for pid in [fork(*argv, rank=rank, world=world, port=port) for rank in range(world)]]
    assert codes == [0] * world, log(0) + log(1)


def weights(out):
    return [td.sha256(f"{out}/{name}") for name in ("model.safetensors", "projector.safetensors", "last/model.safetensors")]


def whole_files(out):
    # nothing under a final name is partial
    if os.path.exists(f"{out}/readout.json"):
        td.check_readout(out)
    if os.path.exists(f"{out}/resume/checkpoint.json"):
        td.check_readout(os.path.join(out, "resume", td.read_json(f"{out}/resume/checkpoint.json")["folder"]))


def kill_fit():
    began = time.time()
    assert wait(fork(*FIT, "8", "--out", f"{here}/whole")) == 0, log()
    length, out, killed, finished = time.time() - began, f"{here}/out", 0, 0
    while killed < kills:
        pid = fork(*FIT, "8", "--out", out, "--resume")
        time.sleep(random.random() * length * 0.6)
        os.kill(pid, signal.SIGKILL)
        code = wait(pid)
        assert code in (0, -9), log()
        killed += code == -9
        whole_files(out)
        if os.path.exists(f"{out}/readout.json"):
            finished += 1
            assert weights(out) == weights(f"{here}/whole")
            shutil.rmtree(out)
    assert wait(fork(*FIT, "8", "--out", out, "--resume")) == 0, log()
    assert weights(out) == weights(f"{here}/whole")
    left = [str(path) for path in pathlib.Path(out).rglob("*") if path.name.endswith(".tmp")]
    assert not left, left
    return {"killed": killed, "finished": finished}


def kill_predict():
    began = time.time()
    assert wait(fork(*PREDICT, "--out", f"{here}/whole.jsonl")) == 0, log()
    length, out, meta, killed = time.time() - began, pathlib.Path(f"{here}/out.jsonl"), pathlib.Path(f"{here}/out.meta.json"), 0
    whole = pathlib.Path(f"{here}/whole.jsonl").read_bytes()
    while killed < kills:
        pid = fork(*PREDICT, "--out", str(out))
        time.sleep(random.random() * length * 0.6)
        os.kill(pid, signal.SIGKILL)
        code = wait(pid)
        assert code in (0, -9), log()
        killed += code == -9
        assert not out.exists() or out.read_bytes() == whole
        if meta.exists():
            for path in (out, meta, pathlib.Path(f"{out}.partial")):
                path.unlink(missing_ok=True)
    assert wait(fork(*PREDICT, "--out", str(out))) == 0, log()
    assert out.read_bytes() == whole and not list(pathlib.Path(here).glob("out.*.tmp"))
    return {"killed": killed}


def curve(out):
    with open(f"{out}/metrics.jsonl") as file:
        return [(line["loss"], line["gradient_norm"], line.get("dev_loss", 0.0)) for line in map(json.loads, file)]


def gap(a, b):
    pairs = list(zip(curve(f"{here}/{a}"), curve(f"{here}/{b}"), strict=True))
    return max(abs(x - y) for left, right in pairs for x, y in zip(left, right))


def several_ranks():
    ranks(2, *FIT, "5", "--out", f"{here}/two", "--accumulation", "2")
    ranks(3, *FIT, "5", "--out", f"{here}/three", "--batch-size", "2")         # a rank without items
    assert wait(fork(*FIT, "5", "--out", f"{here}/one")) == 0, log()
    assert wait(fork(*FIT, "5", "--out", f"{here}/small", "--batch-size", "2")) == 0, log()
    return {"two": gap("one", "two"), "three": gap("small", "three")}


def limits():
    for size in (3_000, 60_000):
        out = f"{here}/full{size}"
        assert wait(fork(*FIT, "3", "--out", out, size=size)) == 1, log()
        assert "cannot write" in log() and "bytes free" in log() and "Traceback" not in log(), log()
        whole_files(out)
        assert wait(fork(*FIT, "3", "--out", out, "--resume")) == 0, log()
    assert wait(fork(*PREDICT, "--out", f"{here}/p.jsonl", size=2_000)) == 1 and "cannot write" in log(), log()
    assert not os.path.exists(f"{here}/p.jsonl")
    assert wait(fork(*PREDICT, "--out", f"{here}/p.jsonl")) == 0, log()
    pid = fork(*FIT, "8", "--out", f"{here}/interrupted")
    while not os.path.exists(f"{here}/interrupted/resume/checkpoint.json"):
        time.sleep(0.02)
    os.kill(pid, signal.SIGINT)
    assert wait(pid) == 130 and "interrupted. HINT" in log(), log()
    assert wait(fork(*FIT, "8", "--out", f"{here}/interrupted", "--resume")) == 0, log()
    return {}


# once in this process, so that no fork has to import what torch and transformers load late
td.main([*FIT, "1", "--out", f"{here}/warm"])
td.main([*PREDICT, "--limit", "2", "--out", f"{here}/warm.jsonl"])
results = {}
for task in (kill_fit, kill_predict, several_ranks, limits):
    began = time.time()
    try:
        results[task.__name__] = task() | {"seconds": round(time.time() - began, 1)}
    except Exception:
        results[task.__name__] = {"error": traceback.format_exc()}
print(json.dumps(results))
'''
KILLS = int(os.environ.get("KILLS", 6))                 # KILLS=30 for the full attack


@pytest.fixture(scope="module")
def attacks(toy, readout, tmp_path_factory):
    """Results of the tasks above, in one process, with the seed printed; SEED=n repeats a run."""
    seed = os.environ.get("SEED") or str(int.from_bytes(os.urandom(3), "big"))
    print(f"attacks: SEED={seed} KILLS={KILLS}")
    folder = tmp_path_factory.mktemp("attacks")
    argv = [sys.executable, "-c", DRIVER, str(ROOT / "train_decoder.py"), str(toy), str(folder), seed, str(KILLS)]
    more = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(argv, capture_output=True, text=True, timeout=1500, env=os.environ | more)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    print(result.stdout)
    return json.loads(result.stdout.splitlines()[-1])


def result_of(attacks, task):
    assert "error" not in attacks[task], attacks[task].get("error")
    return attacks[task]


@pytest.mark.kills
def test_killed_fits_end_in_the_same_bytes(attacks):
    assert result_of(attacks, "kill_fit")["killed"] == KILLS


@pytest.mark.kills
def test_killed_predictions_end_in_the_same_bytes(attacks):
    assert result_of(attacks, "kill_predict")["killed"] == KILLS


def test_ranks_and_micro_steps_give_the_same_loss_curve(attacks):
    gaps = result_of(attacks, "several_ranks")
    assert gaps["two"] < 1e-5 and gaps["three"] < 1e-5, gaps


def test_full_disk_and_interruption(attacks):
    result_of(attacks, "limits")
