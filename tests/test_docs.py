"""Flags, paths and names in documents exist, generated pages are current, numbers in the help match the code."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest

from moe_engine.config.absent_flags import absent_flags
from moe_engine.config.args import PARTS, build_parser
from moe_engine.config.field import fields_of, option_of
from moe_engine.config.flags import known_options
from moe_engine.models.registry import supported
from moe_engine.planning.parallelism import resolve_parallel
from moe_engine.planning.speculation import draft_tree
from moe_engine.planning.steps import resolve_graphs
from moe_engine.planning.steps.resolve_limits import CPU_CHUNK, CPU_MAX_RUNNING, GPU_CHUNKS, GPU_MAX_RUNNING
from tests.source_trees import SHARED, parsed  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md", "CONTRIBUTING.md", "slurm/README.md", "deploy/README.md", "benchmarks/README.md",
    "moe_engine/demo/README.md", "tests/README.md",
)  # fmt: skip
DOCUMENTS = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in PAGES)])
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
SOURCES = ("benchmarks", "slurm", "moe_engine/cli", "moe_engine/demo", "moe_engine/tuning")
OTHERS = {
    "--nodes", "--gres", "--requeue", "--no-requeue", "--no-kill", "--signal", "--pty", "--ntasks-per-node",
    "--kill-on-bad-exit", "--wait", "--partition", "--exclude", "--array", "--overlap", "--time", "--cpus-per-task",
    "--no-python", "--nproc-per-node", "--index-url", "--extra-index-url", "--shm-size", "--gpus", "--upgrade",
    "--constraint", "--node-list", "--mem", "--output", "--export", "--job-name", "--exclusive", "--comment",
    "--dependency", "--get-user-env", "--immediate",
    "--cache-threshold", "--balance-abs-threshold", "--balance-rel-threshold", "--retry-max-retries", "--worker-urls",
    "--pd-disaggregation", "--prefill", "--decode",
    "--health-failure-threshold", "--health-check-timeout-secs", "--health-success-threshold", "--prometheus-port",
    "--tls-cert-path", "--timeout", "--session-timeout",
}  # fmt: skip
"""Flags of sbatch, srun, scancel, torchrun, pip, docker, sglang-router and pytest-timeout."""

NOT_HERE = ("not supported yet", "not available yet", "refused", "removed from SGLang", "later")


def own_flags() -> set[str]:
    """Flags of every command and every program of the repository."""
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".sbatch")]
    text = "\n".join(file.read_text() for file in [*files, ROOT / "tests" / "forked_run.py"])
    known = {*known_options(build_parser()), *map(option_of, absent_flags().name_of), "--help", "--version"}
    return known | set(re.findall(r"[\"'](--[a-z][a-z0-9-]*)", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_in_documents_exist(document):
    known = own_flags()
    refused = {option_of(name) for name in absent_flags().flags}
    unknown, unmarked = [], []
    for number, line in enumerate(document.read_text().splitlines(), 1):
        for flag in FLAG.findall(line):
            if flag in refused and not any(words in line for words in NOT_HERE):
                unmarked.append(f"{document.name}:{number}: {flag} is refused, and the line does not state it")
            elif flag not in known and flag not in OTHERS and not any(option.startswith(flag) for option in known):
                unknown.append(f"{document.name}:{number}: {flag}")
    assert not unknown and not unmarked


def test_the_search_finds_flags():
    """A check that the test above can fail."""
    found = {flag for document in DOCUMENTS for flag in FLAG.findall(document.read_text())}
    assert len(found) > 60 and {"--model-path", "--tp", "--speculative-num-steps"} <= found
    assert "--unheard-of" not in own_flags()


CHUNKS = [tokens for _, tokens in GPU_CHUNKS]
SENTENCES = {
    "max_running_requests": f"at most {CPU_MAX_RUNNING} on a CPU (there a step's time grows with every request) "
    f"and {GPU_MAX_RUNNING} on a GPU",
    "chunked_prefill_size": f"Left out: {CPU_CHUNK} on a CPU, {CHUNKS[0]} to {2 * CHUNKS[-1]} by memory",
    "dist_timeout": f"Left out: {resolve_parallel.START_SECONDS:g}.",
    "speculative_num_steps": f"chooses 0 to {draft_tree.AUTO_MAX_STEPS} for each step",
    "speculative_num_draft_tokens": f"At most {draft_tree.MAX_DRAFT_TOKENS}.",
    "cuda_graph_max_bs_decode": f"Left out: {resolve_graphs.MAX_SIZES[0][1]} to {resolve_graphs.LARGEST} by memory",
}
"""Sentences with numbers in the help of a flag, built from the code's numbers."""


@pytest.mark.parametrize("name", SENTENCES)
def test_numbers_in_the_help_equal_the_code(name):
    (info,) = (info for part in PARTS.values() for info in fields_of(part) if info.name == name)
    assert SENTENCES[name] in " ".join(info.flag.help.split())


def test_default_trees_in_the_help():
    (info,) = (info for info in fields_of(PARTS["speculative"]) if info.name == "speculative_num_steps")
    tree = ", ".join(map(str, draft_tree.DEFAULT_TREE))
    steps = draft_tree.NGRAM_STEPS
    assert f"{tree} (NGRAM: {steps}, 1, {steps + 1};" in info.flag.help


def test_maximum_draft_depth_in_documents():
    found = [
        (document.name, int(most))
        for document in DOCUMENTS
        for most in re.findall(r"0 to (\d+)(?= drafts)", document.read_text())
    ]
    assert found and all(most == draft_tree.AUTO_MAX_STEPS for _, most in found), found


def test_dependencies_are_imported():
    """Every listed dependency is imported somewhere."""
    import tomllib

    names = {"pyyaml": "yaml", "pyzmq": "zmq", "httptools": "uvicorn.protocols.http.httptools_impl"}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names_of_folders = ("moe_engine", "kernels", "models", "parallel", "benchmarks")  # rglob follows no links
    folders = [ROOT / name for name in names_of_folders]
    text = "\n".join(file.read_text() for folder in folders for file in folder.rglob("*.py"))
    for entry in listed:
        package = re.split(r"[><=;\[ ]", entry)[0]
        module = names.get(package, package.replace("-", "_"))
        assert re.search(rf"^\s*(import|from) {module}\b", text, re.M), f"{package} is listed and not imported"


# -- paths and names

SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
SUFFIXES = (".py", ".md", ".sh", ".sbatch", ".cpp", ".h", ".json", ".svg", ".html", ".toml", ".jinja")
ENDPOINT = re.compile(r"/[a-z_][\w/]*")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+(?:\(\))?")
CLASS = re.compile(r"[A-Z]\w*[a-z]\w*(?:\(\))?")
SNAKE = re.compile(r"_?[a-z]\w*_\w*(?:\(\))?")
PYTHON_FOLDERS = ("moe_engine", "kernels", "models", "parallel", "benchmarks")
OUTSIDE = {
    "rid_0", "rid_1", "extra_body", "proxy_buffering", "proxy_read_timeout", "client_max_body_size",
    "client_header_timeout", "client_body_timeout", "Authorization", "Origin", "Allow", "Upgrade", "KillWait",
    "SlurmdTimeout", "dump.pt", "heat_map.png", "imbalance.png", "serve.yaml",
    "modules.json", "params.json", "tekken.json",
    "/cache", "/dev/shm", "/dev/gdrdrv", "/dev/infiniband", "mlx5_ib", "nvidia_peermem",
    "gdrcopy_sanity", "MLX5_1.25", "PeerMappingOverride", "NET/IB", "NET/Socket", "libcudart.so.13",
    "benchmarks/results/<date>_<gpu>_gpu_suite.json",
}  # fmt: skip
"""Names of other programs, of drivers, of HTTP and of users' files."""


def spans(document: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each inline code span outside fenced blocks."""
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), document.read_text())
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, span) for span in SPAN.findall(line))


@lru_cache
def files() -> frozenset[str]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    found = listed.stdout.split("\n") if listed.returncode == 0 else []
    found = found or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    return frozenset(name for name in found if name and (ROOT / name).exists())


@lru_cache
def folders() -> frozenset[str]:
    return frozenset(str(parent) for name in files() for parent in Path(name).parents if str(parent) != ".")


def path_exists(path: str, document: Path) -> bool:
    """True if the path, or the end of a path, is a file or folder of the repository. ``*`` matches any part of a
    name."""
    if (document.parent / path).exists():
        return True
    wanted = re.compile(r"(?:.*/)?" + re.escape(path.rstrip("/")).replace(r"\*", "[^/]*"))
    return any(wanted.fullmatch(name) for name in (*files(), *folders()))


@lru_cache
def trees() -> dict[str, ast.Module]:
    """Every Python file except tests, by its path; links are not followed."""
    return {
        name: parsed(ROOT / name) for name in files() if name.endswith(".py") and name.split("/")[0] in PYTHON_FOLDERS
    }


def _own_names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)


def _class_names(node: ast.ClassDef, lines: list[str]) -> set[str]:
    """With the attributes of `self`. lines: of the file."""
    text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return {*_own_names(node.body), *re.findall(r"\bself\.(\w+)", text)}


def _classes(body: list[ast.stmt]) -> Iterator[ast.ClassDef]:
    """Of a block, whatever they are nested in. Expressions, most nodes of a tree, hold none."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _classes(getattr(node, name, []))


@lru_cache
def members() -> dict[str, set[str]]:
    """Names in each module, package and class, by the last part of its name; equal names are merged."""
    found: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for name, tree in trees().items():
        module = Path(name).parent.name if name.endswith("__init__.py") else Path(name).stem
        found.setdefault(module, set()).update(_own_names(tree.body))
        if module == "moe_engine":  # names that are loaded on use
            found[module].update(re.findall(r"\w+", str(re.findall(r"__all__ = (.*)", (ROOT / name).read_text()))))
            found[module].update(("kernels", "models", "parallel"))
        found.setdefault(Path(name).parent.name, set()).add(Path(name).stem)
        lines = (ROOT / name).read_text().splitlines()
        for node in _classes(tree.body):
            found.setdefault(node.name, set()).update(_class_names(node, lines))
            bases.setdefault(node.name, set()).update(base.id for base in node.bases if isinstance(base, ast.Name))
    for name in files():  # documents name only classes of tests
        if name.startswith("tests/") and name.endswith(".py"):
            for cls in re.findall(r"^class (\w+)", (ROOT / name).read_text(), re.M):
                found.setdefault(cls, set())
    for path in folders():
        found.setdefault(Path(path).parent.name, set()).add(Path(path).name)
    for name, of in bases.items():
        found[name].update(*(found.get(base, set()) for base in of))
    return found


@lru_cache
def words() -> frozenset[str]:
    """Every word of the source, in code and in strings."""
    suffixes = (".py", ".cpp", ".h", ".sh", ".sbatch", "Makefile")
    sources = [name for name in files() if name.endswith(suffixes) and name != "tests/test_docs.py"]
    return frozenset(word for name in sources for word in re.findall(r"\w+", (ROOT / name).read_text()))


@lru_cache
def endpoints() -> frozenset[str]:
    text = "\n".join((ROOT / name).read_text() for name in files() if name.startswith("moe_engine/server/"))
    return frozenset(re.findall(r"[\"'](/[\w/{}:]*)[\"']", text))


def dotted_name_exists(name: str) -> bool:
    """Each part must be a member of the previous part; the first may be any module, package or class."""
    parts = name.removesuffix("()").split(".")
    return parts[0] in members() and all(
        part in members().get(owner, set()) for owner, part in pairwise(parts) if owner in members()
    )


def why_unknown(span: str, document: Path) -> str | None:
    """The reason why a code span names nothing of this project; None if it does, or if it is neither a path nor a
    name."""
    if span in OUTSIDE or span.split(".")[0] in ("torch", "transformers"):
        return None
    if ENDPOINT.fullmatch(span):
        known = any(route == span or route.startswith(f"{span}/") for route in endpoints())
        return None if known else "no such endpoint"
    if PATH.fullmatch(span) and (span.endswith(SUFFIXES) or ("/" in span and not span[0].isdigit())):
        return None if path_exists(span, document) else "no such file or folder"
    if DOTTED.fullmatch(span):
        return None if dotted_name_exists(span) or path_exists(span, document) else "no such name"
    if CLASS.fullmatch(span):
        known = span.removesuffix("()") in members() or span in supported()
        known = known or (span.endswith("ForCausalLM") and span in words())
        return None if known else "no such class"
    if SNAKE.fullmatch(span):
        return None if span.removesuffix("()") in words() else "no such word in the source"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_and_names_in_documents_exist(document):
    found = [(number, span, why_unknown(span, document)) for number, span in spans(document)]
    assert not [f"{document.name}:{number}: {span}: {why}" for number, span, why in found if why is not None]


@pytest.mark.parametrize(
    ("span", "known"),
    [
        ("worker/worker.py", True), ("worker/step_graph.py", False), ("docs/", True), ("engine/loop", False),
        ("Scheduler.schedule()", True), ("Scheduler.shedule()", False), ("StepPlan.dp_facts", True),
        ("EngineCore", True), ("RemoteCore", False), ("last_token", True), ("no_such_word_here", False),
        ("/health", True), ("/unheard_of", False), ("kernels/tables.py", True), ("scheduler/step_price.py", False),
        ("config.resolve", False), ("core.loop", True),
    ],
)  # fmt: skip
def test_the_search_tells_names_that_exist(span, known):
    assert (why_unknown(span, ROOT / "docs" / "glossary.md") is None) == known


def test_modules_and_commands_in_documents_exist():
    from moe_engine.cli.main import COMMANDS

    unknown = []
    for document in DOCUMENTS:
        text = document.read_text()
        for module in re.findall(r"python -m ((?:moe_engine|benchmarks|tests)[\w.]*)", text):
            path = ROOT / module.replace(".", "/")
            if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()):
                unknown += [f"{document.name}: python -m {module}"] * (module != "benchmarks.NAME")
        for command in re.findall(r"(?:^|`)(?:\.venv/bin/)?moe-engine ([a-z][a-z-]*)(?=[\s`]|$)", text, re.M):
            if command not in COMMANDS:
                unknown.append(f"{document.name}: moe-engine {command}")
    assert not unknown


def test_links_between_documents_lead_somewhere():
    """Links to files, and to headings by GitHub's anchors."""
    broken = []
    for document in [*DOCUMENTS, ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", document.read_text())):
            path, _, anchor = target.partition("#")
            if path.startswith(("http", "mailto")):
                continue
            file = document.parent / path if path else document
            if not file.exists():
                broken.append(f"{document.name}: {target}")
            elif anchor:
                titles = re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text()), re.M)
                anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                if anchor not in anchors:
                    broken.append(f"{document.name}: {target}")
    assert not broken


# -- pages made from the source, or checked against it


def test_the_page_of_sglangs_flags_is_current():
    made = subprocess.run([sys.executable, "docs/flag_table.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (ROOT / "docs/sglang_flags.md").read_text() == made.stdout, "run python docs/flag_table.py --write"


def test_the_tables_of_formats_are_current():
    made = subprocess.run(
        [sys.executable, "docs/format_table.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert made.stdout in (ROOT / "docs/models.md").read_text(), "run python docs/format_table.py --write"


def test_every_metric_is_documented_with_its_type():
    from types import SimpleNamespace

    from moe_engine.scheduler.prefill_delayer import PrefillDelayer
    from moe_engine.server.experts_metrics import ExpertMetrics
    from moe_engine.server.metrics import Metrics
    from moe_engine.server.metrics_http import StatusCount
    from moe_engine.server.prefill_delayer_metrics import PrefillDelayerMetrics
    from moe_engine.server.speculation_metrics import SpeculationMetrics
    from moe_engine.types.prefill_delay import DelayerSettings

    metrics = Metrics("model", SimpleNamespace(model_type="deepseek_v3", dtype="bfloat16"), "0")
    StatusCount(lambda *scope: None, metrics)
    SpeculationMetrics(metrics.families)
    ExpertMetrics(metrics.families)
    delayer = PrefillDelayer(DelayerSettings(), max_rows=8, clock=lambda: 0.0)
    PrefillDelayerMetrics(metrics.families).set([delayer.state()])
    families = list(metrics.registry.collect())
    registered = {family.name + ("_total" if family.type == "counter" else ""): family.type for family in families}
    registered = {name: kind for name, kind in registered.items() if name.startswith(("sglang:", "moe_engine"))}
    page = (ROOT / "docs/metrics.md").read_text()
    documented = dict(re.findall(r"^\| `((?:sglang:|moe_engine)\w+)` \| (\w+) \|", page, re.M))
    registered = {f"{name}_info" if kind == "info" else name: kind for name, kind in registered.items()}
    assert documented == registered and len(documented) > 40
    listed = re.search(r"has the labels (.+?);", page, re.S)
    assert listed is not None and re.findall(r"`(\w+)`", listed[1]) == list(metrics.families.labels)


# -- messages and words


def _text(node: ast.expr) -> str:
    """A literal's text, with ``...`` for inserted values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[a-z]", "...", node.value)
    return "..."


@lru_cache
def messages() -> str:
    found = []
    for name, tree in trees().items():
        if not name.startswith(("tests", "benchmarks")):
            found += [_text(node) for node in ast.walk(tree) if isinstance(node, (ast.JoinedStr, ast.Constant))]
    return "\n".join(found)


@pytest.mark.parametrize(("name", "least"), [("troubleshooting.md", 30), ("gpu_quickstart.md", 25)])
def test_messages_in_tables_exist_in_the_source(name, least):
    """Each part of a quoted message between its ``...`` occurs in the source."""
    page = (ROOT / "docs" / name).read_text()
    quoted = [span for row in re.findall(r"^\| ([^|]+)\|", page, re.M) for span in SPAN.findall(row) if " " in span]
    quoted = [span for span in quoted if not FLAG.match(span) or ":" in span]  # without flags and their values
    assert len(quoted) > least
    parts = [
        part.strip(" ;,().?:") for message in quoted for part in message.split("...") if len(part.strip(" ;,():")) > 5
    ]
    others = ("cuda graph: False", "no C++ compiler")  # part of a log line; a command's report
    assert not [part for part in parts if part not in messages() and not part.startswith(others)]


SEARCHED = {
    "block table": "moe_engine/worker/batch/request_rows.py",
    "radix cache": "moe_engine/scheduler/kv_cache/radix_cache.py",
    "KV cache manager": "moe_engine/scheduler/kv_cache/kv_cache_manager.py",
    "executor": "moe_engine/core/executor.py",
    "worker": "moe_engine/worker/worker.py",
    "model runner": "moe_engine/worker/model_runner.py",
    "sampler": "moe_engine/worker/sampling/sampler.py",
    "EPLB manager": "moe_engine/worker/eplb/eplb_manager.py",
    "dispatcher": "parallel/dispatch/protocol.py",
    "speculative worker": "moe_engine/worker/speculation/step.py",
}
"""Common terms of the field, and the file that implements each."""


@pytest.mark.parametrize("name", SEARCHED)
def test_a_plain_search_for_a_name_of_the_field_leads_to_its_file(name):
    """The docstring of the file contains the term, in upper or lower case."""
    head = " ".join((ast.get_docstring(trees()[SEARCHED[name]]) or "").split())
    found = name.lower() in head.lower()
    assert found, f"the docstring of {SEARCHED[name]} does not contain {name!r}: {head[:120]}"


@pytest.mark.parametrize("name", SEARCHED)
def test_the_glossary_has_the_names_of_the_field(name):
    lines = (ROOT / "docs/glossary.md").read_text().splitlines()
    assert any(name in line.split("|")[1] and f"`{SEARCHED[name]}`" in line for line in lines if line.startswith("| "))


def test_every_row_of_the_glossary_names_a_file():
    rows = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 50
    assert not [row for row in rows if not re.search(r"`[\w/]+\.py`", row) and not row.startswith(("| word |",))]


def test_results_name_a_module_that_exists():
    results = [*(ROOT / "benchmarks/results").glob("*_cpu_*.json")]
    for result in results:
        found = json.JSONDecoder().raw_decode(result.read_text())[0]
        if "about" not in found:
            assert result.stem.endswith("_quantized"), result.name
            continue
        module = found["about"]["command"].split()[2].replace(".", "/")
        assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists(), result.name
    assert len(results) > 30
