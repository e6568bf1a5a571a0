"""Measures the step costs of a running server from outside, through the client of `bench serving`.

Decode: concurrent streams, whose chunks come once a step. Prefill: the first token of short answers, which is sent
while the next step runs, as in longer answers. Both include the slowdown of steps by the front end and the client on
a machine where they share cores.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import httpx

from moe_engine.errors import MoeEngineError
from moe_engine.tuning import mixed_probe
from moe_engine.tuning.answer import Answer
from moe_engine.tuning.costs.measured import CostFile, Curve, MeasuredCosts
from moe_engine.tuning.datasets import BenchRequest
from moe_engine.tuning.native_client import CallOptions, ask_native
from moe_engine.tuning.stats import mean, median

REPEATS = 5
ROUNDS = 3
ROUND_SECONDS = 1.0, 4.0
"""Rounds of a measurement are repeated for at least the first time; no further round begins after the second time."""
PREFIX_SECONDS = 1.5
"""Max time of prompts that only fill the cache."""
FIRST_TOKENS = 4
"""Tokens of an answer of which only the first is measured."""
DECODE_TOKENS = 96
STAGGER_TOKENS = 6
"""Additional tokens for each concurrent request: the first requests are ahead when the last ones begin."""
ARRIVALS, ARRIVAL_TOKENS = 6, 512
"""Requests that arrive at once, and tokens of the answers meanwhile."""
LONE_TOKENS, LONE_REPEATS, LONE_PAUSE = 64, 24, 0.03
"""Prompt tokens, number and mean pause of requests that find the server idle for a while."""
LEAST_ANSWERS = 8
"""Concurrent answers from which the time between the tokens of a step is measured."""
SKIPPED = 6
"""First chunks of a stream that are not measured, because other prompts are computed meanwhile."""


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


@dataclass(frozen=True)
class Decode:
    """Seconds of a step, and context tokens of each request in it. `token_seconds`: between two of its tokens."""

    seconds: float
    context: float
    token_seconds: float = 0.0


@dataclass(frozen=True)
class Stream:
    """An answer: seconds from its request to each chunk, and the time of its beginning. `received`: time at which the
    server had read the request, on the same clock."""

    chunks: list[float]
    started: float
    received: float

    @property
    def entry(self) -> float:
        """Seconds until the server had read the request."""
        return self.received - self.started


class Probes:
    """All measurements of a server."""

    def __init__(self, base_url: str, limits: Limits, seed: int = 0) -> None:
        self._options, self._limits = CallOptions(base_url), limits
        self._rng = random.Random(seed)
        self._steps, self._accepted = 0, 0.0

    async def run(self, progress: Callable[[str], None]) -> CostFile:
        """The cost file without launch, machine and ledger."""
        for _ in range(REPEATS):  # a cold server is slower
            await asyncio.gather(*(self._ask(self._prompt(16), DECODE_TOKENS) for _ in range(2)))
        counts, totals = [], []
        for length in self._prompt_lengths():
            progress(f"prefill, {length} tokens")
            counts.append(float(length))
            totals.append(await self._first_token(self._prompt, length))
        totals = ascending(totals)
        prefill = Curve(tuple(counts), tuple(totals))
        short = min(32, self._limits.max_input // 4)
        decodes: dict[int, Decode] = {}
        for count in self._row_counts():
            progress(f"decode, {count} requests")
            decodes[count] = await self._decode(count, short)
        progress("decode, long contexts")
        per_context = await self._context_second(decodes, prefill)
        progress("prefill behind a cached prefix")
        per_cached, per_pair = await self._cached_seconds(prefill)
        progress("requests after a pause")
        idle, entry = await self._after_pauses()
        progress("new requests during a decode")
        first = decodes[min(decodes)]
        base = first.context
        of_group = {max(count // self._limits.num_groups, 1): decode for count, decode in decodes.items()}
        seconds = ascending([d.seconds - n * (d.context - base) * per_context for n, d in of_group.items()])
        answer = max(totals[0] - seconds[0] * (0.5 if self._limits.drafts else 1), 0.0)
        steps = Curve(prefill.counts, tuple(max(total - answer, 1e-6) for total in totals))
        delay, between = await self._arrivals(steps, short)
        progress("requests beside each other")
        busy = max(await self._entry_beside_decodes(short) - entry, 0.0)
        most = decodes[max(decodes)]
        file = CostFile(
            {self._limits.drafts: Curve(tuple(map(float, of_group)), tuple(max(s, 1e-6) for s in seconds))},
            steps,
            context_second=per_context,
            context_base=base,
            cached_second=per_cached,
            pair_second=per_pair,
            answer_seconds=answer,
            arrival_seconds=delay,
            idle_seconds=idle,
            busy_seconds=busy,
            request_seconds=min(between, answer),
            token_seconds=min(most.token_seconds, answer),
            acceptance=self._acceptance(),
        )
        return replace(file, arrival_seconds=await self._beside_each_other(file))

    async def _beside_each_other(self, file: CostFile) -> float:
        """Seconds by which a request makes the steps longer (`mixed_probe`). With several schedulers, or a server that
        does not record its steps: the delay of decodes."""
        limits, costs = self._limits, MeasuredCosts(file)
        async with httpx.AsyncClient(base_url=self._options.base_url, timeout=60) as client:
            before = await _recorded(client)
            if len(before) != 1 or before[0] is None:
                return file.arrival_seconds

            async def ask(prompt: int, answer: int) -> Stream:
                return await self._ask(self._prompt(prompt), answer)

            most = min(limits.max_input // 2, limits.pool // 8)
            count = await mixed_probe.run(ask, mixed_probe.rate_of(costs, limits.drafts), most, self._rng)
            after = await _recorded(client)
        assert after[0] is not None
        number, steps = after[0]
        new = steps[max(len(steps) - (number - before[0][0]), 0) :]
        return mixed_probe.excess(new, costs, limits.drafts, count)

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

    async def _decode(self, count: int, length: int) -> Decode:
        """A step in which `count` requests decode: the median of up to three rounds."""
        rounds: list[Decode] = []
        began = time.perf_counter()
        while _goes_on(len(rounds), ROUNDS, time.perf_counter() - began):
            rounds.append(await self._streams(count, length))
        return sorted(rounds, key=lambda found: found.seconds)[len(rounds) // 2]

    async def _context_second(self, decodes: dict[int, Decode], prefill: Curve) -> float:
        """Seconds of a context token: long contexts against short ones."""
        groups = self._limits.num_groups
        count = max(count for count in decodes if count <= max(8 * groups, min(decodes)))
        short = decodes[count]
        room = self._limits.pool * groups // count - 2 * DECODE_TOKENS
        length = min(self._limits.max_input - 2 * DECODE_TOKENS, room, _length_of(prefill, PREFIX_SECONDS), 4096)
        if length < 2 * short.context:
            return 0.0
        long = await self._decode(count, length)
        return max(long.seconds - short.seconds, 0.0) / (max(count // groups, 1) * (long.context - short.context))

    async def _cached_seconds(self, prefill: Curve) -> tuple[float, float]:
        """Seconds of a cached token before a prompt's new tokens, and of a pair of a new and a cached token: a short
        and a long tail after a cached prefix."""
        limits = self._limits
        prefix = min(limits.max_input // 2, limits.pool // 2, _length_of(prefill, PREFIX_SECONDS), 4096)
        tails = 32, min(256, int(prefill.counts[-1]), limits.max_input - prefix - 8)
        if prefix < 256 or tails[1] < 2 * tails[0]:
            return 0.0, 0.0
        ids = self._prompt(prefix)
        await self._ask(ids, 1)
        more = []
        for tail in tails:
            found = await self._first_token(lambda length: ids + self._prompt(length), tail)
            more.append((found - prefill.at(tail)) / prefix)
        pair = min(max((more[1] - more[0]) / (tails[1] - tails[0]), 0.0), max(more[1], 0.0) / tails[1])
        return max(more[1] - pair * tails[1], 0.0), pair

    async def _after_pauses(self) -> tuple[float, float]:
        """Additional seconds of a first token if the server was idle for a while (its processes sleep, its caches are
        cold), and seconds until the server has read a request without a pause. Both kinds in turn."""
        length = min(LONE_TOKENS, self._limits.chunk, self._limits.max_input // 2)
        at_once, paused = [], []
        for _ in range(LONE_REPEATS):
            at_once.append(await self._ask(self._prompt(length), FIRST_TOKENS))
            await asyncio.sleep(self._rng.expovariate(1 / LONE_PAUSE))
            paused.append(await self._ask(self._prompt(length), FIRST_TOKENS))
        first, later = (median([stream.chunks[0] for stream in streams]) for streams in (at_once, paused))
        return max(later - first, 0.0), median([stream.entry for stream in at_once])

    async def _entry_beside_decodes(self, length: int) -> float:
        """Seconds until the server has read a request while steps take the cores."""
        count, tokens = self._beside(length)
        if count < 1:
            return 0.0
        streams = asyncio.gather(*(self._ask(self._prompt(length), tokens) for _ in range(count)))
        entries = []
        while not streams.done():
            await asyncio.sleep(self._rng.expovariate(1 / LONE_PAUSE))
            if not streams.done():
                entries.append((await self._ask(self._prompt(1), 1)).entry)
        await streams
        return median(entries) if entries else 0.0

    def _beside(self, length: int) -> tuple[int, int]:
        """Number of answers beside which other requests arrive, and their tokens."""
        groups = self._limits.num_groups
        count = min(4 * groups, self._limits.max_running - groups)
        tokens = ARRIVAL_TOKENS * (1 + self._limits.drafts)
        return count, min(tokens, self._limits.max_input - length, self._limits.pool // (max(count, 0) + 1) - length)

    async def _arrivals(self, prefill: Curve, length: int) -> tuple[float, float]:
        """Delay of a step by an arriving request, and the time that the front end takes for it: while some requests
        decode, several others arrive at once, and then none for the same time."""
        count, tokens = self._beside(length)
        if count < 1:
            return 0.0, 0.0
        streams = asyncio.gather(*(self._ask(self._prompt(length), tokens) for _ in range(count)))
        phases: list[tuple[float, float, float]] = []
        between: list[float] = []
        while not streams.done():
            begin = time.perf_counter()
            new = await asyncio.gather(*(self._ask(self._prompt(1), 1) for _ in range(ARRIVALS)))
            middle = time.perf_counter()
            received = [one.received for one in new]
            between.append((max(received) - min(received)) / (ARRIVALS - 1))
            await asyncio.sleep(middle - begin)
            phases.append((begin, middle, time.perf_counter()))
        answers = await streams
        moments = [a.started + chunk for a in answers for chunk in a.chunks]
        first, last = max(a.started + a.chunks[0] for a in answers), min(a.started + a.chunks[-1] for a in answers)
        found = []
        for begin, middle, end in phases:
            if first < begin and end < last:
                busy = sum(begin < moment <= middle for moment in moments) / count
                free = sum(middle < moment <= end for moment in moments) / count
                lost = (middle - begin) - busy * (end - middle) / max(free, 1.0)
                found.append((lost - prefill.at(ARRIVALS)) / ARRIVALS)
        return max(median(found), 0.0) if found else 0.0, median(between) if between else 0.0

    async def _first_token(self, prompt: Callable[[int], list[int]], length: int) -> float:
        """Median seconds until the answer to a prompt of `length` new tokens."""
        taken: list[float] = []
        began = time.perf_counter()
        while _goes_on(len(taken), REPEATS, time.perf_counter() - began):
            taken.append((await self._ask(prompt(length), FIRST_TOKENS)).chunks[0])
        return median(taken)

    async def _streams(self, count: int, length: int) -> Decode:
        """A step of `count` concurrent answers, from the chunks that arrived while all of them ran."""
        tokens = (DECODE_TOKENS + STAGGER_TOKENS * count) * (1 + self._limits.drafts)
        tokens = max(min(tokens, self._limits.max_input - length, self._limits.pool // count - length), 2 * SKIPPED)
        for _ in range(REPEATS):
            answers = await asyncio.gather(*(self._ask(self._prompt(length), tokens) for _ in range(count)))
            if common := _common_steps(answers):
                seconds, done = median([step for step, _ in common]), median([done for _, done in common])
                return Decode(seconds, length + done * tokens, _between_tokens(answers))
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
            _chunks(answer, [count for count in counts if count > 0]),
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


async def _recorded(client: httpx.AsyncClient) -> list[tuple[int, list[mixed_probe.Step]] | None]:
    """Number of steps so far, and the recorded ones, of each scheduler; None: it records none."""
    states = (await client.get("/server_info")).raise_for_status().json().get("internal_states") or []
    return [(state["total_steps"], state["step_times"]) if "step_times" in state else None for state in states]


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


def _chunks(answer: Answer, counts: Sequence[int]) -> list[float]:
    """Seconds from the request to each chunk, of `counts` tokens."""
    chunks, gap = [answer.ttft], 0
    for count in counts[1:]:
        chunks.append(chunks[-1] + sum(answer.itl[gap : gap + count]))
        gap += count
    return chunks


def _goes_on(done: int, rounds: int, seconds: float) -> bool:
    """Whether a measurement that took `seconds` so far gets a further round."""
    least, most = ROUND_SECONDS
    return done == 0 or seconds < least or (done < rounds and seconds < most)


def _length_of(prefill: Curve, seconds: float) -> int:
    """Prompt tokens computed in this time."""
    return int(max((count for count, taken in zip(prefill.counts, prefill.seconds) if taken <= seconds), default=0))


def _between_tokens(answers: Sequence[Stream]) -> float:
    """Mean seconds between two chunks of one step, while all answers ran. The longest gaps, one a step, are those
    between steps. 0: too few answers."""
    if len(answers) < LEAST_ANSWERS:
        return 0.0
    begin = max(answer.chunks[0] + answer.started for answer in answers)
    end = min(answer.chunks[-1] + answer.started for answer in answers)
    moments = sorted(answer.started + at for answer in answers for at in answer.chunks)
    gaps = sorted(later - before for before, later in pairwise(moments) if begin <= before and later <= end)
    of_steps = gaps[: len(gaps) - -(-len(gaps) // len(answers))]
    return mean(of_steps) if of_steps else 0.0


def _common_steps(answers: Sequence[Stream]) -> list[tuple[float, float]]:
    """For each answer, while all of them ran: mean seconds between its chunks, and the part of it that had arrived in
    the middle of that time."""
    begin = max(answer.chunks[0] + answer.started for answer in answers)
    end = min(answer.chunks[-1] + answer.started for answer in answers)
    found = []
    for answer in answers:
        inside = [i for i, at in enumerate(answer.chunks) if i >= SKIPPED and begin <= at + answer.started <= end]
        if len(inside) > SKIPPED:
            first, last = inside[0], inside[-1]
            gap = (answer.chunks[last] - answer.chunks[first]) / (last - first)
            found.append((gap, (first + last) / 2 / len(answer.chunks)))
    return found
