"""Calls on all ranks over HTTP while clients stream: block FP8, speculation, overlap, chunks and the prefix cache."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from moe_engine.parallel.recording.config import DIRECTORY_VARIABLE
from tests.e2e.server_process import ServerProcess, runs
from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import dequantized_copy, write_tensors
from tests.models.fp8 import quantize_fp8
from tests.speculation.agreeing import agreeing_checkpoint
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(1)]

PROMPTS = [[7, 8, 9, 10, 11, 12, 13, 14] + [20 + i] * (1 + 5 * i) for i in range(4)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLING = GREEDY | {"max_new_tokens": 16}
ALONE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_total_tokens": 512, "max_running_requests": 4}
FLAGS = [
    *("--dtype", "float32", "--max-total-tokens", "4096", "--max-running-requests", "16", "--cpu-threads", "1"),
    *("--skip-tokenizer-init", "--weight-version", "old", "--chunked-prefill-size", "16"),
]
DRAFTS = ["--speculative-algorithm", "NEXTN", "--expert-distribution-recorder-mode", "stat"]
DP = ["--tp-size", "2", "--attn-dp-size", "2"]
FORMS = {
    "one rank": (1, DRAFTS),
    "tp2": (2, ["--tp-size", "2", *DRAFTS]),
    "dp2": (2, [*DP, *DRAFTS]),
    "ep2": (2, [*DP, "--moe-a2a-backend", "allgather", *DRAFTS]),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints in block FP8; the folders with `-plain` have the dequantized weights, for the expected tokens."""
    folder = tmp_path_factory.mktemp("rank-calls")
    for seed, name in enumerate(("old", "new")):
        path = agreeing_checkpoint("deepseek_v3", folder / name, 60 + seed, num_mtp_layers=1)
        write_tensors(path, quantize_fp8(load_file(path / "model.safetensors")))
        config = json.loads((path / "config.json").read_text())
        method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
        dequantized_copy(path, folder / f"{name}-plain")
    return {name: folder / name for name in ("old", "new")}


def tokens_of(http: httpx.Client, number: int) -> tuple[str, list[int]]:
    """Version and tokens of a streamed answer."""
    body = {"input_ids": PROMPTS[number], "sampling_params": SAMPLING, "stream": True}
    last: dict[str, Any] = {}
    with http.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line[6:])
    assert "meta_info" in last, last
    return last["meta_info"]["weight_version"], last["output_ids"]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    found = {}
    for name, path in checkpoints.items():
        engine = InProcessEngine(f"{path}-plain", tmp_path_factory.mktemp("alone") / "board", **ALONE)
        answers = engine.run([Scripted(str(i), prompt, 16, sampling=GREEDY) for i, prompt in enumerate(PROMPTS)])
        engine.close()
        found[name] = [answers[str(i)].token_ids for i in range(len(PROMPTS))]
    return found


class Clients:
    """Clients that stream until the end of the block; `answers` are their answers."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self._ending = server, threading.Event()
        self.answers: list[tuple[int, str, list[int]]] = []

    def __enter__(self) -> Clients:
        self._pool = concurrent.futures.ThreadPoolExecutor(len(PROMPTS))
        self._clients = [self._pool.submit(self._run, number) for number in range(len(PROMPTS))]
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for client in self._clients:
            client.result(120)

    def _run(self, number: int) -> None:
        with self._server.client() as http:
            while not self._ending.is_set():
                self.answers.append((number, *tokens_of(http, number)))


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form == "ep2" else pytest.mark.exhaustive) for form in FORMS]
)
def test_calls_over_http_under_load(
    checkpoints: dict[str, Path],
    expected: dict[str, list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    """The other forms: tests/distributed/engine/test_weight_updates.py."""
    ranks, more = FORMS[form]
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "dumps"))
    flags = [*FLAGS, "--model-path", str(checkpoints["old"]), *more]
    with ServerProcess(tmp_path, *flags) as server, server.client() as http, Clients(server) as clients:

        def ask(path: str, **body: Any) -> httpx.Response:
            response = http.post(path, json=body)
            assert response.status_code == 200, response.text
            return response

        ask("/start_expert_distribution_record")
        started = ask("/start_profile", output_dir=str(tmp_path / "traces"), profile_id="p").text.splitlines()[1:]
        assert http.post("/start_profile", json={}).status_code == 400
        before = len(clients.answers)
        until(lambda: http.get("/health").raise_for_status() and len(clients.answers) >= before + 4)
        ask("/dump_expert_distribution_record")
        assert len(list((tmp_path / "dumps").glob("expert_distribution_recorder_*.pt"))) == 1
        stopped = ask("/stop_profile").text.splitlines()[1:]
        assert http.post("/stop_profile", json={}).status_code == 400
        updated = ask("/update_weights_from_disk", model_path=str(checkpoints["new"]), weight_version="new")
        assert updated.json()["success"] is True
        info = http.get("/model_info").json()
        assert (info["model_path"], info["weight_version"]) == (str(checkpoints["new"]), "new")
        before = len(clients.answers)
        until(lambda: http.get("/health").raise_for_status() and len(clients.answers) >= before + 4)
    assert started == stopped == [str(tmp_path / "traces" / f"p-TP-{rank}.trace.json.gz") for rank in range(ranks)]
    for path in map(Path, stopped):
        names = [event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
        assert any(str(name).startswith("step ") for name in names), path
    for number, version, tokens in clients.answers:
        assert tokens == expected[version][number], (form, version, number)
    assert {version for _, version, _ in clients.answers} == {"old", "new"}


def follower_of(server: ServerProcess) -> psutil.Process:
    (found,) = [child for child in server.children() if runs(child, "rank_main")]
    return found


@pytest.fixture
def two_ranks(checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, *FLAGS, "--model-path", str(checkpoints["old"]), "--tp-size", "2") as server:
        yield server


def test_a_rank_that_dies_during_an_update_ends_the_engine_with_its_name(
    checkpoints: dict[str, Path], two_ranks: ServerProcess
) -> None:
    """The update waits for a stopped rank, which is then killed."""
    follower = follower_of(two_ranks)
    with two_ranks.client() as http, concurrent.futures.ThreadPoolExecutor(1) as pool:
        follower.suspend()
        update = pool.submit(http.post, "/update_weights_from_disk", json={"model_path": str(checkpoints["new"])})
        with pytest.raises(concurrent.futures.TimeoutError):
            update.result(0.5)
        follower.kill()
        try:
            response = update.result(60)
        except httpx.TransportError:  # the server has ended
            response = None
    assert response is None or (response.status_code == 503 and "TP1" in response.text), response
    assert two_ranks.process.wait(180) == 1 and "TP1" in two_ranks.log
