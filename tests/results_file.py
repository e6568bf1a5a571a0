"""``pytest --results FILE``: a line of JSON for each test as soon as it has ended, with the text of a failure.

A run that is cut keeps them, and the next one with this file leaves out the tests that have passed.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

MOST_TEXT = 3000
"""Last characters of a failure."""


def register(config: pytest.Config) -> None:
    if (path := config.getoption("results")) is not None:
        config.pluginmanager.register(Results(path))


class Results:
    """Writes in the process that reads the options; forked test processes send it their reports."""

    def __init__(self, path: Path) -> None:
        self._path, self._process = path, os.getpid()
        self._passed: set[str] = set()
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):  # the last line of a run may be cut
                found = json.loads(line)
                self._passed |= {found["test"]} if found["outcome"] == "passed" else set()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if done := [item for item in items if item.nodeid in self._passed]:
            items[:] = [item for item in items if item.nodeid not in self._passed]
            config.hook.pytest_deselected(items=done)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if os.getpid() != self._process or (report.when != "call" and report.outcome == "passed"):
            return
        line: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome != "passed":
            line["why"] = report.longreprtext[-MOST_TEXT:]
        with self._path.open("a") as file:
            file.write("\n" * (file.tell() > 0) + json.dumps(line))
