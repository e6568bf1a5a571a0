"""DeepEP's three generations, one adapter file each; `generation_of` distinguishes them by the module's attributes."""

from moe_engine.parallel.dispatch.deepep.generation import generation_of, is_first_generation, why_not

FIRST_GENERATION_TOKENS = 511
"""Max tokens of a rank in a low-latency dispatch of the first generation: by the library's NVSHMEM queue depth."""

__all__ = ["FIRST_GENERATION_TOKENS", "generation_of", "is_first_generation", "why_not"]
