"""Ops in plain torch: correct on any device and dtype, the reference of all other rows.

Legend: T tokens, D hidden, H heads, R rotary width, C kv_lora_rank, E experts, G expert groups, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.gate_form import SILU, GatedActivation
from moe_engine.kernels.gated_activation import activate
from moe_engine.kernels.kv_format import head_records, latent_records
from moe_engine.kernels.kv_format.formats import PLAIN
from moe_engine.kernels.ops.protocol import OpsCapabilities, RotaryTable, RouterSpec


class TorchOps:
    """`Ops` for any device and dtype."""

    name = "torch"
    capabilities = OpsCapabilities(routes_shared=True)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return ((wide * scale).to(x.dtype) * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor, form: GatedActivation = SILU) -> Tensor:
        if form.squared:
            return gate_up.relu().square_()
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate, up, form)

    def rotate(self, x: Tensor, positions: Tensor, table: RotaryTable, inverse: bool = False) -> None:
        rotate_(x[..., x.shape[-1] - table.width :], positions, table, inverse)

    def rotate_leading(self, x: Tensor, positions: Tensor, table: RotaryTable) -> None:
        rotate_(x[..., : table.width], positions, table)

    def write_latent(
        self,
        kv_a: Tensor,
        weight: Tensor,
        eps: float,
        positions: Tensor,
        table: RotaryTable,
        slots: Tensor,
        cache: Tensor,
        scale: float = 1.0,
    ) -> None:
        latent = weight.shape[0]
        form = latent_records.form_of(cache, latent, table.width)
        rows = torch.empty(kv_a.shape, dtype=cache.dtype if form == PLAIN else kv_a.dtype, device=cache.device)
        rows[:, :latent] = self.rms_norm(kv_a[:, :latent], weight, eps)
        rows[:, latent:] = kv_a[:, latent:]
        if table.width:  # GLM-5.3-Flash has no rotated channels, and a table of one row
            rotate_(rows[:, latent:].unsqueeze(1), positions, table)
        _write(cache, slots, rows if form == PLAIN else latent_records.pack(rows, latent, form, scale))

    def write_kv(self, k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        for heads, cache in ((k, k_cache), (v, v_cache)):
            form = head_records.form_of(cache, heads.shape[-1])
            _write(cache, slots, heads.to(cache.dtype) if form == PLAIN else head_records.pack(heads, form))

    def prepare_gate(self, gate: Tensor) -> Tensor:
        return gate.float()

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec, real: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        logits = F.linear(x.float(), gate.float())  # [T, E], with a column for the shared experts
        logits, of_shared = logits[:, : spec.num_experts], logits[:, spec.num_experts :]
        if spec.bias_on_logits and bias is not None:
            logits, bias = logits + bias, None
        if spec.score == "sparsemixer":
            weights, ids = sparse_mixer(logits, spec)
        else:
            scores = SCORES[spec.score](logits)
            ids = _best(scores, bias, spec) if experts is None else experts.long()  # [T, K]
            weights = scores.gather(1, ids)
        if spec.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + spec.sum_eps)
        if spec.scale != 1.0:
            weights = weights * spec.scale
        if spec.num_shared:
            each = of_shared.sigmoid() if spec.shared_gate else torch.ones_like(weights[:, :1])
            weights = torch.cat((weights, (spec.shared_weight * each).expand(-1, spec.num_shared)), 1)
        return weights, with_padding(in_slots(ids.int(), spec), real)


def in_slots(ids: Tensor, spec: RouterSpec) -> Tensor:
    """The experts [T, K] as slots of the rank, with the shared ones [T, K + num_shared]."""
    if spec.held is not None:
        own = ids - spec.first
        ids = torch.where((own >= 0) & (own < spec.held), own, -1)
    shared = torch.arange(spec.num_held, spec.num_held + spec.num_shared, dtype=ids.dtype, device=ids.device)
    return torch.cat((ids, shared.expand(len(ids), -1)), 1) if spec.num_shared else ids


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """cache[slots] = rows; float8 as bytes: torch does not support index_copy of float8."""
    if cache.element_size() == 1:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache.index_copy_(0, slots.long(), rows)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}
"""By `RouterSpec.score`."""


def sparse_mixer(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights and chosen experts [T, K] of the score ``sparsemixer``."""
    weights, ids = [], []
    for _ in range(spec.top_k):
        best, at = logits.max(-1, keepdim=True)
        near = best - logits <= 2 * spec.jitter * torch.maximum(logits.abs(), best)
        weights.append(1 / ((logits - best).exp() * near).sum(-1, keepdim=True))
        ids.append(at)
        logits = logits.scatter(-1, at, float("-inf"))
    return torch.cat(weights, -1), torch.cat(ids, -1)


def _best(scores: Tensor, bias: Tensor | None, spec: RouterSpec) -> Tensor:
    """The chosen experts [T, K]."""
    choice = scores if bias is None else scores + bias
    if spec.group_score is not None and spec.num_groups > spec.topk_groups:
        choice = _mask_groups(choice, spec)
    return choice.topk(spec.top_k, dim=-1).indices


def _mask_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """choice [T, E] with the experts outside each token's best groups at -inf (0 could exceed a negative bias)."""
    grouped = choice.unflatten(1, (spec.num_groups, -1))  # [T, G, E/G]
    group_scores = grouped.topk(2, dim=-1).values.sum(-1) if spec.group_score == "top2" else grouped.amax(-1)
    kept = group_scores.topk(spec.topk_groups, dim=-1).indices
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).view_as(choice)


def rotate_(x: Tensor, positions: Tensor, table: RotaryTable, inverse: bool = False) -> None:
    """Rotates all channels of x [T, H, R] in place, in float32."""
    half = table.width // 2
    cos, sin = table.cos_sin.index_select(0, positions.reshape(-1)).unsqueeze(1).split(half, dim=-1)  # [T, 1, R/2]
    if inverse:
        sin = -sin
    if table.interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    a, b = first.float(), second.float()
    rotated = a * cos - b * sin, a * sin + b * cos
    first.copy_(rotated[0])
    second.copy_(rotated[1])


def with_padding(ids: Tensor, real: Tensor | None) -> Tensor:
    """ids [T, K], -1 for tokens whose `real` [T] is 0; None: all are real."""
    return ids if real is None else ids.masked_fill(real.unsqueeze(1) == 0, -1)
