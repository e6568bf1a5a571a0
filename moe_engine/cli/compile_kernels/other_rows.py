"""Stand-ins for non-Triton kernels (vendor, torch): they need no compilation and may not run on this machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.cli.compile_kernels.absent_deep_gemm import absent_products
from moe_engine.kernels.attention.protocol import AttentionCapabilities
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.deep_gemm import DeepGemmExperts
from moe_engine.kernels.experts.reference import TorchExperts
from moe_engine.kernels.linear.deep_gemm import DeepGemmLinear
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.registry import Choice
from moe_engine.kernels.sampling.protocol import SamplingParameters


class NoAttention:
    """`MLABackend` and `GQABackend` whose results have the right shapes."""

    name = "none"
    capabilities = AttentionCapabilities(windows=True)

    def plan(self, batch: AttentionBatch) -> None:
        return None

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: Any, value_width: int | None = None
    ) -> Tensor:
        return q[..., : value_width or q.shape[-1] - 64]

    def gather_latent(
        self, cache: Tensor, queries: PagedQueries, plan: Any, out: Tensor | None = None, value_width: int | None = None
    ) -> Tensor:
        return cache.new_empty(queries.num_context_tokens, cache.shape[1]) if out is None else out

    def expanded(self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any) -> Tensor:
        keys = q.shape[-1] - k_rope.shape[-1]
        return q.new_empty(*q.shape[:2], kv.shape[-1] - keys)

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: PagedQueries, scale: float, plan: Any
    ) -> Tensor:
        return torch.empty_like(q)


class NoSampling:
    """`SamplingKernel` without sampling."""

    name = "none"
    reads_half = True

    def greedy(self, logits: Tensor) -> Tensor:
        return logits.new_empty(len(logits), dtype=torch.int64)

    def sample(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        return self.greedy(logits)

    def probabilities(self, logits: Tensor, parameters: SamplingParameters, tokens: Tensor) -> Tensor:
        return logits.new_empty(tokens.shape)


class NoExperts(TorchExperts):
    """`TorchExperts` without products: their loop reads the rows of each expert on the host, and results on the meta
    device have no values."""

    def run(self, batch: ExpertBatch, weights: ExpertWeights) -> Tensor:
        return torch.empty_like(batch.x)

    def run_routed(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None = None
    ) -> Tensor:
        return torch.empty_like(x)


DEEP_GEMM: dict[str, Any] = {"linear": DeepGemmLinear, "experts": DeepGemmExperts}


def build_triton(
    choices: tuple[Choice, ...], capability: tuple[int, int] | None = None, takes_ends: bool = True
) -> Backends:
    """The chosen backends; attention and sampling are replaced by stand-ins unless they are Triton's, experts if they
    are torch's, TensorRT-LLM's or MegaMoE, and DeepGEMM's products.

    Args:
        capability, takes_ends: of the target, as in `absent_products`; needed with DeepGEMM only.
    """
    built: dict[str, Any] = {}
    for choice in choices:
        if choice.row.name == DeepGemmLinear.name and choice.family in DEEP_GEMM:
            assert capability is not None
            built[choice.family] = DEEP_GEMM[choice.family](absent_products(capability, takes_ends))
            continue
        if choice.family == "experts" and choice.row.name in (NoExperts.name, "flashinfer_trtllm", "mega_moe"):
            built[choice.family] = NoExperts()
        elif choice.row.name == "triton" or choice.family in ("ops", "linear", "experts", "delta"):
            built[choice.family] = choice.build()
    built.setdefault("attention", NoAttention())
    built.setdefault("sampling", NoSampling())
    return Backends(**built, choices=choices)
