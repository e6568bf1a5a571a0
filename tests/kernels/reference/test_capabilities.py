"""The optional parts of every row that can be built on a CPU, as docs/kernels.md lists them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from moe_engine.kernels import conformance, tables
from moe_engine.kernels.cpu.library import LibraryError
from moe_engine.kernels.quantization.codes import GroupCodes
from moe_engine.kernels.quantization.protocol import BlockFP8, RowFP8
from moe_engine.kernels.registry import Choice
from moe_engine.kernels.weight_forms import CODES, FOUR_BITS, FP8_BLOCKS, FP8_ROWS

FAMILIES = {
    "attention (MLA)": tables.MLA, "attention (GQA)": tables.GQA, "experts": tables.EXPERTS, "linear": tables.LINEAR,
    "ops": tables.OPS,
}  # fmt: skip


def listed() -> Iterator[tuple[str, str, set[str]]]:
    """(family, capability, rows) of the page's table."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "kernels.md").read_text()
    for family, capability, rows in re.findall(
        r"^\| ([a-z]+(?: \((?:MLA|GQA)\))?) \| `(\w+)`: [^|]*\| ([^|]*) \|$", page, re.M
    ):
        yield family, capability, set(re.findall(r"`(\w+)`", rows))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["torch", "cpu", "triton"])
def test_the_page_lists_what_a_row_can_do(family: str, name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    row = next(row for row in FAMILIES[family] if row.name == name)
    try:
        built = Choice(family, row, "test").build()
    except LibraryError as error:
        pytest.skip(f"no CPU library here: {error}")
    record = built.capabilities
    if family in ("linear", "experts"):
        forms = {BlockFP8: {FP8_BLOCKS}, RowFP8: {FP8_ROWS}, GroupCodes: {CODES, FOUR_BITS}}
        assert {kind for kind in forms if forms[kind] & row.multiplies} == forms.keys() & set(record.quantized)
    able = {field.name for field in fields(record) if getattr(record, field.name)}
    found = list(listed())
    assert found and {capability for _, capability, _ in found} >= {field.name for field in fields(record)}
    kinds = {family, "attention"} if family.startswith("attention") else {family}
    assert able == {capability for kind, capability, rows in found if kind in kinds and name in rows}


def test_the_page_lists_every_row_of_every_family() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "kernels.md").read_text()
    table = page.partition("| family | verbs |")[2].partition("| family | capability |")[0]
    cells = {line.split(" | ")[0].strip("| "): line.rpartition(" | ")[2] for line in table.splitlines()}
    cells["mla"], cells["gqa"] = cells.pop("attention").split("GQA:")
    for family, rows in tables.FAMILIES.items():
        assert {row.name for row in rows} == set(re.findall(r"`(\w+)`", cells[family])), family


def test_the_types_of_every_row_are_checked() -> None:
    text = Path(conformance.__file__).read_text()
    rows = [row for rows in tables.FAMILIES.values() for row in rows]
    assert [row.target for row in rows if f"{row.target.rpartition(':')[2]}()" not in text] == []
