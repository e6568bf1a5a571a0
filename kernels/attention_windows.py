"""Windows of attention: the positions that a query token sees. Imports no torch.

A window is a number of positions, its own included: sliding, or a `ChunkWindow`. None: all positions.
"""

from __future__ import annotations

from typing import Any


class ChunkWindow(int):
    """The window of chunked attention (Llama 4): a query token sees the positions of its own chunk of this many, up to
    its own. A sliding window of this size has all of them, so that whatever keeps KV for windows keeps enough."""


def lowest_seen(position: Any, window: int) -> Any:
    """The lowest position inside the window of a query token at `position`, below 0 near the start of a context.
    position: a number, or an array or tensor of them."""
    return position - (position % window if isinstance(window, ChunkWindow) else window - 1)


def first_seen(position: int, window: int | None) -> int:
    """The first position that a query token at `position` sees."""
    return 0 if window is None else max(0, lowest_seen(position, window))


def window_number(window: int | None) -> int:
    """The window as an argument of kernels: negative for chunks, 0 for all positions."""
    return -window if isinstance(window, ChunkWindow) else window or 0
