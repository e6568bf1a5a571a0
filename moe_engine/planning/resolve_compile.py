"""From flags to the decode steps that torch compiles. Combinations that cannot work are refused with both names."""

from __future__ import annotations

from moe_engine.config.args import EngineArgs
from moe_engine.config.field import option_of
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.resolve_parallel import ParallelPlan
from moe_engine.types import CompileSettings, SpeculationConfig

FLAG = "--enable-torch-compile"
INSIDE = ("ops_backend", "linear_backend")
"""Flags of the families whose operators are compiled together."""


def resolve_compile(
    args: EngineArgs,
    model: ModelConfig,
    parallel: ParallelPlan,
    device: str,
    speculation: SpeculationConfig | None,
    running: int,
    record: Record,
) -> CompileSettings:
    """Pure.

    Args:
        running: most requests of a decode step.

    Raises:
        ConfigError: torch cannot compile the steps of such a launch.
    """
    asked = args.backends
    if not asked.enable_torch_compile:
        return CompileSettings()
    if asked.enable_deterministic_inference:
        raise ConfigError(
            f"{FLAG} with --enable-deterministic-inference: compiled steps of one token, of several and of many sum in "
            "different orders; drop one"
        )
    if parallel.topology.tp_size > 1:
        raise ConfigError(f"{FLAG} with --tp-size {parallel.topology.tp_size}: only layers of one rank are compiled")
    if model.quant is not None and device != "cpu":
        raise ConfigError(
            f"{FLAG} with {model.quant.method} weights: their products are kernels that torch cannot look into; drop it"
        )
    for name in INSIDE:
        value = getattr(asked, name)
        if value not in ("auto", "torch"):
            raise ConfigError(
                f"{FLAG} with {option_of(name)} {value}: torch cannot look into these kernels; use torch, or drop one"
            )
        if value == "auto":
            record.note(name, "torch", f"{FLAG} compiles what torch computes itself")
    tokens = 1 if speculation is None else speculation.num_draft_tokens
    return CompileSettings(min(asked.torch_compile_max_bs, running) * tokens, asked.torch_compile_cache_dir or "")
