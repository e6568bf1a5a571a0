"""Measures the step costs of a running server from outside, as its clients see them.

Decode: concurrent streams, whose chunks come once a step. Prefill: prompts with one answer token. Both include what the
front end costs the steps on a machine where they share cores.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from moe_engine.errors import MoeEngineError
from moe_engine.tuning.costs.measured import CostFile, Curve
from moe_engine.tuning.stats import median

REPEATS = 5
DECODE_TOKENS = 96
STAGGER_TOKENS = 6
"""More tokens for each concurrent request: the first ones are ahead when the last ones begin."""
SKIPPED = 6
"""First chunks of a stream that are not measured: other prompts are computed then."""


@dataclass(frozen=True)
class Limits:
    """Of the server: concurrent requests, prompt tokens of a request, tokens of the pool and of a prefill step, ids of
    ordinary tokens, drafts each (0: none)."""

    max_running: int
    max_input: int
    pool: int
    chunk: int
    vocab: Sequence[int]
    drafts: int = 0
    num_groups: int = 1


class Probes:
    """All measurements of a server."""

    def __init__(self, base_url: str, limits: Limits, seed: int = 0) -> None:
        self._url, self._limits = base_url, limits
        self._rng = random.Random(seed)
        self._steps, self._accepted = 0, 0.0

    async def run(self, progress: Callable[[str], None]) -> CostFile:
        """The cost file without launch, machine and ledger."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            self._client = client
            for _ in range(REPEATS):  # a cold server is slower
                await asyncio.gather(*(self._ask(self._prompt(16), DECODE_TOKENS) for _ in range(2)))
            short = min(32, self._limits.max_input // 4)
            rows = self._row_counts()
            seconds = []
            for count in rows:
                progress(f"decode, {count} requests")
                seconds.append(await self._decode(count, short))
            progress("decode, long contexts")
            per_context = await self._context_second(rows, seconds, short)
            per_group = [max(count // self._limits.num_groups, 1) for count in rows]
            decode = dict(zip(per_group, seconds))
            one = seconds[0] * (1 if not self._limits.drafts else 0.5)
            counts, totals = [], []
            for length in self._prompt_lengths():
                progress(f"prefill, {length} tokens")
                counts.append(float(length))
                totals.append(await self._first_token(length))
            answer = max(totals[0] - one, 0.0)
            steps = [max(total - answer, 1e-6) for total in totals]
            progress("prefill behind a cached prefix")
            pair = await self._pair_second(counts, steps, answer)
            progress("acceptance of drafts")
            return CostFile(
                {self._limits.drafts: Curve(tuple(map(float, decode)), tuple(decode.values()))},
                Curve(tuple(counts), tuple(steps)),
                context_second=per_context,
                context_base=float(short + DECODE_TOKENS // 2),
                pair_second=pair,
                answer_seconds=answer,
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

    async def _decode(self, count: int, length: int) -> float:
        """Median seconds of a step in which `count` requests decode."""
        return median([await self._streams(count, length) for _ in range(3 if count < 8 else 1)])

    async def _context_second(self, rows: Sequence[int], seconds: Sequence[float], short: int) -> float:
        """Of a context token: long contexts against short ones."""
        count = next((c for c in reversed(rows) if c <= 8 * self._limits.num_groups), rows[0])
        room = self._limits.pool * self._limits.num_groups // count - 2 * DECODE_TOKENS
        length = min(self._limits.max_input - 2 * DECODE_TOKENS, room, 4096)
        if length < 4 * short:
            return 0.0
        long = await self._decode(count, length)
        rows_of_group = max(count // self._limits.num_groups, 1)
        return max(long - seconds[rows.index(count)], 0.0) / (rows_of_group * (length - short))

    async def _pair_second(self, counts: Sequence[float], steps: Sequence[float], answer: float) -> float:
        """Of a pair of a prompt token and a cached token: the last tokens of a long prompt whose start is cached."""
        prefix = min(self._limits.max_input // 2, self._limits.pool // 2, 4096)
        tail = min(256, int(counts[-1]), self._limits.max_input - prefix - 8)
        if prefix < 256 or tail < 32:
            return 0.0
        taken = []
        for _ in range(REPEATS):
            ids = self._prompt(prefix)
            await self._ask(ids, 1)
            taken.append((await self._ask(ids + self._prompt(tail), 1))[0][0])
        expected = Curve(tuple(counts), tuple(steps)).at(tail)
        return max(median(taken) - answer - expected, 0.0) / (tail * prefix)

    async def _first_token(self, length: int) -> float:
        """Median seconds until the answer to a prompt of new tokens."""
        taken = []
        for _ in range(REPEATS):
            chunks, _ = await self._ask(self._prompt(length), 1)
            taken.append(chunks[0])
        return median(taken)

    async def _streams(self, count: int, length: int) -> float:
        """Median seconds between the chunks of `count` concurrent answers."""
        tokens = (DECODE_TOKENS + STAGGER_TOKENS * count) * (1 + self._limits.drafts)
        tokens = max(min(tokens, self._limits.max_input - length, self._limits.pool // count - length), 2 * SKIPPED)
        for _ in range(REPEATS):
            answers = await asyncio.gather(*(self._ask(self._prompt(length), tokens) for _ in range(count)))
            if gaps := _common_gaps(answers):
                return median(gaps)
        raise MoeEngineError(f"{count} concurrent answers of {tokens} tokens did not overlap; nothing was measured")

    def _prompt(self, length: int) -> list[int]:
        return self._rng.choices(self._limits.vocab, k=length)

    async def _ask(self, ids: list[int], tokens: int) -> tuple[list[float], float]:
        """Seconds from the request to each chunk of its answer, and when it began."""
        body = {
            "input_ids": ids,
            "stream": True,
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
        }
        chunks: list[float] = []
        started = time.perf_counter()
        meta: dict[str, Any] = {}
        async with self._client.stream("POST", f"{self._url}/generate", json=body) as response:
            if response.status_code != 200:
                raise MoeEngineError(f"the server answered {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunks.append(time.perf_counter() - started)
                    meta = json.loads(line[6:]).get("meta_info") or {}
        if not chunks:
            raise MoeEngineError("the server ended a stream without any token")
        if steps := meta.get("spec_verify_ct"):
            self._steps += steps
            self._accepted += steps * (meta["spec_accept_length"] - 1)
        return chunks, started

    def _acceptance(self) -> tuple[float, ...]:
        """The chance that gives the measured number of accepted drafts a step, taken as equal at all positions."""
        drafts = self._limits.drafts
        if not drafts or not self._steps:
            return ()
        mean, low, high = self._accepted / self._steps, 0.0, 1.0
        for _ in range(40):
            rate = (low + high) / 2
            expected = sum(rate ** (i + 1) for i in range(drafts))
            low, high = (rate, high) if expected < mean else (low, rate)
        return (round(low, 6),) * drafts


def _common_gaps(answers: Sequence[tuple[list[float], float]]) -> list[float]:
    """Mean seconds between the chunks of each answer, while all of them ran."""
    begin = max(chunks[0] + started for chunks, started in answers)
    end = min(chunks[-1] + started for chunks, started in answers)
    gaps = []
    for chunks, started in answers:
        inside = [moment for moment in chunks[SKIPPED:] if begin <= moment + started <= end]
        if len(inside) > SKIPPED:
            gaps.append((inside[-1] - inside[0]) / (len(inside) - 1))
    return gaps
