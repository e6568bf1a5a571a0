"""Recovery of a rank after the loss of other ranks (elastic EP): new groups, and a placement on surviving ranks.

The surviving ranks exchange their physical experts, compute the same plan, and copy experts from slot to slot; an
expert without a remaining replica is read from the checkpoint by its new rank.

Legend: L layers, MTP layers included; E experts, P physical experts (slots), G ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_engine.errors import ConfigError
from moe_engine.kernels.experts.protocol import ExpertsKernel
from moe_engine.models.layers.moe import MoE
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.elastic import ElasticWorld
from moe_engine.parallel.expert_tables import ExpertTables
from moe_engine.parallel.expert_transfer import ExpertTransfer, Link, SlotMemory
from moe_engine.parallel.placement.balance import balancedness
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.moves import Chunk, plan_moves
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.survivors import plan_for_survivors
from moe_engine.worker.eplb.expert_control import ExpertControl


@dataclass(frozen=True)
class Recovered:
    """Summary over all ranks: experts `copied` from slot to slot and `read` from the checkpoint.

    `balancedness`: of the new placement for recent counts, or for a uniform load without counts.
    """

    copied: int
    read: int
    balancedness: float


class RankRecovery:
    """Recovers a rank. `give_up` may be called from any thread, `go_on` runs on the worker's thread like a step.

    Args:
        parallel: with an elastic world, a dispatcher and tables.
        layers: MoE layers, MTP layers included, by index.
        kernel: of the experts.
        layout: of the whole world.
        policy: EPLB algorithm, as for `plan_placement`.
        open_weights: opens the checkpoint again.
        control: has the recorder and EPLB manager, which use the tables.
    """

    def __init__(
        self,
        parallel: ParallelContext,
        layers: Mapping[int, MoE],
        kernel: ExpertsKernel,
        layout: ExpertLayout,
        policy: str,
        open_weights: Callable[[], WeightSource],
        control: ExpertControl,
    ) -> None:
        assert parallel.elastic is not None and parallel.experts is not None and parallel.dispatcher is not None
        self.elastic: ElasticWorld = parallel.elastic
        self._world, self._dispatcher = parallel.world, parallel.dispatcher
        self._tables: ExpertTables = parallel.experts
        self._layers, self._kernel = layers, kernel
        self._layout, self._policy = layout, policy
        self._open_weights = open_weights
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
            self._balance.restart(alive, recovered.balancedness)
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
        """(copied, read) experts over all ranks, as all ranks have the same plan."""
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
