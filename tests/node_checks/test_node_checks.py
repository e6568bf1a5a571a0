"""Checks of GPU nodes on texts in the formats of their tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from moe_engine.cli.node_checks import sources
from moe_engine.cli.node_checks.links import matrix
from moe_engine.cli.node_checks.node import check_node
from moe_engine.cli.node_checks.sources import Absent, Node, read_node
from tests.node_checks.recorded import HEALTHY, PORT, table, with_smi, with_text

ALL = (
    "GPUs", "driver", "MIG", "ECC", "memory rows", "persistence", "clocks", "Xid", "NVLink", "peer access",
    "fabric manager", "near adapter", "adapters", "rates", "locked memory", "peer memory", "GIN, IBGDA", "/dev/shm",
    "CPU clocks", "versions",
)  # fmt: skip


def statuses(node: Node) -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, check.text) for check in check_node(node)}


def test_a_healthy_node() -> None:
    """Corrected errors, remapped rows, the power limit and Xids of programs are no problems."""
    found = statuses(HEALTHY)
    assert tuple(found) == ALL and {status for status, _ in found.values()} == {"ok"}, found
    assert found["NVLink"][1] == "NV18 between all GPUs" and found["GPUs"][1] == "8 x NVIDIA H200"
    assert found["rates"][1] == "400 Gb/sec on each of 8 ports"


def ports(**changed: str) -> Node:
    return replace(HEALTHY, ports={**HEALTHY.ports, "mlx5_3/1": {**PORT, **changed}})


def linked(cell: Callable[[int, int], str]) -> Node:
    return with_text("topology", lambda _: table(cell, 8))


OLD = with_text("smi", lambda text: text.replace("580.95.05", "570.12.01"))
OLD = replace(OLD, texts={**OLD.texts, "fabric_manager_version": "Fabric Manager version is : 570.12.01"})
NO_WAY = replace(HEALTHY, texts={**HEALTHY.texts, "modules": "nvidia 1 0 -", "kernel": "5.4.0-42"})
PROBLEMS: list[tuple[str, Node, str]] = [
    ("GPUs", with_smi("NVIDIA H200", "NVIDIA H100 80GB HBM3"), "7 x NVIDIA H200"),
    ("GPUs", with_text("smi", lambda text: text[:100]), "nvidia-smi -q -x"),
    ("driver", OLD, "too old for torch's CUDA 13"),
    ("MIG", with_smi("<current_mig>Disabled", "<current_mig>Enabled"), "GPU 0"),
    ("ECC", with_smi("<dram_uncorrectable>0", "<dram_uncorrectable>4"), "GPU 0 dram_uncorrectable 4"),
    ("ECC", with_smi("<current_ecc>Enabled", "<current_ecc>Disabled"), "disabled on GPU 0"),
    ("memory rows", with_smi("failure>No", "failure>Yes"), "failed on GPU 0"),
    ("memory rows", with_smi("pending>No", "pending>Yes"), "pending on GPU 0"),
    ("persistence", with_smi("<persistence_mode>Enabled", "<persistence_mode>Disabled"), "off on GPU 0"),
    ("clocks", with_smi("thermal_slowdown>Not Active", "thermal_slowdown>Active"), "GPU 0 hw_thermal_slowdown"),
    ("Xid", with_text("kernel_log", lambda log: log + "NVRM: Xid (PCI:0000:0f:00): 79, GPU has fallen off the bus.\n"),
     "79 on 0000:0f:00 (1 times)"),
    ("NVLink", linked(lambda a, b: "SYS" if {a, b} == {1, 5} else "NV18"), "GPU1-GPU5 SYS"),
    ("NVLink", linked(lambda a, b: "NV12" if 3 in (a, b) else "NV18"), "NV12, NV18"),
    ("peer access", with_text("peers", lambda _: table(lambda a, b: "CNS" if 7 in (a, b) else "OK", 0)), "and 3 more"),
    ("fabric manager", with_smi("<state>Completed", "<state>In Progress"), "GPU 0 In Progress"),
    ("fabric manager", with_text("fabric_manager_version", lambda _: "Fabric Manager version is : 575.7"), "575.7"),
    ("near adapter", with_text("topology", lambda _: table(lambda a, b: "NV18", 8, near="NODE")), "through the CPU"),
    ("adapters", ports(state="1: DOWN"), "mlx5_3/1 1: DOWN"),
    ("rates", ports(rate="200 Gb/sec (4X HDR)"), "mlx5_3/1 200 Gb/sec"),
    ("locked memory", replace(HEALTHY, locked_bytes=64 << 10), "at most 64 KiB"),
    ("peer memory", NO_WAY, "nvidia_peermem"),
    ("/dev/shm", replace(HEALTHY, shared_bytes=64 << 20), "0.1 GiB"),
    ("CPU clocks", with_text("governor", lambda _: "powersave"), "powersave"),
    ("versions", replace(HEALTHY, versions={"torch": "2.13.0+cu130"}), "torch 2.13.0+cu130 instead of 2.14.1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "node", "part"), PROBLEMS, ids=[f"{name}: {part}" for name, _, part in PROBLEMS])
def test_one_fault_is_one_problem_with_its_fix(name: str, node: Node, part: str) -> None:
    found = [check for check in check_node(node) if check.status == "problem"]
    assert [check.name for check in found] == [name]
    assert part in found[0].text and found[0].fix and found[0].sentence.startswith(f"{name}: ")


def test_what_cannot_be_read_is_skipped_with_the_reason() -> None:
    absent = {name: Absent(f"no {name}") for name in HEALTHY.texts if name != "smi"}
    found = statuses(replace(HEALTHY, texts={**absent, "smi": HEALTHY.texts["smi"]}, ports={}, pins={}))
    assert {status for status, _ in found.values()} == {"ok", "skipped"}
    assert found["Xid"] == ("skipped", "no kernel_log") and found["adapters"] == ("skipped", "no RDMA adapter")
    assert found["NVLink"] == ("skipped", "no topology") and found["fabric manager"][0] == "ok"


def test_other_ways_to_the_same_end() -> None:
    """DMA-BUF instead of the module, GDRCopy instead of the parameter, one GPU, no NVLink at all."""
    texts = {**HEALTHY.texts, "modules": "nvidia 1 0 -", "parameters": 'RegistryDwords: ""'}
    found = statuses(replace(HEALTHY, texts=texts, devices=frozenset({"/dev/gdrdrv"})))
    assert found["peer memory"] == ("ok", "DMA-BUF (open driver, Linux 5.15.0-1054)")
    assert found["GIN, IBGDA"] == ("ok", "GDRCopy's module gdrdrv is loaded")
    assert statuses(replace(HEALTHY, texts=texts, devices=frozenset()))["GIN, IBGDA"][0] == "skipped"
    found = statuses(with_text("topology", lambda _: table(lambda a, b: "PHB", 8)))
    assert found["NVLink"][0] == "skipped" and "--disable-custom-all-reduce" in found["NVLink"][1]
    one = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n\nLegend:\n"
    assert statuses(with_text("topology", lambda _: one))["NVLink"] == ("skipped", "one GPU")


def test_tables_end_before_their_legend() -> None:
    cells = matrix(table(lambda a, b: f"NV{a + b}", 2))
    assert len(cells) == 100 and cells["GPU2", "GPU5"] == "NV7" and cells["GPU1", "NIC1"] == "PIX"
    assert cells["NIC0", "NIC0"] == "X"


def test_a_node_without_gpus_runs_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.shutil, "which", lambda name: None)
    monkeypatch.setattr(sources.subprocess, "run", lambda *args, **more: pytest.fail("a program ran"))
    checks = check_node()
    assert [(check.name, check.status) for check in checks] == [("GPUs", "skipped")]
    assert checks[0].text == "nvidia-smi is not installed"


def test_programs_that_fail_or_hang(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(sources, "SECONDS", 0.2)
    found = [sources._run(("sh", "-c", script)) for script in ("echo out; exit 3", "echo why >&2; exit 4", "sleep 60")]
    assert found[0] == "out\n" and found[1] == Absent("sh -c echo why >&2; exit 4: why")
    assert found[2] == Absent("sh -c sleep 60: no answer within 0.2 s")
    assert isinstance(sources._read(str(tmp_path / "none")), Absent)


def test_pins_are_those_of_the_checkout() -> None:
    assert read_node().pins["triton"].count(".") == 2 and "nvidia-cuda-nvcc" not in sources._pins()
