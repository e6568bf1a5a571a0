"""The pinned versions can be installed together with any build of torch: what torch itself pins is left to it."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def pins() -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {
        name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines if line)
    }


def test_pins_agree_with_what_torch_asks_for() -> None:
    pinned = pins()
    for text in importlib.metadata.requires("torch") or []:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            version = pinned.get(wanted.name.lower().replace("_", "-"))
            assert version is None or wanted.specifier.contains(version), f"torch needs {wanted}, not {version}"


def test_triton_is_left_to_torch() -> None:
    """GPU builds of torch, PyPI's among them, ask for one Triton: another pin would refuse every fresh machine."""
    assert "triton" not in pins()
    found = re.search(r"^TRITON := triton==(.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert found is not None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert Requirement(extras["triton"][0]).specifier.contains(found[1])
