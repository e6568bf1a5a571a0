"""Image processors: child processes that start on demand, in use by one thread at a time, killed at the time limit."""

from __future__ import annotations

import msgspec

from moe_engine.errors import GenerationError
from moe_engine.media.addresses import MediaError
from moe_engine.media.image_process import ImageSetup, Processed
from moe_engine.processes.frame_child import FrameChild, FrameChildren

PROCESS_SECONDS = 60.0
START_SECONDS = 120.0
_decode = msgspec.msgpack.Decoder(Processed).decode


class Processors:
    def __init__(self, setup: ImageSetup) -> None:
        self._children = FrameChildren(lambda: _Child(setup))

    def process(self, data: bytes) -> Processed:
        """Blocking. Raises MediaError: the image is wrong. GenerationError: the process does not start.
        InputError: 503, it was killed at its start, twice."""
        try:
            done = self._children.call(lambda child: child.ask(data))
        except EOFError:
            raise MediaError("the image cannot be processed: its processing crashed; send a smaller one") from None
        if done.problem is not None:
            raise MediaError(done.problem)
        return done

    def close(self) -> None:
        self._children.close()


class _Child(FrameChild):
    def __init__(self, setup: ImageSetup) -> None:
        super().__init__("moe_engine.media.image_process", "the process that reads images")
        self._setup = setup

    def begin(self) -> None:
        """Raises GenerationError: it cannot work, or is not ready in time. EOFError: it has ended."""
        answer = self.exchange(msgspec.msgpack.encode(self._setup), START_SECONDS)
        problem = "not in time" if answer is None else msgspec.msgpack.decode(answer)
        if problem is not None:
            raise GenerationError(
                f"the process that reads images failed to start: {problem} (needs pip install -e '.[vision]')"
            )

    def ask(self, data: bytes) -> Processed:
        """Raises MediaError; EOFError: the process has crashed."""
        answer = self.exchange(data, PROCESS_SECONDS)
        if answer is None:
            raise MediaError(f"processing the image takes longer than {PROCESS_SECONDS:g} s; send a smaller one")
        return _decode(answer)
