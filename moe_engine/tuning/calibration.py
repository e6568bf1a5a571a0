"""Measures the costs of a running server, through the client of `bench serving` and the steps that the server records.

Decode: concurrent streams. Prefill: prompts of short answers while others decode, as under load: the step of a prompt
alone is longer, because caches and threads are cold. The time until the first token of such a lone prompt beyond its
step is that of an answer outside the engine. All points are measured in rounds (`moe_engine.tuning.rounds`). On a
machine where frontend and client share cores with the steps, the steps contain this slowdown.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import httpx

from moe_engine.errors import MoeEngineError
from moe_engine.tuning import frontend_work, mixed_probe, under_load
from moe_engine.tuning.answer_steps import SKIPPED, Decode, Stream, chunks_of, common_steps
from moe_engine.tuning.costs.measured import LONE_TOKENS, CostFile, MeasuredCosts
from moe_engine.tuning.datasets import BenchRequest
from moe_engine.tuning.disturbance import Disturbance, Watch
from moe_engine.tuning.measured_points import (
    AT_ONCE,
    CACHED,
    DECODE,
    DECODE_TOKENS,
    LONE,
    LONG,
    LONG_TAILS,
    OUTSIDE,
    PAUSED,
    PREFILL,
    SPLIT,
    STAGGER_TOKENS,
    STREAMED,
    Limits,
    MeasuredPoints,
)
from moe_engine.tuning.native_client import CallOptions, ask_native
from moe_engine.tuning.phases import DELIVERY
from moe_engine.tuning.stats import median
from moe_engine.tuning.step_records import StepRecords

ROUNDS, MORE_ROUNDS = 4, 3
"""Rounds of the measurement; at most as many more for rounds while other programs ran."""
REPEATS = 5
ROUND_SECONDS, LEAST_REPEATS, MOST_REPEATS = 0.25, 3, 40
"""Time of the repeats of a point in a round, their least and max number."""
FIRST_TOKENS = 4
"""Tokens of an answer of which only the first is measured."""
ARRIVALS, ARRIVAL_TOKENS = 6, 512
"""Requests that arrive together, and tokens of the answers meanwhile."""
LEAST_PREFIX = 64
"""Tokens of a cached prefix that is worth a measurement."""
LONE_REPEATS, LONE_PAUSE = 8, 0.03
"""Number in a round and mean pause of requests that find the server idle for a while."""
BURSTS = 5, 13
"""Prompts that arrive together."""
AT_A_TIME, TIMES = 16, 8
"""Concurrent requests whose answers have one token, and how often in a round."""
BESIDE_TOKENS = 256
"""Tokens of the answers that decode during measured prompts."""
VARIED_TOKENS = 48
"""First tokens of an answer of this length or more, whose drafts count for the acceptance. An answer to random tokens
soon repeats itself, and nearly all drafts of a repetition are accepted."""
Span = tuple[float, float, float]
"""Unix times, and the seconds of a step as the client saw it."""


class Probes:
    """All measurements of a server."""

    def __init__(
        self, base_url: str, limits: Limits, front_end_cpu: Callable[[], float], watch: Watch | None = None
    ) -> None:
        """
        Args:
            front_end_cpu: CPU seconds of the server's frontend so far.
            watch: finds other programs; None: rounds with others count as well.
        """
        self._options, self._limits = CallOptions(base_url), limits
        self._rng = random.Random(0)
        self._points = MeasuredPoints(limits)
        self._parts: list[mixed_probe.Part] = []
        self._unread: list[tuple[Hashable, int, Stream | Span]] = []
        """Points whose recorded steps have not been read: tokens of a prompt and its answer, or requests that decoded
        and the time span."""
        self._bursts: list[tuple[float, float]] = []
        """Unix times of prompts that were sent together, and whose steps have not been read."""
        self._unread_work: list[tuple[tuple[float, float], Sequence[Stream], float]] = []
        """Unix times, answers and CPU seconds whose recorded steps have not been read."""
        self._front_end_cpu, self._watch = front_end_cpu, watch
        self.disturbances: list[Disturbance] = []
        """Other programs' use of the machine in each round, with a `watch`."""

    async def run(
        self, progress: Callable[[str], None], after_round: Callable[[int], Awaitable[None]] | None = None
    ) -> CostFile:
        """The cost file without launch, machine and ledger.

        Args:
            after_round: what else a benchmark measures between the rounds, with the number of the round from 0.
        """
        for _ in range(REPEATS):  # a cold server is slower
            await asyncio.gather(*(self._ask(self._prompt(16), DECODE_TOKENS) for _ in range(2)))
        rounds = self._points.rounds
        while self._wants_round:
            rounds.begin()
            if self._watch is not None:
                self._watch.begin()
            most = ROUNDS + min(len(rounds.left_out), MORE_ROUNDS)
            await self._round(progress, f"round {rounds.number + 1} of {most}: ")
            if self._watch is not None:
                self.disturbances.append(found := self._watch.end())
                if found.is_strong:
                    rounds.left_out.add(rounds.number)
                    progress(f"round {rounds.number + 1}: {found}")
            if after_round is not None:
                await after_round(rounds.number)
        return under_load.cost_file(self._points, self._parts)

    @property
    def _wants_round(self) -> bool:
        """Whether quiet rounds are missing; more are not tried if other programs never rested."""
        done = self._points.rounds.number + 1
        quiet = done - len(self._points.rounds.left_out)
        return done < ROUNDS or (0 < quiet < ROUNDS and done < ROUNDS + MORE_ROUNDS)

    @property
    def spread(self) -> float:
        """How much longer the slowest of the rounds that count took than the fastest one, less 1."""
        return self._points.rounds.spread

    @property
    def slowness(self) -> list[float]:
        """For each round: how much longer everything took than in the median of the rounds that count."""
        return self._points.rounds.slowness()

    async def _round(self, progress: Callable[[str], None], name: str) -> None:
        """All measurements once, the curves in opposite order in every other round."""
        short, order = self._points.short, slice(None, None, -1 if self._points.rounds.number % 2 else 1)
        async with self._decodes():
            for length in self._points.prompt_lengths()[order]:
                progress(f"{name}prefill, {length} tokens")
                await self._first_token((PREFILL, length), length)
        await self._read_steps()
        async with self._decodes():
            progress(f"{name}prefill behind a cached prefix")
            await self._behind_a_prefix()
            progress(f"{name}several prompts in a step")
            await self._several_prompts()
        for count in self._points.row_counts()[order]:
            progress(f"{name}decode, {count} requests")
            await self._decode((DECODE, count), count, short)
        await self._read_steps()
        if self._points.rounds.number == 0:
            await self._find_jumps(progress, name)
        progress(f"{name}decode, long contexts")
        await self._long_contexts()
        progress(f"{name}requests after a pause")
        await self._after_pauses()
        progress(f"{name}new requests during a decode")
        await self._arrivals(short)
        await self._entry_beside_decodes(short)
        progress(f"{name}requests alone")
        await self._requests_alone()
        await self._read_steps()
        progress(f"{name}concurrent requests")
        for load in mixed_probe.LOADS:
            await self._beside_each_other(load)

    @asynccontextmanager
    async def _decodes(self) -> AsyncIterator[None]:
        """Answers that decode meanwhile."""
        limits, short, goes_on = self._limits, self._points.short, True
        tokens = min(BESIDE_TOKENS * (1 + limits.drafts), limits.max_input - short, limits.pool // 16 - short)

        async def repeat() -> None:
            while goes_on:
                await self._ask(self._prompt(short), tokens)

        tasks = [asyncio.ensure_future(repeat()) for _ in range(limits.beside if tokens > FIRST_TOKENS else 0)]
        try:
            await self._ask(self._prompt(1), FIRST_TOKENS)  # the others decode when it has ended
            yield
        finally:
            goes_on = False
            await asyncio.gather(*tasks)

    async def _beside_each_other(self, load: float) -> None:
        """A part of the measurement by `mixed_probe`. Not with several replicas, whose steps are independent: these
        have the delay of decodes."""
        limits = self._limits
        if limits.num_replicas > 1:
            return

        async def ask(prompt: int, answer: int) -> Stream:
            return await self._ask(self._prompt(prompt), answer)

        most = min(limits.max_input // 2, limits.pool // 8)
        costs, accepted = MeasuredCosts(self._points.file()), accumulate(self._points.acceptance(), mul)
        tokens = 1 + sum(accepted)
        rate = load * mixed_probe.rate_of(costs, limits.drafts, tokens, limits.num_groups, limits.max_running)
        began, before = time.time(), self._cpu()
        streams = sorted(await mixed_probe.run(ask, rate, most, self._rng), key=lambda stream: stream.started)
        self._add_work(streams, began, before)
        await self._read_steps()
        steps = (await self._records()).together(began, time.time())
        unix = time.time() - time.perf_counter()
        part = mixed_probe.Part(
            steps,
            [(unix + stream.started, unix + stream.received) for stream in streams],
            [unix + stream.started + stream.chunks[-1] for stream in streams],
            load,
            self._points.rounds.number,
        )
        if len(steps) >= mixed_probe.LEAST_STEPS:
            self._parts.append(part)

    async def _records(self) -> StepRecords:
        async with httpx.AsyncClient(base_url=self._options.base_url, timeout=60) as client:
            return StepRecords.of((await client.get("/server_info")).raise_for_status().json())

    async def _read_steps(self) -> None:
        """Adds the values of the points measured since the last call, by the steps that the server recorded."""
        records = await self._records()
        unix = time.time() - time.perf_counter()
        for point, count, what in self._unread:
            if isinstance(what, Stream):
                began = unix + what.started  # the step counts as ended after its token has been sent
                seconds = records.prompt(count, began, began + what.chunks[-1])
                if seconds is not None:
                    self._points.rounds.add(point, seconds)
                    if point == (LONE, count):
                        self._points.rounds.add(OUTSIDE, max(what.chunks[0] - seconds, 1e-6))
            else:
                begin, end, seen = what
                self._points.rounds.add(point, records.decode(count, begin, end) or seen)
        self._unread.clear()
        for begin, end in self._bursts:
            several = [step for step in records.between(begin, end) if step[2] > 1 and not step[0]]
            self._points.split += [(self._points.rounds.number, step) for step in several]
        self._bursts.clear()
        for (begin, end), streams, seconds in self._unread_work:
            together = self._limits.num_replicas == 1
            steps = records.together(begin, end) if together else records.between(begin, end)
            num_chunks = sum(len(stream.chunks) for stream in streams)
            if steps and seconds > 0:
                sample = frontend_work.Sample(len(streams), len(steps), num_chunks, seconds)
                self._points.work.append((self._points.rounds.number, sample))
        self._unread_work.clear()

    async def _decode(self, point: Hashable, count: int, length: int) -> Decode | None:
        """A step in which `count` requests decode: while the tokens of each step are sent, and without that."""
        if not self._points.rounds.wants(point):
            return None
        rows, began = max(count // self._limits.num_groups, 1), time.time()
        with self._points.rounds.timed(point):
            found, tokens = await self._streams(count, length)
            middle = time.time()
            await asyncio.gather(*(self._ask(self._prompt(length), tokens, stream=False) for _ in range(count)))
        self._unread.append(((STREAMED, point), rows, (began, middle, found.seconds)))
        self._unread.append((point, rows, (middle, time.time(), found.seconds)))
        if point == (DECODE, count):
            self._points.decodes.setdefault(count, []).append(found)
        return found

    async def _find_jumps(self, progress: Callable[[str], None], name: str) -> None:
        """Halves the ranges in which the seconds of a decode jump."""
        while (count := self._points.halve_jump()) is not None:
            progress(f"{name}decode, {count} requests")
            await self._decode((DECODE, count), count, self._points.short)
            await self._read_steps()

    async def _long_contexts(self) -> None:
        """Steps with long contexts, with as many requests as one of the steps with short ones."""
        chosen = self._points.long_decode() if self._points.long is None else self._points.long[:2]
        if chosen is not None and (found := await self._decode(LONG, *chosen)) is not None:
            self._points.long = (*chosen, found.context)

    async def _behind_a_prefix(self) -> None:
        """Tails of several lengths after a short cached prefix, some also after a long one."""
        limits = self._limits
        if not self._points.prefix:
            length = min(limits.max_input // 2, limits.pool // 2, self._points.quick_length(), 4096)
            self._points.prefix = self._prompt(length)
        prefix, short, tails = self._points.prefix, self._points.short_prefix, self._points.tails()
        if short < LEAST_PREFIX or len(tails) < 3:
            return
        await self._ask(prefix, 1)
        for tail in tails:
            await self._first_token((CACHED, tail, short), tail, prefix[:short])
        for tail in {tails[place] for place in LONG_TAILS}:
            await self._first_token((CACHED, tail, len(prefix)), tail, prefix)

    async def _several_prompts(self) -> None:
        """Prompts that arrive together: after the step of the first one, the others share a step."""
        most = min(LONE_TOKENS, self._limits.max_input // 2)
        for repeat in range(LONE_REPEATS if self._points.rounds.wants(SPLIT) else 0):
            count = min(BURSTS[repeat % len(BURSTS)], self._limits.max_running)
            length = min(most, self._limits.chunk // count)
            began = time.time()
            with self._points.rounds.timed(SPLIT):
                await asyncio.gather(*(self._ask(self._prompt(length), FIRST_TOKENS) for _ in range(count)))
            self._bursts.append((began, time.time()))

    async def _after_pauses(self) -> None:
        """First tokens if the server was idle for a while (its processes sleep, its caches are cold), and without a
        pause, in turn."""
        length = self._points.lone_tokens
        if not self._points.rounds.wants(PAUSED):
            return
        for _ in range(LONE_REPEATS):
            with self._points.rounds.timed(PAUSED):
                stream = await self._ask(self._prompt(length), FIRST_TOKENS)
                self._points.rounds.add(AT_ONCE, stream.chunks[0])
                self._points.entries[False].append((self._points.rounds.number, stream.entry))
                self._points.replies.append((self._points.rounds.number, stream.reply))
                self._unread.append(((LONE, length), length, stream))
                await asyncio.sleep(self._rng.expovariate(1 / LONE_PAUSE))
                self._points.rounds.add(PAUSED, (await self._ask(self._prompt(length), FIRST_TOKENS)).chunks[0])

    def _cpu(self) -> float:
        """CPU seconds of the frontend and this client."""
        return time.process_time() + self._front_end_cpu()

    def _add_work(self, streams: Sequence[Stream], began: float, before: float) -> None:
        """CPU time of frontend and client for these answers. `before`: `_cpu` at the Unix time `began`."""
        self._unread_work.append(((began, time.time()), streams, self._cpu() - before))

    async def _requests_alone(self) -> None:
        """CPU time of frontend and client for requests whose answers have nothing but a first token."""
        if not self._points.rounds.wants("requests alone"):
            return
        count, began, before = min(AT_A_TIME, self._limits.max_running), time.time(), self._cpu()
        streams: list[Stream] = []
        with self._points.rounds.timed("requests alone"):
            for _ in range(TIMES):
                streams += await asyncio.gather(*(self._ask(self._prompt(1), 1) for _ in range(count)))
        self._add_work(streams, began, before)

    async def _entry_beside_decodes(self, length: int) -> None:
        """Seconds until the server has read a request while steps take the cores."""
        count, tokens = self._beside(length)
        if count < 1 or not self._points.rounds.wants("entries"):
            return
        with self._points.rounds.timed("entries"):
            streams = asyncio.gather(*(self._ask(self._prompt(length), tokens) for _ in range(count)))
            while not streams.done():
                await asyncio.sleep(self._rng.expovariate(1 / LONE_PAUSE))
                if not streams.done():
                    entry = (await self._ask(self._prompt(1), 1)).entry
                    self._points.entries[True].append((self._points.rounds.number, entry))
            await streams

    def _beside(self, length: int) -> tuple[int, int]:
        """Number of answers during which other requests arrive, and their tokens."""
        groups = self._limits.num_groups
        count = min(4 * groups, self._limits.max_running - groups)
        tokens = ARRIVAL_TOKENS * (1 + self._limits.drafts)
        return count, min(tokens, self._limits.max_input - length, self._limits.pool // (max(count, 0) + 1) - length)

    async def _arrivals(self, length: int) -> None:
        """Delay of a step by an arriving request: while some requests decode, several others arrive together, and then
        none for the same time."""
        count, tokens = self._beside(length)
        if count < 1 or not self._points.rounds.wants("arrivals"):
            return
        phases: list[tuple[float, float, float]] = []
        with self._points.rounds.timed("arrivals"):
            streams = asyncio.gather(*(self._ask(self._prompt(length), tokens) for _ in range(count)))
            while not streams.done():
                begin = time.perf_counter()
                await asyncio.gather(*(self._ask(self._prompt(1), 1) for _ in range(ARRIVALS)))
                middle = time.perf_counter()
                await asyncio.sleep(middle - begin)
                phases.append((begin, middle, time.perf_counter()))
            answers = await streams
        moments = [a.started + chunk for a in answers for chunk in a.chunks]
        first, last = max(a.started + a.chunks[0] for a in answers), min(a.started + a.chunks[-1] for a in answers)
        prefill = self._points.prefill_seconds(ARRIVALS)
        for begin, middle, end in phases:
            if first < begin and end < last:
                busy = sum(begin < moment <= middle for moment in moments) / count
                free = sum(middle < moment <= end for moment in moments) / count
                lost = (middle - begin) - busy * (end - middle) / max(free, 1.0)
                self._points.delays.append((self._points.rounds.number, (lost - prefill) / ARRIVALS))

    async def _first_token(self, point: Hashable, length: int, prefix: Sequence[int] = ()) -> None:
        """Seconds until the answer to a prompt of `length` new tokens after a prefix."""
        if not self._points.rounds.wants(point):
            return
        began = time.perf_counter()
        with self._points.rounds.timed(point):
            for repeat in range(MOST_REPEATS):
                if repeat >= LEAST_REPEATS and time.perf_counter() - began >= ROUND_SECONDS:
                    break
                stream = await self._ask([*prefix, *self._prompt(length)], FIRST_TOKENS)
                self._unread.append((point, length, stream))

    async def _streams(self, count: int, length: int) -> tuple[Decode, int]:
        """A step of `count` concurrent answers, from the chunks that arrived while all of them ran, and the tokens of
        each answer."""
        tokens = (DECODE_TOKENS + STAGGER_TOKENS * count) * (1 + self._limits.drafts)
        room = self._limits.pool * self._limits.num_groups // count
        most = max(min(self._limits.max_input, room) - length, 2 * SKIPPED)
        for _ in range(REPEATS):
            tokens = min(tokens, most)
            began, before = time.time(), self._cpu()
            answers = await asyncio.gather(*(self._ask(self._prompt(length), tokens) for _ in range(count)))
            if common := common_steps(answers):
                seconds, done = median([step for step, _ in common]), median([done for _, done in common])
                self._add_work(answers, began, before)
                return Decode(seconds, length + done * tokens), tokens
            tokens *= 2
        raise MoeEngineError(f"{count} concurrent answers of {tokens} tokens did not overlap; nothing was measured")

    def _prompt(self, length: int) -> list[int]:
        return self._rng.choices(self._limits.vocab, k=length)

    async def _ask(self, ids: list[int], tokens: int, stream: bool = True) -> Stream:
        counts: list[int] = []
        last: dict[str, Any] = {}
        varied: dict[str, Any] = {}

        def seen(meta: dict[str, Any], count: int) -> None:
            nonlocal last, varied
            counts.append(count)
            last = meta
            if meta.get("completion_tokens", 0) <= VARIED_TOKENS:
                varied = meta

        to_unix = time.time() - time.perf_counter()
        options = replace(self._options, stream=stream)
        answer = await ask_native(BenchRequest(ids, len(ids), tokens), options, seen)
        if not answer.success:
            raise MoeEngineError(f"a request of the measurement failed: {answer.error}")
        if tokens >= VARIED_TOKENS:  # shorter answers would count with their first tokens alone
            self._points.steps += varied.get("spec_verify_ct", 0)
            self._points.accepted += varied.get("spec_num_correct_drafts", 0)
        return Stream(
            chunks_of(answer, [count for count in counts if count > 0]),
            answer.started,
            last.get("request_received_ts", 0.0) - to_unix,
            answer.phases.get(DELIVERY, 0.0),
        )
