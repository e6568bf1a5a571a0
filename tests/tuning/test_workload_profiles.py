"""--workload-profile: values of each profile, precedence of given flags, absence of contradictions, and the reasons in
--explain."""

from __future__ import annotations

import itertools
import json

import pytest

from moe_engine.cli.main import main
from moe_engine.config.args import EngineArgs
from moe_engine.config.field import fields_of
from moe_engine.config.scheduling import SchedulingArgs
from moe_engine.config.slo import Slo, parse_slo
from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.planning.output.explain import explain_json
from moe_engine.planning.prepare import prepare
from moe_engine.planning.workload_profiles import PROFILES
from moe_engine.tuning.hardware.table import find_gpu

H200 = find_gpu("h200").machine()


def planned(profile=None, machine=None, **flags):
    return prepare(EngineArgs.from_kwargs(model_path=str(CHECKPOINT_DIR), workload_profile=profile, **flags), machine)


def gpu(profile=None, **flags):
    return planned(profile, H200, device="cuda", **flags)


def test_the_flag_has_these_profiles():
    (info,) = (info for info in fields_of(SchedulingArgs) if info.name == "workload_profile")
    assert info.flag.choices == tuple(PROFILES)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("make", [planned, gpu], ids=["cpu", "gpu"])
def test_choices_are_set_with_reasons(profile, make):
    config, plain = make(profile), make()
    device = "cpu" if make is planned else "cuda"
    values = explain_json(config)["values"]
    for choice in PROFILES[profile]:
        for name, value in choice.flags(device).items():
            assert value not in (None, plain.flat()[name])
            shown = values[name]["value"]
            assert shown == value or (name == "speculative_num_steps" and shown == 6) or shown == str(value)
            assert values[name]["origin"] == "auto"
            assert values[name]["reason"].startswith(f"--workload-profile {profile}: {choice.reason}")
    chosen = {name for choice in PROFILES[profile] for name in choice.flags(device)}
    before, after = plain.flat(), config.flat()
    for name in ("dtype", "kv_cache_dtype", "quantization"):
        assert before[name] == after[name], "a profile does not change numerics"
    assert not {name for name in chosen if name in config.args.given}


@pytest.mark.parametrize("profile", PROFILES)
def test_given_flags_win(profile):
    """Also if the given value is the default."""
    plain = gpu().flat()
    flags = {choice.flag: plain[choice.flag] for choice in PROFILES[profile] if choice.flag != "speculative_algorithm"}
    flags = {name: value if value is not None else 2 for name, value in flags.items()}
    values = explain_json(gpu(profile, **flags))["values"]
    assert {name: values[name]["value"] for name in flags} == flags
    assert all("--workload-profile" not in values[name]["reason"] for name in flags)


EXCLUDING = (
    {"disable_radix_cache": True},
    {"enable_priority_scheduling": True},
    {"chunked_prefill_size": -1},
    {"is_embedding": True},
    {"max_total_tokens": 4096},
    {"disable_cuda_graph": True},
    {"tp_size": 2, "enable_dp_attention": True, "dp_size": 2},
    {"speculative_algorithm": "NGRAM"},
    {"enable_deterministic_inference": True},
)  # fmt: skip


@pytest.mark.parametrize(("profile", "flags"), [*itertools.product(PROFILES, EXCLUDING)])
def test_no_profile_contradicts_flags(profile, flags):
    """A launch that is valid without a profile is valid with it."""
    plain, config = planned(None, **flags), planned(profile, **flags)
    assert all(config.flat()[name] == plain.flat()[name] for name in flags if name != "is_embedding")


def test_spaces_in_a_service_level_objective():
    assert parse_slo(" ttft = 2s , itl = 50 ms ") == Slo(2.0, 0.05)


def test_choices_left_out_are_named():
    notes = planned("multi-turn", disable_radix_cache=True).notes
    (note,) = (note for note in notes if "--workload-profile multi-turn: without --schedule-policy" in note)
    assert "--disable-radix-cache" in note
    notes = planned("low-latency", chunked_prefill_size=-1).notes
    assert any("without --enable-mixed-chunk" in note for note in notes)


def test_long_context_has_more_memory_for_kv():
    """For a GPU and a model with long contexts: the reason in --explain is true."""
    flags = {"context_length": 2048, "max_total_tokens": None}
    plain, config = gpu(**flags), gpu("long-context", **flags)
    names = ("activations", "slot tables")
    assert sum(map(config.ledger.bytes_of, names)) < sum(map(plain.ledger.bytes_of, names))


def test_command_line(capsys):
    assert main(["plan", "--workload-profile", "low-latency", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert values["max_running_requests"] == {
        "value": 16, "origin": "auto",
        "reason": "--workload-profile low-latency: a step's time grows with every request; others wait",
    }  # fmt: skip
    assert main(["plan", "--workload-profile", "fast"]) == 2
    error = capsys.readouterr().err
    assert "low-latency, throughput, long-context" in error and error.count("\n") == 1
