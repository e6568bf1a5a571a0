"""`ChainKernels` in plain torch: correct on any device, the reference of the other row.

Padding writes what the first request writes, or, without requests, the values that are there: an index may then occur
several times, always with one value.

Legend: as in `protocol.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.sampling.protocol import SamplingParameters
from moe_engine.kernels.sampling.reference import TorchSampling
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


def device_uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """`sampling_state.uniforms` on the device: bits of mixed seeds and positions, int64 -> float32 in [0, 1)."""
    return _shifted(_mixed(seeds + positions * signed64(GOLDEN)), 40).float() * 2.0**-24


def _mixed(value: Tensor) -> Tensor:
    """`sampling_state.mix64`."""
    value = value + signed64(GOLDEN)
    value = (value ^ _shifted(value, 30)) * signed64(MIX_1)
    value = (value ^ _shifted(value, 27)) * signed64(MIX_2)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, count: int) -> Tensor:
    """A shift to the right that brings zeros in."""
    return (value >> count) & ((1 << (64 - count)) - 1)


NGRAM_PLACES = 1 << 18
"""Positions of texts that a search compares at once: its scratch memory."""


class TorchChains:
    """`ChainKernels`."""

    name = "torch"

    def __init__(self) -> None:
        self._sampling = TorchSampling()

    def draw(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        sampled = self._sampling.sample(logits, parameters, uniform)
        return torch.where(parameters.temperature > 0, sampled, self._sampling.greedy(logits))

    def inputs(self, tables: RowTables, chain: ChainBuffers) -> None:
        real = chain.rows >= 0
        rows = chain.rows.clamp_min(0)
        width, device = tables.slots.shape[1], rows.device
        starts = torch.where(real, tables.lengths.index_select(0, rows), 1)
        chain.starts.copy_(starts)
        chain.draft_ids[0].copy_(torch.where(real, tables.last_tokens.index_select(0, rows), 0))
        chain.ids[:, 0].copy_(chain.draft_ids[0])
        chain.draft_real.copy_(real)
        chain.real.copy_(real[:, None].expand(chain.real.shape))
        steps = torch.arange(chain.num_drafts, device=device)[:, None]
        drafted = starts + chain.first_draft + (steps - chain.lookback).clamp_min(0)
        drafted = torch.where(real, drafted, 0)
        shifts = torch.zeros_like(rows)
        if len(tables.image_ends):
            shifts = torch.where(real, tables.image_ends[:, 0].index_select(0, rows), 0)
        chain.shifts.copy_(shifts)
        chain.draft_positions.copy_(drafted + shifts)
        chain.draft_lens.copy_(drafted + 1)
        chain.draft_slots.copy_(torch.where(real, _taken(tables.slots, rows * width + drafted), 0))
        places = torch.arange(chain.ids.shape[1], device=device)
        verified = torch.where(real[:, None], starts[:, None] + places, 0)
        chain.positions.copy_(verified + shifts[:, None])
        if chain.places.numel():
            ends = torch.where(real[:, None], tables.image_ends.index_select(0, rows), 0)
            chain.places.copy_(verified)
            chain.pool_axes.copy_(_pool_axes(verified, chain.pool, ends[:, None]))
            chain.draft_places.copy_(drafted)
            chain.draft_axes.copy_(_pool_axes(drafted, chain.pool, ends[None]))
        chain.slots.copy_(torch.where(real[:, None], _taken(tables.slots, (rows * width)[:, None] + verified), 0))
        if chain.window_slots.numel():
            windowed = _taken(tables.windows, (rows * width)[:, None] + verified)
            chain.window_slots.copy_(torch.where(real[:, None], windowed, 0))
            windowed = _taken(tables.windows, rows * width + drafted)
            chain.draft_window_slots.copy_(torch.where(real, windowed, 0))
        chain.lens.copy_(torch.where(real, starts, 0) + len(places))
        numbers = device_uniforms(chain.seeds[:, None], starts[:, None] + 1 + places)
        chain.uniform.copy_(numbers)
        chain.draft_uniform.copy_(numbers[:, : chain.num_drafts].t())

    def accept(self, tables: RowTables, chain: ChainBuffers, rule: SimulatedAcceptance | Thresholds | None) -> None:
        sampled, drafts, count = chain.sampled, chain.ids[:, 1:], chain.num_drafts
        places = torch.arange(count + 1, device=sampled.device)
        if not isinstance(rule, SimulatedAcceptance):
            good = drafts == sampled[:, :count]
            if rule is not None:
                good = good | _forced(chain, rule)
            counts = (good & (sampled[:, :count] >= 0)).long().cumprod(1).sum(1) + 1
        else:
            least = int(rule.length)
            numbers = device_uniforms(chain.seeds ^ signed64(rule.salt), chain.starts)
            counts = (least + (numbers < rule.length - least).long()).clamp_max(count + 1)
        path = torch.minimum(places, counts[:, None] - 1)
        tokens = sampled.gather(1, path)
        if rule is not None:
            end = sampled.gather(1, counts[:, None] - 1)
            padded = torch.cat((drafts, end), 1)
            tokens = torch.where(places < counts[:, None] - 1, padded, end)
        chain.result[:, :-1].copy_(tokens)
        chain.result[:, -1].copy_(counts)
        real, valid = chain.rows >= 0, tokens.clamp_min(0)
        chain.next_ids.copy_(torch.where(real[:, None], valid, 0))
        chain.last.copy_(torch.arange(len(counts), device=counts.device) * (count + 1) + counts - 1)
        flat = chain.rows[:, None] * tables.tokens.shape[1] + chain.starts[:, None] + 1 + places
        _put(tables.tokens.view(-1), flat, valid, real)
        _put(tables.lengths, chain.rows, chain.starts + counts, real)
        _put(tables.last_tokens, chain.rows, valid[:, -1], real)

    def keep_states(self, states: Tensor, hidden: Tensor, rows: Tensor, sources: Tensor) -> None:
        _put(states, rows, hidden.index_select(0, sources), rows >= 0)

    def runs(self, tables: RowTables, chain: ChainBuffers, runs: RunBuffers) -> None:
        back, (count, width) = runs.back, (runs.positions.shape[1], tables.slots.shape[1])
        is_real, rows = chain.rows >= 0, chain.rows.clamp_min(0)
        starts = torch.where(is_real, chain.starts, 0)[:, None]
        places = torch.arange(count, device=rows.device)
        first = (starts - back).clamp_min(0)
        end = torch.where(is_real, chain.starts + count - back, 0)[:, None]
        positions = torch.where(is_real[:, None], first + places, 0)
        real = is_real[:, None] & (positions >= runs.cached[:, None]) & (positions < end)
        inside = positions.clamp_max(width - 1)
        runs.positions.copy_(inside + chain.shifts[:, None])
        runs.slots.copy_(torch.where(real, _taken(tables.slots, (rows * width)[:, None] + inside), 0))
        if runs.window_slots.numel():
            windowed = _taken(tables.windows, (rows * width)[:, None] + inside)
            runs.window_slots.copy_(torch.where(real, windowed, 0))
        runs.lens.copy_(first[:, 0] + count)
        runs.real.copy_(real)
        for j, ids in enumerate(runs.ids):
            at = (positions + runs.shift + j).clamp_max(width - 1)
            ids.copy_(torch.where(real, _taken(tables.tokens, (rows * width)[:, None] + at), 0))
        runs.sources.copy_(_sources(chain, rows, starts, positions, back))
        if back and runs.shift:
            accepted = starts + chain.result[:, -1:]
            last = accepted - back + torch.arange(back, device=rows.device)
            runs.kept.copy_(_sources(chain, rows, starts, last, back))

    def gather_states(self, kept: Tensor, hidden: Tensor, sources: Tensor) -> Tensor:
        new = hidden.index_select(0, sources.clamp_min(0))
        return torch.where((sources < 0)[:, None], kept.index_select(0, (-1 - sources).clamp_min(0)), new)

    def find_ngrams(self, tables: RowTables, chain: ChainBuffers, least: int, most: int) -> None:
        tokens, depth = tables.tokens, chain.num_drafts
        width, rows = tokens.shape[1], chain.rows.clamp_min(0)
        last = torch.where(chain.rows >= 0, chain.starts, 0)
        best = torch.zeros_like(last)
        at_once = max(1, NGRAM_PLACES // len(rows))
        for begin in range(0, width, at_once):
            places = torch.arange(begin, min(width, begin + at_once), device=rows.device)
            alive = (places < last[:, None]) & (chain.rows >= 0)[:, None]
            size = torch.zeros_like(alive, dtype=torch.int64)
            for back in range(most):
                wanted = _taken(tokens, rows * width + (last - back).clamp_min(0))
                there = _taken(tokens, (rows * width)[:, None] + (places - back).clamp_min(0))
                alive = alive & (there == wanted[:, None]) & (places >= back)
                size += alive
            found = torch.where(size >= least, size * width + places + 1, 0)
            best = torch.maximum(best, found.amax(1))
        behind = best[:, None] % width + torch.arange(depth, device=rows.device)
        known = (best > 0)[:, None] & (behind <= last[:, None])
        drafts = _taken(tokens, (rows * width)[:, None] + behind.clamp_max(width - 1))
        chain.ids[:, 1:].copy_(torch.where(known, drafts, 0))


def _forced(chain: ChainBuffers, rule: Thresholds) -> Tensor:
    """[R, S] bool: drafts that the thresholds accept."""
    nodes = torch.arange(1, chain.num_drafts + 1, device=chain.seeds.device)
    seeds = chain.seeds[:, None] ^ _mixed(nodes + rule.salt)
    numbers, chance = device_uniforms(seeds, chain.starts[:, None] + nodes), chain.chances[:, :-1]
    extra = ((chance / rule.acc).clamp_max(1.0) - chance) / (1.0 - chance).clamp_min(1e-6)
    return (chance >= rule.single) | (numbers < extra)


def _sources(chain: ChainBuffers, rows: Tensor, starts: Tensor, positions: Tensor, back: int) -> Tensor:
    """`RunBuffers.sources` of positions [R, N]."""
    count = chain.num_drafts + 1
    place = positions - starts
    new = torch.arange(len(rows), device=rows.device)[:, None] * count + place.clamp(0, count - 1)
    old = -1 - (rows[:, None] * back + back + place)
    return torch.where((place < 0) & (place >= -back) & (chain.rows >= 0)[:, None], old, new)


def _pool_axes(places: Tensor, pool: int, ends: Tensor) -> Tensor:
    """Positions [..., 3] of the first tokens of the pools of `places`. ends [..., 5]: of `RowTables.image_ends`."""
    first = (places // pool * pool)[..., None]
    return torch.where(first < ends[..., 1:2], ends[..., 2:], first + ends[..., :1])


def _taken(table: Tensor, flat: Tensor) -> Tensor:
    return table.view(-1).index_select(0, flat.flatten()).long().view(flat.shape)


def _put(table: Tensor, index: Tensor, values: Tensor, real: Tensor) -> None:
    """table[index] = values for real requests. index [R, *], values [R, *, ...], real [R]: the real ones come first."""
    there = real.view(-1, *[1] * (index.dim() - 1))
    index = torch.where(there, index, index[:1]).clamp_min(0).flatten()
    kept = table.index_select(0, index).view(values.shape)
    mask = real.view(-1, *[1] * (values.dim() - 1))
    values = torch.where(mask, values.to(table.dtype), torch.where(mask[:1], values[:1].to(table.dtype), kept))
    table.index_copy_(0, index, values.flatten(0, values.dim() - table.dim()))
