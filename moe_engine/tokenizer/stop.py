"""Stop-string matching in streamed text: which text to emit, to hold back, and to cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

Beginnings = Callable[[str], Set[str]]
"""The proper beginnings of a mark after which `max_tokens` may cut it (`Tokenizer.beginnings`)."""


def overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`: a stream must hold it back."""
    start = max(0, len(text) - len(marker) + 1)
    at = text.find(marker[0], start)
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


def without_cut_mark(text: str, marks: Iterable[str], beginnings: Beginnings | None) -> str:
    """A text without the beginning of a mark at its end, where the output was cut; `beginnings` is None if it was not
    cut: all of the text."""
    found = (one for mark in marks for one in beginnings(mark)) if beginnings is not None else ()
    return text.removesuffix(max((one for one in found if text.endswith(one)), key=len, default=""))


class StopMatcher:
    """Finds the stop string that ends first in a streamed text.

    The result is independent of how the text was split into pieces: the stop string that ends first wins; among those
    that end together, the one that starts first. Text that may become a stop string is held back.

    Args:
        stops: the stop strings, none empty.
        trim: whether the stop string itself is removed (SGLang's default) or kept (`no_stop_trim`).
    """

    __slots__ = ("_held", "_stops", "_trim", "matched")

    def __init__(self, stops: tuple[str, ...], *, trim: bool) -> None:
        self._stops = stops
        self._trim = trim
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Adds a piece; returns the text that is safe to emit. Sets `matched` when a stop string is complete."""
        if self.matched is not None or not piece:
            return ""
        text = self._held + piece
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, self.matched = best
            self._held = ""
            return text[: start if self._trim else end]
        held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Text held back; call after the last piece."""
        held, self._held = self._held, ""
        return held
