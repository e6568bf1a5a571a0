"""Every row of every kernel family. Adding a backend is one adapter file and one row here.

Preferences: torch 0, C++ for CPUs 10, this project's GPU kernels 20; most vendor libraries, tuned for their hardware,
have more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_engine.kernels import workspaces
from moe_engine.kernels.cpu.availability import why_not as cpu_why_not
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.kv_format.formats import E4M3
from moe_engine.kernels.registry import BIASES, CAPPED, CHUNKED, CLAMPS, SINKS, SPANS, SPARSE, WINDOWS, Row
from moe_engine.kernels.triton.availability import why_not as triton_why_not
from moe_engine.kernels.triton.availability import why_not_cache as triton_why_not_cache
from moe_engine.kernels.triton.availability import why_not_index_heads as triton_why_not_index_heads
from moe_engine.kernels.triton.availability import why_not_latent as triton_why_not_latent
from moe_engine.kernels.vendors import availability as vendors
from moe_engine.kernels.weight_forms import CODES, FOUR_BITS, FP8_BLOCKS, FP8_ROWS, WeightForm

WhyNot = Callable[[Device, Need], str | None]

_EXPERTS = "moe_engine.kernels.experts"
_VENDORS = "moe_engine.kernels.attention.vendors"
_FIXED = ("deterministic",)
_CODED = frozenset((CODES, FOUR_BITS))
_BLOCKS = frozenset((FP8_BLOCKS,))
_KEPT = frozenset((FOUR_BITS, FP8_ROWS))
"""Only this project's GPU kernels multiply these as stored."""


def _torch(device: Device, need: Need) -> str | None:
    if need.deterministic and device.kind != "cpu":
        return "torch selects algorithms by the number of rows (--enable-deterministic-inference)"
    return None


def _always(device: Device, need: Need) -> str | None:
    return None


def _cpu(device: Device, need: Need) -> str | None:
    return cpu_why_not(device, need.dtype)


def _cpu_float32(device: Device, need: Need) -> str | None:
    """Logits are float32 in every model."""
    return cpu_why_not(device, "float32")


def _triton(device: Device, need: Need) -> str | None:
    return triton_why_not(device, need.dtype)


def _triton_with_cache(device: Device, need: Need) -> str | None:
    return _triton(device, need) or triton_why_not_cache(device, need.kv_dtype)


def _triton_latent(device: Device, need: Need) -> str | None:
    return _triton_with_cache(device, need) or triton_why_not_latent(device)


def _triton_indexer(device: Device, need: Need) -> str | None:
    reason = _triton_with_cache(device, need)
    return reason or (None if need.index is None else triton_why_not_index_heads(need.index.width))


def _triton_blocks(device: Device, need: Need) -> str | None:
    reason = _triton(device, need)
    return reason or (None if need.blocks is None else triton_why_not_index_heads(need.blocks.width))


def _triton_float32(device: Device, need: Need) -> str | None:
    """Logits are float32 in every model."""
    return triton_why_not(device, "float32")


def _uncaptured_torch(device: Device, need: Need) -> str | None:
    return "the torch row reads token counts per expert or context on the host"


def _uncaptured_indexer(device: Device, need: Need) -> str | None:
    return "the torch row of the indexer loops over requests on the host"


def _uncaptured_delta(device: Device, need: Need) -> str | None:
    return "the torch row of the delta rule reads the lengths of runs on the host"


def _uncaptured_compression(device: Device, need: Need) -> str | None:
    return "the torch row of compression reads on the host which windows are complete"


def _multiplies_fp8(device: Device) -> bool:
    return device.capability is not None and device.capability >= (8, 9)


def _uncaptured_triton(device: Device, need: Need) -> str | None:
    if not need.deterministic:
        return None
    return (
        "--enable-deterministic-inference cuts contexts at fixed places, into more segments the longer they are; a "
        "captured graph has memory for a fixed number"
    )


def _fa3_mla_preference(device: Device, need: Need) -> int:
    """First on Hopper: the fastest decode for 16 and for 128 heads at all batch sizes (measured in vLLM's PR 27363),
    and SGLang's default for decodes over selected tokens."""
    return 46 if device.capability is not None and device.capability[0] == 9 else 35


_BELOW_TRITON = 19


def _flash_mla_preference(device: Device, need: Need) -> int:
    """Over FP8 records a dense context is read by lists of all its slots, more slowly than pages. The kernel with sinks
    reads a token's whole list in one program for 64 heads: a decode of few requests leaves most of the device idle."""
    if need.sinks:
        return _BELOW_TRITON
    return 44 if need.kv_dtype == E4M3 and need.index is None else 45


_KEEPS = 42
"""Preference before libraries that would multiply weights of 4 bits, or FP8 with a scale per row, dequantized."""


def _triton_experts_preference(device: Device, need: Need) -> int:
    return _KEEPS if need.experts is not None and need.experts.form in _KEPT else 20


def _triton_linear_preference(device: Device, need: Need) -> int:
    return _KEEPS if need.linear_forms & _KEPT else 20


def _torch_and_cpu(
    family: str, torch_class: str, cpu_class: str, cpu: WhyNot = _cpu, torch: WhyNot = _torch,
    torch_uncaptured: WhyNot | None = None, multiplies: frozenset[WeightForm] = frozenset(),
    supports: tuple[str, ...] = (), cpu_takes: tuple[str, ...] = (),
) -> list[Row]:  # fmt: skip
    package = f"moe_engine.kernels.{family}"
    return [
        Row(
            "torch", f"{package}.reference:{torch_class}", 0, torch, why_not_captured=torch_uncaptured,
            supports=supports,
        ),
        Row("cpu", f"{package}.cpu:{cpu_class}", 10, cpu, cpu_takes, multiplies=multiplies, supports=supports),
    ]  # fmt: skip


def _triton_row(target: str, why_not: WhyNot = _triton, takes: tuple[str, ...] = (), **has: Any) -> Row:
    return Row("triton", f"moe_engine.kernels.{target}", 20, why_not, takes, **has)


OPS = [
    *_torch_and_cpu("ops", "TorchOps", "CpuOps"),
    _triton_row("ops.triton_ops:TritonOps", _triton_with_cache, _FIXED),
]
LINEAR = [
    *_torch_and_cpu("linear", "TorchLinear", "CpuLinear", multiplies=_CODED, cpu_takes=_FIXED),
    _triton_row(
        "linear.triton_linear:TritonLinear", takes=_FIXED, multiplies=_BLOCKS | _KEPT,
        prefers=_triton_linear_preference,
    ),
    Row("deep_gemm", "moe_engine.kernels.linear.deep_gemm:DeepGemmLinear", 40, vendors.deep_gemm, multiplies=_BLOCKS),
]  # fmt: skip
EXPERTS = [
    *_torch_and_cpu(
        "experts", "TorchExperts", "CpuExperts", torch_uncaptured=_uncaptured_torch, multiplies=_CODED,
        supports=(BIASES, CLAMPS), cpu_takes=_FIXED,
    ),
    _triton_row(
        "experts.triton_experts:TritonExperts", takes=_FIXED, prefers=_triton_experts_preference,
        multiplies=_BLOCKS | _KEPT, supports=(BIASES, CLAMPS), reads_fp8=_multiplies_fp8,
    ),
    Row(
        "deep_gemm", f"{_EXPERTS}.deep_gemm:DeepGemmExperts", 40, vendors.deep_gemm, multiplies=_BLOCKS,
        supports=(CLAMPS,), reads_fp8=_multiplies_fp8,
    ),
    Row("mega_moe", f"{_EXPERTS}.mega_moe:MegaMoe", 40, vendors.mega_moe, multiplies=_BLOCKS, fused=True),
    Row(  # 45: SGLang's default for DeepSeek V3 in FP8 on Blackwell
        "flashinfer_trtllm", f"{_EXPERTS}.flashinfer_trtllm:TrtllmExperts", 45, vendors.trtllm_experts,
        multiplies=_BLOCKS, reads_fp8=_multiplies_fp8, lacks_plain=True, experts_workspace=workspaces.trtllm_experts,
    ),
]  # fmt: skip
MLA = [
    *_torch_and_cpu(
        "attention", "TorchMLA", "CpuMLA", torch_uncaptured=_uncaptured_torch, supports=(SPARSE, SINKS)
    ),
    _triton_row(
        "attention.triton.attention:TritonMLA", _triton_latent, _FIXED, workspace=workspaces.triton,
        why_not_captured=_uncaptured_triton, supports=(SPARSE, SINKS),
    ),
    Row(
        "flashmla", f"{_VENDORS}.flashmla:FlashMLA", 45, vendors.flash_mla, ("index", "kv_dtype", "sinks"),
        workspaces.flashmla, vendors.flash_mla_uncaptured, _flash_mla_preference, pages=(64,), lacks_expanded=True,
        supports=(SPARSE, SINKS),
    ),
    Row(
        "trtllm_mla", f"{_VENDORS}.trtllm_mla:TrtllmMLA", 46, vendors.trtllm_mla, workspace=workspaces.trtllm_mla,
        pages=(64, 32),
    ),
    Row(
        "flashinfer", f"{_VENDORS}.flashinfer_mla:FlashInferMLA", 40, vendors.flashinfer_mla, ("kv_dtype",),
        workspace=workspaces.flashinfer, exact_lengths=True,
    ),
    Row(
        "fa3", f"{_VENDORS}.fa3:FA3MLA", 35, vendors.fa3_mla, ("index",), workspaces.fa3,
        prefers=_fa3_mla_preference, supports=(SPARSE,),
    ),
]  # fmt: skip
GQA = [
    *_torch_and_cpu(
        "attention", "TorchGQA", "CpuGQA", torch_uncaptured=_uncaptured_torch,
        supports=(WINDOWS, CHUNKED, SPARSE, SPANS, SINKS, CAPPED),
    ),
    _triton_row(
        "attention.triton.attention:TritonGQA", _triton_with_cache, _FIXED, workspace=workspaces.triton,
        why_not_captured=_uncaptured_triton, supports=(WINDOWS, CHUNKED, SPARSE, SPANS, SINKS, CAPPED),
    ),
    Row(
        "flashinfer", f"{_VENDORS}.flashinfer_gqa:FlashInferGQA", 40, vendors.flashinfer_gqa,
        workspace=workspaces.flashinfer_gqa, supports=(WINDOWS,), exact_lengths=True,
    ),
    Row("fa3", f"{_VENDORS}.fa3:FA3GQA", 35, vendors.fa3_gqa, workspace=workspaces.fa3, supports=(WINDOWS,)),
]  # fmt: skip
SAMPLING = [
    *_torch_and_cpu("sampling", "TorchSampling", "CpuSampling", _cpu_float32, _always),
    _triton_row("sampling.triton_sampling:TritonSampling", _triton_float32),
    Row("flashinfer", "moe_engine.kernels.sampling.flashinfer:FlashInferSampling", 15, vendors.flashinfer_sampling),
]
PERMUTATION = [
    *_torch_and_cpu("permutation", "TorchPermutation", "CpuPermutation"),
    _triton_row("permutation.triton_permute:TritonPermutation"),
]
LORA = [*_torch_and_cpu("lora", "TorchLora", "CpuLora"), _triton_row("lora.triton_lora:TritonLora")]
INDEXER = [
    *_torch_and_cpu("indexer", "TorchIndexer", "CpuIndexer", torch_uncaptured=_uncaptured_indexer),
    _triton_row("indexer.triton_indexer:TritonIndexer", _triton_indexer),
    Row("deep_gemm", "moe_engine.kernels.indexer.deep_gemm:DeepGemmIndexer", 40, vendors.deep_gemm_indexer),
]
BLOCK_INDEX = [
    *_torch_and_cpu("block_index", "TorchBlockIndex", "CpuBlockIndex", torch_uncaptured=_uncaptured_indexer),
    _triton_row("block_index.triton_blocks:TritonBlockIndex", _triton_blocks),
]
DELTA = [
    *_torch_and_cpu("delta", "TorchDelta", "CpuDelta", torch_uncaptured=_uncaptured_delta),
    _triton_row("delta.triton_delta:TritonDelta"),
]
COMPRESSION = [
    *_torch_and_cpu("compression", "TorchCompression", "CpuCompression", torch_uncaptured=_uncaptured_compression),
    _triton_row("compression.triton_compression:TritonCompression"),
]
VARLEN = [
    Row("torch", "moe_engine.kernels.varlen.reference:TorchVarlen", 0, _always),
    _triton_row("varlen.triton_varlen:TritonVarlen"),
]

FAMILIES: dict[str, list[Row]] = {
    "ops": OPS,
    "linear": LINEAR,
    "experts": EXPERTS,
    "mla": MLA,
    "gqa": GQA,
    "sampling": SAMPLING,
    "permutation": PERMUTATION,
    "lora": LORA,
    "indexer": INDEXER,
    "block_index": BLOCK_INDEX,
    "delta": DELTA,
    "compression": COMPRESSION,
    "varlen": VARLEN,
}
"""The rows of every family; attention has one family per kind."""
