"""Stand-in for DeepEP's second generation on a simulated device, and its cost.

A token is sent once to each rank that has some of its experts, then copied to the row of each expert; a rank's results
of a token are summed before they are returned. No measurement of it for decodes is published: rates and latencies are
those of the first generation.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.costs import size
from benchmarks.step_costs.hardware import Hardware

NUM_SMS = 24
"""As published for 8 ranks; bytes of a launch are not limited by it."""


def elastic_buffer(libraries: Any, hardware: Hardware, num_nodes: int, target_ranks: float) -> type:
    """The class `ElasticBuffer`. `libraries`: records the calls. target_ranks: ranks that a token may choose."""
    from benchmarks.step_costs.libraries import message_cost, targets_of

    class ElasticBuffer:
        num_rdma_ranks = num_nodes

        def __init__(self, group: Any, *, num_max_tokens_per_rank: int, hidden: int, **options: Any) -> None:
            self._size = group.size()

        def get_theoretical_num_sms(self, num_experts: int, num_topk: int, **rates: float) -> int:
            return NUM_SMS

        def _messages(self, operation: str, waits: bool, tokens: int, copies: float, row_bytes: int) -> Cost:
            mode = "normal" if waits else "low_latency"
            return message_cost(hardware, mode, operation, copies, row_bytes, self._size, num_nodes, tokens)

        def dispatch(
            self, x: Any, *, topk_idx: Tensor, topk_weights: Tensor, num_experts: int, num_max_tokens_per_rank: int,
            expert_alignment: int, do_cpu_sync: bool, do_handle_copy: bool, do_expand: bool,
            use_tma_aligned_col_major_sf: bool, num_sms: int,
        ) -> Any:  # fmt: skip
            data, scales = x if isinstance(x, tuple) else (x, None)
            routing, (tokens, top_k) = libraries._recorder.setting.routing, topk_idx.shape
            local, hidden, device = num_experts // self._size, data.shape[1], data.device
            row_bytes = hidden * data.element_size() + (0 if scales is None else 4 * scales.shape[1])
            copies = tokens * targets_of(top_k, target_ranks)
            libraries.call("elastic_dispatch", self._messages("dispatch", do_cpu_sync, tokens, copies, row_bytes))
            libraries.call("elastic_dispatch_copy", Cost(copies * row_bytes, routing.rows * row_bytes))
            if do_cpu_sync:
                from tests.simulated_cuda import streams

                streams.note_wait("DeepEP's counts")
                rows = sum(-(-count // expert_alignment) * expert_alignment for count in routing.each)
            else:
                worst = self._size * num_max_tokens_per_rank * min(top_k, local) + (expert_alignment - 1) * local
                rows = -(-worst // expert_alignment) * expert_alignment
            out = data.new_empty(rows, hidden)
            handle = SimpleNamespace(
                psum_num_recv_tokens_per_expert=torch.empty(local, dtype=torch.int32, device=device),
                tokens=tokens, copies=copies, waits=do_cpu_sync,
            )  # fmt: skip
            weights = torch.empty(rows, device=device)
            if scales is None:
                return out, None, weights, handle, None
            blocks = scales.shape[1]
            by_columns = torch.empty(blocks, -(-rows // 4) * 4, device=device)[:, :rows].T
            own = by_columns if use_tma_aligned_col_major_sf else torch.empty(rows, blocks, device=device)
            return (out, own), None, weights, handle, None

        def combine(self, x: Tensor, handle: Any) -> Any:
            routing, row_bytes = libraries._recorder.setting.routing, x.shape[1] * x.element_size()
            out = x.new_empty(handle.tokens, x.shape[1])
            cost = self._messages("combine", handle.waits, handle.tokens, handle.copies, row_bytes)
            libraries.call("elastic_combine", replace(cost, read=routing.rows * row_bytes))
            libraries.call("elastic_combine_sum", Cost(handle.copies * row_bytes, size(out)))
            return out, None, None

    return ElasticBuffer
