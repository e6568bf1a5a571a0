"""Drafter of layers that read the target's hidden states: a checkpoint's own multi-token-prediction (MTP) layers
(DeepSeek V3; SGLang's NEXTN), or an EAGLE head, which is one layer of this kind.

Layer j reads the hidden state at a position and the token j + 1 further, and predicts the token after that. Its KV
entry of a position therefore depends on later tokens, and is written when these are known: layer 0's in the step that
computes the position, layer j's up to j tokens later. A draft extend thus recomputes the last M - 1 positions. It only
writes KV (all layers but the last also compute their output v, which the next layer reads).

Drafting starts with layer 0 at the last position, from the target's hidden state. The next layers continue at the same
position, one token further each; after the last layer, that layer continues position by position, with its own v as
input.

A draft is sampled as the target will sample at that position, with the same parameters and random numbers: similar
distributions give the same samples, greedy or not.

Legend: D rows with drafts, M MTP layers, E hidden size, K new tokens of a row in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.decoder.layers import most_tokens
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.drafts.draft_layers import DraftLayers
from moe_engine.models.drafts.mtp import MTPLayers
from moe_engine.models.layers.attention.sparse_chunks import SharedSelection
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import NewRow
from moe_engine.worker.batch.dp_step import DPSteps
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.step_batch import StepBatch
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.sampler import SampledRows, Sampler
from moe_engine.worker.speculation.draft_batch import DraftBatches, places_in_runs
from moe_engine.worker.speculation.drafter import Computed, Drafter
from moe_engine.worker.speculation.drafts import Drafts, DraftTask, target_ids
from moe_engine.worker.speculation.tree import NodeRun, grow

if TYPE_CHECKING:  # of models with a vision tower alone
    from moe_engine.worker.speculation.draft_images import DraftImages


class MTPDrafter(Drafter):
    """The drafter of the module docstring; implements `Drafter`. A row gets drafts only if draft extends have covered
    all its tokens.

    Args:
        images: of rows; None: the model has no vision tower.
    """

    def __init__(
        self,
        layers: DraftLayers,
        batches: DraftBatches,
        rows: RequestRows,
        sampler: Sampler,
        stream: DeviceStream,
        shared: DPSteps,
        hidden: int,
        images: DraftImages | None = None,
    ) -> None:
        self.layers = layers
        self._images = images
        self.batches = batches
        self._rows = rows
        self._sampler = sampler
        self._stream = stream
        self._shared = shared
        self._lookback = layers.num_layers - 1
        self._hidden_size = hidden
        self.states: Tensor | None = None
        """[max_rows, E]: the target's hidden state at each row's last position; None until the first draft extend."""
        self._host_state: np.ndarray | None = None
        self.last_states: Tensor | None = None
        """[max_rows, M - 1, E]: the same at the last M - 1 positions; None until the first draft extend."""
        self.num_cached = np.zeros(rows.max_rows, dtype=np.int64)
        """Tokens of each row from the radix cache, whose hidden states are unknown."""

    def enter(self, new: NewRow) -> None:
        self.num_cached[new.row] = len(new.slots)

    # -- drafting

    def propose(self, task: DraftTask) -> Drafts:
        assert self.states is not None, "a row gets drafts without a draft extend before"
        chain = task.topk == 1
        places = self._places(task.lengths, task.depth if chain else 1)
        if chain and self.layers.fuses_drafts and len(task.rows) <= most_tokens(self._rows.vocab_size):
            return self._propose_fused(task, self.states, places)
        state = self.states.index_select(0, task.rows_device)  # [D, E]
        tokens = [task.roots]
        shared = SharedSelection() if chain and self.layers.shares_selection else None
        for step, batch in enumerate(self.batches.chain(task.rows, task.rows_device, places)):
            sizes = task.sizes[step] if task.sizes else None
            batch = replace(batch, sizes=sizes)
            selection = shared if step >= self._lookback else None  # steps of the last layer
            layer = min(step, self._lookback)
            state = self.layers.forward(layer, tokens[-1], state, batch, selection)
            if not chain:
                expand = _LevelByLevel(self.layers, self.batches, task, state)
                return grow(task, self.layers.logits, state, expand, self._sampler, self.layers.ids)
            sampled = SampledRows(task.rows, task.lengths + 1 + step, task.rows_device)
            head = partial(self.layers.logits, layer=layer)
            tokens.append(target_ids(self.layers.ids, self._sampler.draw(head, state, sampled, sizes)))
        self.join(task.sizes[task.depth :], task.depth)
        return Drafts(torch.stack(tokens, 1))

    def join(self, sizes: Sequence[StepSizes], first: int = 0) -> None:
        """`Drafter.join` from draft step `first` on."""
        for step, some in enumerate(sizes, first):
            layer = min(step, self._lookback)
            head = partial(self.layers.logits, layer=layer)
            self._sampler.passes.join(head, self._join_layer(layer, some), some)

    def join_extend(self) -> None:
        sizes = self._shared.exchange(0) if self._lookback else None
        if sizes is not None:
            for layer in range(self._lookback):
                self._join_layer(layer, sizes)

    def _join_layer(self, layer: int, sizes: StepSizes) -> Tensor:
        return self.layers.join(layer, ForwardBatch.nothing(self.batches.kv, sizes, self._stream.device))

    def _propose_fused(self, task: DraftTask, states: Tensor, places: np.ndarray) -> Drafts:
        """Drafts the chain in one kernel call."""
        levels = [min(step, self._lookback) for step in range(task.depth)]
        steps = self.batches.steps(task.rows, task.rows_device, places, levels)
        parameters, uniform = self._sampler.parameters(task.rows), None
        if parameters is not None:
            lengths = (task.lengths + 1 + np.arange(task.depth)[:, None]).ravel()
            again = SampledRows(np.tile(task.rows, task.depth), lengths, task.rows_device)
            uniform = self._sampler.uniforms(again)
        kv, roots = self.batches.kv, task.roots
        assert isinstance(self.layers, MTPLayers)
        return Drafts(self.layers.draft_chain(states, task.rows_device, roots, steps, kv, parameters, uniform))

    def _places(self, lengths: np.ndarray, num_steps: int) -> np.ndarray:
        """Positions [num_steps, D] of the draft steps."""
        steps = np.arange(num_steps)[:, None]
        return lengths - 1 + np.maximum(steps - self._lookback, 0)

    # -- draft extend

    def update_cache(self, computed: Computed) -> None:
        computed = replace(computed, hidden=self.layers.prepare(computed.hidden))
        rows, starts, counts = computed.rows, computed.starts, computed.counts
        history = self._rows.history
        assert history is not None
        self._store_states(rows, computed)
        if not self._lookback:
            if self.layers.attends_to_extend:
                computed = self._planned(computed)
            forward = self._with_images(computed.batch, computed.forward, rows, starts, counts, computed.offsets)
            self.layers.remember(0, history.at(computed.batch.flat + 1), computed.hidden, forward)
        else:
            first = np.maximum(starts - self._lookback, self.num_cached[rows])
            hidden = self._prepend_last(computed, starts - first)
            sizes = counts + starts - first
            batch, plain = self.batches.runs(rows, first, sizes, num_decodes=0)
            plain = replace(plain, sizes=self._shared.exchange(plain.num_tokens))
            # the batch may reorder runs; hidden has them in their original order
            hidden = hidden.index_select(0, self._stream.from_array(places_in_runs(batch.offsets, sizes)))
            v = hidden
            for layer in range(self._lookback + 1):
                forward = self._with_images(batch, plain, rows, first, sizes, batch.offsets, layer + 1)
                ids = history.at(batch.flat + 1 + layer)
                if layer < self._lookback:
                    v = self.layers.forward(layer, ids, v, forward)
                else:
                    self.layers.remember(layer, ids, v, forward)
            self._store_last(rows, hidden, batch.offsets, starts + self._stream.read(computed.kept) - first)
        if self._images is not None:
            self._images.end()

    def _planned(self, computed: Computed) -> Computed:
        """The same tokens in a batch that is planned for the layers' attention."""
        rows, starts, counts, offsets = computed.rows, computed.starts, computed.counts, computed.offsets
        batch, forward = self.batches.runs(rows, starts, counts, num_decodes=0)
        begins = np.cumsum(counts) - counts
        in_runs = np.arange(int(counts.sum())) + np.repeat(offsets - begins, counts)  # place of each run's tokens
        index = self._stream.from_array(in_runs[places_in_runs(batch.offsets, counts)])
        hidden = computed.hidden.index_select(0, index)
        return replace(computed, batch=batch, forward=forward, hidden=hidden, offsets=batch.offsets)

    def _with_images(
        self, batch: StepBatch, forward: ForwardBatch, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray,
        offsets: np.ndarray, distance: int = 1,
    ) -> ForwardBatch:  # fmt: skip
        """The forward with the image tokens `distance` places after its tokens."""
        if self._images is None:
            return forward
        ahead = self._images.ahead(rows, starts, counts, offsets, distance)
        return replace(self._images.placed(batch, forward), next_images=ahead)

    def _store_states(self, rows: np.ndarray, computed: Computed) -> None:
        """Stores the hidden states at the rows' last tokens."""
        hidden = computed.hidden
        if self.states is None:
            self.states = hidden.new_zeros(self._rows.max_rows, self._hidden_size)
            self._host_state = self._stream.host_view(self.states)
        host = self._stream.host_view(hidden)
        if self._host_state is not None and host is not None:
            self._host_state[rows] = host[computed.offsets + self._stream.read(computed.kept) - 1]
        else:
            last = self._stream.from_array(computed.offsets - 1) + computed.kept
            self.states.index_copy_(0, self._stream.from_array(rows), hidden.index_select(0, last))

    def _prepend_last(self, computed: Computed, again: np.ndarray) -> Tensor:
        """The step's hidden states, with the `again[i]` last ones of earlier steps before those of run i, by row."""
        hidden = computed.hidden
        if self.last_states is None:
            self.last_states = hidden.new_zeros(self._rows.max_rows, self._lookback, self._hidden_size)
        old = self.last_states.view(-1, self._hidden_size)
        both = torch.cat((old, hidden))
        index = []
        for row, offset, count, num in zip(computed.rows, computed.offsets, computed.counts, again):
            end = (row + 1) * self._lookback
            index += [*range(end - num, end), *range(len(old) + offset, len(old) + offset + count)]
        return both.index_select(0, self._stream.from_array(np.array(index, dtype=np.int64)))

    def _store_last(self, rows: np.ndarray, hidden: Tensor, offsets: np.ndarray, kept: np.ndarray) -> None:
        """Stores the hidden states at each row's last positions; zeros before a short run, which are never read."""
        assert self.last_states is not None
        for row, offset, count in zip(rows.tolist(), offsets.tolist(), kept.tolist()):
            num = min(self._lookback, count)
            self.last_states[row, self._lookback - num :] = hidden[offset + count - num : offset + count]


class _LevelByLevel:
    """Expands the nodes of a tree: one layer per level, then the last layer for all further levels."""

    def __init__(self, layers: DraftLayers, batches: DraftBatches, task: DraftTask, state: Tensor) -> None:
        self._layers = layers
        self._batches = batches
        self._task = task
        self._last_layer = layers.num_layers - 1
        self._states = state[:, None]  # [D, F, E]: v of the level before
        self._inputs: list[Tensor] = []  # of the nodes in `_run`, each [D, F, E]
        self._run = self._start()

    def _start(self) -> NodeRun:
        first = self._task.lengths - (1 if self._last_layer else 0)
        return NodeRun(self._batches, self._task.rows, first, first)

    def __call__(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        if level <= self._last_layer:  # a new layer: its KV cache has none of the nodes above
            self._run, self._inputs = self._start(), []
        width = self._states.shape[-1]
        self._inputs.append(self._states.gather(1, parents[:, :, None].expand(-1, -1, width)))
        ids, batch = self._run.add(tokens, parents)
        hidden = torch.cat(self._inputs, 1)
        v = self._layers.forward(min(level, self._last_layer), ids.flatten(), hidden.flatten(0, 1), batch)
        self._states = v.view(*ids.shape, width)[:, -tokens.shape[1] :]
        return self._states.flatten(0, 1)
