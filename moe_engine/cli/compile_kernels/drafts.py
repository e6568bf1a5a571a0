"""Forwards of MTP layers, draft heads and draft models, from the sizes of a step only. The bookkeeping of chains and
trees is compiled at the start of the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from moe_engine.cli.compile_kernels.forwards import caches, make_batch, run_step
from moe_engine.cli.compile_kernels.steps import StepTensors
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.warmup_sizes import StepSize
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.drafts.block_head import BlockHead, BlockLayers
from moe_engine.models.drafts.draft_layers import DraftLayers
from moe_engine.models.drafts.stream_block import StreamBlock
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.loader import LoadOptions, load_head, load_model, load_mtp
from moe_engine.models.sharding import local_config
from moe_engine.planning.resolved_config import ResolvedConfig

RunDrafts = Callable[[StepSize], None]


def num_own_layers(config: ResolvedConfig) -> int:
    """Layers of the checkpoint that draft."""
    speculation = config.speculation
    return config.model.num_nextn_predict_layers if speculation is not None and speculation.uses_own_layers else 0


def drafts_of(
    config: ResolvedConfig, model: Any, load: LoadOptions, backends: Backends, own: Backends | None,
    tensors: StepTensors, kv: list[Any],
) -> RunDrafts:  # fmt: skip
    """The drafter's forwards around a step of this size; none without forwards of these kinds.

    Args:
        backends: the model's, which MTP layers use.
        own: those of a head or of a draft model; None: these are left out.
        kv: the caches of the model and its MTP layers; the head's are appended.
    """
    speculation, head = config.speculation, config.draft_head
    if speculation is None:
        return lambda size: None
    path, depth = speculation.draft_model_path, speculation.num_steps
    if speculation.uses_own_layers:
        layers = load_mtp(path or config.model_path, model.config, model, load, path is not None)
        if isinstance(layers, StreamBlock):
            tapped = model.config.own_block.tapped
            return _blocks(layers, depth, len(tapped) * model.config.hidden_size, backends, tensors, kv, model)
        return _around(cast(DraftLayers, layers), layers.state_width, backends, tensors, kv, model)
    if own is None or path is None:
        return lambda size: None
    if head is not None:
        assert isinstance(model, Decoder)
        drafting = load_head(head, model, (config.model_path, config.model), load, own, config.context_len)
        kv += caches(local_config(head.layer, model.parallel), config, config.max_running_requests)
        width = max(1, len(head.tapped)) * head.target_hidden
        if isinstance(drafting, BlockHead):
            return _blocks(drafting, depth, width, own, tensors, kv, model)
        return _around(cast(DraftLayers, drafting), width, own, tensors, kv, model)
    assert config.draft_model is not None
    small = load_model(path, config.draft_model, load, own, max_positions=config.context_len)
    small_kv = caches(config.draft_model, config, config.max_running_requests)
    return lambda size: run_step(small, own, tensors, small_kv, size, None)


def _around(
    layers: DraftLayers, width: int, backends: Backends, tensors: StepTensors, kv: list[Any], model: Decoder
) -> RunDrafts:
    """The draft extend after a step, which only writes the last layer's cache; and of decodes a draft step of each
    layer, with its logits."""
    last, dtype = layers.num_layers - 1, model.embedding.weight.dtype

    def batch_of(size: StepSize) -> ForwardBatch:
        return make_batch(backends, tensors, kv, model.parallel, size)

    def run(size: StepSize) -> None:
        batch, hidden = batch_of(size), layers.prepare(tensors.rows(size.tokens, width, dtype))
        for layer in range(last):
            layers.forward(layer, batch.input_ids, hidden, batch)
        layers.remember(last, batch.input_ids, hidden, batch)
        if size.decodes and not size.prefill:
            batch = batch_of(StepSize(size.decodes, 1, size.context))
            for layer in range(layers.num_layers):
                states = tensors.rows(size.decodes, hidden.shape[1], dtype)
                layers.logits(layers.forward(layer, batch.input_ids, states, batch), batch.sizes, layer)

    return run


def _blocks(
    layers: BlockLayers, depth: int, width: int, backends: Backends, tensors: StepTensors, kv: list[Any],
    model: Decoder,
) -> RunDrafts:  # fmt: skip
    """The keys of a step's tokens; and of decodes the forward of a block of each request, with the logits of its
    `depth` drafts: in one product, or with ranks that share the head in one for each."""
    dtype, count = model.embedding.weight.dtype, layers.block.tokens(depth)

    def run(size: StepSize) -> None:
        batch = make_batch(backends, tensors, kv, model.parallel, size)
        layers.remember(tensors.rows(size.tokens, width, dtype), batch)
        if not size.decodes or size.prefill:
            return
        size = StepSize(size.decodes, count, size.context)
        batch = make_batch(backends, tensors, kv, model.parallel, size, visible=layers.visible)
        v = layers.forward(batch).unflatten(0, (-1, count))[:, count - depth :].transpose(0, 1).contiguous()
        for part in [v.flatten(0, 1)] if batch.sizes is None else v:
            layers.logits(part, batch.sizes)

    return run
