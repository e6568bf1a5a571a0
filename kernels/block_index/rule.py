"""The rule by which blocks of a context are selected. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS_AT_ONCE = 256
"""Query tokens whose positions are computed at once."""
MAX_SCORES = 1 << 24
"""Max scores of blocks in memory; query tokens with more are scored in parts."""


@dataclass(frozen=True)
class BlockRule:
    """`size`: tokens of a block. `top_k`: max blocks of a selection; `local` (at least 1) of them are the last ones."""

    size: int
    top_k: int
    local: int = 1

    @property
    def max_tokens(self) -> int:
        """Contexts up to this length are selected as a whole."""
        return self.size * self.top_k

    def num_selected(self, visible: int) -> int:
        """Tokens that a token selects of its `visible` ones: its own block is selected up to itself, others whole."""
        last = (visible - 1) // self.size
        return min(last, self.top_k - 1) * self.size + visible - last * self.size
