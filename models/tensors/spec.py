"""A tensor of a checkpoint: name, shape and storage. Imports no torch."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


class Kind(enum.Enum):
    """Storage of a tensor: LINEAR weights are in the checkpoint's `WeightFormat`, WIDE weights are kept in float32,
    INDEX are integers, kept in int32."""

    LINEAR = "linear"
    PLAIN = "plain"
    WIDE = "wide"
    INDEX = "index"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor, or the tensors of all routed experts: then ``*`` in the name means 0 to `copies` - 1."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = Kind.LINEAR
    copies: int = 1

    @property
    def num_elements(self) -> int:
        """Elements of one copy."""
        return prod(self.shape)

    def names(self) -> Iterator[str]:
        if "*" not in self.name:
            yield self.name
            return
        before, after = self.name.split("*")
        yield from (f"{before}{i}{after}" for i in range(self.copies))

    def within(self, prefix: str) -> TensorSpec:
        # `dataclasses.replace` takes several times as long
        return TensorSpec(f"{prefix}.{self.name}", self.shape, self.kind, self.copies)


def linear(prefix: str, rows: int, cols: int, bias: bool = False) -> Iterator[TensorSpec]:
    """A matrix [rows, cols], and its bias."""
    yield TensorSpec(f"{prefix}.weight", (rows, cols))
    if bias:
        yield TensorSpec(f"{prefix}.bias", (rows,), Kind.PLAIN)


def norm(prefix: str, width: int) -> TensorSpec:
    """The weight of a norm."""
    return TensorSpec(f"{prefix}.weight", (width,), Kind.WIDE)
