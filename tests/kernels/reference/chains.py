"""Random rows and chains of drafts, for tests of `ChainKernels` and for the GPU suite."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

import torch

from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.speculation.protocol import ChainBuffers, RunBuffers
from moe_engine.kernels.speculation.trees import LevelBuffers, TreeBuffers

ROWS, WIDTH, HIDDEN = 6, 24, 40
Buffers = TypeVar("Buffers", ChainBuffers, RunBuffers, LevelBuffers, TreeBuffers)


def cloned(buffers: Buffers, device: str = "cpu") -> Buffers:
    """With memory of its own, on that device."""
    tensors = {field.name: getattr(buffers, field.name) for field in fields(buffers)}
    own = {name: t.to(device, copy=True) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    return replace(buffers, **own)


def drawn_tables(
    generator: torch.Generator, num_rows: int = ROWS, width: int = WIDTH, hidden: int = HIDDEN, images: bool = True
) -> RowTables:
    """Each row has at least 8 free positions."""

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(1, high, shape, generator=generator)

    slots = torch.randperm(num_rows * width, generator=generator).view(num_rows, width).int() + 1
    states = torch.randn(num_rows, hidden, generator=generator)
    windows, tokens = ints(1000, num_rows, width).int(), ints(50, num_rows, width).int()
    ends = torch.randint(-30, 30, (num_rows, 5), generator=generator)  # every second row has images
    ends[:, 1] = torch.randint(0, width, (num_rows,), generator=generator)
    ends[::2] = 0
    lengths, last = ints(width - 8, num_rows), ints(50, num_rows)
    return RowTables(slots, tokens, lengths, last, states, windows, ends[: num_rows * images])


def drawn_chain(
    generator: torch.Generator, real: int, padded: int, drafts: int, windows: bool = True, num_rows: int = ROWS,
    pool: int = 1,
) -> ChainBuffers:  # fmt: skip
    """Requests of different rows, with about half of the drafts correct; -1 among the sampled tokens. Outputs of the
    kernels start with arbitrary values."""
    size, count = real + padded, drafts + 1
    rows = torch.cat((torch.randperm(num_rows, generator=generator)[:real], torch.full((padded,), -1)))

    def garbage(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype)

    sampled = torch.randint(-1, 3, (size, count), generator=generator)
    chain = ChainBuffers(
        rows=rows,
        query_rows=rows.clamp_min(0).int(),
        seeds=torch.randint(-(2**62), 2**62, (size,), generator=generator),
        starts=garbage(size),
        draft_ids=garbage(count, size),
        draft_positions=garbage(drafts, size),
        draft_slots=garbage(drafts, size),
        draft_window_slots=garbage(drafts, size if windows else 0),
        draft_lens=garbage(drafts, size, dtype=torch.int32),
        draft_real=garbage(size, dtype=torch.int32),
        draft_uniform=garbage(drafts, size, dtype=torch.float32),
        ids=torch.randint(0, 3, (size, count), generator=generator),
        positions=garbage(size, count),
        slots=garbage(size, count),
        window_slots=garbage(size, count if windows else 0),
        lens=garbage(size, dtype=torch.int32),
        real=garbage(size, count, dtype=torch.int32),
        uniform=garbage(size, count, dtype=torch.float32),
        sampled=sampled,
        chances=torch.rand(size, count, generator=generator) ** 3,
        result=garbage(size, count + 1),
        next_ids=garbage(size, count),
        last=garbage(size),
        shifts=garbage(size),
        places=garbage(size, count if pool > 1 else 0),
        pool_axes=garbage(size, count if pool > 1 else 0, 3),
        draft_places=garbage(drafts, size if pool > 1 else 0),
        draft_axes=garbage(drafts, size if pool > 1 else 0, 3),
        pool=pool,
    )
    return chain


def drawn_tree(generator: torch.Generator, size: int, depth: int, topk: int) -> TreeBuffers:
    """Trees of few different tokens, of which many are right; parents before children, the same tokens below different
    parents only."""
    count = 1 + topk + (depth - 1) * topk // 2 + (depth > 1)

    def garbage(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype)

    parents, ids = torch.full((size, count), -1), torch.randint(0, 9, (size, count), generator=generator)
    for tree in range(size):
        levels, children = [0], [0] * count
        for node in range(1, count):
            free = [n for n in range(node) if levels[n] < depth and children[n] < topk]
            parent = free[int(torch.randint(len(free), (), generator=generator))]
            parents[tree, node], ids[tree, node] = parent, children[parent]
            levels.append(levels[parent] + 1)
            children[parent] += 1
    nodes = {
        "positions": garbage(size, count), "slots": garbage(size, count), "lens": garbage(size, dtype=torch.int32),
        "real": garbage(size, count, dtype=torch.int32), "visible": garbage(size, count),
    }  # fmt: skip
    levels_of = [
        LevelBuffers(**{n: t if t.dim() == 1 else t[:, :1].repeat(1, level * topk) for n, t in nodes.items()})
        for level in range(1, depth)
    ]
    path = garbage(size, depth + 1)
    tree_buffers = TreeBuffers(
        ids=ids, parents=parents, **nodes, uniform=garbage(size, count, dtype=torch.float32),
        sampled=torch.randint(-1, 3, (size, count), generator=generator), path=path, taken=path.flatten().clone(),
        sources=path.flatten().clone(), levels=[cloned(level) for level in levels_of],
    )  # fmt: skip
    return cloned(tree_buffers)


def drawn_runs(
    generator: torch.Generator, chain: ChainBuffers, back: int, shift: int, num_ids: int, windows: bool = True
) -> RunBuffers:
    """Runs of rows of which some tokens come from a cache; what the kernels write holds garbage."""
    size = len(chain.rows)
    count = back + (chain.num_drafts + 1 if shift else 1)

    def garbage(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype)

    return RunBuffers(
        back, shift, torch.randint(0, WIDTH, (size,), generator=generator), garbage(size, count), garbage(size, count),
        garbage(size, count if windows else 0), garbage(size, dtype=torch.int32),
        garbage(size, count, dtype=torch.int32), garbage(num_ids, size, count),
        garbage(size, count), garbage(size, back),
    )  # fmt: skip
