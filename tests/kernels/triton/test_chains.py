"""Chains of drafts in Triton, under the interpreter: the same memory contents as with the torch row."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.speculation import reference
from moe_engine.kernels.speculation.protocol import ChainBuffers
from moe_engine.kernels.speculation.reference import TorchChains
from moe_engine.kernels.speculation.trees import TorchTrees
from tests.kernels.reference.chains import ROWS, cloned, drawn_chain, drawn_runs, drawn_tables, drawn_tree
from tests.kernels.reference.test_chains import RULES, Rule
from tests.speculation.test_ngram import naive

triton_chains = pytest.importorskip("moe_engine.kernels.speculation.triton_chains", reason="needs triton")
triton_trees = pytest.importorskip("moe_engine.kernels.speculation.triton_trees", reason="needs triton")


def copied(tables: RowTables, chain: ChainBuffers) -> tuple[RowTables, ChainBuffers]:
    return RowTables(*(table.clone() for table in tables)), cloned(chain)


@pytest.mark.parametrize("real,padded,drafts", [(3, 2, 3), (1, 0, 1), (0, 2, 2), (2, 1, 0), (4, 0, 4)])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_leaves_the_same_memory(real: int, padded: int, drafts: int, rule: Rule) -> None:
    generator = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())
    images, pool = (False, 1) if real == 3 else (True, 1 + 3 * (drafts % 2))
    tables, chain = drawn_tables(generator, images=images), drawn_chain(generator, real, padded, drafts, pool=pool)
    other_tables, other = copied(tables, chain)
    hidden = torch.randn(chain.ids.numel(), tables.states.shape[1])
    for kernels, own, memory in ((TorchChains(), tables, chain), (triton_chains.TritonChains(), other_tables, other)):
        kernels.inputs(own, memory)
        kernels.accept(own, memory, rule)
        kernels.keep_states(own.states, hidden, memory.rows, memory.last)
    check_alike(chain, other)
    assert all(a.equal(b) for a, b in zip(other_tables, tables))


def check_alike(one: object, other: object) -> None:
    for field in fields(one):  # type: ignore[arg-type]
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        assert mine.equal(theirs) if isinstance(mine, torch.Tensor) else mine == theirs, field.name


@pytest.mark.parametrize(("back", "shift", "num_ids"), [(1, 1, 2), (3, 1, 4), (1, 0, 1)])
def test_runs_and_their_states(back: int, shift: int, num_ids: int) -> None:
    """Several MTP layers, a draft model; rows shorter than what they look back, cached tokens, padding."""
    generator = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())
    tables, chain = drawn_tables(generator), drawn_chain(generator, 4, 1, 2)
    tables.lengths[chain.rows[0]] = 1
    chain = replace(chain, first_draft=-shift, lookback=back * shift)
    runs = drawn_runs(generator, chain, back, shift, num_ids)
    runs.cached[1] = 0
    kept, hidden = torch.randn(ROWS * back, 40), torch.randn(chain.ids.numel(), 40)
    found = []
    for kernels in (TorchChains(), triton_chains.TritonChains()):
        own, memory, run = RowTables(*(table.clone() for table in tables)), cloned(chain), cloned(runs)
        kernels.inputs(own, memory)
        kernels.accept(own, memory, None)
        kernels.runs(own, memory, run)
        states = [kernels.gather_states(kept, hidden, run.sources.flatten())]
        if shift:
            states.append(kernels.gather_states(kept, hidden, run.kept.flatten()))
        found.append((memory, run, states))
    (memory, run, states), (other, other_run, other_states) = found
    check_alike(memory, other)
    check_alike(run, other_run)
    assert all(a.equal(b) for a, b in zip(states, other_states))
    assert run.real.any() and not run.slots[run.real == 0].any()
    assert run.window_slots[run.real == 1].all() and not run.window_slots[run.real == 0].any()


@pytest.mark.parametrize(("real", "padded", "depth", "topk"), [(4, 1, 3, 2), (0, 2, 1, 4), (3, 0, 4, 3)])
def test_trees(real: int, padded: int, depth: int, topk: int) -> None:
    generator = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())
    tables, chain = drawn_tables(generator), drawn_chain(generator, real, padded, depth)
    tree = drawn_tree(generator, real + padded, depth, topk)
    found = []
    for kernels in (TorchTrees(), triton_trees.TritonTrees()):
        own, memory, nodes = RowTables(*(table.clone() for table in tables)), cloned(chain), cloned(tree)
        nodes = replace(nodes, levels=[cloned(level) for level in tree.levels])
        TorchChains().inputs(own, memory)
        kernels.spread(own, memory, nodes)
        kernels.enter(memory, nodes)
        kernels.walk(memory, nodes)
        found.append((memory, replace(nodes, levels=()), *nodes.levels))
    for one, other in zip(*found):
        check_alike(one, other)


@pytest.mark.parametrize(("least", "most"), [(1, 4), (2, 3)])
def test_ngrams(monkeypatch: pytest.MonkeyPatch, least: int, most: int) -> None:
    """Texts of few tokens in several blocks, against a search with Python lists."""
    monkeypatch.setattr(triton_chains, "_BLOCK_N", 8)
    monkeypatch.setattr(reference, "NGRAM_PLACES", 20)
    generator = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())
    tables, chain = drawn_tables(generator), drawn_chain(generator, 4, 2, 3)
    tables.tokens.copy_(torch.randint(1, 4, tables.tokens.shape, generator=generator))
    for kernels in (TorchChains(), triton_chains.TritonChains()):
        memory = cloned(chain)
        kernels.inputs(tables, memory)
        kernels.find_ngrams(tables, memory, least, most)
        for row, drafts in zip(chain.rows.tolist(), memory.ids[:, 1:].tolist()):
            text = tables.tokens[row, : int(tables.lengths[row]) + 1].tolist() if row >= 0 else [0]
            assert drafts == [max(0, token) for token in naive(text, least, most, 3)]
