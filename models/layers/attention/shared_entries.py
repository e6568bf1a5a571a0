"""Attention to a window of tokens and to entries that several layers read (DeepSeek V4.1).

Some layers write entries of one or two tokens, with an index key made from each; some select entries by an indexer. All
other layers read the entries and the selection of the layer before them. Keys and entries are rounded to the numbers of
the formats with which the model was trained.

Legend: T tokens, E entries that a step completes, W channels of an entry, I of an index key.
Source: transformers' `modeling_deepseek_v41.py`; DeepSeek V4.1's technical report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Shift
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.compression.protocol import CompressedTokens, Kept, PairedEntries
from moe_engine.kernels.indexer.candidates import Candidates, CandidateTable
from moe_engine.kernels.indexer.protocol import BlockChoice, IndexerKernel
from moe_engine.kernels.ops.block_rounding import E2M1, E2M1_SMALL, E4M3, round_rows
from moe_engine.kernels.ops.protocol import CacheRows, Ops, RotaryTable, RoundRows
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.compressed_cache import CompressedCache
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.compressed import MAX_CANDIDATES, SharedEntriesConfig
from moe_engine.models.layers.attention.compressed_attention import CompressedAttention
from moe_engine.models.layers.attention.compressed_in_place import StepInPlace
from moe_engine.models.layers.attention.compressed_rows import AttendedRows, CompressedStep, EntrySelection
from moe_engine.models.layers.attention.compressed_step import StepRows
from moe_engine.models.layers.attention.index_gates import IndexGates
from moe_engine.models.layers.attention.latent_queries import NormedLatent
from moe_engine.models.layers.fixed_memory import FixedMemory
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource


@dataclass(frozen=True)
class WrittenEntries:
    """The entries of a step's tokens, in layers whose entries are of two tokens.

    Attributes:
        tokens: [E] int64, those that complete an entry; None: all tokens of a captured step, of which those that
            complete none write to the dummy page.
        slots: [E] int64, rows of the entries. positions: [E] int64, of their first tokens.
        stored: [E] int64, rows of `Kept` of the first tokens. in_step: [E, 1], whether these are tokens of the step.
    """

    tokens: Tensor | None
    slots: Tensor
    positions: Tensor
    stored: Tensor
    in_step: Tensor

    @classmethod
    def of(cls, tokens: CompressedTokens, kept: Kept, captured: bool) -> WrittenEntries:
        complete, last = tokens.positions % 2 == 1, None
        if not captured:
            last = complete.nonzero().squeeze(1)
            positions, starts, rows, table, slots = tokens
            tokens = CompressedTokens(positions[last], starts[last], rows[last], table, slots[last])
        slots, before = tokens.slots // 2, (tokens.positions - 1).clamp_(min=0)
        if captured:
            slots = slots * complete
        stored = kept.places(before, tokens.rows, tokens.slots)
        return cls(last, slots, before, stored, (tokens.positions > tokens.starts).unsqueeze(1))


@dataclass
class SharedStep:
    """A step of the layers of one rate, and what a layer leaves to those after it.

    Attributes:
        rows: None for a step without tokens.
        written: None with entries of one token, and where one launch sums two.
        first_entry: the row of the first entry in the rows of attention as they are now.
        memory: of the candidates of a captured step; None: they are made when they are needed.
        candidates: None: all entries are candidates.
    """

    step: CompressedStep
    rows: AttendedRows | None
    written: WrittenEntries | None
    first_entry: int
    memory: CandidateMemory | None = None
    candidates: Candidates | None = None
    _entries: Tensor | None = None
    """Which of the rows are entries, int32."""

    def rows_of(self, cache: CompressedCache, num_slots: int, shifts: bool) -> AttendedRows:
        """The rows of a layer, whose entries have other numbers in each layer's cache.

        Args:
            num_slots: of windows; entries are after them.
            shifts: attention adds the difference itself.
        """
        assert self.rows is not None
        slots = self.rows.selected.slots
        if cache.num_slots != self.first_entry:
            if shifts:
                shift = Shift(num_slots, cache.num_slots - self.first_entry)
                return replace(self.rows, selected=replace(self.rows.selected, shift=shift))
            if self._entries is None:
                self._entries = (slots >= num_slots).int()
            slots.add_(self._entries, alpha=cache.num_slots - self.first_entry)
            self.first_entry = cache.num_slots
        return self.rows

    def selection_of(self, cache: CompressedCache) -> tuple[EntrySelection, Tensor] | None:
        """The step's selection, if it has one, and the rows of attention that it sets, as this layer's cache numbers
        the entries."""
        if (selection := self.step.selection) is None:
            return None
        assert self.rows is not None
        self.first_entry = cache.num_slots
        return replace(selection, first_entry=cache.num_slots), self.rows.selected.slots


class CandidateMemory:
    """Memory of a captured step's candidates. `blocks`: those of its tokens."""

    def __init__(
        self, attention: SharedEntriesConfig, tokens: int, table: Tensor, indexer: IndexerKernel, memory: FixedMemory
    ) -> None:
        count, size, device = attention.candidate_blocks, attention.candidate_size, table.device
        self.blocks = BlockChoice(size, memory.take("blocks", (tokens, count), device))
        slots = memory.take("candidates", (tokens, count * size), device)
        lens = memory.take("numbers of candidates", (tokens,), device)
        plan = partial(indexer.plan_in_place, heads=attention.index_heads)
        self.table = CandidateTable(slots, lens, [count * size] * tokens, plan)


class SharedInPlace:
    """`RenewablePlan` of a decode group: that of each rate, and memory of candidates."""

    common = False

    def __init__(self, plans: dict[int, StepInPlace], candidates: CandidateMemory | None) -> None:
        self.plans, self.candidates = plans, candidates

    @property
    def on_device(self) -> bool:
        return all(plan.on_device for plan in self.plans.values())

    def renew(self) -> None:
        for plan in self.plans.values():
            plan.renew()


class SharedSteps:
    """Builds the steps of all rates."""

    def __init__(self, attention: SharedEntriesConfig, backends: Backends) -> None:
        self._layers = {rate: layer for layer, rate in reversed([*enumerate(attention.rates)])}
        attend: Any = backends.attention
        self._attention, self._indexer = attention, backends.indexer
        self._sum_pairs = None if backends.compression is None else backends.compression.sum_pairs
        self._rows = {
            rate: StepRows(_view(attention, rate), {rate: layer}, attend, backends.indexer, backends.compression)
            for rate, layer in self._layers.items()
        }
        self._memory = FixedMemory()

    def plan_in_place(self, batch: AttentionBatch) -> SharedInPlace | None:
        """The plan of captured decodes; None if one of the kernels cannot be captured."""
        plans = {}
        for rate, rows in self._rows.items():
            plan = rows.plan_in_place(batch)
            if plan is None:
                return None
            plans[rate] = plan
        a, candidates = self._attention, None
        if a.candidate_source >= 0:
            assert batch.decode is not None and self._indexer is not None
            table = batch.decode.slot_table
            if table.shape[1] // a.rate(a.candidate_source) > a.candidate_blocks * a.candidate_size:
                candidates = CandidateMemory(a, batch.decode.num_tokens, table, self._indexer, self._memory)
        return SharedInPlace(plans, candidates)

    def of(self, batch: ForwardBatch) -> dict[int, SharedStep]:
        """By rate."""
        found, plan = {}, batch.attention_plan
        captured = isinstance(plan, SharedInPlace)
        for rate, rows in self._rows.items():
            step = rows.of(replace(batch, attention_plan=plan.plans[rate]) if captured else batch)
            cache: CompressedCache = batch.kv[self._layers[rate]]
            written = None
            if rate > 1 and self._sum_pairs is None:
                written = WrittenEntries.of(step.tokens, cache.kept[0], captured)
            memory = plan.candidates if captured and rate == self._attention.rate_of_candidates else None
            found[rate] = SharedStep(step, step.rows.get(rate), written, cache.num_slots, memory)
        return found


class EntryWriter:
    """Entries and index keys of tokens. On many ranks every rank has all of it."""

    def __init__(
        self, backends: Backends, reader: WeightSource, prefix: str, config: ModelConfig, rate: int, rotary: RotaryTable
    ) -> None:
        a = config.attention
        assert isinstance(a, SharedEntriesConfig)
        assert backends.compression is not None
        self._sum_pairs = backends.compression.sum_pairs
        self._round, self._rotary, self._rate, self._width = _rounding(backends.ops), rotary, rate, a.head_dim
        names = [f"{prefix}.compressor.{name}" for name in ("kv_proj", "gate_proj")[: 1 + (rate > 1)]]
        self._project = load_linear(backends.linear, reader, names, [a.head_dim] * len(names), config.hidden_size)
        self._norm = RMSNorm(backends.ops, reader, f"{prefix}.compressor.norm", a.head_dim, config.norm_eps)
        self._key = load_linear(backends.linear, reader, [f"{prefix}.indexer.wk"], [a.index_width], a.head_dim)
        self._key_norm = RMSNorm(backends.ops, reader, f"{prefix}.indexer.k_norm", a.index_width, config.norm_eps)
        self.input_format = self._project.input_format
        """Activation format of the hidden states."""

    def update(self, hidden: Activation, shared: SharedStep, cache: CompressedCache) -> None:
        """Writes the entries that the tokens complete, and what they contribute to later ones."""
        projected, tokens = self._project(hidden), shared.step.tokens
        if self._rate == 1:
            latents, slots, positions = self._norm(projected), tokens.slots, tokens.positions
        else:
            latents, slots, positions = self._pairs(projected, shared, cache.kept[0])
        assert cache.index_keys is not None
        keys, norm = self._key(latents), self._key_norm
        to = CacheRows(slots, cache.index_keys.squeeze(1))
        self._round(keys.unsqueeze(1), (norm.weight, norm.eps), positions, self._rotary, E2M1, to)
        self._round(latents.unsqueeze(1), None, positions, self._rotary, E2M1_SMALL, CacheRows(slots, cache.entries))

    def _pairs(self, projected: Tensor, shared: SharedStep, kept: Kept) -> PairedEntries:
        """Normed entries of two tokens; keeps what later ones need."""
        own, written = shared.step.kept[2], shared.written
        if written is None:
            assert self._sum_pairs is not None
            norm, places = (self._norm.weight, self._norm.eps), own.places if own.apart else None
            found = self._sum_pairs(projected, kept, norm, shared.step.tokens, places)
            if own.apart:
                return found
        else:
            sums = self._sums(projected, kept, written).to(projected.dtype)
            found = PairedEntries(self._norm(sums), written.slots, written.positions)
        own.keep(projected.to(kept.rows.dtype), kept)
        return found

    def _sums(self, projected: Tensor, kept: Kept, written: WrittenEntries) -> Tensor:
        """The sums [E, W] of the entries' two tokens, weighted by the softmax of their gates; float32."""
        stored, last = kept.rows[written.stored], written.tokens
        if last is None:
            own, before = projected, projected.roll(1, 0)
        else:
            own, before = projected[last], projected[(last - 1).clamp(min=0)]
        before = torch.where(written.in_step, before, stored).float()
        (value, gate), (first, first_gate) = (part.split(self._width, 1) for part in (own.float(), before))
        return first + (gate - first_gate).sigmoid() * (value - first)


class SharedIndexer:
    """Selects entries for each query token. Replicated on the ranks of an attention group."""

    def __init__(
        self, backends: Backends, reader: WeightSource, prefix: str, config: ModelConfig, layer: int,
        rotary: RotaryTable,
    ) -> None:  # fmt: skip
        a = config.attention
        assert isinstance(a, SharedEntriesConfig) and backends.indexer is not None
        self._round, self._kernel, self._rotary, self._config, self._layer = (
            _rounding(backends.ops), backends.indexer, rotary, a, layer,
        )  # fmt: skip
        gates = reader.tensor(f"{prefix}.weights_proj.weight", (a.index_heads, config.hidden_size), dtype=torch.float32)
        self._gates = IndexGates(backends, gates * (a.index_heads * a.index_width) ** -0.5)
        self.input_format: ActivationFormat = UNQUANTIZED
        """Activation format of the hidden states: the head weights are products of unquantized numbers."""

    def update(
        self, hidden: Activation, latent: NormedLatent, positions: Tensor, shared: SharedStep, cache: CompressedCache
    ) -> None:
        """Sets the selected entries among the rows of attention, if the step selects."""
        if (found := shared.selection_of(cache)) is None:
            return
        (selection, rows), a = found, self._config
        assert cache.index_keys is not None
        q = latent.index_queries().view(-1, a.index_heads, a.index_width)
        q = self._round(q, None, positions, self._rotary, E2M1)
        weights = self._gates(hidden)
        if a.limits_candidates(self._layer) and shared.candidates is not None:
            for part, table in shared.candidates.parts():
                own = selection.among(table, part)
                own.select(self._kernel, q[part], weights[..., part, :], cache.index_keys, a.top_k, rows[part])
            return
        blocks = self._blocks(selection.queries, shared) if self._layer == a.candidate_source else None
        selection.select(self._kernel, q, weights, cache.index_keys, a.top_k, rows, blocks)
        if blocks is not None:
            memory = None if shared.memory is None else shared.memory.table
            shared.candidates = Candidates(selection.queries, blocks, self._kernel.plan, MAX_CANDIDATES, memory)

    def _blocks(self, queries: PagedQueries, shared: SharedStep) -> BlockChoice | None:
        """Memory for the blocks of candidates; None: all entries are candidates."""
        a = self._config
        if shared.memory is not None:
            return shared.memory.blocks
        if queries.slot_table.shape[1] // queries.rate <= a.candidate_blocks * a.candidate_size:
            return None
        shape = queries.num_tokens, a.candidate_blocks
        return BlockChoice(a.candidate_size, torch.empty(shape, dtype=torch.int32, device=queries.rows.device))


class SharedAttention(CompressedAttention):
    """`CompressedAttention` of a layer that reads entries of its own or of a layer before it."""

    def _make_head_norm(self, eps: float, device: torch.device) -> None:
        return None

    def _load_entries(
        self, config: ModelConfig, backends: Backends, reader: WeightSource, prefix: str, rotary: RotaryTable
    ) -> None:
        a = self._attention
        assert isinstance(a, SharedEntriesConfig)
        self._round = _rounding(backends.ops)
        if a.writes(self._layer_index):
            self._compressor = EntryWriter(backends, reader, prefix, config, self._rate, rotary)
        if a.selects(self._layer_index):
            self._indexer = SharedIndexer(backends, reader, f"{prefix}.indexer", config, self._layer_index, rotary)
        self._readers = [part for part in (self._compressor, self._indexer) if part is not None]

    def _written(self, q: Tensor, kv: Tensor, positions: Tensor, slots: Tensor, cache: CompressedCache) -> Tensor:
        norm, to = (self._kv_norm.weight, self._kv_norm.eps), CacheRows(slots, cache.rows)
        self._round(kv.unsqueeze(1), norm, positions, self._rotary, E4M3, to, q if q.shape[1] else None)
        return q

    def forward(  # type: ignore[override]
        self, hidden: Activation, batch: ForwardBatch, steps: dict[int, SharedStep]
    ) -> Tensor:
        a, cache = self._attention, self.cache_of(batch)
        assert isinstance(a, SharedEntriesConfig)
        shared = steps[self._rate]
        down = self._down(hidden)
        latent = self._queries(down[:, : a.q_lora_rank])
        group = a.group(self._layer_index)
        num_slots = cache.num_slots // (len(group) - group.index(self._layer_index))
        if self._compressor is not None:
            self._compressor.update(hidden, shared, cache)
        if self._indexer is not None:
            self._indexer.update(hidden, latent, batch.positions, shared, cache)
        q = latent.queries().view(-1, a.num_heads, a.head_dim)
        q = self._written(q, down[:, a.q_lora_rank :], batch.positions, shared.step.slots, cache)
        return self._attend(q, batch, shared.rows_of(cache, num_slots, self._sparse.shifts), cache)


def _rounding(ops: Ops) -> RoundRows:
    return ops.capabilities.round_rows or partial(round_rows, ops)


def _view(attention: SharedEntriesConfig, rate: int) -> SharedEntriesConfig:
    """The config whose selecting layers have this rate."""
    return replace(attention, selected_rate=rate if rate else -1)
