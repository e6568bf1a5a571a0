"""Large schemas of request bodies: kept as the client wrote them, read in the process that compiles grammars."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from msgspec import Raw

from moe_engine.errors import InputError
from moe_engine.server.body_work import body_work
from moe_engine.server.http_io import decode_body, encode_json
from moe_engine.server.large_schemas import cut_schema
from moe_engine.server.openai.types import ChatRequest
from moe_engine.structured_output.backend import GrammarSettings
from moe_engine.structured_output.check_process import verdict_of
from moe_engine.structured_output.open_backend import open_backend
from moe_engine.structured_output.request import UNREAD_CHARS, find_constraint, json_source, read_constraint
from moe_engine.structured_output.tool_choice import tool_constraint
from moe_engine.types.constraint import Constraint
from tests.server.fake_engine import FakeClient
from tests.server.harness import make_app
from tests.structured_output.test_llguidance_backend import EOS, SIZE

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BODIES: dict[str, tuple[str, Any, str]] = {
    "response_format": (
        "chat_completions",
        lambda schema: {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        "response_format.json_schema.schema",
    ),
    "guided_json": ("completions", lambda schema: {"prompt": "hi", "guided_json": schema}, "guided_json"),
    "json_schema": ("chat_completions", lambda schema: {**ASKED, "json_schema": schema}, "json_schema"),
    "text of a schema": ("chat_completions", lambda schema: {**ASKED, "json_schema": _dumped(schema)}, "json_schema"),
    "structured_outputs": (
        "completions", lambda schema: {"prompt": "hi", "structured_outputs": {"json": schema}},
        "structured_outputs.json",
    ),
    "/v1/responses": (
        "responses", lambda schema: {"input": "hi", "text": {"format": {"type": "json_schema", "schema": schema}}},
        "response_format.json_schema.schema",
    ),
    "/v1/messages": (
        "messages",
        lambda schema: {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
        "response_format.json_schema.schema",
    ),
    "/generate": (
        "generate", lambda schema: {"text": "hi", "sampling_params": {"json_schema": schema}},
        "sampling_params.json_schema",
    ),
}  # fmt: skip


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", " : "))


def large_schema(rng: random.Random) -> dict[str, Any]:
    names = [f'{rng.getrandbits(40):x} \U0001f600 "\\' for _ in range(UNREAD_CHARS // 20)]
    return {"properties": {name: {"enum": [rng.random(), None, True, [], name]} for name in names}}


@pytest.mark.parametrize("name", BODIES)
def test_a_large_schema_is_not_read_here(name: str) -> None:
    endpoint, body_of, where = BODIES[name]
    schema = large_schema(random.Random(random.getrandbits(64)))
    body = _dumped(body_of(schema)).encode()
    work = body_work(make_app(FakeClient()).state.server)
    for sent in (body, json.dumps(body_of(schema)).encode(), bytearray(body)):
        plan: Any = work[endpoint](sent)
        found = plan.read.prompts[0].sampling.constraint
        assert found.where == where and found.kind == "json_schema"
        assert found.unread or isinstance(sent, bytearray)  # these are read by a process of their own
        assert read_constraint(found) == Constraint("json_schema", json_source("", schema, (dict,)))
        if name == "/v1/responses":  # repeated in the response
            assert json.loads(encode_json(plan.options[0].fields))["text"]["format"]["schema"] == schema


def test_bodies_that_stay_whole() -> None:
    schema = large_schema(random.Random(random.getrandbits(64)))
    text = _dumped(schema)
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for body in (
        _dumped({**ASKED, "guided_json": schema, "tools": tools}).encode(),  # twice: which of them is not certain
        _dumped({**ASKED, "tools": tools}).encode(),
        _dumped({**ASKED, "guided_json": {"type": "object"}, "user": "x" * UNREAD_CHARS}).encode(),
        _dumped({**ASKED, "response_format": [schema]}).encode(),
        _dumped({**ASKED, "guided_json": schema}).encode()[:-1],
        _dumped({**ASKED, "guided_json": schema}).encode("utf-16"),
        _dumped({**ASKED, "sampling_params": {"json_schema": schema}}).encode(),  # no field of this endpoint
        (_dumped(ASKED)[:-1] + ', "guided_json": ' + text.replace("null", "NaN") + "}").encode(),
        (_dumped(ASKED)[:-1] + ', "guided_json": ').encode() + text.encode("latin-1", "replace") + b'"\xff"}',
    ):
        assert cut_schema(body, ChatRequest) == (body, None)
    for fields in ({"temperature": "x"}, {"response_format": [schema, 1]}, {"max_tokens": 2.0}):
        wrong = _dumped({**ASKED, "guided_json": schema, **fields}).encode()
        assert _outcome(wrong) == _outcome(bytearray(wrong))
    # the last of equal names counts, as in any JSON object
    doubled = _dumped(ASKED)[:-1] + ', "guided_json": ' + text + ', "guided_json": {"a": ' + text + "}}"
    assert cut_schema(doubled.encode(), ChatRequest)[1] is not None
    request = decode_body(doubled.encode(), ChatRequest)
    assert isinstance(request.guided_json, Raw) and json.loads(bytes(request.guided_json)) == {"a": schema}
    assert request.messages == ASKED["messages"]


def _outcome(body: bytes | bytearray) -> Any:
    try:
        return decode_body(body, ChatRequest)
    except InputError as error:
        return error.message


def test_faults_of_unread_schemas() -> None:
    client = FakeClient()
    backend = open_backend(GrammarSettings(), client.tokenizer, SIZE, (EOS,))
    large = f'{{"description": "{"x" * UNREAD_CHARS}", '
    deep = '{"items": ' * 200 + "{}" + "}" * 200
    for text, words in (
        (f'{large}"type": object}}', "is not valid JSON"),
        (f'{large}"$ref": "\\ud800"}}', "contains half of a surrogate pair"),
        (f"[{large}}}]".replace(", }", "}"), "expected a JSON object"),
        (f'{large}"items": {deep}}}', "nested too deep"),
        ("[" * 100_000, "nested too deep"),
        (f'{large}"not": {{}}}}', "not"),
    ):
        found = find_constraint(ChatRequest(messages=[], json_schema=text))
        assert found is not None and found.unread
        problem = verdict_of(backend, found).problem
        assert problem is not None and words in problem and "json_schema: " not in problem, problem
    wrong = find_constraint(ChatRequest(messages=[], json_schema=f'{large}"type": object}}'))
    with pytest.raises(InputError, match=r"^json_schema: is not valid JSON"):
        tool_constraint([], "qwen25", "json_schema", required=False, several=True, content=wrong)
    with pytest.raises(InputError, match="half of a surrogate pair"):
        find_constraint(ChatRequest(messages=[], json_schema=f'{large}"$ref": "\ud800"}}'))
    passed = verdict_of(backend, Constraint("json_schema", f'{large}"type": "null"}}', "f", unread=True)).prepared
    assert passed is not None and not passed.unread and passed.where == "f"
