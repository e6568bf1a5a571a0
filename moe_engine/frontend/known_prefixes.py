"""Prefixes that a scheduler has in its KV cache, derived from the requests sent there.

A prompt is cut into blocks of `BLOCK` tokens. The key of a block is a hash chained over all blocks before it, so that
equal keys mean equal prefixes. A collision only leads to a poorer choice of scheduler: the scheduler compares tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

BLOCK = 32
"""Tokens of a block. Hashing takes 26 ns a token; smaller blocks take longer."""


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Keys of the whole blocks of a prompt.

    Attributes:
        rest: the tokens after them. before: key of the last block, or of the namespace.
    """

    num_tokens: int
    keys: list[int]
    rest: list[int]
    before: int

    def with_answer(self, tokens: Sequence[int]) -> list[int]:
        """The keys of the prompt followed by its answer."""
        if len(self.rest) + len(tokens) < BLOCK:
            return self.keys
        return self.keys + block_keys([*self.rest, *tokens], self.before)


def prompt_blocks(tokens: list[int], namespace: Hashable = None) -> PromptBlocks:
    """The blocks of a prompt. `namespace`: what else requests must have in common to share KV, as the adapter."""
    root = hash(namespace)
    keys = block_keys(tokens, root)
    return PromptBlocks(len(tokens), keys, tokens[len(keys) * BLOCK :], keys[-1] if keys else root)


def block_keys(tokens: list[int], before: int) -> list[int]:
    """Keys of the whole blocks of tokens that follow the block `before`. Hashes of numbers are equal in every run."""
    keys, all_of = [], tuple(tokens)
    for begin in range(0, len(all_of) - BLOCK + 1, BLOCK):
        before = hash((before, all_of[begin : begin + BLOCK]))
        keys.append(before)
    return keys


class KnownPrefixes:
    """The blocks used last, `max_tokens` in all. A block is dropped before the blocks that precede it, as in the radix
    cache, so that the blocks kept of any prompt are its first ones.

    Args:
        dropped: gets the key of each block that is dropped, if given.
    """

    def __init__(self, max_tokens: int, dropped: Callable[[int], None] | None = None) -> None:
        self._max_blocks, self._dropped = max_tokens // BLOCK, dropped
        self.blocks: OrderedDict[int, int] = OrderedDict()
        """Key -> number of prompts that were known up to this block. Only to be read: without its first block a prompt
        has no known prefix."""

    def __len__(self) -> int:
        return len(self.blocks)

    def match(self, keys: Sequence[int]) -> int:
        """Number of tokens of the known prefix."""
        blocks = self.blocks
        if not keys or keys[0] not in blocks:
            return 0
        return BLOCK * bisect_left(range(len(keys)), True, key=lambda index: keys[index] not in blocks)

    def count(self, keys: Sequence[int], matched: int) -> None:
        """Counts a prompt that is known up to `matched` tokens."""
        if matched:
            self.blocks[keys[matched // BLOCK - 1]] += 1

    def num_continued(self, keys: Sequence[int], matched: int) -> int:
        """Number of prompts so far that were known up to this block: few for a session, many for a shared prompt."""
        return self.blocks[keys[matched // BLOCK - 1]] if matched else 0

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many more tokens drop no block."""
        return len(self.blocks) + num_tokens // BLOCK <= self._max_blocks

    def use(self, keys: Sequence[int]) -> None:
        """Adds a prompt: its last block becomes the first to drop, its first block the last."""
        blocks = self.blocks
        for key in reversed(keys):
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = 0
        while len(blocks) > self._max_blocks:
            key, _ = blocks.popitem(last=False)
            if self._dropped is not None:
                self._dropped(key)

    def clear(self) -> None:
        keys = list(self.blocks)
        self.blocks.clear()
        if self._dropped is not None:
            for key in keys:
                self._dropped(key)
