"""Check of a file before it is opened. Imports no torch."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


def check_regular(path: Path) -> None:
    """Refuses pipes and devices: adapters and updates are read on the thread that runs the steps, and a pipe without a
    writer would block it.

    Raises:
        OSError: no regular file, or it does not exist.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder has an error of its own
        raise OSError(errno.EINVAL, "no regular file")
