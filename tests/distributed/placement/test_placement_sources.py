"""Every form of --init-expert-location, and the errors of invalid ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.policies import plan_placement
from moe_engine.parallel.placement.sources import from_any

LAYOUT = ExpertLayout(6, 2, 2)
COUNTS = np.random.default_rng(1).integers(0, 50, (5, 3, 6))  # [S, L, E]
TABLE = plan_placement(COUNTS, LAYOUT).physical_to_logical


def forms(folder, content):
    """The same content as tensors in .pt, lists in .json, and text."""
    lists = {name: np.asarray(value).tolist() for name, value in content.items()}
    (folder / "p.json").write_text(json.dumps(lists))
    torch.save({name: torch.from_numpy(np.array(value)) for name, value in content.items()}, folder / "p.pt")
    return [str(folder / "p.pt"), str(folder / "p.json"), json.dumps(lists)]


def test_trivial():
    assert from_any("trivial", LAYOUT, 3).physical_to_logical.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]] * 3


def test_maps_are_used_as_they_are(tmp_path):
    table = np.flip(TABLE, axis=1)
    for value in forms(tmp_path, {"physical_to_logical_map": table, "logical_count": COUNTS}):
        found = from_any(value, LAYOUT, 3)
        assert (found.physical_to_logical == table).all() and found.num_ranks == 2


@pytest.mark.parametrize("counts", [COUNTS, COUNTS.sum(0)])
def test_counts_are_planned(tmp_path, counts):
    for value in forms(tmp_path, {"logical_count": counts}):
        assert (from_any(value, LAYOUT, 3).physical_to_logical == TABLE).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("balanced", "give trivial, a .pt or .json file"),
        ("missing.pt", "missing.pt: No such file"),
        ("{bad", "--init-expert-location: not JSON"),
        ('{"counts": 1}', "neither physical_to_logical_map nor logical_count, but counts"),
        ('{"physical_to_logical_map": [[0, 1]]}', r"has shape \[1, 2\].*need \[3, 8\]"),
        (json.dumps({"physical_to_logical_map": [[0, 1, 2, 3, 4, 4, 0, 1]] * 3}), "layer 0 expert 5"),
        (json.dumps({"physical_to_logical_map": [[0, 1, 2, 3, 4, 5, 6, 1]] * 3}), "holds expert 6"),
        (json.dumps({"physical_to_logical_map": [[0, 1, 2, 3, 4, 5, -1, 1]] * 3}), "holds -1"),
        ('{"logical_count": [[1, 2], [3]]}', "unequal length"),
        ('{"logical_count": [[0.5]]}', "fractions"),
        ('{"logical_count": [["a"]]}', "table of numbers"),
        (json.dumps({"logical_count": [[1] * 6] * 2}), r"needed: \[3, 6\]"),
        (json.dumps({"logical_count": [[1] * 5] * 3}), r"\[layers, 6\]"),
        (json.dumps({"logical_count": [[-1] * 6] * 3}), "negative"),
    ],
)
def test_what_does_not_fit_is_named(value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        from_any(value, LAYOUT, 3)
    assert str(caught.value).startswith("--init-expert-location")


def test_files_that_are_no_dumps(tmp_path):
    for name, content in (("a.pt", b"not a dump"), ("b.pt", b""), ("c.json", b"[1]")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            from_any(str(path), LAYOUT, 3)


class Executed:
    def __reduce__(self):
        return (print, ("executed",))


def test_nothing_in_a_file_is_executed(tmp_path, capsys):
    torch.save({"logical_count": Executed()}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match=r"evil.pt: not a torch.save file of tensors"):
        from_any(str(tmp_path / "evil.pt"), LAYOUT, 3)
    assert "executed" not in capsys.readouterr().out
