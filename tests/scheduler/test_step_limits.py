"""Random flags: accepted flags never lead to a step above the limits.

The tests check the dispatcher's modes, CUDA graphs and the memory ledger. A scheduler plans steps under random loads,
with the worker's forwards: halves, draft steps, draft extends.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.config.args import EngineArgs
from moe_engine.core.setup import scheduler_config
from moe_engine.errors import ConfigError
from moe_engine.models.config_file import load_model_config
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.planning.memory.dispatch import dispatch_rows
from moe_engine.planning.model.resolve_dtype import DTYPE_BYTES
from moe_engine.planning.resolve import resolve
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.types import StepPlan
from moe_engine.worker.batch.two_batches import find_cut
from tests.config.conftest import SMALL, machine
from tests.examples import examples
from tests.scheduler.drafting_worker import DraftingWorker
from tests.scheduler.simulator import Simulation, make_request

CPU, GPU = machine(), machine(138, 141, "cuda", capability=(9, 0))
LAYERS = (1, 3)
"""MTP layers of the models."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    found = {}
    for count in LAYERS:
        folder = found[count] = tmp_path_factory.mktemp(f"mtp{count}")
        fields = {**SMALL, "num_attention_heads": 8, "num_nextn_predict_layers": count}
        (folder / "config.json").write_text(json.dumps(fields))
    return found


def maybe(name: str, *values: Any) -> st.SearchStrategy[dict[str, Any]]:
    """A flag with a value, or no flag."""
    return st.sampled_from([{}, *({name: value} for value in values)])


TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 5, "speculative_num_draft_tokens": 3}
DRAFTS: list[dict[str, Any]] = [
    {},
    {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
    {"speculative_algorithm": "NEXTN", "speculative_num_steps": "auto"},
    {"speculative_algorithm": "NEXTN"},
    {"speculative_algorithm": "NEXTN", **TREE},
]


@st.composite
def flags(draw: st.DrawFn) -> dict[str, Any]:
    """Flags of a launch; some contradict each other."""
    drafts = draw(st.sampled_from(DRAFTS))
    tp_size = draw(st.sampled_from([1, 2, 2, 2, 4]))
    groups = 1 if "speculative_eagle_topk" in drafts else draw(st.sampled_from([1, 1, tp_size]))
    found = drafts | {"tp_size": tp_size, "attn_dp_size": groups}
    if draw(st.integers(0, 3)):
        found |= {"moe_a2a_backend": draw(st.sampled_from(["all_to_all", "allgather", "auto"]))}
        found |= draw(maybe("enable_two_batch_overlap", True)) if tp_size > 1 else {}
    chunk = draw(st.sampled_from([None, -1, 8, 48, 304]))
    found |= {} if chunk is None else {"chunked_prefill_size": chunk}
    page = draw(st.sampled_from([1, 4, 16]))
    found |= {"page_size": page if chunk in (None, -1) or chunk % page == 0 else 1}
    found |= draw(maybe("enable_mixed_chunk", True)) if chunk != -1 else {}
    for flag in (
        maybe("deepep_mode", "low_latency", "low_latency", "normal"),
        maybe("max_dispatch_tokens_per_rank", 7, 24, 200),
        maybe("max_running_requests", 1, 3, 12, 40),
        maybe("max_prefill_tokens", 16, 100),
        st.one_of(maybe("cuda_graph_max_bs_decode", 2, 64), maybe("cuda_graph_bs_decode", "1 4 48")),
    ):
        found |= draw(flag)
    return found | {"context_length": draw(st.sampled_from([40, 200])), "max_total_tokens": 640}


def resolved(folder: Path, asked: dict[str, Any], on_gpu: bool) -> ResolvedConfig:
    args, model = EngineArgs.from_kwargs(**asked), load_model_config(folder)
    return resolve(args, model, GPU if on_gpu else CPU, model_path=str(folder))


class Parts:
    """The limits of a configuration, checked for each forward."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.config, self.limits = config, config.limits
        self.modes = config.parallel.dispatch.modes if config.parallel.dispatch is not None else {}
        self.held = {"normal": self.limits.dispatch_tokens, "low_latency": self.limits.low_latency_tokens}
        topology = config.parallel.topology
        self.context = ParallelContext(topology, decode_tokens=self.limits.low_latency_tokens)

    def check(self, num_tokens: int, prefills: bool) -> None:
        """One forward of the model's layers."""
        assert num_tokens <= self.limits.forward_tokens  # tokens for which the ledger counts activations
        if not self.modes or not num_tokens:
            return
        groups = [num_tokens] * self.context.attn_dp_size
        sizes = StepSizes.known(self.context, groups, groups, prefills)
        mode = self.modes[sizes.phase]
        assert max(sizes.shares) <= self.held[mode], (sizes, mode, self.held)

    def check_plan(self, plan: StepPlan) -> None:
        """All forwards of a plan."""
        prefills, limits, speculation = plan.num_decodes < len(plan.rows), self.limits, self.config.speculation
        assert limits.problem_of(plan.num_tokens, len(plan.rows)) is None
        self.check(plan.num_tokens, prefills)
        cut = find_cut(plan, self.config.args.parallel.tbo_token_distribution_threshold)
        if cut is not None and self.config.args.parallel.enable_two_batch_overlap:
            self.check(cut.num_tokens, prefills)
            self.check(plan.num_tokens - cut.num_tokens, prefills)
        if speculation is None or plan.speculation is None or speculation.method != "nextn":
            return
        drafted, depth = sum(count > 1 for count in plan.counts[: plan.num_decodes]), plan.speculation.depth
        for level in range(depth):  # a tree recomputes all its levels so far
            self.check(drafted * (max(1, level * speculation.topk) if speculation.topk > 1 else 1), False)
        if plan.speculation.follow:  # the path of a tree is one token longer than its depth
            again = self.config.model.num_nextn_predict_layers - 1
            path = depth + 1 if speculation.topk > 1 else 0
            counts = [max(n, path * (n > 1 and i < plan.num_decodes)) for i, n in enumerate(plan.counts)]
            self.check(sum(counts) + again * len(counts) if again else 0, True)

    def check_graphs(self) -> None:
        """Every captured step is a decode that fits a low-latency dispatch, and is printed."""
        graphs, values = self.config.graphs, self.config.flat()
        if not graphs.sizes:
            return
        assert values["cuda_graph_bs_decode"] == " ".join(map(str, graphs.sizes))
        assert graphs.sizes[-1] <= self.config.max_running_requests
        assert values["cuda_graph_max_bs_decode"] in (None, graphs.sizes[-1])
        largest = graphs.sizes[-1] * max(graphs.counts)
        if self.modes:
            groups = [largest] * self.context.attn_dp_size
            assert StepSizes.known(self.context, groups, groups, False).phase == "decode"

    def check_values(self) -> None:
        """The printed values are those in use."""
        config, values = self.config, self.config.flat()
        assert values["chunked_prefill_size"] == config.chunked_prefill_size == self.limits.chunk
        assert config.max_running_requests <= self.limits.running
        if self.limits.low_latency != "never":
            shown = values["max_dispatch_tokens_per_rank"]
            assert shown == self.held["low_latency"] or "max_dispatch_tokens_per_rank" in config.args.given
            assert self.held["low_latency"] <= shown
        size = DTYPE_BYTES[config.dtype]
        rows = dispatch_rows(config.parallel, config.model, size, config.device, self.limits)
        assert [row for row in config.ledger.rows if row.name == "dispatch buffers"] == rows


def loads(rng: random.Random, sim: Simulation, longest: int) -> Iterator[None]:
    """Prompts of all lengths, most above the limits of a step; some are aborted."""
    for number in range(14):
        length = min(longest - 1, rng.choice([1, rng.randint(1, longest), longest]))
        new = rng.randint(1, min(12, longest - length))
        sim.add(make_request(f"{number}.", [rng.randrange(50) for _ in range(length)], new))
        if rng.random() < 0.2:
            sim.abort(f"{rng.randrange(number + 1)}.")
        yield


@settings(max_examples=examples(50), suppress_health_check=list(HealthCheck))
@given(asked=flags(), layers=st.sampled_from(LAYERS), on_gpu=st.booleans(), seed=st.integers(0, 10**6))
def test_no_plan_exceeds_the_limits(
    folders: dict[int, Path], asked: dict[str, Any], layers: int, on_gpu: bool, seed: int
) -> None:
    try:
        config = resolved(folders[layers], asked, on_gpu)
    except ConfigError as error:
        assert "--" in str(error)
        return
    parts, rng = Parts(config), random.Random(seed)
    parts.check_values()
    parts.check_graphs()
    own = dataclasses.replace(scheduler_config(config), vocab_size=50)
    worker = DraftingWorker(own, seed, luck=0.6) if own.speculation is not None else None
    sim = Simulation(own, overlap=rng.random() < 0.7, check_every=10, worker=worker)
    sim.keep_plans = True
    for _ in loads(rng, sim, min(own.context_len, config.max_req_len)):
        for _ in range(rng.randint(0, 3)):
            sim.turn()
    sim.run_to_end(20_000)
    sim.check_end()
    for plan in sim.plans:
        parts.check_plan(plan)


# -- contradicting flags


@pytest.mark.parametrize(
    ("asked", "capacity", "named"),
    [
        ({"chunked_prefill_size": 300}, 24, ["--chunked-prefill-size 300", "chunks of 48"]),
        ({"chunked_prefill_size": -1}, 24, ["--chunked-prefill-size -1", "--context-length"]),
        ({"max_running_requests": 60}, 24, ["--max-running-requests", "run at most 48 of them"]),
        ({"page_size": 64}, 24, ["--page-size 64", "no chunk could fill a page"]),
        ({"speculative_algorithm": "NGRAM"}, 1, ["of up to 5 tokens (drafts)"]),
    ],
)  # fmt: skip
def test_steps_above_the_low_latency_capacity_are_refused(
    folders: dict[int, Path], asked: dict[str, Any], capacity: int, named: list[str]
) -> None:
    common = {"tp_size": 2, "moe_a2a_backend": "all_to_all", "deepep_mode": "low_latency"}
    common["max_dispatch_tokens_per_rank"] = capacity
    with pytest.raises(ConfigError) as caught:
        resolved(folders[1], common | asked, on_gpu=False)
    for text in (*named, "--deepep-mode low_latency holds", "--max-dispatch-tokens-per-rank"):
        assert text in str(caught.value)


def test_values_left_open_are_reduced(folders: dict[int, Path]) -> None:
    """Flags without the numbers resolve to the dispatcher's capacity, with the reason."""
    common = {"tp_size": 2, "moe_a2a_backend": "all_to_all", "deepep_mode": "low_latency"}
    config = resolved(folders[1], common | {"max_dispatch_tokens_per_rank": 24, "page_size": 16}, on_gpu=False)
    assert (config.chunked_prefill_size, config.max_running_requests) == (48, 48)
    reasons = {decision.name: decision.reason for decision in config.decisions}
    assert "24 tokens a rank" in reasons["chunked_prefill_size"] and "24 tokens" in reasons["max_running_requests"]
    wide = resolved(folders[1], common | {"max_running_requests": 300, "speculative_algorithm": "NGRAM"}, on_gpu=False)
    assert wide.limits.low_latency_tokens == 300 * 5 // 2 and wide.chunked_prefill_size == 1500
    asked = resolved(folders[1], common | {"chunked_prefill_size": 1000}, on_gpu=False)
    assert asked.limits.low_latency_tokens == 500


def test_decodes_of_all_requests_fit_low_latency(folders: dict[int, Path]) -> None:
    """Not only 128 tokens per rank; with little memory 128 and a note, or the given size."""
    common = {"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "all_to_all", "speculative_algorithm": "NEXTN"}
    config = resolved(folders[1], common | {"max_running_requests": 512}, on_gpu=True)
    assert config.limits.low_latency_tokens == 256 * 4 and not any("normal mode" in note for note in config.notes)
    assert config.graphs.sizes[-1] == 256
    few = resolved(folders[1], common | {"max_running_requests": 512, "max_dispatch_tokens_per_rank": 40}, on_gpu=True)
    assert few.graphs.sizes[-1] == 10
    (note,) = (note for note in few.notes if "normal mode" in note)
    assert "more than 40 tokens" in note and "--max-dispatch-tokens-per-rank 40" in note
    reasons = {decision.name: decision.reason for decision in few.decisions}
    assert "40 tokens a rank, 10 requests of 4 tokens" in reasons["cuda_graph_max_bs_decode"]
