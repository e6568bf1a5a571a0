"""Head widths supported by the attention kernels of vendor libraries. Adapters check calls against these rules; the
tables check launches against them before anything is loaded. Imports no torch.

Each rule returns the refusal reason, or None. Legend: N qk_nope, P rotary width, C kv_lora_rank, V v_head.
"""

from __future__ import annotations

from collections.abc import Callable

from moe_engine.kernels.device import HeadWidths

Limit = Callable[[HeadWidths], str | None]

FLASHINFER_EXPANDED = ((192, 128), (128, 128), (64, 64), (256, 256))
"""(N+P, V) of FlashInfer's generated ragged kernels."""

FLASHINFER_HEADS = (64, 128, 256)
FLASHMLA_LATENT, FLASHMLA_ROTARY = 512, 64
FLASHMLA_RECORD_HEADS = (64, 128)
"""Query heads of FlashMLA's kernels over lists of slots and FP8 records; smaller counts are padded."""

TRTLLM_WIDTHS = ((512, 64), (256, 64))
"""(C, P) supported by trtllm-gen's MLA decode."""

TRTLLM_HEADS = 64, 128
"""Query heads: up to the first, or the second; counts between are padded."""

TRTLLM_PAGES = (32, 64)

TRTLLM_TOP_K = 32
"""Experts of a token in trtllm-gen's fused experts."""

TRTLLM_DISPATCHED = (
    "trtllm-gen's fused experts take tokens with their choices, not rows from a dispatcher: leave --moe-a2a-backend out"
)

MEGA_RANKS, MEGA_TOP_K, MEGA_WIDEST, MEGA_TOKENS = 32, 32, 4096, 128
"""MegaMoE on Hopper: most ranks, experts of a token, channels of an expert; its capacity is a multiple of the last."""

FA3_WIDEST = 256
FA3_MIN_LATENT, FA3_MAX_LATENT, FA3_MAX_ROTARY = 256, 512, 64


def refuse(reason: str | None) -> None:
    """Raises ValueError with the reason, if there is one."""
    if reason:
        raise ValueError(reason)


def flashinfer_absorbed(latent: int, rotary: int) -> str | None:
    if latent % 128 or rotary % 64:
        return f"FlashInfer's MLA needs latents of 128 n and rotary widths of 64 n, not {latent} and {rotary}"
    return None


def flashinfer_expanded(key: int, value: int) -> str | None:
    if (key, value) not in FLASHINFER_EXPANDED:
        return f"FlashInfer has no kernels for keys of {key} and values of {value}"
    return None


def flashinfer_paged(width: int) -> str | None:
    if width not in FLASHINFER_HEADS:
        return f"FlashInfer has no kernels for heads of {width}, but of {', '.join(map(str, FLASHINFER_HEADS))}"
    return None


def flashmla_absorbed(latent: int, rotary: int) -> str | None:
    if (latent, rotary) != (FLASHMLA_LATENT, FLASHMLA_ROTARY):
        return f"FlashMLA has kernels for {FLASHMLA_LATENT}+{FLASHMLA_ROTARY} channels, not {latent}+{rotary}"
    return None


def flashmla_whole(width: int) -> str | None:
    """Rows that are keys and values as a whole, with attention sinks."""
    if width != FLASHMLA_LATENT:
        return f"FlashMLA has sinks for rows of {FLASHMLA_LATENT} channels, not {width}"
    return None


def flashmla_records(heads: int) -> str | None:
    most = FLASHMLA_RECORD_HEADS[-1]
    return f"FlashMLA reads lists of slots for at most {most} query heads, not {heads}" if heads > most else None


def flashmla_record_heads(heads: int) -> int:
    """Query heads of the kernel that runs `heads`: the others are padding."""
    return next(count for count in FLASHMLA_RECORD_HEADS if heads <= count)


def trtllm_absorbed(latent: int, rotary: int, heads: int) -> str | None:
    if (latent, rotary) not in TRTLLM_WIDTHS:
        known = " or ".join(f"{c}+{p}" for c, p in TRTLLM_WIDTHS)
        return f"trtllm-gen's MLA has kernels for {known} channels, not {latent}+{rotary}"
    if heads > TRTLLM_HEADS[1]:
        return f"trtllm-gen's MLA has kernels for at most {TRTLLM_HEADS[1]} query heads, not {heads}"
    return None


def trtllm_page(page_size: int) -> str | None:
    if page_size not in TRTLLM_PAGES:
        known = " or ".join(map(str, TRTLLM_PAGES))
        return f"trtllm-gen's MLA reads pages of {known} tokens, --page-size is {page_size}"
    return None


def trtllm_heads(heads: int) -> int:
    """`heads`, padded to a number that has kernels."""
    return heads if heads <= TRTLLM_HEADS[0] else TRTLLM_HEADS[1]


def fa3_absorbed(latent: int, rotary: int) -> str | None:
    """`qv`: the value as a second part of the key. Source: hopper/flash_api.cpp."""
    fits = FA3_MIN_LATENT <= latent <= FA3_MAX_LATENT and rotary <= FA3_MAX_ROTARY
    if not fits or latent % 8 or rotary % 8:
        return f"FlashAttention 3 has no kernels for a latent of {latent} and {rotary} rotary channels"
    return None


def fa3_expanded(key: int, value: int) -> str | None:
    unequal = (128 < key <= 192 and 96 < value <= 128) or (key <= 64 and value <= 512)
    if key > FA3_WIDEST or key % 8 or value % 8 or not (key == value or unequal):
        return f"FlashAttention 3 has no kernels for keys of {key} and values of {value}"
    return None


def fa3_paged(width: int) -> str | None:
    return fa3_expanded(width, width)


def flashinfer_mla(widths: HeadWidths) -> str | None:
    return flashinfer_absorbed(widths.latent, widths.rotary) or flashinfer_expanded(widths.key, widths.value)


def flashinfer_fp8(widths: HeadWidths) -> str | None:
    """Latents of unscaled e4m3 numbers. Source: flashinfer/mla/_batch_mla/_backends/_fa_common.py, 0.7.2."""
    if (widths.latent, widths.rotary) != (512, 64):
        return f"FlashInfer reads FP8 latents of 512+64 channels, not {widths.latent}+{widths.rotary}"
    return flashinfer_mla(widths)


def flashinfer_gqa(widths: HeadWidths) -> str | None:
    return _one_width("FlashInfer", widths) or flashinfer_paged(widths.key)


def flashmla(widths: HeadWidths) -> str | None:
    return flashmla_absorbed(widths.latent, widths.rotary)


def trtllm_mla(widths: HeadWidths) -> str | None:
    """Prompts run on FlashInfer's kernels."""
    own = trtllm_absorbed(widths.latent, widths.rotary, widths.heads)
    return own or flashinfer_expanded(widths.key, widths.value)


def trtllm_experts(hidden: int, width: int) -> str | None:
    if hidden % 128 or width % 128:
        return f"trtllm-gen's fused experts have widths of 128 n channels, not {hidden} and {width}"
    return None


def mega_moe(hidden: int, width: int, top_k: int) -> str | None:
    """Source: asserts of csrc/apis/sm90_mega.hpp, sgl-deep-gemm 0.2.5; the pre-dispatch kernel has a thread for 8
    channels."""
    if hidden % 512 or hidden > 8192 or width % 256 or width > MEGA_WIDEST:
        return (
            f"MegaMoE has hidden sizes of 512 n up to 8192 and experts of 256 n up to {MEGA_WIDEST} channels, not "
            f"{hidden} and {width}"
        )
    return f"MegaMoE sums at most {MEGA_TOP_K} experts of a token, not {top_k}" if top_k > MEGA_TOP_K else None


def trtllm_experts_of(count: int, top_k: int) -> int:
    """Experts that trtllm-gen counts for `count` held ones: more than these, more than `top_k`, a multiple of 4."""
    return -(-(max(count, top_k) + 1) // 4) * 4


def fa3_mla(widths: HeadWidths) -> str | None:
    return fa3_absorbed(widths.latent, widths.rotary) or fa3_expanded(widths.key, widths.value)


def fa3_gqa(widths: HeadWidths) -> str | None:
    return _one_width("FlashAttention 3", widths) or fa3_paged(widths.key)


def _one_width(name: str, widths: HeadWidths) -> str | None:
    """The adapters of grouped-query attention pass one width for keys and values."""
    if widths.key == widths.value:
        return None
    return f"the {name} row has paged keys and values of one width, not {widths.key} and {widths.value}"
