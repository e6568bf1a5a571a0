"""Checks of RDMA adapters and of their path to GPU memory, from sysfs and the kernel's modules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from moe_engine.cli.node_checks.check import Check, ok, problem, skipped
from moe_engine.cli.node_checks.sources import Absent, Node

FIRST_DMA_BUF = (5, 12)
"""Linux version from which RDMA of device memory needs no module in addition to an open driver."""


def check_adapters(node: Node) -> list[Check]:
    """The ports, then the further requirements of several nodes; without adapters no further checks."""
    if not node.ports:
        reason = "no RDMA adapter"
        return [skipped("adapters", reason)]
    return [_ports(node.ports), _rates(node.ports), _locked(node), _peer_memory(node), _doorbell(node)]


def _ports(ports: Mapping[str, Mapping[str, str]]) -> Check:
    down = [f"{port} {own.get('state', 'unknown')}" for port, own in ports.items() if not _active(own)]
    if down:
        fix = "check cable, switch and subnet manager; exclude unused ports by HCA in slurm/env.sh"
        return problem("adapters", f"not active: {', '.join(down)}", fix)
    layers = Counter(own.get("link_layer", "unknown") for own in ports.values())
    return ok("adapters", ", ".join(f"{count} active ({layer})" for layer, count in layers.items()))


def _active(port: Mapping[str, str]) -> bool:
    return port.get("state", "").endswith("ACTIVE")


def _rates(ports: Mapping[str, Mapping[str, str]]) -> Check:
    rates = {port: own["rate"] for port, own in ports.items() if _active(own) and "rate" in own}
    if not rates:
        return skipped("rates", "no active port")
    highest = max(map(_gigabits, rates.values()))
    slower = [f"{port} {rate}" for port, rate in rates.items() if _gigabits(rate) < highest]
    if slower:
        text = f"{', '.join(slower)}; others have {highest:g} Gb/sec"
        return problem("rates", text, "check cable and port setting, or exclude them by HCA")
    return ok("rates", f"{highest:g} Gb/sec on each of {len(rates)} ports")


def _gigabits(rate: str) -> float:
    number = re.match(r"[\d.]+", rate)
    return float(number[0]) if number else 0.0


def _locked(node: Node) -> Check:
    if node.locked_bytes is None:
        return ok("locked memory", "unlimited")
    fix = "ulimit -l unlimited (limits.conf; SLURM: PropagateResourceLimitsExcept=MEMLOCK; --ulimit memlock=-1)"
    return problem("locked memory", f"at most {node.locked_bytes >> 10} KiB, which RDMA buffers exceed", fix)


def _modules(node: Node) -> set[str] | None:
    text = node.text("modules")
    return None if isinstance(text, Absent) else {line.split()[0] for line in text.splitlines() if line.split()}


def _peer_memory(node: Node) -> Check:
    modules, driver = _modules(node), node.text("driver")
    if modules is None or isinstance(driver, Absent):
        return skipped("peer memory", driver.reason if isinstance(driver, Absent) else "/proc/modules is missing")
    if "nvidia_peermem" in modules:
        return ok("peer memory", "nvidia_peermem is loaded")
    kernel = node.text("kernel")
    version = re.match(r"(\d+)\.(\d+)", kernel) if isinstance(kernel, str) else None
    has_dma_buf = version is not None and (int(version[1]), int(version[2])) >= FIRST_DMA_BUF
    if has_dma_buf and "Open Kernel Module" in driver:
        return ok("peer memory", f"DMA-BUF (open driver, Linux {kernel})")
    text = "neither nvidia_peermem nor DMA-BUF: messages between nodes are copied through host memory"
    return problem("peer memory", text, "modprobe nvidia_peermem")


def _doorbell(node: Node) -> Check:
    """For DeepEP between nodes only: the GPU itself rings the adapter's doorbell."""
    parameters, name = node.text("parameters"), "GIN, IBGDA"
    if "/dev/gdrdrv" in node.devices:
        return ok(name, "GDRCopy's module gdrdrv is loaded")
    if isinstance(parameters, str) and "PeerMappingOverride=1" in parameters:
        return ok(name, "PeerMappingOverride=1")
    text = "neither PeerMappingOverride=1 nor gdrdrv: --moe-a2a-backend deepep works within this node only"
    return skipped(name, text)
