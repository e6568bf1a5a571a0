"""Captures a runner's decode steps as CUDA graphs before the first request, if device and kernels support it."""

from __future__ import annotations

import logging

import torch

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.embedding import Head
from moe_engine.types.step_settings import GraphSettings
from moe_engine.worker.device_stream import make_graphs
from moe_engine.worker.eplb.expert_recording_model import ExpertRecordingModel
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.speculation.draft_graphs import DraftGraphs
from moe_engine.worker.speculation.drafted_step import DraftedStep
from moe_engine.worker.startup.draft_setup import draft_parts, why_drafts_are_not_captured
from moe_engine.worker.step_graphs import GraphBackend, StepGraphs, StepOutputs

logger = logging.getLogger("moe_engine")


def capture_graphs(
    runner: ModelRunner, settings: GraphSettings, *, progress: bool = False, backend: GraphBackend | None = None
) -> int:
    """Sets `ForwardPass.graphs`; collective on several ranks. Returns the number of graphs, 0 if steps stay eager.

    The runner must be warmed up: every kernel of a decode step was launched before.

    Args:
        progress: show a progress bar on stderr.
        backend: graph backend; default: the device's own, if it has one.
    """
    backend = backend or make_graphs(runner.stream.device)
    if not settings.sizes or backend is None:
        return 0
    attention, model, captured = runner.forward.attention, runner.model, False
    own = model.planner_of_decodes() if isinstance(model, Decoder) else None
    plan_in_place = own or attention.capabilities.plan_in_place
    if plan_in_place is not None:
        captured = _capture(runner, settings, plan_in_place, backend, progress)
    if not captured:
        logger.warning("No CUDA graphs: the %s attention backend cannot be replayed for other steps", attention.name)
        return 0
    runner.kv_pool.clear_dummy_page()
    assert runner.forward.graphs is not None
    shapes = runner.forward.graphs.shapes | (runner.drafted.graphs.shapes if runner.drafted is not None else set())
    return len(shapes)


def _capture(
    runner: ModelRunner, settings: GraphSettings, plan_in_place: InPlacePlanner, backend: GraphBackend, progress: bool
) -> bool:
    """Captures steps without drafts, and steps with drafts whole, if the attention backend reads lengths on the device;
    otherwise only their verification."""
    most = runner.sampler.passes.rows_at_once
    outputs = StepOutputs(runner.model, most, runner.taps, _keeps_half(runner), settings.hidden)
    graphs = StepGraphs(
        settings, runner.model, plan_in_place, runner.kv_pool, runner.rows, runner.shared, runner.stream, backend,
        outputs, runner.windows,
    )  # fmt: skip
    drafted, why = None, why_drafts_are_not_captured(runner)
    if why is None:
        drafted = DraftGraphs(settings, draft_parts(runner, settings, plan_in_place, outputs), backend)
    if not graphs.capture(drafted, progress=progress):
        return False
    _enter(runner, graphs)
    if outputs.half_logits is not None:
        runner.sampler.kernel.greedy(outputs.half_logits[:1])  # compiles it: the warm-up's logits were float32
    runner.forward.graphs = graphs
    if drafted is not None and drafted.shapes:
        assert runner.speculation is not None
        runner.drafted = DraftedStep(runner.speculation, drafted, runner.rows, runner.stream)
    elif runner.speculation is not None:
        why = why or f"the {runner.forward.attention.name} attention backend plans by exact lengths on the host"
        logger.info("Drafts are not captured (%s): a step with drafts waits once, for the accepted lengths", why)
    return True


def _keeps_half(runner: ModelRunner) -> bool:
    """Whether the logits of captured steps are the head's product itself: neither bounded nor copied to float32."""
    model = runner.model.model if isinstance(runner.model, ExpertRecordingModel) else runner.model
    if not isinstance(model, Decoder) or not isinstance(model.head, Head) or model.config.logit_cap:
        return False
    return model.embedding.weight.itemsize == 2 and runner.sampler.kernel.reads_half


def _enter(runner: ModelRunner, graphs: StepGraphs) -> None:
    """Compiles what enters a captured decode, with a token in the dummy page."""
    static = graphs.inputs.enter(1)
    if static is not None:
        row, packed = (torch.zeros(size, dtype=torch.int64, device=static.ids.device) for size in (1, 4))
        runner.forward.builder.kernels.enter(packed, row, runner.rows.last_token, runner.rows.slot_table, static)
