"""Has torch compile its part of decode steps before the first request, or load what an earlier start compiled."""

from __future__ import annotations

import logging

from moe_engine.kernels import torch_regions
from moe_engine.kernels.torch_regions import Regions
from moe_engine.types import CompileSettings
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.startup.warmup import compile_regions

logger = logging.getLogger("moe_engine")


def start_regions(settings: CompileSettings) -> Regions | None:
    """Before the model is built, which compiles at its first steps; None where nothing is to be compiled."""
    if not settings.max_tokens:
        return None
    folder = torch_regions.keep_compiled_code(settings.folder)
    torch_regions.watch()
    logger.info("torch.compile of decodes up to %d tokens; compiled code is kept in %s", settings.max_tokens, folder)
    return Regions(settings.max_tokens)


def finish_regions(runner: ModelRunner, regions: Regions | None) -> None:
    """After the warm-up: compiles what it did not need, and says what there was to do."""
    if regions is None:
        return
    compile_regions(runner, regions)
    regions.sealed = True
    loaded, compiled = torch_regions.loaded_and_compiled()
    if not regions.num_functions:
        logger.warning("--enable-torch-compile: %s has nothing that torch compiles", type(runner.model).__name__)
    logger.info("torch.compile end. %d graphs loaded, %d compiled.", loaded, compiled)
