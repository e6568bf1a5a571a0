"""Backoff of admission: decode steps for which waiting requests are not examined.

Admission stops for `RETRY_DECODE_STEPS` when memory is short, and for `retract_decode_steps` after a retraction. The
first pause ends when memory is freed, the second when a row is released.
"""

from __future__ import annotations

RETRY_DECODE_STEPS = 10
"""Decode steps after which admission blocked by memory is retried; it is retried earlier if memory is freed."""


class AdmissionBackoff:
    """Counts decode steps; times of the backoff are numbers of decode steps."""

    def __init__(self) -> None:
        self.decode_steps = 0
        self.prefills_in_a_row = 0
        """Plans without decodes since the last plan with decodes."""
        self._left_waiting = False
        """Whether the last of them left prompts waiting."""
        self._retry_at = 0
        self._retracted_until = 0
        self._released_before = 0
        """Rows released before the last retraction."""

    def count_plan(self, num_decodes: int, left_waiting: bool) -> None:
        """`left_waiting`: some prompts did not fit into the plan."""
        self._left_waiting = left_waiting
        if num_decodes:
            self.decode_steps += 1
            self.prefills_in_a_row = 0
        else:
            self.prefills_in_a_row += 1

    def count_decodes(self, steps: int) -> None:
        self.decode_steps += steps
        self.prefills_in_a_row = 0

    def count_run(self, decodes: int, in_a_row: int, left_waiting: bool) -> None:
        """Counts the plans of a run of chunks and decodes (`chunk_run.py`), of which the last `in_a_row` have no
        decodes; `left_waiting`: of the last one."""
        self.decode_steps += decodes
        self.prefills_in_a_row, self._left_waiting = in_a_row, left_waiting

    def is_decode_turn(self, most: int) -> bool:
        """Whether running requests come before prompts: after `most` plans of prompts, or after a plan that took all
        waiting prompts. Otherwise prompts that arrive one by one would delay the next token of running requests."""
        return self.prefills_in_a_row >= most or (self.prefills_in_a_row > 0 and not self._left_waiting)

    def may_admit(self, num_released: int) -> bool:
        """Whether waiting requests are examined.

        Args:
            num_released: rows released since the start.
        """
        return self.steps_left(num_released) <= 0

    def steps_left(self, num_released: int) -> int:
        """Decode steps until waiting requests are examined again; 0 or less: now."""
        until = self._retry_at
        if num_released == self._released_before:
            until = max(until, self._retracted_until)
        return until - self.decode_steps

    def out_of_memory(self) -> None:
        """Records that admission was blocked by memory."""
        self._retry_at = self.decode_steps + RETRY_DECODE_STEPS

    def retry_now(self) -> None:
        """Ends the backoff: memory may have been freed, or a more urgent request has arrived."""
        self._retry_at = 0

    def after_retraction(self, steps: int, num_released: int) -> None:
        self._retracted_until = self.decode_steps + steps
        self._released_before = num_released

    def reset(self) -> None:
        self._retry_at = self._retracted_until = 0
