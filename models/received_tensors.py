"""Tensors received without a file, in the form that `WeightReader` reads."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.models.cut import UNCUT, Cut
from moe_engine.models.host_copy import copy_into
from moe_engine.models.safetensors_file import DTYPES
from moe_engine.models.tensor_header import TensorHeader, WeightFile

_CODES = {str(dtype).removeprefix("torch."): (dtype, code) for code, dtype in DTYPES.items()}


def header_of(dtype: str, shape: list[int]) -> tuple[torch.dtype, TensorHeader]:
    """
    Args:
        dtype: torch's name, with or without "torch.".

    Raises:
        CheckpointError: not a dtype of checkpoints.
    """
    known = _CODES.get(dtype.removeprefix("torch."))
    if known is None or any(size < 0 for size in shape):
        raise CheckpointError(f"dtype {dtype!r:.40} of shape {shape}: use one of {', '.join(sorted(_CODES))}")
    return known[0], TensorHeader(known[1], tuple(shape), 0, prod(shape) * known[0].itemsize)


def as_files(source: str, headers: Mapping[str, TensorHeader]) -> dict[str, WeightFile]:
    """The tensors as the entries of one file."""
    file = WeightFile(Path(source), dict(headers))
    return dict.fromkeys(headers, file)


class ReceivedTensors:
    """The reading side of `SafetensorsFile`, over tensors in host memory.

    Args:
        source: their origin, for messages.
    """

    def __init__(self, source: str, tensors: Mapping[str, Tensor]) -> None:
        self.path = Path(source)
        self._tensors = tensors
        self.entries = {name: header_of(str(tensor.dtype), list(tensor.shape))[1] for name, tensor in tensors.items()}

    def read(self, name: str, cut: Cut = UNCUT) -> Tensor:
        """A slice, not to be written to."""
        return cut.of(self._tensors[name])

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        """out = the slice, converted to its dtype and device."""
        copy_into(out, cut.of(self._tensors[name]))
