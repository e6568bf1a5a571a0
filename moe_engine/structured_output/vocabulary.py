"""The bytes of every token, as they appear in the output's text."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]`: bytes of token i; empty for special tokens and for unused ids."""

    tokens: list[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer


def vocabulary_of(tokenizer: Tokenizer, size: int, eos_ids: tuple[int, ...]) -> Vocabulary:
    """Args: size: the model's vocabulary, which may exceed the tokenizer's."""
    special = frozenset(tokenizer.special_ids) | set(eos_ids)
    known = min(size, tokenizer.vocab_size)
    tokens = [b"" if i in special else tokenizer.exact_bytes(i) for i in range(known)]
    return Vocabulary(tokens + [b""] * (size - known), special, eos_ids, tokenizer)
