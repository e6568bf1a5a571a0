"""Streams and events of simulated devices, what the host waits for, and copies that are under way.

Work is done when it is launched, but the host does not see it until it waited: a download's destination is poisoned at
first, and an upload's source must hold at the wait what it held at the launch. Time is counted in launches: a stream's
clock holds the progress of every stream that is known to it.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from tests.simulated_cuda import failures, observer

Clock = dict[int, int]
_numbers = count(1)


class HazardError(AssertionError):
    """A race, or a use of freed memory, on a device."""


@dataclass
class Wait:
    """The host waited for a device, or had to, to read or send a value."""

    what: str
    thread: str
    where: str
    """The innermost frames of the engine."""


@dataclass
class _Copy:
    """A copy between the device and pinned memory, until the host waited for it."""

    stream: Stream
    tick: int
    host: Tensor
    content: Tensor
    upload: bool

    @torch.inference_mode()
    def finish(self) -> None:
        if not self.upload:
            self.host.copy_(self.content)
        elif not torch.equal(_bytes(self.host), self.content):
            raise HazardError("pinned memory was changed while its upload was under way")


waits: list[Wait] = []
_copies: list[_Copy] = []
_host_clock: Clock = {}
_lock = threading.RLock()
_random = random.Random(0)
_streams: WeakSet[Stream] = WeakSet()
_several = False


def several() -> bool:
    """Whether anything runs beside the default stream."""
    return _several


def note_wait(what: str) -> None:
    """The host waits. Not while a graph is recorded."""
    failures.raise_broken()
    if current().capturing:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
    foreign = ("simulated_cuda", "/torch/", "/concurrent/", "/threading.py")
    frames = [f for f in traceback.extract_stack() if not any(part in f.filename for part in foreign)]
    where = " < ".join(f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno}" for f in reversed(frames[-4:]))
    waits.append(Wait(what, threading.current_thread().name, where))
    if observer.observer is not None:
        observer.observer.waited(waits[-1])


def _merge(into: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if into.get(stream, 0) < tick:
            into[stream] = tick


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        global _several
        self.device = torch.device("cuda", index_of(device))
        _several = _several or self.device.index in _defaults
        self.priority = priority
        self.number = next(_numbers)
        self.clock: Clock = {self.number: 0}
        with _lock:
            _streams.add(self)
        self.capturing: Any = None
        """The graph that is recorded from it: since it was begun there, or since it waited for one of its streams."""

    @property
    def cuda_stream(self) -> int:
        return self.number

    @property
    def stream_id(self) -> int:
        return self.number

    def launch(self) -> int:
        """The tick of one more launch, which comes behind all that the host waited for."""
        _merge(self.clock, _host_clock)
        self.clock[self.number] += 1
        return self.clock[self.number]

    def knows(self, stream: Stream, tick: int) -> bool:
        """Whether a launch of another stream is over before the next one of this begins."""
        return stream is self or max(self.clock.get(stream.number, 0), _host_clock.get(stream.number, 0)) >= tick

    def wait_stream(self, other: Stream) -> None:
        self._comes_behind(other.capturing)
        _merge(self.clock, other.clock)

    def wait_clock(self, clock: Clock, graph: Any) -> None:
        """Comes behind what an event saw, while `graph` was recorded from its stream (None: none was)."""
        self._comes_behind(graph)
        _merge(self.clock, clock)

    def _comes_behind(self, graph: Any) -> None:
        """A stream that waits for one of a recording belongs to it from then on."""
        if graph is self.capturing:
            return
        if graph is None:
            raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")
        if self.capturing is not None or not graph.recording:
            raise RuntimeError("CUDA error: operation not permitted on an event last recorded in a capturing stream")
        self.capturing = graph
        graph.streams.append(self)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        note_wait("Stream.synchronize")
        finish(self.clock)

    def query(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return self.number


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._clock: Clock | None = None
        self._graph: Any = None  # that was recorded from the stream
        self._asked = 0
        self._timing = enable_timing
        self._launches = 0

    def record(self, stream: Stream | None = None) -> None:
        failures.raise_broken()
        stream = stream or current()
        _merge(stream.clock, _host_clock)
        self._clock, self._graph, self._asked = dict(stream.clock), stream.capturing, 0
        self._launches = stream.clock[stream.number]

    def wait(self, stream: Stream | None = None) -> None:
        if self._clock is not None:
            (stream or current()).wait_clock(self._clock, self._graph)

    def query(self) -> bool:
        """Done when asked for the second or third time."""
        self._check()
        failures.raise_broken()
        self._asked += 1
        if self._asked < 2 + _random.randrange(2):
            return False
        if self._clock is not None:
            finish(self._clock)
        return True

    def synchronize(self) -> None:
        note_wait("Event.synchronize")
        self._check()
        if self._clock is not None:
            finish(self._clock)

    def _check(self) -> None:
        if self._graph is not None:
            raise RuntimeError("CUDA error: operation not permitted on an event last recorded in a capturing stream")

    def elapsed_time(self, end: Event) -> float:
        """One launch is a millisecond."""
        if not (self._timing and end._timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._clock is None or end._clock is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return float(end._launches - self._launches)


class AnyEvent(Event):
    """``torch.Event``: of any accelerator, here of these."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        super().__init__(**options)


def finish(clock: Clock) -> None:
    """The host has waited for all launches a clock knows."""
    with _lock:
        _merge(_host_clock, clock)
        done = [c for c in _copies if clock.get(c.stream.number, 0) >= c.tick]
        _copies[:] = [c for c in _copies if c not in done]
    for copy in done:
        copy.finish()


def under_way(host: Tensor, content: Tensor | None, stream: Stream) -> None:
    """A copy between pinned `host` memory and the device was launched: a download of `content`, or an upload."""
    if content is not None:
        _copies.append(_Copy(stream, stream.clock[stream.number], host, content.clone(), False))
        host.fill_(float("nan") if host.is_floating_point() else -1)
    else:
        _copies.append(_Copy(stream, stream.clock[stream.number], host, _bytes(host), True))


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


# -- what is current, by thread

_threads = threading.local()
_defaults: dict[int, Stream] = {}


def index_of(device: Any = None) -> int:
    """Of a device as torch takes one."""
    if device is None:
        return getattr(_threads, "device", 0)
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return getattr(_threads, "device", 0) if index is None else index


count_devices = 1
"""How many there are."""


def set_device(device: Any) -> None:
    if index_of(device) >= count_devices:
        raise RuntimeError("CUDA error: invalid device ordinal")
    _threads.device = index_of(device)


def default(device: Any = None) -> Stream:
    index = index_of(device)
    with _lock:
        if index not in _defaults:
            _defaults[index] = Stream(index)
        return _defaults[index]


def current(device: Any = None) -> Stream:
    index = index_of(device)
    stream = getattr(_threads, "streams", {}).get(index)
    return default(index) if stream is None else stream


def set_stream(stream: Stream) -> None:
    _threads.streams = {**getattr(_threads, "streams", {}), stream.device.index: stream}


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """``torch.cuda.stream``."""
    if stream is None:
        yield
        return
    device, before = index_of(), current(stream.device)
    set_device(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        set_device(device)


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    """``torch.cuda.device``."""
    before = index_of()
    if device is not None and index_of(device) >= 0:
        set_device(device)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: Any = None) -> None:
    """``torch.cuda.synchronize``."""
    note_wait("torch.cuda.synchronize")
    index = index_of(device)
    with _lock:
        streams = [stream for stream in _streams if stream.device.index == index]
    for stream in streams:
        finish(stream.clock)
