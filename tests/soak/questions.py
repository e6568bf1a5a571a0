"""Requests with known answers: each was sent to a reference server alone, without other load.

Every question is deterministic: greedy, or sampled with a seed. In float32 the answer then depends neither on other
requests nor on the parallel form, the prefix cache, chunking, retraction or speculation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

PLACES = ("France", "Peru", "Japan", "Kenya", "Norway", "Chad", "Fiji", "Cuba", "Laos", "Mali", "Oman", "Iran")
ASKED = ("capital", "currency", "language", "continent")
PREFIXES = (
    "You are a careful assistant who answers in one short sentence and never adds anything. ",
    "The following list of facts was checked twice by people who know every country of the world well. " * 3,
)
STOPS: tuple[Any, ...] = (" is", [".", " the"], "e", ["of", "\n"], " of", "z")


@dataclass(frozen=True)
class Question:
    """A request body. `sequences`: number of requested sequences."""

    path: str
    body: dict[str, Any]
    sequences: int = 1

    @property
    def has_stop(self) -> bool:
        return "stop" in self.body or "stop" in self.body.get("sampling_params", {})

    @property
    def is_plain_chat(self) -> bool:
        """A greedy chat without further sampling parameters."""
        known = {"model", "messages", "max_completion_tokens", "temperature", "logprobs", "top_logprobs"}
        return self.path.endswith("chat/completions") and self.body.keys() <= known and not self.body["temperature"]


def draw(seed: int, count: int) -> list[Question]:
    """Random questions: native and OpenAI endpoints, greedy and seeded, copies, batches, log-probabilities."""
    rng = random.Random(seed)
    kinds = (_native, _native, _tokens, _batch, _completion, _chat, _chat)
    return [rng.choice(kinds)(rng) for _ in range(count)]


def _text(rng: random.Random) -> str:
    place, about = rng.choice(PLACES), rng.choice(ASKED)
    text = rng.choice(
        [
            f"The {about} of {place} is",
            f"What is the {about} of {place}?",
            f"{rng.randint(1, 99)} plus {rng.randint(1, 99)} is",
            f"A paragraph about {place}:",
        ]
    )
    return (rng.choice(PREFIXES) if rng.random() < 0.4 else "") + text


def _sampling(rng: random.Random, length: str, seed: str) -> dict[str, Any]:
    """`length`, `seed`: the endpoint's names of the two fields."""
    params: dict[str, Any] = {length: rng.randint(1, 24), "temperature": 0.0}
    if rng.random() < 0.5:
        params |= {"temperature": rng.choice([0.5, 1.0, 1.5]), seed: rng.getrandbits(31)}
        if rng.random() < 0.5:
            params |= {"top_p": 0.9}
    if rng.random() < 0.4:
        params["stop"] = rng.choice(STOPS)
    if rng.random() < 0.3:
        params["ignore_eos"] = True
    if rng.random() < 0.2:
        params |= {"frequency_penalty": 0.5}
    if params["temperature"] and rng.random() < 0.2:
        params["n"] = rng.randint(2, 4)
    return params


def _native(rng: random.Random) -> Question:
    sampling = _sampling(rng, "max_new_tokens", "sampling_seed")
    body: dict[str, Any] = {"text": _text(rng), "sampling_params": sampling}
    if rng.random() < 0.3:
        body |= {"return_logprob": True, "top_logprobs_num": rng.randint(0, 5)}
    return Question("/generate", body, sampling.get("n", 1))


def _tokens(rng: random.Random) -> Question:
    ids = [rng.randrange(20, 250) for _ in range(rng.randint(1, 120))]
    sampling = _sampling(rng, "max_new_tokens", "sampling_seed")
    return Question("/generate", {"input_ids": ids, "sampling_params": sampling}, sampling.get("n", 1))


def _batch(rng: random.Random) -> Question:
    count = rng.randint(2, 5)
    sampling = [_sampling(rng, "max_new_tokens", "sampling_seed") for _ in range(count)]
    for each in sampling:
        each.pop("n", None)  # a batch has one number of copies
    return Question("/generate", {"text": [_text(rng) for _ in range(count)], "sampling_params": sampling}, count)


def _completion(rng: random.Random) -> Question:
    body = {"model": "default", "prompt": _text(rng), **_sampling(rng, "max_tokens", "seed")}
    if rng.random() < 0.3:
        body["logprobs"] = rng.randint(1, 5)
    return Question("/v1/completions", body, body.get("n", 1))


def _chat(rng: random.Random) -> Question:
    messages = [{"role": "user", "content": _text(rng)}]
    body = {"model": "default", "messages": messages, **_sampling(rng, "max_completion_tokens", "seed")}
    if rng.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": rng.choice([0, 5, 20])}
    return Question("/v1/chat/completions", body, body.get("n", 1))
