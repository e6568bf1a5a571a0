"""The LoRA adapters of a step's tokens, for the layers of a model, and the adapters of MLA's kv_b.

Legend: T tokens, S adapter slots, H heads, N qk_nope, V v_head, C kv_lora_rank, R max rank.
"""

from __future__ import annotations

from torch import Tensor

from moe_engine.kernels.lora.protocol import AdapterTokens, LoraKernel, LoraWeights
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk
from moe_engine.parallel.dp_gather_scatter import TokenLayout
from moe_engine.parallel.step_sizes import StepSizes


class StepAdapters:
    """One for all layers of a model; set at the beginning of a forward.

    A step without adapters takes the same path as in a launch without LoRA, whole-layer calls included.
    """

    def __init__(self, shares: bool) -> None:
        """`shares`: feed-forward parts of layout SHARE get a part of the tokens."""
        self._shares = shares
        self._share: AdapterTokens | None = None
        self._parts: dict[tuple[int, int, int], AdapterTokens | None] = {}
        self.all: AdapterTokens | None = None
        """Adapters of all tokens of the attention group; None: no token has an adapter."""

    def begin(self, tokens: AdapterTokens | None, sizes: StepSizes | None) -> None:
        """Sets the adapters of the step that starts."""
        self.all = self._share = tokens
        self._parts.clear()
        if tokens is not None and self._shares and sizes is not None:
            own = sizes.own_tokens
            self._share = tokens if own == slice(0, tokens.num_tokens) else tokens.part(own)

    @property
    def active(self) -> bool:
        """Whether a token of this rank's step has an adapter."""
        return self.all is not None

    def of_layout(self, layout: TokenLayout) -> AdapterTokens | None:
        """Adapters of the input tokens of a feed-forward part."""
        return self.all if layout is TokenLayout.ALL else self._share

    def of_queries(self, chunk: AttentionChunk) -> AdapterTokens | None:
        """Adapters of the tokens of a chunk; computed once for all layers."""
        return self._part(chunk, -1)

    def of_context(self, chunk: AttentionChunk, num_rows: int) -> AdapterTokens | None:
        """Adapters of the gathered context rows of a chunk, or of one of its context chunks."""
        return self._part(chunk, num_rows)

    def _part(self, chunk: AttentionChunk, num_rows: int) -> AdapterTokens | None:
        if self.all is None:
            return None
        key = (chunk.tokens.start, chunk.tokens.stop, num_rows)
        if key not in self._parts:
            queries, tokens = chunk.queries, self.all
            self._parts[key] = (
                tokens.part(chunk.tokens)
                if num_rows < 0
                else tokens.of_contexts(chunk.tokens, queries.query_lens, queries.context_lens, num_rows)
            )
        return self._parts[key]


class KVBAdapters:
    """Adapters of kv_b in both forms of MLA. With scaling * B = [B_k | B_v] by head:

    absorbed: the query against the latent gets (q B_k) A + q W_UK, the values get (mixed A) B_v + mixed W_UV;
    expanded: keys and values of the context get latent A B, as of any linear layer.
    """

    def __init__(
        self, kernel: LoraKernel, step: StepAdapters, weights: LoraWeights, keys: Tensor, values: Tensor
    ) -> None:
        """
        Args:
            weights: a [S, R, C], b [S, R, H (N + V)].
            keys, values: the same b by head, [S, H, R, N] and [S, H, R, V].
        """
        self.step = step
        # bound to calls: these are not weights of the checkpoint (`models.footprint`)
        self._add, self._add_heads = kernel.add, kernel.add_heads
        self._weights = lambda: (weights, weights.a.unsqueeze(1), keys, values)

    def add_to_query(self, latent: Tensor, q: Tensor, chunk: AttentionChunk | None) -> None:
        """latent [T, H, C] += of q [T, H, N]; `chunk`: of its tokens, not of all."""
        tokens = self.step.all if chunk is None else self.step.of_queries(chunk)
        if tokens is not None:
            _, shared, keys, _ = self._weights()
            self._add_heads(latent, q, keys, shared, tokens)

    def add_to_values(self, out: Tensor, mixed: Tensor, chunk: AttentionChunk | None) -> None:
        """out [T, H, V] += of mixed [T, H, C]."""
        tokens = self.step.all if chunk is None else self.step.of_queries(chunk)
        if tokens is not None:
            _, shared, _, values = self._weights()
            self._add_heads(out, mixed, shared, values, tokens)

    def add_to_context(self, kv: Tensor, latent: Tensor, chunk: AttentionChunk) -> None:
        """kv [rows, H (N + V)] += of the gathered latent [rows, C] of a chunk."""
        tokens = self.step.of_context(chunk, len(kv))
        if tokens is not None:
            self._add(kv, latent, self._weights()[0], tokens)
