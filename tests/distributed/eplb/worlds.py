"""The ranks of these tests: a shard of a model with experts in given slots, recorded as in a worker."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moe_engine.kernels.device import cpu_device
from moe_engine.models.config_file import load_model_config
from moe_engine.models.loader import LoadOptions, load_model, load_mtp
from moe_engine.models.sharding import dispatch_shape, local_config
from moe_engine.parallel.context import ParallelContext, join, with_dispatcher
from moe_engine.parallel.dispatch.tables import Place, choose
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.parallel.topology import Topology
from moe_engine.worker.eplb.eplb_manager import EPLBManager
from moe_engine.worker.eplb.expert_control import ExpertControl
from moe_engine.worker.startup.expert_setup import attach_experts, with_experts
from tests.distributed.models import script
from tests.models.stepper import Chunk, Stepper, make_backends, make_kv

MAX_TOKENS, DECODE_TOKENS, TIMEOUT_S = 64, 4, 20.0

contexts: dict[Topology, ParallelContext] = {}  # one per rank process


@dataclass(frozen=True)
class Case:
    """One model on one topology, with experts by `settings`. `row`: kernel row."""

    path: Path
    topology: Topology
    settings: ExpertSettings = field(default_factory=ExpertSettings)
    row: str = "torch"
    mtp: bool = False


@dataclass
class Loaded:
    stepper: Stepper
    mtp: Any
    parallel: ParallelContext
    control: ExpertControl
    runner: Any

    def look(self) -> None:
        """The current model: the recording wrapper may have been installed or removed."""
        self.stepper.model = self.runner.forward.model

    def sizes_of(self, batch: Any) -> StepSizes | None:
        parallel = self.parallel
        if parallel.attn_dp_size == 1:
            return None  # all ranks have the same plan
        prefills = batch.attention.prefill is not None
        return StepSizes.exchange(parallel, parallel.world, batch.num_tokens, len(batch.logits_rows), prefills)


def load(case: Case, parallel: ParallelContext) -> Loaded:
    config = load_model_config(case.path)
    parallel = with_experts(parallel, config, case.settings, "cpu")
    if parallel.topology.travels:
        choice = choose(Place(cpu_device(), parallel.ep_size), parallel.topology.moe_a2a_backend)
        shape = dispatch_shape(config, parallel, torch.float32, MAX_TOKENS)
        parallel = with_dispatcher(parallel, choice, shape, DECODE_TOKENS)
    backends = make_backends(config, case.row)
    model = load_model(case.path, config, LoadOptions("float32"), backends, parallel)
    local = local_config(config, parallel)
    stepper = Stepper(model, local, backends, seed=1)
    mtp = None
    if case.mtp:
        mtp = load_mtp(case.path, config, model, LoadOptions("float32"))
        stepper.kv += make_kv(local, stepper.kv[0].shape[0], torch.float32, num_mtp_layers=mtp.num_layers)
    device = torch.device("cpu")
    runner: Any = SimpleNamespace(forward=SimpleNamespace(model=model), stream=SimpleNamespace(device=device))
    control = attach_experts(runner, config, case.settings, parallel, backends.experts, mtp)
    loaded = Loaded(stepper, mtp, parallel, control, runner)
    loaded.look()
    return loaded


def context_of(topology: Topology, rank: int) -> ParallelContext:
    if topology not in contexts:
        contexts[topology] = join(topology, rank, TIMEOUT_S)
    return contexts[topology]


def run_placed(rank: int, cases: list[Case], seed: int) -> list[tuple[int, script.Trace, Any]]:
    """(attention group, trace, part of a dump) of every case."""
    results = []
    for case in cases:
        loaded = load(case, context_of(case.topology, rank))
        if case.settings.recorder_mode:
            loaded.control.start()
        results.append((loaded.parallel.attn_dp_rank, *run_script(loaded, seed), loaded.control.dump_part()))
    return results


def run_script(loaded: Loaded, seed: int) -> tuple[script.Trace]:
    loaded.look()
    parallel = loaded.parallel
    prompts = script.prompts(seed, loaded.stepper.config.vocab_size)
    groups, group = parallel.attn_dp_size, parallel.attn_dp_rank
    return (script.run(loaded.stepper, prompts, groups, group, loaded.sizes_of, loaded.mtp),)


@dataclass
class Balanced:
    """A rebalance on one rank, step by step; `tables` [L, P], MTP layers included, and `states` of each step;
    `drafts`: logits of the MTP layer."""

    logits: list[torch.Tensor]
    tables: list[np.ndarray]
    states: list[dict[str, Any]]
    log: list[str]
    drafts: list[torch.Tensor] = field(default_factory=list)


def run_balanced(rank: int, case: Case, prompts: list[list[int]]) -> Balanced:
    """A step per prompt, each a separate sequence, the same on all ranks (with DP only group 0 has requests)."""
    lines, logger = Lines(), logging.getLogger("moe_engine")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        seen = balanced(load(case, context_of(case.topology, rank)), prompts)
    finally:
        logger.removeHandler(lines)
    seen.log = [line for line in lines.lines if "EPLB" in line]
    return seen


class Lines(logging.Handler):
    """Collects log records."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@torch.inference_mode()
def balanced(loaded: Loaded, prompts: list[list[int]]) -> Balanced:
    seen = Balanced([], [], [], [])
    stepper, tables = loaded.stepper, loaded.parallel.experts
    balance: EPLBManager | None = loaded.control.balance
    for number, prompt in enumerate(prompts):
        stepper.lengths[number % 8] = 0
        mine = loaded.parallel.attn_dp_rank == 0
        batch = stepper.batch([Chunk(number % 8, prompt, decode=False)] if mine else [])
        sizes = loaded.sizes_of(batch)
        batch = batch if sizes is None else replace(batch, sizes=sizes)
        hidden = stepper.model.forward(batch)
        seen.logits.append(stepper.model.logits(hidden, sizes).clone())
        if loaded.mtp is not None:
            v = loaded.mtp.forward(0, batch.input_ids.roll(-1), hidden, batch)
            seen.drafts.append(loaded.mtp.logits(v, sizes).clone())
        if tables is not None:
            seen.tables.append(tables.whole_placement.physical_to_logical.copy())
        seen.states.append(loaded.control.state())
        if balance is not None and balance._planning is not None:
            balance._planning.exception()  # so that moves always begin in the same step
    loaded.control.close()
    return seen
