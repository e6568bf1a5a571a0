"""Drafts of captured steps, by drafter: batches over fixed buffers, the forwards that draft, the draft extend.

Each class holds one captured size (`ChainDrafter`). Lengths are on the device; host lists are upper bounds.

Legend: R requests, S drafts of each, K = S + 1, N tokens of a request in a run, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.sampling.protocol import SamplingParameters
from moe_engine.kernels.speculation.protocol import ChainBuffers, ChainKernels, RunBuffers
from moe_engine.kernels.speculation.trees import LevelBuffers, TreeBuffers
from moe_engine.models.batch import ForwardBatch, PoolStarts, WindowSlots
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.worker.batch.dp_step import DPSteps
from moe_engine.worker.captured_groups import ALL_POSITIONS, AttentionWindows, GroupPlans
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.logits_passes import Head, LogitsPasses
from moe_engine.worker.speculation.chain_memory import ChainMemory
from moe_engine.worker.speculation.mtp import MTPDrafter
from moe_engine.worker.speculation.ngram import NgramDrafter
from moe_engine.worker.speculation.standalone import StandaloneDrafter


@dataclass(frozen=True)
class ChainParts:
    """Objects shared by all sizes. `tables`: of all rows, on the device. `windows`: of the model."""

    kernels: ChainKernels
    tables: RowTables
    memory: ChainMemory
    page_size: int
    shared: DPSteps
    passes: LogitsPasses
    stream: DeviceStream
    windows: AttentionWindows = ALL_POSITIONS


@dataclass(frozen=True)
class StaticTokens:
    """The tokens of a forward in fixed buffers, the same number of each of R requests.

    `window_slots`: in the table of `AttentionWindows`, if there is one. `visible`: as `PagedQueries.visible`.
    """

    positions: Tensor  # [R * count] int64
    slots: Tensor  # [R * count] int64
    lens: Tensor  # [R] int32: context tokens
    real: Tensor  # [R * count] int32: 0 for padding
    ids: Tensor | None = None  # [R * count] int64; None: the caller of the forward gives them
    window_slots: Tensor | None = None  # [R * count] int64
    visible: Tensor | None = None  # [R * count] int64, of draft trees

    @classmethod
    def of(
        cls, buffers: ChainBuffers | RunBuffers | LevelBuffers | TreeBuffers, ids: Tensor | None = None
    ) -> StaticTokens:
        """All tokens of the buffers; of a `ChainBuffers`, those of verification."""
        flat = buffers.positions.flatten(), buffers.slots.flatten(), buffers.lens, buffers.real.flatten()
        if isinstance(buffers, (LevelBuffers, TreeBuffers)):
            return cls(*flat, ids, visible=buffers.visible.flatten())
        return cls(*flat, ids, buffers.window_slots.flatten())


class StaticBatch:
    """A forward over fixed buffers, with the plans of the last `prepare`.

    Args:
        shared: ranks share its layers.
        windows: of its layers.
    """

    def __init__(
        self, parts: ChainParts, chain: ChainBuffers, tokens: StaticTokens, kv: Sequence[Any], *,
        shared: bool = True, windows: AttentionWindows = ALL_POSITIONS,
    ) -> None:  # fmt: skip
        size, count = len(tokens.lens), len(tokens.positions) // len(tokens.lens)
        self._count, self._windows, self._slots = count, windows, parts.tables.slots
        starts = torch.arange(0, size * count + 1, count, dtype=torch.int32)
        self.queries = queries = PagedQueries(
            query_lens=[count] * size,
            context_lens=[count] * size,
            rows=chain.query_rows,
            query_starts=parts.stream.upload(starts),
            context_lens_device=tokens.lens,
            slot_table=windows.table_of(windows.first, self._slots),
            page_size=parts.page_size,
            window=windows.first,
            visible=tokens.visible,
        )
        own = None
        if windows.table is not None:
            assert tokens.window_slots is not None
            own = WindowSlots(tokens.window_slots, windows.table)
        positions, none = tokens.positions, tokens.positions[:0]
        self.forward = ForwardBatch(
            input_ids=none if tokens.ids is None else tokens.ids, positions=positions, slots=tokens.slots,
            logits_rows=none, attention=AttentionBatch(queries, None), attention_plan=None, kv=kv,
            sizes=parts.shared.even_sizes(len(positions)) if shared else None, real=tokens.real, windows=own,
        )  # fmt: skip
        self.plan: GroupPlans | None = None

    def prepare(self, planner: InPlacePlanner) -> bool:
        """Plans again, for one capture; False if the attention backend plans by exact lengths on the host."""
        return self._has(self._planned(planner))

    def share(self, other: StaticBatch, planner: InPlacePlanner) -> bool:
        """`prepare`, with the plan of a batch of the same size if it is valid for this batch too."""
        plan = other.plan
        return self._has(self._planned(planner) if plan is None or plan.common else plan)

    def _planned(self, planner: InPlacePlanner) -> GroupPlans | None:
        return GroupPlans.of(self.forward.attention, planner, self._windows, self._slots)

    def _has(self, plan: GroupPlans | None) -> bool:
        if plan is None or not plan.on_device:
            return False
        self.plan, self.forward = plan, plan.planned(self.forward)
        return True

    def renew(self, lens: Sequence[int]) -> None:
        """Renews the plan by upper bounds of the context tokens of each request."""
        assert self.plan is not None
        self.queries.context_lens[:] = [max(length, self._count) for length in lens]
        self.plan.renew()


def draft_tokens(chain: ChainBuffers, step: int) -> StaticTokens:
    """The tokens of a step of drafting, one of each request."""
    return StaticTokens(
        chain.draft_positions[step], chain.draft_slots[step], chain.draft_lens[step], chain.draft_real,
        window_slots=chain.draft_window_slots[step],
    )  # fmt: skip


class ChainDrafter:
    """The drafts of one captured size; here without forwards."""

    def prepare(self) -> bool:
        """Plans its forwards again; False as in `StaticBatch.prepare`."""
        return True

    def renew(self, lens: list[int]) -> None:
        """Renews the plans that verification does not renew; `lens`: upper bounds [R] of context tokens."""

    def draft(self) -> None:
        """Runs after `ChainKernels.inputs`: writes the drafts to `ChainBuffers.ids`."""
        raise NotImplementedError

    def follow(self, hidden: Tensor, verified: ForwardBatch) -> None:
        """Runs after `ChainKernels.accept`, with the hidden states [R * K, *] of verification."""


class _ModelDrafts:
    """Draws drafts from hidden states, in forwards of one token for each request."""

    def __init__(
        self, parts: ChainParts, chain: ChainBuffers, kv: Sequence[Any], planner: InPlacePlanner, *,
        shared: bool = True, windows: AttentionWindows = ALL_POSITIONS,
    ) -> None:  # fmt: skip
        self.parts, self.chain, self.planner = parts, chain, planner
        self.parameters: SamplingParameters = parts.memory.parameters(len(chain.rows))
        self.steps = [
            StaticBatch(parts, chain, draft_tokens(chain, step), kv, shared=shared, windows=windows)
            for step in range(chain.num_drafts)
        ]
        if chain.pool > 1:
            for step, *starts in zip(self.steps, chain.draft_places, chain.draft_axes):
                step.forward = replace(step.forward, pool_starts=PoolStarts(*starts))

    def prepare(self, first: int = 0) -> bool:
        """Plans the steps from the first one on."""
        used = self.steps[first:]
        return not used or (
            used[0].prepare(self.planner) and all(step.share(used[0], self.planner) for step in used[1:])
        )

    def draw(self, step: int, state: Tensor, logits: Head, sizes: StepSizes | None) -> Tensor:
        """Drafts [R] of hidden states [R, D]."""
        parts, uniform = self.parts, self.chain.draft_uniform[step]

        def work(rows: slice, found: Tensor) -> Tensor:
            return parts.kernels.draw(found, self.parameters.part(rows), uniform[rows])

        drawn = parts.passes.over(logits, state, sizes, work)
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)

    def store(self) -> None:
        self.chain.ids[:, 1:].copy_(self.chain.draft_ids[1:].t())


class MTPChain(ChainDrafter):
    """`ChainDrafter` of MTP layers or an EAGLE head. Several layers follow in a run, which begins with the tokens whose
    KV in deeper layers depends on tokens accepted just now.

    Args:
        planner: of the drafter's attention; `own`: True if it is not the model's, so that its plans are renewed
        separately.
    """

    def __init__(
        self, parts: ChainParts, chain: ChainBuffers, drafter: MTPDrafter, planner: InPlacePlanner, own: bool,
        taps: HiddenTaps | None,
    ) -> None:  # fmt: skip
        self._drafter, self._own, self._taps = drafter, own, taps
        windows = parts.windows if drafter.layers.windowed else ALL_POSITIONS
        self._drafts = _ModelDrafts(parts, chain, drafter.batches.kv, planner, windows=windows)
        self._lookback = drafter.layers.num_layers - 1
        if self._lookback:
            self._runs = runs = parts.memory.runs_of(len(chain.rows), chain.num_drafts)
            self._run = StaticBatch(parts, chain, StaticTokens.of(runs), drafter.batches.kv, windows=windows)

    def prepare(self) -> bool:
        return self._drafts.prepare() and (not self._lookback or self._run.prepare(self._drafts.planner))

    def renew(self, lens: list[int]) -> None:
        planned = [*self._drafts.steps[:1], *([self._run] if self._lookback else [])]
        if planned and planned[0].plan is not None and planned[0].plan.common:
            planned = planned[:1] if self._own else []
        for batch in planned:
            batch.renew(lens)

    def draft(self) -> None:
        drafts, layers = self._drafts, self._drafter.layers
        parts, chain = drafts.parts, drafts.chain
        if not drafts.steps:
            return
        state = parts.tables.states.index_select(0, chain.query_rows)
        for step, batch in enumerate(drafts.steps):
            layer = min(step, self._lookback)
            state = layers.forward(layer, chain.draft_ids[step], state, batch.forward)
            ids = chain.draft_ids[step + 1]
            head = partial(layers.logits, layer=layer)
            torch.clamp_min(drafts.draw(step, state, head, batch.forward.sizes), 0, out=ids)
            if layers.ids is not None:
                ids.copy_(layers.ids.index_select(0, ids))
        drafts.store()

    def follow(self, hidden: Tensor, verified: ForwardBatch) -> None:
        layers, parts, chain = self._drafter.layers, self._drafts.parts, self._drafts.chain
        hidden = layers.prepare(hidden if self._taps is None else self._taps.take())
        parts.kernels.keep_states(parts.tables.states, hidden, chain.rows, chain.last)
        if not self._lookback:
            layers.remember(0, chain.next_ids.flatten(), hidden, verified)
            return
        runs, last = self._runs, self._drafter.last_states
        assert last is not None
        parts.kernels.runs(parts.tables, chain, runs)
        flat = last.view(-1, last.shape[-1])
        v = parts.kernels.gather_states(flat, hidden, runs.sources.flatten())
        kept = parts.kernels.gather_states(flat, hidden, runs.kept.flatten())
        for layer in range(self._lookback):
            v = layers.forward(layer, runs.ids[layer].flatten(), v, self._run.forward)
        layers.remember(self._lookback, runs.ids[self._lookback].flatten(), v, self._run.forward)
        whole = kept.view(len(chain.rows), -1)
        every = torch.arange(len(whole), device=whole.device)
        parts.kernels.keep_states(last.view(len(last), -1), whole, chain.rows, every)


class StandaloneChain(ChainDrafter):
    """`ChainDrafter` of a draft model. Its KV may lack the last two tokens, the last accepted draft and the root: the
    first forward computes both."""

    def __init__(
        self, parts: ChainParts, chain: ChainBuffers, drafter: StandaloneDrafter, planner: InPlacePlanner
    ) -> None:  # fmt: skip
        self._model = drafter.model
        windows = AttentionWindows(drafter.windows)
        self._drafts = _ModelDrafts(parts, chain, drafter.batches.kv, planner, shared=False, windows=windows)
        self._runs = runs = parts.memory.runs_of(len(chain.rows), chain.num_drafts)
        tokens = StaticTokens.of(runs, runs.ids[0].flatten())
        self._run = StaticBatch(parts, chain, tokens, drafter.batches.kv, shared=False, windows=windows)

    def prepare(self) -> bool:
        return not self._drafts.steps or (self._drafts.prepare(1) and self._run.prepare(self._drafts.planner))

    def renew(self, lens: list[int]) -> None:
        if not self._drafts.steps:
            return
        self._run.renew(lens)
        if self._run.plan is not None and not self._run.plan.common:
            for step in self._drafts.steps[1:2]:
                step.renew(lens)

    def draft(self) -> None:
        drafts = self._drafts
        parts, chain, model = drafts.parts, drafts.chain, self._model
        if not drafts.steps:
            return
        parts.kernels.runs(parts.tables, chain, self._runs)
        both = model.forward(self._run.forward)  # [R * 2, D]
        state = both.view(len(chain.rows), -1, both.shape[-1])[:, -1].contiguous()
        for step, batch in enumerate(drafts.steps):
            if step:
                state = model.forward(replace(batch.forward, input_ids=chain.draft_ids[step]))
            torch.clamp_min(drafts.draw(step, state, model.logits, None), 0, out=chain.draft_ids[step + 1])
        drafts.store()


class NgramChain(ChainDrafter):
    """`ChainDrafter` of prompt lookup."""

    def __init__(self, parts: ChainParts, chain: ChainBuffers, drafter: NgramDrafter) -> None:
        self._parts, self._chain, self._sizes = parts, chain, (drafter.min_match, drafter.max_match)

    def draft(self) -> None:
        if self._chain.num_drafts:
            self._parts.kernels.find_ngrams(self._parts.tables, self._chain, *self._sizes)
