"""V4 checkpoints in the published forms: block FP8, and experts in FP4 or FP8; random codes, and their values by the
definition, in numpy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.checkpoints import write_tensors

PLAIN_PARTS = ("compressor", "norm", "gate.", "embed.", "head.", "hc_", "weights_proj", "attn_sink")
"""Parts of the published names of tensors that are not quantized."""
SECTION: dict[str, Any] = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
Drawn = tuple[Tensor, Tensor, Tensor]
"""Codes, scales, and the values."""
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)


def quantized_copy(source: Path, directory: Path, expert_dtype: str) -> tuple[Path, Path]:
    """The checkpoint with random quantized weights, and one with their values."""

    def draw(name: str, rows: int, cols: int) -> Drawn | None:
        if any(part in name for part in PLAIN_PARTS):
            return None
        return (random_fp4 if ".experts." in name and expert_dtype == "fp4" else random_fp8)(rows, cols)

    return write_copies(source, directory, {"quantization_config": SECTION, "expert_dtype": expert_dtype}, draw)


def write_copies(
    source: Path, directory: Path, section: dict[str, Any], draw: Callable[[str, int, int], Drawn | None]
) -> tuple[Path, Path]:
    """The checkpoint with matrices that `draw` makes of a name, rows and columns, and one with their values. `section`:
    fields of the first one's config.json."""
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        drawn = draw(name, *tensor.shape) if tensor.dim() == 2 else None
        if drawn is None:
            stored[name] = values[name] = tensor
        else:
            stored[name], stored[name.removesuffix(".weight") + ".scale"], values[name] = drawn
    config = json.loads((source / "config.json").read_text())
    for folder, tensors, fields in (("stored", stored, section), ("values", values, {})):
        shutil.copytree(source, directory / folder)
        write_tensors(directory / folder, tensors)
        (directory / folder / "config.json").write_text(json.dumps(config | fields))
    return directory / "stored", directory / "values"


def random_fp4(rows: int, cols: int) -> Drawn:
    """int8 [N, K / 2], e8m0 [N, K / 32], and the values."""
    packed = np.random.default_rng(_seed()).integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    powers = np.random.default_rng(_seed()).integers(121, 126, (rows, -(-cols // 32)), dtype=np.uint8)
    codes = np.stack((packed & 15, packed >> 4), -1).reshape(rows, cols)
    numbers = np.where(codes > 7, -1, 1) * E2M1[codes & 7]
    values = numbers * np.exp2(powers.astype(np.float32) - 127).repeat(32, 1)[:, :cols]
    return torch.from_numpy(packed.view(np.int8)), _e8m0(powers), torch.from_numpy(values.astype(np.float32))


def random_fp8(rows: int, cols: int, block: tuple[int, int] = (128, 128)) -> Drawn:
    """e4m3 [N, K], e8m0 by block, and the values."""
    weight = (torch.randn(rows, cols) * 100).to(torch.float8_e4m3fn)
    shape = -(-rows // block[0]), -(-cols // block[1])
    powers = np.random.default_rng(_seed()).integers(115, 119, shape, dtype=np.uint8)
    scales = np.exp2(powers.astype(np.float32) - 127).repeat(block[0], 0).repeat(block[1], 1)[:rows, :cols]
    return weight, _e8m0(powers), torch.from_numpy(weight.float().numpy() * scales)


def _e8m0(powers: Any) -> Tensor:
    return torch.from_numpy(powers).view(torch.float8_e8m0fnu)


def _seed() -> int:
    return int(torch.randint(1 << 31, ()))
