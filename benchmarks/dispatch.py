"""Dispatch and combine among ranks of this machine, against plain all-to-alls through gloo, interleaved.

    python -m benchmarks.dispatch [--ranks 2 4] [--tokens 1 8 64 512] [--hidden 2048] [--seconds 0.5] [--no-json]

`ours` is dispatch + combine with no-op experts. `plain` is a direct implementation without a library: rows copied for
every (token, choice), sorted by expert, sent by all_to_all_single and back, weighted and summed at the source; in
normal mode with an exchange of sizes, in low latency with fixed buffers for every (source rank, expert). `wire` is only
two all_to_all_single calls with the same number of bytes as `ours`, without gather, sort or sum. Times are medians of
rank 0 over several consecutive calls, as in consecutive layers. `of needed` is the bytes sent by a rank over the
minimum: one row for each (token, other rank with an expert of it) out and back, and 8 bytes per choice. Finally, the
error added by
FP8 dispatch: of the sums of random SwiGLU experts against float64.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "100")

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.report import add_result_options, command_parser, table, write_if_asked
from moe_engine.kernels.experts.reference import TorchExperts
from moe_engine.parallel.collectives import DistributedGroup, SingleRank
from moe_engine.parallel.dispatch.build import Groups, build
from moe_engine.parallel.dispatch.protocol import DispatchShape, Mode
from moe_engine.parallel.dispatch.tables import ROWS, DispatchChoice
from moe_engine.tuning.stats import median

MODES: tuple[Mode, ...] = ("normal", "low_latency")
CHOICE_BYTES = 8  # an expert's id and its weight
TIMEOUT_S = 60.0
IN_A_ROW = 4  # calls between two clock readings


@dataclass(frozen=True)
class Case:
    ranks: int
    mode: Mode
    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: str


@dataclass
class Line:
    """Milliseconds, and bytes sent by rank 0 in a dispatch and combine."""

    case: Case
    gloo_ms: float
    shared_ms: float
    plain_ms: float
    wire_ms: float
    sent_bytes: int
    needed_bytes: int
    plain_bytes: int


class PlainAllToAll:
    """The baseline: one row per (token, choice), torch.distributed only."""

    def __init__(self, case: Case, static: bool) -> None:
        self._case = case
        self._local = case.experts // case.ranks
        self._static = static
        self.sent_bytes = 0

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.flatten().long()
        order = torch.argsort(flat, stable=True)
        rows = x.index_select(0, order // self._case.top_k)
        back = self._padded(rows, flat[order]) if self._static else self._varying(rows, flat)
        chosen = torch.empty_like(back)
        chosen[order] = back
        return (chosen.view(*ids.shape, -1).float() * weights.unsqueeze(2)).sum(1).to(x.dtype)

    def _varying(self, rows: Tensor, flat: Tensor) -> Tensor:
        counts = torch.bincount(flat, minlength=self._case.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent = counts.view(self._case.ranks, -1).sum(1).tolist()
        received = theirs.view(self._case.ranks, -1).sum(1).tolist()
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows, received, sent)
        experts = torch.arange(self._case.experts, device=rows.device) % self._local
        by_expert = torch.argsort(torch.repeat_interleave(experts, theirs), stable=True)
        results = torch.empty_like(arrived)
        results[by_expert] = arrived.index_select(0, by_expert)  # to the experts' order and back
        back = torch.empty_like(rows)
        dist.all_to_all_single(back, results, sent, received)
        self.sent_bytes = 2 * (len(rows) - sent[dist.get_rank()]) * rows[0].nbytes
        return back

    def _padded(self, rows: Tensor, experts: Tensor) -> Tensor:
        case = self._case
        starts = torch.searchsorted(experts, torch.arange(case.experts))
        place = experts * case.tokens + torch.arange(len(rows)) - starts[experts]
        sent = rows.new_empty(case.experts * case.tokens, rows.shape[1])
        sent[place] = rows
        arrived, back = torch.empty_like(sent), torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent)
        dist.all_to_all_single(back, arrived)
        self.sent_bytes = 2 * sent.nbytes // case.ranks * (case.ranks - 1)
        return back.index_select(0, place)


class Wire:
    """Two all_to_all_single of bytes, equal shares for all ranks."""

    def __init__(self, num_ranks: int, num_bytes: list[int]) -> None:
        shares = [-(-size // num_ranks) * num_ranks for size in num_bytes]
        self._tensors = [(torch.zeros(n, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)) for n in shares]

    def __call__(self) -> None:
        for out, x in self._tensors:
            dist.all_to_all_single(out, x)


def choices(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(getattr(torch, case.dtype))
    ids = torch.stack([torch.randperm(case.experts, generator=generator)[: case.top_k] for _ in range(case.tokens)])
    return x, ids.to(torch.int32), torch.rand(case.tokens, case.top_k, generator=generator)


def needed(case: Case, rank: int, ids: Tensor, row_bytes: int) -> int:
    """Minimum bytes sent by this rank in a dispatch and a combine."""
    total = 0
    for source in range(case.ranks):
        owners = choices(case, source)[1] // (case.experts // case.ranks)
        if source == rank:
            pairs = sum(len({o for o in row if o != rank}) for row in owners.tolist())
            total += pairs * row_bytes + int((owners != rank).sum()) * CHOICE_BYTES
        else:
            total += sum(rank in row for row in owners.tolist()) * row_bytes
    return total


@torch.inference_mode()
def measure(rank: int, case: Case, seconds: float) -> Line:
    """All candidates, interleaved, until the time limit; every rank runs the same number of rounds."""
    sent: list[list[int]] = []
    world = dist.group.WORLD
    group = DistributedGroup(world, TIMEOUT_S, observe=lambda what, size: sent.append(size))
    dtype = getattr(torch, case.dtype)
    shape = DispatchShape(case.experts, case.ranks, case.top_k, case.hidden, case.tokens, dtype)
    x, ids, weights = choices(case, rank)

    def through(backend: str) -> Callable[[], Any]:
        row = next(row for row in ROWS if row.name == backend)
        dispatcher = build(DispatchChoice(row, {"decode": case.mode}, ""), shape, case.tokens, Groups(group))

        def call() -> Tensor:
            batch, handle = dispatcher.dispatch(x, ids, weights, "decode")
            return dispatcher.combine(batch.x, weights, handle)

        return call

    gloo, shared = through("all_to_all"), through("shared_memory")
    sent.clear()
    ours = gloo()
    exchanges = [list(size) for size in sent]
    plain = PlainAllToAll(case, case.mode == "low_latency")
    torch.testing.assert_close(ours.float(), plain(x, ids, weights).float(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(ours, shared(), rtol=0.02, atol=0.02)
    payloads = [[sum(size) for size in exchanges if sum(size) > 8 * case.ranks]]
    dist.broadcast_object_list(payloads, 0)
    wire = Wire(case.ranks, payloads[0])

    contestants: list[Callable[[], Any]] = [gloo, shared, lambda: plain(x, ids, weights), wire]
    times: list[list[float]] = [[] for _ in contestants]
    rounds, start = 0, time.perf_counter()
    while True:
        for own, call in zip(times, contestants):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(IN_A_ROW):
                call()
            own.append((time.perf_counter() - begin) / IN_A_ROW)
        rounds += 1
        keep_going = torch.tensor([rounds < 4 or time.perf_counter() - start < seconds])
        dist.broadcast(keep_going, 0)
        if not keep_going:
            break
    gloo_ms, shared_ms, plain_ms, wire_ms = (median(own[1:]) * 1e3 for own in times)
    leaves = sum(sum(size) - size[rank] for size in exchanges)
    least = needed(case, rank, ids, case.hidden * dtype.itemsize)
    return Line(case, gloo_ms, shared_ms, plain_ms, wire_ms, leaves, least, plain.sent_bytes)


def fp8_errors() -> dict[str, float]:
    """Root mean square of the error over that of the result, with bfloat16 and FP8 dispatch."""
    hidden, width, experts, top_k = 1024, 256, 16, 8
    case = Case(1, "normal", 64, hidden, experts, top_k, "bfloat16")
    x, ids, weights = choices(case, 0)
    generator = torch.Generator().manual_seed(1)
    kernel = TorchExperts()
    loaded = kernel.allocate(experts, hidden, width, torch.bfloat16, "cpu")
    exact = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(experts):
        gate, up, down = (torch.randn(width, hidden, generator=generator).bfloat16() / hidden**0.5 for _ in range(3))
        kernel.load_expert(loaded, expert, gate, up, down.t())
        share = (weights * (ids == expert)).sum(1, keepdim=True)
        rows = x.double()
        inner = torch.nn.functional.silu(rows @ gate.double().t()) * (rows @ up.double().t())
        exact += share * (inner @ down.double())
    found = {}
    for name in ("bfloat16", "fp8"):
        shape = DispatchShape(experts, 1, top_k, hidden, case.tokens, torch.bfloat16, fp8=name == "fp8")
        row = next(row for row in ROWS if row.name == "local")
        dispatcher = build(DispatchChoice(row, {"decode": "normal"}, ""), shape, case.tokens, Groups(SingleRank()))
        batch, handle = dispatcher.dispatch(x, ids, weights, "decode")
        error = dispatcher.combine(kernel.run(batch, loaded), weights, handle).double() - exact
        found[name] = float(error.square().mean().sqrt() / exact.square().mean().sqrt())
    return found


def _rank_main(rank: int, folder: str, cases: list[Case], seconds: float, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(os.path.join(folder, "store"), cases[0].ranks)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=cases[0].ranks, timeout=timeout)
    lines = [measure(rank, case, seconds) for case in cases]
    if rank == 0:
        queue.put(lines)
    dist.barrier()


def run_world(cases: list[Case], seconds: float) -> list[Line]:
    """The cases of one number of ranks."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, cases, seconds, queue)
        ranks = [context.Process(target=_rank_main, args=(r, *arguments)) for r in range(cases[0].ranks)]
        for process in ranks:
            process.start()
        try:
            return queue.get(timeout=60 + len(cases) * (seconds + 10))
        finally:
            for process in ranks:
                process.join(10)
                process.kill()


def show(lines: list[Line]) -> str:
    header = ["ranks mode tokens", "gloo ms", "plain", "wire", "gloo/plain", "gloo/wire", "shm ms", "gloo/shm"]
    header += ["plain/shm", "MB sent", "of needed", "plain MB"]
    rows = []
    for line in lines:
        case = line.case
        rows.append(
            [
                f"{case.ranks} {case.mode:11s} {case.tokens:4d}",
                *(f"{ms:.2f}" for ms in (line.gloo_ms, line.plain_ms, line.wire_ms)),
                f"{line.gloo_ms / line.plain_ms:.2f}",
                f"{line.gloo_ms / line.wire_ms:.2f}",
                f"{line.shared_ms:.2f}",
                f"{line.gloo_ms / line.shared_ms:.2f}",
                f"{line.plain_ms / line.shared_ms:.2f}",
                f"{line.sent_bytes / 1e6:.2f}",
                f"{line.sent_bytes / max(line.needed_bytes, 1):.3f}",
                f"{line.plain_bytes / 1e6:.2f}",
            ]
        )
    return table(header, rows)


def main() -> None:
    parser = command_parser("dispatch", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="per line")
    add_result_options(parser)
    args = parser.parse_args()
    lines: list[Line] = []
    for ranks in args.ranks:
        cases = [
            Case(ranks, mode, tokens, args.hidden, args.experts, args.top_k, args.dtype)
            for mode in args.modes
            for tokens in args.tokens
        ]
        lines += run_world(cases, args.seconds)
    print(show(lines))
    errors = fp8_errors()
    print("relative error of the sums: " + ", ".join(f"{name} {error:.2%}" for name, error in errors.items()))
    write_if_asked(args, "dispatch", {"lines": [asdict(line) for line in lines], "errors": errors})


if __name__ == "__main__":
    main()
