"""Refusal reasons of vendor rows. Finds modules without importing them; no torch."""

from __future__ import annotations

from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.kv_format.formats import E4M3, E4M3_TENSOR, E5M2, is_fp8
from moe_engine.kernels.vendors import limits, probe
from moe_engine.kernels.weight_forms import FP8_BLOCKS


def deep_gemm(device: Device, need: Need) -> str | None:
    return _why_not("DeepGEMM", probe.DEEP_GEMM, device, need)


def mega_moe(device: Device, need: Need) -> str | None:
    reason = _why_not("MegaMoE", probe.MEGA_MOE, device, need)
    if reason or need.experts is None:
        return reason
    if need.experts.form != FP8_BLOCKS:
        return "MegaMoE on Hopper multiplies block FP8; this checkpoint's experts are not in FP8 blocks of 128 x 128"
    return limits.mega_moe(need.experts.hidden, need.experts.width, need.experts.top_k)


def trtllm_experts(device: Device, need: Need) -> str | None:
    name = "trtllm-gen's fused experts"
    reason = _why_not(name, probe.TRTLLM_MOE, device, need)
    if reason or need.experts is None:
        return reason
    experts = need.experts
    if experts.form != FP8_BLOCKS:
        return f"{name} multiply block FP8; this checkpoint's experts are not stored in FP8 blocks of 128 x 128"
    if experts.dispatched:
        return limits.TRTLLM_DISPATCHED
    if experts.top_k > limits.TRTLLM_TOP_K:
        return f"{name} sum at most {limits.TRTLLM_TOP_K} experts of a token, not {experts.top_k}"
    return limits.trtllm_experts(experts.hidden, experts.width)


DEEP_GEMM_INDEX_HEADS, DEEP_GEMM_INDEX_WIDTHS = (32, 64), (32, 64, 128)
"""On Hopper (csrc/apis/attention.hpp)."""


def deep_gemm_indexer(device: Device, need: Need) -> str | None:
    reason = _why_not("DeepGEMM", probe.DEEP_GEMM_INDEXER, device, need)
    if reason or need.index is None:
        return reason
    if need.kv_dtype != E4M3 and not need.index.fp8_keys:
        return f"DeepGEMM scores FP8 index keys (--kv-cache-dtype {E4M3})"
    heads = DEEP_GEMM_INDEX_HEADS
    if need.index.heads not in heads or need.index.width not in DEEP_GEMM_INDEX_WIDTHS:
        return f"DeepGEMM scores {heads} index heads of {DEEP_GEMM_INDEX_WIDTHS} channels, not {need.index}"
    return None


def flashinfer_mla(device: Device, need: Need) -> str | None:
    name = "FlashInfer"
    reason = _why_not(name, probe.FLASHINFER, device, need) or _unscaled_cache(name, need)
    if reason or need.kv_dtype != E4M3_TENSOR:
        return reason or _too_wide(limits.flashinfer_mla, need)
    if device.capability and device.capability[0] != 9:
        return f"FlashInfer's MLA wrapper reads {E4M3_TENSOR} on Hopper (sm_90) only"
    return _too_wide(limits.flashinfer_fp8, need)


def trtllm_mla(device: Device, need: Need) -> str | None:
    name = "trtllm-gen's MLA"
    reason = _why_not(name, probe.TRTLLM_MLA, device, need) or _unscaled_cache(name, need)
    if reason is None and need.kv_dtype == E4M3_TENSOR and need.trees:
        return f"{name} runs draft trees on FlashInfer's wrapper, which reads {E4M3_TENSOR} on Hopper only"
    return reason or _too_wide(limits.trtllm_mla, need) or limits.trtllm_page(need.page_size)


def flashinfer_gqa(device: Device, need: Need) -> str | None:
    reason = _why_not("FlashInfer", probe.FLASHINFER, device, need) or _plain_cache("FlashInfer", need)
    return reason or _too_wide(limits.flashinfer_gqa, need)


def fa3_mla(device: Device, need: Need) -> str | None:
    return _fa3(device, need) or _too_wide(limits.fa3_mla, need)


def fa3_gqa(device: Device, need: Need) -> str | None:
    return _fa3(device, need) or _too_wide(limits.fa3_gqa, need)


def flash_mla(device: Device, need: Need) -> str | None:
    """bf16, fp16 and unscaled e4m3 caches: Hopper, pages of 64 tokens. fp8_e4m3 caches (records of 656 bytes): also
    Blackwell, any page, up to 128 query heads. With sinks (DeepSeek V4): both, any page, bf16."""
    if need.sinks:
        return _flash_mla_with_sinks(device, need)
    library = probe.FLASH_MLA_FP8 if need.kv_dtype == E4M3_TENSOR else probe.FLASH_MLA
    reason = _why_not("FlashMLA", library, device, need) or _too_wide(limits.flashmla, need)
    if reason is None and need.kv_dtype == E4M3 and need.widths is not None:
        reason = limits.flashmla_records(need.widths.heads)
    if reason is None and need.kv_dtype == E4M3_TENSOR:
        reason = _unscaled_cache("FlashMLA", need)
    if reason is None and need.kv_dtype == E5M2:
        return f"FlashMLA reads FP8 records with scales (fp8_e4m3), not {need.kv_dtype}"
    if reason or need.kv_dtype == E4M3:
        return reason
    if device.capability and device.capability[0] != 9:
        return f"FlashMLA reads caches without scales on Hopper (sm_90) only; those of {E4M3} also on Blackwell"
    if need.page_size % 64:
        return f"FlashMLA reads pages of 64 tokens, --page-size is {need.page_size}"
    return None


def _flash_mla_with_sinks(device: Device, need: Need) -> str | None:
    reason = _why_not("FlashMLA", probe.FLASH_MLA, device, need)
    if reason is None and need.widths is not None:
        reason = limits.flashmla_whole(need.widths.latent) or limits.flashmla_records(need.widths.heads)
    if reason is None and (need.dtype, need.kv_dtype) != ("bfloat16", "auto"):
        reason = f"FlashMLA has sinks for bfloat16 rows, not {need.dtype} (--kv-cache-dtype {need.kv_dtype})"
    return reason


def flash_mla_uncaptured(device: Device, need: Need) -> str | None:
    if need.kv_dtype != E4M3 or device.capability is None or device.capability[0] >= 10:
        return None
    return "FlashMLA's kernel for FP8 records takes no list lengths on Hopper, so lists cannot be renewed in place"


def flashinfer_sampling(device: Device, need: Need) -> str | None:
    return probe.FLASHINFER_SAMPLING.why_not(device, need)


def _why_not(name: str, library: probe.Library, device: Device, need: Need) -> str | None:
    """The library is missing, or the launch is deterministic: vendor kernels are not batch-invariant, because attention
    splits depend on the batch, product tiling on the row count."""
    if need.deterministic:
        return f"{name} is not batch-invariant (--enable-deterministic-inference)"
    return library.why_not(device, need)


def _fa3(device: Device, need: Need) -> str | None:
    name = "FlashAttention 3"
    return _why_not(name, probe.FA3, device, need) or _plain_cache(name, need)


def _too_wide(limit: limits.Limit, need: Need) -> str | None:
    all_widths = () if need.widths is None else (need.widths, *need.other_widths)
    return next(filter(None, map(limit, all_widths)), None)


def _unscaled_cache(name: str, need: Need) -> str | None:
    """Also takes unscaled e4m3 numbers; results, and the queries of some kernels, are bfloat16 then."""
    if need.kv_dtype != E4M3_TENSOR:
        return _plain_cache(name, need)
    wrong = need.dtype != "bfloat16"
    return f"{name} reads a KV cache in {E4M3_TENSOR} for bfloat16 activations, not {need.dtype}" if wrong else None


def _plain_cache(name: str, need: Need) -> str | None:
    return f"{name} reads a KV cache in the activation dtype, not in {need.kv_dtype}" if is_fp8(need.kv_dtype) else None
