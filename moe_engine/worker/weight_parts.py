"""The parts of a rank's model whose weights can be read and replaced while serving."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from moe_engine.errors import CheckpointError, MoeEngineError
from moe_engine.kernels.ops.hashed_rows import HashedRows
from moe_engine.models.footprint import weights_of
from moe_engine.models.layers.decoder import Decoder, Reloadable
from moe_engine.models.loader import LoadOptions, OwnDrafts, gates_of, open_weights
from moe_engine.models.weights import WeightSource
from moe_engine.worker.eplb.expert_recording_model import ExpertRecordingModel
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.options import WorkerOptions
from moe_engine.worker.startup.speculation_setup import mtp_layers

Part = Decoder | OwnDrafts


def parts_of(runner: ModelRunner, exported: bool = False) -> list[Part]:
    """The model, and its MTP layers if they draft. A draft model with its own checkpoint is not included, nor are MTP
    layers from another checkpoint, unless `exported`.

    Raises:
        MoeEngineError: an external model.
    """
    model = runner.model
    inner = model.model if isinstance(model, ExpertRecordingModel) else model
    if not isinstance(inner, Decoder):
        raise MoeEngineError(f"{type(inner).__name__}: the weights of external models cannot be replaced")
    mtp = mtp_layers(runner)
    speculation = runner.speculation
    if mtp is None or (speculation is not None and speculation.config.draft_model_path and not exported):
        return [inner]
    return [inner, mtp]


def modules_of(parts: Iterable[Part], names: Iterable[str]) -> Iterator[Reloadable]:
    """The modules that hold these tensors."""
    wanted = tuple(names)
    for part in parts:
        for module in part.modules():
            if any(name.startswith(module.prefixes) for name in wanted):
                yield module


def structure_of(runner: ModelRunner, options: WorkerOptions) -> WeightSource:
    """A source that lists the weights kept quantized, with the dtype of the served routers.

    Raises:
        CheckpointError: the files no longer exist.
    """
    plain = not options.model.weight_format.has_kernel_formats
    load_format = "dummy" if plain else options.load_format
    load = LoadOptions(options.dtype, runner.stream.device, load_format, options.dummy_seed)
    source = open_weights(options.model_path, options.model, load)
    source.served_gates = gates_of(parts_of(runner))
    return source


def pairs(old: object, new: object) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of a module with those of its replacement.

    Raises:
        CheckpointError: they are stored in another form.
    """
    kept, read = list(weights_of(old)), list(weights_of(new))
    _check(old, [(a.shape, a.dtype) for a in kept] == [(b.shape, b.dtype) for b in read])
    return zip(kept, read)


def tables(old: object, new: object) -> Iterator[tuple[HashedRows, HashedRows]]:
    """The tables of n-grams of a module, which stay in their files, with those of its replacement.

    Raises:
        CheckpointError: as `pairs`.
    """
    for name, kept in getattr(old, "__dict__", {}).items():
        if isinstance(kept, HashedRows):
            read: HashedRows = getattr(new, name)
            _check(old, kept.layout == read.layout)
            yield kept, read


def _check(module: object, same: bool) -> None:
    if not same:
        raise CheckpointError(
            f"{type(module).__name__}: stored in another format than in the served checkpoint; restart the server with "
            "it"
        )


def distinct(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors with distinct memory."""
    seen: set[tuple[int, int]] = set()
    for tensor in tensors:
        key = tensor.data_ptr(), tensor.nbytes
        if key not in seen:
            seen.add(key)
            yield tensor
