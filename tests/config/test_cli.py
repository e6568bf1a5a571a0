"""The command line: fast help, one clear message and exit code 2, no traceback, no torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from moe_engine.cli.main import COMMANDS, main
from tests.models.published import V3

LOADED_TORCH = "import sys, moe_engine.cli.main as c; code = c.main({argv!r}); print('torch' in sys.modules, code)"


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_teaches(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(f"  {name} " in out for name in COMMANDS)
    assert "What is the capital" in out
    assert run(capsys)[0] == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    try:
        code = main([command, "--help"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    text = capsys.readouterr().out
    assert code == 0 and "usage: moe-engine" in text
    assert ("--port PORT" in text) == (command in ("serve", "plan", "router"))  # the others serve nothing


def test_the_serving_benchmark_has_the_name_that_sglang_users_type():
    command = [sys.executable, "-m", "moe_engine.bench_serving", "--dataset-name", "nosuch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and "moe-engine bench serving: error: --dataset-name" in done.stderr


def test_mistakes_exit_with_2_and_one_message(capsys, model_dir):
    for argv, words in [
        (["sevre"], "did you mean serve"),
        (["--port", "3"], "give a command first"),
        (["serve", "--tp", "3"], "attention heads cannot be split evenly over 3 ranks"),
        (["serve", "--pp", "4"], "--pp-size 4: not supported yet"),
        (["serve", "--page-sise", "4"], "--page-size"),
        (["simulate", "--hardwaer", "8xh200"], "did you mean --hardware?"),
        (["doctor", "--ulr", "http://x"], "--ulr: unknown argument (did you mean --url?)"),
        (["plan", "--model-path", "/no/such"], "no such folder"),
        (["plan", "--model-path", str(model_dir())], "no *.safetensors"),
        (["serve", "--json"], "--json belongs to --explain"),
        (["bench", "nonsense"], "nonsense"),
    ]:
        code, out, err = run(capsys, *argv)
        last = err.strip().splitlines()[-1]
        assert code == 2 and words in last and "Traceback" not in err and not out, (argv, err)


def test_plan_and_serve_explain(capsys, model_dir):
    flags = ["--model-path", str(model_dir()), "--load-format", "dummy", "--context-length", "512"]
    code, text, _ = run(capsys, "plan", *flags)
    assert code == 0 and "context_length" in text and "kernels:" in text
    code, out, _ = run(capsys, "serve", "--explain", "--json", *flags)
    assert code == 0 and json.loads(out)["values"]["context_length"]["value"] == 512


def test_help_of_plan_and_serve_on_json(capsys):
    texts = {}
    for command in ("plan", "serve"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        texts[command] = " ".join(capsys.readouterr().out.split())
    assert "--json print JSON" in texts["plan"]
    assert "moe-engine plan --model-path" in texts["plan"]
    assert "--json with --explain: print JSON" in texts["serve"] and "--explain" in texts["serve"]


@pytest.mark.parametrize(
    ("topic", "held", "left_out"),
    [
        ((), ["speculative decoding", "--page-size", "moe-engine serve --config"], ["--page-size TOKENS"]),
        (("memory",), ["memory:", "--page-size"], ["--lora-paths", "--model-path PATH"]),
        (("page_size",), ["--page-size TOKENS"], ["--lora-paths", "--model-path PATH"]),
        (("all",), ["--page-size", "--lora-paths", "--explain"], []),
    ],
    ids=str,
)
def test_help_has_topics(capsys, topic, held, left_out):
    with pytest.raises(SystemExit):
        main(["serve", "--help", *topic])
    text = capsys.readouterr().out
    assert all(words in text for words in held) and not any(words in text for words in left_out)
    assert topic == ("all",) or len(text.splitlines()) < 250
    assert run(capsys, "serve", "--help", "no such words")[0] == 2


def test_verdicts_of_doctor_cannot_be_misread(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    verdicts = [verdict for family in json.loads(out)["kernels"].values() for verdict in family.values()]
    assert code == 0 and any(verdict != "runs" for verdict in verdicts)
    assert all(verdict == "runs" or verdict.startswith("does not run: ") for verdict in verdicts)


def test_plan_for_gpus_that_are_not_here(capsys, model_dir):
    """Every decision is that of such a machine; the printed CUDA graph sizes are the captured ones."""
    flags = ["plan", "--model-path", str(model_dir(V3)), "--load-format", "dummy", "--tp", "8", "--attn-dp-size", "8"]
    flags += ["--moe-a2a-backend", "all_to_all", "--speculative-algorithm", "NEXTN"]
    code, out, _ = run(capsys, *flags, "--hardware", "8xH200", "--json", "--max-dispatch-tokens-per-rank", "100")
    found = json.loads(out)
    values = found["values"]
    assert code == 0 and found["machine"]["total_bytes"] == 150_109_000_000 and found["machine"]["num_devices"] == 8
    sizes = [int(size) for size in values["cuda_graph_bs_decode"]["value"].split()]
    assert sizes[-1] == 25 and "100 tokens a rank, 25 requests of 4" in values["cuda_graph_bs_decode"]["reason"]
    assert any("decode steps of more than 100 tokens" in note for note in found["notes"])
    assert "deep_gemm" in {**found["kernels"][1]["refused"], found["kernels"][1]["backend"]: ""}
    for hardware, words in (
        ("2xh200", "this machine has 2"),
        ("h900", "--hardware h900: unknown GPU h900; use one of a100"),
        ("0xh200", "--hardware '0xh200': give a number of GPUs"),
        ("h200 --device cpu", "--device is cpu"),
    ):
        code, out, err = run(capsys, *flags, "--hardware", *hardware.split())
        assert code == 2 and words in err, (hardware, err)
    code, out, err = run(capsys, "serve", "--hardware", "h200")
    assert code == 2 and "--hardware: unknown flag" in err


def test_plan_takes_explain_like_serve(capsys):
    """With `--explain` `plan` prints what it prints without."""
    command = ("plan", "--hardware", "h200", "--random-seed", "1")
    plans = [run(capsys, *command, *flags)[:2] for flags in ((), ("--explain",))]
    assert plans[0] == plans[1] and plans[0][0] == 0 and "kernels:" in plans[0][1]
    code, _, err = run(capsys, "plan", "--explain", "--hardware", "h200", "--workload", "in=20,out=10")
    assert code == 2 and "--explain shows one launch, --workload compares launches" in err


@pytest.mark.parametrize("flag", ["--prt", "--frobnicate"])
def test_unlike_flags_have_no_nearest_spelling(capsys, flag):
    """The dashes alone make no two flags similar: `--prt` is not `--url`."""
    code, _, err = run(capsys, "doctor", flag)
    assert code == 2 and err == f"moe-engine doctor: error: {flag}: unknown argument; --help lists all\n"


def test_a_plan_for_gpus_imports_no_torch(model_dir):
    argv = ["plan", "--model-path", str(model_dir()), "--load-format", "dummy", "--hardware", "h200"]
    code = LOADED_TORCH.format(argv=argv)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "False 0", done.stderr


def test_demo_and_doctor(capsys):
    code, out, _ = run(capsys, "demo")
    assert code == 0 and out.strip().endswith("checkpoint")
    code, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0 and found["cpu"]["cores"] >= 1 and found["kernels"]["ops"]["torch"] == "runs"
    assert isinstance(found["problems"], list)
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "compiler" in out


def test_commands_without_a_temporary_directory(capsys, monkeypatch):
    """A container with a read-only root: `doctor` goes on."""

    def none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    assert main(["doctor"]) in (0, 1) and "take no file: set TMPDIR to a directory" in capsys.readouterr().out
    assert main(["cluster-check", "--nnodes", "1"]) == 2
    assert "take no file: set TMPDIR to a directory" in capsys.readouterr().err


def test_a_prompt_that_is_not_utf_8_is_refused(capsys):
    code, _, err = run(capsys, "generate", "--prompt", b"Z\xfcrich".decode(errors="surrogateescape"))
    assert code == 2 and "error: --prompt: character 1 is" in err and "Traceback" not in err


def test_generate_needs_a_prompt(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for argv in (["generate"], ["generate", "--prompt", ""]):
        code, _, err = run(capsys, *argv)
        assert code == 2 and "--prompt" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "nan"], "--temperature: expected a number"),
        (["--max-new-tokens", "-1"], "--max-new-tokens: expected an integer"),
        (["--top-p", "2"], "--top-p: expected a number"),
        (["--stop", "x" * 2000], "--stop"),
    ],
)
def test_generate_names_its_flags_before_it_loads_a_model(capsys, monkeypatch, flags, words):
    monkeypatch.setattr("moe_engine.frontend.engine.Engine", lambda **_: pytest.fail("an engine is started"))
    code, _, err = run(capsys, "generate", "a prompt without its flag", *flags)
    assert code == 2 and f"error: {words}" in err and "sampling_params" not in err


def test_a_refused_compile_writes_one_line(tmp_path):
    argv = ["-m", "moe_engine.cli.main", "compile", "--output", str(tmp_path / "kernels"), "--tp", "3"]
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_launch_that_cannot_fit_is_refused_before_torch_is_loaded(model_dir):
    code = LOADED_TORCH.format(argv=["serve", "--model-path", str(model_dir(V3))])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["False", "2"] and "Traceback" not in done.stderr, done.stderr
    assert "weights 1251.83 GB" in done.stderr and "this machine offers" in done.stderr


@pytest.mark.parametrize("argv", [["--help"], ["demo"], ["doctor"], ["serve", "--tp", "3"]])
def test_quick_commands_load_no_torch(argv):
    code = LOADED_TORCH.format(argv=argv)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip().splitlines()[-1].startswith("False"), done.stderr
