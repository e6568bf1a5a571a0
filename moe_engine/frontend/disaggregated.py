"""Requests of a router in prefill/decode mode: the part of a request that each of the two servers runs."""

from __future__ import annotations

from dataclasses import replace

from moe_engine.errors import InputError
from moe_engine.frontend.prompts import Prompt


def apply_mode(mode: str, prompts: list[Prompt]) -> None:
    """The prefill server computes the prompt and one token; only its answer contains prompt log-probabilities; the
    router merges it with the decode server's. A request without a room is served as usual on either server.

    Raises:
        InputError: the request has a room, and this server is neither a prefill nor a decode server.
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
            raise InputError.at(
                "bootstrap_room",
                "this server serves whole requests; start it with --disaggregation-mode prefill or "
                "decode, or leave the field out",
            )
