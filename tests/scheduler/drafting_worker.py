"""The fake worker of a scheduler with speculation: only the worker has the true lengths, and it reports them late.

Like `FakeWorker` it keeps a hash of the computed prefix for each KV slot; slots of rejected drafts have arbitrary
contents. For every plan it checks that starts are the least possible ones, that the row's table has slots for all
possible writes of drafting, that these slots belong to no other request, and that draft extends have covered the
drafter's context.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from moe_engine.scheduler import SchedulerConfig
from moe_engine.types import StepPlan, StepResult
from tests.scheduler.simulator import next_token, prefix_hashes, step_hash

RUBBISH = -1
PAD_TOKENS = 8  # as `worker.rows`: positions a row may run past the context without drafts


@dataclass
class DraftingRow:
    """`computed` tokens of a row are in the pool; tokens[computed] is the last sampled token, if it decodes."""

    tokens: list[int]
    slots: list[int]
    computed: int
    hashes: list[int] = field(default_factory=list)
    followed: bool = True
    """Draft extends have covered all computed tokens of the row."""


class DraftingWorker:
    """Executes plans in order on request, as `FakeWorker`. Accepts a random number of drafts.

    Args:
        luck: acceptance probability of a draft.
    """

    def __init__(self, config: SchedulerConfig, seed: int, luck: float) -> None:
        assert config.speculation is not None
        self.config = config
        self.speculation = config.speculation
        self.rng = random.Random(seed)
        self.luck = luck
        self.queue: deque[StepPlan] = deque()
        self.rows: dict[int, DraftingRow] = {}
        self.pool: dict[int, int] = {}
        self.drafter_pool: dict[int, tuple[int, int]] = {}
        """By slot: the prefix and its successor from which the drafter's KV was computed."""
        self.always_follows = config.speculation.method == "nextn" and not config.speculation.auto_depth
        self.most_slots = self.speculation.num_slots(self.speculation.num_steps)
        self.tables: dict[int, list[int]] = {}
        """Slot tables after the start of all submitted plans."""
        self._ahead: dict[int, int] = {}
        """By plan number: steps in flight when it was planned."""
        self.last_number = 0
        self.speculative_steps = self.accepted = self.drafted = 0

    # -- allocation checks at planning

    def submit(self, plan: StepPlan) -> None:
        """Checks that no slot that a step in flight may use changes its owner."""
        assert plan.number == self.last_number + 1
        self.last_number = plan.number
        self._ahead[plan.number] = len(self.queue)
        busy: set[int] = set()
        for flying in self.queue:
            for row in flying.rows:
                busy.update(self.tables[row])
        for new in plan.new_rows:
            assert new.row not in {row for flying in self.queue for row in flying.rows}
            self.tables[new.row] = list(new.slots)
        for write in plan.row_writes:
            self.tables[write.row][write.start : write.start + len(write.slots)] = write.slots
        fresh: list[int] = []
        for write in plan.speculation.reserved if plan.speculation is not None else ():
            assert write.start == len(self.tables[write.row]), "reserved slots leave a gap"
            self.tables[write.row] += write.slots
            fresh += write.slots
        for row, start, slots in self._given(plan):
            fresh += [slot for slot in slots if slot not in self.tables[row]]
            self.tables[row][start : start + len(slots)] = slots
        assert len(set(fresh)) == len(fresh)
        assert busy.isdisjoint(fresh), "a slot was reassigned while a step in flight may use it"
        self.queue.append(plan)

    def _given(self, plan: StepPlan) -> list[tuple[int, int, list[int]]]:
        """(row, start, slots) of the requests whose slots are in the plan."""
        first = plan.num_decodes if plan.speculation is not None else 0
        found, at = [], 0
        for row, start, count in list(zip(plan.rows, plan.starts, plan.counts))[first:]:
            found.append((row, start, plan.slots[at : at + count]))
            at += count
        assert at == len(plan.slots)
        return found

    # -- execution

    def execute(self) -> StepResult:
        """Runs the oldest submitted plan."""
        plan = self.queue.popleft()
        self._update_rows(plan)
        assert len(set(plan.rows)) == len(plan.rows)
        for row, start, slots in self._given(plan):
            self._check_pages(self.rows[row], start, slots)
            self.rows[row].slots[start : start + len(slots)] = slots
        result_rows, tokens, input_at = [], [], 0
        writes: dict[int, int] = {}
        followed: dict[int, tuple[int, int]] = {}
        for i, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts)):
            state = self.rows[row]
            if i < plan.num_decodes:
                new, touched = self._decode(state, start, count, plan)
                first = state.computed - len(new)
            else:
                ids = plan.input_ids[input_at : input_at + count]
                input_at += count
                assert start == state.computed and ids == state.tokens[start : start + count]
                first, touched = start, state.slots[start : start + count]
                self._compute(state, count)
                new = [next_token(state.hashes[-1])] if plan.samples[i] else []
                state.tokens += new
            self._check_owned(row, touched)
            writes |= dict.fromkeys(touched, RUBBISH)
            writes |= {state.slots[p]: state.hashes[p] for p in range(first, state.computed)}
            state.followed &= plan.speculation is not None and plan.speculation.follow
            if state.followed:
                self._follow(state, first, followed)
            if plan.samples[i]:
                result_rows.append(row)
                tokens.append(new)
        assert input_at == len(plan.input_ids)
        self.pool |= writes  # last: no request may rely on writes of another request in the same step
        self.drafter_pool |= followed
        if plan.speculation is not None and plan.num_decodes:
            self.speculative_steps += 1
        return StepResult(plan.number, result_rows, tokens, seconds=self.rng.uniform(0.5, 2), follow_seconds=0.1)

    def _decode(self, state: DraftingRow, start: int, count: int, plan: StepPlan) -> tuple[list[int], list[int]]:
        """New tokens of a decode, and the slots that it and its drafts write."""
        at = state.computed
        context = [self.pool.get(slot) for slot in state.slots[:at]]
        assert context == state.hashes[:at], "a context slot has the wrong KV"
        assert len(state.tokens) == at + 1, "a decode without a sampled token"
        if plan.speculation is None:
            assert start == at and count == 1, "an ordinary step must know where its decodes begin"
            return self._accept(state, 0), [state.slots[at]]
        depth = plan.speculation.depth if count > 1 else 0
        assert count == self.speculation.num_nodes(depth)
        assert start <= at <= start + self.speculation.num_steps * self._ahead[plan.number], "starts are the least"
        width = self.speculation.num_slots(depth)
        assert len(state.slots) >= at + width, "drafts have no slots"
        assert at + width <= self.config.context_len + PAD_TOKENS + 2 * self.most_slots, "the worker's row ends there"
        if depth and self.speculation.method == "nextn":
            assert state.followed, "a draft follows tokens that the drafter has not computed"
        if depth and self.always_follows:
            made_of = [self.drafter_pool.get(slot) for slot in state.slots[:at]]
            assert made_of == list(zip(state.hashes, state.tokens[1:])), "the drafter's KV belongs to another text"
        right = 0
        while right < depth and self.rng.random() < self.luck:
            right += 1
        self.drafted += depth
        self.accepted += right
        return self._accept(state, right), state.slots[at : at + width]

    def _accept(self, state: DraftingRow, right: int) -> list[int]:
        """Computes the last token and `right` accepted drafts; returns the drafts and one more token."""
        new = []
        for _ in range(right + 1):
            self._compute(state, 1)
            new.append(next_token(state.hashes[-1]))
            state.tokens.append(new[-1])
        return new

    @staticmethod
    def _compute(state: DraftingRow, count: int) -> None:
        for token in state.tokens[state.computed : state.computed + count]:
            state.hashes.append(step_hash(state.hashes[-1] if state.hashes else 0, token))
        state.computed += count

    def _follow(self, state: DraftingRow, first: int, followed: dict[int, tuple[int, int]]) -> None:
        """Draft extend of positions from `first` on, each with the token after it."""
        for position in range(first, state.computed):
            behind = state.tokens[position + 1] if position + 1 < len(state.tokens) else RUBBISH
            followed[state.slots[position]] = (state.hashes[position], behind)

    # -- checks

    def _check_pages(self, state: DraftingRow, start: int, slots: list[int]) -> None:
        """Pages are filled in order."""
        page = self.config.page_size
        assert all(page <= slot < self.config.num_slots + page for slot in slots)
        assert start <= len(state.slots)
        table = state.slots[:start] + slots
        for position in range(start, start + len(slots)):
            if position % page:
                assert table[position] == table[position - 1] + 1
            else:
                assert table[position] % page == 0

    def _check_owned(self, row: int, touched: list[int]) -> None:
        """Checks that these slots belong to no other row."""
        mine = set(touched)
        assert len(mine) == len(touched)
        for other, state in self.rows.items():
            assert other == row or mine.isdisjoint(state.slots), "a step writes to a slot of another request"

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.finished_rows:
            del self.rows[row]
        for new in plan.new_rows:
            assert new.row not in self.rows and 0 <= new.row < self.config.max_rows
            computed = len(new.slots)
            assert computed < len(new.token_ids)
            hashes = prefix_hashes(new.token_ids[:computed])
            assert [self.pool.get(slot) for slot in new.slots] == hashes, "a cached slot has the wrong KV"
            self.rows[new.row] = DraftingRow(list(new.token_ids), list(new.slots), computed, hashes)
        for write in plan.row_writes:
            state = self.rows[write.row]
            assert write.start + len(write.slots) <= state.computed
            assert [self.pool.get(s) for s in write.slots] == state.hashes[write.start :][: len(write.slots)]
            state.slots[write.start : write.start + len(write.slots)] = write.slots
        if plan.speculation is not None:
            for write in plan.speculation.reserved:
                state = self.rows[write.row]
                assert write.start == len(state.slots)
                state.slots += write.slots
                self._check_run(state.slots[max(0, write.start - 1) :], write.start)

    def _check_run(self, slots: list[int], start: int) -> None:
        page = self.config.page_size
        for position, (before, slot) in enumerate(pairwise(slots), start):
            assert slot == before + 1 if position % page else slot % page == 0
