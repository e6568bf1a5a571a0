"""The official `anthropic` client against the embedded model; its types check the answers, in strict mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter

from tests.clients.conftest import KEY

anthropic = pytest.importorskip("anthropic", reason="needs anthropic: pip install anthropic")

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
IN_PARIS: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["city", "river"]


@pytest.fixture(scope="module")
def root(url: str) -> str:
    return url.removesuffix("/v1")


@pytest.fixture(scope="module")
def client(root: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=root, api_key=KEY, max_retries=0) as made:
        yield made


OPTIONS: list[dict[str, Any]] = [
    {}, {"max_tokens": 2}, {"stop_sequences": ["Paris"]}, {"system": [{"type": "text", "text": "Be brief."}]},
    {"messages": IN_PARIS, "tools": [WEATHER]},
    {"messages": IN_PARIS, "tools": [WEATHER], "tool_choice": {"type": "any"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "none")
def test_answers_and_events_have_the_clients_types(root: str, options: dict[str, Any]) -> None:
    types = anthropic.types
    asked = {"model": "demo", "max_tokens": 60, "messages": FRANCE, "temperature": 0, **options}
    with httpx.Client(base_url=root, headers={"x-api-key": KEY}, timeout=60) as http:
        whole = http.post("/v1/messages", json=asked).raise_for_status().text
        answer = TypeAdapter(types.Message).validate_json(whole, strict=True)
        lines = http.post("/v1/messages", json={**asked, "stream": True}).raise_for_status().text.split("\n")
    event = TypeAdapter(types.RawMessageStreamEvent)
    events = [event.validate_json(line[6:], strict=True) for line in lines if line.startswith("data: ")]
    assert answer.stop_reason == events[-2].delta.stop_reason
    streamed = "".join(getattr(e.delta, "text", "") for e in events if e.type == "content_block_delta")
    assert streamed == "".join(block.text for block in answer.content if block.type == "text")


def test_models_have_the_clients_type(root: str) -> None:
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    shown = httpx.get(root + "/v1/models/demo", headers=headers).raise_for_status()
    assert TypeAdapter(anthropic.types.ModelInfo).validate_json(shown.text, strict=True).id == "demo"


def test_tools_round_trip_in_a_stream(client: Any) -> None:
    asked: Any = {"model": "demo", "max_tokens": 60, "tools": [WEATHER]}
    with client.messages.stream(messages=IN_PARIS, tool_choice={"type": "any"}, **asked) as stream:
        answer = stream.get_final_message()
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and call.input.keys() == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*IN_PARIS, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(messages=turns, **asked)
    assert client.messages.count_tokens(model="demo", messages=turns, tools=[WEATHER]).input_tokens == (
        after.usage.input_tokens + after.usage.cache_read_input_tokens
    )


def test_pages_schemas_and_refusals(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    form = {"type": "json_schema", "schema": Place.model_json_schema()}
    asked: Any = {"model": "demo", "messages": FRANCE}
    found = client.messages.create(max_tokens=60, output_config={"format": form}, **asked)
    assert Place.model_validate(json.loads(found.content[0].text))
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(max_tokens=-1, **asked)
    warmed = client.messages.create(max_tokens=0, **asked)  # fills the prefix cache only
    assert not warmed.content and warmed.usage.output_tokens == 0
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
        client.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(max_tokens=5, **asked)
