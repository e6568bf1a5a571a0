"""Flags of parallelism: ranks, nodes, TP, DP, EP. `resolve_parallel` turns them into a `ParallelPlan`."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.config.values import parse_count
from moe_engine.parallel.dispatch.deepep.generation import VERSIONS
from moe_engine.parallel.dispatch.tables import MODES, ROWS

OTHER_DISPATCHERS = "more dispatch backends"


def _dispatchers() -> tuple[str, ...]:
    return ("none", "auto", *(row.name for row in ROWS if row.name != "local"))


@dataclass(frozen=True)
class ParallelArgs:
    tp_size: int = flag(
        1,
        "Ranks (processes, one GPU each) of a model. Attention heads, dense layers, embedding and LM head are sharded "
        "over them, and experts by --ep-size.",
        aliases=("--tensor-parallel-size", "--tp"),
        metavar="N",
    )
    dp_size: int = flag(
        1,
        "Independent replicas of the model, each with --tp-size ranks, behind one frontend, on one machine. With "
        "--enable-dp-attention: the same as --attn-dp-size.",
        aliases=("--data-parallel-size", "--dp"),
        metavar="N",
    )
    attn_dp_size: int = flag(
        1,
        "DP attention: groups of ranks, each with its own requests, scheduler, KV cache and prefix cache; experts and "
        "dense layers are shared by all groups. Divides --tp-size. MLA caches one latent for all heads, which plain "
        "tensor parallelism would store on every rank.",
        metavar="N",
    )
    enable_dp_attention: bool = flag(False, "Use --dp-size as --attn-dp-size (older spelling).")
    enable_dp_lm_head: bool = flag(
        False, "Shard the LM head within each attention group: no logits cross groups. Needs DP attention."
    )
    moe_dense_tp_size: int | None = flag(
        None,
        "TP size of dense layers. 1: not sharded, each rank runs them on its own tokens. Left out: all ranks.",
        metavar="1|TP",
    )
    ep_size: int = flag(
        1,
        "Expert-parallel groups: experts are distributed over them, and the --tp-size / --ep-size ranks of a group "
        "shard each expert by width.",
        aliases=("--expert-parallel-size", "--ep"),
        metavar="N",
    )
    enable_ep_moe: bool = flag(False, "Distribute the experts over all ranks (older spelling of --ep-size TP).")
    moe_a2a_backend: str = flag(
        "none",
        "Dispatch backend (all-to-all of tokens to the ranks of their experts). none: every rank processes all tokens. "
        "auto: the best that can run here (on GPUs deepep, without it symm_mem on one node; shared_memory on one CPU "
        "host; two_hop on several nodes). "
        "megamoe: dispatch, experts and combine in one call of DeepGEMM, for block FP8 on Hopper GPUs of one host.",
        choices=_dispatchers,
        unsupported=dict.fromkeys(
            ("deepep_v2", "mooncake", "nixl", "mori", "ascend_fuseep", "flashinfer", "flashinfer_megamoe", "pplx",
             "ascend_tp"),
            OTHER_DISPATCHERS,
        ),
    )  # fmt: skip
    enable_deepep_moe: bool = flag(False, "Older spelling of --moe-a2a-backend deepep.")
    deepep_mode: str = flag(
        "auto",
        "Dispatch mode. normal: exact counts, for prefill; low_latency: fixed capacity without host synchronization, "
        "for decode; auto: normal for prefill, low_latency for decode. Applies to every --moe-a2a-backend.",
        choices=("auto", *MODES),
    )
    deepep_version: str = flag(
        "auto",
        "DeepEP's interface. 2: ElasticBuffer, over NCCL; 1: Buffer, over NVSHMEM; auto: the newest in the library.",
        choices=VERSIONS,
    )
    moe_dispatch_dtype: str = flag(
        "auto",
        "Data type of dispatched tokens. fp8 halves the bytes, with a scale per 128 channels (combine uses the "
        "activations' type). bf16: the activations' type. auto: fp8 if the experts read FP8.",
        choices=("auto", "fp8", "bf16"),
    )
    max_dispatch_tokens_per_rank: int | None = flag(
        None,
        "Max tokens of a rank in a low-latency dispatch; bounds its buffers. Larger decode steps run in normal mode; "
        "with --deepep-mode low_latency no step is larger. Left out: the tokens of all running requests with their "
        "drafts, as far as they fit a small share of the memory.",
        parse=parse_count,
        metavar="TOKENS",
    )
    enable_two_batch_overlap: bool = flag(
        False,
        "Split each step into two halves: dispatch and combine of one overlap with computation of the other. Needs a "
        "--moe-a2a-backend.",
    )
    tbo_token_distribution_threshold: float = flag(
        0.48,
        "Two-batch overlap: a prompt is split across the halves if halves of whole requests would leave less than this "
        "share of the tokens to the smaller one. 0 never splits a prompt.",
        metavar="PART",
    )
    enable_single_batch_overlap: bool = flag(
        False, "Compute the shared expert during dispatch to the routed experts. Needs a --moe-a2a-backend."
    )
    disable_shared_expert_overlap: bool = flag(
        False,
        "Compute the shared expert before dispatch. By default GPUs with DeepEP or symm_mem compute it during "
        "dispatch, on another stream.",
    )
    disable_shared_experts_fusion: bool = flag(
        False,
        "Compute shared experts apart from the routed ones. By default a rank that holds a part of every expert (TP or "
        "one rank, on GPUs) computes them in the routed experts' kernels, which saves three launches a layer.",
    )
    disable_custom_all_reduce: bool = flag(
        False,
        "Use torch.distributed for all collectives. By default CPU ranks of one host communicate through shared "
        "memory, several times faster, and GPUs of one host that reach each other's memory all-reduce with kernels of "
        "their own, fused with the norm that follows; NCCL sums more than 8 MiB.",
    )
    elastic_ep: bool = flag(
        False,
        "Elastic EP: keep serving after the loss of any ranks, as long as the remaining ranks have physical experts "
        "for every expert (--ep-num-redundant-experts). Experts move, and requests of a lost rank continue on other "
        "ranks. Needs DP attention with one rank per group and a --moe-a2a-backend.",
    )
    nnodes: int = flag(
        1,
        "Number of machines. Ranks are distributed evenly; the same command runs on each machine, with its "
        "--node-rank. Left out inside a SLURM step or torchrun: the number of nodes they started.",
        metavar="N",
    )
    node_rank: int = flag(0, "Rank of this machine, from 0; node 0 runs the HTTP server.", metavar="I")
    dist_init_addr: str | None = flag(
        None,
        "HOST:PORT of node 0, which all nodes must be able to reach.",
        aliases=("--nccl-init-addr",),
        metavar="HOST:PORT",
    )
    dist_secret_file: str | None = flag(
        None,
        "File with a secret of 16 characters or more, the same on every node: encrypts the sockets between nodes and "
        "rejects processes without it. Left out: the variable MOE_ENGINE_DIST_SECRET; without either, any host that "
        "reaches the nodes' ports can use and stop the engine.",
        metavar="FILE",
    )
    dist_timeout: int | None = flag(
        None, "Seconds within which all ranks must be ready at start. Left out: 1200.", metavar="SECONDS"
    )
    base_gpu_id: int = flag(0, "The first GPU of this machine to use.", metavar="I")
    gpu_id_step: int = flag(1, "Step between the ids of the used GPUs.", metavar="N")
    load_balance_method: str = flag(
        "auto",
        "Which replica or attention group gets a new request. total_requests: the one with the fewest requests; "
        "total_tokens: the one with the fewest tokens; round_robin: the next one; cache_aware: the one that has the "
        "longest prefix of the prompt in its KV cache, unless it is busier by more than that saves; total_tokens "
        "without a prefix. auto: cache_aware, with --disable-radix-cache total_tokens.",
        choices=("auto", "round_robin", "total_requests", "total_tokens", "cache_aware"),
        synonyms={"shortest_queue": "total_requests", "minimum_tokens": "total_tokens"},
    )
