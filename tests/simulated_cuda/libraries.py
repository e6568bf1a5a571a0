"""Library calls on simulated devices: emulators of `tests/kernels/vendors`, each call one launch that graphs record.

What an emulator computes with is the library's own affair, as what a kernel does is: it is given the memory of its
tensors as the host's, and may read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.simulated_cuda.memory import MEMORY


class Calls:
    """What `tests.kernels.vendors.tape.launched` hands the emulators' calls to."""

    def launch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from tests.simulated_cuda.operators import Launch

        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_cuda]
        if not given:
            return function(*args, **kwargs)
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
            there = MEMORY.device(x, given[0].device.index)
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
    """From now on emulators' calls are launches."""
    from tests.kernels.vendors import flashinfer_emulator
    from tests.kernels.vendors.tape import Tape
    from tests.simulated_cuda.streams import current

    Tape.current = Calls()  # type: ignore[assignment]
    flashinfer_emulator.recording = lambda: current().capturing is not None
