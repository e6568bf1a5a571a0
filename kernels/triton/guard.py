"""Compilation guard: counts compilations after READY, to detect compiler stalls while serving.

Triton has one listener per process, so the counts are per process. The engine's start calls `watch` before the first
kernel and `ready` at the end of warm-up; metrics read `compilations_after_ready`. Other compilers (torch.compile)
report to `note`.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

from moe_engine.kernels.triton.availability import installed

logger = logging.getLogger(__name__)


@dataclass
class _Counts:
    lock: threading.Lock = field(default_factory=threading.Lock)
    watching: bool = False
    is_ready: bool = False
    late: list[str] = field(default_factory=list)


_counts = _Counts()


def watch() -> None:
    """Starts counting; idempotent. Events are forwarded to a listener that was already installed."""
    if _counts.watching or not installed():
        return
    from triton import knobs

    following = knobs.compilation.listener

    def listener(**event: Any) -> None:
        note("Triton kernel " + event["metadata"].get("name", "?"), event["times"].total / 1e6, event["cache_hit"])
        if following is not None:
            following(**event)

    knobs.compilation.listener = listener
    _counts.watching = True


def ready() -> None:
    """From now on a compilation is a stall: counted as late and logged as a warning with the kernel's name."""
    with _counts.lock:
        _counts.is_ready = True


def reset() -> None:
    """Back to the state before READY, for a new engine in this process."""
    with _counts.lock:
        _counts.is_ready = False
        _counts.late = []


def note(name: str, seconds: float, cache_hit: bool) -> None:
    """Records a compilation, or a first load from the cache."""
    with _counts.lock:
        if not _counts.is_ready:
            return
        _counts.late.append(name)
    how = "was loaded from the cache" if cache_hit else f"was compiled ({seconds:.2f} s)"
    logger.warning("%s %s after READY: warm-up did not launch it with such arguments", name, how)


def compilations_after_ready() -> int:
    """Number of kernels compiled, or first loaded, after READY."""
    return len(_counts.late)
