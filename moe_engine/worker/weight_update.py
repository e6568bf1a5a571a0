"""Replacement of a rank's weights by another checkpoint of the same architecture, or of some tensors, in two phases.

`stage` and `stage_tensors` read new weights into new memory in the kernels' layouts; the weights in force are not
touched. `commit` copies them into the tensors in force, whose addresses do not change: CUDA graphs and whole-layer
calls hold them. Both run between steps, without a request: the frontend drains the engine first. A draft model with
its own checkpoint is not replaced.

A module of which only some tensors are replaced is built twice, from the tensors and from a mask of the same names
(`models.partial_weights`): bytes outside the mask are unchanged.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError, MoeEngineError
from moe_engine.kernels.host_memory import host_memory
from moe_engine.kernels.ops.hashed_rows import HashedRows
from moe_engine.models.checkpoint.tensor_header import WeightFile
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.footprint import weights_of
from moe_engine.models.formats.online import online_format
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.header_check import check_headers, with_stored_format
from moe_engine.models.loader import LoadOptions, reload
from moe_engine.models.partial_weights import ReceivedWeights, mask_source
from moe_engine.models.pooling import with_pooling
from moe_engine.models.received_tensors import ReceivedTensors, files_of, header_of
from moe_engine.models.tensor_names import TensorNames
from moe_engine.models.tensors.model import table_names
from moe_engine.worker.eplb.expert_control import ExpertControl
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.options import WorkerOptions
from moe_engine.worker.weight_groups import GroupName, ReceiveArgs, WeightGroups
from moe_engine.worker.weight_parts import Part, distinct, modules_of, pairs, parts_of, structure_of, tables
from moe_engine.worker.weight_read import WeightRead

MAY_DIFFER = ("source", "raw", "checkpoint_dtype", "file_layers", "latent_scales")
"""Fields of a config that do not determine the weights' layout or the use of the model."""
TENSORS = "the tensors"
"""The source of tensors without a checkpoint, in messages."""


class CheckpointArgs(msgspec.Struct, forbid_unknown_fields=True):
    """`model_path`: a local folder on every node. `load_format`: None: that of the launch."""

    model_path: str
    load_format: str | None = None


class TensorArgs(msgspec.Struct, forbid_unknown_fields=True):
    """`paths`: folders with a safetensors file of whole tensors each: one for all ranks, or one by rank."""

    paths: list[str]


@dataclass(frozen=True)
class _Staged:
    """`mask`: the bytes that are replaced; None: all."""

    kept: Tensor
    read: Tensor
    mask: Tensor | None = None

    def copy(self) -> None:
        if self.mask is None:
            self.kept.copy_(self.read)
            return
        merged = torch.where(self.mask, _bytes_of(self.read), _bytes_of(self.kept))
        self.kept.copy_(merged.view(self.kept.dtype).view(self.kept.shape))


@dataclass(frozen=True)
class _StagedTable:
    kept: HashedRows
    read: HashedRows

    def copy(self) -> None:
        self.kept.follow(self.read)


class WeightUpdate:
    """The update of one rank. Every method runs on the worker's thread, between steps.

    Attributes:
        refusal: the reason why this rank's weights cannot be replaced, or None.
        reading: reads single weights by name.
        groups: groups with trainers.
    """

    def __init__(self, runner: ModelRunner, options: WorkerOptions, experts: ExpertControl) -> None:
        self._runner, self._options, self._experts = runner, options, experts
        self._staged: Sequence[_Staged | _StagedTable] | None = None
        self.refusal: str | None = None
        self.reading = WeightRead(runner, options, experts)
        self.groups = WeightGroups(runner)

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
            files = read_checkpoint(Path(args.model_path))
            if not files:
                raise CheckpointError(f"{args.model_path}: no *.safetensors files next to config.json")
            config = _compare(with_stored_format(config, files), served)
            check_headers(args.model_path, files, config, len(parts) > 1)
        return self._memory([tensor for part in parts for tensor in weights_of(part)])

    def stage(self, args: CheckpointArgs) -> None:
        """Reads the checkpoint into new memory: on a GPU module by module, each copied to the host. Experts are read in
        the placement in force, which does not change before `commit`, as no pass runs.

        Raises:
            MoeEngineError: the checkpoint cannot be read or does not fit; nothing is staged then.
        """
        self._begin()
        options, device = self._options, self._runner.stream.device
        load = LoadOptions(options.dtype, device, self._format(args), options.dummy_seed, finite=True)
        staged: dict[tuple[int, int], _Staged] = {}
        mapped: list[_StagedTable] = []
        for part in self._parts():
            for old, new in reload(part, args.model_path, options.model, load):
                mapped += (_StagedTable(*both) for both in tables(old, new))
                for kept, read in pairs(old, new):
                    staged.setdefault((kept.data_ptr(), kept.nbytes), _Staged(kept, read.cpu()))
        self._staged = [*staged.values(), *mapped]

    def check_tensors(self, args: TensorArgs) -> dict[str, str | int]:
        """`check` of some tensors: compares names, shapes and dtypes with the model; reads no data, changes nothing."""
        path = self._path(args)
        files = self._some(path)
        if not files:
            raise CheckpointError(
                f"{socket.gethostname()} does not see the tensors, which are passed in files of the server's node; "
                "use update_weights_from_disk with a folder that every node can read"
            )
        return self._check_files(files)

    def stage_tensors(self, args: TensorArgs) -> None:
        """`stage` of some tensors: builds the modules that hold them. Raises MoeEngineError, as `stage`."""
        path = self._path(args)
        self._stage_files(self._some(path), path)

    def check_received(self, args: ReceiveArgs) -> dict[str, str | int]:
        """`check_tensors` for tensors that a trainer is about to broadcast."""
        if not len(args.names) == len(args.dtypes) == len(args.shapes) or len(set(args.names)) < len(args.names):
            raise MoeEngineError("names, dtypes and shapes: lists of the same length, every name once")
        self.groups.member(args.group_name)
        kinds = zip(args.dtypes, args.shapes)
        found = {name: header_of(dtype, shape)[1] for name, (dtype, shape) in zip(args.names, kinds)}
        facts = self._check_files(files_of(TENSORS, found, self._options.model.num_layers))
        received = sum(header.num_bytes for header in found.values())
        return facts | {"needed": int(facts["needed"]) + received}

    def stage_received(self, args: GroupName) -> None:
        """`stage_tensors` for tensors received from a trainer."""
        taken = self.groups.take(args.group_name)
        received = ReceivedTensors(TENSORS, taken, self._options.model.num_layers)
        self._stage_files(received.files, received)

    def _some(self, path: Path) -> dict[str, WeightFile]:
        return read_checkpoint(path, num_layers=self._options.model.num_layers)

    def _check_files(self, files: Mapping[str, WeightFile]) -> dict[str, str | int]:
        if self.refusal is not None:
            raise MoeEngineError(self.refusal)
        parts = self._parts()
        names = TensorNames(self._options.model, len(parts) > 1).check(TENSORS, files)
        modules = modules_of(parts, names | table_names(files))
        return self._memory([tensor for module in modules for tensor in weights_of(module.module)], copies=2)

    def _stage_files(self, files: Mapping[str, WeightFile], source: Path | ReceivedTensors) -> None:
        self._begin()
        parts = self._parts()
        names = TensorNames(self._options.model, len(parts) > 1).check(TENSORS, files)
        structure = structure_of(self._runner, self._options)
        received = ReceivedWeights(source, structure, self._options.model.num_layers)
        marks = mask_source(structure, names)
        staged: dict[tuple[int, int], _Staged] = {}
        mapped: list[_StagedTable] = []
        with torch.no_grad():
            for module in modules_of(parts, names | table_names(files)):
                received.missed, received.tables = False, set()
                built = module.build(received)
                if len(received.tables) > 1:
                    raise CheckpointError(f"{TENSORS}: a part of a table of n-grams; send all tensors of a table")
                if True in received.tables:
                    mapped += (_StagedTable(*both) for both in tables(module.module, built))
                new = list(pairs(module.module, built))
                masks: list[Tensor | None] = [None] * len(new)
                if received.missed:
                    masks = [_bytes_of(mask) != 0 for _, mask in pairs(module.module, module.build(marks))]
                for (kept, read), mask in zip(new, masks):
                    staged.setdefault((kept.data_ptr(), kept.nbytes), _Staged(kept, read.cpu(), mask))
        self._staged = [*staged.values(), *mapped]

    def commit(self) -> None:
        """Copies the staged weights over those in force.

        Raises:
            MoeEngineError: nothing is staged.
        """
        if self._staged is None:
            raise MoeEngineError("no weights are staged")
        staged, self._staged = self._staged, None
        with torch.no_grad():
            for part in staged:
                part.copy()
        if self._runner.forward.images is not None:
            self._runner.forward.images.forget()
        if self._runner.fused is not None:
            self._runner.fused.forget_prefix()
        self._runner.stream.synchronize()

    def discard(self) -> None:
        """Drops staged weights, if any."""
        self._staged = None

    def refuse(self, reason: str | None) -> None:
        """Refuses to replace and read weights from now on; None: permits both again."""
        self.refusal = self.reading.refusal = reason

    def settle(self) -> None:
        """Completes expert moves: experts keep their places until the next pass."""
        if self._experts.balance is not None:
            self._experts.balance.settle()

    def _begin(self) -> None:
        """Prepares for the staging of new weights."""
        self._staged = None
        self.settle()

    def _parts(self) -> list[Part]:
        return parts_of(self._runner)

    def _path(self, args: TensorArgs) -> Path:
        parallel = self._runner.shared.parallel
        if len(args.paths) not in (1, parallel.world_size):
            raise MoeEngineError(
                f"serialized_named_tensors has {len(args.paths)} items; send one for all ranks, or one for each of the "
                f"{parallel.world_size}"
            )
        return Path(args.paths[parallel.world_rank if len(args.paths) > 1 else 0])

    def _memory(self, tensors: list[Tensor], copies: int = 1) -> dict[str, str | int]:
        """The result of `check` for staging these tensors."""
        sizes = [tensor.nbytes for tensor in distinct(tensors)]
        self._check_device(max(sizes, default=0))
        available = host_memory().available_bytes
        return {"host": socket.gethostname(), "needed": copies * sum(sizes), "available": available}

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


def _compare(config: ModelConfig, served: ModelConfig) -> ModelConfig:
    """The config with the settings of the launch. Raises ConfigError: it is another architecture."""
    if served.vision is None:
        config = replace(config, vision=None)  # --language-model-only
    elif config.vision is not None:  # the largest image is a setting of the processor
        config = replace(config, vision=replace(config.vision, max_patches=served.vision.max_patches))
    online = online_format(served.weight_format.name)
    if config.weight_format == PLAIN and online and online.of_dtype(config.checkpoint_dtype) == served.weight_format:
        config = replace(config, weight_format=served.weight_format)  # --quantization
    if (short := config.rope.within(config.rope.original_max_position)) == served.rope:
        config = replace(config, rope=short)  # --context-length
    differs = [
        field.name
        for field in fields(ModelConfig)
        if field.name not in MAY_DIFFER and getattr(config, field.name) != getattr(served, field.name)
    ]
    if differs:
        some = "; ".join(f"{name}: {getattr(config, name)}, served {getattr(served, name)}" for name in differs[:3])
        raise ConfigError(f"{config.source}: not the architecture of the served model: {some}")
    return config


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on the host."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)
