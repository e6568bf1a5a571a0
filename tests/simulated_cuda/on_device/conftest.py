"""Collects the tests of this folder only in a process with simulated devices; see `test_on_device.py`."""

from __future__ import annotations

from tests.simulated_cuda import install

collect_ignore_glob = [] if install.installed() else ["test_*.py"]
