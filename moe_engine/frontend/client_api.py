"""Interface of a running engine for the text frontend. Implemented by `frontend.client`; tests may fake it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moe_engine.core.engine_info import EngineInfo
from moe_engine.core.messages import AddRequest, RequestDelta
from moe_engine.core.rank_calls import RankAnswer
from moe_engine.errors import EngineDeadError, MoeEngineError

BACKEND_FIELDS = {
    "attention": "attention_backend",
    "experts": "moe_runner_backend",
    "linear": "linear_backend",
    "ops": "ops_backend",
    "sampling": "sampling_backend",
}
"""Flag of each kernel family."""


def kernel_flags(backends: Mapping[str, str]) -> dict[str, str]:
    """Backend flags in effect; `backends`: backend name by kernel family."""
    return {BACKEND_FIELDS[family]: name for family, name in backends.items() if family in BACKEND_FIELDS}


CALL_SECONDS = 60.0
"""Default deadline of a call on all ranks."""
NO_ARGS: Mapping[str, Any] = {}
CallArgs = Mapping[str, Any] | Callable[[int | None], Mapping[str, Any]]
"""Arguments of a call on all ranks: the same for all, or by replica (None with a single one)."""


@dataclass(frozen=True)
class Health:
    """Read from shared memory, never from a queue. Ages in seconds."""

    alive: bool
    ready: bool
    last_step: int
    last_step_age: float
    """Since the last step ended; 0 while idle."""
    oldest_queued_age: float
    num_running: int
    num_waiting: int
    num_used_tokens: int
    dead: str | None = None
    """Name of the dead process and cause, e.g. ``engine core (pid 4242) was killed by SIGKILL``."""
    silence: float = 0.0
    """Since the last iteration of the engine's loop, idle or busy: long when a step hangs or the process is stopped."""


def combine(healths: Sequence[Health]) -> Health:
    """Aggregated health: counts summed and ages maximized over live schedulers; dead only if all are."""
    if len(healths) == 1:
        return healths[0]
    alive = [health for health in healths if health.alive]
    if not alive:
        return healths[0]
    return Health(
        alive=True,
        ready=all(health.ready for health in alive),
        last_step=max(health.last_step for health in alive),
        last_step_age=max(health.last_step_age for health in alive),
        oldest_queued_age=max(health.oldest_queued_age for health in alive),
        num_running=sum(health.num_running for health in alive),
        num_waiting=sum(health.num_waiting for health in alive),
        num_used_tokens=sum(health.num_used_tokens for health in alive),
        silence=max(health.silence for health in alive),
    )


class CallError(MoeEngineError):
    """A control call failed on a scheduler or rank, which is named. The engine serves on."""


@dataclass(frozen=True)
class GroupAnswers:
    """A scheduler's answers of its ranks to a call.

    Attributes:
        replica: None with a single one.
        lost: the cause of the scheduler's loss, if its answers were lost with it; failed: the reason why a live
        scheduler has none.
    """

    replica: int | None
    answers: Sequence[RankAnswer] = ()
    lost: str | None = None
    failed: str | None = None

    @property
    def values(self) -> list[Any]:
        """The values of the ranks without an error."""
        return [answer.value for answer in self.answers if not answer.error]

    def problems(self) -> dict[str, str]:
        """Error by rank."""
        prefix = "" if self.replica is None else f"replica {self.replica} "
        problems = {f"{prefix}rank {answer.rank}": answer.error for answer in self.answers if answer.error}
        return problems if self.failed is None else {f"{prefix or 'the engine'}".strip(): self.failed}


def values_of(groups: Sequence[GroupAnswers], method: str) -> list[Any]:
    """The values of the ranks of all schedulers that are not lost. Raises as `EngineClient.collective_rpc`."""
    ranks: dict[str, list[str]] = {}
    for group in groups:
        for rank, error in group.problems().items():
            ranks.setdefault(error, []).append(rank)
    if ranks:
        raise CallError(f"{method}: " + "; ".join(f"{', '.join(named)}: {error}" for error, named in ranks.items()))
    if groups and all(group.lost is not None for group in groups):
        raise EngineDeadError(groups[0].lost or "")
    return [value for group in groups for value in group.values]


DirectReader = Callable[[RequestDelta], bool]
"""Takes a delta on arrival, without waking the reader's task; False: the delta must go to the task."""


class EngineClient(Protocol):
    info: EngineInfo

    def stream(self, request: AddRequest, direct: DirectReader | None = None) -> AsyncGenerator[RequestDelta]:
        """Submits a request and yields its deltas, merged if the reader is slow, until one has `finish`.

        Closing the iterator early (client disconnected, stop string found) aborts the request.

        Args:
            direct: offered each plain delta (tokens and nothing else) that arrives while the reader waits for it.
                It must not raise.

        Raises:
            EngineDeadError: as soon as the engine is dead.
        """

    def abort(self, rids: Sequence[str], reason: str = "Aborted") -> None:
        """Aborts these requests (exact `AddRequest.rid`); finished ones are ignored."""

    async def call(self, method: str, **args: Any) -> list[Any]:
        """Control call to every scheduler; one reply each: ``flush_cache`` -> bool, ``internal_state`` -> dict. A
        scheduler that is lost meanwhile serves nothing any more, and has none.

        Raises:
            CallError: a scheduler refused.
            EngineDeadError: no scheduler is alive.
        """

    async def ask_ranks(
        self, method: str, args: CallArgs = NO_ARGS, deadline: float = CALL_SECONDS
    ) -> list[GroupAnswers]:
        """Calls a method of `worker.rank_methods` on every rank, between two steps; the answers by scheduler.

        Args:
            deadline: seconds; ranks without an answer then have an error.

        Raises:
            EngineDeadError: no scheduler is alive.
        """

    async def collective_rpc(self, method: str, args: CallArgs = NO_ARGS, deadline: float = CALL_SECONDS) -> list[Any]:
        """`ask_ranks`, for calls that must succeed wherever requests run: the values in rank order, replica by replica,
        without those of a replica that is lost meanwhile.

        Raises:
            CallError: names the ranks that failed or did not answer, with their errors.
            EngineDeadError: no scheduler is alive.
        """

    async def call_one(self, method: str, **args: Any) -> Any:
        """Control call to one scheduler: the first one alive."""

    def health(self) -> Health:
        """Aggregated over all schedulers."""

    def healths(self) -> list[Health]:
        """One per scheduler."""

    def stop_stalled(self, stall: Callable[[Health], str | None]) -> None:
        """Kills replicas for which `stall` returns a reason. Their requests fail with that reason."""

    async def shutdown(self, *, drain: bool = True) -> None: ...
