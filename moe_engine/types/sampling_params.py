"""Sampling and stop parameters of a request. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_engine.errors import InputError
from moe_engine.types.constraint import Constraint

GREEDY_TEMPERATURE = 1e-6
"""Requests below this temperature are decoded greedily."""

MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024
MAX_N = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stop parameters. Names, defaults and ranges are SGLang's.

    `max_new_tokens` None means up to the context length. `top_k` -1 means the whole vocabulary. `sampling_seed` makes
    the request's samples independent of the other requests of the batch.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None
    stream_interval: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    """Tokens that may be sampled; empty: all."""
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences of `bad_words`: the last token of each is forbidden after the others."""
    custom_logit_processor: str | None = None
    """Serialized `custom_logit_processor.CustomLogitProcessor`; `custom_params` is its argument."""
    custom_params: dict[str, Any] | None = None
    constraint: Constraint | None = None
    max_thinking_tokens: int | None = None
    thinking_tags: tuple[int, int] | None = None
    """With `max_thinking_tokens`: tokens of the tags that begin (-1: the output begins inside) and end a reasoning."""

    @property
    def needs_late_masks(self) -> bool:
        """Whether the allowed tokens depend on the tokens before."""
        if self.constraint is not None or self.thinking_tags is not None:
            return True
        return any(len(ids) > 1 for ids in self.bad_word_ids)

    @property
    def reads_tokens(self) -> bool:
        """Whether logits processors read the tokens of the sequence."""
        return self.has_penalties or self.custom_logit_processor is not None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    def check_vocab(self, vocab_size: int, *, prefix: str) -> None:
        """Raises InputError if a token id of the parameters is outside the vocabulary."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InputError.at(
                        f"{prefix}.{name}", f"token id {token} is outside the vocabulary [0, {vocab_size})"
                    )
