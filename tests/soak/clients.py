"""Realistic clients: most send requests and read, others disconnect, abort, retry with the same id, read slowly, send
large or wrong bodies. Every answer is compared with the known one.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from moe_engine.demo import CHECKPOINT_DIR
from tests.soak import answers
from tests.soak.http import Connection, Response
from tests.soak.questions import Question

PATIENCE_SECONDS = 180.0
"""Seconds without an answer after which a request counts as lost."""
RETRY_SECONDS = 0.02
"""Seconds between two attempts with an id that the server still holds for a disconnected client."""
MAX_PROBLEMS = 50


@dataclass(frozen=True)
class Known:
    """A question and its expected answer."""

    question: Question
    answer: list[answers.Sequence]


@dataclass
class Tally:
    """The outcomes of all clients."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, kind: str, problem: str | None = None, *, lost: bool = False) -> None:
        self.counts[kind] += 1
        if problem is None:
            return
        self.lost += lost
        self.wrong += not lost
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{kind}: {problem}"[:1000])


class Client:
    """One client. `ask_next` sends one random request.

    Args:
        rid: the id of all its requests, sent one at a time; None: the server chooses the ids.
    """

    def __init__(self, port: int, bank: Sequence[Known], seed: int, tally: Tally, rid: str | None = None) -> None:
        self._port = port
        self._bank = bank
        self._rng = random.Random(seed)
        self._tally = tally
        self._rid = rid
        self._connection = Connection(port)

    async def ask_next(self, behaviors: dict[str, int] | None = None) -> None:
        """One request of a random kind; `behaviors`: their weights, by name."""
        weights = behaviors or BEHAVIORS
        (name,) = self._rng.choices(list(weights), weights=list(weights.values()))
        behave: Callable[[], Awaitable[str | None]] = getattr(self, f"_{name}")
        try:
            problem = await asyncio.wait_for(behave(), PATIENCE_SECONDS)
        except (TimeoutError, ConnectionError, EOFError) as error:
            self._connection.drop()
            self._tally.add(name, f"{type(error).__name__}: {error}", lost=True)
        except ValueError as error:
            self._connection.drop()
            self._tally.add(name, str(error))
        else:
            self._tally.add(name, problem)

    def close(self) -> None:
        self._connection.drop()

    # -- requests

    def _draw(self, suits: Callable[[Question], bool] = lambda question: True) -> tuple[Known, dict[str, Any]]:
        """A suitable known question, and a request body for it."""
        while not suits((known := self._rng.choice(self._bank)).question):
            pass
        body = dict(known.question.body)
        if self._rid is not None:
            body["rid"] = self._rid
        return known, body

    async def _send(self, path: str, body: dict[str, Any]) -> Response:
        """Sends until the server has detected the disconnect of this client's last request with the same id."""
        while True:
            response = await self._connection.send("POST", path, body)
            if self._rid is None or response.status != 400:
                return response
            refusal = (await response.read()).decode()
            if "is still running" not in refusal:
                raise ValueError(f"status 400: {refusal}")
            await asyncio.sleep(RETRY_SECONDS)

    async def _whole(self) -> str | None:
        """Sends a request and reads the answer."""
        known, body = self._draw()
        response = await self._send(known.question.path, body)
        if response.status != 200:
            return f"status {response.status}: {(await response.read())[:300]!r}"
        return _differences(answers.whole(await response.json()), known.answer)

    async def _streamed(self, pause: float = 0.0) -> str | None:
        """Reads an event stream; `pause` in seconds after its first event."""
        known, body = self._draw()
        response = await self._send(known.question.path, body | {"stream": True})
        if response.status != 200:
            return f"status {response.status}: {(await response.read())[:300]!r}"
        found = [answers.Sequence() for _ in range(known.question.sequences)]
        await asyncio.sleep(pause)
        await answers.streamed(response.events(), found)
        return _differences(found, known.answer)

    async def _slow(self) -> str | None:
        return await self._streamed(self._rng.uniform(0.1, 1.0))

    async def _leaves_a_stream(self) -> str | None:
        """Closes the connection after some events, or before the first."""
        known, body = self._draw()
        response = await self._send(known.question.path, body | {"stream": True})
        if response.status != 200:
            return f"status {response.status}: {(await response.read())[:300]!r}"
        left, found = self._rng.randint(0, 6), [answers.Sequence() for _ in range(known.question.sequences)]
        events = response.events()

        async def some() -> Any:
            for _ in range(left):
                with suppress(StopAsyncIteration):
                    yield await anext(events)

        await answers.streamed(some(), found)
        self._connection.drop(reset=self._rng.random() < 0.5)
        parts = zip(found, known.answer, strict=True)
        return None if known.question.has_stop else _first(_beginning(part, right) for part, right in parts)

    async def _leaves_an_answer(self) -> str | None:
        """Closes the connection while the server computes."""
        known, body = self._draw()
        try:
            response = await asyncio.wait_for(
                self._send(known.question.path, body), self._rng.choice([0.001, 0.01, 0.1])
            )
        except TimeoutError:
            self._connection.drop(reset=self._rng.random() < 0.5)
            return None
        return _differences(answers.whole(await response.json()), known.answer)

    async def _aborts(self) -> str | None:
        """Ends its own stream by /abort_request: the tokens received so far must be correct."""
        known, body = self._draw(lambda question: question.path == "/generate" and not question.has_stop)
        body["rid"] = rid = self._rid or f"abort-{self._rng.getrandbits(64)}"
        response = await self._send("/generate", body | {"stream": True})
        if response.status != 200:
            return f"status {response.status}: {(await response.read())[:300]!r}"
        abort = asyncio.create_task(self._abort_after(self._rng.choice([0.0, 0.005, 0.05]), rid))
        found = [answers.Sequence() for _ in range(known.question.sequences)]
        await answers.streamed(response.events(), found)
        await abort
        return _first(
            _beginning(part, right) if part.finish == "abort" else part.difference(right)
            for part, right in zip(found, known.answer, strict=True)
        )

    async def _abort_after(self, seconds: float, rid: str) -> None:
        await asyncio.sleep(seconds)
        connection = Connection(self._port)
        await connection.fetch("POST", "/abort_request", {"rid": rid})
        connection.drop()

    async def _other_forms(self) -> str | None:
        """A greedy chat in the form of the Responses API or of Anthropic: the same text."""
        if not any(known.question.is_plain_chat for known in self._bank):
            return None
        known, chat = self._draw(lambda question: question.is_plain_chat)
        body = {"model": "default", "temperature": 0}
        if self._rng.random() < 0.5:
            body |= {"max_tokens": chat["max_completion_tokens"], "messages": chat["messages"]}
            status, content = await self._connection.fetch("POST", "/v1/messages", body)
            parts = json.loads(content).get("content", ())
        else:
            body |= {"max_output_tokens": chat["max_completion_tokens"], "input": chat["messages"][0]["content"]}
            status, content = await self._connection.fetch("POST", "/v1/responses", body)
            parts = [part for item in json.loads(content).get("output", ()) for part in item["content"]]
        text, right = "".join(part["text"] for part in parts), known.answer[0].text
        return None if text == right else f"status {status}, {text!r} instead of {right!r}"

    async def _updates(self) -> str | None:
        """Replaces the weights by equal ones. One update runs at a time, others are refused."""
        status, content = await self._connection.fetch("POST", UPDATE, {"model_path": str(CHECKPOINT_DIR)})
        return None if status in (200, 400) else f"status {status}, {content[:300]!r}"

    async def _copies(self) -> str | None:
        """Copies without a seed differ: texts of 20 tokens at a high temperature do not repeat."""
        sampling = {"n": 4, "temperature": 2.0, "max_new_tokens": 20, "ignore_eos": True}
        status, content = await self._connection.fetch("POST", "/generate", {"text": "A", "sampling_params": sampling})
        texts = [part.text for part in answers.whole(json.loads(content))] if status == 200 else []
        return None if len(set(texts)) == 4 else f"status {status}, {len(set(texts))} different copies of 4: {texts}"

    async def _large(self) -> str | None:
        """A long document to count, and prompts far beyond the context."""
        words = self._rng.randint(1, 1 << 17)
        kind = self._rng.randrange(3)
        if kind == 0:
            body: dict[str, Any] = {"prompt": "a b " * words}
            status, content = await self._connection.fetch("POST", "/tokenize", body)
            count = json.loads(content).get("count", 0) if status == 200 else -1
            return None if count >= words else f"/tokenize of {words} words: status {status}, {count} tokens"
        if kind == 1:
            body = {"model": "default", "messages": [{"role": "user", "content": "a b " * (words + 4096)}]}
            status, content = await self._connection.fetch("POST", "/v1/chat/completions", body)
        else:
            status, content = await self._connection.fetch("POST", "/generate", {"input_ids": [7] * (words + 4096)})
        return None if status in (400, 413) else f"{words} words beyond the context: status {status} {content[:200]!r}"

    async def _half_a_body(self) -> str | None:
        """Announces a body, sends a part of it and disconnects."""
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.sendall(b'POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{"text": "')
        connection.close()
        return None

    async def _wrong(self) -> str | None:
        """Bodies that must be refused."""
        path, body = self._rng.choice(WRONG)
        status, content = await self._connection.fetch("POST", path, body)
        return None if status in (400, 404, 422) else f"{body!r:.200}: status {status}, {content[:200]!r}"

    async def _control(self) -> str | None:
        """Reads of state, and a flush of the prefix cache, refused while requests run."""
        method, path, due = self._rng.choice(CONTROL)
        status, content = await self._connection.fetch(method, path)
        return None if status in due else f"{method} {path}: status {status}, {content[:200]!r}"


UPDATE = "/update_weights_from_disk"
BEHAVIORS = {
    "whole": 300,
    "streamed": 300,
    "leaves_a_stream": 100,
    "leaves_an_answer": 80,
    "slow": 20,
    "aborts": 60,
    "other_forms": 60,
    "updates": 4,
    "copies": 15,
    "wrong": 40,
    "control": 30,
    "half_a_body": 10,
    "large": 2,
}
"""Weights of a mixed client's next action; each name is a method of `Client`."""

ORDINARY = {"whole": 1, "streamed": 1}

CONTROL = [
    ("GET", "/health", (200,)),
    ("GET", "/v1/models", (200,)),
    ("GET", "/server_info", (200,)),
    ("GET", "/v1/loads", (200,)),
    ("POST", "/flush_cache", (200, 400)),
    ("GET", "/no_such_page", (404,)),
]

WRONG: list[tuple[str, Any]] = [
    ("/generate", {"sampling_params": {"max_new_tokens": 4}}),
    ("/generate", {"input_ids": [1, 2], "sampling_params": {"temperature": -1}}),
    ("/generate", {"input_ids": [1, 2], "sampling_params": {"no_such_parameter": 1}}),
    ("/generate", {"input_ids": [1 << 30], "sampling_params": {}}),
    ("/generate", {"text": "both", "input_ids": [1]}),
    ("/generate", {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1}]}),
    ("/generate", {"text": "a", "routed_dp_rank": 99}),
    ("/generate", b"{"),
    ("/generate", b"\xff\xfe"),
    ("/v1/completions", {"model": "default", "prompt": "a", "logprobs": 10**9}),
    ("/v1/completions", {"model": "default", "prompt": "a", "n": 10**9}),
    ("/v1/chat/completions", {"model": "default", "messages": []}),
    ("/v1/chat/completions", {"model": "default", "messages": [{"role": "user"}], "max_tokens": -3}),
]


def _beginning(part: answers.Sequence, right: answers.Sequence) -> str | None:
    return None if part.is_beginning_of(right) else f"{part.text!r} is no beginning of {right.text!r}"


def _differences(found: list[answers.Sequence], right: list[answers.Sequence]) -> str | None:
    if len(found) != len(right):
        return f"{len(found)} sequences instead of {len(right)}"
    return _first(one.difference(other) for one, other in zip(found, right))


def _first(problems: Any) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
