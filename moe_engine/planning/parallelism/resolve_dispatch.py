"""The dispatcher of a launch, and the flags that need one."""

from __future__ import annotations

from moe_engine.config.args import EngineArgs
from moe_engine.config.parallel import ParallelArgs
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.parallel.dispatch.tables import DispatchChoice, Place, choose
from moe_engine.parallel.topology import Topology
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.resolution_log import Record

FP8_BLOCK = 128
"""Channels that share a scale."""


def dispatch_backend(args: EngineArgs) -> str:
    flags = args.parallel
    if not flags.enable_deepep_moe:
        return flags.moe_a2a_backend
    if flags.moe_a2a_backend not in ("none", "deepep"):
        raise ConfigError(
            f"--enable-deepep-moe and --moe-a2a-backend {flags.moe_a2a_backend} name two dispatchers; drop one"
        )
    return "deepep"


def resolve_dispatch(
    flags: ParallelArgs, topology: Topology, model: ModelConfig, machine: Machine, record: Record
) -> DispatchChoice | None:
    """The dispatcher, or None: all ranks process all tokens.

    Raises:
        ConfigError: a dispatcher that cannot run here, or flags that it excludes.
    """
    dispatch = None
    if topology.travels:
        moe = model.moe
        assert moe is not None
        place = Place(
            machine.device, topology.tp_size, topology.num_nodes, machine.unlinked, flags.deepep_version, moe.top_k,
            model.routed_size, moe.num_experts,
        )  # fmt: skip
        dispatch = _choose(topology, place, flags, record)
    _check_overlap(flags, dispatch is not None)
    if flags.enable_two_batch_overlap and model.shortcut:
        raise ConfigError(
            f"--enable-two-batch-overlap: experts of {model.architecture} overlap with the dense layers; use "
            "--enable-single-batch-overlap"
        )
    _check_fused(flags, dispatch)
    if flags.moe_dispatch_dtype == "fp8" and (dispatch is None or model.routed_size % FP8_BLOCK):
        why = "no --moe-a2a-backend" if dispatch is None else f"hidden size {model.routed_size}"
        raise ConfigError(
            "--moe-dispatch-dtype fp8 needs a --moe-a2a-backend, and a hidden size of whole blocks of 128 channels: "
            f"{why}"
        )
    return dispatch


def _choose(topology: Topology, place: Place, flags: ParallelArgs, record: Record) -> DispatchChoice:
    try:
        choice = choose(place, topology.moe_a2a_backend, flags.deepep_mode)
    except ValueError as error:
        raise ConfigError(f"--moe-a2a-backend {topology.moe_a2a_backend}: {error}") from None
    if topology.moe_a2a_backend == "auto":
        record.note("moe_a2a_backend", choice.row.name, choice.reason)
    return choice


def _check_fused(flags: ParallelArgs, dispatch: DispatchChoice | None) -> None:
    """Raises ConfigError for flags that a fused exchange excludes."""
    if dispatch is None or not dispatch.row.fused:
        return
    name = f"--moe-a2a-backend {dispatch.row.name}"
    if flags.enable_two_batch_overlap:
        raise ConfigError(f"--enable-two-batch-overlap with {name}: its one buffer holds the tokens of one batch")
    if flags.moe_dispatch_dtype == "bf16":
        raise ConfigError(f"--moe-dispatch-dtype bf16 with {name}, which sends FP8: leave it out")


def _check_overlap(flags: ParallelArgs, travels: bool) -> None:
    for flag, asked in (
        ("--enable-two-batch-overlap", flags.enable_two_batch_overlap),
        ("--enable-single-batch-overlap", flags.enable_single_batch_overlap),
    ):
        if asked and not travels:
            raise ConfigError(f"{flag} overlaps computation with dispatch, and there is none: add --moe-a2a-backend")
    if flags.enable_single_batch_overlap and flags.disable_shared_expert_overlap:
        raise ConfigError("--enable-single-batch-overlap with --disable-shared-expert-overlap: drop one")
    if not 0 <= flags.tbo_token_distribution_threshold <= 0.5:
        raise ConfigError(
            f"--tbo-token-distribution-threshold {flags.tbo_token_distribution_threshold:g}: must be between 0 and 0.5"
        )
