"""Every command with invalid input: exit code 2 and one line with the error, never a traceback."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine import logs
from moe_engine.cli.main import COMMANDS, main
from moe_engine.cli.output_file import check_writable, writing
from moe_engine.config.args import PARTS, EngineArgs
from moe_engine.config.field import fields_of
from moe_engine.errors import ConfigError
from moe_engine.frontend.start import open_tokenizer
from moe_engine.planning.inputs.checkpoint import embedded_model
from moe_engine.planning.prepare import prepare
from moe_engine.server.app import make_template
from moe_engine.server.launch import server_settings
from moe_engine.tuning.costs.measured import VERSION
from tests.examples import examples

REMARKS = ("no --model-path", "note: ", "[20")
"""Prefixes of lines that are not errors; the last is the log."""


def run(capsys: pytest.CaptureFixture[str], argv: list[str]) -> tuple[int, list[str]]:
    """(exit code, lines on stderr without remarks). An exception fails the test."""
    try:
        code = main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    lines = capsys.readouterr().err.strip().splitlines()
    return code, [line for line in lines if not line.startswith(REMARKS)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Values that a flag does not accept."""
    import torch

    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty").write_bytes(b"")
    (folder / "junk.pt").write_bytes(bytes(range(256)))
    (folder / "text").write_text("hello")
    (folder / "folder").mkdir()
    (folder / "binary.jinja").write_bytes(b"\xff\xfe\x00\x80")
    torch.save({"a": 1}, folder / "other.pt")
    torch.save([1, 2], folder / "list.pt")
    torch.save({"logical_count": "x"}, folder / "string.pt")
    torch.save({"logical_count": torch.zeros(4)}, folder / "flat.pt")
    torch.save({"logical_count": torch.zeros(0, 3, 4)}, folder / "nothing.pt")
    torch.save({"logical_count": torch.full((5, 3, 8), float("nan"))}, folder / "nan.pt")
    torch.save({"logical_count": torch.ones(5, 3, 8, dtype=torch.int64)}, folder / "good.pt")
    yaml = {
        "binary": b"\xff\xfe\x00\x80", "tabs": b"a:\t- b\n\t: c", "object": b"page-size: {a: 1}\n", "text": b"hello",
        "infinite": b"port: .inf\n", "nan": b"page-size: .nan\n", "date": b"port: 2020-01-01\n", "list": b"tp: [1, 2]",
        "number": b"1: 2\n", "switch": b"skip-server-warmup: 3\n", "nested": b"config: other.yaml\n",
        "unhashable": b"? [a]\n: 1\n",
    }  # fmt: skip
    for name, content in yaml.items():
        (folder / f"{name}.yaml").write_bytes(content)
    (folder / "binary.toml").write_bytes(b"name = '\xe9'")
    (folder / "deep.json").write_bytes(b"[" * 3000)
    curve = {"counts": [1, 2], "seconds": [0.1, 0.2]}
    costs = {"version": VERSION, "decode": {"0": curve}, "prefill": curve}
    for name, change in {
        "old": {"version": VERSION - 1}, "curves": {"decode": {"0": {**curve, "seconds": [0.1]}}},
        "null": {"token_seconds": None}, "nan": {"context_base": float("nan")}, "conditions": {"conditions": [1]},
        "no-curve": {"prefill": None},
    }.items():  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(costs | change))
    for name, content in {"broken": b"{", "list": b"[]", "empty": b"{}", "deep": b"[" * 3000, "junk": b"\xff"}.items():
        (folder / f"model-{name}").mkdir()
        (folder / f"model-{name}" / "config.json").write_bytes(content)
    (folder / "model-folder" / "config.json").mkdir(parents=True)
    return folder


CASES = [
    *(f"experts {{files}}/{name}" for name in (
        "empty", "junk.pt", "text", "folder", "other.pt", "list.pt", "string.pt", "flat.pt", "nothing.pt", "nan.pt",
        "missing.pt",
    )),
    *(f"experts {{files}}/good.pt {more}" for more in (
        "--ep-size 0", "--ep-size -1", "--ep-size x", "--nodes 0", "--nodes -1", "--nodes 3 --ep-size 4", "--groups 0",
        "--groups 3 --ep-size 4", "--redundant -9", "--redundant 999999 --ep-size 2", "--out {files}/text/x",
        "{files}/empty", "--unheard-of",
    )),
    "experts",
    *(f"{command} --config {{files}}/{name}" for command in ("plan", "serve", "generate --prompt x") for name in (
        "binary.yaml", "tabs.yaml", "object.yaml", "text.yaml", "infinite.yaml", "nan.yaml", "date.yaml", "list.yaml",
        "number.yaml", "switch.yaml", "nested.yaml", "unhashable.yaml", "missing.yaml", "folder", "",
    )),
    *(f"{command} --model-path {{files}}/model-{name}"
      for command in ("plan", "serve", "generate --prompt x", "compile --output {files}/out")
      for name in ("broken", "list", "empty", "deep", "junk", "folder", "missing")),
    *(f"plan {flag} {path}"
      for flag in ("--model-path", "--chat-template", "--init-expert-location",
                   "--speculative-algorithm STANDALONE --speculative-draft-model-path")
      for path in ("{files}/text", "{files}/folder", "{files}/missing", "{long}", "~unheard-of-user/x", "{null}")
      if (flag, path) not in {("--chat-template", "{files}/text")}),
    "serve --chat-template {files}/binary.jinja --port 0",
    "serve --port 99999", "serve --port x", "serve --host 999.1.1.1", "serve --host {long}", "serve --json",
    "serve --host {null}", "serve stray", "serve --tp 3", "serve --nnodes 2", "serve --ep 2",
    "serve --enable-dp-attention --dp-size 8", "serve --unheard-of", "serve --shm-size 32g", "serve --tp",
    "generate", "generate --prompt x --temperature x", "generate --prompt x --max-new-tokens x",
    "generate --prompt x --tp 3", "generate --prompt x --skip-tokenizer-init --unheard-of", "generate --unheard-of",
    "doctor x", "doctor --unheard-of", "demo x", "demo --unheard-of",
    "cluster-check x", "cluster-check --nnodes 0", "cluster-check --nnodes 2", "cluster-check --nnodes x",
    "cluster-check --nnodes 2 --dist-init-addr x", "cluster-check --nnodes 2 --dist-init-addr localhost:99999",
    "cluster-check --node-rank 5", "cluster-check --join-timeout -1", "cluster-check --engine-timeout nan",
    "compile", "compile --gpu unheard-of --output {files}/out", "compile --output {files}/out --tp 3",
    *(f"{command} --hardware {text}" for command in ("plan", "plan --workload in=9,out=9", "simulate --num-prompts 1")
      for text in ("8h200", "h200:8", "0xh200", "x", "{files}/text", "{files}/folder", "{files}/binary.toml")),
    *(f"{command} --cost-file {{files}}/{name}" for command in ("plan --workload in=9,out=9", "simulate")
      for name in (
          "deep.json", "old.json", "curves.json", "null.json", "nan.json", "conditions.json", "no-curve.json",
      )),
    "plan --workload in=9,out=9 --hardware 8xh200 --interconnect=", "simulate --hardware h200 --interconnect=",
    *(f"simulate --hardware h200 --dataset-name agentic --agent-{name} 99999999999"
      for name in ("turns", "groups", "subagents", "subagent-turns")),
    "calibrate", "calibrate --output {files}/out --tp 3", "calibrate x",
    "simulate", "simulate --cost-file {files}/missing", "simulate --cost-file {files}/text",
    "simulate --cost-file {files}/text --num-prompts x", "simulate --cost-file {files}/folder", "simulate x",
    "quantize", "quantize --model-path {files}/missing --output {files}/out --format int4",
    "quantize --model-path {files}/model-broken --output {files}/out --format int8",
    "quantize --model-path {files}/model-empty --output {files}/out --format x", "quantize x",
    "router --workers 0", "router --router-program x -- --port 1", "router -- --unheard-of",
    "bench one_batch --batch-size 4 0", "bench one_batch --input-len -1", "bench serving --base-url localhost:1",
    "generate hi --prompt x", "generate two words", "plan --model-path ''",
    "serve --tp 2 --nnodes 2 --node-rank 1 --dist-init-addr x",
    "bench unheard-of", "unheard-of", "--unheard-of", "plan --json-model-override-args {deep}",
]  # fmt: skip


def test_every_command_is_tried():
    assert {case.split()[0] for case in CASES} >= set(COMMANDS)


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_code_2(case, files, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    words = {"files": str(files), "long": "a" * 5000, "null": "a\0b", "deep": '{"a":' * 3000}
    argv = ["" if word == "''" else word.format(**words) for word in case.split()]
    if case.endswith("--config "):
        argv.append("")
    code, lines = run(capsys, argv)
    assert code == 2 and len(lines) == 1 and "error: " in lines[0], (code, lines)


def test_a_prompt_that_is_no_text(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    code, lines = run(capsys, ["generate"])
    assert code == 2 and len(lines) == 1 and "not UTF-8" in lines[0]


@pytest.mark.parametrize("output", ["text", "text/x"])
def test_compile_into_a_file(output, files, capsys):
    pytest.importorskip("triton")
    code, lines = run(capsys, ["compile", "--output", str(files / output), "--load-format", "dummy"])
    assert code == 2 and "Traceback" not in "".join(lines) and f"--output {files / output}" in lines[-1]


# -- values of flags

WORDS = [
    "0", "-1", "1", "2", "x", "", " ", "1e400", "nan", "inf", "-inf", "99999999999999999999", "1.5", "-0", "1k", "k",
    "1e3", "0x10", "٣", "null", "true", "[]", "{}", "{", '{"a": 1}', "auto", "none", "/", "a:b", "%s", "{}{}",
    "1 2", "1,2", "--", "127.0.0.1:70000",
]  # fmt: skip
FLAGS = [info for part in PARTS.values() for info in fields_of(part) if info.name not in ("device",)]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([info.name for info in FLAGS]), st.sampled_from(WORDS), min_size=1, max_size=3))
def test_any_value_of_any_flag(capsys, values):
    argv = ["plan"]
    for name, word in values.items():
        info = next(info for info in FLAGS if info.name == name)
        argv.append(info.option if info.type is bool else f"{info.option}={word}")
    code, lines = run(capsys, argv)
    assert code in (0, 2) and len(lines) == (1 if code else 0), (argv, code, lines)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(sorted(EngineArgs().flat())),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
        | st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
        min_size=1, max_size=2,
    )
)  # fmt: skip
def test_any_python_value_of_any_keyword(capsys, values):
    try:
        EngineArgs.from_kwargs(**values)
    except ConfigError as error:
        assert "\n" not in str(error).replace("\\n", "") or any("\n" in str(value) for value in values.values())


# -- files of a checkpoint

JUNK: dict[str, Callable[[], bytes]] = {
    "random": lambda: random.randbytes(60),
    "list": lambda: b"[]",
    "number": lambda: b"3",
    "null": lambda: b"null",
    "text": lambda: b'"x"',
    "empty": lambda: b"",
    "deep": lambda: b"[" * 3000,
    "types": lambda: b'{"weight_map": 3, "model": 4, "chat_template": 5, "temperature": "x", "bos_token": []}',
    "template": lambda: b'{"chat_template": [{"name": "default"}]}',
    "numbers": lambda: b'{"chat_template": [3], "eos_token": {"content": 5}}',
}


@pytest.mark.parametrize("kind", JUNK)
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors",
     "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"],
)  # fmt: skip
def test_broken_files_of_a_checkpoint(tmp_path, name, kind):
    """The startup of `serve` with a checkpoint, before its engine is ready."""
    folder = tmp_path / "model"
    shutil.copytree(embedded_model(), folder)
    (folder / name).write_bytes(JUNK[kind]())
    values: dict[str, Any] = {"model_path": str(folder)}
    try:
        config = prepare(EngineArgs.from_kwargs(**values))
        make_template(server_settings(config, 0), open_tokenizer(config))
    except ConfigError as error:
        assert "\n" not in str(error)


NEEDED = ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer_config.json"]


@pytest.mark.parametrize("name", [*NEEDED, "model-00001-of-00003.safetensors"])
def test_a_file_without_permission_is_named(tmp_path, name, monkeypatch):
    """Root may read every file: the system's answer is replaced for the one file."""
    folder = tmp_path / "model"
    shutil.copytree(embedded_model(), folder)
    really = io.open

    def opened(file, *arguments, **options):
        if str(file) == str(folder / name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return really(file, *arguments, **options)

    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr("builtins.open", opened)
    values: dict[str, Any] = {"model_path": str(folder)}
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read \(Permission denied") as refused:
        config = prepare(EngineArgs.from_kwargs(**values))
        make_template(server_settings(config, 0), open_tokenizer(config))
    assert "download" not in str(refused.value)


@pytest.mark.parametrize(
    "command",
    ["calibrate --output", "simulate --hardware 8xH200 --output-file", "simulate --hardware 8xH200 --plot",
     "bench one_batch --result-filename", "bench offline_throughput --dataset-name random --result-filename",
     "bench serving --dataset-name random --output-file"],
)  # fmt: skip
@pytest.mark.parametrize("place", ["missing/x.png", "text/x.png", "folder"])
def test_outputs_are_checked_before_the_run(command, place, files, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["moe-engine"])
    code, lines = run(capsys, [*command.split(), str(files / place)])
    flag = command.split()[-1]
    assert code == 2 and len(lines) == 1 and f"error: {flag} {files / place}: cannot be written (" in lines[0], lines
    assert "name a file in a folder that exists" in lines[0]


def test_a_full_disk_is_named(tmp_path):
    """/dev/full takes no byte."""
    refused = pytest.raises(ConfigError, match=r"^--output /dev/full: cannot be written \(.*\); free space there")
    with refused, writing("--output", "/dev/full"):
        Path("/dev/full").write_text("x")
    check_writable("--output", tmp_path / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan --hardware 8h200", "--hardware 8h200: write an x behind the number, 8xh200"),
        ("plan --hardware H200:8", "--hardware H200:8: write the number first, 8xH200"),
        ("simulate --cost-file {files}/old.json", f"has version {VERSION - 1}, and this release reads {VERSION}"),
        ("simulate --num-prompts 1k", "--num-prompts '1k': expected a whole number"),
        ("simulate --burstiness x", "--burstiness 'x': expected a number"),
        ("simulate --num-prompts", "--num-prompts: has no value; give one, behind = if it begins with -"),
    ],
)
def test_the_line_has_the_fix(command, words, files, capsys):
    code, (line,) = run(capsys, command.format(files=files).split())
    assert code == 2 and words in line


@pytest.mark.parametrize("name", ["config.json", ""])
def test_a_plan_for_other_hardware_takes_a_bare_config(name, tmp_path, capsys):
    """In each form of the command; on this machine the weights are needed."""
    (tmp_path / "config.json").write_bytes((embedded_model() / "config.json").read_bytes())
    model = ["--model-path", str(tmp_path / name)]
    for command in (
        ["plan", "--hardware", "8xh200"],
        ["plan", "--hardware", "h200", "--workload", "in=9,out=9"],
        ["simulate", "--hardware", "h200", "--num-prompts", "1", "--disable-tqdm"],
    ):
        assert main([*command, *model]) == 0
    assert "no weight files in" in capsys.readouterr().out
    code, (line,) = run(capsys, ["plan", *model])
    assert code == 2 and "no *.safetensors files" in line


@pytest.mark.parametrize("command", ["plan --hardware h200", "simulate --hardware h200 --num-prompts 1"])
def test_the_embedded_model_is_named(command, capsys):
    assert main(command.split()) == 0
    assert "no --model-path: using the small model embedded in this package" in capsys.readouterr().err


def test_an_unknown_command_is_named_once(capsys):
    text = "moe-engine: error: sevre: unknown command (did you mean serve?); `moe-engine --help` lists them"
    assert run(capsys, ["sevre"]) == (2, [text])


@pytest.mark.parametrize("command", [["plan", "--json"], ["demo"]], ids=["long", "short"])
def test_an_output_that_cannot_be_written_is_one_line(command, capsys, monkeypatch):
    """The short one is written by the last flush."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        code, lines = run(capsys, command)
    assert code == 1 and lines == [f"moe-engine {command[0]}: the output cannot be written: No space left on device"]


@pytest.fixture(autouse=True)
def _quiet():
    yield
    logs.setup_logging("warning")
