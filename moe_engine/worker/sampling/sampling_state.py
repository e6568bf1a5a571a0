"""Sampling parameters of each row: arrays on the host, written when a row is added, gathered when a step samples.

The random number of a sampled token depends only on the request's seed and the token's position. It is therefore
independent of other requests, of restarts and of retractions.
"""

from __future__ import annotations

import numpy as np

from moe_engine.kernels.sampling.protocol import Draw
from moe_engine.types import NewRow

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014) after one step of its counter."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniforms(mixed_seeds: np.ndarray, positions: np.ndarray, salt: int = 0) -> np.ndarray:
    """Numbers in [0, 1) with 24 random bits, float32, one for each (mix64(seed), position).

    Each salt is an independent stream; tokens are sampled with salt 0.
    """
    if salt:
        mixed_seeds = mixed_seeds ^ np.uint64(mix64(salt))
    value = mixed_seeds + positions.astype(np.uint64) * np.uint64(_GOLDEN)
    value += np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return (value >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


class SamplingState:
    """Arrays over rows [max_rows]. `version` changes whenever a row is added."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.version = 0
        self.draw = np.zeros(max_rows, dtype=np.uint8)
        self.temperature = np.ones(max_rows, dtype=np.float32)
        self.top_p = np.ones(max_rows, dtype=np.float32)
        self.min_p = np.zeros(max_rows, dtype=np.float32)
        self.top_k = np.full(max_rows, vocab_size, dtype=np.int64)
        self.mixed_seed = np.zeros(max_rows, dtype=np.uint64)

    def enter(self, new: NewRow) -> None:
        sampling, row = new.sampling, new.row
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else self._vocab_size
        greedy = sampling.is_greedy
        self.version += 1
        self.draw[row] = Draw.of(greedy, top_k, sampling.top_p, self._vocab_size)
        self.temperature[row] = 0.0 if greedy else sampling.temperature
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.top_k[row] = top_k
        self.mixed_seed[row] = mix64(new.seed & _MASK)
