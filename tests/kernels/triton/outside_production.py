"""Launches of a model's steps in production sizes, outside the interpreter on an absent H200, in a separate process:
``python -m tests.kernels.triton.outside_production FOLDER MODEL FORM``.

Prints the number of kernels, and for each kernel, and for one with an error, the sums and products of 32 bits in its
addresses that exceed them with the largest grid and arguments of its launches. A grid that no device launches is an
error.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.gpu_suite.engine_points import write_model
from benchmarks.step_costs.models import MODELS, shortened
from moe_engine.cli.compile_kernels.exercise import exercise
from moe_engine.cli.compile_kernels.other_rows import build_triton
from moe_engine.config.args import EngineArgs
from moe_engine.kernels.triton.absent_device import absent_device
from moe_engine.kernels.warmup_sizes import StepSize
from moe_engine.planning.hardware import GPUS
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from tests.kernels.triton import grid_limits
from tests.kernels.triton.address_bounds import (
    ACCEPTED,
    KNOWN,
    LIMIT,
    Bounds,
    first_representation,
    narrow_kernel,
    too_large,
)
from tests.kernels.triton.cache_keys import Key, key_of, there
from tests.models import published

PUBLISHED = {
    **{name: shortened(fields)[0] for name, fields in MODELS.items()}, "glm-5.2": published.GLM_5_2,
    "qwen3.8": published.QWEN3_8, "kimi-linear": published.KIMI_LINEAR, "nemotron-3": published.NEMOTRON_3_NANO,
    "ling-flash": published.LING_FLASH, "longcat-flash": published.LONGCAT_FLASH,
    "qwen-3.8-flash-next": published.QWEN_3_8_FLASH_NEXT,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {"tp1": {}, "dp8ep8": {"tp_size": 8, "attn_dp_size": 8, "ep_size": 8}}
"""Flags. The most heads of a rank, and the most tokens of the experts."""
REQUESTS, CHUNK, CONTEXT = 256, 32768, 1 << 20
ENOUGH_BYTES = 10**13
"""For the weights and the KV of each model: offsets do not depend on what fits."""
STEPS = (
    StepSize(REQUESTS, 1, 4096), StepSize(REQUESTS, 4, 4096), StepSize(1, 1, CONTEXT), StepSize(0, 1, 0, CHUNK),
    StepSize(0, 1, 0, CHUNK // 2, CONTEXT // 2), StepSize(7, 1, 50, 300, 64),
)  # fmt: skip


@dataclass
class Seen:
    """The compiler's input, the largest grid, and the largest integers by argument.

    narrow: the kernel multiplies slots in 32 bits, since the elements of the caches are fewer.
    """

    given: dict[str, Any]
    grid: tuple[int, ...]
    values: dict[str, int]
    narrow: bool = False

    def bounds(self, known: Bounds) -> Bounds:
        """Those of the launches."""
        strides = [
            value for name, value in self.values.items() if name in ("cache_stride", "key_stride", "value_stride")
        ]
        loaded = min(known.loaded, (LIMIT - 1) // max(strides)) if self.narrow else known.loaded
        return known._replace(loaded=loaded, grid=self.grid, values=self.values)


@contextmanager
def seen(arch: int) -> Iterator[dict[Key, Seen]]:
    """Inside, launches are added, and neither compile nor run. Raises GridError."""
    found: dict[Key, Seen] = {}
    run, own = JITFunction.run, Seen({}, (), {})

    def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        names = inspect.getfullargspec(kernel.fn).args
        known = {name: value for name, value in options.items() if name in names}
        given = inspect.getcallargs(kernel.fn, *args, **known)
        places = tuple(grid(given) if callable(grid) else grid)
        grid_limits.check(kernel.fn.__name__, places)
        own.grid = places + (1,) * (3 - len(places))
        own.narrow = given.get("WIDE") is False
        own.values = {name: abs(value) for name, value in given.items() if type(value) is int}
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    def note(src: Any, target: GPUTarget, options: dict[str, Any], **rest: Any) -> None:
        given = {"src": src, "target": target, "options": options}
        before = found.setdefault(key_of(src, target, options), replace(own, given=given))
        before.grid = tuple(map(max, before.grid, own.grid))
        before.values = {name: max(value, before.values[name]) for name, value in own.values.items()}

    with (
        absent_device(arch),
        patch.object(triton.compiler, "compile", note),
        patch.object(JITFunction, "run", launched),
    ):
        yield found


def launch_of(folder: Path, model: str, form: str) -> ResolvedConfig:
    """The launch of a model on Triton's rows."""
    fields = PUBLISHED[model]
    text = fields.get("text_config", fields)
    longest = min(CONTEXT, text.get("max_position_embeddings", CONTEXT))
    args = EngineArgs.from_kwargs(
        model_path=str(write_model(folder / "model", fields)), load_format="dummy", device="cuda",
        max_running_requests=REQUESTS, chunked_prefill_size=CHUNK, context_length=longest, **FORMS[form],
    )  # fmt: skip
    return prepare(args, replace(GPUS["h200"], memory_bytes=ENOUGH_BYTES).machine())


def sizes_of(config: ResolvedConfig) -> list[StepSize]:
    """`STEPS`, within the longest context."""
    most = config.context_len
    found = [replace(size, context=min(size.context, most), prefill=min(size.prefill, most)) for size in STEPS]
    return [replace(size, prefix=min(size.prefix, most - size.prefill)) for size in found]


def main() -> None:
    folder, model, form = Path(sys.argv[1]), *sys.argv[2:]
    config = launch_of(folder, model, form)
    with seen(90) as launches:
        for _ in exercise(config, build_triton(config.kernels.model.choices), sizes_of(config)):
            pass
        narrow_kernel[(CHUNK,)](there(1), CHUNK, WIDTH=CHUNK)
    found: dict[str, list[str]] = {}
    for one in launches.values():
        kernel = one.given["src"].fn.__name__
        bounds = one.bounds(KNOWN.get(kernel, Bounds()))
        wrong = too_large(first_representation(one.given), bounds) - ACCEPTED.get(kernel, set())
        found[kernel] = sorted({*found.get(kernel, ()), *wrong})
    print(json.dumps([len(launches), found]))


if __name__ == "__main__":
    main()
