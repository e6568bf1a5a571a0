"""Where the time of a decode step goes: device time by class of kernel, and how long the device had nothing to do."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.engine_points import CONTEXT, V2_LITE, write_model

CLASSES = (
    ("attention", r"latent_kernel|expanded_kernel|paged_kernel|gather_kernel|merge_|flash|mla|fmha|attention"),
    ("experts", r"grouped|expert|permute|place_kernel|count_kernel|combine_kernel|moe"),
    ("router", r"router_"),
    ("sampling", r"limits_kernel|draw_kernel|greedy_kernel|look_up|argmax|topk|sort"),
    ("norms and rotary", r"rms_norm|rotate_kernel|write_latent|write_kv|layer_norm"),
    ("activation", r"silu"),
    ("products", r"block_gemm|gemm|gemv|cutlass|cublas|nvjet|sm90_xmma|splitk|sum_parts|matmul"),
    ("quantisation", r"quantize"),
    ("copies", r"memcpy|memset|copy|fill|cat|index|gather|scatter"),
)
"""The first class whose pattern is found in a kernel's name, in any case, has it."""

BATCH = 128
STEPS = 8


def class_of(kernel: str) -> str:
    """``other`` where no pattern fits."""
    return next((name for name, pattern in CLASSES if re.search(pattern, kernel, re.IGNORECASE)), "other")


def by_class(kernels: Iterable[tuple[str, float, int]]) -> dict[str, dict[str, float]]:
    """(name, microseconds, launches) of kernels -> the sums of every class, the longest first."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: {"us": 0.0, "launches": 0})
    for name, us, launches in kernels:
        sums[class_of(name)]["us"] += us
        sums[class_of(name)]["launches"] += launches
    return dict(sorted(sums.items(), key=lambda item: -item[1]["us"]))


def measure(folder: Path) -> dict[str, Any]:
    """Decode steps of DeepSeek-V2-Lite's shape with `BATCH` requests; per step."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.step_driver import BatchDriver, create_worker
    from moe_engine.config.args import EngineArgs
    from moe_engine.config.launch_plan import prepare

    model = write_model(folder / "v2_lite", V2_LITE)
    config = prepare(
        EngineArgs.from_kwargs(
            model_path=str(model), load_format="dummy", device="cuda", skip_tokenizer_init=True,
            context_length=2 * CONTEXT, max_running_requests=BATCH,
        )
    )  # fmt: skip
    worker = create_worker(config)
    draw = random.Random(0)
    prompts = [[draw.randrange(1000, 100000) for _ in range(CONTEXT)] for _ in range(BATCH)]
    driver = BatchDriver(worker, config, prompts, CONTEXT + STEPS + 8, config.max_prefill_tokens)
    driver.prefill()
    for _ in range(4):
        driver.decode()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        wall = sum(driver.decode() for _ in range(STEPS))
    driver.close()
    worker.close()
    events = [e for e in profiler.key_averages() if e.self_device_time_total]
    classes = by_class((e.key, e.self_device_time_total / STEPS, e.count / STEPS) for e in events)
    busy = sum(entry["us"] for entry in classes.values())
    longest = [
        {"kernel": e.key, "us": e.self_device_time_total / STEPS, "class": class_of(e.key)}
        for e in sorted(events, key=lambda e: -e.self_device_time_total)[:20]
    ]
    return {
        "batch": BATCH, "context": CONTEXT, "step_us": wall / STEPS * 1e6, "device_us": busy, "classes": classes,
        "longest": longest,
    }  # fmt: skip
