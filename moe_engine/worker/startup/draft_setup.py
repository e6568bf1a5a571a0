"""Collects the parts of the graphs of steps with drafts, from a runner that has warmed up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.speculation.choice import chain_kernels, tree_kernels
from moe_engine.kernels.speculation.protocol import ChainBuffers, SimulatedAcceptance, Thresholds
from moe_engine.kernels.speculation.trees import TreeBuffers
from moe_engine.models.drafts.mtp import MTPLayers
from moe_engine.models.drafts.stream_block import StreamBlock
from moe_engine.types import SpeculationConfig
from moe_engine.types.step_settings import GraphSettings
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.sampling.sampling_state import mix64
from moe_engine.worker.speculation.block import BlockDrafter
from moe_engine.worker.speculation.block_chain import BlockChain
from moe_engine.worker.speculation.chain_drafters import ChainDrafter, ChainParts, MTPChain, NgramChain, StandaloneChain
from moe_engine.worker.speculation.chain_memory import ChainForm, ChainMemory
from moe_engine.worker.speculation.draft_graphs import DraftParts
from moe_engine.worker.speculation.drafter import Drafter
from moe_engine.worker.speculation.mtp import MTPDrafter
from moe_engine.worker.speculation.ngram import NgramDrafter
from moe_engine.worker.speculation.standalone import StandaloneDrafter
from moe_engine.worker.speculation.step import FORCE_SALT
from moe_engine.worker.speculation.tree import TreeSize
from moe_engine.worker.speculation.tree_graphs import TreeDrafts, TreeParts
from moe_engine.worker.step_graphs import StepOutputs


def why_drafts_are_not_captured(runner: ModelRunner) -> str | None:
    """Why steps with drafts need the accepted lengths on the host, or None. An attention backend that plans by exact
    lengths is found when steps are captured."""
    step = runner.speculation
    if step is None:
        return "no drafts"
    drafter = step.drafter
    if step.config.topk > 1 and (why := _why_no_trees(step.config, drafter)) is not None:
        return why
    if isinstance(drafter, MTPDrafter | StandaloneDrafter | BlockDrafter):
        attention = drafter.batches.attention
        if attention.capabilities.plan_in_place is None:
            return f"the {attention.name} attention backend of the drafter cannot be replayed for other steps"
        own = drafter.layers if isinstance(drafter, MTPDrafter) else None
        if isinstance(own, MTPLayers) and any(runner.windows.windows) and not own.windowed:
            return "MTP layers without a window of a model with windows: their queries are planned by the model"
        if isinstance(drafter, MTPDrafter) and drafter.layers.attends_to_extend:
            return "a head of several layers: its draft extend runs attention"
    elif isinstance(drafter, NgramDrafter) and step.config.has_thresholds:
        return "acceptance thresholds with NGRAM: a request without a match has no drafts to accept"
    elif not isinstance(drafter, NgramDrafter):
        return f"drafts of {type(drafter).__name__} need the lengths on the host"
    if isinstance(drafter, MTPDrafter) and drafter.layers.num_layers > 1 and runner.rows.image_ends is not None:
        return "several MTP layers with images: the host computes positions of image tokens that they compute again"
    return None


def _why_no_trees(config: SpeculationConfig, drafter: Drafter) -> str | None:
    if not isinstance(drafter, MTPDrafter):
        return "trees of a draft model: the host orders the KV of their nodes"
    if drafter.layers.num_layers > 1:
        return "trees of several MTP layers: a level recomputes the nodes above it in its own layer"
    if config.has_thresholds or config.simulated_accept_length is not None:
        return "trees with acceptance thresholds: the host draws a number for each node"
    return None


def draft_parts(
    runner: ModelRunner, settings: GraphSettings, plan_in_place: InPlacePlanner, outputs: StepOutputs
) -> DraftParts:
    """For a runner with drafts that can be captured; its drafter has run a draft extend."""
    rows, step, stream = runner.rows, runner.speculation, runner.stream
    assert step is not None and rows.history is not None
    drafter, history = step.drafter, rows.history
    states = drafter.states if isinstance(drafter, MTPDrafter) else history.lengths[:0, None]
    assert states is not None
    pool = 1 if rows.images is None else rows.images.pool
    form = replace(_form(drafter), windows=runner.windows.table is not None, pool=pool)
    is_tree = step.config.topk > 1
    depth = step.config.num_steps if is_tree else max(settings.counts) - 1
    windows = rows.slot_table[:0] if runner.windows.table is None else runner.windows.table
    chains = ChainParts(
        kernels=chain_kernels(runner.sampler.kernel),
        tables=RowTables(
            rows.slot_table,
            history.tokens,
            history.lengths,
            rows.last_token,
            states,
            windows,
            history.lengths[:0, None] if rows.image_ends is None else rows.image_ends,
        ),
        memory=ChainMemory(max(settings.sizes), depth, rows.sampling, stream, form),
        page_size=runner.kv_pool.page_size,
        shared=runner.shared,
        passes=runner.sampler.passes,
        stream=stream,
        windows=runner.windows,
    )
    trees = None
    if is_tree:
        config = step.config
        size = TreeSize(config.topk, config.num_steps, config.num_nodes(config.num_steps))
        trees = TreeParts.of(
            tree_kernels(runner.sampler.kernel), size, runner.kv_pool, max(settings.sizes), stream.device
        )
    return DraftParts(
        model=runner.model,
        chains=chains,
        drafts_of=_drafts_of(runner, drafter, chains, plan_in_place),
        plan_in_place=plan_in_place,
        kv=runner.kv_pool.layers,
        outputs=outputs,
        rule=_rule(step.config),
        catch_up=drafter.catch_up if isinstance(drafter, StandaloneDrafter) else None,
        states=rows.states,
        trees=trees,
        trees_of=None if trees is None else _trees_of(runner, drafter, chains, trees, plan_in_place),
        adapters=rows.adapters,
    )


def _form(drafter: Drafter) -> ChainForm:
    if isinstance(drafter, StandaloneDrafter):
        return ChainForm(first_draft=0, back=1, shift=0, num_ids=1)
    layers = drafter.layers.num_layers if isinstance(drafter, MTPDrafter) else 1
    if layers == 1:
        return ChainForm()
    assert isinstance(drafter, MTPDrafter)
    return ChainForm(lookback=layers - 1, back=layers - 1, num_ids=layers, cached=drafter.num_cached)


def _drafts_of(
    runner: ModelRunner, drafter: Drafter, parts: ChainParts, plan_in_place: InPlacePlanner
) -> Callable[[ChainBuffers], ChainDrafter]:
    if isinstance(drafter, NgramDrafter):
        return lambda chain: NgramChain(parts, chain, drafter)
    assert isinstance(drafter, MTPDrafter | StandaloneDrafter | BlockDrafter)
    attention = drafter.batches.attention
    own = attention is not runner.forward.attention
    planner = attention.capabilities.plan_in_place if own else plan_in_place
    if isinstance(drafter, MTPDrafter) and isinstance(drafter.layers, MTPLayers):
        planner = drafter.layers.planner or planner
    if isinstance(drafter, BlockDrafter) and isinstance(drafter.layers, StreamBlock):
        planner = drafter.layers.planner
    assert planner is not None
    if isinstance(drafter, StandaloneDrafter):
        return lambda chain: StandaloneChain(parts, chain, drafter, planner)
    if isinstance(drafter, BlockDrafter):
        assert runner.taps is not None
        taps = runner.taps
        return lambda chain: BlockChain(parts, chain, drafter, planner, taps)
    return lambda chain: MTPChain(parts, chain, drafter, planner, own, runner.taps)


def _trees_of(
    runner: ModelRunner, drafter: Drafter, parts: ChainParts, trees: TreeParts, plan_in_place: InPlacePlanner
) -> Callable[[ChainBuffers, TreeBuffers], TreeDrafts]:
    assert isinstance(drafter, MTPDrafter)
    attention = drafter.batches.attention
    own = attention is not runner.forward.attention
    planner = attention.capabilities.plan_in_place if own else plan_in_place
    assert planner is not None
    return lambda chain, tree: TreeDrafts(parts, trees, chain, tree, drafter, planner, runner.taps)


def _rule(config: SpeculationConfig) -> SimulatedAcceptance | Thresholds | None:
    if config.simulated_accept_length is not None:
        return SimulatedAcceptance(config.simulated_accept_length, mix64(FORCE_SALT))
    if config.has_thresholds:
        return Thresholds(config.accept_threshold_single, config.accept_threshold_acc, FORCE_SALT)
    return None
