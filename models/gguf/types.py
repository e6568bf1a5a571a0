"""Served types of tensors in GGUF files, and their sizes. Imports no torch.

A block type stores the numbers of a row in blocks of fixed size and bytes. Source: ggml's ggml.h and ggml-quants.
"""

from __future__ import annotations

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES

ELEMENT_TYPES = {0: "F32", 1: "F16", 28: "F64", 30: "BF16", 24: "I8", 25: "I16", 26: "I32", 27: "I64"}
"""ggml's numbers of unquantized types, by the names of safetensors."""
BLOCKS = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4",
}  # fmt: skip
"""ggml's numbers of the served block types."""
UNSERVED = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
SERVED = (*BLOCK_TYPES, "F16", "BF16", "F32")


def type_name(number: int, tensor: str, source: str) -> str:
    """The name of a served type. Raises CheckpointError for others."""
    found = ELEMENT_TYPES.get(number) or BLOCKS.get(number)
    if found is None:
        name = UNSERVED.get(number, f"number {number}")
        raise CheckpointError(
            f"{source}: tensor {tensor} has the type {name}, which is not served; served are {', '.join(SERVED)}: use "
            "such a file of the same model (llama-quantize makes one)"
        )
    return found
