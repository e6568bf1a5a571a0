"""Random shapes of the families that select tokens, pools, blocks or entries, against transformers:
``python -m tests.models.random_sparse_shapes --count 50``.

As `random_shapes`. Prompts exceed the selections, and rounding decides none of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.models.config_file import load_model_config
from tests.models import sparse, stepper
from tests.models.byte_tokenizer import EOS
from tests.models.checkpoints import BLOCK_SPARSE, GATED_STREAMS, LARGE4, POOLED, make_checkpoint
from tests.models.random_shapes import LENGTH, Refused, _rope, run_draws, within_tolerance
from tests.models.stepper import Chunk
from tests.models.v4_checkpoints import CSA, HCA, SLIDING, make_v4

V4 = "deepseek_v4"
KINDS = ("deepseek_v32", "glm_moe_dsa", LARGE4, POOLED, BLOCK_SPARSE, GATED_STREAMS, V4)
MARGIN = 4e-6


@dataclass
class Shape:
    """As `random_shapes.Shape`."""

    kind: str
    row: str
    fields: dict[str, Any] = field(default_factory=dict)
    dialect: str = "hub"


def draw(kind: str, rng: random.Random) -> Shape:
    fields: dict[str, Any] = {
        "vocab_size": rng.choice((263, 300, 331)), "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
        "hidden_size": rng.choice((48, 60, 84, 120)), "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "num_hidden_layers": rng.choice((2, 3, 4)),
    }  # fmt: skip
    own = {LARGE4: _inputs, POOLED: _pooled, BLOCK_SPARSE: _blocks, GATED_STREAMS: streams, V4: _entries}.get(
        kind, _tokens
    )
    fields |= own(rng, fields["num_hidden_layers"])
    if kind in ("deepseek_v32", "glm_moe_dsa"):
        fields |= {"rope_scaling": _rope(rng, kind), "rope_theta": rng.choice((1e4, 1e6))}
    if kind == "glm_moe_dsa":
        fields |= {"index_topk_freq": rng.choice((1, 2, 3)), "index_skip_topk_offset": rng.choice((1, 2))}
    return Shape(kind, rng.choice(("torch", "cpu")), fields, rng.choice(("hub", "transformers")))


def _mla(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice((1, 2, 3, 5))
    return {
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": rng.choice((12, 24, 40)),
        "kv_lora_rank": rng.choice((16, 32, 36)), "qk_nope_head_dim": rng.choice((8, 16, 24)),
        "v_head_dim": rng.choice((8, 12, 28)), "intermediate_size": rng.choice((37, 96)),
    }  # fmt: skip


def _experts(rng: random.Random, name: str = "n_routed_experts") -> dict[str, Any]:
    count = rng.choice((4, 6, 9))
    fields = {name: count, "num_experts_per_tok": rng.randint(1, 3), "moe_intermediate_size": rng.choice((12, 20, 38))}
    return fields | {"n_group": 1, "topk_group": 1}


def _tokens(rng: random.Random, layers: int) -> dict[str, Any]:
    fields = _mla(rng) | _experts(rng) | {"qk_rope_head_dim": rng.choice((4, 8, 12))}
    fields |= {"first_k_dense_replace": rng.choice((0, 1, layers)), "n_shared_experts": rng.choice((1, 2))}
    fields |= {"index_n_heads": rng.choice((10, 13, 16)), "index_head_dim": rng.choice((16, 32))}
    return fields | {"index_topk": rng.choice((3, 8, 17))}


def _inputs(rng: random.Random, layers: int) -> dict[str, Any]:
    """Without a query's latent. A layer has its own latents, or those of the first one of its kind: transformers shares
    the latents of one layer of a kind."""
    turned = [rng.randint(0, 1) for _ in range(layers)]
    sources = [turned.index(kind) if rng.random() < 0.4 else i for i, kind in enumerate(turned)]
    fields = _tokens(rng, layers) | {"no_rope_layers": turned, "kv_source_layers": sources}
    del fields["q_lora_rank"]
    fields |= {"indexer_types": ["full", *(rng.choice(("full", "shared")) for _ in range(layers - 1))]}
    return fields | {"final_logit_softcapping": rng.choice((2.0, 30.0))}


def _pooled(rng: random.Random, layers: int) -> dict[str, Any]:
    pool = rng.choice((2, 4, 8))
    kinds = [rng.choice(("linear_attention", "deepseek_sparse_attention")) for _ in range(layers - 1)]
    fields = _mla(rng) | _experts(rng) | {"n_shared_experts": 1, "index_n_heads": rng.choice((12, 16))}
    fields |= {"index_kpool": pool, "index_topk": pool * rng.choice((1, 3)), "index_head_dim": rng.choice((16, 32))}
    fields |= {"layer_types": [*kinds, "deepseek_sparse_attention"], "hc_mult": rng.choice((2, 3, 4))}
    fields |= {"mlp_layer_types": [rng.choice(("dense", "sparse")) for _ in range(layers)]}
    linear = {"num_heads": rng.choice((1, 2, 3)), "head_dim": rng.choice((8, 12, 20))}
    linear |= {"gate_lower_bound": rng.choice((-5.0, -2.5)), "short_conv_kernel_size": rng.choice((2, 4))}
    return fields | {"linear_attn_config": linear, "swiglu_limit": rng.choice((1.5, 7.0))}


def _blocks(rng: random.Random, layers: int) -> dict[str, Any]:
    groups, width = rng.choice((1, 2, 3)), rng.choice((16, 24, 40))
    part = rng.choice((0.25, 0.5, 1.0))
    sparse_layers = [rng.randint(0, 1) for _ in range(layers - 1)] + [1]
    own = {
        "use_sparse_attention": True, "sparse_num_index_heads": groups, "sparse_index_dim": width + rng.choice((0, 8)),
        "sparse_block_size": rng.choice((4, 8, 16)), "sparse_topk_blocks": rng.choice((2, 3)),
        "sparse_local_block": rng.choice((1, 2)), "sparse_init_block": 0, "sparse_score_type": "max",
        "sparse_attention_freq": sparse_layers, "sparse_disable_index_value": sparse_layers,
    }  # fmt: skip
    return {
        "num_attention_heads": groups * rng.choice((1, 2, 3)), "num_key_value_heads": groups, "head_dim": width,
        "partial_rotary_factor": part, "rotary_dim": int(part * width), "num_local_experts": rng.choice((4, 7)),
        "num_experts_per_tok": rng.choice((1, 3)), "intermediate_size": rng.choice((20, 32)),
        "shared_intermediate_size": rng.choice((20, 44)), "dense_intermediate_size": rng.choice((37, 96)),
        "moe_layer_freq": [rng.randint(0, 1) for _ in range(layers)], "sparse_attention_config": own,
        "swiglu_limit": rng.choice((1.5, 7.0)),
    }  # fmt: skip


def streams(rng: random.Random, layers: int) -> dict[str, Any]:
    """Fields of Qwen3.8-Flash-Next's text model."""
    groups, ratio, keys = rng.choice((1, 2)), rng.choice((2, 4, 8)), rng.choice((1, 2, 3))
    attention = rng.choice(("full_attention", "indexed_attention"))
    kinds = [rng.choice(("linear_attention", attention)) for _ in range(layers - 1)]
    linear = [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"]
    width, longest, rows = rng.choice((16, 24, 40)), rng.choice((2, 3, 4)), rng.choice((1, 2, 3))
    part = rng.choice([part for part in (0.25, 0.5, 1.0) if int(width * part) % 2 == 0])
    half = int(width * part) // 2
    turned = rng.randint(0, half // 3)
    fields = {
        "num_attention_heads": groups * rng.choice((1, 2, 3)), "num_key_value_heads": groups, "head_dim": width,
        "num_experts": rng.choice((4, 7)), "layer_types": [*kinds, attention],
        "num_experts_per_tok": rng.choice((1, 3)), "moe_intermediate_size": rng.choice((12, 32)),
        "shared_expert_intermediate_size": rng.choice((20, 48)), "hc_count": rng.choice((2, 3, 4)),
        "hc_lowrank": rng.choice((8, 12)), "norm_topk_prob": rng.random() < 0.6,
        "ple_layer_ids": rng.sample(linear, rng.randint(0, len(linear))),
        "ple_conv_kernel_size": rng.choice((2, 4, 5)), "linear_conv_kernel_dim": rng.choice((2, 3, 4)),
        "linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.choice((1, 2)),
        "linear_key_head_dim": rng.choice((8, 12)), "linear_value_head_dim": rng.choice((8, 12, 20)),
        "ngram_size": longest, "heads_per_ngram": rows, "ple_embed_dim": (longest - 1) * rows * rng.choice((1, 6, 16)),
        "ngram_vocab_size_base": rng.choice((2, 60, 997)), "split_ngram_parts": rng.choice((1, 5, 512)),
        "make_ngram_vocab_size_divisible_by": rng.choice((1, 8, 128)),
        "indexer_n_heads": rng.choice((12, 16)), "indexer_head_dim": 2 * half + rng.choice((0, 8, 24)),
        "indexer_budget": ratio * rng.choice((1, 2, 3)), "indexer_compress_ratio": ratio,
        "output_gate_type": rng.choice((None, "silu", "sigmoid")), "partial_rotary_factor": part,
        "rope_theta": rng.choice((1e4, 1e6)), "tie_word_embeddings": rng.random() < 0.3,
        "eos_token_id": rng.choice((EOS, [EOS, 7], [7, EOS])),
    }  # fmt: skip
    section = {"mrope_section": [half - 2 * turned, turned, turned], "mrope_interleaved": True}
    return fields | {"rope_scaling": {"rope_type": "default", **section}}


def _entries(rng: random.Random, layers: int) -> dict[str, Any]:
    groups, selected, heavy = rng.choice((1, 2, 3)), rng.choice((2, 4)), rng.choice((8, 16))
    rotated = rng.choice((4, 8, 16))
    scaling = {"type": "yarn", "factor": rng.choice((4, 8)), "original_max_position_embeddings": rng.choice((32, 64))}
    fields = {
        "num_attention_heads": groups * rng.choice((1, 2, 3)), "o_groups": groups, "head_dim": rng.choice((32, 48)),
        "qk_rope_head_dim": rotated, "q_lora_rank": rng.choice((16, 40)), "o_lora_rank": rng.choice((8, 16, 20)),
        "index_n_heads": rng.choice((20, 24)), "index_head_dim": rng.choice((16, 32)),
        "index_topk": rng.choice((1, 3, 6)),
        "compress_rates": {CSA: selected, HCA: heavy}, "sliding_window": rng.choice((16, 21)),
        "layer_types": [rng.choice((SLIDING, CSA, HCA)) for _ in range(layers)],
        "num_hash_layers": rng.randint(0, layers),
        "hc_mult": rng.choice((2, 3, 4)), "hc_sinkhorn_iters": rng.choice((1, 3, 20)),
        "rope_theta": rng.choice((1e4, 5e4)), "compress_rope_theta": rng.choice((1e4, 16e4)),
        "rope_scaling": rng.choice((None, scaling, scaling | {"beta_fast": 16, "beta_slow": 2})),
        "swiglu_limit": rng.choice((1.5, 10.0)), "scoring_func": rng.choice(("sqrtsoftplus", "sigmoid")),
        "tie_word_embeddings": False, "n_shared_experts": 1,
    }  # fmt: skip
    experts = _experts(rng)
    return fields | {name: experts[name] for name in experts if "group" not in name}


def reference(path: Path, seed: int) -> tuple[list[int], Tensor]:
    """A prompt without close selections, and transformers' logits."""
    model, numbers = sparse.load(path), random.Random(seed)

    def drawn() -> tuple[list[int], Tensor]:
        tokens = [numbers.randrange(5, 250) for _ in range(LENGTH)]
        for end in numbers.sample(range(LENGTH), 3):  # over which no n-gram reaches
            tokens[end] = numbers.choice((7, EOS))
        return tokens, model(torch.tensor([tokens])).logits[0]

    with torch.no_grad():
        return sparse.clear_draw(drawn, MARGIN)


def check(shape: Shape, folder: Path, seed: int) -> float:
    """The largest relative error of a token's logits. Raises Refused."""
    try:
        if shape.kind == V4:
            path = make_v4(folder, seed, tokenizer=False, **shape.fields)
        else:
            path = make_checkpoint(shape.kind, folder, seed, tokenizer=False, dialect=shape.dialect, **shape.fields)
        tokens, want = reference(path, seed)
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    loaded = stepper.load(path, shape.row, page_size=load_model_config(path).page_multiple, seed=seed)
    parts = [(tokens[:23], False), (tokens[23:40], False), *(([token], True) for token in tokens[40:50])]
    got = torch.cat([loaded.step([Chunk(0, part, decode)])[0] for part, decode in [*parts, (tokens[50:], True)]])
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


if __name__ == "__main__":
    run_draws(__doc__, KINDS, 30, draw, within_tolerance(check))
