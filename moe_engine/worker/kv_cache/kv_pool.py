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

from moe_engine.kernels.kv_format.formats import STORED
from moe_engine.models.config import ModelConfig
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.state_pool import StatePool

TOUCHED_AT_ONCE_BYTES = 512 << 20
"""Pools up to this size commit their memory at start, so that the process does not grow while serving."""


@dataclass(frozen=True)
class KVSpec:
    """KV cache layout of a token: the trailing shapes of each layer's tensors, () for a layer without KV."""

    layers: tuple[tuple[tuple[int, ...], ...], ...]
    dtype: torch.dtype

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
        return sum(math.prod(part) for parts in self.layers for part in parts) * self.dtype.itemsize


def kv_spec(config: ModelConfig, kv_dtype: str, num_further_layers: int = 0, head: ModelConfig | None = None) -> KVSpec:
    """KV cache layout of a model, in a format of `kv_format`; further layers (MTP) follow the model's own, and then the
    layers of an EAGLE head."""
    layers = [config.kv_parts(i, kv_dtype) for i in range(config.num_layers + num_further_layers)]
    if head is not None:
        layers += [head.kv_parts(i, kv_dtype) for i in range(head.num_layers)]
    return KVSpec(tuple(layers), getattr(torch, STORED[kv_dtype][0]))


class KVPool:
    """`layers[i]` is `ForwardBatch.kv[i]`: [slots, C+P] for MLA (with index keys a pair, the second [slots, 1, I]), a
    pair of [slots, G, Dh] and [slots, G, V] for GQA; with FP8 the last dimension is that of `kv_format`'s rows.

    Args:
        num_slots: tokens for requests; the tensors have one more page, the dummy page 0.
        windowed: layers whose KV is bounded by their window: they have `num_window_slots` slots, numbered separately.
        states: its tensors are the entries of layers without KV.
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
    ) -> None:
        for slots in (num_slots, num_window_slots) if windowed else (num_slots,):
            if slots <= 0 or page_size <= 0 or slots % page_size:
                raise ValueError(f"num_slots {slots} must be a positive multiple of the page size {page_size}")
        self.spec = spec
        self.num_slots = num_slots
        self.page_size = page_size
        self.num_window_slots = num_window_slots if windowed else 0
        self._tensors = [
            [
                stream.lazy_zeros(
                    ((num_window_slots if layer in windowed else num_slots) + page_size, *part), spec.dtype
                )
                for part in parts
            ]
            for layer, parts in enumerate(spec.layers)
        ]
        if self.num_bytes <= TOUCHED_AT_ONCE_BYTES:
            for parts in self._tensors:
                for tensor in parts:
                    tensor.zero_()
        bounded = set(windowed) if self.num_window_slots else set()
        self._raw, self._raw_windows = (
            [_bytes(tensor) for i, parts in enumerate(self._tensors) if (i in bounded) == own for tensor in parts]
            for own in (False, True)
        )
        of_states = {} if states is None else states.layers
        self.layers: Sequence[Any] = tuple(
            of_states[i] if i in of_states else parts[0] if len(parts) == 1 else tuple(parts)
            for i, parts in enumerate(self._tensors)
        )

    @property
    def num_bytes(self) -> int:
        """Address space; on the CPU a large pool commits memory at the first write of each page."""
        return sum(tensor.nbytes for parts in self._tensors for tensor in parts)

    def tensors(self) -> list[Tensor]:
        """All tensors of the layers."""
        return [tensor for parts in self._tensors for tensor in parts]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies slots source [n] to slots target [n] in every layer; reads everything before writing."""
        self._refuse_windows()
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

    def _refuse_windows(self) -> None:
        if self.num_window_slots:
            raise ValueError("the layers of this pool have different slots: a token cannot be copied as a whole")

    def clear_dummy_page(self) -> None:
        for parts in self._tensors:
            for tensor in parts:
                tensor[: self.page_size].zero_()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten(1).view(torch.uint8)


def _write(tensors: list[Tensor], slots: Tensor, rows: Tensor) -> None:
    """Rows [n, W] to slots [n] of the tensors, one after the other."""
    begin = 0
    for tensor in tensors:
        width = tensor.shape[1]
        tensor.index_copy_(0, slots, rows[:, begin : begin + width])
        begin += width
