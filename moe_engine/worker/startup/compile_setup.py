"""torch.compile of decode steps before the first request; compiled code of an earlier start is loaded from disk."""

from __future__ import annotations

import logging

from moe_engine.errors import ConfigError
from moe_engine.kernels import torch_regions
from moe_engine.kernels.torch_regions import CompiledRegions
from moe_engine.types.step_settings import CompileSettings
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.startup.warmup import compile_regions

logger = logging.getLogger("moe_engine")


def start_regions(settings: CompileSettings) -> CompiledRegions | None:
    """To be called before the model is built, whose first steps compile; None if nothing is compiled.

    Raises:
        ConfigError: compiled code cannot be kept.
    """
    if not settings.max_tokens:
        return None
    try:
        folder = torch_regions.keep_compiled_code(settings.folder)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: the folder of compiled code cannot be created ({error.strerror}); name another one "
            "with --torch-compile-cache-dir"
        ) from None
    torch_regions.watch()
    logger.info("torch.compile of decodes up to %d tokens; compiled code is kept in %s", settings.max_tokens, folder)
    return CompiledRegions(settings.max_tokens)


def finish_regions(runner: ModelRunner, regions: CompiledRegions | None) -> None:
    """To be called after the warm-up: compiles the remaining regions and logs the counts."""
    if regions is None:
        return
    compile_regions(runner, regions)
    regions.sealed = True
    loaded, compiled = torch_regions.loaded_and_compiled()
    if not regions.num_functions:
        logger.warning("--enable-torch-compile: %s has no regions to compile", type(runner.model).__name__)
    logger.info("torch.compile end. %d graphs loaded, %d compiled.", loaded, compiled)
