"""The form of parallelism given by the flags of a launch."""

from __future__ import annotations

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.hardware.table import Cluster

OURS = "moe-engine"
GB = 1 << 30


def host_bytes(args: EngineArgs) -> int:
    """Weights of a rank that every step copies from host memory, at most."""
    return int(args.memory.cpu_offload_gb * GB)


def given_form(args: EngineArgs, cluster: Cluster, engine: str = OURS) -> tuple[Form, int]:
    """The ranks of a replica, and the number of replicas.

    Raises:
        ConfigError: the axes do not divide each other, or the cluster has fewer GPUs.
    """
    parallel = args.parallel
    dp = parallel.attn_dp_size
    if parallel.tp_size % dp or parallel.tp_size % parallel.ep_size:
        raise ConfigError(
            f"--tp-size {parallel.tp_size}: --attn-dp-size {dp} and --ep-size {parallel.ep_size} must divide it"
        )
    travels = parallel.moe_a2a_backend != "none" or (dp > 1 and parallel.ep_size > 1 and engine != OURS)
    form = Form(
        parallel.tp_size, dp, parallel.ep_size, travels, args.experts.ep_num_redundant_experts,
        parallel.enable_two_batch_overlap, parallel.moe_dense_tp_size == 1 or travels,
    )  # fmt: skip
    replicas = max(1, parallel.dp_size)
    if form.ranks * replicas > cluster.num_gpus:
        raise ConfigError(
            f"--tp-size {form.ranks} x --dp-size {replicas} needs {form.ranks * replicas} GPUs, --hardware has "
            f"{cluster.num_gpus}"
        )
    return form, replicas
