"""The dimensions that the flags of a launch leave to the search."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF
from moe_engine.config.field import option_of
from moe_engine.config.speculative import AUTO
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.planning.parallelism.resolve_dispatch import dispatch_backend
from moe_engine.planning.parallelism.resolve_parallel import data_parallel
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.speculation.draft_tree import AUTO_MAX_STEPS
from moe_engine.planning.workload_profiles import PROFILES, excluded
from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.hardware.table import Cluster
from moe_engine.tuning.planner.space import MOST_DRAFTS, Space

SEARCHED = ("chunked_prefill_size", "max_running_requests", "cuda_graph_max_bs_decode", "speculative_algorithm")
"""Flags of a workload profile that the search would otherwise choose."""
DECIDE = {
    "enable_dp_attention": ("attn_dp_size", "dp_size"), "enable_ep_moe": ("ep_size",),
    "enable_deepep_moe": ("moe_a2a_backend",), "cuda_graph_bs_decode": ("cuda_graph_max_bs_decode",),
    "disable_cuda_graph": ("cuda_graph_max_bs_decode",),
}  # fmt: skip
"""Flags whose value decides that of others."""


def given_space(args: EngineArgs, cluster: Cluster, kv: Sequence[str]) -> Space:
    """The space in which every flag of the user leaves one value. `kv`: dtypes to try without --kv-cache-dtype.

    Raises:
        ConfigError: flags that contradict each other.
    """
    parallel, memory, given = args.parallel, args.memory, args.given
    replicas = parallel.dp_size if "dp_size" in given and not parallel.enable_dp_attention else None
    depths, auto = _drafts(args)
    return Space(
        form=_form(args),
        kept=lambda form: _is_kept(form, args, cluster),
        replicas=replicas,
        kv=(kv_of(args),) if "kv_cache_dtype" in given else kv,
        chunk=memory.chunked_prefill_size,
        prompts=memory.max_prefill_tokens,
        running=memory.max_running_requests,
        drafts=depths,
        auto_depth=auto,
        separate="disaggregation_mode" not in given and (replicas or 1) == 1,
        fixed_by=_fixed_by(args),
        caches=not args.scheduling.disable_radix_cache,
    )


def check_mode(args: EngineArgs) -> None:
    """Raises ConfigError for one side of separate engines, whose rate depends on the other."""
    if (mode := args.disaggregation.disaggregation_mode) != OFF:
        raise ConfigError(
            f"--disaggregation-mode {mode}: the search compares separate engines by itself; leave it out, and leave "
            "out --concurrency"
        )


def _form_values(args: EngineArgs) -> dict[tuple[str, ...], tuple[str, Any]]:
    """Fields of `Form` by the flags that may give them."""
    parallel, experts = args.parallel, args.experts
    return {
        ("tp_size",): ("ranks", parallel.tp_size),
        ("attn_dp_size", "enable_dp_attention"): ("attn_dp", data_parallel(args, Record())[0]),
        ("ep_size",): ("ep", parallel.ep_size),
        ("moe_a2a_backend", "enable_deepep_moe"): ("travels", dispatch_backend(args) != "none"),
        ("moe_dense_tp_size",): ("dense_whole", parallel.moe_dense_tp_size == 1),
        ("ep_num_redundant_experts",): ("redundant", experts.ep_num_redundant_experts),
        ("enable_two_batch_overlap",): ("overlap", parallel.enable_two_batch_overlap),
    }


def _form(args: EngineArgs) -> dict[str, Any]:
    """Fields of `Form` that flags give."""
    return dict(value for names, value in _form_values(args).items() if args.given.intersection(names))


def _fixed_by(args: EngineArgs) -> list[str]:
    """The given flags, with their values, that fix the form or the number of engines."""
    values = args.flat()
    names = [*itertools.chain.from_iterable(_form_values(args)), "enable_ep_moe", "dp_size", "nnodes"]
    given = [name for name in dict.fromkeys(names) if name in args.given]
    return [option_of(name) if values[name] is True else f"{option_of(name)} {values[name]}" for name in given]


def _is_kept(form: Form, args: EngineArgs, cluster: Cluster) -> bool:
    """Whether the given number of nodes, replicas and experts of a rank is that of a form."""
    parallel, per_node = args.parallel, cluster.gpu.gpus_per_node
    nodes = -(-form.ranks // per_node)
    replicas = 1 if parallel.enable_dp_attention else parallel.dp_size
    if "nnodes" in args.given and nodes != parallel.nnodes:
        return False
    if replicas > 1 and form.ranks * replicas > per_node:
        return False
    return not parallel.enable_ep_moe or form.moe_tp == 1


def kv_of(args: EngineArgs) -> str:
    """The dtype of the KV cache by its flag, as the cost model names it."""
    return "fp8" if args.memory.kv_cache_dtype.startswith("fp8") else "bf16"


def _drafts(args: EngineArgs) -> tuple[Sequence[int] | None, bool]:
    """Draft depths by the flags, None if they give none; whether each step has its own."""
    flags = args.speculative
    steps, nodes = flags.speculative_num_steps, flags.speculative_num_draft_tokens
    if steps == AUTO:
        return range(AUTO_MAX_STEPS + 1 if nodes is None else nodes), True
    if steps is not None:
        return (int(steps),), False
    if nodes is not None:
        return (nodes - 1,), False
    return (None if flags.speculative_algorithm is None else range(1, MOST_DRAFTS + 1)), False


def decided(args: EngineArgs) -> frozenset[str]:
    """Names of flags whose value the user's flags determine: a candidate does not set them."""
    values = args.flat()
    found = set(args.given)
    for name, others in DECIDE.items():
        if values[name]:
            found.update(others)
    return frozenset(found)


def profile_flags(args: EngineArgs, model: ModelConfig) -> Mapping[str, Any]:
    """Values of --workload-profile in dimensions of the search, where no flag gives another."""
    found: dict[str, Any] = {}
    for choice in PROFILES.get(args.scheduling.workload_profile or "", ()):
        if choice.flag in SEARCHED and choice.flag not in args.given and excluded(choice, args, model) is None:
            found |= {name: value for name, value in choice.flags("cuda").items() if name not in args.given}
    return found
