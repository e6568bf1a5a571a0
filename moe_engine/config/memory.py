"""Flags of memory: weights and the largest step come first, the KV cache gets the rest (see `planning.ledger`)."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.config.values import parse_count

WRITE_THROUGH = "write-through to the host-RAM tier"
OTHER_KV = "4-bit KV caches and KV caches with block scales"


@dataclass(frozen=True)
class MemoryArgs:
    mem_fraction_static: float | None = flag(
        None,
        "Fraction of the device's memory for weights and KV cache, between 0 and 1. Left out: all memory that the "
        "memory ledger leaves after the largest step and a reserve (a fifth of the available memory on a CPU).",
        metavar="FRACTION",
    )
    max_running_requests: int | None = flag(
        None,
        "Max requests that run at once; others wait. Left out: by the size of the KV cache, at most 256 on a CPU "
        "(there a step's time grows with every request) and 2048 on a GPU.",
        parse=parse_count,
        metavar="N",
    )
    max_total_tokens: int | None = flag(
        None,
        "Size of the KV cache in tokens (suffixes: 64k, 1M). Left out: as the free memory allows, on a CPU at most "
        "what the running requests can use. A size that does not fit is refused with the largest that does.",
        parse=parse_count,
        metavar="TOKENS",
    )
    chunked_prefill_size: int | None = flag(
        None,
        "Max prompt tokens of one step; longer prompts are prefilled in chunks, so that decodes do not stall. "
        "-1 disables chunked prefill. Left out: 2048 on a CPU, 2048 to 16384 by memory on a GPU.",
        parse=parse_count,
        metavar="TOKENS",
    )
    max_prefill_tokens: int = flag(
        16384,
        "Max prompt tokens of one step when chunked prefill is disabled or its size is larger than this; the first "
        "prompt may exceed it.",
        parse=parse_count,
        metavar="TOKENS",
    )
    enable_memory_saver: bool = flag(
        False,
        "Allows /release_memory_occupation, which gives the memory of weights and KV cache back to the system, and "
        "/resume_memory_occupation.",
    )
    page_size: int | None = flag(
        None,
        "Tokens of a page (block) of the KV cache, the unit of allocation and prefix sharing. Left out: 1, or what the "
        "attention backend needs.",
        metavar="TOKENS",
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Data type of the KV cache. auto: that of the activations. fp8_e4m3 holds nearly twice the tokens of bfloat16 "
        "(each row stores its scales), fp8_e5m2 exactly twice, less accurately.",
        choices=("auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"),
        synonyms={"bf16": "bfloat16"},
        unsupported=dict.fromkeys(("mxfp8", "fp4_e2m1", "nvfp4", "fp4_mx_block16"), OTHER_KV),
    )
    swa_full_tokens_ratio: float = flag(
        0.8,
        "Tokens in the KV pool of layers with a sliding window over those of the other layers, between 0 and 1, where "
        "memory is too small for the windows of all running requests. Smaller for long contexts.",
        metavar="RATIO",
    )
    disable_hybrid_swa_memory: bool = flag(
        False, "Layers with a sliding window keep the KV of the whole context, in the pool of the other layers."
    )
    enable_hierarchical_cache: bool = flag(
        False,
        "Host-RAM tier of the KV cache: prefixes that leave the KV cache are kept in host memory, and are loaded back "
        "when a request returns to them.",
        aliases=("--enable-hicache",),
    )
    hicache_ratio: float = flag(
        2.0, "Size of the host-RAM tier, as a multiple of the KV cache. Needs --enable-hierarchical-cache.",
        metavar="RATIO",
    )  # fmt: skip
    hicache_size: int = flag(
        0,
        "Size of the host-RAM tier of each rank in GB (10^9 bytes), instead of --hicache-ratio. 0: by the ratio.",
        metavar="GB",
    )
    kv_connector: str = flag(
        "host",
        "Tier or transport of KV with --enable-hierarchical-cache: host (host RAM), or the path of a class, as "
        "package.module:Class.",
        metavar="NAME",
    )
    hicache_write_policy: str = flag(
        "write_back",
        "When KV is copied to the host-RAM tier. write_back: when it leaves the KV cache.",
        choices=("write_back",),
        unsupported=dict.fromkeys(("write_through", "write_through_selective"), WRITE_THROUGH),
    )
