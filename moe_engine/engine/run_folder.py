"""The folder of a running engine's sockets and status board, and what is left of engines that were killed.

Each folder holds a file that its front end keeps locked for life. The lock ends with the process, however it ends, and
is seen from other containers that share the temporary folder, where process numbers mean nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

PREFIX = "moe-engine-"
LOCK_FILE = "owner"


class RunFolder:
    """A new folder, this process's until `remove` or until it exits: a signal may come before anybody holds the folder.

    Folders of dead front ends of the same user go first.
    """

    def __init__(self) -> None:
        remove_abandoned()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
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


def remove_abandoned() -> None:
    """Removes the folders in the temporary folder that are ours and whose front end is gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
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
