"""The matrices that a quantized copy of a checkpoint has in 8 or 4 bits.

Other engines join some projections of a layer to one matrix, and all experts of a layer to two tensors; each is
quantized as a whole or not at all, so that they load a copy. FP8 has whole blocks of 128 x 128 only: transformers
divides a matrix into equal parts instead of blocks, and vLLM refuses most matrices with other blocks at the edges.
Sources: transformers, integrations/finegrained_fp8; vLLM, layers/quantization (fp8, compressed_tensors).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from moe_engine.errors import ConfigError
from moe_engine.kernels.quantization.codes import GroupCodes
from moe_engine.kernels.quantization.protocol import BLOCK
from moe_engine.models.config import ModelConfig
from moe_engine.models.formats.fused_experts import GROUP
from moe_engine.models.tensors.model import Kind, TensorSpec, model_tensors

_KEPT = (".eh_proj.", ".compressor.", ".shared_head.")
"""Parts of the names of projections that checkpoints publish unquantized."""
_JOINED = {
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"): ("qkv_proj", "qkvb_proj", "in_proj_qkvgfab"),
    ("q_a_proj", "kv_a_proj_with_mqa", "kv_proj"): ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"): ("gate_up_proj",),
    ("in_proj_qkv", "in_proj_z"): ("in_proj_qkvz",),
    ("in_proj_b", "in_proj_a"): ("in_proj_ba",),
}
"""Projections of a block that other engines join to one matrix, those of them that the block has; its names there."""
_INTEGERS_KEEP = (".kv_b_proj.", ".o_a_proj.", ".indexer.wk.")
"""Parts of the names of projections that stay plain among integers: readers multiply the first two by head, and vLLM
joins the last with the plain `weights_proj`, and dequantizes it from FP8 only."""


@dataclass(frozen=True)
class Target:
    """
    Attributes:
        format: `fp8`, `int8`, `int4`, or `mxfp4`, of experts only.
        group: columns with a common scale; int4 only.
    """

    format: str
    group: int = 128

    @property
    def codes(self) -> GroupCodes | None:
        """The integer format; None: another format."""
        if self.format == "int8":
            return GroupCodes(8, 0, scales="bfloat16")
        return GroupCodes(4, self.group) if self.format == "int4" else None

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a projection of the decoder layers can be quantized."""
        if self.format == "mxfp4":
            return self.wants(name) and shape[1] % GROUP == 0
        if self.codes is None:
            return all(size % BLOCK == 0 for size in shape)
        return self.wants(name) and self.codes.takes(shape[1])

    def wants(self, name: str) -> bool:
        """Whether a projection has this format wherever its shape permits."""
        if self.format == "mxfp4":
            return ".experts." in name
        return self.codes is None or not any(part in name for part in _INTEGERS_KEEP)

    @property
    def needs(self) -> str:
        """What a projection that is left out does not have."""
        if self.codes is None and self.format == "fp8":
            return f"whole blocks of {BLOCK} x {BLOCK}"
        return f"whole groups of {self.group if self.codes else GROUP} columns"


def joined_names(modules: Collection[str]) -> set[str]:
    """The names in other engines of the matrices that they make of some of these modules: some of their readers know
    a joined matrix by its own name only (vLLM 0.32.0: MTP layers of DeepSeek V3)."""
    found = set()
    for module in modules:
        block, _, projection = module.rpartition(".")
        for group, names in _JOINED.items():
            found |= {f"{block}.{name}" for name in names if projection in group}
    return found


@dataclass(frozen=True)
class Selection:
    """
    Attributes:
        quantized: names of the tensors that are quantized, in the model; those of single experts too.
        left_out: names of the projections that cannot be quantized, without the numbers of layers.
    """

    quantized: frozenset[str]
    left_out: tuple[str, ...]


def select(source: Path, config: ModelConfig, target: Target) -> Selection:
    """Raises ConfigError: nothing of `source` can be quantized."""
    specs = [
        spec
        for spec in model_tensors(config, include_mtp=config.num_nextn_predict_layers > 0)
        if spec.kind is Kind.LINEAR and spec.name.startswith("model.layers.")
        if not any(part in spec.name for part in _KEPT)
    ]
    refused = {spec.name for spec in specs if not target.takes(spec.name, spec.shape)}
    taken = [spec for spec in specs if not refused.intersection(_joined(spec))]
    if not taken:
        other = {"int4": "a smaller --group-size", "fp8": "--format int8"}.get(target.format, "another format")
        raise ConfigError(f"{source}: no projection has {target.needs}; use {other}")
    wanted = {spec.name for spec in specs if target.wants(spec.name)}
    without = sorted(wanted - {spec.name for spec in taken})
    short = dict.fromkeys(re.sub(r"^model\.layers\.\d+\.|\.weight$", "", name) for name in without)
    return Selection(frozenset(name for spec in taken for name in spec.names()), tuple(short))


def _joined(spec: TensorSpec) -> list[str]:
    """Names of the projections that other engines join with one, itself included."""
    block, projection = spec.name.removesuffix(".weight").rsplit(".", 1)
    if block.endswith(".experts.*"):
        every: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
    else:
        every = next((group for group in _JOINED if projection in group), (projection,))
    return [f"{block}.{name}.weight" for name in every]
