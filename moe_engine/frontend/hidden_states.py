"""Final hidden states of a request (`return_hidden_states`): collected while it runs, in SGLang's shape at its end."""

from __future__ import annotations

from typing import Any

NOT_ENABLED = "start the server with --enable-return-hidden-states"


class HiddenStates:
    """Args: width: numbers of a state."""

    def __init__(self, width: int, num_prompt: int) -> None:
        self._width, self._num_prompt = width, num_prompt
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        """States of the next positions, float32."""
        self._parts.append(part)

    def shown(self, num_outputs: int) -> list[Any]:
        """The states of the prompt as one list, then one state for each output token except the last, whose state no
        step computed. States of tokens after a stop string are left out."""
        values = memoryview(b"".join(self._parts)).cast("f").tolist()
        states = [values[at : at + self._width] for at in range(0, len(values), self._width)]
        prompt, outputs = states[: self._num_prompt], states[self._num_prompt :][: max(0, num_outputs - 1)]
        return [prompt, *outputs]
