"""The indexer with DeepGEMM's scores for prompts, whose keys are gathered once for many query tokens. Decodes are
scored in Triton, which reads paged keys in place.

Legend: T query tokens, Hi index heads, I channels of an index head, S context tokens.
Source: DeepGEMM, csrc/apis/attention.hpp; deep_gemm/__init__.py of sgl-deep-gemm 0.2.5, whose logits are always
compressed: columns count from the start of each query's keys, which is 0 here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.indexer import triton_keys, triton_select
from moe_engine.kernels.indexer.protocol import LOGITS_BYTES, BlockChoice
from moe_engine.kernels.indexer.triton_indexer import IndexPlan, TritonIndexer
from moe_engine.kernels.kv_format.formats import head_scale_offset
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.vendors.probe import DEEP_GEMM_INDEXER, accepts

LEAST_TOKENS = 64
"""Query tokens of a prompt above which gathering its keys pays off: the keys are read and written once more."""


class DeepGemmIndexer(TritonIndexer):
    """`IndexerKernel` for causal queries and FP8 index keys.

    Args:
        library: DeepGEMM; default: the installed one.

    Raises:
        ImportError: the library is missing or lacks `fp8_fp4_mqa_logits`.
    """

    name = "deep_gemm"

    def __init__(self, library: Any | None = None, logits_bytes: int = LOGITS_BYTES) -> None:
        super().__init__(logits_bytes)
        found = DEEP_GEMM_INDEXER.load() if library is None else DEEP_GEMM_INDEXER.check(library)
        self._logits = found.fp8_fp4_mqa_logits
        # builds that can also fill the rest of the rows do so by default
        self._unfilled = {"clean_logits": False} if accepts(self._logits, "clean_logits") else {}

    def select(
        self, q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, top_k: int, selected: Selected,
        plan: Any, blocks: BlockChoice | None = None,
    ) -> None:  # fmt: skip
        if queries.num_requests != 1 or len(q) < LEAST_TOKENS or cache.dtype != torch.uint8:
            super().select(q, weights, cache, queries, top_k, selected, plan, blocks)
            return
        own = IndexPlan.find(plan, queries)
        if q.dtype != torch.float8_e4m3fn:
            q, weights = triton_keys.quantize_queries(q, weights)
        tokens, width, context = len(q), q.shape[2], queries.context_lens[0]
        slots, ends = own.prompt
        records, offset = cache.squeeze(1).index_select(0, slots), head_scale_offset(width)
        keys = records[:, :width].contiguous().view(torch.float8_e4m3fn)
        scales = records[:, offset : offset + 4].contiguous().view(torch.float32).squeeze(1)
        starts = torch.zeros_like(ends)
        step, target = max(1, self._budget // context), triton_select.Selection(selected.slots, top_k)
        for first in range(0, tokens, step):
            part = slice(first, min(first + step, tokens))
            scores = self._logits(
                (q[part], None), (keys, scales), weights[part], starts[part], ends[part], max_seqlen_k=context,
                **self._unfilled,
            )  # fmt: skip
            triton_select.select(scores, queries, own.request_of, first, target)
