"""The check of a router's choices allows what rounding does, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.kernels.ops.reference import TorchOps
from tests.kernels.choices import Routed
from tests.kernels.row_checks import ROUTERS

WIDTH = 300
SPECS = {name: spec for name, spec in ROUTERS.items() if spec.top_k < spec.num_experts}


def rounded(spec: RouterSpec, tokens: int, shift: int = 0) -> Routed:
    """Of rows rounded to bfloat16; shift: the bias is that of other experts."""
    exact = torch.randn(tokens, WIDTH)
    x = exact.bfloat16()
    gate = (torch.randn(spec.num_logits, WIDTH) / WIDTH**0.5).bfloat16()
    bias = torch.randn(spec.num_experts) - 1.0 if spec.has_bias else None
    weights, ids = TorchOps().route(x, gate, None if bias is None else bias.roll(shift), spec)
    return Routed(weights, ids, exact, gate, bias, spec, roundings=1)


def routed(spec: RouterSpec, shift: int = 0) -> Routed:
    """Without an error of the rows."""
    found = rounded(spec, 300, shift)
    return replace(found, rows=found.rows.bfloat16(), roundings=0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("spec", ROUTERS.values(), ids=ROUTERS.keys())
def test_choices_of_float32_are_allowed(spec: RouterSpec, shared: bool) -> None:
    if shared and spec.score != "sparsemixer":
        spec = replace(spec, num_shared=2, shared_gate=True, shared_weight=0.5)
    assert (routed(spec).relative_weights() - 1).abs().median() < 1e-6


@pytest.mark.parametrize("spec", ROUTERS.values(), ids=ROUTERS.keys())
def test_choices_of_rounded_rows_are_allowed_with_their_rounding_only(spec: RouterSpec) -> None:
    """In 3,000 tokens many experts change places."""
    found = rounded(spec, 3000)
    found.relative_weights()
    with pytest.raises(ValueError, match="the router"):
        replace(found, roundings=0).relative_weights()


def wrong_expert(found: Routed) -> Routed:
    """One token's last choice is another expert, of the best group if there are groups."""
    ids, taken = found.ids.clone(), found.ids[7].tolist()
    members = found.spec.num_experts // found.spec.num_groups
    near = range(members * (taken[0] // members), members * (taken[0] // members + 1))
    ids[7, -1] = next(i for i in [*near, *range(found.spec.num_experts)] if i not in taken)
    return replace(found, ids=ids)


def swapped_weights(found: Routed) -> Routed:
    """Of the most different choices of a token."""
    weights = found.weights.clone()
    token = int((weights.amax(1) - weights.amin(1)).argmax())
    high, low = int(weights[token].argmax()), int(weights[token].argmin())
    weights[token, [high, low]] = weights[token, [low, high]]
    return replace(found, weights=weights)


def one_weight(found: Routed) -> Routed:
    """A thousandth larger."""
    weights = found.weights.clone()
    weights[7, 0] *= 1.001
    return replace(found, weights=weights)


def one_expert_twice(found: Routed) -> Routed:
    ids = found.ids.clone()
    ids[7, -1] = ids[7, 0]
    return replace(found, ids=ids)


def not_a_number(found: Routed) -> Routed:
    weights = found.weights.clone()
    weights[7, 0] = torch.nan
    return replace(found, weights=weights)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("change", [wrong_expert, swapped_weights, one_weight, one_expert_twice, not_a_number])
def test_wrong_choices_are_refused(spec: RouterSpec, change: Callable[[Routed], Routed]) -> None:
    if spec.top_k == 1 and change in (swapped_weights, one_expert_twice):
        pytest.skip("one choice")
    if spec.renormalize and spec.top_k == 1 and change is one_weight:
        pytest.skip("its weight is 1")
    with pytest.raises(ValueError, match="the router"):
        change(routed(spec)).relative_weights()


@pytest.mark.parametrize("spec", [spec for spec in SPECS.values() if spec.has_bias], ids=str)
def test_a_wrong_bias_is_refused(spec: RouterSpec) -> None:
    with pytest.raises(ValueError, match="the router"):
        routed(spec, shift=1).relative_weights()


@pytest.mark.parametrize("apart", [1e-6, 1e-2])
def test_experts_with_nearly_equal_scores_may_be_exchanged(apart: float) -> None:
    """Not if they differ by more than rounding; and each has its own weight."""
    spec = RouterSpec(8, 2, "sigmoid", True)
    gate, x = torch.randn(8, WIDTH) / WIDTH**0.5, torch.randn(1, WIDTH)
    logits = torch.tensor([3.0, 1.0 + apart, 1.0, *[-1.0] * 5])
    gate += (logits - x[0] @ gate.T)[:, None] * x / x.square().sum()
    bias = torch.zeros(8)

    def exchanged(weight: Tensor) -> Routed:
        weights = torch.stack((logits[0].sigmoid(), weight)).view(1, 2)
        return Routed(weights, torch.tensor([[0, 2]]), x, gate, bias, spec)

    if apart < 1e-3:
        exchanged(logits[2].sigmoid()).relative_weights()
        with pytest.raises(ValueError, match="another weight"):
            exchanged(logits[0].sigmoid()).relative_weights()
    else:
        with pytest.raises(ValueError, match="left out a better expert"):
            exchanged(logits[2].sigmoid()).relative_weights()
