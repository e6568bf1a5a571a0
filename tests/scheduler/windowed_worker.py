"""A fake worker with a second pool for windowed layers, in which it keeps hashes as in the full pool."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from moe_engine.scheduler import SchedulerConfig
from moe_engine.types import StepPlan, StepResult
from moe_engine.types.row_sizes import window_pool_tokens
from tests.scheduler.simulator import FakeWorker, prefix_hashes


def bounded(config: SchedulerConfig, window: int, requests: int | None = None) -> SchedulerConfig:
    """`config` with a window pool for this number of requests (None: for all running requests)."""
    step = config.chunk_tokens or max(config.max_prefill_tokens, config.context_len)
    drafts = config.speculation.num_slots(config.speculation.num_steps) if config.speculation is not None else 0
    rows = config.max_rows if requests is None else min(requests, config.max_rows)
    tokens = window_pool_tokens(window, config.page_size, rows, step + config.decode_tokens, drafts)
    return replace(config, window=window, num_window_slots=tokens)


class WindowedWorker(FakeWorker):
    """Checks that every token in the window of every query has a window slot with the token's KV."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.planned_page_of: dict[int, int] = {}
        self.page_of: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.window_pool: dict[int, int] = {}
        self.reads: deque[set[int]] = deque()
        """Window slots that each submitted plan may read or write."""

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        pairs = dict(zip(plan.window_pages[::2], plan.window_pages[1::2]))
        assert 2 * len(pairs) == len(plan.window_pages), "a page is mapped twice"
        self.planned_page_of.update(pairs)
        written = {self._mapped(self.planned_page_of, slot) for slot in plan.slots}
        assert len(written) == len(plan.slots), "two tokens share a window slot"
        in_flight = set().union(*self.reads) if self.reads else set()
        assert in_flight.isdisjoint(written), "a window slot was reassigned while a step in flight may use it"
        reads = set(written)
        for row, start in zip(plan.rows, plan.starts):
            context = self.mirror[row][max(0, start - self.config.window + 1) : start]
            reads.update(self._mapped(self.planned_page_of, slot) for slot in context)
        self.reads.append(reads)

    def execute(self) -> StepResult:
        plan = self.queue[0]
        result = super().execute()
        self.reads.popleft()
        writes: dict[int, int] = {}
        at = 0
        for row, start, count in zip(plan.rows, plan.starts, plan.counts):
            table = self.tables[row]
            new = [self._mapped(self.page_of, slot) for slot in plan.slots[at : at + count]]
            at += count
            hashes = prefix_hashes(self.rows[row].tokens[: start + count])
            first = max(0, start - self.config.window + 1)
            assert len(table) == start
            assert [self.window_pool.get(slot) for slot in table[first:]] == hashes[first:start], "wrong windowed KV"
            table += new
            writes.update(zip(new, hashes[start:]))
        self.window_pool.update(writes)
        return result

    def _update_rows(self, plan: StepPlan) -> None:
        super()._update_rows(plan)
        self.page_of.update(zip(plan.window_pages[::2], plan.window_pages[1::2]))
        for new in plan.new_rows:
            self.tables[new.row] = [self._mapped(self.page_of, slot) for slot in new.slots]
        for write in plan.row_writes:
            end = write.start + len(write.slots)
            self.tables[write.row][write.start : end] = [self._mapped(self.page_of, slot) for slot in write.slots]

    def _mapped(self, page_of: dict[int, int], slot: int) -> int:
        page = self.config.page_size
        window_page = page_of.get(slot - slot % page)
        return -1 if window_page is None else window_page + slot % page
