"""Parameter counts and byte sums of a model, for the memory ledger. Imports no torch.

Parameters are those of `tensors`' table.
"""

from __future__ import annotations

from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.tensors import EMBEDDING, Kind, TensorSpec, model_tensors
from moe_engine.parallel.topology import Topology

ONE_RANK = Topology()
FP8_BLOCK_ELEMENTS = 128 * 128
_KV_B, _LAYER = ".kv_b_proj.weight", "model.layers."

MAX_EXPANDED_TOKENS = 16384
"""Context tokens whose keys and values the MLA layer expands at once (its constructor's default)."""

MAX_ABSORBED_TOKENS = 1024
"""Query tokens of one piece when a long context is read in the absorbed form instead."""

DRAFT_CATCH_UP = 4096
"""Tokens of all rows that a draft model computes at once when it has not seen them."""

DRAFT_FEW = 16
"""Tokens of a row up to which a draft model computes them in the form of decodes."""

LOGIT_BYTES = 12
"""Of one logit while its row is sampled: float32, a copy of it from before edits, its log-probability. The head takes
no more: two forms of the activations' dtype, or one and float32."""

LOGITS_AT_ONCE = 1 << 26
"""Logits that a step makes and samples at once, about."""

MIN_LOGITS_ROWS, MAX_LOGITS_ROWS = 16, 1024
"""Rows of that: prompt log-probabilities want some where few requests run; more bring nothing to a small vocabulary."""

LOGITS_ROWS_STEP = 64
"""Calls that run a whole step are for up to so many rows, and tiles of a product are no larger."""

EDIT_BYTES = 32 << 20
"""Scratch memory of penalties and biases on logits, where one row does not need more."""

PENALTY_COUNT_BYTES, PENALTY_TOKEN_BYTES = 4, 40
"""Scratch memory that the penalties of a row take for each entry of the vocabulary, and for each token of its text."""

NGRAM_PLACES = 1 << 20
"""Places of all texts that an accelerator compares with their ends at once."""

NGRAM_PLACE_BYTES, NGRAM_HOST_BYTES = 48, 24
"""Scratch memory of one of them; of one token of a text that a host looks through, one text after the other."""


def num_parameters(config: ModelConfig, include_mtp: bool = False) -> int:
    """Unique parameters, the tied head and MTP's copies of embedding and head counted once."""
    return sum(spec.num_elements * spec.copies for spec in model_tensors(config, include_mtp))


def num_active_parameters(config: ModelConfig) -> int:
    """Parameters that one token meets: K of E experts, the whole head, one row of the embedding (not counted)."""
    top_k = config.moe.top_k if config.moe is not None else 1
    return sum(
        spec.num_elements * min(spec.copies, top_k)
        for spec in model_tensors(config)
        if config.tie_word_embeddings or spec.name != EMBEDDING
    )


def weight_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    include_mtp: bool = False,
    topology: Topology = ONE_RANK,
    redundant_experts: int = 0,
    keeps_fp8: bool = False,
) -> int:
    """Bytes that one rank holds for the weights: activations' dtype, norms, router and the rotary table (one for all
    layers) in float32, kv_b in both forms. With kernels that keep one copy (the reference rows); with `keeps_fp8` those
    multiply block FP8 as it is stored."""
    plain = wide = blocks = 0
    for spec in model_tensors(config, include_mtp):
        held = _held_elements(config, spec, topology, redundant_experts)
        if spec.kind is Kind.WIDE:
            wide += spec.num_elements
        elif spec.name.endswith(_KV_B):
            plain += 2 * held
        elif keeps_fp8 and spec.kind is Kind.LINEAR and spec.name.startswith(_LAYER):
            blocks += held
        else:
            plain += held
    rotary = config.context_length * config.rope.width
    return plain * dtype_bytes + 4 * (wide + rotary) + blocks + 4 * blocks // FP8_BLOCK_ELEMENTS


def _held_elements(config: ModelConfig, spec: TensorSpec, topology: Topology, redundant_experts: int) -> int:
    """Elements of a tensor, or of all experts' tensors of one name, that one rank holds."""
    name, count = spec.name, spec.num_elements
    if spec.copies > 1:
        return (spec.copies + redundant_experts) // topology.ep_size * (count // topology.moe_tp_size)
    return -(-count // _parts(config, name, topology))


def _parts(config: ModelConfig, name: str, topology: Topology) -> int:
    """Equal parts that a tensor is cut into."""
    if name == EMBEDDING:
        return topology.attn_tp_size
    if name == "lm_head.weight":
        return topology.attn_tp_size if topology.enable_dp_lm_head else topology.tp_size
    if ".shared_experts." in name:
        return 1 if topology.travels else topology.tp_size
    if ".self_attn." in name:
        return _attention_parts(config, name, topology.attn_tp_size)
    return topology.tp_size if ".mlp." in name and topology.cuts_dense else 1


def _attention_parts(config: ModelConfig, name: str, attn_tp_size: int) -> int:
    """Projections from and to heads are cut; those from and to the latent, and inner norms, are not."""
    part = name.rpartition(".self_attn.")[2].partition(".")[0]
    if part in ("k_proj", "v_proj"):  # where KV heads are fewer than ranks, each stands on several
        return min(attn_tp_size, config.attention.num_kv_heads)  # type: ignore[union-attr]
    return attn_tp_size if part in ("q_proj", "q_b_proj", "kv_b_proj", "o_proj") else 1


def largest_step_activation_bytes(
    config: ModelConfig, num_tokens: int, dtype_bytes: int, num_logits: int = 0, expanded_tokens: int | None = None
) -> int:
    """Upper estimate of what a forward of `num_tokens` tokens holds at once, without KV and weights.

    Args:
        num_logits: rows of logits kept in float32 (0: none).
        expanded_tokens: context tokens whose keys and values MLA expands at once; default the layer's own limit.
    """
    stream = 3 * num_tokens * config.hidden_size * dtype_bytes  # residual, normed input, output of the part
    largest = max(
        _attention_bytes(config, num_tokens, dtype_bytes, expanded_tokens), _mlp_bytes(config, num_tokens, dtype_bytes)
    )
    return stream + largest + num_logits * config.vocab_size * (4 + dtype_bytes)


def logits_rows(vocab_size: int, num_logits: int) -> int:
    """Rows of logits that there may be at once, where a step has at most `num_logits` to sample."""
    fit = LOGITS_AT_ONCE // vocab_size // LOGITS_ROWS_STEP * LOGITS_ROWS_STEP
    return max(MIN_LOGITS_ROWS, min(max(fit, LOGITS_ROWS_STEP), MAX_LOGITS_ROWS, num_logits))


def sampling_bytes(vocab_size: int, num_rows: int, scratch: int, context_len: int) -> int:
    """What sampling holds at once: so many rows of logits, and scratch memory of a kernel or of edits."""
    longest = PENALTY_COUNT_BYTES * vocab_size + PENALTY_TOKEN_BYTES * context_len
    return num_rows * vocab_size * LOGIT_BYTES + max(scratch, EDIT_BYTES, longest)


def _attention_bytes(config: ModelConfig, num_tokens: int, dtype_bytes: int, expanded_tokens: int | None) -> int:
    a = config.attention
    if a.kind == "gqa":
        width = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim  # type: ignore[union-attr]
        return num_tokens * width * dtype_bytes
    return _mla_bytes(a, num_tokens, dtype_bytes, expanded_tokens)  # type: ignore[arg-type]


def _mla_bytes(a: MLAConfig, num_tokens: int, dtype_bytes: int, expanded_tokens: int | None) -> int:
    limit = MAX_EXPANDED_TOKENS if expanded_tokens is None else expanded_tokens
    down = (a.q_lora_rank or 0) * 2 + a.cache_width
    query = a.num_heads * (a.qk_head_dim + a.v_head_dim)
    context = a.cache_width + a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
    expanded = limit * context + min(num_tokens, limit) * a.num_heads * a.v_head_dim  # and what attention returns
    absorbed = min(num_tokens, MAX_ABSORBED_TOKENS) * a.num_heads * (a.cache_width + a.kv_lora_rank)
    return (num_tokens * (down + query) + max(expanded, absorbed)) * dtype_bytes


def _mlp_bytes(config: ModelConfig, num_tokens: int, dtype_bytes: int) -> int:
    dense = 3 * config.intermediate_size
    moe = config.moe
    if moe is None:
        return num_tokens * dense * dtype_bytes
    routed = moe.top_k * (3 * config.hidden_size + 3 * moe.width)  # rows in, products, rows out (float32 sums aside)
    combine = 4 * moe.top_k * config.hidden_size + 8 * moe.num_experts
    return num_tokens * (max(dense, routed + 3 * moe.shared_width) * dtype_bytes + combine)
