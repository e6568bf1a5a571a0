"""Delays of prompts by flags: ``--prefill-decode-interval`` and ``--enable-prefill-delayer``.

One attention group decides by itself, before each step. Schedulers of several groups decide together from the facts
that they exchange (`core.dp_sync.PrefillTurns`), so that all of them hold prompts back in the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.prefill_delayer import Outcome, PrefillDelayer
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.types.prefill_delay import DelayFacts


class DecodeInterval:
    """Decode steps that follow each step with prompts.

    Args:
        steps: their number; 0: none.
        least: the interval holds prompts back only while at least so many requests decode.
    """

    def __init__(self, steps: int, least: int) -> None:
        self._steps, self._least = steps, max(least, 1)
        self.left = 0

    def after(self, prefilled: bool, steps: int = 1) -> None:
        """These steps are planned; `prefilled`: with prompts."""
        self.left = self._steps if prefilled else max(self.left - steps, 0)

    def left_beside(self, running: int) -> int:
        """Steps for which prompts wait while this number of requests decode."""
        return self.left if running >= self._least else 0


class PrefillDelays:
    """The delays of one scheduler.

    Attributes:
        shared: the schedulers of several groups decide together (`after_step`).
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self.shared = False
        self.interval = DecodeInterval(config.prefill_decode_interval, config.prefill_decode_interval_min_bs)
        self.delayer = PrefillDelayer(config.delayer, config.max_rows, clock) if config.delayer is not None else None
        self._decision: tuple[Outcome, DelayFacts] | None = None
        """The decision on the next step, and this group's facts before it."""

    def facts(self, table: RequestTable, is_paused: bool = False) -> DelayFacts | None:
        """This group's facts for the delayer; None without it."""
        if self.delayer is None:
            return None
        in_prompt = table.chunked is not None and not is_paused
        has_row = table.num_running < table.settings.max_running_requests and not is_paused
        usage = table.kv_cache.num_used / table.kv_cache.slots.num_slots
        return self.delayer.facts(len(table.queue) * has_row + in_prompt, len(table.decodes), usage, in_prompt)

    def hold(self, table: RequestTable, num_decodes: int) -> bool:
        """Whether the next step of a single group has no prompts; `num_decodes`: requests that can decode in it."""
        if self.shared:
            return False
        if self.kept_steps(num_decodes):
            self._decision = None
            return True
        own = self.facts(table)
        if self.delayer is None or own is None:
            return False
        outcome = self.delayer.decide((own,))
        self._decision = outcome, own
        return not outcome.allow

    def kept_steps(self, num_decodes: int) -> int:
        """The next steps of a single group that have no prompts by ``--prefill-decode-interval``."""
        return 0 if self.shared else self.interval.left_beside(num_decodes)

    def decoded(self, steps: int) -> None:
        """So many steps without prompts are planned (`decode_run.py`, without a delayer)."""
        if not self.shared:
            self.interval.after(False, steps)

    def planned(self, num_prompts: int) -> None:
        """A step is planned, with this number of prompts."""
        if not self.shared:
            self.interval.after(num_prompts > 0)
        if self.delayer is not None and self._decision is not None:
            outcome, own = self._decision
            if not self.shared:
                if num_prompts and not outcome.allow:  # no request decodes in this step: all were retracted, or wait
                    outcome = self.delayer.decide((own._replace(running=0),))
                self.delayer.advance(outcome)
            self.delayer.planned(outcome, own, num_prompts)
            self._decision = None

    def decide_after(self, groups: Sequence[DelayFacts], own: DelayFacts) -> bool:
        """Whether the delayer allows prompts in the step after one with these facts of all groups. Call it once a
        step."""
        assert self.delayer is not None
        outcome = self.delayer.decide(groups)
        self.delayer.advance(outcome)
        self._decision = outcome, own
        return outcome.allow

    def forget(self) -> None:
        """Ends all waits, after a loss of groups: the others may have counted different steps."""
        self.interval.left, self._decision = 0, None
        if self.delayer is not None:
            self.delayer.forget()

    def state(self) -> dict[str, Any] | None:
        """State of the delayer, for metrics; None without it."""
        return self.delayer.state() if self.delayer is not None else None
