"""`force_nonempty_content` in chat_template_kwargs (SGLang): an answer that is reasoning alone has it as content."""

from __future__ import annotations

import pytest

from moe_engine.server.openai.choice import ChoiceParser, ParserOptions
from moe_engine.tokenizer.reasoning import REASONING_FORMATS
from tests.server.fake_engine import FakeClient
from tests.server.harness import post

CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
CASES = [
    ("nemotron_3", "I think", ("", "I think")),  # cut before the end of the reasoning
    ("nemotron_3", "I think</think>", ("", "I think")),
    ("nemotron_3", "I think</think>\n\nSo", ("I think", "So")),
    ("nemotron_3", "", ("", "")),
    ("nemotron_3", f"I think{CALL}", ("I think", "")),  # a call is content for the parser of reasoning
    ("gpt-oss", "<|channel|>analysis<|message|>cut", ("", "cut")),
    ("gpt-oss", "<|channel|>final<|message|>x", ("", "x")),
]


def parser(name: str, fills: bool = True, shown: bool = True) -> ChoiceParser:
    form = REASONING_FORMATS[name]
    return ChoiceParser(
        ParserOptions(
            reasoning=form, inside=True, shows_reasoning=shown, tool_form="qwen3_coder", functions={"f": None},
            fills_content=fills,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("name", "text", "wanted"), CASES)
def test_whole_answers(name: str, text: str, wanted: tuple[str, str]) -> None:
    message = parser(name).whole(text, None)
    assert (message["reasoning_content"] or "", message["content"] or "") == wanted
    assert bool(message["tool_calls"]) == (CALL in text)
    hidden = parser(name, shown=False).whole(text, None)
    assert (hidden["reasoning_content"], hidden["content"] or "") == (None, wanted[1])
    plain = parser(name, fills=False).whole(text, None)
    changed = bool(text) and not plain["content"] and not plain["tool_calls"]
    assert changed == (plain["content"] != message["content"])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("name", "text", "wanted"), CASES)
def test_streams(name: str, text: str, wanted: tuple[str, str], size: int) -> None:
    """What was sent as reasoning comes again as content, at the end."""
    choice = parser(name)
    deltas = [d for at in range(0, len(text), size) for d in choice.push(text[at : at + size])] + choice.finish(None)
    reasoning, content = ("".join(d.get(key) or "" for d in deltas) for key in ("reasoning_content", "content"))
    assert content.strip() == wanted[1] and reasoning in (wanted[0], wanted[1])


@pytest.mark.parametrize("asked", [False, True])
def test_a_request(asked: bool) -> None:
    """The field of the request, and that of the server's defaults."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    own = body | {"chat_template_kwargs": {"force_nonempty_content": asked}}
    for sent, defaults in ((own, "{}"), (body, f'{{"force_nonempty_content": {str(asked).lower()}}}')):
        settings = {"reasoning_parser": "deepseek-r1", "default_chat_template_kwargs": defaults}
        found = post(FakeClient("I think"), "/v1/chat/completions", sent, **settings).json()["choices"][0]["message"]
        assert (found["content"] or "", found["reasoning_content"] or "") == (
            ("I think", "") if asked else ("", "I think")
        )
