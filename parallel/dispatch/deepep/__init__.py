"""DeepEP's three generations, one adapter file each; `generation_of` tells them apart by what the module has."""

from moe_engine.parallel.dispatch.deepep.generation import generation_of, why_not

__all__ = ["generation_of", "why_not"]
