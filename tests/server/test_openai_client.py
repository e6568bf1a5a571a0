"""OpenAI's own client, sync and async, over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, TEXT, real_server

MESSAGES: Any = CHAT["messages"]


@pytest.fixture(scope="module")
def url():
    with real_server(FakeClient(), api_key="secret", enable_cache_report=True) as address:
        yield address + "/v1"


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as made:
        yield made


def test_chat(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, seed=1, logprobs=True, top_logprobs=2, extra_body={"top_k": 5}
    )
    assert [c.message.content for c in answer.choices] == [TEXT, TEXT]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["matched_stop"] == 1
    first = answer.choices[0].logprobs.content[0]
    assert (first.token, bytes(first.bytes), len(first.top_logprobs)) == ("Hello", b"Hello", 2)
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 18
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_stream(client):
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, max_completion_tokens=4
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[1:-1]) == "Hello world, how"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert len({c.id for c in chunks}) == 1


def test_completions(client):
    answer = client.completions.create(model="default", prompt=["a", "b"], max_tokens=3, logprobs=1, echo=True)
    assert [c.text for c in answer.choices] == ["aHello world,", "bHello world,"]
    assert answer.choices[0].logprobs.tokens == ["<｜begin▁of▁sentence｜>", "a", "Hello", " world", ","]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    stream = client.completions.create(model="default", prompt=[5, 6], stream=True, stop=["how"])
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == "Hello world, "
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].model_extra["matched_stop"] == "how"


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.model_extra["max_model_len"]) == ("tiny", 256)
    assert client.models.retrieve("tiny").id == "tiny"
    answer = client.chat.completions.create(model="gpt-4o", messages=MESSAGES)  # a name from another server
    assert (answer.model, answer.choices[0].message.content) == ("gpt-4o", TEXT)
    with pytest.raises(openai.NotFoundError, match="'x' does not exist"):
        client.models.retrieve("x")


def test_errors_show_their_message(client, url):
    with pytest.raises(openai.BadRequestError, match="temperature: expected a number >= 0") as info:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert info.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="names a LoRA adapter, and this server runs without"):
        client.chat.completions.create(model="tiny:adapter", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="is longer than the model's context length"):
        client.completions.create(model="tiny", prompt=[5] * 300, stream=True)
    other = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
    with other, pytest.raises(openai.AuthenticationError, match="Authorization: Bearer"):
        other.models.list()


def test_async_many_at_once(url):
    async def one(client, i):
        text = ""
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        plain = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=i + 1)
        assert plain.usage.completion_tokens == min(i + 1, 9)
        return text

    async def main():
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(20)))

    assert asyncio.run(main()) == [TEXT] * 20


def test_error_inside_a_stream():
    fake = FakeClient()
    fake.fail_after = 3
    with real_server(fake) as address, openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0) as client:
        chunks = []
        with pytest.raises(openai.APIError, match="SIGKILL"):
            for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):
                chunks.append(chunk)
        assert len(chunks) == 4
        fake.fail_after = 0
        with pytest.raises(openai.InternalServerError, match="SIGKILL") as info:
            client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        assert info.value.status_code == 503
