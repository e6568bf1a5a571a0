"""The facts of a model that determine the cost of a step: counts of weights, KV and operations, from config.json.

Works for models that this engine does not serve (Gated DeltaNet layers, sliding windows, sparse attention), because
the planner also predicts other engines. Legend: weights are elements, not bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.models.config_defaults import with_defaults
from moe_engine.models.config_parsers.afmoe import afmoe_fields
from moe_engine.models.config_parsers.bailing import bailing_fields, bailing_v2_fields
from moe_engine.models.config_parsers.cohere import cohere2_fields
from moe_engine.models.config_parsers.compressed import compressed_attention
from moe_engine.models.config_parsers.dense import exaone4_fields, olmo3_fields
from moe_engine.models.config_parsers.families import qwen_moe_layers
from moe_engine.models.config_parsers.gemma import gemma2_fields, gemma4_fields, gemma_fields
from moe_engine.models.config_parsers.glm5_next import glm5_next_fields
from moe_engine.models.config_parsers.granite import granite_facts, granite_swa_fields
from moe_engine.models.config_parsers.hunyuan import hunyuan_moe_fields
from moe_engine.models.config_parsers.kimi_linear import kimi_linear_fields
from moe_engine.models.config_parsers.laguna import laguna_fields
from moe_engine.models.config_parsers.lfm2 import lfm2_fields
from moe_engine.models.config_parsers.llama4 import llama4_facts
from moe_engine.models.config_parsers.longcat import longcat_facts
from moe_engine.models.config_parsers.mimo import mimo_fields
from moe_engine.models.config_parsers.minimax_m3 import SPARSE, minimax_m3_mixture
from moe_engine.models.config_parsers.minimax_text import minimax_text_fields
from moe_engine.models.config_parsers.mixtures import ernie_moe_fields, gpt_oss_fields
from moe_engine.models.config_parsers.nemotron_h import ATTENTION, EXPERTS, STATE, nemotron_fields, nemotron_kinds
from moe_engine.models.config_parsers.nemotron_h import MLP as LONE_MLP
from moe_engine.models.config_parsers.qwen4_exp import qwen4_exp_fields
from moe_engine.models.config_parsers.step import step_fields
from moe_engine.models.config_parsers.windowed import exaone_moe_fields, flint_fields, mellum_fields
from moe_engine.models.config_sections.fields import Fields, text_fields
from moe_engine.tuning.costs.form import KV_BYTES


def _nemotron_fields(fields: Fields) -> Fields:
    """Nemotron-H under the names of others; a layer is a mixer over tokens with the feed-forward after it, if any."""
    kinds, raw = nemotron_kinds(fields), dict(nemotron_fields(fields).raw)
    names = {STATE: "linear_attention", ATTENTION: "full_attention"}
    raw["layer_types"] = [names[kind] for kind in kinds if kind in names]
    raw["num_hidden_layers"] = len(raw["layer_types"])
    raw |= {"dense_layers": kinds.count(LONE_MLP), "moe_layers": kinds.count(EXPERTS), "mlp_matrices": 2}
    raw |= {
        "linear_num_key_heads": fields.integer("n_groups", 8),
        "linear_key_head_dim": raw.get("ssm_state_size", 128),
    }
    raw |= {"linear_num_value_heads": fields.integer("mamba_num_heads", 128)}
    raw |= {"linear_value_head_dim": fields.integer("mamba_head_dim", 64), "linear_gates": 1}
    raw["shared_expert_intermediate_size"] = fields.integer("moe_shared_expert_intermediate_size", 0, minimum=0)
    raw["routed_expert_hidden_size"] = fields.integer("moe_latent_size", None)
    if not raw["moe_layers"]:
        raw["n_routed_experts"] = None
    return Fields(raw, fields.source)


_COMPLETED = {
    "mimo_v2_flash": mimo_fields, "mimo_v2": mimo_fields, "gpt_oss": gpt_oss_fields, "kimi_linear": kimi_linear_fields,
    **dict.fromkeys(("bailing_moe", "bailing_moe_v2"), bailing_v2_fields),
    "bailing_hybrid": bailing_fields, "glm5_next_text": glm5_next_fields, "glm5_next": glm5_next_fields,
    "qwen4_exp_text": qwen4_exp_fields, "qwen4_exp": qwen4_exp_fields,
    "step3p5": step_fields, "step3p7": step_fields, "nemotron_h": _nemotron_fields,
    **dict.fromkeys(("lfm2", "lfm2_moe"), lfm2_fields),
    "longcat_flash": longcat_facts, "laguna": laguna_fields, "afmoe": afmoe_fields,
    "llama4_text": llama4_facts, "gemma2": gemma2_fields, "gemma3_text": gemma_fields, "gemma4_text": gemma4_fields,
    "olmo3": olmo3_fields, "exaone4": exaone4_fields, "exaone_moe": exaone_moe_fields,
    **dict.fromkeys(("cohere2", "cohere2_moe"), cohere2_fields),
    "flint": flint_fields, "mellum": mellum_fields,
    **dict.fromkeys(("granitemoehybrid", "granitemoeshared"), granite_facts),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), granite_swa_fields),
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), minimax_text_fields),
    "ernie4_5_moe": ernie_moe_fields, "hunyuan_v1_moe": hunyuan_moe_fields,
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3"), minimax_m3_mixture),
}  # fmt: skip
"""Families whose files may leave out the kinds of their layers, or name fields differently, by `model_type`."""

_HEADS = ("num_key_value_heads", "num_attention_heads")

CACHED_STATE_BYTES = 4
"""Bytes of a number in the state of a linear-attention layer: float32."""

GROUPED, LATENT, INDEXER, GATE, LINEAR, CONV, MLP, ROUTED = 6, 8, 5, 2, 6, 4, 3, 5
"""Kernels of a decode step in a layer, without messages, as `benchmarks.step_costs` counts those of this engine: GQA,
MLA, the indexer of sparse attention in addition to MLA, an output gate by a projection of its own, Gated DeltaNet, a
short convolution, dense layer or shared experts, routed experts with their router."""

ROTATED = 2
"""More kernels of lightning attention with norms and rotation of q and k, and norms of several groups of heads."""

BLOCK_INDEXER = 8
"""More kernels of block-sparse attention: index queries and keys, their norms, rotations and places, scores of blocks,
and the selection."""

STREAMS, ENTRIES, ENTRY_INDEXER = 1, 2, 7
"""More kernels of DeepSeek V4: residual streams with what attention to windows has in addition to MLA, compressed
entries, and their indexer."""


GATES = 4
"""More kernels before each part of a layer of Qwen3.8-Flash-Next: gates of the residual streams."""


@dataclass(frozen=True)
class AttentionFacts:
    """Equal attention layers.

    Attributes:
        layers: their number. sharded, replicated: weights of one layer that an attention group splits, or that each
            of its ranks has.
        kv_width: cached numbers of a token, of which `kv_heads` ranks hold different parts (1: all the same, MLA).
        decode_flops, prefill_flops: operations of a (query token, context token) pair over all heads.
        limit: context tokens that a query reads at most (window, or the top-k of sparse attention); 0: all.
        keeps: tokens whose KV stays cached; 0: all.
        index_flops, index_bytes: of the indexer that selects the tokens of sparse attention; of a token's index key.
        state_numbers: of a request, for layers without KV.
        kernels: of a decode step in one layer.
    """

    layers: int
    sharded: int
    replicated: int
    kernels: int
    kv_width: float = 0
    kv_heads: int = 1
    decode_flops: float = 0.0
    prefill_flops: float = 0.0
    limit: int = 0
    keeps: int = 0
    index_flops: float = 0.0
    index_bytes: float = 0
    state_numbers: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """A model in the terms of the cost files. `expert` is one routed expert of one layer; the other weights are of one
    layer of their kind, `head` of the whole model. `shared` includes the projections into and out of the routed
    experts' space, of `routed` channels."""

    name: str
    hidden: int
    vocab: int
    layers: int
    dense_layers: int
    dense: int
    shared: int
    expert: int
    routed: int
    num_experts: int
    top_k: int
    head: int
    attention: tuple[AttentionFacts, ...]
    stored_dtype: str
    num_heads: int
    mtp_layers: int = 0
    bare_layers: int = 0
    """Layers without a feed-forward (Nemotron-H)."""
    zero_experts: int = 0
    """The router chooses them in addition to `num_experts`. `top_k` are the other choices of a token, on average."""

    @property
    def key(self) -> str:
        """Names the model by its sizes, which survive renamed checkpoints: ``61x7168x256``."""
        return f"{self.layers}x{self.hidden}x{self.num_experts}"

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers - self.bare_layers

    def kernels(self, shared_slots: bool = False) -> int:
        """Number of kernels of a decode step in all layers.

        Args:
            shared_slots: those of the routed experts compute the shared ones too.
        """
        attention = sum(group.layers * group.kernels for group in self.attention)
        beside = MLP * (bool(self.shared) and not shared_slots)
        return attention + self.dense_layers * MLP + self.moe_layers * (ROUTED + beside)

    @property
    def num_parameters(self) -> int:
        """Weights of projections, experts and the head; without norms, biases and the embedding."""
        attention = sum(group.layers * (group.sharded + group.replicated) for group in self.attention)
        router = (self.num_experts + self.zero_experts) * self.hidden
        moe = self.moe_layers * (self.num_experts * self.expert + router + self.shared)
        return attention + self.dense_layers * self.dense + moe + self.head

    def kv_token_bytes(self, attn_tp: int, kv: str, *, windows: bool) -> float:
        """Bytes of KV and index keys per token on a rank of an attention group.

        Args:
            attn_tp: ranks of the group. kv: dtype of the KV cache.
            windows: with layers that keep the KV of their window only.
        """
        groups = (each for each in self.attention if windows or not each.keeps)
        size = KV_BYTES[kv]
        return sum(
            each.layers * (size * each.kv_width / min(attn_tp, each.kv_heads) + each.index_bytes) for each in groups
        )


def model_facts(raw: Mapping[str, Any], source: str = "config.json") -> ModelFacts:
    """From the fields of config.json.

    Raises:
        ConfigError: a field is missing or has another type.
    """
    fields = Fields(with_defaults(text_fields(raw)), source)
    if complete := _COMPLETED.get(str(fields.raw.get("model_type"))):
        fields = complete(fields)
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    experts = _first(fields, "n_routed_experts", "num_experts", "num_local_experts")
    top_k = _first(fields, "num_experts_per_tok", "experts_per_token", "top_k_experts") if experts else 0
    if experts and top_k > experts:
        fields.fail("num_experts_per_tok", f"is {top_k}, above the {experts} experts")
    own_width = _first(fields, "moe_intermediate_size")
    width = fields.integer("intermediate_size", own_width) if own_width else fields.integer("intermediate_size")
    latent = _first(fields, "routed_expert_hidden_size") if experts else 0
    matrices = fields.integer("mlp_matrices", 3)
    expert = matrices * (latent or hidden) * (own_width or width) if experts else 0
    shared = _first(fields, "shared_expert_intermediate_size")
    if not shared and experts:
        shared = _first(fields, "n_shared_experts", "num_shared_experts") * (own_width or width)
    dense = _dense_layers(fields, layers) if experts else layers
    if fields.has("mlp_matrices"):
        dense = fields.integer("dense_layers", minimum=0)
    bare = layers - dense - fields.integer("moe_layers", minimum=0) if fields.has("mlp_matrices") else 0
    return ModelFacts(
        name=_name(raw),
        hidden=hidden,
        vocab=(vocab := fields.integer("vocab_size")),
        layers=layers,
        dense_layers=dense,
        dense=matrices * hidden * width,
        shared=matrices * hidden * shared + 2 * hidden * latent,
        expert=expert,
        routed=latent or hidden,
        num_experts=experts,
        top_k=top_k,
        head=vocab * hidden,
        attention=tuple(_with_gates(fields, hidden, group) for group in _attention(fields, hidden, layers)),
        stored_dtype=stored_dtype(raw),
        num_heads=fields.integer("num_attention_heads"),
        mtp_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        bare_layers=bare,
        zero_experts=_first(fields, "zero_expert_num"),
    )


def _dense_layers(fields: Fields, layers: int) -> int:
    kinds = fields.raw.get("mlp_layer_types")
    if isinstance(kinds, list):
        return kinds[:layers].count("dense")
    if fields.has("decoder_sparse_step") or fields.has("mlp_only_layers"):
        return qwen_moe_layers(fields).count(False)
    return min(layers, fields.integer("first_k_dense_replace", 0, minimum=0))


def stored_dtype(raw: Mapping[str, Any]) -> str:
    """``bf16``, ``fp8``, ``fp4`` or ``int4``: how the routed experts (or all projections) are stored; 8-bit integers as
    ``fp8``."""
    quantization = raw.get("quantization_config") or text_fields(raw).get("quantization_config") or {}
    text = str(quantization).lower()
    if not quantization or "'quant_method': 'gguf'" in text:  # GPUs dequantize GGUF blocks while loading
        return "bf16"
    if "fp4" in text or raw.get("expert_dtype") == "fp4":  # nvfp4, mxfp4; DeepSeek V4
        return "fp4"
    if any(word in text for word in ("'bits': 4", "'num_bits': 4", "'load_in_4bit': true", "int4")):
        return "int4"
    if "bits': 8" not in text and ("awq" in text or "gptq" in text):
        return "int4"
    return "fp8"


def _name(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    return str(names[0] if isinstance(names, list) and names else raw.get("model_type", "model"))


def _first(fields: Fields, *names: str) -> int:
    """The first of these whole numbers that the file has, else 0."""
    return next((fields.integer(name, minimum=0) for name in names if fields.has(name)), 0)


def _attention(fields: Fields, hidden: int, layers: int) -> tuple[AttentionFacts, ...]:
    if fields.has("kv_lora_rank"):
        states = _kinds(fields, layers).count("linear_attention") if fields.has("linear_num_value_heads") else 0
        latent = (_latent(fields, hidden, layers - states),)
        if not states:
            return latent
        if fields.raw.get("linear_gates") == 0:
            return (*latent, replace(_linear(fields, hidden, states), kernels=LINEAR + ROTATED))
        return (*latent, _by_channel(fields, hidden, states))
    if fields.has("o_lora_rank"):
        return _compressed(fields, hidden, layers)
    kinds = _kinds(fields, layers)
    window = fields.integer("sliding_window", 0, minimum=0)
    full = grouped = sum(kind == "full_attention" for kind in kinds)
    sliding, blocks = kinds.count("sliding_attention"), kinds.count(SPARSE)
    linear = len(kinds) - full - sliding - blocks
    found = []
    if grouped:
        plain = _grouped(fields, hidden, grouped, 0)
        found.append(_over_pools(fields, hidden, plain) if fields.has("indexer_budget") else plain)
    if blocks:
        found.append(_block_sparse(fields, hidden, blocks))
    if sliding:
        own = (name if fields.has(name := f"swa_{plain}") else plain for plain in (*_HEADS, "head_dim"))
        found.append(_grouped(fields, hidden, sliding, window, *own))
    if linear:
        found.append(_linear(fields, hidden, linear))
    return tuple(found)


def _kinds(fields: Fields, layers: int) -> list[Any]:
    """`layer_types`, or the `full_attention_interval` of Qwen3-Next's published files."""
    kinds = fields.raw.get("layer_types")
    if kinds and (not isinstance(kinds, list) or len(kinds) != layers):
        fields.fail("layer_types", f"must be a list of {layers} names, one a layer")
    if kinds:
        return list(kinds)
    interval = fields.integer("full_attention_interval", 4) if fields.has("linear_num_value_heads") else 1
    return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]


def _latent(fields: Fields, hidden: int, layers: int) -> AttentionFacts:
    heads, latent = fields.integer("num_attention_heads"), fields.integer("kv_lora_rank")
    query, nope = fields.integer("q_lora_rank", None), fields.integer("qk_nope_head_dim")
    rope, value = fields.integer("qk_rope_head_dim", minimum=0), fields.integer("v_head_dim")
    limit, index = _first(fields, "index_topk"), _first(fields, "index_head_dim")
    index_heads, pool = _first(fields, "index_n_heads"), _first(fields, "index_kpool") or 1
    key, gates = nope + rope, int(pool > 1)  # pools of index keys have gates of their own, cached with the keys
    indexer = index * ((1 + gates) * hidden + index_heads * (query or hidden)) if limit else 0
    gate = heads * hidden if fields.has("gated_attention_proj_granularity_type") else 0
    gate = heads * value * hidden if fields.raw.get("mla_use_output_gate") else gate
    sharded = heads * key * (query or hidden) + latent * heads * (nope + value) + heads * value * hidden + gate
    return AttentionFacts(
        layers=layers,
        sharded=sharded,
        replicated=hidden * (latent + rope) + (hidden * query if query else 0) + indexer,
        kernels=LATENT + INDEXER * bool(limit) + GATE * bool(gate),
        kv_width=latent + rope,
        decode_flops=2.0 * heads * (2 * latent + rope),
        prefill_flops=2.0 * heads * (key + value),
        limit=limit,
        index_flops=2.0 * index * index_heads / pool if limit else 0.0,
        # FP8 with float32 scales; of pools bfloat16
        index_bytes=4 * index * gates or (index + 4 * -(-index // 128) if limit else 0),
    )


def _compressed(fields: Fields, hidden: int, layers: int) -> tuple[AttentionFacts, ...]:
    """DeepSeek V4: windows in every layer; and entries of several tokens, in numbers of a token."""
    config = compressed_attention(fields)
    heads, width, query = config.num_heads, config.head_dim, config.q_lora_rank
    output = config.output_rank * (heads * width + config.output_groups * hidden)
    window = AttentionFacts(
        layers=layers,
        sharded=query * heads * width + output,
        replicated=hidden * (query + width),
        kernels=LATENT + STREAMS,
        kv_width=width,
        decode_flops=4.0 * heads * width,
        prefill_flops=4.0 * heads * width,
        limit=config.window,
        keeps=config.window,
    )
    found = [window]
    for rate in sorted(set(config.rates) - {0}):
        layer = config.rates.index(rate)
        selects, index = config.selects(layer), config.index_width
        flops = 4.0 * heads * width / rate
        indexer = config.index_heads * (query * index + hidden) if selects else 0
        found.append(AttentionFacts(
            layers=config.rates.count(rate),
            sharded=0,
            replicated=hidden * sum(config.projected_widths(layer)) + indexer,
            kernels=ENTRIES + ENTRY_INDEXER * selects,
            kv_width=width / rate,
            decode_flops=flops,
            prefill_flops=flops,
            limit=config.top_k * rate if selects else 0,
            index_flops=2.0 * index * config.index_heads / rate if selects else 0.0,
            index_bytes=2 * index / rate if selects else 0,
        ))  # fmt: skip
    return tuple(found)


def _grouped(
    fields: Fields,
    hidden: int,
    layers: int,
    window: int,
    kv_heads: str = _HEADS[0],
    query_heads: str = _HEADS[1],
    head_dim: str = "head_dim",
) -> AttentionFacts:
    """kv_heads, query_heads, head_dim: names of the fields with the numbers of heads, and the channels of a key."""
    heads = fields.integer(query_heads)
    groups = fields.integer(kv_heads, heads)
    key = fields.integer(head_dim, hidden // heads)
    shared = groups * key * hidden if fields.raw.get("attention_k_eq_v") and not window else 0
    both = key + fields.integer("v_head_dim", key)
    gate = heads * key * hidden if fields.raw.get("attn_output_gate") else 0
    by_head = bool(fields.raw.get("use_head_wise_attn_gate"))
    flops = 2.0 * heads * both
    return AttentionFacts(
        layers=layers,
        sharded=hidden * both * (heads + groups) + gate + heads * hidden * by_head - shared,
        replicated=0,
        kernels=GROUPED + GATE * by_head,
        kv_width=groups * both,
        kv_heads=groups,
        decode_flops=flops,
        prefill_flops=flops,
        limit=window,
        keeps=window,
    )


def _block_sparse(fields: Fields, hidden: int, layers: int) -> AttentionFacts:
    """MiniMax-M3: an index head for each KV head selects blocks of the context."""
    plain, width = _grouped(fields, hidden, layers, 0), fields.integer("index_head_dim")
    heads = fields.integer("index_n_heads")
    return replace(
        plain,
        sharded=plain.sharded + hidden * heads * width,
        replicated=hidden * width,
        kernels=GROUPED + BLOCK_INDEXER,
        limit=fields.integer("index_block_size") * fields.integer("index_topk_blocks"),
        index_flops=2.0 * width * heads,
        index_bytes=2 * width,
    )


def _over_pools(fields: Fields, hidden: int, plain: AttentionFacts) -> AttentionFacts:
    """Qwen3.8-Flash-Next: an indexer with one key for each pool of tokens selects for all heads."""
    width, heads = fields.integer("indexer_head_dim"), fields.integer("indexer_n_heads")
    return replace(
        plain,
        replicated=hidden * (heads + 1) * width,
        kernels=plain.kernels + INDEXER,
        limit=fields.integer("indexer_budget"),
        index_flops=2.0 * width * heads / fields.integer("indexer_compress_ratio"),
        index_bytes=2 * width,
    )


def _with_gates(fields: Fields, hidden: int, plain: AttentionFacts) -> AttentionFacts:
    """With the gates of the residual streams of Qwen3.8-Flash-Next, of both parts of a layer."""
    if not fields.has("hc_lowrank"):
        return plain
    rank, count = fields.integer("hc_lowrank"), fields.integer("hc_count", 4)
    weights = 2 * count * hidden * (2 * rank + count)
    return replace(plain, replicated=plain.replicated + weights, kernels=plain.kernels + 2 * GATES)


def _linear(fields: Fields, hidden: int, layers: int) -> AttentionFacts:
    """Layers with a state of fixed size: key heads x key width, value heads x value width (Gated DeltaNet), or the last
    inputs of a convolution, in 16 bits (LFM2)."""
    if fields.has("conv_L_cache"):
        last = (fields.integer("conv_L_cache") - 1) * hidden // 2
        return AttentionFacts(layers, 4 * hidden * hidden, 0, CONV, state_numbers=last)
    if not fields.has("linear_num_value_heads"):
        raise ConfigError(f"{fields.source}: layer_types has layers that the planner does not know; remove them")
    keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
    heads, width = fields.integer("linear_num_value_heads"), fields.integer("linear_value_head_dim")
    values, gates = heads * width, fields.integer("linear_gates", 2, minimum=0)
    return AttentionFacts(
        layers=layers,
        sharded=hidden * (2 * keys + 2 * values + gates * heads) + values * hidden,
        replicated=0,
        kernels=LINEAR,
        state_numbers=values * fields.integer("linear_key_head_dim"),
    )


def _by_channel(fields: Fields, hidden: int, layers: int) -> AttentionFacts:
    """Kimi Delta Attention: `_linear` whose decays and output gates come from products of low rank, or each from a
    whole matrix, or (Kimi K3) only the decays from products of low rank."""
    plain, key = _linear(fields, hidden, layers), fields.integer("linear_key_head_dim")
    width = fields.integer("linear_num_key_heads") * key
    heads = fields.integer("linear_num_key_heads")
    if fields.raw.get("no_kda_lora"):
        return replace(plain, sharded=hidden * (6 * width + heads))
    if fields.raw.get("use_full_rank_gate"):
        sharded = hidden * (5 * width + heads) + width * key
        return replace(plain, sharded=sharded, replicated=hidden * key, kernels=LINEAR + 1)
    return replace(
        plain, sharded=hidden * (4 * width + heads) + 2 * width * key, replicated=2 * hidden * key, kernels=LINEAR + 2
    )
