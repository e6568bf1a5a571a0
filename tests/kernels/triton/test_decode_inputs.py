"""The inputs of captured decodes: Triton and torch against the definition, row by row."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.kernels.speculation.decode_inputs import TorchDecodes
from tests.kernels.reference.decodes import drawn_decodes

triton_decodes = pytest.importorskip("moe_engine.kernels.speculation.triton_decode_inputs", reason="needs triton")


@pytest.mark.parametrize("row", ["torch", "triton"])
@pytest.mark.parametrize("count", [1, 7, 130])
def test_inputs_and_sampled_tokens(row: str, count: int) -> None:
    kernels = TorchDecodes() if row == "torch" else triton_decodes.TritonDecodes()
    drawn = drawn_decodes(torch.Generator().manual_seed(random.randrange(2**31)), count, random.randint(0, 3), 40)
    packed, rows, sampled = (x.tolist() for x in (drawn.packed[: 3 * count], drawn.rows, drawn.sampled))
    positions, slots, flat = packed[:count], packed[count : 2 * count], packed[2 * count :]
    lens = drawn.packed[3 * count :].view(torch.int32)[:count].tolist()
    last, table, *buffers = (x.flatten().tolist() for x in drawn.tensors())
    kernels.enter(drawn.packed, drawn.rows, drawn.last_tokens, drawn.table, drawn.out)
    for place, slot in zip(flat, slots):
        table[place] = slot
    for buffer, values in zip(buffers, ([last[r] for r in rows], positions, slots, rows, lens)):
        buffer[:count] = values
    assert [x.flatten().tolist() for x in drawn.tensors()] == [last, table, *buffers]
    kernels.keep(drawn.sampled, drawn.rows, drawn.last_tokens)
    for row_, token in zip(rows, sampled):
        last[row_] = max(token, 0)
    assert drawn.last_tokens.tolist() == last
