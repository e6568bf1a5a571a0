"""Expert flags: resolved settings, and refusals with the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.parallel.expert_settings import ExpertSettings, RebalanceSettings
from moe_engine.parallel.topology import Topology
from moe_engine.planning.parallelism.resolve_experts import ONE_RANK, resolve_experts
from moe_engine.planning.resolution_log import Record
from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    folder = tmp_path_factory.mktemp("flags")
    kinds = ("deepseek_v3", "llama")
    return {kind: load_model_config(make_checkpoint(kind, folder / kind, 1, tokenizer=False)) for kind in kinds}


def resolved(
    model: ModelConfig, text: str, topology: Topology = ONE_RANK, directory: Path = Path("/dumps")
) -> tuple[ExpertSettings, dict[str, Any]]:
    record = Record()
    settings = resolve_experts(EngineArgs.from_cli(text.split()), model, record, topology, directory)
    return settings, {decision.name: decision.value for decision in record.decisions}


EP2, EP4 = Topology(2, ep_size=2), Topology(4, ep_size=4, moe_a2a_backend="allgather")


def test_no_flags(models: dict[str, ModelConfig]) -> None:
    for model in models.values():
        settings, decided = resolved(model, "")
        assert not settings.places_experts and settings.recorder_mode is None and not settings.reports
        assert not decided


def test_resolved_settings(models: dict[str, ModelConfig]) -> None:
    model = models["deepseek_v3"]
    settings, _ = resolved(model, "--expert-distribution-recorder-mode per_token")
    assert (settings.recorder_mode, settings.buffer_size, settings.directory) == ("per_token", 1000, Path("/dumps"))
    text = "--enable-eplb --eplb-rebalance-num-iterations 50 --eplb-min-rebalancing-utilization-threshold 0.9"
    settings, decided = resolved(model, text, EP2)
    assert settings.rebalance == RebalanceSettings(50, 1, 0.9) and settings.buffer_size == 50
    assert decided == {"expert_distribution_recorder_mode": "stat"} and settings.places_experts
    settings, decided = resolved(model, "--ep-num-redundant-experts 4 --eplb-rebalance-layers-per-chunk 3", EP4)
    assert settings.num_redundant == 4 and settings.dispatch == "static" == decided["ep_dispatch_algorithm"]
    settings, decided = resolved(model, "--ep-num-redundant-experts 2", EP2)
    assert settings.dispatch == "dynamic" == decided["ep_dispatch_algorithm"]
    for text, log, metrics in (
        ("--expert-balancedness-report-mode server_log", True, False),
        ("--expert-balancedness-report-mode prometheus", False, True),
        ("--enable-expert-distribution-metrics", True, True),
    ):
        settings, decided = resolved(model, text)
        assert (settings.report_log, settings.report_metrics) == (log, metrics)
        assert decided["expert_distribution_recorder_mode"] == "stat"


@pytest.mark.parametrize(
    ("text", "topology", "words"),
    [
        ("--enable-eplb", Topology(), "--ep-size is 1"),
        ("--ep-num-redundant-experts 3", EP2, "not a multiple of --ep-size 2"),
        ("--ep-num-redundant-experts 2 --ep-dispatch-algorithm static", EP2, "must choose alike: use dynamic"),
        ("--expert-distribution-recorder-mode all", Topology(), "--expert-distribution-recorder-mode all"),
        ("--expert-distribution-recorder-mode stat --expert-distribution-recorder-buffer-size 0", EP2, "-1 for all"),
        ("--eplb-min-rebalancing-utilization-threshold 2", EP2, "between 0 and 1"),
        ("--init-expert-location nowhere.json", EP2, "nowhere.json: no such file"),
        ("--init-expert-location best", EP2, "give trivial, a .pt or .json file"),
        ("--eplb-algorithm greedy", EP2, "--eplb-algorithm greedy"),
    ],
)
def test_refusals(models: dict[str, ModelConfig], text: str, topology: Topology, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolved(models["deepseek_v3"], text, topology)
    assert words in str(refusal.value)


def test_unsupported_algorithms(models: dict[str, ModelConfig]) -> None:
    for text in ("--eplb-algorithm deepseek_vec", "--ep-dispatch-algorithm lp"):
        with pytest.raises(NotAvailableYet, match=text.split()[0]):
            resolved(models["deepseek_v3"], text)


def test_a_model_without_experts(models: dict[str, ModelConfig]) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts; leave it out"):
        resolved(models["llama"], "--expert-distribution-recorder-mode stat")


def test_existing_locations(models: dict[str, ModelConfig], tmp_path: Path) -> None:
    text = json.dumps({"logical_count": [[1]]}, separators=(",", ":"))
    file = tmp_path / "map.json"
    file.write_text(text)
    for value in (text, str(file)):
        assert resolved(models["deepseek_v3"], f"--init-expert-location {value}", EP2)[0].location == value
