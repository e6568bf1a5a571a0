"""The indexer of DeepSeek sparse attention: scores of all context tokens, and the best of them for each query token.

    score(t, s) = sum over heads h of weight[t, h] * relu(q[t, h] . key[s])

Legend: T query tokens, Hi index heads, I channels of an index head, K selected tokens, S context tokens.
Source: DeepSeek-V3.2 technical report; `inference/model.py` of its release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.indexer.key_norm import KeyNorm
from moe_engine.kernels.indexer.pools import PoolKernels
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.queries import PagedQueries

LOGITS_BYTES = 256 << 20
"""Max bytes of scores at once; query tokens with more are scored in parts."""


@dataclass(frozen=True)
class BlockChoice:
    """Blocks that a selection also chooses by its scores, for queries of one token each.

    Attributes:
        found: [T, B] int32, set by `IndexerKernel.select`: by ascending number the blocks of `size` positions with the
            highest score of a position, then -1. The block of a token's last position is always among them; of equal
            scores the lower block is.
    """

    size: int
    found: Tensor


class PrepareIndex(Protocol):
    """All work of an indexer between its products and `IndexerKernel.select`, in one launch."""

    def __call__(
        self, keys: Tensor, norm: KeyNorm, q: Tensor | None, gates: Tensor | None, factor: float, positions: Tensor,
        table: RotaryTable, slots: Tensor, cache: Tensor,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """keys [T, I]: normed, rotated and written to cache[slots]. q [T, Hi, I] and gates [P, T, Hi] float32 -> q and
        weights for `select`: rotated, sum of the gates' parts * factor; over FP8 keys quantized, with their scales
        folded. Each step rounds to the dtype of its argument. None without q. The arguments do not change."""


GateProduct = Callable[[Tensor, Tensor], Tensor]
"""x [T, D], weight [Hi, D] of `Ops.prepare_gate` -> [P, T, Hi] float32: parts, whose sum in order is the product to
float32 accuracy."""


class SelectInto(Protocol):
    """`IndexerKernel.select` into lists of other rows, in place, by the launches of a selection alone."""

    def __call__(
        self, q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, top_k: int, rows: Tensor,
        columns: Tensor, counts: Tensor, added: int, plan: Any, blocks: BlockChoice | None = None,
    ) -> None:  # fmt: skip
        """Sets `top_k` columns of rows [T, *] int32, from columns [T] int32 on, to the selected slots, each plus
        `added`, then -1.

        Args:
            counts: [T] int32; 0: the token selects none, whatever its context is.
            blocks: as in `IndexerKernel.select`.
        """


class IndexerKernel(Protocol):
    """Cached index keys are in the activation dtype, or FP8 records (`index_keys`).

    With FP8 keys, queries are quantized too: both are multiplied by a Hadamard matrix, which spreads outliers and keeps
    products, and a query's scale is folded into its weight.
    """

    name: str

    @property
    def prepare(self) -> PrepareIndex | None:
        """None: the layer's own operations, then `write`, and `select` of unquantized queries."""

    @property
    def gates(self) -> GateProduct | None:
        """The product of the head gates, in parts that `prepare` or `select` sums. None: a linear in float32."""

    @property
    def select_into(self) -> SelectInto | None:
        """None: `select`, and operations that place its result; such launches are not captured."""

    @property
    def pools(self) -> PoolKernels:
        """The work on pools of tokens, where the keys of the context are those of pools."""

    def plan(self, queries: PagedQueries) -> Any:
        """Host work for some queries, once per step."""

    def plan_in_place(self, queries: PagedQueries, heads: int) -> Any | None:
        """`plan` for captured launches: the queries' tensors are overwritten at later steps, and contexts may be as
        long as a row of the slot table. All requests have the same number of query tokens. `heads`: Hi; no selection
        needs to have run before. None if the launches cannot be captured."""

    def write(self, keys: Tensor, slots: Tensor, cache: Tensor, page_size: int) -> None:
        """keys [T, I] (normed, rotated) -> cache[slots], [num_slots, 1, I or bytes of a record]."""

    def select(
        self, q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, top_k: int, selected: Selected,
        plan: Any, blocks: BlockChoice | None = None,
    ) -> None:  # fmt: skip
        """Sets `selected.slots` to the `top_k` visible tokens with the highest scores, or to all visible tokens if
        there are at most that many. Of equal scores the lower position is selected. The result does not depend on other
        requests.

        Args:
            q: [T, Hi, I], rotated, or as `prepare` returns it. weights: [T, Hi] float32, all factors of the score
                included; or their parts, as of `gates`.
            blocks: chosen by the same scores; not set over FP8 keys.
        """
