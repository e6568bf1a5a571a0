"""The interface of a grammar backend. A backend is one file; `open_backend.py` chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moe_engine.errors import MoeEngineError
from moe_engine.types.constraint import Constraint, FreeReasoning

if TYPE_CHECKING:
    import numpy as np  # not loaded by the frontend

    from moe_engine.structured_output.mask_batch import MaskBatch


PREPARED = "prepared"
"""Kind of a constraint whose source is the library's own grammar. Clients cannot send it."""


class GrammarError(MoeEngineError):
    """A grammar cannot be compiled; the message has the reason."""


class Matcher(Protocol):
    """The state of one request: `PositionMasks` of `core.late_masks`."""

    def accept(self, token: int) -> None: ...
    def fill(self, mask: np.ndarray) -> None: ...
    def fill_later(self, batch: MaskBatch, place: int) -> None: ...
    def check(self) -> None: ...
    def forced(self) -> list[int]: ...
    def rollback(self, count: int) -> None: ...


class CompiledGrammar(Protocol):
    def matcher(self, reasoning: FreeReasoning | None = None) -> Matcher:
        """A new state, before the first token."""


class GrammarBackend(Protocol):
    def prepare(self, constraint: Constraint) -> Constraint:
        """The constraint as the library reads it, of kind `PREPARED` or unchanged: the remaining work of `compile` then
        runs without the GIL and delays no step.

        Raises:
            GrammarError: as `compile`.
        """

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """The grammar of a constraint without its `reasoning`. Called from several threads.

        Raises:
            GrammarError: the constraint is wrong, or has a part that the backend does not enforce.
        """


@dataclass(frozen=True)
class GrammarSettings:
    """Fields with the name of a flag have that flag's value (`ResolvedConfig.select`)."""

    grammar_backend: str = "llguidance"
    constrained_json_whitespace_pattern: str | None = None
    constrained_json_disable_any_whitespace: bool = False
