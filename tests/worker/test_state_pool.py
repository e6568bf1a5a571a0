"""The states of requests: tensors of each layer and part, zeros for a new request, rows of a step's sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config_sections.state import StateGroup, StatePart
from moe_engine.types import NewRow, SamplingParams
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from moe_engine.worker.kv_cache.state_pool import StatePool

ROWS = 5
GROUPS = (
    StateGroup((1, 2), (StatePart((3, 4), "float32"), StatePart((2,)))),
    StateGroup((4,), (StatePart((6,)),)),
)


def make_pool() -> StatePool:
    return StatePool(GROUPS, ROWS, torch.bfloat16, DeviceStream("cpu"))


def queries(rows: list[int], counts: list[int]) -> PagedQueries:
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    table = torch.zeros(ROWS, 8, dtype=torch.int32)
    return PagedQueries(counts, counts, torch.tensor(rows).int(), starts, torch.tensor(counts).int(), table, 1)


def spec_beside(pool: StatePool) -> KVSpec:
    return KVSpec(tuple(() if i in pool.layers else ((7,),) for i in range(5)), torch.float32)


def make_batch(pool: StatePool, decode: PagedQueries | None, prefill: PagedQueries | None) -> ForwardBatch:
    kv = KVPool(spec_beside(pool), 4, 1, DeviceStream("cpu"), states=pool).layers
    none = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(none, none, none, none, AttentionBatch(decode, prefill), None, kv)


def test_tensors_and_bytes() -> None:
    pool = make_pool()
    assert [tuple(part.shape) for part in pool.layers[2]] == [(ROWS + 1, 3, 4), (ROWS + 1, 2)]
    assert [part.dtype for part in pool.layers[1]] == [torch.float32, torch.bfloat16]
    assert pool.num_bytes == (ROWS + 1) * sum(group.num_bytes("bfloat16") for group in GROUPS)
    assert pool.num_bytes == (ROWS + 1) * (2 * (12 * 4 + 2 * 2) + 6 * 2)


def test_layers_with_a_state_have_no_kv() -> None:
    pool = make_pool()
    spec = spec_beside(pool)
    kv = KVPool(spec, 4, 1, DeviceStream("cpu"), states=pool)
    assert spec.bytes_per_token == 2 * 7 * 4 and kv.num_bytes == 5 * spec.bytes_per_token
    assert isinstance(kv.layers[0], Tensor) and kv.layers[4] is pool.layers[4]


def test_a_new_request_starts_with_zeros() -> None:
    rows = RequestRows(ROWS, 8, 10, DeviceStream("cpu"))
    rows.states = pool = make_pool()
    for parts in pool.layers.values():
        for part in parts:
            part.fill_(torch.nan)
    new = [NewRow(row, f"r{row}", [0], 1, [], SamplingParams(), 0, frozenset()) for row in (3, 0)]
    rows.apply([], new, [])
    for parts in pool.layers.values():
        for part in parts:
            assert not part[[0, 3]].any() and part[[1, 2, 4, 5]].isnan().all()


def test_states_of_a_step_with_decodes_and_prompts() -> None:
    """The sequences of both groups, in the order of the tokens; the states of other rows do not change."""
    pool = make_pool()
    batch = make_batch(pool, queries([4, 1], [1, 2]), queries([2], [5]))
    assert batch.state_rows.tolist() == [4, 1, 2] and batch.sequence_lens == [1, 2, 5]
    pool.layers[4][0].copy_(torch.arange(ROWS + 1)[:, None])
    assert batch.state(4)[:, 0].tolist() == [4, 1, 2]
    batch.set_state(4, batch.state(4) + 10)
    assert pool.layers[4][0][:, 5].tolist() == [0, 11, 12, 3, 14, 5]
    values = torch.rand(3, 2, dtype=torch.bfloat16)
    batch.set_state(2, values, part=1)
    assert torch.equal(pool.layers[2][1][[4, 1, 2]], values) and not pool.layers[1][1].any()


def test_an_idle_batch_has_no_states() -> None:
    batch = make_batch(make_pool(), None, None)
    assert batch.state_rows.tolist() == batch.sequence_lens == [] and batch.state(1).shape == (0, 3, 4)
