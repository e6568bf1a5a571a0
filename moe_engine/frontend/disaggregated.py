"""Requests of a router in prefill/decode mode: what each of the two servers does with the same request."""

from __future__ import annotations

from dataclasses import replace

from moe_engine.errors import InputError
from moe_engine.frontend.generate_input import Prompt


def apply_mode(mode: str, prompts: list[Prompt]) -> None:
    """The prefill server computes the prompt and one token; prompt log-probabilities are in its answer alone, which the
    router merges with the decode server's. A request without a room is served as usual on either server.

    Raises:
        InputError: a room, and this server is on neither side.
    """
    for prompt in prompts:
        if prompt.bootstrap is None:
            continue
        if mode == "prefill":
            prompt.sampling = replace(prompt.sampling, max_new_tokens=1, min_new_tokens=0, n=1, constraint=None)
            prompt.max_new_tokens = 1
        elif mode == "decode":
            if prompt.logprobs is not None:
                prompt.logprobs = replace(prompt.logprobs, start=None)
        else:
            raise InputError(
                "bootstrap_room: this server serves whole requests; start it with --disaggregation-mode prefill or "
                "decode, or leave the field out",
                field="bootstrap_room",
            )
