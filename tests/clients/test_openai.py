"""The official `openai` client through every endpoint and option of the server, with the embedded model.

`tests/server/test_openai_client.py` checks exact answers of a scripted engine; here the answers are the model's.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.clients.conftest import KEY

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["city", "river"]
    number: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


CHAT_OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 5}, {"max_completion_tokens": 5}, {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    {"frequency_penalty": 0.5, "presence_penalty": -0.5}, {"stop": "Paris"}, {"stop": ["Paris", "xyz"]},
    {"n": 3, "temperature": 1}, {"logprobs": True, "top_logprobs": 3}, {"logit_bias": {"100": -100}},
    {"reasoning_effort": "high"}, {"response_format": {"type": "text"}}, {"user": "a"}, {"metadata": {"a": "b"}},
    {"store": False}, {"service_tier": "auto"}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"},
    {"tools": [WEATHER], "parallel_tool_calls": False},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}},
    {"extra_body": {"chat_template_kwargs": {"thinking": True}}}, {"extra_body": {"regex": "[a-z]{3}"}},
    {"extra_body": {"rid": "mine", "priority": 3, "skip_special_tokens": False, "stop_token_ids": [5]}},
]  # fmt: skip


@pytest.mark.parametrize("options", CHAT_OPTIONS, ids=lambda options: "+".join(options.get("extra_body", options)))
def test_chat_options_with_and_without_a_stream(client: openai.OpenAI, options: dict[str, Any]) -> None:
    asked = {"model": "default", "messages": FRANCE, "temperature": 0, "max_tokens": 30} | options
    if "max_completion_tokens" in options:
        del asked["max_tokens"]
    answer = client.chat.completions.create(**asked)
    assert len(answer.choices) == options.get("n", 1)
    text, reasoning, calls = [""] * len(answer.choices), [""] * len(answer.choices), 0
    asked["extra_body"] = {**options.get("extra_body", {})} | ({"rid": "other"} if "extra_body" in options else {})
    usage = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            reasoning[choice.index] += getattr(choice.delta, "reasoning_content", None) or ""
            calls += len(choice.delta.tool_calls or ())
    assert usage is not None
    if "temperature" not in options or "seed" in options:
        assert text == [choice.message.content or "" for choice in answer.choices]
        assert reasoning == [getattr(c.message, "reasoning_content", None) or "" for c in answer.choices]
        assert usage.completion_tokens == answer.usage.completion_tokens
        assert bool(calls) == bool(answer.choices[0].message.tool_calls)
    if "stop" in options:
        assert answer.choices[0].finish_reason == "stop" and "Paris" not in answer.choices[0].message.content
    if options.get("logprobs"):
        for entry in answer.choices[0].logprobs.content:
            assert entry.logprob <= 0 and len(entry.top_logprobs) == 3 and math.isfinite(entry.logprob)


def test_tools_round_trip(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: Any = {"model": "default", "tools": [WEATHER], "temperature": 0, "max_tokens": 60}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = client.chat.completions.create(messages=messages, tool_choice=choice, **options).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert json.loads(answer.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    messages.append(answer.message)
    messages.append({"role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "sunny"})
    final = client.chat.completions.create(messages=messages, **options).choices[0]
    assert final.finish_reason == "stop" and final.message.content


def test_parsed_answers(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "messages": FRANCE, "response_format": Place, "max_tokens": 200}
    assert isinstance(client.chat.completions.parse(**asked).choices[0].message.parsed, Place)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Place)
    assert {"chunk", "content.delta", "content.done"} <= kinds
    parsed = client.responses.parse(model="default", input=FRANCE, text_format=Place, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Place)


COMPLETION_OPTIONS: list[dict[str, Any]] = [
    {}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 1, "max_tokens": 0}, {"n": 2, "temperature": 1},
    {"prompt": ["a", "b"]}, {"prompt": [5, 6, 7]}, {"prompt": [[5, 6], [7]]}, {"stop": ["."]}, {"suffix": None},
    {"best_of": 1}, {"seed": 3, "temperature": 1}, {"user": "a"}, {"presence_penalty": 1, "frequency_penalty": 1},
    {"extra_body": {"json_schema": Place.model_json_schema()}, "max_tokens": 100},
]  # fmt: skip


@pytest.mark.parametrize("options", COMPLETION_OPTIONS, ids=lambda options: "+".join(options) or "none")
def test_completions(client: openai.OpenAI, options: dict[str, Any]) -> None:
    asked = {"model": "default", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0} | options
    answer = client.completions.create(**asked)
    texts = [""] * len(answer.choices)
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    if not options.get("temperature") or "seed" in options:
        assert texts == [choice.text for choice in answer.choices]


def test_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model="default", input="What is the capital of France?", temperature=0)
    assert "Paris" in first.output_text and first.status == "completed"
    with client.responses.stream(model="default", input="What is the capital of France?", temperature=0) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == first.output_text
    # a schema of finite answers: the client raises if an answer is cut, as one of type json_object may be
    form = {"type": "json_schema", "name": "place", "schema": Place.model_json_schema(), "strict": True}
    more: Any = {"previous_response_id": first.id, "text": {"format": form}}
    with client.responses.stream(model="default", input="And of Italy?", max_output_tokens=200, **more) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text and final.previous_response_id == first.id
    tools: Any = [{"type": "function", **WEATHER["function"]}]
    called = client.responses.create(
        model="default", input="What is the weather in Paris?", tools=tools, tool_choice="required", temperature=0
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    after = client.responses.create(
        model="default", input=output, previous_response_id=called.id, tools=tools, temperature=0
    )
    assert after.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_in_the_background(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "input": "What is the capital of France?"}
    include: Any = ["message.output_text.logprobs"]
    found = client.responses.create(**asked, temperature=0, background=True, include=include, top_logprobs=2)
    assert found.status == "queued"
    while found.status in ("queued", "in_progress"):
        found = client.responses.retrieve(found.id)
    whole = client.responses.create(**asked, temperature=0)
    assert found.output_text == whole.output_text and "Paris" in found.output_text and found.usage is not None
    (content,) = found.output[0].content or ()
    assert content.type == "output_text" and "".join(entry.token for entry in content.logprobs or ()) == content.text
    assert client.responses.input_tokens.count(**asked).input_tokens == found.usage.input_tokens
    (item,) = client.responses.input_items.list(found.id)
    assert item.type == "message" and item.content[0].text == asked["input"]
    begun = client.responses.create(
        **asked, background=True, max_output_tokens=1900, extra_body={"ignore_eos": True, "min_tokens": 1900}
    )
    assert client.responses.cancel(begun.id).status == "cancelled"
    turns: Any = [{"role": "user", "content": "Why? " * 40}, {"role": "assistant", "content": "So."}] * 40
    question: Any = {"role": "user", "content": asked["input"]}
    cut = client.responses.create(**{**asked, "input": [*turns, question]}, truncation="auto", max_output_tokens=30)
    assert cut.usage is not None and cut.usage.input_tokens + 30 <= 2048


def test_models_and_errors(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(model="default", messages=FRANCE)
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": "a b " * 3000}])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="default", messages=FRANCE, temperature=-1)


def test_async_streams_that_are_left_early(url: str) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:

            async def first_words(country: str) -> str:
                messages: Any = [{"role": "user", "content": f"What is the capital of {country}?"}]
                text = ""
                stream = await client.chat.completions.create(
                    model="default", messages=messages, stream=True, max_tokens=500, extra_body={"ignore_eos": True}
                )
                async with stream:
                    async for chunk in stream:
                        text += chunk.choices[0].delta.content or ""
                        if len(text) > 20:
                            break
                return text

            return await asyncio.gather(*(first_words(country) for country in ("Italy", "Japan", "Peru", "Norway")))

    assert all(len(text) > 20 for text in asyncio.run(main()))


def test_embeddings(vectors_url: str) -> None:
    with openai.OpenAI(base_url=vectors_url, api_key=KEY, max_retries=0) as client:
        for given in ("a", ["a", "b c"], [5, 6, 7], [[5, 6], [7]]):
            count = 2 if isinstance(given, list) and not isinstance(given[0], int) else 1
            found = client.embeddings.create(model="default", input=given, dimensions=16)
            assert [len(item.embedding) for item in found.data] == [16] * count
            plain = client.embeddings.create(model="default", input=given, encoding_format="float", dimensions=16)
            assert plain.data[0].embedding == pytest.approx(found.data[0].embedding, abs=0.02)
