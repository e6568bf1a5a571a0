"""V4.1 checkpoints in the published form: block FP8, experts in FP4, tables of n-grams in FP8; random codes, and their
values by the definition."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.models.checkpoints import write_tensors
from tests.models.v4_quantized import random_fp4, random_fp8

SECTION: dict[str, Any] = {
    "activation_scheme": "dynamic", "expert_dtype": "fp4", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
}  # fmt: skip
PLAIN_PARTS = (
    "compressor", "indexer.wk.", "weights_proj", "norm", "gate.", "head.", "hc_", "attn_sink", "vision", "aligner",
    "q_weight", "k_weight",
)  # fmt: skip
"""Parts of the published names of tensors that are not quantized."""
WIDTHS: dict[str, Any] = {
    "hidden_size": 96, "moe_intermediate_size": 64, "engram_head_dim": 32,
}  # fmt: skip
"""Fields of config.json with which all quantized matrices have blocks."""
TABLE = ".engram.embed.weight"


def quantized_v41(source: Path, directory: Path) -> tuple[Path, Path]:
    """The checkpoint with random quantized weights, and one with their values."""
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        plain = any(part in name for part in PLAIN_PARTS) or name == "embed.weight"
        if tensor.dim() != 2 or plain:
            stored[name] = values[name] = tensor
            continue
        scale = name.removesuffix(".weight") + ".scale"
        if name.endswith(TABLE):
            stored[name], stored[scale], values[name] = random_fp8(*tensor.shape, (1, 32))
        elif ".experts." in name:
            stored[name], stored[scale], values[name] = random_fp4(*tensor.shape)
        else:
            stored[name], stored[scale], values[name] = random_fp8(*tensor.shape, (32, 32))
    config = json.loads((source / "config.json").read_text())
    for folder, tensors, fields in (("stored", stored, {"quantization_config": SECTION}), ("values", values, {})):
        shutil.copytree(source, directory / folder)
        write_tensors(directory / folder, tensors)
        (directory / folder / "config.json").write_text(json.dumps(config | fields))
    return directory / "stored", directory / "values"
