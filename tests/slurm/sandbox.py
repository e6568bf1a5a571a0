"""A real SLURM with separate hosts on this machine (`slurm-sandbox`), for tests. Every call has a time limit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOL = Path(__file__).with_name("slurm-sandbox")
SCRIPTS = Path(__file__).resolve().parents[2] / "slurm"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nft", "unshare", "nsenter")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY"}


def why_not() -> str | None:
    """The reason why no sandbox can run here; None if one can."""
    if os.getuid() != 0:
        return "a SLURM of one's own needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages: see the head of {TOOL.name})"
    namespaces = ["unshare", "--net", "--mount", "--uts", "--pid", "--ipc", "--fork", "true"]
    if subprocess.run(namespaces, capture_output=True, timeout=60).returncode:
        return "this machine does not allow namespaces"
    return None


LOG_SECONDS = 180.0
"""Time limit for a line of a log."""


class Sandbox:
    """`nodes` hosts node1, node2, ... with one fake GPU each; jobs write their logs to `folder`.

    This SLURM needs a minute to detect a lost node; most clusters need longer. With a shorter limit it loses nodes of a
    busy machine.
    """

    def __init__(self, nodes: int) -> None:
        self._state = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: a socket's path contains it
        self._state.chmod(0o755)  # required by munged
        self.folder = self._state / "jobs"
        self.folder.mkdir()
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "MOE_ENGINE": str(Path(sys.executable).with_name("moe-engine")),
            "PYTHON": sys.executable,
            "STEP_GRACE": "1",
        }
        settings = ("-o", "SlurmdTimeout=60", "-o", "MessageTimeout=30", "-o", "KillWait=30")
        try:
            self._tool("start", "-n", str(nodes), "-g", "1", *settings)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._tool("stop")
        shutil.rmtree(self._state, ignore_errors=True)

    def kill_node(self, host: str) -> None:
        self._tool("kill-node", host)

    def cut(self, host: str, other: str) -> None:
        self._tool("cut", host, other)

    def heal(self) -> None:
        self._tool("heal")

    def run(self, *command: str, host: str = "ctl", seconds: float = 60.0) -> str:
        """The standard output of a command on a host; a failure fails the test."""
        return self._tool("exec", host, "--", *command, seconds=seconds)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Like `run` on ctl, in the background."""
        full = [str(TOOL), "exec", str(self._state), "--", *command]
        return subprocess.Popen(full, stdout=subprocess.PIPE, text=True, env=self._environ, cwd=self.folder)

    def _tool(self, verb: str, *rest: str, seconds: float = 120.0) -> str:
        command = [str(TOOL), verb, str(self._state), *rest]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=self._environ, cwd=self.folder
        )
        assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    # -- jobs

    def submit(self, script: str, *arguments: str, nodes: int, **variables: str) -> Job:
        """Args: variables: environment variables."""
        gres = () if script == "smoke.sbatch" else ("--gres=gpu:1",)
        setting = ("env", *(f"{name}={value}" for name, value in variables.items()))
        command = ["sbatch", "--parsable", f"--nodes={nodes}", *gres, str(SCRIPTS / script), *arguments]
        return Job(self, int(self.run(*setting, *command)))


class Job:
    def __init__(self, sandbox: Sandbox, number: int) -> None:
        self._sandbox, self.number = sandbox, number

    def facts(self) -> dict[str, str]:
        """SLURM's record: JobState, ExitCode, Restarts, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self._sandbox.run("scontrol", "show", "job", str(self.number))))

    @property
    def log(self) -> str:
        files = list(self._sandbox.folder.glob(f"*-{self.number}.log"))
        return files[0].read_text() if files else ""

    def cancel(self) -> None:
        self._sandbox.run("scancel", str(self.number))

    def until_logged(self, text: str, times: int = 1) -> None:
        deadline = time.monotonic() + LOG_SECONDS
        while self.log.count(text) < times:
            state = self.facts()["JobState"]
            assert state not in ENDED, f"the job is {state}, and {text!r} was never logged:\n{self.log}"
            assert time.monotonic() < deadline, f"{text!r} was not logged within {LOG_SECONDS:g} s:\n{self.log}"
            time.sleep(0.1)

    def until(self, seconds: float = 180.0, **expected: str) -> dict[str, str]:
        """Waits until SLURM's record has the values, of which several may be given as ``A|B``; returns it."""
        deadline = time.monotonic() + seconds
        while True:
            facts = self.facts()
            if all(facts.get(name) in value.split("|") for name, value in expected.items()):
                return facts
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {expected}: {facts}\n{self.log}"
            time.sleep(0.1)

    def ended(self, seconds: float = 180.0) -> dict[str, str]:
        return self.until(seconds, JobState="|".join(ENDED))
