"""Parameter counts and bytes of a model, for the memory ledger. Imports no torch.

Parameters are those listed in `tensors`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from moe_engine.kernels.block_index.rule import MAX_SCORES as MAX_BLOCK_SCORES
from moe_engine.kernels.block_index.rule import TOKENS_AT_ONCE
from moe_engine.models.compressed_config import CompressedConfig
from moe_engine.models.config import GQAConfig, MLAConfig, ModelConfig
from moe_engine.models.expert_format import experts_format, width_group
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.online import derived_codes
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.state_config import DeltaConfig
from moe_engine.models.tensors import (
    BIASES,
    EMBEDDING,
    GATE_UP_BIAS,
    ROUTERS,
    Kind,
    TensorSpec,
    is_delta,
    is_head,
    layer_index,
    model_tensors,
)
from moe_engine.models.vision_tensors import PREFIX as VISION
from moe_engine.parallel.share import Share
from moe_engine.parallel.topology import Topology

ONE_RANK = Topology()
_KV_B, _LAYER = ".kv_b_proj.weight", "model.layers."
_BY_HEAD = (_KV_B, ".o_a_proj.weight")
"""Projections by head or by group of heads, which kernels hold in the activation dtype."""
_WHOLE_OF_DELTA = (".norm.weight", ".o_norm.weight", ".f_a_proj.weight", ".g_a_proj.weight")
"""Tensors of a delta net that each rank has: the others are divided by heads."""
_ROW_PARALLEL = (".o_proj.weight", ".o_b_proj.weight", ".down_proj.weight", ".out_proj.weight")

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


def num_parameters(config: ModelConfig, include_mtp: bool = False) -> int:
    """Unique parameters; the tied head and MTP's copies of embedding and head count once."""
    if (key := ("parameters", include_mtp)) not in config.known_sizes:
        counts = (spec.num_elements * spec.copies for spec in model_tensors(config, include_mtp))
        config.known_sizes[key] = sum(counts)
    return config.known_sizes[key]


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


def num_gate_elements(config: ModelConfig, include_mtp: bool = False) -> int:
    """Elements of all routers' weights."""
    if (key := ("gates", include_mtp)) not in config.known_sizes:
        found = (spec for spec in model_tensors(config, include_mtp) if spec.name.endswith(ROUTERS))
        config.known_sizes[key] = sum(spec.num_elements for spec in found)
    return config.known_sizes[key]


def weight_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    include_mtp: bool = False,
    topology: Topology = ONE_RANK,
    redundant_experts: int = 0,
    format: WeightFormat = PLAIN,
) -> int:
    """Weight bytes of one rank: activation dtype; norms, router and the rotary table (one for all layers) in float32;
    kv_b in both forms. For kernels that keep one copy (the reference rows), and projections of layers in `format`."""
    key = ("weights", dtype_bytes, include_mtp, topology, redundant_experts, format)
    if key not in config.known_sizes:  # a search over forms needs the same sums many times
        config.known_sizes[key] = _weight_bytes(config, dtype_bytes, include_mtp, topology, redundant_experts, format)
    return config.known_sizes[key]


def _weight_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    include_mtp: bool,
    topology: Topology,
    redundant_experts: int,
    format: WeightFormat,
) -> int:
    format = _of_whole_groups(config, format, topology)
    found = _alike_of_model(config, include_mtp, dtype_bytes, topology, format)
    return _sum_of(config, found, dtype_bytes, topology, redundant_experts, format)


def bytes_per_weight(
    config: ModelConfig, dtype_bytes: int, topology: Topology, format: WeightFormat
) -> tuple[float, float]:
    """Mean memory of a weight of the layers' projections as kernels hold them: of routed experts, and of the others.
    Experts' is of the first rank, whose part may be the largest, per weight of an equal part."""
    format = _of_whole_groups(config, format, topology)
    held = {True: Fraction(0), False: Fraction(0)}
    elements = {True: 0, False: 0}
    for spec, each, count in _alike_of_model(config, False, dtype_bytes, topology, format):
        if each is not None:
            number = spec.num_elements * spec.copies * count
            elements[spec.copies > 1] += number
            held[spec.copies > 1] += number * each
    means = {routed: float(held[routed] / elements[routed]) if elements[routed] else dtype_bytes for routed in held}
    return means[True] * _unevenness(config, topology, format), means[False]


def _unevenness(config: ModelConfig, topology: Topology, format: WeightFormat) -> float:
    """The first rank's part of an expert over an equal part: a step takes as long as on the rank that reads the most.
    12 blocks of 128 channels on 8 ranks: 4 / 3."""
    if config.moe is None:
        return 1.0
    width = config.moe.width
    return _largest_part(config, width, topology, format) * topology.moe_tp_size / width


Alike = tuple[TensorSpec, Fraction | None, int]
"""A tensor, bytes of an element if it is a projection of a layer, and the number of such tensors, in other layers."""


def _alike_of_model(
    config: ModelConfig, include_mtp: bool, dtype_bytes: int, topology: Topology, format: WeightFormat
) -> list[Alike]:
    topology = _of_columns(topology, format)
    if (key := ("alike", include_mtp, dtype_bytes, topology, format)) not in config.known_sizes:
        config.known_sizes[key] = _alike(config, model_tensors(config, include_mtp), dtype_bytes, topology, format)
    found: list[Alike] = config.known_sizes[key]
    return found


def _of_columns(topology: Topology, format: WeightFormat) -> Topology:
    """The topology if the format's bytes depend on a rank's columns, else that of all columns."""
    return topology if isinstance(format, SchemeFormat) and "linear" in format.kept else ONE_RANK


def _alike(
    config: ModelConfig, specs: Iterable[TensorSpec], dtype_bytes: int, topology: Topology, format: WeightFormat
) -> list[Alike]:
    """Layers have the same tensors but for their number; a format may store them differently."""
    found: dict[tuple[object, ...], Alike] = {}
    for spec in specs:
        layered = spec.name.startswith(_LAYER) and not is_head(spec.name)
        each = None
        if layered and spec.kind is Kind.LINEAR and not spec.name.endswith(_BY_HEAD):
            shape = _local_shape(config, spec, topology)
            each = format.bytes_per_element(spec.name.removesuffix(".weight"), shape, dtype_bytes)
        name = spec.name[len(_LAYER) :].partition(".")[2] if layered else spec.name
        size = each and each.as_integer_ratio()
        key = layered, name, spec.shape, spec.kind, spec.copies, size
        known = found.get(key)
        found[key] = (spec, each, 1 if known is None else known[2] + 1)
    return list(found.values())


def tensor_bytes(
    config: ModelConfig,
    specs: Iterable[TensorSpec],
    dtype_bytes: int,
    topology: Topology = ONE_RANK,
    redundant_experts: int = 0,
    format: WeightFormat = PLAIN,
) -> int:
    """`weight_bytes` of some tensors of a model, and of its rotary table."""
    format = _of_whole_groups(config, format, topology)
    alike = _alike(config, specs, dtype_bytes, _of_columns(topology, format), format)
    return _sum_of(config, alike, dtype_bytes, topology, redundant_experts, format)


def _sum_of(
    config: ModelConfig, tensors: Iterable[Alike], dtype_bytes: int, topology: Topology, redundant_experts: int,
    format: WeightFormat,
) -> int:  # fmt: skip
    """format: with experts as a rank holds them."""
    plain = wide = 0
    kept, derived = Fraction(0), derived_codes(format, 1) is not None
    head = derived_codes(format, config.hidden_size, is_head=True)
    for spec, each, count in tensors:
        held = count * _held_elements(config, spec, topology, redundant_experts, format)
        if spec.kind in (Kind.WIDE, Kind.INDEX):
            sharded = spec.name.endswith(BIASES) or is_delta(config, spec.name)
            wide += held if sharded else count * spec.num_elements
        elif spec.name.endswith(_KV_B):
            plain += held if derived else 2 * held
            kept += _absorbed_bytes(config, held, format) if derived else 0
        elif is_head(spec.name) and head and head.takes(spec.shape[1]):
            kept += held * Fraction(head.num_bytes(1, spec.shape[1]), spec.shape[1])
        elif each is not None:
            kept += held * each
        elif _head_as_stored(spec, format, topology):
            kept += held * format.bytes_per_element(spec.name.removesuffix(".weight"), spec.shape, dtype_bytes)
        else:
            plain += held
    rotary = sum(rope.num_rows(config.context_length) * rope.width for rope in config.ropes)
    return plain * dtype_bytes + 4 * (wide + rotary) + int(kept)


def _head_as_stored(spec: TensorSpec, format: WeightFormat, topology: Topology) -> bool:
    stored = isinstance(format, SchemeFormat) and format.stores_head
    return stored and is_head(spec.name) and topology.tp_size == 1


def _absorbed_bytes(config: ModelConfig, elements: int, format: WeightFormat) -> int:
    """Bytes of kv_b's halves by head, [C, N] and [V, C], with this many elements of all heads."""
    mla = config.attention
    assert isinstance(mla, MLAConfig)
    heads = elements // (mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim))
    keys, values = (mla.kv_lora_rank, mla.qk_nope_head_dim), (mla.v_head_dim, mla.kv_lora_rank)
    forms = [(shape, derived_codes(format, shape[1])) for shape in (keys, values)]
    return heads * sum(form.num_bytes(*shape) for shape, form in forms if form is not None)


def _local_shape(config: ModelConfig, spec: TensorSpec, topology: Topology) -> tuple[int, ...]:
    """Shape of the part of a matrix on a rank, as far as its columns are sharded; of experts the whole shape."""
    if spec.copies > 1 or not spec.name.endswith(_ROW_PARALLEL):
        return spec.shape
    return spec.shape[0], spec.shape[1] // _parts(config, spec.name, topology)


def _held_elements(
    config: ModelConfig, spec: TensorSpec, topology: Topology, redundant_experts: int, format: WeightFormat
) -> int:
    """Elements, on one rank, of a tensor or of all experts' tensors of one name."""
    name, count = spec.name, spec.num_elements
    if name.endswith(BIASES):
        slots, experts = spec.shape[0] + redundant_experts, spec.shape[0]
        part = count // experts
        if name.endswith(GATE_UP_BIAS):
            part = _largest_part(config, part, topology, format)
        return slots // topology.ep_size * part
    if spec.copies > 1:
        slots = (spec.copies + redundant_experts) // topology.ep_size
        return slots * _largest_part(config, count, topology, format)
    return -(-count // _parts(config, name, topology))


def _of_whole_groups(config: ModelConfig, format: WeightFormat, topology: Topology) -> WeightFormat:
    """The format with experts dequantized if a rank's part splits groups with a scale, or in FP8 without a gate."""
    if config.moe is None or not isinstance(format, SchemeFormat | BlockFP8Format) or "experts" not in format.kept:
        return format
    splits = _largest_part(config, config.moe.width, topology, format) % _width_group(config, format)
    splits |= config.moe.squared and experts_format(config) is None
    return replace(format, kept=format.kept - {"experts"}) if splits else format


def _width_group(config: ModelConfig, format: WeightFormat) -> int:
    return width_group(config, isinstance(format, SchemeFormat | BlockFP8Format) and "experts" in format.kept)


def _largest_part(config: ModelConfig, count: int, topology: Topology, format: WeightFormat) -> int:
    """The most of `count` elements of an expert on a rank: the first one's."""
    assert config.moe is not None
    width, ranks, group = config.moe.width, topology.moe_tp_size, _width_group(config, format)
    cut = Share(0, ranks).cut_in_groups(width, group) if group > 1 and width % ranks == 0 else None
    return count // ranks if cut is None else count // width * cut.stop


def _parts(config: ModelConfig, name: str, topology: Topology) -> int:
    """Number of equal parts that a tensor is sharded into."""
    if name.startswith(VISION):
        return 1
    if name == EMBEDDING:
        return topology.attn_tp_size
    if is_head(name):
        return topology.attn_tp_size if topology.enable_dp_lm_head else topology.tp_size
    if ".shared_expert" in name:
        if topology.travels or ".shared_expert_gate." in name:
            return 1
        moe = config.moe_of(layer_index(name))
        shared = moe is not None and moe.num_shared_slots(topology.ep_size)
        return topology.moe_tp_size if shared else topology.tp_size
    if is_delta(config, name):
        whole = name.endswith(_WHOLE_OF_DELTA) and not (config.delta is not None and config.delta.additive)
        return 1 if whole else topology.attn_tp_size
    if name.endswith(".routed_expert_up_proj.weight"):
        return 1 if topology.travels else topology.tp_size
    if ".self_attn." in name:
        return _attention_parts(config, name, topology.attn_tp_size)
    return topology.tp_size if ".mlp." in name and topology.cuts_dense else 1


def _attention_parts(config: ModelConfig, name: str, attn_tp_size: int) -> int:
    """Projections from and to heads are sharded; those from and to the latent, and inner norms, are not."""
    part = name.rpartition(".self_attn.")[2].partition(".")[0]
    if part in ("k_proj", "v_proj", "index_q_proj"):  # with fewer KV heads than ranks, each is replicated
        attention = config.attention_of(layer_index(name))
        return min(attn_tp_size, attention.num_kv_heads)  # type: ignore[union-attr]
    if part == "o_b_proj" and isinstance(a := config.attention, CompressedConfig):
        return min(attn_tp_size, a.output_groups)
    return attn_tp_size if part in ("q_proj", "q_b_proj", "kv_b_proj", "o_proj", "o_a_proj", "g_proj") else 1


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
        return max(own, _delta_bytes(config.delta, num_tokens, dtype_bytes))
    if isinstance(a, CompressedConfig):
        return _compressed_bytes(a, config.context_length, num_tokens, num_requests, dtype_bytes)
    dense = _mla_bytes(a.widest, num_tokens, dtype_bytes, expanded_tokens) + _indexer_bytes(
        config, num_tokens, dtype_bytes
    )
    return max(dense, _delta_bytes(config.delta, num_tokens, dtype_bytes))


def _gqa_width(a: GQAConfig) -> int:
    """Numbers of a token: q and k (rotated in place or copied), v, the result, and the gate with a copy."""
    gates = 2 * a.num_heads * (a.head_dim if a.output_gate else a.gate_width)
    return (a.num_heads + a.num_kv_heads) * (a.head_dim + a.value_width) + gates


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
    # slots of pools have positions, places and masks beside them, in chunks
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
