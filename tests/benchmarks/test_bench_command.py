"""`moe-engine bench`: each benchmark has one line in the list, names its command and needs no further package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from moe_engine.cli import bench
from moe_engine.cli.main import main
from moe_engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
FOUND = bench.benchmarks()


def main_file(name: str) -> Path:
    return FOLDER / f"{name}.py" if (FOLDER / f"{name}.py").exists() else FOLDER / name / "__main__.py"


def test_the_list_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    lines = dict(re.findall(r"^  (\w+) +(\S.*)$", out, re.M))
    assert lines == {name: what for name, what in FOUND.items() if name not in bench.TOOLS}
    assert {"gpu_suite", "serving", "one_batch"} <= lines.keys() and all(lines.values())


def test_the_readme_lists_the_same() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(rows) == sorted(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_usage_names_the_command(name: str) -> None:
    source = main_file(name).read_text()
    assert re.findall(r'command_parser\(\s*"(\w+)"', source) == [name] and "argparse.ArgumentParser(" not in source


def test_a_package_is_run_like_a_module(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "gpu_suite", "--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: moe-engine bench gpu_suite")


@pytest.mark.parametrize(
    ("name", "dataset"),
    [
        ("serving", "random"),
        ("serving", "image"),
        ("serving", "generated-shared-prefix"),
        ("offline_throughput", "random"),
    ],
)
def test_a_load_that_memory_cannot_hold_is_one_line(
    name: str, dataset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ran until the kernel ended it."""
    argv = ["--dataset-name", dataset, "--num-prompts", str(10**10), "--gsp-num-groups", str(10**9)]
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, *argv])
    assert ended.value.code == 2
    count = r"is 1\d{10}: these requests take \d+\.\d\d GB of memory, \S+ .B are available; at most \d+ fit"
    assert re.fullmatch(rf"moe-engine bench {name}: error: --[^\n]* {count}\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["offline_throughput", "--num-prompts", "1O"], "--num-prompts '1O': expected a whole number"),
        (
            ["serving", "--num-promts", "1"],
            "--num-promts: unknown argument (did you mean --num-prompts?); --help lists all",
        ),
        (["serving", "--num-prompts", "0"], "--num-prompts is 0; it must be at least 1"),
        (["limits", "--repeats", "x"], "--repeats 'x': expected a whole number"),
    ],
)
def test_a_wrong_option_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *argv])
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"moe-engine bench {argv[0]}: error: {message}\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["one_batch", "--input-len", "9" * 20], " tokens exceed the context of 2048 (--context-length)"),
        (["one_batch", "--batch-size", "9" * 20], " requests, but --max-running-requests is "),
        (["offline_throughput", "--random-input-len", "-1"], "--random-input-len is -1; it must be at least 1"),
    ],
)
def test_sizes_are_checked_before_the_engine_starts(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *argv, "--result-filename", ""])
    assert ended.value.code == 2
    found = capsys.readouterr().err.removeprefix("no --model-path: using the small model embedded in this package\n")
    assert message in found and found.count("\n") == 1


def test_names_of_vllm_and_unknown_names() -> None:
    vllm = {"latency": "one_batch", "throughput": "offline_throughput", "serve": "serving"}
    assert {asked: bench._benchmark(asked, list(FOUND)) for asked in vllm} == vllm
    with pytest.raises(ConfigError, match=r"^unheard-of: no such benchmark; `moe-engine bench` lists them$"):
        bench._benchmark("unheard-of", list(FOUND))
    with pytest.raises(ConfigError, match=r"^one-bach: no such benchmark \(did you mean one_batch\?\); "):
        bench._benchmark("one-bach", list(FOUND))
    with pytest.raises(ConfigError, match="cpu: begins several names, cpu_kernels, cpu_sampling; give one of them"):
        bench._benchmark("cpu", list(FOUND))
    assert not [line for line in FOUND.values() if "``" in line or "python -m" in line]


def test_a_missing_package_is_named_with_the_way_to_get_it() -> None:
    code = (
        "import sys; sys.modules['httpx'] = None; "
        "from moe_engine.cli.main import main; sys.exit(main(['bench', 'serving']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == "moe-engine bench: error: serving: needs httpx, which is not installed: pip install httpx\n"


def test_benchmarks_import_what_is_installed_anyway() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {Requirement(text).name.replace("-", "_") for text in project["dependencies"]}
    known = installed | {"benchmarks", "moe_engine", "tests"} | sys.stdlib_module_names
    needed: dict[str, set[str]] = {}
    for file in FOLDER.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if (top := (name or "").partition(".")[0]) not in known:
                    needed.setdefault(file.stem, set()).add(top)
    assert not needed
