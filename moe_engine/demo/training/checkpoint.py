"""Conversion between the training model and DeepSeek's files: names, FP8 blocks, shards, config.json."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .model import DemoConfig, DemoModel

BLOCK = 128
FP8_MAX = 448.0
SHARD_BYTES = 4 << 20
KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "eh_proj", "shared_head")
"""Names with one of these parts are stored unquantized."""


def hub_tensors(model: DemoModel) -> dict[str, Tensor]:
    """The weights under DeepSeek's names, one tensor per expert, still float32 and without the MTP copies."""
    cfg, out = model.cfg, {}
    for name, value in model.state_dict().items():
        if name.startswith("mtp."):
            name = f"layers.{cfg.num_hidden_layers}.{name.removeprefix('mtp.')}"
        name = name if name.startswith("lm_head") else f"model.{name}"
        stem = name.rpartition(".")[0]
        if name.endswith(".mlp.gate_up"):
            for e, (gate, up) in enumerate(v.chunk(2) for v in value):
                out[f"{stem}.experts.{e}.gate_proj.weight"], out[f"{stem}.experts.{e}.up_proj.weight"] = gate, up
        elif name.endswith(".mlp.down"):
            out |= {f"{stem}.experts.{e}.down_proj.weight": v for e, v in enumerate(value)}
        else:
            out[name] = value
    return out


def load_hub_tensors(model: DemoModel, tensors: dict[str, Tensor]) -> None:
    """The inverse of `hub_tensors`: fill the training model from DeepSeek's names."""
    cfg, state = model.cfg, {}
    for name in model.state_dict():
        hub = name.replace("mtp.", f"layers.{cfg.num_hidden_layers}.", 1) if name.startswith("mtp.") else name
        hub = hub if hub.startswith("lm_head") else f"model.{hub}"
        stem = hub.rpartition(".")[0]
        experts = [f"{stem}.experts.{e}." for e in range(cfg.n_routed_experts)]
        if hub.endswith(".mlp.gate_up"):
            pairs = [torch.cat((tensors[e + "gate_proj.weight"], tensors[e + "up_proj.weight"])) for e in experts]
            state[name] = torch.stack(pairs).float()
        elif hub.endswith(".mlp.down"):
            state[name] = torch.stack([tensors[e + "down_proj.weight"] for e in experts]).float()
        else:
            state[name] = tensors[hub].float()
    model.load_state_dict(state)


def expand(scale: Tensor, shape: torch.Size) -> Tensor:
    """A grid of block values expanded to the matrix; blocks at the edges are truncated."""
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 values and the float32 scale of every 128 x 128 block."""
    rows, cols = weight.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-cols // BLOCK) * BLOCK)
    padded[:rows, :cols] = weight
    peak = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax(dim=(1, 3))
    scale = (peak / FP8_MAX).clamp_min(1e-12)
    return (weight / expand(scale, weight.shape)).to(torch.float8_e4m3fn), scale


def dequantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors in float32, with the block scales applied and removed."""
    out = {}
    for name, value in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scale = tensors.get(f"{name}_scale_inv")
        out[name] = value.float() if scale is None else value.float() * expand(scale, value.shape)
    return out


def stored_tensors(model: DemoModel) -> dict[str, Tensor]:
    """The tensors as stored in the files: FP8 with scales, bfloat16, and the MTP copies of embedding and head."""
    out: dict[str, Tensor] = {}
    for name, value in hub_tensors(model).items():
        if name.endswith("e_score_correction_bias"):
            out[name] = value.float().contiguous()
        elif any(part in name for part in KEPT):
            out[name] = value.to(torch.bfloat16).contiguous()
        else:
            out[name], out[f"{name}_scale_inv"] = quantize(value.float())
    prefix = f"model.layers.{model.cfg.num_hidden_layers}."
    out[f"{prefix}embed_tokens.weight"] = out["model.embed_tokens.weight"].clone()
    out[f"{prefix}shared_head.head.weight"] = out["lm_head.weight"].clone()
    return out


def hub_config(cfg: DemoConfig) -> dict[str, Any]:
    """config.json in DeepSeek's format."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": cfg.num_key_value_heads,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 2,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "rope_scaling": None,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **cfg.to_dict(),
    }


def _layer(name: str) -> int:
    """Sort key of a tensor in the files: embedding, layers in order, then norm and head."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1 if parts[1] == "embed_tokens" else 10**6


def write_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Shards of about SHARD_BYTES, in layer order, and their index."""
    for old in folder.glob("*.safetensors"):
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    for name in sorted(tensors, key=lambda n: (_layer(n), n)):
        if sum(t.nbytes for t in shards[-1].values()) >= SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensors[name]
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checkpoint(model: DemoModel, folder: Path) -> None:
    """Weights, index, config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(stored_tensors(model), folder)
    _write_json(folder / "config.json", hub_config(model.cfg))
    _write_json(
        folder / "generation_config.json",
        {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": False},
    )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every stored tensor of a checkpoint folder."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    out: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        out |= load_file(folder / file)
    return out


def load_checkpoint(folder: Path) -> DemoModel:
    """The training model, filled with the dequantized weights of a checkpoint folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = DemoModel(DemoConfig(**{f.name: config[f.name] for f in fields(DemoConfig)}), torch.float32)
    load_hub_tensors(model, dequantize(read_tensors(folder)))
    return model.eval()
