"""The router's kernels: logits of a tile, choice of a token, and both in one launch.

Legend: T tokens, D hidden, E experts, G groups, K experts per token, P parts of D.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_engine.kernels.triton.dependent import announce_next, dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.grid_barrier import grid_barrier
from moe_engine.kernels.triton.prefetch import prefetch_shared


@triton.jit
def logits_of_tile(
    x, residual, norm, gate, logits, stride, num_tokens, token_block, expert_block, part,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, PART: tl.constexpr, BF16X3: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """One part of D. SUM: x is (x + residual) * norm, residual contiguous: the norm's other factor is one per token."""
    token = token_block * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = expert_block * BLOCK_E + tl.arange(0, BLOCK_E)
    live_token, live_expert = (token < num_tokens)[:, None], (expert < EXPERTS)[None, :]
    x_row = x + token.to(tl.int64)[:, None] * stride
    gate_row = gate + expert[None, :] * HIDDEN
    total = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for begin in range(part * PART, min((part + 1) * PART, HIDDEN), BLOCK_D):
        column = begin + tl.arange(0, BLOCK_D)
        inside = column < HIDDEN
        a = tl.load(x_row + column[None, :], live_token & inside[None, :], 0.0)  # [BLOCK_T, BLOCK_D]
        b = tl.load(gate_row + column[:, None], live_expert & inside[:, None], 0.0)  # [BLOCK_D, BLOCK_E]
        if SUM:
            place = residual + token.to(tl.int64)[:, None] * HIDDEN + column[None, :]
            a = a.to(tl.float32) + tl.load(place, live_token & inside[None, :], 0.0).to(tl.float32)
            a = a.to(residual.dtype.element_ty).to(tl.float32) * tl.load(norm + column, inside, 0.0)[None, :]
            if BF16X3:
                a = a.to(tl.bfloat16)
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
def all_logits(
    x, residual, norm, gate, logits, barrier, stride, num_tokens,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, BF16X3: tl.constexpr,
    EXACT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The tiles of all tokens, divided among the programs of a one-dimensional grid, which wait for each other after
    them: `logits` is complete, and x and residual are no longer read."""
    EXPERT_BLOCKS: tl.constexpr = (EXPERTS + BLOCK_E - 1) // BLOCK_E
    tiles = tl.cdiv(num_tokens, BLOCK_T) * EXPERT_BLOCKS * PARTS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        rest = tile // EXPERT_BLOCKS
        logits_of_tile(
            x, residual, norm, gate, logits, stride, num_tokens, rest // PARTS, tile % EXPERT_BLOCKS, rest % PARTS,
            EXPERTS, HIDDEN, PART, BF16X3, EXACT, BLOCK_T, BLOCK_E, BLOCK_D, SUM,
        )  # fmt: skip
    grid_barrier(barrier)
    announce_next()


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to float32 accuracy: log(1 + z) is 2 artanh(z / (2 + z)), here with z at most 1."""
    z = tl.exp(-tl.abs(x))
    s = z / (2.0 + z)
    square = s * s
    series = 2.0 / 15 + tl.zeros_like(s)
    for k in tl.static_range(7):
        series = series * square + 2.0 / (13 - 2 * k)
    return series * s + tl.maximum(x, 0.0)


@triton.jit
def _take_best(value, index, none):
    """(largest, its lowest index, value without it); `none` marks values already taken."""
    best, at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    return best, at, tl.where(index == at, none, value)


@triton.jit
def choose(
    logits, bias, real, given, weights, ids, num_tokens, scale, first, token, factor,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, GROUP_SCORE: tl.constexpr, SCORE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BIAS_ON_LOGITS: tl.constexpr, RENORMALIZE: tl.constexpr, GATED: tl.constexpr, SHARED_WEIGHT: tl.constexpr,
    HELD: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HAS_REAL: tl.constexpr,
    GIVEN: tl.constexpr,
):  # fmt: skip
    """weights, ids [K + SHARED] of int64 `token`, whose logits are `factor` times the sum of the parts; group g's
    experts are row g of a [BLOCK_G, BLOCK_M] tile. GIVEN: the experts are those of `given` int32 [T, K]. GATED: the
    logit after the experts' is that of the shared ones. HELD experts from `first` on, and the shared ones, are the
    slots of this rank; -1: another's."""
    COLUMNS: tl.constexpr = EXPERTS + GATED
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    flat = tl.arange(0, BLOCK_G * BLOCK_M)
    live = (flat // BLOCK_M < GROUPS) & (flat % BLOCK_M < MEMBERS)
    expert = (flat // BLOCK_M) * MEMBERS + flat % BLOCK_M
    score = tl.zeros((BLOCK_G * BLOCK_M,), tl.float32)
    shared = 0.0
    for part in tl.static_range(PARTS):
        row = logits + (part * num_tokens + token) * COLUMNS
        score += tl.load(row + expert, live, 0.0)
        if GATED:
            shared += tl.load(row + EXPERTS)
    score *= factor
    if BIAS_ON_LOGITS:
        score += tl.load(bias + expert, live, 0.0)
    if SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-score))
    elif SCORE == "sqrtsoftplus":
        score = tl.sqrt(softplus(score))
    else:
        score = tl.where(live, score, float("-inf"))
        score = tl.exp(score - tl.max(score, 0))
        score = score / tl.sum(score, 0)
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    weight = tl.zeros((BLOCK_K,), tl.float32)
    if GIVEN:
        for k in tl.static_range(TOP_K):
            at = tl.load(given + token * TOP_K + k)
            own = tl.sum(tl.where(live & (expert == at), score, 0.0), 0)
            chosen = tl.where(place == k, at, chosen)
            weight = tl.where(place == k, own, weight)
    else:
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
        for k in tl.static_range(TOP_K):
            _best, at, choice = _take_best(choice, flat, float("-inf"))
            own = tl.sum(tl.where(flat == at, score, 0.0), 0)
            chosen = tl.where(place == k, (at // BLOCK_M) * MEMBERS + at % BLOCK_M, chosen)
            weight = tl.where(place == k, own, weight)
    if RENORMALIZE > 0:
        weight = weight / (tl.sum(weight, 0) + RENORMALIZE)
    of_shared = SHARED_WEIGHT / (1.0 + tl.exp(-shared * factor)) if GATED else SHARED_WEIGHT
    weight = tl.where(place < TOP_K, weight * scale, of_shared)
    if HELD != EXPERTS:
        chosen -= first
        chosen = tl.where((chosen >= 0) & (chosen < HELD), chosen, -1)
    chosen = tl.where(place < TOP_K, chosen, HELD + place - TOP_K)
    if HAS_REAL:
        chosen = tl.where(tl.load(real + token) != 0, chosen, -1)
    tl.store(weights + token * (TOP_K + SHARED) + place, weight, place < TOP_K + SHARED)
    tl.store(ids + token * (TOP_K + SHARED) + place, chosen, place < TOP_K + SHARED)


@dependent_jit(do_not_specialize=["num_tokens"])
def router_logits_kernel(
    x, gate, logits, stride, num_tokens,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, PART: tl.constexpr, BF16X3: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """logits [P, T, E]: part p is x[:, p PART : (p + 1) PART] @ gate[:, the same].T; BF16X3: x is bfloat16; EXACT:
    the gate too. Grid (token blocks, expert blocks, P)."""
    wait_for_inputs()
    logits_of_tile(
        x, None, None, gate, logits, stride, num_tokens, tl.program_id(0), tl.program_id(1), tl.program_id(2),
        EXPERTS, HIDDEN, PART, BF16X3, EXACT, BLOCK_T, BLOCK_E, BLOCK_D, False,
    )  # fmt: skip


@dependent_jit(do_not_specialize=["num_tokens", "first"], do_not_specialize_on_alignment=["real", "given"])
def router_select_kernel(
    logits, bias, real, given, weights, ids, num_tokens, scale, first,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, GROUP_SCORE: tl.constexpr, SCORE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BIAS_ON_LOGITS: tl.constexpr, RENORMALIZE: tl.constexpr, GATED: tl.constexpr, SHARED_WEIGHT: tl.constexpr,
    HELD: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HAS_REAL: tl.constexpr,
    GIVEN: tl.constexpr,
):  # fmt: skip
    """weights, ids [T, K + SHARED] from logits [PARTS, T, E + GATED]. Tokens whose `real` [T] is 0 choose no
    expert: -1. Grid (T,)."""
    wait_for_inputs()
    choose(
        logits, bias, real, given, weights, ids, num_tokens, scale, first, tl.program_id(0).to(tl.int64), 1.0,
        PARTS, EXPERTS, GROUPS, TOP_GROUPS, TOP_K, SHARED, GROUP_SCORE, SCORE, HAS_BIAS, BIAS_ON_LOGITS, RENORMALIZE,
        GATED, SHARED_WEIGHT, HELD, BLOCK_G, BLOCK_M, BLOCK_K, HAS_REAL, GIVEN,
    )  # fmt: skip


@dependent_jit(do_not_specialize=["num_tokens", "first"], do_not_specialize_on_alignment=["real", "given"])
def route_kernel(
    x, gate, logits, bias, real, given, weights, ids, barrier, ahead, stride, num_tokens, scale, first,
    HIDDEN: tl.constexpr, PART: tl.constexpr, BF16X3: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, GROUP_SCORE: tl.constexpr, SCORE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BIAS_ON_LOGITS: tl.constexpr, RENORMALIZE: tl.constexpr, GATED: tl.constexpr, SHARED_WEIGHT: tl.constexpr,
    HELD: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HAS_REAL: tl.constexpr,
    GIVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Both kernels in one launch: all programs compute tiles of the logits, wait for each other, then choose for
    tokens. AHEAD bytes of `ahead` are prefetched. Cooperative; any one-dimensional grid."""
    wait_for_inputs(announce=False)
    prefetch_shared(ahead, AHEAD)
    all_logits(
        x, None, None, gate, logits, barrier, stride, num_tokens,
        EXPERTS + GATED, HIDDEN, PART, PARTS, BF16X3, EXACT, BLOCK_T, BLOCK_E, BLOCK_D, False,
    )  # fmt: skip
    for token in tl.range(tl.program_id(0), num_tokens, tl.num_programs(0), num_stages=1):
        choose(
            logits, bias, real, given, weights, ids, num_tokens, scale, first, tl.cast(token, tl.int64), 1.0,
            PARTS, EXPERTS, GROUPS, TOP_GROUPS, TOP_K, SHARED, GROUP_SCORE, SCORE, HAS_BIAS, BIAS_ON_LOGITS,
            RENORMALIZE, GATED, SHARED_WEIGHT, HELD, BLOCK_G, BLOCK_M, BLOCK_K, HAS_REAL, GIVEN,
        )  # fmt: skip
