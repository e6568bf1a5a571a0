"""NVFP4 experts in common tensors of a layer, as ModelOpt writes Llama 4. Imports no torch.

Legend: E experts, N rows and K columns of a matrix.

With `gate_up_proj` uint8 [E, K / 2, N] (columns of the gate first) and `down_proj`: `_weight_scale` e4m3
[E, K / 16, N], `_weight_scale_2`, a factor of all matrices or of each expert's, and `_input_scale`, which is not used.
Source: transformers (llama4), whose matrices are transposed; ModelOpt's names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.formats.fp4 import FP4
from moe_engine.models.formats.fused_experts import Place, place_of
from moe_engine.models.formats.integers import SCALES
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import QuantizedWeight

_ENDS = {".weight": "", ".weight_scale": "_weight_scale", ".weight_scale_2": "_weight_scale_2"}
_INPUT = {".input_scale": "_input_scale"}


@dataclass(frozen=True)
class FusedNVFP4(FP4):
    """A `Scheme` of the experts' matrices; others have NVFP4's, whose fields it has.

    Attributes:
        num_experts: E.
    """

    num_experts: int = 0

    @property
    def extras(self) -> tuple[str, ...]:
        return tuple(f"_proj{end}" for end in (*_ENDS.values(), *_INPUT.values()) if end)

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        place = place_of(prefix)
        return place is not None and f"{place.name}_weight_scale_2" in names

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        place, (n, k), count = place_of(prefix), shape, self.num_experts
        assert place is not None, prefix
        rows, one = place.parts * n, ((), (count,), (count, 1, 1))
        found = [
            StoredTensor(place.name, (count, -(-k // 2), rows), ("U8", "I8")),
            StoredTensor(f"{place.name}_weight_scale", (count, -(-k // self.group), rows), ("F8_E4M3",)),
            StoredTensor(f"{place.name}_weight_scale_2", (1,), SCALES, one),
        ]
        if (unused := f"{place.name}_input_scale") in names:
            found.append(StoredTensor(unused, (1,), SCALES, one))
        return tuple(found)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        place = place_of(prefix)
        assert place is not None, prefix
        own = _Expert(source, prefix, place, self.tensors(prefix, shape, source.names), shape[0])
        FP4(self.group, self.codes, self.whole, scale_dtype=self.scale_dtype).load(own, prefix, shape, cut, out)


class _Expert(StoredTensors):
    """The tensors of an expert's matrix as if they were stored apart, by row."""

    def __init__(
        self, source: StoredTensors, prefix: str, place: Place, tensors: tuple[StoredTensor, ...], rows: int
    ) -> None:
        self._source, self._place, self._rows = source, place, rows
        self._tensors = {f"{prefix}{end}": tensor for end, tensor in zip((*_ENDS, *_INPUT), tensors)}

    @property
    def names(self) -> Collection[str]:
        return self._tensors

    def dtype_of(self, name: str) -> str | None:
        return self._source.dtype_of(self._tensors[name].name)

    @contextmanager
    def open(self, tensor: StoredTensor, cut: Cut = UNCUT) -> Iterator[Tensor]:
        stored, place = self._tensors[tensor.name], self._place
        if len(stored.shape) == 1:
            with self._source.open(stored) as whole:
                factors = whole.reshape(-1)
                yield factors[place.expert : place.expert + 1] if len(factors) > 1 else factors
            return
        with self._source.open(stored, Cut(slice(place.expert, place.expert + 1))) as whole:
            first = place.part * self._rows
            yield cut.of(whole[0].T[first : first + self._rows]).contiguous()

    def read_into(self, tensor: StoredTensor, cut: Cut, out: Tensor) -> None:
        with self.open(tensor, cut) as part:
            out.copy_(part)
