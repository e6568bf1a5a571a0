"""Tables of n-grams (Engram, DeepSeek V4.1; Qwen3.8-Flash-Next): which rows of a table the last tokens choose. Imports
no torch.

Sources: transformers' `modeling_deepseek_v41.py` and `modeling_qwen4_exp.py`; SGLang's `layers/residual/engram.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

_SEED = 10007
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Bases of the Miller-Rabin test, which are exact below 3e24."""
_GOLDEN, _MIX, _WORD = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), (1 << 64) - 1
"""SplitMix64: its step, its shifts with factors, and the mask of a word."""


@dataclass(frozen=True)
class EngramConfig:
    """The tables of some layers, with rows of `width` numbers: each n-gram of 2 to `longest` tokens chooses `heads`.

    Attributes:
        layers: before which rows are added.
        rows: of each layer's table.
        first_prime: numbers of rows of a head are primes from here on.
        num_ids: ids that the vocabulary is mapped to, see `kernels.ops.hashed_rows.token_map`.
        pad_id: token id before the first token.
        seed: of the factors of ids, drawn by SplitMix64; None: numpy draws them (DeepSeek V4.1).
        parts: tensors of a table in the checkpoint.
        taps: of a convolution over the values of earlier tokens, `longest` tokens apart; 0: none.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    longest: int
    heads: int
    width: int
    first_prime: int
    num_ids: int
    pad_id: int
    seed: int | None = None
    parts: int = 1
    taps: int = 0

    @property
    def reach(self) -> int:
        """Earlier tokens that the convolution reads."""
        return (self.taps - 1) * self.longest

    @property
    def columns(self) -> int:
        """Rows that a token chooses in a table."""
        return (self.longest - 1) * self.heads

    @cached_property
    def primes(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each column, by layer: those of bigrams first. No prime is used twice."""
        used, found = set[int](), []
        for _ in self.layers:
            own = []
            for _ in range(self.longest - 1):
                number = self.first_prime - 1
                for _ in range(self.heads):
                    number += 1
                    while number in used or not _is_prime(number):
                        number += 1
                    used.add(number)
                    own.append(number)
            found.append(tuple(own))
        return tuple(found)

    def multipliers(self, layer: int) -> tuple[int, ...]:
        """Odd factors of the ids of an n-gram, the last token's first."""
        bound = max(1, (2**63 - 1) // self.num_ids // 2)
        if self.seed is not None:
            first = self.seed + _SEED * self.layers.index(layer)
            words = (_split_mix(first + _GOLDEN * (i + 1)) for i in range(self.longest))
            return tuple(2 * (word % bound) + 1 for word in words)
        import numpy as np  # the frontend reads configs without numpy

        drawn = np.random.default_rng(_SEED * layer).integers(0, bound, self.longest, dtype=np.int64)
        return tuple(int(value) * 2 + 1 for value in drawn)


def _split_mix(state: int) -> int:
    """The number that SplitMix64 makes of a state, after its step."""
    word = state + _GOLDEN & _WORD
    for shift, factor in _MIX:
        word = (word ^ word >> shift) * factor & _WORD
    return word ^ word >> 31


def _is_prime(number: int) -> bool:
    if number < 2 or any(number % small == 0 for small in _WITNESSES):
        return number in _WITNESSES
    odd, power = number - 1, 0
    while odd % 2 == 0:
        odd, power = odd // 2, power + 1
    return all(_passes(pow(witness, odd, number), power, number) for witness in _WITNESSES)


def _passes(x: int, power: int, number: int) -> bool:
    if x in (1, number - 1):
        return True
    return any((x := x * x % number) == number - 1 for _ in range(power - 1))
