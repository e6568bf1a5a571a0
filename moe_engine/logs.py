"""Logging in SGLang's format, and the startup lines that tools parse. The scheduler writes the batch lines.

Every line is ``[2025-11-11 13:01:09 TP0] message``; a single-rank engine omits the rank.
GB are 2^30 bytes, as in SGLang.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from moe_engine.processes.unblocked_stream import unblocked

LOGGER = "moe_engine"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
READY_LINE = "The server is fired up and ready to roll!"


class Formatter(logging.Formatter):
    """``[time tag] message``. The tag is empty or has the rank: `` DP0 TP1``."""

    def __init__(self, tag: str = "") -> None:
        tag = f" {tag.strip()}" if tag.strip() else ""
        super().__init__(f"[%(asctime)s{tag.replace('%', '%%')}] %(message)s", DATE_FORMAT)


def rank_name(rank: int, size: int, group: int | None) -> str:
    """The tag of a rank of a model replica of `size` ranks: ``DP0 TP3``, ``DP0`` or ``TP3``. `group`: its attention
    group among those of all replicas; None with a single group in total."""
    prefix = "" if group is None else f"DP{group} "
    return f"{prefix}TP{rank}" if size > 1 or not prefix else prefix.strip()


def setup_logging(level: str = "info", tag: str = "", stream: TextIO | None = None) -> logging.Logger:
    """Logs the engine's messages at `level` and above to `stream` (stderr). May be called again; the last call wins."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(level.upper())
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream) if stream is not None else StderrHandler()
    handler.setFormatter(Formatter(tag))
    logger.addHandler(handler)
    return logger


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]  # typeshed's alone is generic
    """Writes to stderr without waiting for its reader."""

    def __init__(self) -> None:
        super().__init__(unblocked(sys.stderr))


class AccessFilter(logging.Filter):
    """Drops access-log lines of paths that start with one of `prefixes`."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        super().__init__()
        self._prefixes = tuple(prefixes)

    def filter(self, record: logging.LogRecord) -> bool:
        path = record.args[2] if isinstance(record.args, tuple) and len(record.args) == 5 else ""
        return not str(path).startswith(self._prefixes)


def uvicorn_config(
    level: str = "info", level_http: str | None = None, quiet_paths: Sequence[str] = ()
) -> dict[str, Any]:
    """uvicorn's `log_config`: the same line format; access-log lines at `level_http` and above.

    Args:
        quiet_paths: path prefixes without access-log lines.
    """
    formatter = {"()": "moe_engine.logs.Formatter"}
    access = {"()": "moe_engine.server.access_log.AccessFormatter"}
    http = (level_http or level).upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"default": formatter, "access": access},
        "filters": {"access": {"()": "moe_engine.logs.AccessFilter", "prefixes": list(quiet_paths)}},
        "handlers": {
            "default": {"class": "moe_engine.logs.StderrHandler", "formatter": "default"},
            "access": {
                "class": "moe_engine.server.access_log.AccessHandler",
                "formatter": "access",
                "filters": ["access"],
            },
        },
        "loggers": {
            "uvicorn": {"handlers": ["default"], "level": http, "propagate": False},
            "uvicorn.error": {"level": http},
            "uvicorn.access": {"handlers": ["access"], "level": http, "propagate": False},
        },
    }


# -- startup lines; memory in GB


def startup_line(
    max_total_num_tokens: int,
    chunked_prefill_size: int,
    max_prefill_tokens: int,
    max_running_requests: int,
    context_len: int,
    available_gb: float,
) -> str:
    """Startup summary in SGLang's wording. `available_gpu_mem` is used on CPU too, so that one pattern parses both."""
    return (
        f"max_total_num_tokens={max_total_num_tokens}, chunked_prefill_size={chunked_prefill_size}, "
        f"max_prefill_tokens={max_prefill_tokens}, max_running_requests={max_running_requests}, "
        f"context_len={context_len}, available_gpu_mem={available_gb:.2f} GB"
    )


def load_begin_line(available_gb: float) -> str:
    return f"Load weight begin. avail mem={available_gb:.2f} GB"


def load_end_line(elapsed: float, model_class: str, dtype: str, available_gb: float, used_gb: float) -> str:
    """Args: dtype: as torch prints it (``torch.bfloat16``) or its bare name."""
    return (
        f"Load weight end. elapsed={elapsed:.2f} s, type={model_class}, dtype={_torch_name(dtype)}, "
        f"avail mem={available_gb:.2f} GB, mem usage={used_gb:.2f} GB."
    )


def kv_line(dtype: str, num_tokens: int, kv_gb: float, *, is_mla: bool = True) -> str:
    """MLA stores one latent (`KV size`); other attention stores keys and values, half each."""
    head = f"KV Cache is allocated. dtype: {_torch_name(dtype)}, #tokens: {num_tokens}, "
    if is_mla:
        return head + f"KV size: {kv_gb:.2f} GB"
    return head + f"K size: {kv_gb / 2:.2f} GB, V size: {kv_gb / 2:.2f} GB"


def state_line(num_rows: int, state_gb: float) -> str:
    return f"State cache is allocated. #requests: {num_rows}, size: {state_gb:.2f} GB"


def host_tier_line(num_tokens: int, num_bytes: int, write_policy: str) -> str:
    return (
        f"Allocating {num_bytes / 1e9:.2f} GB host memory for hierarchical KV cache, #tokens: {num_tokens}, "
        f"write policy: {write_policy}"
    )


def pool_end_line(available_gb: float) -> str:
    return f"Memory pool end. avail mem={available_gb:.2f} GB"


def _torch_name(dtype: str) -> str:
    return dtype if dtype.startswith("torch.") else f"torch.{dtype}"
