"""All Triton launches of the suite, on meta tensors: the kernels to compile in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite import cases
from benchmarks.gpu_suite.engine_points import FULL, V2_LITE, V3_LAYERS, write_model
from benchmarks.gpu_suite.exchange import V3_BESIDE, V3_EP8, Load, RanksHere
from benchmarks.gpu_suite.rows import FAMILIES, PARTS
from benchmarks.gpu_suite.tokens import PROMPTS
from benchmarks.kernel_cases import all_cases
from moe_engine.kernels.registry import Choice
from moe_engine.planning.machine import Machine

Launches = tuple[str, Callable[[], Any]]
"""A name, and a function that makes the launches."""


def of_suite(folder: Path, machine: Machine, dry: bool) -> Iterator[Launches]:
    """Launches of kernels, of the exchange, and of every engine started on the machine. A dry run has few."""
    yield from of_kernels([case for case in cases.tiny_cases() if dry and "quantize" in case.name])
    if dry:
        return
    yield from of_kernels([*cases.parity_cases(), *cases.timed_cases(), *all_cases()])
    for load in (V3_EP8, V3_BESIDE):
        for fp8 in (False, True):
            yield f"exchange of {load.num_local} experts", partial(_exchange, replace(load, fp8=fp8))
    lite, layers = (write_model(folder / model["model_type"], model) for model in (V2_LITE, V3_LAYERS))
    context, tokens = 2 * FULL.context, FULL.offline_tokens
    dummy: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    decode = dummy | {"model_path": str(lite), "context_length": context}
    engines: dict[str, dict[str, Any]] = {
        "decode": decode | {"max_running_requests": max(FULL.decode_batches)},
        "profile": decode | {"max_running_requests": FULL.layer_batches[-1]},
        "offline": decode | {"context_length": 2 * tokens + 64, "max_running_requests": FULL.offline_requests},
        "fp8_layers": dummy
        | {"model_path": str(layers), "context_length": context, "max_running_requests": max(FULL.layer_batches)},
    }
    for dtype in ("float32", "bfloat16"):
        engines[f"tokens in {dtype}"] = {"dtype": dtype, "max_running_requests": len(PROMPTS)}
    for name, flags in engines.items():
        yield name, partial(_engine, flags, machine)


def of_kernels(asked: list[cases.KernelCase]) -> Iterator[Launches]:
    """Launches of Triton's rows on these cases."""
    rows = {family: next(row for row in table if row.name == "triton") for family, table in FAMILIES.items()}
    kernels = {family: Choice(family, row, "to be compiled").build() for family, row in rows.items()}
    kernels |= {part: import_module(f"moe_engine.kernels.{modules['triton']}") for part, modules in PARTS.items()}
    for case in asked:
        yield case.name, partial(_kernel, case, kernels[case.family])


def _kernel(case: cases.KernelCase, kernel: Any) -> None:
    case.prepare(kernel, "meta")()


def _exchange(load: Load) -> None:
    RanksHere(load, "meta").run(0)


def _engine(flags: dict[str, Any], machine: Machine) -> None:
    from moe_engine.cli.compile_kernels.exercise import exercise
    from moe_engine.cli.compile_kernels.other_rows import build_triton
    from moe_engine.config.args import EngineArgs
    from moe_engine.planning.prepare import prepare

    config = prepare(EngineArgs.from_kwargs(device="cuda", **flags), machine)
    for _ in exercise(config, build_triton(config.kernels.model.choices)):
        pass
