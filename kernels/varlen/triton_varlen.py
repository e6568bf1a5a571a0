"""Attention within runs in Triton: the kernel of expanded keys, without rotary channels and without a mask.

Legend: as in protocol.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_engine.kernels.attention.triton.expanded import blocks, expanded_attention, expanded_tile
from moe_engine.kernels.uploads import upload


class TritonVarlen:
    """`VarlenKernel` for NVIDIA GPUs."""

    name = "triton"

    def run(self, q: Tensor, k: Tensor, v: Tensor, lens: Sequence[int], scale: float) -> Tensor:
        tile = expanded_tile(q.dtype)
        records = upload(blocks(lens, lens, lens, tile.block_m), q.device)  # a run's first token sees all of its keys
        no_rotary = q.new_empty(len(k), 0)
        out, _ = expanded_attention(q, torch.cat((k, v), 2), no_rotary, records, tile, scale)
        return out
