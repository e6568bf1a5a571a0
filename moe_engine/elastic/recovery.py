"""Recovery of a rank after the loss of other ranks: new groups, and a placement on surviving ranks.

The surviving ranks exchange their physical experts, compute the same plan, and copy experts from slot to slot; an
expert without a remaining replica is read from the checkpoint by its new rank.

Legend: L layers, MTP layers included; E experts, P physical experts (slots), G ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from moe_engine.elastic.groups import ElasticContext
from moe_engine.elastic.placement import plan_for_survivors
from moe_engine.errors import ConfigError
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.loader import LoadOptions, open_weights
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.expert_transfer import ExpertTransfer, Link, SlotMemory
from moe_engine.parallel.placement.balance import balancedness
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.moves import Chunk, plan_moves
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.policies import MIN_GAIN
from moe_engine.worker.eplb.eplb_planner import Planner
from moe_engine.worker.options import WorkerOptions
from moe_engine.worker.startup.expert_setup import moe_layers, mtp_moe_layers
from moe_engine.worker.startup.speculation_setup import mtp_layers
from moe_engine.worker.worker import Worker


@dataclass(frozen=True)
class Recovered:
    """Summary over all ranks: experts `copied` from slot to slot and `read` from the checkpoint.

    `balancedness`: of the new placement for recent counts, or for a uniform load without counts.
    """

    copied: int
    read: int
    balancedness: float


class SurvivorPlanner(Planner):
    """Plans EPLB of the live ranks, on its predecessor's thread."""

    def __init__(self, layout: ExpertLayout, policy: str, before: Planner, alive: Sequence[bool]) -> None:
        super().__init__(layout, policy, before.executor)
        self._alive = tuple(alive)

    def balancedness(self, placement: ExpertPlacement, counts: NDArray[np.int64]) -> float:
        return super().balancedness(placement.of_ranks(self._alive), counts)

    def place(self, counts: NDArray[np.int64], current: ExpertPlacement) -> ExpertPlacement:
        return plan_for_survivors(counts, self._layout, self._alive, current, self._policy, MIN_GAIN).placement


class RankRecovery:
    """Recovers a rank. `give_up` may be called from any thread, `go_on` runs on the worker's thread like a step.

    Args:
        worker: ready; on several ranks of an `ElasticWorld`.
        options: those that the worker was created with.
    """

    def __init__(self, worker: Worker, options: WorkerOptions) -> None:
        runner, config, control = worker.runner, options.model, worker.experts
        parallel = runner.shared.parallel
        self._layers: Mapping[int, MoE] = {**moe_layers(runner.model), **mtp_moe_layers(mtp_layers(runner))}
        kernel = next(iter(self._layers.values())).stored.kernel
        assert isinstance(parallel, ElasticContext) and config.moe is not None
        assert parallel.experts is not None and parallel.dispatcher is not None
        self.elastic = parallel.elastic
        self._world, self._dispatcher, self._tables = parallel.world, parallel.dispatcher, parallel.experts
        self._kernel, self._options, self._device = kernel, options, runner.stream.device
        self._layout = options.experts.layout(config.moe.num_experts, config.moe.num_groups, parallel.topology)
        self._policy = options.experts.policy
        self._recorder, self._balance, self._observed = control.recorder, control.balance, control.observed

    def give_up(self) -> None:
        """Aborts this rank's current collectives with `PeerLost`; later ones belong to the new group."""
        self.elastic.give_up()

    @torch.inference_mode()
    def go_on(self, alive: Sequence[bool]) -> Recovered:
        """Recovers with the ranks alive, which are torch's default group now; collective. Steps can run afterwards.

        Raises:
            PeerLost: another rank was lost meanwhile. CheckpointError: an expert cannot be read.
        """
        self.elastic.form(alive)
        self._dispatcher.renew()
        current = self._held_by_all()
        counts = np.ones((current.num_layers, current.num_experts), dtype=np.int64)
        if self._balance is not None:
            counted = self._balance.reset()
            counts[: len(counted)] += counted
        plan = plan_for_survivors(counts, self._layout, alive, current, self._policy)
        if plan.unplaced:
            raise ConfigError(f"{len(plan.unplaced)} experts have no place on {sum(alive)} ranks")
        copied, read = self._move(current, plan.placement)
        recovered = Recovered(copied, read, balancedness(plan.placement.of_ranks(alive), counts))
        if self._balance is not None:
            planner = SurvivorPlanner(self._layout, self._policy, self._balance.planner, alive)
            self._balance.restart(planner, self.elastic.places[0], recovered.balancedness)
        self._restart_counting(alive)
        self._world.barrier()
        return recovered

    def _restart_counting(self, alive: Sequence[bool]) -> None:
        """Aligns the pass numbers, as the aborted pass has begun on some ranks only."""
        if self._recorder is None or self._observed is None:
            return
        self._recorder.balance.go_on(alive)
        begun = torch.tensor([self._observed.passes], device=self._world.device)
        self._observed.passes = int(self._world.all_gather(begun).max())
        self._observed.is_reporting_rank = self.elastic.places[0] == self.elastic.rank

    def _held_by_all(self) -> ExpertPlacement:
        """The current placement, each rank's slots from its own table: other ranks' tables may be a move behind."""
        held = torch.tensor(self._tables.all_held, dtype=torch.int64, device=self._world.device)  # [L, P/G]
        of_ranks = self._world.all_gather(held).cpu().numpy()  # [G, L, P/G]
        table = of_ranks.transpose(1, 0, 2).reshape(held.shape[0], -1)
        whole = ExpertPlacement(table, self._layout.num_experts, self._layout.num_ranks)
        return whole.without_ranks(np.array(self.elastic.alive))

    def _move(self, current: ExpertPlacement, new: ExpertPlacement) -> tuple[int, int]:
        """(copied, read) experts over all ranks: all ranks have the same plan."""
        elastic, link = self.elastic, self.elastic.link()
        weights: WeightSource | None = None
        copied = read = 0
        for index, table in enumerate(current.physical_to_logical):
            self._update(index, table.tolist())
        for chunk in plan_moves(current, new):
            layer = self._layers.get(chunk.layer)
            if layer is not None:
                self._copy(chunk, layer, link)
                lost = [copy for copy in chunk.copies if copy.source is None]
                copied, read = copied + len(chunk.copies) - len(lost), read + len(lost)
                for copy in lost:
                    rank, slot = divmod(copy.dest, self._tables.slots_per_rank)
                    if rank == elastic.rank:
                        weights = weights or self._open_weights()
                        layer.stored.fill(weights, layer.weights, {copy.expert: [slot]})
            self._update(chunk.layer, chunk.table)
        return copied, read

    def _open_weights(self) -> WeightSource:
        options = self._options
        load = LoadOptions(options.dtype, self._device, options.load_format, options.dummy_seed)
        return open_weights(options.model_path, options.model, load)

    def _update(self, layer: int, table: Sequence[int]) -> None:
        if self._balance is not None:
            self._tables.update_layer(layer, table, self._balance.counter_of(layer))
        else:
            self._tables.update_layer(layer, table, self._recorder if layer < self._tables.num_layers else None)

    def _copy(self, chunk: Chunk, layer: MoE, link: Link) -> None:
        """Copies with new spare memory: transfers aborted by the loss may still write to the old."""
        copies = tuple(copy for copy in chunk.copies if copy.source is not None)
        if not copies:
            return
        memory = SlotMemory(self._kernel, {chunk.layer: layer.weights}, num_spare=1)
        transfer = ExpertTransfer(memory, link, self.elastic.rank, self._tables.slots_per_rank)
        transfer.begin([replace(chunk, copies=copies)])
        transfer.finish()
