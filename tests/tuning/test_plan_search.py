"""The search: forms, the Pareto front, and memory ledgers equal to those of `serve`."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.config.slo import Slo
from moe_engine.errors import ConfigError
from moe_engine.models.config_file import load_model_config
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.costs.efficiency import load_efficiency
from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.costs.model_facts import model_facts
from moe_engine.tuning.hardware.table import parse_cluster
from moe_engine.tuning.planner.candidate import Candidate, serve_command
from moe_engine.tuning.planner.launch import Subject
from moe_engine.tuning.planner.memory import Memory
from moe_engine.tuning.planner.predict import Prediction, Predictor
from moe_engine.tuning.planner.search import Found, Search, pareto
from moe_engine.tuning.planner.space import Space
from moe_engine.tuning.planner.workload import Workload
from tests.models.published import V3
from tests.tuning.plan_models import small_grouped, write

WORKLOAD, ANY = Workload(2000, 200), Slo()


def search(folder: str, hardware: str, slo: Slo = ANY, workload: Workload = WORKLOAD, top: int = 3) -> Found:
    cluster = parse_cluster(hardware)
    facts = model_facts(V3)
    predictor = Predictor(facts, cluster, load_efficiency("moe-engine"), facts.stored_dtype)
    given = EngineArgs.from_kwargs(model_path=folder, context_length=8192)
    memory = Memory(Subject(load_model_config(folder)), cluster, given)
    return Search(predictor, memory, workload, slo).run(cluster.num_gpus, folder, top)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("model"), V3)


@pytest.fixture(scope="module")
def found(folder: str) -> Found:
    return search(folder, "16xH200")


def test_the_ledger_is_that_of_serve(folder: str, found: Found):
    """The ledger of the flags in the printed command, as `prepare` resolves them for a launch."""
    for plan in found.plans:
        argv = shlex.split(serve_command(plan.rooms[0].flags))[2:]
        args = EngineArgs.from_cli([*argv, "--device", "cuda", "--load-format", "dummy"])
        launch = prepare(args, parse_cluster("16xH200").machine)
        assert plan.rooms[0].ledger is not None
        assert launch.ledger.lines() == plan.rooms[0].ledger.lines()
        assert launch.max_running_requests >= plan.setup.decode.rows
        assert launch.max_total_num_tokens >= plan.setup.decode.rows * (WORKLOAD.prompt + WORKLOAD.output)
        assert launch.context_len == 8192


def test_forms_that_do_not_fit_are_named_with_their_sum(found: Found):
    assert any(name.startswith("16 x 1 GPUs") for name in found.refused)
    assert all("weights" in why and "GB" in why for why in found.refused.values())


def test_plans_are_of_different_forms_and_the_best_is_first(found: Found):
    rates = [plan.prediction.output_per_gpu for plan in found.plans]
    assert rates == sorted(rates, reverse=True)
    assert len({(p.setup.form_key) for p in found.plans}) == 3
    assert rates[0] <= max(prediction.output_per_gpu for _, prediction in found.front)


def test_an_objective_is_met_or_refused_with_the_nearest(folder: str):
    slo = Slo(ttft_s=1.0, itl_s=0.03)
    for plan in search(folder, "8xH200", slo).plans:
        assert plan.prediction.ttft_s <= 1.0 and max(plan.prediction.itl_s, plan.prediction.tpot_s) <= 0.03
    with pytest.raises(ConfigError, match=r"--slo: no configuration of 8 GPUs meets it; .*ttft=.*itl="):
        search(folder, "8xH200", Slo(itl_s=1e-4))


def test_nothing_fits(folder: str):
    with pytest.raises(ConfigError, match=r"nothing fits 2xh200.*weights \d+"):
        search(folder, "2xH200")


def prediction(tpot: float, rate: float) -> Prediction:
    return Prediction(1, 1, tpot, tpot, tpot, rate, rate, 1, {}, {})


def test_the_front_has_the_points_that_no_other_exceeds():
    candidate = Candidate(Form(1), 1, "bf16", 2048, 1)
    for _ in range(30):
        points = [(candidate, prediction(random.randint(1, 9), random.randint(1, 9))) for _ in range(20)]
        own = {(p.tpot_s, p.output_per_s) for _, p in points}
        kept = {
            point for point in own
            if not any(o != point and o[0] <= point[0] and o[1] >= point[1] for o in own)
        }  # fmt: skip
        assert {(p.tpot_s, p.output_per_s) for _, p in pareto(points)} == kept


def test_forms_use_all_gpus_and_divide_the_model():
    for _ in range(10):
        facts, gpus = model_facts(small_grouped()), random.choice([1, 2, 6, 8, 16, 24, 64])
        for form, replicas in Space().forms(facts, gpus):
            assert form.ranks * replicas == gpus
            assert facts.num_heads % form.attn_tp == 0 and facts.num_experts % form.ep == 0
            assert not form.travels or form.attn_dp > 1


def test_many_gpus_are_searched_by_few_ledgers(folder: str):
    """Ledgers are the slow part: 256 GPUs need at most a few hundred."""
    cluster = parse_cluster("256xH200")
    memory = Memory(Subject(load_model_config(Path(folder))), cluster, EngineArgs.from_kwargs(model_path=folder))
    asked: list[Candidate] = []
    counted = memory.of

    def of(candidate: Candidate):
        asked.append(candidate)
        return counted(candidate)

    memory.of = of  # type: ignore[method-assign]
    facts = model_facts(V3)
    predictor, lines = Predictor(facts, cluster, load_efficiency("moe-engine"), "fp8"), list[str]()
    whole = Search(predictor, memory, WORKLOAD, Slo(), Space(kept=lambda form: form.ranks >= 32), progress=lines.append)
    result = whole.run(256, folder, 2)
    assert result.tried > 2000 and len(result.plans) == 2
    assert len(set(asked)) < 600
    assert len(lines) > 20 and sum("separate engines" in line for line in lines) > 10  # shown in every stage
