"""The CPU rows against this machine's limits and against torch's kernels, measured in one run.

    python -m benchmarks.cpu_kernels [--json FILE] [--quick] [--threads N] [--only linear,experts,attention,ops]

Weights rotate over more memory than the cache sizes, as in a decode step. Repetitions of all candidates of a line are
interleaved; a value is the lower quartile of its times, which is least sensitive to other load. `limit` is the minimum
time for the line's bytes or its arithmetic, whichever is longer, and `of limit` the share reached. With one thread the
clock is that thread's CPU time, so a busy machine hardly affects the results.
"""

# ruff: noqa: B023 (the calls of a line run within the loop iteration that creates them)

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.interleaved_calls import Call, alternate
from benchmarks.report import command_parser
from moe_engine.kernels.attention.cpu import CpuGQA, CpuMLA
from moe_engine.kernels.cpu.library import load
from moe_engine.kernels.device import cpu_device
from moe_engine.kernels.experts.cpu import CpuExperts
from moe_engine.kernels.linear.cpu import CpuLinear
from moe_engine.kernels.ops.cpu import CpuOps
from moe_engine.kernels.ops.protocol import RotaryTable, RouterSpec
from moe_engine.kernels.queries import AttentionBatch, PagedQueries

DTYPE = torch.bfloat16
COLD = 192 << 20
"""Bytes that the weights of a memory-bound line rotate over."""


@dataclass
class Line:
    family: str
    shape: str
    microseconds: float
    gigabytes_per_second: float
    gigaflops: float
    of_limit: float | None
    others: dict[str, float] = field(default_factory=dict)  # microseconds


@dataclass
class Limits:
    read: float  # bytes per second
    multiply: float  # bf16 operations per second


def packed(weight: Tensor) -> Tensor | None:
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.clone(), None)
    except (RuntimeError, AttributeError):
        return None


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def measure_limits() -> Limits:
    memory = torch.zeros((700 << 20) // 8, dtype=torch.int64)
    weight, x = torch.randn(4096, 4096).to(DTYPE), torch.randn(1024, 4096).to(DTYPE)
    theirs, linear = packed(weight), CpuLinear()
    ours = linear.prepare(weight)
    products: list[Call] = [lambda: linear.run(x, ours)]
    if theirs is not None:
        products.append(lambda: onednn(x, theirs))
    read = memory.numel() * 8 / min(alternate([memory.max], 3))
    return Limits(read, 2 * 1024 * 4096 * 4096 / min(alternate(products, 3)))


class Bench:
    def __init__(self, limits: Limits, seconds: float) -> None:
        self.limits, self.seconds, self.lines = limits, seconds, list[Line]()

    def line(self, family: str, shape: str, calls: dict[str, Call], data: float, flops: float) -> None:
        """`calls`: ours first; data and flops of one call."""
        ours, *others = alternate(list(calls.values()), self.seconds)
        limit = max(data / self.limits.read, flops / self.limits.multiply)
        line = Line(
            family, shape, ours * 1e6, data / ours / 1e9, flops / ours / 1e9, limit / ours if limit > 5e-6 else None,
            {name: seconds * 1e6 for name, seconds in zip(list(calls)[1:], others)},
        )  # fmt: skip
        self.lines.append(line)
        against = "".join(f"  {name} {t:.0f} us (x{t / line.microseconds:.2f})" for name, t in line.others.items())
        share = "     -" if line.of_limit is None else f"{100 * line.of_limit:5.0f}%"
        print(
            f"{family:10s} {shape:34s} {line.microseconds:10.1f} us {line.gigabytes_per_second:7.1f} GB/s "
            f"{line.gigaflops:8.1f} GF/s {share} {against}",
            flush=True,
        )


def rotating(items: list[Any], call: Callable[[Any], Any]) -> Call:
    at = 0

    def run() -> Any:
        nonlocal at
        at = (at + 1) % len(items)
        return call(items[at])

    return run


def linear_lines(bench: Bench) -> None:
    linear = CpuLinear()
    for k, n in ((1024, 1024), (4096, 1024), (1024, 4096)):
        weights = [torch.randn(n, k).to(DTYPE) for _ in range(max(COLD // (2 * n * k), 1))]
        ours, theirs = [linear.prepare(w) for w in weights], [packed(w) for w in weights]
        for m in (1, 4, 8, 16, 32, 256, 2048):
            x = torch.randn(m, k).to(DTYPE)
            calls: dict[str, Call] = {"cpu": rotating(ours, lambda w: linear.run(x, w))}
            if theirs[0] is not None:
                calls["oneDNN packed"] = rotating(theirs, lambda w: onednn(x, w))
            if m <= 32:
                calls["F.linear"] = rotating(weights, lambda w: F.linear(x, w))
            bench.line("linear", f"{m} x {k} -> {n}", calls, 2 * n * k, 2 * m * n * k)


def experts_lines(bench: Bench) -> None:
    kernel = CpuExperts()
    count, hidden, width, top_k = 128, 1024, 128, 8
    layers = [kernel.allocate(count, hidden, width, DTYPE, "cpu") for _ in range(2)]
    gates, downs = torch.randn(count, 2 * width, hidden).to(DTYPE) * 0.03, torch.randn(count, hidden, width).to(DTYPE)
    for layer in layers:
        for e in range(count):
            gate, up = gates[e].chunk(2)
            kernel.load_expert(layer, e, gate, up, downs[e])

    def loop(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, place = (ids == e).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], gates[e]).chunk(2, -1)
            rows = F.linear(F.silu(gate) * up, downs[e])
            out.index_add_(0, token, (rows * weights[token, place, None]).to(DTYPE))
        return out

    for tokens in (1, 4, 16, 32, 128, 2048):
        batches = []
        for _ in range(12 if tokens < 128 else 1):
            ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]).int()
            batches.append((torch.randn(tokens, hidden).to(DTYPE), torch.rand(tokens, top_k), ids))
        used = sum(len(ids.unique()) for _, _, ids in batches) / len(batches)
        both = [(batch, layers[i % 2]) for i, batch in enumerate(batches)]
        calls = {
            "cpu": rotating(both, lambda item: kernel.run_routed(item[0][0], item[0][1], item[0][2], item[1])),
            "F.linear loop": rotating(batches, lambda item: loop(*item)),
        }
        data, flops = used * 6 * hidden * width, 6 * tokens * top_k * hidden * width
        bench.line("experts", f"{tokens} tokens, {count} of {hidden}x{width}, top {top_k}", calls, data, flops)


def paged(lens: list[tuple[int, int]], page: int) -> tuple[PagedQueries, int]:
    pages = [-(-context // page) for _, context in lens]
    order = torch.randperm(sum(pages))
    table = torch.zeros(len(lens), max(context for _, context in lens), dtype=torch.int32)
    for row, (count, (_, context)) in enumerate(zip(pages, lens)):
        mine, order = order[:count], order[count:]
        table[row, :context] = (mine[:, None] * page + torch.arange(page)).flatten()[:context].int()
    starts = torch.tensor([0, *(q for q, _ in lens)]).cumsum(0).int()
    contexts = [c for _, c in lens]
    queries = PagedQueries(
        [q for q, _ in lens], contexts, torch.arange(len(lens)).int(), starts, torch.tensor(contexts).int(), table, page
    )
    return queries, sum(pages) * page


def attention_lines(bench: Bench) -> None:
    mla, gqa = CpuMLA(), CpuGQA()
    for heads, lens in ((16, [(1, 560)] * 32), (16, [(1, 8192)]), (16, [(4, 1024)] * 8), (128, [(1, 2048)] * 2)):
        queries, slots = paged(lens, 16)
        cache = torch.randn(slots, 576).to(DTYPE)
        q = torch.randn(queries.num_tokens, heads, 576).to(DTYPE)
        plan = mla.plan(AttentionBatch(queries, None))

        def by_bmm() -> None:
            for request, mine in enumerate(q.split(queries.query_lens)):
                keys = cache[queries.slot_table[request, : queries.context_lens[request]].long()]
                torch.softmax(mine.flatten(0, 1) @ keys.T, -1) @ keys[:, :512]

        flops = sum(2.0 * a * b * heads * (576 + 512) for a, b in lens)
        data = sum(b for _, b in lens) * 576 * 2
        calls: dict[str, Call] = {"cpu": lambda: mla.absorbed(q, cache, queries, 0.1, plan), "gather + bmm": by_bmm}
        shape = f"{len(lens)} x {lens[0][0]} of {lens[0][1]}"
        bench.line("absorbed", f"{shape}, {heads} heads", calls, data, flops)
    for heads, length in ((16, 512), (16, 2048)):
        queries, _ = paged([(length, length)], 1)
        q, kv = torch.randn(length, heads, 192).to(DTYPE), torch.randn(length, heads, 256).to(DTYPE)
        rope = torch.randn(length, 64).to(DTYPE)
        keys = torch.cat((kv[..., :128], rope[:, None].expand(-1, heads, -1)), -1).transpose(0, 1).contiguous()
        values, qs = kv[..., 128:].transpose(0, 1).contiguous(), q.transpose(0, 1).contiguous()
        calls = {
            "cpu": lambda: mla.expanded(q, kv, rope, queries, 0.1, None),
            "SDPA": lambda: F.scaled_dot_product_attention(qs[None], keys[None], values[None], is_causal=True),
        }
        bench.line("expanded", f"{length} causal, {heads} heads 192/128", calls, 0, length * length * heads * 320.0)
    for heads, groups, width, lens in (
        (16, 4, 128, [(1, 1024)] * 16),
        (16, 16, 64, [(1, 1024)] * 16),
        (16, 4, 128, [(2048, 2048)]),
    ):
        queries, slots = paged(lens, 16)
        k_cache, v_cache = (torch.randn(slots, groups, width).to(DTYPE) for _ in range(2))
        q = torch.randn(queries.num_tokens, heads, width).to(DTYPE)

        def by_sdpa() -> None:
            for request, mine in enumerate(q.split(queries.query_lens)):
                rows = queries.slot_table[request, : queries.context_lens[request]].long()
                k, v = k_cache[rows].transpose(0, 1)[None], v_cache[rows].transpose(0, 1)[None]
                several = len(mine) > 1
                F.scaled_dot_product_attention(mine.transpose(0, 1)[None], k, v, is_causal=several, enable_gqa=True)

        share = 0.5 if lens[0][0] > 1 else 1.0
        flops = share * sum(4.0 * a * b * heads * width for a, b in lens)
        data = sum(b for _, b in lens) * groups * width * 4
        calls = {"cpu": lambda: gqa.paged(q, k_cache, v_cache, queries, 0.1, None), "gather + SDPA": by_sdpa}
        shape = f"{len(lens)} x {lens[0][0]} of {lens[0][1]}, {heads}/{groups} x {width}"
        bench.line("paged", shape, calls, data, flops)


def ops_lines(bench: Bench) -> None:
    ops = CpuOps()
    angles = torch.rand(4096, 64)
    table = RotaryTable(angles, True)
    spec = RouterSpec(128, 8, "sigmoid", True, 8, 4, "top2", True, 2.5)
    gate, bias = torch.randn(128, 1024), torch.randn(128)
    for tokens in (1, 16, 2048):
        x, residual = torch.randn(tokens, 1024).to(DTYPE), torch.randn(tokens, 1024).to(DTYPE)
        weight, positions = torch.ones(1024).to(DTYPE), torch.randint(4096, (tokens,))
        q, kv_a = torch.randn(tokens, 16, 192).to(DTYPE), torch.randn(tokens, 576).to(DTYPE)
        cache, slots = torch.zeros(4096, 576).to(DTYPE), torch.randperm(4096)[:tokens]
        size = tokens * 2048
        calls: dict[str, tuple[Call, int, float]] = {
            "rms_norm": (lambda: ops.rms_norm(x, weight, 1e-6), 2 * size, 0),
            "add_rms_norm": (lambda: ops.add_rms_norm(x, residual, weight, 1e-6), 4 * size, 0),
            "silu_and_mul": (lambda: ops.silu_and_mul(x), size * 3 // 2, 0),
            "rotate 16 heads of 64": (lambda: ops.rotate(q, positions, table), tokens * 4096, 0),
            "write_latent": (
                lambda: ops.write_latent(kv_a, weight[:512], 1e-6, positions, table, slots, cache), tokens * 2304, 0,
            ),
            "route 128, groups, top 8": (lambda: ops.route(x, gate, bias, spec), 0, 0),
        }  # fmt: skip
        plain: dict[str, Call] = {
            "rms_norm": lambda: F.rms_norm(x, (1024,), weight, 1e-6),
            "silu_and_mul": lambda: F.silu(x[:, :512]) * x[:, 512:],
            "route 128, groups, top 8": lambda: torch.sigmoid(x.float() @ gate.T).topk(8),
        }
        for name, (call, data, flops) in calls.items():
            both = {"cpu": call} | ({"torch": plain[name]} if name in plain else {})
            bench.line("ops", f"{tokens} x 1024 {name}", both, data, flops)
    stored = [torch.randn(128, 1024).to(DTYPE) for _ in range(COLD // (2 * 128 * 1024))]
    wide, x = [one.float() for one in stored], torch.randn(1, 1024).to(DTYPE)
    calls_of_gates: dict[str, Call] = {
        name: rotating(gates, lambda one: ops.route(x, one, bias, spec))
        for name, gates in (("cpu", stored), ("float32 gate", wide))
    }
    bench.line("ops", "1 x 1024 route 128, gate from RAM", calls_of_gates, 2 * 128 * 1024, 0)


FAMILIES = {"linear": linear_lines, "experts": experts_lines, "attention": attention_lines, "ops": ops_lines}


def main(arguments: list[str]) -> int:
    parser = command_parser("cpu_kernels", __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time per line")
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, separated by commas")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(FAMILIES):
        parser.error(f"unknown family {', '.join(sorted(unknown))}; known: {', '.join(FAMILIES)}")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    path = load().path
    with torch.no_grad():
        limits = measure_limits()
        print(f"{cpu_device().name}, {torch.get_num_threads()} threads, bf16 products by {path}")
        print(f"limits of this machine: read {limits.read / 1e9:.1f} GB/s, bf16 GEMM {limits.multiply / 1e9:.0f} GF/s")
        bench = Bench(limits, 0.05 if options.quick else 0.4)
        for name in chosen:
            FAMILIES[name](bench)
    if options.json is not None:
        report = {
            "machine": cpu_device().name, "threads": torch.get_num_threads(), "path": path, "torch": torch.__version__,
            "limits": asdict(limits), "lines": [asdict(line) for line in bench.lines],
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
