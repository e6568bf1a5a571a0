"""Install commands in messages and documents work: moe-engine itself is on no package index."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from moe_engine.kernels.vendors.probe import LIBRARIES

ROOT = Path(__file__).parents[1]
FOLDERS = ("moe_engine", "kernels", "models", "parallel", "benchmarks", "docs", "slurm")
SUFFIXES = (".py", ".md", ".sh", ".sbatch", ".html")


def texts() -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in SUFFIXES:
                yield str(file.relative_to(ROOT)), file.read_text()
    for name in ("README.md", "CONTRIBUTING.md", "Makefile"):
        yield name, (ROOT / name).read_text()


def extras() -> dict[str, set[str]]:
    """Requirements of each extra."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {name: {str(Requirement(text)) for text in wanted} for name, wanted in found.items()}


def test_moe_engine_is_installed_from_a_checkout_or_an_address() -> None:
    wrong = [
        f"{name}: {found[0]}"
        for name, text in texts()
        for found in re.finditer(r"pip install [^`\n]*?moe-engine(?:\[[a-z0-9,-]+\])?(?! @ git\+)['\" `]", text)
    ]
    assert not wrong, "write pip install -e '.[EXTRA]', or 'moe-engine[EXTRA] @ git+ADDRESS'"


def test_an_extra_is_added_to_the_checkout_in_place() -> None:
    """Without -e pip replaces the installation of `make serve` by a copy, without benchmarks."""
    assert not [name for name, text in texts() if re.search(r"pip install '?\.\[", text)]


def test_extras_that_are_named_exist() -> None:
    known = extras()
    named = {
        (name, extra)
        for name, text in texts()
        for found in re.findall(r"pip install (?:-e )?'?(?:\.|moe-engine)\[([a-z0-9,-]+)\]", text)
        for extra in found.split(",")
    }
    assert named and not [(name, extra) for name, extra in named if extra not in known]


def test_a_missing_library_is_named_as_its_extra_names_it() -> None:
    known = {text for wanted in extras().values() for text in wanted}
    for library in LIBRARIES:
        found = re.search(r"pip install '([^']+)'", library.install)
        assert found is not None and str(Requirement(found[1])) in known, library.install
