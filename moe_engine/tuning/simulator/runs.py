"""Groups of a replica whose next plans are known, as arrays over the groups: a step of all groups costs a few array
operations.

All running requests of such a group decode; their counts grow by a token a step, so the first and the last step
determine a run. A group in the middle of a long prompt computes a chunk of it instead in steps that may have prompts
(`chunk_run.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_engine.scheduler.chunk_run import ChunkLimits
from moe_engine.scheduler.step_sums import StepSums
from moe_engine.tuning.costs.step_cost import StepShape

NEVER = 1 << 62
RunStep = tuple[list[StepShape], int, int]
"""A step of the groups in runs: the shapes of the busiest with a chunk and of the busiest that decodes, the requests
that decode and the prompt tokens of all."""


def most_of(values: NDArray[np.int64]) -> int:
    """The maximum. `argmax` takes a third of the time of `max`, which is called through Python."""
    return values.item(values.argmax())


class Runs:
    """Attributes:
    step: steps that have passed, of all runs. sums: their seconds.
    members: groups in a run. fresh: those whose run has no step yet.
    chunking: members that compute chunks of a prompt.
    holding: members with waiting prompts, except these; they leave when prompts may be computed.
    waiting: all members with waiting prompts.
    finishing: chunking members whose last chunk is in flight.
    joined: members whose next step is the first decode of the prompt of that chunk, with its tokens.
    ending: members whose next step is without the requests that end with the step in flight.
    Joined members leave with the result of the step in flight, ending ones if they cannot go on. `rows_ahead`: requests
    that they have more in their next step than in that one.
    lasting: members some of whose requests still decode after their run.
    total_rows: requests that decode, of all members.
    """

    def __init__(self, num_groups: int) -> None:
        self.step = self.total_rows = 0
        self.sums = StepSums()
        self.members: set[int] = set()
        self.fresh: set[int] = set()
        self.holding: set[int] = set()
        self.waiting: set[int] = set()
        self.chunking: set[int] = set()
        self.finishing: set[int] = set()
        self.joined: dict[int, int] = {}
        self.ending: set[int] = set()
        self.lasting: set[int] = set()
        self.rows_ahead = 0
        self._ahead: dict[int, int] = {}
        self._rows = np.zeros(num_groups, np.int64)
        self._rows_after = np.zeros(num_groups, np.int64)
        """Requests that still decode after the run."""
        self._context = np.zeros(num_groups, np.int64)
        """Context tokens extrapolated back to step 0."""
        self._ends = np.full(num_groups, NEVER, np.int64)
        self._chunks = _Chunks(num_groups)
        self._loads = np.zeros(num_groups, np.int64)
        """Tokens of all requests, extrapolated back to step 0."""
        self._next_end = NEVER
        self._most_rows = 0
        self._is_stale = False

    def join(self, group: int, shape: StepShape, limit: int, rows_after: int, holds: bool, waits: bool) -> None:
        """Adds a group's run of at most `limit` steps, after which `rows_after` requests still decode; `shape`: that of
        the first step."""
        self.members.add(group)
        self.fresh.add(group)
        self.total_rows += shape.decode_rows
        self._rows[group] = shape.decode_rows
        self._context[group] = shape.decode_context - shape.decode_rows * self.step
        self._ends[group] = self.step + limit
        self._set_rows_after(group, rows_after)
        if waits:
            self.wait(group, holds)

    def join_chunks(self, group: int, shape: StepShape, limits: ChunkLimits, most_in_a_row: int) -> None:
        """Adds a group's run with chunks; `shape`: that of the next decode step; `most_in_a_row`: chunks after which
        running requests decode."""
        self.join(group, shape, limits.decodes, shape.decode_rows, holds=False, waits=True)
        self.chunking.add(group)
        self._chunks.join(group, shape.decode_rows, limits, most_in_a_row)

    def wait(self, group: int, holds: bool) -> None:
        """Marks a member as having waiting prompts, which may join the last chunk of another one."""
        self.waiting.add(group)
        if group in self.chunking:
            self._chunks.end_before_last(group)
        elif holds:
            self.holding.add(group)

    def join_prompt(self, group: int) -> None:
        """The prompt of a finishing member decodes in the next step, with its other requests."""
        chunks, rows = self._chunks, self._rows.item(group)
        context = self._context.item(group) + rows * self.step + chunks.computed_by(group) + 1
        self.joined[group] = self.last_size(group)
        chunks.leave(group, rows)
        self.finishing.remove(group)
        self.chunking.remove(group)
        self._change(group, rows + 1, context, rows + 1)

    def end_rows(self, group: int, rows: int, context: int, rows_after: int) -> None:
        """Requests of a member end with the step in flight; the next step has `rows`, with so many context tokens; of
        them `rows_after` decode behind it."""
        self.ending.add(group)
        self._change(group, rows, context, rows_after)

    def go_on(self, group: int, limit: int, rows_after: int) -> None:
        """The run of an ending member goes on for at most `limit` steps with the requests of its next step."""
        self.ending.remove(group)
        self.rows_ahead -= self._ahead.pop(group)
        self._ends[group] = self.step + limit
        self._set_rows_after(group, rows_after)

    def _set_rows_after(self, group: int, rows: int) -> None:
        self._rows_after[group] = rows
        (self.lasting.add if rows else self.lasting.discard)(group)
        self._is_stale = True

    def _change(self, group: int, rows: int, context: int, rows_after: int) -> None:
        """A member's next step, with which its run ends, has other requests than the step in flight."""
        more = self._ahead[group] = rows - self._rows.item(group)
        self.rows_ahead += more
        self.total_rows += more
        self._rows[group] = rows
        self._context[group] = context - rows * self.step
        self._ends[group] = self.step + 1
        self._set_rows_after(group, rows_after)

    def leave(self, group: int) -> None:
        self.members.remove(group)
        if group in self.chunking:
            self._chunks.leave(group, self._rows.item(group))
        self.finishing.discard(group)
        self.joined.pop(group, None)
        self.ending.discard(group)
        self.rows_ahead -= self._ahead.pop(group, 0)
        self.fresh.discard(group)
        self.holding.discard(group)
        self.waiting.discard(group)
        self.chunking.discard(group)
        self.total_rows -= self._rows.item(group)
        self._rows[group] = self._context[group] = 0
        self._ends[group] = NEVER
        self._set_rows_after(group, 0)

    def set_load(self, group: int, tokens: int) -> None:
        """Sets the tokens of the requests of a group; of a member, extrapolated back to step 0."""
        self._loads[group] = tokens

    def read_loads(self, tokens: NDArray[np.int64]) -> None:
        """Sets the tokens of the requests of each group now."""
        np.multiply(self._rows, self.step, out=tokens)
        tokens += self._loads

    def chunks_in_a_row(self, group: int) -> int:
        """Chunks of a member since its last decode step."""
        return self._chunks.in_a_row.item(group)

    def last_size(self, group: int) -> int:
        """Tokens of the last chunk of a member, if it is in flight or computed; else 0."""
        return self._chunks.sizes.item(group) if group in self.finishing else self.joined.get(group, 0)

    def rows_after(self, steps: int, exactly: bool = True) -> int:
        """Requests that still decode after so many further plans, in the member with most of them; if not `exactly` any
        other number may stand for one above 0."""
        if not exactly and (self.lasting or self.finishing):
            return 1
        self._refresh()
        if self.step + steps < self._next_end:
            most = self._most_rows
        else:
            most = most_of(np.where(self._ends <= self.step + steps, self._rows_after, self._rows))
        return max([most, *[self._rows.item(group) + 1 for group in self.finishing]]) if self.finishing else most

    @property
    def next_end(self) -> int:
        """The step at which a member must ask its scheduler again."""
        self._refresh()
        return self._next_end

    def leaving(self, hold: bool) -> set[int]:
        """Members that ask their schedulers for the next step; `hold`: it has no prompts."""
        found: set[int] = set()
        if self.step >= self.next_end:
            found.update((self._ends <= self.step).nonzero()[0].tolist())
        if not hold:
            found |= self.holding
            if self.chunking:
                found.update(self._chunks.over(self._rows).nonzero()[0].tolist())
        return found | (self.finishing & self.waiting) if self.finishing else found

    def shape(self, ahead: int = 0) -> StepShape:
        """The maximum over the members, with the tokens of all, of the step `ahead` steps after the next one, without
        prompts."""
        self._refresh()
        context = self._context + self._rows * (self.step + ahead)
        return StepShape(self._most_rows, most_of(context), 0, 0, 0, self.total_rows)

    def planned(self, hold: bool) -> RunStep | None:
        """Plans the next step of all members; None if no member has a part in it. `hold`: it has no prompts."""
        chunks = self._chunks
        if hold or not self.chunking:
            if chunks.some_in_a_row:
                chunks.decoded(self._rows)
            return ([self.shape()], self.total_rows, 0) if self.total_rows else None
        rows = self._rows * chunks.others
        context = self._context + rows * self.step
        context *= chunks.others
        last = chunks.begin_last()
        decodes, tokens = self.total_rows - chunks.num_rows, chunks.num_tokens
        most = chunks.shape()
        shapes = [StepShape(0, 0, 0, *most, tokens, prefill_cached=chunks.cached, prefill_fresh=chunks.fresh)]
        if decodes:
            shapes.append(StepShape(most_of(rows), most_of(context), 0, 0, 0, decodes))
        chunks.computed()
        self.finishing.update(last)
        self.waiting.difference_update(last)
        self._context -= self._rows - rows
        self._ends += chunks.mask
        self._is_stale = True
        return shapes, decodes, tokens

    def _refresh(self) -> None:
        if self._is_stale:
            self._next_end, self._most_rows = self._ends.item(self._ends.argmin()), most_of(self._rows)
            self._is_stale = False


class _Chunks:
    """The chunks of members, by group; zero for other groups. `num_rows`: their decoding requests, which wait during a
    chunk; `num_tokens`: tokens of a chunk of each."""

    def __init__(self, num_groups: int) -> None:
        self.mask, self.others = np.zeros(num_groups, np.int64), np.ones(num_groups, np.int64)
        self.in_a_row, self.sizes = np.zeros(num_groups, np.int64), np.zeros(num_groups, np.int64)
        self.num_rows = self.num_tokens = 0
        self.some_in_a_row = False
        self._starts = np.zeros(num_groups, np.int64)
        self._left = np.full(num_groups, NEVER, np.int64)
        self._last = np.zeros(num_groups, np.int64)
        """Tokens of the last chunk; 0: the run ends before it."""
        self._most_in_a_row = NEVER

    def join(self, group: int, rows: int, limits: ChunkLimits, most_in_a_row: int) -> None:
        self.mask[group], self.others[group] = 1, 0
        self.num_rows += rows
        self.num_tokens += limits.size
        self.in_a_row[group], self._most_in_a_row = limits.in_a_row, most_in_a_row
        self.some_in_a_row |= limits.in_a_row > 0
        self.sizes[group], self._starts[group], self._left[group] = limits.size, limits.start, limits.chunks
        self._last[group] = limits.last

    def end_before_last(self, group: int) -> None:
        self._last[group] = 0

    def leave(self, group: int, rows: int) -> None:
        self.mask[group], self.others[group] = 0, 1
        self.num_rows -= rows
        self.num_tokens -= self.sizes.item(group)
        self.in_a_row[group] = self.sizes[group] = self._starts[group] = self._last[group] = 0
        self._left[group] = NEVER

    def computed_by(self, group: int) -> int:
        """Tokens of the prompt that are computed with the step in flight."""
        return self._starts.item(group)

    def begin_last(self) -> list[int]:
        """Groups that compute their last chunk in the next step."""
        found: list[int] = ((self._left <= 0) & (self._last > 0)).nonzero()[0].tolist()
        for group in found:
            self.num_tokens += self._last.item(group) - self.sizes.item(group)
            self.sizes[group], self._last[group], self._left[group] = self._last[group], 0, NEVER
        return found

    def over(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Groups whose next step with prompts is of another kind: the last chunk, or the turn of the decodes."""
        found: NDArray[np.bool_] = (self._left <= 0) & (self._last == 0)
        found |= (self.in_a_row >= self._most_in_a_row) & (rows > 0)
        return found

    @property
    def cached(self) -> int:
        """Most context tokens before a chunk."""
        return most_of(self._starts)

    @property
    def fresh(self) -> int:
        """Tokens of the largest chunk with less context before it."""
        return most_of(self.sizes * (self._starts < self.sizes))

    def shape(self) -> tuple[int, int]:
        """Tokens, and pairs of tokens, of the largest chunk."""
        sizes = self.sizes
        pairs = sizes * self._starts + sizes * (sizes + 1) // 2
        return most_of(sizes), most_of(pairs)

    def computed(self) -> None:
        """Each member computes a chunk."""
        self._starts += self.sizes
        self._left -= self.mask
        self.in_a_row += self.mask
        self.some_in_a_row = True

    def decoded(self, rows: NDArray[np.int64]) -> None:
        """The members decode that have requests to decode."""
        self.in_a_row[rows > 0] = 0
        self.some_in_a_row = most_of(self.in_a_row) > 0
