"""Whole decode steps (slots, decoder, head, sampling) in one call, as C structs.

Legend: R rows, V vocabulary, W entries of a row in the slot table.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from moe_engine.kernels.attention_windows import window_number
from moe_engine.kernels.cpu.tensors import common_kind
from moe_engine.kernels.decoder.chain import draws_struct
from moe_engine.kernels.decoder.layers import L, P, kind_of_weights, weight_struct
from moe_engine.kernels.decoder.shared_prefix import SharedPrefix
from moe_engine.kernels.decoder.stack import FusedStack
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.sampling.protocol import SamplingParameters


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("decoder", "head", "slots")),
        ("width", L),
        ("last_tokens", P),
        ("window", L),
    ]


@dataclass(frozen=True)
class DecodeTables:
    """Per-row state of a worker, in host memory."""

    slots: Tensor  # [max_rows, W] int32: slot of each position
    last_tokens: Tensor  # [max_rows] int64
    window: int | None = None
    """Sliding window of all layers."""


class DecodeRows:
    """Rows of a decode step [R], with the buffers of their steps."""

    def __init__(self, rows: list[int]) -> None:
        count = len(rows)
        self.listed = rows
        self.rows = np.array(rows, dtype=np.int64)
        self._places = np.empty((2, count), dtype=np.int64)
        self.tokens = np.empty(count, dtype=np.int64)
        self.addresses = (self.rows.ctypes.data, *(a.ctypes.data for a in (*self._places, self.tokens)))
        """Addresses of rows, positions, slots and sampled tokens."""

    def place(self, positions: list[int], slots: list[int]) -> None:
        self._places[0], self._places[1] = positions, slots

    @property
    def positions(self) -> np.ndarray:
        """[R] int64."""
        return self._places[0]


@dataclass(frozen=True, slots=True)
class FusedDecodeStep:
    """Decode steps of all layers, in one call."""

    kind: int
    address: int
    stack: FusedStack
    width: int  # of the slot table
    keep: tuple[Any, ...]

    def run(
        self,
        rows: DecodeRows,
        caches: Any,
        parameters: SamplingParameters | None,
        uniform: np.ndarray | None,
        prefix: SharedPrefix | None = None,
    ) -> np.ndarray:
        """The tokens [R] int64 that follow the last tokens of the rows; negative for invalid logits. Bit-identical to
        the separate calls, but with a prefix. The result is valid until the next call.

        Args:
            rows: with positions and slots of their last tokens.
            caches: see `FusedStack.run`.
            parameters: sampling parameters of the rows; None: greedy.
            uniform: [R] float32, the random number of each row, with `parameters`.
            prefix: shared by some of the rows, MLA only; each of them is longer.

        Raises:
            ValueError: a row's table is too short; no state was changed.
        """
        self.stack.take(caches)
        where, positions, slots, tokens = rows.addresses
        draws = draws_struct(parameters, None if uniform is None else uniform.ctypes.data)
        too_short = self.stack.library.moe_decode_step(
            self.kind, self.address, where, positions, slots, len(rows.listed),
            None if prefix is None else prefix.address, ctypes.addressof(draws), tokens,
        )  # fmt: skip
        if too_short >= 0:
            raise ValueError(f"row {too_short} grows beyond its table of {self.width} tokens")
        return rows.tokens


def fuse_decode_step(stack: FusedStack, head: PreparedLinear, tables: DecodeTables) -> FusedDecodeStep | None:
    """None if the head does not fit the layers.

    Args:
        tables: read and advanced by every step.
    """
    kind = common_kind((stack.kind, kind_of_weights([head])))
    if kind is None or not (tables.slots.is_contiguous() and tables.last_tokens.is_contiguous()):
        return None
    weight = weight_struct(head)
    struct = _Step(
        stack.address, ctypes.addressof(weight), tables.slots.data_ptr(), tables.slots.shape[1],
        tables.last_tokens.data_ptr(), window_number(tables.window),
    )  # fmt: skip
    return FusedDecodeStep(kind, ctypes.addressof(struct), stack, struct.width, (struct, weight, head, tables))
