"""Tokens of which rounding in float32 does not decide the choice of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import RouterSpec
from tests.kernels.cpu.formulas import normal, of_groups, router_scores, with_bias

EPS = 2.0**-24
"""The largest relative error of a rounding to float32."""


def draw_clear(x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec) -> Tensor:
    """x [T, D], in which the tokens without a clear choice are drawn again, in place."""
    for _ in range(50):
        unclear = ~is_clear(x, gate, bias, spec)
        if not unclear.any():
            return x
        x[unclear] = normal(int(unclear.sum()), x.shape[1], dtype=x.dtype)
    raise AssertionError("no clear draw")


def is_clear(x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec) -> Tensor:
    """[T]: whether the margins of a token's choice exceed the errors of float32.

    Logits: each of the products, in up to three terms of a gate in bfloat16, and of their sums in any order is rounded
    once. Scores: no score changes by more than its value times twice the errors of the logits (softmax; sigmoid and
    sqrtsoftplus by less), plus roundings of the sum over experts and of functions. The sum with the bias is rounded
    once more.
    """
    wide, columns = x.double(), gate.double().T
    logits = wide @ columns
    error = 3 * x.shape[1] * EPS * (wide.abs() @ columns.abs()).amax(-1)
    if spec.score == "sparsemixer":
        return _margin_of_mixer(logits, spec) > 4 * error  # differences of two logits, and 2 * jitter < 2 of a third
    if spec.bias_on_logits and bias is not None:
        choice = logits + bias.double()
        return _margin(choice, spec.top_k) > 2 * (error + EPS * choice.abs().amax(-1))
    scores = router_scores(logits, spec.score)
    choice = with_bias(scores, bias, spec)
    error = scores.amax(-1) * (2 * error + (scores.shape[-1] + 16) * EPS) + EPS * choice.abs().amax(-1)
    clear = torch.ones(len(x), dtype=torch.bool)
    if spec.group_score is not None:
        best = of_groups(choice, spec)  # the sum of two has two errors, and its own rounding
        clear = _margin(best, spec.topk_groups) > 2 * (2 * error + EPS * best.abs().amax(-1))
        keep = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(spec.topk_groups, -1).indices, True)
        choice = choice.masked_fill(~keep.repeat_interleave(choice.shape[-1] // spec.num_groups, -1), -torch.inf)
    return clear & (_margin(choice, spec.top_k) > 2 * error)


def _margin(values: Tensor, count: int) -> Tensor:
    """[T]: between the `count`-th largest value of a row and the next one."""
    if count == values.shape[-1]:
        return torch.full((len(values),), torch.inf, dtype=values.dtype)
    best = values.topk(count + 1, -1).values
    return best[:, -2] - best[:, -1]


def _margin_of_mixer(logits: Tensor, spec: RouterSpec) -> Tensor:
    """[T]: the smallest one of each choice, and of each remaining expert to the distance of near ones."""
    ordered, margin = logits.sort(-1, descending=True).values, torch.full((len(logits),), torch.inf).double()
    for place in range(spec.top_k):
        best, rest = ordered[:, place : place + 1], ordered[:, place + 1 :]
        near = 2 * spec.jitter * torch.maximum(rest.abs(), best)
        margin = torch.minimum(margin, (best - rest).amin(-1))
        margin = torch.minimum(margin, (best - rest - near).abs().amin(-1))
    return margin
