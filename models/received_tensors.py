"""Tensors received without a file, in the form that `WeightReader` reads."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.checkpoint.host_copy import copy_into
from moe_engine.models.checkpoint.safetensors_file import DTYPES
from moe_engine.models.checkpoint.tensor_header import TensorHeader, WeightFile
from moe_engine.models.checkpoint_files import with_model_parts

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


def files_of(source: str, headers: Mapping[str, TensorHeader], num_layers: int | None = None) -> dict[str, WeightFile]:
    """The tensors, sent under the names of a checkpoint, as `read_checkpoint` has those of files: under the model's
    names, and joined matrices by their parts. `num_layers`: as there."""
    return with_model_parts(dict.fromkeys(headers, WeightFile(Path(source), dict(headers))), num_layers)


class ReceivedTensors:
    """The reading side of `SafetensorsFile`, over tensors in host memory.

    Args:
        source: their origin, for messages.
        tensors: under the names of a checkpoint. `num_layers`: as in `read_checkpoint`.
    """

    def __init__(self, source: str, tensors: Mapping[str, Tensor], num_layers: int | None = None) -> None:
        self.path = Path(source)
        self._tensors = tensors
        headers = {name: header_of(str(tensor.dtype), list(tensor.shape))[1] for name, tensor in tensors.items()}
        self.files = files_of(source, headers, num_layers)
        self.entries = {name: file.tensors[name] for name, file in self.files.items()}

    def read(self, name: str, cut: Cut = UNCUT) -> Tensor:
        """A slice, not to be written to."""
        return cut.of(self._whole(name))

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        """out = the slice, converted to its dtype and device."""
        copy_into(out, self.read(name, cut))

    def _whole(self, name: str) -> Tensor:
        """A tensor, or the part of a joined matrix that its header describes."""
        tensor, header = self._tensors[self.files[name].stored_name(name)], self.entries[name]
        if header.shape == tuple(tensor.shape):
            return tensor
        flat, first = tensor.contiguous().view(-1), header.start // tensor.itemsize
        if not header.pitch:
            return flat[first : first + prod(header.shape)].view(header.shape)
        return flat.as_strided(header.shape, (header.pitch // tensor.itemsize, 1), first)
