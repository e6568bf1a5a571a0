"""Flags in documents exist, and refused ones are called so; numbers in the help are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_engine.config.args import PARTS, build_parser
from moe_engine.config.dropped import DROPPED
from moe_engine.config.field import fields_of
from moe_engine.config.flags import known_options
from moe_engine.config.unsupported_flags import UNSUPPORTED_FLAGS
from moe_engine.planning import resolve_graphs, resolve_parallel, resolve_speculation
from moe_engine.planning.resolve_limits import CPU_CHUNK, CPU_MAX_RUNNING, GPU_CHUNKS, GPU_MAX_RUNNING

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("README.md", "slurm/README.md", "benchmarks/README.md"))]
)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
SOURCES = (
    "benchmarks",
    "slurm",
    "moe_engine/cli/cluster_check",
    "moe_engine/cli/compile_kernels",
    "moe_engine/cli/experts_report",
)
OTHERS = {
    "--nodes", "--gres", "--requeue", "--no-requeue", "--no-kill", "--signal", "--pty", "--ntasks-per-node",
    "--kill-on-bad-exit", "--wait", "--partition", "--exclude", "--array", "--overlap", "--time", "--cpus-per-task",
    "--no-python", "--nproc-per-node", "--index-url", "--extra-index-url", "--shm-size", "--gpus", "--upgrade",
    "--constraint", "--node-list", "--mem", "--output", "--export", "--job-name", "--exclusive", "--comment",
    "--dependency", "--get-user-env", "--immediate",
}  # fmt: skip
"""Of sbatch, srun, scancel, torchrun, pip and docker."""

NOT_HERE = ("not supported yet", "not available yet", "refused", "removed from SGLang", "later")


def own_flags() -> set[str]:
    """Of every command and every program of the repository."""
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".sbatch")]
    text = "\n".join(file.read_text() for file in [*files, ROOT / "moe_engine/cli/main.py"])
    return {*known_options(build_parser()), *re.findall(r"[\"'](--[a-z][a-z0-9-]*)", text), "--help", "--version"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_in_documents_exist(document):
    known = own_flags()
    refused = {row.option for row in (*UNSUPPORTED_FLAGS.values(), *DROPPED.values())}
    unknown, unsaid = [], []
    for number, line in enumerate(document.read_text().splitlines(), 1):
        for flag in FLAG.findall(line):
            if flag in refused and not any(words in line for words in NOT_HERE):
                unsaid.append(f"{document.name}:{number}: {flag} is refused, and the line does not say so")
            elif flag not in known and flag not in OTHERS and not any(option.startswith(flag) for option in known):
                unknown.append(f"{document.name}:{number}: {flag}")
    assert not unknown and not unsaid


def test_the_search_finds_flags():
    """Else the test above could not fail."""
    found = {flag for document in DOCUMENTS for flag in FLAG.findall(document.read_text())}
    assert len(found) > 60 and {"--model-path", "--tp", "--speculative-num-steps"} <= found
    assert "--unheard-of" not in own_flags()


CHUNKS = [tokens for _, tokens in GPU_CHUNKS]
SENTENCES = {
    "max_running_requests": f"at most {CPU_MAX_RUNNING} on a CPU (there a step's time grows with every request) "
    f"and {GPU_MAX_RUNNING} on a GPU",
    "chunked_prefill_size": f"Left out: {CPU_CHUNK} on a CPU, {CHUNKS[0]} to {2 * CHUNKS[-1]} by memory",
    "dist_timeout": f"Left out: {resolve_parallel.START_SECONDS:g}.",
    "speculative_num_steps": f"chooses 0 to {resolve_speculation.AUTO_MAX_STEPS} for each step",
    "speculative_num_draft_tokens": f"At most {resolve_speculation.MAX_DRAFT_TOKENS}.",
    "cuda_graph_max_bs_decode": f"Left out: {resolve_graphs.MAX_SIZES[0][1]} to {resolve_graphs.LARGEST} by memory",
}
"""What the help of a flag says of a number that the code has."""


@pytest.mark.parametrize("name", SENTENCES)
def test_numbers_in_the_help_are_those_of_the_code(name):
    (info,) = (info for part in PARTS.values() for info in fields_of(part) if info.name == name)
    assert SENTENCES[name] in " ".join(info.flag.help.split())


def test_default_trees_in_the_help():
    (info,) = (info for info in fields_of(PARTS["speculative"]) if info.name == "speculative_num_steps")
    tree = ", ".join(map(str, resolve_speculation.DEFAULT_TREE))
    steps = resolve_speculation.NGRAM_STEPS
    assert f"{tree} (NGRAM: {steps}, 1, {steps + 1})" in info.flag.help


def test_most_drafts_in_documents():
    found = [
        (document.name, int(most))
        for document in DOCUMENTS
        for most in re.findall(r"0 to (\d+)(?= drafts)", document.read_text())
    ]
    assert found and all(most == resolve_speculation.AUTO_MAX_STEPS for _, most in found), found


def test_dependencies_are_imported():
    """Every package of the project's list is imported by it."""
    import tomllib

    names = {"pyyaml": "yaml", "pyzmq": "zmq", "httptools": "uvicorn.protocols.http.httptools_impl"}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names_of_folders = ("moe_engine", "kernels", "models", "parallel", "benchmarks")  # links are not followed
    folders = [ROOT / name for name in names_of_folders]
    text = "\n".join(file.read_text() for folder in folders for file in folder.rglob("*.py"))
    for entry in listed:
        package = re.split(r"[><=;\[ ]", entry)[0]
        module = names.get(package, package.replace("-", "_"))
        assert re.search(rf"^\s*(import|from) {module}\b", text, re.M), f"{package} is listed and not imported"
