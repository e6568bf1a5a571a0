"""Builds the kernels of a rank: the rows of `kernels.backends.choose`, with a fallback if a library fails to load.

A row may pass its checks (a compiler is installed) and still fail when built (the compiler is broken, a library does
not load). With ``auto`` the torch row then replaces it and the reason is logged; for a named row it is an error.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.kernels.backends import Backends, choose
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.registry import Choice

logger = logging.getLogger(__name__)

FALLBACK = "torch"
FAILED = "failed to load"


def build_backends(device: Device, need: Need, asked: Mapping[str, str] | None = None) -> Backends:
    """Chooses and builds ops, linear, experts, attention and sampling.

    Raises:
        ConfigError: a named backend is unknown, cannot run here or fails to load.
    """
    asked = dict(asked or {})
    try:
        choices = choose(device, need, asked)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _report_refusals(choices, asked)
    built = [_build(choice, device, need, asked) for choice in choices]
    _report_failures(choice for _, choice in built)
    ops, linear, experts, attention, sampling = (kernel for kernel, _ in built)
    return Backends(ops, linear, experts, attention, sampling, tuple(choice for _, choice in built))


def _report_refusals(choices: tuple[Choice, ...], asked: Mapping[str, str]) -> None:
    """Logs one line per reason why ``auto`` chose the fallback."""
    families: dict[str, list[str]] = {}
    for choice in choices:
        if choice.row.name == FALLBACK and asked.get(choice.family, "auto") == "auto":
            for name, why in choice.refused.items():
                families.setdefault(f"{name} {why}", []).append(choice.family)
    for reason, found in families.items():
        logger.warning("%s: using %s kernels, because %s", ", ".join(found), FALLBACK, reason)


def _report_failures(choices: Iterable[Choice]) -> None:
    """Logs one line per reason why rows could not be built, with all families that use the fallback for it."""
    families: dict[str, list[str]] = {}
    for choice in choices:
        for name, why in choice.refused.items():
            if why.startswith(FAILED):
                families.setdefault(f"{name} {why}", []).append(choice.family)
    for reason, found in families.items():
        logger.warning("%s: using %s kernels, because %s", ", ".join(found), FALLBACK, reason)


def _build(choice: Choice, device: Device, need: Need, asked: dict[str, str]) -> tuple[Any, Choice]:
    """The kernel and its choice; the fallback with its reason if the build fails."""
    try:
        return choice.build(), choice
    except Exception as error:
        reason = f"{FAILED}: {type(error).__name__}: {error}"
        if asked.get(choice.family, "auto") != "auto":
            raise ConfigError(f"{choice.family} backend {choice.row.name!r} {reason}") from error
        if choice.row.name == FALLBACK:
            raise
    by_family = {c.family: c for c in choose(device, need, {**asked, choice.family: FALLBACK})}
    fallback = by_family[choice.family]
    refused = {**fallback.refused, choice.row.name: reason}
    fallback = dataclasses.replace(fallback, reason=f"{choice.row.name} {FAILED}", refused=refused)
    return fallback.build(), fallback
