"""FP8 products and experts launched outside the interpreter on an absent device, in a separate process:
``python -m tests.kernels.triton.outside_experts`` prints a `difference`.
"""

from __future__ import annotations

import json
from unittest.mock import patch

import torch

from moe_engine.kernels.experts import triton_expert_cases
from moe_engine.kernels.experts.batch import ExpertBatch, ExpertBiases
from moe_engine.kernels.experts.shapes import (
    AWQ,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    FOUR_BIT_MODELS,
    GPT_OSS_20B_MXFP4,
    ExpertModel,
)
from moe_engine.kernels.experts.triton_experts import PAIRS, TritonExperts
from moe_engine.kernels.linear import triton_four_bits_gemm
from moe_engine.kernels.linear.shapes import FOUR_BIT_PRODUCTS, LinearShape
from moe_engine.kernels.linear.tiles import FEW_BLOCK_FP8, FEW_ROWS
from moe_engine.kernels.linear.triton_block_gemm import cases_of
from moe_engine.kernels.linear.triton_linear import TritonLinear
from moe_engine.kernels.permutation import triton_permute
from moe_engine.kernels.permutation.triton_permute import TritonPermutation
from moe_engine.kernels.quantization import triton_groups, triton_rows
from moe_engine.kernels.quantization.codes import CodedWeight
from moe_engine.kernels.quantization.protocol import BlockWeight
from moe_engine.kernels.triton.aot import AotCase
from tests.kernels.triton.cache_keys import difference, there

ARCH = 90
MODULES = triton_rows, triton_groups, triton_permute, triton_expert_cases
HIDDEN, WIDTH, RANK = 7168, 2048, 16  # DeepSeek V3's, and the experts of one of 16 ranks
SOME = 48
FEW = 16
"""Rows of an expert for which experts in 4 bits are launched too."""


def launch(tokens: int, capacity: int) -> None:
    """A shared expert's product, V3's experts of one rank on a padded batch, and V2-Lite's routed experts."""
    permutation = TritonPermutation()
    _, positions = permutation.place(there(tokens, 8, dtype=torch.int32), RANK, capacity)
    permutation.permute(there(tokens, HIDDEN), positions, there(RANK * capacity, HIDDEN))
    linear, experts = TritonLinear(), TritonExperts()
    x = there(tokens, HIDDEN)
    linear.run(x, linear.prepare_blocks(BlockWeight.empty(2 * WIDTH, HIDDEN, "meta")))
    weights = experts.allocate_blocks(RANK, HIDDEN, WIDTH, "meta")
    counts = there(RANK + 1, dtype=torch.int32)[1:]  # aligned or not, the kernel is the same
    experts.run(ExpertBatch("padded", there(RANK, capacity, HIDDEN), counts=counts), weights)
    if capacity <= FEW:
        launch_four_bits(experts, capacity)
    lite = DEEPSEEK_V2_LITE
    weights = experts.allocate(lite.num_experts, lite.hidden, lite.width, torch.bfloat16, "meta")
    ids, choices = there(tokens, 6, dtype=torch.int32), there(tokens, 6, dtype=torch.float32)
    experts.run_routed(there(tokens, lite.hidden), choices, ids, weights, there(tokens, lite.hidden))


def launch_four_bits(experts: TritonExperts, capacity: int) -> None:
    """gpt-oss-20b's experts on a padded batch, some of each other form of 4 bits, and dense products."""
    row = TritonLinear()
    for products in FOUR_BIT_PRODUCTS:
        first = next(products.at(capacity))
        weight = CodedWeight.empty(products.format, first.n, first.k, "meta")
        with patch.object(triton_four_bits_gemm.triton_four_bits, "store"):
            prepared = row.prepare_codes(weight)
        dtype = torch.float16 if products.format == AWQ else torch.bfloat16
        for count in (capacity - 1, capacity):
            row.run(there(count, first.k, dtype=dtype), prepared)
    for model in (GPT_OSS_20B_MXFP4, *FOUR_BIT_MODELS):
        assert model.format is not None
        count, shapes = min(model.num_experts, SOME), (2 * model.width, model.hidden)
        weights = experts.allocate_codes(count, model.hidden, model.width, "meta", model.format)
        if model.biased:
            weights.bias = ExpertBiases(*(there(count, width, dtype=torch.float32) for width in shapes), 1.702, 7.0)
        weights.activation = model.activation
        counts, dtype = there(count, dtype=torch.int32), dtype_of(model)
        experts.run(ExpertBatch("padded", there(count, capacity, model.hidden, dtype=dtype), counts=counts), weights)


def dtype_of(model: ExpertModel) -> torch.dtype:
    return torch.float16 if model.format == AWQ else torch.bfloat16


def expected(tokens: int, capacity: int) -> list[AotCase]:
    """The cases of `launch`, among the cases of the modules."""
    named = {case.name: case for module in MODULES for case in module.aot_cases()}
    pairs = tokens * 6 <= PAIRS
    mean = 1 if pairs else -(-tokens * 6 // 64)
    tiles = FEW_BLOCK_FP8 if tokens <= FEW_ROWS else None
    found = cases_of(LinearShape("gate_up", tokens, 2 * WIDTH, HIDDEN, True), tiles=tiles)
    found += triton_expert_cases.cases_of(DEEPSEEK_V3, RANK, capacity, True)
    found += triton_expert_cases.cases_of(DEEPSEEK_V2_LITE, 64, mean, False, pairs=pairs)
    if capacity <= FEW:
        found += [
            case
            for products in FOUR_BIT_PRODUCTS
            for case in triton_four_bits_gemm.cases_of(next(products.at(capacity)))
        ]
        for model in (GPT_OSS_20B_MXFP4, *FOUR_BIT_MODELS):
            count = min(model.num_experts, SOME)
            found += triton_expert_cases.cases_of(model, count, capacity, True, dtype_of(model))
    names = [f"fp8_quantize_{HIDDEN}", f"groups_quantize_padded_{HIDDEN}", f"expert_permute_{HIDDEN}"]
    if tokens > 100:
        names += [f"expert_count_{RANK}", f"expert_place_padded_{RANK}", "expert_count_and_place_64"]
    else:  # few pairs: one launch
        names += [f"expert_place_alone_padded_{RANK}", *([] if pairs else ["expert_place_alone_64"])]
    names.append("expert_combine_2048")
    return found + [named[name] for name in names]


def main() -> None:
    sizes = (((1, 3, 16), 16), ((2048, 2051), 64))  # each within a row of the tables
    cases = {case.name: case for tokens, capacity in sizes for count in tokens for case in expected(count, capacity)}

    def launches() -> None:
        for tokens, capacity in sizes:
            for count in tokens:
                launch(count, capacity)

    print(json.dumps(difference(cases.values(), launches, ARCH)))


if __name__ == "__main__":
    main()
