"""Vendor libraries: detection and loading. Version numbers are unreliable (forks number differently), so modules and
attributes are checked. `why_not` imports nothing; `load` imports, and names a missing attribute. The doctor shows both.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.vendors import cuda_home


@dataclass(frozen=True)
class Library:
    """A supported vendor library.

    modules: import names, the first one found is used. provides: attributes that an adapter calls (dotted).
    majors: compute capabilities (major) with kernels. dtypes: activation dtypes. compiles: runs nvcc at first use.
    """

    name: str
    modules: tuple[str, ...]
    install: str
    provides: tuple[str, ...]
    majors: tuple[int, ...] = (9, 10)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    compiles: bool = False

    def installed(self) -> str | None:
        """The installed import name, or None; imports nothing."""
        return next((name for name in self.modules if _found(name)), None)

    def why_not(self, device: Device, need: Need) -> str | None:
        """The refusal reason, or None."""
        if device.no_cuda is not None:
            return f"{self.name} {device.no_cuda}"
        major = device.capability[0] if device.capability else 0
        if major not in self.majors:
            known = ", ".join(f"sm_{major}0" for major in self.majors)
            return f"{self.name} has kernels for {known}; {device.name} is sm_{major}x"
        if need.dtype not in self.dtypes:
            return f"{self.name} computes in {' or '.join(self.dtypes)}, not in {need.dtype}"
        if not device.has_libraries and self.installed() is None:
            return f"{' or '.join(self.modules)} is not installed ({self.install})"
        return None

    def load(self) -> ModuleType:
        """The module.

        Raises:
            ImportError: if it is missing, fails to load, or lacks a required attribute.
        """
        name = self.installed()
        if name is None:
            raise ImportError(f"{' or '.join(self.modules)} is not installed ({self.install})")
        cuda_home.provide()
        return self.check(importlib.import_module(name))

    def check(self, module: Any) -> Any:
        """Returns the module. Raises ImportError if an attribute is missing, or its compiled part did not load."""
        where = getattr(module, "__file__", None) or getattr(module, "__name__", "the module")
        broken = getattr(module, "_flashmla_import_error", None)  # sgl_kernel raises it at the first call only
        if broken is not None:
            raise ImportError(f"{where}: {broken}") from broken
        missing = [name for name in self.provides if not _has(module, name)]
        if missing:
            raise ImportError(f"{where} lacks {', '.join(missing)}: too old, or another package ({self.install})")
        return module


DEEP_GEMM = Library(
    "DeepGEMM",
    ("deep_gemm",),
    "pip install 'sgl-deep-gemm>=0.2.5'",
    (
        "fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked",
        "m_grouped_bf16_gemm_nt_contiguous", "m_grouped_bf16_gemm_nt_masked", "transform_sf_into_required_layout",
        "get_mk_alignment_for_contiguous_layout",
    ),
    dtypes=("bfloat16",),
    compiles=True,
)  # fmt: skip
DEEP_GEMM_INDEXER = Library(
    "DeepGEMM's indexer of FP8 keys with one scale",  # on Blackwell it takes scales of 32 channels (MX) only
    DEEP_GEMM.modules,
    DEEP_GEMM.install,
    ("fp8_fp4_mqa_logits",),
    majors=(9,),
    dtypes=DEEP_GEMM.dtypes,
    compiles=True,
)
MEGA_MOE = Library(
    "DeepGEMM's MegaMoE",
    DEEP_GEMM.modules,
    DEEP_GEMM.install,
    (
        "get_symm_buffer_for_sm90_mega_moe", "transform_weights_for_mega_moe_sm90", "mega_moe_pre_dispatch_sm90",
        "fp8_mega_moe",
    ),
    majors=(9,),
    dtypes=DEEP_GEMM.dtypes,
    compiles=True,
)  # fmt: skip
FLASHINFER = Library(
    "FlashInfer",
    ("flashinfer",),
    "pip install 'flashinfer-python>=0.7'",
    (
        "mla.BatchMLAPagedAttentionWrapper", "mla.MLAPlanMetadata", "BatchPrefillWithRaggedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
    ),
    majors=(8, 9, 10, 12),
    compiles=True,
)  # fmt: skip
TRTLLM_MLA = Library(
    "FlashInfer's trtllm-gen MLA",
    FLASHINFER.modules,
    FLASHINFER.install,
    (*FLASHINFER.provides, "mla.trtllm_batch_decode_with_kv_cache_mla"),
    majors=(10,),
    dtypes=("bfloat16",),  # results are bfloat16, whatever the queries are
    compiles=True,
)
TRTLLM_MOE = Library(
    "FlashInfer's trtllm-gen MoE",
    FLASHINFER.modules,
    FLASHINFER.install,
    (
        "shuffle_matrix_a", "fused_moe.convert_to_block_layout", "fused_moe.trtllm_fp8_block_scale_routed_moe",
        "fused_moe.WeightLayout", "fused_moe.RoutingMethodType",
    ),
    majors=(10,),
    dtypes=("bfloat16",),
    compiles=True,
)  # fmt: skip
FLASHINFER_SAMPLING = Library(
    "FlashInfer",
    ("flashinfer",),
    "pip install 'flashinfer-python>=0.7'",
    ("sampling.softmax", "sampling.top_k_renorm_probs", "sampling.top_p_renorm_probs"),
    majors=(8, 9, 10, 12),
    dtypes=("bfloat16", "float16", "float32"),
)
FLASH_MLA = Library(
    "FlashMLA",
    ("flash_mla", "sgl_kernel.flash_mla"),
    "pip install 'sglang-kernel>=0.4.10' brings it, or build github.com/deepseek-ai/FlashMLA",
    ("get_mla_metadata", "flash_mla_with_kvcache"),
)
FLASH_MLA_FP8 = Library(
    "FlashMLA's dense kernel for FP8",
    FLASH_MLA.modules[1:],  # the library's own package has none
    "pip install 'sglang-kernel>=0.4.10'",
    FLASH_MLA.provides,
    majors=(9,),
)
FA3 = Library(
    "FlashAttention 3",
    ("flash_attn_interface", "sgl_kernel.flash_attn"),
    "pip install 'sglang-kernel>=0.4.10', or build hopper/ of github.com/Dao-AILab/flash-attention",
    ("flash_attn_with_kvcache", "flash_attn_varlen_func"),
    majors=(9,),
)
DEEP_EP = Library(
    "DeepEP",
    ("deep_ep",),
    "pip install 'sgl-deep-ep>=0.1.2.post1'",
    ("topk_idx_t",),
    dtypes=("bfloat16",),
    compiles=True,
)
NVSHMEM = Library("NVSHMEM for Python", ("nvshmem.core",), "pip install 'nvshmem4py-cu13>=0.4'", ("init",))

LIBRARIES = (DEEP_GEMM, FLASHINFER, FLASH_MLA, FA3, DEEP_EP, NVSHMEM)


def accepts(function: Callable[..., Any], argument: str) -> bool:
    """True if a function takes a keyword, by its signature or by pybind11's docstring."""
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return f"{argument}:" in (function.__doc__ or "")


def needs_no_arguments(function: Callable[..., Any]) -> bool:
    """True if a function can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def report(libraries: Sequence[Library] = LIBRARIES) -> dict[str, str]:
    """Per library: the import name found, or how to install it. Imports nothing."""
    return {
        library.name: f"found as {found}" if (found := library.installed()) else f"missing: {library.install}"
        for library in libraries
    }


_remembered: ContextVar[dict[str, bool] | None] = ContextVar("remembered", default=None)


@contextmanager
def remembering(found: dict[str, bool]) -> Iterator[None]:
    """Modules are searched once each while it is open: a search over hundreds of launches needs the same ones."""
    token = _remembered.set(found)
    try:
        yield
    finally:
        _remembered.reset(token)


def _found(name: str) -> bool:
    remembered = _remembered.get()
    if remembered is None:
        return _search(name)
    if name not in remembered:
        remembered[name] = _search(name)
    return remembered[name]


def _search(name: str) -> bool:
    """For a submodule only its file is searched: find_spec would import its package."""
    package, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None or not parts:
        return spec is not None
    paths = [Path(place, *parts) for place in spec.submodule_search_locations or ()]
    return any(path.is_dir() or any(path.parent.glob(f"{path.name}.*")) for path in paths)


def _has(module: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True
