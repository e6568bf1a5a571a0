"""Memory shared by the ranks of one host, with flags to wait on.

The file is unlinked once all ranks have opened it, so no file remains after a crash. Each rank holds a lock on its byte
of the file; the OS releases it when the rank dies, so waiting ranks detect the death immediately. Flags are plain
8-byte stores: x86-64 makes them visible to other cores in program order.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
import weakref
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from moe_engine.errors import ConfigError
from moe_engine.parallel import host_support
from moe_engine.parallel.collectives import Group, PeerLost

LINE = 64  # bytes of a cache line: one flag each
SPIN_S = 0.002  # a wait yields at most this long before it sleeps between polls
LEAST_SPIN_S = 0.00005
SLEEP_S = 0.0001
ALIVE_EVERY = 64  # sleeping polls between two checks of the peers' liveness


class SharedSegment:
    """`num_bytes` of zeroed memory shared by the group, and `num_flags` counters per rank.

    The constructor is collective. Ranks that the group has `lost` are not waited for.

    Args:
        reserve: allocate the memory now, or fail; else pages are allocated on first touch, and if the folder is full by
            then, the kernel kills the rank (SIGBUS). The folder must have room for all of it in both cases.

    Raises:
        ConfigError: too little shared memory, or ranks on different hosts; raised on every rank.
    """

    def __init__(self, group: Group, num_bytes: int, num_flags: int, reserve: bool = False) -> None:
        self._group = group
        head_bytes = -(-num_flags * group.size * LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file = _open_common(group, head_bytes + num_bytes, reserve)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, group.rank)
        weakref.finalize(self, os.close, self._file)
        memory = mmap.mmap(self._file, head_bytes + num_bytes)
        words = np.frombuffer(memory, dtype=np.int64, count=head_bytes // 8)
        self._flags = words[: num_flags * group.size * LINE // 8 : LINE // 8].reshape(num_flags, group.size)
        self.lost = [] if group.alive is None else (~group.alive).nonzero().flatten().tolist()
        self._flags[:, self.lost] = np.iinfo(np.int64).max  # all ranks write the same
        self._spin_s = LEAST_SPIN_S
        self.bytes: Tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=head_bytes, count=num_bytes)
        group.barrier()  # every rank must hold its lock before the first wait

    def raise_flag(self, flag: int, value: int) -> None:
        """Sets this rank's flag to `value`; its earlier writes are visible to ranks that read the flag."""
        self._flags[flag, self._group.rank] = value

    def wait(self, flag: int, value: int, operation: str) -> None:
        """Returns when every rank has raised the flag to `value`.

        A wait of more than `SPIN_S` shortens the spinning of the next waits, a shorter one lengthens it: a peer that is
        so late has no core, or much to compute. Spinning would then take its core, because `sched_yield` yields only to
        processes of the same session (Linux's autogroups), and each engine process has a separate session.

        Raises:
            PeerLost: a rank died, or the group's timeout expired; the message lists the ranks.
        """
        flags = self._flags[flag]
        start = time.perf_counter()
        waited, looks = 0.0, 0
        while flags.min() < value:
            waited = time.perf_counter() - start
            if waited < self._spin_s:
                os.sched_yield()
                continue
            looks += 1
            if looks % ALIVE_EVERY == 0:
                self._check_peers(flags, value, operation, waited)
            time.sleep(SLEEP_S)
        self._spin_s = (
            max(self._spin_s / 8, LEAST_SPIN_S) if waited > SPIN_S else min(self._spin_s + SPIN_S / 64, SPIN_S)
        )

    def _check_peers(self, flags: np.ndarray, value: int, operation: str, waited: float) -> None:
        self._group.check()
        late = [int(rank) for rank in (flags < value).nonzero()[0]]
        dead = [rank for rank in late if not self._is_alive(rank)]
        if dead:
            raise PeerLost(f"{operation} on rank {self._group.rank}: ranks {dead} have died")
        if waited > self._group.timeout_s:
            raise PeerLost(f"{operation} on rank {self._group.rank}: ranks {late} did not arrive within {waited:.1f} s")

    def _is_alive(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return False


def _open_common(group: Group, num_bytes: int, reserve: bool) -> int:
    """The same unnamed file on every rank of the group."""
    sent = torch.zeros(512, dtype=torch.uint8, device=group.device)  # the path, or the reason why there is none
    file, path, text = -1, "", ""
    first = 0 if group.alive is None else int(group.alive.nonzero()[0])
    if group.rank == first:
        try:
            file, path = _new_file(num_bytes, reserve)
            text = path
        except OSError as error:
            text = f"!{error.strerror}"
        encoded = text.encode()[: len(sent)]
        sent[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    group.broadcast(sent, source=first)
    text = bytes(sent.tolist()).rstrip(b"\0").decode(errors="replace")
    path = "" if text.startswith("!") else text
    try:
        if file < 0 and path:
            with suppress(OSError):  # reported below, on all ranks
                file = os.open(path, os.O_RDWR)
        missing = sum(group.exchange_ints([int(file < 0)] * group.size))
    finally:
        if group.rank == first and path:
            os.unlink(path)
    if missing:
        if file >= 0:
            os.close(file)
        reason = f"{missing} ranks cannot open the file; shared memory needs ranks of one host" if path else text[1:]
        raise ConfigError(f"{num_bytes} bytes in {host_support.FOLDER} unavailable: {reason}")
    return file


def _new_file(num_bytes: int, reserve: bool) -> tuple[int, str]:
    file, path = host_support.new_file()
    try:
        if (free := _free_bytes(file)) < num_bytes:
            need = -(-num_bytes // 2**20)
            fix = f"enlarge it by at least {need} MiB (containers: --shm-size; Kubernetes: an emptyDir in memory)"
            raise OSError(errno.ENOSPC, f"{free} are free; {fix}")
        if reserve:
            os.posix_fallocate(file, 0, num_bytes)
        else:
            os.ftruncate(file, num_bytes)
    except OSError:
        os.close(file)
        os.unlink(path)
        raise
    return file, path


def _free_bytes(file: int) -> int:
    found = os.fstatvfs(file)
    return found.f_bavail * found.f_frsize
