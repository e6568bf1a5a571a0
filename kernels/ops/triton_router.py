"""Routing: router logits to float32 accuracy on tensor cores, then grouped top-k, one program per token.

bf16 activations are exact in bf16, so x @ gate only needs the float32 gate split into three bf16 terms (bf16x3: 8 + 8 +
8 bits of its 24): three products, accumulated in float32, cost a tenth of a float32 product without tensor cores. With
few tokens the gate's bytes dominate, so D is split over programs; the selection sums the parts in order. A gate that is
exact in bf16, as checkpoints store it, is one term: `prepare_gate`.

Legend: T tokens, D hidden, E experts, G groups, K experts per token, P parts of D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.launch import element, stride_of, with_contiguous_rows

_GROUP_SCORES = {None: 0, "max": 1, "top2": 2}

_SPLIT_TOKENS = 256
"""Up to this many tokens tiles are low."""

_PARTS = ((_SPLIT_TOKENS, 512), (1024, 1024), (4096, 2048))
"""(tokens up to, columns of D per part): about one program per SM or more from 257 tokens on."""

_FIXED_PART = 2048
"""The same in deterministic mode, for any number of tokens; larger: long prompts keep all parts in memory."""


@triton.jit(do_not_specialize=["num_tokens"])
def router_logits_kernel(
    x, gate, logits, stride, num_tokens,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, PART: tl.constexpr, BF16X3: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """logits [P, T, E]: part p is x[:, p PART : (p + 1) PART] @ gate[:, the same].T; BF16X3: x is bfloat16; EXACT:
    the gate too."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    live_token, live_expert = (token < num_tokens)[:, None], (expert < EXPERTS)[None, :]
    x_row = x + token.to(tl.int64)[:, None] * stride
    gate_row = gate + expert[None, :] * HIDDEN
    total = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for begin in range(part * PART, min((part + 1) * PART, HIDDEN), BLOCK_D):
        column = begin + tl.arange(0, BLOCK_D)
        inside = column < HIDDEN
        a = tl.load(x_row + column[None, :], live_token & inside[None, :], 0.0)  # [BLOCK_T, BLOCK_D]
        b = tl.load(gate_row + column[:, None], live_expert & inside[:, None], 0.0)  # [BLOCK_D, BLOCK_E]
        if BF16X3 and EXACT:
            total = tl.dot(a, b, total)
        elif BF16X3:
            high = b.to(tl.bfloat16)
            rest = b - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(a, low, total)
            total = tl.dot(a, middle, total)
            total = tl.dot(a, high, total)
        else:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    place = logits + (part * num_tokens + token).to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    tl.store(place, total, live_token & live_expert)


@triton.jit
def _take_best(value, index, none):
    """(largest, its lowest index, value without it); `none` marks values already taken."""
    best, at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    return best, at, tl.where(index == at, none, value)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["real"])
def router_select_kernel(
    logits, bias, real, weights, ids, num_tokens, scale,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, GROUP_SCORE: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    BIAS_ON_LOGITS: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HAS_REAL: tl.constexpr,
):  # fmt: skip
    """weights, ids [T, K + SHARED] from logits [PARTS, T, E]; group g's experts are row g of a [BLOCK_G, BLOCK_M] tile.
    Tokens whose `real` [T] is 0 choose no expert: -1."""
    token = tl.program_id(0).to(tl.int64)
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    flat = tl.arange(0, BLOCK_G * BLOCK_M)
    live = (flat // BLOCK_M < GROUPS) & (flat % BLOCK_M < MEMBERS)
    expert = (flat // BLOCK_M) * MEMBERS + flat % BLOCK_M
    score = tl.zeros((BLOCK_G * BLOCK_M,), tl.float32)
    for part in tl.static_range(PARTS):
        score += tl.load(logits + (part * num_tokens + token) * EXPERTS + expert, live, 0.0)
    if BIAS_ON_LOGITS:
        score += tl.load(bias + expert, live, 0.0)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    else:
        score = tl.where(live, score, float("-inf"))
        score = tl.exp(score - tl.max(score, 0))
        score = score / tl.sum(score, 0)
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + expert, live, 0.0)
    choice = tl.where(choice == choice, choice, float("inf"))  # NaN sorts as largest, so that ids stay in range
    choice = tl.where(live, choice, float("-inf"))
    if GROUP_SCORE != 0:
        grouped = tl.reshape(choice, [BLOCK_G, BLOCK_M])
        group = tl.max(grouped, 1)  # [BLOCK_G]
        if GROUP_SCORE == 2:
            at = tl.argmax(grouped, 1, tie_break_left=True)
            member = tl.arange(0, BLOCK_M)[None, :]
            group += tl.max(tl.where(member == at[:, None], float("-inf"), grouped), 1)
        group_index = tl.arange(0, BLOCK_G)
        allowed = tl.zeros((BLOCK_G,), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            _best, at, group = _take_best(group, group_index, float("-inf"))
            allowed = tl.where(group_index == at, 1, allowed)
        choice = tl.reshape(tl.where(allowed[:, None] == 1, grouped, float("-inf")), [BLOCK_G * BLOCK_M])
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    weight = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(TOP_K):
        _best, at, choice = _take_best(choice, flat, float("-inf"))
        own = tl.sum(tl.where(flat == at, score, 0.0), 0)
        chosen = tl.where(place == k, (at // BLOCK_M) * MEMBERS + at % BLOCK_M, chosen)
        weight = tl.where(place == k, own, weight)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    weight = tl.where(place < TOP_K, weight * scale, 1.0)
    chosen = tl.where(place < TOP_K, chosen, EXPERTS + place - TOP_K)
    if HAS_REAL:
        chosen = tl.where(tl.load(real + token) != 0, chosen, -1)
    tl.store(weights + token * (TOP_K + SHARED) + place, weight, place < TOP_K + SHARED)
    tl.store(ids + token * (TOP_K + SHARED) + place, chosen, place < TOP_K + SHARED)


def prepare_gate(gate: Tensor) -> Tensor:
    """gate float32 [E, D] in bfloat16 if that is exact: a third of the products, half the bytes.
    Synchronises."""
    rounded = gate.to(torch.bfloat16)
    if gate.is_meta:  # compilation without values: as checkpoints have it
        return rounded
    return rounded if torch.equal(rounded.float(), gate) else gate


def route(
    x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec, deterministic: bool = False,
    real: Tensor | None = None, ids_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`Ops.route`: ties by lower id. Raises ValueError for an invalid router.

    Args:
        gate: float32, or from `prepare_gate`.
        deterministic: the split of D does not depend on the number of tokens (batch-invariant results).
    """
    count, hidden = x.shape
    x = with_contiguous_rows(x)
    weights = torch.empty((count, spec.num_choices), dtype=torch.float32, device=x.device)
    ids = torch.empty((count, spec.num_choices), dtype=ids_dtype, device=x.device)
    logits_constants, grid, warps, stages = _logits_plan(
        count, hidden, spec.num_experts, x.dtype, deterministic, gate.dtype == torch.bfloat16
    )
    has_bias = spec.has_bias and bias is not None
    constants = _select_plan(spec, grid[2], has_bias, real is not None)
    if not count:
        return weights, ids
    logits = torch.empty((grid[2], count, spec.num_experts), dtype=torch.float32, device=x.device)
    router_logits_kernel[grid](
        x, gate, logits, stride_of(x, 0), count, **logits_constants, num_warps=warps, num_stages=stages
    )
    router_select_kernel[(count,)](
        logits, bias if has_bias else logits, real, weights, ids, count, spec.scale, **constants,
        num_warps=_select_warps(constants),
    )  # fmt: skip
    return weights, ids


def _logits_plan(
    count: int, hidden: int, experts: int, dtype: torch.dtype, deterministic: bool = False, exact: bool = False
) -> tuple[dict, tuple[int, int, int], int, int]:
    """(constants, grid, warps, stages) of the logits kernel for `count` tokens."""
    few = deterministic or count <= _SPLIT_TOKENS
    bf16x3 = dtype == torch.bfloat16
    block_t = (16 if count <= 16 and not deterministic else 64) if few else 128
    block_e = min(64, max(16, next_power_of_2(experts)))
    block_d = (64 if few else 32) if bf16x3 else 32
    if not bf16x3:
        block_t = min(block_t, 32)  # float32 products do not use tensor cores: small tiles, no spills
    whole = next_power_of_2(hidden)
    part = _FIXED_PART if deterministic else next((part for most, part in _PARTS if count <= most), whole)
    constants = {
        "EXPERTS": experts, "HIDDEN": hidden, "PART": part, "BF16X3": bf16x3, "EXACT": exact,
        "BLOCK_T": block_t, "BLOCK_E": block_e, "BLOCK_D": block_d,
    }  # fmt: skip
    grid = (triton.cdiv(count, block_t), triton.cdiv(experts, block_e), triton.cdiv(hidden, part))
    return constants, grid, 4, 2 if block_t == 16 else 3


def _select_plan(spec: RouterSpec, parts: int, has_bias: bool, has_real: bool = False) -> dict:
    """Constants of the selection kernel."""
    if spec.score not in ("sigmoid", "softmax") or spec.group_score not in _GROUP_SCORES:
        raise ValueError(f"unknown router {spec.score!r} with group score {spec.group_score!r}")
    limited = spec.group_score is not None and spec.num_groups > spec.topk_groups
    groups = spec.num_groups if limited else 1
    choosable = spec.num_experts // groups * (spec.topk_groups if limited else 1)
    if spec.num_experts % groups or not 0 < spec.top_k <= choosable:
        raise ValueError(f"invalid router: {spec}")
    return {
        "PARTS": parts, "EXPERTS": spec.num_experts, "GROUPS": groups, "TOP_GROUPS": spec.topk_groups if limited else 1,
        "TOP_K": spec.top_k, "SHARED": spec.num_shared,
        "GROUP_SCORE": _GROUP_SCORES[spec.group_score] if limited else 0,
        "SIGMOID": spec.score == "sigmoid", "HAS_BIAS": has_bias and not spec.bias_on_logits,
        "BIAS_ON_LOGITS": has_bias and spec.bias_on_logits, "RENORMALIZE": spec.renormalize,
        "BLOCK_G": next_power_of_2(groups), "BLOCK_M": next_power_of_2(spec.num_experts // groups),
        "BLOCK_K": next_power_of_2(spec.num_choices), "HAS_REAL": has_real,
    }  # fmt: skip


def _select_warps(constants: dict) -> int:
    """One warp needs no barrier between the top-k rounds."""
    return 1 if constants["BLOCK_G"] * constants["BLOCK_M"] <= 512 else 4


def route_cases(
    label: str, hidden: int, spec: RouterSpec, count: int, dtype: torch.dtype, deterministic: bool = False,
    exact: bool = False, has_real: bool = False, ids_dtype: torch.dtype = torch.int32,
) -> list[AotCase]:  # fmt: skip
    """The two specialisations launched by `route` for `count` tokens."""
    logits_constants, grid, warps, stages = _logits_plan(count, hidden, spec.num_experts, dtype, deterministic, exact)
    constants = _select_plan(spec, grid[2], spec.has_bias, has_real) | ({} if has_real else {"real": None})
    name = f"{label}_{'any' if deterministic else count}_{element(dtype)}{'_exact' * exact}{'_masked' * has_real}"
    name += "_int64" * (ids_dtype == torch.int64)
    parts = {"logits": "*fp32", "num_tokens": "i32"}
    chosen = {"bias": "*fp32", "weights": "*fp32", "ids": f"*{element(ids_dtype)}", "scale": "fp32"}
    chosen |= {"real": "*i32:1"} if has_real else {}
    gate = "*bf16" if exact else "*fp32"
    return [
        AotCase(
            f"router_logits_{name}", router_logits_kernel,
            parts | {"x": f"*{element(dtype)}", "gate": gate, "stride": "i32:16"},
            logits_constants, warps, stages, dtype == torch.bfloat16,
        ),
        AotCase(
            f"router_select_{name}", router_select_kernel, parts | chosen,
            constants, _select_warps(constants), 3, False,
        ),
    ]  # fmt: skip


V3 = RouterSpec(256, 8, "sigmoid", True, 8, 4, "top2", True, 2.5)
V2 = RouterSpec(160, 6, "softmax", False, 8, 3, "max", False, 16.0)
V2_LITE = RouterSpec(64, 6, "softmax")
GPT_OSS = RouterSpec(128, 4, "softmax", True, renormalize=True, bias_on_logits=True)
QWEN3_MOE = RouterSpec(128, 8, "softmax", renormalize=True)


def aot_cases() -> list[AotCase]:
    """The routers of DeepSeek-V3, V2, V2-Lite and Qwen3's mixtures and gpt-oss, for one, some and many tokens."""
    routers = [("v3", 7168, V3), ("v2", 5120, V2), ("v2_lite", 2048, V2_LITE), ("qwen3", 2048, QWEN3_MOE)]
    routers.append(("gpt_oss", 2880, GPT_OSS))
    cases = [
        case
        for label, hidden, spec in routers
        for count in (1, 128, 1024, 4096, 8192)
        for case in route_cases(label, hidden, spec, count, torch.bfloat16, exact=True)
    ]
    for count in (1, 128, 8192):
        cases += route_cases("v3", 7168, V3, count, torch.bfloat16)
    for ids_dtype in (torch.int32, torch.int64):
        more = route_cases("v3", 7168, V3, 128, torch.bfloat16, exact=True, has_real=True, ids_dtype=ids_dtype)
        cases += more[1:]
    cases += route_cases("v3", 7168, V3, 1, torch.bfloat16, deterministic=True)
    return cases + route_cases("v3", 7168, V3, 128, torch.float32)
