"""Header entries of weight files: dtype, shape and position of a tensor. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

from moe_engine.errors import CheckpointError

ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Supported dtypes, by the names of safetensors."""
BLOCK_TYPES = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
"""Served block types of GGUF files: numbers and bytes of a block."""


class TensorHeader(NamedTuple):
    """Header entry of a tensor; `start` and `stop` are byte offsets in the file. `pitch`: bytes from a row to the next
    of a tensor that is some columns of a stored one; 0: rows are adjacent."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    pitch: int = 0

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.dtype] if self.pitch else self.stop - self.start


@dataclass(frozen=True)
class WeightFile:
    """
    Attributes:
        tensors: by the names that the model uses.
        stored_names: names in the file, by those names; only where they differ.
    """

    path: Path
    tensors: dict[str, TensorHeader]
    stored_names: dict[str, str] = field(default_factory=dict)

    def stored_name(self, name: str) -> str:
        return self.stored_names.get(name, name)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a weight file that the system does not read."""
    fix = "download the checkpoint again"
    if isinstance(error, PermissionError):
        fix = "give the user of this process the permission"
    link = f"; it is a link to {path.readlink()}" if path.is_symlink() else ""
    return CheckpointError(f"{path}: cannot be read ({error.strerror}{link}); {fix}")
