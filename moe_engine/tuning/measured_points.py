"""Measured points of a server, and the cost file that follows from them (`moe_engine.tuning.calibration`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from moe_engine.errors import MoeEngineError
from moe_engine.tuning import frontend_work, mixed_probe
from moe_engine.tuning.answer_steps import Decode
from moe_engine.tuning.costs.measured import LONE_TOKENS, CostFile, Curve
from moe_engine.tuning.rounds import Rounds
from moe_engine.tuning.stats import median

POINT_SECONDS = 4.0
"""A point that has taken this time gets no further round."""
COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Requests of a scheduler that decode."""
JUMP, MOST_HALVES = 0.2, 8
"""Least jump of the seconds of a decode, over its seconds; most points to find jumps."""
PREFIX_SECONDS = 1.5
"""Max time of prompts that only fill the cache."""
DECODE_TOKENS = 96
STAGGER_TOKENS = 2
"""Additional tokens for each concurrent request: the first requests are ahead when the last ones begin. Longer answers
would cost more than ordinary ones: frontend and client process each chunk with all tokens so far."""
PREFILL, DECODE, LONG, CACHED, AT_ONCE, PAUSED = "prefill", "decode", "long", "cached", "at once", "paused"
STREAMED = "streamed"
"""A decode whose tokens are sent immediately; the others are sent at the end of the answer."""
TAILS, LONG_TAILS, SHORT_PREFIX = (8, 32, 64, 96, 256), (1, -1), 256
"""New tokens after a cached prefix; places of those measured with a long one too; tokens of the short one."""
OUTSIDE, SPLIT, LONE = "outside the steps", "several prompts", "alone"
"""Points of the rounds."""


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
    beside: int = 0
    """Answers that decode while prompts are measured."""
    num_replicas: int = 1
    """Engines, each with an equal part of the groups."""


class MeasuredPoints:
    """Which points are measured, and what was found.

    Attributes:
        rounds: values of the points. decodes: answers that decoded together, by their number.
        long: concurrent requests, prompt tokens and context tokens of the decodes with long contexts.
        prefix: tokens of the long cached prefix.
        entries: seconds until the server had read a request: idle, and during decodes. With their round, as the next.
        replies: seconds from a first token at the frontend until the client has it.
        delays: of steps by requests that arrive together. work: CPU time of frontend and client.
        split: steps with several prompts. steps, accepted: of drafts.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rounds = Rounds(POINT_SECONDS)
        self.decodes: dict[int, list[Decode]] = {}
        self.long: tuple[int, int, float] | None = None
        self.prefix: list[int] = []
        self.entries: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
        self.replies: list[tuple[int, float]] = []
        self.delays: list[tuple[int, float]] = []
        self.work: list[tuple[int, frontend_work.Sample]] = []
        self.split: list[tuple[int, mixed_probe.Step]] = []
        self.steps, self.accepted = 0, 0.0
        self._halves: list[int] = []
        """Numbers of requests in addition to those of `COUNTS`, to find jumps."""

    def file(self) -> CostFile:
        """Costs by the rounds so far, without `mixed_probe`. Raises MoeEngineError: the server recorded no step of a
        point."""
        try:
            return self._file()
        except KeyError as error:
            raise MoeEngineError(f"the server recorded no step of the point {error}; run calibrate again") from None

    def _file(self) -> CostFile:
        rounds, groups, drafts = self.rounds, self.limits.num_groups, self.limits.drafts
        lengths, counts = self.prompt_lengths(), self.row_counts()
        prefill = ascending([rounds.value((PREFILL, length)) for length in lengths])
        base = self.context(counts[0])
        per_context = self.context_second()
        of_group = {max(count // groups, 1): count for count in counts}
        seconds = ascending(
            [
                rounds.value((DECODE, count)) - n * (self.context(count) - base) * per_context
                for n, count in of_group.items()
            ]
        )
        answer = rounds.value(OUTSIDE)
        per_cached, per_pair, behind = self.cached_costs()
        lone = rounds.value((LONE, self.lone_tokens)) - self.prefill_seconds(self.lone_tokens)
        idle = max(rounds.value(PAUSED) - rounds.value(AT_ONCE) + lone, 0.0)
        samples = rounds.kept(self.work)
        work = frontend_work.work_of(samples) if samples else frontend_work.Work()
        delays, idle_entry, busy_entry = map(rounds.kept, (self.delays, self.entries[False], self.entries[True]))
        replies = rounds.kept(self.replies)
        return CostFile(
            {drafts: Curve(tuple(map(float, of_group)), tuple(max(s, 1e-6) for s in seconds))},
            Curve(tuple(map(float, lengths)), tuple(max(s, 1e-6) for s in prefill)),
            context_second=per_context,
            context_base=base,
            cached_second=per_cached,
            pair_second=per_pair,
            behind=behind,
            split_second=self.split_second(),
            answer_seconds=answer,
            arrival_seconds=max(median(delays), 0.0) if delays else 0.0,
            idle_seconds=idle,
            entry_seconds=max(median(idle_entry), 0.0),
            reply_seconds=max(median(replies), 0.0),
            busy_seconds=max(median(busy_entry) - median(idle_entry), 0.0),
            sent_seconds=self.sent_seconds(),
            request_seconds=work.request,
            results_seconds=work.step,
            token_seconds=work.chunk,
            acceptance=self.acceptance(),
        )

    @property
    def lone_tokens(self) -> int:
        return min(LONE_TOKENS, self.limits.chunk, self.limits.max_input // 2)

    @property
    def short(self) -> int:
        return min(32, self.limits.max_input // 4)

    def row_counts(self) -> list[int]:
        limits, groups = self.limits, self.limits.num_groups
        each = (1 + limits.drafts) * (DECODE_TOKENS + 32)
        counts = [
            groups * count
            for count in COUNTS
            if count <= limits.max_running and count * (each + STAGGER_TOKENS * count) < 0.8 * limits.pool
        ]
        return sorted([*counts, *self._halves]) or [groups]

    def halve_jump(self) -> int | None:
        """Adds a number of requests in the middle of two between which the seconds of a decode jump, by the rounds so
        far: they rise by more than at the rate of the steeper neighboring range (a kernel that takes only so many
        tokens). None: there is no such jump between numbers that are not adjacent."""
        points = [(count, self.rounds.value((DECODE, count))) for count in self.row_counts()]
        ranges = list(pairwise(points))
        slopes = [(high - low) / (to - begin) for (begin, low), (to, high) in ranges]
        found: list[tuple[float, int]] = []
        for place, ((begin, low), (to, high)) in enumerate(ranges):
            beside = max(slopes[max(place - 1, 0) : place] + slopes[place + 1 : place + 2], default=slopes[place])
            jump = (high - low - max(beside, 0.0) * (to - begin)) / low
            middle = (begin + to) // 2 // self.limits.num_groups * self.limits.num_groups
            if jump > JUMP and begin < middle < to:
                found.append((jump, middle))
        if not found or len(self._halves) >= MOST_HALVES:
            return None
        self._halves.append(max(found)[1])
        return self._halves[-1]

    def prompt_lengths(self) -> list[int]:
        most = min(self.limits.chunk, self.limits.max_input - 8)
        lengths = [length for length in (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096) if length < most]
        return [*lengths, most]

    def tails(self) -> list[int]:
        """New tokens after a cached prefix."""
        most = min(self.prompt_lengths()[-1], self.limits.max_input - len(self.prefix) - 8)
        return [tail for tail in TAILS if tail <= most]

    @property
    def short_prefix(self) -> int:
        """Tokens of the short cached prefix, a part of the long one."""
        return min(SHORT_PREFIX, len(self.prefix) // 2)

    def long_decode(self) -> tuple[int, int] | None:
        """Concurrent requests and prompt tokens of decodes with long contexts: one of the numbers of requests with
        short ones, the largest for which the pool has room. None: there is none."""
        limits, counts = self.limits, self.row_counts()
        groups = limits.num_groups
        for count in reversed([count for count in counts if count <= max(8 * groups, counts[0])]):
            room = limits.pool * groups // count - 2 * DECODE_TOKENS
            length = min(limits.max_input - 2 * DECODE_TOKENS, room, self.quick_length(), 4096)
            if length >= 2 * self.context(count):
                return count, length
        return None

    def quick_length(self) -> int:
        """Prompt tokens computed in `PREFIX_SECONDS`."""
        lengths = [n for n in self.prompt_lengths() if self.rounds.has((PREFILL, n))]
        return max((n for n in lengths if self.rounds.value((PREFILL, n)) <= PREFIX_SECONDS), default=0)

    def context(self, count: int) -> float:
        """Context tokens of each of `count` decoding requests with short prompts."""
        return median([decode.context for decode in self.decodes[count]])

    def prefill_seconds(self, length: int) -> float:
        """Seconds of the steps of a prompt, as far as measured."""
        lengths = self.prompt_lengths()
        known = [(n, self.rounds.value((PREFILL, n))) for n in lengths]
        return Curve(*(tuple(map(float, column)) for column in zip(*known))).at(length)

    def context_second(self) -> float:
        """Seconds of a context token: long contexts against short ones."""
        if self.long is None:
            return 0.0
        count, _, context = self.long
        more = self.rounds.value(LONG) - self.rounds.value((DECODE, count))
        return max(more, 0.0) / (max(count // self.limits.num_groups, 1) * (context - self.context(count)))

    def cached_costs(self) -> tuple[float, float, Curve | None]:
        """Seconds of a cached token before a prompt's new tokens, and of a pair of a new and a cached token: a long
        prefix against a short one. And step seconds over the new tokens, without those: another form of attention, or
        compiled calls, may make them less than those of other prompts."""
        tails, short, long = self.tails(), self.short_prefix, len(self.prefix)
        ends = [
            tail for tail in tails if self.rounds.has((CACHED, tail, long)) and self.rounds.has((CACHED, tail, short))
        ]
        if len(ends) < 2:
            return 0.0, 0.0, None
        few, many = (
            (self.rounds.value((CACHED, tail, long)) - self.rounds.value((CACHED, tail, short))) / (long - short)
            for tail in ends
        )
        pair = min(max((many - few) / (ends[1] - ends[0]), 0.0), max(many, 0.0) / ends[1])
        token = max(many - pair * ends[1], 0.0)
        tails = [tail for tail in tails if self.rounds.has((CACHED, tail, short))]
        seconds = [self.rounds.value((CACHED, tail, short)) - short * (token + pair * tail) for tail in tails]
        return token, pair, Curve(tuple(map(float, tails)), tuple(max(s, 1e-6) for s in ascending(seconds)))

    def sent_seconds(self) -> float:
        """Time that a step loses to each request with tokens from the step before: streamed answers against others,
        over all numbers of requests alike."""
        points = [
            (count, (DECODE, count)) for count in self.row_counts() if self.rounds.has((STREAMED, (DECODE, count)))
        ]
        lost = [(self.rounds.value((STREAMED, point)) - self.rounds.value(point)) / count for count, point in points]
        return max(median(lost), 0.0) if lost else 0.0

    def split_second(self) -> float | None:
        """Seconds that a pair of tokens in different prompts saves; None: no step had several prompts."""
        rounds, saved = self.rounds, list[tuple[float, float]]()
        slowness = rounds.slowness()
        for number, (_, tokens, prompts, *_, seconds) in rounds.kept((pair[0], pair) for pair in self.split):
            whole = self.prefill_seconds(int(tokens))
            pairs = mixed_probe.pairs_of(int(tokens), 1) - mixed_probe.pairs_of(int(tokens), int(prompts))
            saved.append((pairs, whole - seconds / slowness[number]))
        if not saved:
            return None
        middle = median([pairs for pairs, _ in saved])  # a few pairs do not show what one saves
        return max(median([seconds / max(pairs, 1) for pairs, seconds in saved if pairs >= middle]), 0.0)

    def acceptance(self) -> tuple[float, ...]:
        """The acceptance rate, assumed equal at all positions, that gives the measured number of accepted drafts a
        step."""
        drafts = self.limits.drafts
        if not drafts or not self.steps:
            return ()
        mean, low, high = self.accepted / self.steps, 0.0, 1.0
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
