"""All checks of a node."""

from __future__ import annotations

from collections.abc import Mapping

from moe_engine.cli.node_checks.adapters import check_adapters
from moe_engine.cli.node_checks.check import Check, ok, problem, skipped
from moe_engine.cli.node_checks.gpus import check_gpus, check_kernel_log
from moe_engine.cli.node_checks.links import check_links
from moe_engine.cli.node_checks.sources import Absent, Node, read_node

LEAST_SHARED_BYTES = 1 << 30
"""/dev/shm for NCCL's buffers between the ranks of a node, in addition to this engine's own."""

GOVERNORS = ("performance", "schedutil")


def check_node(node: Node | None = None) -> list[Check]:
    """Checks of a node, by default this one. Without nvidia-smi: one skipped check, and no checks of adapters."""
    node = read_node() if node is None else node
    smi = node.text("smi")
    if isinstance(smi, Absent):
        return [skipped("GPUs", smi.reason)]
    versions = node.versions or {}
    return [
        *check_gpus(smi, versions),
        check_kernel_log(node.text("kernel_log")),
        *check_links(node),
        *check_adapters(node),
        _shared(node),
        _governor(node),
        *_pins(versions, node.pins or {}),
    ]


def _shared(node: Node) -> Check:
    if node.shared_bytes is None:
        return skipped("/dev/shm", "there is none")
    size = f"{node.shared_bytes / 2**30:.1f} GiB"
    if node.shared_bytes < LEAST_SHARED_BYTES:
        fix = "start the container with --shm-size 8g or --ipc host"
        return problem("/dev/shm", f"{size}, too small for NCCL", fix)
    return ok("/dev/shm", size)


def _governor(node: Node) -> Check:
    text = node.text("governor")
    if isinstance(text, Absent):
        return skipped("CPU clocks", text.reason)
    if text not in GOVERNORS:
        fix = "cpupower frequency-set -g performance"
        return problem("CPU clocks", f"governor {text}: launches of steps slow down", fix)
    return ok("CPU clocks", f"governor {text}")


def _pins(versions: Mapping[str, str], pins: Mapping[str, str]) -> list[Check]:
    """Installed versions against the compatible ones."""
    if not pins:
        return [skipped("versions", "constraints-gpu.txt is not installed; it is in a source checkout")]
    other = [
        f"{name} {versions[name]} instead of {pin}"
        for name, pin in pins.items()
        if name in versions and versions[name].partition("+")[0] != pin
    ]
    if other:
        fix = "pip install -c constraints-gpu.txt -e '.[gpu]'"
        return [problem("versions", ", ".join(other), fix)]
    present = [name for name in pins if name in versions]
    return [ok("versions", f"as in constraints-gpu.txt: {', '.join(present) or 'none is installed'}")]
