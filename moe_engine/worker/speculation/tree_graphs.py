"""Captured steps with draft trees of one MTP layer or an EAGLE head: as `draft_graphs`, with a tree instead of the
chain until the target has sampled, and the accepted path as the chain from then on.

Legend: R requests, N nodes of a tree, S depth, K = S + 1, D hidden, E tokens of a request in a forward of drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.sampling.protocol import SamplingParameters
from moe_engine.kernels.speculation.protocol import ChainBuffers
from moe_engine.kernels.speculation.trees import LevelBuffers, TreeBuffers, TreeKernels
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.worker.kv_cache.kv_pool import KVPool
from moe_engine.worker.speculation.chain_drafters import ChainParts, StaticBatch, StaticTokens, draft_tokens
from moe_engine.worker.speculation.mtp import MTPDrafter
from moe_engine.worker.speculation.tree import LevelHead, TreeSize, grow_trees

_DTYPES = {"lens": torch.int32, "real": torch.int32, "uniform": torch.float32}


@dataclass(frozen=True)
class TreeParts:
    """What trees need besides `ChainParts`: kernels, the trees' size, the pool whose KV moves, and the buffers of the
    largest step, of which smaller steps use the beginnings."""

    kernels: TreeKernels
    size: TreeSize
    pool: KVPool
    memory: TreeBuffers

    @classmethod
    def of(cls, kernels: TreeKernels, size: TreeSize, pool: KVPool, requests: int, device: torch.device) -> TreeParts:
        def buffers(count: int, names: list[str]) -> dict[str, Tensor]:
            shapes = dict.fromkeys(names, (requests, count)) | {"lens": (requests,)}
            return {n: torch.zeros(shapes[n], dtype=_DTYPES.get(n, torch.int64), device=device) for n in names}

        names = [field.name for field in fields(LevelBuffers)]
        levels = [LevelBuffers(**buffers(level * size.topk, names)) for level in range(1, size.depth)]
        own = buffers(
            size.num_nodes,
            [f.name for f in fields(TreeBuffers) if f.name not in ("path", "taken", "sources", "levels")],
        )
        path = torch.zeros(requests, size.depth + 1, dtype=torch.int64, device=device)
        flat = {name: path.flatten().clone() for name in ("taken", "sources")}
        return cls(kernels, size, pool, TreeBuffers(**own, path=path, **flat, levels=levels))

    def of_size(self, requests: int) -> TreeBuffers:
        """The buffers of a step with this number of requests."""

        def first(buffers: Any) -> dict[str, Tensor]:
            names = [f.name for f in fields(buffers) if f.name not in ("levels", "taken", "sources")]
            return {name: getattr(buffers, name)[:requests] for name in names}

        memory = self.memory
        count = requests * (self.size.depth + 1)
        levels = [LevelBuffers(**first(level)) for level in memory.levels]
        flat = {"taken": memory.taken[:count], "sources": memory.sources[:count]}
        return TreeBuffers(**first(memory), **flat, levels=levels)


class TreeDrafts:
    """The trees of one captured size; methods as `ChainDrafter`, with trees.

    Args:
        planner: of the drafter's attention.
        verified: shares the plans of its batch's size no further: each level has a size of its own.
    """

    def __init__(
        self, parts: ChainParts, trees: TreeParts, chain: ChainBuffers, tree: TreeBuffers, drafter: MTPDrafter,
        planner: InPlacePlanner, taps: HiddenTaps | None,
    ) -> None:  # fmt: skip
        self._parts, self._trees, self._chain, self._tree = parts, trees, chain, tree
        self._drafter, self._planner, self._taps = drafter, planner, taps
        self._parameters = parts.memory.parameters(len(chain.rows))
        kv = drafter.batches.kv
        self._root = StaticBatch(parts, chain, draft_tokens(chain, 0), kv)
        self._levels = [StaticBatch(parts, chain, StaticTokens.of(level), kv) for level in tree.levels]

    def prepare(self) -> bool:
        """Plans the forwards again, for one capture; False if the attention plans by exact lengths on the host."""
        return all(batch.prepare(self._planner) for batch in (self._root, *self._levels))

    def renew(self, lens: list[int]) -> None:
        """Renews the plans; `lens`: upper bounds [R] of the context tokens of verification."""
        more = max(
            0, max((level.slots.shape[1] for level in self._tree.levels), default=0) - self._trees.size.num_nodes
        )
        width = self._parts.tables.slots.shape[1]
        bounds = [min(length + more, width) for length in lens]
        for batch in (self._root, *self._levels):
            batch.renew(bounds)

    def draft(self) -> None:
        """After `ChainKernels.inputs`: grows the trees."""
        parts, chain, tree, layers = self._parts, self._chain, self._tree, self._drafter.layers
        self._trees.kernels.spread(parts.tables, chain, tree)
        state = parts.tables.states.index_select(0, chain.query_rows)
        state = layers.forward(0, chain.draft_ids[0], state, self._root.forward)
        head = LevelHead(layers.logits, parts.passes, self._draw, layers.ids)
        drafts = grow_trees(self._trees.size, chain.draft_ids[0], head, state, _Levels(self, state))
        assert drafts.parents is not None
        tree.ids.copy_(drafts.tokens)
        tree.parents.copy_(drafts.parents)
        self._trees.kernels.enter(chain, tree)

    def _draw(self, level: int, nodes: int) -> Callable[[slice, Tensor], Tensor]:
        own = self._parameters
        uniform = self._chain.draft_uniform[level].repeat_interleave(nodes)
        columns = (own.temperature, own.top_p, own.min_p, own.top_k)
        temperature, top_p, min_p, top_k = (column.repeat_interleave(nodes) for column in columns)
        draws = own.draws.repeat(nodes)
        parameters = SamplingParameters(draws, temperature, top_p, min_p, top_k, own.asynchronous)
        return lambda part, logits: self._parts.kernels.draw(logits, parameters.part(part), uniform[part])

    def run_level(self, level: int, ids: Tensor, hidden: Tensor, masks: Tensor) -> Tensor:
        """v [R * E, D] of all nodes down to a level; ids and masks [R, E], hidden [R * E, D]."""
        self._tree.levels[level - 1].visible.copy_(masks)
        return self._drafter.layers.forward(0, ids.flatten(), hidden, self._levels[level - 1].forward)

    def follow(self, hidden: Tensor, followed: ForwardBatch) -> None:
        """After the acceptance, with the hidden states [R * N, *] of verification; `followed`: the chain's tokens."""
        layers, parts, chain = self._drafter.layers, self._parts, self._chain
        states = hidden if self._taps is None else self._taps.take()
        states = layers.prepare(states.index_select(0, self._tree.taken))
        parts.kernels.keep_states(parts.tables.states, states, chain.rows, chain.last)
        layers.remember(0, chain.next_ids.flatten(), states, followed)


class _Levels:
    """`tree.Expand` over the fixed buffers."""

    def __init__(self, drafts: TreeDrafts, state: Tensor) -> None:
        self._drafts = drafts
        self._states = state[:, None]  # [R, F, D]: v of the level before
        self._tokens: list[Tensor] = []
        self._inputs: list[Tensor] = []
        self._masks: list[Tensor] = []  # of the nodes of each level, among all nodes

    def __call__(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        width, dim = tokens.shape[1], self._states.shape[-1]
        self._tokens.append(tokens)
        self._inputs.append(self._states.gather(1, parents[:, :, None].expand(-1, -1, dim)))
        own = 1 << torch.arange((level - 1) * width, level * width, device=tokens.device).expand(len(tokens), -1)
        self._masks.append(own | self._masks[-1].gather(1, parents) if self._masks else own)
        ids, hidden = torch.cat(self._tokens, 1), torch.cat(self._inputs, 1)
        v = self._drafts.run_level(level, ids, hidden.flatten(0, 1), torch.cat(self._masks, 1))
        self._states = v.view(*ids.shape, dim)[:, -width:]
        return self._states.flatten(0, 1)


class TreeRun:
    """The captured functions of a shape; methods as `draft_graphs.ChainRun`."""

    def __init__(self, parts: Any, size: int) -> None:
        trees, chains = parts.trees, parts.chains
        self._parts, self._trees = parts, trees
        self._chain = chain = chains.memory.of(size, trees.size.depth)
        self.verified = tree = trees.of_size(size)
        self._drafts: TreeDrafts = parts.trees_of(chain, tree)
        self._batch = StaticBatch(chains, chain, StaticTokens.of(tree, tree.ids.flatten()), parts.kv)
        self._batch.forward = parts.adapted(self._batch.forward)
        self._followed = StaticBatch(chains, chain, StaticTokens.of(chain), parts.kv).forward

    @property
    def results(self) -> list[Tensor]:
        """Per request: new tokens and their number, and the nodes at which they were sampled."""
        return [self._chain.result, self.verified.path]

    def prepare(self) -> bool:
        return self._batch.prepare(self._parts.plan_in_place) and self._drafts.prepare()

    def renew(self, lens: list[int]) -> None:
        self._drafts.renew(lens)
        self._batch.renew(lens)

    def draft(self) -> None:
        self._parts.chains.kernels.inputs(self._parts.chains.tables, self._chain)
        self._drafts.draft()

    def verify(self) -> None:
        self._parts.outputs.run(self._batch.forward)

    def follow(self) -> None:
        parts, chain, tree, kernels = self._parts, self._chain, self.verified, self._trees.kernels
        kernels.walk(chain, tree)
        parts.chains.kernels.accept(parts.chains.tables, chain, None)
        self._trees.pool.move(tree.sources, chain.slots.flatten())
        hidden, _ = parts.outputs.of(tree.ids.numel(), tree.ids.numel())
        self._drafts.follow(hidden, self._followed)
