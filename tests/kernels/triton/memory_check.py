"""Checks of the memory accesses of launches under Triton's interpreter, as compute-sanitizer's memcheck and racecheck
on a device.

A launch may access only memory of its arguments: elsewhere a device reads other tensors, or faults, as it does where an
element is not aligned. A program may not
read what another program of its launch writes, unless both have atomic operations in between, as tickets have: a device
runs programs in any order. Programs may write the same place (rows of padding).

Nor may a thread of a program read what a thread of another warp writes, before or after it, unless `tl.debug_barrier`
or an atomic operation, whose result all threads get, comes in between: the interpreter has one thread, a device has
warps, of which one may be ahead. Elements at the same place of blocks of one shape belong to one thread; scalars are
read by all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder
from triton.runtime.jit import TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

MOST = 1 << 22
"""Addresses that are kept of a launch; the check for races covers accesses up to then."""


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


class Launch:
    """The accesses of one launch."""

    def __init__(self, name: str, arguments: list[Any], warps: int) -> None:
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(arguments)}
        self._name = name
        self._begins = np.array(sorted(storages), dtype=np.uint64)
        self._ends = np.array([begin + storages[begin] for begin in sorted(storages)], dtype=np.uint64)
        self._warps = warps
        self._atomics: Counter[tuple[int, ...]] = Counter()
        self._barriers: Counter[tuple[int, ...]] = Counter()
        self._loads: list[_Access] = []
        self._stores: list[_Access] = []
        self._left = MOST

    def add(self, pointers: Any, mask: Any, program: tuple[int, ...], writes: bool) -> None:
        """Raises MemoryAccessError outside of the arguments' memory."""
        used = np.broadcast_to(mask.data, pointers.data.shape)
        addresses = pointers.data[used].astype(np.uint64)
        if not addresses.size:
            return
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        holder = np.searchsorted(self._begins, addresses, "right") - 1
        outside = (holder < 0) | (addresses + np.uint64(width) > self._ends[holder])
        if outside.any():
            verb = "writes" if writes else "reads"
            raise MemoryAccessError(
                f"{self._name} {verb} {outside.sum()} of {addresses.size} elements outside of its arguments' memory"
            )
        if (addresses % np.uint64(width)).any():  # a CPU reads them
            raise MemoryAccessError(
                f"{self._name} accesses elements of {width} bytes at addresses that are not aligned"
            )
        if self._left >= addresses.size:
            self._left -= addresses.size
            order = self._atomics[program], self._barriers[program]
            access = _Access(addresses, width, program, *order, np.flatnonzero(used), pointers.data.shape)
            (self._stores if writes else self._loads).append(access)

    def add_atomic(self, program: tuple[int, ...]) -> None:
        self._atomics[program] += 1

    def add_barrier(self, program: tuple[int, ...]) -> None:
        self._barriers[program] += 1

    def check_races(self) -> None:
        """Raises MemoryAccessError if a program, or a thread, reads what another one writes."""
        if not self._stores or not self._loads:
            return
        unit = min(access.width for access in (*self._stores, *self._loads))
        written, writer, to = _by_address(self._stores, unit)
        read, reader, of = _by_address(self._loads, unit)
        first, last = np.searchsorted(written, read, "left"), np.searchsorted(written, read, "right")
        counts = last - first
        each = np.repeat(np.arange(len(read)), counts)  # an entry for each read and each write of the same place
        write = np.arange(len(each)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        pairs = (reader[each] * len(self._stores) + writer[write]) * 2 + (of[each] != to[write])
        for pair in np.unique(pairs).tolist():
            load, store = divmod(pair // 2, len(self._stores))
            one, other = self._loads[load], self._stores[store]
            if one.program != other.program:
                if not self._in_order(one, other):
                    raise MemoryAccessError(
                        f"{self._name}: program {one.program} reads what program {other.program} of the launch writes"
                    )
            elif self._warps > 1 and (one.number, one.barriers) == (other.number, other.barriers):
                apart = pair % 2 or one.shape != other.shape
                if apart or int(np.prod(one.shape)) == 1:
                    raise MemoryAccessError(
                        f"{self._name}: threads read {one.shape} of what others of their program write as "
                        f"{other.shape}, without a barrier"
                    )

    def _in_order(self, load: _Access, store: _Access) -> bool:
        """The writer has an atomic operation after the store and the reader one before the load, or the reverse."""
        after_store = self._atomics[store.program] > store.number and load.number > 0
        return after_store or (self._atomics[load.program] > load.number and store.number > 0)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, (TensorDescriptor, TensorWrapper)):
            yield value.base
        elif isinstance(value, Tensor):
            yield value


def _by_address(accesses: list[_Access], unit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All addresses in units of memory, sorted, the number of the access of each, and its place in the block."""
    parts = [(x.addresses[:, None] + np.arange(0, x.width, unit, dtype=np.uint64)).ravel() for x in accesses]
    numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    joined = np.concatenate(parts)
    places = np.concatenate([np.repeat(x.places, x.width // unit) for x in accesses])
    order = np.argsort(joined, kind="stable")
    return joined[order], numbers[order], places[order]


@contextmanager
def checked_accesses() -> Iterator[None]:
    """Checks launches whose programs run one after another, in this block."""
    builder = InterpreterBuilder
    launches: list[Launch] = []
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    barrier = builder.create_barrier
    call = GridExecutor.__call__

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        if launches:
            launches[-1].add(pointers, mask, self.grid_idx, writes=False)
        return load(self, pointers, mask, *rest, **options)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        if launches:
            launches[-1].add(pointers, mask, self.grid_idx, writes=True)
        return store(self, pointers, value, mask, *rest, **options)

    def rmw(self: Any, *given: Any) -> Any:
        if launches:
            launches[-1].add_atomic(self.grid_idx)
        return atomic(self, *given)

    def wait(self: Any) -> Any:
        if launches:
            launches[-1].add_barrier(self.grid_idx)
        return barrier(self)

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(Launch(self.fn.__name__, [*args, *kwargs.values()], kwargs.get("num_warps", 4)))
        try:
            call(self, *args, **kwargs)
        finally:
            ended = launches.pop()
        ended.check_races()

    builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw = masked_load, masked_store, rmw
    builder.create_barrier = wait
    GridExecutor.__call__ = launch
    try:
        yield
    finally:
        builder.create_barrier = barrier
        builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw = load, store, atomic
        GridExecutor.__call__ = call
