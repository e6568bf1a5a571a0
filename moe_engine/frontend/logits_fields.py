"""Sampling fields that need the tokenizer or a flag: bad_words, custom_logit_processor, max_thinking_tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moe_engine.custom_logit_processor import pickled_bytes
from moe_engine.errors import InputError
from moe_engine.frontend.prompts import Prompt
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types import SamplingParams
from moe_engine.types.constraint import FreeReasoning

NOT_ENABLED = (
    "The server is not configured to enable custom logit processor. Start it with --enable-custom-logit-processor "
    "to enable this feature."
)


def complete_sampling(prompts: Iterable[Prompt], tokenizer: Tokenizer | None, where: str, *, custom: bool) -> None:
    """Checks these fields of the prompts' sampling parameters, and adds the token ids of bad_words.

    Args:
        where: the client's name of the parameters; "" if the fields are at the top level.
        custom: whether custom logit processors are enabled.

    Raises:
        InputError: names the field and the fix.
    """
    done: dict[int, SamplingParams] = {}  # prompts of a batch may share one object
    for prompt in prompts:
        sampling = prompt.sampling
        if sampling.custom_logit_processor is not None:
            _check_processor(sampling.custom_logit_processor, enabled=custom)
        if sampling.bad_words:
            if id(sampling) not in done:
                field = f"{where}.bad_words".lstrip(".")
                done[id(sampling)] = replace(sampling, bad_word_ids=_bad_word_ids(sampling.bad_words, tokenizer, field))
            prompt.sampling = done[id(sampling)]


def _check_processor(text: str, *, enabled: bool) -> None:
    if not enabled:
        raise InputError.at("custom_logit_processor", NOT_ENABLED)
    try:
        pickled_bytes(text)
    except ValueError as error:
        raise InputError.at("custom_logit_processor", str(error)) from None


def _bad_word_ids(words: tuple[str, ...], tokenizer: Tokenizer | None, field: str) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word at the beginning of a text, and after a space if these ids differ. vLLM leaves out the
    second form if its number of tokens differs; a common word may then still appear in the middle of a text."""
    if tokenizer is None:
        raise InputError.at(field, "needs a tokenizer, and this server runs with --skip-tokenizer-init")
    bare = [word.lstrip() for word in words]
    ids = tokenizer.encode_batch([*bare, *(f" {word}" for word in bare)], False)
    found = []
    for i, word in enumerate(words):
        first, spaced = tuple(ids[i]), tuple(ids[len(bare) + i])
        if not first:
            raise InputError.at(field, f"{word!r:.40} has no tokens; leave it out")
        found.append(first)
        if spaced[-len(first) :] != first:
            found.append(spaced)
    return tuple(found)


def thinking_tags(reasoning: FreeReasoning | None, parser: str | None, tokenizer: Tokenizer | None) -> tuple[int, int]:
    """`SamplingParams.thinking_tags` of a request with max_thinking_tokens. Raises InputError with the fix.

    Args:
        reasoning: of the request's prompts. parser: of the server.
    """
    problem = None
    if parser is None or tokenizer is None:
        problem = "needs a server with --reasoning-parser and a tokenizer"
    elif reasoning is None:
        problem = "needs a chat, or require_reasoning: the output of another prompt has no reasoning"
    else:
        start, end = -1 if reasoning.inside else tokenizer.token_id(reasoning.start), tokenizer.token_id(reasoning.end)
        if start is not None and end is not None:
            return start, end
        problem = f"needs tags that are tokens, and {reasoning.end!r:.40} is several in this vocabulary"
    raise InputError.at("max_thinking_tokens", problem)
