"""The official `ollama` client against the embedded model; its types, in pydantic's strict mode, check the answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from tests.clients.conftest import KEY

ollama = pytest.importorskip("ollama", reason="needs ollama: pip install ollama")

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA: Any = {
    "type": "object", "properties": {"kind": {"enum": ["city", "river"]}}, "required": ["kind"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HEADERS = {"Authorization": f"Bearer {KEY}"}
GREEDY: Any = {"options": {"temperature": 0}}


@pytest.fixture(scope="module")
def root(url: str) -> str:
    return url.removesuffix("/v1")


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("chat", "ChatResponse", {"messages": FRANCE}),
        ("chat", "ChatResponse", {"messages": FRANCE, "tools": [WEATHER]}),
        ("generate", "GenerateResponse", {"prompt": "What is the capital of France?"}),
        ("generate", "GenerateResponse", {"prompt": "The capital of France is", "raw": True}),
    ],
)
def test_answers_and_lines_have_the_clients_types(root: str, path: str, kind: str, body: dict[str, Any]) -> None:
    model = TypeAdapter(getattr(ollama, kind))
    with httpx.Client(base_url=root, headers=HEADERS, timeout=60) as http:
        asked = {"model": "demo", **body, **GREEDY}
        whole = http.post(f"/api/{path}", json={**asked, "stream": False}).raise_for_status()
        lines = http.post(f"/api/{path}", json=asked).raise_for_status().text.splitlines()
    answer, parts = (
        model.validate_json(whole.text, strict=True),
        [model.validate_json(line, strict=True) for line in lines],
    )
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    text, pieces = (
        (answer.message.content, [part.message.content for part in parts])
        if path == "chat"
        else (answer.response, [part.response for part in parts])
    )
    assert "".join(pieces) == text and parts[-1].eval_count == answer.eval_count


def test_models_options_and_refusals(root: str) -> None:
    client = ollama.Client(root, headers=HEADERS)
    (model,) = client.list().models
    assert model.model == "demo" and "tools" in client.show("demo").capabilities
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.size, loaded.size_vram) == ("demo", model.size, 0)
    cut = client.chat("demo", FRANCE, options={"temperature": 0, "stop": ["Paris"]})
    assert "Paris" not in cut.message.content and cut.done_reason == "stop"
    assert client.chat("demo", FRANCE, options={"num_predict": 2}).done_reason == "length"
    assert json.loads(client.chat("demo", FRANCE, format=SCHEMA).message.content).keys() == {"kind"}
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    (call,) = client.chat("demo", asked, tools=[WEATHER], **GREEDY).message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    for refused in (lambda: client.show("none"), lambda: client.embed("demo", "a"), lambda: client.pull("a")):
        with pytest.raises(ollama.ResponseError):
            refused()
    with pytest.raises(ollama.ResponseError, match=r"messages\[0\]\.images"):
        client.chat("demo", [{"role": "user", "content": "x", "images": [b"no image"]}])
