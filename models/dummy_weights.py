"""Random weights for any config, without files: for benchmarks, and for planning without the checkpoint."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from moe_engine.kernels.quantization.protocol import QuantizedWeight
from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.weights import WeightSource

_POOL = 1_048_573  # prime, so that rows of any width start at different places


class DummyReader(WeightSource):
    """`WeightSource` of seeded random weights, deterministic in seed, name and shape.

    Norm weights are 1; matrices have variance 1 / K, so that activations keep their scale. Values are copied from one
    pool of random values: filling runs at the speed of a copy.

    Args:
        format: of the projections of the decoder layers; a format without a kernel format is loaded as plain.
    """

    made_up = True
    """Norm weights are 1, whatever is added to stored weights."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0, format: WeightFormat = PLAIN
    ) -> None:
        self.dtype = dtype
        self.format = format
        self.device = torch.device(device)
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(_POOL, generator=generator).to(self.device)
        self._scaled: dict[tuple[float, torch.dtype], Tensor] = {}
        self.served_gates: torch.dtype | None = None
        """As in `WeightSource`."""

    def gate_dtype(self, name: str) -> torch.dtype:
        usual = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        return self.served_gates or usual

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
        if out.is_meta:  # compilation without values
            return out
        if "norm" in name:
            return out.fill_(1.0)
        if not out.is_floating_point():  # numbers of rows: different ones in each row
            return out.copy_(torch.arange(out.shape[-1]).expand_as(out))
        scale = 0.02 if len(shape) == 1 else shape[-1] ** -0.5
        offset = zlib.crc32(f"{name} {cut.rows} {cut.cols}".encode()) % _POOL
        if out.is_contiguous():
            self._fill(out.view(-1), scale, offset)
            return out
        filled = torch.empty(sliced, dtype=out.dtype, device=out.device)
        self._fill(filled.view(-1), scale, offset)
        return out.copy_(filled)

    def mapped(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, str]:
        return torch.zeros((1, 4 * shape[1]), dtype=torch.uint8).expand(shape[0], -1), "F32"

    def linear(
        self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: Tensor | QuantizedWeight | None = None
    ) -> Tensor | QuantizedWeight:
        if out is None or isinstance(out, Tensor):
            return self.tensor(prefix + ".weight", shape, cut, out=out)
        if self.device == torch.device("meta"):
            return out
        offset = zlib.crc32(prefix.encode()) % _POOL
        out.randomize(1 / shape[1] ** 0.5, lambda part, scale: self._fill(part.view(-1), scale, offset))
        return out

    def keeps(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT) -> bool:
        kept = self.format.kernel_format(prefix) is not None
        size = self.dtype.itemsize
        if kept and self.format.bytes_per_element(prefix, shape, size) == size:  # the format leaves this one out
            return False
        return kept and ".layers." in prefix and not prefix.endswith(".eh_proj")

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
