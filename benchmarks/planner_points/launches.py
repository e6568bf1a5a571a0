"""Flags of the measured launches, which the table of points does not have: from the scripts of their benchmark
(InferenceX, benchmarks/single_node of 2026-04-10; for B300 of 2026-04-28)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_engine.tuning.planner.steady import AT_ONCE, PromptTurns

DEFAULT_CHUNK = 16384
"""Of launches without a script."""


@dataclass(frozen=True)
class Launch:
    """kv: dtype of the KV cache. chunk: prompt tokens of a step. expert_rows: as in `Precision`. graphs: whether
    decodes run as CUDA graphs."""

    kv: str = "bf16"
    chunk: int = DEFAULT_CHUNK
    turns: PromptTurns = AT_ONCE
    expert_rows: int = 0
    graphs: bool = True


UNKNOWN = Launch()


def of_inferencex(row: Mapping[str, Any]) -> bool:
    """Whether a row is of InferenceX: rows with a date, and those without one that repeat its times."""
    return bool(row["silicon_data_source"]) or "Qwen3-235B" not in row["model_path"]


def launch_of(row: Mapping[str, Any], gpu: str) -> Launch:
    """gpu: its name in the planner's tables."""
    engine, blackwell = row["backend"], "b" in gpu
    if not of_inferencex(row):
        # vLLM 0.12 gives FP8 experts to DeepGEMM in blocks of 128 rows, in decodes too
        padded = 128 if row["backend_version"] == "0.12.0" and row["precision"] == "fp8" else 0
        chunk = DEFAULT_CHUNK if engine == "sglang" else 8192  # the engines' own
        return Launch("fp8" if engine == "trtllm" else "bf16", chunk, expert_rows=padded)
    family = next(
        name for name in ("DeepSeek", "Qwen", "GLM", "MiniMax", "Kimi", "gpt-oss") if name in row["model_path"]
    )
    dtype, prompt, requests = row["precision"], int(row["isl"]), int(float(row["concurrency"]))
    if engine == "sglang":
        return _sglang(family, dtype, requests, blackwell)
    if engine == "vllm":
        chunk = 2 * prompt if family == "MiniMax" and blackwell else 8192
        return Launch("fp8" if blackwell and dtype != "int4" else "bf16", chunk)
    if row["backend_version"] == "1.3.0rc1":
        # 85 to 91 ms a token for 5 to 56 requests a GPU, 1.3 ms a layer in both models: eager launches
        return Launch("bf16" if family == "gpt-oss" else "fp8", graphs=False)
    if family == "gpt-oss":
        return Launch("fp8" if blackwell else "bf16", 20000)
    chunk = max(8192, (requests + prompt + 127) // 64 * 64)
    if float(row["attention_dp_size"] or 1) == 1:
        return Launch("fp8", chunk)
    # attention_dp_config: enable_balance, timeout_iters 60
    return Launch("fp8", chunk, PromptTurns(waits=60, uneven=0))


def _sglang(family: str, dtype: str, requests: int, blackwell: bool) -> Launch:
    if not blackwell:
        if family == "Qwen":
            return Launch("fp8", 16384)
        return Launch("bf16", 32768 if family == "DeepSeek" else 8192)
    interval = 1 if (family, dtype) == ("GLM", "fp8") else 10 if family == "GLM" or requests < 16 else 30
    chunk = 16384 if (family, dtype) == ("DeepSeek", "fp4") else 32768
    return Launch("bf16" if dtype == "bf16" else "fp8", chunk, PromptTurns(waits=interval / 2))
