"""The kernels of a launch: `KernelPlan`, its rows chosen together once, and `Backends`, the built rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

from moe_engine.kernels import tables
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.registry import Choice, Row, select
from moe_engine.kernels.weight_forms import Multiplied

if TYPE_CHECKING:  # the protocols import torch; selection does not need it
    from moe_engine.kernels.attention.protocol import GQABackend, MLABackend
    from moe_engine.kernels.block_index.protocol import BlockIndexKernel
    from moe_engine.kernels.compression.protocol import CompressionKernel
    from moe_engine.kernels.delta.protocol import DeltaKernel
    from moe_engine.kernels.experts.protocol import ExpertsKernel
    from moe_engine.kernels.indexer.protocol import IndexerKernel
    from moe_engine.kernels.linear.protocol import LinearKernel
    from moe_engine.kernels.ops.protocol import Ops
    from moe_engine.kernels.sampling.protocol import SamplingKernel
    from moe_engine.kernels.torch_regions import CompiledRegions
    from moe_engine.kernels.varlen.protocol import VarlenKernel
    from moe_engine.kernels.weight_stream import WeightStream


@dataclass(frozen=True)
class Backends:
    """Kernels of one rank. `attention` is an MLA or a GQA backend, by model."""

    ops: Ops
    linear: LinearKernel
    experts: ExpertsKernel
    attention: MLABackend | GQABackend
    sampling: SamplingKernel
    choices: tuple[Choice, ...]
    regions: CompiledRegions | None = None
    """Compiles the torch code between kernels if ops and linear use torch (--enable-torch-compile)."""
    fuse_shared_experts: bool = True
    """Whether shared experts may be stored after the routed ones (not with --disable-shared-experts-fusion)."""
    indexer: IndexerKernel | None = None
    """The indexer of a model with sparse attention."""
    block_index: BlockIndexKernel | None = None
    """The indexer of a model with block-sparse attention."""
    delta: DeltaKernel | None = None
    """The delta rule of a model with gated delta nets."""
    compression: CompressionKernel | None = None
    """Compression of keys into entries; None for models without entries."""
    varlen: VarlenKernel | None = None
    """Attention of the vision tower; None for models without one."""
    weight_stream: WeightStream | None = None
    """Keeps the weights of some layers in host memory (--cpu-offload-gb)."""


FAMILIES = ("ops", "linear", "experts", "attention", "sampling")
"""Families of a kernel plan; attention is that of the model's kind."""


def families_of(need: Need) -> tuple[str, ...]:
    """The families that a model needs: with sparse attention an indexer too, with gated delta nets their rule, with
    compressed entries their compression, with a vision tower its attention."""
    more = {
        "indexer": need.index is not None,
        "block_index": need.blocks is not None,
        "delta": need.delta,
        "compression": need.compression,
        "varlen": need.varlen,
    }
    return (*FAMILIES, *(family for family, needed in more.items() if needed))


@dataclass(frozen=True)
class KernelPlan:
    """The rows of all families for one model in one launch, chosen together; imports no backend.

    `need` includes the page size of the KV cache. `asked`: requested row by family; missing ones are ``auto``.
    `captured`: decodes are captured as CUDA graphs if all rows allow it.
    """

    device: Device
    need: Need
    choices: tuple[Choice, ...]
    asked: Mapping[str, str] = field(default_factory=dict)
    captured: bool = False

    def row(self, family: str) -> Row:
        return next(choice.row for choice in self.choices if choice.family == family)

    @property
    def multiplied(self) -> Multiplied:
        """Forms of quantized weights that the rows of linear layers and experts multiply as stored."""
        return {family: self.row(family).multiplies for family in ("linear", "experts")}

    @property
    def refuses_capture(self) -> str | None:
        """The reason why steps with these rows cannot be captured as CUDA graphs, or None."""
        rows = (choice.row for choice in self.choices if choice.family != "experts" or self.need.moe)
        return next((why for row in rows if (why := row.refuses_capture(self.device, self.need))), None)

    def next_best(self, family: str, failed: Mapping[str, str]) -> Choice:
        """The choice of a family without rows that could not be built.

        Raises:
            ValueError: no other row can run here, or be captured if the launch captures decodes.
        """
        choice = _select(family, self.device, self.need, self.asked, self.captured, failed)
        captures = self.captured and self.refuses_capture is None
        if captures and (why := choice.row.refuses_capture(self.device, self.need)):
            raise ValueError(f"{choice.row.name} would replace it, but cannot be captured as CUDA graphs: {why}")
        return choice


@dataclass(frozen=True)
class LaunchKernels:
    """Kernel plans of the model and of its draft model, which share the KV cache's page size."""

    model: KernelPlan
    draft: KernelPlan | None = None
    uncaptured: str | None = None
    """The reason why decodes are not captured as CUDA graphs, or None."""

    @property
    def page_size(self) -> int:
        return self.model.need.page_size


def plan_kernels(
    device: Device,
    need: Need,
    asked: Mapping[str, str] | None = None,
    *,
    pages: Sequence[int] = (),
    kv_dtypes: Sequence[str] = (),
    captured: bool = False,
) -> KernelPlan:
    """The best plan: of all rows, page sizes and formats of the KV cache the one that can be captured, with the most
    preferred attention row.

    Args:
        asked: backend name by family; missing ones are ``auto``.
        pages: page sizes to choose from, best first among equals; (): that of `need`.
        kv_dtypes: formats to choose from, likewise.
        captured: decodes are to be captured as CUDA graphs.

    Raises:
        ValueError: with the reason, if a requested backend cannot run here.
    """
    asked = dict(asked or {})
    plans, errors = [], []
    for kv_dtype, page in product(kv_dtypes or (need.kv_dtype,), pages or (need.page_size,)):
        fitting = replace(need, page_size=page, kv_dtype=kv_dtype)
        try:
            choices = tuple(_select(family, device, fitting, asked, captured) for family in families_of(fitting))
        except ValueError as error:
            errors.append(error)
        else:
            plans.append(KernelPlan(device, fitting, choices, asked, captured))
    if not plans:
        raise errors[0]
    return max(plans, key=_score)


def page_sizes_of(need: Need) -> tuple[int, ...]:
    """Page sizes worth choosing from: single tokens (finest prefix sharing) first, then those that rows need."""
    return tuple(sorted({1}.union(*(row.pages for row in _rows("attention", need)))))


def _score(plan: KernelPlan) -> tuple[bool, int]:
    captured = not plan.captured or plan.refuses_capture is None
    return captured, plan.row("attention").score(plan.device, plan.need)


def _select(
    family: str,
    device: Device,
    need: Need,
    asked: Mapping[str, str],
    captured: bool,
    failed: Mapping[str, str] | None = None,
) -> Choice:
    wanted = "auto" if failed else asked.get(family, "auto")
    return select(family, _rows(family, need), wanted, device, need, captured=captured, failed=failed)


def _rows(family: str, need: Need) -> list[Row]:
    return tables.FAMILIES[need.attention if family == "attention" else family]
