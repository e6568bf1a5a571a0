"""Drives a model directly: one `ForwardBatch` per step, with slots, rows and groups chosen by the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends, plan_kernels
from moe_engine.kernels.device import Need, cpu_device
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.models.batch import ForwardBatch, Model
from moe_engine.models.compressed_cache import CompressedCache
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.needs import block_index_widths, index_widths
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.state_pool import StatePool
from moe_engine.worker.startup.kernel_choice import build_backends


def make_backends(config: ModelConfig, row: str = "torch", dtype: str = "float32", page_size: int = 1) -> Backends:
    """The given row of every family. Raises ValueError if it cannot run here."""
    need = Need(
        dtype=dtype, attention=config.attention.kind, page_size=page_size, index=index_widths(config),
        blocks=block_index_widths(config),
        delta=config.delta is not None, varlen=config.vision is not None,
        compression=isinstance(config.attention, CompressedConfig),
    )  # fmt: skip
    asked = dict.fromkeys(("attention", "experts", "linear", "ops", "indexer", "block_index", "delta"), row)
    return build_backends(plan_kernels(cpu_device(), need, asked))


def load(path: Path, row: str = "torch", dtype: str = "float32", **options: Any) -> Stepper:
    """A stepper over the checkpoint in `path`; `options` are the model's, the loader's `load_format`, the stepper's
    `page_size` and `seed`, `change` of the config, and an `indexer` instead of the row's."""
    page_size, seed = options.pop("page_size", 1), options.pop("seed", 0)
    load = LoadOptions(dtype, load_format=options.pop("load_format", "auto"))
    config = options.pop("change", lambda same: same)(load_model_config(path))
    backends = make_backends(config, row, dtype, page_size)
    backends = replace(backends, indexer=options.pop("indexer", backends.indexer))
    model = load_model(path, config, load, backends, **options)
    return Stepper(model, config, backends, getattr(torch, dtype), page_size=page_size, seed=seed)


@dataclass(frozen=True)
class Chunk:
    """Next tokens of a sequence; `decode` puts it into the decode group (MLA: the absorbed form)."""

    sequence: int
    tokens: list[int]
    decode: bool


class Stepper:
    """Holds the KV pool and the slot table, shuffled by `seed` so that results cannot rely on adjacent slots."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        backends: Backends,
        dtype: torch.dtype = torch.float32,
        max_rows: int = 8,
        max_context: int = 256,
        page_size: int = 1,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.model, self.config, self.backends, self.device = model, config, backends, device
        self.page_size = page_size
        generator = torch.Generator().manual_seed(seed)
        num_pages = max_rows * max_context // page_size
        pages = torch.randperm(num_pages, generator=generator)
        slots = (pages.unsqueeze(1) * page_size + torch.arange(page_size)).view(max_rows, max_context)
        self.slot_table = slots.to(device=device, dtype=torch.int32)
        self.row_of = torch.randperm(max_rows, generator=generator).tolist()
        self.num_slots = num_pages * page_size
        self.kv = make_kv(config, self.num_slots, dtype, device, max_rows=max_rows)
        states = StatePool(config.state_groups, max_rows, dtype, DeviceStream(device)).layers
        self.kv = [states.get(layer, cache) for layer, cache in enumerate(self.kv)]
        self.lengths = [0] * max_rows

    def step(self, chunks: list[Chunk]) -> list[Tensor]:
        """Runs one step; returns, in the order of `chunks`, the logits [len(tokens), V] of each."""
        ordered = sorted(range(len(chunks)), key=lambda i: not chunks[i].decode)
        batch = self.batch([chunks[i] for i in ordered])
        logits = self.model.logits(self.model.forward(batch)).split([len(chunks[i].tokens) for i in ordered])
        by_chunk = dict(zip(ordered, logits))
        return [by_chunk[i] for i in range(len(chunks))]

    def run(self, tokens: list[int], steps: Sequence[Sequence[tuple[int, int, bool]]]) -> list[Tensor]:
        """Runs steps of (sequence, number of its next tokens, decode); all sequences have these tokens. Returns the
        logits of each sequence, in the order of their first steps."""
        done: dict[int, list[Tensor]] = {}
        for step in steps:
            starts = [self.lengths[sequence] for sequence, _, _ in step]
            chunks = [Chunk(s, tokens[start : start + n], decode) for (s, n, decode), start in zip(step, starts)]
            for chunk, logits in zip(chunks, self.step(chunks)):
                done.setdefault(chunk.sequence, []).append(logits)
        return [torch.cat(parts) for parts in done.values()]

    def batch(self, chunks: list[Chunk]) -> ForwardBatch:
        """The step's batch, decode chunks first; advances the sequences' lengths."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[Tensor] = []
        for chunk in chunks:
            start = self.lengths[chunk.sequence]
            stop = start + len(chunk.tokens)
            ids += chunk.tokens
            positions += range(start, stop)
            slots.append(self.slot_table[self.row_of[chunk.sequence], start:stop])
            self.lengths[chunk.sequence] = stop
        attention = AttentionBatch(
            self._queries([c for c in chunks if c.decode]), self._queries([c for c in chunks if not c.decode])
        )
        return ForwardBatch(
            input_ids=torch.tensor(ids, dtype=torch.int64, device=self.device),
            positions=torch.tensor(positions, dtype=torch.int64, device=self.device),
            slots=torch.cat(slots).long() if slots else torch.empty(0, dtype=torch.int64, device=self.device),
            logits_rows=torch.arange(len(ids), device=self.device),
            attention=attention,
            attention_plan=self.backends.attention.plan(attention),
            kv=self.kv,
        )

    def _queries(self, chunks: list[Chunk]) -> PagedQueries | None:
        if not chunks:
            return None
        query_lens = [len(chunk.tokens) for chunk in chunks]
        context_lens = [self.lengths[chunk.sequence] for chunk in chunks]
        starts = [0]
        for length in query_lens:
            starts.append(starts[-1] + length)

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        return PagedQueries(
            query_lens=query_lens,
            context_lens=context_lens,
            rows=ints([self.row_of[chunk.sequence] for chunk in chunks]),
            query_starts=ints(starts),
            context_lens_device=ints(context_lens),
            slot_table=self.slot_table,
            page_size=self.page_size,
        )


def make_kv(
    config: ModelConfig, num_slots: int, dtype: torch.dtype, device: str = "cpu", num_mtp_layers: int = 0,
    max_rows: int = 8,
) -> list[Any]:  # fmt: skip
    """Caches of every layer, or of the MTP layers after them, filled with NaN: unwritten slots must have no
    influence."""
    name = str(dtype).removeprefix("torch.")

    def empty(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    def caches(layer: int) -> Any:
        found = tuple(empty(num_slots, *part) for part in config.kv_parts(layer, name))
        return found[0] if len(found) == 1 else found

    first = config.num_layers if num_mtp_layers else 0
    layers = range(first, first + (num_mtp_layers or config.num_layers))
    if isinstance(config.attention, CompressedConfig):
        return list(CompressedCache.of_layers(config, layers, num_slots, max_rows, empty))
    return [caches(i) for i in layers]
