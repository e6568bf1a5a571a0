"""The kinds of request the soak sends, and what counts as the right answer to each.

No command of its own; `benchmarks.soak` is the caller.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

MAX_PROMPT = 160
MAX_OUTPUT = 48
NUM_PREFIXES = 6
WORDS = (
    "the",
    "capital",
    "of",
    "France",
    "is",
    "what",
    "how",
    "many",
    "people",
    "live",
    "there",
    "two",
    "plus",
    "seven",
)


@dataclass(frozen=True)
class SoakContext:
    """The server under test. Lengths of prompts and answers follow from its context length."""

    client: httpx.AsyncClient
    url: str
    vocab_size: int
    context_len: int
    disconnect_share: float

    @property
    def max_prompt(self) -> int:
        return max(2, min(MAX_PROMPT, self.context_len // 3))

    @property
    def max_output(self) -> int:
        return max(1, min(MAX_OUTPUT, self.context_len // 4))

    def token_ids(self, rng: random.Random) -> list[int]:
        """A random prompt; half of them begin with one of a few shared prefixes."""
        length = rng.randint(1, self.max_prompt)
        own = [rng.randrange(self.vocab_size) for _ in range(length)]
        if rng.random() < 0.5:
            shared = random.Random(rng.randrange(NUM_PREFIXES))
            prefix = [shared.randrange(self.vocab_size) for _ in range(self.max_prompt // 2)]
            own = (prefix + own)[: self.max_prompt]
        return own

    def text(self, rng: random.Random) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))

    def sampling(self, rng: random.Random) -> dict[str, Any]:
        """Greedy or drawn, sometimes with a stop string or penalties; ends early or late."""
        params: dict[str, Any] = {"max_new_tokens": rng.randint(1, self.max_output), "ignore_eos": rng.random() < 0.7}
        params["temperature"] = rng.choice([0.0, 0.7, 1.0])
        if rng.random() < 0.2:
            params |= {"top_p": 0.9, "top_k": 20}
        if rng.random() < 0.1:
            params["stop"] = rng.choice(["e", [" the", "."]])
        if rng.random() < 0.1:
            params |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1}
        return params


@dataclass(frozen=True)
class Outcome:
    """`result` is one of the constants; `detail` says what went wrong."""

    ANSWERED = "answered"
    DISCONNECTED = "disconnected"
    REFUSED = "refused as it should be"
    FAILED = "failed"

    result: str
    detail: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of request: how often it comes, its path, its body, and how many answers a good response holds."""

    weight: int
    path: str
    body: Callable[[SoakContext, random.Random], dict[str, Any]] | None
    generates: bool = True
    must_fail: bool = False


def _native(**more: Any) -> Callable[[SoakContext, random.Random], dict[str, Any]]:
    return lambda context, rng: {"input_ids": context.token_ids(rng), "sampling_params": context.sampling(rng), **more}


def _batch(context: SoakContext, rng: random.Random) -> dict[str, Any]:
    count = rng.randint(2, 4)
    return {"input_ids": [context.token_ids(rng) for _ in range(count)], "sampling_params": context.sampling(rng)}


def _two(context: SoakContext, rng: random.Random) -> dict[str, Any]:
    return {"text": context.text(rng), "sampling_params": {**context.sampling(rng), "n": 2}}


def _completion(stream: bool) -> Callable[[SoakContext, random.Random], dict[str, Any]]:
    return lambda context, rng: {
        "model": "default",
        "prompt": context.text(rng),
        "max_tokens": rng.randint(1, context.max_output),
        "temperature": rng.choice([0.0, 0.8]),
        "ignore_eos": rng.random() < 0.7,
        "stream": stream,
    }


def _chat(stream: bool) -> Callable[[SoakContext, random.Random], dict[str, Any]]:
    def body(context: SoakContext, rng: random.Random) -> dict[str, Any]:
        return {
            "model": "default",
            "messages": [{"role": "user", "content": context.text(rng)}],
            "max_completion_tokens": rng.randint(1, context.max_output),
            "temperature": rng.choice([0.0, 0.8]),
            "stream": stream,
        }

    return body


def _wrong(context: SoakContext, rng: random.Random) -> dict[str, Any]:
    """Something the server must refuse with a 4xx."""
    return rng.choice(
        [
            {"sampling_params": {"max_new_tokens": 4}},
            {"input_ids": [1, 2], "sampling_params": {"temperature": -1}},
            {"input_ids": [1, 2], "sampling_params": {"no_such_parameter": 1}},
            {"input_ids": [context.vocab_size + 5], "sampling_params": {}},
            {"input_ids": [1] * (context.context_len + 5), "sampling_params": {}},
            {"text": "both", "input_ids": [1], "sampling_params": {}},
        ]
    )


KINDS: dict[str, Kind] = {
    "generate": Kind(16, "/generate", _native()),
    "generate, streamed": Kind(24, "/generate", _native(stream=True)),
    "generate, batch": Kind(5, "/generate", _batch),
    "generate, n = 2": Kind(4, "/generate", _two),
    "generate, logprobs": Kind(
        5, "/generate", _native(return_logprob=True, logprob_start_len=0, top_logprobs_num=2, stream=True)
    ),
    "completions": Kind(8, "/v1/completions", _completion(False)),
    "completions, streamed": Kind(10, "/v1/completions", _completion(True)),
    "chat": Kind(8, "/v1/chat/completions", _chat(False)),
    "chat, streamed": Kind(10, "/v1/chat/completions", _chat(True)),
    "wrong": Kind(5, "/generate", _wrong, generates=False, must_fail=True),
    "models": Kind(2, "/v1/models", None, generates=False),
    "health": Kind(2, "/health", None, generates=False),
    "server info": Kind(1, "/server_info", None, generates=False),
}


async def perform(context: SoakContext, name: str, rng: random.Random, *, disconnect: bool | None = None) -> Outcome:
    """Sends one request of that kind. `disconnect` None leaves it to chance whether the client stays for the answer."""
    kind = KINDS[name]
    body = kind.body(context, rng) if kind.body else None
    leaves = kind.generates and (rng.random() < context.disconnect_share if disconnect is None else disconnect)
    try:
        if body is None:
            response = await context.client.get(context.url + kind.path)
            return _check(kind, response.status_code, response.text)
        if body.get("stream"):
            return await _streamed(context, kind, body, rng.randint(0, 6) if leaves else None)
        if leaves:
            return await _abandoned(context, kind, body, rng.uniform(0.0, 0.3))
        response = await context.client.post(context.url + kind.path, json=body)
        return _check(kind, response.status_code, response.text)
    except httpx.HTTPError as error:
        return Outcome(Outcome.FAILED, f"{type(error).__name__}: {error}")


async def _streamed(context: SoakContext, kind: Kind, body: dict[str, Any], leave_after: int | None) -> Outcome:
    """Reads an event stream to its [DONE], or closes it after so many chunks."""
    chunks = 0
    async with context.client.stream("POST", context.url + kind.path, json=body) as response:
        if response.status_code != 200:
            return _check(kind, response.status_code, (await response.aread()).decode(errors="replace"))
        if leave_after == 0:
            return Outcome(Outcome.DISCONNECTED)
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            if line[5:].strip() == "[DONE]":
                return Outcome(Outcome.ANSWERED) if chunks else Outcome(Outcome.FAILED, "an empty stream")
            if '"error"' in line:
                return Outcome(Outcome.FAILED, line[:300])
            chunks += 1
            if chunks == leave_after:
                return Outcome(Outcome.DISCONNECTED)
    return Outcome(Outcome.FAILED, f"the stream ended after {chunks} chunks without [DONE]")


async def _abandoned(context: SoakContext, kind: Kind, body: dict[str, Any], patience: float) -> Outcome:
    """Gives up on an answer after `patience` seconds; it may be there before."""
    try:
        response = await context.client.post(
            context.url + kind.path, json=body, timeout=httpx.Timeout(30.0, read=patience)
        )
    except httpx.ReadTimeout:
        return Outcome(Outcome.DISCONNECTED)
    return _check(kind, response.status_code, response.text)


def _check(kind: Kind, status: int, text: str) -> Outcome:
    if kind.must_fail:
        if 400 <= status < 500:
            return Outcome(Outcome.REFUSED)
        return Outcome(Outcome.FAILED, f"status {status} for a request that must be refused: {text[:200]}")
    if status == 200:
        return Outcome(Outcome.ANSWERED)
    return Outcome(Outcome.FAILED, f"status {status}: {text[:300]}")
