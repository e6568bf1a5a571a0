"""The interface of a weight format. Imports no torch.

A format is a frozen dataclass, made from config.json's `quantization_config`. It provides names and shapes of tensors
to the header check, bytes to the memory ledger, loading to weight sources, and the form that kernels multiply to
layers. docs/extending.md has the steps to add a format.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

from moe_engine.kernels.weight_forms import Multiplied
from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import KernelFormat, QuantizedWeight

Shape = tuple[int, ...]
FAMILIES = frozenset(("linear", "experts"))
"""Kernel families that multiply matrices of a checkpoint."""


def family_of(prefix: str) -> str:
    """The kernel family that multiplies a matrix."""
    return "experts" if ".experts." in prefix else "linear"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its name, shape and accepted dtypes, in the spelling of safetensors.

    `other_shapes`: accepted too; `any_shape`: every shape is; `blocks`: block types of GGUF files, which are
    dequantized when they are read into a Tensor, are accepted too.
    """

    name: str
    shape: Shape
    dtypes: tuple[str, ...]
    other_shapes: tuple[Shape, ...] = ()
    any_shape: bool = False
    blocks: bool = False

    def takes(self, dtype: str) -> bool:
        return dtype in self.dtypes or (self.blocks and dtype in BLOCK_TYPES)

    def fits(self, shape: Shape) -> bool:
        return self.any_shape or shape == self.shape or shape in self.other_shapes


class StoredTensors(Protocol):
    """The tensors of a checkpoint, as a format reads them."""

    @property
    def names(self) -> Collection[str]: ...

    def dtype_of(self, name: str) -> str | None:
        """The dtype in the header; None if there is no such tensor."""

    def open(self, tensor: StoredTensor, cut: Cut = UNCUT) -> AbstractContextManager[Tensor]:
        """A slice on the host, inside a `with`; at its end the slice counts as read.

        Raises:
            CheckpointError: missing, of another shape or dtype, or not readable.
        """

    def read_into(self, tensor: StoredTensor, cut: Cut, out: Tensor) -> None:
        """out = a slice, converted to its dtype and device, without a copy of the whole slice. Raises: as `open`."""


class WeightFormat(Protocol):
    """How a checkpoint stores the matrices [N, K] of linear layers and experts. `prefix` is a matrix's name without
    `.weight`; `shape` is that of the whole matrix."""

    @property
    def name(self) -> str:
        """The name in `quant_method`, in --quantization and in messages; empty: not quantized."""

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        """The tensors of a matrix, in a checkpoint with tensors of these names."""

    def is_scale(self, name: str) -> bool:
        """True if a stored tensor of that name has scales, not parameters of the model."""

    def bytes_per_element(self, prefix: str, shape: Shape, dtype_bytes: int) -> Fraction:
        """Memory of a matrix in the kernels' form, scales included; dtype_bytes: of an activation. ``*`` in the prefix:
        all experts. shape: of the part on a rank, except of experts."""

    def held_by(self, multiplied: Multiplied) -> WeightFormat:
        """The format in which these kernels hold the weights; `PLAIN`: all are dequantized."""

    def kernel_format(self, prefix: str) -> KernelFormat | None:
        """The form in which kernels multiply a matrix, if they declare it; None: always dequantized."""

    @property
    def has_kernel_formats(self) -> bool:
        """True if `kernel_format` is not None for some matrices."""

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        """True if this slice of a matrix can be loaded in `kernel_format`."""

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        """Reads a slice of a matrix: dequantized into a Tensor, unchanged into a weight of `kernel_format`."""
