"""Log-probabilities of a request, and their packed form. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class LogprobSpec:
    """The log-probabilities of a request.

    `start`: first prompt position whose token gets one (None: outputs only). `top`: number of best tokens reported at
    each position. `token_ids`: tokens reported at each position regardless of their rank.
    """

    start: int | None = None
    top: int = 0
    token_ids: tuple[int, ...] = ()


class PackedLogprobs(NamedTuple):
    """Log-probabilities (natural log, of the softmax of the raw logits) of P consecutive tokens, and at each position
    those of the K best tokens and of the J requested ones (`LogprobSpec.token_ids`).

    A constant number of objects for any P: the worker sends this form, and only the frontend converts it to Python
    objects or JSON.

    Arrays in native byte order. NaN in `values` means not computed (the first token of a prompt, and the token at the
    end of a cached prefix); the other arrays are undefined there.
    """

    token_ids: bytes  # [P] int32
    values: bytes  # [P] float32
    top_ids: bytes = b""  # [P, K] int32
    top: bytes = b""  # [P, K] float32
    asked: bytes = b""  # [P, J] float32

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    def part(self, start: int, stop: int) -> PackedLogprobs:
        """Log-probabilities of the tokens [start, stop); both within [0, P]."""
        count = self.num_tokens
        if stop - start == count:
            return self
        return PackedLogprobs(*(data[len(data) // count * start : len(data) // count * stop] for data in self))

    @staticmethod
    def join(parts: Sequence[PackedLogprobs]) -> PackedLogprobs:
        """Log-probabilities of the tokens of all parts, in order; at least one part."""
        return parts[0] if len(parts) == 1 else PackedLogprobs(*map(b"".join, zip(*parts)))
