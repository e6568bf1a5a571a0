"""The selected vendor rows, and the reasons for others: by capability and installed libraries, without imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_engine.cli import doctor_libraries
from moe_engine.kernels import tables
from moe_engine.kernels.device import Device, HeadWidths, IndexWidths, Need
from moe_engine.kernels.registry import select
from moe_engine.kernels.triton import availability
from moe_engine.kernels.vendors import probe
from moe_engine.kernels.vendors.probe import DEEP_GEMM, FA3, FLASH_MLA, FLASHINFER, LIBRARIES, accepts

HOPPER, BLACKWELL, AMPERE = (Device("cuda", f"GPU {major}", (major, 0)) for major in (9, 10, 8))
CPU = Device("cpu", "test")
BF16 = Need("bfloat16", page_size=64)
TABLES = {"linear": tables.LINEAR, "experts": tables.EXPERTS, "mla": tables.MLA, "gqa": tables.GQA}
VENDOR_ROWS = {"deep_gemm", "flashinfer", "flashmla", "fa3", "trtllm_mla"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder whose modules can be imported, and are forgotten afterwards: an imported module counts as installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def refusals(table: str, device: Device, need: Need = BF16) -> dict[str, str | None]:
    return {row.name: row.why_not(device, need) for row in TABLES[table] if row.name in VENDOR_ROWS}


def test_nothing_vendor_related_runs_on_a_cpu(everything_installed):
    for table in TABLES:
        found = refusals(table, CPU)
        assert found and all("needs a CUDA device" in why for why in found.values())


def test_a_missing_library_is_said_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(probe, "_found", lambda name: False)
    for table in TABLES:
        for name, why in refusals(table, HOPPER).items():
            if name == "trtllm_mla":  # not on this GPU
                why = refusals(table, BLACKWELL)[name]
            assert why is not None
            assert "is not installed" in why and ("pip install" in why or "build" in why)


@pytest.mark.parametrize(
    "table,device,able",
    [
        ("linear", HOPPER, {"deep_gemm"}),
        ("experts", BLACKWELL, {"deep_gemm"}),
        ("linear", AMPERE, set()),
        ("mla", HOPPER, {"flashmla", "flashinfer", "fa3"}),
        ("mla", BLACKWELL, {"flashinfer", "trtllm_mla"}),
        ("mla", AMPERE, {"flashinfer"}),
        ("gqa", HOPPER, {"flashinfer", "fa3"}),
    ],
)
def test_capability_decides(everything_installed, table, device, able):
    found = refusals(table, device)
    assert {name for name, why in found.items() if why is None} == able
    assert all("sm_" in why for why in found.values() if why is not None)


@pytest.mark.parametrize(
    "change,row,words",
    [
        ({"page_size": 1}, "flashmla", "pages of 64"),
        ({"dtype": "float32"}, "flashmla", "bfloat16 or float16"),
        ({"dtype": "float32"}, "flashinfer", "bfloat16 or float16"),
        ({"kv_dtype": "fp8_e4m3"}, "flashinfer", "fp8_e4m3"),
        ({"kv_dtype": "fp8_e4m3"}, "fa3", "fp8_e4m3"),
        ({"kv_dtype": "fp8_e5m2"}, "flashmla", "fp8_e4m3"),
        ({"deterministic": True}, "flashmla", "FlashMLA is not batch-invariant"),
        ({"deterministic": True}, "flashinfer", "--enable-deterministic-inference"),
        ({"deterministic": True}, "fa3", "FlashAttention 3 is not batch-invariant"),
    ],
)
def test_needs_decide(everything_installed, change, row, words):
    assert words in refusals("mla", HOPPER, replace(BF16, **change))[row]


def test_fp8_records_are_read_on_blackwell_too(everything_installed):
    assert refusals("mla", BLACKWELL, replace(BF16, kv_dtype="fp8_e4m3", page_size=1))["flashmla"] is None


@pytest.mark.parametrize("index", [None, IndexWidths(64, 128, 512)])
def test_compressed_entries_need_sparse_attention_with_sinks(everything_installed, index):
    widths = HeadWidths(64, 1, 512, 512, 512)
    need = replace(BF16, sinks=True, compression=True, index=index, widths=widths)
    choice = select("attention", tables.MLA, "auto", HOPPER, need)
    assert choice.row.name == "triton" and choice.refused["fa3"] == "no attention sinks"
    assert choice.refused["flashmla"] == "less preferred than triton"
    for device in (HOPPER, BLACKWELL):
        named = select("attention", tables.MLA, "flashmla", device, need)
        assert named.options["sinks"] is True
    for change, words in (
        ({"dtype": "float16"}, "sinks for bfloat16 rows, not float16"),
        ({"widths": replace(widths, latent=256)}, "rows of 512 channels, not 256"),
        ({"widths": replace(widths, heads=256)}, "at most 128 query heads"),
    ):
        assert words in refusals("mla", HOPPER, replace(need, **change))["flashmla"]


def test_sparse_attention_prefers_the_fastest_decode(everything_installed):
    need = replace(BF16, index=IndexWidths(64, 128, 2048))
    assert select("attention", tables.MLA, "auto", HOPPER, need).row.name == "fa3"
    assert select("attention", tables.MLA, "auto", HOPPER, replace(need, kv_dtype="fp8_e4m3")).row.name == "flashmla"


def test_auto_takes_what_is_installed_and_tells_of_the_rest(everything_installed):
    choice = select("attention", tables.MLA, "auto", HOPPER, BF16)
    assert choice.row.name == "fa3" and choice.refused["flashmla"] == "less preferred than fa3"
    assert select("attention", tables.MLA, "auto", BLACKWELL, replace(BF16, page_size=1)).row.name == "flashinfer"
    assert select("attention", tables.MLA, "auto", BLACKWELL, BF16).row.name == "trtllm_mla"
    with pytest.raises(ValueError, match="'fa3' cannot run here: FlashAttention 3 has kernels for sm_90"):
        select("attention", tables.MLA, "fa3", BLACKWELL, BF16)


def test_choosing_imports_no_library_and_no_torch():
    code = (
        "import sys\n"
        "from moe_engine.kernels import tables\n"
        "from moe_engine.kernels.device import Device, Need\n"
        "for table in (tables.LINEAR, tables.EXPERTS, tables.MLA, tables.GQA, tables.SAMPLING):\n"
        "    for row in table:\n"
        "        row.why_not(Device('cuda', 'GPU', (9, 0)), Need('bfloat16'))\n"
        "found = {'torch', 'flashinfer', 'flash_mla', 'deep_gemm', 'sgl_kernel', 'triton'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_libraries_are_found_by_their_files(tmp_path, monkeypatch):
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('no GPU')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert FA3.installed() is None
    with probe.remembering({}):
        assert FA3.installed() is None
        (package / "flash_attn.py").write_text("")
        assert FA3.installed() is None
    assert FA3.installed() == "sgl_kernel.flash_attn"
    with pytest.raises(ImportError, match="no GPU"):
        FA3.load()


def test_attributes_decide_not_versions(folder):
    old = SimpleNamespace(__name__="deep_gemm", __version__="99.0", gemm_fp8_fp8_bf16_nt=None)
    with pytest.raises(ImportError, match=r"lacks fp8_gemm_nt.*too old, or another package"):
        DEEP_GEMM.check(old)
    whole = SimpleNamespace(__name__="flashinfer", mla=SimpleNamespace())
    for name in FLASHINFER.provides:
        setattr(whole.mla if name.startswith("mla.") else whole, name.removeprefix("mla."), None)
    assert FLASHINFER.check(whole) is whole
    (folder / "flash_attn_interface.py").write_text("flash_attn_varlen_func = None\n")
    with pytest.raises(ImportError, match=r"flash_attn_interface.py lacks flash_attn_with_kvcache"):
        FA3.load()


def test_a_compiled_part_that_does_not_load_is_found_before_the_first_call(folder):
    """sgl_kernel.flash_mla catches the failure when it is imported, and raises it when a kernel is called."""
    (folder / "flash_mla.py").write_text(
        "get_mla_metadata = flash_mla_with_kvcache = _flashmla_import_error = None\n"
        "try:\n    import ops_of_another_cuda\nexcept Exception as error:\n    _flashmla_import_error = error\n"
    )
    with pytest.raises(ImportError, match=r"flash_mla.py: No module named 'ops_of_another"):
        FLASH_MLA.load()


def test_arguments_are_found_in_signatures_and_docstrings():
    def plain(a, use_psum_layout=False):
        """A reason without other rows' names."""

    class Bound:
        """f(a: torch.Tensor, use_psum_layout: bool = False) -> None"""

        __signature__ = "no signature that inspect supports"

        def __call__(self, a):
            return a

    assert accepts(plain, "use_psum_layout") and not accepts(plain, "alpha")
    assert accepts(Bound(), "use_psum_layout") and not accepts(Bound(), "alpha")


def test_the_doctor_names_broken_libraries(tmp_path, monkeypatch):
    found = doctor_libraries.libraries("cpu")
    assert set(found) == {library.name for library in LIBRARIES}
    assert all("missing: " in text or "needs a GPU" in text for text in found.values())
    Path(tmp_path, "deep_gemm.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    verdict = doctor_libraries.libraries("cuda")["DeepGEMM"]
    assert verdict == "deep_gemm does not load: ImportError: undefined symbol: _ZN3c10"
    assert doctor_libraries.problems({"DeepGEMM": verdict})


def test_tritons_mla_on_blackwell_needs_a_newer_compiler(monkeypatch):
    for installed, words in (
        ((3, 8), "needs Triton 3.9 for MLA on Blackwell, Triton 3.8 is installed"),
        ((3, 9), None),
    ):
        monkeypatch.setattr(availability, "version", lambda installed=installed: installed)
        assert availability.why_not_latent(BLACKWELL) == words
        assert availability.why_not_latent(HOPPER) is None
