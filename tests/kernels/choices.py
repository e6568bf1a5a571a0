"""A router's choices against float64: exactly what the rounding of its row allows. For kernels' tests and for the GPU
suite, on any device. Imports no pytest.

Every score has an interval, that of its rounding. Experts may take each other's place only if their intervals overlap,
and each weight has to be in the interval of its own expert's.

Legend: T tokens, D hidden, E experts, G groups, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.ops.protocol import RouterSpec

BF16_ROUNDING = 2.0**-9
"""Largest relative error of a number rounded to bfloat16."""
DEVIATIONS = 7.0
"""The errors of a row's numbers are independent: their sum exceeds so many times its square root of squared bounds once
in 10^10 times (Hoeffding: 2 exp(-z^2 / 2))."""
FLOAT32_SCORES = 2.0**-18
"""Relative error of scores and weights in float32: exponentials of numbers up to 16, and divisions."""
LEAST = -1e30
"""Logit of an expert that was chosen before; finite, so that intervals have a width."""


class Range(NamedTuple):
    """Lowest and highest value that rounding allows."""

    low: Tensor
    high: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Range:
        """Of an increasing function."""
        return Range(function(self.low), function(self.high))

    def rounded(self, size: Tensor) -> Range:
        """Wider by the rounding of numbers of this size in float32."""
        return Range(self.low - FLOAT32_SCORES * size, self.high + FLOAT32_SCORES * size)


@dataclass(frozen=True)
class Routed:
    """Result of a router with its inputs.

    Attributes:
        weights, ids: [T, K + shared], of experts (not of slots of a rank).
        rows: [T, D], what the logits are of.
        norm: weight and epsilon of a norm of the rows before, in one launch with the router.
        roundings: to bfloat16, of each number of a row before its product.
        given: experts [T, K] of the tokens, or None: they are chosen.
    """

    weights: Tensor
    ids: Tensor
    rows: Tensor
    gate: Tensor
    bias: Tensor | None
    spec: RouterSpec
    norm: tuple[Tensor, float] | None = None
    roundings: int = 0
    given: Tensor | None = None

    def relative_weights(self) -> Tensor:
        """Each weight over the exact one of its expert [T, K + shared].

        Raises:
            ValueError: a choice or weight that rounding does not allow.
        """
        spec, ids = self.spec, self.ids.long()
        logits, chosen = self._logits(), ids[:, : spec.top_k]
        _refuse(self.ids[:, spec.top_k :] != _shared_ids(spec, ids), "has not the shared experts")
        _refuse((chosen < 0) | (chosen >= spec.num_experts), "chose no expert")
        _refuse(chosen.sort(1).values.diff() == 0, "chose an expert twice")
        own = logits.map(lambda x: x[:, : spec.num_experts])
        if spec.bias_on_logits and self.bias is not None:
            bias = self.bias.double()
            own = own.map(lambda x: x + bias).rounded(bias.abs())
        if spec.score == "sparsemixer":
            weights = _sparse_mixer(own, chosen, spec)
        else:
            scores = _scores(own, spec)
            self._check(scores, chosen)
            weights = scores.map(lambda x: x.gather(1, chosen))
        if spec.renormalize:
            low, high = weights
            others = Range(low.sum(1, True) - low + spec.sum_eps, high.sum(1, True) - high + spec.sum_eps)
            weights = Range(low / (low + others.high), high / (high + others.low))
        weights = weights.map(lambda x: spec.scale * x)
        if spec.num_shared:
            shared = logits.map(lambda x: x[:, spec.num_experts :].sigmoid() if spec.shared_gate else x[:, :1] * 0 + 1)
            shared = shared.map(lambda x: spec.shared_weight * x.expand(-1, spec.num_shared))
            weights = Range(*(torch.cat(pair, 1) for pair in zip(weights, shared)))
        exact, found = (weights.low + weights.high) / 2, self.weights.double()
        low, high = weights.rounded(exact.abs())
        _refuse((found < low) | (found > high) | found.isnan(), "has another weight than its expert's")
        return found / exact

    def _logits(self) -> Range:
        """[T, E], with a column for a gate of shared experts. The second term: sums of D products in float32, on tensor
        cores, which round in one direction."""
        x, gate = self.rows.double(), self.gate.double()
        if self.norm is not None:
            weight, eps = self.norm
            x = x * weight.double() * (x.square().mean(1, keepdim=True) + eps).rsqrt()
        exact, size = x @ gate.T, (x.square() @ gate.square().T).sqrt()
        error = size * (DEVIATIONS * BF16_ROUNDING * self.roundings**0.5 + (x.shape[1] + 64) * 2.0**-25)
        return Range(exact - error, exact + error)

    def _check(self, scores: Range, chosen: Tensor) -> None:
        """That no expert was left out whose score is above a chosen one's."""
        if self.given is not None:
            return _refuse(chosen != self.given, "has not the given experts")
        spec, choice = self.spec, scores
        if self.bias is not None and not spec.bias_on_logits:
            bias = self.bias.double()
            choice = choice.map(lambda x: x + bias).rounded(bias.abs())
        taken = torch.zeros_like(choice.low, dtype=torch.bool).scatter_(1, chosen, True)
        allowed = torch.ones_like(taken)
        if spec.group_score is not None and spec.num_groups > spec.topk_groups:
            members = spec.num_experts // spec.num_groups
            allowed = _certain_groups(choice, taken, spec).repeat_interleave(members, 1)
        least = choice.high.masked_fill(~taken, torch.inf).amin(1, True)
        _refuse((choice.low > least) & allowed & ~taken, "left out a better expert")


def _refuse(wrong: Tensor, what: str) -> None:
    """wrong [T, n]."""
    if bool(wrong.any()):
        tokens = wrong.any(1).nonzero().flatten().tolist()
        raise ValueError(f"the router {what}: {len(tokens)} of {len(wrong)} tokens, the first is {tokens[0]}")


def _shared_ids(spec: RouterSpec, ids: Tensor) -> Tensor:
    return torch.arange(spec.num_experts, spec.num_experts + spec.num_shared, device=ids.device)


def _scores(logits: Range, spec: RouterSpec) -> Range:
    """[T, E]. The sum of a softmax has an error, too."""
    if spec.score == "softmax":
        low, high = logits
        scores, error = ((low + high) / 2).softmax(1), (high - low) / 2
        error = error + error.amax(1, True)
        found = Range(scores * (-error).exp(), scores * error.exp())
    else:
        found = logits.map(torch.sigmoid if spec.score == "sigmoid" else lambda x: F.softplus(x).sqrt())
    return found.rounded(found.high)


def _certain_groups(choice: Range, taken: Tensor, spec: RouterSpec) -> Tensor:
    """[T, G]: groups that were certainly among the best ones, by their scores or since they have chosen experts.

    Raises:
        ValueError: a chosen expert is in a group that is not among the best.
    """
    count = 2 if spec.group_score == "top2" else 1
    low, high = choice.map(lambda x: x.unflatten(1, (spec.num_groups, -1)).topk(count, 2).values.sum(2))
    used = taken.unflatten(1, (spec.num_groups, -1)).any(2)
    above = (low[:, None] > high[:, :, None]).sum(2)  # groups that are certainly better
    beside = (high[:, None] >= low[:, :, None]).sum(2) - 1  # groups that may be better
    _refuse(used & (above >= spec.topk_groups), "chose from a worse group")
    _refuse((used.sum(1) > spec.topk_groups)[:, None], "chose from too many groups")
    return used | (beside < spec.topk_groups)


def _sparse_mixer(logits: Range, chosen: Tensor, spec: RouterSpec) -> Range:
    """Weights [T, K]. SparseMixer chooses one expert after another; each weight is a softmax over the experts near the
    best of those that remain."""
    weights = []
    for at in chosen.split(1, 1):
        low, high = logits
        best = Range(low.gather(1, at), high.gather(1, at))
        _refuse(low.amax(1, True) > best.high, "left out a better expert")
        most = 2 * spec.jitter
        nearest, farthest = best.low - high, best.high - low
        size = torch.maximum(low.abs(), best.low), torch.maximum(high.abs(), best.high)
        certain, possible = farthest <= most * torch.minimum(*size), nearest <= most * torch.maximum(*size)
        error = farthest - nearest
        shares = (-(farthest + nearest) / 2).exp()
        sums = [(shares * near * (sign * error).exp()).scatter(1, at, 1.0).sum(1, True)
                for sign, near in ((1, possible), (-1, certain))]  # fmt: skip
        weights.append(Range(1 / sums[0], 1 / sums[1]))
        logits = Range(low.scatter(1, at, LEAST), high.scatter(1, at, LEAST))
    return Range(*(torch.cat(sides, 1) for sides in zip(*weights)))
