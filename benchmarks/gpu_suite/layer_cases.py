"""Cases of layers that DeepSeek V3 has none of, or of their less common forms: gated delta nets, convolutions, LoRA,
blocks of the residual, gates, rows of grouped attention, FP8 caches, contexts in chunks, weights of 4 bits, vision
towers.

Legend: T tokens, R requests, D hidden, H heads, G KV heads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.attention_cases import PAGE, paged_queries, pool_size
from benchmarks.gpu_suite.launched import counted, kernel_case
from benchmarks.kernel_cases import POSITIONS, Call, KernelCase, NotServed, normal, rotary_table, writes
from moe_engine.kernels.delta.protocol import DeltaShape, StateRuns
from moe_engine.kernels.kv_format import head_records, latent_records
from moe_engine.kernels.kv_format.formats import E4M3, FP8_GROUPS, head_width, latent_width
from moe_engine.kernels.lora.protocol import AdapterTokens, LoraWeights
from moe_engine.kernels.ops.head_factors import scale_heads
from moe_engine.kernels.ops.layer_norm import add_layer_norm
from moe_engine.kernels.ops.protocol import HeadNorms
from moe_engine.kernels.ops.residual_blocks import mix_blocks
from moe_engine.kernels.ops.short_conv import gated_conv
from moe_engine.kernels.ops.zero_experts import add_input
from moe_engine.kernels.sampling.protocol import Draw, SamplingParameters
from tests.kernels.drawn import block_residual, block_weights, delta_inputs

EPS = 1e-6


def delta(label: str, shape: DeltaShape, lens: list[int]) -> KernelCase:
    """A delta net's runs of tokens: decodes, or prompts in chunks."""

    def prepare(kernel: Any, device: str) -> Call:
        inputs, weights, states = delta_inputs(shape, sum(lens), len(lens), torch.bfloat16, device)
        runs = StateRuns.plain(lens, torch.arange(len(lens), device=device))
        return lambda: (kernel.run(inputs, weights, states, runs, shape), *states)

    return counted("delta", f"delta.{label}.{len(lens)}x{lens[0]}", prepare, fp8=True)


@kernel_case("ops", "gated_conv.{width}.{count}x{each}")
def short_conv(ops: Any, device: str, count: int, each: int, width: int, taps: int = 3) -> Call:
    """Convolutions between gates, of runs of `each` tokens."""
    kernel = ops.capabilities.gated_conv or gated_conv
    projected, kept = normal(count * each, 3 * width, device=device), normal(count, taps - 1, width, device=device)
    weights = torch.rand(taps, width, device=device) - 0.5
    runs = StateRuns.plain([each] * count, torch.arange(count, device=device))
    return lambda: (kernel(projected, weights, kept, runs), kept)


def lora(tokens: int, k: int, columns: tuple[int, ...], rank: int, slots: int = 4) -> KernelCase:
    """Products of several adapters with a common input."""

    def prepare(kernel: Any, device: str) -> Call:
        parts, n = len(columns) - 1, columns[-1]
        a, b = normal(slots, parts * rank, k, device=device), normal(slots, rank, n, device=device)
        weights, found = LoraWeights(a, b, columns), _adapters(tokens, slots, device)
        x, y = normal(tokens, k, device=device, scale=k**-0.5), normal(tokens, n, device=device)
        return writes(y, kernel.add, y, x, weights, found)

    return counted("lora", f"lora.{k}x{columns[-1]}.r{rank}.t{tokens}", prepare)


def _adapters(tokens: int, slots: int, device: str) -> AdapterTokens:
    """Of each slot equally many tokens, and as many without."""
    numbers = torch.arange(tokens).remainder(slots + 1).sub(1)
    found = AdapterTokens.of(numbers.numpy(), lambda x: x.to(device))
    assert found is not None
    return found


@kernel_case("ops", "mix_blocks.{rows}x{width}.t{tokens}")
def residual_blocks(ops: Any, device: str, tokens: int, rows: int, width: int) -> Call:
    """A part in the last block reads all rows of the residual, and their norm follows."""
    residual = block_residual(rows, width, tokens, device).bfloat16()
    weights, norm = block_weights(width, rows - 1, device=device), torch.rand(width, device=device) + 0.5
    x, mix = normal(tokens, width, device=device), ops.capabilities.mix_blocks or mix_blocks
    return lambda: (mix(x, residual, weights, norm), residual)


@kernel_case("ops", "gate_heads.{heads}x{width}{by_head:.by_head}{by_softplus:.softplus}.t{tokens}")
def head_gates(
    ops: Any, device: str, tokens: int, heads: int, width: int, by_head: bool, by_softplus: bool = False
) -> Call:
    """Results of attention times the sigmoid, or softplus, of a gate."""
    x, gate = (normal(tokens, heads, size, device=device) for size in (width, 1 if by_head else width))
    gates = ops.capabilities.gates
    if gates is not None:
        return lambda: gates.heads(x.clone(), gate, by_softplus)
    return lambda: x.clone() * (softplus(gate.float()).to(gate.dtype) if by_softplus else gate.sigmoid())


@kernel_case("ops", "scale_heads.{heads}x{width}+{zeros}.t{tokens}")
def head_factors(ops: Any, device: str, tokens: int, heads: int, width: int, zeros: int) -> Call:
    """Queries times factors by head and position, with zeros behind them."""
    q, run = normal(tokens, heads, width, device=device), ops.capabilities.scale_heads or scale_heads
    scale, bias = (torch.rand(heads, device=device) for _ in range(2))
    positions = torch.arange(tokens, device=device) * 1000
    return lambda: run(q, positions, scale, bias, zeros)


@kernel_case("ops", "gate_rows.{width}.t{tokens}")
def row_gates(ops: Any, device: str, tokens: int, width: int) -> Call:
    """A shared expert's result times the sigmoid of a product."""
    rows, x = (normal(tokens, width, device=device) for _ in range(2))
    weight, gates = normal(1, width, device=device, scale=width**-0.5), ops.capabilities.gates
    return lambda: rows * (x @ weight.T).sigmoid() if gates is None else gates.rows(rows.clone(), x, weight)


@kernel_case("ops", "lookup.{vocab}x{width}.t{tokens}")
def lookup(ops: Any, device: str, tokens: int, vocab: int, width: int) -> Call:
    """A rank's rows of the embedding: half of the ids are another rank's."""
    ids, weight = torch.randint(2 * vocab, (tokens,), device=device), normal(vocab, width, device=device)

    def apart() -> Tensor:
        own = ids - vocab
        known = own >= 0
        return weight[own.clamp(min=0)].masked_fill_(~known[:, None], 0)

    found = ops.capabilities.lookup
    return apart if found is None else lambda: found(ids, weight, vocab)


@kernel_case("ops", "zero_experts.{width}.k{top_k}.t{tokens}")
def zero_experts(ops: Any, device: str, tokens: int, width: int, top_k: int) -> Call:
    """The input by the weights of a third of the choices, and an addend."""
    x, add = normal(tokens, width, device=device), normal(tokens, width, device=device)
    weights = torch.rand(tokens, top_k, device=device)
    ids = torch.randint(-64, 128, (tokens, top_k), dtype=torch.int32, device=device).clamp(min=-1)
    found = ops.capabilities.add_input or add_input
    return lambda: found(x, weights, ids, add)


@kernel_case("ops", "layer_norm.{width}{unbiased:.unbiased}{first:.first}.t{tokens}")
def layer_norm(ops: Any, device: str, tokens: int, width: int, unbiased: bool = False, first: bool = False) -> Call:
    """A residual with an addend; first: without."""
    x, residual = normal(tokens, width, device=device), normal(tokens, width, device=device)
    weight, bias = torch.rand(width, device=device), None if unbiased else torch.rand(width, device=device)
    run = ops.capabilities.layer_norm or add_layer_norm

    def both() -> tuple[Tensor, Tensor]:
        summed = residual.clone()
        return run(None if first else x, summed, weight, bias, 1e-5), summed

    return both


@kernel_case("ops", "grouped_rows.{heads}x{groups}x{width}.t{tokens}")
def grouped_rows(ops: Any, device: str, tokens: int, heads: int, groups: int, width: int) -> Call:
    """Bias, norms, rotation and cache rows of grouped attention."""
    qkv = normal(tokens, heads + 2 * groups, width, device=device)
    q, k, v = qkv.split((heads, groups, groups), 1)
    bias, table = normal(qkv[0].numel(), device=device), rotary_table(width // 2, device)
    norms = HeadNorms(torch.rand(width, device=device) + 0.5, torch.rand(width, device=device) + 0.5, EPS)
    positions = torch.randint(POSITIONS, (tokens,), device=device)
    slots, caches = _cache(tokens, groups, width, device)
    given, fused = (positions, table), ops.capabilities.grouped_rows

    def apart() -> tuple[Tensor, ...]:
        added = (qkv + bias.view(-1, width)).split((heads, groups, groups), 1)
        rows = [ops.rms_norm(x, weight, EPS) for x, weight in zip(added, (norms.q, norms.k))]
        for x in rows:
            ops.rotate_leading(x, *given)
        ops.write_kv(rows[1], added[2], slots, *caches)
        return rows[0], *caches

    def together() -> tuple[Tensor, ...]:
        return fused(q, k, v, norms, *given, slots, *caches, bias), *caches

    return apart if fused is None else together


def _cache(
    tokens: int, groups: int, width: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, list[Tensor]]:
    """Slots of tokens, and zeroed caches of keys and values."""
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    return slots, [torch.zeros(2 * tokens, groups, width, dtype=dtype, device=device) for _ in "kv"]


def write_kv(tokens: int, groups: int, width: int, fp8: bool) -> KernelCase:
    """Keys and values into the cache, fp8: as e4m3 records."""

    def prepare(ops: Any, device: str) -> Call:
        keys, values = (normal(tokens, groups, width, device=device) for _ in "kv")
        form = (head_width(E4M3, width), torch.uint8) if fp8 else (width, torch.bfloat16)
        slots, caches = _cache(tokens, groups, form[0], device, form[1])
        return writes(caches, ops.write_kv, keys, values, slots, *caches)

    name = f"write_kv.{groups}x{width}{'.fp8' * fp8}.t{tokens}"
    return counted("ops", name, prepare, fp8=fp8, compared=lambda found: _unpacked(found, width))


def _unpacked(caches: list[Tensor], width: int) -> tuple[Tensor, ...]:
    return tuple(head_records.unpack(cache, width) for cache in caches)


def write_latent_records(tokens: int, latent: int, rotary: int) -> KernelCase:
    """MLA's rows as e4m3 records."""

    def prepare(ops: Any, device: str) -> Call:
        kv_a, weight = normal(tokens, latent + rotary, device=device), torch.rand(latent, device=device) + 0.5
        table, positions = rotary_table(rotary, device), torch.randint(POSITIONS, (tokens,), device=device)
        slots = torch.randperm(2 * tokens, device=device)[:tokens]
        cache = torch.zeros(2 * tokens, latent_width(E4M3, latent, rotary), dtype=torch.uint8, device=device)
        return writes(cache, ops.write_latent, kv_a, weight, EPS, positions, table, slots, cache)

    compared = partial(latent_records.unpack, latent=latent, rotary=rotary)
    return counted("ops", f"write_latent.{latent}x{rotary}.fp8.t{tokens}", prepare, fp8=True, compared=compared)


@kernel_case("mla", "chunks.{heads}x{nope}{bf16:.bf16}.q{tokens}.s{context}")
def chunked_context(
    kernel: Any, device: str, tokens: int, context: int, heads: int, nope: int, rotary: int, bf16: bool = False
) -> Call:
    """MLA's expanded form over a context in two chunks, whose rows are gathered, from FP8 records or from rows in 16
    bits, and their merge."""
    chunks, latent = kernel.capabilities.chunks, 4 * nope
    if chunks is None:
        raise NotServed("has no context in chunks")
    asked, half = paged_queries(1, tokens, context, device, PAGE), context // 2
    cache = normal(pool_size(asked), latent + rotary, device=device)
    cache = cache if bf16 else latent_records.pack(cache, latent, FP8_GROUPS)
    q = normal(tokens, heads, nope + rotary, device=device)
    kv = normal(context, heads, 2 * nope, device=device)
    plans = [chunks.plan(asked, [first], [count]) for first, count in ((0, half), (half, context - half))]
    rooms = [q.new_empty(count, latent + rotary) for count in (half, context - half)]

    def call() -> Tensor:
        found = []
        for part, plan, room in zip(kv.split((half, context - half)), plans, rooms):
            rows = kernel.gather_latent(cache, asked, plan, room, latent)
            found.append(chunks.expanded(q, part, rows[:, latent:], (nope + rotary) ** -0.5, plan))
        chunks.merge(*found[0], *found[1])
        return found[0][0]

    return call


@kernel_case("sampling", "probabilities.{vocab}x{tokens}.r{rows}")
def probabilities(sampling: Any, device: str, rows: int, vocab: int, tokens: int = 4) -> Call:
    """The target's probabilities of drafts."""
    logits = normal(rows, vocab, device=device, dtype=torch.float32, scale=3.0)
    ids = torch.randint(vocab, (rows, tokens), device=device)
    temperature, top_p, min_p = (torch.full((rows,), value, device=device) for value in (0.7, 0.95, 0.0))
    top_k = torch.full((rows,), vocab, dtype=torch.int64, device=device)
    draws = torch.full((rows,), Draw.NUCLEUS, dtype=torch.uint8).numpy()
    parameters = SamplingParameters(draws, temperature, top_p, min_p, top_k, device != "cpu")
    return lambda: sampling.probabilities(logits, parameters, ids)


@kernel_case("sampling", "greedy.{vocab}.r{rows}")
def greedy(sampling: Any, device: str, rows: int, vocab: int) -> Call:
    """The best tokens."""
    logits = normal(rows, vocab, device=device, dtype=torch.float32)
    return lambda: sampling.greedy(logits)


@kernel_case("permutation", "copy_rows.{rows}x{width}")
def copied_rows(kernel: Any, device: str, rows: int, width: int) -> Call:
    """The rows of experts before NVSHMEM sends them: their number is on the device."""
    x, count = normal(rows, width, device=device), rows * 3 // 4
    out, end = torch.zeros_like(x), torch.tensor([count], dtype=torch.int32, device=device)

    def call() -> Tensor:
        if kernel.name == "triton":
            from moe_engine.kernels.symm_mem.triton_copy import copy_rows

            copy_rows(x, out, end)
        else:
            out[:count] = x[:count]
        return out

    return call


def varlen(lens: list[int], heads: int, width: int) -> KernelCase:
    """A vision tower's attention within images."""

    def prepare(kernel: Any, device: str) -> Call:
        q, k, v = (normal(sum(lens), heads, width, device=device) for _ in "qkv")
        return lambda: kernel.run(q, k, v, lens, width**-0.5)

    return counted("varlen", f"varlen.{heads}x{width}.{len(lens)}x{lens[0]}", prepare)


def cases(tokens: int, hidden: int, heads: int, width: int, prompt: int) -> list[KernelCase]:
    """Of steps of `tokens` decodes, and of prompts of `prompt` tokens."""
    gdn = DeltaShape(heads // 2, heads, width, width, 4)
    kda = DeltaShape(heads, heads, width, width, 4, width, sigmoid=True)
    ssm = DeltaShape(max(1, heads // 8), heads, width, width // 2, 4, additive=True)
    lightning = DeltaShape(heads, heads, width, width, 0, additive=True, shortest=1.0, longest=1.0)
    bound = replace(kda, bound=-5.0)
    nets, runs, groups = (
        {"gdn": gdn, "kda": kda, "kda.bound": bound, "ssm": ssm, "lightning": lightning},
        ([1] * tokens, [prompt] * 2),
        heads // 4,
    )
    return [
        *(delta(label, shape, lens) for label, shape in nets.items() for lens in runs),
        short_conv(tokens, 1, hidden),
        short_conv(2, prompt, hidden),
        lora(tokens, hidden, (0, hidden, hidden * 5 // 4, hidden * 3 // 2), 16),
        residual_blocks(tokens, 9, hidden),
        head_gates(tokens, heads, width, by_head=False),
        head_gates(tokens, heads, width, by_head=True),
        head_gates(tokens, heads, width, by_head=True, by_softplus=True),
        head_factors(tokens, heads, width, zeros=width // 2),
        row_gates(tokens, hidden),
        lookup(tokens, 2 * hidden, hidden),
        zero_experts(tokens, hidden, 12),
        layer_norm(tokens, hidden),
        layer_norm(tokens, hidden, unbiased=True),
        layer_norm(tokens, hidden, first=True),
        layer_norm(tokens, hidden, unbiased=True, first=True),
        grouped_rows(tokens, heads, groups, width),
        write_kv(tokens, groups, width, fp8=False),
        write_kv(tokens, groups, width, fp8=True),
        write_latent_records(tokens, 4 * width, width // 2),
        chunked_context(prompt, 2 * prompt, heads, width, width // 2),
        chunked_context(prompt, 2 * prompt, heads, width, width // 2, bf16=True),
        greedy(tokens, 32 * hidden),
        probabilities(tokens, 32 * hidden),
        copied_rows(8 * tokens, hidden),
        varlen([prompt] * 2, heads, width),
    ]
