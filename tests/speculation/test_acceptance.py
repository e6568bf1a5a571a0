"""Acceptance of drafts, against a loop in plain Python over random chains and trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_engine.worker.speculation.acceptance import accept, accept_at_random, accept_chains, force

VOCAB = 4  # so small that drafts are often accepted
BROKEN = -1


def random_parents(rng: np.random.Generator, num_requests: int, num_nodes: int) -> np.ndarray:
    """[D, N] trees of any shape, parents before children."""
    parents = [rng.integers(0, node, num_requests) for node in range(1, num_nodes)]
    return np.stack([np.full(num_requests, -1), *parents], 1)


def distinct_siblings(rng: np.random.Generator, parents: np.ndarray) -> np.ndarray:
    """Drafts [D, N]; children of a node differ, up to the size of the vocabulary, and further ones are absent."""
    drafts = np.full(parents.shape, -1)
    for d, row in enumerate(parents):
        used: dict[int, list[int]] = {}
        for node in range(1, len(row)):
            taken = used.setdefault(int(row[node]), [])
            left = [token for token in range(VOCAB) if token not in taken]
            if left and rng.random() < 0.9:
                drafts[d, node] = rng.choice(left)
                taken.append(int(drafts[d, node]))
    return drafts


def check_walk(
    sampled: list[int],
    drafts: list[int],
    parents: list[int],
    forced: list[bool],
    depth: int,
    found: tuple[list[int], int, list[int]],
) -> None:
    """Checks `found` (tokens, count, path) of one tree by definition. Any of several forced drafts is valid."""
    tokens, count, path = found
    node, accepted = 0, 0
    for step in range(depth + 1):
        assert path[step] == node
        below = [n for n in range(1, len(drafts)) if parents[n] == node and drafts[n] >= 0]
        exact = [n for n in below if drafts[n] == sampled[node]]
        choices = exact or [n for n in below if forced[n]]
        if step == depth or sampled[node] < 0 or not choices:
            assert tokens[step:] == [sampled[node]] * (depth + 1 - step)
            assert path[step:] == [node] * (depth + 1 - step)
            break
        assert path[step + 1] in choices
        node, accepted = path[step + 1], accepted + 1
        assert tokens[step] == drafts[node]
    assert count == accepted + 1


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 9),
    num_nodes=st.integers(1, 12),
    chains=st.booleans(),
    some_forced=st.booleans(),
    broken=st.sampled_from([0.0, 0.1]),
)
def test_accept_equals_the_walk(
    seed: int, num_requests: int, num_nodes: int, chains: bool, some_forced: bool, broken: float
) -> None:
    rng = np.random.default_rng(seed)
    parents = np.tile(np.arange(-1, num_nodes - 1), (num_requests, 1))
    depth = num_nodes - 1
    if not chains:
        parents, depth = random_parents(rng, num_requests, num_nodes), int(rng.integers(0, num_nodes))
    drafts = distinct_siblings(rng, parents)
    drafts[:, 0] = rng.integers(0, VOCAB, num_requests)
    sampled = rng.integers(0, VOCAB, parents.shape)
    sampled[rng.random(parents.shape) < broken] = BROKEN
    forced = rng.random(parents.shape) < (0.4 if some_forced else 0.0)
    accepted = accept(
        torch.from_numpy(sampled),
        torch.from_numpy(drafts),
        None if chains else torch.from_numpy(parents),
        depth,
        torch.from_numpy(forced) if some_forced else None,
    )
    assert accepted.tokens.shape == accepted.path.shape == (num_requests, depth + 1)
    for d in range(num_requests):
        found = accepted.tokens[d].tolist(), int(accepted.counts[d]), accepted.path[d].tolist()
        check_walk(sampled[d].tolist(), drafts[d].tolist(), parents[d].tolist(), forced[d].tolist(), depth, found)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), num_requests=st.integers(0, 9), depth=st.integers(0, 6), broken=st.booleans())
def test_chains_as_arrays_and_as_tensors_equal_the_walk(seed: int, num_requests: int, depth: int, broken: bool) -> None:
    """Also with nodes that repeat the last node of a shorter chain: their draft is -1."""
    rng = np.random.default_rng(seed)
    shape = (num_requests, depth + 1)
    sampled, drafts = rng.integers(-1 if broken else 0, 2, shape), rng.integers(0, 2, shape)
    lengths = rng.integers(1, depth + 2, num_requests)
    drafts[np.arange(depth + 1) >= lengths[:, None]] = -1
    found = [accept_chains(sampled, drafts, depth)]
    found.append(accept_chains(torch.from_numpy(sampled), torch.from_numpy(drafts), depth))
    for accepted in found:
        for d in range(num_requests):
            one = accepted.tokens[d].tolist(), int(accepted.counts[d]), accepted.path[d].tolist()
            parents, forced = list(range(-1, depth)), [False] * (depth + 1)
            check_walk(sampled[d].tolist(), drafts[d].tolist(), parents, forced, depth, one)
            assert one[1] <= lengths[d]


def test_a_chain_is_a_tree_without_branches() -> None:
    rng = np.random.default_rng(1)
    sampled, drafts = (torch.from_numpy(rng.integers(0, 2, (64, 5))) for _ in range(2))
    chain = accept(sampled, drafts, None, 4)
    tree = accept(sampled, drafts, torch.arange(-1, 4).expand(64, -1), 4)
    assert chain.counts.unique().numel() == 5  # every number of accepted drafts occurs
    for field in ("tokens", "counts", "path"):
        assert torch.equal(getattr(chain, field), getattr(tree, field))


@pytest.mark.parametrize(("single", "acc"), [(1.0, 0.5), (0.4, 1.0), (0.7, 0.3), (1.0, 1.0)])
def test_forced_drafts_reach_the_probability_of_the_thresholds(single: float, acc: float) -> None:
    """Equality accepts a draft of probability p with probability p; with `force` it is min(1, p / acc), and 1 from
    `single` on."""
    draws = 40_000
    generator = torch.Generator().manual_seed(5)
    for p in (0.0, 0.05, 0.2, 0.39, 0.41, 0.69, 0.71, 0.97, 1.0):
        equal = torch.rand(draws, generator=generator) < p
        forced: Tensor = force(torch.full((draws, 1), p), torch.rand(draws, 1, generator=generator), single, acc)
        share = (equal | forced[:, 0]).float().mean().item()
        wanted = 1.0 if p >= single else min(1.0, p / acc)
        assert share == pytest.approx(wanted, abs=5 * (wanted * (1 - wanted) / draws) ** 0.5 + 1e-6)


@pytest.mark.parametrize("length", [1.0, 1.7, 3.0, 4.0])
def test_simulated_acceptance_has_its_length_and_keeps_drafts(length: float) -> None:
    sampled, drafts = torch.randint(9, (4000, 4)), torch.randint(9, (4000, 4))
    drafts[:1000, 2:] = -1  # fewer drafts
    found = accept_at_random(sampled, drafts, length, torch.rand(4000))
    assert float(found.counts[1000:].double().mean()) == pytest.approx(length, abs=0.05)
    assert int(found.counts[:1000].max()) <= 2
    for row in range(900, 1100):
        count = int(found.counts[row])
        own = [*drafts[row, 1:count].tolist(), int(sampled[row, count - 1])]
        assert found.tokens[row].tolist() == own + own[-1:] * (4 - count)
        assert found.path[row].tolist() == [*range(count), *[count - 1] * (4 - count)]
