"""The selected row of every family, built once before the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_engine.kernels import tables
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.registry import Choice, select

if TYPE_CHECKING:  # the protocols import torch; selection does not need it
    from moe_engine.kernels.attention.protocol import GQABackend, MLABackend
    from moe_engine.kernels.experts.protocol import ExpertsKernel
    from moe_engine.kernels.linear.protocol import LinearKernel
    from moe_engine.kernels.ops.protocol import Ops
    from moe_engine.kernels.sampling.protocol import SamplingKernel
    from moe_engine.kernels.torch_regions import Regions


@dataclass(frozen=True)
class Backends:
    """Kernels of one rank. `attention` is an MLA or a GQA backend, by model."""

    ops: Ops
    linear: LinearKernel
    experts: ExpertsKernel
    attention: MLABackend | GQABackend
    sampling: SamplingKernel
    choices: tuple[Choice, ...]
    regions: Regions | None = None
    """Compiles the torch code between kernels if ops and linear use torch (--enable-torch-compile)."""


def choose(device: Device, need: Need, asked: Mapping[str, str] | None = None) -> tuple[Choice, ...]:
    """Choices for ops, linear, experts, attention, sampling, in that order; imports no backend.

    Args:
        asked: backend name by family (``attention``, ``experts``, ``linear``, ``ops``, ``sampling``); missing ones are
            ``auto``.

    Raises:
        ValueError: with the reason, if a requested backend cannot run here.
    """
    asked = asked or {}
    attention = tables.MLA if need.attention == "mla" else tables.GQA
    families = (
        ("ops", tables.OPS),
        ("linear", tables.LINEAR),
        ("experts", tables.EXPERTS),
        ("attention", attention),
        ("sampling", tables.SAMPLING),
    )
    return tuple(select(family, rows, asked.get(family, "auto"), device, need) for family, rows in families)


def build(choices: tuple[Choice, ...]) -> Backends:
    """Imports and constructs the selected rows."""
    ops, linear, experts, attention, sampling = (choice.build() for choice in choices)
    return Backends(ops, linear, experts, attention, sampling, choices)
