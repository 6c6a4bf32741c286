"""results/report.py on a small run folder of the demo's layout: figures, words, escaping, order statistics, and the page in a real browser."""
import base64
import csv
import hashlib
import importlib.util
import itertools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
VECTORS = {"joint": ("qwen3-vl-embedding-2b", "vl_joint"), "visual": ("qwen3-vl-embedding-2b", "visual_only"), "clip": ("clip", "visual_only")}
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
    words = ["train_decoder.py", "predict", "--readout", f"runs/readouts/{name}", "--items", "items/test.jsonl", "--out", f"runs/controls/{name}/{condition}.jsonl"]
    meta = {"format_version": 1, "embedder": embedder, "mode": mode, "condition": condition, "readout_sha256": hashlib.sha256(name.encode()).hexdigest(),
            "items_sha256": sha256(items_path), "limit": None, "command": words, "device": "cpu", "versions": {"torch": "2.13.0"}, "seconds": 1.5,
            "embeddings": {"model": f"models/{name}", "dim": 192, "weights_sha256": hashlib.sha256(b"w").hexdigest()}, "predictions_sha256": sha256(path)}
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
                answers.append(gold if rng.random() < chances[DOMAINS.index(item["domain"])] else wrong.get(gold, rng.choice(("A", "no", "blue", "17", "MOT"))))
            write_predictions(folder, folder / "items/test.jsonl", items, name, condition, answers)
    return score(folder, "runs/controls/*/*.jsonl")


def score(folder, pattern, out="scores"):
    done = subprocess.run([sys.executable, str(ROOT / "evaluate.py"), "--items", "items/test.jsonl", "--predictions", pattern, "--out", out,
                           "--bootstrap", "1000"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def run_report(folder, *words, status=0):
    done = subprocess.run([sys.executable, str(ROOT / "results/report.py"), *map(str, words)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == status, done.stderr + done.stdout
    return done.stdout, done.stderr


# ---------------------------------------------------------------- the page in a real browser, over the DevTools pipe (no package needed)
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync "
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
            if not select.select([self.into], [], [], 120)[0]:
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
        x, y = self.value(f"(() => {{ const e = {expression}; e.scrollIntoView({{block: 'center', inline: 'center'}}); const b = e.getBoundingClientRect(); "
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
