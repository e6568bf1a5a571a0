"""A child process that answers frames on its pipes (`pipe_frames`)."""

from __future__ import annotations

import select
import subprocess
import sys

from moe_engine.processes.pipe_frames import read_frame, write_frame


class FrameChild:
    """A child process in a session of its own, in use by one thread at a time.

    Args:
        module: run with `python -m`; reads a frame from stdin and writes its answer to stdout, in turn.
    """

    def __init__(self, module: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def exchange(self, data: bytes, seconds: float) -> bytes | None:
        """The answer to a frame; None if it is late. Raises EOFError if the process has ended."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        try:
            write_frame(self._popen.stdin, data)
        except OSError:
            raise EOFError from None
        if not select.select([self._popen.stdout], [], [], seconds)[0]:
            return None
        return read_frame(self._popen.stdout)
