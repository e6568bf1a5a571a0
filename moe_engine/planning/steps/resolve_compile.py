"""Resolves --enable-torch-compile: which decode steps are compiled. Invalid combinations are refused by both names."""

from __future__ import annotations

from moe_engine.config.args import EngineArgs
from moe_engine.config.field import option_of
from moe_engine.errors import ConfigError
from moe_engine.kernels.weight_forms import FP8_BLOCKS
from moe_engine.models.config import ModelConfig
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.steps.resolve_kernels import FLAGS
from moe_engine.types import SpeculationConfig
from moe_engine.types.step_settings import CompileSettings

FLAG = "--enable-torch-compile"
INSIDE = ("ops", "linear")
"""Kernel families whose operators are compiled together."""
IN_BLOCKS = dict.fromkeys(("linear", "experts"), frozenset((FP8_BLOCKS,)))
"""Kernels of a GPU that torch cannot trace."""


def compiled_rows(
    args: EngineArgs, model: ModelConfig, parallel: ParallelPlan, device: str, record: Record
) -> dict[str, str]:
    """Kernel rows that --enable-torch-compile needs, by family; {} without the flag. Pure.

    Raises:
        ConfigError: torch cannot compile the steps of this launch.
    """
    asked = args.backends
    if not asked.enable_torch_compile:
        return {}
    if asked.enable_deterministic_inference:
        raise ConfigError(
            f"{FLAG} with --enable-deterministic-inference: the order of summation of compiled steps depends on their "
            "number of tokens; drop one"
        )
    if parallel.topology.tp_size > 1:
        raise ConfigError(
            f"{FLAG} with --tp-size {parallel.topology.tp_size}: only layers of one rank are compiled; drop one"
        )
    if any(getattr(kind, "gate_width", 0) for kind in model.attentions):
        raise ConfigError(f"{FLAG}: not available yet: layers with output gates are not compiled; leave it out")
    if model.moe is not None and model.moe.normed:
        raise ConfigError(f"{FLAG}: not available yet: experts with norms of their own are not compiled; leave it out")
    if device != "cpu" and (kept := model.weight_format.held_by(IN_BLOCKS).name):
        raise ConfigError(f"{FLAG} with {kept} weights: torch cannot trace their GEMM kernels; drop it")
    for name in (FLAGS[family] for family in INSIDE):
        value = getattr(asked, name)
        if value not in ("auto", "torch"):
            raise ConfigError(
                f"{FLAG} with {option_of(name)} {value}: torch cannot trace these kernels; use torch, or drop one"
            )
        if value == "auto":
            record.note(name, "torch", f"{FLAG} compiles torch's own operators")
    return dict.fromkeys(INSIDE, "torch")


def compile_settings(args: EngineArgs, speculation: SpeculationConfig | None, running: int) -> CompileSettings:
    """Sizes of compiled decode steps.

    Args:
        running: max requests of a decode step.
    """
    asked = args.backends
    if not asked.enable_torch_compile:
        return CompileSettings()
    tokens = 1 if speculation is None else speculation.num_draft_tokens
    return CompileSettings(min(asked.torch_compile_max_bs, running) * tokens, asked.torch_compile_cache_dir or "")
