"""Head widths: a backend without kernels for a model's widths is refused before loading, with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_engine.kernels import tables
from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.vendors.fa3 import FA3GQA, FA3MLA
from moe_engine.kernels.attention.vendors.flashinfer_gqa import FlashInferGQA
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
from moe_engine.kernels.attention.vendors.flashmla import FlashMLA
from moe_engine.kernels.device import Device, HeadWidths, Need
from moe_engine.kernels.registry import Row, select
from moe_engine.models.config import GQAConfig, MLAConfig
from moe_engine.models.needs import head_widths
from tests.kernels.cpu.formulas import filled_cache, normal, paged_queries
from tests.kernels.vendors import fa3_emulator, flash_mla_emulator, flashinfer_emulator

pytestmark = pytest.mark.usefixtures("everything_installed")
HOPPER = Device("cuda", "GPU 9", (9, 0))
V3 = HeadWidths(128, 1, 192, 128, 512, 64)
LLAMA = HeadWidths(32, 8, 128, 128)
BF16 = torch.bfloat16

# (table, row, change of supported widths, part of the refusal)
REFUSED: list[tuple[str, str, dict[str, int], str]] = [
    ("mla", "flashinfer", {"latent": 320}, "latents of 128 n"),
    ("mla", "flashinfer", {"rotary": 32}, "rotary widths of 64 n"),
    ("mla", "flashinfer", {"key": 160}, "keys of 160 and values of 128"),
    ("mla", "flashinfer", {"value": 192}, "keys of 192 and values of 192"),
    ("mla", "flashmla", {"latent": 256}, r"not 256\+64"),
    ("mla", "flashmla", {"rotary": 32}, r"not 512\+32"),
    ("mla", "fa3", {"latent": 128}, "a latent of 128"),
    ("mla", "fa3", {"rotary": 128}, "128 rotary channels"),
    ("mla", "fa3", {"latent": 1024}, "a latent of 1024"),
    ("mla", "fa3", {"key": 264, "value": 264}, "keys of 264"),
    ("mla", "fa3", {"value": 64}, "keys of 192 and values of 64"),
    ("gqa", "flashinfer", {"key": 96, "value": 96}, "heads of 96"),
    ("gqa", "fa3", {"key": 320, "value": 320}, "keys of 320"),
    ("gqa", "fa3", {"key": 100, "value": 100}, "keys of 100"),
    ("gqa", "fa3", {"key": 192}, "of one width, not 192 and 128"),
    ("gqa", "flashinfer", {"key": 192}, "of one width, not 192 and 128"),
]


def rows(table: str) -> list[Row]:
    return {"mla": tables.MLA, "gqa": tables.GQA}[table]


def need(table: str, **changes: Any) -> Need:
    return Need("bfloat16", attention=table, page_size=64, widths=replace(V3 if table == "mla" else LLAMA, **changes))


@pytest.mark.parametrize("table,row,changes,words", REFUSED)
def test_widths_are_refused_with_the_reason(table: str, row: str, changes: dict[str, int], words: str) -> None:
    assert select("attention", rows(table), row, HOPPER, need(table)).row.name == row
    with pytest.raises(ValueError, match=f"{row!r} cannot run here.*{words}"):
        select("attention", rows(table), row, HOPPER, need(table, **changes))
    assert select("attention", rows(table), "auto", HOPPER, need(table, **changes)).row.name != row


def test_flashmla_reads_fp8_records_for_128_heads_at_most() -> None:
    many = replace(need("mla", heads=192), kv_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match="at most 128 query heads, not 192"):
        select("attention", tables.MLA, "flashmla", HOPPER, many)
    assert select("attention", tables.MLA, "flashmla", HOPPER, need("mla", heads=192)).row.name == "flashmla"


def test_widths_that_are_not_known_refuse_nothing() -> None:
    for table in ("mla", "gqa"):
        unknown = replace(need(table), widths=None)
        for row in rows(table):
            if row.name in ("flashinfer", "flashmla", "fa3"):
                assert row.why_not(HOPPER, unknown) is None


@pytest.mark.parametrize("table,row,changes,words", [r for r in REFUSED if {"latent", "rotary"} & set(r[2])])
def test_calls_are_refused_by_the_same_rule(table: str, row: str, changes: dict[str, int], words: str) -> None:
    backend: Any = {
        "flashinfer": lambda: FlashInferMLA(flashinfer_emulator.module()),
        "flashmla": lambda: FlashMLA(flash_mla_emulator.module(), expanded=TorchMLA()),
        "fa3": lambda: FA3MLA(fa3_emulator.module()),
    }[row]()
    widths = replace(V3, **changes)
    queries, size = paged_queries([(1, 5)], 64)
    width = widths.latent + widths.rotary
    cache = filled_cache(queries, size, width, dtype=BF16)
    with pytest.raises(ValueError, match=words):
        backend.absorbed(normal(1, 2, width, dtype=BF16), cache, queries, 1.0, None, widths.latent)


@pytest.mark.parametrize("make,width", [(FlashInferGQA, 96), (FA3GQA, 100), (FA3GQA, 264)])
def test_gqa_calls_are_refused_by_the_same_rule(make: Any, width: int) -> None:
    module = flashinfer_emulator.module() if make is FlashInferGQA else fa3_emulator.module()
    queries, size = paged_queries([(1, 5)], 16)
    keys, values = (filled_cache(queries, size, 2, width, dtype=BF16) for _ in "kv")
    with pytest.raises(ValueError, match=f"of {width}"):
        make(module).paged(normal(1, 4, width, dtype=BF16), keys, values, queries, 1.0, None)


@pytest.mark.parametrize("widths", [(192, 128), (128, 128), (64, 64), (256, 256), (96, 96), (160, 128), (192, 192)])
def test_the_rules_are_those_of_the_libraries(widths: tuple[int, int]) -> None:
    """The expanded form of both, against emulators written from the libraries' sources."""
    key, value = widths
    queries, _ = paged_queries([(2, 5)], 16)
    q, kv, rope = (normal(*shape, dtype=BF16) for shape in ((2, 2, key), (5, 2, key - 32 + value), (5, 32)))
    for row, backend in (
        ("flashinfer", FlashInferMLA(flashinfer_emulator.module())),
        ("fa3", FA3MLA(fa3_emulator.module())),
    ):
        reason = next(r for r in tables.MLA if r.name == row).why_not(HOPPER, need("mla", key=key, value=value))
        if reason is None:
            assert backend.expanded(q, kv, rope, queries, 1.0, None).shape == (2, 2, value)
        else:
            with pytest.raises(ValueError, match=f"keys of {key} and values of {value}"):
                backend.expanded(q, kv, rope, queries, 1.0, None)


def test_widths_of_models() -> None:
    class Model:
        attention: Any = MLAConfig(16, None, 512, 128, 64, 96)

        @property
        def attentions(self) -> tuple[Any, ...]:
            return (self.attention,)

    assert head_widths(Model()) == HeadWidths(16, 1, 192, 96, 512, 64)  # type: ignore[arg-type]
    Model.attention = GQAConfig(32, 4, 80)
    assert head_widths(Model()) == HeadWidths(32, 4, 80, 80)  # type: ignore[arg-type]
    assert head_widths(Model()).result == 80  # type: ignore[arg-type]
