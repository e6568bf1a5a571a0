"""Prefill and decode on separate engines: numbers of engines, rates, memory and commands."""

from __future__ import annotations

import random
import shlex
from dataclasses import replace

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.config.slo import Slo
from moe_engine.models.config_file import load_model_config
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.costs.efficiency import load_efficiency
from moe_engine.tuning.costs.model_facts import model_facts
from moe_engine.tuning.costs.step_cost import StepShape
from moe_engine.tuning.hardware.table import parse_cluster
from moe_engine.tuning.planner.candidate import Candidate, serve_command
from moe_engine.tuning.planner.disaggregated import BUSY, Disaggregated, DisaggregatedSearch, engine_counts
from moe_engine.tuning.planner.launch import Subject
from moe_engine.tuning.planner.memory import Memory
from moe_engine.tuning.planner.predict import Prediction, Predictor
from moe_engine.tuning.planner.report import json_of, text_of
from moe_engine.tuning.planner.search import Found, Plan, Search
from moe_engine.tuning.planner.space import Space
from moe_engine.tuning.planner.steady import Load
from moe_engine.tuning.planner.workload import Workload
from tests.tuning.plan_models import write

LOAD = Load(4000.0, 4000.0, 200.0)
HARDWARE = "6xH200"
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 6,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 3000, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384, "rope_theta": 10000, "norm_topk_prob": True, "eos_token_id": 1,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("model"), CONFIG)


def parts(folder: str) -> tuple[Predictor, Memory]:
    cluster, facts = parse_cluster(HARDWARE), model_facts(CONFIG)
    given = EngineArgs.from_kwargs(model_path=folder, context_length=16384)
    predictor = Predictor(facts, cluster, load_efficiency("moe-engine"), facts.stored_dtype)
    return predictor, Memory(Subject(load_model_config(folder)), cluster, given)


SPACE = Space({"ranks": 1}, kv=("bf16",))


def setups(folder: str, load: Load = LOAD) -> list[tuple[Disaggregated, Prediction]]:
    return list(DisaggregatedSearch(*parts(folder), load, SPACE).run(6, folder, {}))


def test_numbers_of_engines_are_the_best():
    """Compared with all numbers."""
    for _ in range(300):
        gpus, ranks = random.randint(2, 96), [random.choice([1, 2, 4, 8, 16]) for _ in range(2)]
        rates = [random.uniform(0.1, 50) for _ in range(2)]
        pairs = [(p, d) for d in range(1, gpus + 1) for p in range(1, gpus + 1) if p * ranks[0] + d * ranks[1] <= gpus]
        found = engine_counts(ranks[0], ranks[1], rates[0], rates[1], gpus)
        if not pairs:
            assert found is None
            continue
        assert found is not None and found[0] in pairs
        assert found[1] == pytest.approx(max(min(p * rates[0], d * rates[1]) for p, d in pairs))


def test_each_side_keeps_up_with_the_other(folder: str):
    predictor, _ = parts(folder)
    found = setups(folder)
    assert {setup.decode.rows for setup, _ in found} > {1, 8, 64}
    for setup, prediction in found:
        requests = prediction.output_per_s / LOAD.output
        assert requests == pytest.approx(prediction.input_per_s / LOAD.computed)
        busy = requests * LOAD.computed / setup.prefill.replicas / prefill_rate(predictor, setup)
        assert busy <= BUSY * 1.001
        assert requests * prediction.tpot_s * LOAD.output <= setup.concurrency * 1.001


def prefill_rate(predictor: Predictor, setup: Disaggregated) -> float:
    """Prompt tokens a second of a prefill engine, from the cost of one step with full chunks."""
    cost, late = predictor.cost(setup.prefill.form, setup.prefill.kv)
    length, chunk = round(LOAD.computed), setup.prefill.chunk
    count, seconds = max(1, chunk // length), 0.0
    for start in range(0, length, chunk):
        tokens = min(chunk, length - start)
        pairs = sum(start + each + 1 for each in range(tokens))
        seconds += cost.step(StepShape(0, 0, 0, count * tokens, count * pairs, count * tokens)).seconds
    return count * length / (late * seconds)


def test_tokens_of_separate_engines_do_not_wait_for_prompts(folder: str):
    """The gap between tokens is that of decodes alone; longer prompts delay the first token only."""
    short, long = setups(folder), setups(folder, replace(LOAD, computed=4000.0, prompt=7000.0))
    for setup, prediction in short:
        assert prediction.itl_p99_s == pytest.approx(prediction.tpot_s)
        for other, later in long:
            if other == setup:
                assert later.ttft_s > prediction.ttft_s and later.input_per_s <= prediction.input_per_s * 1.001


def test_launches_are_those_of_serve(folder: str):
    """The plan's commands resolve as `serve` resolves them, with the same ledger."""
    predictor, memory = parts(folder)
    search = DisaggregatedSearch(predictor, memory, LOAD, SPACE)
    setup, prediction = max(search.run(6, folder, {}), key=lambda point: point[1].output_per_s)
    rooms = tuple(memory.of(side) for side in setup.sides)
    for side, room in zip(setup.sides, rooms):
        args = EngineArgs.from_cli([*shlex.split(serve_command(room.flags))[2:], "--device", "cuda"])
        assert args.disaggregation.disaggregation_mode == side.mode and args.parallel.dp_size == 1
        launch = prepare(args.replace(load_format="dummy"), parse_cluster(HARDWARE).machine)
        assert room.ledger is not None and launch.ledger.lines() == room.ledger.lines()
    found = Found((Plan(setup, prediction, rooms),), ((setup, prediction),), {}, 1)
    text, values = text_of(found, predictor.cluster), json_of(found, predictor.cluster)["plans"][0]
    for mode, side in zip(("prefill", "decode"), setup.sides):
        assert f"{side.replicas} x: {values[mode]['command']}" in text or side.replicas == 1
        assert values[mode]["form"]["replicas"] == values[mode]["launches"] == side.replicas
    assert values["router"] in text and values["predicted"]["ttft_ms"] == prediction.ttft_s * 1e3


def test_the_search_compares_them_with_whole_engines(folder: str):
    predictor, memory = parts(folder)
    found = Search(predictor, memory, Workload(8000, 100), Slo(), SPACE).run(6, folder, 9)
    assert {type(plan.setup) for plan in found.plans} == {Candidate, Disaggregated}
    apart = next(plan for plan in found.plans if isinstance(plan.setup, Disaggregated))
    best = max(p.output_per_gpu for _, p in setups(folder, Load(8000.0, 8000.0, 100.0)))
    assert apart.prediction.output_per_gpu == best
