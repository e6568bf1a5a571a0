"""Tables of n-grams (Engram, DeepSeek V4.1): which rows of a table the last tokens choose. Imports no torch.

Source: transformers' `modeling_deepseek_v41.py`; SGLang's `layers/engram.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

_SEED = 10007
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Of Miller and Rabin's test, exact below 3e24."""


@dataclass(frozen=True)
class EngramConfig:
    """The tables of some layers, with rows of `width` numbers: each n-gram of 2 to `longest` tokens chooses `heads`.

    Attributes:
        layers: before which rows are added.
        rows: of each layer's table.
        first_prime: numbers of rows of a head are primes from here on.
        num_ids: ids that the vocabulary is mapped to, see `kernels.ops.hashed_rows.token_map`.
        pad_id: token id before the first token.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    longest: int
    heads: int
    width: int
    first_prime: int
    num_ids: int
    pad_id: int

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
        import numpy as np  # the frontend reads configs without numpy

        bound = max(1, int(np.iinfo(np.int64).max) // self.num_ids // 2)
        drawn = np.random.default_rng(_SEED * layer).integers(0, bound, self.longest, dtype=np.int64)
        return tuple(int(value) * 2 + 1 for value in drawn)


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
