"""Logs in the documented formats of SGLang, line by line."""

from __future__ import annotations

import time
from typing import Any

from moe_engine.tuning.doctor.diagnosis import Diagnosis, Finding
from moe_engine.tuning.doctor.log_reader import LogReader
from moe_engine.tuning.doctor.memory_costs import ReportedCosts

BEGAN = 1_754_932_623


def stamp(second: float, rank: str = "") -> str:
    text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(BEGAN + second))
    return f"[{text}{' ' + rank if rank else ''}]"


def decode(
    second: float, *, running: int = 100, usage: float = 0.95, queue: int = 200, graph: bool = True,
    accept: float | None = None, rank: str = "",
) -> str:  # fmt: skip
    """A decode line of SGLang 0.5.5."""
    drafts = "" if accept is None else f"accept len: {accept:.2f}, accept rate: 0.50, "
    return (
        f"{stamp(second, rank)} Decode batch, #running-req: {running}, #token: {running * 1000}, "
        f"token usage: {usage:.2f}, {drafts}cuda graph: {graph}, gen throughput (token/s): 4594.01, "
        f"#queue-req: {queue}, "
    )


def prefill(
    second: float, *, new: int = 4000, cached: int = 0, seqs: int = 4, running: int = 0, queue: int = 0, rank: str = ""
) -> str:
    """A prefill line of SGLang 0.5.23."""
    return (
        f"{stamp(second, rank)} Prefill batch, #new-seq: {seqs}, #new-token: {new}, #cached-token: {cached}, "
        f"token usage: 0.50, #running-req: {running}, #queue-req: {queue}, #pending-token: 0, cuda graph: False, "
        f"input throughput (token/s): 1234.50"
    )


def decodes(count: int = 20, **values: Any) -> list[str]:
    return [decode(second, **values) for second in range(count)]


def startup(available: float = 6.5, **sizes: int) -> str:
    """The summary before READY."""
    values = {"max_total_num_tokens": 665690, "chunked_prefill_size": 8192, "max_prefill_tokens": 16384,
              "max_running_requests": 4096, "context_len": 65536} | sizes  # fmt: skip
    words = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{stamp(0, 'TP0')} {words}, available_gpu_mem={available:.2f} GB"


def flags(**values: Any) -> str:
    words = ", ".join(f"{name}={value!r}" for name, value in {"model_path": "/nowhere/V3", **values}.items())
    return f"{stamp(0)} server_args=ServerArgs({words})"


def weights(used: float, available: float = 79.0) -> list[str]:
    return [
        f"{stamp(0, 'TP0')} Load weight begin. avail mem={available:.2f} GB",
        f"{stamp(0, 'TP0')} Load weight end. type=DeepseekV3ForCausalLM, dtype=torch.bfloat16, "
        f"avail mem={available - used:.2f} GB, mem usage={used:.2f} GB.",
    ]


def kv_cache(dtype: str = "bfloat16", tokens: int = 665690, size: float = 40.0) -> str:
    return f"{stamp(0, 'TP0')} KV Cache is allocated. dtype: torch.{dtype}, #tokens: {tokens}, KV size: {size:.2f} GB"


def pools(second: float, full: float, *, swa: float | None = None, mamba: float | None = None, queue: int = 9) -> str:
    """A decode line of SGLang 0.5.23 for a model whose windows or states have a pool of their own."""
    windows = "" if swa is None else f"#swa token: 900, swa token usage: {swa:.2f}, "
    states = "" if mamba is None else f"mamba num: 9, mamba usage: {mamba:.2f}, "
    return (
        f"{stamp(second, 'TP0')} Decode batch, #running-req: 30, #full token: 5000, full token usage: {full:.2f}, "
        f"{windows}{states}cuda graph: True, gen throughput (token/s): 99.50, #queue-req: {queue}"
    )


def decode_server(second: float, *, usage: float = 0.97, prealloc: int = 21, queue: int = 0) -> str:
    """A decode line of SGLang 0.5.23 with --disaggregation-mode decode."""
    return (
        f"{stamp(second, 'TP0')} Decode batch, #running-req: 3, #token: 29088, token usage: {usage:.2f}, pre-allocated "
        f"usage: 0.70, #prealloc-req: {prealloc}, #transfer-req: 12, #retracted-req: 0, cuda graph: True, gen "
        f"throughput (token/s): 33.00, #queue-req: {queue}"
    )


def prefill_server(
    second: float, *, queue: int = 4, seqs: int = 4, new: int = 4000, usage: float = 0.5, rank: str = "TP0"
) -> str:
    """A prefill line of SGLang 0.5.23 with --disaggregation-mode prefill."""
    return (
        f"{stamp(second, rank)} Prefill batch, #new-seq: {seqs}, #new-token: {new}, #cached-token: 0, token usage: "
        f"{usage:.2f}, #running-req: 0, #queue-req: {queue}, #pending-token: 0, #bootstrap-req: 2, #inflight-req: 3, "
        "#optimistic-req: 0, cuda graph: False, input throughput (token/s): 7.29"
    )


def pool_error(second: float, full: int, swa: int | None = None) -> list[str]:
    """The lines of SGLang 0.5.23 when a pool has no room for a chunk, up to the end of the traceback."""
    windows = [] if swa is None else [f"Available swa: {swa} (available_size={swa} + component_evictable_size_=0)"]
    error = [
        "Prefill out of memory. Try to lower your batch size.",
        "Try to allocate 8192 tokens.",
        f"Available full tokens: {full} (full_available_size={full} + full_evictable_size_=0)",
        *windows,
        "",
    ]
    return [f"{stamp(second, 'TP0')} {error[0]}", *error[1:], "Traceback:", f"RuntimeError: {error[0]}", *error[1:]]


def retraction(second: float) -> str:
    return (
        f"{stamp(second)} KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 812, "
        "#new_token_ratio: 0.5243 -> 0.9998"
    )


def ready(second: float = 0) -> str:
    return f"{stamp(second)} The server is fired up and ready to roll!"


def read(lines: list[str], window: float = 0.0) -> LogReader:
    diagnosis = Diagnosis()
    reader = LogReader(diagnosis, window)
    diagnosis.costs = ReportedCosts(reader.launch)
    reader.read(line + "\n" for line in lines)
    reader.finish()
    return reader


def findings(lines: list[str], window: float = 0.0) -> dict[str, Finding]:
    return {finding.name: finding for finding in read(lines, window).diagnosis.findings()}
