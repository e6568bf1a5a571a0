"""Ling 2.0: a random GLM-4.5 checkpoint under Ling's names. transformers has no class of it; its formulas are those of
GLM-4.5 with norms of q and k, whose model is the reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.byte_tokenizer import write_tokenizer
from tests.models.checkpoints import make_checkpoint, write_tensors

LIKE = "glm4_moe"
_PARTS = {
    "model.embed_tokens.": "model.word_embeddings.", ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.", ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".gate.e_score_correction_bias": ".gate.expert_bias", ".shared_head.norm.": ".final_layernorm.",
}  # fmt: skip
_FIELDS = {
    "n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias",
}  # fmt: skip
_COPIES = re.compile(r"model\.layers\.\d+\.(?:embed_tokens|shared_head\.head)\..+")
_QUERY = re.compile(r"(model\.layers\.\d+)\.self_attn\.q_proj\.(weight|bias)")


def make_ling_v2(directory: str | Path, seed: int, tokenizer: bool = True, **overrides: Any) -> Path:
    """The checkpoint, in a folder with that of GLM-4.5 beside it (`like`); overrides: of `make_checkpoint`."""
    source = make_checkpoint(LIKE, like(Path(directory)), seed, tokenizer=False, use_qk_norm=True, **overrides)
    return as_ling_v2(source, Path(directory), tokenizer)


def like(path: Path) -> Path:
    """The folder of the GLM-4.5 checkpoint of a Ling checkpoint."""
    return path.with_name(f"{path.name}-like")


def as_ling_v2(source: Path, path: Path, tokenizer: bool = True) -> Path:
    """A copy of a GLM-4.5 checkpoint of one file."""
    path.mkdir(parents=True, exist_ok=True)
    tensors, found = load_file(source / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if (query := _QUERY.fullmatch(name)) is not None:
            parts = [tensors[f"{query[1]}.self_attn.{part}_proj.{query[2]}"] for part in "qkv"]
            found[f"{query[1]}.attention.query_key_value.{query[2]}"] = torch.cat(parts)
        elif not re.search(r"\.self_attn\.[kv]_proj\.", name) and not _COPIES.fullmatch(name):
            for old, new in _PARTS.items():
                name = name.replace(old, new)
            found[name] = tensor
    write_tensors(path, found)
    fields = json.loads((source / "config.json").read_text())
    own = {_FIELDS.get(name, name): value for name, value in fields.items()}
    own |= {
        "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "use_bias": False,
        "moe_shared_expert_intermediate_size": fields["moe_intermediate_size"],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(own, indent=1))
    if tokenizer:
        write_tokenizer(path, fields["vocab_size"])
    return path
