"""The job scripts in bash with stand-ins for srun, scontrol and the program: detected programs, output and arguments.

Tests under a real SLURM: test_serve.py and test_smoke.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "slurm"
NAMES = ("serve.sbatch", "bench.sbatch", "smoke.sbatch")

SRUN = """#!/bin/bash
echo "srun $*" >> "$LOG"
while [[ "$1" == --* ]]; do shift; done
for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || code=$?; done
exit "${code:-0}"
"""
SCONTROL = """#!/bin/bash
case "$*" in
  "show job"*) echo "   Command=$JOB_SCRIPT" ; echo "   Requeue=${REQUEUE:-0}" ;;
  "requeue "*) echo "scontrol $*" >> "$LOG"; exit 1 ;;
  "show hostnames"*) printf 'node%s\n' 1 2 3 4 ;;
  "show config") echo "SlurmdPort = 6818" ;;
esac
"""
PROGRAM = """#!/bin/bash
if [ "$1 $2 ${!#}" = "bench serving --check" ]; then
  if [ -n "$NO_HTTPX" ]; then echo "ModuleNotFoundError: No module named 'httpx'" >&2; exit 1; fi
  if [[ "$*" == *WRONG* ]]; then echo "error: wrong options: $*" >&2; exit 2; fi
  exit 0
fi
echo "program $0 node $SLURM_NODEID secret ${MOE_ENGINE_DIST_SECRET:-none}: $*" >> "$LOG"
exit "${PROGRAM_CODE:-0}"
"""


class Shell:
    """A folder with the scripts beside a checkout, and a PATH with stand-ins for SLURM's programs."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin, self.log = folder / "checkout", folder / "bin", folder / "log"
        shutil.copytree(SCRIPTS, self.checkout / "slurm")
        self.log.write_text("")
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", "#!/bin/bash\n")):
            self.program(self.bin / name, text)
        self.environ = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(folder),
            "LOG": str(self.log),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURMD_NODENAME": "node1",
        }

    def program(self, path: Path, text: str = PROGRAM) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command, variables = self._command(script, arguments, environ)
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)

    def start(self, script: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        command, variables = self._command(script, arguments, environ)
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)

    def _command(
        self, script: str, arguments: tuple[str, ...], environ: dict[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        path = self.checkout / "slurm" / script
        return ["bash", str(path), *arguments], {**self.environ, "JOB_SCRIPT": str(path), **environ}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.parametrize("script", NAMES)
def test_without_the_program_one_line_says_what_to_do(shell: Shell, script: str) -> None:
    done = shell.run(script)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "no moe-engine in" in line and "make serve" in line and "MOE_ENGINE=" in line
    assert shell.log.read_text() == ""  # no step was started
    assert shell.run(script, MOE_ENGINE="/no/such/program").returncode == 2


@pytest.mark.parametrize("script", ["serve.sbatch", "smoke.sbatch"])
@pytest.mark.parametrize("place", ["beside", "virtual environment", "PATH", "named"])
def test_the_program_is_found(shell: Shell, tmp_path: Path, script: str, place: str) -> None:
    environ = {}
    if place == "beside":
        expected = shell.program(shell.checkout / ".venv/bin/moe-engine")
        shell.program(shell.bin / "moe-engine")
    elif place == "virtual environment":
        expected = shell.program(tmp_path / "env/bin/moe-engine")
        environ["VIRTUAL_ENV"] = str(tmp_path / "env")
    elif place == "named":
        expected = shell.program(tmp_path / "else/moe-engine")
        environ["MOE_ENGINE"] = str(expected)
        shell.program(shell.bin / "moe-engine")
    else:
        expected = shell.program(shell.bin / "moe-engine")
    done = shell.run(script, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"program {expected} node 0" in shell.log.read_text()


def test_all_tasks_of_a_job_get_one_secret_that_no_command_line_shows(shell: Shell) -> None:
    shell.program(shell.bin / "moe-engine")
    secrets = []
    for _ in range(2):
        shell.log.write_text("")
        done = shell.run("serve.sbatch")
        assert done.returncode == 0, done.stdout + done.stderr
        log = shell.log.read_text()
        found = re.findall(r"program .* node (\d) secret (\w+):", log)
        assert [node for node, _ in found] == ["0", "1"] and found[0][1] == found[1][1]
        secret = found[0][1]
        assert re.fullmatch("[0-9a-f]{64}", secret)
        (step,) = re.findall("^srun .*", log, re.M)
        assert secret not in step + done.stdout + done.stderr
        assert not any(secret in file.read_text() for file in shell.checkout.rglob("*") if file.is_file())
        secrets.append(secret)
    assert secrets[0] != secrets[1]


@pytest.mark.parametrize(
    ("code", "restarts", "requeue", "again"),
    [(1, 0, 1, True), (1, 1, 1, False), (1, 0, 0, False), (2, 0, 1, False), (0, 0, 1, False)],
    ids=["failure", "limit of restarts", "--no-requeue", "wrong flags", "success"],
)
def test_a_failed_server_is_requeued_up_to_the_limit(
    shell: Shell, code: int, restarts: int, requeue: int, again: bool
) -> None:
    shell.program(shell.bin / "moe-engine")
    environ = {"PROGRAM_CODE": code, "SLURM_RESTART_COUNT": restarts, "REQUEUE": requeue, "MAX_RESTARTS": 1}
    done = shell.run("serve.sbatch", **{name: str(value) for name, value in environ.items()})
    assert done.returncode == code, done.stdout + done.stderr
    assert ("scontrol requeue 7" in shell.log.read_text()) == again
    assert ("back to the queue, restart 1 of 1" in done.stdout) == again


ROUTER = """#!/bin/bash
echo "router $*" >> "$LOG"
[ "$1" = --help ] || sleep "${ROUTER_SECONDS:-30}"
"""


def test_replicas_share_the_nodes_behind_a_router(shell: Shell) -> None:
    shell.program(shell.bin / "moe-engine", PROGRAM.replace('exit "${PROGRAM_CODE:-0}"', "sleep 2"))
    router = shell.program(shell.bin / "router", ROUTER)
    environ = {"REPLICAS": "2", "SLURM_JOB_NUM_NODES": "4", "ROUTER": str(router), "RANKS_PER_NODE": "8"}
    done = shell.run("serve.sbatch", "--model-path", "M", **environ, ROUTER_SECONDS="1")
    assert done.returncode == 1 and "the router ended" in done.stdout, done.stdout + done.stderr
    log = shell.log.read_text()
    steps = re.findall("^srun .*", log, re.M)
    assert {re.search("--nodelist=(\\S+)", step)[1] for step in steps} == {"node1,node2", "node3,node4"}  # type: ignore[index]
    assert all("--port 30001 --tp-size 16 --attn-dp-size 16" in step and "--model-path M" in step for step in steps)
    assert "--worker-urls http://node1:30001 http://node3:30001" in log
    assert "--disable-circuit-breaker --policy cache_aware" in log


@pytest.mark.parametrize(("code", "starts"), [(1, 3), (2, 1)])
def test_failed_replicas_are_started_again_up_to_the_limit(shell: Shell, code: int, starts: int) -> None:
    shell.program(shell.bin / "moe-engine")
    router = shell.program(shell.bin / "router", ROUTER)
    environ = {"REPLICAS": "2", "ROUTER": str(router), "MAX_RESTARTS": "2", "RESTART_PAUSE": "0.1"}
    done = shell.run("serve.sbatch", **environ, PROGRAM_CODE=str(code))
    assert done.returncode == code, done.stdout + done.stderr
    assert len(re.findall("^srun .*nodelist=node1 ", shell.log.read_text(), re.M)) == starts


def test_a_stopped_job_starts_no_replica_again(shell: Shell) -> None:
    """The signal arrives while failed replicas wait for their restart."""
    shell.program(shell.bin / "moe-engine")
    router = shell.program(shell.bin / "router", ROUTER)
    environ = {"REPLICAS": "2", "ROUTER": str(router), "RESTART_PAUSE": "6", "PROGRAM_CODE": "1"}
    with shell.start("serve.sbatch", **environ) as job:
        assert job.stdout is not None
        ended = [line for line in (job.stdout.readline() for _ in range(3)) if "ended with exit code 1" in line]
        job.terminate()
        assert len(ended) == 2 and job.wait(240) == 0, job.stdout.read()
    assert len(re.findall("^srun ", shell.log.read_text(), re.M)) == 2


def test_replicas_that_cannot_start_are_explained(shell: Shell) -> None:
    shell.program(shell.bin / "moe-engine")
    router = shell.program(shell.bin / "router", ROUTER)
    done = shell.run("serve.sbatch", REPLICAS="3", ROUTER=str(router))
    assert done.returncode == 2 and "2 nodes cannot be divided" in done.stderr
    done = shell.run("serve.sbatch", REPLICAS="2", ROUTER="/no/router")
    assert done.returncode == 2 and "pip install -e '.[router]'" in done.stderr


def test_preset_secret_is_kept(shell: Shell) -> None:
    shell.program(shell.bin / "moe-engine")
    shell.run("smoke.sbatch", MOE_ENGINE_DIST_SECRET="set-by-the-user")
    assert "secret set-by-the-user:" in shell.log.read_text()


def test_the_benchmark_looks_for_what_it_needs_before_it_starts_a_server(shell: Shell) -> None:
    shell.program(shell.bin / "moe-engine")
    done = shell.run("bench.sbatch", "--", "--num-prompts", "1", NO_HTTPX="1")
    assert done.returncode == 2 and shell.log.read_text() == ""
    assert "No module named 'httpx'" in done.stdout
    done = shell.run("bench.sbatch", "--model-path", "M", "--", "--goodput", "WRONG")
    assert done.returncode == 2 and shell.log.read_text() == ""
    assert f"wrong options: bench serving --port 30000 --output-file {shell.log.parent}" in done.stdout
    assert "--goodput WRONG --check" in done.stdout


def test_the_python_of_a_program_on_the_path_is_the_one_it_names(shell: Shell, tmp_path: Path) -> None:
    python = shell.program(tmp_path / "env/bin/python3", "#!/bin/bash\n")
    shell.program(shell.bin / "moe-engine", f"#!{python}\n")
    command = f"REPOSITORY={shell.checkout}; source {shell.checkout}/slurm/env.sh && echo $PYTHON"
    done = subprocess.run(["bash", "-c", command], env=shell.environ, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == str(python), done.stderr


def test_the_scripts_are_syntactically_right() -> None:
    for file in SCRIPTS.iterdir():
        if file.suffix in (".sh", ".sbatch"):
            done = subprocess.run(
                ["bash", "-n", str(file)], capture_output=True, text=True, timeout=240, env=os.environ
            )
            assert done.returncode == 0, done.stderr
