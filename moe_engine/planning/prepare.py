"""Prepares a launch: locates the checkpoint, reads config.json, probes the machine and resolves the flags.

Imports no torch on a CPU, so that an invalid launch is refused in well under a second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF
from moe_engine.config.model import OTHER_FORMATS
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.gguf_container import SUFFIX, find_gguf
from moe_engine.models.checkpoint.tensor_header import WeightFile
from moe_engine.models.checkpoint_files import read_checkpoint, read_head, read_nextn
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config, read_fields
from moe_engine.models.header_check import check_head_headers, check_headers, check_nextn_headers, with_stored_format
from moe_engine.models.pooling import with_pooling
from moe_engine.models.tensors.vision import PREFIX as VISION
from moe_engine.parallel.recording.config import recorder_directory
from moe_engine.planning.flags.checkpoint_deletion import check_deletion
from moe_engine.planning.flags.resolve_storage import storage_settings
from moe_engine.planning.flags.template_parsers import with_template_parsers
from moe_engine.planning.inputs.checkpoint import CheckpointFacts, locate, sums
from moe_engine.planning.inputs.cluster_env import ClusterPlace, find_place
from moe_engine.planning.inputs.machine import Machine, probe_machine
from moe_engine.planning.memory.images import with_images
from moe_engine.planning.model.quantization import with_quantization
from moe_engine.planning.model.resolve_lora import read_adapters
from moe_engine.planning.remarks import unread_variables
from moe_engine.planning.resolve import resolve
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.planning.speculation.draft_model import load_draft, with_nextn
from moe_engine.planning.speculation.resolve_speculation import DraftModel
from moe_engine.planning.workload_profiles import resolve_profile
from moe_engine.processes.address_space import check_address_space
from moe_engine.processes.dist_secret import DistSecret, find_secret, open_to_others
from moe_engine.processes.runtime_dir import check_temporary

SEED_BITS = 30
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
OTHER_WEIGHTS = (".npz", ".ckpt")
SUMMING = ("linear", "experts", "attention")
"""Families whose results depend on the order of summation."""


def place_in_cluster() -> ClusterPlace | None:
    """The place of this process in a SLURM or torchrun launch, for a server; None without such a launcher."""
    return find_place(os.environ)


def prepare(args: EngineArgs, machine: Machine | None = None, *, place: ClusterPlace | None = None) -> ResolvedConfig:
    """Does the I/O that the pure `resolve` must not do, then resolves. Call it once, in the process that starts the
    engine.

    Args:
        place: of this process in a server on several machines.

    Raises:
        ConfigError: as `resolve`; or no such checkpoint, an unsupported model, missing or truncated weight files, or a
            named backend that cannot run here.
    """
    check_temporary()
    found = machine or probe_machine(args.model.device)
    folder = locate(
        args.model.model_path, args.model.revision, args.model.download_dir, weights=not found.device.elsewhere
    )
    model, draft = read_model(args, folder)
    folder = find_gguf(folder) or folder
    config_folder = folder if folder.is_dir() or folder.suffix == SUFFIX else folder.parent
    check_deletion(args, config_folder)
    args, remarks = with_template_parsers(args, config_folder)
    remarks = (*remarks, *unread_overrides(args, folder))
    files = None
    if reads_weights(args, config_folder, elsewhere=found.device.elsewhere):
        files = read_checkpoint(config_folder, args.model.load_format)
        model = with_stored_format(model, files)
    elif found.device.elsewhere and args.model.load_format != "dummy":
        remarks = (*remarks, f"no weight files in {config_folder}: the plan counts the weights by config.json")
    facts = checkpoint_facts(files, model, draft)
    exported = draft is not None and draft.is_nextn
    resolve_once = partial(
        resolve,
        model=model,
        machine=found,
        model_path=str(config_folder),
        checkpoint=facts,
        draft=draft,
        adapters=read_adapters(args, model),
        drawn_seed=secrets.randbits(SEED_BITS),
        place=place,
        dump_directory=recorder_directory(os.environ),
    )
    resolved = resolve_profile(args, model, found.device.kind, resolve_once)
    resolved = dataclasses.replace(_with_secret(resolved), storage=storage_settings(resolved.args, os.environ))
    if files is not None:
        uses_mtp = resolved.speculation is not None and resolved.speculation.uses_own_layers
        _check_weights(config_folder, files, model, uses_mtp and not exported)
        if draft is not None and exported:
            check_nextn_headers(draft.path, read_nextn(Path(draft.path), model.num_layers), model)
        elif draft is not None and draft.head is not None:
            check_head_headers(draft.path, read_head(Path(draft.path)), draft.head)
        elif draft is not None and resolved.draft_model is not None:
            draft_folder = Path(draft.path)
            _check_weights(draft_folder, read_checkpoint(draft_folder), draft.config)
    on_cpu = resolved.device == "cpu"
    if machine is None:  # else a plan for another machine
        check_address_space(resolved.ledger.total_bytes)
    if on_cpu and resolved.compiled.max_tokens and found.device.compiler is None:
        raise ConfigError(
            "--enable-torch-compile: on a CPU torch compiles with g++, which is not installed here; install it, or "
            "drop the flag"
        )
    more = _determinism_remarks(resolved) if on_cpu else _gpu_determinism_remarks(resolved)
    return dataclasses.replace(resolved, notes=(*resolved.notes, *remarks, *unread_variables(os.environ), *more))


def reads_weights(args: EngineArgs, folder: Path, elsewhere: bool) -> bool:
    """Whether a launch reads weight files. A plan for another machine (`elsewhere`) takes a bare config.json, or a
    folder without them."""
    if args.model.load_format == "dummy":
        return False
    has_weights = folder.is_dir() and any(each.suffix in WEIGHT_SUFFIXES for each in folder.iterdir())
    return has_weights or not elsewhere or folder.suffix == SUFFIX


def read_model(args: EngineArgs, folder: Path) -> tuple[ModelConfig, DraftModel | None]:
    """The model of a launch and the model that drafts for it, without weight files. `folder` may be a bare config.json.
    Raises ConfigError."""
    model = _read_alone(args, folder, json.loads(args.model.json_model_override_args))
    draft = load_draft(args, model)
    return with_nextn(model, draft), draft


def _read_alone(args: EngineArgs, folder: Path, overrides: Mapping[str, Any]) -> ModelConfig:
    model = load_model_config(folder, overrides)
    model = with_quantization(with_pooling(model, args.model.is_embedding), args)
    return with_images(model, args, folder if folder.is_dir() else folder.parent)


def unread_overrides(args: EngineArgs, folder: Path) -> tuple[str, ...]:
    """A line on the fields of `--json-model-override-args` that config.json does not have and no model's parser reads,
    as misspelled ones; none if there are no such fields. Raises ConfigError."""
    overrides = json.loads(args.model.json_model_override_args)
    file, stored = read_fields(folder)
    unread = []
    for name in overrides.keys() - stored.keys():
        with suppress(ConfigError):  # the model needs the field
            others = {other: value for other, value in overrides.items() if other != name}
            with_it, without = (_read_alone(args, folder, fields) for fields in (overrides, others))
            if dataclasses.replace(with_it, raw=None) == dataclasses.replace(without, raw=None):
                unread.append(name)
    if not unread:
        return ()
    return (f"--json-model-override-args: no effect of {', '.join(sorted(unread))}: {file.name} has no such field",)


def checkpoint_facts(
    files: Mapping[str, WeightFile] | None, model: ModelConfig, draft: DraftModel | None
) -> CheckpointFacts | None:
    """Sums over the headers of a launch's weight files, those of an exported MTP layer included; None without files."""
    if not files:
        return None
    facts = sums(files, model.num_layers, model.weight_format, _unloaded(model))
    if draft is None or not draft.is_nextn:
        return facts
    drafted = sums(read_nextn(Path(draft.path), model.num_layers), model.num_layers)
    scales = {**facts.latent_scales, **drafted.latent_scales}
    return dataclasses.replace(facts, mtp_bf16_gates=drafted.mtp_bf16_gates, latent_scales=scales)


def _unloaded(model: ModelConfig) -> str | None:
    """Beginning of the names of tensors that are not loaded: those of a vision tower (--language-model-only)."""
    return VISION if model.vision is None else None


def secret_of_nodes(args: EngineArgs) -> DistSecret | None:
    """The secret from the flag or the environment. Raises as `find_secret`."""
    return find_secret(os.environ, args.parallel.dist_secret_file)


def _with_secret(config: ResolvedConfig) -> ResolvedConfig:
    """Adds the secret shared by the nodes, or by prefill and decode servers; other launches have no sockets that need
    it."""
    path = config.args.parallel.dist_secret_file
    if config.parallel.num_nodes == 1 and config.args.disaggregation.disaggregation_mode == OFF:
        remarks = ["--dist-secret-file: no effect (one node has no sockets to others)"] if path is not None else []
        return dataclasses.replace(config, notes=(*config.notes, *remarks))
    secret = secret_of_nodes(config.args)
    remark = open_to_others(path) if path is not None else None
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, secret=secret),
        notes=(*config.notes, remark) if remark is not None else config.notes,
    )


def _determinism_remarks(config: ResolvedConfig) -> Iterator[str]:
    """Limits of --enable-deterministic-inference with these kernels."""
    if not config.args.backends.enable_deterministic_inference:
        return
    loose = [family for family in SUMMING if config.kernels.model.row(family).name == "torch"]
    if loose:
        yield (
            f"--enable-deterministic-inference with torch kernels for {', '.join(loose)}: the same steps give the same "
            "bits, but torch's order of summation depends on the batch size, so other requests of a batch may change "
            "the last bits of a result; the cpu kernels are batch-invariant"
        )
    elif config.dtype != "float32":
        yield (
            f"--enable-deterministic-inference in {config.dtype}: bitwise equality is guaranteed in float32 "
            "(--dtype float32), in shorter formats only for the same steps"
        )


def _gpu_determinism_remarks(config: ResolvedConfig) -> Iterator[str]:
    """Cost and limits of --enable-deterministic-inference on a GPU."""
    if not config.args.backends.enable_deterministic_inference:
        return
    yield (
        "--enable-deterministic-inference on a GPU: uses only this project's kernels, whose order of summation does "
        "not depend on the batch; slower than libraries, and without CUDA graphs"
    )
    if config.parallel.topology.tp_size > 1:
        yield (
            "--enable-deterministic-inference on several GPUs: NCCL's order of summation may depend on the size of the "
            "step; bitwise equality is guaranteed for the same steps only"
        )


def _check_weights(
    folder: Path, files: Mapping[str, WeightFile], model: ModelConfig, include_mtp: bool = False
) -> None:
    """Checks the weight files by their headers, without reading weights."""
    if not files:
        if other := next((path.name for path in sorted(folder.iterdir()) if path.suffix in OTHER_WEIGHTS), None):
            raise NotAvailableYet(
                f"{folder}: has {other}, and no *.safetensors or *.bin; not supported yet: {OTHER_FORMATS}; convert "
                "the weights to safetensors"
            )
        raise ConfigError(
            f"{folder}: no *.safetensors files (or *.bin) next to config.json; give the folder of a complete "
            "checkpoint, or use --load-format dummy for random weights"
        )
    check_headers(folder, files, model, include_mtp)
