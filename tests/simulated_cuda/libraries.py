"""Library calls on simulated devices: emulators of `tests/kernels/vendors`, each call is one launch that graphs
capture.

An emulator receives its tensors as host memory and may read them, as a kernel may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.kernels.vendors import library_calls
from tests.simulated_cuda import kernels
from tests.simulated_cuda.memory import MEMORY
from tests.simulated_cuda.operators import Launch
from tests.simulated_cuda.streams import current, index_of, note_wait


class Calls:
    """Implements `tests.kernels.vendors.library_calls.Device`."""

    def recording(self) -> bool:
        return current().capturing is not None

    def wait(self, what: str) -> None:
        note_wait(what)

    def launch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        given = [x for x in tensors if x.is_cuda]
        if not given:
            return function(*args, **kwargs)
        public = not function.__name__.startswith("_")  # others get values that the emulator keeps on the host
        if public and any(x.numel() and not x.is_cuda for x in tensors):
            raise RuntimeError(f"{function.__name__}: tensors must be on the device")
        if any(x.device.index != index_of() for x in given):  # libraries launch on the current device
            raise RuntimeError(f"{function.__name__} is launched on device {index_of()} with memory of others")
        kernels.count(function.__name__)
        launch = Launch(function.__name__, given[0].device)
        for x in given:
            launch.input_format(x)
            if launch.graph is not None:
                launch.graph.keep(MEMORY.block(x))
        host_args, host_kwargs = tree_map_only(Tensor, _host, (args, kwargs))
        result = function(*host_args, **host_kwargs)
        owners = {x.untyped_storage().data_ptr(): x for x in given}

        def back(x: Tensor) -> Tensor:
            owner = owners.get(x.untyped_storage().data_ptr())
            if owner is not None:
                return owner.as_strided(x.size(), x.stride(), x.storage_offset())
            there = owners[x.untyped_storage().data_ptr()] = MEMORY.device(x, given[0].device.index)
            if launch.graph is not None:
                launch.graph.taken(MEMORY.block(there))
            launch.writes(there)
            return there

        if launch.graph is not None:
            kept = _tensors(result)

            def again() -> None:
                for old, new in zip(kept, _tensors(function(*host_args, **host_kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

            launch.graph.add(again)
        return tree_map_only(Tensor, back, result)


def _host(x: Tensor) -> Tensor:
    return MEMORY.host(x) if x.is_cuda else x


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def install() -> None:
    """Makes emulators' calls launches."""
    library_calls.device = Calls()
