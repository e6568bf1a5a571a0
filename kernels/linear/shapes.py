"""Named products of the benchmarked models, with their minimal bytes and operations. Imports no torch.

Legend: M rows, N out-features, K in-features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_engine.kernels.quantization.codes import FP4, MXFP4_GROUP, NVFP4_GROUP, GroupCodes


@dataclass(frozen=True)
class LinearShape:
    """x [M, K] @ weight [N, K].T in bf16, or with x and weight in block FP8; the result is bf16. `format`: of a weight
    in 4 bits, with x in 16 bits. `row_scales`: FP8 has a scale per row of the weight. `biased`: with a bias.
    `power_of_two`: rows are quantized with such scales."""

    name: str
    rows: int
    n: int
    k: int
    fp8: bool
    format: GroupCodes | None = None
    row_scales: bool = False
    biased: bool = False
    power_of_two: bool = False

    @property
    def bytes(self) -> int:
        """Rows, weight and result moved once, scales included."""
        m, n, k = self.rows, self.n, self.k
        if self.format is not None:
            return round(2 * (m * k + m * n) + n * k * self.format.bytes_on_gpu())
        if not self.fp8:
            return 2 * (m * k + n * k + m * n)
        blocks = -(-k // 128)
        scales = n if self.row_scales else blocks * -(-n // 128)
        return m * k + n * k + 4 * (blocks * m + scales) + 2 * m * n

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.n * self.k


@dataclass(frozen=True)
class ModelProducts:
    """The products of a model on one GPU: name -> (N, K)."""

    model: str
    products: tuple[tuple[str, int, int], ...]
    fp8: bool
    format: GroupCodes | None = None
    """Format of weights in 4 bits; None: other weights."""
    row_scales: bool = False

    def at(self, rows: int) -> Iterator[LinearShape]:
        """Shapes with `rows` rows."""
        for name, n, k in self.products:
            yield LinearShape(f"{self.model}.{name}.m{rows}", rows, n, k, self.fp8, self.format, self.row_scales)


DEEPSEEK_V3 = ModelProducts(
    "deepseek-v3",
    (
        ("q_a+kv_a", 1536 + 576, 7168),
        ("q_b", 128 * 192, 1536),
        ("o", 7168, 128 * 128),
        ("shared_gate_up", 2 * 2048, 7168),
        ("shared_down", 7168, 2048),
        ("dense_gate_up", 2 * 18432, 7168),
        ("dense_down", 7168, 18432),
    ),
    fp8=True,
)
DEEPSEEK_V2_LITE = ModelProducts(
    "deepseek-v2-lite",
    (
        ("q", 16 * 192, 2048),
        ("kv_a", 576, 2048),
        ("o", 2048, 16 * 128),
        ("shared_gate_up", 2 * 2816, 2048),
        ("shared_down", 2048, 2816),
        ("dense_gate_up", 2 * 10944, 2048),
        ("dense_down", 2048, 10944),
    ),
    fp8=False,
)
_LLAMA_8B = (("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 2 * 14336, 4096), ("down", 4096, 14336))
AWQ = GroupCodes(4, 128, zeros=True, scales="float16")
"""Computed in float16, as its checkpoints declare."""
LLAMA_8B_ROWS = ModelProducts("llama-8b-fp8-rows", _LLAMA_8B, True, row_scales=True)
LLAMA_8B_AWQ = ModelProducts("llama-8b-awq", _LLAMA_8B, False, AWQ)
LLAMA_8B_INT4 = ModelProducts("llama-8b-int4", _LLAMA_8B, False, GroupCodes(4, 128))
LLAMA_8B_INT4_32 = ModelProducts("llama-8b-int4-32", _LLAMA_8B, False, GroupCodes(4, 32))
LLAMA_8B_NVFP4 = ModelProducts("llama-8b-nvfp4", _LLAMA_8B, False, GroupCodes(4, NVFP4_GROUP, values=FP4))
LLAMA_8B_MXFP4 = ModelProducts("llama-8b-mxfp4", _LLAMA_8B, False, GroupCodes(4, MXFP4_GROUP, values=FP4))
FOUR_BIT_PRODUCTS = LLAMA_8B_AWQ, LLAMA_8B_INT4, LLAMA_8B_INT4_32, LLAMA_8B_NVFP4, LLAMA_8B_MXFP4
DECODE_ROWS = (1, 8, 32, 64, 128, 256)
PREFILL_ROWS = (1024, 4096)


def named_shapes() -> list[LinearShape]:
    """Every product of both models at decode and prefill sizes."""
    models = (DEEPSEEK_V3, DEEPSEEK_V2_LITE)
    return [shape for model in models for rows in (*DECODE_ROWS, *PREFILL_ROWS) for shape in model.at(rows)]
