"""Costs of Triton kernels that DeepSeek-V3 has none of: GQA with windows, gated delta nets, convolutions, the
indexer, pools of GLM-5.3-Flash, entries and streams of DeepSeek V4, blocks of MiniMax-M3, norms and router of
Phi-3.5-MoE.

Legend: a argument namespace, s setting.
"""

from __future__ import annotations

from typing import Any

from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.costs import Setting, cost_of, size
from benchmarks.step_costs.sampling_costs import SECTOR
from benchmarks.step_costs.triton_costs import FP32, NAMES, given, pieces_of


def _records(heads: int, width: int, kind: int) -> int:
    """Bytes of a token's keys and values."""
    return 2 * heads * width * kind


@cost_of("write_kv_kernel", "write_kv_fp8_kernel")
def write_kv(a: Any, s: Setting) -> Cost:
    tokens, kind = len(a.slots), a.k.element_size()
    rows = tokens * _records(a.HEADS, a.WIDTH, kind)
    return Cost(rows + size(a.slots), tokens * _records(a.HEADS, a.WIDTH, a.k_cache.element_size()))


@cost_of("grouped_rows_kernel")
def grouped_rows(a: Any, s: Setting) -> Cost:
    """Norms, rotation and cache rows."""
    tokens = len(a.q)
    records = a.KV_HEADS * (a.WIDTH + a.VALUE)
    read = size(a.q) + tokens * (records * a.k.element_size() + a.TURNED * FP32) + size(a.positions, a.slots, a.bias)
    return Cost(read, size(a.out) + tokens * records * a.k_cache.element_size())


@cost_of("paged_kernel")
def paged(a: Any, s: Setting) -> Cost:
    """The requests' keys and values once; a split block writes partial results in float32: at most one per request and
    program."""
    requests, (tokens, heads) = len(a.rows), a.q.shape[:2]
    groups, kind = a.keys.shape[1], a.keys.element_size()
    context = min(s.context, a.table.shape[1])  # of selected tokens fewer than the context
    if a.WINDOW:  # below 0: the tokens of the chunk so far
        context = min(context, a.WINDOW) if a.WINDOW > 0 else (context - 1) % -a.WINDOW + 1
    partials = min(len(a.partial), requests + a.grid[0]) if a.grid[0] > requests else 0
    blocks = requests * -(-tokens * heads // (requests * groups * a.BLOCK_M))
    partials = min(partials, blocks * pieces_of(context, a.BLOCK_N))
    partial = partials * groups * a.BLOCK_M * (a.WIDTH + 1) * FP32
    flops = 4.0 * tokens * heads * context * a.WIDTH
    return Cost(
        size(a.q) + requests * context * (_records(groups, a.WIDTH, kind) + FP32), size(a.out) + partial,
        {NAMES[a.q.dtype]: flops},
    )  # fmt: skip


# -- gated delta nets


@cost_of("conv_update_kernel", "conv_kernel")
def conv_update(a: Any, s: Setting) -> Cost:
    """Each request's last inputs are read and written; the gates are not convolved."""
    tokens, requests = len(a.taken), len(a.starts) - 1
    tail = requests * a.HEADS * a.MIXED * (a.TAPS - 1) * a.inputs.element_size()
    return Cost(size(a.taken) + size(a.conv) + tail, size(a.taken) + tail * (tokens <= requests * 8))


@cost_of("tail_kernel")
def tail(a: Any, s: Setting) -> Cost:
    moved = len(a.rows) * a.HEADS * a.MIXED * (a.TAPS - 1) * a.inputs.element_size()
    return Cost(moved, moved)


@cost_of("delta_kernel")
def delta(a: Any, s: Setting) -> Cost:
    """A request's state is read once and written after each of its tokens."""
    tokens, requests, heads = len(a.out), len(a.starts) - 1, a.KEY_HEADS * a.SHARED
    state = heads * a.KEY * a.VALUE * FP32
    gates = (a.DECAYS + (not a.ADDITIVE)) * tokens * heads * a.b.element_size()
    flops = {"fp32": (4.0 if a.ADDITIVE else 6.0) * tokens * heads * a.KEY * a.VALUE}
    return Cost(size(a.taken) + gates + requests * state, size(a.out) + tokens * state, flops)


@cost_of("system_kernel")
def delta_system(a: Any, s: Setting) -> Cost:
    """The part of each chunk that does not depend on its first state: products of keys with keys and with queries."""
    tokens, heads, gates = len(a.taken), a.KEY_HEADS * a.SHARED, (1 + a.DECAYS) * a.b.element_size()
    scaled = size(a.scaled) if a.DECAYS > 1 else 0
    flops = {NAMES[a.taken.dtype]: 4.0 * tokens * heads * a.CHUNK * a.KEY}
    keys = size(a.taken) * 2 * a.KEY / a.MIXED
    return Cost(keys + tokens * heads * gates, size(a.solve, a.scores, a.scales) + scaled, flops)


@cost_of("additive_kernel")
def delta_scores(a: Any, s: Setting) -> Cost:
    """The same of additive states: products of keys with queries."""
    tokens, heads = len(a.taken), a.KEY_HEADS * a.SHARED
    flops = {NAMES[a.taken.dtype]: 2.0 * tokens * heads * a.CHUNK * a.KEY}
    read = size(a.taken) * 2 * a.KEY / a.MIXED + tokens * heads * a.a.element_size()
    return Cost(read, size(a.scores, a.scales), flops)


@cost_of("states_kernel")
def delta_states(a: Any, s: Setting) -> Cost:
    """Five products of a chunk, three of an additive state; a run's state is read once and written at its end."""
    tokens, heads, requests = len(a.taken), a.KEY_HEADS * a.SHARED, len(a.reads)
    states = requests * heads * a.KEY * a.VALUE * FP32
    scaled = size(a.scaled) if a.DECAYS > 1 else 0
    products = 1 if a.ADDITIVE else 2
    flops = {NAMES[a.taken.dtype]: 2.0 * tokens * heads * a.VALUE * ((products + 1) * a.KEY + products * a.CHUNK)}
    return Cost(size(a.taken, a.scales) + products * size(a.scores) + scaled + states, size(a.out) + states, flops)


@cost_of("gated_norm_kernel", "group_norm_kernel")
def gated_norm(a: Any, s: Setting) -> Cost:
    return Cost(2 * size(a.x) + size(a.weight), size(a.x))


@cost_of("gate_heads_kernel")
def gate_heads(a: Any, s: Setting) -> Cost:
    return Cost(2 * size(a.x), size(a.x))


@cost_of("scale_heads_kernel")
def scale_heads(a: Any, s: Setting) -> Cost:
    return Cost(size(a.q, a.scale, a.bias, a.positions), size(a.out))


@cost_of("gate_rows_kernel")
def gate_rows(a: Any, s: Setting) -> Cost:
    return Cost(size(a.rows, a.x, a.weight), size(a.rows))


# -- residual streams with gates of low rank


@cost_of("norm_gated_kernel")
def norm_gated(a: Any, s: Setting) -> Cost:
    """With a result, the streams are written too."""
    adds = a.x is not None
    return Cost(size(a.out, a.weight, given(a.x)), size(a.out) * (1 + adds), programs=a.grid[0] * a.STREAMS)


@cost_of("rank_gates_kernel")
def rank_gates(a: Any, s: Setting) -> Cost:
    return Cost(size(a.projected), size(a.out), programs=a.grid[0])


@cost_of("text_ids_kernel")
def text_ids(a: Any, s: Setting) -> Cost:
    return Cost(size(a.tokens, a.rows, a.starts, a.reads) + a.grid[0] * SECTOR, size(a.out) + a.grid[0] * SECTOR)


@cost_of("gate_values_kernel")
def gate_values(a: Any, s: Setting) -> Cost:
    return Cost(size(a.gated, a.found, a.weights, a.norm), size(a.gated, a.normed), programs=a.grid[0] * a.STREAMS)


@cost_of("mix_products_kernel", "mix_long_kernel")
def mix_products(a: Any, s: Setting) -> Cost:
    """Each token reads `TAPS` products; short runs store all that a state keeps, of decodes one for each token."""
    lines, states = size(a.gated), size(a.gated) // len(a.gated) * a.grid[0] * (a.TAPS - 1) * a.APART
    kept = states if hasattr(a, "rows") else 0
    return Cost(lines * (2 + a.TAPS) + kept + size(a.taps), lines + kept)


@cost_of("keep_products_kernel")
def keep_products(a: Any, s: Setting) -> Cost:
    kept = len(a.stored) * a.LINES * a.WIDE * a.kept.element_size()
    return Cost(kept, kept)


@cost_of("short_conv_kernel", "long_conv_kernel")
def short_conv(a: Any, s: Setting) -> Cost:
    """Each token reads gates and values of `TAPS` tokens; short runs read and store what a state keeps, of decodes one
    for each token."""
    lines, each = size(a.out), size(a.out) // len(a.out) * (a.TAPS - 1)
    kept = each * a.grid[0] if hasattr(a, "rows") else 0
    return Cost(size(a.projected) + kept + size(a.taps), lines + kept)


@cost_of("conv_states_kernel")
def conv_states(a: Any, s: Setting) -> Cost:
    kept = len(a.stored) * a.LINES * a.WIDTH * a.kept.element_size()
    return Cost(2 * kept, kept)


@cost_of("read_gated_kernel")
def read_gated(a: Any, s: Setting) -> Cost:
    return Cost(size(a.gates, a.normed), size(a.out))


# -- blocks of the residual


@cost_of("mix_blocks_kernel")
def mix_blocks(a: Any, s: Setting) -> Cost:
    """The rows once from memory, then from L2."""
    tokens = a.grid[0]
    row = tokens * a.WIDTH * a.out.element_size()
    held = a.WRITTEN + (not a.STARTS)
    return Cost(row * (held + a.ADD) + size(a.norm, a.proj, given(a.out_norm)), row * (1 + a.ADD), programs=tokens)


# -- DeepSeek V4


@cost_of("compress_kernel")
def compress(a: Any, s: Setting) -> Cost:
    """Each `RATE` tokens complete an entry, which one program sums from `SERIES` times as many: on average over the
    positions of requests. With KEEP the tokens' projections are copied, too."""
    assert s.hardware is not None
    entries = len(a.positions) / a.RATE
    values = a.RATE * a.SERIES * 2 * a.WIDTH * a.projected.element_size()  # with gates
    copied = size(a.projected) if a.KEEP else 0
    some, constants = min(1.0, entries), size(a.bias, a.norm)
    read = entries * (values + a.ROTARY * FP32) + some * constants + copied
    read += size(a.positions, a.starts, a.rows, a.slots, given(a.places))
    alone_us = some * (values + constants) / s.hardware["program_bytes_per_s"] * 1e6
    return Cost(read, entries * a.WIDTH * a.out.element_size() + copied, link_us=alone_us)


@cost_of("rows_kernel")
def plan_rows(a: Any, s: Setting) -> Cost:
    """Slots of windows, and of every `RATE`-th token unless entries are set later: a sector each."""
    tokens, most = len(a.positions), min(s.context, a.WINDOW)
    entries = s.context // a.RATE if a.RATE and not a.TOP_K else 0
    outputs = map(given, (a.places, a.starts, a.of_token, a.columns, a.chosen, a.visible))
    written = size(a.rows, a.counts, *outputs)
    return Cost(tokens * (most * FP32 + entries * SECTOR) + size(a.positions, a.slots, a.requests), written)


@cost_of("pair_kernel")
def pairs(a: Any, s: Setting) -> Cost:
    """Every second token completes an entry; its first token is kept from the step before."""
    tokens = len(a.positions)
    lines, results = size(a.projected), size(a.out, a.entry_slots, a.first)
    kept = lines if a.KEEP else 0
    before = tokens / 2 * 2 * a.WIDTH * a.kept.element_size()
    numbers = size(a.positions, a.starts, a.rows, a.slots, given(a.places), a.norm)
    return Cost(lines + before + numbers, results + kept)


@cost_of("ngram_ids_kernel")
def ngram_ids(a: Any, s: Setting) -> Cost:
    tokens = len(a.positions)
    read = size(a.tokens, a.positions, a.slots, a.requests) + tokens * (SECTOR + 2 * a.COUNT * SECTOR)
    return Cost(read, tokens * (1 + a.COUNT) * FP32)


@cost_of("ngram_values_kernel")
def ngram_values(a: Any, s: Setting) -> Cost:
    return Cost(size(a.rows, given(a.scales)), size(a.out))


@cost_of("ngram_add_kernel")
def ngram_add(a: Any, s: Setting) -> Cost:
    """Reads the streams twice."""
    tokens = a.grid[0]
    streams = tokens * a.STREAMS * a.WIDTH * a.residual.element_size()
    added = tokens * a.WIDTH * a.x.element_size() if a.ADD else 0
    read = 2 * streams + size(a.found, a.weights) + added
    return Cost(read, streams * (1 + a.ADD), programs=tokens)


@cost_of("write_kernel")
def write_streams(a: Any, s: Setting) -> Cost:
    """Reads the streams, adds to them, and multiplies them by the matrix, in three products of TF32 at half of the rate
    of bfloat16."""
    tokens, width = a.num_tokens, a.STREAMS * a.WIDTH
    streams = tokens * width * a.residual.element_size()
    added = tokens * a.WIDTH * a.x.element_size() if a.ADD else 0
    flops = 2.0 * tokens * width * a.NUMBERS
    return Cost(streams + added + size(a.fn), size(a.parts) + streams * a.ADD, {"bf16": 6 * flops})


@cost_of("read_kernel")
def read_streams(a: Any, s: Setting) -> Cost:
    streams = a.num_tokens * a.STREAMS * a.WIDTH * a.residual.element_size()
    outputs = size(*map(given, (a.out, a.quantized, a.scales)))
    return Cost(streams + size(a.parts, a.base, a.scale, given(a.norm)), outputs, programs=a.grid[0] * a.grid[1])


@cost_of("round_rows_kernel")
def round_rows(a: Any, s: Setting) -> Cost:
    """Rows of DeepSeek V4.1's cache, and index queries."""
    tokens, angles = a.grid[0], a.grid[0] * a.ROTARY * FP32
    rows = tokens * (a.grid[1] - a.QUERIES) * a.WIDTH
    turned = tokens * a.QUERIES * a.ROTARY * a.q.element_size()
    read = rows * a.x.element_size() + angles + size(a.positions) + turned
    return Cost(read, rows * a.out.element_size() + turned)


@cost_of("block_maxima_kernel")
def block_maxima(a: Any, s: Setting) -> Cost:
    scores = a.grid[0] * min(s.context, a.scores.shape[1])
    return Cost(scores * FP32, scores / a.SIZE * FP32)


# -- the indexer


@cost_of("index_rows_kernel")
def index_rows(a: Any, s: Setting) -> Cost:
    """Keys into the cache, and queries if some are selected for."""
    record = a.WIDTH + FP32 if a.FP8 else a.WIDTH * a.cache.element_size()
    read = size(*map(given, (a.keys, a.slots, a.positions, a.q, a.gates)))  # gates: every part
    return Cost(read, a.tokens * record * a.KEYS + size(given(a.out), given(a.folded)))


@cost_of("scores_kernel")
def index_scores(a: Any, s: Setting) -> Cost:
    """Index keys of each request once, one for each `RATE` tokens, and the lines of the slot table that name them."""
    tokens, requests, entries = len(a.q), len(a.rows), s.context // a.RATE
    keys = entries * (a.WIDTH * a.cache.element_size() + (FP32 if a.FP8 else 0)) + s.context * FP32
    flops = 2.0 * tokens * a.NUM_HEADS * entries * a.WIDTH
    return Cost(size(a.q, a.weights) + requests * keys, tokens * entries * FP32, {NAMES[a.q.dtype]: flops})


@cost_of("select_kernel")
def index_select(a: Any, s: Setting) -> Cost:
    """Three passes find the bound, one writes; the scores come from L2 after the first."""
    tokens, entries = len(a.scores), s.context // a.RATE
    return Cost(tokens * (entries + min(a.TOP_K, entries)) * FP32, tokens * a.width * FP32)


@cost_of("pool_keys_kernel")
def pool_keys(a: Any, s: Setting) -> Cost:
    """Keys and gates of the tokens; every `SIZE`-th token completes a pool, whose other tokens are in the cache."""
    tokens, record = len(a.keys), a.WIDTH * (a.key_cache.element_size() + a.gate_cache.element_size())
    pools = tokens / a.SIZE
    numbers = size(a.norm_weight, a.norm_bias, a.positions, a.slots) + min(1.0, pools) * size(a.bias)
    return Cost(size(a.keys, a.gates) + numbers + pools * (a.SIZE - 1) * record, tokens * record)


@cost_of("mean_keys_kernel")
def mean_keys(a: Any, s: Setting) -> Cost:
    """As `pool_keys`, without gates."""
    tokens, record = len(a.keys), a.WIDTH * a.cache.element_size()
    pools = tokens / a.SIZE
    numbers = size(a.weight, a.places, a.slots) + pools * (8 + a.ROTARY * 4)
    return Cost(size(a.keys) + numbers + pools * (a.SIZE - 1) * record, tokens * record)


@cost_of("count_pools_kernel")
def count_pools(a: Any, s: Setting) -> Cost:
    return Cost(size(a.positions), size(a.pools, a.counts))


@cost_of("place_pools_kernel")
def place_pools(a: Any, s: Setting) -> Cost:
    """Tokens of pools by number; of the slot table those after the last pool, without `chosen` of every token."""
    tokens = len(a.positions)
    chosen = 0 if given(a.chosen) is None else size(a.chosen)
    table = tokens * (a.SIZE - 1 if chosen else min(s.context, a.width)) * FP32
    return Cost(chosen + table + size(a.positions, a.rows), size(a.out))


# -- blocks of MiniMax-M3


@cost_of("block_scores_kernel")
def block_scores(a: Any, s: Setting) -> Cost:
    """Index keys of each request once."""
    tokens, requests = len(a.q), len(a.rows)
    keys = requests * s.context * (a.WIDTH * a.cache.element_size() + FP32)
    flops = 2.0 * tokens * a.NUM_HEADS * s.context * a.WIDTH
    return Cost(size(a.q) + keys, tokens * a.NUM_HEADS * -(-s.context // a.SIZE) * FP32, {NAMES[a.q.dtype]: flops})


@cost_of("select_blocks_kernel")
def select_blocks(a: Any, s: Setting) -> Cost:
    """Scores of blocks, and the slots of the selected ones."""
    rows, chosen = a.grid[0], min(a.TOP_K * a.SIZE, s.context)
    return Cost(rows * (-(-s.context // a.SIZE) + chosen) * FP32, rows * a.width * a.SIZE * FP32)


@cost_of("layer_norm_kernel")
def layer_norm(a: Any, s: Setting) -> Cost:
    return Cost(size(a.residual, a.weight) + a.BIASED * size(a.bias) + a.ADD * size(a.x), (1 + a.ADD) * size(a.out))


@cost_of("sparse_mixer_kernel")
def sparse_mixer(a: Any, s: Setting) -> Cost:
    return Cost(size(a.logits), size(a.weights, a.ids))
