"""Calls of an attention backend beyond attention (`AttentionCapabilities.decoder`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.decoder.chain import FusedDrafts, fuse_drafts
from moe_engine.kernels.decoder.drafting import DraftLevel
from moe_engine.kernels.decoder.grouped import FusedGQA, GQALayer, fuse_gqa
from moe_engine.kernels.decoder.layers import FusedMLA, MLALayer, fuse_mla
from moe_engine.kernels.decoder.stack import FusedStack, StackedLayer, fuse_stack
from moe_engine.kernels.linear.protocol import PreparedLinear


class DecoderCalls:
    """Each is fused once, at load; None if the weights are not in the layout of the C++ rows."""

    def __init__(self, library: Library) -> None:
        self._lib = library

    def fuse_mla(self, layer: MLALayer) -> FusedMLA | None:
        return fuse_mla(self._lib, layer)

    def fuse_gqa(self, layer: GQALayer) -> FusedGQA | None:
        """A layer of grouped-query attention, for `fuse_stack`."""
        return fuse_gqa(layer)

    def fuse_stack(self, embedding: Tensor, first_norm: Tensor, layers: Sequence[StackedLayer]) -> FusedStack | None:
        """All decoder layers. embedding [V, D], first_norm [D]."""
        return fuse_stack(self._lib, embedding, first_norm, layers)

    def fuse_drafts(self, levels: Sequence[DraftLevel], embedding: Tensor, head: PreparedLinear) -> FusedDrafts | None:
        """Draft chains of MTP layers. embedding [V, D], head [V, D]."""
        return fuse_drafts(self._lib, levels, embedding, head)
