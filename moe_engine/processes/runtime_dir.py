"""Runtime directory of an engine: its sockets and status files, and the cleanup of directories of killed engines.

A directory of mode 0700 in the temporary directory; if that path is too long for a Unix socket, in $XDG_RUNTIME_DIR or
/tmp.

It contains a file that the frontend keeps locked. The kernel releases the lock however the process ends, and the lock
is visible in other containers that share the temporary directory, where pids are meaningless.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

from moe_engine.errors import ConfigError

logger = logging.getLogger("moe_engine")

PREFIX = "moe-engine-"
LOCK_FILE = "owner"
MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path on Linux: `sun_path` of unix(7), without its final zero."""
LONGEST_NAME = "to-core-999999"
"""Longest socket name in a directory, with an attention group's number."""
RANDOM_CHARACTERS = 8
"""Characters that `tempfile` appends to the prefix."""
ATTEMPTS = 100
"""Max new directories in a row that another engine's cleanup may remove before they are locked."""


class RuntimeDir:
    """A new directory, removed by `remove` or at process exit (a signal may arrive before the caller can clean up).

    First removes directories of the same user's dead frontends.

    Raises:
        ConfigError: no candidate directory is writable, or its path would be too long for a socket, or it is full.
    """

    def __init__(self) -> None:
        remove_abandoned()
        place = _place()
        for _ in range(ATTEMPTS):
            try:
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            except OSError as error:
                raise _unusable(place, error.strerror) from None
            self._lock = _lock(self.path, wait=True)
            self._end = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())
            if self._lock is not None and self.path.is_dir():
                return  # else another engine's cleanup removed it before it was locked
            self.remove()
        raise _unusable(place, f"{LOCK_FILE} cannot be created and locked in it")

    def remove(self) -> None:
        self._end()


def _remove(path: Path, lock: IO[str] | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked child that exits
        return
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        lock.close()


def _places() -> list[str]:
    """Candidate parent directories, in order of preference; the first is the temporary directory (TMPDIR)."""
    places = [_temporary(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"]
    return [place for place in dict.fromkeys(places) if os.path.isabs(place)]


def _temporary() -> str:
    """The temporary directory; empty if none of the directories that `tempfile` tries is writable."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return ""


def check_temporary() -> None:
    """Raises ConfigError if there is no temporary directory, which several parts use: the root of the container is
    read-only, or the disks are full."""
    if not _temporary():
        tried = os.environ.get("TMPDIR") or "not set"
        raise ConfigError(
            f"TMPDIR ({tried}), /tmp, /var/tmp and the working directory take no file: set TMPDIR to a directory that "
            "does (in a container with a read-only root: a volume mounted there, or /dev/shm)"
        )


def _unusable(place: str, why: str | None) -> ConfigError:
    return ConfigError(f"{place}: the engine's directory cannot be created there: {why}; set TMPDIR to a usable one")


def _place() -> str:
    for place in _places():
        longest = os.fsencode(f"{place}/{PREFIX}{'x' * RANDOM_CHARACTERS}/{LONGEST_NAME}")
        if len(longest) <= MAX_SOCKET_PATH and os.access(place, os.W_OK | os.X_OK):
            if place != _places()[0]:
                logger.info("TMPDIR %s is too long for socket paths: using %s", _places()[0], place)
            return place
    tried = _temporary() or os.environ.get("TMPDIR", "")
    raise ConfigError(
        f"TMPDIR={tried}: the engine's sockets need a writable directory with a path of at most "
        f"{MAX_SOCKET_PATH - len(PREFIX) - RANDOM_CHARACTERS - len(LONGEST_NAME) - 2} bytes, and neither "
        "$XDG_RUNTIME_DIR nor /tmp is one: set TMPDIR to such a directory"
    )


def remove_abandoned() -> None:
    """Removes this user's directories whose frontend has exited."""
    for path in (path for place in _places() for path in Path(place).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # another process may remove it concurrently
            if not (path / LOCK_FILE).is_file() or path.stat().st_uid != os.getuid():
                continue
            lock = _lock(path, wait=False)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                lock.close()


def _lock(path: Path, *, wait: bool) -> IO[str] | None:
    """The locked file of a directory; None if its owner is alive or the directory does not exist."""
    try:
        file = open(path / LOCK_FILE, "a")  # noqa: SIM115  # stays open while this process owns the directory
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        file.close()
        return None
    return file
