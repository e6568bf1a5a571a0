"""Collects the parts of the graphs of steps with drafts, from a runner that has warmed up."""

from __future__ import annotations

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.speculation.choice import chain_kernels
from moe_engine.kernels.speculation.protocol import SimulatedAcceptance
from moe_engine.step_settings import GraphSettings
from moe_engine.types import SpeculationConfig
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.sampling.sampling_state import mix64
from moe_engine.worker.speculation.chain_memory import ChainMemory
from moe_engine.worker.speculation.draft_graphs import DraftParts
from moe_engine.worker.speculation.mtp import MTPDrafter
from moe_engine.worker.speculation.step import FORCE_SALT
from moe_engine.worker.step_graphs import StepOutputs


def why_drafts_are_not_captured(runner: ModelRunner) -> str | None:
    """The reason why steps with drafts need the accepted lengths on the host with any attention backend, or None."""
    step = runner.speculation
    if step is None:
        return "no drafts"
    if step.config.topk > 1:
        return "trees: the host builds their masks"
    if step.config.has_thresholds:
        return "acceptance thresholds draw numbers by position on the host"
    drafter = step.drafter
    if not isinstance(drafter, MTPDrafter):
        return f"{step.config.method} drafts: the host computes which tokens the drafter has not seen"
    if drafter.attention.capabilities.plan_in_place is None:
        return f"the {drafter.attention.name} attention backend of the drafter cannot be replayed for other steps"
    if drafter.layers.num_layers > 1:
        return "several MTP layers: each runs over another number of earlier tokens"
    if runner.rows.windows is not None or runner.window is not None:
        return "sliding windows: the host maps their pages by length"
    return None


def draft_parts(
    runner: ModelRunner, settings: GraphSettings, plan_in_place: InPlacePlanner, outputs: StepOutputs
) -> DraftParts:
    """The parts of a runner with drafts that can be captured; its drafter has run a draft extend."""
    rows, step = runner.rows, runner.speculation
    assert step is not None and rows.history is not None
    drafter, history = step.drafter, rows.history
    assert isinstance(drafter, MTPDrafter) and drafter.states is not None
    most, plan_drafts = max(settings.counts) - 1, drafter.attention.capabilities.plan_in_place
    assert plan_drafts is not None
    if drafter.attention is runner.attention:
        plan_drafts = plan_in_place
    return DraftParts(
        model=runner.model,
        drafter=drafter,
        kernels=chain_kernels(runner.sampler.kernel),
        tables=RowTables(rows.slot_table, history.tokens, history.lengths, rows.last_token, drafter.states),
        memory=ChainMemory(max(settings.sizes), most, rows.sampling, runner.stream),
        plan_in_place=plan_in_place,
        plan_drafts=plan_drafts,
        page_size=runner.kv_pool.page_size,
        shared=runner.shared,
        passes=runner.sampler.passes,
        outputs=outputs,
        stream=runner.stream,
        simulated=_simulated(step.config),
        taps=runner.taps,
    )


def _simulated(config: SpeculationConfig) -> SimulatedAcceptance | None:
    length = config.simulated_accept_length
    return None if length is None else SimulatedAcceptance(length, mix64(FORCE_SALT))
