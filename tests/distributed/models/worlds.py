"""A rank in these tests: joins a topology, loads its part of a model, runs the script."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from moe_engine.kernels.device import cpu_device
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.quantization.protocol import ActivationFormat
from moe_engine.models.config_file import load_model_config
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.models.loader import LoadOptions, load_model, load_mtp
from moe_engine.models.sharding import dispatch_shape, local_config
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.context import ParallelContext, join, with_dispatcher
from moe_engine.parallel.dispatch.tables import Place, choose
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.parallel.topology import Topology
from moe_engine.parallel.uneven import sum_over
from tests.distributed.models import script
from tests.models.stepper import Stepper, make_backends, make_kv

MAX_TOKENS, DECODE_TOKENS = 48, 1  # so that some decode steps are too large for the decode mode
TIMEOUT_S = 20.0

contexts: dict[Topology, ParallelContext] = {}  # of this rank's process, created once


@dataclass(frozen=True)
class Case:
    """One model on one topology. `row`: row of the kernels; `mtp`: with its MTP layer; `norms_sum`: norms sum the
    ranks' results, as with the custom all-reduce of GPUs; `taps`: with the hidden states after each layer."""

    path: Path
    topology: Topology
    row: str = "torch"
    mtp: bool = False
    page_size: int = 1
    norms_sum: bool = False
    taps: bool = False

    def __str__(self) -> str:
        return f"{self.path.name} {self.row} {self.topology}{', norms sum' * self.norms_sum}"


class HostSums:
    """The interface of `CustomAllReduce` on a group's own sums."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def sum(self, x: Tensor) -> Tensor:
        return sum_over(self._group, x)

    def add_rms_norm(self, plain: Any, format: ActivationFormat, x: Tensor, *more: Any) -> Any:
        return plain(self.sum(x), *more)

    def add_rows_rms_norm(self, plain: Any, format: ActivationFormat, rows: ExpertRows, *more: Any) -> Any:
        return plain(self.sum(TorchPermutation().combine(rows.rows, rows.positions, rows.weights, rows.add)), *more)

    def check_peers(self) -> None:
        """No kernel waits for a peer."""


def load(case: Case, parallel: ParallelContext) -> tuple[Stepper, Any, ParallelContext]:
    """A stepper over this rank's part, its MTP layers if the case has them, the context with a dispatcher."""
    config = load_model_config(case.path)
    if case.norms_sum:
        parallel = replace(parallel, all_reduce=cast(Any, HostSums(parallel.world)))
    if parallel.topology.travels and config.is_moe:
        choice = choose(
            Place(cpu_device(), parallel.ep_size, parallel.topology.num_nodes), parallel.topology.moe_a2a_backend
        )
        shape = dispatch_shape(config, parallel, torch.float32, MAX_TOKENS)
        parallel = with_dispatcher(parallel, choice, shape, DECODE_TOKENS)
    backends = make_backends(config, case.row, page_size=case.page_size)
    model = load_model(case.path, config, LoadOptions("float32"), backends, parallel)
    local = local_config(config, parallel)
    stepper = Stepper(model, local, backends, page_size=case.page_size, seed=1)
    if case.taps:
        count, width = (0, 0) if config.streams is None else (config.streams.count, config.hidden_size)
        model.taps = HiddenTaps(range(len(config.blocks) + 1), count, width)
    if not case.mtp:
        return stepper, None, parallel
    mtp = load_mtp(case.path, config, model, LoadOptions("float32"))
    if mtp.reads_residual:
        model.taps = HiddenTaps((config.num_layers,))
    stepper.kv += make_kv(local, stepper.num_slots, torch.float32, num_mtp_layers=mtp.num_layers)
    return stepper, mtp, parallel


def run_cases(rank: int, cases: list[Case], seed: int) -> list[tuple[int, script.Trace]]:
    """(attention group, trace) of every case."""
    return [run_case(rank, case, seed) for case in cases]


def run_case(rank: int, case: Case, seed: int) -> tuple[int, script.Trace]:
    topology = case.topology
    if topology not in contexts:
        contexts[topology] = join(topology, rank, TIMEOUT_S)
    parallel = contexts[topology]
    stepper, mtp, parallel = load(case, parallel)

    def sizes_of(batch: Any) -> StepSizes | None:
        if topology.attn_dp_size == 1:
            return None  # all ranks have the same plan
        prefills = batch.attention.prefill is not None
        return StepSizes.exchange(parallel, parallel.world, batch.num_tokens, len(batch.logits_rows), prefills)

    group = parallel.attn_dp_rank
    prompts = script.prompts(seed, stepper.config.vocab_size)
    return group, script.run(stepper, prompts, topology.attn_dp_size, group, sizes_of, mtp)
