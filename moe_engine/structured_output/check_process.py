"""Child process that compiles grammars on trial, so that a slow or crashing compilation harms nothing else.

Frames on standard input and output: 4 bytes of length, then msgpack. The first frame in is the specification (pickle).
It exits when its input closes.
"""

from __future__ import annotations

import os
import pickle
import resource
import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import IO

import msgspec

from moe_engine.errors import InputError
from moe_engine.processes.background import in_idle_time, yield_to_steps
from moe_engine.processes.pipe_frames import read_frame, write_frame
from moe_engine.processes.stop_signals import ignore_stop_signals
from moe_engine.processes.watched_thread import start_watched
from moe_engine.structured_output.backend import GrammarBackend, GrammarError, GrammarSettings
from moe_engine.structured_output.open_backend import open_backend
from moe_engine.structured_output.request import read_constraint
from moe_engine.tokenizer.tokenizer import TokenizerSource
from moe_engine.types.constraint import Constraint

MAX_MEMORY_BYTES = 4 << 30
STACK_BYTES = 4 << 20
"""Half of a thread's usual stack: a grammar that compiles here does not overflow the engine's stack."""


@dataclass(frozen=True)
class CheckSpec:
    settings: GrammarSettings
    tokenizer: TokenizerSource
    vocab_size: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """The reason against a constraint; or the constraint for the engine, as `GrammarBackend.prepare` returns it."""

    problem: str | None = None
    prepared: Constraint | None = None


def main() -> None:
    ignore_stop_signals()
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    work = partial(_work, sys.stdin.buffer, sys.stdout.buffer)
    start_watched("grammar checks", work, lambda message: os._exit(1)).join()


def _work(requests: IO[bytes], answers: IO[bytes]) -> None:
    try:
        spec: CheckSpec = pickle.loads(read_frame(requests))
        backend = open_backend(spec.settings, spec.tokenizer.load(), spec.vocab_size, spec.eos_ids)
        write_frame(answers, msgspec.msgpack.encode(None))
        yield_to_steps()  # only now: a start takes a third of a second of a core
        while True:
            constraint = msgspec.msgpack.decode(read_frame(requests), type=Constraint)
            verdict = in_idle_time(partial(verdict_of, backend, constraint))
            write_frame(answers, msgspec.msgpack.encode(verdict))
    except (EOFError, BrokenPipeError):
        pass


def verdict_of(backend: GrammarBackend, constraint: Constraint) -> Verdict:
    """Compiles a constraint in the form that the engine will compile."""
    try:
        constraint = read_constraint(constraint)
    except InputError as error:
        return Verdict(error.message.removeprefix(f"{constraint.where}: "))
    try:
        try:
            prepared = backend.prepare(constraint)
            backend.compile(prepared).matcher()
            return Verdict(None, prepared)
        except GrammarError as error:
            backend.compile(constraint).matcher()  # its message has the position in the client's form
            return Verdict(str(error))
    except GrammarError as error:
        return Verdict(str(error))
    except MemoryError:
        return Verdict("compiling it needs too much memory")


if __name__ == "__main__":
    main()
