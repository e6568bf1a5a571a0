"""Tokenization, incremental detokenization, stop strings, chat templates, reasoning and tool-call parsers."""

from moe_engine.tokenizer.detokenizer import Detokenizer
from moe_engine.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]
