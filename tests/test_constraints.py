"""All installed packages are pinned, for any build of torch: torch's own pins are left to it."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def pins() -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {
        name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines if line)
    }


def installed_for_tests() -> set[str]:
    """The distributions that `make test` requires, and their requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"], "setuptools"]
    pending, seen = [Requirement(text) for text in wanted], set()
    while pending:
        requirement = pending.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        if key[0] == "triton" or key[0].startswith(("nvidia-", "cuda-")):  # pinned by torch
            continue
        for text in importlib.metadata.requires(requirement.name) or []:
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                needed.marker = None
                pending.append(needed)
    return {name for name, _ in seen}


@pytest.mark.skipif(sys.platform != "linux", reason="the packages needed on Linux are pinned")
def test_what_is_pinned_is_what_is_installed() -> None:
    of_torch = {name for name in installed_for_tests() if name == "triton" or name.startswith(("nvidia-", "cuda-"))}
    assert set(pins()) == installed_for_tests() - of_torch


def test_pins_agree_with_what_torch_asks_for() -> None:
    pinned = pins()
    for text in importlib.metadata.requires("torch") or []:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            version = pinned.get(wanted.name.lower().replace("_", "-"))
            assert version is None or wanted.specifier.contains(version), f"torch needs {wanted}, not {version}"


def test_gpu_constraints_fit_the_extras() -> None:
    """Every GPU library has a pinned version that its extra accepts; libraries built for one torch require its
    range."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints-gpu.txt").read_text().splitlines())
    given = {requirement.name: requirement.specifier for requirement in map(Requirement, filter(None, lines))}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    gpu = re.findall(r"[\w-]+", extras["gpu"][0].partition("[")[2])
    for extra in gpu:
        for wanted in map(Requirement, extras[extra]):
            exact = [clause.version for clause in given[wanted.name] if clause.operator == "=="]
            assert exact or wanted.specifier == given[wanted.name], wanted
            assert all(wanted.specifier.contains(version) for version in exact), wanted
    for extra in ("deep-gemm", "fa3"):
        assert any(Requirement(text).name == "torch" for text in extras[extra])


def test_triton_is_left_to_torch() -> None:
    """GPU builds of torch, including PyPI's, require one version of Triton: another pin would fail on every new
    machine."""
    assert "triton" not in pins()
    found = re.search(r"^TRITON := triton==(.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert found is not None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert Requirement(extras["triton"][0]).specifier.contains(found[1])


def test_the_lowest_triton_is_compiled_with() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (clause,) = Requirement(extras["triton"][0]).specifier
    assert clause.operator == ">="
    found = re.search(r"^LOWEST_TRITON := triton==(.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert found is not None and Version(found[1]).release[:2] == Version(clause.version).release[:2]
