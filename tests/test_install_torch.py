"""The build of torch that `make` installs. A stand-in for the environment's Python records pip's arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then [ -n "$INSTALLED" ] && echo "$INSTALLED"; exit; fi
echo "$@" >> "$ASKED"
case "$*" in *"$REFUSED"*) exit 1;; esac
"""
VERSION = next(
    line.removeprefix("torch==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.startswith("torch==")
)


def installed(
    folder: Path,
    *arguments: str,
    driver: bool = False,
    before: str = "",
    refused: str = "nothing",
    system: str = "Linux",
) -> tuple[list[str], str]:
    """The packages that pip was called with, and the output."""
    programs = folder / "bin"
    programs.mkdir()
    asked, driver_file = folder / "asked", folder / "driver"
    for name, text in {
        "python": PYTHON,
        "uname": f"#!/bin/sh\necho {system}\n",
        "nvidia-smi": "#!/bin/sh\nexit 9\n",  # as with its package installed but no driver
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    if driver:
        driver_file.touch()
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}", "ASKED": str(asked), "INSTALLED": before, "REFUSED": refused,
        "DRIVER_FILES": str(driver_file),
    }  # fmt: skip
    command = ["sh", "tools/install_torch.sh", "python", "constraints.txt", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return asked.read_text().splitlines() if asked.exists() else [], done.stdout


def test_without_a_driver_it_is_the_cpu_build(tmp_path: Path) -> None:
    (asked,), said = installed(tmp_path)
    assert asked.endswith(f" torch=={VERSION}+cpu") and "uv" not in asked
    assert "no NVIDIA driver" in said and "200 MB" in said


def test_with_a_driver_it_is_that_of_the_package_index(tmp_path: Path) -> None:
    (asked,), said = installed(tmp_path, driver=True)
    assert asked.endswith("-c constraints.txt torch") and "--index-url" not in asked
    assert "NVIDIA driver" in said and "3 GB" in said


def test_the_package_index_of_other_systems_has_cpu_builds(tmp_path: Path) -> None:
    (asked,), _ = installed(tmp_path, system="Darwin")
    assert asked.endswith("-c constraints.txt torch")


def test_uv_knows_where_cpu_builds_are(tmp_path: Path) -> None:
    (first, second, third), said = installed(tmp_path, refused="+cpu")
    assert "+cpu" in first and second.endswith(" uv")
    assert "-m uv pip install" in third and "--torch-backend=cpu" in third and third.endswith(f"torch=={VERSION}")
    assert "3 GB" not in said


def test_where_no_cpu_build_is_found_the_size_is_said_first(tmp_path: Path) -> None:
    asked, said = installed(tmp_path, refused="qq")
    assert "+cpu" in asked[0] and asked[1].endswith(" uv") and asked[2].endswith("-c constraints.txt torch")
    assert "3 GB" in said and "PIP_FIND_LINKS" in said and "PIP_EXTRA_INDEX_URL" in said


def test_arguments_of_the_user_come_first(tmp_path: Path) -> None:
    wanted = ["torch==2.12.0", "--index-url", "https://example.org/whl/cu126"]
    (asked,), _ = installed(tmp_path, *wanted, before=VERSION)
    assert asked.endswith(" ".join(wanted))


@pytest.mark.parametrize("build", ["", "+cpu", "+cu126"])
def test_the_build_that_was_chosen_stays(tmp_path: Path, build: str) -> None:
    assert installed(tmp_path, before=VERSION + build)[0] == []


def test_another_version_is_replaced(tmp_path: Path) -> None:
    assert len(installed(tmp_path, before="2.11.0+cpu")[0]) == 1
