"""Experts of a layer in common tensors, as gpt-oss stores them (unquantized, or in MXFP4), Qwen3-VL-MoE and Qwen3.5.
Imports no torch.

Legend: E experts, D hidden, I expert width, G groups of 32 numbers, N rows and K columns of a matrix.

Unquantized, `gate_up_proj` is [E, D, 2I] and `down_proj` [E, I, D]: transposed; of Qwen3.5 they are [E, 2I, D] and
[E, D, I]. In MXFP4 a matrix [N, K] of each expert
is `_blocks` uint8 [E, N, G, 16] with two numbers a byte, the first in the low bits, and `_scales` uint8 [E, N, G]: a
value is number * 2^(scale - 127). Gate and up alternate: rows 0, 2, 4 ... and 1, 3, 5 ... of `gate_up_proj`. Sources:
the OCP Microscaling specification 1.0; names and layout of the published checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from moe_engine.kernels.weight_forms import CODES, FOUR_BITS, Multiplied, families
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.formats.plain import PLAIN, plain_tensor
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import KernelFormat, QuantizedWeight

FUSED = ".experts.gate_up_proj"
"""End of the name of a common tensor."""
MXFP4 = "mxfp4"
GROUP = 32
"""Numbers with a common scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; codes from 8 on are their negatives."""

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")


class Place(NamedTuple):
    """Where a matrix of an expert is: `part` of the `parts` matrices of each expert in tensor `name`."""

    name: str
    expert: int
    part: int
    parts: int


def place_of(prefix: str, joined: bool = True) -> Place | None:
    """None: not a matrix of an expert. joined: gate and up are one tensor."""
    match = _EXPERT.fullmatch(prefix)
    if match is None:
        return None
    if match[3] == "down" or not joined:
        return Place(f"{match[1]}.{match[3]}_proj", int(match[2]), 0, 1)
    return Place(f"{match[1]}.gate_up_proj", int(match[2]), int(match[3] == "up"), 2)


@dataclass(frozen=True)
class FusedExpertsFormat:
    """`WeightFormat`: matrices of experts are parts of tensors of all experts; other matrices are plain. MXFP4 is
    dequantized while loading, unless the kernel takes it.

    Attributes:
        num_experts: E.
        method: `quant_method` in config.json, empty if there is none.
        alternating: rows of gate and up alternate; else the gate's come first (Qwen3-VL-MoE).
        transposed: unquantized matrices are [K, N].
        optional: a checkpoint may have a matrix for each expert instead.
        scale_bytes: of a scale of MXFP4 in memory.
        joined: gate and up are one tensor; else `gate_proj` and `up_proj` [E, I, D] (Step 3.5).
    """

    num_experts: int
    method: str = ""
    alternating: bool = True
    transposed: bool = True
    optional: bool = False
    scale_bytes: int = 2
    joined: bool = True

    @property
    def name(self) -> str:
        return self.method

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        place = place_of(prefix, self.joined)
        if place is None:
            return PLAIN.tensors(prefix, shape, names)
        name, rows, cols = place.name, place.parts * shape[0], shape[1]
        if self.optional and name not in names:
            return PLAIN.tensors(prefix, shape, names)
        if f"{name}_blocks" not in names and self.method != MXFP4:
            matrix = (cols, rows) if self.transposed else (rows, cols)
            return (plain_tensor(name, (self.num_experts, *matrix)),)
        groups = (self.num_experts, rows, cols // GROUP)
        blocks = StoredTensor(f"{name}_blocks", (*groups, GROUP // 2), ("U8",))
        return blocks, StoredTensor(f"{name}_scales", groups, ("U8",))

    def is_scale(self, name: str) -> bool:
        return name.endswith("_proj_scales")

    def bytes_per_element(self, prefix: str, shape: Shape, dtype_bytes: int) -> Fraction:
        if self.method == MXFP4 and _EXPERT.fullmatch(prefix.replace("*", "0")) and shape[-1] % GROUP == 0:
            return Fraction(1, 2) + Fraction(self.scale_bytes, GROUP)
        return Fraction(dtype_bytes)

    def held_by(self, multiplied: Multiplied) -> WeightFormat:
        if not self.has_kernel_formats or "experts" not in families(multiplied, FOUR_BITS):
            return PLAIN
        return replace(self, scale_bytes=2 if "experts" in families(multiplied, CODES) else 1)

    def kernel_format(self, prefix: str) -> KernelFormat | None:
        from moe_engine.kernels.quantization.codes import FP4, GroupCodes

        return GroupCodes(4, GROUP, values=FP4) if self.method == MXFP4 and _EXPERT.fullmatch(prefix) else None

    @property
    def has_kernel_formats(self) -> bool:
        return self.method == MXFP4

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        stored = self.tensors(prefix, shape, source.names)
        return len(stored) == 2 and shape[1] % GROUP == 0 and cut.keeps_whole(shape, (1, GROUP))

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        import torch

        from moe_engine.kernels.quantization.codes import CodedWeight

        place = place_of(prefix, self.joined)
        if place is None:
            PLAIN.load(source, prefix, shape, cut, out)
            return
        stored = self.tensors(prefix, shape, source.names)
        if self.optional and stored[0].name == f"{prefix}.weight":
            PLAIN.load(source, prefix, shape, cut, out)
            return
        expert = Cut(slice(place.expert, place.expert + 1))
        own = slice(place.part, None, place.parts)  # rows of this matrix
        if not self.alternating:
            own = slice(place.part * shape[0], (place.part + 1) * shape[0])
        if len(stored) == 1:
            with source.open(stored[0], expert) as part:
                matrix = part[0][:, own].T if self.transposed else part[0][own]
                out.copy_(cut.of(matrix))  # type: ignore[union-attr]
            return
        with source.open(stored[0], expert) as blocks, source.open(stored[1], expert) as scales:
            rows = Cut(cut.rows)
            if isinstance(out, CodedWeight):
                codes, powers = (rows.of(part[0][own]).to(out.codes.device) for part in (blocks, scales))
                columns = slice(*(cut.cols or slice(None)).indices(shape[1])[:2])
                values = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
                out.codes.copy_(values[:, columns])
                out.scales.copy_(torch.exp2(powers.float() - 127)[:, columns.start // GROUP : columns.stop // GROUP])
                return
            matrix = dequantize_mxfp4(rows.of(blocks[0][own]), rows.of(scales[0][own]))
            out.copy_(Cut(cols=cut.cols).of(matrix))  # type: ignore[union-attr]


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [N, G, 16], scales uint8 [N, G] -> float32 [N, 32 G]."""
    import torch

    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)  # [N, 32 G]
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    powers = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    return values[codes.int()].unflatten(1, (-1, GROUP)).mul_(powers.unsqueeze(-1)).flatten(1)
