"""Builds the configured drafter and its speculative step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moe_engine.kernels.backends import Backends
from moe_engine.models.batch import Model
from moe_engine.models.config import ModelConfig
from moe_engine.models.drafts.block_head import BlockHead
from moe_engine.models.drafts.mtp import MTPLayers
from moe_engine.models.drafts.stream_block import StreamBlock
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.models.loader import LoadOptions, OwnDrafts, load_head, load_model, load_mtp
from moe_engine.types import SpeculationConfig
from moe_engine.worker.batch.batch_builder import BatchBuilder
from moe_engine.worker.batch.mla_form import form_policy
from moe_engine.worker.kv_cache.kv_pool import KVPool, kv_spec
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.options import WorkerOptions
from moe_engine.worker.speculation.block import BlockDrafter
from moe_engine.worker.speculation.draft_batch import DraftBatches
from moe_engine.worker.speculation.drafter import Drafter
from moe_engine.worker.speculation.fused_spec_step import FusedStep
from moe_engine.worker.speculation.mtp import MTPDrafter
from moe_engine.worker.speculation.ngram import NgramDrafter
from moe_engine.worker.speculation.standalone import StandaloneDrafter
from moe_engine.worker.speculation.step import SpeculativeStep

if TYPE_CHECKING:  # of models with a vision tower alone
    from moe_engine.worker.speculation.draft_images import DraftImages


def num_mtp_layers(config: ModelConfig, speculation: SpeculationConfig | None) -> int:
    """KV cache layers for MTP in addition to the target's own."""
    return config.num_nextn_predict_layers if speculation is not None and speculation.uses_own_layers else 0


def add_speculation(
    runner: ModelRunner,
    config: SpeculationConfig,
    options: WorkerOptions,
    load: LoadOptions,
    draft_backends: Backends | None,
) -> None:
    """Sets a runner's speculative step.

    Args:
        draft_backends: kernels of a separate draft model or head; MTP layers use the target's.
    """
    rows, stream, pool = runner.rows, runner.stream, runner.kv_pool
    assert rows.history is not None, "RequestRows was created without num_drafts"
    target = DraftBatches(runner.forward.builder, runner.forward.attention, pool.layers, stream)
    drafter: Drafter
    if config.uses_own_layers:
        path, exported = config.draft_model_path or options.model_path, config.draft_model_path is not None
        layers = load_mtp(path, options.model, runner.model, load, exported)
        drafter = _own_layers(runner, options.model, layers, target)
    elif config.method == "standalone":
        drafter = _standalone(runner, config, options, load, draft_backends)
    elif config.method in ("eagle", "block"):
        drafter = _head(runner, options, load, draft_backends)
    else:
        drafter = NgramDrafter(rows.history, config.ngram_min_match, config.ngram_max_match, stream)
    fused = None
    exact = not config.has_thresholds and config.simulated_accept_length is None and rows.images is None
    if isinstance(drafter, MTPDrafter) and isinstance(drafter.layers, MTPLayers) and config.topk == 1 and exact:
        fused = FusedStep(drafter, rows, runner.sampler, pool.layers)
    runner.speculation = SpeculativeStep(
        config, drafter, rows, runner.forward.builder, runner.sampler, pool, target, stream, fused
    )


def mtp_layers(runner: ModelRunner) -> OwnDrafts | None:
    """The drafting layers of a runner's own checkpoint, or None."""
    drafter = runner.speculation.drafter if runner.speculation is not None else None
    layers = drafter.layers if isinstance(drafter, MTPDrafter | BlockDrafter) else None
    return layers if isinstance(layers, MTPLayers | StreamBlock) else None


def draft_bytes(runner: ModelRunner) -> int:
    """Bytes of the drafter's weights, without those that it shares with the model."""
    drafter = runner.speculation.drafter if runner.speculation is not None else None
    if isinstance(drafter, MTPDrafter | BlockDrafter):
        return drafter.layers.weight_bytes
    if isinstance(drafter, StandaloneDrafter) and isinstance(drafter.model, Decoder):
        return drafter.model.weight_bytes
    return 0


def _own_layers(
    runner: ModelRunner, model: ModelConfig, layers: OwnDrafts, target: DraftBatches
) -> MTPDrafter | BlockDrafter:
    if isinstance(layers, StreamBlock):
        own, streams = model.own_block, model.streams
        assert isinstance(runner.model, Decoder) and own is not None and streams is not None
        runner.taps = runner.model.taps = HiddenTaps(own.tapped, streams.count, model.hidden_size)
        return BlockDrafter(layers, target, runner.sampler, runner.stream)
    if layers.reads_residual:
        assert isinstance(runner.model, Decoder)
        runner.taps = runner.model.taps = HiddenTaps((model.num_layers,))
    width, images = layers.state_width, _draft_images(runner)
    return MTPDrafter(layers, target, runner.rows, runner.sampler, runner.stream, runner.shared, width, images)


def _head(
    runner: ModelRunner, options: WorkerOptions, load: LoadOptions, backends: Backends | None
) -> MTPDrafter | BlockDrafter:
    """The drafter of a head, whose KV is in the last layers of the target's pool."""
    head, rows, stream, pool = options.draft_head, runner.rows, runner.stream, runner.kv_pool
    assert head is not None and backends is not None
    layers = load_head(head, runner.model, (options.model_path, options.model), load, backends, rows.width)
    if head.tapped:
        assert isinstance(runner.model, Decoder)
        runner.taps = runner.model.taps = HiddenTaps(head.tapped, scale=options.model.residual_scale)
    form = form_policy(head.layer.attention, deterministic=options.enable_deterministic_inference)
    builder = BatchBuilder(rows, pool.page_size, form, stream)
    batches = DraftBatches(builder, backends.attention, pool.layers, stream)
    if isinstance(layers, BlockHead):
        return BlockDrafter(layers, batches, runner.sampler, stream)
    size, images = head.layer.hidden_size, _draft_images(runner)
    return MTPDrafter(layers, batches, rows, runner.sampler, stream, runner.shared, size, images)


def _draft_images(runner: ModelRunner) -> DraftImages | None:
    if runner.rows.images is None or runner.forward.images is None:
        return None
    from moe_engine.worker.speculation.draft_images import DraftImages

    return DraftImages(runner.rows.images, runner.forward.images)


def _standalone(
    runner: ModelRunner, config: SpeculationConfig, options: WorkerOptions, load: LoadOptions, backends: Backends | None
) -> StandaloneDrafter:
    rows, stream, page_size = runner.rows, runner.stream, runner.kv_pool.page_size
    draft = options.draft_model
    assert rows.history is not None and draft is not None and backends is not None
    assert config.draft_model_path is not None
    if load.load_format != "dummy":
        load = replace(load, load_format="auto")
    model: Model = load_model(config.draft_model_path, draft, load, backends, max_positions=rows.width)
    pool = KVPool(kv_spec(draft, options.kv_dtype), runner.kv_pool.num_slots, page_size, stream)
    form = form_policy(draft.attention, deterministic=options.enable_deterministic_inference)
    builder = BatchBuilder(rows, page_size, form, stream)
    batches = DraftBatches(builder, backends.attention, pool.layers, stream)
    windows = tuple(group.window for group in draft.cache_groups)
    return StandaloneDrafter(model, batches, rows.history, runner.sampler, stream, rows.max_rows, windows)
