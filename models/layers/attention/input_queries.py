"""Sparse MLA whose queries are products of the layer's input, attention's and the indexer's (Mistral Large 4): no
latent of the query, a factor for each head and position, layers without rotary channels, latents of other layers.

Legend: T tokens, D hidden, H heads of this rank, N channels of a query, R rotary width, C kv_lora_rank, Hi index heads,
I channels of an index head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.head_factors import scale_heads
from moe_engine.kernels.ops.protocol import Ops, RotaryTable
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, common_format, unquantized
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.layers.attention.indexer import index_queries
from moe_engine.models.layers.attention.sparse_mla import SparseMLAAttention
from moe_engine.models.layers.linear import Linear, load_linear, stacks
from moe_engine.models.layers.norm import LayerNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.share import WHOLE, Share

NORM_EPS = 1e-6
"""Epsilon of q_input_norm, as of k_norm."""


class HeadFactors:
    """Scale and bias of `ScaleHeads`; `share`: this rank's heads."""

    def __init__(self, ops: Ops, reader: WeightSource, prefix: str, heads: int, share: Share = WHOLE) -> None:
        names, cut = [f"{prefix}.softmax_scaling.{name}" for name in ("scale", "bias")], Cut(share.cut(heads))
        self.scale, self.bias = (reader.tensor(name, (heads,), cut, dtype=torch.float32) for name in names)
        self._run = ops.capabilities.scale_heads or scale_heads

    def __call__(self, q: Tensor, positions: Tensor, zeros: int = 0) -> Tensor:
        """q [T, H N] -> [T, H, N + zeros]."""
        return self._run(q.unflatten(1, (len(self.scale), -1)), positions, self.scale, self.bias, zeros)


class InputIndexQueries:
    """hidden [T, D] -> index queries [T, Hi, I], not rotated."""

    def __init__(self, mla: MLAConfig, hidden: int, reader: WeightSource, backends: Backends, prefix: str) -> None:
        assert mla.indexer is not None
        name, ((rows_name, rows),) = f"{prefix}.indexer", index_queries(mla, prefix).items()
        self._norm = LayerNorm(backends.ops, reader, f"{name}.q_input_norm", hidden, NORM_EPS)
        self._product = load_linear(backends.linear, reader, [rows_name], [rows], hidden)
        self._factors = HeadFactors(backends.ops, reader, name, mla.indexer.num_heads)

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return self._factors(self._product(self._norm(hidden)), positions)


@dataclass(frozen=True)
class InputQueries:
    """`IndexedQueries` of a step's input. q: attention's before their factors."""

    owner: InputSparseMLA
    q: Tensor
    hidden: Activation
    positions: Tensor

    def queries(self) -> Tensor:
        return self.owner.factors(self.q, self.positions, self.owner.zeros).flatten(1)

    def index_queries(self) -> Tensor:
        assert self.owner.index is not None
        return self.owner.index(unquantized(self.hidden), self.positions)


class InputSparseMLA(SparseMLAAttention):
    """`SparseMLAAttention` by products of the input: one launch, if the matrices are stored alike.

    A layer without rotary channels has zeros in their place, in queries and cache rows, so that kernels see one width
    of rows in all layers. A layer that attends to another one's latents writes index keys alone.
    """

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, *others: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, layer_index, reader, backends, *others, **options)
        prefix, self.index = f"model.layers.{layer_index}.self_attn", None
        if self._indexer is not None:
            self.index = InputIndexQueries(self._mla, config.hidden_size, reader, backends, prefix)

    @property
    def first_product(self) -> Linear:
        return self._inputs[0]

    def _load_query(self, mla: MLAConfig, reader: WeightSource, prefix: str, hidden: int) -> None:
        layer = self._layer_index
        self._queries, self._q = None, None
        self.zeros = mla.qk_rope_head_dim if layer in mla.plain_layers else 0
        """Rotary channels that the layer does not have."""
        rows = {f"{prefix}.q_proj": (mla.num_heads * (mla.qk_head_dim - self.zeros), self._share)}
        indexed, self._has_rows = layer not in mla.shared_layers, mla.source_of(layer) == layer
        if indexed:
            rows[f"{prefix}.indexer.wk"] = mla.index_width, WHOLE
        if self._has_rows:
            rows[f"{prefix}.kv_a_proj_with_mqa"] = mla.stored_width(layer), WHOLE
        local = {name: share.width(count) for name, (count, share) in rows.items()}
        groups = [rows] if stacks(reader, local) else [{name: part} for name, part in rows.items()]
        self._inputs = [self._product(reader, group, hidden) for group in groups]
        self._input_widths = [[local[name] for name in group] for group in groups]
        self._joined = indexed  # `Indexer` has no product of keys
        self.factors = HeadFactors(self._ops, reader, prefix, mla.num_heads, self._share)

    def _product(self, reader: WeightSource, rows: dict[str, tuple[int, Share]], hidden: int) -> Linear:
        counts, shares = [count for count, _ in rows.values()], [share for _, share in rows.values()]
        return load_linear(self._linear, reader, [*rows], counts, hidden, out_shares=shares)

    @property
    def _index_rotary(self) -> RotaryTable:
        table = self._rotary
        return RotaryTable(table.cos_sin[:, :0], table.interleaved) if self.zeros else table

    @property
    def input_format(self) -> ActivationFormat:
        formats = [product.input_format for product in self._inputs]
        return common_format(*formats, *(() if self._indexer is None else (self._indexer.input_format,)))

    def _down(self, hidden: Activation, positions: Tensor) -> tuple[InputQueries, Tensor | None, Tensor | None]:
        q, *others = self._parts_of(hidden)
        return InputQueries(self, q, hidden, positions), *self._kept(others)

    def _kept_of(self, hidden: Activation) -> tuple[Tensor | None, Tensor | None]:
        return self._kept(self._parts_of(hidden)[1:])

    def _parts_of(self, hidden: Activation) -> list[Tensor]:
        products = zip(self._inputs, self._input_widths)
        return [part for product, widths in products for part in product(hidden).split(widths, 1)]

    def _kept(self, parts: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Index keys and kv_a, with zeros for rotary channels that the layer does not have."""
        kv_a = parts[-1] if self._has_rows else None
        if kv_a is not None and self.zeros:  # `pad` by nothing copies
            kv_a = pad(kv_a, (0, self.zeros))
        return parts[0] if self._joined else None, kv_a
