"""Captures a runner's decode steps as CUDA graphs before the first request, if device and kernels support it."""

from __future__ import annotations

import logging

from moe_engine.step_settings import GraphSettings
from moe_engine.worker.device_stream import make_graphs
from moe_engine.worker.graphs.step_graphs import GraphBackend, StepGraphs
from moe_engine.worker.model_runner import ModelRunner

logger = logging.getLogger("moe_engine")


def capture_graphs(
    runner: ModelRunner, settings: GraphSettings, *, progress: bool = False, backend: GraphBackend | None = None
) -> int:
    """Sets `ModelRunner.graphs`; collective on several ranks. Returns the number of graphs, 0 if steps stay eager.

    The runner must be warmed up: every kernel of a decode step was launched before.

    Args:
        progress: show a progress bar on stderr.
        backend: graph backend; default: the device's own, if it has one.
    """
    backend = backend or make_graphs(runner.stream.device)
    if not settings.sizes or backend is None:
        return 0
    attention = runner.attention
    plan_in_place, graphs = attention.capabilities.plan_in_place, None
    if plan_in_place is not None:
        graphs = StepGraphs(
            settings, runner.model, plan_in_place, runner.kv_pool, runner.rows, runner.shared, runner.stream, backend,
            runner.sampler.passes.rows_at_once, runner.window,
        )  # fmt: skip
    if graphs is None or not graphs.capture(progress=progress):
        logger.warning("No CUDA graphs: the %s attention backend cannot be replayed for other steps", attention.name)
        return 0
    runner.kv_pool.clear_dummy_page()
    runner.graphs = graphs
    return graphs.num_graphs
