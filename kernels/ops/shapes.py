"""Ops of a model at a number of tokens, with their minimal bytes. Imports no torch.

Legend: T tokens, D hidden, Q q_lora_rank, C kv_lora_rank, R rotary width, H heads, I width, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ACTIVATION_BYTES = 2  # bf16


@dataclass(frozen=True)
class OpShape:
    """One operation on `tokens` tokens; `widths` in the order of `ModelOps.at`.

    operation: a method of `Ops`, or ``sample`` of `SamplingKernel`.
    """

    name: str
    operation: str
    tokens: int
    widths: tuple[int, ...]
    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class ModelOps:
    """The widths of a model on one GPU. 0: the model has no such part."""

    model: str
    hidden: int
    vocab: int
    heads: int
    rotary: int
    latent: int = 0
    q_latent: int = 0
    dense_width: int = 0
    shared_width: int = 0
    num_experts: int = 0
    top_k: int = 0

    def at(self, tokens: int) -> Iterator[OpShape]:
        """The operations of one layer, and the sampling of `tokens` rows."""

        def shape(operation: str, widths: tuple[int, ...], elements: int, more: int = 0, flops: int = 0) -> OpShape:
            """`elements` activations are moved per token, plus `more` bytes."""
            name = f"{self.model}.{operation}.{'x'.join(map(str, widths))}.t{tokens}"
            return OpShape(name, operation, tokens, widths, ACTIVATION_BYTES * elements * tokens + more, flops)

        norm_bytes = ACTIVATION_BYTES * self.hidden
        yield shape("rms_norm", (self.hidden,), 2 * self.hidden, norm_bytes)
        yield shape("add_rms_norm", (self.hidden,), 4 * self.hidden, norm_bytes)
        if self.q_latent:
            yield shape("rms_norm", (self.q_latent,), 2 * self.q_latent, ACTIVATION_BYTES * self.q_latent)
        for width in sorted({self.dense_width, self.shared_width} - {0}):
            yield shape("silu_and_mul", (width,), 3 * width)
        yield shape("rotate", (self.heads, self.rotary), 2 * self.heads * self.rotary, 4 * self.rotary * tokens)
        if self.latent:
            row = self.latent + self.rotary
            yield shape("write_latent", (self.latent, self.rotary), 2 * row, 4 * self.rotary * tokens)
        if self.num_experts:
            gate = 4 * self.num_experts * self.hidden
            work = 2 * tokens * self.num_experts * self.hidden
            yield shape("route", (self.hidden, self.num_experts, self.top_k), self.hidden, gate, work)
        yield shape("sample", (self.vocab,), 2 * self.vocab)  # float32 logits, read once


DEEPSEEK_V3 = ModelOps("deepseek-v3", 7168, 129280, 128, 64, 512, 1536, 18432, 2048, 256, 8)
DEEPSEEK_V2_LITE = ModelOps("deepseek-v2-lite", 2048, 102400, 16, 64, 512, 0, 10944, 2816, 64, 6)
TOKENS = (1, 128, 4096)


def named_shapes() -> list[OpShape]:
    """Both models at decode and prefill sizes; sampling has one row per request, so at most 256."""
    models = (DEEPSEEK_V3, DEEPSEEK_V2_LITE)
    found = [shape for model in models for tokens in TOKENS for shape in model.at(tokens)]
    return [shape for shape in found if shape.operation != "sample" or shape.tokens <= 256]
