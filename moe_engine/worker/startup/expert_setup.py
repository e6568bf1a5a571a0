"""Setup of expert placement before a model is loaded, and of recorder and EPLB afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from moe_engine.errors import ConfigError
from moe_engine.kernels.experts.protocol import ExpertsKernel
from moe_engine.models.batch import Model
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.loader import OwnDrafts
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.parallel.expert_tables import ExpertTables
from moe_engine.parallel.expert_transfer import ExpertTransfer, SlotMemory
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.sources import from_any
from moe_engine.parallel.recording.config import RecorderConfig
from moe_engine.parallel.recording.draft_counts import DraftCounts
from moe_engine.parallel.recording.recorder import ExpertRecorder
from moe_engine.worker.device_stream import make_comm_stream
from moe_engine.worker.eplb.eplb_manager import EPLBManager
from moe_engine.worker.eplb.eplb_planner import Planner
from moe_engine.worker.eplb.expert_control import ExpertControl
from moe_engine.worker.eplb.expert_recording_model import ExpertRecordingModel
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.options import WorkerOptions
from moe_engine.worker.routed_experts import RoutedExperts
from moe_engine.worker.startup.warmup import NUM_TOKENS


def with_experts(
    parallel: ParallelContext, config: ModelConfig, settings: ExpertSettings, device: torch.device | str
) -> ParallelContext:
    """The context with the tables of the initial placement. To be called before the dispatcher is created, which
    depends on the number of physical experts.

    Raises:
        ConfigError: the location's file cannot be read or does not fit, or physical experts do not divide evenly.
    """
    if not settings.places_experts or config.moe is None or parallel.experts is not None:
        return parallel
    if parallel.dispatcher is not None:
        raise ValueError("with_experts comes before with_dispatcher")
    layout = _layout(config, settings, parallel)
    tables = ExpertTables(
        from_any(settings.location, layout, config.num_layers, settings.policy),
        parallel.ep_rank,
        "static" if settings.dispatch == "static" else "dynamic",
        num_more_layers=config.num_nextn_predict_layers if _moves_drafts(config) else 0,
        num_nodes=layout.num_nodes,
        device=device,
    )
    return replace(parallel, experts=tables)


def attach_experts(
    runner: ModelRunner,
    config: ModelConfig,
    settings: ExpertSettings,
    parallel: ParallelContext,
    kernel: ExpertsKernel,
    mtp: OwnDrafts | None,
) -> ExpertControl:
    """Attaches recorder and EPLB to a loaded, warmed-up model, as configured. Collective with EPLB.

    Args:
        mtp: the model's drafting MTP layers; their experts move with the model's own.
    """
    model = runner.forward.model
    if settings.recorder_mode is None or not isinstance(model, Decoder) or not model.moes:
        return ExpertControl()
    layers = moe_layers(model)
    device = runner.stream.device
    recorder = _recorder(config, settings, parallel, device)
    balance = None
    if settings.rebalance is not None and parallel.ep_size > 1:
        recorder.watch()
        drafts = mtp_moe_layers(mtp) if _moves_drafts(config) else {}
        balance = _balance(config, settings, parallel, layers, drafts, kernel, recorder)
        recorder.start()  # as SGLang does: can be dumped at any time
    model.passes = 0  # without warm-up passes, whose number may differ between ranks
    observed = ExpertRecordingModel(
        model, recorder, balance, log=settings.report_log, is_reporting_rank=parallel.world_rank == 0
    )

    def observe(on: bool) -> None:
        model.record(recorder if on else None)
        observed.counts_in_layers = not any(layer.records_experts for layer in layers.values())
        recorder.count_in_place(on and observed.counts_in_layers)
        runner.forward.model = observed if on else model

    return ExpertControl(recorder, balance, observed, observe)


def attach_routed(
    runner: ModelRunner, config: ModelConfig, options: WorkerOptions, parallel: ParallelContext
) -> RoutedExperts:
    """Records the experts of every token, from the warm-up on: CUDA graphs record too."""
    model, slots = runner.forward.model, runner.kv_pool.num_slots + runner.kv_pool.page_size
    if not isinstance(model, Decoder) or config.moe is None:
        raise ConfigError(f"--enable-return-routed-experts: {config.architecture} records no experts; leave it out")
    tokens = max(options.shapes.tokens, NUM_TOKENS, options.max_rows)
    keeps = parallel.attn_tp_rank == 0
    routed = RoutedExperts(config.num_layers, config.moe.top_k, tokens, slots, runner.stream, keeps=keeps)
    model.record(routed)
    return routed


def mtp_moe_layers(mtp: OwnDrafts | None) -> dict[int, MoE]:
    """MoE layers of MTP, by index."""
    return {layer.layer_index: layer for layer in mtp.feed_forwards if isinstance(layer, MoE)} if mtp else {}


def moe_layers(model: Model) -> dict[int, MoE]:
    """The model's own MoE layers by index, without MTP layers."""
    inner = model.model if isinstance(model, ExpertRecordingModel) else model
    return {layer.layer_index: layer for layer in inner.moes} if isinstance(inner, Decoder) else {}


def _moves_drafts(config: ModelConfig) -> bool:
    """Whether experts of draft layers move: those of layers with another number of experts stay where they are."""
    return config.moe_of(config.num_layers) == config.moe


def _layout(config: ModelConfig, settings: ExpertSettings, parallel: ParallelContext) -> ExpertLayout:
    assert config.moe is not None
    return settings.layout(config.moe.num_experts, config.moe.num_groups, parallel.topology)


def _recorder(
    config: ModelConfig, settings: ExpertSettings, parallel: ParallelContext, device: torch.device
) -> ExpertRecorder:
    assert config.moe is not None and settings.recorder_mode is not None
    travels, tables = parallel.dispatcher is not None, parallel.experts
    recorder_config = RecorderConfig(
        mode=settings.recorder_mode,
        num_layers=config.num_layers,
        num_experts=config.moe.num_experts,
        num_physical=config.moe.num_experts + settings.num_redundant,
        directory=settings.directory,
        source="dispatcher" if travels and settings.recorder_mode == "stat_approx" else "router",
        buffer_size=settings.buffer_size,
        rank=parallel.world_rank,
        counts_here=travels or parallel.world_rank == 0,  # else every rank routes the same tokens
        ep_rank=parallel.ep_rank,
        ep_size=parallel.ep_size,
        top_k=config.moe.top_k,
        report_balancedness=settings.reports,
        device=device,
    )
    slots = None if tables is None else torch.from_numpy(tables.placement.physical_to_logical.copy())
    return ExpertRecorder(recorder_config, parallel.world.all_reduce, slots)


def _balance(
    config: ModelConfig,
    settings: ExpertSettings,
    parallel: ParallelContext,
    layers: dict[int, MoE],
    drafting: dict[int, MoE],
    kernel: ExpertsKernel,
    recorder: ExpertRecorder,
) -> EPLBManager:
    rebalance, tables = settings.rebalance, parallel.experts
    assert rebalance is not None and tables is not None
    drafts = None
    if drafting:
        table = torch.from_numpy(tables.whole_placement.physical_to_logical[config.num_layers :].copy())
        counts_here = recorder.config.counts_here
        drafts = DraftCounts(
            config.num_layers, table.to(recorder.config.device), recorder.config.num_experts, counts_here=counts_here
        )
        for layer in drafting.values():
            layer.count(drafts)
    weights = {index: layer.weights for index, layer in {**layers, **drafting}.items()}

    def transfer() -> ExpertTransfer:
        memory = SlotMemory(kernel, weights, num_spare=rebalance.layers_at_once)
        stream = make_comm_stream(recorder.config.device)
        return ExpertTransfer(memory, parallel.expert_link(), parallel.ep_rank, tables.slots_per_rank, stream)

    return EPLBManager(
        rebalance,
        tables,
        recorder,
        transfer,
        parallel.world,
        Planner(_layout(config, settings, parallel), settings.policy, ThreadPoolExecutor(1, "expert-planner")),
        drafts,
    )
