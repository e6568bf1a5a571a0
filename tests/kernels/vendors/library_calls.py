"""Calls of an emulated library that represent kernel launches.

On the CPU they are plain calls. On simulated devices `tests.simulated_cuda.libraries` runs each call as one launch,
which CUDA graphs capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Device(Protocol):
    def launch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def recording(self) -> bool: ...

    def wait(self, what: str) -> None: ...


device: Device | None = None
"""Set once per process; None: emulators run on the CPU."""


def recording() -> bool:
    """True while a graph is being captured on the current stream."""
    return device is not None and device.recording()


def wait(what: str) -> None:
    """The library waits on the host for the device."""
    if device is not None:
        device.wait(what)


def launched(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator of a function that represents launches of a library."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        return function(*args, **kwargs) if device is None else device.launch(function, args, kwargs)

    return call
