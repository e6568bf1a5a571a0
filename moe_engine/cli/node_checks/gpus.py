"""Checks of GPUs and driver, from ``nvidia-smi -q -x`` and the kernel's log."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from xml.etree import ElementTree

from moe_engine.cli.node_checks.check import Check, ok, problem, skipped
from moe_engine.cli.node_checks.sources import Absent, Text

LEAST_DRIVER = {12: 525, 13: 580}
"""Lowest driver branch by major version of CUDA (minor versions are compatible)."""

SLOW = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Reasons for low clocks that a healthy idle or busy GPU does not have; names of elements of -q -x end with them."""

APPLICATION = {13, 31, 43, 45, 68, 69}
"""Xids caused by a program. All others come from the GPU, its links or its driver."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")


class SmiError(ValueError):
    """The output of nvidia-smi is not the XML of ``-q -x``."""


class Gpus:
    """Parsed ``nvidia-smi -q -x``. Elements that a driver does not report are not checked."""

    def __init__(self, text: str) -> None:
        try:
            self.root = ElementTree.fromstring(text)
        except ElementTree.ParseError as error:
            raise SmiError(f"nvidia-smi -q -x: {error}") from error
        self.each = self.root.findall("gpu")

    def values(self, path: str) -> dict[str, str]:
        """The text of an element of each GPU, by GPU number; GPUs without the element, or with N/A, are omitted."""
        found = {}
        for number, gpu in enumerate(self.each):
            value = (gpu.findtext(path) or "").strip()
            if value and value not in ("N/A", "[N/A]"):
                found[f"GPU {number}"] = value
        return found

    def of(self, path: str) -> str:
        return (self.root.findtext(path) or "").strip()


def check_gpus(smi: Text, versions: Mapping[str, str]) -> list[Check]:
    """All checks of this file except the kernel's log."""
    if isinstance(smi, Absent):
        return [skipped("GPUs", smi.reason)]
    try:
        gpus = Gpus(smi)
    except SmiError as error:
        return [problem("GPUs", str(error), "run nvidia-smi -q -x; see the kernel's log for the driver's errors")]
    if not gpus.each:
        return [problem("GPUs", "the driver reports no GPU", "see lines with Xid or NVRM in dmesg")]
    names = Counter(gpus.values("product_name").values())
    listed = ", ".join(f"{count} x {name}" for name, count in names.items())
    found = [ok("GPUs", listed)] if len(names) <= 1 else [problem("GPUs", listed, "serve on GPUs of one kind")]
    checks = (_driver(gpus, versions), _mig(gpus), _ecc(gpus), _rows(gpus), _persistence(gpus), _clocks(gpus))
    return found + [check for check in checks if check is not None]


def _driver(gpus: Gpus, versions: Mapping[str, str]) -> Check | None:
    driver = gpus.of("driver_version")
    branch = driver.partition(".")[0]
    if not branch.isdigit():
        return None
    torch = re.search(r"\+cu(\d\d)\d*$", versions.get("torch", ""))
    if torch is None:
        return skipped("driver", f"{driver}; torch for CUDA is not installed")
    cuda = int(torch[1])
    least = LEAST_DRIVER.get(cuda)
    if least is not None and int(branch) < least:
        return problem("driver", f"{driver} is too old for torch's CUDA {cuda}", f"install driver {least} or later")
    return ok("driver", f"{driver}, torch is built for CUDA {cuda}")


def _mig(gpus: Gpus) -> Check | None:
    modes = gpus.values("mig_mode/current_mig")
    enabled = [gpu for gpu, mode in modes.items() if mode == "Enabled"]
    if enabled:
        fix = "nvidia-smi -mig 0 on idle GPUs; instances have neither peer access nor NVLink"
        return problem("MIG", f"enabled on {', '.join(enabled)}", fix)
    return ok("MIG", "disabled") if modes else None


def _ecc(gpus: Gpus) -> Check | None:
    modes = gpus.values("ecc_mode/current_ecc")
    wrong = []
    for gpu, element in enumerate(gpus.each):
        errors = element.find("ecc_errors/volatile")
        for error in [] if errors is None else errors:
            if "uncorrectable" in error.tag and (error.text or "").strip().isdigit() and int(error.text or 0):
                wrong.append(f"GPU {gpu} {error.tag} {(error.text or '').strip()}")
    if wrong:
        return problem("ECC", f"uncorrected errors since the driver was loaded: {', '.join(wrong)}", "reset the GPU")
    off = [gpu for gpu, mode in modes.items() if mode == "Disabled"]
    if off:
        return problem("ECC", f"disabled on {', '.join(off)}", "nvidia-smi -e 1, then reboot")
    return ok("ECC", "enabled, no uncorrected errors") if modes else None


def _rows(gpus: Gpus) -> Check | None:
    pending = [gpu for gpu, text in gpus.values("remapped_rows/remapped_row_pending").items() if text == "Yes"]
    failures = gpus.values("remapped_rows/remapped_row_failure")
    failed = [gpu for gpu, text in failures.items() if text == "Yes"]
    if failed:
        return problem("memory rows", f"remapping failed on {', '.join(failed)}", "replace the GPU")
    if pending:
        return problem("memory rows", f"a remapping is pending on {', '.join(pending)}", "reset the GPU")
    return ok("memory rows", "none failed or pending") if failures else None


def _persistence(gpus: Gpus) -> Check | None:
    modes = gpus.values("persistence_mode")
    off = [gpu for gpu, mode in modes.items() if mode == "Disabled"]
    if off:
        text = f"off on {', '.join(off)}: the driver unloads between programs, and each start takes seconds longer"
        return problem("persistence", text, "start nvidia-persistenced, or nvidia-smi -pm 1")
    return ok("persistence", "on") if modes else None


def _clocks(gpus: Gpus) -> Check | None:
    slow, seen = [], False
    for number, gpu in enumerate(gpus.each):
        for name in ("clocks_event_reasons", "clocks_throttle_reasons"):
            reasons = gpu.find(name)
            for reason in [] if reasons is None else reasons:
                kind = next((kind for kind in SLOW if reason.tag.endswith(f"_reason_{kind}")), None)
                seen = seen or kind is not None
                if kind and (reason.text or "").strip() == "Active":
                    slow.append(f"GPU {number} {kind}")
    if slow:
        return problem("clocks", f"reduced: {', '.join(slow)}", "check cooling and power supply of the node")
    return ok("clocks", "not reduced by heat or power supply") if seen else None


def check_kernel_log(log: Text) -> Check:
    """Errors of GPUs since the node was started."""
    if isinstance(log, Absent):
        return skipped("Xid", log.reason)
    counts = Counter((gpu, int(code)) for gpu, code in _XID.findall(log) if int(code) not in APPLICATION)
    if counts:
        listed = ", ".join(f"{code} on {gpu} ({count} times)" for (gpu, code), count in sorted(counts.items()))
        return problem("Xid", listed, "look the numbers up in NVIDIA's Xid catalog; reset or replace the GPU")
    return ok("Xid", "no errors of GPUs in the kernel's log")
