"""Torch's operators on simulated devices: checked like CUDA's, computed by the CPU's over the same memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.simulated_cuda import any_order, failures, index_rows, observer, order, profiler
from tests.simulated_cuda.memory import MEMORY
from tests.simulated_cuda.streams import HazardError, Stream, current, deliver, note_wait, under_way

aten = torch.ops.aten
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
BY_VALUES = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default,
    aten.unique_dim.default, aten.equal.default, aten.is_nonzero.default, aten.bincount.default,
    aten.repeat_interleave.Tensor,
}  # fmt: skip
"""Operators whose result shapes, or the host's next step, depend on values on the device."""
TAKES_HOST_INDEX = {
    aten.index.Tensor, aten.index.Tensor_out, aten.index_put_.default, aten._index_put_impl_.default,
    aten.index_put.default,
}  # fmt: skip

WITHOUT_BYTES = {
    aten.index.Tensor, aten.index.Tensor_out, aten.index_copy.out, aten.index_copy_.default,
    aten.index_fill_.int_Scalar, aten.masked_scatter_.default, aten.take.default,
}  # fmt: skip
"""Operators that CUDA, unlike CPUs, lacks for FP8 and wide unsigned integers (torch, native/cuda/IndexKernel.cu)."""
BYTES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64}

SETS = (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor)


Rows = Callable[[], order.Extent] | None
"""The bytes that a launch uses of a tensor, by the values of an index; None: all."""


class Launch:
    """One launch on a device's current stream: its reads and writes are checked, and it is recorded during capture."""

    def __init__(self, what: str, device: Any = None) -> None:
        MEMORY.collect()
        failures.raise_broken()
        self.what = what
        self.stream: Stream = current(device)
        self.tick = self.stream.launch()
        self.graph = self.stream.capturing
        if self.graph is None:
            profiler.launches[what] += 1
        else:
            self.graph.names.append(what)

    def input_format(self, tensor: Tensor, rows: Rows = None) -> None:
        self._touches(tensor, False, rows)

    def writes(self, tensor: Tensor, rows: Rows = None) -> None:
        self._touches(tensor, True, rows)

    def _touches(self, tensor: Tensor, writes: bool, rows: Rows) -> None:
        block = MEMORY.block(tensor)
        if self.graph is not None:
            self.graph.touches(block, order.extent(tensor), writes, self.stream, self.tick, self.what, rows)
        else:
            part = order.extent(tensor) if rows is None else rows()
            order.touch(block, part, writes, self.stream, self.tick, self.what)


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator that takes or creates a tensor on a simulated device."""
    if op is aten.empty.memory_format or op is aten.empty_strided.default:
        return _empty(op, *args, **kwargs)
    if op is aten._local_scalar_dense.default:
        note_wait("a scalar is read")
        Launch("item", args[0].device).input_format(args[0])
        return op(MEMORY.host(args[0]))
    if op is aten.record_stream.default:
        raise NotImplementedError("record_stream through the dispatcher")
    if op.is_view or op in SETS:
        return op.redispatch(CPU, *args, **kwargs)
    if op in (aten.resize_.default,):
        return _resize(*args, **kwargs)
    return _compute(op, args, kwargs)


def _empty(op: Any, size: Any, *rest: Any, device: Any = None, dtype: Any = None, **options: Any) -> Tensor:
    like = op(size, *rest, device="meta", dtype=dtype, **{k: v for k, v in options.items() if k != "pin_memory"})
    tensor = MEMORY.strided(like.size(), like.stride(), like.dtype, _index(device))
    graph = current(device).capturing
    if graph is not None:
        graph.taken(MEMORY.block(tensor))
    return tensor


def _index(device: Any) -> int:
    return current(device).device.index


def _resize(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    if tensor.numel() == 0:  # as for results of operators that create them
        fresh = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
        tensor.set_(fresh.untyped_storage(), 0, fresh.size(), fresh.stride())
        return tensor
    if list(size) != list(tensor.shape):
        raise NotImplementedError("a simulated device's tensors are not resized")
    return tensor


# -- copies


def copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``aten::copy_`` with a device on either side."""
    if into.is_cuda and source.is_cuda:
        return _compute(aten.copy_.default, (into, source), {})
    if not into.numel():
        return into
    launch = Launch("copy", into.device if into.is_cuda else source.device)
    if into.is_cuda:
        _upload(launch, into, source, non_blocking)
    else:
        _download(launch, into, source, non_blocking)
    return into


def copy_lists(into: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    """``aten::_foreach_copy_``: one launch for contiguous tensors of one dtype, as CUDA's kernel, else a copy
    of each."""
    alike = len({x.dtype for x in into} | {x.dtype for x in sources}) == 1
    if alike and all(x.is_cuda and x.is_contiguous() for x in (*into, *sources)):
        _compute(aten._foreach_copy_.default, (into, sources), {})
        return
    for destination, source in zip(into, sources):
        destination.copy_(source, non_blocking)


def _upload(launch: Launch, into: Tensor, source: Tensor, non_blocking: bool) -> None:
    pinned = is_pinned(source) and _moves_at_once(source, into)
    if launch.graph is not None and not (pinned and non_blocking):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing (upload of pageable memory)")
    if not pinned:
        note_wait("an upload of pageable memory")
    elif not non_blocking:
        note_wait("a blocking upload")
    launch.writes(into)
    if observer.observer is not None:
        observer.observer.copy(launch, into.nbytes, True)
    there = MEMORY.host(into)
    if observer.skips([into]):
        return
    there.copy_(source)
    if launch.graph is not None:
        host, device = _still_owned(source), into.device

        def again() -> None:
            there.copy_(host())
            under_way(host(), None, current(device))

        launch.graph.add(again)
    elif pinned and non_blocking:
        under_way(source, None, launch.stream)


def _download(launch: Launch, into: Tensor, source: Tensor, non_blocking: bool) -> None:
    launch.input_format(source)
    if observer.observer is not None:
        observer.observer.copy(launch, source.nbytes, False)
    content = MEMORY.host(source)
    if non_blocking and is_pinned(into) and _moves_at_once(into, source):
        if into.dtype != source.dtype:
            raise NotImplementedError("a simulated download that converts")
        if launch.graph is not None:
            into.copy_(content)
            host, device = _still_owned(into), source.device
            launch.graph.add(lambda: under_way(host(), content, current(device)))
            return
        under_way(into, content, launch.stream)
        return
    note_wait("a download")
    into.copy_(content)


def _moves_at_once(host: Tensor, device: Tensor) -> bool:
    """Whether a copy reads or writes the host's tensor itself. If not, torch copies through a contiguous temporary
    tensor, in pageable memory (torch, native/cuda/Copy.cu, copy_requires_temporaries)."""
    if host.shape != device.shape:  # the host's is expanded
        return host.numel() == 1 == device.numel()
    return host.is_contiguous() or (host.dtype == device.dtype and host.stride() == device.stride() and _dense(host))


def _dense(x: Tensor) -> bool:
    """Whether the elements fill their memory, in any order of dimensions."""
    return sum((n - 1) * step for n, step in zip(x.size(), x.stride())) + 1 == x.numel()


def _still_owned(host: Tensor) -> Callable[[], Tensor]:
    """Pinned memory of a captured copy: a graph does not keep it. Raises HazardError if nothing else has kept it."""
    own = host.detach()

    def found() -> Tensor:
        if torch._C._storage_Use_Count(own.untyped_storage()._cdata) < 3:  # of `own`, and of this call
            raise HazardError("a replayed copy uses pinned memory that was given back")
        return own

    return found


def call_in_order(function: int, data: int, device: Any) -> None:
    """`kernels.host_calls.call_in_order`: copies launched before on the stream are done, later ones wait."""
    launch = Launch("host function", device)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    if observer.observer is not None:
        observer.observer.copy(launch, 0, False)
        return

    def run() -> None:
        deliver(current(device))
        call(data)

    run()
    if launch.graph is not None:
        launch.graph.add(run)


def pin(tensor: Tensor) -> Tensor:
    """Marks host memory as pinned."""
    tensor.untyped_storage().is_simulated_pinned = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "is_simulated_pinned", False)


# -- all else


def _compute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index = _one_device(op, [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)], kwargs)
    args = as_declared(op, args)
    flat = leaves((args, kwargs))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    if op in BY_VALUES and kwargs.get("output_size") is None:
        note_wait(str(op))
    if op in WITHOUT_BYTES and (lacking := {x.dtype for x in tensors} & BYTES):
        raise NotImplementedError(f"{op} is not implemented on CUDA for {lacking.pop()}")
    launch = Launch(_schema(op).name, index)
    written = _written(op, args, kwargs)
    indexed = None if observer.observer is not None else index_rows.rows_of(op, args, kwargs)
    for tensor in tensors:
        if tensor.is_cuda:
            rows = indexed[1] if indexed is not None and tensor is indexed[0] else None
            if any(tensor is other for other in written):
                launch.writes(tensor, rows)
            else:
                launch.input_format(tensor, rows)
    fresh = [x for x in written if not x.numel() and sum(x is other for other in flat) == 1]  # not read as well
    if fresh and "out" in _schema(op).name:
        return _made(op, args, kwargs, written, launch)
    skipped = observer.skips(tensors)
    if skipped and op is aten.equal.default:
        note_wait(str(op))
        return True  # values without content
    hosts: list[Any] = []

    def host_of(x: Any) -> Any:
        hosts.append(_shape(x) if skipped else _host(x))
        return hosts[-1]

    host_args, host_kwargs = mapped(host_of, (args, kwargs))
    given = {id(h): x for h, x in zip(hosts, flat) if isinstance(x, Tensor)}
    storages = {
        h.untyped_storage().data_ptr(): x
        for h, x in zip(hosts, flat) if isinstance(x, Tensor) and x.is_cuda and not skipped
    }  # fmt: skip
    result = any_order.compute(op, host_args, host_kwargs)

    def back(host: Tensor) -> Tensor:
        if id(host) in given:
            return given[id(host)]
        if host.is_meta:
            return _empty(aten.empty_strided.default, host.size(), host.stride(), dtype=host.dtype, device=index)
        base = storages.get(host.untyped_storage().data_ptr())
        if base is not None and host.numel():
            return base.as_strided(host.size(), host.stride(), host.storage_offset())
        return _adopted(host, index, launch)

    out = mapped(lambda x: back(x) if isinstance(x, Tensor) else x, result)
    if observer.observer is not None:
        made = [x for x in leaves(out) if isinstance(x, Tensor) and not any(x is other for other in tensors)]
        observer.observer.operator(launch, op, tensors, written, made)
    elif launch.graph is not None:
        fresh = [host for host in leaves(result) if isinstance(host, Tensor) and id(host) not in given]

        def again() -> None:
            made = any_order.compute(op, host_args, host_kwargs)
            found = [x for x in leaves(made) if isinstance(x, Tensor)]
            if fresh:
                for into, value in zip(fresh, found):
                    into.copy_(value)

        launch.graph.add(again)
    return out


def leaves(value: Any) -> list[Any]:
    """Leaves of an operator's arguments or results; faster than torch's tree functions."""
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in leaves(part)]
    return [leaf for part in value.values() for leaf in leaves(part)] if isinstance(value, dict) else [value]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with `function` of each of its `leaves`, in their order."""
    if isinstance(value, dict):
        return {name: mapped(function, part) for name, part in value.items()}
    if not isinstance(value, (tuple, list)):
        return function(value)
    parts = [mapped(function, part) for part in value]
    if type(value) in (tuple, list):
        return type(value)(parts)
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def as_declared(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The dispatcher passes wrapped numbers as numbers; not all operators accept them in place of tensors."""
    of_tensors = _schema(op).of_tensors
    if not any(isinstance(x, (bool, int, float)) for x in args):
        return args
    return tuple(
        torch.tensor(x) if isinstance(x, (bool, int, float)) and place in of_tensors else x
        for place, x in enumerate(args)
    )


@dataclass(frozen=True)
class _Schema:
    """Schema of an operator: its name, the positions of tensors, positions and names of written ones."""

    name: str
    of_tensors: frozenset[int]
    written: tuple[tuple[int, str], ...]


@cache
def _schema(op: Any) -> _Schema:
    arguments = list(enumerate(op._schema.arguments))
    return _Schema(
        str(op),
        frozenset(place for place, argument in arguments if isinstance(argument.type, torch.TensorType)),
        tuple(
            (place, argument.name)
            for place, argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )


def _shape(x: Any) -> Any:
    """A tensor without content."""
    if isinstance(x, Tensor) and (x.is_cuda or x.dim()):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _host(x: Any) -> Any:
    if isinstance(x, Tensor):
        return MEMORY.host(x) if x.is_cuda else x
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device("cpu")
    return x


def _adopted(host: Tensor, index: int, launch: Launch) -> Tensor:
    tensor = MEMORY.device(host, index)
    block = MEMORY.block(tensor)
    if launch.graph is not None:
        launch.graph.taken(block)
    launch.writes(tensor)
    return tensor


def _made(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor], launch: Launch) -> Any:
    """An operator that resizes its empty ``out``."""
    places = {id(x): place for place, x in enumerate(written)}
    hosts = {id(x): _host(x) for x in leaves((args, kwargs)) if id(x) not in places}

    def run() -> list[Tensor]:
        made = [torch.empty(0, dtype=x.dtype) for x in written]
        host_args, host_kwargs = mapped(
            lambda x: made[places[id(x)]] if id(x) in places else hosts[id(x)], (args, kwargs)
        )
        op(*host_args, **host_kwargs)
        return made

    results = []
    for x, found in zip(written, run()):
        there = torch.empty_strided(found.size(), found.stride(), dtype=found.dtype, device=x.device)
        results.append(MEMORY.host(there))
        results[-1].copy_(found)
        x.set_(there.untyped_storage(), 0, there.size(), there.stride())
    if launch.graph is not None:

        def again() -> None:
            for into, value in zip(results, run()):
                into.copy_(value)

        launch.graph.add(again)
    return written[0] if len(written) == 1 else tuple(written)


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for place, name in _schema(op).written:
        value = kwargs.get(name, args[place] if place < len(args) else None)
        found += [x for x in leaves(value) if isinstance(x, Tensor)]
    return found


def _one_device(op: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> int:
    """The index of the common device.

    Raises:
        RuntimeError: as in torch, for tensors on several devices.
    """
    devices = {x.device for x in tensors if x.is_cuda}
    elsewhere = [x for x in tensors if not x.is_cuda]
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices} ({op})")
    for x in elsewhere:
        if op in TAKES_HOST_INDEX and x.dtype in (torch.int64, torch.bool, torch.int32):
            note_wait(f"{op} with an index on the host")
        elif x.dim() or (torch.Tag.pointwise not in op.tags and op is not aten.fill_.Tensor):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{', '.join(map(str, sorted(devices, key=str)))} and cpu! ({op})"
            )
    if devices:
        return devices.pop().index
    device = kwargs.get("device")
    return _index(device)
