"""Records a runner's decode steps before the first request, where the device and its kernels can."""

from __future__ import annotations

import logging

from moe_engine.kernels.attention.protocol import Replayable
from moe_engine.types import GraphSettings
from moe_engine.worker.device_stream import make_graphs
from moe_engine.worker.graphs.step_graphs import GraphBackend, StepGraphs
from moe_engine.worker.model_runner import ModelRunner

logger = logging.getLogger("moe_engine")


def record_steps(
    runner: ModelRunner, settings: GraphSettings, *, progress: bool = False, backend: GraphBackend | None = None
) -> int:
    """Sets `ModelRunner.graphs`; on many ranks collective. Returns the number of recordings, 0 where steps stay eager.

    The runner is warm: every kernel that a decode step launches was launched before.

    Args:
        progress: show a bar on stderr.
        backend: what records; default: the device's own, if it has one.
    """
    backend = backend or make_graphs(runner.stream.device)
    if not settings.sizes or backend is None:
        return 0
    attention = runner.attention
    graphs = None
    if isinstance(attention, Replayable):
        graphs = StepGraphs(
            settings, runner.model, attention, runner.kv_pool, runner.rows, runner.shared, runner.stream, backend,
            runner.sampler.passes.rows_at_once,
        )  # fmt: skip
    if graphs is None or not graphs.capture(progress=progress):
        logger.warning("No CUDA graphs: the %s attention backend cannot be replayed for other steps", attention.name)
        return 0
    runner.kv_pool.clear_dummy_page()
    runner.graphs = graphs
    return graphs.num_recorded
