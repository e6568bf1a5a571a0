"""DeepSeek V4 on a simulated GPU: captured decodes and steps with drafts compute their rows on the device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from moe_engine.worker.startup import build_runner
from tests.engine.harness import Scripted
from tests.models.v4_checkpoints import CSA, HCA
from tests.models.v4_mtp import make_agreeing
from tests.simulated_cuda import kernels, quick_start
from tests.simulated_cuda.on_device.test_engines import CHAIN, FEW, GREEDY, compared

pytestmark = pytest.mark.drawn(1)

NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 2}
FIELDS: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": [HCA, CSA], "num_hash_layers": 1, "sliding_window": 4,
    "compress_rates": {CSA: 2, HCA: 4}, "index_topk": 3, "index_n_heads": 4, "n_routed_experts": 4,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "decodes": {}, "bounded windows": {"chunked_prefill_size": 4, "max_total_tokens": 256}, "n-gram drafts": NGRAM,
    "MTP drafts": CHAIN,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_steps_with_entries_are_captured(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the CPU, with contexts within the window and the top-k and beyond, padded steps, cached prefixes;
    no waits."""
    monkeypatch.setattr(build_runner, "warm_sizes", quick_start.warm_sizes)
    path = make_agreeing(tmp_path / "model", random.randrange(1 << 30), **FIELDS)
    prefix = [*range(40, 44), 5, 6, random.randrange(250), 5]
    requests = [
        Scripted("short", [9, 5], 3, 0, sampling=GREEDY),
        Scripted("r0", [*prefix, 7, 5], 4, 0, sampling=GREEDY),
        Scripted("r1", [*prefix, 5], 2, 5, sampling=GREEDY),
    ]
    both = {"page_size": 4, "context_length": 24, "max_running_requests": 3, "max_total_tokens": 96} | FORMS[form]
    found = compared(path, tmp_path, requests, both, cuda_graph_bs_decode="2", **FEW)
    replayed = [step for step in found.steps if step.cuda_graph]
    assert found.num_graphs and len(replayed) > 1 and not any(step.waits for step in replayed)
    lens = {start + 1 for step in replayed for start in step.plan.starts}
    assert min(lens) < 4 < 12 < max(lens)
    if "drafts" in form:
        assert any(step.plan.speculation and step.plan.speculation.depth for step in replayed)
    launched = set(kernels.launches)
    assert launched >= {"scores_kernel", "select_kernel", "latent_kernel", "compress_kernel"}
