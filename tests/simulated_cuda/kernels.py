"""Triton's kernels on simulated devices: run by the interpreter over the tensors' memory, programs in any order."""

from __future__ import annotations

import dataclasses
import inspect
import os
import random
from pathlib import Path
from typing import Any

from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.jit import TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels.triton import beside
from tests.simulated_cuda import failures, observer, streams, symmetric
from tests.simulated_cuda.memory import MEMORY
from tests.simulated_cuda.operators import Launch, is_pinned

_call = interpreter.GridExecutor.__call__
_random = random.Random(0)
launches: dict[str, int] = {}
"""By kernel."""
LAUNCHED = "SIMULATED_CUDA_LAUNCHED"
"""Environment variable: a folder that gets an empty file with the name of each launched kernel."""
WAITING = {
    "one_shot_kernel", "two_shot_kernel", "route_kernel", "norm_route_kernel", "place_kernel", "receive_kernel",
    "sum_kernel",
}  # fmt: skip
"""Kernels that wait for programs of the same launch, here or on other ranks: their programs must run concurrently."""


def count(name: str) -> None:
    """Counts a launch of a kernel or a library."""
    if name not in launches and (folder := os.environ.get(LAUNCHED)):
        Path(folder, name).touch()
    launches[name] = launches.get(name, 0) + 1


def _tensors(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, (tuple, list)):
            found += _tensors(value)
        elif isinstance(value, (TensorDescriptor, TensorWrapper)):
            found.append(value.base)
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def call(self: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces `GridExecutor.__call__`."""
    name = self.fn.__name__
    tensors = _tensors([*args, *kwargs.values()])
    on_host = [x for x in tensors if not x.is_cuda]
    tensors = [x for x in tensors if x.is_cuda]
    if not tensors:
        return _call(self, *args, **kwargs)
    if any(x.numel() and not is_pinned(x) for x in on_host):
        raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?): {name}")
    elsewhere = {x.device for x in tensors if x.device.index != streams.index_of()}
    if elsewhere:  # a real kernel would run on the current device, and access the other's memory or fail
        raise RuntimeError(f"{name} is launched on device {streams.index_of()} with memory of {elsewhere}")
    launch = Launch(name)
    if observer.observer is not None:
        observer.observer.kernel(launch, name, *_bound(self, args, kwargs))
        return None
    blocks = {id(block): block for x in tensors for block in [MEMORY.block(x)]}
    if launch.graph is not None:
        for block in blocks.values():
            launch.graph.keep(block)
    before = {key: block.host.clone() for key, block in blocks.items()} if streams.several() else {}
    hosts, host_options = [_host(x) for x in args], {key: _host(x) for key, x in kwargs.items()}
    count(name)

    def run() -> None:
        if name in WAITING:
            beside.run_launch(self, tuple(hosts), host_options, _random.randrange(1 << 30))
        else:
            _call(self, *hosts, **host_options)

    if launch.graph is None or not any(map(symmetric.leads_there, tensors)):  # cannot restore other ranks' memory
        run()
        failures.launched(name)
    for x in tensors:
        block = MEMORY.block(x)
        changed = id(block) in before and not before[id(block)].equal(block.host)
        launch.writes(x) if changed else launch.input_format(x)
    if launch.graph is not None:
        launch.graph.add(run)
    return None


def _bound(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A launch's arguments and options by name, and its grid."""
    names = inspect.getfullargspec(executor.fn)
    known = {key: x for key, x in kwargs.items() if key in names.args or key in names.kwonlyargs}
    bound = inspect.getcallargs(executor.fn, *args, **known)
    return {**kwargs, **bound}, tuple(executor.grid(bound) if callable(executor.grid) else executor.grid)


def _host(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_host(y) for y in x)
    if isinstance(x, TensorDescriptor):
        return dataclasses.replace(x, base=_host(x.base))
    if isinstance(x, TensorWrapper):
        return TensorWrapper(_host(x.base), x.dtype)
    return MEMORY.host(x) if isinstance(x, Tensor) and x.is_cuda else x


def install() -> None:
    """Installs the executor for the whole process; idempotent."""
    interpreter.GridExecutor.__call__ = call
