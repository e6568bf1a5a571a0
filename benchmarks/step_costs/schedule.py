"""When the launches of a section begin and end, by a device's constants.

Launches of a stream are sequential, streams overlap between the events that they wait for. Concurrent launches do not
slow each other down, but prefetches share the memory with their stream's launches (`prefetch.py`). Graphs and eager
launches run one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.step_costs.hardware import Hardware
from benchmarks.step_costs.prefetch import Prefetches
from benchmarks.step_costs.recorder import Line

ATTENTION = {
    "latent_kernel",
    "expanded_kernel",
    "flash_attn_with_kvcache",
    "flash_attn_varlen",
    "flash_mla_fp8",
    "paged_kernel",
    "tree_kernel",
    "trtllm_mla",
}


@dataclass(frozen=True)
class Span:
    """A launch in microseconds of its graph, or of all eager launches. waits: microseconds of it before the messages
    that it needs have arrived."""

    line: Line
    begin: float
    end: float
    waits: float = 0.0

    @property
    def microseconds(self) -> float:
        return self.end - self.begin


def kind_of(line: Line) -> str:
    """The device's rate that applies to a launch."""
    if line.name in ATTENTION:
        return "attention"
    return "product" if line.cost.total_flops else "stream"


def message_us(span: Span, hardware: Hardware) -> float:
    """Microseconds of a launch that its messages take: all of its link time, or of a fused exchange what its products
    do not hide."""
    cost = span.line.cost
    products = hardware.microseconds("product", replace(cost, link_us=0.0), True) if cost.flops else 0.0
    return span.waits + max(0.0, cost.link_us - products)


def all_prefetches(hardware: Hardware) -> defaultdict[tuple[bool, int], Prefetches]:
    """Of every stream of a step, by graph or not and its number."""
    return defaultdict(lambda: Prefetches(hardware))


def schedule(
    lines: Iterable[Line], hardware: Hardware, prefetches: Mapping[tuple[bool, int], Prefetches] | None = None
) -> list[Span]:
    """The launches in their order; prefetches: of the launches before them.

    Messages arrive some time after the launch that sends them; a launch that awaits them starts before, and works from
    then on.
    """
    streams: dict[tuple[bool, int], list[tuple[int, float]]] = defaultdict(list)  # ticks and ends, in order
    arrival = {True: 0.0, False: 0.0}
    prefetches = all_prefetches(hardware) if prefetches is None else prefetches
    lines, spans = list(lines), []
    for line in lines:  # layers repeat: before the first launch of a section, its last one has run
        prefetches[line.graph, line.stream].ended(hardware.work_us(kind_of(line), line.cost), line.cost.bytes)
    for line in lines:
        own, cost = streams[line.graph, line.stream], line.cost
        begin = own[-1][1] if own else 0.0
        for stream, tick in line.behind.items():
            before = (end for number, end in reversed(streams[line.graph, stream]) if number <= tick)
            begin = max(begin, next(before, 0.0))
        gap, requested = hardware.gap_us(cost, line.graph, line.announced), prefetches[line.graph, line.stream]
        waits = max(0.0, arrival[line.graph] - begin - gap) if cost.awaits else 0.0
        requested.pause(gap + waits, cost, line.announced)
        end = begin + gap + waits + requested.run(cost, partial(hardware.work_us, kind_of(line)))
        if cost.travel_us:
            arrival[line.graph] = end + cost.travel_us
        own.append((line.tick, end))
        spans.append(Span(line, begin, end, waits))
    return spans


def length_of(spans: Iterable[Span]) -> float:
    """The longest chain of launches that wait for each other."""
    ends = {True: 0.0, False: 0.0}
    for span in spans:
        ends[span.line.graph] = max(ends[span.line.graph], span.end)
    return sum(ends.values())
