"""LoRA adapters of a loaded model: the one place where they are joined to its linear layers.

Each linear layer with a target module adds the product of its adapters to its own; whole-layer calls, which read
the weights themselves, run in steps without adapters only. On many ranks a product is sharded as its layer: the columns
of A follow those of a row-parallel weight, whose partial sums include the adapters', and the rows of B those of a
column-parallel weight.

Legend: S slots, P projections of a product, R max rank, K in-features, N out-features, H heads, C kv_lora_rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import Tensor

from moe_engine.kernels.lora.protocol import AdapterTokens, LoraKernel, LoraWeights
from moe_engine.kernels.quantization.protocol import Activation, unquantized
from moe_engine.models.checkpoint.safetensors_file import SafetensorsFile
from moe_engine.models.layers.attention.latent_queries import LatentQueries
from moe_engine.models.layers.attention.mla import MLAAttention
from moe_engine.models.layers.attention.step_adapters import KVBAdapters, StepAdapters
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.feed_forward.mlp import MLP
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.layers.linear import Linear, Projection
from moe_engine.models.lora_adapter import TARGETS, Adapter, AdapterModule
from moe_engine.parallel.dp_gather_scatter import TokenLayout


class LoraProduct:
    """The slots of one linear layer's adapters."""

    def __init__(self, parts: tuple[Projection, ...], weights: LoraWeights) -> None:
        self.parts, self.weights = parts, weights

    def clear(self, slot: int) -> None:
        self.weights.a[slot].zero_()
        self.weights.b[slot].zero_()

    def store(self, slot: int, part: int, a: Tensor, b: Tensor) -> None:
        """a [r, K], and b [r, N of the part] with the scaling."""
        rank, weights = len(a), self.weights
        first = part * weights.rank
        weights.a[slot, first : first + rank].copy_(a)
        weights.b[slot, :rank, weights.columns[part] : weights.columns[part + 1]].copy_(b)

    @property
    def num_bytes(self) -> int:
        return self.weights.num_bytes


class KVBProduct(LoraProduct):
    """The slots of kv_b's adapters, whose B is also kept by head for the absorbed form."""

    def __init__(self, part: Projection, weights: LoraWeights, heads: int, nope: int, value: int) -> None:
        super().__init__((part,), weights)
        slots, rank = weights.b.shape[:2]
        self._heads, self._nope = heads, nope
        self.keys = weights.b.new_zeros(slots, heads, rank, nope)
        self.values = weights.b.new_zeros(slots, heads, rank, value)

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.keys[slot].zero_()
        self.values[slot].zero_()

    def store(self, slot: int, part: int, a: Tensor, b: Tensor) -> None:
        super().store(slot, part, a, b)
        by_head = b.unflatten(1, (self._heads, -1)).transpose(0, 1)  # [H, r, N + V]
        self.keys[slot, :, : len(a)].copy_(by_head[..., : self._nope])
        self.values[slot, :, : len(a)].copy_(by_head[..., self._nope :])

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.keys.nbytes + self.values.nbytes


class LoraLayers:
    """The adapters of a model in `num_slots` slots. `attach` makes it."""

    def __init__(self, step: StepAdapters, products: list[LoraProduct]) -> None:
        self.step, self.products = step, products
        self._places = {part.name: (product, i) for product in products for i, part in enumerate(product.parts)}

    @classmethod
    def attach(
        cls, model: Decoder, kernel: LoraKernel, targets: Collection[str], rank: int, num_slots: int
    ) -> LoraLayers:
        """Joins adapters to a loaded model. All slots are empty: their products are zero.

        Args:
            targets: last parts of the names of the modules with adapters.
            rank: the largest rank of an adapter.
        """
        sizes, topology = (num_slots, rank), model.parallel.topology
        step, products = StepAdapters(topology.travels or not topology.cuts_dense), []
        for linear, layout in _linears(model):
            for parts, first in _adaptable(linear.parts):
                if any(part.name.rpartition(".")[2] in targets for part in parts):
                    weights = _empty(parts, sizes, model.embedding.weight)
                    linear.adapt(partial(_add, kernel, step, layout, weights, first))
                    products.append(LoraProduct(parts, weights))
        for layer in model.layers:
            if isinstance(layer.attention, MLAAttention):
                layer.attention.adapters = step
                if "kv_b_proj" in targets:
                    products.append(_attach_kv_b(layer.attention, kernel, step, sizes, model.embedding.weight))
            for part in _feed_forwards(layer.feed_forward):
                part.adapters = step
        model.keep_unquantized()
        model.adapters = step
        return cls(step, products)

    @property
    def num_bytes(self) -> int:
        return sum(product.num_bytes for product in self.products)

    def read(self, adapter: Adapter, dtype: torch.dtype) -> list[tuple[AdapterModule, Tensor, Tensor]]:
        """This rank's part of an adapter's weights, on the host: A [r, K], and B [r, N] with the scaling.

        Raises:
            CheckpointError: the file cannot be read.
        """
        file, found = SafetensorsFile(adapter.file), []
        for module in adapter.modules:
            product, i = self._places[module.name]
            cut = product.parts[i].cut
            a = file.read(adapter.tensor(module, "A")).float()
            b = file.read(adapter.tensor(module, "B")).float()
            a = a if cut.cols is None else a[:, cut.cols]
            b = b if cut.rows is None else b[cut.rows]
            found.append((module, a.to(dtype).contiguous(), (b.T * module.scaling).to(dtype).contiguous()))
        return found

    def warm_up(self, kernel: LoraKernel, tokens: AdapterTokens | None) -> None:
        """Runs every product of one token, so that nothing compiles while serving."""
        assert tokens is not None
        for product in self.products:
            a, b = product.weights.a, product.weights.b
            kernel.add(b.new_zeros(1, b.shape[2]), a.new_zeros(1, a.shape[2]), product.weights, tokens)
            if isinstance(product, KVBProduct):
                keys, values, shared = product.keys, product.values, a.unsqueeze(1)
                heads, latent = keys.shape[1], a.shape[2]
                x, y = a.new_zeros(1, heads, latent), a.new_zeros(1, heads, keys.shape[3])
                kernel.add_heads(x, y, keys, shared, tokens)
                kernel.add_heads(a.new_zeros(1, heads, values.shape[3]), x, shared, values, tokens)

    def store(self, slot: int, weights: list[tuple[AdapterModule, Tensor, Tensor]]) -> None:
        """Puts an adapter into a slot, replacing the previous one; without weights: the base model's result."""
        for product in self.products:
            product.clear(slot)
        for module, a, b in weights:
            product, i = self._places[module.name]
            product.store(slot, i, a, b)


def _linears(model: Decoder) -> Iterator[tuple[Linear, TokenLayout | None]]:
    """The linear layers that have the names of their projections, with the layout of their tokens (None: attention)."""
    for layer in model.layers:
        yield from ((linear, None) for linear in _own(layer.attention))
        whole = layer.feed_forward
        for part in _feed_forwards(whole):
            if isinstance(part, MLP) and whole is not None:
                yield from ((linear, whole.tokens) for linear in _own(part))


def _own(module: object) -> list[Linear]:
    """Without the products of an indexer, which no adapter changes."""
    values = (part for value in vars(module).values() for part in (value if isinstance(value, list) else [value]))
    parts = [value.query if isinstance(value, LatentQueries) else value for value in values]
    return [part for part in parts if isinstance(part, Linear) and part.parts]


def _adaptable(parts: tuple[Projection, ...]) -> Iterator[tuple[tuple[Projection, ...], int]]:
    """Adjacent projections that can have adapters, with the column of the first: between them may be an indexer's."""
    found, start, column = list[Projection](), 0, 0
    for part in parts:
        begin, column = column, column + part.cut.shape(part.shape)[0]
        if part.name.rpartition(".")[2] in TARGETS:
            start = start if found else begin
            found.append(part)
        elif found:
            yield tuple(found), start
            found = []
    if found:
        yield tuple(found), start


def _feed_forwards(part: object) -> Iterator[MLP | MoE]:
    """The feed-forward part, and a mixture's shared expert."""
    if isinstance(part, MLP | MoE):
        yield part
    if isinstance(part, MoE) and part.shared is not None:
        yield part.shared


def _empty(parts: tuple[Projection, ...], sizes: tuple[int, int], like: Tensor) -> LoraWeights:
    columns = [0]
    for part in parts:
        columns.append(columns[-1] + part.cut.shape(part.shape)[0])
    (slots, rank), in_features = sizes, parts[0].cut.shape(parts[0].shape)[1]
    a = like.new_zeros(slots, len(parts) * rank, in_features)
    return LoraWeights(a, like.new_zeros(slots, rank, columns[-1]), tuple(columns))


def _add(
    kernel: LoraKernel, step: StepAdapters, layout: TokenLayout | None, weights: LoraWeights, first: int, y: Tensor,
    x: Activation,
) -> None:  # fmt: skip
    tokens: AdapterTokens | None = step.all if layout is None else step.of_layout(layout)
    if tokens is not None:
        kernel.add(y[:, first : first + weights.columns[-1]], unquantized(x), weights, tokens)


def _attach_kv_b(
    attention: MLAAttention, kernel: LoraKernel, step: StepAdapters, sizes: tuple[int, int], like: Tensor
) -> KVBProduct:
    mla, part = attention.mla, attention.kv_b_part
    weights = _empty((part,), sizes, like)
    product = KVBProduct(part, weights, mla.num_heads, mla.qk_nope_head_dim, mla.v_head_dim)
    attention.kv_b_adapters = KVBAdapters(kernel, step, weights, product.keys, product.values)
    return product
