"""Functions that ranks run in `test_ranks`, each on a separate simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simulated_cuda.install import install

ROWS, WIDTH = 3, 5
_groups: dict[int, Any] = {}


def device_of(rank: int) -> str:
    install()
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


def group_of(rank: int) -> Any:
    """The group of all ranks, as in an engine; created once."""
    from moe_engine.parallel.collectives import DistributedGroup

    device = device_of(rank)
    if rank not in _groups:
        everybody = list(range(dist.get_world_size()))
        _groups[rank] = DistributedGroup.of(everybody, "cpu:gloo,cuda:nccl", 20.0, device)
    return _groups[rank]


def drawn(rank: int, seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank))


def collectives(rank: int, seed: int) -> tuple[dict[str, Tensor], list[str]]:
    """Every operation's result, and the host's waits before it read them."""
    group = group_of(rank)
    from tests.simulated_cuda import streams

    x = drawn(rank, seed, 2, ROWS, WIDTH).pin_memory().to(group.device, non_blocking=True)
    narrow = x.to(torch.float8_e4m3fn)
    streams.waits.clear()
    found = {
        "all_gather": group.all_gather(x),
        "reduce_scatter": group.reduce_scatter(x),
        "all_reduce": group.all_reduce(x.clone()),
        "broadcast": group.broadcast(x.clone(), 1),
        "all_to_all": torch.empty_like(narrow),
        "uneven": x.new_empty(2 + 2 * rank, WIDTH),
    }
    group.all_to_all(found["all_to_all"], narrow)
    rows = ([2, 1], [0, 3])  # rows that rank r sends to each
    group.all_to_all(found["uneven"], x[0], [sent[rank] for sent in rows], list(rows[rank]))
    waits = [wait.what for wait in streams.waits]
    return {name: value.cpu() for name, value in found.items()}, waits


def refusals(rank: int) -> list[str]:
    """Errors of tensors that NCCL does not accept, and of a first operation during capture."""
    device = device_of(rank)
    alone = dist.new_group([0, 1], backend="nccl")
    x = torch.zeros(4, 4, device=device)

    def recorded() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dist.all_reduce(x, group=alone)

    tried: list[Callable[[], Any]] = [
        recorded,
        lambda: dist.all_reduce(x.cpu(), group=alone),
        lambda: dist.all_reduce(x[:, :2], group=alone),
        lambda: dist.all_reduce(x.to(torch.int16), group=alone),
        lambda: dist.all_reduce(x.to(torch.float8_e4m3fn), group=alone),
    ]
    return [error_of(call) for call in tried]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def replayed(rank: int, seeds: list[int]) -> list[Tensor]:
    """A sum and a concurrent exchange on a second stream, captured once and replayed over other values."""
    from moe_engine.worker.device_stream import DeviceCommStream

    group = group_of(rank)
    lane = DeviceCommStream(group.device)
    x, received = (torch.zeros(2, WIDTH, device=group.device) for _ in range(2))

    def work() -> Tensor:
        exchange = lane.run(group.all_to_all, received, x)
        total = group.all_reduce(x * 2)
        exchange.wait()
        return total + received

    work()  # creates communicators
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    found = []
    for seed in seeds:
        x.copy_(drawn(rank, seed, 2, WIDTH))
        graph.replay()
        found.append(out.cpu())
    return found


def not_waited_for(rank: int) -> list[str]:
    """Errors of a stream or graph that uses memory of another stream without order."""
    group = group_of(rank)
    work: Any = None
    x = torch.ones(4, device=group.device)

    def forked() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.add_(1)

    side = torch.cuda.Stream()
    work = dist.all_reduce(x, group=group._process_group, async_op=True)
    early = error_of(lambda: x + 1)
    work.wait()
    return [early, error_of(lambda: x + 1), error_of(forked)]


def exchanged(rank: int, kinds: tuple[bool, ...]) -> list[list[float]]:
    """The worst errors of exchanges through symmetric memory, eager and replayed; `kinds`: with FP8 or without. Sets
    torch's capture stream on the device that all ranks share here."""
    device_of(0)
    from tests.distributed.dispatch import test_symm_mem_gpu

    return [test_symm_mem_gpu.run(rank, fp8, 3) for fp8 in kinds]


def summed(rank: int, two_shot: bool) -> list[float]:
    """The worst errors of all-reduces through symmetric memory, eager and replayed, on one device for all ranks."""
    device_of(0)
    from moe_engine.kernels.symm_mem import all_reduce_layout
    from tests.distributed.dispatch import test_symm_mem_gpu

    if two_shot:
        all_reduce_layout.Arenas.is_one_shot = lambda arenas, rows: rows < 2  # type: ignore[method-assign]
    return test_symm_mem_gpu.sum_rows(rank, 2)


def given_back(rank: int) -> list[str]:
    """Errors of freeing memory that another stream reads: directly, and with `DeviceCommStream`, which keeps the memory
    until the read ends."""
    from moe_engine.worker.device_stream import DeviceCommStream

    device = torch.device(device_of(rank))
    lane, side, kept = DeviceCommStream(device), torch.cuda.Stream(), []

    def carelessly() -> None:
        x = torch.ones(8, device=device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kept.append(x * 2)
        del x
        torch.zeros(8, device=device)

    def in_lane() -> None:
        under_way = lane.run(torch.mul, torch.ones(8, device=device), 2)
        torch.zeros(8, device=device)
        assert under_way.wait().tolist() == [2.0] * 8
        torch.zeros(8, device=device)

    found = error_of(carelessly)
    torch.cuda.synchronize()
    return [found, error_of(in_lane)]


def dispatched(rank: int) -> tuple[Tensor, Tensor, list[str]]:
    """Dispatch and combine of a prompt's tokens: weighted sums where expert e multiplies by e + 1, and the host's
    waits."""
    from moe_engine.kernels.permutation_choice import permutation
    from moe_engine.parallel.dispatch.all_to_all import VariableAllToAll
    from moe_engine.parallel.dispatch.exchanged import ExchangedDispatcher
    from moe_engine.parallel.dispatch.layouts import GroupedLayout
    from moe_engine.parallel.dispatch.protocol import DispatchShape
    from tests.simulated_cuda import streams

    group = group_of(rank)
    shape = DispatchShape(8, 2, 3, 128, 32, torch.float32)
    rows = permutation(shape.dtype, "cuda")
    assert rows.name == "triton"
    layout = GroupedLayout(shape, rows, group.device)
    dispatcher = ExchangedDispatcher(shape, VariableAllToAll(group, shape, rows), layout, rows)
    count = 5 + 4 * rank
    x = torch.randn(count, shape.hidden, device=group.device)
    ids = torch.rand(count, 8, device=group.device).topk(3).indices.to(torch.int32)
    weights = torch.rand(count, 3, device=group.device)
    expected = x * (weights * (ids + 1)).sum(1, keepdim=True)
    streams.waits.clear()
    batch, handle = dispatcher.dispatch(x, ids, weights)
    places = torch.arange(len(batch.x), device=group.device)
    experts = torch.searchsorted(batch.offsets, places, right=True) - 1 + rank * shape.num_local
    found = dispatcher.combine(batch.x * (experts + 1).unsqueeze(1), weights, handle)
    waits = [wait.what for wait in streams.waits]
    return found.cpu(), expected.cpu(), waits


def started(rank: int) -> tuple[int, list[str]]:
    """The current device while a rank joins its groups, in a separate thread; and DeepEP's access to NCCL's
    communicator without a collective, after one, and from a thread with another current device."""
    from concurrent.futures import ThreadPoolExecutor
    from types import SimpleNamespace

    from moe_engine.executor.options import RankPlace
    from moe_engine.executor.progress import Progress
    from moe_engine.executor.sharded_worker import sharded_worker
    from moe_engine.parallel.dispatch.deepep import startup

    class Joined(Exception):
        """The current device."""

    def join(*args: Any) -> Any:
        raise Joined(torch.cuda.current_device())

    def start() -> int:
        config: Any = SimpleNamespace(random_seed=0, parallel=SimpleNamespace(dispatch=None))
        place = RankPlace(rank, 2, "TP", device=f"cuda:{rank}")
        try:
            sharded_worker(config, place, Progress(lambda: ""), join)
        except Joined as joined:
            return joined.args[0]
        raise AssertionError

    device = torch.device(device_of(rank))
    with ThreadPoolExecutor(1) as thread:
        current = thread.submit(start).result()
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    backend = group._get_backend(torch.device("cuda"))
    found = ["live" if backend._comm_ptr() else "null"]
    startup.connect(group, device)
    found.append("live" if backend._comm_ptr() else "null")
    torch.cuda.set_device(1 - rank)
    found.append(error_of(lambda: startup.connect(group, device)))
    torch.cuda.set_device(rank)
    return current, found
