"""The place of this process in a cluster launch, from the environment of a SLURM step or of torchrun.

Sources: srun(1), "OUTPUT ENVIRONMENT VARIABLES"; scontrol(1), "show hostnames"; the head of torch/distributed/run.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moe_engine.errors import ConfigError

FIRST_PORT, NUM_PORTS = 20000, 10000
"""Below Linux's ephemeral ports (from 32768)."""
STEP_STRIDE, RESTART_STRIDE = 701, 5003
"""Primes: each step and restart of a job gets its own port, and jobs with consecutive ids never share one."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step ids from here on are not steps of tasks: the batch script, an interactive shell, the external step."""
MOST_HOSTS = 65536

_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)


@dataclass(frozen=True)
class ClusterPlace:
    """The place of this process among the processes of its launcher.

    If a launcher starts several tasks on a node, the task with `local_rank` 0 starts the node's ranks; the others
    should log that they are not needed and exit with code 0.

    Args:
        leader_address: ``host:port`` where node 0 listens; None with a single node, which needs none.
        origin: for messages: ``SLURM_* of job 123``, ``torchrun's environment``.
        hosts: the nodes' names by node rank, if the launcher provides them; else empty.
    """

    num_nodes: int
    node_rank: int
    leader_address: str | None
    local_rank: int
    origin: str
    hosts: tuple[str, ...] = ()

    @property
    def node_variable(self) -> str:
        """The variable that `node_rank` comes from."""
        return "SLURM_NODEID" if self.origin.startswith("SLURM") else "GROUP_RANK"


def find_place(environ: Mapping[str, str]) -> ClusterPlace | None:
    """The place from the environment, or None without a launcher.

    torchrun takes precedence over SLURM, as it runs inside a step if both are set. Of SLURM only steps with tasks of
    ``srun`` count: in a batch script, ``salloc``'s shell or ``srun --pty`` users start processes by hand.

    Raises:
        ConfigError: a variable is missing, malformed or contradicts another; names it.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _torchrun(environ)
    step = environ.get("SLURM_STEP_ID")
    if step is None or "SLURM_PROCID" not in environ or "SLURM_PTY_PORT" in environ:
        return None
    return _slurm(environ) if _integer(environ, "SLURM_STEP_ID") < FIRST_SPECIAL_STEP else None


def _slurm(environ: Mapping[str, str]) -> ClusterPlace:
    job = _integer(environ, "SLURM_JOB_ID")
    count = _first_of(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    num_nodes, node_rank = _integer(environ, count, least=1), _integer(environ, "SLURM_NODEID")
    _check_below("SLURM_NODEID", node_rank, count, num_nodes)
    origin = f"SLURM_* of job {job}"
    local_rank = _integer(environ, "SLURM_LOCALID")
    hosts = _first_of(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    names = expand_node_list(environ[hosts], hosts)
    if len(names) != num_nodes:
        raise ConfigError(f"{hosts}={environ[hosts]} names {len(names)} nodes, but {count}={num_nodes}")
    if num_nodes == 1:
        return ClusterPlace(1, 0, None, local_rank, origin, names)
    step, restarts = _integer(environ, "SLURM_STEP_ID"), _integer(environ, "SLURM_RESTART_COUNT", default=0)
    port = FIRST_PORT + (job + STEP_STRIDE * step + RESTART_STRIDE * restarts) % NUM_PORTS
    if environ.get("MASTER_PORT"):
        port = _port(environ)
    address = _address(environ.get("MASTER_ADDR") or names[0], port)
    return ClusterPlace(num_nodes, node_rank, address, local_rank, origin, names)


def _torchrun(environ: Mapping[str, str]) -> ClusterPlace:
    ranks, per_node = _integer(environ, "WORLD_SIZE", least=1), _integer(environ, "LOCAL_WORLD_SIZE", least=1)
    if ranks % per_node:
        raise ConfigError(
            f"WORLD_SIZE={ranks} is not a multiple of LOCAL_WORLD_SIZE={per_node}: start as many ranks on every node"
        )
    num_nodes, node_rank = ranks // per_node, _integer(environ, "GROUP_RANK")
    _check_below("GROUP_RANK", node_rank, "WORLD_SIZE / LOCAL_WORLD_SIZE", num_nodes)
    local_rank = _integer(environ, "LOCAL_RANK")
    _check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", per_node)
    address = None
    if num_nodes > 1:
        host, port = environ[_first_of(environ, "MASTER_ADDR")], _port(environ)
        # torchrun's own store may listen on MASTER_PORT itself
        address = _address(host, port + 1 if port < 65535 else port - 1)
    return ClusterPlace(num_nodes, node_rank, address, local_rank, "torchrun's environment")


# -- node lists


def expand_node_list(text: str, variable: str) -> tuple[str, ...]:
    """The hosts of a SLURM node list, in its order: ``node[1-2,07],login`` gives node1, node2, node07 and login.

    A host may have several brackets (``rack[1-2]node[01-02]``); the last one varies fastest. Leading zeros of a range's
    start set the width.

    Raises:
        ConfigError: the list is malformed or longer than `MOST_HOSTS`; names `variable`.
    """
    names: list[str] = []
    for item in _split(text, variable):
        parts = [_alternatives(part, text, variable) for part in re.split(r"(\[[^]]*\])", item) if part]
        names += map("".join, itertools.islice(itertools.product(*parts), MOST_HOSTS + 1))
        if not item or len(names) > MOST_HOSTS:
            raise _malformed(text, variable)
    return tuple(names)


def _split(text: str, variable: str) -> Iterator[str]:
    """Splits at the commas outside brackets."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _malformed(text, variable)
        if character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise _malformed(text, variable)
    yield text[start:]


def _alternatives(part: str, text: str, variable: str) -> list[str]:
    """The expansions of one part of a name: itself, or the items of its bracket."""
    if not part.startswith("["):
        if not _HOST.fullmatch(part):
            raise _malformed(text, variable)
        return [part]
    found: list[str] = []
    for item in part[1:-1].split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _malformed(text, variable)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MOST_HOSTS - len(found):
            raise _malformed(text, variable)
        found += (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return found


def _malformed(text: str, variable: str) -> ConfigError:
    shown = text if len(text) < 200 else f"{text[:200]}..."
    return ConfigError(f"{variable}={shown!r} is not a node list such as node[1-3,7],gpu-[01-04]")


# -- values


def _first_of(environ: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environ.get(name):
            return name
    raise ConfigError(f"{names[0]} is not set, though the rest of its launcher's environment is")


def _integer(environ: Mapping[str, str], name: str, least: int = 0, default: int | None = None) -> int:
    text = environ.get(name) if default is not None else environ[_first_of(environ, name)]
    if not text and default is not None:
        return default
    assert text is not None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) >= least):
        raise ConfigError(f"{name}={text!r} is not a whole number from {least} up")
    return int(text)


def _port(environ: Mapping[str, str]) -> int:
    port = _integer(environ, "MASTER_PORT", least=1)
    if port > 65535:
        raise ConfigError(f"MASTER_PORT={port} is not a port: must be at most 65535")
    return port


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise ConfigError(f"{name}={value} does not fit {limit_name}={limit}: it counts from 0")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
