"""An engine core in this process: real scheduler, real worker, real kernels; messages come from a script."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from moe_engine.config.args import EngineArgs
from moe_engine.core import messages
from moe_engine.core.kv_arrivals import KVArrivals
from moe_engine.core.loop import EngineCore, LoopSettings
from moe_engine.core.setup import scheduler_config
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.step_reporter import StepReporter
from moe_engine.executor.make_worker import worker_options
from moe_engine.planning.prepare import prepare
from moe_engine.sampling_checks import parse_sampling
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.structured_output.compiler import GrammarCompiler
from moe_engine.worker.worker import Worker
from tests.logprobs import unpack


@dataclass
class Scripted:
    """A request and the turn of the loop at which it arrives; optionally the turn at which it is aborted."""

    rid: str
    prompt_ids: list[int]
    max_new_tokens: int = 8
    arrives: int = 0
    aborted_at: int | None = None
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    seed: int = 0
    logprob: bool = False
    logprob_start: int | None = None
    priority: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of `AddRequest`."""
    resolved: dict[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that the frontend computes."""


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    retractions: int = 0
    cached_tokens: int = 0
    rows: bytes = b""
    """Hidden states or experts of its positions."""


class ScriptedPort:
    """A `CoreTransport`: delivers messages by turn, collects the answers, ends the loop when all requests have
    ended."""

    def __init__(self, script: list[Scripted]) -> None:
        self._script = script
        self._turn = -1
        self._sent: set[str] = set()
        self.answers = {item.rid: Answer() for item in script}

    def receive(self, timeout: float) -> list[messages.Message]:
        self._turn += 1
        if timeout and len(self._sent) < len(self._script):  # idle: the next arrival is delivered now
            self._turn = max(self._turn, min(i.arrives for i in self._script if i.rid not in self._sent))
        out: list[messages.Message] = []
        for item in self._script:
            if item.rid not in self._sent and item.arrives <= self._turn:
                self._sent.add(item.rid)
                out.append(add_request(item))
            if item.rid in self._sent and item.aborted_at == self._turn:
                out.append(messages.AbortRequest([item.rid]))
        if len(self._sent) == len(self._script) and all(a.finish for a in self.answers.values()):
            out.append(messages.Shutdown())
        return out

    def wake(self) -> None:
        """No effect: `receive` never waits."""

    def send(self, message: messages.Message) -> None:
        message = messages.decode_from_core(messages.encode(message))  # as received from a socket
        assert isinstance(message, messages.StepOutput)
        for delta in message.deltas:
            answer = self.answers[delta.rid]
            assert answer.finish is None, f"{delta.rid} got an output after its end"
            answer.token_ids += delta.token_ids
            answer.logprobs += unpack(delta.logprobs)
            answer.prompt_logprobs += unpack(delta.prompt_logprobs)
            answer.finish = delta.finish
            answer.retractions = delta.retractions
            answer.cached_tokens = delta.cached_tokens
            answer.rows += delta.vector or b""


def add_request(item: Scripted) -> messages.AddRequest:
    sampling = parse_sampling({"max_new_tokens": item.max_new_tokens, **item.sampling})
    return messages.AddRequest(
        rid=item.rid,
        prompt_ids=list(item.prompt_ids),
        sampling=msgspec.to_builtins(sampling) | item.resolved,
        max_new_tokens=item.max_new_tokens,
        seed=item.seed,
        priority=item.priority,
        return_logprob=item.logprob,
        **({"logprob_start": item.logprob_start} | item.more),
    )


class InProcessEngine:
    """A loaded model with a new scheduler for each run, with other limits and switches.

    Args:
        path: checkpoint directory.
        flags: server flags, which determine the worker's allocations. One thread computes by default.
    """

    def __init__(self, path: Path | str, status: Path, **flags: Any) -> None:
        self.config = prepare(EngineArgs.from_kwargs(**{"model_path": str(path), "cpu_threads": 1} | flags))
        self.worker = Worker.create(worker_options(self.config))
        self._status = SharedStatus(status, create=True)

    def run(
        self,
        script: list[Scripted],
        *,
        overlap: bool = True,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
        **scheduling: Any,
    ) -> dict[str, Answer]:
        """Runs a script to its end. `clock`: the scheduler's clock. `scheduling` replaces fields of the
        SchedulerConfig."""
        config = dataclasses.replace(scheduler_config(self.config), **scheduling)
        self.scheduler = Scheduler(config, clock)
        port = ScriptedPort(script)
        eos = frozenset(self.config.model.eos_token_ids)
        arrivals = KVArrivals(port.wake)
        self.worker.on_kv_done(arrivals.report, arrivals.report_storage)
        core = EngineCore(
            self.scheduler, self.worker, port, self._status, StepReporter(), LoopSettings(eos, overlap),
            kv_arrivals=arrivals if config.host_tier_tokens else None, grammars=grammars,
        )  # fmt: skip
        core.run()
        self.check_pool_whole()
        return port.answers

    def check_pool_whole(self) -> None:
        stats = self.scheduler.stats()
        assert stats.num_free + stats.num_evictable == stats.num_slots
        assert self.scheduler.check_integrity() == []

    def close(self) -> None:
        self.worker.close()
