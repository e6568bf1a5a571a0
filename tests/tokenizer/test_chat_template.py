"""Chat templates: rendering as transformers does, the sandbox, refusals."""

from __future__ import annotations

import contextlib
import re

import pytest

from moe_engine.errors import ConfigError, InputError
from moe_engine.tokenizer import chat_template
from moe_engine.tokenizer.chat_template import ChatTemplate, load_chat_template
from tests.tokenizer.tiny_tokenizer import TEMPLATE, make_tokenizer

TOK = make_tokenizer()
CHAT = ChatTemplate(TEMPLATE, TOK.special_tokens)
BOS, EOS = TOK.bos_token, TOK.eos_token
USER = {"role": "user", "content": "hi"}


def test_conversation():
    messages = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "yo"}, USER]
    assert CHAT.render(messages) == f"{BOS}S<｜User｜>hi<｜Assistant｜>yo{EOS}<｜User｜>hi<｜Assistant｜>"
    assert CHAT.render([USER], add_generation_prompt=False) == f"{BOS}<｜User｜>hi"
    assert CHAT.render([USER], kwargs={"thinking": True}).endswith("<｜Assistant｜><think>")


def test_prompt_has_one_bos():
    assert TOK.encode(CHAT.render([USER]), False).count(0) == 1
    assert TOK.encode(CHAT.render([USER]), True).count(0) == 1


def test_parts_and_tools():
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert "<｜User｜>a b" in CHAT.render([parts])
    looping = ChatTemplate("{% for p in messages[0]['content'] %}[{{ p.text }}]{% endfor %}")
    assert looping.render([parts]) == "[a][b]"
    assert '[{"type": "function", "é": "<b>"}]' in CHAT.render([USER], tools=[{"type": "function", "é": "<b>"}])


def test_a_developer_is_the_system_where_the_template_knows_none():
    roles = "{% for m in messages %}{{ m.role }},{% endfor %}"
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    assert ChatTemplate(roles).render(messages) == "system,user,"
    assert ChatTemplate(roles + "{# developer #}").render(messages) == "developer,user,"
    assert messages[0]["role"] == "developer"


def test_arguments_reach_templates_of_both_kinds():
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert f'f:{{"a": 1}}{EOS}' in CHAT.render([USER, message])
    wants_object = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    assert wants_object.render([message]) == '{"a": 1}'


def test_calls_reach_a_template_of_observations():
    """GLM-4-0414: calls are messages with the name as metadata, results observations; others stay as they are."""
    source = (
        "{% if tools %}# 可用工具{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.get('metadata', '') }}\n"
        "{{ m.content }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    other = {**call, "function": {"name": "g", "arguments": {}}}
    asked = [
        USER, {"role": "assistant", "content": "Look.", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]  # fmt: skip
    assert ChatTemplate(source).render(asked) == (
        '<|user|>\nhi<|assistant|>\nLook.<|assistant|>f\n{"a": "é"}<|assistant|>g\n{}<|observation|>\n5'
        '<|assistant|>f\n{"a": "é"}'
    )
    plain = ChatTemplate("{% for m in messages %}<|{{ m.role }}|>{{ m.tool_calls|length }}{% endfor %}")
    assert plain.render(asked[1:3]) == "<|assistant|>2<|tool|>0"


def test_helpers():
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([USER]).isdigit()
    assert (
        ChatTemplate("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}").render([])
        == "012"
    )
    assert ChatTemplate("{% generation %}x{% endgeneration %}y").render([]) == "xy"
    assert ChatTemplate("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}").render([]) == "2"
    assert ChatTemplate({"default": "d", "tool_use": "t"}).render([], tools=[{}]) == "t"


def test_refusals_name_messages():
    with pytest.raises(InputError, match="unknown role judge") as info:
        CHAT.render([{"role": "judge", "content": "x"}])
    assert info.value.field == "messages"
    for source in ("{{ messages[0].content + 1 }}", "{{ 1 // n }}", "{% for i in range(10**9) %}{% endfor %}"):
        with pytest.raises(InputError, match="cannot render"):
            ChatTemplate(source).render([USER], kwargs={"n": 0})
    with pytest.raises(InputError, match=r"chat_template_kwargs\.messages"):
        CHAT.render([USER], kwargs={"messages": []})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(99999) recursive %}{{ loop(range(9)) if loop.depth < 30 }}{% endfor %}",
    ],
)
def test_a_template_without_end_is_refused(source, monkeypatch):
    """Its rendering holds the event loop, where no signal ends the server."""
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.05)
    with pytest.raises(InputError, match=r"it takes more than 0\.05 s of processor time") as info:
        ChatTemplate(source).render([USER])
    assert info.value.field == "messages"
    assert ChatTemplate("{% for a in range(3) %}{{ a }}{% endfor %}").render([USER]) == "012"


def test_a_template_beyond_memory_is_refused():
    with pytest.raises(InputError, match=r"cannot render them \(MemoryError"):
        ChatTemplate("{{ 'x' * 10**17 }}").render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ strftime_now.__globals__ }}",
    ],
)
def test_sandbox(source):
    template = ChatTemplate(source)
    with contextlib.suppress(InputError):
        assert template.render([USER]) == ""  # an unsafe attribute is undefined


def test_loading(tmp_path):
    assert load_chat_template(None, None, {}) is None
    inline = load_chat_template("{{ 1 }}", "own", {})
    assert inline and inline.render([]) == "1"
    file = tmp_path / "t.jinja"
    file.write_text("file {{ bos_token }}")
    from_file = load_chat_template(str(file), "own", {"bos_token": "B"})
    assert from_file and from_file.render([]) == "file B"
    with pytest.raises(ConfigError, match="--chat-template nowhere"):
        load_chat_template("nowhere", "own", {})
    file.write_text("{% if")
    for chosen, own, where in (("{% if %}", None, "--chat-template"), (str(file), None, str(file)),
                               (None, "{% if", str(tmp_path))):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{re.escape(where)}: chat template, line 1"):
            load_chat_template(chosen, own, {}, tmp_path)


def test_gme():
    """The prompt of the model card: image, text, and the end token after the assistant's header."""
    template = load_chat_template("gme-qwen2-vl", "own", {})
    assert template is not None and template.reads_parts
    user, image = "<|im_start|>user\n", "<|vision_start|><|image_pad|><|vision_end|>"
    end = "<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    parts = [{"type": "image"}, {"type": "text", "text": "hi"}]
    assert template.render([{"role": "user", "content": parts}]) == f"{system}{user}{image}hi{end}"
    found = template.render([{"role": "system", "content": "Find."}, USER], add_generation_prompt=False)
    assert found == f"<|im_start|>system\nFind.<|im_end|>\n{user}hi{end}"
