"""The products of routed experts of named models as cases for ahead-of-time compilation."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from moe_engine.kernels.experts.shapes import (
    AWQ,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    FOUR_BIT_MODELS,
    GEMMA_4,
    GPT_OSS_20B,
    GPT_OSS_20B_MXFP4,
    KIMI_K2,
    KIMI_K3,
    MINIMAX_M3,
    NEMOTRON_3,
    NEMOTRON_3_SUPER,
    QWEN3_30B_ROWS,
    ExpertModel,
)
from moe_engine.kernels.experts.tiles import four_bits_tiles, tiles_of
from moe_engine.kernels.experts.triton_grouped_gemm import (
    Groups,
    constants_of,
    down_kernel,
    gate_up_kernel,
    gathering_constants,
)
from moe_engine.kernels.linear.triton_four_bits import options_of, scales_dtype
from moe_engine.kernels.quantization.protocol import FP8
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.launch import element


def cases_of(
    model: ExpertModel,
    num_experts: int,
    mean_rows: int,
    padded: bool,
    dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
    pairs: bool = False,
) -> list[AotCase]:
    """Both products of a layer's experts on one rank, with gathered rows unless padded or `pairs`."""
    stored = FP8 if model.fp8 else torch.uint8 if model.format else dtype
    fp8, kind, weight = model.fp8, element(FP8 if model.fp8 else dtype), element(stored)
    few = kind if model.format is None else four_bits_tiles(model.format, model.activation)
    table = tiles_of(few, deterministic)
    groups = Groups(torch.empty(0), num_experts, int(padded), 0, mean_rows, table, pairs)
    first, second = table.gate_up.at(mean_rows), table.down.at(mean_rows)
    signature = {
        "x": f"*{kind}", "sizes": "*i32:1", "weight": f"*{weight}", "capacity": "i32", "x_scale_stride": "i32",
    }  # fmt: skip
    scales = {"x_scales": "*fp32", "weight_scales": "*fp32"} if fp8 else {}
    if model.format is not None:
        scales["weight_scales"] = f"*{element(scales_dtype(model.format))}"
        scales |= {"whole": "*fp32"} if model.format.nvfp4 else {}
    none: dict[str, Any] = dict.fromkeys({"x_scales", "weight_scales", "whole"} - scales.keys())
    signature |= scales
    layout = "padded" if padded else "pairs" if pairs else "grouped"
    name = f"{model.name}_e{num_experts}_{layout}{'_fixed' * deterministic}"
    if model.biased:
        signature["bias"] = "*fp32"
    else:
        none["bias"] = None
    shifted = model.biased or model.activation.alpha > 0
    columns = model.width // 2 if model.activation.squared else model.width
    constants = constants_of(
        groups, columns, model.hidden, stored, first, first.tma, shifted, model.format, model.row_scales
    )
    constants |= gathering_constants(1 if padded else model.top_k, layout == "grouped", False, model.activation)
    more = {"out": f"*{kind}", "slope": "fp32", "limit": "fp32"} | dict.fromkeys(
        ("x_scale_row", "x_scale_skip", "out_scale_stride"), "i32"
    )
    more |= {"out_scales": "*fp32"} if fp8 else {}
    more |= {"source": "*i32"} if layout == "grouped" else {}
    nothing = none | ({} if fp8 else {"out_scales": None}) | ({} if layout == "grouped" else {"source": None})
    if first.tma:
        more["weight"] = f"tensordesc<{kind}[{first.block_n}, {table.block_k}]>"
    up = AotCase(
        f"expert_gate_up_{name}_tile{first.block_m}", gate_up_kernel, signature | more, constants | nothing,
        first.num_warps, first.num_stages, True, options_of(model.format),
    )  # fmt: skip
    constants = constants_of(
        groups, model.hidden, model.width, stored, second, second.tma, model.biased, model.format, model.row_scales
    )
    signature["weight"] = f"tensordesc<{kind}[{second.block_n}, {table.block_k}]>" if second.tma else f"*{weight}"
    result = AotCase(
        f"expert_down_{name}_tile{second.block_m}x{second.block_n}", down_kernel,
        signature | {"out": f"*{element(dtype)}"}, constants | none, second.num_warps, second.num_stages, True,
        options_of(model.format),
    )  # fmt: skip
    return [up, result]


def aot_cases() -> list[AotCase]:
    """All experts of DeepSeek V3, 16 of them (one rank), and all of V2-Lite and gpt-oss-20b, at decode and prefill
    sizes; experts in 4 bits as one of eight ranks holds them, a part of all or some."""
    found: dict[str, AotCase] = {}
    for mean_rows in (8, 32, 64, 512):
        for model, num_experts, padded in (
            (DEEPSEEK_V3, 256, False),
            (DEEPSEEK_V3, 16, True),
            (DEEPSEEK_V2_LITE, 64, False),
            (DEEPSEEK_V2_LITE, 64, True),
        ):
            found |= {case.name: case for case in cases_of(model, num_experts, mean_rows, padded)}
    plain = product((GPT_OSS_20B, MINIMAX_M3, QWEN3_30B_ROWS, NEMOTRON_3, NEMOTRON_3_SUPER, GEMMA_4), (8, 512))
    for model, mean_rows in (*plain, *product((GPT_OSS_20B_MXFP4,), (8, 32, 64, 512))):
        found |= {case.name: case for case in cases_of(model, model.num_experts, mean_rows, False)}
    for model in FOUR_BIT_MODELS:
        dtype = torch.float16 if model.format == AWQ else torch.bfloat16
        for mean_rows, num_experts, part in ((8, 48, model), (32, 48, model), (512, model.num_experts, model.part(8))):
            made = cases_of(part, num_experts, mean_rows, part is model, dtype)
            found |= {case.name: case for case in made}
    for mean_rows in (64, 512):
        found |= {case.name: case for case in cases_of(KIMI_K3.part(8), 896, mean_rows, False)}
    whole = (
        (DEEPSEEK_V3, 256), (DEEPSEEK_V2_LITE, 64), (GPT_OSS_20B_MXFP4, 32), (GPT_OSS_20B, 32),
        (KIMI_K2.part(8), 384), (KIMI_K3.part(8), 896), (QWEN3_30B_ROWS, 128), (NEMOTRON_3, 128),
        (NEMOTRON_3_SUPER, 512), (GEMMA_4, 128),
    )  # fmt: skip
    for model, num_experts in whole:
        found |= {case.name: case for case in cases_of(model, num_experts, 1, False, pairs=True)}
    fixed = (cases_of(model, count, 8, False, deterministic=True) for model, count in whole[:3])
    return [*found.values(), *(case for cases in fixed for case in cases)]
