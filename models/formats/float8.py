"""FP8 weights (e4m3) with a scale per row or for the whole matrix: compressed-tensors (``float-quantized``), fbgemm,
ModelOpt, vLLM's ``fp8`` without blocks, SGLang's ``w8a8_fp8``. Imports no torch.

Activations are not quantized to static scales of the checkpoint: tensors of such scales are accepted and not used.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_engine.models.cut import Cut
from moe_engine.models.formats.integers import SCALES, consume, read_row_scales, row_scales
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors
from moe_engine.models.formats.schemes import SchemeBase

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import QuantizedWeight

_SCALES = (".weight_scale", ".weight_scale_inv")
"""Names of the scales; both are factors. The second is transformers', without blocks."""
_UNUSED = (
    ".input_scale", ".input_scale_ub", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale",
    ".activation_scale",
)  # fmt: skip
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Float8(SchemeBase):
    """`weight` e4m3 [N, K] and `weight_scale` (`weight_scale_inv`) [N, 1], [N], [1] or []: value = element * scale."""

    @property
    def extras(self) -> tuple[str, ...]:
        return (*_SCALES, *_UNUSED)

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        return f"{prefix}.weight" in names and any(prefix + end in names for end in _SCALES)

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        ends = (end for end in _SCALES if prefix + end in names)
        scale = row_scales(prefix + next(ends, _SCALES[0]), shape[0])
        weight = StoredTensor(f"{prefix}.weight", shape, ("F8_E4M3",))
        unused = (prefix + end for end in _UNUSED if prefix + end in names)
        return (weight, scale, *(StoredTensor(name, (1,), SCALES, ((), (1, 1))) for name in unused))

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        from torch import Tensor

        from moe_engine.kernels.cpu.fp8_weights import fp8_values

        weight, scale, *unused = self.tensors(prefix, shape, source.names)
        consume(source, *unused)
        scales = read_row_scales(source, scale, cut).float()
        assert isinstance(out, Tensor)
        step = max(1, _CHUNK_ELEMENTS // max(1, shape[1]))
        with source.open(weight, cut) as part:
            if fp8_values(out, part, scales, (1, max(1, shape[1])), (0, 0)):
                return
            for start in range(0, len(part), step):
                rows = slice(start, start + step)
                out[rows].copy_(part[rows].float().mul_(scales[rows]))
