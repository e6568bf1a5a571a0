"""`ChainKernels` in Triton: a program per request, one launch for the inputs of a step, two after its sampling.

Legend: as in `protocol.py`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.sampling.protocol import SamplingParameters
from moe_engine.kernels.sampling.triton_sampling import TritonSampling
from moe_engine.kernels.speculation.protocol import (
    GOLDEN,
    MIX_1,
    MIX_2,
    ChainBuffers,
    RunBuffers,
    SimulatedAcceptance,
    Thresholds,
    signed64,
)
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import warps_for

_GOLDEN = tl.constexpr(signed64(GOLDEN))
_MIX_1 = tl.constexpr(signed64(MIX_1))
_MIX_2 = tl.constexpr(signed64(MIX_2))
_BLOCK_D = 1024
_BLOCK_N = 1024
"""Positions of a text that a program of the n-gram search compares."""


@triton.jit
def _mixed(value):
    """`sampling_state.mix64`; a mask makes a shift of int64 bring zeros in."""
    value += _GOLDEN
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniform(seed, position):
    """`sampling_state.uniforms`."""
    return ((_mixed(seed + position * _GOLDEN) >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _store_pools(places, axes, at, place, ends, is_real, wanted, POOL: tl.constexpr):
    """Places of tokens, and positions by axis of the first tokens of their pools; ends: of the row's images."""
    tl.store(places + at, place, wanted)
    first, shift, length = place // POOL * POOL, tl.load(ends, is_real, 0), tl.load(ends + 1, is_real, 0)
    for axis in tl.static_range(3):
        end = tl.load(ends + 2 + axis, is_real, 0)
        tl.store(axes + at * 3 + axis, tl.where(first < length, end, first + shift), wanted)


@dependent_jit(do_not_specialize=["num_requests", "width"])
def chain_inputs_kernel(
    rows, seeds, lengths, last_tokens, slot_table, window_table, image_ends, starts, draft_ids, draft_positions,
    draft_slots, draft_window_slots, draft_lens, draft_real, draft_uniform, ids, positions, slots, window_slots, lens,
    real, uniform, shifts, places, pool_axes, draft_places, draft_axes, num_requests, width,
    K: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LOOKBACK: tl.constexpr, WINDOWS: tl.constexpr,
    IMAGES: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """See `ChainKernels.inputs`. POOL: 1: there are no pools."""
    wait_for_inputs()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    is_real = row >= 0
    place = tl.arange(0, BLOCK).to(tl.int64)
    has_row = place * 0 + row >= 0
    row = tl.maximum(row, 0)
    start = tl.load(lengths + row, is_real, 1)
    root = tl.load(last_tokens + row, is_real, 0)
    tl.store(starts + request, start)
    tl.store(draft_ids + request, root)
    tl.store(draft_real + request, is_real.to(tl.int32))
    tl.store(ids + request * K, root)
    tl.store(lens + request, (tl.where(is_real, start, 0) + K).to(tl.int32))
    table = slot_table + row * width
    numbers = _uniform(tl.load(seeds + request), start + 1 + place)
    at = request * K + place
    verified = tl.where(has_row, start + place, 0)
    shift = row * 0
    if IMAGES:
        shift = tl.load(image_ends + row * 5, is_real, 0)
    tl.store(shifts + request, shift)
    tl.store(positions + at, verified + shift, place < K)
    if POOL > 1:
        _store_pools(places, pool_axes, at, verified, image_ends + row * 5, is_real, place < K, POOL)
    tl.store(slots + at, tl.load(table + verified, (place < K) & has_row, 0).to(tl.int64), place < K)
    if WINDOWS:
        slot = tl.load(window_table + row * width + verified, (place < K) & has_row, 0)
        tl.store(window_slots + at, slot.to(tl.int64), place < K)
    tl.store(real + at, tl.zeros([BLOCK], tl.int32) + is_real.to(tl.int32), place < K)
    tl.store(uniform + at, numbers, place < K)
    drafting = place < K - 1
    at = place * num_requests + request
    drafted = tl.where(has_row, start + FIRST + tl.maximum(place - LOOKBACK, 0), 0)
    tl.store(draft_positions + at, drafted + shift, drafting)
    tl.store(draft_slots + at, tl.load(table + drafted, drafting & has_row, 0).to(tl.int64), drafting)
    if WINDOWS:
        slot = tl.load(window_table + row * width + drafted, drafting & has_row, 0)
        tl.store(draft_window_slots + at, slot.to(tl.int64), drafting)
    tl.store(draft_lens + at, (drafted + 1).to(tl.int32), drafting)
    tl.store(draft_uniform + at, numbers, drafting)
    if POOL > 1:
        _store_pools(draft_places, draft_axes, at, drafted, image_ends + row * 5, is_real, drafting, POOL)


@dependent_jit(do_not_specialize=["width"])
def chain_accept_kernel(
    rows, seeds, starts, ids, sampled, chances, tokens, lengths, last_tokens, result, next_ids, last, width, share,
    acc,
    SALT: tl.constexpr, LEAST: tl.constexpr, FORCE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `ChainKernels.accept`. LEAST: tokens of every chain, `share` of the chains have one more; 0: as sampled.
    FORCE: thresholds `share` (single) and acc."""
    wait_for_inputs()
    request = tl.program_id(0).to(tl.int64)
    row, start = tl.load(rows + request), tl.load(starts + request)
    place = tl.arange(0, BLOCK).to(tl.int64)
    inside = place < K
    below = tl.load(ids + request * K + place + 1, place < K - 1, -1)
    drawn = tl.load(sampled + request * K + place, inside, -1)
    if LEAST == 0:
        good = below == drawn
        if FORCE:
            node = place + 1
            chance = tl.load(chances + request * K + place, inside, 0.0)
            extra = (tl.minimum(chance / acc, 1.0) - chance) / tl.maximum(1.0 - chance, 1e-6)
            number = _uniform(tl.load(seeds + request) ^ _mixed(node + SALT), start + node)
            good = good | (chance >= share) | (number < extra)
        good = good & (drawn >= 0) & (place < K - 1)
        count = tl.min(tl.where(good, BLOCK, place), 0) + 1
    else:
        more = _uniform(tl.load(seeds + request) ^ SALT, start) < share
        count = tl.minimum(LEAST + more.to(tl.int64), K)
    new = tl.load(sampled + request * K + tl.minimum(place, count - 1), inside, -1)
    if LEAST > 0 or FORCE:
        new = tl.where(place < count - 1, below, tl.load(sampled + request * K + count - 1))
    tl.store(result + request * (K + 1) + place, new, inside)
    tl.store(result + request * (K + 1) + K, count)
    tl.store(last + request, request * K + count - 1)
    is_real = row >= 0
    has_row = place * 0 + row >= 0
    valid = tl.maximum(new, 0)
    tl.store(next_ids + request * K + place, tl.where(has_row, valid, 0), inside)
    row = tl.maximum(row, 0)
    tl.store(tokens + row * width + start + 1 + place, valid.to(tl.int32), inside & has_row)
    tl.store(lengths + row, start + count, is_real)
    tl.store(last_tokens + row, tl.sum(tl.where(place == K - 1, valid, 0), 0), is_real)


@dependent_jit
def chain_states_kernel(states, hidden, rows, last, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """See `ChainKernels.keep_states`."""
    wait_for_inputs()
    request = tl.program_id(0)
    row, source = tl.load(rows + request), tl.load(last + request)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < WIDTH) & (column * 0 + row >= 0)
    values = tl.load(hidden + source * WIDTH + column, inside, 0.0)
    tl.store(states + tl.maximum(row, 0) * WIDTH + column, values, inside)


@triton.jit
def _source(place, request, row, is_row, BACK: tl.constexpr, K: tl.constexpr):
    """`RunBuffers.sources` of a position, `place` tokens after the step's start."""
    new = request * K + tl.minimum(tl.maximum(place, 0), K - 1)
    return tl.where((place < 0) & (place >= -BACK) & is_row, -1 - (row * BACK + BACK + place), new)


@dependent_jit(do_not_specialize=["num_requests", "width"])
def chain_runs_kernel(
    rows, all_starts, shifts, result, cached, tokens, slot_table, window_table, positions, slots, window_slots, lens,
    real, ids, sources, kept, num_requests, width,
    N: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr, SHIFT: tl.constexpr, IDS: tl.constexpr, K: tl.constexpr,
    WINDOWS: tl.constexpr,
):  # fmt: skip
    """See `ChainKernels.runs`."""
    wait_for_inputs()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    place = tl.arange(0, BLOCK).to(tl.int64)
    is_row = place * 0 + row >= 0
    start = tl.load(all_starts + request, row >= 0, 0)
    end = tl.where(row >= 0, start + (N - BACK), 0)
    row = tl.maximum(row, 0)
    first = tl.maximum(start - BACK, 0)
    position = tl.where(is_row, first + place, 0)
    inside, at = place < N, request * N + place
    is_real = is_row & (position >= tl.load(cached + request)) & (position < end)
    kept_inside = tl.minimum(position, width - 1)
    tl.store(positions + at, kept_inside + tl.load(shifts + request), inside)
    slot = tl.load(slot_table + row * width + kept_inside, inside & is_real, 0)
    tl.store(slots + at, slot.to(tl.int64), inside)
    if WINDOWS:
        slot = tl.load(window_table + row * width + kept_inside, inside & is_real, 0)
        tl.store(window_slots + at, slot.to(tl.int64), inside)
    tl.store(real + at, is_real.to(tl.int32), inside)
    tl.store(lens + request, (first + N).to(tl.int32))
    for j in tl.static_range(IDS):
        next_token = tokens + row * width + tl.minimum(position + (SHIFT + j), width - 1)
        token = tl.load(next_token, inside & is_real, 0).to(tl.int64)
        tl.store(ids + (j * num_requests + request) * N + place, token, inside)
    tl.store(sources + at, _source(position - start, request, row, is_row, BACK, K), inside)
    if BACK > 0 and SHIFT > 0:
        behind = tl.load(result + request * (K + 1) + K) - BACK + place
        source = _source(behind, request, row, is_row, BACK, K)
        tl.store(kept + request * BACK + place, source, place < BACK)


@dependent_jit
def gather_states_kernel(kept, hidden, sources, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """See `ChainKernels.gather_states`."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    source = tl.load(sources + token)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    is_new = column * 0 + source >= 0
    new = tl.load(hidden + tl.maximum(source, 0) * WIDTH + column, inside & is_new, 0.0)
    old = tl.load(kept + tl.maximum(-1 - source, 0) * WIDTH + column, inside & (is_new == 0), 0.0)
    tl.store(out + token * WIDTH + column, tl.where(is_new, new, old), inside)


@dependent_jit(do_not_specialize=["width"])
def match_kernel(
    rows, starts, tokens, best, width, LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """best [R, blocks]: size * W + position after the best match that ends in a block of positions, 0: none."""
    wait_for_inputs()
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + request)
    last = tl.load(starts + request, row >= 0, 0)
    value = last * 0
    if block * BLOCK < last:
        text = tokens + row * width
        place = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        alive = place < last
        size = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MOST):
            wanted = tl.load(text + last - back, last >= back, -1)
            there = tl.load(text + place - back, alive & (place >= back), -2)
            alive = alive & (there == wanted) & (place >= back)
            size += alive.to(tl.int64)
        value = tl.max(tl.where(size >= LEAST, size * width + place + 1, 0), 0)
    tl.store(best + request * tl.num_programs(1) + block, value)


@dependent_jit(do_not_specialize=["width", "blocks"])
def match_drafts_kernel(
    rows, starts, tokens, best, ids, width, blocks, S: tl.constexpr, BLOCKS: tl.constexpr, DRAFTS: tl.constexpr
):  # fmt: skip
    """The tokens after the best match of each request to ids [R, S + 1]."""
    wait_for_inputs()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    block = tl.arange(0, BLOCKS)
    found = tl.max(tl.load(best + request * blocks + block, block < blocks, 0), 0)
    place = tl.arange(0, DRAFTS).to(tl.int64)
    behind = found % width + place
    known = (place < S) & (place * 0 + found > 0) & (behind <= tl.load(starts + request))
    drafts = tl.load(tokens + tl.maximum(row, 0) * width + behind, known, 0).to(tl.int64)
    tl.store(ids + request * (S + 1) + 1 + place, drafts, place < S)


class TritonChains:
    """`ChainKernels` on a GPU."""

    name = "triton"

    def __init__(self) -> None:
        self._sampling = TritonSampling()

    def draw(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        return self._sampling.sample(logits, parameters, uniform)

    def inputs(self, tables: RowTables, chain: ChainBuffers) -> None:
        c, count = chain, chain.ids.shape[1]
        chain_inputs_kernel[(len(c.rows),)](
            c.rows, c.seeds, tables.lengths, tables.last_tokens, tables.slots, tables.windows, tables.image_ends,
            c.starts, c.draft_ids, c.draft_positions, c.draft_slots, c.draft_window_slots, c.draft_lens, c.draft_real,
            c.draft_uniform, c.ids, c.positions, c.slots, c.window_slots, c.lens, c.real, c.uniform, c.shifts, c.places,
            c.pool_axes, c.draft_places, c.draft_axes, len(c.rows), tables.slots.shape[1],
            K=count, BLOCK=next_power_of_2(count), FIRST=c.first_draft, LOOKBACK=c.lookback,
            WINDOWS=c.window_slots.numel() > 0, IMAGES=len(tables.image_ends) > 0, POOL=c.pool, num_warps=1,
        )  # fmt: skip

    def accept(self, tables: RowTables, chain: ChainBuffers, rule: SimulatedAcceptance | Thresholds | None) -> None:
        c, count, force = chain, chain.ids.shape[1], isinstance(rule, Thresholds)
        least, share, acc, salt = 0, 0.0, 1.0, 0
        if isinstance(rule, Thresholds):
            share, acc, salt = rule.single, rule.acc, rule.salt
        elif rule is not None:
            least = int(rule.length)
            share, salt = rule.length - least, signed64(rule.salt)
        chain_accept_kernel[(len(c.rows),)](
            c.rows, c.seeds, c.starts, c.ids, c.sampled, c.chances, tables.tokens, tables.lengths, tables.last_tokens,
            c.result, c.next_ids, c.last, tables.tokens.shape[1], share, acc,
            SALT=salt, LEAST=least, FORCE=force, K=count, BLOCK=next_power_of_2(count), num_warps=1,
        )  # fmt: skip

    def keep_states(self, states: Tensor, hidden: Tensor, rows: Tensor, sources: Tensor) -> None:
        width = states.shape[1]
        chain_states_kernel[(len(rows), triton.cdiv(width, _BLOCK_D))](
            states, hidden, rows, sources, WIDTH=width, BLOCK=_BLOCK_D, num_warps=warps_for(_BLOCK_D)
        )

    def runs(self, tables: RowTables, chain: ChainBuffers, runs: RunBuffers) -> None:
        r, count = runs, runs.positions.shape[1]
        chain_runs_kernel[(len(chain.rows),)](
            chain.rows, chain.starts, chain.shifts, chain.result, r.cached, tables.tokens, tables.slots, tables.windows,
            r.positions, r.slots, r.window_slots, r.lens, r.real, r.ids, r.sources, r.kept, len(chain.rows),
            tables.slots.shape[1],
            N=count, BLOCK=next_power_of_2(count), BACK=r.back, SHIFT=r.shift, IDS=len(r.ids), K=chain.ids.shape[1],
            WINDOWS=r.window_slots.numel() > 0, num_warps=1,
        )  # fmt: skip

    def gather_states(self, kept: Tensor, hidden: Tensor, sources: Tensor) -> Tensor:
        width = hidden.shape[1]
        out = hidden.new_empty(len(sources), width)
        gather_states_kernel[(len(sources), triton.cdiv(width, _BLOCK_D))](
            kept, hidden, sources, out, WIDTH=width, BLOCK=_BLOCK_D, num_warps=warps_for(_BLOCK_D)
        )
        return out

    def find_ngrams(self, tables: RowTables, chain: ChainBuffers, least: int, most: int) -> None:
        size, width, drafts = len(chain.rows), tables.tokens.shape[1], chain.num_drafts
        blocks = triton.cdiv(width, _BLOCK_N)
        best = chain.rows.new_empty(size, blocks)
        match_kernel[(size, blocks)](
            chain.rows, chain.starts, tables.tokens, best, width, LEAST=least, MOST=most, BLOCK=_BLOCK_N, num_warps=4
        )
        match_drafts_kernel[(size,)](
            chain.rows, chain.starts, tables.tokens, best, chain.ids, width, blocks, S=drafts,
            BLOCKS=next_power_of_2(blocks), DRAFTS=next_power_of_2(drafts), num_warps=1,
        )  # fmt: skip


def aot_cases() -> list[AotCase]:
    """Chains of one draft and of three; rows of V3's hidden states."""
    narrow = ("slot_table", "window_table", "draft_lens", "draft_real", "lens", "real", "tokens")
    kinds = dict.fromkeys(narrow, "*i32") | dict.fromkeys(("num_requests", "width", "blocks"), "i32")
    kinds |= {"share": "fp32", "acc": "fp32"}
    kinds |= dict.fromkeys(("draft_uniform", "uniform", "chances"), "*fp32")

    def case(name: str, kernel: Any, **constants: int) -> AotCase:
        names = [name for name in kernel.arg_names if name not in constants]
        return AotCase(name, kernel, {name: kinds.get(name, "*i64") for name in names}, constants, 1, 3, False)

    cases = []
    for count in (2, 4):
        size = {"K": count, "BLOCK": next_power_of_2(count)}
        places = {"FIRST": -1, "LOOKBACK": count // 4, "WINDOWS": count == 4, "IMAGES": False, "POOL": 1}
        cases.append(case(f"chain_inputs_{count}", chain_inputs_kernel, **size, **places))
        cases.append(case(f"chain_accept_{count}", chain_accept_kernel, SALT=0, LEAST=0, FORCE=False, **size))
    size = {"K": 4, "BLOCK": 4}
    places = {"FIRST": -1, "LOOKBACK": 0, "WINDOWS": False, "IMAGES": True, "POOL": 32}
    cases.append(case("chain_inputs_4_pools", chain_inputs_kernel, **size, **places))
    cases.append(case("chain_accept_4_thresholds", chain_accept_kernel, SALT=1, LEAST=0, FORCE=True, **size))
    states = {"states": "*bf16", "hidden": "*bf16", "rows": "*i64", "last": "*i64"}
    constants = {"WIDTH": 7168, "BLOCK": _BLOCK_D}
    cases.append(AotCase("chain_states_v3", chain_states_kernel, states, constants, warps_for(_BLOCK_D), 3, False))
    gathered = {"kept": "*bf16", "hidden": "*bf16", "sources": "*i64", "out": "*bf16"}
    cases.append(AotCase("gather_states_v3", gather_states_kernel, gathered, constants, warps_for(_BLOCK_D), 3, False))
    run = {"N": 5, "BLOCK": 8, "BACK": 1, "SHIFT": 1, "IDS": 2, "K": 4}
    cases.append(case("chain_runs_2_layers", chain_runs_kernel, **run, WINDOWS=False))
    cases.append(case("chain_runs_2_layers_windows", chain_runs_kernel, **run, WINDOWS=True))
    cases.append(case("ngram_match", match_kernel, LEAST=1, MOST=12, BLOCK=_BLOCK_N))
    cases.append(case("ngram_drafts", match_drafts_kernel, S=4, BLOCKS=64, DRAFTS=4))
    return cases
