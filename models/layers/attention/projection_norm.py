"""Norm of q and of k over all their heads, before the rotation (MiniMax-M2).

Legend: T tokens, H query heads, G KV heads, Dh head width; on many ranks H and G count this rank's heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import Ops
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.share import Share


class ProjectionNorms:
    """q [T, H*Dh], k [T, G*Dh] -> their norms: x * rsqrt(mean of x^2 over all ranks' heads + eps) * weight.

    On many ranks the sums of squares are added over the attention group, in one all-reduce of 2T numbers.

    Args:
        widths: of the unsharded q and k.
        shares: this rank's parts of them; adjacent ranks may hold the same part of k.
        group: the attention group.
    """

    def __init__(
        self,
        ops: Ops,
        reader: WeightSource,
        prefix: str,
        widths: tuple[int, int],
        eps: float,
        shares: tuple[Share, Share],
        group: Group,
    ) -> None:
        self._ops, self._eps, self._group = ops, eps, group
        self._weights = [
            reader.tensor(f"{prefix}.{name}.weight", (width,), Cut(share.cut(width)), dtype=torch.float32)
            for name, width, share in zip(("q_norm", "k_norm"), widths, shares)
        ]
        copies = [group.size // share.size for share in shares]  # ranks with the same part
        counts = torch.tensor([[width * n] for width, n in zip(widths, copies)], dtype=torch.float32)
        self._counts = counts.to(reader.device)

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rows may be strided. New contiguous tensors."""
        q_weight, k_weight = self._weights
        if self._group.size == 1:
            return self._ops.rms_norm(q, q_weight, self._eps), self._ops.rms_norm(k, k_weight, self._eps)
        norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in (q, k)]
        squares = self._group.all_reduce(torch.stack(norms).square_())  # [2, T]
        scales = squares.div_(self._counts).add_(self._eps).rsqrt_().unsqueeze(-1)
        return scaled(q, scales[0], q_weight), scaled(k, scales[1], k_weight)


def scaled(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """x [T, N] * scale [T, 1], in x's dtype, * weight [N], as `Ops.rms_norm` rounds."""
    return ((x * scale).to(x.dtype) * weight).to(x.dtype)
