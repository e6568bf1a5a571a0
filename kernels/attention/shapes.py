"""Named sizes of attention calls, with their minimal bytes and operations. Imports no torch.

Legend: R requests, t query tokens of each, s context tokens of each (query tokens included), H query heads, G KV heads,
C kv_lora_rank, P rotary width, N qk_nope, V v_head, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ACTIVATION_BYTES = 2  # bf16


@dataclass(frozen=True)
class AttentionShape:
    """One call of an attention backend, all requests of equal size; causal.

    form: ``absorbed`` (key and value one row of C + P numbers, shared by all heads), ``expanded`` (keys of N + P, the P
    shared, values of V, for each head) or ``paged`` (keys and values of D for each KV head).
    key, value: widths of a head's key and value; rotary: channels of the key that all heads share, if expanded.
    row_bytes: bytes of one context token in the cache, or of its expanded keys and values.
    """

    model: str
    form: str
    requests: int
    query_tokens: int
    context: int
    heads: int
    groups: int
    key: int
    value: int
    row_bytes: int
    rotary: int = 0

    @property
    def name(self) -> str:
        return f"{self.model}.{self.form}.h{self.heads}.r{self.requests}.q{self.query_tokens}.s{self.context}"

    @property
    def tokens(self) -> int:
        return self.requests * self.query_tokens

    @property
    def bytes(self) -> int:
        """Queries, context and output, each moved once."""
        numbers = self.tokens * self.heads * (self.key + self.value)
        return ACTIVATION_BYTES * numbers + self.requests * self.context * self.row_bytes

    @property
    def flops(self) -> int:
        """Operations of the two matrix products, over visible pairs only."""
        before = self.context - self.query_tokens
        pairs = self.query_tokens * before + self.query_tokens * (self.query_tokens + 1) // 2
        return 2 * self.requests * pairs * self.heads * (self.key + self.value)


@dataclass(frozen=True)
class LatentModel:
    """MLA of a model on one GPU. `record_bytes`: bytes of a token's cache row if not bf16."""

    name: str
    heads: int
    latent: int = 512
    rotary: int = 64
    nope: int = 128
    value: int = 128
    record_bytes: int | None = None

    def absorbed(self, requests: int, query_tokens: int, context: int) -> AttentionShape:
        key = self.latent + self.rotary
        row = self.record_bytes or ACTIVATION_BYTES * key
        return AttentionShape(
            self.name, "absorbed", requests, query_tokens, context, self.heads, 1, key, self.latent, row
        )

    def expanded(self, requests: int, query_tokens: int, context: int) -> AttentionShape:
        row = ACTIVATION_BYTES * (self.heads * (self.nope + self.value) + self.rotary)
        key = self.nope + self.rotary
        return AttentionShape(
            self.name, "expanded", requests, query_tokens, context, self.heads, self.heads, key, self.value, row,
            self.rotary,
        )  # fmt: skip


@dataclass(frozen=True)
class GroupedModel:
    """Grouped-query attention of a model on one GPU."""

    name: str
    heads: int
    groups: int
    width: int

    def paged(self, requests: int, query_tokens: int, context: int) -> AttentionShape:
        row = ACTIVATION_BYTES * 2 * self.groups * self.width
        return AttentionShape(
            self.name, "paged", requests, query_tokens, context, self.heads, self.groups, self.width, self.width, row
        )


DEEPSEEK_V3 = LatentModel("deepseek-v3", 128)
DEEPSEEK_V3_FP8 = LatentModel("deepseek-v3-fp8-kv", 128, record_bytes=656)
DEEPSEEK_V2_LITE = LatentModel("deepseek-v2-lite", 16)
LLAMA_3_8B = GroupedModel("llama-3-8b", 32, 8, 128)
QWEN3_30B_A3B = GroupedModel("qwen3-30b-a3b", 32, 4, 128)


def named_shapes() -> Iterator[AttentionShape]:
    """Decode, verification of three drafts, and prompts, at the batch sizes of the performance tables."""
    for latent in (DEEPSEEK_V3, DEEPSEEK_V3_FP8, DEEPSEEK_V2_LITE):
        for requests, context in ((1, 4096), (32, 4096), (128, 2048), (128, 8192)):
            yield latent.absorbed(requests, 1, context)
        yield latent.absorbed(64, 4, 4096)
    for latent in (DEEPSEEK_V3, DEEPSEEK_V2_LITE):
        yield latent.expanded(4, 2048, 2048)
        yield latent.expanded(1, 4096, 16384)
    for grouped in (LLAMA_3_8B, QWEN3_30B_A3B):
        for requests, context in ((1, 4096), (128, 2048), (128, 8192)):
            yield grouped.paged(requests, 1, context)
        yield grouped.paged(64, 4, 4096)
        yield grouped.paged(4, 2048, 2048)
