"""Windows of attention: the positions that a query token sees. Imports no torch.

A window is a number of positions, its own included: sliding, or a `ChunkWindow`. None: all positions.
"""

from __future__ import annotations


class ChunkWindow(int):
    """The window of chunked attention (Llama 4): a query token sees the positions of its own chunk of this many, up to
    its own. A sliding window of this size has all of them, so that whatever keeps KV for windows keeps enough."""


def first_seen(position: int, window: int | None) -> int:
    """The first position that a query token at `position` sees."""
    if window is None:
        return 0
    return position - position % window if isinstance(window, ChunkWindow) else max(0, position - window + 1)


def window_number(window: int | None) -> int:
    """The window as an argument of kernels: negative for chunks, 0 for all positions."""
    return -window if isinstance(window, ChunkWindow) else window or 0
