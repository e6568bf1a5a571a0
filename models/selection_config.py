"""Config of layers whose query tokens see a selection of the context. Imports no torch.

Legend: R rotary width.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.kernels.kv_format import formats as kv_format


@dataclass(frozen=True)
class IndexerConfig:
    """DeepSeek sparse attention: the indexer that selects the tokens to which a query token attends.

    Attributes:
        num_heads, top_k: heads of the index query; max tokens selected for a query token.
        interleaved: its rotary pairs are (2j, 2j+1), else (j, j+R/2); they are the first R channels of a head.
        shared_layers: layers without an indexer, which use the selection of the last preceding layer with an indexer.
        shares_drafts: draft steps of an MTP layer after the first use the selection of the first.
        fp8_keys: index keys are cached as FP8 records also beside latents of another type.
        pool: tokens of a pool. Above 1 the indexer scores means of the keys of adjacent tokens, and selects pools with
            all their tokens; the tokens behind the last whole pool are always seen (GLM-5.3-Flash).
    """

    num_heads: int
    top_k: int
    interleaved: bool
    shared_layers: tuple[int, ...] = ()
    shares_drafts: bool = False
    fp8_keys: bool = False
    pool: int = 1


@dataclass(frozen=True)
class BlockSelection:
    """Block-sparse attention (MiniMax-M3): an indexer with a head of `width` channels for each KV head selects blocks
    of the context by `rule`. `dense_layers` have no indexer and see all positions."""

    rule: BlockRule
    width: int
    dense_layers: tuple[int, ...] = ()

    def key_width(self, kv_dtype: str) -> int:
        """Elements of an index key in the cache: bytes of bfloat16 beside FP8 rows."""
        return 2 * self.width if kv_format.is_fp8(kv_dtype) else self.width
