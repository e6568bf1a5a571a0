"""Cases of DeepSeek V4 and V4.1: compressed entries, the rows that attention reads, residual streams, n-grams, rows of
rounded caches.

Legend: R requests of one token each, T tokens, W channels of an entry, S series, n streams, D hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.launched import counted, kernel_case
from benchmarks.gpu_suite.steps import Decodes
from benchmarks.kernel_cases import POSITIONS, Call, KernelCase, NotServed, normal, rotary_table, writes
from moe_engine.kernels.attention.selected import Selected, Turn
from moe_engine.kernels.compression.protocol import (
    CompressedTokens,
    CompressorWeights,
    DecodedTokens,
    Kept,
    PairedEntries,
    PlannedRows,
    SelectedEntries,
)
from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.ops import gated_streams, ngram_rows
from moe_engine.kernels.ops import ngram_products as products
from moe_engine.kernels.ops.block_rounding import E4M3, round_rows
from moe_engine.kernels.ops.ngram_rows import SCALED, NgramTokens
from moe_engine.kernels.ops.protocol import CacheRows, RotaryTable
from moe_engine.kernels.ops.reference import TorchOps
from moe_engine.kernels.ops.streams import mix_streams
from moe_engine.kernels.quantization.protocol import UNQUANTIZED
from tests.kernels.drawn import late_residual, late_weights, stream_weights, without_numbers

EPS = 1e-6
STREAMS = 4


@kernel_case("compression", "compress.{rate}x{series}.{width}{prompt:.prompt}{block:.blocks}.r{requests}")
def compress(
    kernel: Any, device: str, requests: int, context: int, rate: int, series: int, width: int = 512, rotary: int = 64,
    prompt: bool = False, block: int = 0,
) -> Call:  # fmt: skip
    """Entries of `rate` tokens. The tokens' projections are kept by the same launch, in rings of requests, or of blocks
    of `block` slots; those of a prompt are not."""
    step, numbers, each = Decodes.of(requests, context, device), series * width, series * rate + 1
    rings = 1 + (step.num_slots // block if block else requests)
    kept = Kept(normal(rings * each, 2 * numbers, device=device), each, block)
    weights = CompressorWeights(
        normal(rate, numbers, device=device, dtype=torch.float32), torch.rand(width, device=device) + 0.5, EPS
    )
    projected, table = normal(requests, 2 * numbers, device=device), rotary_table(rotary, device)
    out = torch.zeros(step.num_slots // rate, width, dtype=torch.bfloat16, device=device)
    tokens = _tokens(step)
    places = None if prompt else kept.places(step.positions, step.queries.rows, step.slots)
    return writes((out, kept.rows), kernel.compress, projected, kept, weights, table, tokens, out, places)


def _tokens(step: Decodes) -> CompressedTokens:
    asked = step.queries
    return CompressedTokens(step.positions, step.positions, asked.rows, asked.slot_table, step.slots)


@kernel_case("compression", "pairs.{width}{prompt:.prompt}.r{requests}")
def pairs(kernel: Any, device: str, requests: int, context: int, width: int = 512, prompt: bool = False) -> Call:
    """Entries of two tokens. A row without them: entries of two tokens without bias and rotation. The tokens'
    projections are kept too, those of a prompt are not."""
    step = Decodes.of(requests, context, device)
    kept = Kept(normal((1 + requests) * 2, 2 * width, device=device), 2, 0)
    projected, norm = normal(requests, 2 * width, device=device), (torch.rand(width, device=device) + 0.5, EPS)
    tokens = _tokens(step)
    places = None if prompt else kept.places(step.positions, step.queries.rows, step.slots)

    def together() -> tuple[Tensor, ...]:
        return *kernel.sum_pairs(projected, kept, norm, tokens, places), kept.rows

    def apart() -> tuple[Tensor, ...]:
        ones = torch.ones(POSITIONS, 1, device=device)
        still = RotaryTable(torch.cat((ones, 0 * ones), 1), True)
        weights = CompressorWeights(torch.zeros(2, width, device=device), *norm)
        out = torch.zeros(step.num_slots // 2, width, dtype=torch.bfloat16, device=device)
        kernel.compress(projected, kept, weights, still, tokens, out, places)
        completes = step.positions % 2 == 1
        slots = torch.where(completes, step.slots // 2, 0)
        entries = torch.where(completes[:, None], out[slots], 0.0)
        return *PairedEntries(entries, slots, torch.where(completes, step.positions - 1, 0)), kept.rows

    return apart if kernel.sum_pairs is None else together


@kernel_case("compression", "rows.{window}x{rate}.{top_k:selected}.r{requests}")
def plan_rows(kernel: Any, device: str, requests: int, context: int, window: int, rate: int, top_k: int = 0) -> Call:
    """The rows of windows and of all entries, or with `top_k` of windows before entries that are selected later. A row
    without them: by indices."""
    listed = 0 if top_k else context // rate
    width, first = window + (top_k or listed), 1000
    step = Decodes.of(requests, context, device)
    rows, table = step.queries.rows, step.queries.slot_table
    tokens = DecodedTokens(step.positions, step.slots, rows, None, table, table)

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=device)

    out = PlannedRows(empty(requests, width), empty(requests), empty(requests).long(), empty(requests))
    chosen = SelectedEntries(empty(requests), empty(requests), empty(requests), top_k) if top_k else None
    kept = Kept(torch.empty(0, device=device), 2 * rate, 0)

    def together() -> tuple[Tensor, ...]:
        places = kernel.plan_rows(tokens, window, rate, first, kept, out, chosen)
        return places, *out, *(chosen[:3] if chosen else ())

    def apart() -> tuple[Tensor, ...]:
        seen, column = step.positions[:, None] + 1, torch.arange(width, device=device)
        before, entries = seen.clamp(max=window), seen // rate
        number = (column - before).clamp(min=0)
        found = torch.where(column < before, table.gather(1, (seen - before + column).clamp(max=context - 1)), -1)
        if not top_k:
            slots = table.gather(1, (number * rate).clamp(max=context - 1)) // rate + first
            found = torch.where((column >= before) & (number < entries), slots, found)
        some = entries.clamp(max=top_k or context)[:, 0].int()
        counts = before[:, 0].int() + some
        places = kept.places(step.positions, rows, step.slots)
        more = (before[:, 0].int(), some, entries[:, 0].int().clamp(min=1)) if top_k else ()
        return places, found.int(), counts, step.positions, rows, *more

    return apart if kernel.plan_rows is None else together


@kernel_case("ops", "streams.{width}{late:.late}{head:.head}{norm:.norm}.t{tokens}")
def streams(
    ops: Any, device: str, tokens: int, width: int, late: bool = False, head: bool = False, norm: bool = False
) -> Call:
    """Residual streams between two parts of a layer, or before the model's head; with the next norm."""
    residual = late_residual(STREAMS, width, tokens, device).bfloat16()
    every = late_weights(STREAMS, width, device)[0] if late else stream_weights(STREAMS, width, device=device)
    weights, factors = without_numbers(every) if head else every, torch.rand(width, device=device) + 0.5
    x, given = normal(tokens, width, device=device), ops.capabilities
    mix, mix_norm = given.mix_streams or mix_streams, given.mix_norm_streams

    def plain() -> tuple[Tensor, Tensor]:
        read = mix(x, residual, weights)
        return ops.rms_norm(read, factors, EPS) if norm else read, residual

    def together() -> tuple[Tensor, Tensor]:
        return mix_norm(x, residual, weights, UNQUANTIZED, factors, EPS), residual

    return together if norm and mix_norm is not None else plain


@kernel_case("ops", "gated_streams.{width}.t{tokens}")
def gated(ops: Any, device: str, tokens: int, width: int, rank: int = 320) -> Call:
    """Residual streams with gates of low rank: all but the products."""
    kernels = ops.capabilities.gated_streams or gated_streams.IN_TORCH
    residual, x = normal(tokens, STREAMS * (width + 1), device=device), normal(tokens, width, device=device)
    projected, gates = normal(tokens, rank + STREAMS, device=device), normal(tokens, STREAMS * width, device=device)
    weight = torch.rand(STREAMS, width, device=device) + 0.5

    def call() -> tuple[Tensor, ...]:
        normed = kernels.norm(x, residual, weight, EPS)
        ranks = kernels.gate(projected, rank, STREAMS, residual)
        return kernels.read(gates, normed, STREAMS), ranks, residual

    return call


@kernel_case("ops", "ngram_products.{width}.r{requests}x{each}")
def ngram_products(
    ops: Any, device: str, requests: int, width: int, each: int = 1, apart: int = 3, taps: int = 4
) -> Call:
    """Rows of n-gram tables in streams with gates of low rank, of `each` tokens of a request: all but the reads and the
    product."""
    tokens = requests * each
    kernels, wide = ops.capabilities.ngram_products or products.IN_TORCH, STREAMS * width
    residual = normal(tokens, wide + STREAMS, device=device)
    found = normal(tokens, wide + width, device=device)
    weights, norm = (torch.rand(STREAMS, width, device=device) + 0.5 for _ in range(2))
    conv, kept = torch.rand(taps, wide, device=device), normal(requests, (taps - 1) * apart, wide, device=device)
    texts = torch.randint(9, (requests, apart - 1, 1), device=device).float()
    ids = torch.randint(9, (tokens,), device=device)
    runs = StateRuns.plain([each] * requests, torch.arange(requests, device=device))

    def call() -> tuple[Tensor, ...]:
        numbers = kernels.ids(ids, texts, runs, 1)
        gated, normed = kernels.gate(residual[:, :wide], found, weights, norm, EPS)
        kernels.mix(gated, normed, kept, conv, runs, residual, apart)
        return numbers, gated, residual, kept, texts

    return call


def ngram_ids(requests: int, context: int, vocab: int = 129280, count: int = 4) -> KernelCase:
    """Ids of the n-grams that end at each token."""

    def prepare(ops: Any, device: str) -> Call:
        step, kernels = Decodes.of(requests, context, device), ops.capabilities.ngrams or ngram_rows.IN_TORCH
        ids = torch.randint(vocab, (requests,), device=device)
        tokens = NgramTokens(ids, step.positions, step.slots, step.queries.rows, 1, step.queries.slot_table)
        numbers = torch.randint(vocab, (vocab,), dtype=torch.int32, device=device)
        cache = torch.randint(vocab, (step.num_slots,), dtype=torch.int32, device=device)
        residual = torch.zeros(requests, 4 * count, dtype=torch.bfloat16, device=device)
        return writes((cache, residual), kernels.put_ids, tokens, numbers, 7, cache, residual, count)

    def compared(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return found[0], found[1].view(torch.int32)  # as numbers of bf16 some are NaN

    return counted("ops", f"ngram_ids.r{requests}", prepare, context, compared=compared)


@kernel_case("ops", "ngram_values.{columns}x{width}.t{tokens}")
def ngram_values(ops: Any, device: str, tokens: int, columns: int = 24, width: int = 256) -> Call:
    """Rows of n-gram tables in FP8 with their scales."""
    rows = normal(tokens, columns, width, device=device).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 130, (tokens, columns, width // SCALED), dtype=torch.uint8, device=device)
    kernels = ops.capabilities.ngrams or ngram_rows.IN_TORCH
    return lambda: kernels.values(rows, scales, torch.bfloat16)


@kernel_case("ops", "ngram_add.{width}.t{tokens}")
def ngram_add(ops: Any, device: str, tokens: int, width: int) -> Call:
    """A token's rows added to the streams, behind the result of the part before."""
    residual = late_residual(STREAMS, width, tokens, device).bfloat16()
    streams, weights = late_weights(STREAMS, width, device)[0], torch.rand(STREAMS, width, device=device) + 0.5
    ids = torch.randint(99, (tokens, 4), dtype=torch.int32, device=device)
    found, x = normal(tokens, (STREAMS + 1) * width, device=device), normal(tokens, width, device=device)
    kernels = ops.capabilities.ngrams or ngram_rows.IN_TORCH
    return writes(residual, kernels.add, found, ids, x, residual, weights, streams)


@kernel_case("ops", "round_rows.{width}x{heads}.t{tokens}", fp8=True)
def rounded_rows(ops: Any, device: str, tokens: int, heads: int, width: int = 512, rotary: int = 64) -> Call:
    """Keys of a rounded cache, and the rotation of queries, in one launch."""
    x, q = normal(tokens, 1, width, device=device), normal(tokens, heads, width, device=device)
    norm = (torch.rand(width, device=device) + 0.5, EPS)
    positions, table = torch.randint(POSITIONS, (tokens,), device=device), rotary_table(rotary, device)
    cache = torch.zeros(2 * tokens, width, dtype=torch.bfloat16, device=device)
    to = CacheRows(torch.randperm(2 * tokens, device=device)[:tokens], cache)
    rounded = ops.capabilities.round_rows or partial(round_rows, ops)
    return lambda: (rounded(x, norm, positions, table, E4M3, to, q), q)


@kernel_case("mla", "selected.{width}x{heads}.k{rows}.r{requests}", context="rows")
def turned_attention(
    kernel: Any, device: str, requests: int, heads: int, rows: int, width: int = 512, rotary: int = 64
) -> Call:
    """Attention over selected rows with sinks, whose results are rotated back. A row without the rotation: apart."""
    sparse = kernel.capabilities.sparse
    if sparse is None or not sparse.sinks:
        raise NotServed("has no sinks over selected rows")
    cache, q = normal(4 * rows, width, device=device), normal(requests, heads, width, device=device)
    slots = torch.randint(4 * rows, (requests, rows), dtype=torch.int32, device=device)
    lengths = torch.full((requests,), rows, dtype=torch.int32, device=device)
    selected, sinks = Selected(slots, [rows] * requests, lengths), torch.randn(heads, device=device)
    turn = Turn(torch.randint(POSITIONS, (requests,), device=device), rotary_table(rotary, device))
    given = q, cache, selected, width**-0.5, sparse.plan(selected), width, sinks

    def apart() -> Tensor:
        found: Tensor = sparse.run(*given)
        TorchOps().rotate(found, turn.positions, turn.table, inverse=True)
        return found

    return apart if sparse.turned is None else lambda: sparse.turned(*given, turn)


def cases(requests: int, context: int, heads: int, width: int, hidden: int) -> list[KernelCase]:
    """Of a decode step of `requests` tokens, with entries of `width` channels and `heads` query heads."""
    rotary = min(64, width // 2)
    rates = (4, 2), (min(128, context // 4), 1)
    return [
        *(compress(requests, context, *rate, width, rotary, prompt) for rate in rates for prompt in (False, True)),
        compress(requests, context, *rates[0], width, rotary, prompt=True, block=128),
        compress(requests, context, 4, 2, width // 2, rotary),
        gated(requests, hidden),
        ngram_products(requests, hidden),
        ngram_products(requests, hidden, 20),
        pairs(requests, context, width),
        pairs(requests, context, width, prompt=True),
        plan_rows(requests, context, min(128, context // 2), 4, min(512, context // 4)),
        plan_rows(requests, context, min(128, context // 2), rates[1][0]),
        streams(requests, hidden),
        streams(requests, hidden, norm=True),
        streams(requests, hidden, late=True, norm=True),
        streams(requests, hidden, head=True),
        ngram_ids(requests, context),
        ngram_values(requests),
        ngram_add(requests, hidden),
        rounded_rows(requests, heads, width, rotary),
        turned_attention(requests, heads, min(640, context), width, rotary),
    ]
