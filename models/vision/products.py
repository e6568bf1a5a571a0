"""Products of vision towers, which are not in the checkpoint's quantized format.

Legend: N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_engine.kernels.backends import Backends
from moe_engine.models.layers.linear import Linear
from moe_engine.models.weights import WeightSource


def load_product(
    backends: Backends,
    reader: WeightSource,
    names: Sequence[str],
    rows: int,
    columns: int,
    stored: tuple[int, ...] | None = None,
    bias: bool = True,
) -> Linear:
    """Matrices [rows, columns] of the same input, stacked. `stored`: their shape in the checkpoint, if it differs."""
    weights = [reader.tensor(f"{name}.weight", stored or (rows, columns)).flatten(1) for name in names]
    biases = [reader.tensor(f"{name}.bias", (rows,)) for name in names] if bias else []
    return Linear(backends.linear, torch.cat(weights), torch.cat(biases) if bias else None)
