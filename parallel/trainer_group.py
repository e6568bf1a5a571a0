"""Membership in a torch.distributed group with another program, a trainer, in addition to the ranks' own groups.

The trainer is rank 0 and opens the store. The keys are those of a torch group of that name over a `tcp://` rendezvous,
so that trainers written for SGLang or vLLM (`init_custom_process_group`) find the members.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = 0
POLL_SECONDS = 0.002
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_REPORT_ONLY = "0"
"""Without it torch would end the process of a rank whose trainer is lost."""
_NEVER = timedelta(days=365)


class TrainerError(RuntimeError):
    """The trainer did not join, did not send, or is lost."""


class TrainerGroup:
    """Joins the group; blocks until all members are there.

    Args:
        host, port: of the trainer's store.
        rank: of this process in the group; 0 is the trainer's.
        device: of received tensors; nccl needs an accelerator, gloo the host.
        seconds: for the members to join.

    Raises:
        TrainerError: they did not join in time.
    """

    def __init__(
        self, host: str, port: int, rank: int, size: int, name: str, backend: str, device: torch.device, seconds: float
    ) -> None:
        self.device = device
        limit = timedelta(seconds=seconds)
        try:
            store: Any = dist.TCPStore(host, port, size, is_master=False, timeout=limit)
            for prefix in (name, f"{name}/", "cpu/" if backend == "gloo" else "cuda/"):
                store = dist.PrefixStore(prefix, store)
            make = _gloo if backend == "gloo" else _nccl
            self._backend: Any = make(store, rank, size, _own_address(host, port), limit)
        except (RuntimeError, OSError) as error:
            raise TrainerError(f"no group with the trainer at {host}:{port}: {_reason(error)}") from None
        self._polled = backend != "gloo"

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, seconds: float) -> Tensor:
        """The next tensor that the trainer broadcasts, on the host.

        Raises:
            TrainerError: it did not arrive; the group is unusable from then on.
        """
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        sent = tensor.view(torch.uint8) if dtype.itemsize == 1 else tensor  # gloo has no FP8
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = ROOT, 0
        options.timeout = timedelta(seconds=max(seconds, 0.001))
        try:
            work = self._backend.broadcast([sent], options)
            if self._polled:
                self._wait(work, seconds)
            work.wait()
        except RuntimeError as error:
            raise TrainerError(f"the trainer has sent nothing, or is lost: {_reason(error)}") from None
        return tensor.cpu()

    def close(self) -> None:
        """Ends the membership. Pending broadcasts of the trainer fail."""
        if self._polled:
            self._backend.abort()
        self._backend = None

    def _wait(self, work: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing within {seconds:.0f} s")
            time.sleep(POLL_SECONDS)


def _gloo(store: Any, rank: int, size: int, address: str, limit: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = limit
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, address: str, limit: timedelta) -> Any:
    """`receive` counts the time; torch's own limit would end the process."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    store.set_timeout(limit)
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = _REPORT_ONLY  # read by the constructor
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[_NCCL_ERRORS]
        else:
            os.environ[_NCCL_ERRORS] = before


def _own_address(host: str, port: int) -> str:
    """This machine's address on the route to the trainer."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # UDP: sends nothing, only selects a route
        return str(probe.getsockname()[0])


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text.partition("Exception raised from")[0].strip() or type(error).__name__
