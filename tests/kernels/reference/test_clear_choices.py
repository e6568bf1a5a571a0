"""Tokens whose experts depend on rounding are found, and drawn again."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.ops.protocol import RouterSpec
from tests.kernels.clear_choices import draw_clear, is_clear
from tests.kernels.cpu.formulas import normal
from tests.kernels.row_checks import ROUTERS

NAMES = [name for name in ROUTERS if name != "all experts"]


@pytest.mark.parametrize("spec", [ROUTERS[name] for name in NAMES], ids=NAMES)
def test_a_choice_within_rounding_is_not_clear(spec: RouterSpec) -> None:
    """The experts of two neighbors in the order differ by less than a rounding of float32."""
    gate, bias = torch.randn(spec.num_experts, 96).double() / 96**0.5, torch.randn(spec.num_experts)
    x = draw_clear(normal(40, 96, dtype=torch.float32), gate, bias, spec)
    assert is_clear(x, gate, bias, spec).all()
    gate[1::2] = gate[::2] * (1 + 1e-9)
    bias[1::2] = bias[::2]
    odd = spec.top_k % 2 == 1
    unclear = ~is_clear(x, gate, bias, spec)
    assert unclear.all() if odd or spec.score == "sparsemixer" else not unclear.all()
    assert draw_clear(x[:0], gate, bias, spec).shape == (0, 96)


def test_most_draws_are_clear() -> None:
    for spec in ROUTERS.values():
        gate, bias = torch.randn(spec.num_experts, 96) / 96**0.5, torch.randn(spec.num_experts)
        assert is_clear(normal(300, 96, dtype=torch.float32), gate, bias, spec).double().mean() > 0.7
