"""The shared expert is computed during dispatch by default with DeepEP or symmetric memory between GPUs; launches that
wait for other ranks come after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_engine.executor.sharded_worker import _overlaps_by_default
from moe_engine.kernels.quantization.protocol import UNQUANTIZED
from moe_engine.parallel.dispatch.build import PhasedDispatcher
from moe_engine.parallel.experts import DispatchedExperts
from moe_engine.parallel.overlap import InlineStream


@pytest.mark.parametrize(
    "row,width,disabled,expected",
    [
        ("deepep", 2048, False, True),
        ("deepep", 2048, True, False),
        ("deepep", 0, False, False),
        ("symm_mem", 2048, False, True),
        ("all_to_all", 2048, False, False),
        (None, 2048, False, False),
    ],
)
def test_where_it_is_the_default(row: str | None, width: int, disabled: bool, expected: bool) -> None:
    dispatch = None if row is None else SimpleNamespace(row=SimpleNamespace(name=row))
    config: Any = SimpleNamespace(
        parallel=SimpleNamespace(dispatch=dispatch),
        model=SimpleNamespace(moe=SimpleNamespace(shared_width=width)),
        args=SimpleNamespace(parallel=SimpleNamespace(disable_shared_expert_overlap=disabled)),
    )
    assert _overlaps_by_default(config) is expected


def test_symmetric_memory_waits_as_late_as_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends, other work, then the launches that wait: programs that wait would keep the device from the other work."""
    from moe_engine.parallel.dispatch.symm_mem import dispatcher  # imports Triton

    calls: list[str] = []

    class Exchange:
        def __init__(self, *sizes: Any) -> None:
            """Has no memory."""

        def lost_ranks(self) -> list[int]:
            return []

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: calls.append(name) or SimpleNamespace(rows=x, counts=None, scales=None)

    monkeypatch.setattr(dispatcher, "SymmMemExchange", Exchange)
    x, ids = torch.zeros(2, 128), torch.zeros(2, 1, dtype=torch.int32)
    shape: Any = SimpleNamespace(
        dtype=torch.float32, hidden=128, fp8=False, num_ranks=2, num_local=1, max_tokens=2, top_k=1,
        mean_rows=lambda tokens: tokens,
    )  # fmt: skip
    memory: Any = SimpleNamespace(
        allocate=lambda *sizes: SimpleNamespace(own=x, addresses=[0, 0]), words_for_host=lambda count: None
    )
    group: Any = SimpleNamespace(rank=0, size=2, timeout_s=1.0)
    made = dispatcher.SymmMemDispatcher(group, shape, memory)
    kernel: Any = SimpleNamespace(
        input_format=lambda weights: UNQUANTIZED, run=lambda batch, weights: calls.append("experts") or batch.x,
        capabilities=SimpleNamespace(row_alignment=None, column_scales=False),
    )  # fmt: skip
    experts = DispatchedExperts(PhasedDispatcher(lambda: {"decode": made}), kernel, None)  # type: ignore[arg-type]
    sent = experts.send(InlineStream(), x, ids.float(), ids, "decode")
    calls.append("other work")
    back = experts.compute(InlineStream(), sent, ids.float())
    calls.append("other work")
    back.wait()
    assert calls == ["send", "other work", "receive", "experts", "combine_send", "other work", "sum"]
    calls.clear()
    assert experts.norms_sums("decode")
    normed = experts.compute_norm(InlineStream(), experts.dispatched(x, ids.float(), ids, "decode"), ids.float())
    calls.append("other work")
    normed(UNQUANTIZED, None, x, x[0], 1e-6)
    assert calls == ["send", "receive", "experts", "combine_send", "other work", "sum_rms_norm"]
    made.dispatch(x, ids, ids.float())
    made.dispatch(x, ids, ids.float())
    with pytest.raises(RuntimeError, match="are pending"):
        made.dispatch(x, ids, ids.float())
