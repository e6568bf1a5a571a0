"""Launches on hardware that this machine does not have: resolved as `serve` does, from a bare config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.gguf_container import find_gguf
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import read_fields
from moe_engine.models.config_sections.fields import merge
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.sizes import bytes_per_weight
from moe_engine.planning.inputs.checkpoint import CheckpointFacts, locate
from moe_engine.planning.model.resolve_dtype import DTYPE_BYTES
from moe_engine.planning.prepare import checkpoint_facts, read_model, reads_weights
from moe_engine.planning.resolve import resolve
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.planning.speculation.resolve_speculation import DraftModel
from moe_engine.planning.workload_profiles import resolve_profile
from moe_engine.tuning.costs.form import Form, Held, Weights
from moe_engine.tuning.hardware.table import Cluster
from moe_engine.tuning.planner.candidate import LEADER


@dataclass(frozen=True)
class Subject:
    """The model of a launch, the model that drafts for it, and sums over the weight files, if there are any."""

    model: ModelConfig
    draft: DraftModel | None = None
    checkpoint: CheckpointFacts | None = None
    folder: str = ""
    """Local folder of the model; empty: that of `--model-path`."""


def config_of(args: EngineArgs) -> tuple[Path, Mapping[str, Any], str]:
    """The model's folder or config.json, its fields with the overrides of the flags, and the name of the file. Of a hub
    model only the small files are downloaded. Raises ConfigError."""
    folder = locate(args.model.model_path, args.model.revision, args.model.download_dir, weights=False)
    file, fields = read_fields(folder)
    return folder, merge(fields, json.loads(args.model.json_model_override_args)), str(file)


def subject_of(args: EngineArgs, folder: Path) -> Subject:
    """As `serve` reads it; a folder without weight files is planned from config.json.

    Raises:
        ConfigError: this engine does not serve the model.
        CheckpointError: weight files are damaged, or some are missing.
    """
    model, draft = read_model(args, folder)
    folder = find_gguf(folder) or folder
    files = read_checkpoint(folder, args.model.load_format) if reads_weights(args, folder, elsewhere=True) else None
    return Subject(model, draft, checkpoint_facts(files, model, draft), str(folder))


def resolve_for(args: EngineArgs, subject: Subject, cluster: Cluster) -> ResolvedConfig:
    """`resolve` with the choices of --workload-profile, for the first node of another machine. Raises as `resolve`."""
    more: dict[str, Any] = {"device": "cuda"}
    nodes = -(-args.parallel.tp_size // cluster.gpu.gpus_per_node)
    if nodes > 1 and "nnodes" not in args.given:
        more |= {"nnodes": nodes, "dist_init_addr": LEADER}
    launch = partial(
        resolve, model=subject.model, machine=cluster.machine, draft=subject.draft, checkpoint=subject.checkpoint,
        model_path=subject.folder,
    )  # fmt: skip
    return resolve_profile(args.replace(**more), subject.model, "cuda", launch)


def form_of(config: ResolvedConfig) -> Form:
    """The ranks of a launch, without the options of a form."""
    topology = config.parallel.topology
    return Form(topology.tp_size, topology.attn_dp_size, topology.ep_size, topology.travels)


def plain(form: Form) -> Form:
    """Forms with the same kernels have the same plain form."""
    return replace(form, redundant=0, overlap=False, dense_whole=False, host_bytes=0)


def held_by(config: ResolvedConfig) -> Held:
    """Weights and dispatched tokens by the tables from which the launch selects its kernels."""
    kept = config.model.weight_format.held_by(config.kernels.model.multiplied)
    experts, other = bytes_per_weight(config.model, DTYPE_BYTES[config.dtype], config.parallel.topology, kept)
    fp8 = frozenset[str]()
    if isinstance(kept, BlockFP8Format):
        fp8 = kept.in_blocks
    elif isinstance(kept, SchemeFormat) and not kept.on_gpu:
        fp8 = kept.kept  # other kept weights are of 4 bits, decoded to bf16
    held = {"experts": Weights(experts, "bf16"), "linear": Weights(other, "bf16")}
    held |= {family: replace(held[family], units="fp8") for family in fp8 & held.keys()}
    dispatch = "fp8" if config.parallel.dispatch_fp8 else "bf16"
    return Held(held["experts"], held["linear"], dispatch, _shared_slots(config))


def _shared_slots(config: ResolvedConfig) -> bool:
    """Whether shared experts are slots of the routed ones, as `models.layers.feed_forward.moe` decides."""
    moe, topology, args = config.model.moe, config.parallel.topology, config.args
    apart = args.parallel.disable_shared_experts_fusion or config.lora is not None
    if moe is None or apart or topology.travels or args.experts.ep_num_redundant_experts:
        return False
    return moe.num_shared_slots(topology.ep_size) > 0
