"""The tensors of a quantized copy of a checkpoint, from those of its source.

Legend: N rows and K columns of a matrix, E experts, D hidden, I expert width.

Experts in common tensors of a layer (`FusedExpertsFormat`) get a matrix each, as llm-compressor writes them and
transformers reads Qwen3.5-MoE; or they stay in common tensors, where a model is published so in the format: in MXFP4
(gpt-oss) and FP8 (Qwen3-VL-MoE, Mistral Small 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.kernels.quantization.codes import CodedWeight
from moe_engine.kernels.quantization.quantize import quantize_codes
from moe_engine.kernels.quantization.reference import quantize_weight
from moe_engine.models.formats.fused_experts import E2M1, GROUP, FusedExpertsFormat
from moe_engine.models.quantized_copy.target import Target

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclass(frozen=True)
class Conversion:
    """
    Attributes:
        quantized: names of the model's tensors that are quantized, those of single experts too.
        experts: how the source has experts in common tensors, if it has.
        common: the copy has them in common tensors, too.
    """

    target: Target
    quantized: frozenset[str]
    experts: FusedExpertsFormat | None
    common: bool

    def tensors(self, name: str, stored: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the copy. name: in the model; stored: in the files."""
        if self.experts is not None and name.endswith((_GATE_UP, _DOWN)):
            quantized = self._single(name)[0] in self.quantized
            if not self.common:
                yield from self._apart(stored if stored.endswith((_GATE_UP, _DOWN)) else name, tensor, quantized)
            elif quantized:
                yield from self._together(stored, tensor)
            else:
                yield stored, tensor
        elif name in self.quantized:
            yield from quantized_tensors(stored, tensor, self.target)
        else:
            yield stored, tensor

    @staticmethod
    def _single(name: str, expert: int = 0) -> list[str]:
        """Names of an expert's matrices in the tensor `name` of all experts."""
        block, _, last = name.rpartition(".")
        return [f"{block}.{expert}.{part}.weight" for part in (("gate_proj", "up_proj") if "_up_" in last else (last,))]

    def _apart(self, stored: str, tensor: Tensor, quantized: bool) -> Iterator[tuple[str, Tensor]]:
        for expert, matrix in enumerate(self._matrices(tensor)):
            names = self._single(stored, expert)
            for name, part in zip(names, matrix.chunk(len(names))):
                if quantized:
                    yield from quantized_tensors(name, part, self.target)
                else:
                    yield name, part.contiguous()

    def _together(self, stored: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        ends = ("_blocks", "_scales") if self.target.format == "mxfp4" else ("", "_scale_inv")
        made: list[tuple[Tensor, Tensor]] = []
        for matrix in self._matrices(tensor):
            if self.target.format == "mxfp4":
                made.append(quantize_mxfp4(matrix))
                continue
            block = quantize_weight(matrix)
            made.append((block.data, block.scales))
        transposed = self.experts is not None and self.experts.transposed and self.target.format == "fp8"
        for end, parts in zip(ends, zip(*made)):
            yield stored + end, torch.stack([part.T if transposed else part for part in parts])

    def _matrices(self, tensor: Tensor) -> Iterator[Tensor]:
        """[N, K] of each expert; the rows of gate and up follow each other, or alternate, as in the source."""
        assert self.experts is not None
        yield from tensor.transpose(1, 2) if self.experts.transposed else tensor


def quantized_tensors(name: str, weight: Tensor, target: Target) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of a matrix [N, K] in FP8 or integers. name: with `.weight`."""
    codes, prefix = target.codes, name.removesuffix(".weight")
    if codes is None:
        block = quantize_weight(weight)
        yield name, block.data
        yield f"{name}_scale_inv", block.scales
        return
    n, k = weight.shape
    coded = CodedWeight.empty(codes, n, k, "cpu")
    quantize_codes(weight, coded)
    per = 32 // codes.bits
    padded = torch.nn.functional.pad(coded.codes, (0, -k % per)).view(n, -1, per).to(torch.int64)
    words = (padded << (torch.arange(per) * codes.bits)).sum(-1)
    yield f"{prefix}.weight_packed", torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    yield f"{prefix}.weight_scale", coded.scales
    yield f"{prefix}.weight_shape", torch.tensor([n, k])


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> blocks uint8 [N, K / 32, 16], scales uint8 [N, K / 32]: the nearest numbers, even ones of two
    equally near; the scale is the largest with which the greatest of a group is at least 4. Source: OCP Microscaling
    specification 1.0."""
    groups = weight.float().contiguous().unflatten(1, (-1, GROUP))
    exponents = torch.frexp(groups.abs().amax(-1)).exponent - 3  # 2^e of the greatest, over 4
    exponents = exponents.clamp(-127, 127)
    scaled = torch.ldexp(groups, -exponents.unsqueeze(-1))
    values = torch.tensor(E2M1)
    middles = (values[1:] + values[:-1]) / 2
    size = scaled.abs()
    codes = torch.bucketize(size, middles)  # of two equally near numbers the lower one
    codes += ((codes % 2 == 1) & (size == middles[codes.clamp(max=len(middles) - 1)])).to(codes.dtype)
    codes = (codes | (scaled.signbit().to(codes.dtype) << 3)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)
