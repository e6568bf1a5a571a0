"""Costs of this project's Triton kernels, by their arguments.

A kernel reads each input and writes each output once; repeated reads by programs of a launch come from L2. Rows of
experts are the average over routing, unless a kernel works on all rows of its buffers.

Legend: a argument namespace, s setting.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.costs import Setting, cost_of, memory_of, size

FP32 = 4
BF16 = 2
WARP = 32
INCREMENT_US = 0.0046
"""A warp's increments of shared memory: 8 clocks of 1.755 GHz, an estimate."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float8_e4m3fn: "fp8", torch.float32: "fp32"}


def product(x: Tensor, rows: float, n: int, k: int) -> dict[str, float]:
    return {NAMES[x.dtype]: 2.0 * rows * n * k}


def matrix_of(x: Any) -> Tensor:
    """The tensor of an argument that may be a TMA descriptor."""
    found: Tensor = x.base if hasattr(x, "base") else x
    return found


def given(x: Any) -> Tensor | None:
    return x if isinstance(x, Tensor) else None


# -- rows in, rows out


@cost_of("rms_norm_kernel")
def rms_norm(a: Any, s: Setting) -> Cost:
    residual, other = size(given(a.residual)) if a.ADD else 0, size(given(a.other)) if a.PAIR else 0
    return Cost(size(a.x, a.weight) + other + residual, size(a.out) + residual, **_beside_norm(a))


@cost_of("rms_norm_quantize_kernel")
def rms_norm_quantize(a: Any, s: Setting) -> Cost:
    residual = size(given(a.residual)) if a.HAS_RESIDUAL else 0
    kept = size(given(a.normed)) if a.KEEP else 0
    other = size(given(a.other)) if a.PAIR else 0
    return Cost(size(a.x, a.weight) + other + residual, size(a.out, a.scales) + residual + kept, **_beside_norm(a))


@cost_of("lookup_kernel")
def lookup(a: Any, s: Setting) -> Cost:
    return Cost(size(a.ids, a.out), size(a.out))


@cost_of("add_input_kernel")
def add_input(a: Any, s: Setting) -> Cost:
    return Cost(size(a.x, a.weights, a.ids) + size(given(a.add)), size(a.out))


@cost_of("silu_and_mul_kernel")
def silu_and_mul(a: Any, s: Setting) -> Cost:
    return Cost(size(a.gate_up), size(a.out))


@cost_of("silu_mul_quantize_kernel")
def silu_mul_quantize(a: Any, s: Setting) -> Cost:
    """All rows of the input."""
    return Cost(size(a.gate_up), size(a.out, a.scales))


@cost_of("quantize_kernel")
def quantize(a: Any, s: Setting) -> Cost:
    return Cost(size(a.x), size(a.out, a.scales))


@cost_of("groups_kernel")
def groups(a: Any, s: Setting) -> Cost:
    """Only rows with a token, in place with weights."""
    share = min(1.0, s.routing.rows * a.WIDTH / a.out.numel())
    weights = size(given(a.weights)) if a.WEIGHTED else 0
    scales = size(given(a.scales)) if a.QUANTIZE else 0
    return Cost(size(a.x) * share + weights * share + size(a.sizes), (size(a.out) + scales) * share)


@cost_of("pack_kernel")
def pack_scales(a: Any, s: Setting) -> Cost:
    """Only rows with a token."""
    share = min(1.0, s.routing.rows * a.BLOCKS / a.x.numel())
    return Cost(size(a.x) * share + size(a.sizes), size(a.out) * share)


@cost_of("sum_parts_kernel")
def sum_parts(a: Any, s: Setting) -> Cost:
    return Cost(size(a.parts), size(a.out))


# -- all-reduce


def _all_reduce(a: Any, s: Setting, sent: float, received: float) -> Cost:
    """sent: rows over NVLink, received: rows read from this rank's symmetric memory, both per input row."""
    assert s.hardware is not None
    x, residual = size(a.x), size(given(a.residual))
    rows = residual or x
    results = size(given(a.out), given(a.quantized), given(a.scales))
    return Cost(
        x + received * rows + residual + size(given(a.weight)), residual + results, nvlink=sent * rows,
        link_us=s.hardware.custom_all_reduce_us(rows, a.RANKS),
    )  # fmt: skip


@cost_of("one_shot_kernel")
def one_shot(a: Any, s: Setting) -> Cost:
    """Experts' rows are read before anything is sent, by one program for each token."""
    cost = _all_reduce(a, s, a.RANKS - 1, a.RANKS)
    if not a.TOP_K:
        return cost
    assert s.hardware is not None
    rows = min(a.positions.numel(), s.routing.rows) * a.WIDTH * a.x.element_size()
    read = rows + size(given(a.add), a.positions, a.router_weights)
    turns = -(-a.num_rows // a.grid[0]) / a.num_rows
    empty_us = read * turns / s.hardware["program_bytes_per_s"] * 1e6
    return replace(cost, read=cost.read - size(a.x) + read, link_us=cost.link_us + empty_us)


@cost_of("two_shot_kernel")
def two_shot(a: Any, s: Setting) -> Cost:
    return _all_reduce(a, s, 2 * (a.RANKS - 1) / a.RANKS, 2)


# -- MLA


@cost_of("rotate_kernel")
def rotate(a: Any, s: Setting) -> Cost:
    rotated = len(a.x) * a.HEADS * a.WIDTH * a.x.element_size()
    return Cost(rotated + size(a.positions) + len(a.x) * a.WIDTH * FP32, rotated)


@cost_of("write_latent_kernel", "write_latent_fp8_kernel")
def write_latent(a: Any, s: Setting) -> Cost:
    tokens, record = len(a.kv_a), a.cache.shape[-1] * a.cache.element_size()
    table = tokens * a.WIDTH * FP32
    return Cost(size(a.kv_a, a.weight, a.positions, a.slots) + table, tokens * record)


@cost_of("absorb_kernel")
def absorb(a: Any, s: Setting) -> Cost:
    """Rotation, absorbed product and cache rows."""
    tokens, record = len(a.kv_a), a.cache.shape[-1] * a.cache.element_size()
    read = size(a.q, a.weight, a.kv_a, a.norm, a.positions, a.slots) + tokens * a.WIDTH * FP32
    flops = product(a.q, tokens * a.HEADS, a.LATENT, a.NOPE)
    return Cost(read, size(a.out) + tokens * record, flops)


MIN_TILE = 32
"""Context tokens of the smallest tile of split attention over 16-bit rows."""


def pieces_of(context: int, block_n: int) -> int:
    """Most pieces of a split context."""
    from moe_engine.kernels.attention.schedule import MIN_TILES

    return -(-context // (MIN_TILES * block_n))


def _merged_partials(a: Any, s: Setting, blocks: int) -> int:
    """Partial results that a merge of `blocks` blocks reads."""
    return min(len(a.partial), len(a.merges) * 2, blocks * pieces_of(s.records, MIN_TILE))


@cost_of("latent_kernel")
def latent(a: Any, s: Setting) -> Cost:
    """The requests' records once; the scores are computed `SHARES` times. A split block writes partial results in
    float32: at most one per request and program."""
    width, context = a.LATENT + a.ROTARY, min(s.records, a.table.shape[1])  # the table of a selection is narrow
    requests, rows = len(a.rows), a.q.numel() // width
    record = a.cache.shape[-1] * a.cache.element_size()
    partials = min(len(a.partial), requests + a.grid[0]) if a.grid[0] > requests else 0
    blocks = requests * -(-rows // (requests * a.BLOCK_M))
    partials = min(partials, blocks * pieces_of(context, a.BLOCK_N))
    partial = partials * a.BLOCK_M * (a.LATENT + 1) * FP32
    flops = 2.0 * rows * context * (width * a.SHARES + a.LATENT)
    angles = len(a.out) * a.TURNED * FP32
    return Cost(size(a.q) + requests * context * (record + FP32) + angles, size(a.out) + partial, {"bf16": flops})


@cost_of("merge_partials_kernel")
def merge_partials(a: Any, s: Setting) -> Cost:
    blocks = len(a.out) * -(-a.PER_GROUP // a.BLOCK_M)
    return Cost(_merged_partials(a, s, blocks) * size(a.partial[:1]), size(a.out))


@cost_of("merge_values_kernel")
def merge_values(a: Any, s: Setting) -> Cost:
    """The weight once from memory, then from L2."""
    tokens = len(a.out)
    read = _merged_partials(a, s, tokens * -(-a.HEADS // a.BLOCK_M)) * size(a.partial[:1]) + size(a.weight)
    return Cost(read, size(a.out), product(a.mixed, tokens * a.HEADS, a.VALUE, a.LATENT))


@cost_of("tree_kernel")
def tree(a: Any, s: Setting) -> Cost:
    """Records of the tree's own tokens; the results over the context, read and written."""
    tokens, heads = a.q.shape[:2]
    records = tokens * a.keys.shape[1] * a.keys.element_size()
    records *= a.WIDTH if a.values.data_ptr() == a.keys.data_ptr() else a.WIDTH + a.VALUE  # MLA: values are in the keys
    rows = tokens * heads * a.VALUE * a.out.element_size()
    flops = 2.0 * tokens * heads * a.BLOCK_N * (a.WIDTH + a.VALUE)
    return Cost(size(a.q, a.lse, a.visible) + records + rows, rows, {"bf16": flops})


@cost_of("expanded_kernel")
def expanded(a: Any, s: Setting) -> Cost:
    """Causal: half of the pairs of query and key."""
    tokens, heads, keys = a.q.shape[0], a.q.shape[1], a.kv.shape[0]
    pairs = tokens * (keys - tokens) + tokens * (tokens + 1) / 2
    flops = 2.0 * heads * pairs * (a.NOPE + a.ROTARY + a.VALUE)
    return Cost(size(a.q, a.kv, a.rope), size(a.out, a.lse), {"bf16": flops})


@cost_of("merge_chunk_kernel")
def merge_chunk(a: Any, s: Setting) -> Cost:
    return Cost(size(a.out, a.lse, a.other, a.other_lse), size(a.out, a.lse))


@cost_of("gather_kernel")
def gather(a: Any, s: Setting) -> Cost:
    return Cost(len(a.out) * a.cache.shape[-1] * a.cache.element_size(), size(a.out))


# -- products


def _read_alone_us(a: Any, s: Setting) -> float:
    """Time in which multiprocessors read the rows and weights of their programs."""
    assert s.hardware is not None
    turns = -(-a.grid[0] * a.grid[1] // s.hardware["multiprocessors"])
    x, weight = (matrix_of(each).element_size() for each in (a.x, a.weight))
    read = (min(a.num_rows, a.BLOCK_M) * x + a.BLOCK_N * weight) * a.K
    return turns * read / s.hardware["program_bytes_per_s"] * 1e6


@cost_of("block_gemm_kernel")
def block_gemm(a: Any, s: Setting) -> Cost:
    """Not faster than `_read_alone_us`, of a program's part of K."""
    flops = {"fp8": 2.0 * a.num_rows * a.N * a.K}
    read = size(matrix_of(a.x), given(a.x_scales), given(a.norm), a.weight_scales) + a.N * a.K
    own = memory_of(matrix_of(a.weight))
    return Cost(
        read, size(a.out), flops, link_us=_read_alone_us(a, s) / a.SPLIT, weights=own,
        requests_own=a.N * a.K if a.AHEAD else 0,
    )  # fmt: skip


@cost_of("four_bits_gemm_kernel")
def four_bits_gemm(a: Any, s: Setting) -> Cost:
    whole = size(given(a.whole))
    return Cost(size(a.x, a.weight, a.scales) + whole, size(a.out), product(a.x, a.num_rows, a.N, a.K))


@cost_of("fixed_gemm_kernel")
def fixed_gemm(a: Any, s: Setting) -> Cost:
    """Not faster than `_read_alone_us`."""
    heads = len(a.weight) if a.weight.dim() == 3 else 1
    later = ((a.following, a.FOLLOWING), (a.later, a.LATER))
    return Cost(
        size(a.x, a.weight), size(a.out), product(a.x, a.num_rows * heads, a.N, a.K), link_us=_read_alone_us(a, s),
        weights=memory_of(a.weight), requests_own=size(a.weight) if a.AHEAD else 0,
        prefetched={memory_of(x): float(n) for x, n in later if n}, requests_last=True,
    )  # fmt: skip


@cost_of("heads_quantize_kernel")
def heads_quantize(a: Any, s: Setting) -> Cost:
    return Cost(size(a.x, a.weight), size(a.out, a.scales), product(a.x, a.num_tokens * a.HEADS, a.N, a.K))


# -- LoRA


@cost_of("shrink_kernel")
def lora_shrink(a: Any, s: Setting) -> Cost:
    """The first matrix of each adapter once."""
    rows = len(a.order)
    read = rows * a.HEADS * a.K * a.x.element_size()
    return Cost(read + size(a.a), size(a.inner), product(a.x, rows * a.HEADS, a.RANKS, a.K))


@cost_of("expand_kernel")
def lora_expand(a: Any, s: Setting) -> Cost:
    """The second matrix of each adapter once; the results are added in place."""
    rows = len(a.order)
    added = rows * a.HEADS * a.N * a.y.element_size()
    return Cost(size(a.inner, a.b) + added, added, product(a.y, rows * a.HEADS, a.N, a.RANK))


# -- experts


def router_logits(a: Any, s: Setting) -> Cost:
    """BF16X3: a float32 gate is split into three pieces of bfloat16; EXACT: the gate is one piece."""
    flops = 2.0 * a.num_tokens * a.EXPERTS * a.HIDDEN
    work = {"bf16": flops if a.EXACT else 3 * flops} if a.BF16X3 else {"fp32": flops}
    return Cost(size(a.x, a.gate), size(a.logits), work)


def _of_a_tile(a: Any, s: Setting, operands: int) -> float:
    """Microseconds in which a program reads its tile's part of D; operands: of its tokens."""
    assert s.hardware is not None
    read = (a.BLOCK_T * operands + a.BLOCK_E) * min(a.PART, a.HIDDEN) * a.x.element_size()
    return float(read / s.hardware["program_bytes_per_s"] * 1e6)


@cost_of("router_logits_kernel")
def separate_logits(a: Any, s: Setting) -> Cost:
    return replace(router_logits(a, s), link_us=_of_a_tile(a, s, 1))


@cost_of("router_select_kernel")
def router_select(a: Any, s: Setting) -> Cost:
    return Cost(size(a.logits), size(a.weights, a.ids))


@cost_of("route_kernel")
def route(a: Any, s: Setting) -> Cost:
    """Both parts in one launch; its programs wait for each other in between."""
    both = _around_a_barrier(router_logits(a, s), router_select(a, s), s)
    return replace(both, prefetched=_ahead(a))


@cost_of("norm_route_kernel")
def norm_route(a: Any, s: Setting) -> Cost:
    """Logits of the sum of x and residual; after the barrier residual, norm and choice."""
    choice = router_select(a, s)
    quantized = size(a.out, a.scales) if a.QUANTIZE else 0
    written = choice.written + size(a.residual, a.normed) + quantized
    then = Cost(choice.read + size(a.x, a.residual, a.norm), written)
    if not a.WAITS:
        return then
    return replace(_around_a_barrier(_of_sums(router_logits(a, s), a), then, s), prefetched=_ahead(a))


@cost_of("sum_logits_kernel")
def sum_logits(a: Any, s: Setting) -> Cost:
    """The first half of `norm_route_kernel`."""
    a.EXPERTS = a.LOGITS
    return replace(_of_sums(router_logits(a, s), a), link_us=_of_a_tile(a, s, 2), prefetched=_ahead(a))


def _of_sums(logits: Cost, a: Any) -> Cost:
    """Of x + residual, times the norm's weight."""
    return Cost(logits.read + size(a.residual, a.norm), logits.written, logits.flops)


def _ahead(a: Any) -> dict[int, float]:
    """The weight that a launch requests for the next one."""
    return {memory_of(a.ahead): float(a.AHEAD)} if a.AHEAD else {}


def _beside_norm(a: Any) -> dict[str, Any]:
    """The weight that a norm's launch requests at its end."""
    return {"prefetched": _ahead(a), "requests_last": True}


def _around_a_barrier(first: Cost, then: Cost, s: Setting) -> Cost:
    """Two halves of a launch whose programs wait for each other in between."""
    assert s.hardware is not None
    halves = [cost.bytes / s.hardware["stream_bytes_per_s"] * 1e6 for cost in (first, then)]
    between = s.hardware["grid_barrier_us"] + max(s.hardware["kernel_floor_us"], halves[0]) + halves[1]
    return Cost(first.read + then.read, first.written + then.written, first.flops, link_us=between)


@cost_of("count_kernel")
def count(a: Any, s: Setting) -> Cost:
    return Cost(size(a.ids), size(a.counts))


@cost_of("place_kernel")
def place(a: Any, s: Setting) -> Cost:
    read, written = size(a.ids, given(a.counts)), size(a.positions, given(a.source))
    if not a.WAITS:
        counted = 0 if a.COUNTED else 2 * a.num_pairs / WARP * INCREMENT_US  # in two histograms
        return Cost(read, written, empty_us=counted)
    assert s.hardware is not None
    between = s.hardware["grid_barrier_us"] + s.hardware["kernel_floor_us"]
    return Cost(read + size(a.ids), written + size(a.counts), link_us=between)


@cost_of("permute_kernel")
def permute(a: Any, s: Setting) -> Cost:
    rows = min(len(a.out.flatten(0, -2)), s.routing.rows)
    return Cost(size(a.x, a.positions), rows * a.WIDTH * a.out.element_size())


@cost_of("combine_kernel")
def combine(a: Any, s: Setting) -> Cost:
    rows = min(a.positions.numel(), s.routing.rows) * a.WIDTH * a.rows.element_size()
    add = size(given(a.add)) if a.HAS_ADD else 0
    return Cost(rows + add + size(a.positions), size(a.out))


@cost_of("combine_norm_kernel")
def combine_norm(a: Any, s: Setting) -> Cost:
    """The experts' rows, their sum into the residual stream, and its norm."""
    rows = min(a.positions.numel(), s.routing.rows) * a.WIDTH * a.rows.element_size()
    read = rows + size(given(a.add), a.positions, a.weights, a.residual, a.norm)
    written = size(a.residual, given(a.normed), given(a.out), given(a.scales))
    return Cost(read, written, **_beside_norm(a))


def _expert_product(a: Any, s: Setting, n: int, gathers: bool) -> Cost:
    """The weights of experts with a token, and the rows routed to them; the products of valid rows."""
    s.routing.check_slots(a.NUM_EXPERTS)
    weight = matrix_of(a.weight)
    matrix = weight.numel() // a.NUM_EXPERTS * weight.element_size()
    scales = 0 if given(a.weight_scales) is None else size(a.weight_scales) // a.NUM_EXPERTS
    rows, kind = s.routing.rows, a.x.element_size()
    per_row = a.K * kind + (a.K // 128 * FP32 if a.FP8 else 0)
    read = min(rows, len(a.x)) * per_row if gathers else rows * per_row
    return Cost(
        s.routing.touched * (matrix + scales) + read, rows * a.WIDTH * a.out.element_size(),
        product(a.x, rows, n, a.K), empty_us=_without_tile(a, s, n // a.WIDTH * a.BLOCK_N),
        weights=memory_of(weight),
    )  # fmt: skip


def _without_tile(a: Any, s: Setting, weight_rows: int) -> float:
    """Time of the programs of a grouped product that find no tile; `weight_rows` are rows of weights in a tile."""
    # Triton: not before a process has chosen between its interpreter and its compiler
    from moe_engine.kernels.experts.group_tiles import programs_per_sm

    assert s.hardware is not None
    if a.PAIRS or not s.routing.touched:
        return 0.0
    tiles = s.routing.touched * -(-s.routing.rows / s.routing.touched // a.BLOCK_M) * -(-a.WIDTH // a.BLOCK_N)
    width = 0.5 if a.FORM else a.x.element_size()
    stage = int((a.BLOCK_M * a.x.element_size() + weight_rows * width) * a.BLOCK_K)
    places = s.hardware["multiprocessors"] * programs_per_sm(stage, a.num_stages, a.num_warps)
    return max(0.0, a.grid[0] - tiles) / places * float(s.hardware["empty_program_us"])


@cost_of("gate_up_kernel")
def gate_up(a: Any, s: Setting) -> Cost:
    return _expert_product(a, s, 2 * a.WIDTH, bool(a.GATHER))


@cost_of("down_kernel")
def down(a: Any, s: Setting) -> Cost:
    return _expert_product(a, s, a.WIDTH, False)
