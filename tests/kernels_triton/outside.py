"""What must run outside the interpreter, as a process: ``python -m tests.kernels_triton.outside NAME CACHE``.

Each function prints one JSON value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton import knobs

from moe_engine.kernels.ops import triton_norm, triton_rotary, triton_router
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.ops.triton_ops import TritonOps
from moe_engine.kernels.sampling import triton_sampling
from moe_engine.kernels.sampling.protocol import SamplingParameters
from moe_engine.kernels.triton import guard
from moe_engine.kernels.triton.absent_device import absent_device
from moe_engine.kernels.triton.aot import AotCase, compile_case

ARCH = 90


def there(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of the device that is absent."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch(count: int) -> None:
    """The small operations of a DeepSeek-V3 layer and the sampling of its logits, for `count` tokens."""
    ops, sampling = TritonOps(), triton_sampling.TritonSampling()
    positions, slots = there(3 * count + 1, dtype=torch.int64)[1:].split(count)[:2]  # slices of one upload
    table = RotaryTable(there(4096, 64, dtype=torch.float32), True)
    hidden, projected = there(count, 7168), there(count, 2112)
    ops.rms_norm(hidden, there(7168), 1e-6)
    ops.rms_norm(projected[:, :1536], there(1536), 1e-6)
    ops.add_rms_norm(hidden, there(count, 7168), there(7168), 1e-6)
    ops.silu_and_mul(there(count, 4096))
    ops.rotate(there(count, 128, 192), positions, table)
    ops.write_latent(projected[:, 1536:], there(512), 1e-6, positions, table, slots, there(900, 576))
    ops.route(hidden, there(256, 7168, dtype=torch.float32), there(256, dtype=torch.float32), triton_router.V3)
    narrow = [there(4 * count + 1, dtype=torch.float32)[1:].split(count)[n] for n in range(4)]
    top_k = there(2 * count, dtype=torch.int64)[count:]
    parameters = SamplingParameters(None, *narrow[:3], top_k, True)  # type: ignore[arg-type]
    logits = there(count, 129280, dtype=torch.float32)
    sampling.greedy(logits)
    sampling.sample(logits, parameters, narrow[3])
    sampling.probabilities(logits, parameters, there(count, 1, dtype=torch.int64))


def expected() -> list[AotCase]:
    """The cases that `launch(1)` to `launch(16)` ask for."""
    bf16, int64 = torch.bfloat16, torch.int64
    return [
        triton_norm.norm_case("v3", 7168, 1, False),
        triton_norm.norm_case("v3", 1536, 1, False),
        triton_norm.norm_case("v3", 7168, 1, True),
        triton_norm.silu_case("v3", 2048),
        triton_rotary.rotate_case("v3", 128, 64, True),
        triton_rotary.latent_case("v3", 512, 64, bf16, int64),
        *triton_router.route_cases("v3", 7168, triton_router.V3, 1, bf16),
        *(case for case in triton_sampling.vocabulary_cases("v3", 129280) if "look_up_16" not in case.name),
    ]


def agreement(cache: str) -> Any:
    """(number of cases compiled, kernels that launches asked for, how many of these the cases had cached)."""
    with knobs.cache.scope():
        knobs.cache.dir = cache
        cases = [compile_case(case, ARCH).name for case in expected()]
    with absent_device(ARCH, cache) as compilations:
        for count in (1, 2, 3, 8, 16):  # odd counts, counts of one, multiples of 16: all must be the same kernels
            launch(count)
    return len(cases), [report.name for report in compilations.reports], compilations.num_cached


def guarding(cache: str) -> Any:
    """Counts of the guard after a warm-up, after the same launches once more, and after one that it did not make."""
    counts = []
    guard.watch()
    guard.watch()  # once more changes nothing
    with absent_device(ARCH, cache):
        ops, weight = TritonOps(), there(2048)
        ops.rms_norm(there(4, 2048), weight, 1e-6)
        guard.ready()
        counts.append([*guard.compilations_before_ready(), guard.compilations_after_ready()])
        ops.rms_norm(there(7, 2048), weight, 1e-6)
        counts.append([*guard.compilations_before_ready(), guard.compilations_after_ready()])
        ops.add_rms_norm(there(7, 2048), there(7, 2048), weight, 1e-6)
        counts.append([*guard.compilations_before_ready(), guard.compilations_after_ready()])
    return counts


NAMES: dict[str, Callable[[str], Any]] = {"agreement": agreement, "guarding": guarding}

if __name__ == "__main__":
    print(json.dumps(NAMES[sys.argv[1]](sys.argv[2])))
