"""All Triton launches of the suite, on meta tensors: the kernels to compile in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite import all_reduce, cases
from benchmarks.gpu_suite.engine_points import V2_LITE, V3_LAYERS, load_of, model_of
from benchmarks.gpu_suite.ranks_here import TINY, TINY_BESIDE, V3_BESIDE, V3_EP8, Load, RanksHere
from benchmarks.gpu_suite.rows import triton_row
from benchmarks.gpu_suite.setting import Setting
from benchmarks.gpu_suite.tokens import PROMPTS, SMALL
from moe_engine.planning.inputs.machine import Machine

Launches = tuple[str, Callable[[], Any]]
"""A name, and a function that makes the launches."""


def of_suite(folder: Path, machine: Machine, setting: Setting) -> Iterator[Launches]:
    """Launches of kernels, of the exchange, and of every engine started on the machine. A dry run on a CPU has few."""
    dry = setting.dry
    if setting.kind == "cpu":
        yield from of_kernels([case for case in cases.tiny_cases() if "quantize" in case.name])
        return
    yield from of_kernels(cases.asked(setting, lambda: [*cases.parity_cases(), *cases.timed_cases()]))
    for load in (TINY, TINY_BESIDE) if dry else (V3_EP8, V3_BESIDE):
        for fp8 in (False, True):
            yield f"exchange of {load.num_local} experts", partial(_exchange, replace(load, fp8=fp8))
    for rows in all_reduce.ROWS:
        yield f"all-reduce of {rows} rows", partial(_all_reduce, *all_reduce.shape_of(dry), rows)
    for name, flags in _engines(folder, setting).items():
        yield name, partial(_engine, flags, machine)


def _engines(folder: Path, setting: Setting) -> dict[str, dict[str, Any]]:
    """Flags of the engines that the parts start."""
    sizes = load_of(setting)
    lite, layers = (model_of(model, folder, setting) for model in (V2_LITE, V3_LAYERS))
    dummy = dict(sizes.flags) | {"load_format": "dummy", "skip_tokenizer_init": True}
    decode = dummy | {"model_path": str(lite), "context_length": 2 * sizes.context}
    rows, last = "max_running_requests", sizes.layer_batches[-1]
    offline = {"context_length": 2 * sizes.offline_tokens + 64, rows: sizes.offline_requests}
    tokens = {rows: len(PROMPTS), **(SMALL if setting.dry else {})}
    return {
        "decode": decode | {rows: max(sizes.decode_batches)},
        "profile": decode | {rows: last},
        "offline": decode | offline,
        "fp8_layers": decode | {"model_path": str(layers), rows: last},
        **{f"tokens in {dtype}": tokens | {"dtype": dtype} for dtype in ("float32", "bfloat16")},
    }


def of_kernels(asked: list[cases.KernelCase]) -> Iterator[Launches]:
    """Launches of Triton's rows on these cases."""
    for case in asked:
        yield case.name, partial(_kernel, case)


def _kernel(case: cases.KernelCase) -> None:
    case.prepare(triton_row(case.family), "meta")()


def _exchange(load: Load) -> None:
    RanksHere(load, "meta").run(0)


def _all_reduce(num_ranks: int, width: int, rows: int) -> None:
    all_reduce.RanksOfSum(num_ranks, rows, width, "meta").call(0)


def _engine(flags: dict[str, Any], machine: Machine) -> None:
    from moe_engine.cli.compile_kernels.exercise import exercise
    from moe_engine.cli.compile_kernels.other_rows import build_triton
    from moe_engine.config.args import EngineArgs
    from moe_engine.planning.prepare import prepare

    config = prepare(EngineArgs.from_kwargs(device="cuda", **flags), machine)
    for _ in exercise(config, build_triton(config.kernels.model.choices)):
        pass
