"""One rank's part of dispatch: sums of rows, FP8, records, refusals, and no host waits in low latency."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.permutation_choice import permutation
from moe_engine.parallel.collectives import SingleRank
from moe_engine.parallel.dispatch.all_to_all import StaticAllToAll, VariableAllToAll
from moe_engine.parallel.dispatch.allgather import AllGather
from moe_engine.parallel.dispatch.buffers import Slots
from moe_engine.parallel.dispatch.exchanged import ExchangedDispatcher, LocalExchange
from moe_engine.parallel.dispatch.layouts import GroupedLayout, PaddedLayout
from moe_engine.parallel.dispatch.payload import RecordFormat, decode, encode, quantize, write_parts
from moe_engine.parallel.dispatch.protocol import DispatchShape, Layout, Tokens

SHAPE = DispatchShape(8, 1, 3, 256, 16, torch.bfloat16)


def choices(seed: int, num_tokens: int = 10, hidden: int = 256) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(num_tokens)]).int()
    return x, ids, torch.rand(num_tokens, 3, generator=generator)


def test_fp8_is_within_half_a_step_of_its_block() -> None:
    x = torch.randn(50, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 50).unsqueeze(1)
    data, scales = quantize(x)
    assert data.dtype == torch.float8_e4m3fn and scales.shape == (50, 4) and bool(data.float().isfinite().all())
    back = decode(Tokens(data, scales, x, x), torch.float32)
    largest = x.unflatten(1, (-1, 128)).abs().amax(2).repeat_interleave(128, 1)
    assert bool(((back - x).abs() <= x.abs() / 16 * 1.001 + largest / 448 / 1024 * 1.001).all())
    assert bool(quantize(torch.zeros(2, 128))[0].float().eq(0).all())


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("dtype", "hidden"), [(torch.bfloat16, 128), (torch.float32, 384), (torch.float16, 1280)])
def test_records_hold_a_token_and_its_choices(fp8: bool, dtype: torch.dtype, hidden: int) -> None:
    x, ids, weights = choices(5, hidden=hidden)
    sent = encode(x.to(dtype), ids, weights, fp8)
    form = RecordFormat.of(DispatchShape(8, 1, 3, hidden, 16, dtype, fp8))
    records = torch.full((10, form.num_bytes), 0xEE, dtype=torch.uint8)
    write_parts(sent, form.view(records))
    found = form.view(records.clone())
    assert torch.equal(found.data.float(), sent.data.float()) and torch.equal(found.weights, weights)
    assert torch.equal(found.ids, ids)
    assert (found.scales is None) == (sent.scales is None)
    assert found.scales is None or torch.equal(found.scales, sent.scales)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", ["torch", "cpu"])
def test_one_rank_gives_the_weighted_sums_of_its_experts(rows: str) -> None:
    x, ids, weights = choices(6)
    batch, handle = (ours := dispatcher(rows)).dispatch(x, ids, weights)
    assert batch.offsets is not None
    assert torch.equal(batch.offsets.diff(), ids.flatten().bincount(minlength=8).int())
    expert = torch.arange(8).repeat_interleave(batch.offsets.diff())
    want = (x.double().unsqueeze(1) * (weights * (ids + 1)).double().unsqueeze(2)).sum(1)
    got = ours.combine(batch.x * (expert + 1).unsqueeze(1).bfloat16(), weights, handle)
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2**-6)


def dispatcher(rows: str = "torch", static: bool = False) -> ExchangedDispatcher:
    kernels: Permutation = TorchPermutation() if rows == "torch" else permutation(torch.bfloat16)
    device = torch.device("cpu")
    layout: Layout = PaddedLayout(SHAPE, kernels, device) if static else GroupedLayout(SHAPE, kernels, device)
    return ExchangedDispatcher(SHAPE, LocalExchange(), layout, None if static else kernels)


@pytest.mark.parametrize("rows", ["torch", "cpu"])
@pytest.mark.parametrize("wrong", [[0, 5, 5], [0, 1, 8], [0, 1, -2]])
def test_wrong_choices_are_refused(wrong: list[int], rows: str) -> None:
    x, ids, weights = choices(7)
    ids[4] = torch.tensor(wrong)
    with pytest.raises(ValueError, match="repeated expert" if wrong[1] == wrong[2] else r"outside 0\.\.7"):
        dispatcher(rows).dispatch(x, ids, weights)


def test_handles_are_used_once_with_the_weights_of_their_dispatch() -> None:
    x, ids, weights = choices(8)
    ours = dispatcher()
    batch, handle = ours.dispatch(x, ids, weights)
    with pytest.raises(ValueError, match="passed to dispatch"):
        ours.combine(batch.x, weights.clone(), handle)
    ours.combine(batch.x, weights, handle)
    with pytest.raises(RuntimeError, match="already combined"):
        ours.combine(batch.x, weights, handle)


def test_low_latency_keeps_within_its_rows_even_if_experts_are_named_twice() -> None:
    """Ids are not checked; rows beyond the capacity are dropped."""
    x, ids, weights = choices(11, num_tokens=16)
    ids.fill_(3)
    ours = dispatcher(static=True)
    batch, handle = ours.dispatch(x, ids, weights)
    assert batch.counts is not None and batch.counts.tolist() == [0, 0, 0, 16, 0, 0, 0, 0]
    assert ours.combine(batch.x, weights, handle).isfinite().all()


def test_more_tokens_than_agreed_and_uneven_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens in one dispatch; this dispatcher was made for 16"):
        dispatcher(static=True).dispatch(*choices(9, num_tokens=17))
    with pytest.raises(ValueError, match="10 experts cannot be divided evenly among 4 ranks"):
        DispatchShape(10, 4, 2, 128, 8, torch.float32)
    with pytest.raises(ValueError, match="128 channels; hidden is 192"):
        DispatchShape(8, 4, 2, 192, 8, torch.bfloat16, fp8=True)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("exchange", [StaticAllToAll, AllGather, VariableAllToAll])
def test_the_host_never_waits_in_low_latency(exchange: type, fp8: bool) -> None:
    """Fake tensors have no values: every read of a value raises. Normal mode raises, so the test can fail."""
    shape = replace(SHAPE, fp8=fp8)
    with FakeTensorMode():
        group = SingleRank()
        rows = TorchPermutation()
        option = {AllGather: (True,), VariableAllToAll: (rows,)}.get(exchange, ())
        made = exchange(group, shape, *option)
        padded = PaddedLayout(shape, rows, torch.device("cpu"))
        ours = ExchangedDispatcher(shape, made, padded, None)
        x = torch.empty(10, 256, dtype=torch.bfloat16)
        ids = torch.empty(10, 3, dtype=torch.int32)
        weights = torch.empty(10, 3)

        def run() -> torch.Tensor:
            batch, handle = ours.dispatch(x, ids, weights)
            assert batch.x.shape == (8, 16, 256) and batch.counts is not None and batch.counts.shape == (8,)
            return ours.combine(batch.x, weights, handle)

        if exchange is VariableAllToAll:
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                run()
        else:
            assert run().shape == (10, 256)


def test_whoever_begins_with_no_result_alive_begins_alike() -> None:
    """An odd number of earlier layers must not shift the slots: graphs of different sizes are replayed alternately."""
    slots = Slots()
    for _ in range(3):
        assert slots.take() == 0
        slots.release(0)
    assert (slots.take(), slots.take()) == (0, 1)
    slots.release(1)
    slots.release(0)
    assert slots.take() == 0
