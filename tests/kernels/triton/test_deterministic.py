"""--enable-deterministic-inference: a token's bits do not depend on the rest of the batch, by kernel and in a whole
model, and only rows that guarantee it run.

Products of tiles are summed in float64 here, because numpy's sums depend on the position of a row in a tile; sums of
tensor cores do not. The test covers how kernels split their work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_engine.kernels import backends as backends_module
from moe_engine.kernels.attention.triton.attention import TritonMLA
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.experts.tiles import tiles_of
from moe_engine.kernels.experts.triton_experts import TritonExperts
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.linear.tiles import block_fp8_tiles
from moe_engine.kernels.linear.triton_fixed_gemm import fixed_gemm
from moe_engine.kernels.linear.triton_linear import TritonLinear
from moe_engine.kernels.ops import triton_router
from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.kernels.ops.triton_ops import TritonOps
from moe_engine.kernels.quantization.reference import quantize_weight
from moe_engine.kernels.tables import EXPERTS, GQA, LINEAR, MLA, OPS
from moe_engine.models.config_file import load_model_config
from moe_engine.models.loader import LoadOptions, load_model
from tests.kernels.triton import interpreter
from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import Chunk, Stepper, make_backends


def wide_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """a @ b + d in float64, rounded once."""
    left, right = (x.data if x.dtype.primitive_bitwidth > 16 else interpreter._widen(x).data for x in (a, b))
    product = left.astype(np.float64) @ right.astype(np.float64) + d.data
    return interpreter.interpreter.TensorHandle(product.astype(np.float32), d.dtype.scalar)


@pytest.fixture(autouse=True)
def sums_that_do_not_depend_on_the_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(interpreter.interpreter.InterpreterBuilder, "create_dot", wide_dot)
    yield


def same_bits_in_every_batch(run: Any, *rows: Tensor) -> Tensor:
    """`run` gives equal results for all `rows`, for some of them (in another row of the tile table), and for the last
    one alone. Returns all results."""
    whole = run(*rows)
    assert torch.equal(run(*(x[:18] for x in rows)), whole[:18])
    assert torch.equal(run(*(x[-1:] for x in rows)), whole[-1:])
    return whole


@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp32"])
def test_linear(kind: str) -> None:
    """K is so large that the ordinary FP8 product of a few rows is split."""
    kernel, dtype = TritonLinear(deterministic=True), torch.bfloat16 if kind == "bf16" else torch.float32
    weight, bias = torch.randn(100, 1300) / 36, torch.randn(100).to(dtype)
    x = torch.randn(70, 1400).to(dtype)[:, 20:1320]
    assert block_fp8_tiles(18, 100, 1300).split > 1
    prepared: PreparedLinear
    if kind == "fp8":
        prepared = kernel.prepare_blocks(quantize_weight(weight), bias)
    else:
        prepared = kernel.prepare(weight.to(dtype), bias)
    got = same_bits_in_every_batch(lambda x: kernel.run(x, prepared), x)
    want = x.double() @ weight.to(dtype).double().T + bias.double()
    assert (got.double() - want).abs().max() < {"fp8": 0.1, "bf16": 0.01, "fp32": 1e-5}[kind] * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_heads(dtype: torch.dtype) -> None:
    """Output and input are parts of a wider query."""
    kernel, weight = TritonLinear(deterministic=True), torch.randn(3, 40, 70).to(dtype)
    prepared, x = kernel.prepare_heads(weight), torch.randn(70, 3, 90).to(dtype)[..., 5:75]

    def run(x: Tensor) -> Tensor:
        room = torch.full((len(x), 3, 50), 7.0, dtype=dtype)
        found = kernel.run_heads(x, prepared, out=room[..., :40])
        assert torch.equal(found, room[..., :40]) and (room[..., 40:] == 7).all()
        return found.contiguous()

    got = same_bits_in_every_batch(run, x)
    want = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert (got.double() - want).abs().max() < (0.01 if dtype == torch.bfloat16 else 1e-5) * want.abs().max()


def test_products_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        fixed_gemm(torch.randn(2, 8), torch.randn(4, 9))
    assert fixed_gemm(torch.randn(0, 8), torch.randn(4, 8)).shape == (0, 4)


@pytest.mark.parametrize("fp8", [True, False])
def test_routed_experts(fp8: bool) -> None:
    kernel, tiles = TritonExperts(deterministic=True), tiles_of("fp8e4nv" if fp8 else "bf16", deterministic=True)
    assert len(tiles.gate_up.rows) == len(tiles.down.rows) == 1
    parts = [[torch.randn(*shape) / 12 for shape in ((64, 128), (64, 128), (128, 64))] for _ in range(2)]
    if fp8:
        weights = kernel.allocate_blocks(2, 128, 64, "cpu")
    else:
        weights = kernel.allocate(2, 128, 64, torch.bfloat16, "cpu")
    for expert, (gate, up, down) in enumerate(parts):
        if fp8:
            kernel.load_expert_blocks(weights, expert, *map(quantize_weight, (gate, up, down)))
        else:
            kernel.load_expert(weights, expert, gate, up, down)
    x, shares = torch.randn(70, 128).bfloat16(), torch.rand(70, 1)
    ids = torch.randint(0, 2, (70, 1), dtype=torch.int32)
    same_bits_in_every_batch(lambda x, shares, ids: kernel.run_routed(x, shares, ids, weights), x, shares, ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_router(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole batch has more tokens than the limit of split sums."""
    monkeypatch.setattr(triton_router, "_SPLIT_TOKENS", 20)
    ops, spec = TritonOps(deterministic=True), RouterSpec(8, 3, "softmax")
    x, gate = torch.randn(40, 2100).to(dtype), torch.randn(8, 2100) / 40
    few, many = (triton_router.logits_plan(count, 2100, 8, dtype, deterministic=True) for count in (1, 300))
    assert few[0] == many[0] and few[2:] == many[2:] and few[1][2] == many[1][2] == 2  # parts of D, summed in order
    same_bits_in_every_batch(lambda x: ops.route(x, gate, None, spec)[0], x)


def test_a_whole_model(tmp_path: Path) -> None:
    """A request's logits, bit for bit: alone, and in a batch with a prompt and a decode before it."""
    path = make_checkpoint("deepseek_v3", tmp_path, seed=5, num_hidden_layers=1, first_k_dense_replace=0)
    config = load_model_config(path)

    def fresh() -> Stepper:
        ours = {
            "ops": TritonOps(True), "linear": TritonLinear(True), "experts": TritonExperts(True),
            "attention": TritonMLA(deterministic=True, num_programs=3),
        }  # fmt: skip
        backends = replace(make_backends(config), **ours)  # type: ignore[arg-type]
        return Stepper(load_model(path, config, LoadOptions("float32"), backends), config, backends)

    prompt, neighbor, long = [5, 9, 200], [77, 3], list(range(40, 47))
    alone = fresh()
    want = [alone.step([Chunk(0, prompt, True)])[0], alone.step([Chunk(0, [8], True)])[0]]
    beside = fresh()
    beside.step([Chunk(1, neighbor, True)])
    first = beside.step([Chunk(1, [6], True), Chunk(0, prompt, True)])[1]
    second = beside.step([Chunk(2, long, True), Chunk(1, [13], True), Chunk(0, [8], True)])[2]
    assert torch.equal(first[-1:], want[0][-1:]) and torch.equal(second, want[1])


def test_nothing_runs_that_does_not_promise_it() -> None:
    gpu, need = Device("cuda", "NVIDIA H200", (9, 0)), Need("bfloat16", page_size=64, deterministic=True)
    chosen = {choice.family: choice for choice in backends_module.plan_kernels(gpu, need).choices}
    assert {name: chosen[name].row.name for name in ("ops", "linear", "experts", "attention")} == dict.fromkeys(
        ("ops", "linear", "experts", "attention"), "triton"
    )
    for family in ("ops", "linear", "experts", "attention"):
        assert chosen[family].options == {"deterministic": True}
        assert "deterministic" in chosen[family].refused["torch"]
    for rows, kind in ((OPS, "mla"), (LINEAR, "mla"), (EXPERTS, "mla"), (MLA, "mla"), (GQA, "gqa")):
        asked = replace(need, attention=kind)
        able = [row.name for row in rows if row.why_not(gpu, asked) is None]
        assert able == ["triton"], able
    relaxed = replace(need, deterministic=False)
    assert all(row.why_not(gpu, relaxed) is None for row in (*OPS, *LINEAR) if row.name == "torch")
