"""Model config: one frozen dataclass for all families, created by `config_file`. Imports no torch.

Legend: D hidden, H query heads, G KV heads, Dh head width, N qk_nope, R rotary width, V v_head, C kv_lora_rank,
Q q_lora_rank, E experts, K experts per token, I expert width, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.kernels.gate_form import SILU, GatedActivation
from moe_engine.kernels.kv_format import formats as kv_format
from moe_engine.models.config_sections.block import OwnBlock
from moe_engine.models.config_sections.compressed import CompressedConfig, KeptRows, StreamsConfig
from moe_engine.models.config_sections.mla import IndexerConfig as IndexerConfig
from moe_engine.models.config_sections.mla import MLAConfig as MLAConfig
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.mtp import DEEPSEEK, MTPForm
from moe_engine.models.config_sections.pooling import PoolingConfig
from moe_engine.models.config_sections.residual import ResidualScales, ResultNorms
from moe_engine.models.config_sections.rope import RopeConfig
from moe_engine.models.config_sections.state import DeltaConfig, ShortConvConfig, StateGroup
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import WeightFormat


@dataclass(frozen=True)
class BlockSelection:
    """Block-sparse attention (MiniMax-M3): an indexer with a head of `width` channels for each KV head selects blocks
    of the context by `rule`. `dense_layers` have no indexer and see all positions."""

    rule: BlockRule
    width: int
    dense_layers: tuple[int, ...] = ()

    def key_width(self, kv_dtype: str) -> int:
        """Elements of an index key in the cache: bytes of bfloat16 with FP8 rows."""
        return 2 * self.width if kv_format.is_fp8(kv_dtype) else self.width


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention. `qk_norm`: q and k are normed before the rotation, each head (``head``, Qwen3) or all
    heads together (``projection``, MiniMax-M2), or each head after the rotation (``rotated``, Hunyuan; ``unweighted``:
    without weights, Llama 4). `sinks`: each head has a logit without a value (gpt-oss). `output_gate`: q_proj has a
    gate after each head's query, whose sigmoid multiplies the head's result (Qwen3-Next). `v_head_dim`: channels of a
    value (0: as of a key). `value_scale`: factor of values (MiMo-V2-Flash). `blocks`: query tokens see selected blocks.
    `indexer`: they see selected pools of tokens, all heads the same (Qwen3.8-Flash-Next); `index_width`: channels of
    its key, which is cached with each token's. `gate_width`: numbers that a projection of its own gives, whose
    sigmoid multiplies a head's result: one (Step 3.5). `gate_softplus`: softplus instead of the sigmoid (Laguna).
    `qk_eps`: epsilon of the norms of q and k; 0: the model's. `value_norm`: each head's value is normed, without
    weights; `shared_values`: values are the keys before norm and rotation (Gemma 4). `score_cap`: scores are
    cap * tanh(score / cap) (Gemma 2); 0: as they are.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = ""
    sinks: bool = False
    output_gate: bool = False
    v_head_dim: int = 0
    value_scale: float = 1.0
    blocks: BlockSelection | None = None
    index_width: int = 0
    indexer: IndexerConfig | None = None
    gate_width: int = 0
    gate_softplus: bool = False
    qk_eps: float = 0.0
    value_norm: bool = False
    shared_values: bool = False
    score_cap: float = 0.0

    kind = "gqa"

    @property
    def pool(self) -> int:
        """See `IndexerConfig`."""
        return 1 if self.indexer is None else self.indexer.pool

    @property
    def value_width(self) -> int:
        """Channels of a value."""
        return self.v_head_dim or self.head_dim

    @property
    def cache_width(self) -> int:
        """Channels cached per token and layer: keys and values of G heads."""
        return self.num_kv_heads * (self.head_dim + self.value_width)

    def kv_parts(self, kv_dtype: str) -> tuple[tuple[int, ...], ...]:
        """Shapes of a token's entries in a layer's cache tensors, in `kv_format`'s layout."""
        widths = (kv_format.head_width(kv_dtype, width) for width in (self.head_dim, self.value_width))
        parts = tuple((self.num_kv_heads, width) for width in widths)
        if self.indexer is not None:  # the last token of a whole pool has the pool's key
            return *parts, (1, self.index_width)
        return parts if self.blocks is None else (*parts, (1, self.blocks.key_width(kv_dtype)))

    @property
    def shared_layers(self) -> tuple[int, ...]:
        """Layers without index keys, the last of `kv_parts`."""
        return () if self.blocks is None else self.blocks.dense_layers


@dataclass(frozen=True)
class CacheGroup:
    """Layers with the same use of their KV cache. `window`: positions that a query token sees, or None: all."""

    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True)
class OtherLayers:
    """Layers whose attention and rotary embedding are not those of the model's other layers: all layers with a window
    (MiMo-V2-Flash), or without entries (DeepSeek V4)."""

    layers: tuple[int, ...]
    attention: GQAConfig | CompressedConfig
    rope: RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """A model of any supported family. Created by `load_model_config`; `moe_layers[i]` is True if layer i is MoE."""

    source: str
    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Max sequence length, scaling of the rotary embedding included (`parse_context_length`)."""
    eos_token_ids: tuple[int, ...]
    attention: MLAConfig | GQAConfig | CompressedConfig
    rope: RopeConfig
    moe: MoEConfig | None
    moe_layers: tuple[bool, ...]
    checkpoint_dtype: str
    weight_format: WeightFormat = PLAIN
    mlp_bias: bool = False
    num_nextn_predict_layers: int = 0
    own_block: OwnBlock | None = None
    """The checkpoint's draft layers fill in blocks (DSpark), and are no MTP layers."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer, see `CacheGroup.window`; (): no layer has one."""
    other_layers: OtherLayers | None = None
    """The layers to which `attention` and `rope` do not apply."""
    state_groups: tuple[StateGroup, ...] = ()
    """Layers with a state for each request. All other layers have KV and belong to `cache_groups`."""
    delta: DeltaConfig | None = None
    """Config of the layers with a state, if they are gated delta nets."""
    norm_plus: float = 0.0
    """Added to the stored weights of norms, except those of gated delta nets (Qwen3-Next: 1)."""
    file_layers: int | None = None
    """Number of layers in config.json, if overridden (--json-model-override-args)."""
    pooling: PoolingConfig | None = None
    """Pooling of a model that serves vectors; None for text generation."""
    streams: StreamsConfig | None = None
    """Streams of the residual; None: one tensor to which every layer adds."""
    residual_block: int = 0
    """Layers of a block with a sum of its own; layers read attention over these sums (Kimi K3). 0: no blocks."""
    vision: VisionConfig | None = None
    """The vision tower; None: text alone."""
    latent_scales: tuple[float, ...] = ()
    """Scale of each layer's latent in a cache of `fp8_per_tensor`, MTP layers last; (): all are 1."""
    raw: Mapping[str, Any] | None = None
    lone_feed_forwards: tuple[int, ...] | None = None
    """The layers that are a feed-forward alone, if others are attention or a state alone (Nemotron-H); None: each layer
    has both."""
    activation: GatedActivation = SILU
    """Activation of the MLPs of a model without experts."""
    shortcut: bool = False
    """Experts run in parallel to the dense layers: layers are pairs, and the experts of a pair read the input of the
    first layer's MLP and are added to the result of the second's (LongCat-Flash)."""
    result_norms: ResultNorms | None = None
    """None: results of attention and feed-forward are added to the residual as they are."""
    embed_scale: float = 1.0
    """Factor of embeddings (Trinity, Gemma, Granite)."""
    logit_cap: float = 0.0
    """Logits are cap * tanh(logits / cap) (Mistral Large 4); 0: as they are."""
    mtp: MTPForm = DEEPSEEK
    """MTP layers, where they are not as DeepSeek's."""
    layer_norm: bool = False
    """Norms of the residual are LayerNorms (Phi-3.5-MoE)."""
    norm_bias: bool = True
    """LayerNorms have biases; without them: Cohere 2."""
    parallel: bool = False
    """Attention and feed-forward read the same norm, and both results are added to the residual (Cohere 2)."""
    head_bias: bool = False
    """The LM head has a bias (Phi-3.5-MoE)."""
    residual_scales: ResidualScales | None = None
    """None: norms leave the residual as it is."""
    rounds_scale: bool = False
    """`embed_scale` is rounded to the dtype of activations (Gemma)."""
    residual_scale: float = 1.0
    """The published model's residual is this times the one here (Granite)."""
    logit_scale: float = 1.0
    """Factor of logits (Granite, Cohere 2)."""
    layer_factors: bool = False
    """After each layer the residual is multiplied by a factor of the layer (Gemma 4), with `result_norms`."""
    short_conv: ShortConvConfig | None = None
    """Config of the layers with a state, if they are short convolutions (LFM2)."""

    @cached_property
    def known_sizes(self) -> dict[Any, Any]:
        """Sums over tensors, parts of the model and facts of all layers that were computed before, by their arguments
        (`models.sizes`, `models.needs`): a plan resolves hundreds of launches of a model."""
        return {}

    @property
    def context_length(self) -> int:
        """Max sequence length."""
        return self.max_position_embeddings

    @property
    def longest_context(self) -> int:
        """The longest sequences that --context-length may set: all positions that the rotary embedding reaches."""
        return max(self.context_length, self.rope.max_position)

    def attention_of(self, layer: int) -> MLAConfig | GQAConfig | CompressedConfig:
        """The layer's attention. Draft layers come after the model's."""
        other = self.other_layers
        return self.attention if other is None or self._like(layer) not in other.layers else other.attention

    def rope_of(self, layer: int) -> RopeConfig:
        """The layer's rotary embedding."""
        if self.delta is not None and self.delta.rope is not None and layer in self.state_layers:
            return self.delta.rope
        other = self.other_layers
        return self.rope if other is None or self._like(layer) not in other.layers else other.rope

    def window_of(self, layer: int) -> int | None:
        """The layer's window; None: it sees all positions."""
        if not self.windows or (layer >= self.num_layers and self.mtp.like is None):
            return None
        return self.windows[self._like(layer)]

    def _like(self, layer: int) -> int:
        """The layer whose attention a layer has: of MTP layers one of the model's, if they are as its layers are."""
        return layer if layer < self.num_layers or self.mtp.like is None else self.mtp.like

    def moe_of(self, layer: int) -> MoEConfig | None:
        """The layer's experts; those of draft layers may be fewer."""
        own, moe = self.own_block, self.moe
        if own is None or moe is None or not own.num_experts or layer < self.num_layers:
            return moe
        return replace(moe, num_experts=own.num_experts, top_k=own.top_k)

    def routes_images(self, layer: int = 0) -> bool:
        """True if the layer's router has a bias of its own for image tokens; draft layers see none."""
        return self.vision is not None and self.moe is not None and self.moe.image_bias and layer < self.num_layers

    @property
    def attentions(self) -> tuple[MLAConfig | GQAConfig | CompressedConfig, ...]:
        """The attention of each kind of layers."""
        return (self.attention, *(() if self.other_layers is None else (self.other_layers.attention,)))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of all layers, each once."""
        others = [part.rope for part in (self.other_layers, self.delta) if part is not None and part.rope is not None]
        return tuple(dict.fromkeys((self.rope, *others)))

    @cached_property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers with KV by the kind of their cache; layers that see all positions come first. Layers with entries
        are in two groups: entries are seen from all positions."""
        if isinstance(self.attention, CompressedConfig):
            with_entries = tuple(i for i in range(self.num_layers) if self.attention.rate(i))
            own = CacheGroup(tuple(range(self.num_layers)), self.attention.window)
            return (CacheGroup(with_entries), own) if with_entries else (own,)
        layers = self.kv_layers
        if not self.windows:
            return (CacheGroup(layers),)
        kinds = sorted({self.windows[i] for i in layers}, key=lambda window: (window is not None, window or 0))
        return tuple(CacheGroup(tuple(i for i in layers if self.windows[i] == kind), kind) for kind in kinds)

    @property
    def planned_windows(self) -> tuple[int | None, ...]:
        """Windows of the groups whose queries are planned one by one; with entries attention is planned as a whole."""
        first, *others = (group.window for group in self.cache_groups)
        return (first,) if isinstance(self.attention, CompressedConfig) else (first, *others)

    @cached_property
    def state_layers(self) -> frozenset[int]:
        """The layers with a state for each request, which have no KV."""
        return frozenset(layer for group in self.state_groups for layer in group.layers)

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with attention: those without a state, except feed-forwards alone."""
        others = self.state_layers.union(self.lone_feed_forwards or ())
        return tuple(i for i in range(self.num_layers) if i not in others)

    def has_attention(self, layer: int) -> bool:
        """Whether the layer has attention or a state."""
        return layer not in (self.lone_feed_forwards or ())

    def feed_forward_of(self, layer: int) -> int | None:
        """The layer whose feed-forward follows a layer's attention or state: itself, or a feed-forward alone; None: the
        next layer's attention or state does."""
        lone = self.lone_feed_forwards
        if lone is None or layer >= self.num_layers:
            return layer
        return layer + 1 if layer + 1 in lone and layer + 1 < self.num_layers else None

    @cached_property
    def blocks(self) -> tuple[tuple[int, int | None], ...]:
        """Each layer with attention or a state, and the layer of the feed-forward that follows it."""
        layers = (i for i in range(self.num_layers) if self.has_attention(i))
        return tuple((i, self.feed_forward_of(i)) for i in layers)

    def norm_names(self, is_moe: bool) -> tuple[str, ...]:
        """Names of a layer's norms of D channels; the first of a layer without a norm of results is its input's."""
        if self.result_norms is None:
            return ("input_layernorm",) if self.parallel else ("input_layernorm", "post_attention_layernorm")
        *names, of_feed_forward, of_experts_only = self.result_norms
        return tuple(filter(None, (*names, of_feed_forward if is_moe or not of_experts_only else "")))

    def norms_result(self, layer: int) -> bool:
        """Whether the result of the layer's feed-forward is normed."""
        own = self.result_norms
        return own is not None and (self.moe_layers[layer] or not own.of_experts_only)

    @property
    def has_dense(self) -> bool:
        """Whether a layer has an MLP and no experts."""
        return any(layer is not None and not self.moe_layers[layer] for _, layer in self.blocks)

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """The layers with a window."""
        return tuple(i for i, own in enumerate(self.windows) if own is not None)

    @property
    def windowed_drafts(self) -> tuple[int, ...]:
        """The MTP layers with a window."""
        layers = range(self.num_layers, self.num_layers + self.num_nextn_predict_layers)
        return tuple(i for i in layers if self.window_of(i) is not None)

    @property
    def longest_window(self) -> int:
        """The longest window of a layer; 0 without windows."""
        return max((own for own in self.windows if own is not None), default=0)

    @cached_property
    def page_multiple(self) -> int:
        """Page sizes are multiples of it: an entry, or pool of index keys, and its tokens are in one page."""
        rates = (self.entry_parts(layer)[0] for layer in range(self.num_layers))
        pool = 1 if isinstance(self.attention, CompressedConfig) else self.attention.pool
        return math.lcm(pool, *(rate for rate in rates if rate))

    def latent_scale(self, layer: int) -> float:
        """The layer's value of `latent_scales`."""
        return self.latent_scales[layer] if layer < len(self.latent_scales) else 1.0

    @property
    def keeps_windows(self) -> bool:
        """Whether layers with a window differ from others also for requests that do not exceed it."""
        return self.other_layers is not None or isinstance(self.attention, CompressedConfig)

    def within(self, context_len: int) -> ModelConfig:
        """The model for requests of at most `context_len` tokens: windows that they cannot exceed are left out, unless
        it `keeps_windows`. A chunk that they cannot exceed is a sliding window."""
        kept = self.keeps_windows
        windows = tuple(None if own is None or (own >= context_len and not kept) else own for own in self.windows)
        windows = tuple(own if own is None or own < context_len else int(own) for own in windows)  # one chunk
        same = all(new is own for new, own in zip(windows, self.windows))  # a chunk equals a window of its size
        model = self if same else replace(self, windows=windows if any(windows) else ())
        if (rope := self.rope.within(context_len)) != self.rope:
            model = replace(model, rope=rope)
        return model if context_len <= self.context_length else replace(model, max_position_embeddings=context_len)

    @property
    def dense_activation(self) -> GatedActivation:
        """Activation of dense layers."""
        return self.activation if self.moe is None else self.moe.of_all or GatedActivation(self.moe.dense_limit)

    @property
    def residual_rows(self) -> int:
        """Rows of a token's residual with blocks: the embedding, and the sum of each block."""
        return 1 + -(-self.num_layers // self.residual_block)

    @property
    def routed_size(self) -> int:
        """Channels of the routed experts' input and result."""
        return (self.moe is not None and self.moe.latent) or self.hidden_size

    @property
    def draft_streams(self) -> StreamsConfig | None:
        """Residual streams of MTP layers, which read those of the model. None: MTP layers have one residual and read
        the result of the final norm."""
        return None if self.streams is None or self.streams.mean_head else self.streams

    @property
    def drafts_read_residual(self) -> bool:
        """Whether MTP layers read the residual after the last layer, not the result of the final norm."""
        return self.mtp.reads_residual or self.draft_streams is not None

    @property
    def draft_state_width(self) -> int:
        """Numbers of a token's hidden state that MTP layers read: one residual, or all streams."""
        return self.hidden_size * (1 if self.draft_streams is None else self.draft_streams.count)

    @property
    def stored_layers(self) -> int:
        """Layers in the checkpoint, without MTP layers."""
        return self.num_layers if self.file_layers is None else self.file_layers

    @property
    def is_moe(self) -> bool:
        return any(self.moe_layers)

    @property
    def is_mtp_moe(self) -> bool:
        """Whether MTP layers have experts."""
        return self.is_moe and not self.mtp.dense

    def kv_parts(self, layer: int, kv_dtype: str) -> tuple[tuple[int, ...], ...]:
        """Shapes of a token's entries in the layer's cache tensors; () for a layer with a state, or without
        entries of its own."""
        if layer in self.state_layers or not self.has_attention(layer):
            return ()
        has_ids = layer == 0 and self.streams is not None and self.streams.ngram > 0
        ids = ((2,),) if has_ids else ()  # bits of the token's id
        attention = self.attention_of(layer)
        parts = (*attention.kv_parts(kv_dtype), *ids)
        parts = parts[:-1] if layer in attention.shared_layers else parts
        return parts[1:] if isinstance(attention, MLAConfig) and attention.source_of(layer) != layer else parts

    def entry_parts(self, layer: int) -> tuple[int, tuple[int, ...]]:
        """Tokens of an entry in the layer's cache (0: it has none), and the channels of its tensors."""
        attention = self.attention_of(layer)
        if not isinstance(attention, CompressedConfig):
            return 0, ()
        widths = attention.entry_widths(layer)
        return attention.rate(layer) if widths else 0, widths

    def kept_rows(self, layer: int, draft_slots: int = 0) -> KeptRows | None:
        """What the layer keeps of contributions to entries (DeepSeek V4); None: nothing."""
        own = self.attention_of(layer)
        return own.kept_rows(layer, self.page_multiple, draft_slots) if isinstance(own, CompressedConfig) else None

    def kv_bytes_of(self, layers: Iterable[int], kv_dtype: str, draft_slots: int = 0) -> int:
        """Cached bytes of one token in these layers, without entries; scales of FP8 rows included, and the kept
        contributions of blocks of tokens, divided over these."""
        each, layers = kv_format.STORED[kv_dtype][1], tuple(layers)
        elements = sum(math.prod(part) for layer in layers for part in self.kv_parts(layer, kv_dtype))
        kept = [rows for layer in layers if (rows := self.kept_rows(layer, draft_slots)) is not None and rows.block]
        of_blocks = sum(rows.each * sum(rows.widths) * each // rows.block for rows in kept)
        return elements * each + of_blocks

    def kept_bytes_of_request(self, kv_dtype: str, draft_slots: int = 0) -> int:
        """Bytes of the contributions to entries that are kept for each request, in all layers."""
        kept = (self.kept_rows(layer, draft_slots) for layer in range(self.num_layers))
        elements = sum(rows.each * sum(rows.widths) for rows in kept if rows is not None and not rows.block)
        return elements * kv_format.STORED[kv_dtype][1]

    def entry_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of all layers' entries, divided by their tokens."""
        each, entries = kv_format.STORED[kv_dtype][1], map(self.entry_parts, range(self.num_layers))
        return sum(sum(widths) * each // rate for rate, widths in entries if rate)

    def kv_bytes_per_token(self, kv_dtype: str, include_mtp: bool = False, draft_slots: int = 0) -> int:
        """`kv_bytes_of` all layers, optionally with MTP layers, and entries."""
        if (key := ("kv", kv_dtype, include_mtp, draft_slots)) not in self.known_sizes:
            last = self.num_layers + (self.num_nextn_predict_layers if include_mtp else 0)
            of_layers = self.kv_bytes_of(range(last), kv_dtype, draft_slots)
            self.known_sizes[key] = of_layers + self.entry_bytes_per_token(kv_dtype)
        found: int = self.known_sizes[key]
        return found
