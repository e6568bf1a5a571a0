"""Time profile of a decode step: device time by class of kernel, and device idle time."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.engine_points import V2_LITE, load_of, model_of
from benchmarks.gpu_suite.setting import Setting

CLASSES = (
    ("attention", r"latent_kernel|expanded_kernel|paged_kernel|gather_kernel|merge_|flash|mla|fmha|attention"),
    ("experts", r"grouped|expert|permute|place_kernel|count_kernel|combine_|moe"),
    ("router", r"router_"),
    ("sampling", r"limits_kernel|draw_kernel|greedy_kernel|look_up|argmax|topk|sort"),
    ("norms and rotary", r"rms_norm|rotate_kernel|absorb|write_latent|write_kv|layer_norm"),
    ("activation", r"silu"),
    ("products", r"block_gemm|heads_quantize|gemm|gemv|cutlass|cublas|nvjet|sm90_xmma|splitk|sum_parts|matmul"),
    ("quantization", r"quantize"),
    ("copies", r"memcpy|memset|copy|fill|cat|index|gather|scatter"),
)
"""A kernel belongs to the first class whose pattern matches its name, ignoring case."""

STEPS = 8


def class_of(kernel: str) -> str:
    """``other`` if no pattern matches."""
    return next((name for name, pattern in CLASSES if re.search(pattern, kernel, re.IGNORECASE)), "other")


def by_class(kernels: Iterable[tuple[str, float, int]]) -> dict[str, dict[str, float]]:
    """(name, microseconds, launches) of kernels -> the sums of every class, longest first."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: {"us": 0.0, "launches": 0})
    for name, us, launches in kernels:
        sums[class_of(name)]["us"] += us
        sums[class_of(name)]["launches"] += launches
    return dict(sorted(sums.items(), key=lambda item: -item[1]["us"]))


def measure(folder: Path, setting: Setting) -> dict[str, Any]:
    """Decode steps of DeepSeek-V2-Lite's shape with a large batch; per step. On a CPU the times are the CPU's."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.step_driver import BatchDriver, create_worker
    from moe_engine.config.args import EngineArgs
    from moe_engine.planning.prepare import prepare

    model, load = model_of(V2_LITE, folder, setting), load_of(setting)
    batch, context = load.layer_batches[-1], load.context
    config = prepare(
        EngineArgs.from_kwargs(
            model_path=str(model), load_format="dummy", device=setting.kind, skip_tokenizer_init=True,
            context_length=2 * context, max_running_requests=batch, **dict(load.flags),
        )
    )  # fmt: skip
    worker = create_worker(config)
    draw = random.Random(0)
    prompts = [[draw.randrange(2, config.model.vocab_size) for _ in range(context)] for _ in range(batch)]
    driver = BatchDriver(worker, config, prompts, context + STEPS + 8)
    driver.prefill()
    for _ in range(4):
        driver.decode()
    activity, kind, of_event = {
        "cpu": (ProfilerActivity.CPU, DeviceType.CPU, "self_cpu_time_total"),
        "cuda": (ProfilerActivity.CUDA, DeviceType.CUDA, "self_device_time_total"),
    }[setting.kind]
    with profile(activities=[activity]) as profiler:
        wall = sum(driver.decode() for _ in range(STEPS))
    driver.close()
    worker.close()
    averages = [event for event in profiler.key_averages() if event.device_type == kind]
    spent = {event.key: (getattr(event, of_event) / STEPS, event.count / STEPS) for event in averages}
    events = sorted(((name, *both) for name, both in spent.items() if both[0]), key=lambda event: -event[1])
    classes = by_class(events)
    busy = sum(entry["us"] for entry in classes.values())
    longest = [{"kernel": name, "us": us, "class": class_of(name)} for name, us, _ in events[:20]]
    step = wall / STEPS * 1e6
    return {
        "batch": batch, "context": context, "step_us": step, "device_us": busy, "classes": classes,
        "longest": longest, "next": next_three(longest, step, busy),
    }  # fmt: skip


def next_three(longest: Sequence[dict[str, Any]], step_us: float, busy_us: float) -> list[dict[str, Any]]:
    """Optimization candidates: the kernels with the largest share of a step, and the idle time."""
    idle = {"kernel": "no kernel runs: the device waits for the host", "us": max(0.0, step_us - busy_us)}
    worst = sorted((idle, *longest), key=lambda entry: -entry["us"])[:3]
    return [{"kernel": entry["kernel"], "us": entry["us"], "share": entry["us"] / step_us} for entry in worst]
