"""Dense products in Triton whose weights stay in 4 bits, against float64 products with the values by definition."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.kernels.linear.tiles import FOUR_BITS
from moe_engine.kernels.linear.triton_four_bits_gemm import tiles_for
from moe_engine.kernels.linear.triton_linear import TritonLinear
from moe_engine.kernels.quantization.codes import CodedWeight, GroupCodes
from tests.kernels.triton.launches import launches
from tests.kernels.triton.test_experts_four_bits import BOUND, FORMS, coded

kernel = TritonLinear()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN in poisoned rows
ROWS = [1, 5, 17, 33, 70, 130]  # every row of the tile table


def columns_of(form: GroupCodes, most: int) -> int:
    """Whole groups, but rarely whole steps of 128 columns."""
    unit = max(32, form.group)
    return unit * random.randint(1, max(1, most // unit))


def stacked(form: GroupCodes, counts: list[int], k: int) -> tuple[CodedWeight, torch.Tensor]:
    """A weight of several matrices, each with a factor of its own, and its values in float64."""
    weight, start, values = CodedWeight.empty(form, sum(counts), k, "cpu"), 0, []
    for count in counts:
        part, own = coded(form, count, k)
        rows = weight.rows(start, start + count)
        for name in ("codes", "scales", "zeros", "whole"):
            if (target := getattr(rows, name)) is not None:
                target.copy_(getattr(part, name))
        start += count
        values.append(own)
    return weight, torch.cat(values)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", FORMS)
def test_products(form: str, rows: int, dtype: torch.dtype) -> None:
    """Stacked matrices, a bias, and rows of x within wider rows."""
    k, n = columns_of(FORMS[form], 288), random.randint(1, 90)
    weight, values = stacked(FORMS[form], [n, 37], k)
    bias = torch.randn(n + 37).to(dtype) if random.random() < 0.5 else None
    prepared = kernel.prepare_codes(weight, bias)
    x = torch.randn(rows, k + 16).to(dtype)[:, :k]
    want = x.double() @ values.T + (0.0 if bias is None else bias.double())
    for row in (kernel, TritonLinear(deterministic=True)):
        got = row.run(x, prepared)
        assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous() and got.isfinite().all()
        assert float((got.double() - want).abs().max() / want.abs().max()) < BOUND[dtype]
    format, steps = weight.format, -(-k // 128)
    of_rows = 64 * (n + 37) * steps * 2 * (format.bytes_on_gpu() - 0.5)
    assert prepared.num_bytes == (n + 37) * (k // 2 + 4 * format.nvfp4) + of_rows + (0 if bias is None else bias.nbytes)
    assert (prepared.in_features, prepared.out_features) == (k, n + 37) and len(kernel.run(x[:0], prepared)) == 0


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [3, 20])
def test_a_product_in_parts(form: str, rows: int) -> None:
    """K is divided where columns alone would leave multiprocessors idle; parts are summed before they are rounded."""
    k, n = 256 * random.choice((5, 6)), random.randint(60, 70)
    weight, values = stacked(FORMS[form], [n], k)
    bias, x = torch.randn(n).bfloat16(), torch.randn(rows, k).bfloat16()
    assert tiles_for(rows, n, k, torch.bfloat16).split > 1
    with launches() as names:
        got = kernel.run(x, kernel.prepare_codes(weight, bias))
    assert names == ["four_bits_gemm_kernel", "sum_parts_kernel"]
    want = x.double() @ values.T + bias.double()
    assert float((got.double() - want).abs().max() / want.abs().max()) < BOUND[torch.bfloat16]


def test_rows_do_not_depend_on_others_in_deterministic_mode() -> None:
    fixed, form = TritonLinear(deterministic=True), FORMS[random.choice(list(FORMS))]
    weight, _ = stacked(form, [70], 256)
    prepared, x = fixed.prepare_codes(weight), torch.randn(150, 256).bfloat16()
    some = random.randrange(1, 149)
    assert torch.equal(fixed.run(x, prepared)[:some], fixed.run(x[:some], prepared))


def test_declared_forms_and_tiles() -> None:
    takes = kernel.capabilities.takes
    assert takes is not None and all(map(takes, FORMS.values()))
    assert not any(map(takes, (GroupCodes(4, 0), GroupCodes(8, 32), GroupCodes(4, 32, factors=8))))
    limits = [limit for limit, _ in FOUR_BITS.rows]
    assert {FOUR_BITS.at(rows) for rows in ROWS} == {tiles for _, tiles in FOUR_BITS.rows} and limits[-1] is None
    with pytest.raises(ValueError, match=r"rows \[2, 64\] do not fit a weight \[5, 128\]"):
        kernel.run(torch.zeros(2, 64), kernel.prepare_codes(coded(GroupCodes(4, 32), 5, 128)[0]))
