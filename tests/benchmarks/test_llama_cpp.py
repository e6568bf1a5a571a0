"""`benchmarks.llama_cpp` with a stand-in for llama-server: its start, its requests, its end."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.llama_cpp import LlamaServer, line, measure
from benchmarks.workloads import Workload

STAND_IN = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert {"--model", "--host", "--threads", "--parallel", "--ctx-size"} <= flags.keys()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"status": "ok"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/completion" and asked["ignore_eos"] and not asked["cache_prompt"]
        short = asked["prompt"][0] == 99
        self.answer({"tokens_predicted": asked["n_predict"] - short})

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


def test_both_sides_get_the_same_prompts_in_turn(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(STAND_IN)
    theirs = LlamaServer(f"{sys.executable} {program}", tmp_path / "model.gguf", 2, 64, 1)
    prompts: list[list[list[int]]] = []

    def run(ids: list[list[int]], output_len: int) -> Any:
        prompts.append(ids)
        return 2.0

    try:
        workload = Workload("W", num_streams=2, own_len=4, output_len=3)
        engine: Any = SimpleNamespace(run=run)
        rates = measure(engine, theirs, [workload], 64, 2)["W"]
        assert len(rates) == 2 and len(prompts) == 3 and len({str(ids) for ids in prompts}) == 3
        assert all(own == 3.0 and other > 0 for own, other in rates)
        with pytest.raises(RuntimeError, match="answered 2 tokens, not 3"):
            theirs.run([[99, 1]], 3)
    finally:
        theirs.close()
    assert theirs._process.returncode is not None
    shown = line("Q4_0", workload, [(4.0, 2.0), (6.0, 2.0)])
    assert "ours      5.0" in shown and "ratio 2.50 (2.00 to 3.00)" in shown


def test_a_program_that_ends_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"nothing\.py.*did not start"):
        LlamaServer(f"{sys.executable} {tmp_path / 'nothing.py'}", tmp_path / "model.gguf", 1, 64, 1)
