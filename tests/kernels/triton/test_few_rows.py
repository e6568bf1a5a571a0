"""Products of few rows with unquantized weights as dependent launches, under the interpreter, against float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_engine.kernels import device
from moe_engine.kernels.linear import cublas, triton_block_gemm, triton_fixed_gemm
from moe_engine.kernels.linear.cublas import CublasLinear
from moe_engine.kernels.linear.deep_gemm import DeepGemmLinear
from moe_engine.kernels.linear.deep_gemm_products import DeepGemm
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.linear.tiles import FEW_BLOCK_FP8, FEW_PLAIN, FEW_ROWS, MOST_NORMED, MOST_QUANTIZED
from moe_engine.kernels.linear.triton_block_gemm import block_gemm
from moe_engine.kernels.linear.triton_fixed_gemm import fixed_gemm
from moe_engine.kernels.linear.triton_linear import TritonLinear
from moe_engine.kernels.quantization import reference, triton_rows
from moe_engine.kernels.quantization.protocol import BlockWeight
from moe_engine.kernels.quantization.triton_rows import quantize_rows
from tests.kernels.cpu.formulas import block_product, by_row, close, normal
from tests.kernels.vendors.deep_gemm_emulator import DeepGemmEmulator

BF16 = torch.bfloat16


@pytest.mark.parametrize("trial", range(4))
def test_random_shapes(trial: int) -> None:
    rows, n, k = random.randint(1, FEW_ROWS), random.randint(1, 90), random.randint(1, 600)
    weight, bias = normal(n, k, dtype=BF16, scale=k**-0.5), normal(n, dtype=BF16)
    x = normal(rows, k + 9, dtype=BF16)[:, 4 : 4 + k]
    got = fixed_gemm(x, weight, bias if trial % 2 else None, tiles=FEW_PLAIN)
    close(got, x.double() @ weight.double().T + (bias.double() if trial % 2 else 0))


@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS])
def test_heads(rows: int) -> None:
    weight, x = normal(3, 40, 70, dtype=BF16), normal(rows, 3, 90, dtype=BF16)[..., 5:75]
    room = torch.full((rows, 3, 50), 7.0, dtype=BF16)
    got = fixed_gemm(x, weight, None, room[..., :40], FEW_PLAIN)
    assert torch.equal(got, room[..., :40]) and (room[..., 40:] == 7).all()
    close(got, torch.einsum("thk,hnk->thn", x.double(), weight.double()))


def test_which_products_are_dependent_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of a small 16-bit weight; others, and all on a CPU, are the library's."""
    asked: list[int] = []
    monkeypatch.setattr(cublas, "_is_few", lambda x, weight: asked.append(len(x)) or len(x) <= FEW_ROWS)
    kernel, weight = CublasLinear(), normal(48, 64, dtype=BF16)
    prepared, heads = kernel.prepare(weight), kernel.prepare_heads(weight.view(2, 24, 64))
    for rows in (FEW_ROWS, FEW_ROWS + 1):
        x = normal(rows, 64, dtype=BF16)
        close(kernel.run(x, prepared), x.double() @ weight.double().T)
        both = x[:, None].expand(-1, 2, -1)
        close(kernel.run_heads(both, heads).flatten(1), x.double() @ weight.double().T)
    assert asked == [FEW_ROWS, FEW_ROWS, FEW_ROWS + 1, FEW_ROWS + 1]


@pytest.mark.parametrize("module", [triton_fixed_gemm, triton_block_gemm], ids=["bf16", "fp8"])
def test_rows_that_a_tile_lacks_are_not_read(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16: a repeated row would be read from the L2 cache again by each program."""
    rows, load = random.randint(1, FEW_ROWS), module.load_step
    seen: list[int] = []

    def recorded(*given: Any) -> Any:
        if len(given) == 8:
            seen.append(int(given[7].handle.data.sum()))
        return load(*given)

    monkeypatch.setattr(module, "load_step", recorded)
    x, weight = torch.randn(rows, 300).to(BF16), torch.randn(20, 300)
    if module is triton_fixed_gemm:
        fixed_gemm(x, weight.to(BF16), tiles=FEW_PLAIN)
    else:
        tiles = replace(FEW_BLOCK_FP8, swap_ab=random.random() < 0.5)
        block_gemm(random.choice([x, quantize_rows(x)]), reference.quantize_weight(weight), BF16, tiles=tiles)
    assert seen == [rows] * (4 if module is triton_fixed_gemm else 6)  # of two programs with two or three steps each


@pytest.mark.parametrize(
    ("rows", "n", "dtype", "kind", "expected"),
    [
        (1, 64, BF16, "meta", True),
        (FEW_ROWS, 64, torch.float16, "meta", True),
        (0, 64, BF16, "meta", False),
        (FEW_ROWS + 1, 64, BF16, "meta", False),
        (1, cublas.MAX_FEW_BYTES // 128 + 1, BF16, "meta", False),
        (1, 64, torch.float32, "meta", False),
        (1, 64, BF16, "cpu", False),
    ],
)
def test_conditions(rows, n, dtype, kind, expected) -> None:
    x, weight = (torch.empty(*shape, dtype=dtype, device=kind) for shape in ((rows, 64), (n, 64)))
    assert cublas._is_few(x, weight) == expected


@pytest.mark.parametrize("arch", [9, 10])
@pytest.mark.parametrize("biased", [False, True])
def test_products_in_fp8_are_dependent_launches(arch: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, few rows of a small weight; on Blackwell, whose scales are packed, all are the library's."""
    monkeypatch.setattr(cublas, "starts_early", lambda kind: True)
    gemm, calls = DeepGemm(DeepGemmEmulator(arch).module, (arch, 0), reference), []
    library = gemm.dense
    monkeypatch.setattr(gemm, "dense", lambda a, b, out: calls.append(len(out)) or library(a, b, out))
    kernel = DeepGemmLinear(gemm)
    n, k = random.randint(1, 4) * 64, random.randint(1, 4) * 128
    weight = reference.quantize_weight(normal(n, k, dtype=torch.float32, scale=k**-0.5), arch == 10)
    bias = normal(n, dtype=BF16) if biased else None
    prepared = kernel.prepare_blocks(weight, bias)
    counts = [random.randint(1, FEW_ROWS), FEW_ROWS, FEW_ROWS + 1]
    for rows in counts:
        x = normal(rows, k, dtype=BF16)
        quantize = quantize_rows if rows <= FEW_ROWS and arch == 9 else reference.quantize_rows  # ties round apart
        want = block_product(quantize(x, arch == 10), weight)
        close(kernel.run(x, prepared), want + (0 if bias is None else bias.double()), scale=2)
    assert calls == (counts if arch == 10 else counts[2:])


@pytest.mark.parametrize("rows", [random.randint(1, FEW_ROWS), FEW_ROWS + 1])
@pytest.mark.parametrize("columns", [MOST_QUANTIZED, MOST_QUANTIZED + 128])
@pytest.mark.parametrize("scales", ["rows", "blocks"])
def test_few_rows_in_fp8_are_one_launch(rows, columns, scales, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few columns of few rows are quantized by the product, whose tiles need no sum of parts."""
    monkeypatch.setattr(cublas, "starts_early", lambda kind: True)
    launched = []
    for module, name in ((triton_block_gemm, "block_gemm_kernel"), (triton_block_gemm, "sum_parts_kernel"),
                         (triton_rows, "quantize_kernel")):  # fmt: skip
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, Counted(kernel, launched))
    linear, full = TritonLinear(), normal(32, columns, dtype=torch.float32, scale=columns**-0.5)
    weight = by_row(full) if scales == "rows" else reference.quantize_weight(full)
    prepared = linear.prepare_rows(weight) if scales == "rows" else linear.prepare_blocks(weight)
    x = normal(rows, columns, dtype=BF16)
    got, launches = linear.run(x, prepared), [*launched]
    close(got, block_product(quantize_rows(x), weight), scale=2)
    few = ["block_gemm_kernel"] if columns == MOST_QUANTIZED else ["quantize_kernel", "block_gemm_kernel"]
    assert launches == (few if rows <= FEW_ROWS else ["quantize_kernel", "block_gemm_kernel", "sum_parts_kernel"])


@pytest.mark.parametrize(
    ("rows", "n", "k", "kind", "expected"),
    [
        (1, 64, MOST_QUANTIZED, "meta", True),
        (MOST_NORMED, cublas.MAX_NORMED_BYTES // 512, 512, "meta", True),
        (MOST_NORMED + 1, 64, 512, "meta", False),
        (0, 64, 512, "meta", False),
        (1, cublas.MAX_NORMED_BYTES // 512 + 1, 512, "meta", False),
        (1, 64, MOST_QUANTIZED + 1, "meta", False),
        (1, 64, 512, "cpu", False),
    ],
)
def test_which_rows_are_normed_by_their_product(rows, n, k, kind, expected) -> None:
    weight = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=kind)
    prepared, x = PreparedLinear(k, n, BlockWeight(weight, None), None, 0), torch.empty(rows, k, dtype=BF16)
    assert TritonLinear().norms(x, prepared) == expected
    assert not TritonLinear(deterministic=True).norms(x, prepared)
    assert not TritonLinear().norms(x, TritonLinear().prepare(torch.empty(n, k, dtype=BF16, device=kind)))


@pytest.mark.parametrize(
    ("count", "groups", "n", "columns", "expected"),
    [
        (FEW_ROWS, 8, 1024, 8192, True),  # DeepSeek V4-Flash with all groups
        (FEW_ROWS + 1, 8, 1024, 8192, False),
        (0, 8, 1024, 8192, False),
        (1, 1, 1024, 4096, False),  # too few programs
        (1, 64, 192, 64 * 192, False),  # no whole blocks
        (1, 8, 1024, MOST_QUANTIZED, False),  # the consumer quantizes
    ],
)
def test_which_products_per_head_are_quantized(count, groups, n, columns, expected) -> None:
    heads = PreparedLinear(64, n, torch.empty(groups, n, 64, dtype=BF16, device="meta"), None, 0)
    data = torch.empty(32, columns, dtype=torch.float8_e4m3fn, device="meta")
    consumer = PreparedLinear(columns, 32, BlockWeight(data, None), None, 0)
    assert TritonLinear().quantizes_heads(count, heads, consumer) == expected
    assert not TritonLinear(deterministic=True).quantizes_heads(count, heads, consumer)
    assert not TritonLinear().quantizes_heads(count, heads, TritonLinear().prepare(torch.empty(32, columns)))


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, kernel: Any, launched: list[str]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launched.append(self._kernel.fn.__name__)
        return self._kernel[grid]


@pytest.mark.parametrize(("capability", "early"), [((8, 0), False), ((9, 0), True), ((10, 0), True), (None, False)])
def test_the_device_decides(capability, early, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "probe", lambda kind: device.Device(kind, "GPU", capability))
    assert device.starts_early.__wrapped__("cuda") == early


def test_deterministic_rows_have_one_tiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "_is_few", lambda x, weight: pytest.fail("the tiling would depend on the rows"))
    kernel = TritonLinear(deterministic=True)
    kernel.run(normal(1, 64, dtype=BF16), kernel.prepare(normal(32, 64, dtype=BF16)))
