"""This rank's groups with trainers, which send weights by broadcasts (`parallel.trainer_group`).

Joining and receiving wait for another program. Each runs in a thread of its own while steps run; `state` shows its end.
Received tensors stay in host memory until they are staged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor

from moe_engine.errors import MoeEngineError
from moe_engine.models.received_tensors import header_of
from moe_engine.parallel.trainer_group import TrainerError, TrainerGroup
from moe_engine.processes.watched_thread import start_watched
from moe_engine.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class GroupName(msgspec.Struct, forbid_unknown_fields=True):
    group_name: str


class JoinArgs(GroupName, forbid_unknown_fields=True):
    """`first_rank`: rank in the trainer's group of rank 0 of this replica."""

    master_address: str
    master_port: int
    first_rank: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    seconds: Seconds


class ReceiveArgs(GroupName, forbid_unknown_fields=True):
    """Names, dtypes (torch's) and shapes of whole tensors, in the order in which the trainer broadcasts them."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    seconds: Seconds


class _Member:
    """One group. Attributes: error: the reason why it is unusable, or ""."""

    def __init__(self, bind: Callable[[], None]) -> None:
        self.group: TrainerGroup | None = None
        self.received: dict[str, Tensor] = {}
        self.error = ""
        self._bind = bind
        self._thread: threading.Thread | None = None
        self._left = False

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work` in a thread, which ends with the process."""
        if self.is_busy:
            raise MoeEngineError("the group still joins or receives")
        self._thread = start_watched("weight-group", lambda: self._run(work), self._failed)

    def leave(self) -> None:
        self._left = True
        self.received = {}
        if self.group is not None and not self.is_busy:
            self._close()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            self._bind()
            work()
        except TrainerError as error:
            self.error = str(error)
        if self._left and self.group is not None:
            self._close()

    def _failed(self, message: str) -> None:
        self.error = message

    def _close(self) -> None:
        assert self.group is not None
        try:
            self.group.close()
        except RuntimeError as error:
            logger.warning("Leaving a group of weight updates: %s", error)
        self.group = None


class WeightGroups:
    """Every method runs on the worker's thread and never waits."""

    def __init__(self, runner: ModelRunner) -> None:
        self._stream, self._parallel = runner.stream, runner.shared.parallel
        self._members: dict[str, _Member] = {}

    def facts(self) -> dict[str, Any]:
        """Ranks of this replica, and the names of the groups."""
        return {"world_size": self._parallel.world_size, "groups": sorted(self._members)}

    def join(self, args: JoinArgs) -> None:
        """Begins to join. Raises MoeEngineError: a second group of the name, or nccl without an accelerator."""
        if args.group_name in self._members:
            raise MoeEngineError(f"group {args.group_name!r} exists")
        if args.backend == "nccl" and not self._stream.asynchronous:
            raise MoeEngineError("backend nccl: this engine has no GPU; use gloo")
        device = torch.device("cpu") if args.backend == "gloo" else self._stream.device
        member = self._members[args.group_name] = _Member(self._stream.bind_thread)

        def work() -> None:
            rank = args.first_rank + self._parallel.world_rank
            member.group = TrainerGroup(
                args.master_address, args.master_port, rank, args.world_size, args.group_name, args.backend, device,
                args.seconds,
            )  # fmt: skip

        member.start(work)

    def receive(self, args: ReceiveArgs) -> None:
        """Begins to receive. Raises MoeEngineError: unknown group."""
        member = self.member(args.group_name)
        member.received = {}
        headers = {name: header_of(dtype, shape) for name, dtype, shape in zip(args.names, args.dtypes, args.shapes)}

        def work() -> None:
            deadline = time.monotonic() + args.seconds
            group, received = member.group, dict[str, Tensor]()
            if group is None:
                raise TrainerError("the group was not joined")
            for number, (name, (dtype, header)) in enumerate(headers.items()):
                try:
                    received[name] = group.receive(header.shape, dtype, deadline - time.monotonic())
                except TrainerError as error:
                    raise TrainerError(f"tensor {number + 1} of {len(headers)}, {name}: {error}") from None
            member.received = received

        member.start(work)

    def state(self, args: GroupName) -> dict[str, Any]:
        """busy: joins or receives; error: the reason of a failure."""
        member = self.member(args.group_name)
        return {"busy": member.is_busy, "error": member.error}

    def leave(self, args: GroupName) -> bool:
        """False: unknown group."""
        member = self._members.pop(args.group_name, None)
        if member is not None:
            member.leave()
        return member is not None

    def take(self, name: str) -> dict[str, Tensor]:
        """The received tensors; each is returned once."""
        member = self.member(name)
        received, member.received = member.received, {}
        return received

    def member(self, name: str) -> _Member:
        """Raises MoeEngineError: unknown group."""
        if name not in self._members:
            raise MoeEngineError(f"group {name!r:.100} does not exist; call /init_weights_update_group first")
        return self._members[name]
