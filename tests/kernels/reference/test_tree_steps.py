"""Draft trees on the device in torch, against the host's own functions for masks and acceptance."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.kernels.speculation.reference import TorchChains
from moe_engine.kernels.speculation.trees import TorchTrees
from moe_engine.worker.speculation.acceptance import accept
from moe_engine.worker.speculation.drafts import Drafts
from tests.examples import examples
from tests.kernels.reference.chains import WIDTH, drawn_chain, drawn_tables, drawn_tree


@settings(max_examples=examples(25))
@given(st.integers(0, 1 << 30), st.integers(0, 4), st.integers(0, 2), st.integers(1, 4), st.integers(2, 4))
def test_a_step_with_trees(seed: int, real: int, padded: int, depth: int, topk: int) -> None:
    """Requests of different lengths, some of whose tokens are invalid."""
    if real + padded == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    tables, chain = drawn_tables(generator), drawn_chain(generator, real, padded, depth)
    tree = drawn_tree(generator, real + padded, depth, topk)
    chains, trees = TorchChains(), TorchTrees()
    chains.inputs(tables, chain)
    trees.spread(tables, chain, tree)
    trees.enter(chain, tree)

    rows, starts, drafts = chain.rows[:real], chain.starts[:real], Drafts(tree.ids[:real], tree.parents[:real])
    levels, count = drafts.levels(), tree.ids.shape[1]

    def slots_of(count: int) -> torch.Tensor:
        columns = starts[:, None] + torch.arange(count)
        return tables.slots[rows[:, None], columns.clamp_max(WIDTH - 1)].long()

    assert levels is not None and tree.visible[:real].equal(drafts.visible())
    shifted = starts[:, None] + chain.shifts[:real, None]
    assert tree.positions[:real].equal(shifted + levels)
    assert tree.uniform[:real].equal(chain.uniform[:real].gather(1, levels))
    assert tree.slots[:real].equal(slots_of(count))
    assert tree.lens[:real].equal((starts + count).int())
    for i, level in enumerate(tree.levels, 1):
        size = i * topk
        assert level.positions[:real].equal(shifted + torch.arange(size) // topk)
        assert level.slots[:real].equal(slots_of(size))
        assert level.lens[:real].equal((starts + size).int()) and not level.slots[real:].any()
    assert not tree.slots[real:].any() and not tree.positions[real:].any() and tree.real.sum() == real * count

    trees.walk(chain, tree)
    chains.accept(tables, chain, None)
    wanted = accept(tree.sampled[:real], tree.ids[:real], tree.parents[:real], depth)
    assert chain.result[:real, -1].equal(wanted.counts)
    known = torch.arange(depth + 1) < wanted.counts[:, None]
    assert chain.result[:real, :-1][known].equal(wanted.tokens[known]) and tree.path[:real].equal(wanted.path)
    assert tree.taken.view(-1, depth + 1)[:real].equal(torch.arange(real)[:, None] * count + wanted.path)
    moved = torch.where(known, wanted.path, torch.arange(depth + 1))
    assert tree.sources.view(-1, depth + 1)[:real].equal(tree.slots[:real].gather(1, moved))
