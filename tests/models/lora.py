"""Random LoRA adapters in PEFT's format, and checkpoints with merged weights, computed in float64."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import write_tensors

PREFIX = "base_model.model."


def make_adapter(
    directory: Path, checkpoint: Path, targets: Sequence[str], rank: int = 4, seed: int = 0, **fields: Any
) -> Path:
    """Writes an adapter of a checkpoint's modules whose names end with `targets`: not of routed experts and MTP layers.

    Args:
        fields: of adapter_config.json, such as lora_alpha, use_rslora, rank_pattern, alpha_pattern.
    """
    directory.mkdir(parents=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(checkpoint), "r": rank,
        "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none", "use_rslora": False,
        "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "use_dora": False, **fields,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    fields = json.loads((checkpoint / "config.json").read_text())
    fields = fields.get("text_config", fields)
    num_layers = fields.get("num_hidden_layers") or fields["num_layers"]
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or ".experts." in module:
            continue
        layer = re.search(r"(?<!vision_model\.encoder\.)layers\.(\d+)\.", module)
        if layer is None or int(layer[1]) >= num_layers:
            continue
        r = _of(config["rank_pattern"], module, rank)
        a = torch.randn(r, weight.shape[1], generator=generator) / math.sqrt(weight.shape[1])
        b = 0.3 * torch.randn(weight.shape[0], r, generator=generator) / math.sqrt(r)
        tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merge(checkpoint: Path, adapter: Path, directory: Path) -> Path:
    """A copy of the checkpoint with W + scaling B A in place of W."""
    shutil.copytree(checkpoint, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, deltas = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in deltas.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        alpha = _of(config["alpha_pattern"], module, config["lora_alpha"])
        scaling = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
        b = deltas[name.replace("lora_A", "lora_B")]
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + scaling * b.double() @ a.double()).to(weight.dtype)
    write_tensors(directory, weights)
    return directory


def _of(patterns: dict[str, Any], module: str, default: Any) -> Any:
    return next((v for key, v in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
