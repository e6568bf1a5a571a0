"""Measures the step costs of a running server from outside, through its clients.

Decode: concurrent streams, whose chunks come once a step. Prefill: prompts with one answer token. Both include the
slowdown of steps by the front end on a machine where they share cores.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from moe_engine.errors import MoeEngineError
from moe_engine.tuning import event_stream
from moe_engine.tuning.costs.measured import CostFile, Curve
from moe_engine.tuning.stats import median

REPEATS = 5
ROUNDS = 3
ROUND_SECONDS = 1.0, 4.0
"""Rounds of a measurement are repeated for at least the first time; no further round begins after the second time."""
PREFIX_SECONDS = 1.5
"""Max time of prompts that only fill the cache."""
DECODE_TOKENS = 96
STAGGER_TOKENS = 6
"""Additional tokens for each concurrent request: the first requests are ahead when the last ones begin."""
ARRIVALS, ARRIVAL_TOKENS = 6, 512
"""Requests that arrive at once, and tokens of the answers meanwhile."""
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
    """An answer: seconds from its request to each chunk, and the time of its beginning. `received`: Unix time at which
    the server had read the request."""

    chunks: list[float]
    started: float
    received: float


class Probes:
    """All measurements of a server."""

    def __init__(self, base_url: str, limits: Limits, seed: int = 0) -> None:
        self._url, self._limits = base_url, limits
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
        progress("new requests during a decode")
        first = decodes[min(decodes)]
        answer = max(totals[0] - first.seconds * (0.5 if self._limits.drafts else 1), 0.0)
        base = first.context
        of_group = {max(count // self._limits.num_groups, 1): decode for count, decode in decodes.items()}
        seconds = tuple(d.seconds - n * (d.context - base) * per_context for n, d in of_group.items())
        steps = Curve(prefill.counts, tuple(max(total - answer, 1e-6) for total in totals))
        delay, between = await self._arrivals(steps, short)
        most = decodes[max(decodes)]
        return CostFile(
            {self._limits.drafts: Curve(tuple(map(float, of_group)), tuple(max(s, 1e-6) for s in seconds))},
            steps,
            context_second=per_context,
            context_base=base,
            cached_second=per_cached,
            pair_second=per_pair,
            answer_seconds=answer,
            arrival_seconds=delay,
            request_seconds=min(between, answer),
            token_seconds=min(most.token_seconds, answer),
            acceptance=self._acceptance(),
        )

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

    async def _arrivals(self, prefill: Curve, length: int) -> tuple[float, float]:
        """Delay of a step by an arriving request, and the time that the front end takes for it: while some requests
        decode, several others arrive at once, and then none for the same time."""
        groups = self._limits.num_groups
        count = min(4 * groups, self._limits.max_running - groups)
        if count < 1:
            return 0.0, 0.0
        tokens = ARRIVAL_TOKENS * (1 + self._limits.drafts)
        tokens = min(tokens, self._limits.max_input - length, self._limits.pool // (count + 1) - length)
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
            taken.append((await self._ask(prompt(length), 1)).chunks[0])
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
        body = {
            "input_ids": ids,
            "stream": True,
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
        }
        chunks: list[float] = []
        started = time.perf_counter()
        last = b"{}"
        async for moment, data in event_stream.events(f"{self._url}/generate", body):
            chunks.append(moment - started)
            last = data
        meta = msgspec.json.decode(last).get("meta_info") or {}
        if not chunks:
            raise MoeEngineError("the server ended a stream without any token")
        if steps := meta.get("spec_verify_ct"):
            self._steps += steps
            self._accepted += steps * (meta["spec_accept_length"] - 1)
        return Stream(chunks, started, meta.get("request_received_ts", 0.0))

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


def _goes_on(done: int, rounds: int, seconds: float) -> bool:
    """Whether a measurement that took `seconds` so far gets a further round."""
    least, most = ROUND_SECONDS
    return done == 0 or seconds < least or (done < rounds and seconds < most)


def _length_of(prefill: Curve, seconds: float) -> int:
    """Prompt tokens computed in this time."""
    return int(max((count for count, taken in zip(prefill.counts, prefill.seconds) if taken <= seconds), default=0))


def _between_tokens(answers: Sequence[Stream]) -> float:
    """Median seconds between two chunks of different answers while all of them ran: most are of one step. 0: too few
    answers."""
    if len(answers) < LEAST_ANSWERS:
        return 0.0
    begin = max(answer.chunks[0] + answer.started for answer in answers)
    end = min(answer.chunks[-1] + answer.started for answer in answers)
    moments = sorted(answer.started + at for answer in answers for at in answer.chunks)
    gaps = [later - before for before, later in pairwise(moments) if begin <= before and later <= end]
    return median(gaps) if gaps else 0.0


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
