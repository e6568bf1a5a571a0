"""Attention within runs in Triton: the kernel of expanded keys, without rotary channels and without a mask.

Legend: as in protocol.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_engine.kernels.attention.triton.expanded import blocks, cases_of, expanded_attention, expanded_tile
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.uploads import upload


class TritonVarlen:
    """`VarlenKernel` for NVIDIA GPUs."""

    name = "triton"

    def run(self, q: Tensor, k: Tensor, v: Tensor, lens: Sequence[int], scale: float) -> Tensor:
        tile = expanded_tile(q.dtype, q.shape[2], v.shape[2])
        records = upload(blocks(lens, lens, lens, tile.block_m), q.device)  # a run's first token sees all of its keys
        no_rotary = k[:, 0, :0]  # with strides like those of the others, which kernels are compiled for
        out, _ = expanded_attention(q, torch.cat((k, v), 2), no_rotary, records, tile, scale)
        return out


def aot_cases() -> list[AotCase]:
    """Qwen2.5-VL: heads of 80."""
    return cases_of("heads of 80 without rotary channels", 80, 0, 80)
