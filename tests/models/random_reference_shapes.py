"""Random shapes of families whose oracle is not transformers' model of the checkpoint itself:
``python -m tests.models.random_reference_shapes --count 50``.

DeepSeek V4.1, Kimi K3 and Ling 2.6, whose formulas are in float64; DeepSeek V4 and V4.1 and Kimi K2.5 with quantized
weights as published, whose values the definition gives. As `random_sparse_shapes`; a prompt is cut into drawn chunks
and decodes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.models.config_file import load_model_config
from moe_engine.models.config_sections.engram import EngramConfig
from tests.models import kimi_checkpoints, kimi_k3, ling_v2_5, random_sparse_shapes, stepper, v4_checkpoints
from tests.models.deepseek_v41 import V41Reference, make_v41
from tests.models.parity_families import Family, text_prompts
from tests.models.random_shapes import Refused, run_draws, within_tolerance
from tests.models.stepper import Chunk
from tests.models.v4_quantized import quantized_copy
from tests.models.v41_quantized import quantized_v41

KINDS = (
    "deepseek_v41", "deepseek_v41_fp4", "deepseek_v4_fp4", "deepseek_v4_fp8", "kimi_k3", "kimi_k25_int4", "ling_v2_5",
)  # fmt: skip
LENGTH, TOLERANCE, MOVED = 90, 3e-4, 3e-4
"""Tokens of a prompt; an error of a token's logits, of their norm; a log-probability that rounding decides."""


@dataclass
class Shape:
    """As `random_shapes.Shape`. `page`: slots of a page, a multiple of what the model needs."""

    kind: str
    row: str
    fields: dict[str, Any] = field(default_factory=dict)
    page: int = 1


def draw(kind: str, rng: random.Random) -> Shape:
    own = {"deepseek_v41": v41_fields, "deepseek_v41_fp4": v41_fp4_fields, "kimi_k3": k3_fields}
    own["ling_v2_5"] = ling_fields
    fields = own.get(kind, _v4_fields if kind.startswith("deepseek_v4") else _k25_fields)(rng)
    return Shape(kind, rng.choice(("torch", "cpu")), fields, rng.choice((1, 1, 2, 4)))


def v41_fields(rng: random.Random) -> dict[str, Any]:
    """Layers without entries, then groups that read the entries of their first layer."""
    rates, sources, indexers, candidates = [0] * rng.choice((0, 1, 2)), [], [], -1
    for _ in range(rng.randint(0, 3)):
        first, count = len(rates), rng.randint(1, 4)
        sources.append(first)
        own = sorted({first} | {i for i in range(first, first + count) if rng.random() < 0.4})
        indexers += own
        rates += [rng.choice((1, 2))] * count
        candidates = rng.choice((-1, *own))  # the last group's count
    rates += [0] * rng.choice((0, 0, 1))
    rates = rates or [0]
    layers, groups, rotated = len(rates), rng.choice((1, 2, 3)), rng.choice((4, 8, 16))
    top_k, size = rng.choice((1, 3, 5, 9)), rng.choice((1, 2, 4, 8))
    yarn = {"rope_type": "yarn", "factor": rng.choice((4, 8)), "beta_fast": rng.choice((32, 16)), "beta_slow": 1}
    yarn["original_max_position_embeddings"] = rng.choice((32, 64))
    fields = {
        "hidden_size": rng.choice((48, 60, 84, 120)), "num_hidden_layers": layers, "compress_ratios": [*rates, 0, 0],
        "num_attention_heads": groups * rng.choice((1, 2, 3)), "o_groups": groups, "head_dim": rng.choice((24, 40, 56)),
        "qk_rope_head_dim": rotated, "q_lora_rank": rng.choice((12, 33, 40)), "o_lora_rank": rng.choice((8, 15, 20)),
        "sliding_window": rng.choice((3, 5, 16, 21, 100)), "kv_source_layer_ids": sources,
        "index_source_layer_ids": indexers, "candidate_source_layer_id": candidates,
        "candidate_topk_blocks": -(-(top_k - 1) // size) + rng.choice((1, 2, 3)), "candidate_block_size": size,
        "index_n_heads": rng.choice((10, 17, 24)), "index_head_dim": max(rotated, rng.choice((8, 16, 24))),
        "index_topk": top_k, "hc_mult": rng.choice((1, 2, 3, 4)), "hc_sinkhorn_iters": rng.choice((1, 3, 20)),
        "rope_theta": rng.choice((1e4, 5e4)), "compress_rope_theta": rng.choice((1e4, 16e4)),
        "rope_scaling": rng.choice(({}, yarn)), "moe_intermediate_size": rng.choice((12, 32, 37)),
        "n_routed_experts": rng.choice((4, 7, 9)), "num_experts_per_tok": rng.randint(1, 4),
        "routed_scaling_factor": rng.choice((1.0, 1.5, 2.5)), "swiglu_limit": rng.choice((0.5, 1.5, 10.0)),
        "rms_norm_eps": rng.choice((1e-20, 1e-6, 1e-3)), "vocab_size": rng.choice((280, 300, 331)),
        "engram_layer_ids": sorted(rng.sample(range(layers), rng.randint(0, min(3, layers)))),
    }  # fmt: skip
    return fields | _tables(rng, fields["engram_layer_ids"], rng.choice((4, 8, 12)))


def _tables(rng: random.Random, layers: list[int], width: int) -> dict[str, Any]:
    """Fields of n-gram tables, whose numbers of rows follow."""
    longest, heads, first = rng.choice((2, 3, 4)), rng.choice((1, 2, 3)), rng.choice((7, 40, 90))
    config = EngramConfig(tuple(layers), (), longest, heads, width, first, 1, 0)
    return {
        "engram_max_ngram_size": longest, "engram_n_heads": heads, "engram_head_dim": width,
        "engram_vocab_size": first, "engram_num_embeddings": [sum(primes) for primes in config.primes],
        "engram_pad_token_id": rng.choice((0, 2, 7)),
    }  # fmt: skip


def v41_fp4_fields(rng: random.Random) -> dict[str, Any]:
    """Widths with blocks of 32."""
    fields = v41_fields(rng) | {"hidden_size": rng.choice((64, 96, 160)), "moe_intermediate_size": rng.choice((32, 96))}
    fields |= {"head_dim": rng.choice((24, 40)), "o_lora_rank": rng.choice((16, 32, 48))}
    return fields | _tables(rng, fields["engram_layer_ids"], rng.choice((32, 64)))


def _v4_fields(rng: random.Random) -> dict[str, Any]:
    fields = random_sparse_shapes.draw(random_sparse_shapes.V4, rng).fields
    return fields | {"hidden_size": rng.choice((96, 128, 160)), "moe_intermediate_size": rng.choice((64, 96, 160))}


def k3_fields(rng: random.Random) -> dict[str, Any]:
    layers = rng.randint(2, 6)
    full = sorted(rng.sample(range(1, layers + 1), rng.randint(1, layers)))
    linear = {
        "head_dim": rng.choice((8, 12, 20)), "num_heads": rng.choice((1, 2, 3, 5)),
        "short_conv_kernel_size": rng.choice((2, 3, 4)), "gate_lower_bound": rng.choice((-5.0, -2.5)),
        "use_full_rank_gate": True, "full_attn_layers": full,
        "kda_layers": [i for i in range(1, layers + 1) if i not in full],
    }  # fmt: skip
    heads, experts = rng.choice((1, 2, 3, 5)), rng.choice((4, 7, 9, 16))
    return {
        "vocab_size": rng.choice((280, 300, 331)), "hidden_size": rng.choice((48, 60, 84, 120)),
        "intermediate_size": rng.choice((37, 96)), "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "q_lora_rank": rng.choice((12, 24, 33)), "kv_lora_rank": rng.choice((16, 32, 36)),
        "qk_nope_head_dim": rng.choice((8, 16, 24)), "qk_rope_head_dim": rng.choice((4, 8, 12)),
        "v_head_dim": rng.choice((8, 12, 28)), "mla_use_output_gate": rng.random() < 0.7, "num_experts": experts,
        "num_experts_per_token": rng.randint(1, 4), "num_shared_experts": rng.choice((1, 2)),
        "moe_intermediate_size": rng.choice((12, 32, 37)), "routed_expert_hidden_size": rng.choice((20, 32, 48)),
        "first_k_dense_replace": rng.choice((0, 1, layers - 1)), "routed_scaling_factor": rng.choice((1.0, 1.3, 2.5)),
        "attn_res_block_size": rng.choice((1, 2, 3, 9)), "activation_situ_beta": rng.choice((0.7, 2.0)),
        "activation_situ_linear_beta": rng.choice((1.5, 4.0)), "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
        "linear_attn_config": linear,
    }  # fmt: skip


def ling_fields(rng: random.Random) -> dict[str, Any]:
    group, heads, groups = rng.choice((1, 2, 3)), rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    experts, width = rng.choice((2, 4, 6)), rng.choice((8, 16, 24))
    yarn = {"rope_type": "yarn", "factor": rng.choice((2.0, 4.0)), "original_max_position_embeddings": 64}
    return {
        "vocab_size": rng.choice((280, 300, 331)), "hidden_size": rng.choice((48, 60, 84, 120)),
        "intermediate_size": rng.choice((37, 96)), "layer_group_size": group,
        "num_hidden_layers": group * rng.choice((1, 2)) if group > 1 else 2, "num_attention_heads": heads * groups,
        "num_kv_heads_for_linear_attn": rng.choice((0, heads * groups)), "group_norm_size": groups, "head_dim": width,
        "partial_rotary_factor": rng.choice((0.5, 1.0)), "rope_theta": rng.choice((1e4, 6e6)),
        "rope_scaling": rng.choice((None, yarn)), "q_lora_rank": rng.choice((None, 12, 33)),
        "kv_lora_rank": rng.choice((16, 32, 36)), "qk_nope_head_dim": rng.choice((8, 16, 24)),
        "qk_rope_head_dim": rng.choice((4, 8, 12)), "v_head_dim": rng.choice((8, 12, 28)),
        "num_experts": 2 * experts, "num_experts_per_tok": rng.randint(1, experts), "n_group": 2,
        "topk_group": rng.choice((1, 2)), "moe_intermediate_size": rng.choice((12, 32, 37)),
        "moe_shared_expert_intermediate_size": rng.choice((20, 32)), "first_k_dense_replace": rng.choice((0, 1)),
        "routed_scaling_factor": rng.choice((1.0, 2.5)), "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
    }  # fmt: skip


def _k25_fields(rng: random.Random) -> dict[str, Any]:
    heads, experts = rng.choice((1, 2, 3, 5)), rng.choice((4, 8, 9))
    return {
        "vocab_size": rng.choice((280, 300, 331)), "hidden_size": rng.choice((64, 96, 160)),
        "num_hidden_layers": rng.choice((2, 3)), "num_attention_heads": heads, "num_key_value_heads": heads,
        "q_lora_rank": rng.choice((12, 24, 33)), "kv_lora_rank": rng.choice((16, 32, 36)),
        "qk_nope_head_dim": rng.choice((8, 16, 24)), "qk_rope_head_dim": rng.choice((4, 8, 12)),
        "v_head_dim": rng.choice((8, 12, 28)), "n_routed_experts": experts, "num_experts_per_tok": rng.randint(1, 4),
        "n_shared_experts": rng.choice((1, 2)), "moe_intermediate_size": rng.choice((32, 64, 96)),
        "first_k_dense_replace": rng.choice((0, 1)), "intermediate_size": rng.choice((37, 96)),
        "routed_scaling_factor": rng.choice((1.0, 2.827)), "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
    }  # fmt: skip


def make(shape: Shape, folder: Path, seed: int) -> Family:
    """The checkpoint and its oracle."""
    torch.manual_seed(seed)
    if shape.kind.startswith("deepseek_v41"):
        path = values = make_v41(folder / "plain", seed, **shape.fields)
        if shape.kind == "deepseek_v41_fp4":
            path, values = quantized_v41(path, folder)
        reference = V41Reference(values)
        return Family(path, lambda ids, images: reference.logits(ids), text_prompts, reference.embeddings)
    if shape.kind == "kimi_k3":
        path = kimi_k3.make_k3(folder / "k3", seed, **shape.fields)
        formulas = kimi_k3.K3Reference(path)
        return Family(path, lambda ids, images: formulas.logits(ids), text_prompts, formulas.embeddings)
    if shape.kind == "ling_v2_5":
        path = ling_v2_5.make_ling(folder / "ling", seed, **shape.fields)
        own = ling_v2_5.LingReference(path)
        return Family(path, lambda ids, images: own.logits(ids), text_prompts, own.embeddings)
    if shape.kind == "kimi_k25_int4":
        made = kimi_checkpoints.make_kimi(folder / "k25", seed, int4=True, **shape.fields)
        return Family(made.path, made.logits, text_prompts, made.model.get_input_embeddings().weight)
    source = v4_checkpoints.make_v4(folder / "plain", seed, **shape.fields)
    path, values = quantized_copy(source, folder, shape.kind.removeprefix("deepseek_v4_"))
    model = v4_checkpoints.load_v4(values)

    @torch.no_grad()
    def logits(ids: list[int], images: Any) -> Tensor:
        found: Tensor = model(torch.tensor([ids])).logits[0]
        return found

    return Family(path, logits, text_prompts, model.get_input_embeddings().weight)


def check(shape: Shape, folder: Path, seed: int) -> float:
    """The largest relative error of the logits of a token that rounding does not decide. Raises Refused."""
    rng = random.Random(seed)
    tokens = [rng.randrange(5, 250) for _ in range(LENGTH)]
    try:
        family = make(shape, folder, seed)
        want = family.logits(tokens, [])
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    page = load_model_config(family.path).page_multiple * shape.page
    loaded = stepper.load(family.path, shape.row, page_size=page, seed=seed)
    loaded = stepper.Stepper(
        loaded.model, loaded.config, loaded.backends, max_rows=4, max_context=-(-LENGTH // page) * page, page_size=page,
        seed=seed,
    )  # fmt: skip
    got, begin = [], 0
    while begin < LENGTH:
        decode = begin > 0 and rng.random() < 0.6
        end = min(LENGTH, begin + rng.choice((1, 1, 2, 5) if decode else (1, 7, 16, 33, 64)))
        got.append(loaded.step([Chunk(0, tokens[begin:end], decode)])[0])
        begin = end
    error = (torch.cat(got) - want).norm(dim=-1) / want.norm(dim=-1)
    if float(error.max()) > TOLERANCE:
        sure = family.moved(tokens, []) < MOVED
        if sure.sum() < LENGTH // 2:
            raise Refused("rounding decides most tokens")
        error = error[sure]
    return float(error.max())


if __name__ == "__main__":
    run_draws(__doc__, KINDS, 30, draw, within_tolerance(check))
