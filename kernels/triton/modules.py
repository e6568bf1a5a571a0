"""The modules with Triton kernels. Each exposes ``aot_cases() -> list[AotCase]``.

Importing this imports no Triton. New kernel modules must be added here; a test compares the list with the
``triton_*.py`` files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_engine.kernels.triton.aot import AotCase

_FAMILIES = "moe_engine.kernels"

MODULES: tuple[str, ...] = (
    f"{_FAMILIES}.attention.triton.expanded",
    f"{_FAMILIES}.attention.triton.gather",
    f"{_FAMILIES}.attention.triton.latent",
    f"{_FAMILIES}.attention.triton.merge",
    f"{_FAMILIES}.attention.triton.merge_values",
    f"{_FAMILIES}.attention.triton.paged",
    f"{_FAMILIES}.attention.triton.tree",
    f"{_FAMILIES}.block_index.triton_blocks",
    f"{_FAMILIES}.compression.triton_compression",
    f"{_FAMILIES}.compression.triton_pairs",
    f"{_FAMILIES}.compression.triton_rows",
    f"{_FAMILIES}.delta.triton_delta",
    f"{_FAMILIES}.experts.triton_expert_cases",
    f"{_FAMILIES}.indexer.triton_keys",
    f"{_FAMILIES}.indexer.triton_pools",
    f"{_FAMILIES}.indexer.triton_scores",
    f"{_FAMILIES}.indexer.triton_select",
    f"{_FAMILIES}.permutation.triton_permute",
    f"{_FAMILIES}.linear.triton_block_gemm",
    f"{_FAMILIES}.linear.triton_fixed_gemm",
    f"{_FAMILIES}.linear.triton_four_bits_gemm",
    f"{_FAMILIES}.linear.triton_heads",
    f"{_FAMILIES}.lora.triton_lora",
    f"{_FAMILIES}.ops.triton_absorb",
    f"{_FAMILIES}.ops.triton_block_rounding",
    f"{_FAMILIES}.ops.triton_combine_norm",
    f"{_FAMILIES}.ops.triton_fp8_cache",
    f"{_FAMILIES}.ops.triton_gated_streams",
    f"{_FAMILIES}.ops.triton_gates",
    f"{_FAMILIES}.ops.triton_grouped",
    f"{_FAMILIES}.ops.triton_layer_norm",
    f"{_FAMILIES}.ops.triton_lookup",
    f"{_FAMILIES}.ops.triton_ngram_products",
    f"{_FAMILIES}.ops.triton_zero_experts",
    f"{_FAMILIES}.ops.triton_ngrams",
    f"{_FAMILIES}.ops.triton_norm",
    f"{_FAMILIES}.ops.triton_norm_route",
    f"{_FAMILIES}.ops.triton_residual_blocks",
    f"{_FAMILIES}.ops.triton_rotary",
    f"{_FAMILIES}.ops.triton_router",
    f"{_FAMILIES}.ops.triton_short_conv",
    f"{_FAMILIES}.ops.triton_sparse_mixer",
    f"{_FAMILIES}.ops.triton_streams",
    f"{_FAMILIES}.symm_mem.triton_all_reduce",
    f"{_FAMILIES}.symm_mem.triton_combine",
    f"{_FAMILIES}.symm_mem.triton_copy",
    f"{_FAMILIES}.symm_mem.triton_dispatch",
    f"{_FAMILIES}.quantization.triton_groups",
    f"{_FAMILIES}.quantization.triton_rows",
    f"{_FAMILIES}.varlen.triton_varlen",
    f"{_FAMILIES}.sampling.triton_sampling",
    f"{_FAMILIES}.speculation.triton_chains",
    f"{_FAMILIES}.speculation.triton_decode_inputs",
    f"{_FAMILIES}.speculation.triton_trees",
)


def all_cases() -> list[AotCase]:
    """The cases of all modules, in list order.

    Raises:
        ValueError: if two cases have the same name.
    """
    cases = [case for module in MODULES for case in import_module(module).aot_cases()]
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two ahead-of-time cases have the same name: {', '.join(twice)}")
    return cases
