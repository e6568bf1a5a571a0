"""Files that commands write: refused before a run of minutes, and named with the fix when a write fails."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_engine.errors import ConfigError

_FULL = (errno.ENOSPC, errno.EDQUOT)
PROBE_BYTES = 64 * 1024


def check_writable(flag: str, path: str | Path) -> None:
    """Raises ConfigError if the file cannot be written now, also because its disk is full."""
    path = Path(path)
    with writing(flag, path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists():  # a device, or a file in a folder that takes no new ones
            path.open("ab").close()
            return
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.write(bytes(PROBE_BYTES))


@contextmanager
def writing(flag: str, path: str | Path, kind: str = "file") -> Iterator[None]:
    """Raises ConfigError with the flag, the path, the reason and the fix instead of an OSError. `kind`: file, folder"""
    try:
        yield
    except OSError as error:
        fix = f"name a {kind} in a folder that exists and that this user may write"
        if error.errno in _FULL:
            fix = f"free space there, or name a {kind} on another disk"
        raise ConfigError(f"{flag} {path}: cannot be written ({error.strerror or error}); {fix}") from None
