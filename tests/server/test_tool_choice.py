"""Enforced tool calls: the constraint received by the engine, refusals, and truncated answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from moe_engine.frontend.grammar_checks import GrammarChecks
from moe_engine.structured_output.backend import PREPARED, GrammarSettings
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS
from moe_engine.tokenizer.tool_calls.named import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from moe_engine.types.constraint import Constraint
from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, post

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
ANY = {"type": "object"}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


WEATHER, NOW = function("weather", parameters=CITY), function("now")
STRICT = function("weather", parameters=CITY, strict=True)
HUGE = function("now", parameters={"maximum": float("inf")})
NAMED = {"type": "function", "function": {"name": "now"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """OpenAI's choice of some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


NO_GRAMMARS = GrammarSettings(grammar_backend="none")
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}}


@pytest.fixture(autouse=True)
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constraints are checked, and the engine gets them in the server's form, not in the library's."""
    check = GrammarChecks.check

    async def checked(self: GrammarChecks, constraint: Constraint) -> Constraint:
        prepared = await check(self, constraint)
        assert prepared.kind == PREPARED and prepared.where == constraint.where
        return constraint

    monkeypatch.setattr(GrammarChecks, "check", checked)


def ask(body: dict[str, Any], client: FakeClient | None = None, **settings: Any) -> httpx.Response:
    settings = {"tool_call_parser": "deepseekv31", **settings}
    return post(client or FakeClient(), "/v1/chat/completions", {**CHAT, **body}, **settings)


def constraint_of(body: dict[str, Any], **settings: Any) -> dict[str, Any] | None:
    client = FakeClient()
    response = ask(body, client, **settings)
    assert response.status_code == 200, response.text
    found: dict[str, Any] | None = client.requests[0].sampling["constraint"]
    return found


ENFORCED: list[tuple[dict[str, Any], str, dict[str, Any], bool, bool]] = [
    ({"tool_choice": "required"}, "tool_choice", {"weather": CITY, "now": NOTHING}, True, True),
    ({"tool_choice": "required", "parallel_tool_calls": False}, "tool_choice", {"weather": CITY, "now": NOTHING},
     True, False),
    ({"tool_choice": NAMED}, "tool_choice", {"now": NOTHING}, True, False),
    ({"tool_choice": allowed("required", "now")}, "tool_choice", {"now": NOTHING}, True, True),
    ({"tool_choice": allowed("required", "now", "weather")}, "tool_choice", {"weather": CITY, "now": NOTHING}, True,
     True),
    ({"tool_choice": allowed("auto", "weather")}, "tools", {"weather": ANY}, False, True),
    ({"tools": [STRICT, NOW]}, "tools", {"weather": CITY, "now": ANY}, False, True),
    ({"tools": [STRICT, NOW], "response_format": FORMAT}, "tools", {"weather": CITY, "now": ANY}, False, True),
    ({"response_format": FORMAT}, "response_format.json_schema.schema", {"weather": ANY, "now": ANY}, False, True),
]  # fmt: skip


@pytest.mark.parametrize(("body", "where", "schemas", "required", "several"), ENFORCED)
def test_constraints(body: dict[str, Any], where: str, schemas: dict[str, Any], required: bool, several: bool) -> None:
    found = constraint_of({"tools": [WEATHER, NOW], **body})
    assert found is not None and (found["kind"], found["where"]) == ("tool_calls", where)
    calls = json.loads(found["source"])
    assert {call["name"]: call["schema"] for call in calls["calls"]} == schemas
    assert (calls["required"], calls["several"]) == (required, several)
    assert calls.get("content") == (CITY if "response_format" in body else None)


def test_the_format_of_the_text_is_idle_beside_enforced_calls() -> None:
    """Clients such as instructor send both to /v1/responses."""
    body = {"tools": [WEATHER], "tool_choice": "required"}
    alone = constraint_of(body)
    for given in (FORMAT, {"type": "json_object"}):
        assert constraint_of(body | {"response_format": given}) == alone is not None


def test_free_requests_have_no_constraint() -> None:
    assert constraint_of({"tools": [WEATHER, NOW]}) is None
    assert constraint_of({"tools": [WEATHER], "parallel_tool_calls": False}) is None
    assert constraint_of({"tools": [STRICT], "tool_choice": "none"}) is None
    assert constraint_of({"tools": [STRICT]}, tool_call_parser=None) is None
    assert constraint_of({"tools": [WEATHER, NOW], "tool_choice": allowed("auto", "weather", "now")}) is None
    given = constraint_of({"tools": [WEATHER], "regex": "a"})
    assert given is not None and given["kind"] == "regex"


def test_reasoning_comes_first() -> None:
    body = {"tools": [WEATHER], "tool_choice": "required"}
    found = constraint_of(body, reasoning_parser="deepseek-r1")
    assert found is not None and found["reasoning"] == {"start": "<think>", "end": "</think>", "inside": True}
    refused = ask({**body, "separate_reasoning": False}, reasoning_parser="deepseek-r1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "separate_reasoning")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required", "regex": "a"}, "regex", "tool_choice and regex"),
    ({"tool_choice": "required", "json_schema": CITY}, "json_schema", "tool_choice and json_schema"),
    ({"tools": [STRICT], "regex": "a"}, "regex", "tools and regex"),
    ({"tool_choice": "required", "min_tokens": 3}, "min_tokens", "cannot be combined with tool_choice"),
    ({"tool_choice": allowed("any", "now")}, "tool_choice.allowed_tools.mode", "'auto' or 'required'"),
    ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools", "length >= 1"),
    ({"tool_choice": allowed("auto", "now", "x")}, "tool_choice.allowed_tools.tools[1].function.name", "'x' is not"),
    ({"tool_choice": "required", "tools": [HUGE]}, "tools[0].function.parameters", "a number is not finite"),
    ({"tool_choice": "required", "tools": [NOW, NOW]}, "tools[1].function.name", "defined twice"),
]


@pytest.mark.parametrize(("body", "field", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_refusals(body: dict[str, Any], field: str, words: str) -> None:
    response = ask({"tools": [WEATHER, NOW], **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field) and words in error["message"]
    none = ask({"tools": [WEATHER], "tool_choice": "required"}, grammars=NO_GRAMMARS)
    assert none.status_code == 400 and "--grammar-backend none" in none.json()["error"]["message"]


def test_formats() -> None:
    """Calls of every format are enforced."""
    body = {"tools": [WEATHER], "tool_choice": "required"}
    for form, wire in TOOL_FORMATS.items():
        syntax, one = wire.syntax, wire.syntax.parameters
        arguments = '{"city": "Rome"}'
        if one is not None:
            value = '"Rome"' if one.before_text is None else "Rome"
            arguments = f"{one.before}city{one.before_text or one.after_name}{value}{one.end_of('city', True)}"
        call = syntax.before_arguments("weather") + arguments + syntax.after_arguments
        text = syntax.begin + syntax.after_begin + call + syntax.end
        client = FakeClient(text, context_len=2048, max_req_input_len=2040, max_total_num_tokens=4096)
        choice = ask(body, client, tool_call_parser=form).json()["choices"][0]
        assert client.requests[0].sampling["constraint"]["kind"] == "tool_calls", form
        function = choice["message"]["tool_calls"][0]["function"]
        assert (function["name"], json.loads(function["arguments"])) == ("weather", {"city": "Rome"}), form
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None


def test_a_call_cut_by_a_stop_string_is_no_call() -> None:
    text = f'{CALLS_BEGIN}{CALL_BEGIN}weather{SEPARATOR}{{"city": "Paris"}}{CALL_END}{CALLS_END}'
    for stop, reason in (([], "tool_calls"), (["Par"], "stop")):
        body = {"tools": [WEATHER], "tool_choice": "required", "stop": stop}
        choice = ask(body, FakeClient(text)).json()["choices"][0]
        assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == (reason, 1)


def test_require_reasoning() -> None:
    body = {"text": "x", "require_reasoning": True, "sampling_params": {"regex": "a"}}
    client = FakeClient()
    assert post(client, "/generate", body, reasoning_parser="kimi").status_code == 200
    reasoning = {"start": "◁think▷", "end": "◁/think▷", "inside": True}
    assert client.requests[0].sampling["constraint"]["reasoning"] == reasoning
    assert post(client, "/generate", {**body, "require_reasoning": False}, reasoning_parser="kimi").status_code == 200
    assert client.requests[1].sampling["constraint"]["reasoning"] is None
    refused = post(client, "/generate", body)
    assert refused.status_code == 400 and "needs a server with --reasoning-parser" in refused.json()["error"]["message"]
