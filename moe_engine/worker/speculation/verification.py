"""Verification of drafts by the target: the nodes of a step's decodes, and the batch of drafts and prompts.

Legend: D decodes, N max tokens of a decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.types import StepPlan
from moe_engine.worker.batch.batch_builder import BatchBuilder
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.step_batch import RaggedTokens, StepBatch
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.speculation.drafts import Drafts


@dataclass(frozen=True)
class Decodes:
    """Values shared by steps whose decodes have the same rows and numbers of drafts.

    `nodes[d, n]` is the row of logits of node n of decode d; a decode without drafts repeats its only row. The rows of
    logits after the nodes belong to prompts.
    """

    plan_rows: list[int]
    plan_counts: list[int]
    rows: np.ndarray  # [D] int64
    rows_device: Tensor  # [D] int64
    counts: np.ndarray  # [D] int64
    most: int  # N
    is_even: bool  # all have N nodes
    with_drafts: np.ndarray  # indices of decodes with drafts
    nodes: Tensor  # [D, N] int64
    host_nodes: np.ndarray  # [D, N] int64

    @property
    def num_nodes(self) -> int:
        """Rows of logits of all nodes."""
        return int(self.counts.sum())

    @property
    def real(self) -> np.ndarray:
        """[D, N] bool: nodes that are not repetitions."""
        return np.arange(self.most) < self.counts[:, None]


@dataclass(frozen=True)
class Verification:
    """The decodes of a step, with their drafts, before the target has run."""

    decodes: Decodes
    starts: np.ndarray  # [D] int64
    tokens: Tensor  # [D, N] int64, -1: no node
    parents: Tensor | None  # [D, N], None for chains
    depth: int

    @property
    def rows(self) -> np.ndarray:
        """[D] int64."""
        return self.decodes.rows

    @property
    def rows_device(self) -> Tensor:
        """[D] int64."""
        return self.decodes.rows_device

    @property
    def counts(self) -> np.ndarray:
        """Nodes of each, [D] int64."""
        return self.decodes.counts

    @property
    def nodes(self) -> Tensor:
        """[D, N] int64, see `Decodes`."""
        return self.decodes.nodes


class VerificationBatches:
    """Builds the batches of decodes with drafts, and of the prompts of the same step."""

    def __init__(self, rows: RequestRows, builder: BatchBuilder, stream: DeviceStream) -> None:
        self._rows = rows
        self._builder = builder
        self._stream = stream
        self._same: Decodes | None = None
        self._runs: tuple[Decodes, StateRuns] | None = None
        self._none = self._make_decodes([], [], np.zeros(0, dtype=np.int64))

    def decodes_of(self, plan: StepPlan) -> Decodes:
        """The decodes of a plan; the same object while rows and counts are the same."""
        num, same = plan.num_decodes, self._same
        if not num:
            return self._none  # keeps `_same` over a prefill between two steps of the same decodes
        plan_rows, plan_counts = plan.rows[:num], plan.counts[:num]
        rows = None
        if same is not None and same.plan_rows == plan_rows:
            if same.plan_counts == plan_counts:
                return same
            rows = same.rows  # caches are keyed by the identity of this object
        if rows is None:
            rows = np.array(plan_rows, dtype=np.int64)
        self._same = self._make_decodes(plan_rows, plan_counts, rows)
        return self._same

    def _make_decodes(self, plan_rows: list[int], plan_counts: list[int], rows: np.ndarray) -> Decodes:
        counts = np.array(plan_counts, dtype=np.int64)
        most = int(counts.max(initial=1))
        first = np.cumsum(counts) - counts
        nodes = first[:, None] + np.minimum(np.arange(most), counts[:, None] - 1)
        return Decodes(
            plan_rows=plan_rows,
            plan_counts=plan_counts,
            rows=rows,
            rows_device=self._stream.from_array(rows),
            counts=counts,
            most=most,
            is_even=bool((counts == most).all()),
            with_drafts=np.flatnonzero(counts > 1),
            nodes=self._stream.from_array(nodes),
            host_nodes=nodes,
        )

    def build(self, plan: StepPlan, verification: Verification) -> StepBatch:
        """The batch of drafts and prompts."""
        decodes = verification.decodes
        if decodes.is_even and verification.parents is None and len(plan.rows) == plan.num_decodes:
            ids = verification.tokens.clamp_min(0)
            batch = self._builder.uniform.batch(
                decodes.rows, decodes.rows_device, verification.starts, decodes.most, ids
            )
            return batch if self._rows.states is None else replace(batch, stored_states=self._stored_states(decodes))
        num, counts = plan.num_decodes, np.array(plan.counts, dtype=np.int64)
        rows, starts = np.array(plan.rows, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
        starts[:num] = verification.starts
        ends = np.cumsum(counts)
        num_decode_tokens = int(ends[num - 1]) if num else 0
        samples = np.array(plan.samples[num:], dtype=bool)
        ids = verification.tokens.clamp_min(0)
        if num and ids.numel() != num_decode_tokens:
            computed = np.arange(ids.shape[1]) < verification.counts[:, None]
            ids = ids.flatten().index_select(0, self._stream.from_array(np.flatnonzero(computed)))
        positions = visible = None
        if verification.parents is not None:
            drafts = Drafts(verification.tokens, verification.parents)
            levels, masks = drafts.levels(), drafts.visible()
            assert levels is not None and masks is not None
            real = np.arange(ids.shape[-1] if ids.dim() == 2 else masks.shape[1]) < verification.counts[:, None]
            prompt_positions = [np.arange(s, s + c) for s, c in zip(starts[num:].tolist(), counts[num:].tolist())]
            levels_read, masks_read = self._stream.read(torch.stack((levels, masks)))  # one synchronization, not two
            positions = np.concatenate([(verification.starts[:, None] + levels_read)[real], *prompt_positions])
            visible = masks_read[real]
        return self._builder.assemble(
            RaggedTokens(
                rows=rows,
                starts=starts,
                counts=counts,
                num_decodes=num,
                device_ids=ids.flatten(),
                host_ids=self._builder.host_ids(plan),
                slots=np.array(plan.slots, dtype=np.int64),
                sampled=np.concatenate((np.arange(num_decode_tokens), ends[num:][samples] - 1)),
                positions=positions,
                visible=visible,
                stores=None if self._rows.states is None else self._stores(plan, decodes),
            )
        )

    def _stored_states(self, decodes: Decodes) -> StateRuns:
        """Pool rows for the states after each token of an even verification; the same object for the same decodes."""
        if self._runs is None or self._runs[0] is not decodes:
            assert self._rows.states is not None
            count, num = decodes.most, len(decodes.rows)
            starts = torch.from_numpy(np.arange(0, (num + 1) * count, count, dtype=np.int32))
            places = self._stream.from_array(self._rows.states.positions(decodes.rows, count).ravel())
            stored = [range(1, count + 1)] * num
            runs = StateRuns([count] * num, self._stream.upload(starts), decodes.rows_device, stored, places)
            self._runs = decodes, runs
        return self._runs[1]

    def _stores(self, plan: StepPlan, decodes: Decodes) -> dict[int, list[tuple[int, int]]]:
        """`RaggedTokens.stores` of decodes and prompts."""
        assert self._rows.states is not None
        stores = self._builder.cuts(plan) or {}
        places = self._rows.states.positions(decodes.rows, decodes.most).tolist()
        for row, count, own in zip(decodes.plan_rows, decodes.plan_counts, places):
            stores[row] = list(enumerate(own[:count], 1))
        return stores
