"""litellm against the embedded model: both of its ways to an OpenAI-compatible server, and its kinds of errors."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.clients.conftest import KEY

litellm = pytest.importorskip("litellm", reason="needs litellm: pip install litellm")

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Weather of a city", "parameters": PLACE}


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    return {
        "model": f"{request.param}/default", "api_base": url, "api_key": KEY, "temperature": 0, "max_tokens": 60,
        "num_retries": 0, "max_retries": 0,
    }  # fmt: skip


def test_completion_and_stream(options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=FRANCE, **options)
    text = answer.choices[0].message.content
    assert "Paris" in text and answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(messages=FRANCE, stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


@pytest.mark.skipif(find_spec("mcp") is None, reason="litellm needs the package mcp for tools: pip install mcp")
@pytest.mark.parametrize("stream", [False, True])
def test_tools(options: dict[str, Any], stream: bool) -> None:
    asked = options | {"tools": [{"type": "function", "function": WEATHER}], "stream": stream}
    answer = litellm.completion(messages=[{"role": "user", "content": "What is the weather in Paris?"}], **asked)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments.replace(" ", "")) == ("get_weather", '{"city":"Paris"}')
    assert answer.choices[0].finish_reason == "tool_calls"


def test_json_schema(options: dict[str, Any]) -> None:
    schema = {"name": "answer", "strict": True, "schema": {"type": "object", "properties": {"n": {"enum": [1, 2]}},
              "required": ["n"], "additionalProperties": False}}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": schema}
    text = litellm.completion(messages=FRANCE, response_format=wanted, **options).choices[0].message.content
    assert text.replace(" ", "").replace("\n", "") in ('{"n":1}', '{"n":2}')


def test_errors_have_their_classes(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "a b " * 3000}], **options)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=FRANCE, **options | {"api_key": "wrong"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=FRANCE, **options | {"temperature": -1})


def test_text_completion_and_embeddings(url: str, vectors_url: str) -> None:
    common = {"model": "openai/default", "api_key": KEY, "num_retries": 0}
    answer = litellm.text_completion(
        prompt="The capital of France is", max_tokens=8, temperature=0, api_base=url, **common
    )
    assert "Paris" in answer.choices[0].text
    texts = ["The capital of France is Paris.", "Seven plus four is eleven."]
    found = litellm.embedding(input=texts, api_base=vectors_url, **common)
    assert [sum(x * x for x in item["embedding"]) for item in found.data] == pytest.approx([1, 1], abs=1e-3)
