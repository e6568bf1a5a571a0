"""Named sizes of routed experts, with their minimal bytes and operations. Imports no torch.

Legend: T tokens, E experts, K experts per token, D hidden, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ExpertModel:
    """The routed experts of a layer; `num_experts` of the whole model. `biased`: with `ExpertBiases`. `mxfp4`: weights
    in MXFP4."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    width: int
    fp8: bool
    biased: bool = False
    mxfp4: bool = False


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
    def bytes(self) -> int:
        """Weights of the experts that were hit, tokens and result, each moved once."""
        model = self.model
        weight = 3 * model.hidden * model.width * (1 if model.fp8 else 17 / 32 if model.mxfp4 else 2)
        scales = 3 * -(-model.hidden // 128) * -(-model.width // 128) * 4 if model.fp8 else 0
        return round(self.experts_hit * (weight + scales) + 2 * 2 * self.tokens * model.hidden)

    @property
    def flops(self) -> int:
        return round(6 * self.rows * self.model.hidden * self.model.width)


DEEPSEEK_V3 = ExpertModel("deepseek-v3", 256, 8, 7168, 2048, fp8=True)
DEEPSEEK_V2_LITE = ExpertModel("deepseek-v2-lite", 64, 6, 2048, 1408, fp8=False)
GPT_OSS_20B = ExpertModel("gpt-oss-20b", 32, 4, 2880, 2880, fp8=False, biased=True)
GPT_OSS_20B_MXFP4 = replace(GPT_OSS_20B, name="gpt-oss-20b-mxfp4", mxfp4=True)
DECODE_TOKENS = (1, 8, 32, 128, 256)
PREFILL_TOKENS = (1024, 4096, 8192)


def named_shapes() -> list[ExpertShape]:
    """All of V2-Lite, and one rank's 16 of V3's 256 experts with the tokens of all 16 ranks."""
    sizes = (*DECODE_TOKENS, *PREFILL_TOKENS)
    whole = [ExpertShape(DEEPSEEK_V2_LITE, tokens, 64) for tokens in sizes]
    return whole + [ExpertShape(DEEPSEEK_V3, 16 * tokens, 16) for tokens in sizes]
