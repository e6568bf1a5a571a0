"""The constraint of a request, as sent to the engine core. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FreeReasoning:
    """Text before the constrained part: free up to the tag `end`. `inside`: the output begins inside the reasoning;
    otherwise the reasoning begins if the first token is the tag `start`."""

    start: str
    end: str
    inside: bool


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint that the text of an output must match.

    `kind`: ``json_schema``, ``regex``, ``grammar`` (Lark or GBNF), ``choice`` (a JSON list of texts),
    ``structural_tag`` or ``tool_calls``. `source` is JSON for all of them but regex and grammar. `where`: its field,
    for messages. `unread`: a JSON schema as the client sent it, not checked yet (`request.read_constraint`).
    """

    kind: str
    source: str
    where: str = field(default="", compare=False)
    reasoning: FreeReasoning | None = field(default=None, compare=False)
    unread: bool = field(default=False, compare=False)

    @property
    def key(self) -> tuple[str, str]:
        """Equal for constraints with the same grammar."""
        return self.kind, self.source
