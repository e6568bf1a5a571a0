"""Which steps of several attention groups may have prompts: the production rule, with the groups of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from moe_engine.core.dp_sync import PrefillTurns
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.prefill_delays import PrefillDelays
from moe_engine.tuning.simulator.group import Group
from moe_engine.types import StepFacts


class GroupTurns:
    """Attributes:
    has_delayer: with `--enable-prefill-delayer` every group decides, as in production (`agree`); all come to the same
    decisions. Without it the counts over the groups suffice (`after`).
    counts_rows: the decision depends on the number of decoding requests; else on whether there is one.
    """

    def __init__(self, config: SchedulerConfig, num_groups: int, clock: Callable[[], float]) -> None:
        delays = config.delays_prefills and num_groups > 1
        self.counts_rows = delays
        self.has_delayer = config.delayer is not None and num_groups > 1
        self._turns = PrefillTurns(delays=PrefillDelays(config, clock) if delays else None)
        self._of: dict[int, PrefillTurns] = {}
        """With a delayer: of each group."""

    @property
    def open(self) -> bool:
        """Whether the next step may have prompts."""
        return self._turns.open

    def begin(self, groups: Sequence[Group], lost: Collection[int]) -> None:
        """At the start, and after a loss: no prompt has waited."""
        if self.has_delayer:
            delays = {i: group.scheduler.delays for i, group in enumerate(groups) if i not in lost}
            for own in delays.values():
                assert own is not None
                own.forget()
            self._of = {i: PrefillTurns(delays=own) for i, own in delays.items()}
            self._turns = next(iter(self._of.values()))

    def after(self, num_groups: int, waiting: int, prefilled: bool, running: int) -> None:
        """Decides for the step after one with these counts: `PrefillTurns.after_counts`."""
        self._turns.after_counts(num_groups, waiting, prefilled, running)

    def agree(self, groups: Sequence[Group], planned: Collection[int], prefilled: bool) -> None:
        """The schedulers exchange their facts for a prefill delayer; those that `planned` nothing join with an idle
        batch."""
        facts: list[StepFacts] = []
        for index in self._of:
            scheduler = groups[index].scheduler
            assert scheduler.delays is not None
            if index not in planned:
                scheduler.delays.planned(0)
            own, running = scheduler.delays.facts(scheduler.table), len(scheduler.table.decodes)
            facts.append(
                StepFacts(prefills=prefilled, num_running=running, num_waiting=scheduler.num_waiting, delay=own)
            )
        for turns, of_group in zip(self._of.values(), facts):
            turns.after(tuple(facts), of_group.delay)
