"""DeepSeek V3.2's prompts: texts by the documented layout of the vendor's encoder, and parsed back."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError, InputError
from moe_engine.tokenizer import load_tokenizer
from moe_engine.tokenizer.chat_template import ChatTemplate, load_chat_template
from moe_engine.tokenizer.deepseek_v32 import DeepseekV32Chat
from moe_engine.tokenizer.reasoning import starts_inside
from moe_engine.tokenizer.tool_calls import ToolCallParser
from tests.examples import examples
from tests.server.fake_engine import FakeClient
from tests.server.harness import events, post
from tests.tokenizer.read_calls import read_calls
from tests.tokenizer.tiny_tokenizer import make_tokenizer, save_tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CHAT = DeepseekV32Chat("TOOLS <{dsml_token}x> {thinking_start_token}{thinking_end_token}\n{tool_schemas}\n")
THINKING = {"thinking": True}
TOOL = {"type": "function", "function": {"name": "f", "description": "é {dsml_token}", "parameters": {}}}
SCHEMA = '{"name": "f", "description": "é {dsml_token}", "parameters": {}}'
VENDOR_FILE = '''
import nothing_that_exists
DSML: str = "x"
TOOLS_SYSTEM_TEMPLATE = """Vendor's words <{dsml_token}invoke>
{tool_schemas}
"""
raise SystemExit("this file must not be run")
'''


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(content: str | None, reasoning: str | None = None, *calls: tuple[str, Any]) -> dict[str, Any]:
    made = [
        {"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(args)}}
        for i, (name, args) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": made or None}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "0"}


TURNS = [{"role": "system", "content": "S"}, user("a"), answer("b", "because"), user("c")]
CALLED = [
    user("q"),
    answer("Look.", "need f", ("f", {"s": 'x "y"\n', "n": 1, "o": {"k": [True, None, "é"]}}), ("g", {})),
    result("r1"),
    result("r2"),
]
BLOCK = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="s" string="true">x "y"\n</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="o" string="false">{"k": [true, null, "é"]}</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
RESULTS = "\n\n<function_results>\n<result>r1</result>\n<result>r2</result>\n</function_results>"
OPEN, SHUT = "<｜Assistant｜><think>", "<｜Assistant｜></think>"


@pytest.mark.parametrize(
    ("messages", "kwargs", "expected"),
    [
        ([user("hi")], {}, f"<｜User｜>hi{SHUT}"),
        ([user("hi")], THINKING, f"<｜User｜>hi{OPEN}"),
        ([user("hi")], {"enable_thinking": True, "thinking": False, "reasoning_effort": "high"}, f"<｜User｜>hi{SHUT}"),
        (TURNS, {}, f"S<｜User｜>a{SHUT}b{EOS}<｜User｜>c{SHUT}"),
        (TURNS, THINKING, f"S<｜User｜>a{SHUT}b{EOS}<｜User｜>c{OPEN}"),
        (CALLED, {}, f"<｜User｜>q{SHUT}Look.{BLOCK}{EOS}{RESULTS}\n\n</think>"),
        (CALLED, THINKING, f"<｜User｜>q{OPEN}need f</think>Look.{BLOCK}{EOS}{RESULTS}\n\n<think>"),
        # the loop has ended: its reasoning is dropped, and its results open no reasoning
        ([*CALLED, answer("done", "so"), user("z")], THINKING,
         f"<｜User｜>q{SHUT}Look.{BLOCK}{EOS}{RESULTS}\n\n</think>done{EOS}<｜User｜>z{OPEN}"),
        ([*CALLED, answer("done", "so")], THINKING,
         f"<｜User｜>q{OPEN}need f</think>Look.{BLOCK}{EOS}{RESULTS}\n\n<think>so</think>done{EOS}"),
        ([user("q"), answer(None, None, ("g", {}))], THINKING,
         f"<｜User｜>q{OPEN}</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"g\">\n\n</｜DSML｜invoke>\n"
         f"</｜DSML｜function_calls>{EOS}"),
        ([{"role": "developer", "content": "D"}], THINKING, f"<｜User｜>\n\n# The user's message is: D{OPEN}"),
        ([{"role": "developer", "content": "D"}, user("u")], {}, f"D<｜User｜>u{SHUT}"),
        ([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], {}, f"<｜User｜>a b{SHUT}"),
    ],
)  # fmt: skip
def test_layout(messages, kwargs, expected):
    got = CHAT.render(messages, kwargs=kwargs)
    assert got == BOS + expected
    if messages[-1]["role"] != "assistant":
        assert starts_inside("deepseek-v3", got, kwargs) == bool(kwargs.get("thinking"))


def test_tools_stand_behind_the_system_text():
    text = f"\n\nTOOLS <｜DSML｜x> <think></think>\n{SCHEMA}\n{SCHEMA}\n"
    assert CHAT.render([user("q")], tools=[TOOL, TOOL]) == f"{BOS}{text}<｜User｜>q{SHUT}"
    assert CHAT.render(TURNS, tools=[TOOL, TOOL]).startswith(f"{BOS}S{text}<｜User｜>a")


def test_no_generation_prompt():
    assert CHAT.render([user("a"), user("b")], add_generation_prompt=False) == f"{BOS}<｜User｜>a{SHUT}<｜User｜>b"
    assert CHAT.render(CALLED, add_generation_prompt=False).endswith("</function_results>")


@pytest.mark.parametrize(
    ("messages", "kwargs", "field"),
    [
        ([result("r")], {}, "messages[0]"),
        ([user("q"), answer("a"), result("r")], {}, "messages[2]"),
        ([*CALLED, result("r3")], {}, "messages[4]"),
        ([{"role": "function", "content": "x"}], {}, "messages[0].role"),
        ([answer(None, None, ("f", [1]))], {}, "messages[0].tool_calls[0].function.arguments"),
        ([user("q")], {"messages": []}, "chat_template_kwargs.messages"),
    ],
)
def test_refusals(messages, kwargs, field):
    with pytest.raises(InputError) as info:
        CHAT.render(messages, kwargs=kwargs)
    assert info.value.field == field and field in info.value.message


NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('<>/"\n'), max_size=20)
VALUES = st.recursive(
    TEXTS | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)


@settings(max_examples=examples(60))
@given(CALLS, st.sampled_from(["", "Look.", "a\n\n"]), st.booleans())
def test_the_parser_reads_written_calls_back(calls, content, thinking):
    check_read_back(CHAT, "deepseekv32", calls, content, thinking)


def check_read_back(
    chat: Any, parser: str, calls: list[Any], content: str, thinking: bool, tools: list[Any] | None = None
) -> None:
    """The parser reads the calls of a prompt back. Its result, rendered again, is the same prompt: the prefix cache
    hits."""
    more = {"tools": tools, "kwargs": {"thinking": thinking}}
    prompt = chat.render([user("q")], **more)
    whole = chat.render([user("q"), answer(content, "r", *calls)], **more)
    output = whole.removeprefix(prompt + ("r</think>" if thinking else "")).removesuffix(EOS)
    plain, found, _ = read_calls(ToolCallParser(parser, {name: None for name, _ in calls}), output, len(output))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert chat.render([user("q"), answer(plain, "r", *calls)], **more) == whole


TURN = st.one_of(
    TEXTS.map(user),
    st.builds(answer, TEXTS, TEXTS | st.none()),
    st.sampled_from([CALLED[1:], [{"role": "system", "content": "s"}], [{"role": "developer", "content": "d"}]]),
)


@settings(max_examples=examples(40))
@given(st.lists(TURN, min_size=1, max_size=6), st.booleans())
def test_a_longer_conversation_extends_the_prompt_of_a_shorter_one(turns, thinking):
    """Always without thinking; with thinking, within one user turn."""
    messages = [m for turn in turns for m in (turn if isinstance(turn, list) else [turn])]
    more = answer("x", "y", ("f", {"a": 1}))
    shorter = CHAT.render([*messages, user("q")], kwargs={"thinking": thinking})
    longer = CHAT.render([*messages, user("q"), more, result("r")], kwargs={"thinking": thinking})
    assert longer.startswith(shorter)
    assert shorter.count(BOS) == 1 and longer.endswith("<think>" if thinking else "</think>")


def checkpoint(folder: Path, model_type: str = "deepseek_v32", vendor: str | None = VENDOR_FILE) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if vendor is not None:
        (folder / "encoding").mkdir()
        (folder / "encoding" / "encoding_dsv32.py").write_text(vendor)
    return folder


def test_choice(tmp_path, caplog):
    folder = checkpoint(tmp_path)
    chosen = load_chat_template(None, None, {"bos_token": "B"}, folder)
    assert isinstance(chosen, DeepseekV32Chat) and pickle.loads(pickle.dumps(chosen)) == chosen
    text = f"Vendor's words <｜DSML｜invoke>\n{SCHEMA}\n"
    assert chosen.render([user("q")], tools=[TOOL]) == f"B\n\n{text}<｜User｜>q{SHUT}"
    assert isinstance(load_chat_template(None, "own", {}, folder), ChatTemplate)
    assert not caplog.records
    named = load_chat_template("deepseek-v32", "own", {}, None)
    assert isinstance(named, DeepseekV32Chat) and "encoding/encoding_dsv32.py" in caplog.text
    assert f"<functions>\n{SCHEMA}\n</functions>" in named.render([user("q")], tools=[TOOL])


def test_other_checkpoints_have_no_encoder(tmp_path):
    assert load_chat_template(None, None, {}, checkpoint(tmp_path, "deepseek_v3")) is None
    (tmp_path / "config.json").write_text("[")
    assert load_chat_template(None, None, {}, tmp_path) is None
    with pytest.raises(
        ConfigError, match="built-in name: deepseek-v32, deepseek-v4, deepseek-v41, kimi-k3, gme-qwen2-vl"
    ):
        load_chat_template("deepseek-v3.2", None, {}, tmp_path)


@pytest.mark.parametrize("source", ["def (", "TOOLS_SYSTEM_TEMPLATE = 'nothing'", "TOOLS_SYSTEM_TEMPLATE = f()"])
def test_a_vendor_file_that_cannot_be_used_is_named(tmp_path, source):
    with pytest.raises(ConfigError, match=r"encoding_dsv32\.py.*--chat-template"):
        load_chat_template(None, None, {}, checkpoint(tmp_path, vendor=source))


@pytest.mark.parametrize("stream", [False, True])
def test_over_the_openai_api(tmp_path, stream):
    """A checkpoint without a template: the engine's prompt, the parts of the answer, and a continuation."""
    folder = checkpoint(save_tokenizer(tmp_path, chat_template=None))
    output = 'why</think>Look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n' + (
        '<｜DSML｜parameter name="s" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    )
    client = FakeClient(output, context_len=4096, max_req_input_len=4000)
    client.tokenizer = load_tokenizer(folder)
    parsers = {"reasoning_parser": "deepseek-v3", "tool_call_parser": "deepseekv32"}
    body = {"messages": CALLED, "tools": [TOOL], "chat_template_kwargs": THINKING, "stream": stream}
    response = post(client, "/v1/chat/completions", body, **parsers)
    prompt = make_tokenizer().decode(client.requests[0].prompt_ids, skip_special_tokens=False)
    assert prompt.startswith(f"{BOS}\n\nVendor's words") and f"{OPEN}need f</think>Look.{BLOCK}{EOS}" in prompt
    assert prompt.endswith(f"{RESULTS}\n\n<think>")
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(response)]
        text = {k: "".join(d.get(k) or "" for d in deltas) for k in ("reasoning_content", "content")}
        arguments = "".join(c["function"]["arguments"] for d in deltas for c in d.get("tool_calls") or [])
    else:
        text = response.json()["choices"][0]["message"]
        arguments = text["tool_calls"][0]["function"]["arguments"]
    assert (text["reasoning_content"], text["content"].strip()) == ("why", "Look.")
    assert json.loads(arguments) == {"s": "x"}
    body = {"messages": [user("q"), {"role": "assistant", "content": "Once"}], "continue_final_message": True}
    assert post(client, "/v1/chat/completions", body, **parsers).status_code == 200
    prompt = make_tokenizer().decode(client.requests[1].prompt_ids, skip_special_tokens=False)
    assert prompt == f"{BOS}<｜User｜>q{SHUT}Once"


@pytest.mark.parametrize(
    ("message", "continued"),
    [
        ({"content": "Once"}, "<think></think>Once"),
        ({"content": "Once", "reasoning_content": "a tale"}, "<think>a tale</think>Once"),
        ({"content": "", "reasoning_content": "a tale"}, "<think>a tale"),
    ],
)
def test_an_unfinished_answer_is_continued_behind_its_reasoning(message, continued):
    """The prompt is the beginning of the whole answer as the conversation has it later."""
    client = FakeClient()
    client.tokenizer = make_tokenizer()
    messages = [user("q"), {"role": "assistant", **message}]
    body = {"messages": messages, "continue_final_message": True, "chat_template_kwargs": THINKING}
    settings = {"chat_template": "deepseek-v32", "reasoning_parser": "deepseek-v3"}
    response = post(client, "/v1/chat/completions", body, **settings)
    prompt = make_tokenizer().decode(client.requests[0].prompt_ids, skip_special_tokens=False)
    assert prompt == f"{BOS}<｜User｜>q<｜Assistant｜>{continued}"
    if message["content"]:
        whole = CHAT.render(messages, add_generation_prompt=False, kwargs=THINKING)
        assert whole == prompt + EOS
    found = response.json()["choices"][0]["message"]
    assert bool(found["content"]) == bool(message["content"]) != bool(found["reasoning_content"])
