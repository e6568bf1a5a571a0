"""Opens the backend of `--grammar-backend`."""

from __future__ import annotations

from moe_engine.structured_output.backend import GrammarBackend, GrammarSettings
from moe_engine.structured_output.vocabulary import vocabulary_of
from moe_engine.tokenizer.tokenizer import Tokenizer


def open_backend(
    settings: GrammarSettings, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...], threads: int = 1
) -> GrammarBackend:
    """
    Args:
        vocab_size: the model's, which may exceed the tokenizer's.
        threads: for the masks of a step.
    """
    vocabulary = vocabulary_of(tokenizer, vocab_size, eos_ids)
    if settings.grammar_backend == "xgrammar":
        from moe_engine.structured_output.xgrammar_backend import XGrammar

        return XGrammar(vocabulary, settings)
    from moe_engine.structured_output.llguidance_backend import LLGuidance

    return LLGuidance(vocabulary, settings, threads)
