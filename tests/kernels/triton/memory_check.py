"""Checks of the memory accesses of launches under Triton's interpreter, as compute-sanitizer's memcheck and racecheck
on a device.

A launch may access only memory of its arguments: elsewhere a device reads other tensors, or faults, as it does where an
element is not aligned. A program may not read what another program of its launch writes, nor write another value there,
unless the one that comes first has an atomic operation with release semantics behind its access, and the other one an
atomic operation with acquire semantics on the same memory before its own, as tickets have: a device runs programs in
any order. Programs may write the same value to a place (rows of padding), and poll with volatile loads.

Nor may a thread of a program read what a thread of another warp writes, before or after it, or write another value
there, unless `tl.debug_barrier` or an atomic operation, whose result all threads get, comes in between: the interpreter
has one thread, a device has warps, of which one may be ahead. A release also needs a barrier behind a block that is
written, because one thread releases. Elements at the same place of blocks of one shape belong to one thread; scalars
are read by all.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from triton._C.libtriton import ir
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder
from triton.runtime.jit import TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

MOST = 1 << 22
"""Addresses that are kept of a launch; the check for races covers accesses up to then."""


ANY_STAYS = {"pair_kernel": "rows that are not kept go to the ring of padding, which is not read"}
"""Kernels whose programs may write other values to one place."""


class MemoryAccessError(Exception):
    """A launch accesses memory that it must not."""


class _Access(NamedTuple):
    addresses: np.ndarray  # [N] uint64
    width: int  # bytes
    program: tuple[int, ...]
    number: int  # atomic operations of the program before
    barriers: int  # barriers of the program before
    places: np.ndarray  # [N] of the addresses in their block
    shape: tuple[int, ...]  # of the block
    values: np.ndarray  # [N] of the elements that are written, else empty


class _Atomic(NamedTuple):
    addresses: frozenset[int]
    semantics: Any
    barriers: int  # of the program before


_ACQUIRES = {ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE}
_RELEASES = {ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE}


class Launch:
    """The accesses of one launch. elsewhere: it may also access memory whose address is a value in memory."""

    def __init__(self, name: str, arguments: list[Any], warps: int, elsewhere: bool = False) -> None:
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(arguments)}
        self._name = name
        self._begins = np.array(sorted(storages), dtype=np.uint64)
        self._ends = np.array([begin + storages[begin] for begin in sorted(storages)], dtype=np.uint64)
        self._warps, self._elsewhere = warps, elsewhere
        self._atomics: defaultdict[tuple[int, ...], list[_Atomic]] = defaultdict(list)
        self._barriers: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._loads: list[_Access] = []
        self._stores: list[_Access] = []
        self._left = MOST

    def add(self, pointers: Any, mask: Any, program: tuple[int, ...], values: Any = None, polls: bool = False) -> None:
        """`values`: those that are written, or None. `polls`: a load of what other programs change meanwhile. Raises
        MemoryAccessError outside of the arguments' memory."""
        used = np.broadcast_to(mask.data, pointers.data.shape)
        addresses = self._checked(pointers, used, "reads" if values is None else "writes")
        if addresses.size and self._left >= addresses.size and not polls:
            self._left -= addresses.size
            width, order = _width(pointers), (len(self._atomics[program]), self._barriers[program])
            written = np.empty(0) if values is None else np.broadcast_to(values.data, pointers.data.shape)[used]
            access = _Access(addresses, width, program, *order, np.flatnonzero(used), pointers.data.shape, written)
            (self._loads if values is None else self._stores).append(access)

    def add_atomic(self, pointers: Any, mask: Any, program: tuple[int, ...], semantics: Any) -> None:
        """Raises MemoryAccessError outside of the arguments' memory."""
        used = np.broadcast_to(mask.data, pointers.data.shape)
        addresses = frozenset(self._checked(pointers, used, "changes").tolist())
        self._atomics[program].append(_Atomic(addresses, semantics, self._barriers[program]))

    def add_barrier(self, program: tuple[int, ...]) -> None:
        self._barriers[program] += 1

    def _checked(self, pointers: Any, used: np.ndarray, verb: str) -> np.ndarray:
        """The addresses that are used."""
        addresses = pointers.data[used].astype(np.uint64)
        width = _width(pointers)
        holder = np.searchsorted(self._begins, addresses, "right") - 1
        outside = (holder < 0) | (addresses + np.uint64(width) > self._ends[holder])
        if outside.any() and not self._elsewhere:
            raise MemoryAccessError(
                f"{self._name} {verb} {outside.sum()} of {addresses.size} elements outside of its arguments' memory"
            )
        if (addresses % np.uint64(width)).any():  # a CPU reads them
            raise MemoryAccessError(
                f"{self._name} accesses elements of {width} bytes at addresses that are not aligned"
            )
        return addresses

    def check_races(self) -> None:
        """Raises MemoryAccessError if a program, or a thread, reads what another one writes, or writes another
        value."""
        if not self._stores:
            return
        unit = min(access.width for access in (*self._stores, *self._loads))
        written, writer, to, values = _by_address(self._stores, unit)
        if self._name not in ANY_STAYS:
            again = np.flatnonzero((written[1:] == written[:-1]) & (values[1:] != values[:-1]))
            self._check(self._stores, writer[again], to[again], writer[again + 1], to[again + 1], "write")
        if not self._loads:
            return
        read, reader, of, _ = _by_address(self._loads, unit)
        first, last = np.searchsorted(written, read, "left"), np.searchsorted(written, read, "right")
        counts = last - first
        each = np.repeat(np.arange(len(read)), counts)  # an entry for each read and each write of the same place
        write = np.arange(len(each)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        self._check(self._loads, reader[each], of[each], writer[write], to[write], "read")

    def _check(
        self, ones: list[_Access], one_of: np.ndarray, one_at: np.ndarray, store_of: np.ndarray, store_at: np.ndarray,
        verb: str,
    ) -> None:  # fmt: skip
        """Pairs of an access and a store to the same memory: the numbers of the accesses, and the places in blocks."""
        for pair in np.unique((one_of * len(self._stores) + store_of) * 2 + (one_at != store_at)).tolist():
            number, other = divmod(pair // 2, len(self._stores))
            one, store = ones[number], self._stores[other]
            if one.program != store.program:
                if not (self._in_order(one, store) or self._in_order(store, one)):
                    raise MemoryAccessError(
                        f"{self._name}: program {one.program} {verb}s what program {store.program} of the launch writes"
                    )
            elif self._warps > 1 and (one.number, one.barriers) == (store.number, store.barriers):
                apart = pair % 2 or one.shape != store.shape
                if apart or (verb == "read" and int(np.prod(one.shape)) == 1):
                    raise MemoryAccessError(
                        f"{self._name}: threads {verb} {one.shape} of what others of their program write as "
                        f"{store.shape}, without a barrier"
                    )

    def _in_order(self, first: _Access, second: _Access) -> bool:
        """Whether an atomic operation behind the first access releases what one before the second access acquires. One
        thread releases, the one that writes scalars: other threads have to arrive at a barrier before."""
        alone = self._warps == 1 or (first.values.size == 1 and int(np.prod(first.shape)) == 1)
        released = frozenset[int]().union(
            *(atomic.addresses for atomic in self._atomics[first.program][first.number :]
              if atomic.semantics in _RELEASES and (alone or atomic.barriers > first.barriers))
        )  # fmt: skip
        acquired = self._atomics[second.program][: second.number]
        return any(atomic.semantics in _ACQUIRES and atomic.addresses & released for atomic in acquired)


def _width(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, (TensorDescriptor, TensorWrapper)):
            yield value.base
        elif isinstance(value, Tensor):
            yield value


def _by_address(accesses: list[_Access], unit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All addresses in units of memory, sorted, the number of the access of each, its place in the block, and the unit
    that is written there."""
    parts = [(x.addresses[:, None] + np.arange(0, x.width, unit, dtype=np.uint64)).ravel() for x in accesses]
    numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    joined = np.concatenate(parts)
    places = np.concatenate([np.repeat(x.places, x.width // unit) for x in accesses])
    values = np.concatenate([np.ascontiguousarray(x.values).view(f"u{unit}").ravel() for x in accesses])
    order = np.argsort(joined, kind="stable")
    return joined[order], numbers[order], places[order], values[order] if values.size else values


_running = threading.local()
"""The launch of the programs that this thread runs, as `launch`."""


@contextmanager
def in_launch(launch: Launch) -> Iterator[None]:
    """Programs that this thread runs inside belong to a launch, if accesses are checked."""
    before, _running.launch = getattr(_running, "launch", None), launch
    try:
        yield
    finally:
        _running.launch = before


def launch_of(function: Any, arguments: list[Any], warps: int) -> Launch:
    """One without accesses. Kernels with `peers` access the memory of other ranks."""
    return Launch(function.__name__, arguments, warps, "peers" in function.__code__.co_varnames)


@contextmanager
def checked_accesses() -> Iterator[None]:
    """Checks launches in this block; those whose programs run at the same time are in `in_launch`."""
    builder = InterpreterBuilder
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    barrier = builder.create_barrier
    call = GridExecutor.__call__

    def running() -> Any:
        return getattr(_running, "launch", None)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        if launch := running():
            launch.add(pointers, mask, self.grid_idx, polls=options.get("is_volatile") or rest[-1] is True)
        return load(self, pointers, mask, *rest, **options)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        if launch := running():
            launch.add(pointers, mask, self.grid_idx, value)
        return store(self, pointers, value, mask, *rest, **options)

    def rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, semantics: Any, scope: Any) -> Any:
        if launch := running():
            launch.add_atomic(pointers, mask, self.grid_idx, semantics)
        return atomic(self, operation, pointers, value, mask, semantics, scope)

    def wait(self: Any) -> Any:
        if launch := running():
            launch.add_barrier(self.grid_idx)
        return barrier(self)

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        launch = launch_of(self.fn, [*args, *kwargs.values()], kwargs.get("num_warps", 4))
        with in_launch(launch):
            call(self, *args, **kwargs)
        launch.check_races()

    builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw = masked_load, masked_store, rmw
    builder.create_barrier = wait
    GridExecutor.__call__ = launched
    try:
        yield
    finally:
        builder.create_barrier = barrier
        builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw = load, store, atomic
        GridExecutor.__call__ = call
