"""DeepGEMM's MegaMoE as a dispatcher: one launch quantizes this rank's tokens into the library's symmetric buffer, with
their choices; the experts' kernel reads the tokens of all ranks there, and its results are summed already.

Source: deep_gemm/__init__.py of sgl-deep-gemm 0.2.5 (SM90SymmBuffer, mega_moe_pre_dispatch_sm90).
Legend: T tokens, D hidden, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch, FusedTokens
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat, unquantized
from moe_engine.parallel.dispatch.protocol import Dispatcher, DispatchShape
from moe_engine.parallel.dispatch.symm_mem.availability import without_multicast


def make_buffer(library: Any, process_group: Any, shape: DispatchShape) -> Any:
    """The symmetric buffer of all layers, for `shape.max_tokens` of each rank. Collective; waits for the device.

    Raises:
        ValueError: the library does not support these sizes, or the GPUs cannot share memory.
    """
    if shape.dtype != torch.bfloat16:
        raise ValueError(f"MegaMoE takes bfloat16 tokens, not {shape.dtype}")
    without_multicast()
    try:
        return library.get_symm_buffer_for_sm90_mega_moe(
            process_group, shape.num_experts, shape.max_tokens, shape.top_k, shape.hidden, shape.width
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"MegaMoE's buffer cannot be made: {reason}; use --moe-a2a-backend deepep") from error


class MegaDispatcher(Dispatcher):
    """A kernel that waits for a lost rank ends the process after 300 s, the library's limit; failure detection is
    earlier.

    Args:
        buffer: of `make_buffer`, shared with other dispatchers: one batch at a time.
        shape: of one mode; its max tokens select the library's schedule.
    """

    takes_rows = False

    def __init__(self, library: Any, buffer: Any, shape: DispatchShape) -> None:
        self._library, self._shape = library, shape
        self._tokens = FusedTokens(buffer, shape.max_tokens)

    def dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> tuple[ExpertBatch, None]:
        """See `Dispatcher.dispatch`; the batch is `fused`, and tokens are quantized here."""
        rows = unquantized(x).contiguous()
        if len(rows) > self._shape.max_tokens:
            raise ValueError(f"{len(rows)} tokens, MegaMoE's buffer was made for {self._shape.max_tokens}")
        buffer = self._tokens.buffer
        self._library.mega_moe_pre_dispatch_sm90(
            rows, topk_ids.to(torch.int32).contiguous(), topk_weights.float().contiguous(), buffer.x, buffer.x_sf,
            buffer.topk_idx, buffer.topk_weights, num_tokens=len(rows),
        )  # fmt: skip
        return ExpertBatch("fused", rows, fused=self._tokens), None

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: None) -> Tensor:
        """The sums themselves."""
        return rows
