"""The chosen backend, the reasons for the others; the detected DeepEP; refusals of its kernels."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moe_engine.kernels.device import Device
from moe_engine.parallel import host_support
from moe_engine.parallel.collectives import SingleRank
from moe_engine.parallel.dispatch.build import Groups, build
from moe_engine.parallel.dispatch.deepep import expanded, legacy
from moe_engine.parallel.dispatch.deepep.generation import LOW_LATENCY_TOP_K, generation_of
from moe_engine.parallel.dispatch.exchanged import ExchangedDispatcher
from moe_engine.parallel.dispatch.protocol import DispatchShape
from moe_engine.parallel.dispatch.tables import MODES, ROWS, FixedSizes, Place, choose
from tests.distributed.dispatch import deepep_emulator as emulator

CPU, GPU = Device("cpu", "a CPU"), Device("cuda", "an H200", (9, 0))


def test_auto_takes_what_the_place_offers() -> None:
    taken = {
        place: choose(place).row.name
        for place in (
            Place(CPU, 1), Place(CPU, 4), Place(CPU, 4, 2), Place(CPU, 4, 4), Place(GPU, 8),
            Place(GPU, 16, 2), Place(GPU, 8, unlinked="no NVLink"), Place(GPU, 8, hidden=7172),
        )
    }  # fmt: skip
    shared = "all_to_all" if host_support.why_not() else "shared_memory"
    others = ["symm_mem", "two_hop", "all_to_all", "all_to_all"]
    assert list(taken.values()) == ["local", shared, "two_hop", "all_to_all", *others]


def test_ranks_without_each_others_memory_run_the_next_row(caplog: pytest.LogCaptureFixture) -> None:
    """Unless the row was named: that is an error on all ranks."""
    pytest.importorskip("triton", reason="needs triton")

    class Apart:
        def allocate(self, group: object, num_bytes: int) -> None:
            raise ValueError("rank 0: the ranks' GPUs cannot access each other's memory")

    memory: Any = Apart()
    shape, groups = replace(GOOD, num_ranks=1, fp8=False), Groups(SingleRank(), symm_mem=memory, on_host=False)
    chosen = choose(Place(GPU, 8, hidden=shape.hidden))
    made = build(chosen, shape, 8, groups)._by_phase
    assert all(isinstance(made[phase], ExchangedDispatcher) for phase in ("prefill", "decode"))
    assert "using all_to_all instead of symm_mem: rank 0: the ranks' GPUs" in caplog.text
    with pytest.raises(ValueError, match="cannot access each other's memory"):
        build(choose(Place(GPU, 8), "symm_mem"), shape, 8, groups)


@pytest.mark.parametrize("place", [Place(CPU, 1), Place(CPU, 4), Place(GPU, 16, 2), Place(CPU, 5, 2)])
def test_every_other_row_is_refused_with_a_reason(place: Place) -> None:
    choice = choose(place)
    assert set(choice.refused) == {row.name for row in ROWS} - {choice.row.name}
    assert all(choice.refused.values())


def test_phases_get_their_modes() -> None:
    place = Place(GPU, 4)
    assert choose(place, "all_to_all").modes == {"prefill": "normal", "decode": "low_latency"}
    assert choose(place, "all_to_all", "normal").modes == {"prefill": "normal", "decode": "normal"}
    assert choose(place, "all_to_all", "low_latency").modes == {"prefill": "low_latency", "decode": "low_latency"}
    assert choose(Place(CPU, 1)).modes == {"prefill": "normal", "decode": "normal"}


@pytest.mark.parametrize(
    ("place", "asked", "mode", "reason"),
    [
        (Place(CPU, 4), "deepep", "auto", "needs GPU memory; the device is cpu"),
        (Place(CPU, 4), "local", "auto", "4 ranks"),
        (Place(CPU, 1), "local", "low_latency", "has no low_latency mode"),
        (Place(CPU, 4, 2), "shared_memory", "auto", "2 nodes"),
        (Place(CPU, 4), "two_hop", "auto", "one node"),
        (Place(CPU, 4), "nvlink", "auto", "unknown dispatch backend 'nvlink'; known: local,"),
        (Place(CPU, 4), "auto", "fast", "unknown dispatch mode 'fast'; known: auto, normal, low_latency"),
    ],
)
def test_what_cannot_serve_is_an_error_with_the_reason(place: Place, asked: str, mode: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        choose(place, asked, mode)


def test_choosing_imports_no_vendor() -> None:
    choose(Place(GPU, 8))
    assert "deep_ep" not in sys.modules


def test_the_generation_is_told_by_attribute() -> None:
    buffer, elastic = emulator.Buffer, emulator.ElasticBuffer
    assert generation_of(emulator.module(buffer)) == "Buffer"
    assert generation_of(emulator.module(buffer, elastic)) == "ElasticBuffer"  # 2.1.0 has both
    assert generation_of(emulator.module(buffer, elastic), "1") == "Buffer"
    with pytest.raises(ValueError, match=r"--deepep-version 2: deep_ep has no ElasticBuffer"):
        generation_of(emulator.module(buffer), "2")
    with pytest.raises(ValueError, match="none of the known classes"):
        generation_of(ModuleType("deep_ep"))


GOOD = DispatchShape(256, 32, 8, 7168, 128, torch.bfloat16, fp8=True)


@pytest.mark.parametrize(
    ("why_not", "changed", "reason"),
    [
        (legacy.why_not_low_latency, {"hidden": 1024}, "hidden 1024"),
        (legacy.why_not_low_latency, {"top_k": 12}, "top-12"),
        (legacy.why_not_low_latency, {"max_tokens": 512}, "NVSHMEM"),
        (legacy.why_not_low_latency, {"dtype": torch.float16}, "bfloat16"),
        (legacy.why_not_normal, {"num_ranks": 1}, "1 ranks"),
        (legacy.why_not_normal, {"dtype": torch.float32}, "bfloat16"),
        (expanded.why_not, {"hidden": 384}, "multiple of 256"),
        (expanded.why_not, {"num_experts": 4096}, "4096 experts"),
        (expanded.why_not, {"num_ranks": 1, "num_experts": 512}, "512 experts of a rank"),
        (expanded.why_not, {"top_k": 33}, "33 top-k"),
    ],
)
def test_adapters_say_what_the_library_cannot_do(why_not: object, changed: dict[str, object], reason: str) -> None:
    assert why_not(GOOD) is None  # type: ignore[operator]
    assert reason in (why_not(replace(GOOD, **changed)) or "")  # type: ignore[operator, arg-type]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of an installed first DeepEP; with a folder `buffers` it has both."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "deep_ep"
    folder.mkdir()
    (folder / "__init__.py").touch()
    return folder


def test_choices_that_the_first_deepep_takes(installed: Path) -> None:
    """LongCat's top-12 is refused in low latency, before the start, and `auto` takes another backend."""
    allowed, many = Place(GPU, 8, top_k=LOW_LATENCY_TOP_K), Place(GPU, 8, top_k=LOW_LATENCY_TOP_K + 1)
    assert legacy.why_not_low_latency(replace(GOOD, top_k=allowed.top_k)) is None
    assert [choose(place, mode=mode).row.name for place in (allowed, many) for mode in ("auto", *MODES)] == [
        "deepep", "deepep", "deepep", "symm_mem", "deepep", "symm_mem",
    ]  # fmt: skip
    fixes = "top-11 in low latency, not top-12; use --deepep-mode normal or --moe-a2a-backend all_to_all"
    for mode in ("auto", "low_latency"):
        with pytest.raises(ValueError, match=fixes):
            choose(many, "deepep", mode)
    (installed / "buffers").mkdir()
    assert choose(many).row.name == "deepep"
    with pytest.raises(ValueError, match="use --deepep-version 2, --deepep-mode normal or"):
        choose(replace(many, deepep_version="1"), "deepep")


def test_hidden_sizes_that_deepep_takes(installed: Path) -> None:
    """Those of the adapters. gpt-oss has 2880 channels, Kimi Linear 2304."""
    for hidden, first, second in ((2880, False, False), (2304, False, True), (7168, True, True), (1536, False, True)):
        place, shape = Place(GPU, 8, deepep_version="1", hidden=hidden), replace(GOOD, hidden=hidden, fp8=False)
        assert (choose(place).row.name == "deepep") == (legacy.why_not_low_latency(shape) is None) == first
        assert choose(place, "deepep", "normal").row.name == "deepep" and legacy.why_not_normal(shape) is None
        (installed / "buffers").mkdir(exist_ok=True)
        newer = choose(replace(place, deepep_version="2"))
        assert (newer.row.name == "deepep") == (expanded.why_not(shape) is None) == second
    with pytest.raises(ValueError, match="not 2880; use --moe-a2a-backend all_to_all"):
        choose(Place(GPU, 8, hidden=2880), "deepep")
    with pytest.raises(ValueError, match="not 2880; use --deepep-mode normal or"):
        choose(Place(GPU, 8, deepep_version="1", hidden=2880), "deepep")
    with pytest.raises(ValueError, match="not 2304; use --deepep-version 2, --deepep-mode normal or"):
        choose(Place(GPU, 8, deepep_version="1", hidden=2304), "deepep")


def test_sizes_that_the_first_deepep_takes(installed: Path) -> None:
    """The same refusals as the adapter's, before the start."""
    row = next(row for row in ROWS if row.name == "deepep")
    for ranks in (1, 2, 3, 4, 8):
        sizes = row.fixed_sizes(Place(GPU, ranks))
        for tokens in (sizes.multiple, 8 * sizes.multiple, sizes.most or 0):
            whole = tokens - tokens % sizes.multiple
            shape = DispatchShape(8 * ranks, ranks, 8, 7168, whole, torch.bfloat16)
            assert legacy.why_not_low_latency(shape) is None
        assert sizes.most is not None
        more = DispatchShape(8 * ranks, ranks, 8, 7168, sizes.most + sizes.multiple, torch.bfloat16)
        assert legacy.why_not_low_latency(more) is not None
    (installed / "buffers").mkdir()
    assert row.fixed_sizes(Place(GPU, 2)) == FixedSizes()
    assert row.fixed_sizes(Place(GPU, 2, deepep_version="1")).multiple == 2
