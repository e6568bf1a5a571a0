"""Draft trees: masks, levels and construction, against plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_engine.types import NewRow, SamplingParams, SpeculationConfig
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.sampler import SampledRows, Sampler
from moe_engine.worker.sampling.sampling_state import SamplingState
from moe_engine.worker.speculation.drafts import Drafts, DraftTask, ancestor_masks
from moe_engine.worker.speculation.tree import grow
from tests.speculation.toy_engine import itself

VOCAB = 7
STREAM = DeviceStream("cpu")


def random_forest(rng: np.random.Generator, num_nodes: int, roots: bool) -> Tensor:
    """parents [9, N]; with `roots` some further nodes also have no parent."""
    parents = np.stack([rng.integers(-1 if roots else 0, max(node, 1), 9) for node in range(num_nodes)], 1)
    parents[:, 0] = -1
    return torch.from_numpy(parents)


def ancestors(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors up to a root."""
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line


@pytest.mark.parametrize("num_nodes", [1, 2, 13, 63])
def test_masks_name_the_ancestors(num_nodes: int) -> None:
    parents = random_forest(np.random.default_rng(num_nodes), num_nodes, roots=True)
    masks = ancestor_masks(parents)
    for row, mask in zip(parents.tolist(), masks.tolist()):
        assert mask == [sum(1 << a for a in ancestors(row, node)) for node in range(num_nodes)]


@pytest.mark.parametrize("num_nodes", [1, 2, 13, 63])
def test_levels_count_the_ancestors(num_nodes: int) -> None:
    parents = random_forest(np.random.default_rng(num_nodes), num_nodes, roots=False)
    levels = Drafts(torch.zeros_like(parents), parents).levels()
    assert levels is not None
    for row, level in zip(parents.tolist(), levels.tolist()):
        assert level == [len(ancestors(row, node)) - 1 for node in range(num_nodes)]


# -- growing


class ToyModel:
    """Logits after a path of tokens: random, but equal for the same path of the same row."""

    def __init__(self, seed: int, spread: float) -> None:
        self._seed, self._spread = seed, spread

    def __call__(self, row: int, path: tuple[int, ...]) -> Tensor:
        rng = np.random.default_rng([self._seed, row, len(path), *path])
        return torch.from_numpy(rng.normal(0, self._spread, VOCAB).astype(np.float32))


class Frontier:
    """An `Expand` over a toy model: stores the path of every node of the last level."""

    def __init__(self, model: ToyModel, rows: list[int]) -> None:
        self._model = model
        self._paths: list[list[tuple[int, ...]]] = [[()] for _ in rows]
        self.rows = rows

    def __call__(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self._paths
        if level == 1:
            above = [[()] * tokens.shape[1] for _ in self.rows]
        self._paths = [
            [paths[place] + (token,) for token, place in zip(row_tokens, places)]
            for paths, row_tokens, places in zip(above, tokens.tolist(), parents.tolist())
        ]
        assert all(len(path) == level for paths in self._paths for path in paths)
        return torch.stack([self._model(r, path) for r, paths in zip(self.rows, self._paths) for path in paths])


@dataclass
class Node:
    path: tuple[int, ...]
    score: float
    coupled: bool
    """Sampled with the target's random number, not chosen by probability."""


class BruteForce:
    """The tree of one row by its definition, with Python lists and sorts."""

    def __init__(self, model: ToyModel, sampler: Sampler, row: int, length: int) -> None:
        self._model, self._sampler, self._row, self._length = model, sampler, row, length

    def children(self, path: tuple[int, ...], width: int) -> list[Node]:
        logits = self._model(self._row, path)
        at = SampledRows(np.array([self._row]), np.array([self._length + 1 + len(path)]), torch.tensor([self._row]))
        drawn = int(self._sampler.sample(logits[None], at))
        logprobs = torch.log_softmax(logits.double(), 0).tolist()
        others = sorted((t for t in range(VOCAB) if t != drawn), key=lambda t: -logprobs[t])[: width - 1]
        nodes = [Node((*path, drawn), max(logprobs), True)]
        return nodes + [Node((*path, token), logprobs[token], False) for token in others]

    def nodes(self, depth: int, width: int) -> list[Node]:
        """All candidates."""
        level = self.children((), width)
        found = list(level)
        for _ in range(1, depth):
            best = sorted(level, key=lambda node: -node.score)[:width]
            level = []
            for parent in best:
                for child in self.children(parent.path, width):
                    level.append(Node(child.path, parent.score + child.score, parent.coupled and child.coupled))
            found += level
        return found


def grown_paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[a] for a in reversed(ancestors(parents, node)[:-1])) for node in range(1, len(tokens))]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("depth", "topk", "nodes"),
    [(1, 2, 3), (1, 4, 5), (2, 2, 7), (3, 2, 4), (4, 2, 15), (3, 4, 37), (4, 4, 9), (2, 7, 40)],
)
def test_grown_trees_hold_the_best_candidates(depth: int, topk: int, nodes: int, temperature: float) -> None:
    config = SpeculationConfig("standalone", depth, topk, nodes)
    num_nodes = config.num_nodes(depth)
    rows, lengths = [2, 0, 3], np.array([9, 4, 30])
    state = SamplingState(4, VOCAB)
    for row in range(4):
        state.enter(NewRow(row, "r", [1], 1, [], SamplingParams(temperature=temperature), 77 + row, frozenset()))
    sampler = Sampler(state, STREAM)
    model = ToyModel(seed=depth * 100 + nodes, spread=2.0)
    task = DraftTask(
        np.array(rows), lengths, torch.tensor(rows), torch.tensor([5, 6, 1]), depth, topk, num_nodes
    )  # fmt: skip
    first = torch.stack([model(row, ()) for row in rows])
    drafts = grow(task, itself, first, Frontier(model, rows), sampler)
    assert drafts.parents is not None and drafts.tokens.shape == drafts.parents.shape == (3, num_nodes)
    assert drafts.tokens[:, 0].tolist() == [5, 6, 1]
    for i, row in enumerate(rows):
        tokens, parents = drafts.tokens[i].tolist(), drafts.parents[i].tolist()
        assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node)
        paths = grown_paths(tokens, parents)
        assert len(set(paths)) == num_nodes - 1 and max(map(len, paths)) <= depth
        candidates = BruteForce(model, sampler, row, int(lengths[i])).nodes(depth, topk)
        score = {node.path: node.score for node in candidates}
        best = sorted(score.values(), reverse=True)[: num_nodes - 1]
        assert sorted((score[path] for path in paths), reverse=True) == pytest.approx(best, abs=1e-5)
        coupled = next(node.path for node in candidates if node.coupled)
        assert coupled in paths  # the target's sample after the root if it equals the drafter
        if temperature == 0:
            assert all(math.isclose(node.score, score[node.path]) for node in candidates if node.coupled)
