"""Tiny random DeepSeek V4 checkpoints by transformers' class, under the published names.

Layers of all kinds: window alone, heavily compressed (HCA), sparse (CSA); two choose experts by token id. Within 64
tokens the window ends, entries of all layers become visible and the indexer selects some of them.

With few index heads the products of all heads may be negative: such entries tie with score 0, and transformers selects
any of them.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.byte_tokenizer import BOS, EOS, VOCAB_SIZE, write_tokenizer
from tests.models.checkpoints import write_tensors

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32, "o_groups": 2,
    "o_lora_rank": 16, "sliding_window": 16, "index_n_heads": 24, "index_head_dim": 16, "index_topk": 4,
    "compress_rates": {CSA: 4, HCA: 16}, "layer_types": [SLIDING, HCA, CSA, HCA, CSA], "num_hash_layers": 2,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 8, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64,
    },
    "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
    "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": BOS, "eos_token_id": EOS,
}  # fmt: skip
PUBLISHED_RATES: dict[str, Any] = {
    "compress_rates": None, "layer_types": None, "compress_ratios": [0, 128, 4, 128, 4], "sliding_window": 128,
    "index_topk": 8, "max_position_embeddings": 1024,
}  # fmt: skip
"""Changes to `FIELDS`: the window and the rates of the published models, in the published form."""
STD = 0.15
"""Standard deviation of the weights of projections."""

_PARTS = {
    "model.": "", "embed_tokens.": "embed.", "lm_head.": "head.",
    "hc_head.hc_": "hc_head_", "attn_hc.": "hc_attn_", "ffn_hc.": "hc_ffn_", "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.", "mlp.": "ffn.", "gate.e_score_correction_bias": "gate.bias",
    "shared_experts.gate_proj.": "shared_experts.w1.", "shared_experts.down_proj.": "shared_experts.w2.",
    "shared_experts.up_proj.": "shared_experts.w3.",
    "self_attn.compressor.indexer.q_b_proj.": "self_attn.indexer.wq_b.",
    "self_attn.compressor.indexer.scorer.": "self_attn.indexer.",
    "self_attn.compressor.indexer.": "self_attn.indexer.compressor.", "compressor.kv_norm.": "compressor.norm.",
    "position_bias": "ape", "gate_proj.": "wgate.", "kv_proj.": "wkv.", "q_a_norm.": "q_norm.", "q_a_proj.": "wq_a.",
    "q_b_proj.": "wq_b.", "o_a_proj.": "wo_a.", "o_b_proj.": "wo_b.", "self_attn.sinks": "self_attn.attn_sink",
    "self_attn.": "attn.",
}  # fmt: skip
"""Parts of transformers' names, and of the published names, applied in this order."""
_FLOAT32 = ("hc_", ".ape", ".attn_sink", ".gate.bias")
"""Parts of the names of tensors that are published in float32 beside bf16 weights."""


def make_v4(
    path: Path, seed: int = 0, dtype: torch.dtype = torch.float32, num_mtp_layers: int = 0, tokenizer: bool = True,
    **fields: Any,
) -> Path:  # fmt: skip
    """Writes a checkpoint directory.

    Args:
        dtype: of projections and norms; other tensors are float32, as published.
        num_mtp_layers: MTP layers, which transformers does not read.
        fields: changes to `FIELDS`; None removes one.
    """
    import transformers

    raw = {key: value for key, value in (FIELDS | fields).items() if value is not None}
    path.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(raw, seed)
    for index in range(num_mtp_layers):
        tensors |= mtp_tensors(raw, seed, index)
    write_tensors(path, {name: tensor.to(dtype_of(name, tensor, dtype)) for name, tensor in tensors.items()})
    raw["num_nextn_predict_layers"] = num_mtp_layers
    raw |= {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    raw |= {"torch_dtype": str(dtype).removeprefix("torch."), "transformers_version": transformers.__version__}
    (path / "config.json").write_text(json.dumps(raw, indent=1))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    if tokenizer:
        write_tokenizer(path, raw["vocab_size"])
    return path


def load_v4(path: Path) -> Any:
    """transformers' model of a checkpoint, in float32."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # which takes any width of experts
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **eager)
    return model.eval()


def v4_model(raw: dict[str, Any], seed: int) -> Any:
    """transformers' model with random weights in float32. `raw`: fields of config.json. Norm weights are not 1, biases,
    sinks and the mixing of the streams not 0, and a token's experts in a hash layer are different."""
    import transformers

    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    config = transformers.DeepseekV4Config(**copy.deepcopy(raw))
    config._attn_implementation = "eager"
    model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not name.endswith("inv_freq"):
            tensor.data = random_values(name, tensor, raw["n_routed_experts"])
    torch.random.set_rng_state(state)
    return model


def random_values(name: str, like: Tensor, num_experts: int) -> Tensor:
    """Values of a tensor by transformers' name."""
    noise = torch.randn(like.shape)
    if name.endswith("tid2eid"):
        return torch.rand(like.shape[0], num_experts).argsort(-1)[:, : like.shape[1]].contiguous()
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith(("_hc.scale", ".hc_scale")):
        return 1 + 0.3 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if name.endswith((".sinks", "_hc.base", ".hc_base")):
        return noise
    return (0.5 if name.endswith("position_bias") else STD) * noise


def random_tensors(raw: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """The model's tensors by published names, in float32; tid2eid in int64."""
    return dict(published_tensors(v4_model(raw, seed).state_dict()))


def mtp_tensors(raw: dict[str, Any], seed: int, index: int) -> dict[str, Tensor]:
    """Tensors of an MTP layer: of a model of one layer without entries, and of the projections of its input."""
    layer = {"num_hidden_layers": 1, "layer_types": [SLIDING], "compress_ratios": None, "num_hash_layers": 0}
    own = {key: value for key, value in (raw | layer).items() if value is not None}
    found = random_tensors(own, seed + 1 + index)
    noise = torch.randn((4, raw["hidden_size"], raw["hidden_size"]), generator=torch.Generator().manual_seed(seed))
    found |= {"e_proj.weight": STD * noise[0], "h_proj.weight": STD * noise[1]}
    found |= {"enorm.weight": 1 + 0.2 * noise[2, 0], "hnorm.weight": 1 + 0.2 * noise[3, 0]}
    return {
        f"mtp.{index}.{name.removeprefix('layers.0.')}": tensor
        for name, tensor in found.items()
        if name not in ("embed.weight", "head.weight")
    }


def published_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' tensors under the published names, with one tensor for each projection of an expert."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        block, _, part = name.partition(".experts.")
        if not part:
            found[published_name(name)] = tensor
            continue
        for i, expert in enumerate(tensor):
            prefix = f"{published_name(block + '.')}experts.{i}"
            if part == "down_proj":
                found[f"{prefix}.w2.weight"] = expert
            else:
                found[f"{prefix}.w1.weight"], found[f"{prefix}.w3.weight"] = expert.chunk(2)
    return found


def published_name(name: str) -> str:
    for part, published in _PARTS.items():
        name = name.replace(part, published)
    return name


def dtype_of(name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The published dtype, beside weights of `dtype`."""
    if tensor.dtype == torch.int64:
        return tensor.dtype
    return torch.float32 if any(part in name for part in _FLOAT32) else dtype
