"""Interface of a running engine for the text front end. Implemented by `frontend.client`; tests may fake it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moe_engine.core.engine_info import EngineInfo
from moe_engine.core.messages import AddRequest, RequestDelta

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


class EngineClient(Protocol):
    info: EngineInfo

    def stream(self, request: AddRequest) -> AsyncIterator[RequestDelta]:
        """Submits a request and yields its deltas, merged if the reader is slow, until one has `finish`.

        Closing the iterator early (client disconnected, stop string found) aborts the request.

        Raises:
            EngineDeadError: as soon as the engine is dead.
        """

    def abort(self, rids: Sequence[str], reason: str = "Aborted") -> None:
        """Aborts these requests (exact `AddRequest.rid`); finished ones are ignored."""

    async def call(self, method: str, **args: Any) -> list[Any]:
        """Control call to every scheduler; one reply each: ``flush_cache`` -> bool, ``internal_state`` -> dict."""

    async def call_each(self, method: str, **args: Any) -> list[Any]:
        """Like `call`, but tolerates schedulers that die: their place in the list holds an `EngineDeadError`.

        Raises:
            EngineDeadError: no scheduler is alive.
        """

    async def call_one(self, method: str, **args: Any) -> Any:
        """Control call to one scheduler: the first one alive."""

    def health(self) -> Health:
        """Aggregated over all schedulers."""

    def healths(self) -> list[Health]:
        """One per scheduler."""

    async def shutdown(self, *, drain: bool = True) -> None: ...
