"""The gated delta net in plain torch, and additive states: one step for decodes, chunks of 64 or 16 tokens for prompts.

Legend: as in `protocol`; R runs of one token, n tokens of a run, c tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaStates, DeltaWeights, StateRuns

CHUNK, CHANNEL_CHUNK = 64, 16
"""Tokens of a chunk; with a decay for each channel, which needs Dk numbers for each pair of its tokens."""
LENGTH_EPS = 1e-6
"""Added to the squared length of q and k."""


class TorchDelta:
    """`DeltaKernel` for any device."""

    name = "torch"

    def run(
        self, inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates, runs: StateRuns, shape: DeltaShape
    ) -> Tensor:
        mixed, z = inputs.mixed, inputs.z
        decay, beta = gates(inputs, weights, shape)
        if runs.is_decode:
            out = self._decode(mixed, decay, beta, weights, states, runs, shape)
        else:
            out = self._runs(mixed, decay, beta, weights, states, runs, shape)
        if not shape.taps:
            return out.to(z.dtype).flatten(1)
        if shape.additive:
            return group_norm(out.to(z.dtype), z, weights).flatten(1)
        z = z.reshape(-1, shape.value_heads, shape.value)
        return gated_norm(out.to(z.dtype), z, weights, shape.sigmoid).flatten(1)

    def _decode(
        self,
        mixed: Tensor,
        decay: Tensor,
        beta: Tensor,
        weights: DeltaWeights,
        states: DeltaStates,
        runs: StateRuns,
        shape: DeltaShape,
    ) -> Tensor:
        """mixed [R, Hk, C], decay [R, Hv, W], beta [R, Hv] -> [R, Hv, Dv] float32."""
        taken = mixed
        if shape.taps:
            window = torch.cat((states.tail.index_select(0, runs.reads), mixed.unsqueeze(2)), 2)  # [R, Hk, K, C]
            states.tail.index_copy_(0, runs.rows, window[:, :, 1:])
            taken = functional.silu(with_bias((window * weights.conv).sum(2), weights)).to(mixed.dtype)
        q, k, v = split_heads(taken, shape)  # [R, Hv, *]
        memory = states.memory.index_select(0, runs.reads).mul_(decay.exp().unsqueeze(-1))
        known = 0 if shape.additive else (k.unsqueeze(-2) @ memory).squeeze(-2)
        change = (v - known) * beta.unsqueeze(-1)  # [R, Hv, Dv]
        memory.addcmul_(k.unsqueeze(-1), change.unsqueeze(-2))
        states.memory.index_copy_(0, runs.rows, memory)
        return skipped((q.unsqueeze(-2) @ memory).squeeze(-2), v, weights)

    def _runs(
        self,
        mixed: Tensor,
        decay: Tensor,
        beta: Tensor,
        weights: DeltaWeights,
        states: DeltaStates,
        runs: StateRuns,
        shape: DeltaShape,
    ) -> Tensor:
        """As `_decode` for T tokens, run after run, each in parts that end where a state is stored."""
        out = mixed.new_empty((len(mixed), shape.value_heads, shape.value), dtype=torch.float32)
        begin = 0
        for index, (count, stored) in enumerate(zip(runs.lens, runs.stored)):
            own = slice(begin, begin + count)
            text, taken = mixed[own].transpose(0, 1), mixed[own]
            if shape.taps:
                text = torch.cat((row_of(states.tail, runs.reads, index), text), 1)  # [Hk, K-1+n, C]
                convolved = with_bias(convolve(text, weights.conv).transpose(0, 1), weights)  # [n, Hk, C]
                taken = functional.silu(convolved).to(mixed.dtype)
            q, k, v = split_heads(taken, shape)
            memory, rule = row_of(states.memory, runs.reads, index), additive_rule if shape.additive else delta_rule
            first = 0
            for last in dict.fromkeys((*stored, count)):
                part, piece = slice(begin + first, begin + last), slice(first, last)
                out[part], memory = rule(q[piece], k[piece], v[piece], decay[part], beta[part], memory)
                skipped(out[part], v[piece], weights)
                if last in stored:
                    store_row(states.memory, runs.rows, begin + last - 1, memory)
                    if shape.taps:
                        store_row(states.tail, runs.rows, begin + last - 1, text[:, last : last + shape.taps - 1])
                first = last
            begin += count
        return out


def row_of(states: Tensor, rows: Tensor, index: int) -> Tensor:
    """states[rows[index]], without waiting for an accelerator."""
    return states.index_select(0, rows[index : index + 1])[0]


def store_row(states: Tensor, rows: Tensor, index: int, value: Tensor) -> None:
    """states[rows[index]] = value, likewise."""
    states.index_copy_(0, rows[index : index + 1], value.unsqueeze(0))


def gates(inputs: DeltaInputs, weights: DeltaWeights, shape: DeltaShape) -> tuple[Tensor, Tensor]:
    """Log decay g [T, Hv, W] and beta [T, Hv], or an additive state's step widths, float32."""
    rate, at = weights.a_log.exp().unsqueeze(-1), inputs.a.flatten(1).float() + weights.dt_bias
    at = at.view(-1, shape.value_heads, shape.decays)
    if shape.additive:
        steps = functional.softplus(at).clamp_(shape.shortest, shape.longest)
        return steps * -rate, steps.squeeze(-1)
    decay = (rate * at).sigmoid() * shape.bound if shape.bound else functional.softplus(at) * -rate
    return decay, inputs.b.flatten(1).sigmoid().float()


def convolve(text: Tensor, taps: Tensor) -> Tensor:
    """text [Hk, K-1+n, C], taps [Hk, K, C] -> [Hk, n, C] float32."""
    last = text.shape[1] - taps.shape[1] + 1
    out = text[:, :last] * taps[:, :1]
    for tap in range(1, taps.shape[1]):
        out += text[:, tap : tap + last] * taps[:, tap : tap + 1]
    return out


def with_bias(convolved: Tensor, weights: DeltaWeights) -> Tensor:
    """The result of the convolution [n, Hk, C] with its bias."""
    return convolved if weights.conv_bias is None else convolved + weights.conv_bias


def skipped(out: Tensor, v: Tensor, weights: DeltaWeights) -> Tensor:
    """out += skip v, [n, Hv, Dv], in place."""
    return out if weights.skip is None else out.addcmul_(v, weights.skip.unsqueeze(-1))


def split_heads(taken: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """taken [T, Hk, C] -> q (scaled), k [T, Hv, Dk], v [T, Hv, Dv], float32. Those of an additive state as they are."""
    q, k, v = taken.float().split((shape.key, shape.key, shape.shared * shape.value), -1)
    if not shape.additive:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS) for x in (q, k))
        q = q * shape.key**-0.5
    q, k = (x.repeat_interleave(shape.shared, 1) for x in (q, k))
    return q, k, v.reshape(-1, shape.value_heads, shape.value)


def gated_norm(x: Tensor, z: Tensor, weights: DeltaWeights, sigmoid: bool) -> Tensor:
    """x, z [T, Hv, Dv] -> [T, Hv, Dv] in z's dtype. sigmoid: as in `DeltaShape`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + weights.eps)
    if sigmoid:
        return (weights.norm * normed * z.float().sigmoid()).to(z.dtype)
    return (weights.norm * normed.to(z.dtype) * functional.silu(z.float())).to(z.dtype)


def group_norm(x: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """x [T, Hv, Dv], z [T, Hk, r Dv] -> z's shape and dtype: the norm of x * silu(z) over a key head's channels."""
    gated = x.view(z.shape).float() * functional.silu(z.float())
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + weights.eps)
    return (normed * weights.norm.view(z.shape[1:])).to(z.dtype)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """n tokens after a state. q, k [n, Hv, Dk], v [n, Hv, Dv], decay (log) [n, Hv, W], beta [n, Hv], memory
    [Hv, Dk, Dv], float32 -> [n, Hv, Dv], the state after them."""
    q, k, v, decay = (x.transpose(0, 1) for x in (q, k, v, decay))
    beta, size = beta.t(), CHUNK if decay.shape[-1] == 1 else CHANNEL_CHUNK
    pieces = []
    for begin in range(0, q.shape[1], size):
        own = slice(begin, begin + size)
        piece, memory = _chunk(q[:, own], k[:, own], v[:, own], decay[:, own], beta[:, own], memory)
        pieces.append(piece)
    return torch.cat(pieces, 1).transpose(0, 1), memory


def additive_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, steps: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """As `delta_rule` without the correction; steps [n, Hv] are factors of v."""
    q, k, v, total = (x.transpose(0, 1) for x in (q, k, v * steps.unsqueeze(-1), decay))
    pieces = []
    for begin in range(0, q.shape[1], CHUNK):
        own = slice(begin, begin + CHUNK)
        queries, keys, values, sums = q[:, own], k[:, own], v[:, own], total[:, own].cumsum(1)  # [Hv, c, *]
        hidden = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool, device=q.device).triu(1)
        between = (sums - sums.transpose(1, 2)).masked_fill(hidden, float("-inf")).exp()
        pieces.append((queries * sums.exp()) @ memory + (queries @ keys.transpose(-1, -2) * between) @ values)
        final = sums[:, -1:]
        memory = memory * final.exp() + (keys * (final - sums).exp()).transpose(-1, -2) @ values
    return torch.cat(pieces, 1).transpose(0, 1), memory


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk, q, k [Hv, c, Dk], v [Hv, c, Dv], decay [Hv, c, W], beta [Hv, c]: the changes u of all tokens solve
    (1 + A) u = beta (v - (exp(G) k) S), where A[i, j] = beta_i sum(exp(G_i - G_j) k_i k_j) over channels for j < i, and
    G sums the decay."""
    total = decay.cumsum(1)  # [Hv, c, W]
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1).unsqueeze(-1)
    between = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(hidden, float("-inf")).exp()  # [Hv, c, c, W]
    grown, final = total.exp(), total[:, -1:]
    change = torch.linalg.solve_triangular(
        _products(k * beta.unsqueeze(-1), k, between),
        (v - (k * grown) @ memory) * beta.unsqueeze(-1),
        upper=False,
        unitriangular=True,
    )  # [Hv, c, Dv]
    out = (q * grown) @ memory + _products(q, k, between) @ change
    left = (k * (final - total).exp()).transpose(-1, -2)
    return out, memory * final.exp().transpose(1, 2) + left @ change


def _products(x: Tensor, k: Tensor, between: Tensor) -> Tensor:
    """[Hv, c, c]: x_i k_j between_ij, summed over channels; x, k [Hv, c, Dk], between [Hv, c, c, W]."""
    if between.shape[-1] == 1:
        return x @ k.transpose(-1, -2) * between.squeeze(-1)
    return torch.einsum("hid,hjd,hijd->hij", x, k, between)
