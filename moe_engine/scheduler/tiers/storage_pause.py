"""Pauses lookups of a storage that hangs, as a mount whose server is gone: else each prompt waits up to its bound.

A storage hangs when reads are open and none has reported for `HANG_SECONDS`. Prompts are then computed without it. From
time to time a lookup that no request waits for tries it again; its answer ends the pause.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("moe_engine")

HANG_SECONDS = 5.0
STEP_SECONDS = 1.0
"""Most that the time between two checks counts: a read begins with the plan of a step, so a long step delays it."""
RETRY_SECONDS = (30.0, 600.0)
"""First and longest time until the next try; it doubles until a page has been read."""


class StoragePause:
    def __init__(self) -> None:
        self.is_on = False
        self._silent = 0.0
        self._checked = self._began = self._next_try = 0.0
        self._retry = RETRY_SECONDS[0]

    def begins(self, now: float, num_open: int) -> bool:
        """Whether the pause begins now; called before each step, with the number of open reads."""
        passed, self._checked = min(now - self._checked, STEP_SECONDS), now
        self._silent = self._silent + passed if num_open else 0.0
        if self.is_on or self._silent < HANG_SECONDS:
            return False
        self.is_on, self._began = True, now
        self._next_try = now + self._retry
        logger.warning(
            "KV storage: no read has answered for %.0f s: prompts are computed without it, next try in %.0f s",
            HANG_SECONDS, self._retry,
        )  # fmt: skip
        self._retry = min(2 * self._retry, RETRY_SECONDS[1])
        return True

    def must_try(self, now: float) -> bool:
        """Whether a lookup is due; once for each interval."""
        if not self.is_on or now < self._next_try:
            return False
        self._next_try = now + self._retry
        return True

    def reported(self, num_pages: int) -> None:
        """A read has reported, with the number of its pages in host memory (0 for lookups)."""
        self._silent = 0.0
        if num_pages:
            self._retry = RETRY_SECONDS[0]

    def end(self, now: float) -> None:
        """A try was answered."""
        if self.is_on:
            self.is_on = False
            logger.info("KV storage: it answers again, after %.0f s", now - self._began)
