"""One configuration of the search: its ranks, sizes and the command that starts it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_engine.config.field import option_of
from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.hardware.table import Cluster

LEADER = "NODE0:20000"
"""Placeholder of --dist-init-addr where no launcher gives it."""


@dataclass(frozen=True)
class Candidate:
    """A replica, the number of replicas and their sizes.

    Attributes:
        form: ranks of a replica. replicas: equal engines.
        kv: ``bf16`` or ``fp8``. chunk: prompt tokens of a step of one attention group.
        rows: running requests of one attention group. drafts: MTP depth.
        model_path: as in the command.
        mode: value of --disaggregation-mode: ``prefill`` or ``decode``; empty: the engine does both.
        requests: given requests of all replicas; None: the running requests of all attention groups.
        auto_depth: the launch chooses the depth of each step; `drafts` is the one that pays off here.
    """

    form: Form
    replicas: int
    kv: str
    chunk: int
    rows: int
    drafts: int = 0
    model_path: str = "MODEL"
    mode: str = ""
    requests: int | None = None
    auto_depth: bool = False

    @property
    def sides(self) -> tuple[Candidate, ...]:
        """The kinds of engines."""
        return (self,)

    @property
    def decode(self) -> Candidate:
        """The engines that decode."""
        return self

    @property
    def of_one_launch(self) -> Candidate:
        """The part of the candidate that determines the flags of one launch: engines of each mode are launches of their
        own."""
        return replace(self, replicas=1) if self.mode else self

    @property
    def form_key(self) -> tuple[int, ...]:
        """Candidates with one key are variants of one form."""
        return self.form.ranks, self.form.attn_dp, self.form.ep

    @property
    def gpus(self) -> int:
        return self.form.ranks * self.replicas

    @property
    def concurrency(self) -> int:
        """Requests of all replicas."""
        return self.rows * self.form.attn_dp * self.replicas if self.requests is None else self.requests

    def with_rows(self, rows: int, requests: int | None = None) -> Candidate:
        return replace(self, rows=rows, requests=requests)

    def with_drafts(self, drafts: int) -> Candidate:
        return replace(self, drafts=drafts)

    def flags(self, cluster: Cluster) -> dict[str, Any]:
        """Flags of `serve` by field name."""
        form = self.form
        nodes = max(1, -(-form.ranks // cluster.gpu.gpus_per_node))
        found: dict[str, Any] = {"model_path": self.model_path}
        sizes = {"tp_size": form.ranks, "attn_dp_size": form.attn_dp}
        found |= {name: size for name, size in sizes.items() if size > 1}
        if form.ranks > 1:  # left out, a launch chooses groups of its own
            found |= {"ep_size": form.ep}
        if form.travels:
            found |= {"moe_a2a_backend": "auto"}
        if form.dense_whole:
            found |= {"moe_dense_tp_size": 1}
        if form.travels and form.attn_dp > 1:
            found |= {"enable_dp_lm_head": True}
        if form.redundant:
            found |= {"ep_num_redundant_experts": form.redundant, "enable_eplb": True}
        if form.overlap:
            found |= {"enable_two_batch_overlap": True}
        if self.mode:
            found |= {"disaggregation_mode": self.mode}
        elif self.replicas > 1 and nodes == 1 and (local := cluster.gpu.gpus_per_node // form.ranks) > 1:
            found |= {"dp_size": min(self.replicas, local)}
        if nodes > 1:
            found |= {"nnodes": nodes, "dist_init_addr": LEADER}
        if self.kv == "fp8":
            found |= {"kv_cache_dtype": "fp8_e4m3"}
        found |= {
            "chunked_prefill_size": self.chunk * form.attn_dp,
            "max_running_requests": self.rows * form.attn_dp,
            "cuda_graph_max_bs_decode": self.rows,
        }
        if self.auto_depth:
            found |= {"speculative_algorithm": "NEXTN", "speculative_num_steps": "auto"}
        elif self.drafts:
            found |= {
                "speculative_algorithm": "NEXTN", "speculative_num_steps": self.drafts, "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": self.drafts + 1,
            }  # fmt: skip
        return found

    @property
    def text(self) -> str:
        """``16 x [TP8] ...``: one line for the report."""
        form = self.form
        parts = [
            f"TP{form.attn_tp}" if form.attn_tp > 1 or form.ranks == 1 else "",
            f"DP{form.attn_dp}" * (form.attn_dp > 1),
        ]
        parts += [f"EP{form.ep}" * (form.ep > 1), f"+{form.redundant} experts" * bool(form.redundant)]
        parts += ["two-batch overlap" * form.overlap, f"MTP {self.drafts}" * bool(self.drafts), f"KV {self.kv}"]
        return f"{self.replicas} x {form.ranks} GPUs: " + " ".join(part for part in parts if part)


def serve_command(flags: Mapping[str, Any]) -> str:
    """The command line of one node of one launch."""
    return "moe-engine serve " + words(flags)


def sbatch_command(flags: Mapping[str, Any], cluster: Cluster) -> str:
    """The same launch by SLURM, whose nodes find each other."""
    own = {name: value for name, value in flags.items() if name not in ("nnodes", "dist_init_addr")}
    ranks = flags.get("tp_size", 1)
    nodes = -(-ranks // cluster.gpu.gpus_per_node)
    per_node = min(cluster.gpu.gpus_per_node, ranks * _replicas(flags))
    return f"LAYOUT=flags sbatch --nodes={nodes} --gres=gpu:{per_node} slurm/serve.sbatch " + words(own)


def launches(replicas: int, flags: Mapping[str, Any]) -> int:
    """Number of times that a command is started: replicas on further machines are launches of their own."""
    return -(-replicas // _replicas(flags))


def _replicas(flags: Mapping[str, Any]) -> int:
    """Engines of one launch: with the older spelling --dp-size counts attention groups."""
    return 1 if flags.get("enable_dp_attention") else int(flags.get("dp_size", 1))


def words(flags: Mapping[str, Any]) -> str:
    """Flags as a command line of a shell."""
    return " ".join(
        option_of(name) if value is True else f"{option_of(name)} {shlex.quote(str(value))}"
        for name, value in flags.items()
    )
