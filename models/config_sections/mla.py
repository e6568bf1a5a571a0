"""Config of multi-head latent attention, and of the indexer of DeepSeek sparse attention. Imports no torch.

Legend: H query heads, N qk_nope, R rotary width, V v_head, C kv_lora_rank, Q q_lora_rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_engine.kernels.kv_format import formats as kv_format


@dataclass(frozen=True)
class IndexerConfig:
    """DeepSeek sparse attention: the indexer that selects the tokens to which a query token attends.

    Attributes:
        num_heads, top_k: heads of the index query; max tokens selected for a query token.
        interleaved: its rotary pairs are (2j, 2j+1), else (j, j+R/2); they are the first R channels of a head.
        shared_layers: layers without an indexer, which use the selection of the last preceding layer with an indexer.
        shares_drafts: draft steps of an MTP layer after the first use the selection of the first.
        fp8_keys: index keys are cached as FP8 records also with latents of another type.
        from_input: its queries are a projection of the layer's input after a LayerNorm, not of the query's latent.
        pool: tokens of a pool. Above 1 the indexer scores means of the keys of adjacent tokens, and selects pools with
            all their tokens; the tokens after the last whole pool are always seen (GLM-5.3-Flash).
    """

    num_heads: int
    top_k: int
    interleaved: bool
    shared_layers: tuple[int, ...] = ()
    shares_drafts: bool = False
    fp8_keys: bool = False
    pool: int = 1
    from_input: bool = False


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention. The file's KV heads and head_dim do not apply and are not read.

    `bias`: q_a, kv_a and o have one (transformers' attention_bias; no released model uses it). `index_width`: channels
    of the index key that is cached with each token's latent, for sparse attention (0: none). `gate_width`: numbers
    from the layer's input whose sigmoid multiplies a head's result: one (Ling), or one for each channel (Kimi K3).
    `latent_eps`: epsilon of the norms of both latents. `latent_factor`: factor of the normed latent of keys and values
    (LongCat-Flash). Of Mistral Large 4: `plain_layers` have no rotary positions: R more plain channels of query and key
    instead, and zeros for R channels of a cache row, so that all layers have one kernel. `head_factors`: each head of
    queries, of an indexer too, has a factor, scale * ln(position + 1) + bias. `sources`: the layer to whose latents
    each layer attends, an earlier one or itself; (): all have their own.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False
    index_width: int = 0
    indexer: IndexerConfig | None = None
    gate_width: int = 0
    latent_eps: float = 1e-6
    latent_factor: float = 1.0
    plain_layers: tuple[int, ...] = ()
    head_factors: bool = False
    sources: tuple[int, ...] = ()

    kind = "mla"

    def of_layer(self, layer: int | None) -> MLAConfig:
        """With the plain channels of the layer's keys. Its rotary channels are zeros if it is one of `plain_layers`."""
        if layer not in self.plain_layers:
            return self
        return replace(self, qk_nope_head_dim=self.qk_head_dim)

    def source_of(self, layer: int) -> int:
        """The layer to whose latents a layer attends."""
        return self.sources[layer] if layer < len(self.sources) else layer

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Channels cached per token and layer: C + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def stored_width(self, layer: int | None) -> int:
        """Rows of the projection to a cache row: C + R, or C in a layer without rotary channels."""
        return self.kv_lora_rank if layer in self.plain_layers else self.cache_width

    @property
    def widest(self) -> MLAConfig:
        """The config of its layer with the widest heads."""
        return self.of_layer(self.plain_layers[0]) if self.plain_layers else self

    def kv_parts(self, kv_dtype: str) -> tuple[tuple[int, ...], ...]:
        """Shapes of a token's entries in a layer's cache tensors, in `kv_format`'s layout."""
        latent = (kv_format.latent_width(kv_dtype, self.kv_lora_rank, self.qk_rope_head_dim),)
        if not self.index_width:
            return (latent,)
        if self.pool > 1:  # keys and gates of tokens; the last token of a whole pool has the pool's key
            return latent, (1, self.index_width), (1, self.index_width)
        if self.fp8_keys:
            return latent, (1, kv_format.head_record_width(kv_dtype, self.index_width))
        return latent, (1, kv_format.head_width(kv_dtype, self.index_width))

    @property
    def pool(self) -> int:
        """See `IndexerConfig`."""
        return 1 if self.indexer is None else self.indexer.pool

    @property
    def fp8_keys(self) -> bool:
        """See `IndexerConfig`."""
        return self.indexer is not None and self.indexer.fp8_keys

    @property
    def shared_layers(self) -> tuple[int, ...]:
        """Layers without the last of `kv_parts`, index keys: they use another layer's selection."""
        return () if self.indexer is None else self.indexer.shared_layers
