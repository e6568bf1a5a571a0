"""Invented words and the names of tools and arguments: too many to memorize, so they have to be copied.

One in ten invented words, chosen by its checksum, and the held-out verbs, subjects and arguments are kept for
evaluation.
"""

from __future__ import annotations

import random
import zlib

_CONSONANTS, _VOWELS, _LETTERS = "bcdfghjklmnprstvwxz", "aeiou", "abcdefghijklmnopqrstuvwxyz"
_ONSETS: tuple[str, ...] = (
    *_CONSONANTS, "bl", "br", "ch", "cl", "cr", "dr", "fl", "fr", "gl", "gr", "ph", "pl", "pr", "qu", "sc", "sh", "sl",
    "sp", "st", "str", "th", "tr", "tw", "wh", "",
)  # fmt: skip
_NUCLEI: tuple[str, ...] = (*_VOWELS, *_VOWELS, "ai", "ea", "ee", "ie", "io", "oo", "ou", "y")
_CODAS: tuple[str, ...] = (
    "", "", "", *"bdglmnprstxy", "ck", "ct", "ld", "ll", "mp", "nd", "ng", "nk", "nt", "pt", "rd", "rt", "sk", "ss",
    "st",
)  # fmt: skip

TRAINED_VERBS: tuple[str, ...] = (
    "get", "get", "get", "fetch", "find", "read", "query", "check", "show", "load", "search", "request", "lookup",
)  # fmt: skip
HELD_OUT_VERBS: tuple[str, ...] = ("obtain", "retrieve", "inspect", "report")
TRAINED_SUBJECTS: tuple[str, ...] = (
    "price", "height", "weight", "score", "owner", "status", "rating", "size", "address", "phone", "balance", "cost",
    "distance", "length", "width", "depth", "volume", "salary", "rank", "level", "version", "author", "title", "date",
    "duration", "capacity", "power", "pressure", "altitude", "traffic", "discount", "tax", "deadline", "color",
)  # fmt: skip
"""Subjects reported by look-up tools."""
HELD_OUT_SUBJECTS: tuple[str, ...] = ("warranty", "mileage", "budget", "editor", "profit", "density")
TRAINED_ARGUMENTS: tuple[str, ...] = (
    "name", "item", "id", "key", "query", "subject", "target", "user", "product", "object", "entity", "symbol", "code",
    "label", "text", "input", "value", "q", "arg", "thing",
)  # fmt: skip
HELD_OUT_ARGUMENTS: tuple[str, ...] = ("record", "ticker", "keyword", "element", "who")
_KEPT = frozenset((*HELD_OUT_VERBS, *HELD_OUT_SUBJECTS, *HELD_OUT_ARGUMENTS))
TRAINED_NUMBERS: tuple[str, ...] = ("days", "limit", "count", "year", "page", "hours", "depth", "top")
"""Integer arguments."""


def is_held_out_word(word: str) -> bool:
    """Invented words kept for evaluation."""
    return zlib.crc32(word.encode()) % 10 == 3


def invented(rng: random.Random, held_out: bool = False) -> str:
    """A meaningless word: simple syllables, English-like syllables, or random letters.

    Only many types of words teach copying of every token of the vocabulary.
    """
    while True:
        roll = rng.random()
        if roll < 0.3:
            word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3))))
        elif roll < 0.85:
            syllables = range(rng.choice((1, 2, 2, 3)))
            word = "".join(rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS) for _ in syllables)
        else:
            word = "".join(rng.choices(_LETTERS, k=rng.randint(4, 8)))
        if len(word) > 3 and is_held_out_word(word) == held_out and word not in _KEPT:
            return word


def function_name(rng: random.Random, topic: str, held_out: bool = False) -> str:
    """A name for a tool about `topic` in one of the common naming styles, sometimes meaningless."""
    roll = rng.random()
    if roll < 0.3:
        words = [invented(rng, held_out) for _ in range(rng.choice((1, 2)))]
    else:
        verb = rng.choice(HELD_OUT_VERBS if held_out else TRAINED_VERBS)
        words = [verb, topic] if roll < 0.7 else [invented(rng, held_out), topic] if roll < 0.9 else [topic, verb]
    style = rng.random()
    if style < 0.75:
        return "_".join(words)
    return words[0] + "".join(w.capitalize() for w in words[1:]) if style < 0.9 else "-".join(words)


def argument_name(rng: random.Random, held_out: bool) -> str:
    """A name for an argument."""
    if rng.random() < 0.4:
        return invented(rng, held_out)
    return rng.choice(HELD_OUT_ARGUMENTS if held_out else TRAINED_ARGUMENTS)
