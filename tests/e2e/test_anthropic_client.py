"""The official `anthropic` client against the embedded model; skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server_process import ServerProcess

anthropic = pytest.importorskip("anthropic", reason="needs the anthropic client")
pytestmark = pytest.mark.usefixtures("forked_processes")

QUESTION: dict[str, Any] = {
    "model": "default", "max_tokens": 60, "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}  # fmt: skip
CITY = {"type": "string", "maxLength": 20}
PLACE = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": PLACE | {"additionalProperties": False},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ServerProcess(tmp_path_factory.mktemp("server"), "--api-key", "secret", "--cpu-threads", "1") as server:
        yield anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def test_create_stream_and_count(client: Any) -> None:
    answer = client.messages.create(**QUESTION)
    assert "Paris" in answer.content[0].text and answer.stop_reason == "end_turn"
    with client.messages.stream(**QUESTION) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
        assert stream.get_final_message().usage.output_tokens == answer.usage.output_tokens
    counted = client.messages.count_tokens(model="default", messages=QUESTION["messages"]).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_tools(client: Any) -> None:
    body = QUESTION | {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    answer = client.messages.create(**body)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and isinstance(call.input["city"], str)
    with client.messages.stream(**body) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [
        *QUESTION["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**QUESTION | {"messages": messages, "tools": [WEATHER]}).content


def test_errors(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**QUESTION | {"max_tokens": -1})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**QUESTION)
