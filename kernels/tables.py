"""Every row of every kernel family. Adding a backend is one adapter file and one row here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_engine.kernels import workspaces
from moe_engine.kernels.cpu.availability import why_not as cpu_why_not
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.kv_format.formats import E4M3
from moe_engine.kernels.registry import Row
from moe_engine.kernels.triton.availability import why_not as triton_why_not
from moe_engine.kernels.triton.availability import why_not_cache as triton_why_not_cache
from moe_engine.kernels.triton.availability import why_not_index_heads as triton_why_not_index_heads
from moe_engine.kernels.triton.availability import why_not_latent as triton_why_not_latent
from moe_engine.kernels.vendors import availability as vendors

WhyNot = Callable[[Device, Need], str | None]


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


def _rows(
    family: str, torch_class: str, cpu_class: str, why_not: WhyNot = _cpu, torch_why_not: WhyNot = _torch,
    torch_uncaptured: WhyNot | None = None, codes: bool = False, **has: Any,
) -> list[Row]:  # fmt: skip
    package = f"moe_engine.kernels.{family}"
    return [
        Row(
            "torch",
            f"{package}.reference:{torch_class}",
            0,
            torch_why_not,
            why_not_captured=torch_uncaptured,
            **has,
        ),
        Row("cpu", f"{package}.cpu:{cpu_class}", 10, why_not, codes=codes, **has),
    ]


OPS = _rows("ops", "TorchOps", "CpuOps")
LINEAR = _rows("linear", "TorchLinear", "CpuLinear", codes=True)
EXPERTS = _rows(
    "experts", "TorchExperts", "CpuExperts", torch_uncaptured=_uncaptured_torch, biases=True, clamps=True, codes=True
)
MLA = _rows("attention", "TorchMLA", "CpuMLA", torch_uncaptured=_uncaptured_torch, sparse=True, sinks=True)
INDEXER = _rows("indexer", "TorchIndexer", "CpuIndexer", torch_uncaptured=_uncaptured_indexer)
GQA = _rows(
    "attention", "TorchGQA", "CpuGQA", torch_uncaptured=_uncaptured_torch, windows=True, sinks=True, sparse=True
)
SAMPLING = _rows("sampling", "TorchSampling", "CpuSampling", _cpu_float32, _always)
PERMUTATION = _rows("permutation", "TorchPermutation", "CpuPermutation")
LORA = _rows("lora", "TorchLora", "CpuLora")
DELTA = _rows("delta", "TorchDelta", "CpuDelta", torch_uncaptured=_uncaptured_delta)
COMPRESSION = _rows("compression", "TorchCompression", "CpuCompression", torch_uncaptured=_uncaptured_compression)
BLOCK_INDEX = _rows("block_index", "TorchBlockIndex", "CpuBlockIndex", torch_uncaptured=_uncaptured_indexer)
VARLEN = [Row("torch", "moe_engine.kernels.varlen.reference:TorchVarlen", 0, _always)]

_FIXED = ("deterministic",)


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
    return _KEEPS if need.experts is not None and (need.experts.four_bits or need.experts.fp8_rows) else 20


# This project's GPU kernels: preferred over torch, below vendor-tuned libraries.
OPS.append(Row("triton", "moe_engine.kernels.ops.triton_ops:TritonOps", 20, _triton_with_cache, _FIXED))
LINEAR.append(
    Row(
        "triton",
        "moe_engine.kernels.linear.triton_linear:TritonLinear",
        20,
        _triton,
        _FIXED,
        prefers=lambda device, need: _KEEPS if need.four_bits or need.fp8_rows else 20,
        blocks=True,
        fp8_rows=True,
        four_bits=True,
    )
)
PERMUTATION.append(Row("triton", "moe_engine.kernels.permutation.triton_permute:TritonPermutation", 20, _triton))
EXPERTS.append(
    Row(
        "triton",
        "moe_engine.kernels.experts.triton_experts:TritonExperts",
        20,
        _triton,
        _FIXED,
        prefers=_triton_experts_preference,
        biases=True,
        clamps=True,
        blocks=True,
        fp8_rows=True,
        reads_fp8=_multiplies_fp8,
        four_bits=True,
    )
)
INDEXER.append(
    Row(
        "triton",
        "moe_engine.kernels.indexer.triton_indexer:TritonIndexer",
        20,
        _triton_indexer,
    )
)
COMPRESSION.append(Row("triton", "moe_engine.kernels.compression.triton_compression:TritonCompression", 20, _triton))
DELTA.append(Row("triton", "moe_engine.kernels.delta.triton_delta:TritonDelta", 20, _triton))
VARLEN.append(Row("triton", "moe_engine.kernels.varlen.triton_varlen:TritonVarlen", 20, _triton))
LORA.append(Row("triton", "moe_engine.kernels.lora.triton_lora:TritonLora", 20, _triton))
BLOCK_INDEX.append(Row("triton", "moe_engine.kernels.block_index.triton_blocks:TritonBlockIndex", 20, _triton_blocks))
SAMPLING.append(Row("triton", "moe_engine.kernels.sampling.triton_sampling:TritonSampling", 20, _triton_float32))

_ATTENTION = "moe_engine.kernels.attention"
MLA.append(
    Row(
        "triton",
        f"{_ATTENTION}.triton.attention:TritonMLA",
        20,
        _triton_latent,
        _FIXED,
        workspaces.triton,
        _uncaptured_triton,
        sparse=True,
        sinks=True,
    )
)
GQA.append(
    Row(
        "triton",
        f"{_ATTENTION}.triton.attention:TritonGQA",
        20,
        _triton_with_cache,
        _FIXED,
        workspaces.triton,
        _uncaptured_triton,
        windows=True,
        sinks=True,
        sparse=True,
    )
)

# Optional vendor libraries: preferred where they run, since they are tuned for the hardware.
LINEAR.append(
    Row("deep_gemm", "moe_engine.kernels.linear.deep_gemm:DeepGemmLinear", 40, vendors.deep_gemm, blocks=True)
)
EXPERTS.append(
    Row(
        "deep_gemm",
        "moe_engine.kernels.experts.deep_gemm:DeepGemmExperts",
        40,
        vendors.deep_gemm,
        blocks=True,
        clamps=True,
        reads_fp8=_multiplies_fp8,
    )
)
EXPERTS.append(
    Row("mega_moe", "moe_engine.kernels.experts.mega_moe:MegaMoe", 40, vendors.mega_moe, blocks=True, fused=True)
)
EXPERTS.append(
    Row(
        "flashinfer_trtllm",
        "moe_engine.kernels.experts.flashinfer_trtllm:TrtllmExperts",
        45,  # SGLang's default for DeepSeek V3 in FP8 on Blackwell
        vendors.trtllm_experts,
        blocks=True,
        reads_fp8=_multiplies_fp8,
        lacks_plain=True,
        experts_workspace=workspaces.trtllm_experts,
    )
)
INDEXER.append(Row("deep_gemm", "moe_engine.kernels.indexer.deep_gemm:DeepGemmIndexer", 40, vendors.deep_gemm_indexer))
MLA += [
    Row(
        "flashmla", f"{_ATTENTION}.vendors.flashmla:FlashMLA", 45, vendors.flash_mla, ("index", "kv_dtype", "sinks"),
        workspaces.flashmla,
        vendors.flash_mla_uncaptured, _flash_mla_preference, pages=(64,), lacks_expanded=True, sparse=True, sinks=True,
    ),
    Row(
        "trtllm_mla", f"{_ATTENTION}.vendors.trtllm_mla:TrtllmMLA", 46, vendors.trtllm_mla,
        workspace=workspaces.trtllm_mla, pages=(64, 32),
    ),
    Row(
        "flashinfer", f"{_ATTENTION}.vendors.flashinfer_mla:FlashInferMLA", 40, vendors.flashinfer_mla, ("kv_dtype",),
        workspace=workspaces.flashinfer, exact_lengths=True,
    ),
    Row(
        "fa3", f"{_ATTENTION}.vendors.fa3:FA3MLA", 35, vendors.fa3_mla, ("index",), workspaces.fa3,
        prefers=_fa3_mla_preference, sparse=True,
    ),
]  # fmt: skip
GQA += [
    Row(
        "flashinfer", f"{_ATTENTION}.vendors.flashinfer_gqa:FlashInferGQA", 40, vendors.flashinfer_gqa,
        workspace=workspaces.flashinfer_gqa, windows=True, exact_lengths=True,
    ),
    Row("fa3", f"{_ATTENTION}.vendors.fa3:FA3GQA", 35, vendors.fa3_gqa, workspace=workspaces.fa3, windows=True),
]  # fmt: skip
SAMPLING.append(
    Row("flashinfer", "moe_engine.kernels.sampling.flashinfer:FlashInferSampling", 15, vendors.flashinfer_sampling)
)

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
