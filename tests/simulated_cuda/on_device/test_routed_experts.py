"""Experts of each token on a simulated GPU: decodes are replayed, and the experts are those of the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.harness import Answer
from tests.simulated_cuda import kernels
from tests.simulated_cuda.on_device.test_engines import GREEDY, script, serve, sometimes_warm
from tests.speculation.agreeing import agreeing_checkpoint

LAYERS = 2


def test_replayed_decodes_record_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sometimes_warm(monkeypatch)
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "model", 5, num_hidden_layers=LAYERS)
    top_k = json.loads((path / "config.json").read_text())["num_experts_per_tok"]

    def experts(answer: Answer) -> np.ndarray:
        """[tokens, layers, K], in ascending order."""
        return np.sort(np.frombuffer(answer.rows, np.int16).reshape(-1, LAYERS, top_k))

    flags: dict[str, Any] = {"enable_return_routed_experts": True}
    first, *asked = script([GREEDY] * 4, logprob=False)
    requests = [first, *(replace(one, more={"return_routed_experts": True}) for one in asked)]
    host = serve(path, tmp_path, requests, device="cpu", **flags)
    found = serve(path, tmp_path, requests, device="cuda", cuda_graph_max_bs=2, chunked_prefill_size=4, **flags)
    assert any(step.cuda_graph for step in found.steps) and not found.waits
    assert "norm_route_kernel" in kernels.launches
    for one in asked:
        answer = found.answers[one.rid]
        assert answer.token_ids == host.answers[one.rid].token_ids and answer.cached_tokens
        assert len(experts(answer)) == len(one.prompt_ids) + len(answer.token_ids) - 1
        np.testing.assert_array_equal(experts(answer), experts(host.answers[one.rid]))
        assert experts(answer)[:, -1].any(axis=1).all()
    assert not found.answers[first.rid].rows
