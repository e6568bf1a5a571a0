"""Bytes that a step of a model takes in addition to weights and KV, for the memory ledger. Imports no torch."""

from __future__ import annotations

from moe_engine.kernels.block_index.rule import MAX_SCORES as MAX_BLOCK_SCORES
from moe_engine.kernels.block_index.rule import TOKENS_AT_ONCE
from moe_engine.models.config import GQAConfig, MLAConfig, ModelConfig
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.config_sections.state import DeltaConfig

MAX_EXPANDED_TOKENS = 16384
"""Context tokens that the MLA layer expands at once (its constructor's default)."""

EXPANDED_PREFIX_BYTES, EXPANDED_PREFIX_STEP = 64 << 20, 64
"""Max keys and values of a prefix shared by decodes, kept expanded, and the unit of its tokens."""

MAX_ABSORBED_TOKENS = 1024
"""Query tokens of one chunk if a long context is read in the absorbed form instead."""

MAX_INDEX_SCORES_BYTES = 256 << 20
"""Max scores of an indexer in memory; query tokens with more are scored in parts (`kernels.indexer`)."""

DRAFT_CATCH_UP = 4096
"""Tokens of all rows per pass when a draft model catches up on unseen tokens."""

DRAFT_FEW = 16
"""Max unseen tokens of a row that a draft model processes as a decode."""

LOGIT_BYTES = 12
"""Sampling bytes per logit: float32, a copy before edits, its log-probability. The head needs no more."""

LOGITS_AT_ONCE = 1 << 26
"""Approximate logits that a step computes and samples at once."""

MIN_LOGITS_ROWS, MAX_LOGITS_ROWS = 16, 1024
"""Min rows at once, for prompt log-probabilities with few requests; more rows do not help with a small vocabulary."""

LOGITS_ROWS_STEP = 64
"""Max rows of whole-step calls, and of product tiles."""

EDIT_BYTES = 32 << 20
"""Scratch memory of penalties and biases on logits, unless one row needs more."""

PENALTY_COUNT_BYTES, PENALTY_TOKEN_BYTES = 4, 40
"""Scratch bytes of a row's penalties per vocabulary entry, and per token of its text."""

NGRAM_PLACES = 1 << 20
"""Text positions that an accelerator compares with the texts' ends at once."""

NGRAM_PLACE_BYTES = 48
"""Scratch bytes per position on an accelerator."""

NGRAM_INDEX_BYTES, NGRAM_HOST_BYTES = 8, 40
"""Bytes per position of a text on a host: for its index, and scratch memory of one text at a time."""


def expanded_prefix(config: ModelConfig, dtype_bytes: int) -> tuple[int, int]:
    """Max tokens of a prefix whose keys and values are kept expanded, and bytes of each. 0 tokens: MLA's latent is too
    narrow for a gain, or the shortest prefix is too large. `config`: of one rank."""
    a = config.attention
    if not isinstance(a, MLAConfig):
        return 0, 0
    row = a.num_heads * (a.qk_nope_head_dim + a.v_head_dim) + a.qk_rope_head_dim
    each = len(config.kv_layers) * row * dtype_bytes
    expanded = a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim
    if 2 * a.kv_lora_rank + a.qk_rope_head_dim < 2 * expanded:
        return 0, each
    return EXPANDED_PREFIX_BYTES // each // EXPANDED_PREFIX_STEP * EXPANDED_PREFIX_STEP, each


def largest_step_activation_bytes(
    config: ModelConfig, num_tokens: int, dtype_bytes: int, num_logits: int = 0, expanded_tokens: int | None = None,
    num_requests: int | None = None, own_tokens: int | None = None,
) -> int:  # fmt: skip
    """Upper bound of the activation memory of a forward of `num_tokens` tokens, without KV and weights.

    Args:
        num_logits: rows of float32 logits (0: none).
        expanded_tokens: context tokens that MLA expands at once; default: the layer's limit.
        num_requests: max requests with these tokens; default: each token may be another's.
        own_tokens: those of the rank's attention group, of which it computes attention; default: all.
    """
    own = num_tokens if own_tokens is None else own_tokens
    requests = own if num_requests is None else min(own, num_requests)
    stream = 3 * num_tokens * config.hidden_size * dtype_bytes  # residual, normed input, output of the part
    stream += num_tokens * (_streams_bytes(config, dtype_bytes) + _selected_bytes(config))
    largest = max(
        _attention_bytes(config, own, requests, dtype_bytes, expanded_tokens),
        _mlp_bytes(config, num_tokens, dtype_bytes),
    )
    return stream + largest + num_logits * config.vocab_size * (4 + dtype_bytes)


def logits_rows(vocab_size: int, num_logits: int) -> int:
    """Max rows of logits at once, for a step with at most `num_logits` rows to sample."""
    fit = LOGITS_AT_ONCE // vocab_size // LOGITS_ROWS_STEP * LOGITS_ROWS_STEP
    return max(MIN_LOGITS_ROWS, min(max(fit, LOGITS_ROWS_STEP), MAX_LOGITS_ROWS, num_logits))


def sampling_bytes(vocab_size: int, num_rows: int, scratch: int, context_len: int) -> int:
    """Peak memory of sampling: `num_rows` rows of logits, and scratch memory of a kernel or of edits."""
    longest = PENALTY_COUNT_BYTES * vocab_size + PENALTY_TOKEN_BYTES * context_len
    return num_rows * vocab_size * LOGIT_BYTES + max(scratch, EDIT_BYTES, longest)


def _attention_bytes(
    config: ModelConfig, num_tokens: int, num_requests: int, dtype_bytes: int, expanded_tokens: int | None
) -> int:
    a = config.attention
    if isinstance(a, GQAConfig):
        width = max(_gqa_width(kind) for kind in config.attentions if isinstance(kind, GQAConfig))
        own = num_tokens * width * dtype_bytes + _block_index_bytes(config, num_tokens, dtype_bytes)
        own += _indexer_bytes(config, num_tokens, dtype_bytes)
        return max(own, _state_bytes(config, num_tokens, dtype_bytes))
    if isinstance(a, CompressedConfig):
        return _compressed_bytes(a, config.context_length, num_tokens, num_requests, dtype_bytes)
    dense = _mla_bytes(a.widest, num_tokens, dtype_bytes, expanded_tokens) + _indexer_bytes(
        config, num_tokens, dtype_bytes
    )
    return max(dense, _state_bytes(config, num_tokens, dtype_bytes))


def _gqa_width(a: GQAConfig) -> int:
    """Numbers of a token: q and k (rotated in place or copied), v, the result, and the gate with a copy."""
    gates = 2 * a.num_heads * (a.head_dim if a.output_gate else a.gate_width)
    return (a.num_heads + a.num_kv_heads) * (a.head_dim + a.value_width) + gates


def _state_bytes(config: ModelConfig, num_tokens: int, dtype_bytes: int) -> int:
    own = config.short_conv
    if own is None:
        return _delta_bytes(config.delta, num_tokens, dtype_bytes)
    # the projection, the products with those of earlier tokens, a tap's, its copy and the sum in float32, the result
    return num_tokens * own.width * (7 * dtype_bytes + 8)


def _delta_bytes(d: DeltaConfig | None, num_tokens: int, dtype_bytes: int) -> int:
    """Projections, the convolution's result, float32 copies of q, k and v for each value head, and the result. With
    decays of channels: these, and q and k with them in three forms."""
    if d is None:
        return 0
    projected = 2 * (d.key_heads * d.key + d.value_heads * d.value)
    wide = d.value_heads * (2 * d.key + 2 * d.value + 4 * d.key * d.by_channel)
    return num_tokens * (2 * projected * dtype_bytes + 4 * (projected + wide))


def _mla_bytes(a: MLAConfig, num_tokens: int, dtype_bytes: int, expanded_tokens: int | None) -> int:
    limit = MAX_EXPANDED_TOKENS if expanded_tokens is None else expanded_tokens
    down = (a.q_lora_rank or 0) * 2 + a.cache_width
    query = a.num_heads * (a.qk_head_dim + a.v_head_dim + 2 * a.gate_width)
    context = a.cache_width + a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
    expanded = limit * context + min(num_tokens, limit) * a.num_heads * a.v_head_dim  # and the attention output
    absorbed = min(num_tokens, MAX_ABSORBED_TOKENS) * a.num_heads * (a.cache_width + a.kv_lora_rank)
    return (num_tokens * (down + query) + max(expanded, absorbed)) * dtype_bytes


def _compressed_bytes(a: CompressedConfig, context: int, num_tokens: int, num_requests: int, dtype_bytes: int) -> int:
    """Projections, the query with a normed copy, the result, and index queries; the rows of each query token with
    their places, by kind of layer; slots of a request's entries; scores of entries."""
    projected = a.q_lora_rank * 2 + 5 * a.head_dim + 4 * a.index_width
    heads = 3 * a.num_heads * a.head_dim + a.output_groups * a.output_rank + a.index_heads * (a.index_width + 4)
    entries = {rate: context // rate for rate in a.rates if rate}
    seen = sum(min(count, a.top_k) if a.selects_of(rate) else count for rate, count in entries.items())
    scores = 4 * max((count for rate, count in entries.items() if a.selects_of(rate)), default=0)
    rows = 16 * ((1 + len(entries)) * a.window + seen)
    slots = num_requests * scores  # int32 as scores are float32
    return (
        num_tokens * ((projected + heads) * dtype_bytes + rows)
        + slots
        + a.candidate_bytes(context, num_tokens)
        + max(scores, min(MAX_INDEX_SCORES_BYTES, num_tokens * scores))
    )


def _streams_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes of a token's residual streams beyond one, and of the float32 copies with which they are mixed."""
    if config.residual_block:
        return (config.residual_rows - 1) * dtype_bytes * config.hidden_size
    if (streams := config.streams) is None:
        return 0
    return (streams.count * (dtype_bytes + 3 * 4) - dtype_bytes) * config.hidden_size


def _indexer_bytes(config: ModelConfig, num_tokens: int, dtype_bytes: int) -> int:
    """Index queries (with a float32 copy where they are quantized) and keys, head weights, selections, and scores."""
    a = config.attention
    if isinstance(a, CompressedConfig) or a.indexer is None:
        return 0
    heads, context = a.indexer.num_heads, config.context_length
    each = (heads * a.index_width + a.index_width) * (2 * dtype_bytes + 4) + 8 * heads
    # slots of pools have positions, places and masks too, in chunks
    selected = (4 if a.pool == 1 else 32) * min(a.indexer.top_k + a.pool - 1, context)
    each += 16 * a.pool * a.index_width if a.pool > 1 else 0  # the keys and gates of a pool
    scores = 4 * context
    return num_tokens * (each + selected) + max(scores, min(MAX_INDEX_SCORES_BYTES, num_tokens * scores))


def _selected_bytes(config: ModelConfig) -> int:
    """Bytes of the slots that the KV heads of a token read, from the first layer to the last."""
    a = config.attention
    return 4 * a.num_kv_heads * a.blocks.rule.max_tokens if isinstance(a, GQAConfig) and a.blocks is not None else 0


def _block_index_bytes(config: ModelConfig, num_tokens: int, dtype_bytes: int) -> int:
    """Index queries and keys, and the query by head; scores of blocks with their order, and positions of a part of the
    tokens."""
    a, context = config.attention, config.context_length
    if not isinstance(a, GQAConfig) or a.blocks is None or context <= a.blocks.rule.max_tokens:
        return 0
    rule, part = a.blocks.rule, min(num_tokens, TOKENS_AT_ONCE) * a.num_kv_heads
    blocks = -(-context // rule.size)
    each = 3 * (a.num_kv_heads + 1) * a.blocks.width + 2 * a.num_heads * a.value_width
    scores = 4 * max(a.num_kv_heads * blocks, min(MAX_BLOCK_SCORES, num_tokens * a.num_kv_heads * blocks))
    return num_tokens * each * dtype_bytes + scores + part * (20 * blocks + 33 * rule.max_tokens)


def _mlp_bytes(config: ModelConfig, num_tokens: int, dtype_bytes: int) -> int:
    dense = 3 * config.intermediate_size
    moe = config.moe
    if moe is None:
        return num_tokens * dense * dtype_bytes
    choices = moe.top_k + -(-moe.shared_width // moe.width)  # shared experts may be fused into the routed ones
    rows = 3 * config.routed_size + 3 * moe.width  # in, products, out (float32 sums aside)
    routed = choices * rows + 3 * moe.latent + moe.scales_input * config.hidden_size
    combine = 4 * choices * config.routed_size + 8 * moe.num_experts
    return num_tokens * (max(dense, routed) * dtype_bytes + combine)
