"""FlashMLA over the tokens that an indexer selected: `flash_mla_sparse_fwd` for bf16 caches, the decode kernel with
lists of slots for FP8 records. Both read lists of slots that end with -1. The first also has sinks, and rows that are
keys and values as a whole (DeepSeek V4).

Legend: T query tokens, H query heads, K selected tokens, C latent (512), P rotary width (64).
Source of sinks and list lengths: FlashMLA, flash_mla/flash_mla_interface.py, csrc/api/sparse_fwd.h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected, SparseAttention
from moe_engine.kernels.kv_format.latent_records import PLAIN, form_of
from moe_engine.kernels.vendors import limits
from moe_engine.kernels.vendors.probe import accepts

LISTED = 128
"""The number of listed tokens must be a multiple of 64 for records, of 128 for the bf16 kernel on Hopper."""

LATENT, ROTARY = limits.FLASHMLA_LATENT, limits.FLASHMLA_ROTARY


class _Lists:
    """Plan of a selection, also a `RenewablePlan`: lists end with -1, so that nothing depends on their lengths.

    `schedule` is made by the first layer over records, within the capture if there is one, and shared by the others.
    """

    on_device = True
    common = True

    def __init__(self, selected: Selected) -> None:
        tokens, most = selected.slots.shape
        self._width = -(-most // LISTED) * LISTED
        self._padded: Tensor | None = None
        if self._width != most:
            self._padded = selected.slots.new_full((tokens, self._width), -1)
        self.schedule: Any = None

    def renew(self) -> None:
        """No-op: kernels read the lists at their fixed addresses."""

    def indices(self, selected: Selected) -> Tensor:
        """[T, 1, K] int32."""
        if self._padded is None:
            return selected.slots.unsqueeze(1)
        self._padded[:, : selected.slots.shape[1]] = selected.slots
        return self._padded.unsqueeze(1)


def sparse_attention(library: Any) -> SparseAttention:
    """`SparseAttention` of a `flash_mla` module with `flash_mla_sparse_fwd`."""

    def run(
        q: Tensor, cache: Tensor, selected: Selected, scale: float, plan: _Lists, value_width: int,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        heads, width = q.shape[1:]
        if sinks is not None:
            return _with_sinks(library, q, cache, plan.indices(selected), selected.counts_device, scale, sinks)
        limits.refuse(limits.flashmla_absorbed(value_width, width - value_width) or limits.flashmla_records(heads))
        form, query = form_of(cache, LATENT, ROTARY), _padded(q)
        indices = plan.indices(selected)
        if form == PLAIN:
            out, _, _ = library.flash_mla_sparse_fwd(query, cache.unsqueeze(1), indices, scale, LATENT)
        else:
            if plan.schedule is None:
                plan.schedule, _ = library.get_mla_metadata()
            records = cache.view(torch.uint8).view(len(cache), 1, 1, -1)  # pages of one token
            out, _ = library.flash_mla_with_kvcache(
                query.unsqueeze(1), records, None, None, LATENT, plan.schedule, softmax_scale=scale,
                is_fp8_kvcache=True, indices=indices,
            )  # fmt: skip
            out = out.squeeze(1)
        return out[:, :heads]

    return SparseAttention(_Lists, run, _Lists, sinks=accepts(library.flash_mla_sparse_fwd, "attn_sink"))


def _with_sinks(
    library: Any, q: Tensor, cache: Tensor, indices: Tensor, counts: Tensor, scale: float, sinks: Tensor
) -> Tensor:
    """q [T, H, C], cache [num_slots, C] bf16, indices [T, 1, K], of which counts [T] are read -> [T, H, C]."""
    heads, width = q.shape[1:]
    reason = limits.flashmla_whole(width) or limits.flashmla_records(heads)
    if reason or cache.dtype != q.dtype:
        raise ValueError(reason or f"queries are {q.dtype}, the cache is {cache.dtype}")
    query = _padded(q)
    sinks = torch.nn.functional.pad(sinks, (0, query.shape[1] - heads))
    out = library.flash_mla_sparse_fwd(
        query, cache.unsqueeze(1), indices, scale, LATENT, attn_sink=sinks, topk_length=counts
    )[0]
    return out[:, :heads]  # type: ignore[no-any-return]


def _padded(q: Tensor) -> Tensor:
    """q [T, H, W], contiguous, with a number of heads that has kernels."""
    tokens, heads, width = q.shape
    padded = limits.flashmla_record_heads(heads)
    if padded == heads:
        return q.contiguous()
    query = q.new_zeros(tokens, padded, width)
    query[:, :heads] = q
    return query
