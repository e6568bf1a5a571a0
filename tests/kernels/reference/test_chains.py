"""Chains of drafts on the device in torch, against the host's own functions for positions, numbers and acceptance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.speculation.protocol import ChainBuffers, SimulatedAcceptance, Thresholds
from moe_engine.kernels.speculation.reference import TorchChains, device_uniforms
from moe_engine.worker.sampling.sampling_state import mix64, uniforms
from moe_engine.worker.speculation.acceptance import accept, accept_at_random, accept_chains, force
from tests.examples import examples
from tests.kernels.reference.chains import drawn_chain, drawn_tables

SALT = 1
Rule = SimulatedAcceptance | Thresholds | None
RULES = (None, *(SimulatedAcceptance(x, mix64(SALT)) for x in (1.0, 2.4)), Thresholds(0.6, 0.4, SALT))


@settings(max_examples=examples(30))
@given(st.integers(0, 2**64 - 1), st.integers(0, 1 << 40))
def test_numbers_equal_the_hosts(seed: int, position: int) -> None:
    seeds = np.array([mix64(seed)], dtype=np.uint64)
    positions = np.array([position], dtype=np.int64)
    found = device_uniforms(torch.from_numpy(seeds.view("int64")), torch.from_numpy(positions))
    assert found.tolist() == uniforms(seeds, positions).tolist()


def numbers(chain: ChainBuffers, positions: np.ndarray, salt: int = 0) -> np.ndarray:
    return uniforms(chain.seeds.numpy().view(np.uint64), positions, salt)


@settings(max_examples=examples(20))
@given(st.integers(0, 1 << 30), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.sampled_from((0, 1, 4)))
def test_inputs(seed: int, real: int, padded: int, drafts: int, pool: int) -> None:
    """Texts without images (pool 0), with images, with pools over images."""
    if real + padded == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    tables = drawn_tables(generator, images=pool > 0)
    chain = drawn_chain(generator, real, padded, drafts, pool=max(pool, 1))
    TorchChains().inputs(tables, chain)
    check_inputs(tables, chain, real)
    check_images(tables, chain)


def check_inputs(tables: RowTables, chain: ChainBuffers, real: int) -> None:
    """The last `padded` requests are neutral; the others are at the lengths of their rows."""
    rows, drafts = chain.rows[:real], chain.num_drafts
    starts, places = tables.lengths[rows], torch.arange(drafts + 1)
    positions = starts[:, None] + places
    assert chain.starts[:real].equal(starts) and chain.positions[:real].equal(positions + chain.shifts[:real, None])
    assert chain.slots[:real].equal(tables.slots[rows[:, None], positions].long())
    assert chain.window_slots[:real].equal(tables.windows[rows[:, None], positions].long())
    assert chain.lens[:real].equal((starts + drafts + 1).int())
    assert chain.ids[:real, 0].equal(tables.last_tokens[rows]) and chain.draft_ids[0, :real].equal(chain.ids[:real, 0])
    behind = starts - 1 + torch.arange(drafts)[:, None]
    assert chain.draft_positions[:, :real].equal(behind + chain.shifts[:real])
    assert chain.draft_slots[:, :real].equal(tables.slots[rows, behind].long())
    assert chain.draft_window_slots[:, :real].equal(tables.windows[rows, behind].long())
    assert chain.draft_lens[:, :real].equal((behind + 1).int())
    for k in range(drafts + 1):
        wanted = numbers(chain, chain.starts.numpy() + 1 + k)[:real].tolist()
        assert chain.uniform[:real, k].tolist() == wanted
        assert k == drafts or chain.draft_uniform[k, :real].tolist() == wanted
    assert (chain.real.sum(1) == torch.tensor([drafts + 1] * real + [0] * (len(chain.rows) - real))).all()
    assert chain.draft_real.tolist() == [1] * real + [0] * (len(chain.rows) - real)
    for neutral in (
        chain.positions[real:],
        chain.shifts[real:],
        chain.places[real:],
        chain.pool_axes[real:],
        chain.draft_places[:, real:],
        chain.draft_axes[:, real:],
        chain.slots[real:],
        chain.window_slots[real:],
        chain.draft_slots[:, real:],
        chain.draft_window_slots[:, real:],
        chain.ids[real:, :1],
    ):
        assert not neutral.any()
    assert (chain.lens[real:] == drafts + 1).all() and (chain.draft_lens[:, real:] == 1).all()


def check_images(tables: RowTables, chain: ChainBuffers) -> None:
    """As the host's arrays of positions, token by token."""
    for i, row in enumerate(chain.rows.tolist()):
        shift, length, *last = tables.image_ends[row].tolist() if row >= 0 and len(tables.image_ends) else [0] * 5
        assert chain.shifts[i] == shift
        if chain.pool == 1 or row < 0:
            continue
        places = [int(tables.lengths[row]) + k for k in range(chain.num_drafts + 1)]
        assert chain.places[i].tolist() == places
        drafted = [place - 1 for place in places[:-1]]
        assert chain.draft_places[:, i].tolist() == drafted
        every = chain.pool_axes[i].tolist() + chain.draft_axes[:, i].tolist()
        for place, axes in zip(places + drafted, every):
            first = place - place % chain.pool
            assert axes == (last if first < length else [first + shift] * 3)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=examples(10))
@given(st.integers(0, 1 << 30), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3))
def test_acceptance(rule: Rule, seed: int, real: int, padded: int, drafts: int) -> None:
    """As `accept_chains`, `accept` with forced drafts and `accept_at_random`; only the rows of requests change."""
    if real + padded == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    tables = drawn_tables(generator)
    chain = drawn_chain(generator, real, padded, drafts)
    TorchChains().inputs(tables, chain)
    check_acceptance(TorchChains(), tables, chain, real, rule)


def check_acceptance(kernels: object, tables: RowTables, chain: ChainBuffers, real: int, rule: Rule) -> None:
    before = RowTables(*(table.clone() for table in tables))
    kernels.accept(tables, chain, rule)  # type: ignore[attr-defined]
    drafts, count = chain.num_drafts, chain.num_drafts + 1
    if rule is None:
        wanted = accept_chains(chain.sampled, chain.ids, drafts)
    elif isinstance(rule, Thresholds):
        draws = np.stack([numbers(chain, chain.starts.numpy() + n, SALT + n) for n in range(count)], 1)
        forced = force(chain.chances.roll(1, 1), torch.from_numpy(draws), rule.single, rule.acc)
        wanted = accept(chain.sampled, chain.ids, None, drafts, forced)
    else:
        draws = torch.from_numpy(numbers(chain, chain.starts.numpy(), SALT))
        wanted = accept_at_random(chain.sampled, chain.ids, rule.length, draws)
    assert chain.result[:, :count].equal(wanted.tokens) and chain.result[:, count].equal(wanted.counts)
    valid, rows = wanted.tokens.clamp_min(0)[:real], chain.rows[:real]
    assert chain.next_ids[:real].equal(valid) and not chain.next_ids[real:].any()
    assert chain.last.equal(torch.arange(len(chain.rows)) * count + wanted.counts - 1)
    for i, row in enumerate(rows.tolist()):
        start = int(chain.starts[i])
        before.tokens[row, start + 1 : start + 1 + count] = valid[i].int()
        before.lengths[row] = start + wanted.counts[i]
        before.last_tokens[row] = valid[i, -1]
    assert all(a.equal(b) for a, b in zip(tables, before))
    hidden = torch.randn(chain.ids.numel(), tables.states.shape[1])
    kernels.keep_states(tables.states, hidden, chain.rows, chain.last)  # type: ignore[attr-defined]
    before.states[rows] = hidden[chain.last[:real]]
    assert tables.states.equal(before.states)
