"""Parts of vision towers, whose weights are not in the checkpoint's quantized format.

Legend: N rows, K columns, P patches of an image, D width, H heads, Dh head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.gate_form import GatedActivation
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.varlen.protocol import VarlenKernel
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.layers.linear import Linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.tensors.vision import PREFIX, patch_shape
from moe_engine.models.vision.grid import Grid
from moe_engine.models.weights import WeightSource

BlockNames = tuple[str, str, str | tuple[str, str, str], str, str, str]
"""Argument of `TowerBlock`."""
GatedNames = tuple[str, str, tuple[str, ...], str, tuple[str, ...], str]
"""Argument of `GatedBlock`."""


def load_product(
    backends: Backends,
    reader: WeightSource,
    names: Sequence[str],
    rows: int,
    columns: int,
    stored: tuple[int, ...] | None = None,
    bias: bool = True,
) -> Linear:
    """Matrices [rows, columns] of the same input, stacked. `stored`: their shape in the checkpoint, if it differs."""
    weights = [reader.tensor(f"{name}.weight", stored or (rows, columns)).flatten(1) for name in names]
    biases = [reader.tensor(f"{name}.bias", (rows,)) for name in names] if bias else []
    return Linear(backends.linear, torch.cat(weights), torch.cat(biases) if bias else None)


class LayerNorm:
    """LayerNorm with weight and bias."""

    def __init__(self, reader: WeightSource, prefix: str, width: int, eps: float) -> None:
        self.weight = reader.tensor(f"{prefix}.weight", (width,))
        self.bias = reader.tensor(f"{prefix}.bias", (width,))
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class AttentionWeights(Protocol):
    """A block's projections of attention: queries, keys and values of all heads in one product, and the output."""

    qkv: Linear
    proj: Linear


class UngatedBlock(AttentionWeights, Protocol):
    """A block whose MLP has two products."""

    up: Linear
    down: Linear

    @property
    def norm1(self) -> Callable[[Tensor], Tensor]: ...

    @property
    def norm2(self) -> Callable[[Tensor], Tensor]: ...


class PatchTransformer:
    """Base of the towers: the product with a patch's pixels, and attention without a mask among patches.

    Args:
        patch_name: of the product with the pixels, without prefix; `patch_bias`: it has a bias.
    """

    def __init__(
        self,
        vision: VisionConfig,
        reader: WeightSource,
        backends: Backends,
        *,
        patch_name: str = "patch_embed.proj",
        patch_bias: bool = False,
    ) -> None:
        v = vision
        assert backends.varlen is not None
        self.vision, self.ops = v, backends.ops
        self._attention: VarlenKernel = backends.varlen
        shape = patch_shape(v)
        name = f"{PREFIX}{patch_name}"
        self.patches = load_product(backends, reader, [name], v.width, v.patch_width, shape, bias=patch_bias)

    def attend(
        self, block: AttentionWeights, hidden: Tensor, places: Tensor, table: RotaryTable | None, lens: tuple[int, ...]
    ) -> Tensor:
        """hidden [P, D] -> [P, D]. places: row of `table` for each patch, None: no rotation; lens: patches that attend
        to each other."""
        heads, width = self.vision.num_heads, self.vision.head_dim
        qkv = self._heads(block, hidden)
        if table is not None:
            self.ops.rotate_leading(qkv[:, : 2 * heads], places, table)
        q, k, v = qkv.split(heads, 1)
        return block.proj(self._attention.run(q, k, v, lens, width**-0.5).flatten(1))

    def _heads(self, block: AttentionWeights, hidden: Tensor) -> Tensor:
        """hidden [P, D] -> queries, keys and values of all heads before the rotation, [P, 3H, Dh]."""
        return block.qkv(hidden).view(-1, 3 * self.vision.num_heads, self.vision.head_dim)

    def through_ungated(
        self,
        blocks: Sequence[UngatedBlock],
        hidden: Tensor,
        places: Tensor,
        table: RotaryTable | None,
        lens: tuple[int, ...],
        activation: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The residual stream [P, D] after the blocks. Arguments as of `attend`."""
        for block in blocks:
            hidden = hidden + self.attend(block, block.norm1(hidden), places, table, lens)
            hidden = hidden + block.down(activation(block.up(block.norm2(hidden))))
        return hidden

    def through(
        self,
        blocks: Sequence[GatedBlock],
        residual: Tensor,
        places: Tensor,
        table: RotaryTable,
        lens_of: Callable[[int], tuple[int, ...]],
    ) -> Tensor:
        """Adds the results of the blocks to the residual stream [P, D], in place, without that of the last MLP, which
        it returns: a norm adds it. `lens_of`: of a block; else as `attend`."""
        hidden = residual[:0]
        for i, block in enumerate(blocks):
            hidden = block.norm1.add(hidden, residual) if i else block.norm1(residual)
            hidden = block.norm2.add(self.attend(block, hidden, places, table, lens_of(i)), residual)
            hidden = block.down(self._gated(block.gate_up(hidden)))
        return hidden

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self.vision.activation == "silu":
            return self.ops.silu_and_mul(gate_up, GatedActivation(self.vision.limit))
        gate, up = gate_up.chunk(2, 1)
        return gelu(gate) * up


def frame_lens(grid: Grid) -> tuple[int, ...]:
    """Patches of each frame, for attention within a frame."""
    return (grid[1] * grid[2],) * grid[0]


class TowerBlock:
    """Weights of a block with layer norms and an MLP of two products.

    Args:
        names: after `prefix`: the norms before attention and MLP, then the products of q, k and v (one name, or one
            for each), the attention's output, and the MLP.
    """

    def __init__(
        self, v: VisionConfig, reader: WeightSource, backends: Backends, prefix: str, names: BlockNames
    ) -> None:
        norm1, norm2, proj, up, down = (f"{prefix}.{name}" for name in (*names[:2], *names[3:]))
        parts = (names[2],) if isinstance(names[2], str) else names[2]
        qkv = [f"{prefix}.{part}" for part in parts]
        self.norm1 = LayerNorm(reader, norm1, v.width, v.norm_eps)
        self.norm2 = LayerNorm(reader, norm2, v.width, v.norm_eps)
        self.qkv = load_product(backends, reader, qkv, 3 * v.width // len(qkv), v.width)
        self.proj = load_product(backends, reader, [proj], v.width, v.width)
        self.up = load_product(backends, reader, [up], v.intermediate, v.width)
        self.down = load_product(backends, reader, [down], v.width, v.intermediate)


class GatedBlock:
    """Weights of a block with RMS norms and an MLP with a gate.

    Args:
        names: after `prefix`: the norms before attention and MLP, then the products of q, k and v, the attention's
            output, gate and up, and down; several matrices of one product are stacked.
        biases: of the product of q, k and v, of the attention's output, and of the MLP's products.
    """

    def __init__(
        self,
        v: VisionConfig,
        reader: WeightSource,
        backends: Backends,
        prefix: str,
        names: GatedNames,
        biases: tuple[bool, bool, bool],
    ) -> None:
        def product(parts: tuple[str, ...], rows: int, columns: int, bias: bool) -> Linear:
            found = [f"{prefix}.{part}" for part in parts]
            return load_product(backends, reader, found, rows // len(found), columns, bias=bias)

        norm1, norm2, qkv, proj, gate_up, down = names
        self.norm1 = RMSNorm(backends.ops, reader, f"{prefix}.{norm1}", v.width, v.norm_eps)
        self.norm2 = RMSNorm(backends.ops, reader, f"{prefix}.{norm2}", v.width, v.norm_eps)
        self.qkv = product(qkv, 3 * v.width, v.width, biases[0])
        self.proj = product((proj,), v.width, v.width, biases[1])
        self.gate_up = product(gate_up, 2 * v.intermediate, v.width, biases[2])
        self.down = product((down,), v.width, v.intermediate, biases[2])
