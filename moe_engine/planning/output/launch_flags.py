"""The flags of /server_info: passed again, as keywords or in a file, they resolve to the same configuration.

Every flag of SGLang that this engine knows is listed, in SGLang's unit: sizes shared by attention groups are sums over
all groups. Flags without a field have the value that describes this engine. Values of a single scheduler are in its
internal state.
"""

from __future__ import annotations

from typing import Any

from moe_engine.config.absent_flags import AbsentFlag, absent_flags, keyword_of
from moe_engine.config.args import PARTS
from moe_engine.config.field import fields_of
from moe_engine.planning.resolved_config import ResolvedConfig


def launch_flags(config: ResolvedConfig) -> dict[str, Any]:
    """Every flag by name, and two facts: `speculation` and `use_mla_backend`. Keys of clients are hidden.

    Kernel backends are as given: the chosen ones are known when the engine is ready (`client_api.kernel_flags`).
    """
    values = config.flat() | _in_all_groups(config) | _chosen(config) | _graphs(config)
    absent = absent_flags()
    values.update({name: _absent(row) for name, row in absent.flags.items()})
    values.update(dict.fromkeys(absent.no_effect, True))
    for part in PARTS.values():
        for info in fields_of(part):
            values.update({keyword_of(old): values[info.name] for old in info.flag.old})
    values["use_mla_backend"] = config.model.attention.kind == "mla"
    return values


def _in_all_groups(config: ResolvedConfig) -> dict[str, Any]:
    """Flags whose value is a sum over attention groups, and the model path in the form that the hub's flags need."""
    groups, chunk = config.parallel.topology.attn_dp_size, config.chunked_prefill_size
    model = config.args.model
    from_hub = model.revision is not None or model.download_dir is not None
    return {
        "model_path": model.model_path if from_hub else config.model_path,
        "chunked_prefill_size": chunk if chunk == -1 else chunk * groups,
        "max_running_requests": config.max_running_requests * groups,
        "schedule_conservativeness": config.scheduling.schedule_conservativeness,
    }


def _chosen(config: ResolvedConfig) -> dict[str, Any]:
    """Resolved values of ``auto`` and of flags that were left out."""
    flags, plan, experts = config.args, config.parallel, config.experts
    found: dict[str, Any] = {"ep_size": plan.topology.ep_size, "moe_a2a_backend": plan.topology.moe_a2a_backend}
    if flags.model.load_format == "auto":
        found["load_format"] = "safetensors"
    if flags.parallel.load_balance_method == "auto":
        found["load_balance_method"] = config.load_balance_method
    if plan.dispatch is not None:
        found["moe_a2a_backend"] = plan.dispatch.row.name
        if config.limits.low_latency_tokens:  # the normal mode has no such size
            found["max_dispatch_tokens_per_rank"] = config.limits.low_latency_tokens
    if config.speculation is not None and config.speculation.auto_depth:
        found["speculative_num_steps"] = "auto"
    if config.num_window_slots:
        found["swa_full_tokens_ratio"] = (config.num_window_slots + 0.5) / config.max_total_num_tokens  # rounded down
    elif config.model.windows:
        found["disable_hybrid_swa_memory"] = True
    if config.model.is_moe:
        found["ep_dispatch_algorithm"] = experts.dispatch
    if experts.recorder_mode is not None:
        found["expert_distribution_recorder_buffer_size"] = experts.buffer_size
    if experts.rebalance is not None:
        found["eplb_rebalance_layers_per_chunk"] = experts.rebalance.layers_at_once
    return found


def _graphs(config: ResolvedConfig) -> dict[str, Any]:
    sizes = list(config.graphs.sizes)
    return {
        "disable_cuda_graph": not sizes,
        "cuda_graph_backend_decode": "full" if sizes else "disabled",
        "cuda_graph_max_bs_decode": max(sizes, default=None),
        "cuda_graph_bs_decode": sizes or None,
    }


def _absent(row: AbsentFlag) -> Any:
    """The value that stands for a disabled feature, or the flag's default."""
    return next((value for value in row.accepted if value in ("none", "disabled")), next(iter(row.accepted), None))
