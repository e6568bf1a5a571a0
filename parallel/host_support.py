"""Memory shared by processes of this host: files in /dev/shm. Imports no torch: used in launch planning.

A file has its name only until the other processes have opened it, and is locked meanwhile. A file without a lock
belongs to a process that was killed at this moment: the next process that creates one removes it. Locks are visible in
other containers that share /dev/shm, where pids are meaningless.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import tempfile
from contextlib import suppress
from pathlib import Path

FOLDER = "/dev/shm"
PREFIX = "moe-engine-"
ATTEMPTS = 100
"""Max new files in a row that another process may remove before they are locked."""


def why_not() -> str | None:
    """The reason why ranks of this host cannot share memory, or None."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"needs x86-64, with ordered stores; this is {platform.machine()}"
    if not os.access(FOLDER, os.W_OK):
        return f"{FOLDER} cannot be written"
    return None


def new_file(kind: str = "") -> tuple[int, str]:
    """An empty file of mode 0600: its descriptor, which holds the lock, and its path. Unlink the path, then close.

    First removes files of this user's killed processes.

    Raises:
        OSError: none can be created, or locked, in the folder.
    """
    remove_abandoned()
    for _ in range(ATTEMPTS):
        file, path = tempfile.mkstemp(prefix=PREFIX + kind, dir=FOLDER)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return file, path
        except OSError:
            os.close(file)
            os.unlink(path)
            raise
        os.close(file)
    raise OSError(errno.EAGAIN, f"another process removes new files of {FOLDER}")


def remove_abandoned() -> None:
    """Removes this user's files that no process holds."""
    for path in Path(FOLDER).glob(f"{PREFIX}*"):
        with suppress(OSError):  # held, or another process removes it concurrently
            if not path.is_file() or path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)
