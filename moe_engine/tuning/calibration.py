"""Measures the costs of a running server, through the client of `bench serving` and the steps that the server records.

Decode: concurrent streams. Prefill: prompts of short answers; the time until the first token beyond their steps is that
of an answer outside the engine. All points are measured in rounds (`moe_engine.tuning.rounds`). On a machine where
front end and client share cores with the steps, the steps contain this slowdown.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from moe_engine.errors import MoeEngineError
from moe_engine.tuning import mixed_probe
from moe_engine.tuning.answer_steps import SKIPPED, Decode, Stream, between_tokens, chunks_of, common_steps
from moe_engine.tuning.costs.measured import CostFile, Curve, MeasuredCosts
from moe_engine.tuning.datasets import BenchRequest
from moe_engine.tuning.native_client import CallOptions, ask_native
from moe_engine.tuning.rounds import Rounds
from moe_engine.tuning.stats import median
from moe_engine.tuning.step_records import StepRecords

ROUNDS = 4
REPEATS = 5
ROUND_SECONDS, MOST_REPEATS = 0.25, 40
"""Time of the repeats of a point in a round, and their max number."""
POINT_SECONDS = 4.0
"""A point that has taken this time gets no further round."""
PREFIX_SECONDS = 1.5
"""Max time of prompts that only fill the cache."""
FIRST_TOKENS = 4
"""Tokens of an answer of which only the first is measured."""
DECODE_TOKENS = 96
STAGGER_TOKENS = 6
"""Additional tokens for each concurrent request: the first requests are ahead when the last ones begin."""
ARRIVALS, ARRIVAL_TOKENS = 6, 512
"""Requests that arrive at once, and tokens of the answers meanwhile."""
LONE_TOKENS, LONE_REPEATS, LONE_PAUSE = 64, 8, 0.03
"""Prompt tokens, number in a round and mean pause of requests that find the server idle for a while."""
BURST = 5
"""Prompts at once."""
PREFILL, DECODE, LONG, CACHED, AT_ONCE, PAUSED = "prefill", "decode", "long", "cached", "at once", "paused"
OUTSIDE, SPLIT = "outside the steps", "several prompts"
"""Points of the rounds."""
SHORT_PROMPT = 256
"""Max prompt tokens of the answers whose time outside the steps is measured."""
Span = tuple[float, float, float]
"""Unix times, and the seconds of a step as the client saw it."""


@dataclass(frozen=True)
class Limits:
    """Limits of the server: concurrent requests, prompt tokens of a request, tokens of the pool and of a prefill step,
    ids of ordinary tokens, drafts each (0: none)."""

    max_running: int
    max_input: int
    pool: int
    chunk: int
    vocab: Sequence[int]
    drafts: int = 0
    num_groups: int = 1


class Probes:
    """All measurements of a server."""

    def __init__(
        self, base_url: str, limits: Limits, seed: int = 0, front_end_cpu: Callable[[], float] | None = None
    ) -> None:
        """
        Args:
            front_end_cpu: CPU seconds of the server's front end so far.
        """
        self._options, self._limits = CallOptions(base_url), limits
        self._rng = random.Random(seed)
        self._steps, self._accepted = 0, 0.0
        self._rounds = Rounds(POINT_SECONDS)
        self._decodes: dict[int, list[Decode]] = {}
        self._long: tuple[int, int, float] | None = None
        """Concurrent requests, prompt tokens and context tokens of the decodes with long contexts."""
        self._prefix: list[int] = []
        self._entries: dict[bool, list[float]] = {False: [], True: []}
        """Seconds until the server had read a request: idle, and beside decodes."""
        self._delays: list[float] = []
        self._between: list[float] = []
        self._parts: list[mixed_probe.Part] = []
        self._unread: list[tuple[Hashable, int, Stream | Span]] = []
        """Points whose recorded steps have not been read: tokens of a prompt and its answer, or requests that decoded
        and the time span."""
        self._bursts: list[tuple[float, float]] = []
        """Unix times of prompts that were sent at once, and whose steps have not been read."""
        self._split: list[tuple[int, mixed_probe.Step]] = []
        """Steps with several prompts, with their round."""
        self._front_end_cpu = front_end_cpu
        self._lone_cpu, self._num_lone = 0.0, 0

    async def run(self, progress: Callable[[str], None]) -> CostFile:
        """The cost file without launch, machine and ledger."""
        for _ in range(REPEATS):  # a cold server is slower
            await asyncio.gather(*(self._ask(self._prompt(16), DECODE_TOKENS) for _ in range(2)))
        for number in range(ROUNDS):
            self._rounds.begin()
            await self._round(progress, f"round {number + 1} of {ROUNDS}: ")
        file = self._file()
        found = mixed_probe.effects(self._parts, MeasuredCosts(file), self._limits.drafts)
        seconds = file.arrival_seconds if found is None else found.arrival + found.end
        return replace(file, arrival_seconds=min(seconds, self._most_arrival_seconds))

    async def _round(self, progress: Callable[[str], None], name: str) -> None:
        """All measurements once, the curves in opposite order in every other round."""
        short, order = self._short, slice(None, None, -1 if self._rounds.number % 2 else 1)
        for length in self._prompt_lengths()[order]:
            progress(f"{name}prefill, {length} tokens")
            await self._first_token((PREFILL, length), length)
        for count in self._row_counts()[order]:
            progress(f"{name}decode, {count} requests")
            await self._decode((DECODE, count), count, short)
        await self._read_steps()
        progress(f"{name}decode, long contexts")
        await self._long_contexts()
        progress(f"{name}prefill behind a cached prefix")
        await self._behind_a_prefix()
        progress(f"{name}several prompts in a step")
        await self._several_prompts()
        progress(f"{name}requests after a pause")
        await self._after_pauses()
        progress(f"{name}new requests during a decode")
        await self._arrivals(short)
        await self._entry_beside_decodes(short)
        await self._read_steps()
        progress(f"{name}requests beside each other")
        await self._beside_each_other()

    def _file(self) -> CostFile:
        """Costs by the rounds so far, without `mixed_probe`."""
        rounds, groups, drafts = self._rounds, self._limits.num_groups, self._limits.drafts
        lengths, counts = self._prompt_lengths(), self._row_counts()
        prefill = ascending([rounds.value((PREFILL, length)) for length in lengths])
        base = self._context(counts[0])
        per_context = self._context_second()
        of_group = {max(count // groups, 1): count for count in counts}
        seconds = ascending(
            [
                rounds.value((DECODE, count)) - n * (self._context(count) - base) * per_context
                for n, count in of_group.items()
            ]
        )
        answer = rounds.value(OUTSIDE)
        per_cached, per_pair = self._cached_seconds()
        idle = max(rounds.value(PAUSED) - rounds.value(AT_ONCE), 0.0)
        between = median([decode.token_seconds for decode in self._decodes[counts[-1]]])
        return CostFile(
            {drafts: Curve(tuple(map(float, of_group)), tuple(max(s, 1e-6) for s in seconds))},
            Curve(tuple(map(float, lengths)), tuple(max(s, 1e-6) for s in prefill)),
            context_second=per_context,
            context_base=base,
            cached_second=per_cached,
            pair_second=per_pair,
            split_second=self._split_second(),
            answer_seconds=answer,
            arrival_seconds=max(median(self._delays), 0.0) if self._delays else 0.0,
            idle_seconds=idle,
            busy_seconds=max(median(self._entries[True]) - median(self._entries[False]), 0.0),
            request_seconds=min(median(self._between), answer),
            token_seconds=min(between, answer),
            acceptance=self._acceptance(),
        )

    async def _beside_each_other(self) -> None:
        """A part of the measurement by `mixed_probe`. Not with several schedulers, which step together: these have the
        delay of decodes."""
        limits = self._limits
        if limits.num_groups > 1:
            return

        async def ask(prompt: int, answer: int) -> Stream:
            return await self._ask(self._prompt(prompt), answer)

        most = min(limits.max_input // 2, limits.pool // 8)
        rate = mixed_probe.rate_of(MeasuredCosts(self._file()), limits.drafts)
        began = time.time()
        streams = await mixed_probe.run(ask, rate, most, self._rng)
        steps = (await self._records()).between(began, time.time())
        unix = time.time() - time.perf_counter()
        self._parts.append(
            mixed_probe.Part(
                steps,
                [(unix + stream.started, unix + stream.received) for stream in streams],
                [unix + stream.started + stream.chunks[-1] for stream in streams],
            )
        )

    async def _records(self) -> StepRecords:
        async with httpx.AsyncClient(base_url=self._options.base_url, timeout=60) as client:
            return StepRecords.of((await client.get("/server_info")).raise_for_status().json())

    async def _read_steps(self) -> None:
        """Adds the values of the points measured since the last call, by the steps that the server recorded."""
        records = await self._records()
        unix = time.time() - time.perf_counter()
        for point, count, what in self._unread:
            if isinstance(what, Stream):
                first = unix + what.started + what.chunks[0]
                seconds = records.prompt(count, unix + what.started, first)
                if seconds is not None:
                    self._rounds.add(point, seconds)
                    if point == (PREFILL, count) and count <= SHORT_PROMPT:
                        self._rounds.add(OUTSIDE, max(what.chunks[0] - seconds, 1e-6))
            else:
                begin, end, seen = what
                self._rounds.add(point, records.decode(count, begin, end) or seen)
        self._unread.clear()
        for begin, end in self._bursts:
            steps = [step for step in records.between(begin, end) if step[2] > 1 and not step[0]]
            self._split += [(self._rounds.number, step) for step in steps]
        self._bursts.clear()

    @property
    def _short(self) -> int:
        return min(32, self._limits.max_input // 4)

    def _context(self, count: int) -> float:
        """Context tokens of each of `count` decoding requests with short prompts."""
        return median([decode.context for decode in self._decodes[count]])

    def _prefill_seconds(self, length: int) -> float:
        """Of the steps of a prompt, as far as measured."""
        lengths = self._prompt_lengths()
        known = [(n, self._rounds.value((PREFILL, n))) for n in lengths]
        return Curve(*(tuple(map(float, column)) for column in zip(*known))).at(length)

    def _row_counts(self) -> list[int]:
        limits, groups = self._limits, self._limits.num_groups
        each = (1 + limits.drafts) * (DECODE_TOKENS + 32)
        counts = [
            groups * count
            for count in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
            if count <= limits.max_running and count * (each + STAGGER_TOKENS * count) < 0.8 * limits.pool
        ]
        return counts or [groups]

    def _prompt_lengths(self) -> list[int]:
        most = min(self._limits.chunk, self._limits.max_input - 8)
        lengths = [length for length in (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096) if length < most]
        return [*lengths, most]

    async def _decode(self, point: Hashable, count: int, length: int) -> Decode | None:
        """A step in which `count` requests decode."""
        if not self._rounds.wants(point):
            return None
        began = time.time()
        with self._rounds.timed(point):
            found = await self._streams(count, length)
        self._unread.append((point, max(count // self._limits.num_groups, 1), (began, time.time(), found.seconds)))
        if point == (DECODE, count):
            self._decodes.setdefault(count, []).append(found)
        return found

    async def _long_contexts(self) -> None:
        """Steps with long contexts, with as many requests as one of the steps with short ones."""
        limits, counts = self._limits, self._row_counts()
        groups = limits.num_groups
        count = max(count for count in counts if count <= max(8 * groups, counts[0]))
        room = limits.pool * groups // count - 2 * DECODE_TOKENS
        length = min(limits.max_input - 2 * DECODE_TOKENS, room, self._quick_length(), 4096)
        if self._long is not None:
            length = self._long[1]
        if length >= 2 * self._context(count) and (found := await self._decode(LONG, count, length)) is not None:
            self._long = (count, length, found.context)

    def _context_second(self) -> float:
        """Seconds of a context token: long contexts against short ones."""
        if self._long is None:
            return 0.0
        count, _, context = self._long
        more = self._rounds.value(LONG) - self._rounds.value((DECODE, count))
        return max(more, 0.0) / (max(count // self._limits.num_groups, 1) * (context - self._context(count)))

    def _tails(self) -> tuple[int, int]:
        """New tokens behind a cached prefix."""
        return 32, min(256, self._prompt_lengths()[-1], self._limits.max_input - len(self._prefix) - 8)

    async def _behind_a_prefix(self) -> None:
        """A short and a long tail after a cached prefix."""
        limits = self._limits
        if not self._prefix:
            length = min(limits.max_input // 2, limits.pool // 2, self._quick_length(), 4096)
            self._prefix = self._prompt(length)
        tails = self._tails()
        if len(self._prefix) < 256 or tails[1] < 2 * tails[0] or not self._rounds.wants((CACHED, tails[0])):
            return
        await self._ask(self._prefix, 1)
        for tail in tails:
            await self._first_token((CACHED, tail), tail, self._prefix)

    def _cached_seconds(self) -> tuple[float, float]:
        """Seconds of a cached token before a prompt's new tokens, and of a pair of a new and a cached token."""
        tails, prefix = self._tails(), len(self._prefix)
        try:
            found = [self._rounds.value((CACHED, tail)) for tail in tails]
        except KeyError:
            return 0.0, 0.0
        more = [(value - self._prefill_seconds(tail)) / prefix for tail, value in zip(tails, found)]
        pair = min(max((more[1] - more[0]) / (tails[1] - tails[0]), 0.0), max(more[1], 0.0) / tails[1])
        return max(more[1] - pair * tails[1], 0.0), pair

    async def _several_prompts(self) -> None:
        """Prompts at once: behind the step of the first one, the others share a step."""
        count = min(BURST, self._limits.max_running)
        length = min(LONE_TOKENS, self._limits.chunk // BURST, self._limits.max_input // 2)
        for _ in range(LONE_REPEATS if length > 1 and self._rounds.wants(SPLIT) else 0):
            began = time.time()
            with self._rounds.timed(SPLIT):
                await asyncio.gather(*(self._ask(self._prompt(length), FIRST_TOKENS) for _ in range(count)))
            self._bursts.append((began, time.time()))

    def _split_second(self) -> float | None:
        """Seconds that a pair of tokens in different prompts saves; None: no step had several prompts."""
        slowness, saved = self._rounds.slowness(), []
        for number, (_, tokens, prompts, *_, seconds) in self._split:
            whole = self._prefill_seconds(int(tokens))
            pairs = mixed_probe.pairs_of(int(tokens), 1) - mixed_probe.pairs_of(int(tokens), int(prompts))
            saved.append((whole - seconds / slowness[number]) / max(pairs, 1))
        return max(median(saved), 0.0) if saved else None

    def _quick_length(self) -> int:
        """Prompt tokens computed in `PREFIX_SECONDS`."""
        lengths = self._prompt_lengths()
        return max((n for n in lengths if self._rounds.value((PREFILL, n)) <= PREFIX_SECONDS), default=0)

    async def _after_pauses(self) -> None:
        """First tokens if the server was idle for a while (its processes sleep, its caches are cold), and without a
        pause, in turn."""
        length = min(LONE_TOKENS, self._limits.chunk, self._limits.max_input // 2)
        if not self._rounds.wants(PAUSED):
            return
        before = self._cpu()
        for _ in range(LONE_REPEATS):
            with self._rounds.timed(PAUSED):
                stream = await self._ask(self._prompt(length), FIRST_TOKENS)
                self._rounds.add(AT_ONCE, stream.chunks[0])
                self._entries[False].append(stream.entry)
                await asyncio.sleep(self._rng.expovariate(1 / LONE_PAUSE))
                self._rounds.add(PAUSED, (await self._ask(self._prompt(length), FIRST_TOKENS)).chunks[0])
        self._lone_cpu += self._cpu() - before
        self._num_lone += 2 * LONE_REPEATS

    def _cpu(self) -> float:
        """CPU seconds of the front end and this client."""
        return time.process_time() + (self._front_end_cpu() if self._front_end_cpu is not None else 0.0)

    @property
    def _most_arrival_seconds(self) -> float:
        """A request cannot take more from the steps beside it than front end and client compute for it."""
        known = self._front_end_cpu is not None and self._num_lone
        return self._lone_cpu / self._num_lone if known else math.inf

    async def _entry_beside_decodes(self, length: int) -> None:
        """Seconds until the server has read a request while steps take the cores."""
        count, tokens = self._beside(length)
        if count < 1 or not self._rounds.wants("entries"):
            return
        with self._rounds.timed("entries"):
            streams = asyncio.gather(*(self._ask(self._prompt(length), tokens) for _ in range(count)))
            while not streams.done():
                await asyncio.sleep(self._rng.expovariate(1 / LONE_PAUSE))
                if not streams.done():
                    self._entries[True].append((await self._ask(self._prompt(1), 1)).entry)
            await streams

    def _beside(self, length: int) -> tuple[int, int]:
        """Number of answers beside which other requests arrive, and their tokens."""
        groups = self._limits.num_groups
        count = min(4 * groups, self._limits.max_running - groups)
        tokens = ARRIVAL_TOKENS * (1 + self._limits.drafts)
        return count, min(tokens, self._limits.max_input - length, self._limits.pool // (max(count, 0) + 1) - length)

    async def _arrivals(self, length: int) -> None:
        """Delay of a step by an arriving request, and the time that the front end takes for it: while some requests
        decode, several others arrive at once, and then none for the same time."""
        count, tokens = self._beside(length)
        if count < 1 or not self._rounds.wants("arrivals"):
            return
        phases: list[tuple[float, float, float]] = []
        with self._rounds.timed("arrivals"):
            streams = asyncio.gather(*(self._ask(self._prompt(length), tokens) for _ in range(count)))
            while not streams.done():
                begin = time.perf_counter()
                new = await asyncio.gather(*(self._ask(self._prompt(1), 1) for _ in range(ARRIVALS)))
                middle = time.perf_counter()
                received = [one.received for one in new]
                self._between.append((max(received) - min(received)) / (ARRIVALS - 1))
                await asyncio.sleep(middle - begin)
                phases.append((begin, middle, time.perf_counter()))
            answers = await streams
        moments = [a.started + chunk for a in answers for chunk in a.chunks]
        first, last = max(a.started + a.chunks[0] for a in answers), min(a.started + a.chunks[-1] for a in answers)
        prefill = self._prefill_seconds(ARRIVALS)
        for begin, middle, end in phases:
            if first < begin and end < last:
                busy = sum(begin < moment <= middle for moment in moments) / count
                free = sum(middle < moment <= end for moment in moments) / count
                lost = (middle - begin) - busy * (end - middle) / max(free, 1.0)
                self._delays.append((lost - prefill) / ARRIVALS)

    async def _first_token(self, point: Hashable, length: int, prefix: Sequence[int] = ()) -> None:
        """Seconds until the answer to a prompt of `length` new tokens behind a prefix."""
        if not self._rounds.wants(point):
            return
        began = time.perf_counter()
        with self._rounds.timed(point):
            for repeat in range(MOST_REPEATS):
                if repeat >= 2 and time.perf_counter() - began >= ROUND_SECONDS:
                    break
                stream = await self._ask([*prefix, *self._prompt(length)], FIRST_TOKENS)
                self._unread.append((point, length, stream))

    async def _streams(self, count: int, length: int) -> Decode:
        """A step of `count` concurrent answers, from the chunks that arrived while all of them ran."""
        tokens = (DECODE_TOKENS + STAGGER_TOKENS * count) * (1 + self._limits.drafts)
        tokens = max(min(tokens, self._limits.max_input - length, self._limits.pool // count - length), 2 * SKIPPED)
        for _ in range(REPEATS):
            answers = await asyncio.gather(*(self._ask(self._prompt(length), tokens) for _ in range(count)))
            if common := common_steps(answers):
                seconds, done = median([step for step, _ in common]), median([done for _, done in common])
                return Decode(seconds, length + done * tokens, between_tokens(answers))
        raise MoeEngineError(f"{count} concurrent answers of {tokens} tokens did not overlap; nothing was measured")

    def _prompt(self, length: int) -> list[int]:
        return self._rng.choices(self._limits.vocab, k=length)

    async def _ask(self, ids: list[int], tokens: int) -> Stream:
        counts: list[int] = []
        last: dict[str, Any] = {}

        def seen(meta: dict[str, Any], count: int) -> None:
            nonlocal last
            counts.append(count)
            last = meta

        to_unix = time.time() - time.perf_counter()
        answer = await ask_native(BenchRequest(ids, len(ids), tokens), self._options, seen)
        if not answer.success:
            raise MoeEngineError(f"a request of the measurement failed: {answer.error}")
        if steps := last.get("spec_verify_ct"):
            self._steps += steps
            self._accepted += steps * (last["spec_accept_length"] - 1)
        return Stream(
            chunks_of(answer, [count for count in counts if count > 0]),
            answer.started,
            last.get("request_received_ts", 0.0) - to_unix,
        )

    def _acceptance(self) -> tuple[float, ...]:
        """The acceptance rate, assumed equal at all positions, that gives the measured number of accepted drafts a
        step."""
        drafts = self._limits.drafts
        if not drafts or not self._steps:
            return ()
        mean, low, high = self._accepted / self._steps, 0.0, 1.0
        for _ in range(40):
            rate = (low + high) / 2
            expected = sum(rate ** (i + 1) for i in range(drafts))
            low, high = (rate, high) if expected < mean else (low, rate)
        return (round(low, 6),) * drafts


def ascending(values: Sequence[float]) -> list[float]:
    """The nearest values (least squares) that never fall: a step with more work takes no less time, whatever else
    the machine did during a measurement."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (high, more), (low, count) = blocks[-2:]
            blocks[-2:] = [((high * more + low * count) / (more + count), more + count)]
    return [value for value, count in blocks for _ in range(count)]
