"""Pooling of a model that serves vectors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolingConfig:
    """Computation of a request's vector from its hidden states (`models.pooling`).

    Attributes:
        kind: state that is used: ``last`` (of the last token), ``mean`` (of all tokens) or ``cls`` (of the first).
        width: numbers of the vector.
        head: score head between the state and the vector: ``linear``, ``mlp`` or none.
        labels: names of the score head's numbers.
        dimensions: lengths to which a vector may be cut; empty: any.
    """

    kind: str
    normalizes: bool
    width: int
    head: str = ""
    labels: tuple[str, ...] = ()
    dimensions: tuple[int, ...] = ()

    @property
    def reads_last(self) -> bool:
        """Whether the last token's state is enough, so that a prefix may be cached."""
        return self.kind == "last"
