"""A model that takes no time, to measure the host overhead of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionCapabilities
from moe_engine.kernels.queries import AttentionBatch
from moe_engine.kernels.sampling.protocol import SamplingKernel
from moe_engine.models.batch import ForwardBatch
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from moe_engine.worker.model_runner import ModelRunner


class StubModel:
    """Logits that favor token 1 for any input. They are shared, so requests that edit their logits are not
    supported."""

    def __init__(self, vocab_size: int, max_rows: int, max_tokens: int) -> None:
        self._hidden = torch.zeros(max_tokens, 1)
        self._logits = torch.zeros(max_rows, vocab_size)
        self._logits[:, 1] = 1.0

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._hidden[: batch.num_tokens]

    def logits(self, hidden: Tensor, sizes: StepSizes | None = None, out: Tensor | None = None) -> Tensor:
        logits = self._logits[: hidden.shape[0]]
        return logits if out is None else out.copy_(logits)


class StubAttention:
    """An attention backend without plans."""

    name = "stub"
    capabilities = AttentionCapabilities()

    def plan(self, batch: AttentionBatch) -> Any:
        return None

    def paged(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("the stub model has no attention")


def stub_runner(
    *,
    max_rows: int = 256,
    context_len: int = 4096,
    vocab_size: int = 1024,
    num_slots: int = 1 << 20,
    sampling: SamplingKernel | None = None,
) -> ModelRunner:
    """A runner whose model takes no time; its KV pool is one element wide. `sampling`: see `ModelRunner`."""
    stream = DeviceStream("cpu")
    pool = KVPool(KVSpec.mla(1, 1, 0, torch.float32), num_slots, 1, stream)
    rows = RequestRows(max_rows, context_len, vocab_size, stream)
    model = StubModel(vocab_size, max_rows, max(max_rows, context_len))
    return ModelRunner(model, pool, rows, StubAttention(), stream, sampling=sampling)
