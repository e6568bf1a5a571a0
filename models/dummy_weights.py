"""Random weights for any config, without files: for benchmarks, and for planning without the checkpoint."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from moe_engine.kernels.quantization.protocol import BlockWeight
from moe_engine.models.cut import UNCUT, Cut

_POOL = 1_048_573  # prime, so that rows of any width start at different places


class DummyReader:
    """`WeightSource` of seeded random weights, deterministic in seed, name and shape.

    Norm weights are 1; matrices have variance 1 / K, so that activations keep their scale. Values are copied from one
    pool of random values: filling runs at the speed of a copy.

    Args:
        block_fp8: the projections of the decoder layers are in block FP8, as in DeepSeek V3's checkpoints.
        power_of_two: see `WeightSource`.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 0,
        block_fp8: bool = False,
        power_of_two: bool = False,
    ) -> None:
        self.dtype = dtype
        self.power_of_two = power_of_two
        self._block_fp8 = block_fp8
        self.device = torch.device(device)
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(_POOL, generator=generator).to(self.device)
        self._scaled: dict[tuple[float, torch.dtype], Tensor] = {}

    def has(self, name: str) -> bool:
        return True

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Cut = UNCUT,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        sliced = cut.shape(shape)
        if out is None:
            out = torch.empty(sliced, dtype=dtype or self.dtype, device=self.device)
        if "norm" in name:
            return out.fill_(1.0)
        scale = 0.02 if len(shape) == 1 else shape[-1] ** -0.5
        offset = zlib.crc32(f"{name} {cut.rows} {cut.cols}".encode()) % _POOL
        if out.is_contiguous():
            self._fill(out.view(-1), scale, offset)
            return out
        filled = torch.empty(sliced, dtype=out.dtype, device=out.device)
        self._fill(filled.view(-1), scale, offset)
        return out.copy_(filled)

    def linear(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: Tensor | None = None) -> Tensor:
        return self.tensor(prefix + ".weight", shape, cut, out=out)

    def keeps_blocks(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT) -> bool:
        return self._block_fp8 and ".layers." in prefix and not prefix.endswith(".eh_proj")

    def blocks(
        self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: BlockWeight | None = None
    ) -> BlockWeight:
        sliced = cut.shape(shape)
        if out is None:
            out = BlockWeight.empty(sliced[0], sliced[1], self.device, self.power_of_two)
        scale = 2.0**-7  # of every block: values use e4m3's range without reaching its maximum, for any K
        self._fill(out.data.view(-1), 1 / (shape[1] ** 0.5 * scale), zlib.crc32(prefix.encode()) % _POOL)
        out.scales.fill_(scale)
        return out

    def skip(self, name: str) -> None:
        pass

    def finish(self) -> None:
        pass

    def _fill(self, flat: Tensor, scale: float, offset: int) -> None:
        """Fills with repeated copies of the pool, from `offset` on."""
        pool = self._scaled.get((scale, flat.dtype))
        if pool is None:
            pool = self._scaled[scale, flat.dtype] = (self._pool * scale).to(flat.dtype)
        done = 0
        while done < flat.numel():
            size = min(_POOL - offset, flat.numel() - done)
            flat[done : done + size] = pool[offset : offset + size]
            done, offset = done + size, 0
