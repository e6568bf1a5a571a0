"""Kernel rows and page size of a launch, chosen once: `kernels.backends.plan_kernels` with the flags' names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from moe_engine.config.args import EngineArgs
from moe_engine.config.field import option_of
from moe_engine.errors import ConfigError
from moe_engine.kernels.backends import KernelPlan, LaunchKernels, page_sizes_of, plan_kernels
from moe_engine.kernels.device import Need
from moe_engine.models.config import ModelConfig
from moe_engine.models.needs import expert_widths, need_of_model
from moe_engine.planning.flags.validate import attention_groups
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.model.resolve_dtype import DTYPE_BYTES, kv_forms
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan
from moe_engine.planning.resolution_log import Record

FLAGS = {
    "attention": "attention_backend",
    "experts": "moe_runner_backend",
    "linear": "linear_backend",
    "ops": "ops_backend",
    "sampling": "sampling_backend",
}
"""Field of `BackendArgs` of each kernel family."""


def resolve_kernels(
    args: EngineArgs,
    asked: Mapping[str, str],
    machine: Machine,
    model: ModelConfig,
    draft: ModelConfig | None,
    dtype: str,
    kv_dtype: str,
    uncaptured: str | None,
    parallel: ParallelPlan,
    record: Record,
    *,
    chains: bool,
    trees: bool,
) -> LaunchKernels:
    """Checks which libraries are installed; imports none.

    Args:
        asked: requested row of each kernel family.
        model, draft: with the heads of one rank.
        uncaptured: the reason why decodes are not captured as CUDA graphs whatever the rows are, or None.
        chains: decodes draft chains, or trees that are captured.
        trees: drafts are trees.

    Raises:
        ConfigError: a requested backend cannot run on this machine.
    """
    given = args.memory.page_size
    if given and given % model.page_multiple:
        multiple = model.page_multiple
        raise ConfigError(f"--page-size {given}: {model.source} has entries of {multiple} tokens; use a multiple of it")
    _check_entries(model, dtype)
    deterministic = args.backends.enable_deterministic_inference
    captured = uncaptured is None
    need = need_of_model(model, dtype, kv_dtype, given or 1, deterministic)
    chains = chains and captured
    dispatch = parallel.dispatch
    placed = parallel.topology.moe_tp_size, dispatch is not None, dispatch is not None and dispatch.row.fused
    need = replace(need, chains=chains, trees=trees, experts=expert_widths(model, *placed))
    pages = (given,) if given else tuple(page for page in _page_sizes(need, model) if fits_sizes(args, page))
    if not pages:
        raise ConfigError(
            f"{model.source} has entries of {model.page_multiple} tokens, and pages of a multiple of it do not fit "
            "--chunked-prefill-size, --max-prefill-tokens, or --max-total-tokens with --max-running-requests; use "
            f"multiples of {model.page_multiple}, and at least as many tokens for each running request"
        )
    forms = kv_forms(args, kv_dtype, model, draft, deterministic)
    plan = _plan(machine, need, asked, pages, captured, forms)
    page, kv_dtype = plan.need.page_size, plan.need.kv_dtype
    if len(forms) > 1 and kv_dtype != forms[0]:
        name = plan.row("attention").name
        record.note("kv_cache_dtype", kv_dtype, f"{name} attention reads e4m3 rows without scales of their own")
    if given is None:
        row = plan.row("attention").name
        reason = f"{row} attention runs on single tokens" if page == 1 else f"{row} attention reads pages of {page}"
        if model.page_multiple > 1:
            reason = f"entries of {model.page_multiple} tokens are in one page"
        record.note("page_size", page, reason)
    drafts = None
    if draft is not None:
        need = need_of_model(draft, dtype, kv_dtype, page, deterministic)
        need = replace(need, chains=chains, trees=trees, experts=expert_widths(draft, *placed))
        drafts = _plan(machine, need, asked, (page,), captured)
    return LaunchKernels(plan, drafts, uncaptured or plan.refuses_capture)


def asked_backends(args: EngineArgs) -> dict[str, str]:
    """Row of each kernel family that the flags request."""
    return {family: getattr(args.backends, name) for family, name in FLAGS.items()}


def _check_entries(model: ModelConfig, dtype: str) -> None:
    """Raises ConfigError for entries, or kept contributions, whose bytes cannot be divided over their tokens, as copies
    of pages need."""
    for rate, widths in map(model.entry_parts, range(model.num_layers)):
        if any(DTYPE_BYTES[dtype] * width % rate for width in widths):
            raise ConfigError(
                f"--dtype {dtype}: entries of {rate} tokens with {min(widths)} channels ({model.source}) have less "
                "than one byte for each token; use float32"
            )
    for kept in filter(None, map(model.kept_rows, range(model.num_layers))):
        if kept.block and any(DTYPE_BYTES[dtype] * width % kept.block for width in kept.widths):
            raise ConfigError(
                f"--dtype {dtype}: contributions of {min(kept.widths)} channels to entries ({model.source}) cannot be "
                f"divided over blocks of {kept.block} tokens; use float32"
            )


def _page_sizes(need: Need, model: ModelConfig) -> tuple[int, ...]:
    """Page sizes worth choosing from, whose pages have whole entries."""
    return tuple(dict.fromkeys(math.lcm(page, model.page_multiple) for page in page_sizes_of(need)))


def fits_sizes(args: EngineArgs, page: int) -> bool:
    """Whether the sizes given by flags are possible with this page size."""
    memory, chunk = args.memory, args.memory.chunked_prefill_size
    whole = chunk is None or chunk == -1 or chunk % page == 0
    pool, prefill = memory.max_total_tokens, memory.max_prefill_tokens
    requests = page * ((memory.max_running_requests or 1) // attention_groups(args))
    return page == 1 or (whole and prefill >= page and (pool is None or pool >= max(page, requests)))


def _plan(
    machine: Machine, need: Need, asked: Mapping[str, str], pages: tuple[int, ...], captured: bool,
    kv_dtypes: tuple[str, ...] = (),
) -> KernelPlan:  # fmt: skip
    try:
        return plan_kernels(machine.device, need, asked, pages=pages, kv_dtypes=kv_dtypes, captured=captured)
    except ValueError as error:
        flags = ", ".join(f"{option_of(FLAGS[family])} {name}" for family, name in asked.items() if name != "auto")
        raise ConfigError(f"{flags or 'kernels'}: {error}") from None
