"""Resolves ``--elastic-ep`` (serving continues after a loss of ranks). Obstacles are refused with the fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.parallel.dispatch.tables import DispatchChoice
from moe_engine.parallel.topology import Topology
from moe_engine.planning.resolution_log import Record

BACKENDS = ("all_to_all", "allgather", "shared_memory")
"""Dispatchers that can be rebuilt for the surviving ranks."""


@dataclass(frozen=True)
class Coverage:
    """Losses that the spare expert slots can absorb.

    `slots`: expert slots per rank and layer.
    """

    num_experts: int
    slots: int

    def covers(self, num_ranks: int) -> bool:
        """True if `num_ranks` ranks have slots for every expert."""
        return num_ranks * self.slots >= self.num_experts

    @property
    def fewest(self) -> int:
        """Ranks that have slots for every expert."""
        return -(-self.num_experts // self.slots)

    def redundant_needed(self, num_left: int, num_ranks: int) -> int:
        """Value of ``--ep-num-redundant-experts`` with which `num_left` of the ranks suffice."""
        return -(-self.num_experts // num_left) * num_ranks - self.num_experts


def resolve_elastic(
    args: EngineArgs,
    model: ModelConfig,
    topology: Topology,
    dispatch: DispatchChoice | None,
    device: str,
    record: Record,
) -> Coverage | None:
    """Which losses are covered; None without the flag.

    Raises:
        ConfigError: names the flag that prevents it and the fix.
    """
    if not args.parallel.elastic_ep:
        return None
    why_not = next(_obstacles(args, model, topology, dispatch, device), None)
    if why_not is not None:
        raise ConfigError(f"--elastic-ep: {why_not}")
    assert model.moe is not None
    redundant, size = args.experts.ep_num_redundant_experts, topology.tp_size
    coverage = Coverage(model.moe.num_experts, (model.moe.num_experts + redundant) // size)
    if not coverage.covers(size - 1):
        raise ConfigError(
            f"--elastic-ep: {size - 1} of {size} ranks have {(size - 1) * coverage.slots} slots for "
            f"{coverage.num_experts} experts, so no rank may be lost: "
            f"--ep-num-redundant-experts {coverage.redundant_needed(size - 1, size)} covers one"
        )
    fewest = coverage.fewest
    record.note("elastic_ep", True, f"{fewest} of {size} ranks have slots for all experts: {size - fewest} may be lost")
    return coverage


def _obstacles(
    args: EngineArgs, model: ModelConfig, topology: Topology, dispatch: DispatchChoice | None, device: str
) -> Iterator[str]:
    flags = args.parallel
    if not model.is_moe:
        yield f"{model.architecture} has no experts; leave it out"
    if topology.tp_size == 1:
        yield "there is one rank; give --tp-size 2 or more"
    if topology.attn_dp_size != topology.tp_size:
        yield (
            f"a group of {topology.attn_tp_size} ranks cannot run its requests without one of its ranks; give "
            f"--attn-dp-size {topology.tp_size}"
        )
    if dispatch is None or dispatch.row.name not in BACKENDS:
        name = "none" if dispatch is None else dispatch.row.name
        yield f"--moe-a2a-backend {name} does not support losing ranks; give {', '.join(BACKENDS)}"
    if args.model.delete_ckpt_after_loading:
        yield "experts of a lost rank are read from the checkpoint again; leave out --delete-ckpt-after-loading"
    if args.speculative.speculative_algorithm == "DSPARK" and model.moe_of(model.num_layers) != model.moe:
        yield (
            "draft layers with another number of experts than the model's layers cannot replace those of a lost rank; "
            "leave out --speculative-algorithm"
        )
    if args.disaggregation.disaggregation_mode != OFF:
        yield "a lost rank would end transfers of KV between servers; leave out --disaggregation-mode"
    if args.memory.enable_memory_saver:
        yield "a recovery reads weights that may be released; leave out --enable-memory-saver"
    if args.server.enable_return_hidden_states:
        yield "a request that changes its rank would repeat hidden states; leave out --enable-return-hidden-states"
    if args.server.enable_return_routed_experts:
        yield "a request that changes its rank would repeat experts; leave out --enable-return-routed-experts"
    if topology.cuts_dense:
        yield "dense layers are sharded over all ranks; give --moe-dense-tp-size 1"
    if not topology.enable_dp_lm_head:
        yield "the LM head is sharded over all ranks; give --enable-dp-lm-head"
    if topology.num_nodes > 1:
        yield f"several nodes are not supported (--nnodes {topology.num_nodes}); give --nnodes 1"
    if device != "cpu":
        yield f"ranks on {device} cannot leave a collective that a lost rank never enters; give --device cpu"
    if flags.enable_two_batch_overlap or flags.enable_single_batch_overlap:
        name = "two" if flags.enable_two_batch_overlap else "single"
        yield f"--enable-{name}-batch-overlap has dispatches in flight that cannot be aborted; leave it out"
