"""Sources of weights for some tensors of a model: received values, and marker values that show their positions in
memory.

A kernel's layout may merge, cut, transpose and pad tensors, but copies every element. A module built from marker values
therefore shows which memory belongs to which element, in every layout: `mask_source` marks the tensors that were
received, `code_source` numbers the elements of one tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.errors import CheckpointError, MoeEngineError
from moe_engine.kernels.quantization.protocol import BLOCK, BlockWeight
from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.formats.block_fp8 import SCALE_ENDS
from moe_engine.models.formats.online import derived_codes
from moe_engine.models.tensors.model import NGRAMS
from moe_engine.models.weights import TensorFile, WeightReader, WeightSource

MARK: float = struct.unpack("f", b"\x3f\x3f\x3f\x3f")[0]
"""About 0.75: none of its bytes is 0, in any floating-point dtype."""
INTEGER_MARK = 0x3F3F3F3F
CODES = 255
"""Number of different codes of an element: 1 to 255, exact in bf16."""
FP8_CODES = 15
"""Exact in e4m3."""

Fill = Callable[[str, tuple[int, ...], Cut, Tensor], None]
"""(name, whole shape, slice, out): fills the slice."""


class ReceivedWeights(WeightReader):
    """`WeightSource` over a folder or tensors in memory; missing tensors are 0.

    Args:
        structure: the served model's weights, to know which are kept quantized.
        num_layers: the model's main layers, see `read_checkpoint`.

    Attributes:
        missed: whether a tensor was missing.
        tables: whether a table of n-grams was received, and whether one was missing.
    """

    def __init__(
        self, directory: str | Path | TensorFile, structure: WeightSource, num_layers: int | None = None
    ) -> None:
        read = partial(read_checkpoint, num_layers=num_layers)
        form = structure.dtype, structure.device, structure.format
        super().__init__(directory, *form, lambda names: names, read=read, finite=True)
        self._structure = structure
        self.served_gates = structure.served_gates
        self.missed, self.tables = False, set[bool]()

    def has(self, name: str) -> bool:
        if NGRAMS in name:  # a table is stored whole or in parts
            return name in self.names
        return self._structure.has(name)

    def mapped(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, str]:
        self.tables.add(name in self.names)
        return super().mapped(name, shape) if name in self.names else self._structure.mapped(name, shape)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Cut = UNCUT,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if name in self.names:
            return super().tensor(name, shape, cut, dtype=dtype, out=out)
        self.missed = True
        return _allocated(self, shape, cut, dtype, out).zero_()

    def linear(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: Any = None) -> Any:
        if self._received(prefix, shape):
            return super().linear(prefix, shape, cut, out=out)
        self.missed = True
        if out is None or isinstance(out, Tensor):
            return _allocated(self, shape, cut, None, out).zero_()
        for field in fields(out):
            if isinstance(part := getattr(out, field.name), Tensor):
                part.zero_()
        return out

    def keeps(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT) -> bool:
        kept = self._structure.keeps(prefix, shape, cut)
        if kept and self._received(prefix, shape) and not super().keeps(prefix, shape, cut):
            raise CheckpointError(f"{prefix}.weight is served as {self.format.name}; send it so, with its scales")
        return kept

    def _received(self, prefix: str, shape: tuple[int, int]) -> bool:
        return self.format.tensors(prefix, shape, self.names)[0].name in self.names


class FilledWeights(WeightSource):
    """`WeightSource` of marker values, in the forms of `structure`."""

    made_up = True

    def __init__(self, structure: WeightSource, fill: Fill) -> None:
        self.dtype, self.device, self.format = structure.dtype, structure.device, structure.format
        if derived_codes(self.format, 1) is not None:
            raise MoeEngineError(
                f"weights held as {self.format.name} are not available by name; load a checkpoint from disk instead"
            )
        self._structure, self._fill, self.served_gates = structure, fill, structure.served_gates

    def gate_dtype(self, name: str) -> torch.dtype:
        return self._structure.gate_dtype(name)

    def has(self, name: str) -> bool:
        return self._structure.has(name)

    def keeps(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT) -> bool:
        return self._structure.keeps(prefix, shape, cut)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Cut = UNCUT,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        out = _allocated(self, shape, cut, dtype, out)
        self._fill(name, shape, cut, out)
        return out

    def mapped(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, str]:
        return self._structure.mapped(name, shape)

    def linear(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: Any = None) -> Any:
        if out is None or isinstance(out, Tensor):
            return self.tensor(f"{prefix}.weight", shape, cut, out=out)
        if not isinstance(out, BlockWeight):
            raise MoeEngineError(f"{prefix}.weight: not available for weights of the form {type(out).__name__}")
        self._fill(f"{prefix}.weight", shape, cut, out.data)
        grid = tuple(-(-size // BLOCK) for size in shape)
        self._fill(f"{prefix}.weight_scale_inv", grid, cut.in_blocks((BLOCK, BLOCK)), out.scales)
        return out


def mask_source(structure: WeightSource, names: Collection[str]) -> FilledWeights:
    """A source in which no byte of the tensors `names` is 0, and all other bytes are."""

    def fill(name: str, shape: tuple[int, ...], cut: Cut, out: Tensor) -> None:
        prefix = name.removesuffix(".weight_scale_inv")
        spelled = (name,) if prefix == name else (prefix + end for end in SCALE_ENDS)
        mark = MARK if out.is_floating_point() else INTEGER_MARK
        out.fill_(mark if any(one in names for one in spelled) else 0)

    return FilledWeights(structure, fill)


def code_source(structure: WeightSource, wanted: str, num_rows: int, digit: int, base: int) -> FilledWeights:
    """Elements of the first `num_rows` rows of the tensor `wanted` are 1 + a digit of their number in it (row-major),
    in the number system `base`; all others are 0."""

    def fill(name: str, shape: tuple[int, ...], cut: Cut, out: Tensor) -> None:
        out.zero_()
        if name != wanted:
            return
        rows = torch.arange(shape[0])[cut.rows if cut.rows is not None else slice(None)]
        rows = rows[rows < num_rows]
        numbers = rows
        if len(shape) > 1:
            width = prod(shape[1:])
            columns = torch.arange(width)[cut.cols if cut.cols is not None else slice(None)]
            numbers = (rows.unsqueeze(1) * width + columns).view(len(rows), *out.shape[1:])
        codes = torch.div(numbers, base**digit, rounding_mode="floor") % base + 1
        out[: len(rows)].copy_(codes.to(torch.float32))

    return FilledWeights(structure, fill)


def _allocated(
    source: WeightSource, shape: tuple[int, ...], cut: Cut, dtype: torch.dtype | None, out: Tensor | None
) -> Tensor:
    if out is not None:
        return out
    return torch.empty(cut.shape(shape), dtype=dtype or source.dtype, device=source.device)
