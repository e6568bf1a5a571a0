"""DeepEP's three generations, one adapter file each; `generation_of` tells them apart by what the module has."""

from moe_engine.parallel.dispatch.deepep.generation import generation_of, is_first_generation, why_not

FIRST_GENERATION_TOKENS = 511
"""Of a rank, in a low-latency dispatch of the first generation: what NVSHMEM's queue holds as the library sets it."""

__all__ = ["FIRST_GENERATION_TOKENS", "generation_of", "is_first_generation", "why_not"]
