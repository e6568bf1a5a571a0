"""Shared-memory status of an engine core, readable by other processes without a request to it.

A small memory-mapped file of doubles: the core writes, the frontend reads. Health probes read only this, so they stay
correct and immediate when the core is busy, stuck or dead. Times are CLOCK_MONOTONIC, which is shared by processes.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from moe_engine.errors import ConfigError

_FIELDS = (
    "ready",
    "last_turn",
    "step",
    "step_end",
    "busy_since",
    "oldest_queued",
    "num_running",
    "num_waiting",
    "num_used_tokens",
    "token_usage",
    "gen_throughput",
    "cache_hit_rate",
    "num_retracted",
    "new_token_ratio",
)
_TIMES = {"last_turn", "step_end", "busy_since", "oldest_queued"}
_OFFSET = {name: 8 * i for i, name in enumerate(_FIELDS)}
_SIZE = 8 * len(_FIELDS)


@dataclass(frozen=True)
class Status:
    """A snapshot of the shared status. Ages in seconds.

    `step_age`: since the last step ended, 0 while idle. `silence`: since the last iteration of the core's loop, which
    runs after every step and, when idle, several times a second.
    """

    ready: bool
    step: int
    step_age: float
    silence: float
    oldest_queued_age: float
    num_running: int
    num_waiting: int
    num_used_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    num_retracted: int
    new_token_ratio: float


class SharedStatus:
    """One core's status file. One side creates it, the other opens it.

    Raises:
        ConfigError: no space for it.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(fd, 0, _SIZE)  # a write to a page without space would kill the process
            self._map = mmap.mmap(fd, _SIZE)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; free space there, or set TMPDIR to another folder") from None
        finally:
            os.close(fd)

    def write(self, **values: float) -> None:
        """Sets the named fields. Each double is written atomically; fields are independent."""
        for name, value in values.items():
            struct.pack_into("=d", self._map, _OFFSET[name], value)

    def pack(self) -> list[float]:
        """All fields for a status file on another machine: times become ages, because clocks differ; 0 for none."""
        values, now = struct.unpack_from(f"={len(_FIELDS)}d", self._map, 0), time.monotonic()
        return [now - v if name in _TIMES and v else v for name, v in zip(_FIELDS, values)]

    def unpack(self, packed: list[float]) -> None:
        """Writes fields packed by `pack` on another machine."""
        now = time.monotonic()
        self.write(**{name: now - v if name in _TIMES and v else v for name, v in zip(_FIELDS, packed)})

    def read(self) -> Status:
        values = dict(zip(_FIELDS, struct.unpack_from(f"={len(_FIELDS)}d", self._map, 0)))
        now = time.monotonic()
        busy_since, step_end = values["busy_since"], values["step_end"]
        queued, last_turn = values["oldest_queued"], values["last_turn"]
        return Status(
            ready=bool(values["ready"]),
            step=int(values["step"]),
            step_age=max(0.0, now - max(busy_since, step_end)) if busy_since else 0.0,
            silence=max(0.0, now - last_turn) if last_turn else 0.0,
            oldest_queued_age=max(0.0, now - queued) if queued else 0.0,
            num_running=int(values["num_running"]),
            num_waiting=int(values["num_waiting"]),
            num_used_tokens=int(values["num_used_tokens"]),
            token_usage=values["token_usage"],
            gen_throughput=values["gen_throughput"],
            cache_hit_rate=values["cache_hit_rate"],
            num_retracted=int(values["num_retracted"]),
            new_token_ratio=values["new_token_ratio"],
        )

    def close(self) -> None:
        self._map.close()
