"""`.ci/run` with stand-ins for the machine's programs: a failed install is an error, omissions are listed last."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = {
    "id": 'echo "${USER_ID:-0}"',
    "make": 'echo "make $*"; [ "$FAILS" != "$1" ] || exit 100',
    "apt-get": 'echo "apt-get $1" >&2; case "$FAILS" in "$1") exit 100;; esac\n'
    'if [ "$1" = install ]; then for p in slurmctld nft; do ln -sf true "${0%/*}/$p"; done; fi',
}


def ci(folder: Path, *, without: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    programs = folder / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "timeout", "ln", "true", "env"):
        (programs / name).symlink_to(shutil.which(name) or name)
    for name, body in PROGRAMS.items():
        if name not in without:
            (programs / name).write_text(f"#!/bin/sh\n{body}\n")
            (programs / name).chmod(0o755)
    (folder / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    environment = {"PATH": str(programs), "FAILS": "", **environment}
    return subprocess.run(["bash", script], env=environment, capture_output=True, text=True)


def test_tools_are_installed_where_they_can_be(tmp_path: Path) -> None:
    done = ci(tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("make test\n")
    assert "apt-get install" in done.stderr and "WARNING" not in done.stderr


@pytest.mark.parametrize(
    ("without", "environment"),
    [((), {"USER_ID": "1000"}), (("apt-get",), {}), ((), {"FAILS": "update"})],
    ids=["no root", "no apt", "no network"],
)
def test_what_is_left_out_is_said_at_the_end(
    tmp_path: Path, without: tuple[str, ...], environment: dict[str, str]
) -> None:
    done = ci(tmp_path, without=without, **environment)
    assert done.returncode == 0 and "make test" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("WARNING: tests under a real SLURM")


def test_an_install_that_fails_is_an_error(tmp_path: Path) -> None:
    done = ci(tmp_path, FAILS="install")
    assert done.returncode != 0 and "make test" not in done.stdout


def test_an_environment_that_fails_is_an_error(tmp_path: Path) -> None:
    done = ci(tmp_path, FAILS="environment")
    assert done.returncode == 100 and "make test" not in done.stdout
