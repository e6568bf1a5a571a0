"""Weights that wait in host memory (--cpu-offload-gb): tokens of an engine without it, no waits, the planned memory.

The simulated device finds a layer that reads its buffer before its copy, and a copy into a buffer in use.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.kernels.attention.vendors.fa3 import FA3GQA
from moe_engine.kernels.weight_stream import LEAST_PART, PINNED_PART, WeightStream, pinned_sizes
from moe_engine.kernels.workspaces import WEIGHT_BUFFERS
from moe_engine.models.config_file import load_model_config
from moe_engine.parallel.topology import Topology
from moe_engine.planning.memory.ledger import BUFFERS_ROW
from moe_engine.planning.memory.weight_offload import layer_bytes, spread
from moe_engine.types.step_settings import GraphSettings
from moe_engine.worker.device_stream import DevicePrefetch
from moe_engine.worker.memory_release import MemoryRelease, ReleaseArgs
from moe_engine.worker.startup import build_runner
from moe_engine.worker.startup.graph_setup import capture_graphs
from tests.engine.harness import InProcessEngine
from tests.kernels.vendors import fa3_emulator
from tests.models.checkpoints import make_checkpoint
from tests.models.lora import make_adapter
from tests.simulated_cuda import libraries
from tests.simulated_cuda.memory import MEMORY
from tests.simulated_cuda.on_device.test_engines import FEW, GREEDY, LIMITS, NONE, check_answers, script, watched
from tests.speculation.agreeing import agreeing_checkpoint

GB = 1 << 30
SAMPLED = {"temperature": 0.8, "top_k": 5, "sampling_seed": 2}
ROTARY = 50_000
"""Bytes of a rotary table for all positions of the model, which the ledger counts."""
REQUESTS = script([GREEDY, SAMPLED], logprob=True)


def gb_of(path: Path, count: int, dtype_bytes: int = 4) -> float:
    """The flag's value for `count` layers."""
    model = load_model_config(path)
    each = layer_bytes(model, dtype_bytes, Topology(), 0, model.weight_format)
    return (sum(each[i] for i in spread(len(each), count)) + 1) / GB


def engine(path: Path, folder: Path, **flags: Any) -> InProcessEngine:
    return InProcessEngine(path, folder / "board", **{**LIMITS, "dtype": "float32", "device": "cuda", **flags})


@pytest.mark.drawn(3, group="engines on a device")
def test_a_mixture_has_the_tokens_and_the_memory_of_the_plan(tmp_path: Path) -> None:
    """Layers of two sizes: dense ones and mixtures."""
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "model", 5, num_hidden_layers=5, first_k_dense_replace=2)
    used, found = [], []
    for offload in (0.0, gb_of(path, 4)):
        gc.collect()  # engines of earlier tests, and the one before
        MEMORY.collect()
        before = MEMORY.used[0]
        served = engine(path, tmp_path, cpu_offload_gb=offload, **NONE)
        try:
            MEMORY.collect()
            used.append(MEMORY.used[0] - before - served.worker.info.kv_bytes)
            found.append(watched(served, REQUESTS))
            weights, ledger = served.worker.info.weight_bytes, served.config.ledger
            assert weights == pytest.approx(ledger.bytes_of("weights") + ledger.bytes_of(BUFFERS_ROW), rel=0.02)
            if offload:
                (row,) = ledger.host_rows
                saved = row.num_bytes - ledger.bytes_of(BUFFERS_ROW)
                with pytest.raises(Exception, match="cpu-offload-gb"):
                    MemoryRelease(served.worker.runner, served.worker.weights).release(ReleaseArgs(["weights"]))
        finally:
            served.close()
        del served
    check_answers(found[1].answers, found[0].answers)
    assert found[1].waits == found[0].waits
    assert used[0] - used[1] == pytest.approx(saved, rel=0.02) and saved > 0


@pytest.mark.drawn(3, group="engines on a device")
@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("form", ["fp8", "int8", "lora"])
def test_formats_and_adapters(form: str, kind: str, tmp_path: Path) -> None:
    """FP8 dequantized by the torch rows, weights quantized while loading, and more adapters than slots."""
    fp8 = {"fp8": True, "hidden_size": 128, "intermediate_size": 256} if form == "fp8" else {}
    path = make_checkpoint(kind, tmp_path / "model", 3, num_hidden_layers=4, tokenizer=False, **fp8)
    flags: dict[str, Any] = NONE | ({"quantization": "int8"} if form == "int8" else {})
    requests = REQUESTS
    if form == "lora":
        targets = (["o_proj", "kv_a_proj_with_mqa"], ["o_proj"])
        adapters = [make_adapter(tmp_path / f"{i}", path, names, 4, i) for i, names in enumerate(targets)]
        flags |= {"lora_paths": [f"{a.name}={a}" for a in adapters], "max_loras_per_batch": 1}
        requests = [replace(item, more=item.more | {"lora_id": 2 - i}) for i, item in enumerate(REQUESTS)]
    found = []
    for offload in (0.0, 1.0):
        served = engine(path, tmp_path, cpu_offload_gb=offload, **flags)
        try:
            found.append(served.run(requests))
            weights, ledger = served.worker.info.weight_bytes, served.config.ledger
            counted = ledger.bytes_of("weights") + ledger.bytes_of(BUFFERS_ROW)
            assert abs(weights - counted) <= 0.02 * counted + ROTARY
        finally:
            served.close()
    assert len(served.config.offloaded_layers) == 4
    check_answers(found[1], found[0])


@pytest.mark.drawn(3, group="engines on a device")
@pytest.mark.parametrize("count", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_captured_steps_contain_the_copies(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all layers in host memory, and with a first layer on the device."""
    libraries.install()
    choose = build_runner.kernels_for
    monkeypatch.setattr(
        build_runner, "kernels_for", lambda *args: replace(choose(*args), attention=FA3GQA(fa3_emulator.module()))
    )
    path = agreeing_checkpoint("qwen3", tmp_path / "model", 3, num_hidden_layers=4, head_dim=64)
    flags: dict[str, Any] = FEW | {"dtype": "bfloat16", "disable_cuda_graph": True}
    plain = engine(path, tmp_path, **flags)
    try:
        expected = plain.run(REQUESTS)
    finally:
        plain.close()
    served = engine(path, tmp_path, cpu_offload_gb=gb_of(path, count, 2), **flags)
    try:
        assert len(served.config.offloaded_layers) == count
        assert capture_graphs(served.worker.runner, GraphSettings((1, 2))) == 2
        found = watched(served, REQUESTS)
    finally:
        served.close()
    check_answers(found.answers, expected, tolerance=1e-4)
    assert sum(step.cuda_graph for step in found.steps) > 2 and found.waits == []


def test_buffers_grow_and_views_keep_their_values() -> None:
    """Layers of rising sizes: earlier ones move to the larger buffers. Transposed and overlapping views."""
    device = torch.device("cuda", 0)
    made: list[list[torch.Tensor]] = []
    stream = WeightStream(
        range(5), DevicePrefetch(device), lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=True), device
    )
    for layer in range(5):
        whole = torch.randn(3 + layer, 40 * layer + 7)
        kinds = [whole.to(device), torch.randint(0, 99, (layer + 1,), dtype=torch.int8).to(device)]
        kinds += [kinds[0].t()[1:], kinds[0][:, 2:5], kinds[0][:0]]
        made.append(kinds)
    expected = [[tensor.cpu() for tensor in kinds] for kinds in made]
    for place, kinds in enumerate(made):
        assert stream.add(kinds) == place
    assert stream.buffer_bytes * 5 > stream.host_bytes * WEIGHT_BUFFERS
    for _ in range(2):
        stream.begin()
        for place, kinds in enumerate(made):
            stream.enter(place)
            results = [tensor.clone() for tensor in kinds]
            stream.leave(place)
            assert all(torch.equal(got.cpu(), want) for got, want in zip(results, expected[place]))


@pytest.mark.parametrize(
    "num_bytes", [0, 1, LEAST_PART - 1, LEAST_PART, 5 * LEAST_PART + 3, 3 * PINNED_PART + 12345678]
)
def test_parts_are_powers_of_two(num_bytes: int) -> None:
    sizes = pinned_sizes(num_bytes)
    assert sum(sizes) == num_bytes
    assert all(size & (size - 1) == 0 for size in sizes[:-1]) and (not sizes or sizes[-1] <= PINNED_PART)
    assert sum(1 << (size - 1).bit_length() for size in sizes) - num_bytes < LEAST_PART
