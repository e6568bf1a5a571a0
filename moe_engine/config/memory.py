"""Flags of memory: weights and the largest step come first, the KV cache gets the rest (`planning.memory`)."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.config.values import parse_count

FURTHER_LAYOUTS = "further layouts of the host-RAM tier"
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
        "Max requests that run concurrently; others wait. Left out: by the size of the KV cache, at most 256 on a CPU "
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
    cpu_offload_gb: float = flag(
        0.0,
        "Weights in host memory, in GB (2^30 bytes) of each rank: whole layers, spread evenly over the model, which "
        "every step copies to the GPU ahead of their use. Two buffers of the largest such layer remain on the GPU.",
        metavar="GB",
    )
    page_size: int | None = flag(
        None,
        "Tokens of a page (block) of the KV cache, the unit of allocation and prefix sharing. Left out: 1, or what the "
        "attention backend needs.",
        metavar="TOKENS",
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Data type of the KV cache. auto: that of the activations, or fp8_e4m3 if the checkpoint states an FP8 KV "
        "cache (kv_cache_quant_algo, kv_cache_scheme). fp8_e4m3 holds nearly twice the tokens of bfloat16 "
        "(each row stores its scales), fp8_e5m2 exactly twice, less accurately. For MLA fp8_e4m3 is fp8_ds_mla (rows "
        "with scales), or fp8_per_tensor (one byte a channel, one scale for a layer) where a GPU library reads it.",
        choices=("auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "fp8_per_tensor"),
        synonyms={"bf16": "bfloat16"},
        unsupported=dict.fromkeys(("mxfp8", "fp4_e2m1", "nvfp4", "fp4_mx_block16"), OTHER_KV),
    )
    swa_full_tokens_ratio: float = flag(
        0.8,
        "Size of the KV pool of sliding-window layers relative to that of the other layers, between 0 and 1, if "
        "memory is too small for the windows of all running requests. Choose less for long contexts. DeepSeek V4: "
        "0.1 unless set.",
        metavar="RATIO",
    )
    max_mamba_cache_size: int | None = flag(
        None,
        "States of a model with recurrent layers: one for each running request, the others are snapshots for cached "
        "prefixes. Left out: one snapshot for each running request.",
        metavar="STATES",
    )
    mamba_track_interval: int = flag(
        256,
        "Tokens between two snapshots of the state of a decoding request; its latest one is cached when it ends.",
        metavar="TOKENS",
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
    hicache_ratio: float | None = flag(
        None,
        "Size of the host-RAM tier, as a multiple of the KV cache (auto: 2; with a GPU at most what "
        "--hicache-host-memory-fraction leaves). Needs --enable-hierarchical-cache.",
        metavar="RATIO",
    )
    hicache_host_memory_fraction: float = flag(
        0.8,
        "With a GPU: share of the available host memory that the host-RAM tiers of all ranks of a machine may take "
        "if neither --hicache-ratio nor --hicache-size is given.",
        metavar="SHARE",
    )
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
        "auto",
        "When KV is copied to the host-RAM tier, and from there to storage. write_back: when it leaves the KV cache. "
        "write_through: as soon as it is cached. write_through_selective: when it is used a second time. auto: "
        "write_through with storage, else write_back.",
        choices=("auto", "write_back", "write_through", "write_through_selective"),
    )
    hicache_mem_layout: str = flag(
        "page_first",
        "Layout of the host-RAM tier. page_first: a page is one piece of memory. layer_first: an array for each layer.",
        choices=("page_first", "layer_first"),
        unsupported=dict.fromkeys(("page_first_direct", "page_first_kv_split", "page_head"), FURTHER_LAYOUTS),
    )
    hicache_io_backend: str = flag(
        "direct",
        "Copies between a GPU and the host-RAM tier. direct: one for each run of neighboring tokens. kernel: one for "
        "all tokens, through a buffer. No effect on a CPU.",
        choices=("direct", "kernel"),
        unsupported={"kernel_ascend": "other accelerators"},
    )
    hicache_storage_backend: str | None = flag(
        None,
        "Storage below the host-RAM tier, which a restarted server finds again: file (a folder), nixl (a folder, by a "
        "NIXL plugin), mooncake (Mooncake's store), or the path of a class, as package.module:Class. Needs "
        "--enable-hierarchical-cache.",
        metavar="NAME",
    )
    hicache_storage_dir: str | None = flag(
        None,
        "Folder of file and nixl storage. Left out: SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR, or a folder of this user "
        "below the system's temporary folder.",
        metavar="FOLDER",
    )
    hicache_storage_size: float = flag(
        0.0,
        "Limit of the storage in GB (10^9 bytes); the pages used longest ago are removed. 0: for a folder "
        "its present size and 90 % of the free disk.",
        metavar="GB",
    )
    hicache_storage_prefetch_policy: str = flag(
        "timeout",
        "How long a request waits for pages of the storage. best_effort: not at all once it can run; it uses the "
        "pages that have arrived. wait_complete: until all have arrived, at most 60 s. timeout: 1 s and 0.25 s per "
        "1024 tokens.",
        choices=("best_effort", "wait_complete", "timeout"),
    )
    hicache_storage_backend_extra_config: str | None = flag(
        None,
        "JSON object, or @FILE with one: prefetch_threshold (256 tokens; shorter prefixes are computed), "
        "prefetch_timeout_base (1 s), prefetch_timeout_per_ki_token (0.25 s), and settings of the backend.",
        metavar="JSON",
    )
