"""Log-probabilities as JSON: correct, rendered once, only on request, and in bounded pieces of work."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_engine.core import messages
from moe_engine.frontend import inbox
from moe_engine.frontend.frontend import Frontend
from moe_engine.frontend.logprob_format import LogprobFormat, LogprobOptions, PythonLogprobs, extend
from moe_engine.server import logprob_json
from moe_engine.server.app import create_app
from moe_engine.server.logprob_json import TokenJson
from moe_engine.server.settings import ServerSettings
from moe_engine.types import PackedLogprobs
from tests.distributed.engine.test_client import FakeCore, client_of
from tests.logprobs import Entry, pack
from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, events, post
from tests.tokenizer.tiny_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.vocab_size
TOP = 20


def entries(rng: random.Random, count: int, best: int, asked: int = 0) -> list[Entry]:
    def value() -> float:
        return rng.choice((-rng.randrange(1 << 20) / 1024, -0.1, -1e-30, 0.0, float("-inf")))

    def single(value: float) -> float:
        return memoryview(memoryview(pack([Entry(0, value)]).values)).cast("f")[0]

    return [
        Entry(
            rng.randrange(VOCAB),
            single(value()),
            tuple((rng.randrange(VOCAB), single(value())) for _ in range(best)),
            tuple(single(value()) for _ in range(asked)),
        )
        for _ in range(count)
    ]


def rendered(form: LogprobFormat, block: PackedLogprobs, cut: int) -> Any:
    """The answer in two parts, as read by a client."""
    columns: list[list[Any]] = []
    for part in (block.part(0, cut), block.part(cut, block.num_tokens)):
        if part.num_tokens:
            extend(columns, form.render(part))
    return json.loads(msgspec.json.encode(form.fields(columns)))


def plain(value: Any) -> Any:
    """A Python object, encoded and decoded as JSON."""
    return json.loads(msgspec.json.encode(value))


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 3), st.booleans(), st.randoms(use_true_random=False))
def test_all_shapes_are_those_of_the_numbers(
    count: int, best: int, asked: int, with_text: bool, rng: random.Random
) -> None:
    found = entries(rng, count, best, asked)
    unknown, cut = rng.randrange(count), rng.randrange(count + 1)
    found[:unknown] = [Entry(entry.token_id, None) for entry in found[:unknown]]
    block, tokens = pack(found, best, asked), TokenJson(TOKENIZER)
    options = LogprobOptions(0, best, tuple(range(asked)), with_text)
    text = TOKENIZER.token_text

    assert rendered(tokens.native(options), block, cut) == plain(
        PythonLogprobs(options, text).fields(PythonLogprobs(options, text).render(block))
    )
    assert rendered(tokens.completion(options), block, cut) == plain(
        {
            "tokens": [text(e.token_id) for e in found],
            "token_logprobs": [e.logprob for e in found],
            "top_logprobs": [{text(token): value for token, value in e.top} or None for e in found],
            "text_offset": [-1] * count,
        }
    )

    def one(token: int, value: float | None) -> dict[str, Any]:
        return {"token": text(token), "bytes": list(TOKENIZER.token_bytes(token)), "logprob": value}

    chat = [{**one(e.token_id, e.logprob), "top_logprobs": [one(*pair) for pair in e.top]} for e in found]
    assert rendered(tokens.chat(options), block, cut) == plain({"content": chat})
    for form in (tokens.native(options), tokens.completion(options), tokens.chat(options)):
        assert all(values == [] for values in plain(form.fields([])).values())


def test_ids_only_without_a_tokenizer() -> None:
    options = LogprobOptions(None, 1, (), with_text=True)
    shown = rendered(TokenJson(None).native(options), pack([Entry(7, -0.5, ((7, -0.5),))]), 0)
    assert shown == {"token_logprobs": [[-0.5, 7, None]], "top_logprobs": [[[-0.5, 7, None]]]}


def test_a_cumulative_stream_renders_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    body = {"text": "x", "return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0, "stream": True}
    chunks = events(post(FakeClient(), "/generate", body))
    last = chunks[-1]["meta_info"]
    tokens = len(last["output_token_logprobs"]) + len(last["input_token_logprobs"])
    assert len(chunks) > 5 and counted.total == 4 * tokens
    assert [len(chunk["meta_info"]["output_top_logprobs"]) for chunk in chunks] == list(range(1, len(chunks) + 1))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": 4}, "top_logprobs_num"),
        ("/generate", {"text": "x", "return_logprob": True, "token_ids_logprob": [1, 2, 3, 4]}, "token_ids_logprob"),
        ("/v1/completions", {"prompt": "x", "logprobs": 4}, "logprobs"),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 4}, "top_logprobs"),
    ],
)
def test_every_endpoint_names_its_field_and_the_flag(path: str, body: dict[str, Any], field: str) -> None:
    assert post(FakeClient(), path, body, max_logprobs=4).status_code == 200
    refused = post(FakeClient(), path, body, max_logprobs=3)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and message.startswith(f"{field}: 4 log-prob") and "--max-logprobs" in message


# -- the event loop


class Counted:
    """Counts the entries that are rendered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total = 0
        for name in ("ChatLogprobs", "CompletionLogprobs", "NativeLogprobs"):
            form = getattr(logprob_json, name)
            monkeypatch.setattr(form, "render", self._counting(form.render))

    def _counting(self, render: Any) -> Any:
        def counting(form: Any, block: PackedLogprobs) -> Any:
            self.total += (len(block.values) + len(block.top) + len(block.asked)) // 4
            return render(form, block)

        return counting


@asynccontextmanager
async def app_over(folder: Path) -> AsyncIterator[tuple[Any, FakeCore]]:
    async with client_of(folder, 1) as (client, (core,)):
        core.statuses[0].write(ready=1)
        yield create_app(Frontend(client, TOKENIZER), client, ServerSettings()), core


def in_process(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def burst(core: FakeCore, num_sequences: int, steps: int, block: PackedLogprobs) -> None:
    """Waits for the requests, then sends all their steps while the loop is blocked."""
    rids = []
    while len(rids) < num_sequences:
        message = await core.got(0)
        assert isinstance(message, messages.AddRequest)
        rids.append(message.rid)
    for number in range(steps):
        finish = {"type": "length", "length": steps} if number == steps - 1 else None
        core.send(messages.StepOutput([messages.RequestDelta(rid, [5], finish, block) for rid in rids]))
    time.sleep(0.3)  # until the sockets have the data


@pytest.mark.parametrize(
    ("num_requests", "options", "steps"),
    [(60, {"stream": True}, 60), (1, {"n": 128, "stream": False}, 30), (1, {"n": 128, "stream": True}, 30)],
    ids=["60 streams", "n=128", "n=128 streamed"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_other_tasks_run_between_bounded_parts_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, num_requests: int, options: dict[str, Any], steps: int
) -> None:
    """A background task counts the parts rendered between two of its iterations: at most one per sequence."""
    monkeypatch.setattr(inbox, "MAX_ENTRIES", 5 * (1 + TOP))
    counted, longest, beats = Counted(monkeypatch), 0, 0
    block = pack(entries(random.Random(1), 1, TOP))
    sequences = num_requests * options.get("n", 1)
    asked = {"top_logprobs": TOP, "logprobs": True} if "chat" in path else {"logprobs": TOP, "prompt": "hi"}
    body = {**CHAT, **asked, **options, "max_tokens": steps}

    async def run() -> None:
        nonlocal longest, beats
        async with app_over(tmp_path) as (app, core), in_process(app) as http:
            answers = asyncio.gather(*(http.post(path, json=body) for _ in range(num_requests)))
            await burst(core, sequences, steps, block)
            while not answers.done():
                before = counted.total
                await asyncio.sleep(0)
                longest, beats = max(longest, counted.total - before), beats + 1
            for answer in await answers:
                assert answer.status_code == 200
                assert answer.text.count('"text_offset"' if "chat" not in path else '"logprob"') > 0

    asyncio.run(run())
    assert counted.total == sequences * steps * (1 + TOP)
    assert beats > steps // 5 and 0 < longest <= sequences * inbox.MAX_ENTRIES < counted.total // 2


@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_does_not_read_costs_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(inbox, "MAX_ENTRIES", 5 * (1 + TOP))
    counted, block = Counted(monkeypatch), pack(entries(random.Random(1), 1, TOP))
    body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": TOP, "n": n, "max_tokens": 200}
    reads, sent = asyncio.Event(), []

    async def run() -> None:
        async with app_over(tmp_path) as (app, core):
            asked = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

            async def receive() -> dict[str, Any]:
                return asked.pop() if asked else await asyncio.Event().wait()  # type: ignore[func-returns-value]

            async def send(message: dict[str, Any]) -> None:
                sent.append(message)
                if message.get("body"):
                    await reads.wait()

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/chat/completions",
                "headers": [],
                "query_string": b"",
            }
            serving = asyncio.create_task(app(scope, receive, send))
            await burst(core, n, 200, block)
            for _ in range(500):
                await asyncio.sleep(0)
            held = counted.total
            # for each sequence: a part being sent, one in the queue, and one that waits for the queue
            assert 0 < held <= 3 * n * inbox.MAX_ENTRIES < n * 200 * (1 + TOP)
            await asyncio.sleep(0.05)
            assert counted.total == held
            reads.set()
            await serving
            assert counted.total == n * 200 * (1 + TOP)

    asyncio.run(run())
    assert sent[-1]["body"].endswith(b"data: [DONE]\n\n") and not sent[-1]["more_body"]
