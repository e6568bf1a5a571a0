"""LayerNorm of index keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import layer_norm


@dataclass(frozen=True)
class KeyNorm:
    """Weight and bias [I] float32."""

    weight: Tensor
    bias: Tensor
    eps: float

    def run(self, keys: Tensor) -> Tensor:
        """keys [T, I] -> normed in float32, in their dtype."""
        return layer_norm(keys.float(), self.weight.shape, self.weight, self.bias, self.eps).to(keys.dtype)
