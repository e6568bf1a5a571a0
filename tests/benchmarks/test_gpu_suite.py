"""The GPU suite and `bench kernels` without a GPU: comparison, targets, classes, failing parts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernels
from benchmarks.attention_cases import attention_case, attention_cases, queries
from benchmarks.gpu_suite import __main__ as suite
from benchmarks.gpu_suite import (
    cases,
    engine_points,
    floors,
    kernel_times,
    parity,
    parts,
    picture,
    profile,
    targets,
    tokens,
)
from benchmarks.gpu_suite.attempts import Attempts
from benchmarks.gpu_suite.engine_points import V2_LITE, V3_LAYERS, write_model
from benchmarks.gpu_suite.parts import PARTS, Part, run_apart, shares
from benchmarks.gpu_suite.rows import Rows
from benchmarks.gpu_suite.setting import Setting
from benchmarks.gpu_suite.texts import part_text
from benchmarks.kernel_cases import all_cases, experts_case, linear_case, op_case
from moe_engine.kernels.attention.shapes import GroupedModel, LatentModel, named_shapes
from moe_engine.kernels.device import cpu_device
from moe_engine.kernels.experts.shapes import ExpertModel, ExpertShape
from moe_engine.kernels.linear.shapes import LinearShape
from moe_engine.kernels.sampling.protocol import SamplingParameters
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.plain import PLAIN
from tests.fork_server import ForkedProcess
from tests.models.parameters import num_active_parameters


@pytest.fixture(scope="module")
def small_cases():
    model = ExpertModel("small", 8, 2, 64, 48, fp8=False)
    linear = [linear_case(LinearShape("product", 7, 40, 256, fp8)) for fp8 in (False, True)]
    return [*linear, experts_case(ExpertShape(model, 6, 8)), *cases.tiny_cases()]


def test_parity_compares_every_row_with_torch(small_cases):
    rows = Rows(cpu_device(), asked=("torch", "cpu"))
    if not rows.kernels["ops"].get("cpu"):
        pytest.skip(rows.refused["ops.cpu"])
    lines = parity.compare(small_cases, rows, Setting.of("cpu", 60))["lines"]
    compared = {case.name for case in small_cases if "cpu" in rows.kernels[case.family]}
    assert {line["kernel"] for line in lines} == compared
    assert all(line["ok"] for line in lines), [line for line in lines if not line["ok"]]
    assert {line["family"] for line in lines if "error" not in line} <= {"sampling", "mla", "indexer"}  # not served


def test_parity_finds_a_row_that_is_wrong_and_one_that_breaks(small_cases):
    rows = Rows(cpu_device(), asked=("torch",))
    good = rows.kernels["ops"]["torch"]

    class Wrong(type(good)):
        def rms_norm(self, x, weight, eps):
            return super().rms_norm(x, weight, eps) * 1.02

        def silu_and_mul(self, gate_up):
            raise RuntimeError("no such kernel")

    rows.kernels["ops"]["other"] = Wrong()
    some = [case for case in small_cases if case.name.startswith(("tiny", "fused"))]
    lines = parity.compare(some, rows, Setting.of("cpu", 60))["lines"]
    wrong = {line["kernel"].split(".")[1]: line for line in lines if not line["ok"]}
    composed = {"add_rms_norm", "write_latent", "absorb", "combine_norm", "norm_route"}  # of the wrong norm
    assert set(wrong) == {"rms_norm", "silu_and_mul"} | composed
    assert wrong["rms_norm"]["error"] == pytest.approx(0.02, rel=0.2)
    assert wrong["silu_and_mul"]["failed"] == "RuntimeError: no such kernel"


def test_difference_sees_integers_and_what_is_not_finite():
    one = torch.tensor([1, 2, 3, 4])
    assert parity.difference((one,), (one + torch.tensor([0, 0, 1, 0]),)) == 0.25
    assert parity.difference((torch.tensor([float("nan")]),), (torch.zeros(1),)) == float("inf")


@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_attention_cases_read_only_pages_of_their_own(name):
    """All requests have different slots, and a second run of the torch row gives the same results."""
    shape = LatentModel("m", 2).absorbed(3, 2, 70) if name == "mla" else GroupedModel("m", 4, 2, 16).paged(3, 2, 70)
    case, asked = attention_case(shape), queries(shape, "cpu")
    assert asked.slot_table.unique().numel() == asked.slot_table.numel() == 3 * 128
    assert (asked.num_tokens, asked.context_lens) == (6, [70] * 3) and asked.query_starts.tolist() == [0, 2, 4, 6]
    kernel = Rows(cpu_device(), asked=("torch",)).kernels[name]["torch"]
    torch.manual_seed(3)
    call = case.prepare(kernel, "cpu")
    assert torch.equal(call(), call())


def test_targets_take_the_worst_of_our_rows_and_the_vendor_by_name():
    def line(kernel: str, row: str, us: float, rate: float = 0.0) -> dict:
        return {"kernel": kernel, "row": row, "us": us, "bytes_per_s": rate, "flops_per_s": rate}

    found = [
        line("deepseek-v3.rms_norm.7168.t4096", "triton", 1, 3.6e12),
        line("deepseek-v3.add_rms_norm.7168.t4096", "triton", 1, 3.2e12),
        line("deepseek-v3.add_rms_norm.7168.t4096", "torch", 1, 1e12),
        line("deepseek-v3.o.m4096", "triton", 10), line("deepseek-v3.o.m4096", "deep_gemm", 9.5),
        {"kernel": "deepseek-v3.absorbed.h128.r128.q1.s2048", "row": "triton", "failed": "out of memory"},
    ]  # fmt: skip
    checked = {target["name"]: target for target in targets.check_all(found, 4e12)}
    norms = checked["norms: share of copy bandwidth"]
    assert norms["reached"] == pytest.approx(0.8) and not norms["met"]
    product = checked["FP8 product 4096 x 7168 x 16384: against DeepGEMM"]
    assert product["reached"] == pytest.approx(0.95) and product["met"]
    attention = checked["MLA decode, 128 heads: TFLOPS"]
    assert attention["reached"] is None and not attention["met"]


def test_every_target_has_cases():
    names = [case.name for case in [*cases.timed_cases(), *all_cases()]]
    for target in targets.TARGETS:
        assert any(targets.re.search(target.pattern, name) for name in names), target.name


def test_attention_is_timed_at_the_shapes_of_its_family():
    assert [case.name for case in attention_cases()] == [shape.name for shape in named_shapes()]
    assert {case.name for case in kernels.cases_of(None, None, "")} >= {case.name for case in attention_cases()}


def test_classes_of_kernels():
    sums = profile.by_class(
        [("rms_norm_kernel", 2.0, 3), ("_grouped_gemm", 9.0, 1), ("nvjet_tst_128x64", 4.0, 1), ("whatever", 1.0, 1)]
    )
    assert list(sums) == ["experts", "products", "norms and rotary", "other"]
    assert sums["norms and rotary"] == {"us": 2.0, "launches": 3}


def test_floors_of_a_model(tmp_path, capsys):
    assert kernels.main(["--model-path", str(write_model(tmp_path / "m", V2_LITE)), "--tokens", "128"]) == 0
    shown = capsys.readouterr().out
    if not torch.cuda.is_available():
        assert "deepseekv2.e64.t128" in shown and "deepseekv2.dense_gate_up.m128" in shown
    lines = {n["kernel"]: n for n in kernels.floors(kernels.cases_of(str(tmp_path / "m"), [128], ""), kernels.H200)}
    decode = lines["deepseekv2.absorbed.h16.r128.q1.s4096"]
    assert decode["family"] == "mla" and decode["bytes"] > 128 * 4096 * 576 * 2
    experts = lines["deepseekv2.e64.t128"]
    assert experts["bytes"] == pytest.approx(64 * 3 * 2048 * 1408 * 2, rel=0.01)  # all experts are hit, bf16
    assert experts["floor_us"] == pytest.approx(experts["bytes"] / 4.8e12 * 1e6)
    assert all(line["floor_us"] > 0 and line["bytes"] > 0 for line in lines.values())


def test_models_of_the_suite_are_what_they_say(tmp_path):
    lite, layers = (load_model_config(write_model(tmp_path / n, c)) for n, c in (("a", V2_LITE), ("b", V3_LAYERS)))
    assert lite.num_layers == 27 and lite.moe.num_experts == 64 and lite.weight_format == PLAIN
    assert layers.weight_format == BlockFP8Format() and layers.moe.group_score == "top2" and sum(layers.moe_layers) == 4


def test_a_decode_step_reads_no_less_than_its_floor(tmp_path):
    lite, layers = (load_model_config(write_model(tmp_path / n, c)) for n, c in (("a", V2_LITE), ("b", V3_LAYERS)))
    one, many = (floors.decode_bytes(layers, batch, 2048) for batch in (1, 100000))
    expert = 3 * 7168 * 2048 * (1 + 4 / 128**2)
    assert many - one == pytest.approx(
        4 * (256 - 8) * expert + 99999 * (2048 * 5 * 576 * 2 + 2 * 7168), rel=1e-3
    )  # all experts instead of 8, the KV of the others, and their rows of the embedding
    assert floors.decode_bytes(lite, 1, 0) == pytest.approx(2 * num_active_parameters(lite), rel=0.02)


def test_the_next_three_things():
    longest = [{"kernel": name, "us": us, "class": "other"} for name, us in (("a", 50.0), ("b", 30.0), ("c", 5.0))]
    named = profile.next_three(longest, 200.0, 160.0)
    assert [entry["us"] for entry in named] == [50.0, 40.0, 30.0] and "host" in named[1]["kernel"]
    assert named[0]["share"] == 0.25


def test_tokens_that_differ_are_counted_and_named(monkeypatch):
    answers = {"cpu": [[1, 2, 3]] * 8, "gpu": [[1, 2, 3]] * 7 + [[1, 5, 3]]}
    worse = [0.1] * 8
    monkeypatch.setattr(tokens, "greedy", lambda device, count, dtype, flags: {"together": answers[device]})
    monkeypatch.setattr(tokens, "regrets", lambda answers: worse)
    setting = Setting.of("cpu", 9)
    assert tokens.measure(setting)["wrong"] == 0
    setting = replace(setting, kind="gpu")
    found = tokens.measure(setting)
    assert found["wrong"] == 1 and f"{tokens.PROMPTS[7]!r} only the first 1" in tokens.as_text(found)
    worse[3] = tokens.MOST_REGRET + 0.25
    found = tokens.measure(setting)
    assert found["wrong"] == 2 and "in bfloat16 the worst token is 0.75 nats below" in tokens.as_text(found)


def test_sampling_case_draws_with_the_parameters_it_says():
    case = next(case for case in map(op_case, cases.TINY_OPS.at(4)) if case.family == "sampling")
    given: list[SamplingParameters] = []

    class Recorder:
        def sample(self, logits, parameters, uniform):
            given.append(parameters)

    case.prepare(Recorder(), "cpu")()
    assert given[0].top_p.tolist() == pytest.approx([0.95] * 4) and not given[0].asynchronous


def test_without_a_gpu_it_says_so_and_parts_fail_alone(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert suite.main(["--output", str(tmp_path / "r.json")]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    values = run_apart(Part("parity", 9, 60, lambda folder, setting: {}), 60)
    assert values["failed"].startswith("exit code 2")


def test_a_part_looks_for_a_device_after_its_environment_is_set_and_never_if_it_forks(monkeypatch):
    """CUDA reads its variables when it is initialized; a forked process cannot initialize it again."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    looked = []

    def has_device(setting):
        looked.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return False

    monkeypatch.setattr(Setting, "has_device", has_device)
    setting = Setting.of("cuda", 60)
    assert parts.run_part("exchange", setting) == parts.NO_DEVICE and looked == ["32"]
    ran = []
    monkeypatch.setattr(parts, "PARTS", [replace(PARTS[0], run=lambda folder, setting: ran.append(1) or {})])
    assert PARTS[0].name == "aot" and parts.run_part("aot", setting) == 0 and ran and len(looked) == 1


def test_a_dry_run_goes_through_parts_and_writes_all(tmp_path, capsys, monkeypatch, fork_server):
    """Two parts in this test; the command runs all nine. The other parts run if one cannot start."""

    def start_process(arguments, errors):
        command = ["benchmarks.gpu_suite.__main__", *arguments]
        return ForkedProcess(fork_server.address, command, (errors.fileno(), errors.fileno()))

    monkeypatch.setattr(parts, "start_process", start_process)
    output = tmp_path / "r.json"
    asked = ["--dry-run", "--parts", "parity", "kernels", "--output", str(output), "--only", "absorbed", "lora"]
    assert suite.main(asked) == 0
    result = json.loads(output.read_text())
    assert result["parity"]["wrong"] == 0 and result["parity"]["lines"] and not result["parity"]["left_out"]
    timed = {line["kernel"] for line in result["kernels"]["lines"] if "us" in line}
    assert {case.name for case in cases.tiny_cases() if "absorbed" in case.name or "lora" in case.name} == timed
    interpreted = {line["kernel"] for line in result["parity"]["lines"] if line["row"] == "triton" and "error" in line}
    assert interpreted == timed
    assert "tiny.absorbed" in capsys.readouterr().out
    assert suite.main([*asked, "--seconds", "3"]) == 0  # finished parts need no time
    assert capsys.readouterr().out.count(f"kept from {output}") == 2 and saved(output) == saved(output, result)
    assert suite.main([*asked, "--rerun", "--seconds", "3"]) == 1
    assert json.loads(output.read_text())["parity"]["failed"] == "no time left"


def saved(output: Path, result: dict[str, Any] | None = None) -> dict[str, Any]:
    """The parts in a file, or in its content."""
    found = result or json.loads(output.read_text())
    return {name: values for name, values in found.items() if name not in ("about", suite.MEASURED)}


def test_short_runs_make_one_result_of_a_code(tmp_path, monkeypatch, capsys):
    """Limits are shared by the parts that run; those in the file stay, as long as the code is the same."""
    output = tmp_path / "r.json"
    monkeypatch.setattr(suite, "code_identity", lambda *folder: {"moe-engine's code": now})
    monkeypatch.setattr(
        suite, "run_apart", lambda part, limit, dry, only, on_values, before: {"skipped": part.name, "limit": limit}
    )
    now = "abc"
    assert suite.run_all(["aot", "tokens"], 200, output, "cpu") == 0
    assert suite.run_all(["tokens", "decode"], 90, output, "cpu") == 0
    result = saved(output)
    assert {"aot", "tokens", "decode"} == set(result) and "tokens: kept from" in capsys.readouterr().out
    assert result["aot"]["limit"] == 150 and result["tokens"]["limit"] == 75 and 80 < result["decode"]["limit"] <= 90
    assert suite.run_all(["tokens"], 60, output, "cpu", rerun=True) == 0 and 50 < saved(output)["tokens"]["limit"] <= 60
    assert suite.run_all(["tokens"], 9e9, output, "cpu", rerun=True, factor=20.0) == 0
    assert saved(output)["tokens"]["limit"] == 20 * 75
    now = "def"
    assert suite.run_all(["decode"], 100, output, "cpu") == 0 and set(saved(output)) == {"decode"}


def test_a_run_that_was_killed_is_continued(tmp_path, monkeypatch):
    """Finished parts stay; a part that was cut, or had no time for cases, gets its lines back; a failed one, other
    cases (`--only`) and the one that fills a cache run again."""
    output, given = tmp_path / "r.json", {}
    line = {"kernel": "k", "row": "triton", "us": 1.0}

    def first(part, limit, dry, only, on_values, before):
        match part.name:
            case "aot" | "tokens":
                return {"skipped": "done"}
            case "exchange":
                return {"skipped": "some", "lines": [line], "left_out": ["x"], "seconds": 3.0}
            case "parity":
                return {"failed": "exit code 1"}
        on_values({"lines": [line], "at": line, "failed": "not finished"})
        raise KeyboardInterrupt  # stands for the end of the program

    def second(part, limit, dry, only, on_values, before):
        given[part.name] = before
        return {"skipped": "done"}

    names = ["aot", "parity", "tokens", "exchange", "kernels", "decode"]
    monkeypatch.setattr(suite, "run_apart", first)
    with pytest.raises(KeyboardInterrupt):
        suite.run_all(names, 590, output, "cpu")
    monkeypatch.setattr(suite, "run_apart", second)
    assert suite.run_all(names, 590, output, "cpu") == 0
    assert list(given) == ["aot", "parity", "exchange", "kernels", "decode"]
    assert given["exchange"]["lines"] == given["kernels"]["lines"] == [line] and given["decode"] == {}
    given.clear()
    assert suite.run_all(["tokens"], 590, output, "cpu", ["text"]) == 0 and given == {"tokens": {}}
    assert suite.run_all(["tokens"], 590, output, "cpu", ["text"]) == 0 and saved(output)["tokens"]["only"] == ["text"]


def test_a_part_that_was_cut_goes_on_behind_its_last_line(monkeypatch):
    """The line at which everything was killed is tried again."""
    known = {"kernel": "k", "row": "triton", "us": 1.0}
    before = {"lines": [known], "at": {"kernel": "k", "family": "mla", "row": "torch"}, "failed": "not finished"}

    def once(part, seconds, setting, log, on_values):
        log.write_text("")
        attempts = Attempts(setting, lambda lines: {"lines": lines})
        assert attempts.lines == [known]
        case = replace(cases.tiny_cases()[0], name="k")
        assert set(attempts.rows(case, {"torch": None, "triton": None})) == {"torch"}
        return 0

    monkeypatch.setattr(parts, "_run_once", once)
    values = run_apart(PARTS[1], 60, "cpu", before=before)
    assert values["lines"] == [known] and "failed" not in values


def test_parts_share_the_time_and_all_get_their_least():
    assert sum(part.least_s for part in PARTS) <= 590
    assert all(part.least_s < part.limit_s for part in PARTS)
    left = 590.0
    for place in range(len(PARTS)):
        limit = shares(PARTS[place:], left)
        assert PARTS[place].least_s <= limit <= PARTS[place].limit_s
        left -= limit  # the worst case: every part takes its whole limit
    assert left >= 0
    assert shares(PARTS[-1:], 20.0) == 20.0


def test_a_time_factor_multiplies_all_limits(capsys, monkeypatch):
    given = []
    monkeypatch.setattr(suite, "run_all", lambda *arguments: given.append(arguments) or 0)
    assert suite.main(["--dry-run", "--time-factor", "20"]) == suite.main(["--dry-run"]) == 0
    assert [(seconds, factor) for _, seconds, *_, factor in given] == [(11800.0, 20.0), (590.0, 1.0)]
    slow = PARTS[0].with_limits(20.0)
    assert (slow.least_s, slow.limit_s, slow.line_s) == (1800, 3000, 800) and slow.name == PARTS[0].name
    for wrong in ("0", "-1", "nan", "inf"):
        with pytest.raises(SystemExit):
            suite.main(["--dry-run", "--time-factor", wrong])
        assert "--time-factor" in capsys.readouterr().err


def test_time_that_is_over_is_noticed_before_the_next_case():
    values = parity.compare(cases.tiny_cases(), Rows(cpu_device(), asked=("torch", "cpu")), Setting.of("cpu", 0.0))
    assert values["lines"] == []
    values = kernel_times.measure(cases.tiny_cases(), ("torch",), Setting.of("cpu", 0.0))
    assert values["lines"] == [] and len(values["left_out"]) == len(cases.tiny_cases())
    assert "no time left" in kernel_times.as_text(values)


@pytest.mark.usefixtures("forked_processes")
def test_offline_keeps_what_it_has_when_time_is_over(tmp_path, monkeypatch):
    # The pool holds two requests at a time: seconds of work, so that an abort whose thread starts late is in time.
    flags = (("chunked_prefill_size", 16), ("max_total_tokens", 1024))
    load = replace(engine_points.SMALL, offline_requests=64, offline_tokens=220, flags=flags)
    monkeypatch.setattr(engine_points, "load_of", lambda setting: load)
    monkeypatch.setattr(engine_points, "POLL_S", 0.001)
    setting = Setting("cpu", True, 0.0, tmp_path / "part.json")
    found = engine_points.measure_offline(tmp_path, setting)
    assert found == setting.saved() and found["tokens"] < found["of_tokens"] == 14080
    text = part_text("offline", found)
    assert f"after {found['tokens']} of 14080 tokens" in text and "offline" in text


def test_picture_of_a_result(tmp_path):
    pytest.importorskip("matplotlib")
    result = {
        "kernels": {
            "lines": [{"kernel": "a", "row": "triton", "us": 1.0, "of_floor": 0.9}, {"kernel": "b", "row": "x"}]
        },
        "profile": {"failed": "no"},
    }
    file = picture.draw(json.loads(json.dumps(result)), tmp_path / "p.png")
    assert file is not None and file.read_bytes()[:4] == b"\x89PNG"
    assert picture.draw({"kernels": {"failed": "no"}}, tmp_path / "q.png") is None
