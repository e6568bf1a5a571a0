"""How a model is spread over ranks and nodes. `resolve_parallel` turns these flags into a `ParallelPlan`."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.config.values import parse_count
from moe_engine.parallel.dispatch.tables import MODES, ROWS

OTHER_DISPATCHERS = "more dispatch backends"


def _dispatchers() -> tuple[str, ...]:
    return ("none", "auto", *(row.name for row in ROWS if row.name != "local"))


@dataclass(frozen=True)
class ParallelArgs:
    tp_size: int = flag(
        1,
        "Ranks (processes, one GPU each) that hold a model together. Attention heads, dense layers, embedding and head "
        "are cut over them, and experts as --ep-size says.",
        aliases=("--tensor-parallel-size", "--tp"),
        metavar="N",
    )
    dp_size: int = flag(
        1,
        "Independent replicas of the model, each on --tp-size ranks of its own, behind one front end, on one "
        "machine. With --enable-dp-attention: the same as --attn-dp-size.",
        aliases=("--data-parallel-size", "--dp"),
        metavar="N",
    )
    attn_dp_size: int = flag(
        1,
        "Groups of ranks with requests, scheduler, KV cache and prefix cache of their own; experts and dense layers "
        "are shared by all. Divides --tp-size. MLA caches one latent for all heads, so this saves KV that plain tensor "
        "parallelism would hold on every rank.",
        metavar="N",
    )
    enable_dp_attention: bool = flag(False, "Take --dp-size as --attn-dp-size (the older spelling of it).")
    enable_dp_lm_head: bool = flag(
        False, "Cut the language-model head inside an attention group only: no logits cross groups. Needs DP attention."
    )
    moe_dense_tp_size: int | None = flag(
        None,
        "Ranks that a dense layer is cut over: 1 keeps it whole, each rank then runs it on its own tokens. Left out: "
        "all ranks.",
        metavar="1|TP",
    )
    ep_size: int = flag(
        1,
        "Ranks that the experts are spread over; inside each, --tp-size / --ep-size ranks cut an expert by width.",
        aliases=("--expert-parallel-size", "--ep"),
        metavar="N",
    )
    enable_ep_moe: bool = flag(False, "Spread the experts over all ranks (the older spelling of --ep-size TP).")
    moe_a2a_backend: str = flag(
        "none",
        "What moves tokens to the ranks of their experts. none: every rank sees all tokens. auto: the best that can "
        "serve here (deepep on GPUs, shared_memory on one CPU host, two_hop on several nodes).",
        choices=_dispatchers,
        unsupported=dict.fromkeys(
            ("deepep_v2", "mooncake", "nixl", "mori", "ascend_fuseep", "flashinfer", "megamoe", "flashinfer_megamoe",
             "pplx", "ascend_tp"),
            OTHER_DISPATCHERS,
        ),
    )  # fmt: skip
    enable_deepep_moe: bool = flag(False, "Use --moe-a2a-backend deepep (the older spelling of it).")
    deepep_mode: str = flag(
        "auto",
        "How tokens are dispatched. normal: exact counts, for prefill; low_latency: fixed capacity, no waiting for "
        "the host, for decode; auto: each in its phase. Holds for every --moe-a2a-backend.",
        choices=("auto", *MODES),
    )
    moe_dispatch_dtype: str = flag(
        "auto",
        "What tokens travel in. fp8 halves the bytes, with a scale for each 128 channels (results come back in the "
        "activations' format). auto: the activations' format.",
        choices=("auto", "fp8"),
    )
    max_dispatch_tokens_per_rank: int | None = flag(
        None,
        "Most tokens that a rank brings to a low-latency dispatch; its buffers have at most this size. Larger decode "
        "steps run in normal mode; with --deepep-mode low_latency no step is larger. Left out: what the running "
        "requests can bring with their drafts, as far as a small part of the memory holds it.",
        parse=parse_count,
        metavar="TOKENS",
    )
    enable_two_batch_overlap: bool = flag(
        False,
        "Cut each step into two halves: while tokens of one travel to their experts, the other computes. Needs a "
        "--moe-a2a-backend.",
    )
    tbo_token_distribution_threshold: float = flag(
        0.48,
        "With two-batch overlap: a prompt is cut where halves of whole requests would leave less than this part of the "
        "tokens to the smaller one. 0 never cuts a prompt.",
        metavar="PART",
    )
    enable_single_batch_overlap: bool = flag(
        False, "Compute the shared expert while tokens travel to the routed ones. Needs a --moe-a2a-backend."
    )
    disable_custom_all_reduce: bool = flag(
        False,
        "Sum and gather by torch.distributed alone. Else CPU ranks of one host do so through memory they share, which "
        "is several times quicker; on GPUs it is NCCL either way, and the flag has nothing to do.",
    )
    elastic_ep: bool = flag(
        False,
        "Go on serving when ranks are lost, whichever, as long as the others have slots for every expert "
        "(--ep-num-redundant-experts): experts move, and requests of the lost go on where they were on other ranks. "
        "For DP attention with a rank a group, and tokens that travel.",
    )
    nnodes: int = flag(
        1,
        "Machines that the ranks are spread over evenly; the same command runs on each, with its --node-rank. Left "
        "out inside a SLURM step or torchrun: as many as they started.",
        metavar="N",
    )
    node_rank: int = flag(0, "This machine's number, from 0; node 0 has the HTTP server.", metavar="I")
    dist_init_addr: str | None = flag(
        None,
        "HOST:PORT of node 0, the one address that all nodes must know and reach.",
        aliases=("--nccl-init-addr",),
        metavar="HOST:PORT",
    )
    dist_secret_file: str | None = flag(
        None,
        "File with a secret of 16 characters or more, the same on every node: sockets between nodes are then encrypted "
        "and admit only processes that hold it. Left out: the variable MOE_ENGINE_DIST_SECRET; without either, any "
        "host that reaches the nodes' ports can use and end the engine.",
        metavar="FILE",
    )
    dist_timeout: int | None = flag(
        None, "Seconds until all ranks must be ready at start. Left out: 1200.", metavar="SECONDS"
    )
    base_gpu_id: int = flag(0, "The first GPU of this machine to use.", metavar="I")
    gpu_id_step: int = flag(1, "Distance between the GPUs that are used.", metavar="N")
    load_balance_method: str = flag(
        "auto",
        "Which replica or attention group gets a new request. total_requests: the one with the fewest; total_tokens: "
        "the one with the fewest tokens; round_robin: the next. auto: total_tokens.",
        choices=("auto", "round_robin", "total_requests", "total_tokens"),
        synonyms={"shortest_queue": "total_requests", "minimum_tokens": "total_tokens"},
    )
