"""The folder of a running engine's sockets and status board, and what is left of engines that were killed.

It is a folder of mode 0700 in the temporary folder; where that one's path is too long for a Unix socket, in
$XDG_RUNTIME_DIR or /tmp.

Each folder holds a file that its front end keeps locked for life. The lock ends with the process, however it ends, and
is seen from other containers that share the temporary folder, where process numbers mean nothing.
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
"""The longest name of a socket in a folder, with an attention group's number."""
RANDOM_CHARACTERS = 8
"""That `tempfile` adds to the prefix."""


class RuntimeDir:
    """A new folder, this process's until `remove` or until it exits: a signal may come before anybody holds the folder.

    Folders of dead front ends of the same user go first.

    Raises:
        ConfigError: no place for it can be written, or its path would be too long for a socket.
    """

    def __init__(self) -> None:
        remove_abandoned()
        place = _place()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            self._lock = _lock(self.path, wait=True)
            self._end = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())
            if self._lock is not None and self.path.is_dir():
                return  # else another start took the folder for abandoned before it was locked
            self.remove()

    def remove(self) -> None:
        self._end()


def _remove(path: Path, lock: IO[str] | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked child that exits
        return
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        lock.close()


def _places() -> list[str]:
    """Where folders are made, the first that will do; the system's temporary folder comes from TMPDIR."""
    places = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"]
    return [place for place in dict.fromkeys(places) if os.path.isabs(place)]


def _place() -> str:
    for place in _places():
        longest = os.fsencode(f"{place}/{PREFIX}{'x' * RANDOM_CHARACTERS}/{LONGEST_NAME}")
        if len(longest) <= MAX_SOCKET_PATH and os.access(place, os.W_OK | os.X_OK):
            if place != _places()[0]:
                logger.info("TMPDIR %s is too long for the paths of sockets: they are in %s", _places()[0], place)
            return place
    raise ConfigError(
        f"TMPDIR={tempfile.gettempdir()}: the engine's sockets need a folder that can be written and whose path has "
        f"{MAX_SOCKET_PATH - len(PREFIX) - RANDOM_CHARACTERS - len(LONGEST_NAME) - 2} bytes at most, and neither "
        "$XDG_RUNTIME_DIR nor /tmp is one: set TMPDIR to such a folder"
    )


def remove_abandoned() -> None:
    """Removes the folders of earlier engines that are ours and whose front end has ended."""
    for path in (path for place in _places() for path in Path(place).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # somebody else removes it, too
            if not (path / LOCK_FILE).is_file() or path.stat().st_uid != os.getuid():
                continue
            lock = _lock(path, wait=False)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                lock.close()


def _lock(path: Path, *, wait: bool) -> IO[str] | None:
    """The locked file of a folder; None where its owner lives or the folder is gone."""
    try:
        file = open(path / LOCK_FILE, "a")  # noqa: SIM115  # open as long as the folder is ours
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        file.close()
        return None
    return file
