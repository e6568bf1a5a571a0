"""Statistics of the batch lines and events of a time window, for the rules."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any

from moe_engine.tuning.doctor.launch import Launch
from moe_engine.tuning.doctor.log_lines import ESCAPES, LogEvent

ROOM = 0.9
"""Token usage below which the KV cache has room: the guide's limit of good utilization."""
MAX_SMALL_BATCH = 512
"""Requests of a decode step up to which a CUDA graph is worth its memory (guide: 512 to 768)."""
LEAST_LINES = 5
"""Min batch lines of a kind for shares and medians to be meaningful."""
FAILURES = ("oom_start", "no_room_for_kv", "oom_prefill", "oom_decode", "oom_pool", "hang")
MEDIANS = (
    "queue", "running", "usage", "kv_usage", "swa_usage", "mamba_usage", "preallocated", "throughput", "accept_len",
)  # fmt: skip
_DP = re.compile(r"DP(\d+)")


@dataclass(frozen=True)
class Statistics:
    """A window. None: the log has no line with this value, or fewer than `LEAST_LINES`.

    Attributes:
        minutes: length; None: lines without times.
        queue, running, usage, kv_usage, swa_usage, mamba_usage, preallocated, throughput, accept_len: medians of
            decode lines, of a server that only prefills those of prefill lines (sums over DP ranks are not formed: a
            line is one rank's). `queue` includes the requests of a
            decode server that wait for memory; `usage` is that of the fullest pool, `kv_usage` that of all positions
            of full attention; `preallocated`: of decode servers only.
        queue_empty, room_but_waiting, graph_off: shares of decode lines: empty queue; token usage below `ROOM` with a
            queue; a small batch without a CUDA graph (of those up to `MAX_SMALL_BATCH`).
        behind: on a server that only prefills, share of lines with as many waiting requests as a step computes.
        hit_rate: prompt tokens from the prefix cache / all prompt tokens.
        full_chunks: share of prefill lines that fill the chunk with one prompt; `chunk_run`: most in succession.
        stalling_chunks: share of prefill lines that do so while other requests run; `stalling_run`: most in succession;
            `running_at_chunks`: median of these requests, 0 without such lines.
        new_per_seq, new_per_step: prompt tokens computed for each sequence, and in each prefill line.
        rank_imbalance: maximum / mean over the DP ranks of their running requests.
        balancedness: of expert loads, mean / maximum over ranks, of the last 100 passes.
    """

    launch: Launch
    num_decode: int = 0
    num_prefill: int = 0
    minutes: float | None = None
    queue: float | None = None
    queue_empty: float | None = None
    running: float | None = None
    max_running: float | None = None
    usage: float | None = None
    kv_usage: float | None = None
    swa_usage: float | None = None
    mamba_usage: float | None = None
    preallocated: float | None = None
    room_but_waiting: float | None = None
    graph_off: float | None = None
    behind: float | None = None
    throughput: float | None = None
    accept_len: float | None = None
    retractions: int = 0
    retractions_a_minute: float | None = None
    hit_rate: float | None = None
    new_per_seq: float | None = None
    new_per_step: float | None = None
    full_chunks: float | None = None
    chunk_run: int | None = None
    stalling_chunks: float | None = None
    stalling_run: int | None = None
    running_at_chunks: float | None = None
    rank_imbalance: float | None = None
    busiest_rank: int | None = None
    balancedness: float | None = None
    late: int | None = None
    late_rank: str | None = None
    jit: int = 0
    oom_start: int | None = None
    no_room_for_kv: int | None = None
    oom_prefill: int | None = None
    oom_decode: int | None = None
    oom_pool: int | None = None
    short_windows: bool = False
    """The pool of windows has less room than that of full attention."""
    hang: int | None = None
    lines: dict[str, tuple[int, str]] = field(default_factory=dict)
    """A line of the log for each kind of evidence: (number, text)."""

    @property
    def num_batches(self) -> int:
        """Lines of the medians."""
        return self.num_decode or self.num_prefill


@dataclass
class Window:
    """Collects events; `statistics` ends it."""

    launch: Launch
    of_log: bool = True
    """Whether the events are from a log; False: from samples of a server, which report no single chunk, no late rank
    and no failure."""
    began: float | None = None
    ended: float | None = None
    decode: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in MEDIANS})
    """Values of the medians; a whole log can be one window, so 8 bytes each."""
    num_decode: int = 0
    num_prefill: int = 0
    waiting_with_room: int = 0
    queue_empty: int = 0
    behind: int = 0
    small: int = 0
    small_without_graph: int = 0
    new_tokens: float = 0.0
    cached_tokens: float = 0.0
    new_seqs: float = 0.0
    num_full: int = 0
    beside: list[float] = field(default_factory=list)
    """Requests that ran during each full chunk, if there were any."""
    runs: Counter[str] = field(default_factory=Counter)
    stalling: Counter[str] = field(default_factory=Counter)
    longest_run: int = 0
    longest_stall: int = 0
    balance: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)
    room: dict[str, int] = field(default_factory=dict)
    """Free tokens of the pools at the last error about them."""
    ranks: dict[int, float] = field(default_factory=dict)
    """Sum of the running requests over the decode lines of each DP rank: an idle rank writes no lines."""
    lines: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.num_decode or self.num_prefill or self.counts or self.balance or self.late)

    def add(self, event: LogEvent, number: int = 0, text: str = "") -> None:
        """Adds an event; `number` and `text` of its line are kept as evidence."""
        if event.time is not None:
            self.began = event.time if self.began is None else min(self.began, event.time)
            self.ended = event.time if self.ended is None else max(self.ended, event.time)
        values = event.values
        line = number, text
        if event.kind == "decode":
            self._decode(values, event.rank, line)
        elif event.kind == "prefill":
            self._prefill(values, event.rank, line)
        elif event.kind == "retraction":
            self.counts["retractions"] += 1
            self.lines["retraction"] = line
        elif event.kind == "balance":
            if (value := values.get("last_100_average", values.get("current_pass"))) is not None:
                self.balance.append(value)
                self.lines["balance"] = line
        elif event.kind == "late":
            self.late[values["rank"]] += 1
            self.lines["late"] = line
        elif event.kind == "out_of_memory":
            key = f"oom_{values['phase'] or 'prefill'}"
            self.counts[key] += 1
            self.lines[key] = line
        elif event.kind == "pool_room":
            self.room |= values
        elif event.kind in ("no_room_for_kv", "hang"):
            self.counts[event.kind] += 1
            self.lines.setdefault(event.kind, line)  # other ranks follow the first
        elif event.kind == "jit" and self.launch.ready:
            self.counts["jit"] += 1
            self.lines["jit"] = line

    def _decode(self, values: dict[str, Any], rank: str, line: tuple[int, str]) -> None:
        self.num_decode += 1
        running, queue = values["running"], values["queue"] + values.get("prealloc", 0.0)
        values = {"kv_usage": values["usage"], **values, "queue": queue}
        self._keep(values, running, line)
        if self.launch.only_prefills:  # a sample
            return
        self.queue_empty += queue == 0
        self.lines["decode"] = line
        if queue > values.get("prealloc", 0.0) and values["usage"] < ROOM:
            self.waiting_with_room += 1
            self.lines["room"] = line
        if "cuda_graph" in values and 0 < running <= MAX_SMALL_BATCH:
            self.small += 1
            if not values["cuda_graph"]:
                self.small_without_graph += 1
                self.lines["graph"] = line
        group = _group(rank)
        self.ranks[group] = self.ranks.get(group, 0.0) + running

    def _keep(self, values: dict[str, Any], step: float, line: tuple[int, str]) -> None:
        """Collects values for the medians. `step`: requests that a step computes."""
        for name, kept in self.decode.items():
            if name in values:
                kept.append(values[name])
        if values["queue"]:
            self.lines["queue"] = line
            self.behind += values["queue"] >= step

    def _prefill(self, values: dict[str, Any], rank: str, line: tuple[int, str]) -> None:
        self.num_prefill += 1
        self.new_tokens += values["new_token"]
        self.cached_tokens += values["cached_token"]
        self.new_seqs += values.get("new_seq", 0.0)
        self.lines["prefill"] = line
        self.ranks.setdefault(_group(rank), 0.0)
        if values.get("is_sum"):
            return  # the line covers several batches and does not report their chunks
        if self.launch.only_prefills:
            self._keep({"kv_usage": values["usage"], **values}, values.get("new_seq", 1.0), line)
        chunk = self.launch.of_rank("chunked_prefill_size")
        if chunk and chunk > 0 and values["new_token"] >= chunk and values.get("new_seq", 1) <= 1:
            continued = self.launch.is_ours and self.runs[rank] > 0  # it counts as running there
            self.runs[rank] += 1
            self.longest_run = max(self.runs[rank], self.longest_run)
            self.num_full += 1
            self.lines["chunk"] = line
            self._beside(values["running"] - continued, rank, line)
        elif not chunk or values["new_token"] < chunk:
            self.runs[rank] = self.stalling[rank] = 0  # the end of a prompt

    def _beside(self, running: float, rank: str, line: tuple[int, str]) -> None:
        """Counts a full chunk while `running` other requests run."""
        if not running:
            self.stalling[rank] = 0
            return
        self.stalling[rank] += 1
        self.longest_stall = max(self.stalling[rank], self.longest_stall)
        self.beside.append(running)
        self.lines["stall"] = line

    def statistics(self) -> Statistics:
        seconds = None if self.began is None or self.ended is None else self.ended - self.began
        minutes = None if seconds is None else seconds / 60
        retractions = self.counts["retractions"]
        failures: dict[str, Any] = {name: self.counts[name] if self.of_log else None for name in FAILURES}
        medians: dict[str, Any] = {name: self._median(name) for name in MEDIANS}
        imbalance, busiest = self._imbalance()
        only_prefills = self.launch.only_prefills
        return Statistics(
            self.launch,
            num_decode=self.num_decode,
            num_prefill=self.num_prefill,
            minutes=minutes,
            **medians,
            max_running=max(self.decode["running"], default=None),
            queue_empty=None if only_prefills else _share(self.queue_empty, self.num_decode),
            room_but_waiting=None if only_prefills else _share(self.waiting_with_room, self.num_decode),
            behind=_share(self.behind, len(self.decode["queue"])) if only_prefills else None,
            graph_off=_share(self.small_without_graph, self.small),
            retractions=retractions,
            retractions_a_minute=None if minutes is None else retractions / max(1.0, minutes),
            **self._of_prefills(),
            rank_imbalance=imbalance,
            busiest_rank=busiest,
            balancedness=median(self.balance) if self.balance else None,
            late=self.late.total() if self.of_log else None,
            late_rank=self.late.most_common(1)[0][0] if self.late else None,
            jit=self.counts["jit"],
            short_windows=self.room.get("swa", math.inf) < self.room.get("full", 0),
            **failures,
            lines={key: (number, printable(text)) for key, (number, text) in self.lines.items()},
        )

    def _of_prefills(self) -> dict[str, Any]:
        """The statistics of prefill lines."""
        found: dict[str, Any] = {"running_at_chunks": median(self.beside) if self.beside else 0.0}
        if self.num_prefill < LEAST_LINES:
            return found
        if prompt := self.new_tokens + self.cached_tokens:
            found["hit_rate"] = self.cached_tokens / prompt
        if self.new_seqs:
            found["new_per_seq"] = self.new_tokens / self.new_seqs
        if self.of_log:
            found["new_per_step"] = self.new_tokens / self.num_prefill
        if self.of_log and self.launch.of_rank("chunked_prefill_size") is not None:
            found["full_chunks"] = _share(self.num_full, self.num_prefill)
            found["stalling_chunks"] = _share(len(self.beside), self.num_prefill)
            found["chunk_run"], found["stalling_run"] = self.longest_run, self.longest_stall
        return found

    def _median(self, name: str) -> float | None:
        values = self.decode.get(name, ())
        return median(values) if len(values) >= LEAST_LINES else None

    def _imbalance(self) -> tuple[float | None, int | None]:
        """Maximum / mean of the ranks' requests, and the rank with the maximum. None with less than two ranks."""
        if len(self.ranks) < 2 or self.num_decode < LEAST_LINES or not (total := sum(self.ranks.values())):
            return None, None
        busiest = max(self.ranks, key=lambda number: self.ranks[number])
        return self.ranks[busiest] * len(self.ranks) / total, busiest


def _share(count: int, lines: int) -> float | None:
    return count / lines if lines >= LEAST_LINES else None


def printable(text: str) -> str:
    """Without colors and other control sequences, which a terminal would obey."""
    return "".join(filter(str.isprintable, ESCAPES.sub("", text))).strip()


@lru_cache(4096)
def _group(rank: str) -> int:
    found = _DP.search(rank)
    return int(found[1]) if found else 0
