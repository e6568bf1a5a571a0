"""Scales of the KV cache, as quantization tools write them beside the weights."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_engine.models.tensors.model import LATENT_SCALES


def add_latent_scales(path: Path, num_layers: int) -> tuple[float, ...]:
    """Gives each layer of a checkpoint a scale of its latent, under a random one of the known names, and a v_scale.
    Returns the former."""
    tensors, scales = load_file(file := path / "model.safetensors"), []
    for layer in range(num_layers):
        scale = (torch.rand(()) * 3 + 0.05).to(random.choice((torch.float32, torch.bfloat16, torch.float16)))
        prefix = f"model.layers.{layer}"
        tensors[prefix + random.choice(LATENT_SCALES)] = scale.reshape(random.choice(((), (1,))))
        tensors[f"{prefix}.self_attn.v_proj.v_scale"] = torch.tensor(0.5)
        scales.append(float(scale))
    save_file(tensors, file, metadata={"format": "pt"})
    return tuple(scales)
