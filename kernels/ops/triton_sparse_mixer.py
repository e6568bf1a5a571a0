"""SparseMixer (Phi-3.5-MoE): the choice of a token by its router logits, in one launch after them.

Legend: T tokens, E experts, K experts per token, P parts of a sum.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs


@dependent_jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["real"])
def sparse_mixer_kernel(
    logits, real, weights, ids, num_tokens, jitter, scale,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, HAS_REAL: tl.constexpr,
):  # fmt: skip
    """weights, ids [T, K] of a token from logits [P, T, E]. Tokens whose `real` [T] is 0 choose no expert: -1.
    Grid (T,)."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    live = expert < EXPERTS
    choice = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        choice += tl.load(logits + (part * num_tokens + token) * EXPERTS + expert, live, 0.0)
    choice = tl.where(choice == choice, choice, float("inf"))  # NaN sorts as largest, so that ids stay in range
    choice = tl.where(live, choice, float("-inf"))
    for k in tl.static_range(TOP_K):
        best, at = tl.max(choice, 0, return_indices=True, return_indices_tie_break_left=True)
        near = best - choice <= 2.0 * jitter * tl.maximum(tl.abs(choice), best)
        weight = scale / tl.sum(tl.where(near, tl.exp(choice - best), 0.0), 0)
        choice = tl.where(expert == at, float("-inf"), choice)
        if HAS_REAL:
            at = tl.where(tl.load(real + token) != 0, at, -1)
        tl.store(weights + token * TOP_K + k, weight)
        tl.store(ids + token * TOP_K + k, at)


def sparse_mixer(
    logits: Tensor, spec: RouterSpec, real: Tensor | None, ids_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """logits [P, T, E] float32, the parts of a sum -> weights and ids [T, K] of `Ops.route`."""
    parts, count, _ = logits.shape
    weights = torch.empty((count, spec.top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((count, spec.top_k), dtype=ids_dtype, device=logits.device)
    if count:
        sparse_mixer_kernel[(count,)](
            logits, real, weights, ids, count, spec.jitter, spec.scale, **_constants(spec, parts, real is not None),
            num_warps=1,
        )  # fmt: skip
    return weights, ids


def _constants(spec: RouterSpec, parts: int, has_real: bool) -> dict[str, int]:
    block = next_power_of_2(spec.num_experts)
    return {
        "PARTS": parts, "EXPERTS": spec.num_experts, "TOP_K": spec.top_k, "BLOCK": block, "HAS_REAL": has_real,
    }  # fmt: skip


PHI = RouterSpec(16, 2, "sparsemixer", jitter=0.01)


def aot_cases() -> list[AotCase]:
    """Phi-3.5-MoE, for few and for many tokens, and in a captured step."""
    cases = []
    for parts, has_real in ((8, False), (1, False), (8, True)):
        signature = {"logits": "*fp32", "weights": "*fp32", "ids": "*i32", "num_tokens": "i32", "jitter": "fp32"}
        signature |= {"scale": "fp32"} | ({"real": "*i32:1"} if has_real else {})
        constants = _constants(PHI, parts, has_real) | ({} if has_real else {"real": None})
        name = f"sparse_mixer_{parts}{'_masked' * has_real}"
        cases.append(AotCase(name, sparse_mixer_kernel, signature, constants, 1, 3, False))
    return cases
