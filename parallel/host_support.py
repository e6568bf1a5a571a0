"""Availability of shared memory between ranks of this host. Imports no torch: used in launch planning."""

from __future__ import annotations

import os
import platform

FOLDER = "/dev/shm"


def why_not() -> str | None:
    """The reason why ranks of this host cannot share memory, or None."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"needs x86-64, with ordered stores; this is {platform.machine()}"
    if not os.access(FOLDER, os.W_OK):
        return f"{FOLDER} cannot be written"
    return None
