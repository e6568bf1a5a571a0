"""Node and rank from SLURM's and torchrun's environments, including misleading ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError
from moe_engine.planning.inputs.cluster_env import ClusterPlace, expand_node_list, find_place

STEP = {  # variables of the last task of `srun --nodes=4 --ntasks-per-node=2`
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NODELIST": "node[1-6]",
    "SLURM_JOB_NUM_NODES": "6",
    "SLURM_NNODES": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[2-4,6]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NODEID": "3",
    "SLURM_PROCID": "7",
    "SLURM_LOCALID": "1",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "RANK": "13",
    "LOCAL_RANK": "5",
    "MASTER_ADDR": "node9",
    "MASTER_PORT": "29500",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_a_slurm_step():
    hosts = ("node2", "node3", "node4", "node6")
    assert find_place(STEP) == ClusterPlace(4, 3, "node2:20123", 1, "SLURM_* of job 123", hosts)


def test_a_step_of_one_node_needs_no_leader():
    one = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node5", "SLURM_NODEID": "0"}
    assert find_place(one) == ClusterPlace(1, 0, None, 1, "SLURM_* of job 123", ("node5",))


def test_torchrun_keeps_off_its_own_port():
    assert find_place(TORCHRUN) == ClusterPlace(2, 1, "node9:29501", 5, "torchrun's environment")
    last = find_place({**TORCHRUN, "MASTER_PORT": "65535", "MASTER_ADDR": "fe80::7"})
    assert last is not None and last.leader_address == "[fe80::7]:65534"


def test_torchrun_inside_a_step_is_the_nearer_launcher():
    assert find_place({**STEP, **TORCHRUN}) == find_place(TORCHRUN)


def test_torchrun_on_one_node():
    one = {**TORCHRUN, "WORLD_SIZE": "8", "GROUP_RANK": "0"}
    assert find_place(one) == ClusterPlace(1, 0, None, 5, "torchrun's environment")


@pytest.mark.parametrize(
    "environ",
    [
        {"PATH": "/usr/bin", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "WORLD_SIZE": "8"},
        without(STEP, "SLURM_STEP_ID"),  # the batch script
        without(STEP, "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"),  # salloc's shell
        {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFB)},  # the batch script's step id
        {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFA)},  # an interactive step
        {**STEP, "SLURM_PTY_PORT": "40001"},  # srun --pty bash
    ],
)
def test_launcher_shells_are_not_steps(environ):
    assert find_place(environ) is None


def test_the_user_may_name_the_meeting_point():
    place = find_place({**STEP, "MASTER_ADDR": "ib-node2", "MASTER_PORT": "4000"})
    assert place is not None and place.leader_address == "ib-node2:4000"
    host_only = find_place({**STEP, "MASTER_ADDR": "ib-node2"})
    assert host_only is not None and host_only.leader_address == "ib-node2:20123"


def test_ports_of_jobs_steps_and_restarts_differ():
    def port(job: int, step: int, restart: int) -> str | None:
        numbers = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_RESTART_COUNT": str(restart)}
        place = find_place({**STEP, **numbers})
        assert place is not None and place.leader_address is not None
        return place.leader_address

    ports = {port(5000 + job, step, restart) for job in range(500) for step in range(3) for restart in range(2)}
    assert len(ports) == 3000
    assert all(20000 <= int(address.rpartition(":")[2]) < 30000 for address in ports if address)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**STEP, "SLURM_NODEID": "4"}, "SLURM_NODEID=4 does not fit SLURM_STEP_NUM_NODES=4"),
        ({**STEP, "SLURM_NODEID": "x"}, "SLURM_NODEID='x' is not a whole number"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "0"}, "SLURM_STEP_NUM_NODES='0' is not a whole number from 1 up"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "5"}, "SLURM_STEP_NODELIST=node[2-4,6] names 4 nodes, but "),
        ({**STEP, "SLURM_STEP_NODELIST": "node[2-"}, "SLURM_STEP_NODELIST='node[2-' is not a node list"),
        (without(STEP, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (without(STEP, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "SLURM_STEP_NODELIST is not set"),
        ({**STEP, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({**STEP, "SLURM_JOB_ID": "\u0661"}, "SLURM_JOB_ID="),
        ({**TORCHRUN, "WORLD_SIZE": "12"}, "WORLD_SIZE=12 is not a multiple of LOCAL_WORLD_SIZE=8"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "GROUP_RANK=2 does not fit"),
        ({**TORCHRUN, "LOCAL_RANK": "8"}, "LOCAL_RANK=8 does not fit LOCAL_WORLD_SIZE=8"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set"),
    ],
)
def test_invalid_environment_is_named(environ, message):
    with pytest.raises(ConfigError) as error:
        find_place(environ)
    assert message in str(error.value)


# -- node lists


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", "login"),
        ("node[1-3,7],gpu-[01-04]", "node1 node2 node3 node7 gpu-01 gpu-02 gpu-03 gpu-04"),
        ("rack[1-2]node[09-10]", "rack1node09 rack1node10 rack2node09 rack2node10"),
        ("n[08-11],a.example.org", "n08 n09 n10 n11 a.example.org"),
        ("n[5,3]-ib", "n5-ib n3-ib"),
    ],
)
def test_node_lists(text, hosts):
    assert expand_node_list(text, "X") == tuple(hosts.split())


BROKEN = ["", "n1,,n2", "n[1", "n1]", "n[[1]]", "n[]", "n[1,]", "n[3-1]", "n[a-b]", "n[1-2-3]", "n 1", "n[1-99999999]"]


@pytest.mark.parametrize("text", [*BROKEN, "n[0-999][0-999]", "n[1-9999999999999]"])
def test_broken_node_lists(text):
    with pytest.raises(ConfigError, match=r"^SLURM_JOB_NODELIST="):
        expand_node_list(text, "SLURM_JOB_NODELIST")


@st.composite
def written_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A node list in SLURM's format, and its hosts by an independent construction."""
    items, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        texts, combined = [], [""]
        for _ in range(draw(st.integers(1, 2))):
            prefix = draw(st.from_regex(r"[a-z][a-z-]{0,3}", fullmatch=True))
            entries, numbers = [], []
            for _ in range(draw(st.integers(1, 3))):
                first, length, width = draw(st.integers(0, 120)), draw(st.integers(0, 12)), draw(st.integers(1, 4))
                text = str(first).zfill(width)
                entries.append(f"{text}-{first + length}" if length else text)
                numbers += [str(first + step).zfill(len(text)) for step in range(length + 1)]
            texts.append(f"{prefix}[{','.join(entries)}]")
            combined = [head + prefix + number for head in combined for number in numbers]
        items.append("".join(texts))
        hosts += combined
    return ",".join(items), hosts


@settings(max_examples=60, deadline=1000)
@given(written_lists())
def test_any_list_gives_back_its_hosts(written):
    text, hosts = written
    assert list(expand_node_list(text, "X")) == hosts


@settings(max_examples=200, deadline=1000)
@given(st.text("ab01[],-. ", max_size=14))
def test_any_text_gives_hosts_or_the_error_for_it(text):
    try:
        hosts = expand_node_list(text, "X")
    except ConfigError:
        return
    assert hosts and all(re.fullmatch(r"[ab01.-]+", host) for host in hosts)


@pytest.fixture(scope="module")
def scontrol_environ(tmp_path_factory):
    """The minimal configuration that scontrol needs to expand a node list, without a controller."""
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n")
    return {**os.environ, "SLURM_CONF": str(conf)}


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs SLURM's scontrol as the oracle")
@settings(max_examples=25, deadline=5000)
@given(written_lists())
def test_as_scontrol_reads_it(scontrol_environ, written):
    command = ["scontrol", "show", "hostnames", written[0]]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=10, env=scontrol_environ)
    assert shown.returncode == 0, shown.stderr
    assert list(expand_node_list(written[0], "X")) == shown.stdout.split()
