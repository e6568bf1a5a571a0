"""Random conversations through the server's rendering and through transformers' `apply_chat_template`.

The templates have the shapes of published ones: what they do with a content that is null, with reasoning, arguments
and calls. Clients send contents of null beside calls, and arguments as text.
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from moe_engine.errors import InputError
from moe_engine.server.http_io import decode_body_and_rest
from moe_engine.server.openai.images import take_images
from moe_engine.server.openai.messages import render_prompt
from moe_engine.server.openai.types import ChatRequest
from moe_engine.tokenizer.chat_template import ChatTemplate
from tests.examples import examples

CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"


def turns(message: str, opening: str = "") -> str:
    """A template that writes each message `m`, and the opening of an answer."""
    each = "{% for m in messages %}<{{ m.role }}>" + message + "<end>{% endfor %}"
    return each + "{% if add_generation_prompt %}<assistant>" + opening + "{% endif %}"


TEMPLATES = {
    "written as it is (GLM-4.6, MiniMax-M2)": turns("{{ m.content }}" + CALLS),
    "trimmed": turns("{{ (m.content or '') | trim }}" + CALLS, "<think>\n"),
    "text or parts (Qwen3-VL, Ministral 3)": turns(
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% endif %}" + CALLS
    ),
    "reasoning before the answer (Qwen3.5)": turns(
        "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
        + CALLS, "<think>\n",
    ),
    "thinking and content exclude each other (gpt-oss)": turns(
        "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "<why>{{ m.content or m.thinking }}{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content }}"
        "{% endif %}"
    ),
    "documents": "{{ documents is none }}" + turns("{{ m.content }}"),
}  # fmt: skip
CONCATENATES = turns(
    "{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% else %}{{ '' + m.content }}{% endif %}"
)
"""DeepSeek-R1's distillations: transformers cannot render a content of null."""
DIVIDES = turns("{{ m.content.split('</think>')[-1] }}" + CALLS)
"""The first release of Qwen3."""
WORDS = ["hi", "größe", "日本語", "a\nb", "{x}", "<b>", "  two", "tail ", '"q"', "\\", "[1]"]


def text() -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 3)))


def turn(last: bool) -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": text()}
    made = [{"role": "user", "content": text()}]
    if not last and random.random() < 0.6:
        names = [f"c{i}" for i in range(random.randint(1, 2))]
        calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": {text(): text()}}} for i in names]
        asks = {"role": "assistant", "content": random.choice([None, "", text()]), "tool_calls": calls}
        made += [asks, *({"role": "tool", "content": text(), "tool_call_id": call["id"]} for call in calls)]
    for message in (*made, answer):
        if message["role"] == "assistant" and random.random() < 0.5:
            message["reasoning_content"] = text()
    return [*made, answer]


def conversation() -> list[dict[str, Any]]:
    system = [{"role": "system", "content": text()}] if random.random() < 0.5 else []
    count = random.randint(1, 3)
    return system + [message for i in range(count) for message in turn(i == count - 1)]


def served(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    """The prompt of a request, whose arguments are text."""
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    body = {"messages": sent, **fields}
    request, whole = decode_body_and_rest(json.dumps(body).encode(), ChatRequest)
    state: Any = SimpleNamespace(
        chat_template=ChatTemplate(source),
        flags=SimpleNamespace(tool_call_parser=None),
        template_arguments=lambda given: dict(given or {}),
    )
    return render_prompt(state, take_images(state, whole["messages"])[0], request)


TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


def theirs(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    found = TOKENIZER.apply_chat_template(messages, chat_template=source, tokenize=False, **fields)
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str) -> None:
    source = TEMPLATES[name]
    for _ in range(examples(30)):
        messages, asks = conversation(), random.random() < 0.5
        if random.random() < 0.3:
            messages.pop()
        try:
            wanted = theirs(source, messages, add_generation_prompt=asks)
        except TemplateError:  # gpt-oss: reasoning and content of a call; the content is what the template shows
            assert "exclude" in name
            for message in messages:
                if message.get("tool_calls") and message["content"]:
                    message.pop("reasoning_content", None)
            assert served(source, messages, add_generation_prompt=asks) == theirs(
                source, messages, add_generation_prompt=asks
            )
            continue
        assert served(source, messages, add_generation_prompt=asks) == wanted
        assert ">None" not in wanted


@pytest.mark.parametrize("name", TEMPLATES)
def test_continued_messages_are_those_of_transformers(name: str) -> None:
    """Also where the prompt of a new answer begins with a tag that an answer in the conversation does not have."""
    for _ in range(examples(20)):
        messages = conversation()
        for message in (m for m in messages if m.get("tool_calls")):
            message.pop("reasoning_content", None)  # gpt-oss
        wanted = theirs(TEMPLATES[name], messages, continue_final_message=True)
        assert served(TEMPLATES[name], messages, continue_final_message=True) == wanted


def test_an_unfinished_reasoning_is_continued() -> None:
    source = TEMPLATES["reasoning before the answer (Qwen3.5)"]
    for reasoning in ("because", " of  ", text()):
        messages = [
            {"role": "user", "content": text()},
            {"role": "assistant", "content": "", "reasoning_content": reasoning},
        ]
        wanted = theirs(source, messages, continue_final_message="reasoning_content")
        assert served(source, messages, continue_final_message=True) == wanted
        assert wanted.endswith(f"<think>\n{reasoning}")


def test_a_template_that_leaves_out_the_last_message() -> None:
    """The text follows the prompt of an answer."""
    users = "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Once "}]
    source = users + "{% if add_generation_prompt %}A:{% endif %}"
    assert served(source, messages, continue_final_message=True) == "[q]A:Once "


def test_templates_that_transformers_cannot_render() -> None:
    """With a content of null beside calls."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    for content, reasoning in ((None, {}), (None, {"reasoning_content": "why"})):
        asks = {"role": "assistant", "content": content, "tool_calls": [call], **reasoning}
        messages = [{"role": "user", "content": "q"}, asks]
        for source, wanted in ((CONCATENATES, 'f{"a": 1}'), (DIVIDES, '<call>f {"a": 1}')):
            with pytest.raises(TemplateError):
                theirs(source, messages)
            assert served(source, messages) == f"<user>q<end><assistant>{wanted}<end><assistant>"


def test_the_first_refusal_is_reported() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(InputError, match="refuses them: first"):
        served("{{ raise_exception('later' if messages[0].content is defined else 'first') }}", messages)
