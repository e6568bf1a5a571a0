"""Tables of cosines and sines by position: plain, linear, YaRN, LongRoPE and Llama 3 frequencies.

Legend: R rotary width, P positions. Angles are computed in float32 (frequencies in float64).
Sources: YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753; the Llama 3.1 release for `llama3`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config_sections.rope import RopeConfig
from moe_engine.models.tensors.model import ROTARY_FACTORS
from moe_engine.models.weights import WeightSource

_ROWS_AT_ONCE = 1 << 15


def make_rotary_table(
    rope: RopeConfig, max_positions: int, device: torch.device | str, factors: Tensor | None = None
) -> RotaryTable:
    """The table [max_positions, R] float32 shared by all layers of a model; of kind ``none`` [1, R]. factors [R/2]: of
    frequencies."""
    inverse = inverse_frequencies(rope).float()  # [R/2]
    if factors is not None:
        inverse = inverse * factors.to(inverse)
    max_positions = rope.num_rows(max_positions)
    place = "meta" if torch.device(device).type == "meta" else "cpu"  # a million rows without values take no time
    table, inverse = torch.empty(max_positions, rope.width, device=place), inverse.to(place)
    for start in range(0, max_positions, _ROWS_AT_ONCE):
        rows = table[start : start + _ROWS_AT_ONCE]
        angles = torch.arange(start, start + rows.shape[0], dtype=torch.float32, device=place).unsqueeze(1) * inverse
        rows[:, : rope.width // 2] = angles.cos() * rope.attention_factor
        rows[:, rope.width // 2 :] = angles.sin() * rope.attention_factor
    return RotaryTable(table.to(device), rope.interleaved, _query_scale(rope, max_positions, device))


class StoredFactors:
    """The table of a model with `RopeConfig.stored_factors`."""

    def __init__(self, rope: RopeConfig, max_positions: int, reader: WeightSource) -> None:
        self.alpha = reader.tensor(ROTARY_FACTORS, (rope.width // 2,), dtype=torch.float32)
        self._table = make_rotary_table(rope, max_positions, reader.device, self.alpha.exp())
        self.cos_sin = self._table.cos_sin  # replaced with the tensor
        if reader.made_up:
            self.cos_sin.zero_()

    @property
    def table(self) -> RotaryTable:
        return self._table


def _query_scale(rope: RopeConfig, max_positions: int, device: torch.device | str) -> Tensor | None:
    """`RotaryTable.query_scale`; None also for contexts within the original one."""
    if not rope.query_beta or max_positions + rope.query_start <= rope.original_max_position:
        return None
    places = torch.arange(rope.query_start, rope.query_start + max_positions, device=device)
    periods = places // rope.original_max_position
    return 1 + rope.query_beta * periods.float().log1p()


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Angle per position of each pair, [R/2] float64."""
    pairs = torch.arange(0, rope.width, 2, dtype=torch.float64)
    base = rope.theta ** (-pairs / rope.width)
    if rope.kind == "zero":
        return torch.zeros_like(base)
    if rope.kind == "proportional":
        return torch.where(torch.arange(len(base)) < rope.turned, base / rope.factor, 0.0)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(base, rope)
    if rope.kind == "yarn":
        return _yarn(base, rope)
    if rope.kind == "longrope":
        return base / torch.tensor(rope.pair_factors, dtype=torch.float64)
    return base


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Low frequencies divided by the factor, high ones kept, a linear ramp between."""
    turns = rope.original_max_position * base / (2 * math.pi)  # turns within the original context
    between = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / between).clamp(0, 1) if between else (turns >= rope.low_freq_factor)
    kept = kept.to(base)
    return base * kept + base / rope.factor * (1 - kept)


def _yarn(base: Tensor, rope: RopeConfig) -> Tensor:
    """As `_llama3`, but the ramp is linear in the index of the pair."""

    def pair_of(turns: float) -> float:
        length = math.log(rope.original_max_position / (turns * 2 * math.pi))
        return rope.width * length / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(base.numel(), dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return base * (1 - slowed) + base / rope.factor * slowed
