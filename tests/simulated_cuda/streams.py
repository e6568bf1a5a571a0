"""Streams and events of simulated devices, waits of the host, and copies in progress.

Work is done at launch, but its results become visible to the host only after a wait: a download's destination is
poisoned before, and an upload's source must have the same bytes at the wait as at the launch. Time is counted in
launches: a stream's clock has the known progress of every stream.
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
    """A wait of the host for a device, explicit or to read or send a value."""

    what: str
    thread: str
    where: str
    """The innermost frames of the engine."""


@dataclass(eq=False)
class _Copy:
    """A copy between the device and pinned memory, until the host's wait for it."""

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
    """True if a stream other than the default runs."""
    return _several


def note_wait(what: str) -> None:
    """Records a wait of the host; refused during capture."""
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
        """The graph captured from this stream: since the capture started on it, or since it waited for one of the
        graph's streams."""

    @property
    def cuda_stream(self) -> int:
        return self.number

    @property
    def stream_id(self) -> int:
        return self.number

    def launch(self) -> int:
        """The tick of a further launch, ordered after all waits of the host."""
        _merge(self.clock, _host_clock)
        self.clock[self.number] += 1
        return self.clock[self.number]

    def knows(self, stream: Stream, tick: int) -> bool:
        """True if a launch of another stream ends before the next one of this stream starts."""
        return stream is self or max(self.clock.get(stream.number, 0), _host_clock.get(stream.number, 0)) >= tick

    def wait_stream(self, other: Stream) -> None:
        self._comes_behind(other.capturing)
        _merge(self.clock, other.clock)

    def wait_clock(self, clock: Clock, graph: Any) -> None:
        """Waits for an event's clock; `graph` was captured from the event's stream at that time (None: no graph)."""
        self._comes_behind(graph)
        _merge(self.clock, clock)

    def _comes_behind(self, graph: Any) -> None:
        """A stream that waits for a stream of a capture belongs to the capture from then on."""
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
        self._graph: Any = None  # the graph captured from the stream
        self._asked = 0
        self._timing = enable_timing
        self._launches = 0
        self._device: Any = None

    def record(self, stream: Stream | None = None) -> None:
        failures.raise_broken()
        stream = stream or current()
        self._device = self._device or stream.device
        if stream.device != self._device:
            raise RuntimeError(f"Event device {self._device} does not match recording stream's device {stream.device}")
        _merge(stream.clock, _host_clock)
        self._clock, self._graph, self._asked = dict(stream.clock), stream.capturing, 0
        self._launches = stream.clock[stream.number]

    def wait(self, stream: Stream | None = None) -> None:
        if self._clock is not None:
            (stream or current()).wait_clock(self._clock, self._graph)

    def query(self) -> bool:
        """True at the second or third query."""
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
        """Milliseconds; one launch takes one, and a microsecond passes without any."""
        if not (self._timing and end._timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._clock is None or end._clock is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if any(_host_clock.get(stream, 0) < tick for x in (self, end) for stream, tick in (x._clock or {}).items()):
            raise RuntimeError("CUDA error: device not ready")
        return float(end._launches - self._launches) or 1e-3


class AnyEvent(Event):
    """``torch.Event`` of any accelerator, here of simulated devices."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        super().__init__(**options)


def host_knows(stream: Stream, tick: int) -> bool:
    """True if the host has waited for a launch: everything launched from now on is ordered after it."""
    return _host_clock.get(stream.number, 0) >= tick


def finish(clock: Clock) -> None:
    """Handles a wait of the host for all launches in a clock."""
    with _lock:
        _merge(_host_clock, clock)
        done = [c for c in _copies if clock.get(c.stream.number, 0) >= c.tick]
        _copies[:] = [c for c in _copies if c not in done]
    for copy in done:
        copy.finish()


def under_way(host: Tensor, content: Tensor | None, stream: Stream) -> None:
    """Records a launched copy between pinned `host` memory and the device: a download of `content`, or an upload."""
    if content is not None:
        _copies.append(_Copy(stream, stream.clock[stream.number], host, content.clone(), False))
        host.fill_(float("nan") if host.is_floating_point() else -1)
    else:
        _copies.append(_Copy(stream, stream.clock[stream.number], host, _bytes(host), True))


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def deliver(stream: Stream) -> None:
    """Ends the copies that were launched on a stream, for a host function that the stream calls after them."""
    with _lock:
        done = [copy for copy in _copies if copy.stream is stream]
        _copies[:] = [copy for copy in _copies if copy.stream is not stream]
    for copy in done:
        copy.finish()


# -- current device and stream, by thread

_threads = threading.local()
_defaults: dict[int, Stream] = {}


def index_of(device: Any = None) -> int:
    """Index of a device in any of torch's forms."""
    if device is None:
        return getattr(_threads, "device", 0)
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return getattr(_threads, "device", 0) if index is None else index


count_devices = 1
"""Number of devices."""


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
