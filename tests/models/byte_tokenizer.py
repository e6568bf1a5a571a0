"""A byte-level tokenizer with DeepSeek's special tokens, small enough to be created by every test."""

from __future__ import annotations

from pathlib import Path

from benchmarks.checkpoints import SPECIAL_TOKENS, save_tokenizer
from moe_engine.tokenizer.byte_alphabet import byte_alphabet

VOCAB_SIZE = 320
BOS, EOS, USER, ASSISTANT, THINK, END_THINK = range(256, 262)


def write_tokenizer(path: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A byte-level tokenizer: ids 0..255 are bytes (in the byte-level alphabet's order), then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, models

    alphabet = sorted(byte_alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    fillers = [f"<|extra_{i}|>" for i in range(len(alphabet) + len(SPECIAL_TOKENS), vocab_size)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in fillers])
    save_tokenizer(tokenizer, path, context_len=512)
