"""Routing: router logits to float32 accuracy on tensor cores, then grouped top-k, a token at a time.

bf16 activations are exact in bf16, so x @ gate only needs the float32 gate split into three bf16 terms (bf16x3: 8 + 8 +
8 bits of its 24): three products, accumulated in float32, cost a tenth of a float32 product without tensor cores. With
few tokens the gate's bytes dominate, so D is split over programs; the selection sums the parts in order. A gate that is
exact in bf16, as checkpoints store it, is one term: `prepare_gate`. Some tokens take one cooperative launch, whose
programs wait for each other between the two halves. Many tokens fill the device in both halves and take two launches;
so do few tokens without a weight to request: two early launches are quicker than a barrier in one that is not early.

Legend: T tokens, D hidden, E experts, G groups, K experts per token, P parts of D.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.linear.tiles import FEW_ROWS
from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.kernels.ops.router_kernels import route_kernel, router_logits_kernel, router_select_kernel
from moe_engine.kernels.ops.triton_sparse_mixer import sparse_mixer
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.grid_barrier import COOPERATIVE, resident_programs
from moe_engine.kernels.triton.launch import element, stride_of, with_contiguous_rows
from moe_engine.kernels.triton.prefetch import BESIDE_ROUTER, requested

_GROUP_SCORES = {None: 0, "max": 1, "top2": 2}

_SPLIT_TOKENS = 256
"""Up to this many tokens tiles are low."""

ONE_LAUNCH_TOKENS = 256
"""Up to this many tokens logits and selection can be one launch."""

OPTIONS = {**COOPERATIVE, "maxnreg": 168}
"""Constants of that launch. Registers: without a limit ptxas spills for sm_100 to fit a second program on an SM."""

_PARTS = ((_SPLIT_TOKENS, 512), (1024, 1024), (4096, 2048))
"""(tokens up to, columns of D per part): about one program per SM or more from 257 tokens on."""

_FIXED_PART = 2048
"""The same in deterministic mode, for any number of tokens; larger: long prompts keep all parts in memory."""


def prepare_gate(gate: Tensor) -> Tensor:
    """gate [E, D] in bfloat16 if that is exact: a third of the products, half the bytes. Synchronizes for a float32
    gate."""
    if gate.dtype == torch.bfloat16:
        return gate
    rounded = gate.to(torch.bfloat16)
    if gate.is_meta:  # compilation without values: assume a checkpoint's gate
        return rounded
    return rounded if torch.equal(rounded.float(), gate) else gate


def route(
    x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec, barrier: Tensor, deterministic: bool = False,
    real: Tensor | None = None, ids_dtype: torch.dtype = torch.int32, experts: Tensor | None = None,
    ahead: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`Ops.route`: ties by lower id. Raises ValueError for an invalid router.

    Args:
        gate: float32 or bfloat16.
        barrier: `barrier_state` of x's device, of launches on one stream.
        ahead: a weight that is read soon; `ONE_LAUNCH_TOKENS` or fewer tokens request it, in one launch.
        deterministic: the split of D does not depend on the number of tokens (batch-invariant results).
    """
    if spec.score == "sparsemixer":
        return sparse_mixer(gate_parts(x, gate, deterministic), spec, real, ids_dtype)
    count, hidden = x.shape
    x = with_contiguous_rows(x)
    experts = None if experts is None else experts.to(torch.int32).contiguous()
    weights, ids = empty_choice(count, spec, ids_dtype, x.device)
    logits_constants, grid, warps, stages = logits_plan(
        count, hidden, spec.num_logits, x.dtype, deterministic, gate.dtype == torch.bfloat16
    )
    has_bias = spec.has_bias and bias is not None
    constants = select_plan(spec, grid[2], has_bias, real is not None) | {"GIVEN": experts is not None}
    if not count:
        return weights, ids
    logits = torch.empty((grid[2], count, spec.num_logits), dtype=torch.float32, device=x.device)
    bias = bias if has_bias else logits
    ahead, num_ahead = requested(ahead, BESIDE_ROUTER)
    if _is_one_launch(count, num_ahead):
        programs = min(resident_programs(x.device), max(grid[0] * grid[1] * grid[2], count))
        route_kernel[(programs,)](
            x, gate, logits, bias, real, experts, weights, ids, barrier, ahead, stride_of(x, 0),
            count, spec.scale, spec.first, **logits_constants | constants, AHEAD=num_ahead, num_warps=warps,
            num_stages=stages, **OPTIONS,
        )  # fmt: skip
        return weights, ids
    router_logits_kernel[grid](
        x, gate, logits, stride_of(x, 0), count, **logits_constants, num_warps=warps, num_stages=stages
    )
    router_select_kernel[(count,)](
        logits,
        bias,
        real,
        experts,
        weights,
        ids,
        count,
        spec.scale,
        spec.first,
        **constants,
        num_warps=_select_warps(constants),
    )
    return weights, ids


def _is_one_launch(count: int, num_ahead: int) -> bool:
    return count <= ONE_LAUNCH_TOKENS and (num_ahead > 0 or count > FEW_ROWS)


def gate_parts(x: Tensor, gate: Tensor, deterministic: bool = False) -> Tensor:
    """x [T, D], gate [E, D] of `prepare_gate` -> parts [P, T, E] float32, whose sum in order is x @ gate.T."""
    x = with_contiguous_rows(x)
    count, hidden = x.shape
    exact = gate.dtype == torch.bfloat16
    constants, grid, warps, stages = logits_plan(count, hidden, len(gate), x.dtype, deterministic, exact)
    parts = torch.empty((grid[2], count, len(gate)), dtype=torch.float32, device=x.device)
    if count:
        router_logits_kernel[grid](
            x, gate, parts, stride_of(x, 0), count, **constants, num_warps=warps, num_stages=stages
        )
    return parts


def empty_choice(count: int, spec: RouterSpec, ids_dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for weights and ids of `count` tokens."""
    shape = (count, spec.num_choices)
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=ids_dtype, device=device)


def logits_plan(
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


def select_plan(spec: RouterSpec, parts: int, has_bias: bool, has_real: bool) -> dict:
    """Constants of the selection kernel."""
    if spec.score not in ("sigmoid", "softmax", "sqrtsoftplus") or spec.group_score not in _GROUP_SCORES:
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
        "SCORE": spec.score, "HAS_BIAS": has_bias and not spec.bias_on_logits,
        "BIAS_ON_LOGITS": has_bias and spec.bias_on_logits, "RENORMALIZE": spec.sum_eps * spec.renormalize,
        "GATED": int(spec.shared_gate), "SHARED_WEIGHT": spec.shared_weight, "HELD": spec.num_held,
        "BLOCK_G": next_power_of_2(groups), "BLOCK_M": next_power_of_2(spec.num_experts // groups),
        "BLOCK_K": next_power_of_2(spec.num_choices), "HAS_REAL": has_real,
    }  # fmt: skip


def _select_warps(constants: dict) -> int:
    """One warp needs no barrier between the top-k rounds."""
    return 1 if constants["BLOCK_G"] * constants["BLOCK_M"] <= 512 else 4


def route_cases(
    label: str, hidden: int, spec: RouterSpec, count: int, dtype: torch.dtype, deterministic: bool = False,
    exact: bool = False, has_real: bool = False, ids_dtype: torch.dtype = torch.int32, given: bool = False,
    num_ahead: int = 0,
) -> list[AotCase]:  # fmt: skip
    """The specializations launched by `route` for `count` tokens: one kernel, or two."""
    logits_constants, grid, warps, stages = logits_plan(count, hidden, spec.num_logits, dtype, deterministic, exact)
    constants = select_plan(spec, grid[2], spec.has_bias, has_real) | {"GIVEN": given}
    constants |= ({} if has_real else {"real": None}) | ({} if given else {"given": None})
    name = f"{label}_{'any' if deterministic else count}_{element(dtype)}{'_exact' * exact}{'_masked' * has_real}"
    name += f"{'_int64' * (ids_dtype == torch.int64)}{'_given' * given}"
    parts = {"logits": "*fp32", "num_tokens": "i32"}
    chosen = {"bias": "*fp32", "weights": "*fp32", "ids": f"*{element(ids_dtype)}", "scale": "fp32", "first": "i32"}
    chosen |= ({"real": "*i32:1"} if has_real else {}) | ({"given": "*i32:1"} if given else {})
    rows = {"x": f"*{element(dtype)}", "gate": "*bf16" if exact else "*fp32", "stride": "i32:16"}
    matrix = dtype == torch.bfloat16
    if _is_one_launch(count, num_ahead):
        signature = parts | chosen | rows | {"barrier": "*i64"} | ({"ahead": "*fp8e4nv"} if num_ahead else {})
        both = logits_constants | constants | {"AHEAD": num_ahead} | ({} if num_ahead else {"ahead": None})
        name += "_ahead" * bool(num_ahead)
        return [AotCase(f"route_{name}", route_kernel, signature, both, warps, stages, matrix, OPTIONS)]
    return [
        AotCase(
            f"router_logits_{name}", router_logits_kernel, parts | rows, logits_constants, warps, stages, matrix
        ),
        AotCase(
            f"router_select_{name}", router_select_kernel, parts | chosen, constants, _select_warps(constants), 3, False
        ),
    ]  # fmt: skip


def gate_cases(label: str, hidden: int, heads: int, count: int) -> list[AotCase]:
    """The specialization launched by `gate_parts` for `count` tokens, of a gate that is exact in bfloat16."""
    constants, _, warps, stages = logits_plan(count, hidden, heads, torch.bfloat16, exact=True)
    signature = {"x": "*bf16", "gate": "*bf16", "logits": "*fp32", "stride": "i32:16", "num_tokens": "i32"}
    name = f"head_gates_{label}_{count}"
    return [AotCase(name, router_logits_kernel, signature, constants, warps, stages, True)]


V3 = RouterSpec(256, 8, "sigmoid", True, 8, 4, "top2", True, 2.5)
V2 = RouterSpec(160, 6, "softmax", False, 8, 3, "max", False, 16.0)
V2_LITE = RouterSpec(64, 6, "softmax")
GPT_OSS = RouterSpec(128, 4, "softmax", True, renormalize=True, bias_on_logits=True)
QWEN3_MOE = RouterSpec(128, 8, "softmax", renormalize=True)
QWEN3_NEXT = RouterSpec(512, 10, "softmax", renormalize=True, num_shared=1, shared_gate=True)
GLM = RouterSpec(160, 8, "sigmoid", True, renormalize=True, scale=2.5, num_shared=1, shared_weight=0.5, held=80)
"""On two groups of ranks."""
V4 = RouterSpec(256, 6, "sqrtsoftplus", True, renormalize=True, scale=1.5)
LONGCAT = RouterSpec(768, 12, "softmax", True, scale=6.0, held=512)
"""With 256 zero experts."""


def aot_cases() -> list[AotCase]:
    """The routers of DeepSeek, Qwen, gpt-oss, GLM and LongCat, for one, some and many tokens."""
    routers = [("v3", 7168, V3), ("v2", 5120, V2), ("v2_lite", 2048, V2_LITE), ("qwen3", 2048, QWEN3_MOE)]
    routers += [("gpt_oss", 2880, GPT_OSS), ("v4", 4096, V4)]
    routers += [("qwen3_next", 2048, QWEN3_NEXT), ("glm_ep2", 5120, GLM), ("longcat", 6144, LONGCAT)]
    cases = [
        case
        for label, hidden, spec in routers
        for count in (1, 128, 1024, 4096, 8192)
        for case in route_cases(label, hidden, spec, count, torch.bfloat16, exact=True)
    ]
    for count in (1, 128, 8192):
        cases += route_cases("v3", 7168, V3, count, torch.bfloat16)
    for count in (1, 128):
        cases += route_cases("v3", 7168, V3, count, torch.bfloat16, exact=True, num_ahead=2 * 256 * 7168)
    for ids_dtype in (torch.int32, torch.int64):
        more = route_cases("v3", 7168, V3, 128, torch.bfloat16, exact=True, has_real=True, ids_dtype=ids_dtype)
        cases += more
    for count in (1, 8192):
        cases += route_cases("v4_hash", 4096, V4, count, torch.bfloat16, exact=True, given=True)
    for count in (1, 128, 8192):
        cases += gate_cases("v3.2", 7168, 64, count)
    cases += route_cases("v3", 7168, V3, 1, torch.bfloat16, deterministic=True)
    return cases + route_cases("v3", 7168, V3, 128, torch.float32)
