"""The live page: no external resources, valid JavaScript, and a run in Node.js on a stub document."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import torch

from moe_engine.parallel.recording.config import RecorderConfig
from moe_engine.parallel.recording.recorder import ExpertRecorder
from moe_engine.server.live_pages import POLICY, page

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")

STUBS = """
const elements = {}, listeners = {}, pending = [];
const context = { createImageData: (w, h) => ({ data: new Uint8ClampedArray(4 * w * h) }), fillRect() {},
                  putImageData(image) { elements.map.image = image; } };
const make = id => ({ id, value: "0", style: {}, textContent: "", getContext: () => context,
  addEventListener: (name, call) => { listeners[`${id} ${name}`] = call; },
  append() {}, replaceChildren() {}, setAttribute() {},
  getBoundingClientRect: () => ({ left: 0, top: 0, width: 100, height: 100 }) });
globalThis.document = { getElementById: id => elements[id] ??= make(id), createElement: make };
globalThis.window = { innerHeight: 800 };
globalThis.sessionStorage = { getItem: () => null, setItem() {} };
globalThis.setTimeout = call => pending.push(call);
let time = 1000;
Date.now = () => 1000 * time;
const answers = ANSWERS, asked = [];
globalThis.fetch = async (url, options) => {
  asked.push(url);
  const gain = { rows: [], ranks: [], planned: [] };
  if (url === "experts/gain") return { ok: true, status: 200, json: async () => gain };
  const answer = answers.shift();
  if (typeof answer === "number") return { ok: false, status: answer };
  return { ok: true, status: 200, json: async () => answer };
};
"""
DRIVE = """
(async () => {
  const seen = [];
  for (let i = 0; i < STEPS; i++) {
    await new Promise(done => setImmediate(done));
    seen.push(Object.fromEntries(["state", "pass", "choices", "imbalance", "balance", "trouble", "empty-command"]
      .map(id => [id, String(elements[id].textContent)])));
    time += 31;
    elements.window.value = "30";
    pending.shift()();
  }
  await new Promise(done => setImmediate(done));
  listeners["map pointermove"]({ target: elements.map, clientX: 99, clientY: 1 });
  console.log(JSON.stringify({ seen, asked, under: elements.under.textContent, width: elements.map.width,
                               height: elements.map.height, hidden: elements.ask.hidden }));
})();
"""


def script() -> str:
    found = re.findall(r"<script>(.*?)</script>", page("experts_live"), re.DOTALL)
    assert len(found) == 1
    return found[0]


def run(code: str) -> str:
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_page_needs_nothing_from_elsewhere():
    text = page("experts_live")
    assert not re.findall(r"https?:|//\w+\.|<link|@import|<img|\bsrc=", text)
    assert "prefers-color-scheme: dark" in text and "<!doctype html>" in text
    assert "innerHTML" not in text and "default-src 'none'" in POLICY


@needs_node
def test_numbers_of_the_page():
    checks = """
    const assert = require("assert");
    assert.deepStrictEqual(color(0), STOPS[0]);
    assert.deepStrictEqual(color(7), STOPS[4]);
    assert.deepStrictEqual(difference([[3, 5]], [[1, 5]]), [[2, 0]]);
    assert.strictEqual(difference([[3, 5]], [[4, 5]]), null);
    const layers = busyLayers([[0, 0], [3, 1], [2, 2]]);
    assert.deepStrictEqual(layers.map(entry => entry.layer), [1, 2]);
    assert.strictEqual(imbalance(layers), 1.25);
    assert.strictEqual(scaleTop([]), 2);
    const history = new History();
    for (const [time, count] of [[0, 1], [20, 5], [40, 9], [60, 12]]) history.add(time, [[count]]);
    assert.deepStrictEqual(history.since(30), [[7]]);
    assert.deepStrictEqual(history.since(0), [[12]]);
    history.add(61, [[2]]);
    assert.deepStrictEqual(history.since(30), [[2]]);
    """
    run(script() + checks)


@needs_node
def test_the_page_shows_what_a_recorder_says(tmp_path):
    """The page shows the recorder's snapshots, given as JSON."""
    config = RecorderConfig("stat", 3, 4, 4, tmp_path, top_k=2, ep_size=2, report_balancedness=True)
    recorder = ExpertRecorder(config)
    launch = {"model": "m", "ranks": 2, "nodes": 1, "redundant_experts": 0, "eplb": False, "version": "1"}
    answers: list[object] = [{**recorder.snapshot(), "launch": launch}, 401]
    recorder.start()
    for number, chosen in enumerate(([[0, 1], [0, 2]], [[3, 0]])):
        recorder.begin_pass(number)
        recorder.on_select(1, torch.tensor(chosen))
        recorder.end_pass()
        answers.append({**recorder.snapshot(), "launch": launch})
    answers.append(500)
    code = STUBS.replace("ANSWERS", json.dumps(answers)) + script() + DRIVE.replace("STEPS", str(len(answers) - 1))
    found = json.loads(run(code))
    off, locked, first, second = found["seen"]
    assert off["state"] == "off" and off["pass"] == "–" and "start_expert_distribution_record" in off["empty-command"]
    assert "API key" in locked["trouble"]
    assert first["state"] == "on" and first["pass"] == "0" and first["choices"] == "4" and first["imbalance"] == "2.00"
    assert first["balance"].startswith("last: 0.8") and "1000" in first["balance"]
    assert second["pass"] == "1" and second["choices"] == "2" and second["trouble"] == "", "the last 30 s alone"
    assert [url for url in found["asked"] if url != "experts/gain"] == ["experts/data"] * len(answers)
    assert "experts/gain" in found["asked"], "what EPLB would gain"
    place = "on rank 1 with the experts in order"
    assert found["under"] == f"layer 1, expert 3: 1 tokens, 2.00 times the mean, 50.00 % of the layer, {place}"
    assert (found["width"], found["height"], found["hidden"]) == (4, 1, True)
