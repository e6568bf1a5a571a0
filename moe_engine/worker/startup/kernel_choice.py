"""Builds the kernels of a rank: the rows of its `KernelPlan`, or the next best row if a library fails to load.

A row may pass its checks (a compiler is installed) and still fail when built (the compiler is broken, a library does
not load). With ``auto`` the next row by preference replaces it and the reason is logged; for a named row it is an
error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.kernels.backends import FAMILIES, Backends, KernelPlan
from moe_engine.kernels.registry import Choice

logger = logging.getLogger(__name__)

FALLBACK = "torch"
TORCH_ON_CPU = ("varlen",)
"""Families whose row for the CPU is torch's: it replaces nothing there."""
FAILED = "failed to load"


def build_backends(plan: KernelPlan) -> Backends:
    """Builds ops, linear, experts, attention and sampling, and the kernels that only some models need.

    Raises:
        ConfigError: a named backend fails to load, or no other row can replace a failed one.
    """
    _log_reasons((choice for choice in plan.choices if _is_fallback(plan, choice)), plan.device.no_cuda)
    built = [_build(choice, plan) for choice in plan.choices]
    choices = tuple(choice for _, choice in built)
    _log_reasons(choices, None, FAILED)
    ops, linear, experts, attention, sampling, *_ = (kernel for kernel, _ in built)
    more = {choice.family: kernel for kernel, choice in built[len(FAMILIES) :]}
    return Backends(ops, linear, experts, attention, sampling, choices, **more)


def _is_fallback(plan: KernelPlan, choice: Choice) -> bool:
    if choice.family in TORCH_ON_CPU and plan.device.kind == "cpu":
        return False
    return choice.row.name == FALLBACK and plan.asked.get(choice.family, "auto") == "auto"


def _log_reasons(choices: Iterable[Choice], no_cuda: str | None, beginning: str = "") -> None:
    """Logs one line per reason against better rows, with all families that it concerns. `no_cuda`: the reason against
    rows for another kind of device, which is not logged."""
    families: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        for name, why in choice.refused.items():
            if why.startswith(beginning) and not (no_cuda and why.endswith(no_cuda)):
                families.setdefault((choice.row.name, f"{name} {why}"), []).append(choice.family)
    for (row, reason), found in families.items():
        logger.warning("%s: using %s kernels, because %s", ", ".join(found), row, reason)


def _build(choice: Choice, plan: KernelPlan) -> tuple[Any, Choice]:
    """The kernel and its choice; the next best row with the reason if the build fails."""
    failed: dict[str, str] = {}
    while True:
        try:
            return choice.build(), choice
        except Exception as error:
            name, family = choice.row.name, choice.family
            reason = f"{FAILED}: {type(error).__name__}: {error}"
            if plan.asked.get(family, "auto") != "auto":
                raise ConfigError(f"{family} backend {name!r} {reason}") from error
            failed[name] = reason
            try:
                choice = plan.next_best(family, failed)
            except ValueError as nothing:
                raise ConfigError(f"{family} backend {name!r} {reason}; {nothing}") from error
            choice = replace(choice, reason=f"{name} {FAILED}")
