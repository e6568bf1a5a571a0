"""Experts of a request's tokens (`return_routed_experts`): collected while it runs, in SGLang's encoding at its end."""

from __future__ import annotations

import base64
from array import array

NOT_ENABLED = "start the server with --enable-return-routed-experts"


class TokenExperts:
    """
    Args:
        width: layers times experts per token.
        start: first position that is returned.
    """

    def __init__(self, width: int, num_prompt: int, start: int) -> None:
        self._width, self._num_prompt, self._start = width, num_prompt, start
        self._values = array("h")

    def add(self, part: bytes) -> None:
        """Experts of the next positions, int16 [n, width]."""
        self._values.frombytes(part)

    def shown(self, num_outputs: int) -> str:
        """Base64 of int32 [tokens, layers, experts per token]: of the prompt from `start` on, and of all output tokens
        but the last, which no step computed. Tokens after a stop string are left out."""
        end = self._num_prompt + max(0, num_outputs - 1)
        return base64.b64encode(array("i", self._values[self._start * self._width : end * self._width])).decode()
