"""Reasoning and tool-call parsers: whole texts, and the same in pieces of any size."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moe_engine.errors import ConfigError
from moe_engine.tokenizer.reasoning import REASONING_FORMATS, ReasoningParser, reasoning_parser, starts_inside
from moe_engine.tokenizer.tool_calls import ToolCallParser
from moe_engine.tokenizer.tool_calls.named import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from tests.tokenizer.read_calls import read_calls
from tests.tokenizer.tiny_tokenizer import make_tokenizer


def reason(text, size, **options):
    parser = ReasoningParser(**options)
    reasoning = content = ""
    for at in range(0, len(text), size):
        r, c = parser.push(text[at : at + size])
        reasoning, content = reasoning + r, content + c
    r, c = parser.finish()
    return reasoning + r, content + c


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("inside", "text", "want"),
    [
        (True, "think hard\n</think>\n\nThe answer", ("think hard", "The answer")),
        (True, "<think>\nthink</think>x", ("think", "x")),
        (True, "never ends <b> </thin", ("never ends <b> </thin", "")),
        (True, "a < b </think> c </think> d", ("a < b", "c </think> d")),
        (True, "</think>x", ("", "x")),
        (True, "", ("", "")),
        (False, "no tags at all", ("", "no tags at all")),
        (False, "<think>t</think>x", ("t", "x")),
        (False, "<thin", ("", "<thin")),
        (False, "a <think> b", ("", "a <think> b")),
        (False, "</think>x", ("", "x")),
        (False, "</thin", ("", "</thin")),
        (False, "a </think> b", ("", "a </think> b")),
    ],
)
def test_reasoning(size, inside, text, want):
    assert reason(text, size, inside=inside) == want
    assert reason(text, size, inside=inside, stream_reasoning=False) == want


def test_reasoning_is_gathered():
    parser = ReasoningParser(inside=True, stream_reasoning=False)
    assert [parser.push(p) for p in ("a", "b", "</think>", "c")] == [("", ""), ("", ""), ("ab", ""), ("", "c")]


def test_other_tags():
    form = REASONING_FORMATS["kimi"]
    assert reason("◁think▷a◁/think▷b", 3, inside=False, form=form) == ("a", "b")
    assert reason("[THINK]a[/THINK]b", 3, inside=False, form=REASONING_FORMATS["mistral"]) == ("a", "b")
    granite = "<think>a</think>\n<response>b</response>"
    assert reason(granite, 3, inside=False, form=REASONING_FORMATS["granite"]) == ("a", "b")
    gemma = REASONING_FORMATS["gemma4"]
    for size in (1, 4, 99):
        assert reason("<|channel>thought\na\n<channel|>b", size, inside=False, form=gemma) == ("a", "b")
        call = "<|tool_call>call:f{}<tool_call|>"
        assert reason("<|channel>thought\na" + call, size, inside=False, form=gemma) == ("a", call)
    assert gemma.markers == ("<|channel>", "<channel|>")
    assert not starts_inside("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", {"enable_thinking": True})
    m3 = REASONING_FORMATS["minimax-m3"]
    assert reason("<mm:think>a</mm:think>b", 3, inside=False, form=m3) == ("a", "b")
    assert reason("a]<]minimax[>[<tool_call>x", 3, inside=True, form=m3) == ("a", "]<]minimax[>[<tool_call>x")
    assert starts_inside("minimax-m3", "]~b]ai\n<mm:think>", {}) and not starts_inside("minimax-m3", "]~b]ai\n", {})
    assert not starts_inside("qwen3", "<|im_start|>assistant\n", {})
    assistant = "<role>ASSISTANT</role>\n<think>"  # Ling's prompts open the reasoning, or close it
    assert starts_inside("ling3", assistant, {}) and not starts_inside("ling3", f"{assistant}</think>", {})


@pytest.mark.parametrize("size", [1, 2, 5, 200])
@pytest.mark.parametrize(
    ("inside", "text", "want"),
    [
        (True, "why<|close|>think<|sep|><|open|>response<|sep|>a <|b<|close|>response<|sep|><|close|>message<|sep|>",
         ("why", "a <|b")),
        (False, "yes<|close|>response<|sep|><|close|>message<|sep|>", ("", "yes")),
        (False, "<|open|>think<|sep|>t<|close|>think<|sep|><|open|>response<|sep|>", ("t", "")),
        (True, "x<|open|>tools<|sep|>c<|close|>tools<|sep|><|close|>message<|sep|>",
         ("x", "<|open|>tools<|sep|>c<|close|>tools<|sep|>")),
        (True, "cut <|close|>thi", ("cut <|close|>thi", "")),
    ],
)  # fmt: skip
def test_channels(size, inside, text, want):
    for streams in (True, False):
        parser = reasoning_parser(REASONING_FORMATS["kimi_k3"], inside=inside, stream_reasoning=streams)
        pieces = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
        assert tuple("".join(part) for part in zip(*pieces)) == want
        assert streams or sum(bool(reasoning) for reasoning, _ in pieces) <= 1
    assert starts_inside("kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>', {})
    assert not starts_inside("kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>', {})


@pytest.mark.parametrize("size", [1, 3, 100])
def test_notes_on_the_thinking_budget(size):
    """Seed-OSS: they stay in the reasoning, which clients send back; a budget of 0 opens one in the prompt."""
    form, note = (
        REASONING_FORMATS["seed_oss"],
        "<seed:cot_budget_reflect>I have used 129 tokens.</seed:cot_budget_reflect>",
    )
    text = f"<seed:think>why\n{note}\nthen <seed:tool_call> </seed:think>\n<seed:tool_call>x"
    want = f"why\n{note}\nthen <seed:tool_call>", "<seed:tool_call>x"
    assert reason(text, size, inside=False, form=form) == want
    assert reason("plain", size, inside=False, form=form) == ("", "plain")
    prompt = "<seed:bos>assistant\n"
    assert not starts_inside("seed_oss", prompt, {})
    assert starts_inside("seed_oss", f"{prompt}\n<seed:think><seed:cot_budget_reflect>\n", {})
    text = "The budget is 0.</seed:cot_budget_reflect>\n</seed:think>yes"
    assert reason(text, size, inside=True, form=form) == ("The budget is 0.</seed:cot_budget_reflect>", "yes")
    assert set(form.markers) >= {"<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"}


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("start", ["", "<think>\n"])
def test_reasoning_that_stays_in_the_content(size, start):
    form = REASONING_FORMATS["minimax-append-think"]
    assert reason(f"{start}why</think>\n\nyes", size, inside=True, form=form) == ("", "<think>why</think>\n\nyes")
    assert reason("<think", size, inside=True, form=form) == ("", "<think><think")
    assert reason("plain", size, inside=False, form=form) == ("", "plain")


@pytest.mark.parametrize("size", [1, 4, 100])
def test_calls_end_the_reasoning(size):
    form = REASONING_FORMATS["qwen3-thinking"]
    assert reason("why a <tool_call>?\n<tool_call>x", size, inside=True, form=form) == (
        "why a <tool_call>?",
        "<tool_call>x",
    )
    assert reason("why</think>\n<tool_call>x", size, inside=True, form=form) == ("why", "<tool_call>x")
    begins = {"kimi_k2": "<|tool_calls_section_begin|>", "glm45": "<tool_call>", "ling3": "<tool_call>"}
    for name, begin in begins.items():
        assert reason(f"why{begin}x", size, inside=True, form=REASONING_FORMATS[name]) == ("why", f"{begin}x")


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_tags_around_the_answer(size):
    form = REASONING_FORMATS["hunyuan_a13b"]
    for text, want in (
        ("<think>\nwhy\n</think>\n<answer>\nyes\n</answer>", ("why", "yes")),
        ("<answer>\nyes</answer>\n", ("", "yes")),
        ("<think>why</think>yes </answer>", ("why", "yes </answer>")),
        ("<answer>a </answer> b </answer", ("", "a </answer> b </answer")),
        ("<answer>a\n<tool_calls>[]</tool_calls>\n</answer>", ("", "a\n<tool_calls>[]</tool_calls>")),
        ("<answer>a </answer>\n<tool_calls>[]</tool_calls>", ("", "a<tool_calls>[]</tool_calls>")),
        ("<answer>a </answer>\n<tool", ("", "a<tool")),
        (" <answ", ("", " <answ")),
        ("<think>why <tool_calls>[]</tool_calls>", ("why", "<tool_calls>[]</tool_calls>")),
    ):
        assert reason(text, size, inside=False, form=form) == want
    ernie = REASONING_FORMATS["ernie45"]
    assert reason("why\n</think>\n\n<response>\na\nb\n</response>\n", size, inside=True, form=ernie) == ("why", "a\nb")
    call = "<tool_call>\n{}\n</tool_call>\n"
    assert reason(f"why\n</think>\n\n\n{call}", size, inside=True, form=ernie) == ("why", call)
    solar, turn = REASONING_FORMATS["solar_open"], "<|begin|>assistant"
    calls = "<|tool_calls|>x"
    for text, want in (
        (f"<|think|>why<|end|>{turn}<|content|>yes", ("why", "yes")),
        (f"<|think|>why<|end|>{turn}{calls}", ("why", calls)),
        (f"{turn}<|content|>yes <|end|>{turn}{calls}", ("", f"yes{calls}")),
        (f"<|content|>a<|end|>b<|end|>{turn}", ("", "a<|end|>b")),
        (calls, ("", calls)),
        (f"{turn}<|cont", ("", f"{turn}<|cont")),
    ):
        assert reason(text, size, inside=False, form=solar) == want, text
    cohere, calls = REASONING_FORMATS["cohere_command4"], "<|START_ACTION|>[]<|END_ACTION|>"
    for text, want in (
        ("why<|END_THINKING|><|START_TEXT|>yes<|END_TEXT|>", ("why", "yes")),
        (f"why<|END_THINKING|>{calls}", ("why", calls)),
        (f"why{calls}", ("why", calls)),
    ):
        assert reason(text, size, inside=True, form=cohere) == want, text
    older = REASONING_FORMATS["cohere_command3"]
    assert reason("<|START_RESPONSE|>yes<|END_RESPONSE|>", size, inside=False, form=older) == ("", "yes")
    hy3 = REASONING_FORMATS["hy_v3"]
    text = "why</think:opensource>\n<answer> b <tool_calls:opensource>"
    assert reason(text, size, inside=True, form=hy3) == ("why", "<answer> b <tool_calls:opensource>")


def test_starts_inside():
    assert starts_inside("deepseek-r1", "<｜Assistant｜>", {})
    assert starts_inside("deepseek-v3", "<｜Assistant｜><think>", {})
    assert starts_inside("deepseek-v3", "<｜Assistant｜>", {"thinking": True})
    assert not starts_inside("deepseek-v3", "<｜Assistant｜></think>", {})


def v31(*calls):
    body = "".join(f"{CALL_BEGIN}{name}{SEPARATOR}{args}{CALL_END}" for name, args in calls)
    return f"{CALLS_BEGIN}{body}{CALLS_END}"


def v3(*calls):
    body = "\n".join(f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{args}\n```{CALL_END}" for name, args in calls)
    return f"{CALLS_BEGIN}{body}{CALLS_END}"


def parse(form, text, size, names=None, **options) -> Any:
    shown, calls, ids = read_calls(ToolCallParser(form, names, **options), text, size)
    assert all(name.startswith("call_") for name in ids)
    return shown, calls


CALLS = [("get_weather", '{"city": "Par\\nis"}'), ("add", '{"a": 1}')]


@pytest.mark.parametrize("size", [1, 3, 8, 1000])
@pytest.mark.parametrize(("form", "write"), [("deepseekv3", v3), ("deepseekv31", v31)])
class TestToolCalls:
    def test_text_then_calls(self, size, form, write):
        assert parse(form, "Let me see. " + write(*CALLS), size) == ("Let me see. ", CALLS)

    def test_no_calls(self, size, form, write):
        assert parse(form, "a <｜tool b", size) == ("a <｜tool b", [])

    def test_unknown_functions_are_dropped(self, size, form, write):
        assert parse(form, write(*CALLS), size, {"add": None}) == ("", CALLS[1:])

    def test_one_call_only(self, size, form, write):
        assert parse(form, write(*CALLS), size, parallel=False) == ("", CALLS[:1])

    def test_cut_short(self, size, form, write):
        text = write(CALLS[0])
        cut = text[: text.index('is"}') + 1]
        assert parse(form, cut, size) == ("", [("get_weather", '{"city": "Par\\ni')])


def test_unknown_format():
    with pytest.raises(ConfigError, match="--tool-call-parser step3"):
        ToolCallParser("step3")


@pytest.mark.parametrize("name", REASONING_FORMATS)
@pytest.mark.parametrize("inside", [True, False])
def test_tags_that_max_tokens_cuts(name: str, inside: bool) -> None:
    """The tags are several tokens of this vocabulary: wherever the output is cut, none is reasoning or content."""
    form, tokenizer = REASONING_FORMATS[name], make_tokenizer()
    text = f"{'' if inside else form.start}w hy{form.end}{form.turn}{''.join(form.answer or ('', '')[:1])}yes"
    if form.answer:
        text = f"{'' if inside else form.start}w hy{form.end}{form.turn}yes".replace("yes", "yes".join(form.answer))
    if form.harmony:
        text = f"{form.start}w hy{form.end}<|start|>assistant<|channel|>final<|message|>yes<|end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for count in range(1, len(ids)):
        cut = tokenizer.decode(ids[:count], skip_special_tokens=False)
        if cut.endswith("\ufffd"):
            continue
        parser, size = reasoning_parser(form, inside=inside), random.randint(1, 9)
        pieces = [parser.push(cut[at : at + size]) for at in range(0, len(cut), size)]
        reasoning, content = ("".join(part) for part in zip(*pieces, parser.finish(tokenizer.beginnings)))
        if form.keeps:
            reasoning, _, content = content.removeprefix(form.start).partition(form.end)
        assert ("w hy".startswith(reasoning), "yes".startswith(content)) == (True, True), (cut, reasoning, content)


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_start_tags_in_pieces(name: str) -> None:
    form = REASONING_FORMATS[name]
    if form.harmony:
        pytest.skip("test_harmony.py")
    kept = ("", f"{form.start}why{form.end}\nyes")
    cases = [(f"{form.start}\n{form.start}why{form.end}\nyes", kept if form.keeps else ("why", "yes"))]
    if form.calls:
        call = form.calls.strip() + "{}"
        cases += [(f"{form.start}\n{call}", ("", call)), (f"{form.start}why\n{call}", ("why", call))]
    for text, wanted in cases:
        for size in range(1, len(text) + 1):
            parser = ReasoningParser(inside=False, form=form)
            found = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
            assert tuple("".join(part) for part in zip(*found)) == wanted, size
