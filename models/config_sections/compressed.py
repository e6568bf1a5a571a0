"""Attention and residual streams of DeepSeek V4 and V4.1. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moe_engine.models.config_sections.engram import EngramConfig

MAX_CANDIDATES = 1 << 22
"""Entries among which indexers select, in memory at once; query tokens with more are in parts."""


class KeptRows(NamedTuple):
    """Rows of a layer's cache with what tokens contribute to entries, as `kernels.compression.protocol.Kept` has them:
    of the last tokens of every block of `block` adjacent tokens, or of every request (`block` 0)."""

    each: int
    block: int
    widths: tuple[int, ...]
    """Channels of a row in each tensor: of the entries of attention, and of those of the indexer."""


@dataclass(frozen=True)
class CompressedConfig:
    """Attention to a window, and to entries that summarize the tokens before (DeepSeek V4).

    One vector of a token is key and value of all heads; its last `rotary_width` channels are rotated. Every
    `rates[layer]` tokens have an entry of the same width; MTP layers come after the model's.

    Attributes:
        window: tokens that a query token sees by themselves, its own included.
        rates: tokens of an entry, by layer; 0: a layer without entries.
        selected_rate: in layers with this rate, an entry also reads the tokens of the entry before it, and an indexer
            with `index_heads` heads of `index_width` channels selects `top_k` entries for each query token.
        output_groups, output_rank: groups of heads, each with a projection to `output_rank` channels.
    """

    num_heads: int
    head_dim: int
    rotary_width: int
    q_lora_rank: int
    window: int
    rates: tuple[int, ...]
    selected_rate: int
    index_heads: int
    index_width: int
    top_k: int
    output_groups: int
    output_rank: int

    kind = "mla"
    """Its vectors are latents without rotary channels of their own for the kernels of MLA."""

    @property
    def shared_layers(self) -> tuple[int, ...]:
        """See `MLAConfig`: none."""
        return ()

    def kv_parts(self, kv_dtype: str) -> tuple[tuple[int, ...], ...]:
        """Shape of a token's key in a layer's cache; `ModelConfig.kv_parts` has what else a layer caches."""
        return ((self.head_dim,),)

    def rate(self, layer: int) -> int:
        """Tokens of an entry in this layer; 0: it has none."""
        return self.rates[layer] if layer < len(self.rates) else 0

    def selects_of(self, rate: int) -> bool:
        """Whether layers of this rate read the entries that an indexer selects, not all."""
        return rate == self.selected_rate

    def group(self, layer: int) -> tuple[int, ...]:
        """The layers that read the entries of this layer's cache; the first of them writes them."""
        return (layer,)

    def selects(self, layer: int) -> bool:
        """Whether the layer has an indexer, and entries that overlap."""
        return self.rate(layer) == self.selected_rate

    def projected_widths(self, layer: int) -> tuple[int, ...]:
        """Channels of what a token contributes to entries, half of them values and half gates: of the entries of
        attention, and of those of the indexer."""
        if not self.rate(layer):
            return ()
        return (4 * self.head_dim, 4 * self.index_width) if self.selects(layer) else (2 * self.head_dim,)

    def kept_rows(self, layer: int, block: int, draft_slots: int) -> KeptRows | None:
        """What the layer keeps of earlier tokens' contributions; None: it has no entries.

        An entry reads contributions of its own tokens, and with overlap of those of the entry before. A request
        continues at the end of a block of tokens: only with overlap it needs contributions from the block. Tokens of
        rejected drafts take rows too.

        Args:
            block: `ModelConfig.page_multiple`.
            draft_slots: of a request in a step.
        """
        rate, widths = self.rate(layer), self.projected_widths(layer)
        if not rate:
            return None
        if self.selects(layer):
            return KeptRows(min(block, 2 * rate + draft_slots), block, widths)
        return KeptRows(rate + draft_slots, 0, widths)

    def spanned(self, rate: int) -> int:
        """Tokens from which an entry of this rate is computed: with selected entries also those before its own."""
        return rate * (1 + (rate == self.selected_rate))

    def candidate_bytes(self, context: int, num_tokens: int) -> int:
        """Bytes of a step for the entries among which later indexers select."""
        return 0

    def entry_widths(self, layer: int) -> tuple[int, ...]:
        """Channels of an entry, and of its index key."""
        if not self.rate(layer):
            return ()
        return (self.head_dim, self.index_width) if self.selects(layer) else (self.head_dim,)


@dataclass(frozen=True)
class SharedEntriesConfig(CompressedConfig):
    """Entries that several layers read (DeepSeek V4.1): of one or two tokens, without overlap.

    A layer of `kv_sources` writes entries and index keys; the layers after it, up to the next one, read them. A layer
    of `index_sources` selects entries; the layers after it read the same ones.

    Attributes:
        candidate_source: the indexers after this layer choose among entries of the `candidate_blocks` blocks of
            `candidate_size` entries that its scores put first; -1: among all.
    """

    kv_sources: tuple[int, ...] = ()
    index_sources: tuple[int, ...] = ()
    candidate_source: int = -1
    candidate_blocks: int = 0
    candidate_size: int = 1

    def selects_of(self, rate: int) -> bool:
        return rate > 0

    def group(self, layer: int) -> tuple[int, ...]:
        if not self.rate(layer):
            return (layer,)
        first = max(source for source in self.kv_sources if source <= layer)
        end = min((source for source in self.kv_sources if source > layer), default=len(self.rates))
        return tuple(i for i in range(first, end) if self.rate(i))

    def selects(self, layer: int) -> bool:
        return layer in self.index_sources

    def writes(self, layer: int) -> bool:
        """Whether the layer writes entries."""
        return layer in self.kv_sources

    def limits_candidates(self, layer: int) -> bool:
        """Whether the layer's indexer chooses among candidates."""
        return 0 <= self.candidate_source < layer

    @property
    def rate_of_candidates(self) -> int:
        """Tokens of an entry that is a candidate; -1: all entries are."""
        return self.rate(self.candidate_source) if self.candidate_source >= 0 else -1

    def candidate_bytes(self, context: int, num_tokens: int) -> int:
        """Blocks of each query token, the slots of some tokens' candidates, and positions of these."""
        most = self.candidate_blocks * self.candidate_size
        if self.candidate_source < 0 or context // self.rate_of_candidates <= most:
            return 0
        return num_tokens * self.candidate_blocks * 4 + 24 * max(most, min(MAX_CANDIDATES, num_tokens * most))

    def spanned(self, rate: int) -> int:
        return rate

    def projected_widths(self, layer: int) -> tuple[int, ...]:
        return (2 * self.head_dim,) if self.writes(layer) and self.rate(layer) > 1 else ()

    def kept_rows(self, layer: int, block: int, draft_slots: int) -> KeptRows | None:
        widths = self.projected_widths(layer)
        return KeptRows(self.rate(layer) + draft_slots, 0, widths) if widths else None

    def entry_widths(self, layer: int) -> tuple[int, ...]:
        return (self.head_dim, self.index_width) if self.writes(layer) else ()


@dataclass(frozen=True)
class StreamsConfig:
    """Hyper-connections (DeepSeek V4): the residual is `count` streams. Each part of a layer reads a weighted sum of
    them; its result is added to each with a weight, after they are mixed by a matrix made doubly stochastic by
    `iterations` Sinkhorn steps."""

    count: int
    iterations: int
    eps: float
    late: bool = False
    """A part reads the sum by the weights that the part before has computed (DeepSeek V4.1); the first reads stream
    0."""

    mean_head: bool = False
    """The model's head reads the mean of the streams (GLM-5.3-Flash), not a sum with weights of its own."""

    engram: EngramConfig | None = None
    """Tables of n-grams, whose rows are added to the streams; None: no layer has one."""

    rank: int = 0
    """Each part reads a gated mean of the normed streams, with gates of this rank, and does not mix them
    (Qwen3.8-Flash-Next, `kernels.ops.gated_streams`); 0: as above."""

    @property
    def weighs_head(self) -> bool:
        """Whether the head reads a sum with weights of its own."""
        return not (self.late or self.mean_head or self.rank)

    @property
    def normed(self) -> int:
        """Streams that the norm of an MTP layer's hidden states norms together."""
        return self.count if self.rank else 1

    @property
    def ngram(self) -> int:
        """Ids of tokens that the residual carries, see `models.layers.residual.engram`."""
        return 0 if self.engram is None or self.rank else self.engram.longest

    @property
    def width(self) -> int:
        """Numbers of a token's residual after the streams; two for an id."""
        if self.rank:
            return self.count
        return self.count * (1 + self.count) + self.count * self.late + 2 * self.ngram


def entry_group(attention: object, layer: int) -> tuple[int, ...]:
    """The layers that read the entries of this layer's cache, the one that writes them first."""
    return attention.group(layer) if isinstance(attention, CompressedConfig) else (layer,)
