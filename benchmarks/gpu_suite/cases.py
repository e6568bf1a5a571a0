"""Cases in addition to the named shapes: small attention, experts in the padded layout, quantization, permutation.

Sizes are those of the models in the families' `shapes.py`. Legend: E experts, M rows of an expert.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_cases import attention_case, attention_cases
from benchmarks.gpu_suite import (
    compressed_cases,
    draft_cases,
    form_cases,
    form_products,
    fused_cases,
    index_cases,
    layer_cases,
)
from benchmarks.gpu_suite.launched import Counted, counted, kernel_case
from benchmarks.gpu_suite.setting import Setting
from benchmarks.kernel_cases import (
    Call,
    KernelCase,
    all_cases,
    experts_case,
    linear_case,
    load_experts,
    normal,
    op_case,
    writes,
)
from benchmarks.step_costs.costs import Routing
from moe_engine.kernels.attention import shapes as attention
from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.experts.shapes import (
    DEEPSEEK_V3,
    FOUR_BIT_MODELS,
    GPT_OSS_20B,
    KIMI_K3,
    MINIMAX_M3,
    MXFP4,
    NEMOTRON_3,
    NEMOTRON_3_SUPER,
    QWEN3_30B_ROWS,
    ExpertModel,
    ExpertShape,
)
from moe_engine.kernels.linear.shapes import AWQ, FOUR_BIT_PRODUCTS, LLAMA_8B_ROWS, LinearShape
from moe_engine.kernels.ops.shapes import ModelOps

EXPERTS, FEW_EXPERTS = 16, 4  # per rank
OTHER_ACTIVATIONS = (NEMOTRON_3, GPT_OSS_20B, MINIMAX_M3, KIMI_K3.part(8))
"""Without a gate, with biases, with a limit and a slope, SiTU. Limits of SiLU are in `four_bits`."""
V2_LITE = ExpertModel("deepseek-v2-lite", 64, 6, 2048, 1408, fp8=False)
_MODELS = dict.fromkeys((V2_LITE, *OTHER_ACTIVATIONS, *FOUR_BIT_MODELS, *form_products.EXPERTS))
PADDED = [model for model in _MODELS if model.format != AWQ and model not in (DEEPSEEK_V3, QWEN3_30B_ROWS)]
"""Experts that read the rows of a dispatch, besides those of DeepSeek V3 and of rows' scales."""
_EXCHANGE = "ranks in one process: `ranks_here.RanksHere`"
_ALL_REDUCE = "ranks in one process: `all_reduce.RanksOfSum`"
ELSEWHERE = {
    **dict.fromkeys(("send_kernel", "receive_kernel", "combine_send_kernel", "sum_kernel"), _EXCHANGE),
    **dict.fromkeys(("one_shot_kernel", "two_shot_kernel"), _ALL_REDUCE),
}
"""Kernels without a case, and what runs them instead."""


def padded_experts(
    rows: int, model: ExpertModel = DEEPSEEK_V3, experts: int = EXPERTS, layout: str = "padded"
) -> KernelCase:
    """The experts of one rank with `rows` tokens each, in the padded or the grouped layout; aligned: as DeepEP 2 sends
    them to kernels with a row alignment, to others grouped. The results of these rows."""

    def prepare(kernel: Any, device: str) -> Call:
        weights = load_experts(kernel, experts, model, device)
        x = normal(experts, rows, model.hidden, device=device)
        batch = ExpertBatch("padded", x, counts=torch.full((experts,), rows, dtype=torch.int32, device=device))
        align = kernel.capabilities.row_alignment if layout == "aligned" else None
        if align is not None and (alignment := align(weights, rows)):
            starts = torch.arange(experts, dtype=torch.int32, device=device) * (-(-rows // alignment) * alignment)
            places = (starts[:, None] + torch.arange(rows, dtype=torch.int32, device=device)).flatten()
            spread = x.new_zeros(int(starts[-1]) + alignment * -(-rows // alignment), model.hidden)
            spread.index_copy_(0, places, x.flatten(0, 1))
            batch = ExpertBatch("aligned", spread, ends=starts + rows, alignment=alignment)
            return lambda: kernel.run(batch, weights).index_select(0, places)
        if layout != "padded":
            offsets = torch.arange(experts + 1, dtype=torch.int32, device=device) * rows
            batch = ExpertBatch("grouped", x.flatten(0, 1), offsets=offsets)
        return lambda: kernel.run(batch, weights)

    numbers = 3 * model.hidden * model.width
    scales = 2 * model.width + model.hidden if model.row_scales else numbers // 128**2
    stored: float = numbers + 4 * scales if model.fp8 else 2 * numbers
    if model.format is not None:
        stored = float(numbers * model.format.bytes_on_gpu())
    moved = round(experts * (stored + 4 * rows * model.hidden))
    flops = 2 * experts * rows * numbers
    own = "" if model in (DEEPSEEK_V3, QWEN3_30B_ROWS) else f".{model.name}"
    name = f"experts.{layout}{'.rows' * model.row_scales}{own}.m{rows}"
    return KernelCase("experts", name, Counted(moved, flops), model.fp8, prepare)


@kernel_case("quantization", "quantize.{width}.t{tokens}")
def quantize(kernel: Any, device: str, tokens: int, width: int) -> Call:
    """bf16 rows to e4m3 with one scale per 128 channels."""
    x = normal(tokens, width, device=device)
    return lambda: kernel.quantize_rows(x).scales


@kernel_case("quantization", "add_rms_norm_quantized.{width}.t{tokens}")
def norm_quantize(kernel: Any, device: str, tokens: int, width: int) -> Call:
    """Residual add, norm, and output in bf16 and e4m3, as before MoE experts."""
    x, stream = (normal(tokens, width, device=device) for _ in range(2))
    weight = 1 + 0.1 * normal(width, device=device, dtype=torch.float32)

    def call() -> Any:
        numbers, rows = kernel.rms_norm_quantize(x, weight, 1e-6, stream)
        return numbers, rows.scales

    return call


def permute(tokens: int, model: ExpertModel = DEEPSEEK_V3) -> KernelCase:
    """Rows gathered in expert order, with a given order."""

    def prepare(kernel: Any, device: str) -> Call:
        x = normal(tokens, model.hidden, device=device)
        ids = torch.rand(tokens, model.num_experts, device=device).topk(model.top_k).indices.int()
        positions = kernel.sort_by_expert(ids, model.num_experts).positions.view(tokens, model.top_k)
        out = x.new_empty(positions.numel(), model.hidden)
        return writes(out, kernel.permute, x, positions, out)

    name, routing = f"permute.{model.hidden}x{model.top_k}.t{tokens}", Routing(tokens, model.top_k, 1, 1)
    return counted("permutation", name, prepare, routing=routing)


def row_products(*rows: int) -> list[LinearShape]:
    """Products of Llama 3.1 8B in FP8 with a scale per row."""
    return [shape for count in rows for shape in LLAMA_8B_ROWS.at(count)]


@kernel_case("permutation", "order.{num_experts}x{top_k}.t{tokens}")
def order(kernel: Any, device: str, tokens: int, num_experts: int = 256, top_k: int = 8) -> Call:
    """Positions of (token, choice) pairs in the order of their experts."""
    ids = torch.rand(tokens, num_experts, device=device).topk(top_k).indices.int()

    def call() -> tuple[Tensor, ...]:
        found = kernel.sort_by_expert(ids, num_experts)
        return found.offsets, found.ends, found.positions, found.source

    return call


def four_bits(*rows: int) -> list[KernelCase]:
    """A product of each form of 4 bits, and the experts of a rank in bfloat16."""
    products = [next(form.at(count)) for form in FOUR_BIT_PRODUCTS for count in rows]
    experts = [model for model in FOUR_BIT_MODELS if model.format != AWQ]
    return [
        *map(linear_case, products),
        *(experts_case(ExpertShape(model, count, EXPERTS)) for model in experts for count in rows),
    ]


def parity_cases() -> list[KernelCase]:
    """Small cases, enough for correctness: decodes, verifications, chunks and prompts of every kind of attention."""
    latent = (attention.DEEPSEEK_V3, attention.DEEPSEEK_V3_FP8, attention.DEEPSEEK_V2_LITE, GLM_47_FLASH)
    grouped = (attention.LLAMA_3_8B, attention.QWEN3_30B_A3B, QWEN3_NEXT)
    shapes = [model.absorbed(5, count, 300) for model in latent for count in (1, 4)]
    shapes += [model.expanded(2, 70, context) for model in (latent[0], *latent[2:]) for context in (70, 300)]
    shapes += [model.paged(5, count, 300) for model in grouped for count in (1, 4, 130)]
    return [
        *map(attention_case, shapes),
        *map(linear_case, row_products(3, 40, 300)),
        *(experts_case(ExpertShape(QWEN3_30B_ROWS, tokens, EXPERTS)) for tokens in (5, 300)),
        padded_experts(8, QWEN3_30B_ROWS),
        padded_experts(8),
        *(padded_experts(rows, layout="aligned") for rows in (40, 200)),
        *(padded_experts(rows, model, FEW_EXPERTS) for model in PADDED for rows in (3, 40, 200)),
        padded_experts(200, QWEN3_30B_ROWS),
        padded_experts(200),
        *(
            padded_experts(rows, model, FEW_EXPERTS, "grouped")
            for model in (DEEPSEEK_V3, QWEN3_30B_ROWS, *PADDED)
            for rows in (3, 40, 200)
        ),
        *(experts_case(ExpertShape(model, tokens, EXPERTS)) for model in OTHER_ACTIVATIONS for tokens in (5, 300)),
        layer_cases.lora(9, 4096, (0, 4096, 5120, 6144), 256),
        quantize(130, DEEPSEEK_V3.hidden),
        norm_quantize(130, DEEPSEEK_V3.hidden),
        permute(130),
        order(130),
        order(300),
        *fused_cases.parity_cases(),
        *four_bits(3, 130),
        *compressed_cases.cases(9, 1024, 8, 512, 4096),
        *index_cases.cases(9, 1024, 64, 256),
        *draft_cases.cases(5, 300, 16),
        *layer_cases.cases(9, 2048, 32, 128, 100),
        *form_cases.cases(9, 300, 2048, 16, 128),
        *form_products.cases(9, 2000, 1024, 16, 128),
        *form_products.experts(EXPERTS),
    ]


def timed_cases() -> list[KernelCase]:
    """The shapes with targets, and neighboring sizes."""
    experts = [padded_experts(rows) for rows in (8, 32, 64, 128)]
    experts += [padded_experts(rows, layout="aligned") for rows in (32, 64)]
    hidden = DEEPSEEK_V3.hidden
    experts += [experts_case(ExpertShape(QWEN3_30B_ROWS, tokens, QWEN3_30B_ROWS.num_experts)) for tokens in (32, 4096)]
    experts += [experts_case(ExpertShape(NEMOTRON_3, tokens, NEMOTRON_3.num_experts)) for tokens in (8, 128, 4096)]
    experts += [experts_case(ExpertShape(NEMOTRON_3_SUPER, tokens, 512)) for tokens in (8, 128)]
    experts += map(linear_case, row_products(1, 32, 256, 4096))
    return [
        *attention_cases(),
        *experts,
        quantize(4096, hidden),
        norm_quantize(4096, hidden),
        permute(4096),
        order(4096),
        *fused_cases.timed_cases(8, DEEPSEEK_V3.hidden, 8, 4096),
        *four_bits(1, 128),
        *compressed_cases.cases(128, 4096, 64, 512, 4096),
        *index_cases.cases(128, 4096, 64, 512),
        *draft_cases.cases(64, 4096, 128),
        *layer_cases.cases(128, 4096, 32, 128, 2048),
        *form_cases.cases(128, 4096, 4096, 64, 128),
        *form_products.cases(128, 4096, 4096, 64, 128),
        *form_products.experts(EXPERTS),
    ]


TINY_OPS = ModelOps("tiny", 96, 300, 4, 16, 32, 48, 64, 24, 16, 3)


GLM_47_FLASH = attention.LatentModel("glm-4.7-flash", 20, nope=192, value=256)
QWEN3_NEXT = attention.GroupedModel("qwen3-next", 16, 2, 256)


def asked(setting: Setting, own: Callable[[], list[KernelCase]]) -> list[KernelCase]:
    """The tiny cases in a dry run, else `own` ones and those of the named shapes; without those that are not asked
    for. Cases that differ only in sizes come one after the other round: a time limit cuts the most similar ones."""
    found = tiny_cases() if setting.dry else [*own(), *all_cases()]
    named = [case for case in found if not setting.only or any(text in case.name for text in setting.only)]
    seen, order = Counter[tuple[str, str]](), {}
    for case in named:
        kind = case.family, re.sub(r"\d+", "", case.name)
        order[case.name] = seen[kind]
        seen[kind] += 1
    return sorted(named, key=lambda case: order[case.name])


def tiny_cases() -> list[KernelCase]:
    """Every kind of case in CPU sizes."""
    latent, grouped = attention.LatentModel("tiny", 2, 128, 64, 32, 32), attention.GroupedModel("tiny", 4, 2, 64)
    model = ExpertModel("tiny", 8, 2, 64, 48, fp8=False)
    shapes = [
        latent.absorbed(3, 2, 70),
        latent.absorbed(1, 1, 600),
        latent.expanded(2, 5, 9),
        grouped.paged(3, 1, 70),
        grouped.paged(1, 8, 8),
    ]
    fp8 = replace(model, name="tiny-fp8-rows", hidden=128, width=128, fp8=True, row_scales=True)
    rows = [linear_case(LinearShape("tiny.product", 3, 64, 128, False))]
    rows += [linear_case(LinearShape("tiny.fp8-rows", 3, 64, 128, True, row_scales=True))]
    rows += [linear_case(LinearShape("tiny.split", 40, 64, 1024, True))]
    rows += [experts_case(ExpertShape(fp8, 5, 4)), padded_experts(4, fp8, 4)]
    rows += [padded_experts(4, model, 4, layout) for layout in ("padded", "aligned")]
    rows += [quantize(5, 256), norm_quantize(5, 256), permute(5, model)]
    rows += [order(64), order(260)]
    coded = replace(model, name="tiny-mxfp4", hidden=128, width=128, format=MXFP4)
    for form in OTHER_ACTIVATIONS:
        own = replace(model, name=f"tiny-{form.name}", biased=form.biased, activation=form.activation)
        rows.append(experts_case(ExpertShape(own, 5, 4)))
        rows += [padded_experts(4, own, 4, layout) for layout in ("padded", "grouped")]
    return [
        *map(attention_case, shapes),
        *map(op_case, TINY_OPS.at(5)),
        *(op_case(shape) for shape in TINY_OPS.at(300) if shape.operation == "route"),
        *rows,
        *fused_cases.tiny_cases(),
        linear_case(LinearShape("tiny.mxfp4", 3, 64, 128, False, MXFP4)),
        experts_case(ExpertShape(coded, 5, 4)),
        padded_experts(4, coded, 4),
        padded_experts(4, coded, 4, "grouped"),
        *compressed_cases.cases(3, 64, 4, 64, 64),
        *index_cases.cases(3, 64, 2, 16, 32),
        *draft_cases.cases(2, 32, 4, 64),
        *layer_cases.cases(3, 128, 4, 32, 18),
        *form_cases.cases(3, 20, 128, 4, 32),
        *form_products.cases(3, 20, 70, 4, 32, wide=False, part=32),
    ]
