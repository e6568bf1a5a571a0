"""Tensors of a vision tower, by their names in the checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from moe_engine.models.vision_config import VisionConfig

PREFIX = "visual."
Entry = tuple[str, tuple[int, ...], bool]
"""Name, shape, and whether the tensor is kept in float32."""


def vision_tensors(vision: VisionConfig) -> Iterator[Entry]:
    """All tensors of the tower."""
    for name, shape, wide in _qwen2_5(vision):
        yield PREFIX + name, shape, wide


def _linear(name: str, rows: int, columns: int) -> Iterator[Entry]:
    yield f"{name}.weight", (rows, columns), False
    yield f"{name}.bias", (rows,), False


def _qwen2_5(v: VisionConfig) -> Iterator[Entry]:
    yield "patch_embed.proj.weight", patch_shape(v), False
    for i in range(v.num_layers):
        block = f"blocks.{i}"
        yield f"{block}.norm1.weight", (v.width,), True
        yield f"{block}.norm2.weight", (v.width,), True
        yield from _linear(f"{block}.attn.qkv", 3 * v.width, v.width)
        yield from _linear(f"{block}.attn.proj", v.width, v.width)
        yield from _linear(f"{block}.mlp.gate_proj", v.intermediate, v.width)
        yield from _linear(f"{block}.mlp.up_proj", v.intermediate, v.width)
        yield from _linear(f"{block}.mlp.down_proj", v.width, v.intermediate)
    yield "merger.ln_q.weight", (v.width,), True
    yield from _linear("merger.mlp.0", v.merged_width, v.merged_width)
    yield from _linear("merger.mlp.2", v.out_width, v.merged_width)


def patch_shape(v: VisionConfig) -> tuple[int, ...]:
    """Of the convolution over patches, whose steps are its size: a product with the patch's numbers in order."""
    return v.width, v.channels, v.temporal_patch_size, v.patch_size, v.patch_size
