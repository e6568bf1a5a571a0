"""DeepSeek V4's prompts: texts by the layout of the vendor's encoder, and parsed back."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError, InputError
from moe_engine.tokenizer import load_tokenizer
from moe_engine.tokenizer.chat_template import load_chat_template
from moe_engine.tokenizer.deepseek_v4 import DeepseekV4Chat
from moe_engine.tokenizer.reasoning import starts_inside
from tests.examples import examples
from tests.server.fake_engine import FakeClient
from tests.server.harness import post
from tests.tokenizer import test_deepseek_v32 as v32
from tests.tokenizer.test_deepseek_v32 import BOS, CALLS, EOS, OPEN, SCHEMA, SHUT, TEXTS, THINKING, TOOL, answer, user
from tests.tokenizer.tiny_tokenizer import make_tokenizer, save_tokenizer

EFFORTS = {"low": "", "high": "HIGH\n\n", "max": "MAX\n\n"}
CHAT = DeepseekV4Chat(
    "TOOLS <{dsml_token}x> {thinking_start_token}{thinking_end_token}\n{tool_schemas}\n", efforts=EFFORTS
)
DESCRIBED = f"\n\nTOOLS <｜DSML｜x> <think></think>\n{SCHEMA}\n"
FIRST_RELEASE = '''
import nothing_that_exists
REASONING_EFFORT_MAX = (
    "All "
    "of it.\\n\\n"
)
TOOLS_TEMPLATE = """Vendor's words <{dsml_token}invoke>
{tool_schemas}
"""
raise SystemExit("this file must not be run")
'''
LATER_RELEASE = FIRST_RELEASE.replace(
    "REASONING_EFFORT_MAX = (", 'REASONING_EFFORT_PROMPTS: dict = {"low": "", "max": ('
)
LATER_RELEASE = LATER_RELEASE.replace(")\nTOOLS", '), "high": "Much.\\n"}\nDEFAULT_REASONING_EFFORT = "low"\nTOOLS')


def result(text: str, call: int = 0) -> dict[str, str]:
    return {"role": "tool", "content": text, "tool_call_id": str(call)}


TURNS = [{"role": "system", "content": "S"}, user("a"), answer("b", "because"), user("c")]
CALLED = [user("q"), answer("Look.", "need f", ("f", {"s": "x", "n": [1]}), ("g", {})), result("r0"), result("r1", 1)]
BLOCK = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="s" string="true">x</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
RESULTS = "<｜User｜><tool_result>r0</tool_result>\n\n<tool_result>r1</tool_result>"
DEVELOPER = {"role": "developer", "content": "D"}


@pytest.mark.parametrize(
    ("messages", "kwargs", "expected"),
    [
        ([user("hi")], {}, f"<｜User｜>hi{SHUT}"),
        ([user("hi")], THINKING, f"<｜User｜>hi{OPEN}"),
        ([user("hi")], THINKING | {"reasoning_effort": "high"}, f"HIGH\n\n<｜User｜>hi{OPEN}"),
        ([user("hi")], THINKING | {"reasoning_effort": "xhigh"}, f"MAX\n\n<｜User｜>hi{OPEN}"),
        ([user("hi")], THINKING | {"reasoning_effort": "medium"}, f"<｜User｜>hi{OPEN}"),
        ([user("hi")], {"reasoning_effort": "max"}, f"<｜User｜>hi{SHUT}"),
        ([user("a"), user("b")], {}, f"<｜User｜>a\n\nb{SHUT}"),
        (TURNS, {}, f"S<｜User｜>a{SHUT}b{EOS}<｜User｜>c{SHUT}"),
        (TURNS, THINKING | {"reasoning_effort": "max"}, f"MAX\n\nS<｜User｜>a{SHUT}b{EOS}<｜User｜>c{OPEN}"),
        (CALLED, {}, f"<｜User｜>q{SHUT}Look.{BLOCK}{EOS}{RESULTS}{SHUT}"),
        # results are a user turn: without tools in the request, the reasoning before them is left out
        (CALLED, THINKING, f"<｜User｜>q{SHUT}Look.{BLOCK}{EOS}{RESULTS}{OPEN}"),
        ([*CALLED, user("z")], {}, f"<｜User｜>q{SHUT}Look.{BLOCK}{EOS}{RESULTS}\n\nz{SHUT}"),
        ([*CALLED, answer("done", "so")], THINKING,
         f"<｜User｜>q{SHUT}Look.{BLOCK}{EOS}{RESULTS}{OPEN}so</think>done{EOS}"),
        ([DEVELOPER], THINKING, f"<｜User｜>D{OPEN}"),
        ([DEVELOPER, user("u")], {}, f"D<｜User｜>u{SHUT}"),
        ([DEVELOPER, answer("b"), user("u")], {}, f"<｜User｜>D{SHUT}b{EOS}<｜User｜>u{SHUT}"),
        ([DEVELOPER, answer("b"), user("u")], THINKING, f"b{EOS}<｜User｜>u{OPEN}"),
        ([user("a"), {"role": "system", "content": "S"}, user("b")], {}, f"<｜User｜>aS<｜User｜>b{SHUT}"),
    ],
)  # fmt: skip
def test_layout(messages, kwargs, expected):
    got = CHAT.render(messages, kwargs=kwargs)
    assert got == BOS + expected
    if messages[-1]["role"] != "assistant":
        assert starts_inside("deepseek-v4", got, kwargs) == bool(kwargs.get("thinking"))


def test_tools_keep_the_reasoning():
    """Tools stand after the system text, and the effort before it."""
    kwargs = THINKING | {"reasoning_effort": "max"}
    loop = f"<｜User｜>q{OPEN}need f</think>Look.{BLOCK}{EOS}{RESULTS}{OPEN}"
    assert CHAT.render(CALLED, tools=[TOOL], kwargs=kwargs) == f"{BOS}MAX\n\n{DESCRIBED}{loop}"
    assert CHAT.render(TURNS, tools=[TOOL], kwargs=kwargs) == (
        f"{BOS}MAX\n\nS{DESCRIBED}<｜User｜>a{OPEN}because</think>b{EOS}<｜User｜>c{OPEN}"
    )


def test_results_stand_in_the_order_of_the_calls():
    """Texts of the user stay where they are."""
    swapped = CHAT.render([*CALLED[:2], result("r1", 1), user("u"), result("r0")])
    assert swapped.endswith("<tool_result>r0</tool_result>\n\nu\n\n<tool_result>r1</tool_result>" + SHUT)
    unknown = CHAT.render([user("q"), answer("a"), result("r", 7)])
    assert unknown.endswith(f"a{EOS}<｜User｜><tool_result>r</tool_result>{SHUT}")


def test_no_generation_prompt():
    assert CHAT.render([user("a")], add_generation_prompt=False) == f"{BOS}<｜User｜>a"
    assert CHAT.render(CALLED, add_generation_prompt=False).endswith("r1</tool_result>")


@pytest.mark.parametrize(
    ("messages", "kwargs", "field"),
    [
        ([user("q"), {"role": "function", "content": "x"}], {}, "messages[1].role"),
        ([user("q"), user("r"), answer(None, None, ("f", [1]))], {}, "messages[2].tool_calls[0].function.arguments"),
        ([user("q")], {"messages": []}, "chat_template_kwargs.messages"),
    ],
)
def test_refusals(messages, kwargs, field):
    with pytest.raises(InputError) as info:
        CHAT.render(messages, kwargs=kwargs)
    assert info.value.field == field and field in info.value.message


@settings(max_examples=examples(60))
@given(CALLS, st.sampled_from(["", "Look.", "a\n\n"]), st.booleans())
def test_the_parser_reads_written_calls_back(calls, content, thinking):
    v32.check_read_back(CHAT, "deepseekv4", calls, content, thinking, [TOOL])


@settings(max_examples=examples(40))
@given(st.lists(TEXTS.map(user) | st.builds(answer, TEXTS, TEXTS | st.none()), max_size=6), st.booleans())
def test_with_tools_a_longer_conversation_extends_the_prompt_of_a_shorter_one(messages, thinking):
    """Also across user turns: the prefix cache hits."""
    shorter = CHAT.render([*messages, user("q")], tools=[TOOL], kwargs={"thinking": thinking})
    more = [answer("x", "y", ("f", {"a": 1})), result("r"), answer("done"), user("z")]
    assert CHAT.render([*messages, user("q"), *more], tools=[TOOL], kwargs={"thinking": thinking}).startswith(shorter)


@pytest.mark.parametrize(
    ("source", "efforts"),
    [
        (FIRST_RELEASE, {"max": "All of it.\n\n"}),
        (LATER_RELEASE, {"low": "", "max": "All of it.\n\n", "high": "Much.\n"}),
    ],
)
def test_texts_of_the_vendor(tmp_path, source, efforts):
    """By model type, from both releases of the encoder."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding_dsv4.py").write_text(source)
    chosen = load_chat_template(None, None, {"bos_token": "B"}, tmp_path)
    assert isinstance(chosen, DeepseekV4Chat) and pickle.loads(pickle.dumps(chosen)) == chosen
    assert chosen.efforts == efforts
    text = f"Vendor's words <｜DSML｜invoke>\n{SCHEMA}\n"
    assert chosen.render([user("q")], tools=[TOOL]) == f"B\n\n{text}<｜User｜>q{SHUT}"
    (tmp_path / "encoding" / "encoding_dsv4.py").write_text(source.replace("TOOLS_TEMPLATE", "OTHER"))
    with pytest.raises(ConfigError, match=r"encoding_dsv4\.py: has no text TOOLS_TEMPLATE.*--chat-template"):
        load_chat_template(None, None, {}, tmp_path)


def test_own_texts(caplog):
    named = load_chat_template("deepseek-v4", "own", {}, None)
    assert isinstance(named, DeepseekV4Chat) and "encoding/encoding_dsv4.py" in caplog.text
    assert f"functions:\n{SCHEMA}\n<｜User｜>" in named.render([user("q")], tools=[TOOL])
    assert named.render([user("q")], kwargs=THINKING | {"reasoning_effort": "max"}).startswith(f"{BOS}Reasoning effort")


def test_over_the_openai_api(tmp_path):
    """A checkpoint without a template: an effort switches the thinking on; the parts of the answer are separated."""
    prompt = prompt_of_an_answer(tmp_path, "deepseek_v4", BLOCK, "max")
    assert prompt.startswith(f"{BOS}Reasoning effort: maximum") and prompt.endswith(f"{BLOCK}{EOS}{RESULTS}{OPEN}")


def prompt_of_an_answer(tmp_path: Path, model_type: str, block: str, effort: str) -> str:
    """The prompt of a chat completion whose answer reasons and calls functions, by the text `block`."""
    folder = save_tokenizer(tmp_path, chat_template=None)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    client = FakeClient(f"why</think>Look.{block}", context_len=9000, max_req_input_len=8000, max_total_num_tokens=9000)
    client.tokenizer = load_tokenizer(folder)
    tools = [TOOL, {"type": "function", "function": {"name": "g"}}]
    body = {"messages": CALLED, "tools": tools, "reasoning_effort": effort, "max_tokens": 1000}
    name = model_type.replace("_", "-")
    parsers = {"reasoning_parser": name, "tool_call_parser": name.replace("-", "")}
    found = post(client, "/v1/chat/completions", body, **parsers).json()["choices"][0]["message"]
    assert (found["reasoning_content"], found["content"].strip()) == ("why", "Look.")
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found["tool_calls"]]
    assert calls == [("f", {"s": "x", "n": [1]}), ("g", {})]
    return make_tokenizer().decode(client.requests[0].prompt_ids, skip_special_tokens=False)
