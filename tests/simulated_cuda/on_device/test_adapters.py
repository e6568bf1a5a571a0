"""LoRA adapters on a simulated GPU: captured steps read the adapters of their rows; the tokens of the CPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Scripted
from tests.models.lora import make_adapter
from tests.simulated_cuda import kernels
from tests.simulated_cuda.on_device.test_engines import CHAIN, FEW, GREEDY, TREE, compared, sometimes_warm
from tests.speculation.agreeing import agreeing_checkpoint

TARGETS = (["o_proj", "kv_a_proj_with_mqa", "kv_b_proj"], ["q_b_proj", "gate_proj", "up_proj", "down_proj"])
FIELDS: dict[str, Any] = {
    "num_hidden_layers": 2, "num_mtp_layers": 1, "q_lora_rank": 32, "qk_rope_head_dim": 16, "n_routed_experts": 8,
}  # fmt: skip
"""Widths are multiples of 16, as those of all published models: kernels are compiled for such strides."""
FORMS: dict[str, dict[str, Any]] = {"decodes": {}, "chains": CHAIN, "trees": TREE | {"page_size": 1}}


@pytest.mark.drawn(3, group="engines on a device")
@pytest.mark.parametrize("form", FORMS)
def test_steps_with_adapters_are_captured(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two adapters, of one in a slot of another before, of the base model, and padding; no waits."""
    sometimes_warm(monkeypatch)
    seed = random.randrange(1000)
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "model", seed, **FIELDS)
    adapters = [make_adapter(tmp_path / f"a{i}", path, names, 4, seed + i) for i, names in enumerate(TARGETS)]
    numbers = (1, 0, 2, 1)
    requests = [
        Scripted(f"r{i}", [*range(5, 11), 20, 21], 5, 3 * i, sampling=GREEDY, logprob=True, more={"lora_id": number})
        for i, number in enumerate(numbers)
    ]
    both = FORMS[form] | {
        "lora_paths": [f"{a.name}={a}" for a in adapters], "max_loras_per_batch": 1 if form == "decodes" else 2,
        "context_length": 24, "max_running_requests": 3, "max_total_tokens": 160,
    }  # fmt: skip
    found = compared(path, tmp_path, requests, both, cuda_graph_bs_decode="3", **FEW)
    replayed = [step for step in found.steps if step.cuda_graph]
    assert found.num_graphs and len(replayed) > 2 and not any(step.waits for step in replayed)
    assert form == "decodes" or any(step.plan.speculation and step.plan.speculation.depth for step in replayed)
    assert set(kernels.launches) >= {"shrink_kernel", "expand_kernel"}
