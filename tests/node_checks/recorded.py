"""Texts of tools on a healthy node of 8 H200, in the formats that NVIDIA and Linux document, and parts of them changed.

No machine was recorded: the layouts are those of ``nvidia-smi -q -x``, ``nvidia-smi topo`` and sysfs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_engine.cli.node_checks.sources import Node

NUM_GPUS = 8
DRIVER = "580.95.05"

_GPU = """  <gpu id="00000000:{number:02X}:00.0">
    <product_name>NVIDIA H200</product_name>
    <persistence_mode>Enabled</persistence_mode>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
    <fabric><state>Completed</state><status>Success</status><cliqueId>0</cliqueId></fabric>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
      <clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
      <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
    </clocks_event_reasons>
    <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
    <ecc_errors>
      <volatile>
        <sram_correctable>0</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
        <dram_correctable>3</dram_correctable>
        <dram_uncorrectable>0</dram_uncorrectable>
      </volatile>
      <aggregate><dram_uncorrectable>2</dram_uncorrectable></aggregate>
    </ecc_errors>
    <remapped_rows>
      <remapped_row_corr>0</remapped_row_corr>
      <remapped_row_unc>2</remapped_row_unc>
      <remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
  </gpu>
"""


def smi() -> str:
    gpus = "".join(_GPU.format(number=number + 1) for number in range(NUM_GPUS))
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"  <driver_version>{DRIVER}</driver_version>\n  <cuda_version>13.0</cuda_version>\n"
        f"  <attached_gpus>{NUM_GPUS}</attached_gpus>\n{gpus}</nvidia_smi_log>\n"
    )


def table(cell: Callable[[int, int], str], adapters: int, near: str = "PIX", styled: bool = True) -> str:
    """``nvidia-smi topo``: GPUs, then adapters; the heading is underlined. Each GPU is near the adapter of its
    number."""
    names = [f"GPU{i}" for i in range(NUM_GPUS)] + [f"NIC{i}" for i in range(adapters)]
    head = "\t".join(f"\x1b[4m{name}" if styled else name for name in names)
    lines = [f"\t{head}\tCPU Affinity\tNUMA Affinity\x1b[0m" if styled else f"\t{head}"]
    for row, name in enumerate(names):
        cells = []
        for column in range(len(names)):
            if row == column:
                cells.append(" X ")
            elif max(row, column) < NUM_GPUS:
                cells.append(cell(row, column))
            else:
                cells.append(near if row % NUM_GPUS == column % NUM_GPUS else "SYS")
        lines.append("\t".join([name, *cells, "0-47", "0"]))
    legend = ["", "Legend:", "", "  X    = Self", "  PIX  = Connection traversing at most a single PCIe bridge"]
    return "\n".join([*lines, *legend, *(f"  NIC{i}: mlx5_{i}" for i in range(adapters))])


PORT = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}

HEALTHY = Node(
    texts={
        "smi": smi(),
        "topology": table(lambda a, b: "NV18", 8),
        "peers": table(lambda a, b: "OK", 0, styled=False),
        "fabric_manager": "active\n",
        "fabric_manager_version": f"Fabric Manager version is : {DRIVER}\n",
        "kernel_log": "[ 12.1] NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n"
        "[ 99.0] NVRM: Xid (PCI:0000:01:00): 31, pid=77, name=python, Ch 00000008\n",
        "modules": "nvidia_peermem 16384 0 - Live 0x0\nnvidia 62914560 9 nvidia_peermem, Live 0x0\nmlx5_ib 4505 0 -\n",
        "driver": f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build",
        "parameters": 'ResmanDebugLevel: 4294967295\nRegistryDwords: "PeerMappingOverride=1;"\n',
        "kernel": "5.15.0-1054",
        "governor": "performance",
    },
    ports={f"mlx5_{i}/1": PORT for i in range(8)},
    devices=frozenset({"/dev/nvidia-nvswitchctl"}),
    shared_bytes=64 << 30,
    versions={"torch": "2.14.1+cu130", "triton": "3.8.0"},
    pins={"torch": "2.14.1", "triton": "3.8.0", "sgl-deep-gemm": "0.2.5"},
)


def with_text(name: str, change: Callable[[str], str]) -> Node:
    text = HEALTHY.texts[name]
    assert isinstance(text, str)
    changed = change(text)
    assert changed != text
    return replace(HEALTHY, texts={**HEALTHY.texts, name: changed})


def with_smi(old: str, new: str) -> Node:
    """The first GPU differs."""
    return with_text("smi", lambda text: text.replace(old, new, 1))
