"""The memory of published models in docs/models.md equals the engine's plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.model_memory import rows

PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
TOLERANCE = 0.05
"""Relative tolerance of KV tokens: small changes of the ledger need no new table."""


def numbers(row: str) -> tuple[float, int, float]:
    """(GiB of weights, KV bytes of a token, thousands of KV tokens) of a row."""
    weights, per_token, tokens = (cell.strip().replace(",", "") for cell in row.strip("|").split("|")[2:5])
    return float(weights), int(per_token), float(tokens.split(" thousand")[0])


def test_the_table_of_memory_is_current():
    pytest.importorskip("triton")
    page = PAGE.read_text()
    documented = {tuple(line.split("|")[1:3]): line for line in page.splitlines() if " thousand" in line}
    planned = list(rows())
    assert len(documented) == len(planned) > 10
    for row in planned:
        weights, per_token, tokens = numbers(documented[tuple(row.split("|")[1:3])])
        expected = numbers(row)
        update = f"{row}: print the table by `python -m tests.config.model_memory`"
        assert (weights, per_token) == (pytest.approx(expected[0], abs=0.2), expected[1]), update
        assert tokens == pytest.approx(expected[2], rel=TOLERANCE), update
