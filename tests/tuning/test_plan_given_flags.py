"""A flag that the user gives fixes its dimension of the search, in the prediction and in the printed command."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from moe_engine.cli.main import main
from moe_engine.config.args import EngineArgs
from tests.models.published import V3
from tests.tuning.plan_models import write

SMALL = V3 | {
    "hidden_size": 1024, "num_hidden_layers": 6, "n_routed_experts": 64, "moe_intermediate_size": 512,
    "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 8000,
    "max_position_embeddings": 16384,
}  # fmt: skip
LOAD = ["--hardware", "16xH200", "--workload", "in=3000,out=100,shared=500,turns=2"]
WIDE = ["--tp-size", "16", "--attn-dp-size", "16", "--moe-a2a-backend", "auto"]
CASES = {
    "--tp-size": [["4"], ["1"]],
    "--attn-dp-size": [["2"], ["1"]],
    "--ep-size": [["2"], ["1"], ["8"]],
    "--dp-size": [["2"], ["1"]],
    "--nnodes": [["1"], ["2"]],
    "--moe-a2a-backend": [["symm_mem"], ["auto"], ["none"]],
    "--moe-dense-tp-size": [["1"]],
    "--kv-cache-dtype": [["auto"], ["fp8_e4m3"], ["bfloat16"]],
    "--chunked-prefill-size": [["1024"], ["16384"], ["-1"]],
    "--max-running-requests": [["40"]],
    "--cuda-graph-max-bs-decode": [["5"]],
    "--cuda-graph-bs-decode": [["1", "2", "4"]],
    "--disable-cuda-graph": [[]],
    "--speculative-num-steps": [["2"], ["0"], ["5"], ["auto"]],
    "--speculative-num-draft-tokens": [["3"]],
    "--speculative-algorithm": [["NEXTN"], ["NEXTN", "--speculative-num-steps", "auto"], ["NGRAM"]],
    "--ep-num-redundant-experts": [["16", *WIDE], ["32", *WIDE], ["0", *WIDE]],
    "--enable-two-batch-overlap": [[], WIDE],
    "--enable-dp-attention": [["--dp-size", "4"]],
    "--enable-ep-moe": [[]],
    "--disable-radix-cache": [[], ["--chunked-prefill-size", "4096"]],
    "--workload-profile": [["low-latency"], ["throughput"], ["long-context"], ["multi-turn"]],
    "--page-size": [["64"]],
    "--max-total-tokens": [["50k"]],
}
"""Values of each flag, with further flags. `make test` draws one for each flag."""
ALL = [
    pytest.param([flag, *values], marks=pytest.mark.one_of(f"plan {flag}", " ".join(values)))
    for flag, several in CASES.items()
    for values in several
]


DRAFTS = ("--speculative-", "--workload-profile")
"""Beginnings of flags that may choose drafts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="module")
def without_drafts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without MTP layers the search has a quarter of the configurations."""
    return write(tmp_path_factory.mktemp("plain"), SMALL | {"num_nextn_predict_layers": 0})


def plans(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert main(["plan", *argv, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["plans"]


@pytest.mark.parametrize("flags", ALL, ids=" ".join)
def test_the_search_obeys_the_flag(
    capsys: pytest.CaptureFixture[str], model: str, without_drafts: str, flags: list[str]
) -> None:
    """The prediction of a plan is that of its command alone. Flags that choose no drafts have them in some runs."""
    if not flags[0].startswith(DRAFTS) and random.randrange(6):
        model = without_drafts
    given = EngineArgs.from_cli([*flags, "--disaggregation-mode", "null"])
    found = plans(capsys, "--model-path", model, *LOAD, *flags, "--disaggregation-mode", "null")
    assert found
    for plan in found:
        command = shlex.split(plan["command"])[2:]
        launch = EngineArgs.from_cli(command)
        for name in given.given:
            assert launch.flat()[name] == given.flat()[name], (name, plan["command"])
        one_form = [] if "--tp-size" in command else ["--tp-size", "1"]
        requests = plan["concurrency"] // plan["launches"]
        alone = plans(capsys, *command, *one_form, *LOAD, "--concurrency", str(requests))[0]
        assert alone["concurrency"] == requests
        values, expected = plan["predicted"], alone["predicted"]
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "output_tokens_per_second_per_gpu"):
            assert values[name] == pytest.approx(expected[name], rel=1e-6), (name, plan["command"])


OLD_AND_NEW = [
    ("--enable-dp-attention --dp-size 8", "--attn-dp-size 8"),
    ("--enable-ep-moe", "--ep-size 8"),
    ("--moe-a2a-backend symm_mem --attn-dp-size 8", "--moe-a2a-backend symm_mem --attn-dp-size 8 --ep-size 8"),
]


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW)
def test_older_spellings_are_predicted_as_their_values(
    capsys: pytest.CaptureFixture[str], model: str, old: str, new: str
) -> None:
    form = ["--model-path", model, *LOAD, "--tp-size", "8", "--concurrency", "60"]
    before, now = (plans(capsys, *form, *text.split())[0] for text in (old, new))
    assert before["predicted"] == now["predicted"] and before["form"] == now["form"]
    assert before["concurrency"] == 60


def test_the_command_is_that_of_a_shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Values with spaces are quoted, lists and a given 0 are kept: its words have the flags of the plan."""
    (tmp_path / "my model").mkdir()
    folder = write(tmp_path / "my model", V3)
    flags = ["--tp-size", "8", "--cuda-graph-bs-decode", "1", "2", "--served-model-name", "it's V3"]
    flags += ["--random-seed", "0", "--json-model-override-args", '{"max_position_embeddings": 9000}']
    load = ["--hardware", "8xH200", "--workload", "in=200,out=20", "--concurrency", "2", "--json"]
    assert main(["plan", "--model-path", folder, *flags, *load]) == 0
    command = json.loads(capsys.readouterr().out)["plans"][0]["command"]
    args, given = EngineArgs.from_cli(shlex.split(command)[2:]), EngineArgs.from_cli(["--model-path", folder, *flags])
    assert args.flat() == given.flat() and args.given == given.given


def test_few_requests_leave_schedulers_idle(capsys: pytest.CaptureFixture[str], model: str) -> None:
    """Two requests over up to 16 engines or attention groups: no plan serves more."""
    found = plans(capsys, "--model-path", model, *LOAD, "--concurrency", "2", "--top", "9")
    assert len(found) > 4
    for plan in found:
        values = plan["predicted"]
        assert plan["concurrency"] == 2
        seconds = values["ttft_ms"] / 1e3 + 99 * values["tpot_ms"] / 1e3
        assert values["output_tokens_per_second"] == pytest.approx(2 * 100 / seconds)


def test_one_side_of_separate_engines_is_no_plan(capsys: pytest.CaptureFixture[str], model: str) -> None:
    for form in ([], ["--tp-size", "2", "--concurrency", "8"]):
        assert main(["plan", "--model-path", model, *LOAD, "--disaggregation-mode", "decode", *form]) == 2
        assert "--disaggregation-mode decode: the search compares separate engines" in capsys.readouterr().err


def test_a_stated_fp8_kv_cache_is_planned(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    stated = write(tmp_path_factory.mktemp("stated"), SMALL | {"quantization_config": section})
    together = ["--disaggregation-mode", "null"]
    for flags in ([], ["--tp-size", "2", "--concurrency", "8"]):
        found = plans(capsys, "--model-path", stated, *LOAD, *together, *flags)
        assert found and all("--kv-cache-dtype fp8_e4m3" in plan["command"] for plan in found)
    found = plans(capsys, "--model-path", stated, *LOAD, *together, "--kv-cache-dtype", "bfloat16")
    assert found and all("--kv-cache-dtype bfloat16" in plan["command"] for plan in found)
