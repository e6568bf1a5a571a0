"""Random decodes, for tests of `DecodeKernels` and for the GPU suite."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_engine.kernels.speculation.decode_inputs import DecodeBuffers


class Decodes(NamedTuple):
    """Arguments of `DecodeKernels.enter`, and sampled tokens."""

    packed: Tensor
    rows: Tensor
    last_tokens: Tensor
    table: Tensor
    out: DecodeBuffers
    sampled: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """What the kernels write."""
        out = self.out
        return self.last_tokens, self.table, out.ids, out.positions, out.slots, out.rows, out.lens


def drawn_decodes(generator: torch.Generator, count: int, spare: int, width: int, device: str = "cpu") -> Decodes:
    """`count` of count + spare rows, in buffers that hold as many."""
    most = count + spare

    def numbers(size: int, end: int) -> Tensor:
        return torch.randint(0, end, (size,), generator=generator)

    rows, starts, slots = (
        torch.randperm(most, generator=generator)[:count],
        numbers(count, width),
        numbers(count, 10**6),
    )
    ints = torch.cat((starts + 1, slots)).int().view(torch.int64)
    packed = torch.cat((starts + numbers(1, 9), slots, rows * width + starts, ints))
    table = numbers(most * width, 10**6).int().view(most, width)
    longs, narrow = ([numbers(most, 10**6) for _ in range(n)] for n in (3, 2))
    out = DecodeBuffers(*(x.to(device) for x in longs), *(x.int().to(device) for x in narrow))
    given = (packed, rows, numbers(most, 10**5), table)
    return Decodes(*(x.to(device) for x in given), out, (numbers(count, 100) - 10).to(device))
