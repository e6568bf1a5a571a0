"""Weights of some layers in host memory (``--cpu-offload-gb``): which layers, and their memory.

The layers are spread evenly, each at the end of its group, so that its weights are copied while the layers before it
compute. Two device buffers hold the layers in use (`kernels.weight_stream`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.kernels.workspaces import WEIGHT_BUFFERS
from moe_engine.models import sizes
from moe_engine.models.config import ModelConfig
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.tensors.model import attention_tensors, feed_forward_tensors
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.parallel.topology import Topology
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.memory.ledger import BUFFERS_ROW, GB, LedgerRow, gb
from moe_engine.planning.resolution_log import Record

FLAG = "--cpu-offload-gb"


@dataclass(frozen=True)
class WeightOffload:
    """`layers` whose weights wait in host memory, of `num_layers`. Bytes are of one rank: `largest_bytes` of one
    layer."""

    layers: tuple[int, ...] = ()
    num_layers: int = 0
    host_bytes: int = 0
    largest_bytes: int = 0

    @property
    def rows(self) -> tuple[LedgerRow, ...]:
        """Ledger rows of the device."""
        if not self.layers:
            return ()
        detail = f"{WEIGHT_BUFFERS} x {gb(self.largest_bytes)}: the layers in host memory take turns"
        return (LedgerRow(BUFFERS_ROW, WEIGHT_BUFFERS * self.largest_bytes, detail),)

    @property
    def host_rows(self) -> tuple[LedgerRow, ...]:
        """Ledger rows of the host's memory."""
        if not self.layers:
            return ()
        detail = f"{len(self.layers)} of {self.num_layers} layers ({FLAG}), page-locked"
        return (LedgerRow("weights", self.host_bytes, detail),)


NONE = WeightOffload()


def resolve_offload(
    args: EngineArgs,
    model: ModelConfig,
    machine: Machine,
    topology: Topology,
    experts: ExpertSettings,
    dtype_bytes: int,
    format: WeightFormat,
    ranks_per_node: int,
    record: Record,
) -> WeightOffload:
    """
    Args:
        machine: one rank's share. format: in which kernels hold the weights.

    Raises:
        ConfigError: names the flag, what contradicts it, and the fix.
    """
    asked = args.memory.cpu_offload_gb
    if not asked:
        return NONE
    for why in _obstacles(args, machine, experts):
        raise ConfigError(f"{FLAG} {asked:g} {why}")
    each = layer_bytes(model, dtype_bytes, topology, experts.num_redundant, format)
    chosen = _choose(each, int(asked * GB))
    least = next((n for n in range(1, len(each) + 1) if _saves(each, spread(len(each), n))), None)
    if least is None:
        raise ConfigError(
            f"{FLAG} {asked:g}: {len(each)} layers would take turns in {WEIGHT_BUFFERS} buffers of the largest layer, "
            "which saves no memory; leave it out"
        )
    if not _saves(each, chosen):
        needed = sum(each[i] for i in spread(len(each), least)) / GB
        raise ConfigError(
            f"{FLAG} {asked:g} holds {len(chosen)} layers, and {WEIGHT_BUFFERS} buffers of the largest one take their "
            f"place on the device: use at least {needed + 0.005:.2f} ({least} layers)"
        )
    found = WeightOffload(chosen, len(each), sum(each[i] for i in chosen), max(each[i] for i in chosen))
    needed, available = found.host_bytes * ranks_per_node, machine.host_bytes
    if available is not None and needed > available:
        ranks = f", {gb(found.host_bytes)} for each of {ranks_per_node} ranks" if ranks_per_node > 1 else ""
        raise ConfigError(
            f"{FLAG} {asked:g}: the weights of {len(chosen)} layers need {gb(needed)} of host memory{ranks}, and "
            f"{gb(available)} are available; use a smaller value"
        )
    reason = f"{len(chosen)} of {len(each)} layers in host memory, {gb(found.host_bytes)}"
    record.remark(f"{FLAG} {asked:g}: {reason}; every step reads them over the bus")
    return found


def layer_bytes(
    model: ModelConfig, dtype_bytes: int, topology: Topology, redundant_experts: int, format: WeightFormat
) -> list[int]:
    """Weights of each layer on one rank, without the norms between layers."""
    further = dtype_bytes, topology, redundant_experts, format
    rotary = sizes.tensor_bytes(model, (), *further)

    def of(layer: int, last: int | None) -> int:
        named = [spec.within(f"model.layers.{layer}") for spec in attention_tensors(model, layer)]
        if last is not None:
            specs = feed_forward_tensors(model, model.moe_layers[last], last)
            named += [spec.within(f"model.layers.{last}") for spec in specs]
        return sizes.tensor_bytes(model, named, *further) - rotary

    return [of(*block) for block in model.blocks]


def spread(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers at even distances, the last one included."""
    return tuple((place + 1) * num_layers // count - 1 for place in range(count))


def _choose(each: list[int], most: int) -> tuple[int, ...]:
    """The most layers whose weights fit into `most` bytes; () if none do."""
    for count in range(len(each), 0, -1):
        layers = spread(len(each), count)
        if sum(each[i] for i in layers) <= most:
            return layers
    return ()


def _saves(each: list[int], layers: tuple[int, ...]) -> bool:
    """True if the layers need more memory than the buffers in which they take turns."""
    found = [each[i] for i in layers]
    return sum(found) > WEIGHT_BUFFERS * max(found, default=0)


def _obstacles(args: EngineArgs, machine: Machine, experts: ExpertSettings) -> Iterator[str]:
    if machine.on_cpu:
        yield "on a CPU: the weights are in host memory already; leave it out"
    if args.parallel.enable_two_batch_overlap:
        yield "with --enable-two-batch-overlap: the halves of a step are at different layers; drop one"
    if experts.rebalance is not None:
        yield "with --enable-eplb: experts are moved within device memory; drop one"
    if args.backends.enable_torch_compile:
        yield "with --enable-torch-compile: compiled code holds the weights of a layer; drop one"
