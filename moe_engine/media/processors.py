"""Image processors: child processes that start on demand, in use by one thread at a time, killed at the time limit."""

from __future__ import annotations

from threading import Lock

import msgspec

from moe_engine.errors import GenerationError
from moe_engine.media.addresses import MediaError
from moe_engine.media.image_process import Processed
from moe_engine.processes.frame_child import FrameChild

PROCESS_SECONDS = 60.0
START_SECONDS = 120.0


class Processors:
    """Args:
    folder: of the checkpoint.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()
        self._lock = Lock()

    def process(self, data: bytes) -> Processed:
        """Blocking. Raises MediaError: the image is wrong. GenerationError: the process does not start."""
        child = self._take()
        try:
            done = child.ask(data)
        except BaseException:
            child.kill()
            raise
        with self._lock:
            self._idle.append(child)
        if done.problem is not None:
            raise MediaError(done.problem)
        return done

    def close(self) -> None:
        with self._lock:
            for child in self._children:
                child.kill()

    def _take(self) -> _Child:
        with self._lock:
            while self._idle:
                if (child := self._idle.pop()).is_alive:
                    return child
        child = _Child("moe_engine.media.image_process")
        with self._lock:
            self._children = {some for some in self._children if some.is_alive} | {child}
        child.start(self._folder)
        return child


class _Child(FrameChild):
    def start(self, folder: str) -> None:
        """Raises GenerationError."""
        try:
            answer = self.exchange(msgspec.msgpack.encode(folder), START_SECONDS)
            problem = "not in time" if answer is None else msgspec.msgpack.decode(answer)
        except EOFError:
            problem = "it has ended; see the server's log"
        if problem is not None:
            self.kill()
            raise GenerationError(
                f"the process that reads images failed to start: {problem} (needs pip install '.[vision]')"
            )

    def ask(self, data: bytes) -> Processed:
        """Raises MediaError."""
        try:
            answer = self.exchange(data, PROCESS_SECONDS)
        except EOFError:
            raise MediaError("the image cannot be processed: its processing crashed; send a smaller one") from None
        if answer is None:
            raise MediaError(f"processing the image takes longer than {PROCESS_SECONDS:g} s; send a smaller one")
        return msgspec.msgpack.decode(answer, type=Processed)
