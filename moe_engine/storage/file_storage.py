"""Storage in a folder (`--hicache-storage-backend file`), also of a mounted file system that servers share.

A page is a file, written under another name and then renamed, so that no reader sees a partial page. The folder has a
limit in bytes: the process that exceeds it removes the pages used longest ago, of all models. Each process counts the
bytes that it has written since its last scan of the folder, and scans again after a share of the limit, so that
processes which share a folder do not each fill it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_engine.errors import ConfigError
from moe_engine.storage.protocol import Buffer

logger = logging.getLogger("moe_engine")

SUFFIX = ".kvpage"
KEEP = 0.9
"""Share of the limit that remains after pages were removed."""
RESCAN = 1 / 8
"""Share of the limit that a process writes before it scans the folder again."""
FREE_SHARE = 0.9
"""Share of the free disk that the storage may take without a given limit."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileStorage:
    """Implements `PageStorage`.

    Args:
        max_bytes: limit of the folder; 0: its present size and 90 % of the free disk.

    Raises:
        ConfigError: the folder cannot be made or written, or the disk is smaller than the limit.
    """

    def __init__(self, directory: str, max_bytes: int = 0) -> None:
        self._root = Path(directory)
        try:
            self._root.mkdir(0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._root) as probe:
                probe.write(b"x")
        except OSError as error:
            fix = "free space there, or give" if error.errno in _FULL else "give"
            raise ConfigError(
                f"--hicache-storage-dir {directory}: cannot be written: {error.strerror or error}; {fix} a folder that "
                "this user may write to"
            ) from error
        self._used, self._unseen = sum(size for _, size, _ in self._files()), 0
        free = shutil.disk_usage(self._root).free
        if max_bytes > self._used + free:
            raise ConfigError(
                f"--hicache-storage-size {max_bytes / 1e9:g} GB: {directory} holds {self._used / 1e9:.2f} GB of pages "
                f"and its disk has {free / 1e9:.2f} GB free, {(self._used + free) / 1e9:.2f} GB together; give less"
            )
        self._max_bytes = max_bytes or int(self._used + FREE_SHARE * free)
        self._lock = threading.Lock()
        self._evicting = threading.Lock()

    def exists(self, names: Sequence[str]) -> int:
        for i, name in enumerate(names):
            if not os.path.exists(self._path(name)):
                return i
        return len(names)

    def get(self, names: Sequence[str], targets: Sequence[Buffer]) -> list[bool]:
        return [self._read(self._path(name), target) for name, target in zip(names, targets)]

    def _read(self, path: str, target: Buffer) -> bool:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO in its place would block
        except FileNotFoundError:
            return False
        try:
            if not self._is_whole(file, path, len(target)):
                return False
            read = 0
            while read < len(target):
                count = os.readv(file, [target[read:]])
                if not count:
                    return False
                read += count
        finally:
            os.close(file)
        with contextlib.suppress(OSError):
            os.utime(path)  # used: removed last
        return True

    def _is_whole(self, file: int, path: str, size: int) -> bool:
        """Whether an open page has its size. A page that lost its end, with the power for example, is removed: it would
        never be stored again, because it exists."""
        found = os.fstat(file)
        if found.st_size == size:
            return True
        if stat.S_ISREG(found.st_mode):
            _removed(path)
        return False

    def put(self, names: Sequence[str], pages: Sequence[Buffer]) -> list[bool]:
        stored = []
        for name, page in zip(names, pages):
            if not self._make_room(len(page)):
                stored.append(False)
                continue
            try:
                self._write(name, page)
            except OSError as error:
                if error.errno not in _FULL or not self._evict(len(page), full=True):
                    raise
                self._write(name, page)
            self._wrote(len(page))
            stored.append(True)
        return stored

    def _write(self, name: str, page: Buffer) -> None:
        path = self._path(name)
        temporary = f"{path}.{os.getpid()}-{threading.get_ident()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(temporary, flags, 0o666)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = os.open(temporary, flags, 0o666)
        try:
            try:
                written = 0
                while written < len(page):
                    written += os.write(file, page[written:])
            finally:
                os.close(file)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _wrote(self, num_bytes: int) -> None:
        with self._lock:
            self._used += num_bytes
            self._unseen += num_bytes

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(name))

    def clear(self) -> None:
        stuck = 0
        for path, size, _ in list(self._files()):
            if not _removed(path):
                stuck += size
        with self._lock:
            self._used = stuck
        if stuck:
            raise OSError(f"{stuck / 1e9:.2f} GB of pages in {self._root} cannot be removed")

    def describe(self) -> dict[str, Any]:
        return {"directory": str(self._root), "used_bytes": self._used, "max_bytes": self._max_bytes}

    def close(self) -> None: ...

    # -- room

    def _path(self, name: str) -> str:
        return f"{self._root}/{name[-2:]}/{name}{SUFFIX}"

    def _files(self) -> Iterator[tuple[str, int, float]]:
        """(path, bytes, time of the last use) of all pages, incomplete ones included. Other files are not touched: the
        folder may be one that the user has for other things too."""
        for folder in _entries(self._root):
            if len(folder.name) != 2 or not folder.is_dir():
                continue
            for entry in _entries(folder.path):
                with contextlib.suppress(FileNotFoundError):
                    if SUFFIX in entry.name and entry.is_file(follow_symlinks=False):
                        found = entry.stat()
                        yield entry.path, found.st_size, found.st_mtime

    def _make_room(self, num_bytes: int) -> bool:
        if num_bytes > self._max_bytes:
            return False
        if self._unseen > RESCAN * self._max_bytes:
            used = sum(size for _, size, _ in self._files())
            with self._lock:
                self._used, self._unseen = used, 0
        return self._used + num_bytes <= self._max_bytes or self._evict(num_bytes)

    def _evict(self, num_bytes: int, full: bool = False) -> bool:
        """Removes pages until the folder is below `KEEP` of its limit. `full`: the disk is full, so at least a
        tenth of the pages is removed. False if no space was gained."""
        with self._evicting:
            files = list(self._files())
            used = before = sum(size for _, size, _ in files)
            target = int(KEEP * (min(before, self._max_bytes) if full else self._max_bytes)) - num_bytes
            order = np.argsort(np.array([file[2] for file in files]))  # sorts without the interpreter's lock
            for index in order:
                path, size, _ = files[index]
                if used <= max(target, 0):
                    break
                if _removed(path):
                    used -= size
            with self._lock:
                self._used, self._unseen = used, 0
            return used < before if full else used + num_bytes <= self._max_bytes


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """The entries of a folder; none if it is gone or cannot be read."""
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _removed(path: str) -> bool:
    """Removes a file; False if it stays."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
