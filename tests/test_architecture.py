"""Rules of the source: import directions; modules that may use torch, devices and the environment."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.source_trees import SHARED, parsed  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("kernels", "models", "parallel")
MAX_LINES = 500
MAX_FUNCTION_LINES = 80

MODEL = {"kernels", "parallel", "models"}
VALUES = {"errors", "types", "sampling_checks", "validation"}
# package -> packages of this project that it may import, besides itself
# fmt: off
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "custom_logit_processor": set(),
    "class_path": {"errors"},
    "kv_connectors": {"class_path", "errors"},
    "storage": {"class_path", "errors", "types", "gguf_container"},
    "sampling_checks": {"errors", "types", "validation", "structured_output"},
    "structured_output": {"errors", "types", "validation", "tokenizer", "processes"},
    "validation": {"errors"},
    "gguf_container": {"errors"},
    "logs": {"processes"},
    "demo": set(),
    "kernels": set(),
    "parallel": {"errors", "kernels"},
    "models": {"errors", "kernels", "parallel", "gguf_container"},
    "media": {"errors", "types", "models", "processes"},
    "scheduler": {"errors", "types", "kv_connectors"},
    "tokenizer": {"errors", "types", "gguf_container"},
    "processes": {"errors"},
    "config": {"errors", "kernels", "parallel", "tokenizer"},
    "planning": MODEL | {"errors", "types", "custom_logit_processor", "kv_connectors", "storage", "sampling_checks",
        "gguf_container", "demo", "scheduler", "tokenizer", "processes", "config"},
    "tuning": MODEL | {"errors", "types", "gguf_container", "logs", "scheduler", "config", "planning", "core",
        "frontend"},
    "worker": MODEL | {"errors", "types", "custom_logit_processor", "kv_connectors", "storage", "processes"},
    "core": {"errors", "types", "structured_output", "logs", "parallel", "models", "scheduler", "tokenizer",
        "processes", "config", "planning", "worker"},
    "executor": MODEL | {"errors", "types", "logs", "processes", "planning", "worker", "core"},
    "cluster": {"errors", "types", "logs", "models", "processes", "planning", "worker", "core", "executor"},
    "elastic": {"errors", "types", "logs", "parallel", "models", "processes", "planning", "worker", "core",
        "executor", "cluster"},
    "frontend": VALUES | {"custom_logit_processor", "storage", "structured_output", "logs", "parallel", "models",
        "media", "tokenizer", "processes", "config", "planning", "core", "executor", "cluster", "elastic",
        "server_args"},
    "server": VALUES | {"custom_logit_processor", "structured_output", "logs", "media", "tokenizer", "processes",
        "config", "planning", "tuning", "executor", "cluster", "frontend"},
    "cli": MODEL | {"errors", "types", "sampling_checks", "validation", "logs", "tokenizer", "processes", "config",
        "planning", "tuning", "frontend", "server"},
    "bench_serving": {"cli"},
    "launch_server": {"cli"},
    "__main__": {"cli"},
    "server_args": {"config"},
    "__init__": {"frontend", "models", "server_args"},
}
# fmt: on

NO_TORCH_FILES = (
    "custom_logit_processor",
    "kv_connectors",
    "sampling_checks",
    "validation",
    "gguf_container",
    "errors",
    "logs",
    "bench_serving",
    "launch_server",
    "server_args",
    "__init__",
)
NO_TORCH = (
    "media",
    "structured_output",
    "storage",
    "scheduler",
    "tokenizer",
    "server",
    "processes",
    "tuning",
    "types",
    *NO_TORCH_FILES,
)
TORCH_IN_FUNCTIONS_ONLY = ("config", "planning", "frontend", "core", "executor", "cluster", "cli")
MAY_IMPORT_TORCH = ("moe_engine/cli/compile_kernels/",)
"""Subpackages of the packages above that only one command imports."""
VENDORS = {"triton", "flashinfer", "flash_mla", "flash_attn", "deep_ep", "deep_gemm", "nvshmem", "sgl_kernel"}

# files that may read the accelerator, a device's kind, the environment: keep these lists short
TOUCHES_CUDA = {
    "kernels/device.py",
    "kernels/host_calls.py",  # its stream, for the driver
    "kernels/uploads.py",  # whether its stream is captured
    "moe_engine/planning/inputs/machine.py",
    "moe_engine/worker/device_stream.py",
    "parallel/dispatch/symm_mem/nvshmem4py.py",  # its stream, in the form of the package
}
TESTS_DEVICE_TYPE = {"moe_engine/worker/device_stream.py"}
READS_ENVIRONMENT = {
    "kernels/cpu/library.py",
    "kernels/torch_regions.py",
    "kernels/vendors/cuda_home.py",  # variables of the libraries' compiler
    "parallel/dispatch/deepep/startup.py",  # DeepEP has no arguments for these
    "parallel/dispatch/symm_mem/availability.py",  # torch's symmetric memory has no argument for this
    "parallel/trainer_group.py",  # torch's NCCL group has no argument for this
    "moe_engine/cli/cluster_check/command.py",
    "moe_engine/cli/doctor.py",
    "moe_engine/planning/prepare.py",
    "moe_engine/frontend/profiling.py",
    "moe_engine/cluster/core_main.py",
    "moe_engine/processes/addresses.py",
    "moe_engine/cluster/rank_main.py",
    "moe_engine/elastic/rendezvous.py",
    "moe_engine/executor/process_groups.py",
    "moe_engine/processes/runtime_dir.py",
}


# --elastic-ep is implemented in moe_engine/elastic; the interface is moe_engine/cluster/rank_loss.py, which does not
# name it
ELASTIC = re.compile(r"(?<!torch)elastic(?!ity|buffer|dispatcher)|survivor|survival|regroup", re.IGNORECASE)
MAY_NAME_ELASTIC = {
    "moe_engine/config/parallel.py",  # the flag
    "moe_engine/frontend/start.py",  # injects the policy
    "moe_engine/planning/parallelism/resolve_elastic.py",
    "moe_engine/planning/parallelism/resolve_parallel.py",
    "moe_engine/cli/simulate.py",
    "moe_engine/tuning/simulator/fleet.py",
}


def package_of(path: str) -> str:
    """``kernels/ops/cpu.py`` -> kernels, ``moe_engine/core/loop.py`` -> engine, ``moe_engine/cli/main.py`` -> cli."""
    parts = Path(path).with_suffix("").parts
    return parts[0] if parts[0] in LINKED else parts[1]


@cache
def sources() -> dict[str, ast.Module]:
    """Every file of the package, by its path in the repository; each link is followed once."""
    found = {}
    for top in ("moe_engine", *LINKED):
        for folder, _, files in os.walk(ROOT / top, followlinks=False):
            for name in files:
                if name.endswith(".py"):
                    file = Path(folder, name)
                    found[file.relative_to(ROOT).as_posix()] = parsed(file)
    return found


EXAMINED = (
    ast.Import, ast.ImportFrom, ast.Attribute, ast.BinOp, ast.Compare, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef,
)  # fmt: skip
"""Kinds of nodes that the rules examine."""


@cache
def nodes(path: str) -> tuple[ast.AST, ...]:
    """The examined nodes of a file. A walk over all nodes takes longer than every rule."""
    return tuple(node for node in ast.walk(sources()[path]) if isinstance(node, EXAMINED))


@cache
def imports_of(path: str) -> tuple[tuple[str, int], ...]:
    """`imports` of a whole file."""
    return tuple(imports(nodes(path)))


def imports(examined: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of all imports of the nodes; ``from a import b`` gives ``a.b``."""
    for node in examined:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level < 2, f"line {node.lineno}: import from a parent package by its full name"
            if node.level == 0:  # `from .x import y` stays in its own folder
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def imports_on_import(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The imports that run when the module is imported: not those in functions or under TYPE_CHECKING."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports([node])
        pending += ast.iter_child_nodes(node)


def project_package(name: str) -> str | None:
    """``moe_engine.kernels.device`` -> kernels; None for other projects and for the package itself."""
    parts = name.split(".")
    if parts[0] != "moe_engine" or len(parts) < 2:
        return None
    return parts[1] if parts[1] in MAY_IMPORT else None


def is_torch(name: str) -> bool:
    return name.split(".")[0] in ("torch", "triton")


def complain(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(sorted(found))


def test_every_package_has_a_place():
    packages = {package_of(path) for path in sources()}
    assert packages <= set(MAY_IMPORT), packages - set(MAY_IMPORT)


def test_import_direction():
    found = []
    used: dict[str, set[str]] = {own: set() for own in MAY_IMPORT}
    for path in sources():
        own = package_of(path)
        for name, line in imports_of(path):
            if (package := project_package(name)) and package != own:
                used[own].add(package)
                if package not in MAY_IMPORT[own]:
                    found.append(f"{path}:{line}: {own} must not import {name}")
    complain(found)
    complain([f"{own} needs no {name} in MAY_IMPORT" for own in used for name in MAY_IMPORT[own] - used[own]])


@cache
def files_by_module() -> dict[str, str]:
    return {module_of(path): path for path in sources() if not path.endswith("__init__.py")}


def files_imported(path: str) -> set[str]:
    """The files of this project from which a file imports names, at any place in the file."""
    names = [name for name, _ in imports_of(path)]
    own = module_of(path).rpartition(".")[0]
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names += [f"{own}.{node.module}.{alias.name}" for alias in node.names]
    modules = files_by_module()
    found = {modules.get(name) or modules.get(name.rpartition(".")[0]) for name in names}
    return {other for other in found if other is not None} - {path}


def module_of(path: str) -> str:
    name = path.removesuffix(".py").replace("/", ".")
    return name if name.startswith("moe_engine.") else f"moe_engine.{name}"


def test_the_drawing_of_the_import_direction_is_true():
    page = (ROOT / "docs/architecture.md").read_text().partition("## Import direction")[2]
    arrows = set()
    for line in page.split("```")[1].strip().splitlines():
        steps = [step.strip("{} ").split(", ") for step in line.split("<-")]
        arrows |= {(low, high) for lows, highs in pairwise(steps) for low in lows for high in highs}
    assert [arrow for arrow in arrows if arrow[0] not in MAY_IMPORT[arrow[1]]] == []
    folders = {name for name in MAY_IMPORT if (ROOT / "moe_engine" / name).is_dir()}
    assert folders - set().union(*arrows) == {"processes", "demo"}


def test_no_file_imports_itself_by_way_of_others():
    """Also not only for type checkers: names that two files need of each other belong in a third file."""
    arrows = {path: files_imported(path) for path in sources()}
    assert sum(map(len, arrows.values())) > 1000  # imports are found
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", ["kernels", "models", "parallel", "moe_engine/worker", "moe_engine/planning"])
def test_no_folder_imports_itself_by_way_of_others(package):
    """Folders form a layered graph: formats and structs, then families, then tables and the selection of rows."""
    arrows: dict[str, set[str]] = {}
    for path in sources():
        if path.startswith(f"{package}/"):
            others = [other for other in files_imported(path) if other.startswith(f"{package}/")]
            folder, *targets = (part_of(each, package) for each in (path, *others))
            arrows.setdefault(folder, set()).update(target for target in targets if target != folder)
    assert sum(map(len, arrows.values())) > 15
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def part_of(path: str, package: str) -> str:
    """Part of the kernels: ``kernels/ops/cpu.py`` -> ops, ``kernels/device.py`` -> device.py."""
    return path.removeprefix(f"{package}/").partition("/")[0]


def test_linked_packages_are_imported_by_their_full_name():
    found = [
        f"{path}:{line}: import {name} as moe_engine.{name}"
        for path in sources()
        for name, line in imports_of(path)
        if name.split(".")[0] in LINKED
    ]
    complain(found)


def test_who_may_import_torch():
    found = []
    for path, tree in sources().items():
        package = package_of(path)
        if package in NO_TORCH:  # not even inside functions
            found += [
                f"{path}:{line}: {package} must not import {name}" for name, line in imports_of(path) if is_torch(name)
            ]
        if package in TORCH_IN_FUNCTIONS_ONLY and not path.startswith(MAY_IMPORT_TORCH):
            found += [
                f"{path}:{line}: {package} must import {name} inside a function"
                for name, line in imports_on_import(tree)
                if is_torch(name)
            ]
    complain(found)


def test_models_know_no_vendor_and_no_kernel_language():
    found = [
        f"{path}:{line}: models must not import {name}"
        for path in sources()
        for name, line in imports_of(path)
        if package_of(path) == "models" and name.split(".")[0] in VENDORS
    ]
    complain(found)


def _attribute_chain(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def test_cuda_device_type_and_environment_live_in_few_files():
    found = []
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.Attribute):
                chain = _attribute_chain(node)
                if chain.startswith("torch.cuda") and path not in TOUCHES_CUDA:
                    found.append(f"{path}:{node.lineno}: torch.cuda")
                if chain in ("os.environ", "os.getenv") and path not in READS_ENVIRONMENT:
                    found.append(f"{path}:{node.lineno}: {chain}")
                if node.attr == "is_cuda":
                    found.append(f"{path}:{node.lineno}: is_cuda")
            if isinstance(node, ast.Compare) and path not in TESTS_DEVICE_TYPE:
                sides = [_attribute_chain(side) for side in (node.left, *node.comparators)]
                found += [f"{path}:{node.lineno}: test of {side}" for side in sides if side.endswith("device.type")]
    complain(found)


def test_the_short_lists_hold_nothing_superfluous():
    for listed, words in (
        (TOUCHES_CUDA, "torch.cuda"),
        (TESTS_DEVICE_TYPE, "device.type"),
        (READS_ENVIRONMENT, "os.environ"),
    ):
        for path in listed:
            assert words in (ROOT / path).read_text(), f"{path} needs no place in the list for {words}"


def test_the_normal_path_does_not_name_elastic_ep():
    found = {
        path: f"{path}:{number}: {line.strip()}"
        for path in sources()
        if package_of(path) != "elastic"
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if ELASTIC.search(line)
    }
    complain([line for path, line in found.items() if path not in MAY_NAME_ELASTIC])
    assert set(found) == MAY_NAME_ELASTIC, "a file needs no place in MAY_NAME_ELASTIC"


def test_threads_report_their_failure():
    """`watched_thread` starts all threads except those of executors, whose futures contain the exceptions."""
    found = [
        f"{path}:{node.lineno}: start it by watched_thread.start_watched"
        for path in sources()
        if path != "moe_engine/processes/watched_thread.py"
        for node in nodes(path)
        if isinstance(node, ast.Call) and _attribute_chain(node.func) in ("threading.Thread", "Thread")
    ]
    complain(found)


def test_types_are_prepared_before_threads_use_them():
    """msgspec crashes the process if one thread uses a type while another one gathers its fields: a type comes from
    `validation.prepared`, or its decoder is made on import."""
    found = []
    for path in sources():
        if not path.startswith(("moe_engine/server/", "moe_engine/frontend/", "moe_engine/media/")):
            continue
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            name = _attribute_chain(node.func)
            if name == "msgspec.convert" and "prepared(" not in ast.unparse(node.args[1]):
                found.append(f"{path}:{node.lineno}: convert to prepared(type)")
            if name in ("msgspec.json.decode", "msgspec.msgpack.decode") and any(
                keyword.arg == "type" and isinstance(keyword.value, ast.Name) for keyword in node.keywords
            ):
                found.append(f"{path}:{node.lineno}: use a decoder that is made on import")
    complain(found)


COMPARES_HOSTS = {"moe_engine/cli/cluster_check/facts.py"}
"""Modules that compare the wall clocks of hosts."""


def test_no_interval_is_measured_with_the_wall_clock():
    """It jumps when it is set. A difference to a monotonic clock converts times of one to the other."""

    def read(node: ast.expr) -> str:
        return _attribute_chain(node.func) if isinstance(node, ast.Call) else ""

    complain([
        f"{path}:{node.lineno}: use time.monotonic()"
        for path in sources()
        for node in nodes(path)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and "time.time" in (read(node.left), read(node.right))
        and read(node.right) not in ("time.monotonic", "time.perf_counter")
        and path not in COMPARES_HOSTS
    ])  # fmt: skip


def test_no_file_and_no_function_is_too_long():
    found = []
    for path in sources():
        lines = len((ROOT / path).read_text().splitlines())
        if lines > MAX_LINES:
            found.append(f"{path}: {lines} lines; look for the second idea in it")
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    complain(found)


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative(name):
    link = ROOT / "moe_engine" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


BEHIND_EXTRAS = {"moe_engine/server/tracing.py"}
"""Modules imported only if a flag needs the extra."""


def test_importing_the_front_end_loads_no_torch():
    """Also at run time: no import of the frontend loads torch."""
    packages = (*NO_TORCH, *TORCH_IN_FUNCTIONS_ONLY)
    modules = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in sources()
        if package_of(path) in packages
        and "__main__" not in path
        and not path.startswith(MAY_IMPORT_TORCH)
        and path not in BEHIND_EXTRAS
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {sorted(modules)!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules and 'transformers' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
