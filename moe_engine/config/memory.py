"""How memory is shared out: weights first, then the largest step, KV takes the rest (see `ledger`)."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.config.values import parse_count

OTHER_KV = "KV caches of 4 bits or with block scales"


@dataclass(frozen=True)
class MemoryArgs:
    mem_fraction_static: float | None = flag(
        None,
        "Part of the device's memory that weights and KV cache may fill, between 0 and 1. Left out: all that the "
        "ledger leaves after the largest step, with a reserve (a fifth of the available memory on a CPU).",
        metavar="FRACTION",
    )
    max_running_requests: int | None = flag(
        None,
        "Most requests computed in one step; others wait. Left out: by the size of the KV cache, at most 256 on a CPU "
        "(there a step's time grows with every request) and 2048 on a GPU.",
        parse=parse_count,
        metavar="N",
    )
    max_total_tokens: int | None = flag(
        None,
        "Size of the KV cache in tokens (64k and 1M are understood). Left out: what memory leaves, on a CPU no more "
        "than the running requests can use. More than fits is refused with the number that does.",
        parse=parse_count,
        metavar="TOKENS",
    )
    chunked_prefill_size: int | None = flag(
        None,
        "Most prompt tokens computed in one step; longer prompts run in chunks so that running answers do not stall. "
        "-1 turns chunking off. Left out: 2048 on a CPU, 2048 to 16384 by memory on a GPU.",
        parse=parse_count,
        metavar="TOKENS",
    )
    max_prefill_tokens: int = flag(
        16384,
        "Token budget of the prompts in one step when chunking is off or larger than this; the first prompt may "
        "exceed it.",
        parse=parse_count,
        metavar="TOKENS",
    )
    page_size: int | None = flag(
        None,
        "Tokens in a page, the unit in which KV slots are given out and prefixes are shared. Left out: 1, or what the "
        "attention backend needs.",
        metavar="TOKENS",
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Number format of the KV cache. auto: that of the activations. fp8_e4m3 holds nearly twice the tokens (rows "
        "carry their own scales), fp8_e5m2 exactly twice, less accurately.",
        choices=("auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"),
        synonyms={"bf16": "bfloat16"},
        unsupported=dict.fromkeys(("mxfp8", "fp4_e2m1", "nvfp4", "fp4_mx_block16"), OTHER_KV),
    )
