"""The command `moe-engine plan --workload`."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from benchmarks.planner_points import FOLDER
from moe_engine.cli.main import main
from moe_engine.tuning.hardware.table import FOLDER as HARDWARE
from moe_engine.tuning.hardware.table import gpu_names
from tests.examples import examples
from tests.models.published import V3
from tests.tuning.plan_models import write

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 4,
    "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 1000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 1,
}  # fmt: skip
ONE = ["--hardware", "8xH200", "--workload", "in=2000,out=200", "--tp-size", "8", "--concurrency", "16"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A bare config.json."""
    return write(tmp_path / "v3", V3) + "/config.json"


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["plan", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def predicted(capsys, *argv: str) -> dict:
    code, out, err = run(capsys, *argv, "--json")
    assert code == 0, err
    return json.loads(out)["plans"][0]


def test_a_form_of_the_flags_is_predicted_alone(capsys, model: str):
    plan = predicted(capsys, "--model-path", model, *ONE, "--context-length", "8192")
    assert plan["form"]["ranks"] == 8 and plan["concurrency"] == 16
    values = plan["predicted"]
    assert values["output_tokens_per_second_per_gpu"] == pytest.approx(values["output_tokens_per_second"] / 8)
    assert values["tpot_ms"] >= values["itl_ms"] > 0 and values["ttft_p99_ms"] >= values["ttft_ms"] > 0
    for phase in ("decode", "prefill"):
        assert sum(values["binds"][phase].values()) == pytest.approx(1)
    assert plan["command"] == f"moe-engine serve --model-path {model} --context-length 8192 --tp-size 8"
    assert plan["memory"]["total_bytes"] <= plan["memory"]["limit_bytes"]


def test_the_text_says_what_binds_and_how_to_start(capsys, model: str):
    code, out, err = run(
        capsys, "--model-path", model, "--hardware", "8xH200", "--workload", "in=2000,out=200", "--top", "1",
        "--context-length", "8192", "--slo", "itl=50ms",
    )  # fmt: skip
    assert code == 0, err
    for words in (
        "bound by",
        "tok/s a GPU",
        "KV cache",
        "moe-engine serve --model-path",
        "sbatch --nodes=1",
        "do not fit",
    ):
        assert words in out
    assert "configurations" in err
    (refused,) = re.findall(r"do not fit \((\d+) forms\)", out)
    assert f"   and {int(refused) - 6} more, which --json lists" in out.splitlines()


def test_an_engine_changes_the_efficiency(capsys, model: str):
    times = {
        engine: predicted(capsys, "--model-path", model, *ONE, "--like", engine)["predicted"]["tpot_ms"]
        for engine in ("moe-engine", "sglang", "vllm", "trtllm")
    }
    assert len(set(times.values())) == 4


def test_another_network_and_gpu_of_a_file(capsys, tmp_path: Path, model: str):
    slow = tmp_path / "slow.toml"
    slow.write_text("bytes_per_s = 5e9\nlatency_us = 50\n")
    gpu = tmp_path / "gpu.toml"
    gpu.write_text((HARDWARE / "gpus" / "h200.toml").read_text().replace("4.8e+12", "9.6e+12"))
    wide = ["--workload", "in=2000,out=200", "--tp-size", "16", "--attn-dp-size", "16", "--ep-size", "16"]
    wide += ["--moe-a2a-backend", "auto", "--concurrency", "256", "--model-path", model]
    known = predicted(capsys, "--hardware", "16xH200", *wide)["predicted"]["tpot_ms"]
    far = predicted(capsys, "--hardware", "16xH200", "--interconnect", str(slow), *wide)["predicted"]["tpot_ms"]
    fast = predicted(capsys, "--hardware", f"16x{gpu}", *wide)["predicted"]["tpot_ms"]
    assert fast < known < far


def test_models_of_other_engines(capsys, tmp_path: Path):
    configs = json.loads((FOLDER / "models.json").read_text())
    other = {**configs["Qwen/Qwen3.5-397B-A17B"], "architectures": ["OtherForCausalLM"], "model_type": "other"}
    folder = write(tmp_path / "other", other)
    code, out, err = run(capsys, "--model-path", folder, *ONE, "--weight-dtype", "fp4", "--like", "vllm", "--json")
    plan = json.loads(out)["plans"][0]
    assert code == 0 and "estimated" in err
    assert "command" not in plan and plan["predicted"]["tpot_ms"] > 0
    code, _, err = run(capsys, "--model-path", folder, *ONE)
    assert code == 2 and "not supported" in err and "Traceback" not in err


def test_requests_beyond_the_memory_wait(capsys, model: str):
    """Little's law holds for all requests, of this engine and of others."""
    load = ["--hardware", "8xH200", "--workload", "in=30000,out=100", "--tp-size", "8", "--model-path", model]
    for engine in ([], ["--like", "vllm"]):
        code, out, err = run(capsys, *load, "--concurrency", "200", *engine, "--json")
        found = re.search(r"note: (\d+) of 200 requests of an attention group run at once", err)
        assert code == 0 and found, err
        values, running = json.loads(out)["plans"][0]["predicted"], int(found[1])
        stay = (values["ttft_ms"] + 99 * values["tpot_ms"]) / 1e3
        assert values["output_tokens_per_second"] / 100 * stay == pytest.approx(200)
        few = predicted(capsys, *load, "--concurrency", str(running), *engine)["predicted"]
        assert values["tpot_ms"] == pytest.approx(few["tpot_ms"])
        assert values["ttft_ms"] > (200 / running - 1) * 99 * few["tpot_ms"]


def test_weights_of_another_dtype_have_its_bytes_in_memory_and_time(capsys, tmp_path: Path):
    """Without experts all projections have 4 bits: a model of 4 times the size fits."""
    large = {"hidden_size": 8192, "num_hidden_layers": 120, "intermediate_size": 28672, "num_attention_heads": 64}
    folder = write(tmp_path / "dense", DENSE | large)
    argv = ["--model-path", folder, "--hardware", "1xH200", "--workload", "in=100,out=100", "--tp-size", "1"]
    argv += ["--concurrency", "8", "--like", "vllm", "--json"]
    code, out, err = run(capsys, *argv)
    assert code == 0 and "weights" in str(json.loads(out)["refused"])
    wide = json.loads(out)["plans"][0]["predicted"]["tpot_ms"]
    code, out, err = run(capsys, *argv, "--weight-dtype", "int4")
    found = json.loads(out)
    assert code == 0 and "are not int4; memory is estimated" in err
    assert not found["refused"] and "command" not in found["plans"][0]
    assert found["plans"][0]["predicted"]["tpot_ms"] < 0.6 * wide


def test_a_picture(capsys, tmp_path: Path, model: str):
    pytest.importorskip("matplotlib")
    for name in ("front.svg", "front.png"):
        code, _, err = run(capsys, "--model-path", model, *ONE, "--plot", str(tmp_path / name))
        assert code == 0, err
    assert b"<svg" in (tmp_path / "front.svg").read_bytes()
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("gpu", ["H200", "GB200-NVL72", "FILE"])
def test_without_a_workload_the_command_is_the_old_one(capsys, tmp_path: Path, model: str, gpu: str):
    """For every GPU that has a file."""
    own = tmp_path / "own.toml"
    own.write_text((HARDWARE / "gpus" / "b200.toml").read_text())
    hardware = f"8x{own if gpu == 'FILE' else gpu}"
    code, out, _ = run(capsys, "--model-path", str(Path(model).parent), "--hardware", hardware, "--tp-size", "8",
                       "--load-format", "dummy")  # fmt: skip
    assert code == 0 and "kernels:" in out and "memory:" in out


@pytest.mark.parametrize("gpu", gpu_names())
def test_every_gpu_has_plans(capsys, tmp_path: Path, gpu: str):
    folder = write(tmp_path / "dense", DENSE)
    code, out, err = run(capsys, "--model-path", folder, "--hardware", f"4x{gpu}", *BASE[2:], "--top", "1", "--json")
    assert code == 0, err
    (plan,) = json.loads(out)["plans"]
    assert plan["predicted"]["output_tokens_per_second_per_gpu"] > 0 and plan["command"].startswith("moe-engine serve")


BASE = ["--hardware", "8xH200", "--workload", "in=2000,out=200"]
WRONG = [
    (["--hardware", "8xH300", "--workload", "in=1,out=1"], r"unknown GPU H300; use one of .*h200"),
    (["--hardware", "0xH200", "--workload", "in=1,out=1"], r"give a number of GPUs"),
    (["--workload", "in=1,out=1"], r"--workload needs --hardware"),
    (["--hardware", "8xH200", "--slo", "itl=1s"], r"--slo belongs to --workload"),
    (["--hardware", "8xH200", "--workload", "in=-5,out=1"], r"in=-5: must be between 1"),
    (["--hardware", "8xH200", "--workload", "in=5,out=0"], r"out=0: must be between 1"),
    (["--hardware", "8xH200", "--workload", "in=5"], r"out= is missing"),
    (["--hardware", "8xH200", "--workload", "in=5,outs=6"], r"unknown name outs \(did you mean out\?\)"),
    (["--hardware", "8xH200", "--workload", "in=5,in=6,out=1"], r"in is given twice"),
    (["--hardware", "8xH200", "--workload", "in=x,out=1"], r"in=x: give a number of tokens"),
    (
        ["--hardware", "8xH200", "--workload", "in=2000000,out=9"],
        r"up to 2000009 tokens, and the context length is \d+;",
    ),
    ([*BASE, "--tp-size", "3"], r"--tp-size 3: no form of parallelism on 8 GPUs has these sizes; change or drop"),
    ([*BASE, "--tp-size", "8", "--dp-size", "3"], r"--tp-size 8, --dp-size 3: no form of parallelism on 8 GPUs"),
    ([*BASE, "--tp-size", "0"], r"error: --tp-size 0: must be at least 1"),
    ([*BASE, "--attn-dp-size", "-1"], r"error: --attn-dp-size -1: must be at least 1"),
    ([*BASE, "--ep-size", "0"], r"error: --ep-size 0: must be at least 1"),
    ([*BASE, "--dp-size", "0"], r"error: --dp-size 0: must be at least 1"),
    ([*BASE, "--cpu-offload-gb", "nan"], r"error: --cpu-offload-gb nan: must be a finite number"),
    ([*BASE, "--cpu-offload-gb", "inf"], r"error: --cpu-offload-gb inf: must be a finite number"),
    ([*BASE, "--page-size", "0"], r"error: --page-size 0: must be at least 1"),
    ([*BASE, "--slo", "itl=5"], r"itl=5: give a time above 0 with its unit"),
    ([*BASE, "--slo", "itl=-5ms"], r"itl=-5ms: give a time above 0"),
    ([*BASE, "--slo", "itl=1us"], r"--slo: no configuration of 8 GPUs meets it"),
    ([*BASE, "--interconnect", "wet string"], r"--interconnect wet string: use one of ib200"),
    ([*BASE, "--interconnect", "none.toml"], r"none.toml: cannot be read as TOML"),
    ([*BASE, "--like", "ollama"], r"--like ollama: must be one of"),
    (
        [*BASE, "--tp-size", "8", "--concurrency", "4", "--max-total-tokens", "1024"],
        r"--workload: a request has \d+ tokens, and the KV cache of this form 1024; use a smaller --chunked-prefill",
    ),
    ([*BASE, "--concurrency", "0"], r"--concurrency 0: give a whole number above 0"),
    (["--autopilot", "--slo", "itl=5"], r"itl=5: give a time above 0 with its unit"),  # a flag of serve there
    (["--hardware", "7xH200", *BASE[2:]], r"nothing fits 7xh200.*try 4xh200 or 8xh200"),
    (["--hardware", "2000000000xH200", *BASE[2:]], r"give a number of GPUs up to \d+"),
    (["--hardware", "7xH100", *BASE[2:]], r"nothing fits 7xh100; the last of \d+ forms, 7 x 1 GPUs: TP1"),
    (["--hardware", "H200x8", *BASE[2:]], r"write the number first, 8xH200"),
    ([*BASE, "--top", "many"], r"--top many: give a whole number"),
    ([*BASE, "--plot", "front.gif"], r"must end in .svg or .png"),
    ([*BASE, "--plot", "no/such/front.svg"], r"no such folder"),
    ([*BASE, "--weight-dtype", "fp6"], r"--weight-dtype fp6: use one of"),
    ([*BASE, "--mtp-acceptance", "2"], r"--mtp-acceptance 2: give a share"),
    ([*BASE, "--tp-size", "16", "--concurrency", "4"], r"needs 16 GPUs, --hardware has 8"),
    ([*BASE, "--tp-size", "4", "--concurrency", "4"], r"weights 158.28 GB"),
    ([*BASE, "--tp-size", "8", "--attn-dp-size", "3", "--concurrency", "4"], r"must divide it"),
]


@pytest.mark.parametrize(
    ("argv", "message"), WRONG, ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else ""
)
def test_wrong_input_is_one_line_with_the_fix(capsys, model: str, argv: list[str], message: str):
    code, out, err = run(capsys, "--model-path", model, *argv)
    assert code == 2 and not out
    assert len(err.strip().splitlines()) == 1
    assert re.search(message, err), err


def test_a_model_without_experts(capsys, tmp_path: Path):
    folder = write(tmp_path / "dense", DENSE)
    code, _, err = run(capsys, "--model-path", folder, *ONE, "--ep-size", "8")
    assert code == 2 and "the model has no experts; drop --ep-size" in err
    few = ["--hardware", "1xH200", "--workload", "in=2000,out=200", "--concurrency", "10000000"]
    code, _, err = run(capsys, "--model-path", folder, *few)
    assert code == 2 and re.search(r"1xh200 has memory for \d+ requests of this length at once; lower it", err), err
    assert predicted(capsys, "--model-path", folder, *ONE)["predicted"]["tpot_ms"] > 0


def test_a_damaged_config_is_one_line(capsys, tmp_path: Path):
    """One field of a random model is missing or has a wrong value: a prediction, or one line that names the fix."""
    configs = [V3, *json.loads((FOLDER / "models.json").read_text()).values()]
    for _ in range(examples(40)):
        config = dict(random.choice(configs))
        name = random.choice(sorted(config))
        if random.random() < 0.3:
            del config[name]
        else:
            config[name] = random.choice([None, -1, 0, 1, "x", [], {}, 3.5, True, 10**30])
        engine = random.choice(["moe-engine", "vllm"])
        code, _, err = run(capsys, "--model-path", write(tmp_path / "damaged", config), *ONE, "--like", engine)
        lines = [line for line in err.splitlines() if not line.startswith("note:")]
        assert (code, len(lines)) in ((0, 0), (2, 1)), (name, config.get(name), err)


def test_a_file_of_a_gpu_names_its_mistakes(capsys, tmp_path: Path, model: str):
    good = (HARDWARE / "gpus" / "h200.toml").read_text()
    for text, message in (
        (good.replace("memory_bytes", "memory_byte"), "memory_bytes is missing"),
        (good + "\n[extra]\na = 1\n", "unknown field extra"),
        (good.replace("4.8e+12", "-1.0"), "peak_bytes_per_s must be above 0"),
        (good.replace("bf16 =", "bf17 ="), "flops needs bf16"),
        (re.sub("capability = .*", 'capability = "9.0"', good), "capability: Expected `array`, got `str`"),
        (re.sub("capability = .*", "capability = [9]", good), "capability: Expected `array` of length 2, got 1"),
        (re.sub("memory_bytes = .*", 'memory_bytes = "141 GB"', good), "memory_bytes: Expected `int`, got `str`"),
        (re.sub("gpus_per_node = .*", "gpus_per_node = 8.5", good), "gpus_per_node: Expected `int`, got `float`"),
        (re.sub("nvlink = .*", 'nvlink = "no"', good), "nvlink: Expected `bool`, got `str`"),
        (re.sub("bf16 = .*", 'bf16 = "fast"', good), "flops[...]: Expected `float`, got `str`"),
        (re.sub("domain_size = .*", "domain_size = -8", good), "domain_size must be above -1, found -8"),
        (good.replace("4.8e+12", "nan"), "peak_bytes_per_s must be above 0, found nan"),
    ):
        file = tmp_path / "gpu.toml"
        file.write_text(text)
        code, _, err = run(capsys, "--model-path", model, "--hardware", f"8x{file}", "--workload", "in=1,out=1")
        assert code == 2 and message in err, err


def test_drafts_of_the_launch_are_predicted(capsys, model: str):
    """The number given, that of the launch without one, and the best one where the launch chooses it for each step."""
    drafts = ["--speculative-algorithm", "NEXTN"]
    tpots = {0: predicted(capsys, "--model-path", model, *ONE)["predicted"]["tpot_ms"]}
    for number in (1, 2, 3):
        chain = ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(number + 1)]
        flags = [*drafts, "--speculative-num-steps", str(number), *chain]
        tpots[number] = predicted(capsys, "--model-path", model, *ONE, *flags)["predicted"]["tpot_ms"]
    assert len(set(tpots.values())) == 4
    chosen = predicted(capsys, "--model-path", model, *ONE, *drafts, "--speculative-num-steps", "auto")
    assert chosen["predicted"]["tpot_ms"] <= min(tpots.values())
    default = predicted(capsys, "--model-path", model, *ONE, *drafts)
    assert default["predicted"]["tpot_ms"] < tpots[0]
