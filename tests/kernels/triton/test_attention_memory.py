"""The ledger's bound on Triton's scratch memory, compared with tiles and schedules."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels import workspaces
from moe_engine.kernels.attention.schedule import ScheduleBuffers
from moe_engine.kernels.device import HeadWidths
from moe_engine.kernels.kv_format.formats import PLAIN
from moe_engine.kernels.workspaces import MULTIPROCESSORS, AttentionLoad
from tests.kernels.cpu.formulas import paged_queries

triton_attention = pytest.importorskip("moe_engine.kernels.attention.triton.attention", reason="needs triton")


@pytest.mark.parametrize("heads", [1, 8, 16, 40, 128])
@pytest.mark.parametrize("count", [1, 4])
def test_partial_results_are_no_more_than_the_ledger_counts(heads: int, count: int) -> None:
    """Both backends with their chosen tiles, on the largest device."""
    device, dtype = torch.device("cpu"), torch.bfloat16
    queries, _ = paged_queries([(count, 70)] * 3)
    programs = MULTIPROCESSORS
    mla, gqa = triton_attention.TritonMLA(num_programs=programs), triton_attention.TritonGQA(num_programs=programs)
    tile, split = mla._absorbed_cut(queries, heads, dtype, PLAIN)
    buffers = ScheduleBuffers.for_decodes(3, count, heads, split, device)
    widths = HeadWidths(heads, 1, 192, 128, 512, 64)
    assert 4 * buffers._limits[2] * tile.block_m * 513 <= workspaces.triton(AttentionLoad(3, count, widths, 9))
    for groups in (1, 2, 8):
        tile, split = gqa._cut(queries, heads, groups, 128, dtype)
        buffers = ScheduleBuffers.for_decodes(3, count, heads, split, device)
        widths = HeadWidths(heads * groups, groups, 128, 128)
        taken = 4 * buffers._limits[2] * groups * tile.block_m * 129
        assert taken <= workspaces.triton(AttentionLoad(3, count, widths, 9))
