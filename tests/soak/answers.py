"""Answers of a server in one common form: whole answers, event streams, native and OpenAI."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 5e-3
"""Max difference of log-probabilities of two parallel forms in float32."""


@dataclass
class Sequence:
    """One generated sequence."""

    text: str = ""
    finish: str | None = None
    logprobs: list[float] = field(default_factory=list)
    rivals: list[list[float]] = field(default_factory=list)
    """For each token, the log-probabilities of the best tokens, best first."""

    def difference(self, right: Sequence) -> str | None:
        """The difference of this sequence from the expected one; None if they are equal."""
        if self.text != right.text:
            return f"text {self.text!r} instead of {right.text!r}"
        if self.finish != right.finish:
            return f"finish {self.finish} instead of {right.finish}"
        if not _close(self.logprobs, right.logprobs):
            return f"log-probabilities {self.logprobs} instead of {right.logprobs}"
        if len(self.rivals) != len(right.rivals) or not all(map(_close, self.rivals, right.rivals)):
            return f"top log-probabilities {self.rivals} instead of {right.rivals}"
        return None

    def is_beginning_of(self, right: Sequence) -> bool:
        """True if this may be the beginning of the expected sequence; a character may be split between two tokens."""
        return right.text.startswith(self.text.rstrip("\ufffd"))


def _close(some: list[float], others: list[float]) -> bool:
    return len(some) == len(others) and all(map(lambda a, b: math.isclose(a, b, abs_tol=TOLERANCE), some, others))


def whole(answer: Any) -> list[Sequence]:
    """The sequences of a non-streamed answer."""
    if isinstance(answer, list):
        return [_native(part) for part in answer]
    if "choices" not in answer:
        return [_native(answer)]
    found = [Sequence() for _ in answer["choices"]]
    for choice in answer["choices"]:
        _add_choice(found[choice["index"]], choice, choice.get("message"))
    return found


async def streamed(events: AsyncIterator[dict[str, Any]], found: list[Sequence]) -> None:
    """Fills `found`, one entry per sequence of the answer, while events arrive.

    Raises:
        ValueError: an event contains an error.
    """
    async for event in events:
        if event.get("error"):
            raise ValueError(f"error in a stream: {event['error']}")
        if "choices" not in event:
            index = event.get("index", 0)
            part = _native(event)
            if not part.text.startswith(found[index].text):
                raise ValueError(f"{part.text!r} contradicts {found[index].text!r}, sent before")
            found[index] = part
        for choice in event.get("choices", ()):
            _add_choice(found[choice["index"]], choice, choice.get("delta"))


def _native(answer: dict[str, Any]) -> Sequence:
    meta = answer["meta_info"]
    finish = meta["finish_reason"]
    return Sequence(
        answer["text"],
        finish and finish["type"],
        [entry[0] for entry in meta.get("output_token_logprobs") or ()],
        [[entry[0] for entry in rivals or ()] for rivals in meta.get("output_top_logprobs") or ()],
    )


def _add_choice(sequence: Sequence, choice: dict[str, Any], message: dict[str, Any] | None) -> None:
    """A choice of an OpenAI answer, or the part of it in one event."""
    logprobs = choice.get("logprobs") or {}
    sequence.text += choice.get("text") or "" if message is None else message.get("content") or ""
    sequence.finish = choice.get("finish_reason") or sequence.finish
    if message is None:
        sequence.logprobs += logprobs.get("token_logprobs") or ()
        # Of tokens with equal text, the dictionary contains one.
        sequence.rivals += [sorted((top or {}).values(), reverse=True) for top in logprobs.get("top_logprobs") or ()]
    else:
        entries = logprobs.get("content") or ()
        sequence.logprobs += [entry["logprob"] for entry in entries]
        sequence.rivals += [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries]
