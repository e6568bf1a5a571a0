"""What simulated devices refuse and notice, as a process: ``python -m tests.simulated_cuda.outside_rules``.

Prints {rule: None, or how it was broken} as JSON.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.simulated_cuda.install import install

install()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from tests.simulated_cuda import streams  # noqa: E402
from tests.simulated_cuda.streams import HazardError  # noqa: E402

GPU = torch.device("cuda", 0)


@contextmanager
def refused(kind: type[BaseException], part: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert part in str(error), str(error)
        return
    raise AssertionError(f"not refused: {part}")


@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, 2 * tl.load(x + places, mask=places < n), mask=places < n)


def double(x: torch.Tensor, out: torch.Tensor) -> None:
    double_kernel[(triton.cdiv(x.numel(), 4),)](x, out, x.numel(), BLOCK=4)


def devices_are_not_mixed() -> None:
    x = torch.ones(3, device=GPU)
    with refused(RuntimeError, "same device"):
        x + torch.ones(3)
    with refused(ValueError, "cannot be accessed from Triton"):
        double(x, torch.empty(3))
    assert (x * torch.tensor(2.0)).tolist() == [2.0] * 3  # a number may be


def new_and_old_memory_is_poison() -> None:
    assert torch.empty(5, device=GPU).isnan().all()
    assert torch.empty(2, dtype=torch.int32, device=GPU).tolist() == [-1, -1]


def waits_are_listed() -> None:
    x = torch.arange(4.0, device=GPU)
    calls: list[Callable[[], object]] = [
        lambda: x.sum().item(), lambda: x.tolist(), lambda: x[x > 1], lambda: torch.ones(3).to(GPU),
        lambda: x.cpu(), lambda: x.__setitem__(0, 3.0), lambda: torch.cuda.synchronize(),
    ]  # fmt: skip
    for place, call in enumerate(calls):
        streams.waits.clear()
        call()
        assert streams.waits, place
    streams.waits.clear()
    y = torch.ones(4).pin_memory().to(GPU, non_blocking=True)
    y.add_(x).mul_(2)
    y[1:3] = 7
    assert not streams.waits


def a_download_is_there_when_it_was_waited_for() -> None:
    x, host = torch.arange(4.0, device=GPU), torch.empty(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    x.zero_()
    assert host.isnan().all()
    done.synchronize()
    assert host.tolist() == [0.0, 1.0, 2.0, 3.0]


def an_upload_finds_its_source_unchanged() -> None:
    host = torch.ones(4).pin_memory()
    host.to(GPU, non_blocking=True)
    host.zero_()
    with refused(HazardError, "changed while its upload"):
        torch.cuda.synchronize()


def graphs_read_what_their_inputs_hold_now() -> None:
    x, out = torch.zeros(6, device=GPU), torch.zeros(6, device=GPU)
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = x + 1
        double(between, out)
    kept = between.data_ptr()
    assert out.tolist() == [0.0] * 6  # nothing ran
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * value + 2] * 6
    assert between.data_ptr() == kept and between.tolist() == [5.0] * 6
    lost = out.new_zeros(6)
    with torch.cuda.graph(other, pool=graph.pool()):
        temporary = x * 3
        lost.copy_(temporary)
    del temporary, between
    graph.replay()
    other.replay()
    graph.replay()
    assert lost.tolist() == [12.0] * 6 and out.tolist() == [10.0] * 6


def graphs_refuse_what_cannot_be_replayed() -> None:
    x = torch.zeros(3, device=GPU)
    for call, part in (
        (lambda: x.tolist(), "not permitted when stream is capturing"),
        (lambda: torch.ones(3).to(GPU), "pageable memory"),
        (lambda: x[x > 0], "not permitted when stream is capturing"),
    ):
        graph = torch.cuda.CUDAGraph()
        with refused(RuntimeError, part), torch.cuda.graph(graph):
            call()


def memory_that_a_graph_reads_must_stay() -> None:
    x, out = torch.ones(3, device=GPU), torch.zeros(3, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(x)
    graph.replay()
    assert out.tolist() == [1.0] * 3
    del x
    graph.replay()
    assert out.isnan().all()


def streams_are_put_in_order() -> None:
    side, x = torch.cuda.Stream(), torch.ones(4, device=GPU)
    with torch.cuda.stream(side), refused(HazardError, "nothing puts them in order"):
        x.add_(1)
    x = torch.ones(4, device=GPU)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
        done = side.record_event()
    with refused(HazardError, "nothing puts them in order"):
        x.mul_(2)
    torch.cuda.current_stream().wait_event(done)
    assert x.mul_(2).tolist() == [4.0] * 4
    left, right = x[:2], x[2:]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        left.add_(1)
    right.add_(1)  # other bytes
    torch.cuda.current_stream().wait_stream(side)


def memory_goes_back_to_its_own_stream() -> None:
    side, x = torch.cuda.Stream(), torch.ones(4, device=GPU)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    del x
    with refused(HazardError, "given back since"):
        torch.zeros(1, device=GPU)
    torch.cuda.current_stream().wait_stream(side)
    x = torch.ones(4, device=GPU)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    x.record_stream(side)
    del x
    torch.zeros(1, device=GPU)


RULES = (
    devices_are_not_mixed, new_and_old_memory_is_poison, waits_are_listed, a_download_is_there_when_it_was_waited_for,
    an_upload_finds_its_source_unchanged, graphs_read_what_their_inputs_hold_now, graphs_refuse_what_cannot_be_replayed,
    memory_that_a_graph_reads_must_stay, streams_are_put_in_order, memory_goes_back_to_its_own_stream,
)  # fmt: skip


def broken(rule: Callable[[], None]) -> str | None:
    try:
        rule()
    except BaseException:  # also what the rule did not expect
        return traceback.format_exc()[-1500:]
    return None


if __name__ == "__main__":
    print(json.dumps({rule.__name__: broken(rule) for rule in RULES}))
