"""A model from outside the engine over HTTP: an installed package adds an architecture whose layers have a state for
each request. One and two replicas, more requests than rows, clients that disconnect."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.server_process import ServerProcess
from tests.engine.test_states import check
from tests.models import ema

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--dtype", "float32", "--device", "cpu", "--cpu-threads", "1", "--max-total-tokens", "300",
    "--max-running-requests", "4", "--chunked-prefill-size", "16",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Installs the package: the command and its processes find the entry point."""
    installed = tmp_path_factory.mktemp("packages")
    package = installed / "ema-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: ema\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[moe_engine.models]\nema = tests.models.ema:register\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(installed), str(ROOT)]))
        yield ema.make_ema_checkpoint("qwen3", tmp_path_factory.mktemp("model"), random.randrange(2**31))


@pytest.mark.parametrize("replicas", ["1", pytest.param("2", marks=pytest.mark.exhaustive)])
def test_answers_equal_a_recomputation(checkpoint: Path, tmp_path: Path, replicas: str) -> None:
    model, rng = ema.reference(checkpoint), random.Random(random.randrange(2**31))
    prompts = [[rng.randrange(250) for _ in range(rng.choice([1, 15, 17, 60]))] for _ in range(24)]
    with ServerProcess(tmp_path, "--model-path", str(checkpoint), "--dp-size", replicas, *FLAGS) as server:
        assert "State cache is allocated. #requests: 4" in server.log and "request states" in server.log
        with server.client() as client, ThreadPoolExecutor(16) as threads:

            def ask(i: int) -> Any:
                sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 40}
                body = {"input_ids": prompts[i], "sampling_params": sampling, "return_logprob": True}
                if i % 4:
                    return client.post("/generate", json=body).json()
                with client.stream("POST", "/generate", json={**body, "stream": True}) as answer:  # disconnects early
                    return next(answer.iter_lines())

            for _ in range(2):
                check_all(model, prompts, list(threads.map(ask, range(len(prompts)))))
        server.wait_idle()


def check_all(model: torch.nn.Module, prompts: list[list[int]], answers: list[Any]) -> None:
    for prompt, answer in zip(prompts, answers):
        if isinstance(answer, dict):
            logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            assert len(logprobs) == 40 and answer["meta_info"]["cached_tokens"] == 0
            check(model, prompt, answer["output_ids"], logprobs)
