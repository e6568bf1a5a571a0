"""Lower bounds of a step: bytes to read and operations to compute, from config.json.

No command. A step must read every used weight once, and the KV of every sequence once; it must compute the model's
products. Activations, launches and Python are not counted: the limits are those of a perfect engine.

The experts used by a batch are an expectation: a token chooses `k` of `E` experts with equal probability, so T tokens
leave an expert unused with probability (1 - k/E)^T. Callers with a measured count pass it.

Legend: T tokens in a step, S sequences, C context length, W weights (elements, not bytes).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES_OF_DTYPE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class StepWork:
    """Minimum work of a step."""

    bytes_read: float
    flops: float

    def seconds(self, limits: MachineLimits) -> float:
        """Time on a machine at its limits: reading and computing overlap perfectly."""
        return max(self.bytes_read / limits.bytes_per_second, self.flops / limits.flops_per_second)


@dataclass(frozen=True)
class MachineLimits:
    """A machine's measured limits: memory reads, and products of large bf16 matrices."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class ModelWork:
    """Counts of a model. `layer_weights` are used by every token, `expert_weights` is one expert of one layer."""

    layer_weights: int
    head_weights: int
    expert_weights: int
    num_moe_layers: int
    num_experts: int
    experts_per_token: int
    kv_bytes_per_token: int
    decode_flops_per_pair: int
    """Attention operations per query token and context token, over all heads and layers, in the decode form."""
    prefill_flops_per_pair: int
    weight_bytes: int = 2

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelWork:
        """From the fields of config.json of a DeepSeek (MLA) or a Llama-like (GQA) model, without biases and norms."""
        weight_bytes = BYTES_OF_DTYPE[config.get("torch_dtype") or config.get("dtype") or "bfloat16"]
        attention = mla_work(config) if "kv_lora_rank" in config else _gqa(config)
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        experts = config.get("n_routed_experts") or 0
        num_moe = layers - config["first_k_dense_replace"] if experts else 0
        expert = 3 * hidden * config["moe_intermediate_size"] if experts else 0
        shared = config.get("n_shared_experts", 0) * expert + experts * hidden  # the shared expert and the router
        mlp = (layers - num_moe) * 3 * hidden * config["intermediate_size"] + num_moe * shared
        return cls(
            layer_weights=layers * attention.weights + mlp,
            head_weights=config["vocab_size"] * hidden,
            expert_weights=expert,
            num_moe_layers=num_moe,
            num_experts=experts,
            experts_per_token=config["num_experts_per_tok"] if experts else 0,
            kv_bytes_per_token=layers * attention.kv_elements * weight_bytes,
            decode_flops_per_pair=layers * attention.decode_flops,
            prefill_flops_per_pair=layers * attention.prefill_flops,
            weight_bytes=weight_bytes,
        )

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> ModelWork:
        return cls.from_config(json.loads((Path(path) / "config.json").read_text()))

    @property
    def active_weights(self) -> int:
        """Active weights per token, with the head."""
        used = self.num_moe_layers * self.experts_per_token * self.expert_weights
        return self.layer_weights + used + self.head_weights

    def experts_touched(self, num_tokens: int) -> float:
        """Expected number of a layer's experts chosen by `num_tokens` tokens, uniformly and independently."""
        return self.num_experts * share_touched(num_tokens, self.experts_per_token, self.num_experts)

    def decode_step(self, contexts: Sequence[int]) -> StepWork:
        """One token for each of the sequences with these context lengths; each sequence's KV is read completely.

        A shared prefix counts for each sequence: an engine that reads it once can exceed this limit.
        """
        tokens = len(contexts)
        weights: float = self.layer_weights + self.head_weights
        weights += self.num_moe_layers * self.experts_touched(tokens) * self.expert_weights
        return StepWork(
            bytes_read=weights * self.weight_bytes + sum(contexts) * self.kv_bytes_per_token,
            flops=2 * self.active_weights * tokens + sum(contexts) * self.decode_flops_per_pair,
        )

    def prefill(self, prompts: Sequence[tuple[int, int]]) -> StepWork:
        """Prompts as (tokens to compute, cached tokens before them), all in one step; one logit row each."""
        tokens = sum(own for own, _ in prompts)
        pairs = sum(own * (own + 1) // 2 + own * cached for own, cached in prompts)
        weights: float = self.layer_weights + self.head_weights
        weights += self.num_moe_layers * self.experts_touched(tokens) * self.expert_weights
        body = self.active_weights - self.head_weights
        return StepWork(
            bytes_read=weights * self.weight_bytes + sum(cached for _, cached in prompts) * self.kv_bytes_per_token,
            flops=2 * body * tokens + 2 * self.head_weights * len(prompts) + pairs * self.prefill_flops_per_pair,
        )

    def generation_seconds(
        self, limits: MachineLimits, num_sequences: int, input_len: int, output_len: int, shared_prefix: int = 0
    ) -> float:
        """Minimum time for a batch: one prefill (the shared prefix once), then output_len - 1 decode steps."""
        own = input_len - shared_prefix
        prompts = [(own, shared_prefix)] * num_sequences
        if shared_prefix:
            prompts = [(shared_prefix, 0), *prompts]
        seconds = self.prefill(prompts).seconds(limits)
        for produced in range(1, output_len):
            seconds += self.decode_step([input_len + produced] * num_sequences).seconds(limits)
        return seconds


def share_touched(num_tokens: int, experts_per_token: int, num_experts: int) -> float:
    """Expected share of a layer's experts chosen by `num_tokens` tokens, uniformly and independently; 0 without any."""
    return 1 - (1 - experts_per_token / num_experts) ** num_tokens if num_experts else 0.0


@dataclass(frozen=True)
class AttentionWork:
    """One layer: weights, KV elements per token, operations per query-context pair."""

    weights: int
    kv_elements: int
    decode_flops: int
    prefill_flops: int


def mla_work(config: Mapping[str, Any]) -> AttentionWork:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    latent, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
    query = heads * (nope + rope)
    weights = hidden * q_rank + q_rank * query if q_rank else hidden * query
    weights += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return AttentionWork(
        weights=weights,
        kv_elements=latent + rope,
        decode_flops=2 * heads * (2 * latent + rope),  # over the latent: scores of latent + rope, values of latent
        prefill_flops=2 * heads * (nope + rope + value),
    )


def _gqa(config: Mapping[str, Any]) -> AttentionWork:
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    pair = 2 * heads * 2 * size
    return AttentionWork(2 * hidden * (heads + kv_heads) * size, 2 * kv_heads * size, pair, pair)
