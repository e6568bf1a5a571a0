"""The log of the schedulers of a simulation: batch lines, retractions and changes by the autopilot, as a server writes.

The lines are those of production: the schedulers and `core.step_reporter` write them to the engine's logger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from moe_engine.core.step_reporter import StepReporter
from moe_engine.logs import LOGGER, Formatter

GroupLogs = Callable[[int, Callable[[], float]], "GroupLog"]
"""``logs(group, clock)``: log of an attention group of a replica."""


class RankLog(logging.Handler):
    """Writes the log to a stream; second 0 of the simulation is 1970-01-01 00:00:00.

    Args:
        names: of the leading rank of each group of all replicas, as in a server's log; may be empty texts.
        interval: `--decode-log-interval`.
    """

    def __init__(self, stream: TextIO, names: Sequence[str], interval: int) -> None:
        super().__init__(logging.INFO)
        self._stream, self._names, self._interval = stream, list(names), interval
        self.group: GroupLog | None = None
        """Whose scheduler runs; None: before the first one."""
        self._launch = _formatter("")

    def of(self, index: int, clock: Callable[[], float]) -> GroupLog:
        """The log of a group among those of all replicas; `clock`: its simulated seconds."""
        return GroupLog(self, self._names[index], clock, self._interval)

    @property
    def position(self) -> int:
        """Bytes written so far."""
        self._stream.flush()
        return self._stream.tell()

    def write(self, message: str) -> None:
        """Writes a line of the start."""
        self.emit(logging.makeLogRecord({"msg": message}))

    def emit(self, record: logging.LogRecord) -> None:
        group = self.group
        formatter = self._launch if group is None else group.formatter
        own = logging.makeLogRecord(vars(record))
        own.created = 0.0 if group is None else group.clock()
        self._stream.write(formatter.format(own) + "\n")


class GroupLog:
    """One group's part of a `RankLog`."""

    def __init__(self, log: RankLog, name: str, clock: Callable[[], float], interval: int) -> None:
        self._log, self.clock, self.formatter = log, clock, _formatter(name)
        self.reporter = StepReporter(interval, clock=clock)

    def runs(self) -> None:
        """The next messages are those of this group's scheduler."""
        self._log.group = self


@contextmanager
def messages_to(handler: logging.Handler) -> Iterator[None]:
    """Within it the engine's messages go to the handler, also those of the level INFO."""
    logger = logging.getLogger(LOGGER)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _formatter(tag: str) -> Formatter:
    formatter = Formatter(tag)
    formatter.converter = time.gmtime
    return formatter
