"""--cpu-offload-gb: the layers that wait in host memory, their rows of the ledger, refusals by name."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest

from moe_engine.errors import ConfigError
from moe_engine.planning.memory.ledger import BUFFERS_ROW, GB
from moe_engine.planning.memory.weight_offload import spread
from moe_engine.planning.output.explain import explain_json, explain_text
from tests.config.conftest import SMALL, machine
from tests.models.published import V3

ON_GPU = {"linear_backend": "torch", "moe_runner_backend": "torch", "attention_backend": "torch"}
GPU = dataclasses.replace(machine(140, 141, "cuda", capability=(9, 0)), num_devices=8)
LAYERS = SMALL | {"num_hidden_layers": 12}


def test_v3_serves_from_fewer_gpus(resolved):
    """DeepSeek-V3 in FP8 on four GPUs of 141 GB: without the flag its weights do not fit."""
    flags = {"tp_size": 4, "linear_backend": "triton", "moe_runner_backend": "triton", "attention_backend": "triton"}
    gpu = dataclasses.replace(GPU, host_bytes=500 * GB)
    with pytest.raises(ConfigError, match="weights 15"):
        resolved(V3, on=gpu, **flags)
    found = resolved(V3, on=gpu, cpu_offload_gb=60, **flags)
    ledger, (host,) = found.ledger, found.ledger.host_rows
    assert 57 * GB < host.num_bytes <= 60 * GB
    buffers = ledger.bytes_of(BUFFERS_ROW)
    assert buffers == pytest.approx(2 * host.num_bytes / len(found.offloaded_layers), rel=0.1)
    assert ledger.total_bytes <= ledger.limit_bytes
    assert "host: weights" in explain_text(found) and explain_json(found)["memory"]["host_rows"]
    assert found.graphs.sizes, "captured steps contain the copies"


def test_layers_are_spread_and_end_with_the_last(resolved):
    for _ in range(20):
        total = random.randint(1, 90)
        count = random.randint(1, total)
        layers = spread(total, count)
        gaps = {b - a for a, b in zip((-1, *layers), layers)}
        assert len(layers) == count and layers[-1] == total - 1 and max(gaps) - min(gaps) <= 1


def test_the_rows_are_those_of_the_layers(resolved):
    plain = resolved(LAYERS, on=GPU, **ON_GPU).ledger
    before = 0
    for gb in (0.015, 0.025, 1):
        found = resolved(LAYERS, on=GPU, cpu_offload_gb=gb, **ON_GPU)
        (host,) = found.ledger.host_rows
        assert before < host.num_bytes <= gb * GB
        assert found.ledger.bytes_of("weights") == plain.bytes_of("weights") - host.num_bytes
        before = host.num_bytes
    assert found.offloaded_layers == tuple(range(12)) and resolved(LAYERS, on=GPU, **ON_GPU).offloaded_layers == ()


@pytest.mark.parametrize(
    ("on", "flags", "words"),
    [
        (machine(), {}, "on a CPU: the weights are in host memory already; leave it out"),
        (GPU, {"enable_torch_compile": True} | ON_GPU, "--enable-torch-compile"),
        (GPU, {"tp_size": 2, "ep_size": 2, "enable_eplb": True} | ON_GPU, "--enable-eplb"),
        (GPU, {"cpu_offload_gb": 0.001} | ON_GPU, r"use at least 0\.\d\d \(3 layers\)"),
        (GPU, {"cpu_offload_gb": -1.0}, "must be at least 0"),
        (dataclasses.replace(GPU, host_bytes=1 << 20), ON_GPU, "need .* of host memory, and 1.0 MB are available"),
    ],
)
def test_refusals_name_the_flag_and_the_fix(resolved, on, flags, words):
    with pytest.raises(ConfigError, match=f"--cpu-offload-gb .*{words}"):
        resolved(LAYERS, on=on, **{"cpu_offload_gb": 1.0} | flags)


def test_the_named_minimum_is_accepted(resolved):
    with pytest.raises(ConfigError) as refusal:
        resolved(LAYERS, on=GPU, cpu_offload_gb=0.001, **ON_GPU)
    least = float(re.findall(r"use at least ([\d.]+)", str(refusal.value))[0])
    assert len(resolved(LAYERS, on=GPU, cpu_offload_gb=least, **ON_GPU).offloaded_layers) >= 3


def test_a_model_of_two_layers_is_refused(resolved):
    with pytest.raises(ConfigError, match="saves no memory"):
        resolved(SMALL | {"num_hidden_layers": 2}, on=GPU, cpu_offload_gb=1.0, **ON_GPU)


def test_three_layers_that_save_nothing_are_refused(resolved):
    """One mixture beside small dense layers: the buffers are larger than all of them."""
    uneven = SMALL | {"num_hidden_layers": 3, "first_k_dense_replace": 2, "n_routed_experts": 128}
    with pytest.raises(ConfigError, match="saves no memory"):
        resolved(uneven, on=GPU, cpu_offload_gb=1.0, **ON_GPU)
