"""Named sizes of routed experts, with their minimal bytes and operations. Imports no torch.

Legend: T tokens, E experts, K experts per token, D hidden, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_engine.kernels.gate_form import GELU, SILU, SQUARED, GatedActivation
from moe_engine.kernels.linear.shapes import AWQ
from moe_engine.kernels.quantization.codes import FP4, MXFP4_GROUP, NVFP4_GROUP, GroupCodes


@dataclass(frozen=True)
class ExpertModel:
    """The routed experts of a layer; `num_experts` of the whole model. `biased`: with `ExpertBiases`. `activation`:
    that of `ExpertWeights`. `format`: of weights in 4 bits. `row_scales`: FP8 has a scale per row, not blocks."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    width: int
    fp8: bool
    biased: bool = False
    format: GroupCodes | None = None
    activation: GatedActivation = SILU
    row_scales: bool = False

    def part(self, ranks: int) -> ExpertModel:
        """What one of `ranks` has of each expert."""
        return replace(self, name=f"{self.name}-tp{ranks}", width=self.width // ranks)


@dataclass(frozen=True)
class ExpertShape:
    """T tokens through the experts of one layer on one GPU, choices balanced; x and the result are bf16.

    `num_experts` of the model's experts are local; other choices run on other ranks.
    """

    model: ExpertModel
    tokens: int
    num_experts: int

    @property
    def name(self) -> str:
        return f"{self.model.name}.e{self.num_experts}.t{self.tokens}"

    @property
    def rows(self) -> float:
        """Expected (token, choice) pairs on this GPU."""
        return self.tokens * self.model.top_k * self.num_experts / self.model.num_experts

    @property
    def experts_hit(self) -> float:
        """Expected number of local experts chosen by any token, for independent choices."""
        model = self.model
        return self.num_experts * (1 - (1 - model.top_k / model.num_experts) ** self.tokens)

    @property
    def matrices(self) -> int:
        """Matrices of an expert: gate, up and down; up and down without a gate."""
        return 2 if self.model.activation.squared else 3

    @property
    def bytes(self) -> int:
        """Weights of the experts that were hit, tokens and result, each moved once."""
        model = self.model
        each = 1 if model.fp8 else 2 if model.format is None else model.format.bytes_on_gpu()
        weight = float(self.matrices * model.hidden * model.width * each)
        scales = 3 * -(-model.hidden // 128) * -(-model.width // 128) * 4 if model.fp8 else 0
        if model.row_scales:
            scales = 4 * (2 * model.width + model.hidden)
        return round(self.experts_hit * (weight + scales) + 2 * 2 * self.tokens * model.hidden)

    @property
    def flops(self) -> int:
        return round(2 * self.matrices * self.rows * self.model.hidden * self.model.width)


DEEPSEEK_V3 = ExpertModel("deepseek-v3", 256, 8, 7168, 2048, fp8=True)
DEEPSEEK_V2_LITE = ExpertModel("deepseek-v2-lite", 64, 6, 2048, 1408, fp8=False)
MINIMAX_M3 = ExpertModel("minimax-m3", 128, 4, 6144, 3072, fp8=False, activation=GatedActivation(7.0, 1.702))
NEMOTRON_3 = ExpertModel("nemotron-3-nano", 128, 6, 2688, 1856, fp8=False, activation=SQUARED)
GEMMA_4 = ExpertModel("gemma-4-26b-a4b", 128, 8, 2816, 704, fp8=False, activation=GELU)
GPT_OSS_20B = ExpertModel("gpt-oss-20b", 32, 4, 2880, 2880, fp8=False, biased=True)
QWEN3_30B_ROWS = ExpertModel("qwen3-30b-a3b-fp8-rows", 128, 8, 2048, 768, fp8=True, row_scales=True)
"""FP8 of compressed-tensors, strategy ``channel``."""
MXFP4 = GroupCodes(4, MXFP4_GROUP, values=FP4)
GPT_OSS_20B_MXFP4 = replace(GPT_OSS_20B, name="gpt-oss-20b-mxfp4", format=MXFP4)
KIMI_K2 = ExpertModel("kimi-k2-int4", 384, 8, 7168, 2048, fp8=False, format=GroupCodes(4, 32))
"""K2-Thinking and K2.5: integers of compressed-tensors."""
KIMI_K3 = ExpertModel(
    "kimi-k3", 896, 16, 3584, 3072, fp8=False, format=MXFP4, activation=GatedActivation(25.0, beta=4.0)
)
NVFP4 = GroupCodes(4, NVFP4_GROUP, values=FP4)
NEMOTRON_3_SUPER = ExpertModel(
    "nemotron-3-super-nvfp4", 512, 22, 1024, 2688, fp8=False, format=NVFP4, activation=SQUARED
)
"""In its latent space."""
FOUR_BIT_MODELS = (
    KIMI_K2,
    replace(DEEPSEEK_V3, name="deepseek-v3-nvfp4", fp8=False, format=NVFP4),
    replace(DEEPSEEK_V3, name="deepseek-v3-awq", fp8=False, format=AWQ),
    ExpertModel("deepseek-v4-flash", 256, 6, 4096, 2048, fp8=False, format=MXFP4, activation=GatedActivation(10.0)),
)
DECODE_TOKENS = (1, 8, 32, 128, 256)
PREFILL_TOKENS = (1024, 4096, 8192)


def named_shapes() -> list[ExpertShape]:
    """All of V2-Lite, and one rank's 16 of V3's 256 experts with the tokens of all 16 ranks."""
    sizes = (*DECODE_TOKENS, *PREFILL_TOKENS)
    whole = [ExpertShape(DEEPSEEK_V2_LITE, tokens, 64) for tokens in sizes]
    return whole + [ExpertShape(DEEPSEEK_V3, 16 * tokens, 16) for tokens in sizes]
