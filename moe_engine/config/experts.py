"""Experts: where they stand, whether they move, what is recorded of them. `resolve_experts` makes `ExpertSettings`."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.parallel.recording.config import MODES

LATER_ALGORITHM = "more ways to place experts"


@dataclass(frozen=True)
class ExpertArgs:
    ep_num_redundant_experts: int = flag(
        0, "Slots beyond one for each expert, over all ranks, for copies of busy ones. With the experts a multiple of "
        "--ep-size.", metavar="N"
    )  # fmt: skip
    ep_dispatch_algorithm: str | None = flag(
        None,
        "Which copy of an expert a token goes to. static: each rank has one for each expert, its own or the nearest; "
        "dynamic: they take turns. Left out: static, or dynamic without --moe-a2a-backend, where all ranks see all "
        "tokens and must choose alike.",
        choices=("static", "dynamic"),
        unsupported=dict.fromkeys(("fake", "lp"), LATER_ALGORITHM),
    )
    init_expert_location: str = flag(
        "trivial",
        "Which slot holds which expert at the start. trivial: in their order; or a .pt or .json file, or JSON, with "
        "physical_to_logical_map [layers, slots], or with logical_count [layers, experts] (or passes before), for "
        "which a placement is planned: a dump of mode stat is such a file.",
        metavar="trivial|FILE|JSON",
    )
    enable_eplb: bool = flag(
        False, "Move experts between ranks while serving, so that all have equally much to do. Needs --ep-size above 1."
    )
    eplb_algorithm: str = flag(
        "auto",
        "How placements are planned. deepseek: copies of the busiest experts, dealt to all ranks; "
        "deepseek_hierarchical: whole expert groups to nodes first; auto: the latter where groups fit --nnodes.",
        choices=("auto", "deepseek", "deepseek_hierarchical"),
        unsupported=dict.fromkeys(
            ("deepseek_vec", "deepseek_vec_hierarchical", "elasticity_aware", "elasticity_aware_hierarchical"),
            LATER_ALGORITHM,
        ),
    )
    eplb_rebalance_num_iterations: int = flag(1000, "Passes between two plans.", metavar="PASSES")
    eplb_rebalance_layers_per_chunk: int | None = flag(
        None,
        "Layers that have an expert on the way to each rank at the same time: more move sooner, and steps wait longer. "
        "Left out: 1.",
        metavar="LAYERS",
    )
    eplb_min_rebalancing_utilization_threshold: float = flag(
        1.0, "Leave experts where they are while mean over max tokens of the ranks is above this.", metavar="0..1"
    )
    expert_distribution_recorder_mode: str | None = flag(
        None,
        "What /start_expert_distribution_record records. stat: counts of each pass; stat_approx: by what arrives at "
        "the ranks of the experts; per_pass: each pass by itself; per_token: each token's experts. Left out: nothing "
        "can be recorded (with --enable-eplb: stat).",
        choices=MODES,
    )
    expert_distribution_recorder_buffer_size: int | None = flag(
        None,
        "Passes that the modes stat and stat_approx keep, -1 for all. Left out: --eplb-rebalance-num-iterations.",
        metavar="PASSES",
    )
    expert_balancedness_report_mode: str = flag(
        "off",
        "Where mean over max tokens of the ranks is reported after each pass; ranks then exchange their counts each "
        "time.",
        choices=("off", "server_log", "prometheus", "both"),
    )
    enable_expert_distribution_metrics: bool = flag(
        False, "Take --expert-balancedness-report-mode both (the older spelling of it)."
    )
