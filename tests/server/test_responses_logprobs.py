"""Log-probabilities of /v1/responses: every text has the entries of exactly its own tokens."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from moe_engine.tokenizer.tool_calls.named import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END
from tests.server.harness import named_events, post
from tests.server.test_anthropic import PARSERS, TEXTS, fake
from tests.server.test_responses import ASK, TIME, WEATHER

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASKED = {**ASK, "tools": [WEATHER, TIME], "include": ["message.output_text.logprobs"], "top_logprobs": 2}


def spelled(entries: list[Any]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


def texts_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [item["content"][0] for item in answer["output"] if item["type"] == "message"]


NO_CALL = f"why</think>I ask. {CALLS_BEGIN}{CALL_BEGIN}get_weather{CALL_END}{CALLS_END} \n The end."


@pytest.mark.parametrize("text", [*TEXTS.values(), "t</think>t", "a </think>a <", "é</think>日本 <｜tool🙂", NO_CALL])
@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_texts_have_their_tokens(text: str, per_step: int):
    client = fake(text)
    client.per_step = per_step
    whole = post(client, "/v1/responses", ASKED, **PARSERS).json()
    Response.model_validate(whole)
    contents = texts_of(whole)
    for content in contents:
        assert spelled(content["logprobs"]).strip() == content["text"].strip()
        assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in content["logprobs"])
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    every = post(fake(text), "/v1/chat/completions", chat, **PARSERS).json()["choices"][0]["logprobs"]["content"]
    assert all(entry in every for content in contents for entry in content["logprobs"])

    client = fake(text)
    client.per_step = per_step
    events = named_events(post(client, "/v1/responses", {**ASKED, "stream": True}, **PARSERS))
    for event in events:
        EVENT.validate_python(event)
    assert [content["logprobs"] for content in texts_of(events[-1]["response"])] == [
        content["logprobs"] for content in contents
    ]
    of_deltas: dict[str, list[Any]] = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            of_deltas.setdefault(event["item_id"], []).extend(event["logprobs"])
        elif event["type"] == "response.output_text.done":
            assert event["logprobs"] == of_deltas[event["item_id"]]


def test_random_answers_behind_a_reasoning():
    letters = "ab t<>/hink日é\n"
    for _ in range(30):
        thought, said = ("".join(random.choices(letters, k=random.randint(1, 30))) for _ in range(2))
        if "</think>" in thought or not said.strip():
            continue
        client = fake(f"{thought}</think>{said}")
        client.per_step = random.choice((1, 2, 5, 100))
        body = {**ASK, "include": ASKED["include"], "stream": random.random() < 0.5}
        answer = post(client, "/v1/responses", body, **PARSERS)
        content = texts_of(named_events(answer)[-1]["response"] if body["stream"] else answer.json())[0]
        assert content["text"] in spelled(content["logprobs"]), (thought, said, client.per_step)
        assert len(spelled(content["logprobs"])) - len(content["text"]) <= 8, (thought, said, client.per_step)


@pytest.mark.parametrize("per_step", [1, 2, 100])
def test_an_answer_behind_a_reasoning_of_spaces(per_step: int):
    """It begins with a character of the tag."""
    client = fake(" </think>\n/thin")
    client.per_step = per_step
    (content,) = texts_of(post(client, "/v1/responses", {**ASK, "include": ASKED["include"]}, **PARSERS).json())
    assert content["text"] == "/thin" and spelled(content["logprobs"]).strip() == "/thin"


@pytest.mark.parametrize("per_step", [1, 2, 100])
def test_skipped_special_tokens_belong_to_no_text(per_step: int):
    """Without a parser of tool calls their marks are skipped in the text."""
    found = []
    for stream in (False, True):
        client = fake(f"a{CALLS_BEGIN}b c{CALLS_END}{CALL_BEGIN}é🙂{CALLS_END} d")
        client.per_step = per_step
        answer = post(client, "/v1/responses", {**ASK, "include": ASKED["include"], "stream": stream})
        (content,) = texts_of(named_events(answer)[-1]["response"] if stream else answer.json())
        assert spelled(content["logprobs"]) == content["text"] == "ab cé🙂 d"
        found.append(content["logprobs"])
    assert found[0] == found[1]


def test_without_the_fields_there_are_none():
    answer = post(fake("</think>Hello"), "/v1/responses", ASK, **PARSERS).json()
    assert texts_of(answer)[0]["logprobs"] == [] and answer["top_logprobs"] == 0
    answer = post(fake("</think>Hello"), "/v1/responses", {**ASK, "top_logprobs": 1}, **PARSERS).json()
    entries = texts_of(answer)[0]["logprobs"]
    assert spelled(entries) == "Hello" and len(entries[0]["top_logprobs"]) == 1
    assert json.dumps(answer["top_logprobs"]) == "1"
