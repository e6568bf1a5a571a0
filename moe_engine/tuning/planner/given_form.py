"""The form of parallelism given by the flags of a launch."""

from __future__ import annotations

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.planning.parallelism.resolve_dispatch import dispatch_backend
from moe_engine.planning.parallelism.resolve_parallel import data_parallel, expert_parallel
from moe_engine.planning.resolution_log import Record
from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.hardware.table import Cluster

OURS = "moe-engine"
GB = 1 << 30


def host_bytes(args: EngineArgs) -> int:
    """Weights of a rank that every step copies from host memory, at most."""
    return int(args.memory.cpu_offload_gb * GB)


def given_form(args: EngineArgs, cluster: Cluster, engine: str, model: ModelConfig | None) -> tuple[Form, int]:
    """The ranks of a replica, and the number of replicas. model: that of a launch of ours, None: not known.

    Raises:
        ConfigError: the axes do not divide each other, or the cluster has fewer GPUs.
    """
    parallel, record = args.parallel, Record()
    dp, replicas = data_parallel(args, record)
    backend = dispatch_backend(args)
    ep = expert_parallel(args, backend, record, model if engine == OURS else None)
    sizes = {"--tp-size": parallel.tp_size, "--attn-dp-size": dp, "--ep-size": ep, "--dp-size": replicas}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} {size}: must be at least 1")
    if parallel.tp_size % dp or parallel.tp_size % ep:
        raise ConfigError(f"--tp-size {parallel.tp_size}: --attn-dp-size {dp} and --ep-size {ep} must divide it")
    travels = (backend != "none" and parallel.tp_size > 1) or (dp > 1 and ep > 1 and engine != OURS)
    form = Form(
        parallel.tp_size, dp, ep, travels, args.experts.ep_num_redundant_experts, parallel.enable_two_batch_overlap,
        parallel.moe_dense_tp_size == 1 or travels,
    )  # fmt: skip
    if form.ranks * replicas > cluster.num_gpus:
        raise ConfigError(
            f"--tp-size {form.ranks} x --dp-size {replicas} needs {form.ranks * replicas} GPUs, --hardware has "
            f"{cluster.num_gpus}"
        )
    return form, replicas
