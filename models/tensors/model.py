"""Tensors of a checkpoint, with names and shapes: the single source for sizes and the header check.

Legend: D hidden, H heads, N qk_nope, R rotary, V v_head, C kv_lora_rank, Q q_lora_rank, I widths, E experts.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from moe_engine.models.config import BlockSelection, GQAConfig, MLAConfig, ModelConfig
from moe_engine.models.config_sections.block import CONFIDENCE, MARKOV, BlockConfig
from moe_engine.models.config_sections.compressed import CompressedConfig, SharedEntriesConfig, StreamsConfig
from moe_engine.models.pooling import score_layers
from moe_engine.models.tensors.delta import state_tensors
from moe_engine.models.tensors.gqa import MLP_NORM, ROUTER_NORM, gqa_tensors, normed_experts_tensors
from moe_engine.models.tensors.mla import indexer_tensors, mla_tensors
from moe_engine.models.tensors.spec import Kind, TensorSpec
from moe_engine.models.tensors.spec import linear as _linear
from moe_engine.models.tensors.spec import norm as _norm
from moe_engine.models.tensors.stream import gate_tensors, ngram_tensors
from moe_engine.models.tensors.vision import AUDIO, POOLING_HEAD, PREFIX, vision_tensors

EMBEDDING = "model.embed_tokens.weight"
_LAYERS = "model.layers."
GATE_UP_BIAS, DOWN_BIAS = "experts.gate_up_proj_bias", "experts.down_proj_bias"
"""Biases of all routed experts, in the block: [E, 2I], gate and up alternating, and [E, D]."""
BIASES = (GATE_UP_BIAS, DOWN_BIAS)
HEAD_BIAS = "lm_head.bias"
LAYER_FACTOR = "layer_scalar"
_ROTARY = "rotary_emb.inv_freq"
_DECAYS = (".slope", ".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")
ROTARY_FACTORS = "model.rotary_emb.alpha"
"""See `RopeConfig.stored_factors`."""
_FIRST_SCORES = "model.layers.0.self_attention_res_"
LATENT_SCALES = (".self_attn.k_proj.k_scale", ".self_attn.k_scale", ".self_attn.kv_scale")
"""Ends of the names of a layer's scale of its latent, in MLA."""
KV_SCALES = (*LATENT_SCALES, ".self_attn.v_proj.v_scale", ".self_attn.v_scale")
"""Ends of the names of a layer's KV cache scales. Rows of `fp8_per_tensor` alone have no scales of their own."""
MINIMAX_M3 = ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM")
MINIMAX_TEXT = ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM")
QWEN3_5_MOE = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
QWEN4_EXP = ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM")
QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", *QWEN3_5_MOE)
GRANITE_MOE = tuple(f"GraniteMoe{kind}ForCausalLM" for kind in ("", "Shared", "Hybrid", "SWA"))
GEMMA4 = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")
EXAONE_MOE = ("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM")
MIMO_V2 = ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM")
LLAMA4 = ("Llama4ForConditionalGeneration", "Llama4ForCausalLM")
STEP = ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")
_MTP_ON_GQA = (
    "BailingMoeV2ForCausalLM", "Ernie4_5_MoeForCausalLM", "Glm4MoeForCausalLM", "HYV3ForCausalLM",
    "MiMoForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM", *QWEN3_5, *QWEN4_EXP, *MINIMAX_M3, *STEP,
)  # fmt: skip
"""Architectures on grouped-query attention whose checkpoints have MTP layers, with DeepSeek's names (`checkpoint_files`
renames those of ERNIE, Hy3, MiniMax-M3 and Qwen)."""
KIMI_LINEAR = ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration")
UNREAD_MTP = {
    **dict.fromkeys((*EXAONE_MOE, "MellumForCausalLM"), ("mtp.",)),
    "Glm5NextForConditionalGeneration": (),
    **dict.fromkeys(MIMO_V2, ("model.mtp.",)),
    "MistralLarge4ForConditionalGeneration": ("mtp_dspark.",),
}
"""By architecture: begins of the names of MTP layers that are not served."""
TABLES = (".engram.embed.weight", ".engram.embed.scale")
"""Tables of n-grams, which stay in their files."""
NGRAMS = ".ple.ple_embedding."
"""In the names of the tables of n-grams of Qwen3.8-Flash-Next, and of what they are computed by."""
_IMAGE_BIAS = ".gate.bias_vl"
MTP_INPUTS = (".eh_proj.weight", ".h_proj.weight")
"""Ends of the names of an MTP layer's projection of hidden states: DeepSeek V3's, DeepSeek V4's."""
_BLOCK_INPUT = ".main_proj.weight"
"""The same of the first of the layers that fill in blocks."""
MTP_HEAD = "shared_head.head"
"""The LM head of an MTP layer, in the layer."""
_EMBEDDING_COPY = ".embed_tokens.weight"
_HEAD_COPIES = (f".{MTP_HEAD}.weight", ".shared_head.weight")


def is_head(name: str) -> bool:
    """True for an LM head: the model's, or an MTP layer's own."""
    return name == "lm_head.weight" or name.endswith(f".{MTP_HEAD}.weight")


def mtp_copies(config: ModelConfig) -> tuple[str, ...]:
    """Ends of the names of an MTP layer's copies of embedding and head, which are the model's."""
    return (_EMBEDDING_COPY,) if config.mtp.own_heads else (_EMBEDDING_COPY, *_HEAD_COPIES)


def has_mtp_names(config: ModelConfig) -> bool:
    """True if MTP layers of the architecture are known."""
    return config.attention.kind == "mla" or config.architecture in _MTP_ON_GQA


@dataclass(frozen=True)
class ExpertNames:
    """Tensor names of a family's MoE block: of an expert's projections, and, relative to the block, of the router's
    weight, biases and table of experts by token id, the shared experts and their gate. `bias_rows`: the bias is stored
    as [1, E]."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate.weight"
    router_bias: str = "gate.e_score_correction_bias"
    router_table: str = "gate.tid2eid"
    router_image_bias: str = "gate.bias_vl"
    bias_rows: bool = False
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate.weight"


_W = ExpertNames("block_sparse_moe", "w1", "w3", "w2", router_bias="e_score_correction_bias")
_GATED = ExpertNames(shared="shared_expert")
_EXPERT_NAMES = {
    **dict.fromkeys(("MixtralForCausalLM", "MiniMaxM2ForCausalLM", "PhiMoEForCausalLM", "PhimoeForCausalLM"), _W),
    **dict.fromkeys((*MINIMAX_TEXT, *MINIMAX_M3), _W),
    **dict.fromkeys(KIMI_LINEAR, ExpertNames("block_sparse_moe", "w1", "w3", "w2")),
    "GptOssForCausalLM": ExpertNames(router="router.weight", router_bias="router.bias"),
    "Ernie4_5_MoeForCausalLM": ExpertNames(router_bias="moe_statics.e_score_correction_bias", bias_rows=True),
    "AfmoeForCausalLM": ExpertNames(router="router.gate.weight", router_bias="expert_bias"),
    **dict.fromkeys(GEMMA4, ExpertNames(shared="")),
    "LagunaForCausalLM": ExpertNames(router_bias="experts.e_score_correction_bias", shared="shared_expert"),
    "HunYuanMoEV1ForCausalLM": ExpertNames(router="gate.wg.weight", shared="shared_mlp"),
    "HYV3ForCausalLM": ExpertNames(router="router.gate.weight", router_bias="expert_bias", shared="shared_mlp"),
    **dict.fromkeys(GRANITE_MOE, ExpertNames("block_sparse_moe", router="router.weight", shared="shared_mlp")),
    **dict.fromkeys(EXAONE_MOE, ExpertNames(router_bias="e_score_correction_bias")),
    **dict.fromkeys(("FlintForCausalLM", "Qwen2MoeForCausalLM", "Qwen3NextForCausalLM"), _GATED),
    **dict.fromkeys((*QWEN3_5_MOE, *QWEN4_EXP), _GATED),
    **dict.fromkeys(LLAMA4, ExpertNames("feed_forward", router="router.weight", shared="shared_expert")),
    "LongcatFlashForCausalLM": ExpertNames(
        "moe", router="router.classifier.weight", router_bias="router.e_score_correction_bias"
    ),
}
"""By architecture; others use the default."""
ROUTERS = tuple(sorted({f".{names.router}" for names in (ExpertNames(), *_EXPERT_NAMES.values())}))
"""Ends of the names of the routers' weights."""


_SINKS = {**dict.fromkeys(MIMO_V2, "attention_sink_bias"), "FlintForCausalLM": "softmax_offset"}


def sinks_name(config: ModelConfig) -> str:
    """Name of an attention layer's sinks."""
    return _SINKS.get(config.architecture, "sinks")


def gate_name(config: ModelConfig) -> str:
    """Name of the projection of a GQA layer's output gate."""
    return "gate_proj" if config.architecture == "AfmoeForCausalLM" else "g_proj"


def expert_names(config: ModelConfig) -> ExpertNames:
    return _EXPERT_NAMES.get(config.architecture, ExpertNames())


def model_tensors(config: ModelConfig, include_mtp: bool = False) -> Iterator[TensorSpec]:
    """All tensors of a built-in architecture's model; optionally with its MTP layers."""
    table = (config.vocab_size, config.hidden_size)
    yield TensorSpec(EMBEDDING, table, Kind.PLAIN)
    yield from (spec.within("model") for spec in _input_norm(config, "norm", config.streams))
    if config.pooling is not None:
        yield from _score_head(config)
    elif not config.tie_word_embeddings:
        yield TensorSpec("lm_head.weight", table)
    if config.head_bias and config.pooling is None:
        yield TensorSpec(HEAD_BIAS, table[:1], Kind.PLAIN)
    if config.streams is not None and config.streams.weighs_head:
        yield from _streams(config.streams, config.hidden_size, "model.hc_head", config.streams.count)
    if config.vision is not None:
        for name, shape, wide in vision_tensors(config.vision):
            yield TensorSpec(name, shape, Kind.WIDE if wide else Kind.PLAIN)
    if config.residual_block:
        yield from _block_scores("model.output_attn_res", config.hidden_size)
    if config.rope.stored_factors:
        yield TensorSpec(ROTARY_FACTORS, (config.rope.width // 2,), Kind.WIDE)
    for i, is_moe in enumerate(config.moe_layers):
        yield from (spec.within(f"{_LAYERS}{i}") for spec in layer_tensors(config, is_moe, i))
    if include_mtp:
        for i in range(config.num_layers, config.num_layers + config.num_nextn_predict_layers):
            yield from (spec.within(f"{_LAYERS}{i}") for spec in draft_tensors(config, i))


def _score_head(config: ModelConfig) -> Iterator[TensorSpec]:
    for layer in score_layers(config):
        yield TensorSpec(f"{layer.name}.weight", (layer.rows, layer.columns), Kind.WIDE)
        if layer.bias:
            yield TensorSpec(f"{layer.name}.bias", (layer.rows,), Kind.WIDE)


def layer_tensors(config: ModelConfig, is_moe: bool, layer: int | None = None) -> Iterator[TensorSpec]:
    """Tensors of one decoder layer, with names relative to the layer. layer: its index; None: of an MTP layer."""
    streams = config.draft_streams if layer is None else config.streams
    first, *others = config.norm_names(is_moe)
    yield from _input_norm(config, first, streams)
    if layer is not None and config.lone_feed_forwards is not None:
        has_attention = config.has_attention(layer)
        yield from attention_tensors(config, layer) if has_attention else feed_forward_tensors(config, is_moe, layer)
        return
    yield from attention_tensors(config, layer)
    for name in others:
        yield from _input_norm(config, name, streams)
    yield from feed_forward_tensors(config, is_moe, layer)
    if config.layer_factors:
        yield TensorSpec(f"{LAYER_FACTOR}.weight", (1,), Kind.WIDE)
    if streams is not None and streams.rank:
        if streams.engram is not None and layer in streams.engram.layers:
            yield from (spec.within("ple") for spec in ngram_tensors(streams.engram, streams.count, config.hidden_size))
        return
    if streams is not None:
        for name in ("hc_attn", "hc_ffn"):
            yield from _streams(streams, config.hidden_size, name, (2 + streams.count) * streams.count)
    if streams is not None and streams.engram is not None and layer in streams.engram.layers:
        width = streams.engram.columns * streams.engram.width
        yield from _linear("engram.kv_proj", (streams.count + 1) * config.hidden_size, width)
        yield from (
            TensorSpec(f"engram.{name}", (streams.count, config.hidden_size), Kind.WIDE)
            for name in ("q_weight", "k_weight")
        )
    if config.residual_block:
        for name in ("self_attention_res", "mlp_res") if layer else ("mlp_res",):
            yield from _block_scores(name, config.hidden_size)


def _input_norm(config: ModelConfig, name: str, streams: StreamsConfig | None) -> Iterator[TensorSpec]:
    """What makes the input of a part of a layer, or of the head: a norm, or gates of the streams."""
    if streams is None or not streams.rank:
        yield _norm(name, config.hidden_size)
        if config.layer_norm and config.norm_bias:
            yield TensorSpec(f"{name}.bias", (config.hidden_size,), Kind.WIDE)
    else:
        yield from gate_tensors(streams, config.hidden_size, name)


def _block_scores(name: str, hidden: int) -> Iterator[TensorSpec]:
    """The weights of the scores of the residual's rows."""
    yield _norm(f"{name}_norm", hidden)
    yield TensorSpec(f"{name}_proj.weight", (1, hidden), Kind.WIDE)


def block_tensors(block: BlockConfig, hidden: int, vocab_size: int, draft_vocab: int = 0) -> Iterator[TensorSpec]:
    """Tensors of the Markov head; every rank has all of them. `draft_vocab`: tokens that it may draft; 0: all."""
    rank = block.markov_rank
    if not rank:
        return
    yield TensorSpec(f"{MARKOV}.markov_w1.weight", (vocab_size, rank), Kind.PLAIN)
    yield TensorSpec(f"{MARKOV}.markov_w2.weight", (draft_vocab or vocab_size, rank), Kind.PLAIN)
    extra = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
    if block.markov_head in extra:
        name, rows, columns = extra[block.markov_head]
        yield TensorSpec(f"{MARKOV}.{name}.weight", (rows, columns), Kind.PLAIN)
        yield TensorSpec(f"{MARKOV}.{name}.bias", (rows,), Kind.PLAIN)


def draft_tensors(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """Tensors of a draft layer of the model's checkpoint, which is `layer` among all."""
    own, hidden, streams = config.own_block, config.hidden_size, config.streams
    if own is None:
        yield from mtp_tensors(config)
        return
    assert streams is not None
    if layer == config.num_layers:
        yield TensorSpec("main_proj.weight", (hidden, len(own.tapped) * hidden))
        yield _norm("main_norm", hidden)
    if layer == config.num_layers + config.num_nextn_predict_layers - 1:
        yield _norm("shared_head.norm", hidden)
        if not streams.late:
            yield from _streams(streams, hidden, "shared_head.hc_head", streams.count)
        yield from block_tensors(own.block, hidden, config.vocab_size)
    yield from layer_tensors(config, config.is_mtp_moe)


def mtp_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Tensors of an MTP layer, the first one's, without its copies of embedding and head."""
    hidden, streams = config.hidden_size, config.draft_streams
    if config.mtp.own_heads:
        yield TensorSpec(f"{MTP_HEAD}.weight", (config.vocab_size, hidden))
    yield _norm("enorm", hidden)
    yield _norm("hnorm", hidden if streams is None else streams.normed * hidden)
    yield from (spec.within("shared_head") for spec in _input_norm(config, "norm", streams))
    if streams is None:
        yield TensorSpec("eh_proj.weight", (hidden, 2 * hidden))
    else:
        yield from (TensorSpec(f"{name}.weight", (hidden, hidden)) for name in ("e_proj", "h_proj"))
        if streams.weighs_head:
            yield from _streams(streams, hidden, "shared_head.hc_head", streams.count)
    yield from layer_tensors(config, config.is_mtp_moe)


def attention_tensors(config: ModelConfig, layer: int | None) -> Iterator[TensorSpec]:
    """Projections, biases and inner norms of one attention layer."""
    hidden = config.hidden_size
    if (own := config.delta or config.short_conv) is not None and layer in config.state_layers:
        yield from state_tensors(own, hidden)
        return
    attention = config.attention_of(config.num_layers if layer is None else layer)
    if isinstance(attention, CompressedConfig):
        yield from (spec.within("self_attn") for spec in _compressed(attention, hidden, layer))
        return
    if isinstance(attention, MLAConfig):
        found = mla_tensors(attention, hidden, layer)
    else:
        found = gqa_tensors(attention, hidden, sinks_name(config), gate_name(config))
    yield from (spec.within("self_attn") for spec in found)
    if layer in attention.shared_layers:
        return
    if isinstance(attention, MLAConfig) and attention.indexer is not None:
        yield from (spec.within("self_attn.indexer") for spec in indexer_tensors(attention, hidden))
    if isinstance(attention, GQAConfig) and attention.indexer is not None:
        heads, width = attention.indexer.num_heads, attention.index_width
        yield from _linear("self_attn.indexer.index_qk_proj", (heads + 1) * width, hidden)
        yield from (_norm(f"self_attn.indexer.{name}_layernorm", width) for name in "qk")
    if isinstance(attention, GQAConfig) and attention.blocks is not None:
        yield from (spec.within("self_attn") for spec in _block_indexer(attention, attention.blocks, hidden))


def _block_indexer(a: GQAConfig, blocks: BlockSelection, hidden: int) -> Iterator[TensorSpec]:
    for name, heads in (("q", a.num_kv_heads), ("k", 1)):
        yield from _linear(f"index_{name}_proj", heads * blocks.width, hidden)
        yield _norm(f"index_{name}_norm", blocks.width)


def has_state(config: ModelConfig, name: str) -> bool:
    """True for a tensor of the part of a layer that keeps a state: of a delta net, or of a short convolution."""
    own = config.delta or config.short_conv
    return own is not None and layer_index(name) in config.state_layers and f".{own.block}." in name


def _compressed(a: CompressedConfig, hidden: int, layer: int | None) -> Iterator[TensorSpec]:
    query = a.num_heads * a.head_dim
    yield from _linear("q_a_proj", a.q_lora_rank, hidden)
    yield _norm("q_a_layernorm", a.q_lora_rank)
    yield from _linear("q_b_proj", query, a.q_lora_rank)
    yield from _linear("kv_proj", a.head_dim, hidden)
    yield _norm("kv_layernorm", a.head_dim)
    yield TensorSpec("sinks", (a.num_heads,), Kind.WIDE)
    yield from _linear("o_a_proj", a.output_groups * a.output_rank, query // a.output_groups)
    yield from _linear("o_b_proj", hidden, a.output_groups * a.output_rank)
    if layer is None or not a.rate(layer):
        return
    if isinstance(a, SharedEntriesConfig):
        yield from _shared_entries(a, hidden, layer)
        return
    prefixes = ("compressor", "indexer.compressor")
    for prefix, width in zip(prefixes, a.entry_widths(layer)):
        series = 2 * width if a.selects(layer) else width
        yield from _linear(f"{prefix}.kv_proj", series, hidden)
        yield from _linear(f"{prefix}.gate_proj", series, hidden)
        yield TensorSpec(f"{prefix}.position_bias", (a.rate(layer), series), Kind.WIDE)
        yield _norm(f"{prefix}.norm", width)
    if a.selects(layer):
        yield from _linear("indexer.q_b_proj", a.index_heads * a.index_width, a.q_lora_rank)
        yield TensorSpec("indexer.weights_proj.weight", (a.index_heads, hidden), Kind.WIDE)


def _shared_entries(a: SharedEntriesConfig, hidden: int, layer: int) -> Iterator[TensorSpec]:
    if a.writes(layer):
        for name in ("kv_proj", "gate_proj") if a.rate(layer) > 1 else ("kv_proj",):
            yield TensorSpec(f"compressor.{name}.weight", (a.head_dim, hidden))
        yield _norm("compressor.norm", a.head_dim)
        yield TensorSpec("indexer.wk.weight", (a.index_width, a.head_dim))
        yield _norm("indexer.k_norm", a.index_width)
    if a.selects(layer):
        yield from _linear("indexer.q_b_proj", a.index_heads * a.index_width, a.q_lora_rank)
        yield TensorSpec("indexer.weights_proj.weight", (a.index_heads, hidden), Kind.WIDE)


def _streams(streams: StreamsConfig, hidden: int, name: str, outputs: int) -> Iterator[TensorSpec]:
    """The weights of a part's mixing of the residual streams. outputs: numbers by token."""
    yield TensorSpec(f"{name}.fn", (outputs, streams.count * hidden), Kind.WIDE)
    yield TensorSpec(f"{name}.base", (outputs,), Kind.WIDE)
    yield TensorSpec(f"{name}.scale", (1 if outputs == streams.count else 3,), Kind.WIDE)


def feed_forward_tensors(config: ModelConfig, is_moe: bool, layer: int | None = None) -> Iterator[TensorSpec]:
    """The dense MLP of a layer, or its router, experts and shared expert. layer: as in `layer_tensors`."""
    hidden, moe = config.hidden_size, config.moe_of(config.num_layers if layer is None else layer)
    if not is_moe or moe is None or config.shortcut:
        yield from _mlp("mlp", hidden, config.intermediate_size, config.mlp_bias, not config.dense_activation.squared)
    if not is_moe or moe is None:
        return
    names = expert_names(config)
    yield TensorSpec(f"{names.block}.{names.router}", (moe.num_choices, hidden), Kind.WIDE)
    if layer is not None and moe.hashes(layer):
        yield TensorSpec(f"{names.block}.{names.router_table}", (config.vocab_size, moe.top_k), Kind.INDEX)
    elif moe.has_bias:
        shape = (1, moe.num_choices) if names.bias_rows else (moe.num_choices,)
        yield TensorSpec(f"{names.block}.{names.router_bias}", shape, Kind.WIDE)
    if layer is not None and config.routes_images(layer):
        yield TensorSpec(f"{names.block}.{names.router_image_bias}", (moe.num_experts,), Kind.WIDE)
    inner = config.routed_size
    for name, shape in (
        (names.gate, (moe.width, inner)),
        (names.up, (moe.width, inner)),
        (names.down, (inner, moe.width)),
    )[moe.squared :]:
        yield TensorSpec(f"{names.block}.experts.*.{name}.weight", shape, copies=moe.num_experts)
    if moe.biased:
        yield TensorSpec(f"{names.block}.{GATE_UP_BIAS}", (moe.num_experts, 2 * moe.width), Kind.WIDE)
        yield TensorSpec(f"{names.block}.{DOWN_BIAS}", (moe.num_experts, hidden), Kind.WIDE)
    if moe.latent:
        yield from _linear(f"{names.block}.routed_expert_down_proj", moe.latent, hidden)
        yield from _linear(f"{names.block}.routed_expert_up_proj", hidden, moe.latent)
        if moe.latent_norm:
            yield _norm(f"{names.block}.routed_expert_norm", moe.latent)
    if moe.shared_width:
        yield from _mlp(f"{names.block}.{names.shared}".rstrip("."), hidden, moe.shared_width, gated=not moe.squared)
        if moe.shared_gate:
            yield TensorSpec(f"{names.block}.{names.shared_gate}", (1, hidden), Kind.WIDE)
    if moe.normed:
        yield _norm(MLP_NORM, hidden)
        yield from (spec.within(names.block) for spec in normed_experts_tensors(moe.num_experts, hidden))


def _mlp(prefix: str, hidden: int, width: int, bias: bool = False, gated: bool = True) -> Iterator[TensorSpec]:
    parts = (("gate_proj", width, hidden), ("up_proj", width, hidden), ("down_proj", hidden, width))
    for name, rows, cols in parts if gated else parts[1:]:
        yield from _linear(f"{prefix}.{name}", rows, cols, bias)


def added(config: ModelConfig, name: str) -> float:
    """What is added to a stored tensor before it is used (`ModelConfig.norm_plus`)."""
    is_norm = name.endswith("norm.weight") or ".ple.norm_" in name
    is_norm &= ".linear_attn." not in name and not name.startswith(PREFIX)
    return config.norm_plus if is_norm else 0.0


def factor(config: ModelConfig, name: str) -> float:
    """What a stored tensor is multiplied by before it is used (`MLAConfig.latent_factor`)."""
    a = config.attention
    if name.endswith(f".{ROUTER_NORM}.weight"):
        return config.hidden_size**-0.5
    return a.latent_factor if isinstance(a, MLAConfig) and name.endswith(".kv_a_layernorm.weight") else 1.0


# -- tensors that are not required


def names_outside_model(config: ModelConfig, names: Collection[str]) -> set[str]:
    """Checkpoint tensors that no layer of the model needs.

    Rotary frequencies, constant decays; a head that is tied to the embedding, or of a pooled model; MTP layers, which
    have an index >= num_hidden_layers and one of `MTP_INPUTS` (another layer there is missing from config.json's
    count); the layers that an override of num_hidden_layers cuts off; a vision tower, if it is not loaded; the pooling
    head of a tower; audio; scales of the KV cache; scores of the residual's rows before the first layer, where there is
    one row; projections of zero experts, which transformers saves.
    """
    unread = {i for i in mtp_layers(names) if i >= config.num_layers} | set(
        range(config.num_layers, config.stored_layers)
    )
    no_head = config.tie_word_embeddings or config.pooling is not None
    unused = ("lm_head.",) * no_head + (PREFIX,) * (config.vision is None) + UNREAD_MTP.get(config.architecture, ())
    unused += (*AUDIO, POOLING_HEAD) + (_FIRST_SCORES,) * (config.residual_block > 0)
    ends = (_ROTARY, *_DECAYS, *TABLES, *KV_SCALES) + (_IMAGE_BIAS,) * (not config.routes_images())
    found = {name for name in names if name.endswith(ends) or name.startswith(unused) or NGRAMS in name}
    if config.moe is not None and config.moe.num_zero:
        found |= {name for name in names if _expert(name) >= config.moe.num_experts}
    return found | {name for name in names if layer_index(name) in unread}


def table_names(names: Collection[str]) -> set[str]:
    """Tensors of tables of n-grams, which layers map instead of loading them."""
    return {name for name in names if name.endswith(TABLES) or NGRAMS in name}


def names_outside_mtp(config: ModelConfig, names: Collection[str]) -> set[str]:
    """Checkpoint tensors that no MTP layer needs: the model's, and copies of embedding and head."""
    mtp = range(config.num_layers, config.num_layers + config.num_nextn_predict_layers)
    return {name for name in names if layer_index(name) not in mtp or name.endswith(unread_in_mtp(config))}


def unread_in_mtp(config: ModelConfig) -> tuple[str, ...]:
    """Ends of the names of tensors of an MTP layer that it does not need."""
    return (_ROTARY, _IMAGE_BIAS, *mtp_copies(config), *KV_SCALES, *CONFIDENCE)


def mtp_layers(names: Collection[str]) -> set[int]:
    """Indices of the MTP layers among the layers with tensors of these names; DSpark layers are those from the first
    one on, which projects the model's hidden states."""
    found = {layer_index(name) for name in names if name.endswith(MTP_INPUTS)}
    first = min((layer_index(name) for name in names if name.endswith(_BLOCK_INPUT)), default=None)
    return found if first is None else found | {i for i in map(layer_index, names) if i >= first}


def layer_index(name: str) -> int:
    """``model.layers.3.mlp...`` -> 3; -1 for tensors of no layer."""
    if not name.startswith(_LAYERS):
        return -1
    part = name[len(_LAYERS) :].partition(".")[0]
    return int(part) if part.isdigit() else -1


def _expert(name: str) -> int:
    """``model.layers.3.moe.experts.7.up_proj.weight`` -> 7; -1 for tensors of no expert."""
    part = name.partition(".experts.")[2].partition(".")[0]
    return int(part) if part.isdigit() else -1
