"""A norm that sums over ranks: its arguments of the all-reduce, in every order of its settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_engine.kernels.ops.protocol import OpsCapabilities, QuantizedNorms
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat
from moe_engine.models.layers.norm import RMSNorm

FP8 = ActivationFormat.fp8(power_of_two=True)


class Recorded:
    """An all-reduce that records its arguments."""

    def add_rms_norm(self, plain: Any, format: ActivationFormat, *args: Any) -> Any:
        self.format, self.args = format, args
        return plain(*args)

    def add_rows_rms_norm(self, plain: Any, format: ActivationFormat, *args: Any) -> Any:
        raise AssertionError("no rows of experts are added here")


@pytest.mark.parametrize("quantizes", [True, False])
@pytest.mark.parametrize("sums_first", [True, False])
def test_the_format_of_the_readers_reaches_the_all_reduce(sums_first: bool, quantizes: bool) -> None:
    unused = [lambda *args: args] * 2
    norms = QuantizedNorms(unused[0], lambda format, x, residual, weight, eps: ("quantized", format), *unused)
    ops: Any = SimpleNamespace(
        capabilities=OpsCapabilities(norms if quantizes else None), rms_norm=lambda *args: "norm",
        add_rms_norm=lambda *args: "plain",
    )  # fmt: skip
    reader: Any = SimpleNamespace(tensor=lambda name, shape, dtype: torch.ones(shape))
    norm, all_reduce = RMSNorm(ops, reader, "norm", 4, 1e-6), Recorded()
    x, residual = torch.ones(2, 4), torch.zeros(2, 4)
    assert norm.add(x, residual) == "plain" and not hasattr(all_reduce, "format")
    steps = [lambda: norm.sum_over(all_reduce), lambda: norm.feed(FP8)]  # type: ignore[arg-type]
    for step in steps if sums_first else reversed(steps):
        step()
    found = norm.add(x, residual)
    assert all_reduce.args == (x, residual, norm.weight, norm.eps)
    if quantizes:
        assert all_reduce.format == FP8 and found == ("quantized", FP8)
    else:
        assert all_reduce.format == UNQUANTIZED and found == "plain"
    if not quantizes:
        assert norm(x) == "norm"
