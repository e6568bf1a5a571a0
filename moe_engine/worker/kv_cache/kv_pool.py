"""KV cache pool: the KV cache tensors of one rank, addressed by slot. The scheduler allocates slots to requests.

Page 0 is a dummy: padded tokens and warm-up write there, no request owns it, and it never holds NaN. All memory starts
as zeros, so that a kernel that reads a tile past the end of a context gets finite numbers.

Legend: C kv_lora_rank, P rotary width, I index key, G KV heads, Dh width of a key, V width of a value, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.compression.protocol import Kept
from moe_engine.kernels.kv_format.formats import STORED
from moe_engine.models.compressed_cache import CompressedCache, num_kept
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.compressed import CompressedConfig, KeptRows, entry_group
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.state_pool import StatePool

TOUCHED_AT_ONCE_BYTES = 512 << 20
"""Pools up to this size commit their memory at start, so that the process does not grow while serving."""


@dataclass(frozen=True)
class KVSpec:
    """KV cache layout of a token: the trailing shapes of each layer's tensors, () for a layer without KV."""

    layers: tuple[tuple[tuple[int, ...], ...], ...]
    dtype: torch.dtype
    entries: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Tokens of an entry (0: none) and channels of its tensors, by layer; (): the model's attention has no entries."""
    kept: tuple[KeptRows | None, ...] = ()
    """What is kept of contributions to entries, by layer; (): as above."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The layers that read the entries of a layer's cache, by layer; (): as above."""

    @classmethod
    def mla(cls, num_layers: int, kv_lora_rank: int, rotary_width: int, dtype: torch.dtype) -> KVSpec:
        """One latent of C+P numbers."""
        return cls((((kv_lora_rank + rotary_width,),),) * num_layers, dtype)

    @classmethod
    def gqa(cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVSpec:
        """A key and a value of [G, Dh]."""
        return cls((((num_kv_heads, head_dim),) * 2,) * num_layers, dtype)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_token(self) -> int:
        each = self.dtype.itemsize
        entries = sum(sum(widths) * each // rate for rate, widths in self.entries if rate)
        entries += sum(rows.each * sum(rows.widths) * each // rows.block for rows in self.kept if rows and rows.block)
        return sum(math.prod(part) for parts in self.layers for part in parts) * each + entries

    def entry_of(self, layer: int) -> tuple[int, tuple[int, ...]]:
        """`entries` of a layer."""
        return self.entries[layer] if self.entries else (0, ())

    def kept_of(self, layer: int) -> KeptRows | None:
        """`kept` of a layer."""
        return self.kept[layer] if self.kept else None

    def group_of(self, layer: int) -> tuple[int, ...]:
        """`groups` of a layer."""
        return self.groups[layer] if self.groups else (layer,)


def kv_spec(
    config: ModelConfig, kv_dtype: str, num_further_layers: int = 0, head: ModelConfig | None = None,
    draft_slots: int = 0,
) -> KVSpec:  # fmt: skip
    """KV cache layout of a model, in a format of `kv_format`; further layers (MTP) follow the model's own, and then the
    layers of an EAGLE head. `draft_slots`: KV slots for drafts of a request during a step."""
    layers = [config.kv_parts(i, kv_dtype) for i in range(config.num_layers + num_further_layers)]
    if head is not None:
        layers += [head.kv_parts(i, kv_dtype) for i in range(head.num_layers)]
    entries = [config.entry_parts(i) for i in range(len(layers))]
    dtype = getattr(torch, STORED[kv_dtype][0])
    if not isinstance(config.attention, CompressedConfig):
        return KVSpec(tuple(layers), dtype)
    kept = tuple(config.kept_rows(i, draft_slots) for i in range(len(layers)))
    groups = tuple(entry_group(config.attention_of(i), i) for i in range(len(layers)))
    return KVSpec(tuple(layers), dtype, tuple(entries), kept, groups)


class KVPool:
    """`layers[i]` is `ForwardBatch.kv[i]`: [slots, C+P] for MLA (with index keys a pair, the second [slots, 1, I]), a
    pair of [slots, G, Dh] and [slots, G, V] for GQA; with FP8 the last dimension is that of `kv_format`'s rows; a
    `CompressedCache` for attention to windows and entries.

    Args:
        num_slots: tokens for requests; the tensors have one more page, the dummy page 0.
        windowed: layers whose KV is bounded by their window: they have `num_window_slots` slots, numbered separately.
        states: its tensors are the entries of layers without KV.
        max_rows: rows of requests, for what is kept of each request.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_slots: int,
        page_size: int,
        stream: DeviceStream,
        *,
        windowed: Collection[int] = (),
        num_window_slots: int = 0,
        states: StatePool | None = None,
        max_rows: int = 0,
    ) -> None:
        for slots in (num_slots, num_window_slots) if windowed else (num_slots,):
            if slots <= 0 or page_size <= 0 or slots % page_size:
                raise ValueError(f"num_slots {slots} must be a positive multiple of the page size {page_size}")
        self.spec = spec
        self.num_slots = num_slots
        self.page_size = page_size
        self.num_window_slots = num_window_slots if windowed else 0
        bounded = set(windowed) if self.num_window_slots else set()
        rows = {
            layer: (num_window_slots if layer in bounded else num_slots) + page_size for layer in range(spec.num_layers)
        }
        self._tensors = [
            [stream.lazy_zeros((count, *part), spec.dtype) for count, part in self._shapes(layer, rows[layer])]
            for layer in rows
        ]
        self._kept = [self._make_kept(layer, rows[layer], max_rows, stream) for layer in rows]
        if self.num_bytes <= TOUCHED_AT_ONCE_BYTES:
            for tensor in self.tensors():
                tensor.zero_()
        self._raw: list[Tensor] = []
        self._raw_windows: list[Tensor] = []
        self.undivided: set[int] = set()
        """Numbers of the tensors of `row_widths` that every rank has whole, unlike KV heads: index keys."""
        for layer in rows:
            self._add_raw(layer, rows[layer], self._raw_windows if layer in bounded else self._raw)
        of_states = {} if states is None else states.layers
        self.layers: Sequence[Any] = tuple(of_states[i] if i in of_states else self._cache(i, rows[i]) for i in rows)

    def _shapes(self, layer: int, rows: int) -> list[tuple[int, tuple[int, ...]]]:
        """Rows and shape of a row of each tensor of a layer. The first tensor has entries after the rows of tokens, of
        all layers that read them."""
        shapes, (rate, widths) = [(rows, part) for part in self.spec.layers[layer]], self.spec.entry_of(layer)
        if not rate:
            return shapes if self.spec.group_of(layer)[0] == layer else shapes[1:]
        rows *= len(self.spec.group_of(layer))
        num_entries = (self.num_slots + self.page_size) // rate
        (_, first), *others = shapes
        return [(rows + num_entries, first), *others, *((num_entries, (1, width)) for width in widths[1:])]

    def _make_kept(self, layer: int, rows: int, max_rows: int, stream: DeviceStream) -> tuple[Kept, ...]:
        """What is kept of contributions to a layer's entries."""
        if (found := self.spec.kept_of(layer)) is None:
            return ()
        count = num_kept(found, rows, max_rows)
        return tuple(Kept(stream.lazy_zeros((count, width), self.spec.dtype), *found[:2]) for width in found.widths)

    def _add_raw(self, layer: int, rows: int, own: list[Tensor]) -> None:
        """Adds the bytes of a layer's tensors: those of tokens and kept rows to `own`, those of entries to `_raw`."""
        parts, num_parts = self._parts(layer, rows), len(self.spec.layers[layer])
        own += [_bytes(tensor[:rows], rows) for tensor in parts[:num_parts]]
        if num_parts == 3:
            self.undivided.add(len(own) - 1)
        own += [_bytes(kept.rows, rows) for kept in self._kept[layer] if kept.block]
        if self.spec.entry_of(layer)[0]:
            entries = (parts[0][len(self.spec.group_of(layer)) * rows :], *parts[num_parts:])
            self._raw += [_bytes(tensor, self.num_slots + self.page_size) for tensor in entries]

    def _parts(self, layer: int, rows: int) -> list[Tensor]:
        """The tensors of a layer; that of its tokens may be a part of another layer's."""
        source = self.spec.group_of(layer)[0]
        if source == layer:
            return self._tensors[layer]
        return [self._tensors[source][0][self.spec.group_of(layer).index(layer) * rows :], *self._tensors[layer]]

    def _cache(self, layer: int, rows: int) -> Any:
        """A layer's entry of `layers`."""
        if self.spec.entries:
            group = self.spec.group_of(layer)
            tensors, num_parts = self._tensors[group[0]], len(self.spec.layers[group[0]])
            keys = tensors[num_parts] if len(tensors) > num_parts else None
            ids = tensors[1] if num_parts > 1 else None
            place = group.index(layer), len(group)
            return CompressedCache.part(tensors[0], *place, rows, self._kept[group[0]], keys, ids)
        parts = self._tensors[layer]
        return parts[0] if len(parts) == 1 else tuple(parts)

    @property
    def num_bytes(self) -> int:
        """Address space; on the CPU a large pool commits memory at the first write of each page."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """All tensors of the layers."""
        kept = [kept.rows for layer in self._kept for kept in layer]
        return [tensor for parts in self._tensors for tensor in parts] + kept

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies slots source [n] to slots target [n] in every layer; reads everything before writing."""
        if self.num_window_slots or self.spec.entries:
            raise ValueError("the layers of this pool have different slots: a token cannot be copied as a whole")
        for parts in self._tensors:
            for tensor in parts:
                rows = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # torch cannot index float8
                rows.index_copy_(0, target, rows.index_select(0, source))

    @property
    def row_widths(self) -> list[int]:
        """Bytes of a token in each tensor, in the order of `read_rows`."""
        return [tensor.shape[1] for tensor in self._raw]

    @property
    def window_widths(self) -> list[int]:
        """As `row_widths` for `read_windows`."""
        return [tensor.shape[1] for tensor in self._raw_windows]

    def schema(self) -> list[str]:
        """The tensors of a token, in the order of `read_rows`: a line each with layer, format and shape."""
        return [
            f"{layer}.{part}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape[1:])}"
            for layer, parts in enumerate(self._tensors)
            for part, tensor in enumerate(parts)
        ] + [
            f"{layer}: {kept.rows.shape[1]} of {kept.each} tokens of {kept.block}"
            for layer, found in enumerate(self._kept)
            for kept in found
            if kept.block
        ]

    def read_rows(self, slots: Tensor) -> Tensor:
        """The KV of slots [n], as bytes [n, sum of `row_widths`], in new memory: of all layers but windowed ones with
        slots of their own."""
        return torch.cat([tensor.index_select(0, slots) for tensor in self._raw], 1)

    def write_rows(self, slots: Tensor, rows: Tensor) -> None:
        """The inverse of `read_rows`."""
        _write(self._raw, slots, rows)

    def read_windows(self, slots: Tensor) -> Tensor:
        """The KV of window slots [n] in the windowed layers, as bytes [n, sum of `window_widths`]; new memory."""
        return torch.cat([tensor.index_select(0, slots) for tensor in self._raw_windows], 1)

    def write_windows(self, slots: Tensor, rows: Tensor) -> None:
        """The inverse of `read_windows`."""
        _write(self._raw_windows, slots, rows)

    def clear_dummy_page(self) -> None:
        for tensor in (*self._raw, *self._raw_windows):
            tensor[: self.page_size].zero_()


def _bytes(tensor: Tensor, slots: int) -> Tensor:
    """The bytes of each slot [slots, n]; those of an entry, and of a block's kept rows, are divided over its tokens."""
    return tensor.flatten().view(torch.uint8).view(slots, -1)


def _write(tensors: list[Tensor], slots: Tensor, rows: Tensor) -> None:
    """Rows [n, W] to slots [n] of the tensors, one after the other."""
    begin = 0
    for tensor in tensors:
        width = tensor.shape[1]
        tensor.index_copy_(0, slots, rows[:, begin : begin + width])
        begin += width
