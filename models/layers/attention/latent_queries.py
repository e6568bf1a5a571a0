"""The norm of a query's latent and the products that read its result: attention's queries, and those of an indexer.

Legend: T tokens, Q q_lora_rank, H heads of attention, N channels of a query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe_engine.kernels.linear.protocol import LinearKernel
from moe_engine.kernels.quantization.protocol import ProductInput, RowsToNorm, common_format
from moe_engine.models.layers.linear import Linear, load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.share import Share


class IndexedQueries(Protocol):
    """A step's queries of a layer with an indexer."""

    def queries(self) -> Tensor:
        """Attention's, [T, H N] of this rank."""

    def index_queries(self) -> Tensor:
        """The indexer's, of all its heads."""


@dataclass(frozen=True)
class NormedLatent:
    """A step's latent for the products of `LatentQueries`."""

    owner: LatentQueries
    rows: ProductInput

    def queries(self) -> Tensor:
        """Attention's queries [T, H N] of this rank."""
        return self.owner.query(self.rows)

    def index_queries(self) -> Tensor:
        """The indexer's queries, of all its heads."""
        assert self.owner.index is not None
        return self.owner.index(self.rows)


class LatentQueries:
    """latent [T, Q] -> queries.

    Args:
        norm: of the latent.
        rows: attention's projection by name, with its unsharded rows; `share`: this rank's part of them.
        index_rows: the indexer's projection; empty: none.

    Attributes:
        norm: a launch of its own, unless every product computes it in its launch.
        query, index: the products.
    """

    def __init__(
        self, kernel: LinearKernel, reader: WeightSource, norm: RMSNorm, rows: Mapping[str, int], share: Share,
        index_rows: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.norm = norm
        self.query = load_linear(kernel, reader, [*rows], [*rows.values()], norm.width, out_shares=[share])
        self.index: Linear | None = None
        if index_rows:
            self.index = load_linear(kernel, reader, [*index_rows], [*index_rows.values()], norm.width)
        norm.feed(common_format(*(product.input_format for product in self._products)))
        norm.precedes(self.query.weight.memory)

    def __call__(self, latent: Tensor) -> NormedLatent:
        """latent: rows may be strided."""
        if all(product.norms(latent) for product in self._products):
            return NormedLatent(self, RowsToNorm(latent, self.norm.weight, self.norm.eps))
        return NormedLatent(self, self.norm(latent))

    @property
    def _products(self) -> list[Linear]:
        return [self.query] if self.index is None else [self.query, self.index]
