"""Small config.json files and a machine of known size; no torch, no weights."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.kernels.device import cpu_device
from moe_engine.models.config_file import load_model_config
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.resolve import resolve
from moe_engine.planning.resolved_config import ResolvedConfig
from tests.models.published import V3

GB = 1 << 30

SMALL: dict[str, Any] = {
    **V3,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 1280,
}
SMALL.pop("quantization_config")


def machine(available_gb: float = 20.0, total_gb: float = 24.0, device: str = "cpu", **of_device: Any) -> Machine:
    own = dataclasses.replace(cpu_device(), kind=device, name="test", **of_device)
    return Machine(own, int(total_gb * GB), int(available_gb * GB), 4, "a test", "given")


@pytest.fixture
def model_dir(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config.json and returns its folder."""

    def make(config: dict[str, Any] = SMALL, name: str = "model", **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    return make


@pytest.fixture
def resolved(model_dir: Callable[..., Path]) -> Callable[..., ResolvedConfig]:
    """Resolves flags, given as keywords, for a config on a machine."""

    def make(config: dict[str, Any] = SMALL, on: Machine | None = None, **flags: Any) -> ResolvedConfig:
        folder = model_dir(config)
        return resolve(
            EngineArgs.from_kwargs(**flags), load_model_config(folder), on or machine(), model_path=str(folder)
        )

    return make


def write_safetensors(file: Path, shapes: dict[str, tuple[list[int], str, int]], cut: int = 0) -> None:
    """A file of zeros: name -> (shape, dtype name, bytes an element); `cut` bytes are missing at the end."""
    header, offset = {}, 0
    for name, (shape, dtype, size) in shapes.items():
        length = size
        for dim in shape:
            length *= dim
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset - cut))
