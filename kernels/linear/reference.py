"""Matrix products in plain torch. The weight is kept unchanged.

Legend: T tokens, K in-features, N out-features, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.linear.protocol import LinearCapabilities, MLPCall, PreparedLinear
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat


class TorchLinear:
    """`LinearKernel` for any device and dtype."""

    name = "torch"

    @property
    def capabilities(self) -> LinearCapabilities:
        return LinearCapabilities()

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> PreparedLinear:
        return PreparedLinear(weight.shape[1], weight.shape[0], weight, bias, _num_bytes(weight, bias), memory=weight)

    def input_format(self, weight: PreparedLinear) -> ActivationFormat:
        return UNQUANTIZED

    def run(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        return F.linear(x, weight.data, weight.bias)

    def fuse_mlp(self, gate_up: PreparedLinear, down: PreparedLinear, limit: float = 0.0) -> MLPCall | None:
        return None

    def prepare_heads(self, weight: Tensor) -> PreparedLinear:
        return PreparedLinear(weight.shape[2], weight.shape[1], weight, None, _num_bytes(weight, None))

    def run_heads(self, x: Tensor, weight: PreparedLinear, out: Tensor | None = None) -> Tensor:
        product = torch.bmm(x.transpose(0, 1), weight.data.transpose(1, 2)).transpose(0, 1)  # [T, H, N]
        return product.contiguous() if out is None else out.copy_(product)


def _num_bytes(weight: Tensor, bias: Tensor | None) -> int:
    return weight.numel() * weight.element_size() + (0 if bias is None else bias.numel() * bias.element_size())
