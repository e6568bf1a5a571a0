"""DeepSeek V4.1's prompts: texts by the layout of the vendor's encoder, and parsed back."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.errors import InputError
from moe_engine.tokenizer.chat_template import load_chat_template
from moe_engine.tokenizer.deepseek_v41 import DeepseekV41Chat
from moe_engine.tokenizer.reasoning import starts_inside
from tests.examples import examples
from tests.tokenizer import test_deepseek_v32 as v32
from tests.tokenizer.test_deepseek_v4 import CALLED, DEVELOPER, RESULTS, TURNS, prompt_of_an_answer
from tests.tokenizer.test_deepseek_v32 import BOS, CALLS, EOS, OPEN, SCHEMA, SHUT, TEXTS, THINKING, TOOL, answer, user

EFFORTS = {"low": 5, "high": 6, "max": 7}
CHAT = DeepseekV41Chat(
    "TOOLS <{dsml_token} x>\n{tool_schemas}\n", efforts=EFFORTS, effort_text="E{budget}\n\n", default_effort="high"
)
DESCRIBED = f"\n\nTOOLS <｜DSML｜ x>\n{SCHEMA}\n"
SYSTEM = {"role": "system", "content": "M"}
BLOCK = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="s" string="true">x</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="n" string="false">[1]</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    '<｜DSML｜ invoke name="g">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
VENDOR = '''
import nothing_that_exists
REASONING_EFFORT_TEMPLATE = ("Effort "
    "{budget}\\n")
REASONING_EFFORT_MAPPINGS: dict = {"low": 11, "high": 22}
DEFAULT_REASONING_EFFORT = "low"
TOOLS_TEMPLATE = """Vendor's <{dsml_token}{tc_block_name}> <{dsml_token}{tool_call_tag_name}>
<{dsml_token}{tool_parameter_tag_name}>
{tool_schemas}
"""
raise SystemExit("this file must not be run")
'''


@pytest.mark.parametrize(
    ("messages", "kwargs", "expected"),
    [
        ([user("hi")], {}, f"<｜User｜>hi{SHUT}"),
        ([user("hi")], THINKING, f"<｜System｜>E6\n\n<｜User｜>hi{OPEN}"),
        ([user("hi")], THINKING | {"reasoning_effort": "max"}, f"<｜System｜>E7\n\n<｜User｜>hi{OPEN}"),
        ([user("hi")], THINKING | {"reasoning_effort": "medium"}, f"<｜System｜>E6\n\n<｜User｜>hi{OPEN}"),
        ([user("hi")], THINKING | {"reasoning_effort": 33}, f"<｜System｜>E33\n\n<｜User｜>hi{OPEN}"),
        ([user("hi")], {"reasoning_effort": "max"}, f"<｜User｜>hi{SHUT}"),
        (TURNS, {}, f"<｜System｜>S<｜User｜>a{SHUT}b{EOS}<｜User｜>c{SHUT}"),
        (TURNS, THINKING, f"<｜System｜>E6\n\nS<｜User｜>a{SHUT}b{EOS}<｜User｜>c{OPEN}"),
        (CALLED, {}, f"<｜User｜>q{SHUT}Look.{BLOCK}{EOS}{RESULTS}{SHUT}"),
        # a system message after the first turn is a prompt
        ([user("a"), SYSTEM], {}, f"<｜User｜>a<｜System｜>M{SHUT}"),
        ([user("a"), answer("b", "r"), SYSTEM], THINKING,
         f"<｜System｜>E6\n\n<｜User｜>a{SHUT}b{EOS}<｜System｜>M{OPEN}"),
        ([user("a"), SYSTEM, answer("b", "r")], THINKING,
         f"<｜System｜>E6\n\n<｜User｜>a<｜System｜>M{OPEN}r</think>b{EOS}"),
        ([user("a"), SYSTEM, user("b")], {}, f"<｜User｜>a<｜System｜>M<｜User｜>b{SHUT}"),
        ([DEVELOPER, answer("b"), user("u")], THINKING, f"<｜System｜>E6\n\nb{EOS}<｜User｜>u{OPEN}"),
    ],
)  # fmt: skip
def test_layout(messages, kwargs, expected):
    got = CHAT.render(messages, kwargs=kwargs)
    assert got == BOS + expected
    if messages[-1]["role"] != "assistant":
        assert starts_inside("deepseek-v41", got, kwargs) == bool(kwargs.get("thinking"))


def test_tools_stand_in_the_first_turn():
    """They keep the reasoning of all answers."""
    loop = f"<｜User｜>q{OPEN}need f</think>Look.{BLOCK}{EOS}{RESULTS}{OPEN}"
    assert CHAT.render(CALLED, tools=[TOOL], kwargs=THINKING) == f"{BOS}<｜System｜>E6\n\n{DESCRIBED}{loop}"
    assert CHAT.render([user("q")], tools=[TOOL]) == f"{BOS}<｜System｜>{DESCRIBED}<｜User｜>q{SHUT}"
    assert CHAT.render(TURNS, tools=[TOOL], kwargs=THINKING) == (
        f"{BOS}<｜System｜>E6\n\nS{DESCRIBED}<｜User｜>a{OPEN}because</think>b{EOS}<｜User｜>c{OPEN}"
    )


@pytest.mark.parametrize("effort", [0, 101, -5])
def test_efforts_out_of_range_are_refused(effort):
    with pytest.raises(InputError, match=f"reasoning_effort: {effort} is not from 1 to 100"):
        CHAT.render([user("q")], kwargs=THINKING | {"reasoning_effort": effort})


@settings(max_examples=examples(60))
@given(CALLS, st.sampled_from(["", "Look.", "a\n\n"]), st.booleans())
def test_the_parser_reads_written_calls_back(calls, content, thinking):
    v32.check_read_back(CHAT, "deepseekv41", calls, content, thinking, [TOOL])


@settings(max_examples=examples(40))
@given(st.lists(TEXTS.map(user) | st.builds(answer, TEXTS, TEXTS | st.none()), max_size=6), st.booleans())
def test_with_tools_a_longer_conversation_extends_the_prompt_of_a_shorter_one(messages, thinking):
    """Also across user turns: the prefix cache hits."""
    shorter = CHAT.render([*messages, user("q")], tools=[TOOL], kwargs={"thinking": thinking})
    more = [answer("x", "y", ("f", {"a": 1})), user("z")]
    assert CHAT.render([*messages, user("q"), *more], tools=[TOOL], kwargs={"thinking": thinking}).startswith(shorter)


def test_texts_of_the_vendor(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v41"}))
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding.py").write_text(VENDOR)
    chosen = load_chat_template(None, None, {"bos_token": "B"}, tmp_path)
    assert isinstance(chosen, DeepseekV41Chat) and pickle.loads(pickle.dumps(chosen)) == chosen
    text = f"Vendor's <｜DSML｜ calls> <｜DSML｜ invoke>\n<｜DSML｜ parameter>\n{SCHEMA}\n"
    asked = chosen.render([user("q")], tools=[TOOL], kwargs=THINKING)
    assert asked == f"B<｜System｜>Effort 11\n\n\n{text}<｜User｜>q{OPEN}"
    assert "Effort 22\n" in chosen.render([user("q")], kwargs=THINKING | {"reasoning_effort": "high"})


def test_over_the_openai_api(tmp_path):
    """A checkpoint without a template: the parts of the answer are separated."""
    prompt = prompt_of_an_answer(tmp_path, "deepseek_v41", BLOCK, "low")
    assert prompt.startswith(f"{BOS}<｜System｜>Reasoning Effort: 50") and prompt.endswith(
        f"{BLOCK}{EOS}{RESULTS}{OPEN}"
    )
