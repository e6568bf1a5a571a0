"""FlashMLA over the tokens that an indexer selected: `flash_mla_sparse_fwd` for bf16 caches, the decode kernel with
lists of slots for FP8 records. Both read lists of slots that end with -1.

Legend: T query tokens, H query heads, K selected tokens, C latent (512), P rotary width (64).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected, SparseAttention
from moe_engine.kernels.kv_format.latent_records import PLAIN, form_of
from moe_engine.kernels.vendors import limits

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
        tokens, heads, width = q.shape
        if sinks is not None:
            raise ValueError("FlashMLA's sparse attention is called without sinks")
        reason = limits.flashmla_absorbed(value_width, width - value_width) or limits.flashmla_records(heads)
        if reason:
            raise ValueError(reason)
        form, padded = form_of(cache, LATENT, ROTARY), limits.flashmla_record_heads(heads)
        query = q.contiguous()
        if padded != heads:
            query = q.new_zeros(tokens, padded, width)
            query[:, :heads] = q
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

    return SparseAttention(_Lists, run, _Lists)
