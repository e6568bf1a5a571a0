"""Flags of expert placement, EPLB and expert distribution recording. `resolve_experts` makes `ExpertSettings`."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.parallel.recording.config import MODES

MORE_ALGORITHMS = "more expert placement algorithms"


@dataclass(frozen=True)
class ExpertArgs:
    ep_num_redundant_experts: int = flag(
        0, "Redundant experts: physical experts over all ranks beyond one per logical expert, which replicate busy "
        "experts. Experts plus redundant experts must be a multiple of --ep-size.", metavar="N"
    )  # fmt: skip
    ep_dispatch_algorithm: str | None = flag(
        None,
        "Which replica of an expert gets a token. static: each rank uses one fixed replica per expert, its own or the "
        "nearest; dynamic: round-robin over the replicas. Left out: static; dynamic without --moe-a2a-backend, where "
        "all ranks process all tokens and must choose the same replica.",
        choices=("static", "dynamic"),
        unsupported=dict.fromkeys(("fake", "lp"), MORE_ALGORITHMS),
    )
    init_expert_location: str = flag(
        "trivial",
        "Expert placement at start. trivial: in order; or a .pt or .json file, or JSON, with physical_to_logical_map "
        "[layers, physical experts], or with logical_count [layers, experts] or [passes, layers, experts], from which "
        "EPLB plans a placement: a dump of mode stat is such a file.",
        metavar="trivial|FILE|JSON",
    )
    enable_eplb: bool = flag(
        False,
        "Expert-parallel load balancer: moves experts between ranks while serving, to balance the ranks' load. "
        "Needs --ep-size above 1.",
    )
    eplb_algorithm: str = flag(
        "auto",
        "EPLB algorithm. deepseek: replicates the busiest experts and packs them over all ranks; "
        "deepseek_hierarchical: assigns whole expert groups to nodes first; auto: deepseek_hierarchical where the "
        "number of expert groups is a multiple of --nnodes.",
        choices=("auto", "deepseek", "deepseek_hierarchical"),
        unsupported=dict.fromkeys(
            ("deepseek_vec", "deepseek_vec_hierarchical", "elasticity_aware", "elasticity_aware_hierarchical"),
            MORE_ALGORITHMS,
        ),
    )
    eplb_rebalance_num_iterations: int = flag(1000, "Forward passes between two rebalances.", metavar="PASSES")
    eplb_rebalance_layers_per_chunk: int | None = flag(
        None,
        "Layers that move an expert to each rank at the same time. Higher values finish a rebalance sooner and delay "
        "steps longer. Left out: 1.",
        metavar="LAYERS",
    )
    eplb_min_rebalancing_utilization_threshold: float = flag(
        1.0, "Skip a rebalance while mean over max tokens of the ranks (balancedness) is above this.", metavar="0..1"
    )
    expert_distribution_recorder_mode: str | None = flag(
        None,
        "What /start_expert_distribution_record records. stat: token counts of each expert; stat_approx: the same from "
        "the tokens that the experts' ranks receive; per_pass: each forward pass separately; per_token: each token's "
        "experts. Left out: no recording (with --enable-eplb: stat).",
        choices=MODES,
    )
    expert_distribution_recorder_buffer_size: int | None = flag(
        None,
        "Forward passes that the modes stat and stat_approx keep, -1 for all. Left out: "
        "--eplb-rebalance-num-iterations.",
        metavar="PASSES",
    )
    expert_balancedness_report_mode: str = flag(
        "off",
        "Where the balancedness (mean over max tokens of the ranks) of each forward pass is reported. Costs an "
        "exchange of counts between the ranks in each pass.",
        choices=("off", "server_log", "prometheus", "both"),
    )
    enable_expert_distribution_metrics: bool = flag(False, "Older spelling of --expert-balancedness-report-mode both.")
