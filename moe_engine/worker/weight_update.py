"""Replacement of a rank's weights by another checkpoint of the same architecture, in two phases.

`stage` reads the checkpoint into new memory in the kernels' layouts; the weights in force are not touched. `commit`
copies it into the tensors in force, whose addresses stay: CUDA graphs and whole-layer calls hold them. Both run between
steps, without a request: the front end drains the engine before. A draft model of its own checkpoint stays.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError, MoeEngineError
from moe_engine.kernels.host_memory import host_memory
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.footprint import weights_of
from moe_engine.models.header_check import check_headers
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.loader import reload
from moe_engine.models.mtp import MTPLayers
from moe_engine.models.pooling import with_pooling
from moe_engine.worker.eplb.expert_control import ExpertControl
from moe_engine.worker.eplb.expert_recording_model import ExpertRecordingModel
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.options import WorkerOptions
from moe_engine.worker.speculation.build import mtp_layers

MAY_DIFFER = ("source", "raw", "checkpoint_dtype", "file_layers")
"""Fields of a config that do not determine the weights' layout or the use of the model."""


class CheckpointArgs(msgspec.Struct, forbid_unknown_fields=True):
    """`model_path`: a local folder on every node. `load_format`: None: that of the launch."""

    model_path: str
    load_format: str | None = None


class WeightUpdate:
    """The update of one rank. Every method runs on the worker's thread, between steps.

    Attributes:
        refusal: why this rank's weights cannot be replaced, or None.
    """

    def __init__(self, runner: ModelRunner, options: WorkerOptions, experts: ExpertControl) -> None:
        self._runner, self._options, self._experts = runner, options, experts
        self._staged: list[tuple[Tensor, Tensor]] | None = None
        self.refusal: str | None = None

    def check(self, args: CheckpointArgs) -> dict[str, str | int]:
        """Compares config.json and the weight files' headers with the model; reads no weight, changes nothing.

        Returns:
            host, and bytes of memory on it that `stage` needs and that are available.

        Raises:
            MoeEngineError: names the file, tensor or field at fault.
        """
        if self.refusal is not None:
            raise MoeEngineError(self.refusal)
        parts = self._parts()
        if self._format(args) != "dummy":
            served = self._options.model
            config = with_pooling(load_model_config(args.model_path), served.pooling is not None)
            _compare(config, served)
            files = read_checkpoint(Path(args.model_path))
            if not files:
                raise CheckpointError(f"{args.model_path}: no *.safetensors files next to config.json")
            check_headers(args.model_path, files, config, len(parts) > 1)
        tensors = list(_distinct(tensor for part in parts for tensor in weights_of(part)))
        needed = sum(tensor.nbytes for tensor in tensors)
        self._check_device(max((tensor.nbytes for tensor in tensors), default=0))
        return {"host": socket.gethostname(), "needed": needed, "available": host_memory().available_bytes}

    def stage(self, args: CheckpointArgs) -> None:
        """Reads the checkpoint into new memory: on a GPU module by module, each copied to the host. Experts are read in
        the placement in force, which does not change before `commit`, as no pass runs.

        Raises:
            MoeEngineError: the checkpoint cannot be read or does not fit; nothing is staged then.
        """
        self._staged = None
        if self._experts.balance is not None:
            self._experts.balance.settle()
        options, device = self._options, self._runner.stream.device
        staged: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for part in self._parts():
            pairs = reload(
                part, args.model_path, options.model, options.dtype, device, self._format(args), options.dummy_seed
            )
            for old, new in pairs:
                for kept, read in _pairs(old, new):
                    staged.setdefault((kept.data_ptr(), kept.nbytes), (kept, read.cpu()))
        self._staged = list(staged.values())

    def commit(self) -> None:
        """Copies the staged weights over those in force.

        Raises:
            MoeEngineError: nothing is staged.
        """
        if self._staged is None:
            raise MoeEngineError("no weights are staged")
        staged, self._staged = self._staged, None
        with torch.no_grad():
            for kept, read in staged:
                kept.copy_(read)
        self._runner.stream.synchronize()

    def discard(self) -> None:
        """Drops staged weights, if any."""
        self._staged = None

    def _parts(self) -> list[Decoder | MTPLayers]:
        model = self._runner.model
        inner = model.model if isinstance(model, ExpertRecordingModel) else model
        if not isinstance(inner, Decoder):
            raise MoeEngineError(f"{type(inner).__name__}: the weights of external models cannot be replaced")
        mtp = mtp_layers(self._runner)
        return [inner] if mtp is None else [inner, mtp]

    def _format(self, args: CheckpointArgs) -> str:
        return args.load_format or self._options.load_format

    def _check_device(self, largest: int) -> None:
        """On a GPU the modules are prepared one by one, with the memory of the largest one twice."""
        stream = self._runner.stream
        if not stream.asynchronous:
            return
        free = stream.free_bytes()
        if free < 2 * largest:
            raise MoeEngineError(
                f"{stream.device}: {free / 2**30:.2f} GiB are free and preparing the largest module needs "
                f"{2 * largest / 2**30:.2f} GiB; start with a smaller --mem-fraction-static"
            )


def _compare(config: ModelConfig, served: ModelConfig) -> None:
    differs = [
        field.name
        for field in fields(ModelConfig)
        if field.name not in MAY_DIFFER and getattr(config, field.name) != getattr(served, field.name)
    ]
    if differs:
        some = "; ".join(f"{name}: {getattr(config, name)}, served {getattr(served, name)}" for name in differs[:3])
        raise ConfigError(f"{config.source}: not the architecture of the served model: {some}")


def _pairs(old: object, new: object) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of a module with those of its replacement."""
    kept, read = list(weights_of(old)), list(weights_of(new))
    same = len(kept) == len(read) and all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(kept, read))
    if not same:
        raise CheckpointError(
            f"{type(old).__name__}: stored in another format than in the served checkpoint; restart the server with it"
        )
    return zip(kept, read)


def _distinct(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    seen: set[tuple[int, int]] = set()
    for tensor in tensors:
        key = tensor.data_ptr(), tensor.nbytes
        if key not in seen:
            seen.add(key)
            yield tensor
