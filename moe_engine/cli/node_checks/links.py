"""Checks of links between GPUs, from ``nvidia-smi topo`` and the fabric manager."""

from __future__ import annotations

import re

from moe_engine.cli.node_checks.check import Check, ok, problem, skipped
from moe_engine.cli.node_checks.gpus import Gpus, SmiError
from moe_engine.cli.node_checks.sources import Absent, Node, Text

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
NEAR = ("PIX", "PXB")
"""Paths between a GPU and an adapter that cross PCIe bridges only."""


def matrix(text: str) -> dict[tuple[str, str], str]:
    """Cells of a table of ``nvidia-smi topo``, by row and column, between GPUs and adapters."""
    cells: dict[tuple[str, str], str] = {}
    columns: list[str] = []
    for line in _STYLE.sub("", text).splitlines():
        words = line.split()
        if not columns:
            columns = [word for word in words if re.fullmatch(r"(GPU|NIC|mlx5_)\d+", word)]
        elif words and words[0] in columns:
            cells.update({(words[0], column): cell for column, cell in zip(columns, words[1:])})
        elif not words and cells:
            break  # the legend follows
    return cells


def check_links(node: Node) -> list[Check]:
    return [_nvlink(node.text("topology")), _peers(node.text("peers")), _fabric(node), _near(node.text("topology"))]


def _pairs(cells: dict[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """Pairs of different GPUs, each once."""
    return {(a, b): cell for (a, b), cell in cells.items() if a[:3] == b[:3] == "GPU" and int(a[3:]) < int(b[3:])}


def _nvlink(topology: Text) -> Check:
    if isinstance(topology, Absent):
        return skipped("NVLink", topology.reason)
    pairs = _pairs(matrix(topology))
    if not pairs:
        return skipped("NVLink", "one GPU")
    without = [f"{a}-{b} {cell}" for (a, b), cell in pairs.items() if not cell.startswith("NV")]
    kinds = sorted(set(pairs.values()))
    if len(without) == len(pairs):
        return skipped("NVLink", f"none on this node ({', '.join(kinds)}); serve with --disable-custom-all-reduce")
    if without:
        return problem("NVLink", f"missing between {_few(without)}", "see Xid 74 in dmesg, and nvidia-smi nvlink -s")
    if len(kinds) > 1:
        return problem("NVLink", f"pairs have different numbers of links: {', '.join(kinds)}", "nvidia-smi nvlink -s")
    return ok("NVLink", f"{kinds[0]} between all GPUs")


def _peers(peers: Text) -> Check:
    if isinstance(peers, Absent):
        return skipped("peer access", peers.reason)
    pairs = _pairs(matrix(peers))
    if not pairs:
        return skipped("peer access", "one GPU")
    without = [f"{a}-{b} {cell}" for (a, b), cell in pairs.items() if cell != "OK"]
    if without:
        fix = "access control (ACS) of PCIe bridges, or a container without some of the GPUs"
        return problem("peer access", f"not between {_few(without)}", fix)
    return ok("peer access", "between all GPUs")


def _fabric(node: Node) -> Check:
    """State of NVSwitch: each GPU must have joined its fabric, by a manager of the driver's version."""
    name, smi = "fabric manager", node.text("smi")
    if isinstance(smi, Absent):
        return skipped(name, smi.reason)
    try:
        gpus = Gpus(smi)
    except SmiError as error:
        return skipped(name, str(error))
    states, results = gpus.values("fabric/state"), gpus.values("fabric/status")
    if not states and "/dev/nvidia-nvswitchctl" not in node.devices:
        return skipped(name, "no NVSwitch")
    wrong = [f"{gpu} {state}" for gpu, state in states.items() if state != "Completed"]
    joined = {gpu: result for gpu, result in results.items() if states.get(gpu) == "Completed"}
    wrong += [f"{gpu} {result}" for gpu, result in joined.items() if result != "Success"]
    active = node.text("fabric_manager")
    stopped = isinstance(active, str) and active.strip() != "active"
    if wrong:
        return problem(name, f"GPUs have not joined the fabric: {_few(wrong)}", _START)
    if stopped and not states:
        return problem(name, f"nvidia-fabricmanager is {str(active).strip()}", _START)
    version, driver = node.text("fabric_manager_version"), gpus.of("driver_version")
    own = re.search(r"(\d+\.\d+(?:\.\d+)?)", version) if isinstance(version, str) else None
    if own and driver and own[1] != driver:
        return problem(name, f"version {own[1]}, the driver has {driver}", "install the driver's version")
    return ok(name, "all GPUs have joined the fabric" if states else "active")


_START = "systemctl restart nvidia-fabricmanager; its version must equal the driver's"


def _near(topology: Text) -> Check:
    if isinstance(topology, Absent):
        return skipped("near adapter", topology.reason)
    cells = matrix(topology)
    adapters = {column for _, column in cells if not column.startswith("GPU")}
    if not adapters:
        return skipped("near adapter", "no RDMA adapter in the topology")
    gpus = sorted({row for row, _ in cells if row.startswith("GPU")}, key=lambda gpu: int(gpu[3:]))
    far = [gpu for gpu in gpus if not any(cells.get((gpu, adapter)) in NEAR for adapter in adapters)]
    if far:
        fix = "choose adapters by HCA in slurm/env.sh, or move them to the GPUs' PCIe switches"
        return problem("near adapter", f"{', '.join(far)} reach every adapter through the CPU", fix)
    return ok("near adapter", "each GPU has one behind its PCIe switch")


def _few(texts: list[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")
