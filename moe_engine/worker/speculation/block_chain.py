"""Captured drafts of layers that fill in blocks: one forward of all tokens of a block.

A block of K tokens has the positions and slots of the tokens that are verified; a shorter one (DSpark: S) has copies of
the first ones.

Legend: R requests, S drafts of each, K = S + 1, N tokens of a block, D hidden, W draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.sampling.protocol import SamplingParameters
from moe_engine.kernels.speculation.protocol import ChainBuffers
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.worker.captured_groups import AttentionWindows
from moe_engine.worker.speculation.block import BlockDrafter, all_of
from moe_engine.worker.speculation.chain_drafters import ChainDrafter, ChainParts, StaticBatch, StaticTokens


class BlockChain(ChainDrafter):
    """`ChainDrafter` of layers that fill in blocks.

    Args:
        planner: of the head's attention.
        taps: of the model, whose states the head reads.
    """

    def __init__(
        self, parts: ChainParts, chain: ChainBuffers, drafter: BlockDrafter, planner: InPlacePlanner, taps: HiddenTaps
    ) -> None:
        self._parts, self._chain, self._planner, self._taps = parts, chain, planner, taps
        self._layers = layers = drafter.layers
        self._count = count = layers.block.tokens(chain.num_drafts) if chain.num_drafts else 0
        self._parameters: SamplingParameters = parts.memory.parameters(len(chain.rows))
        if not count:
            return
        self._is_whole = count == chain.ids.shape[1]
        self._ids = chain.ids.new_full((len(chain.rows), count), layers.block.mask_id)
        own = (chain.positions, chain.slots, chain.real)
        self._first = own if self._is_whole else tuple(torch.zeros_like(part[:, :count]).contiguous() for part in own)
        self._lens = chain.lens if self._is_whole else torch.zeros_like(chain.lens)
        positions, slots, real = (part.flatten() for part in self._first)
        tokens = StaticTokens(
            positions, slots, self._lens, real, self._ids.flatten(),
            visible=positions.new_full((len(positions),), all_of(count)) if layers.visible else None,
        )  # fmt: skip
        self._batch = StaticBatch(parts, chain, tokens, drafter.batches.kv, windows=AttentionWindows(layers.windows))

    def prepare(self) -> bool:
        return not self._count or self._batch.prepare(self._planner)

    def renew(self, lens: list[int]) -> None:
        if self._count:
            self._batch.renew(lens)

    def draft(self) -> None:
        chain, layers = self._chain, self._layers
        if not self._count:
            return
        self._ids[:, 0].copy_(chain.draft_ids[0])
        if not self._is_whole:
            for own, part in zip(self._first, (chain.positions, chain.slots, chain.real)):
                own.copy_(part[:, : self._count])
            torch.sub(chain.lens, chain.ids.shape[1] - self._count, out=self._lens)
        v = layers.forward(self._batch.forward).unflatten(0, (-1, self._count))
        v = v[:, self._count - chain.num_drafts :].transpose(0, 1).contiguous()  # [S, R, D]
        state = None if layers.markov is None else layers.markov.first_state(len(chain.rows))
        for step, logits in enumerate(self._logits(v)):
            if layers.markov is not None and state is not None:
                bias, state = layers.markov.bias(chain.draft_ids[step], v[step], state)
                logits = bias.add_(logits)
            drawn = self._parts.kernels.draw(logits, self._parameters, chain.draft_uniform[step])
            torch.clamp_min(drawn, 0, out=chain.draft_ids[step + 1])
            if layers.ids is not None:
                chain.draft_ids[step + 1].copy_(layers.ids.index_select(0, chain.draft_ids[step + 1]))
        chain.ids[:, 1:].copy_(chain.draft_ids[1:].t())

    def follow(self, hidden: Tensor, verified: ForwardBatch) -> None:
        self._layers.remember(self._taps.take(), verified)

    def _logits(self, v: Tensor) -> list[Tensor]:
        """v [S, R, D] -> logits [R, W] of each draft: in one product if they fit into the memory of a pass."""
        sizes, steps = self._batch.forward.sizes, v.shape[0]
        if sizes is None and (steps + 2) * v.shape[1] <= self._parts.passes.rows_at_once:
            return list(self._layers.logits(v.flatten(0, 1)).unflatten(0, (steps, -1)))
        return [self._layers.logits(each, self._parts.shared.even_sizes(len(each))) for each in v]
