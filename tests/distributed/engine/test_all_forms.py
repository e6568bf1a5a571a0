"""An interrupted run over all forms of parallelism: its results are kept, and the next run continues after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.engine import all_forms
from tests.distributed.engine.forms import Case, Outcome


class Forms:
    """Runs no engine; is interrupted at the third case."""

    def __init__(self, *args: Any) -> None:
        self.ran: list[Case] = []
        made.append(self)

    def run(self, case: Case) -> Outcome:
        self.ran.append(case)
        if len(made) == 1 and len(self.ran) == 3:
            raise KeyboardInterrupt
        if len(made) == 1 and len(self.ran) == 2:
            raise RuntimeError("no room")
        return Outcome({}, 0, 2, 1, 0, 0.0)


made: list[Forms] = []


def test_a_run_that_was_cut_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_forms, "Forms", Forms)
    path, only = tmp_path / "forms.json", ["--only", "ranks=2"]
    with pytest.raises(KeyboardInterrupt):
        all_forms.main([*only, "--json", str(path)])
    left = json.loads(path.read_text())
    assert [bool(result.get("failure")) for result in left["cases"]] == [False, True]
    assert all_forms.main([*only, "--resume", str(path)]) == 0
    whole = json.loads(path.read_text())
    assert len(whole["cases"]) == whole["planned"] == left["planned"] == len(made[1].ran) + 1
    assert made[0].ran[0] not in made[1].ran and made[0].ran[1] in made[1].ran
    assert [file.name for file in tmp_path.iterdir()] == ["forms.json"]
    with pytest.raises(SystemExit):
        all_forms.main(["--only", "ranks=4", "--resume", str(path)])
