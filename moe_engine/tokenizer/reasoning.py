"""Reasoning parsers: separate reasoning from content, in whole texts and streams (SGLang's `--reasoning-parser`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_engine.tokenizer import xtml
from moe_engine.tokenizer.answer_tags import AnswerTags
from moe_engine.tokenizer.harmony import CHANNEL, END, MARKERS, MESSAGE, HarmonyReasoning
from moe_engine.tokenizer.stop import Beginnings, overlap, without_cut_mark
from moe_engine.tokenizer.xtml import XtmlReasoning
from moe_engine.types.constraint import FreeReasoning

THINK_START = "<think>"
THINK_END = "</think>"
HY3_SUFFIX = ":opensource"
"""End of the names of all tags in the published tokenizers of Hy3."""
HY3 = ("hunyuan", "hy_v3")
"""Hy3's parsers of reasoning and tool calls, for tags without and with the suffix."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Tags of a model family, and the conditions under which its output starts inside the reasoning without a start
    tag.

    Args:
        forced: always.
        switch: if this chat_template_kwarg is true.
        calls: begin of tool calls, which ends the reasoning without an end tag.
        keeps: the reasoning stays in the content, between its tags, for clients that send it back in this form.
        harmony: messages with channels (`harmony.py`); the tags are those of the first one.
        xtml: channels of Kimi K3 (`xtml.py`).
        answer: tags around the content, which are removed (`answer_tags.py`).
        turn: begin of the message with the content, or with calls; removed too.
        token: the special token at the beginning of `start`, if `start` is longer.
        notes: marks around notes in the reasoning, which keeps them; a prompt may open the first one (Seed-OSS: on the
            thinking budget).
    """

    start: str = THINK_START
    end: str = THINK_END
    forced: bool = False
    switch: str = ""
    calls: str = ""
    keeps: bool = False
    harmony: bool = False
    xtml: bool = False
    answer: tuple[str, str] | None = None
    turn: str = ""
    token: str = ""
    notes: tuple[str, str] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which outputs must keep."""
        if self.xtml:
            return xtml.MARKERS
        return (
            MARKERS if self.harmony else (self.token or self.start, self.end, *(self.answer or ()), *(self.notes or ()))
        )

    @property
    def free_end(self) -> str:
        """The end of the reasoning before a constrained text."""
        if self.turn and self.answer:
            return self.end + self.turn + self.answer[0]
        if self.xtml:
            return self.end + xtml.RESPONSE
        return f"{CHANNEL}final{MESSAGE}" if self.harmony else self.end


def _cohere(answer: str) -> ReasoningFormat:
    """Args: answer: name of the tags around the answer."""
    tags = f"<|START_{answer}|>", f"<|END_{answer}|>"
    return ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", calls="<|START_ACTION|>", answer=tags)


def _hunyuan(suffix: str = "") -> ReasoningFormat:
    """Args: suffix: of the names of tags, in published tokenizers of Hy3."""
    answer = None if suffix else ("<answer>", "</answer>")
    return ReasoningFormat(f"<think{suffix}>", f"</think{suffix}>", calls=f"<tool_calls{suffix}>", answer=answer)


REASONING_FORMATS = {
    "deepseek-r1": ReasoningFormat(forced=True),
    "deepseek-v3": ReasoningFormat(switch="thinking"),
    "deepseek-v4": ReasoningFormat(switch="thinking"),
    "deepseek-v41": ReasoningFormat(switch="thinking"),
    "qwen3": ReasoningFormat(calls="\n<tool_call>"),
    "qwen3-thinking": ReasoningFormat(forced=True, calls="\n<tool_call>"),
    "glm45": ReasoningFormat(calls="<tool_call>"),
    "ling3": ReasoningFormat(calls="<tool_call>"),
    "kimi_k3": ReasoningFormat(xtml.THINK, xtml.THINK_END, calls=xtml.TOOLS, xtml=True),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": ReasoningFormat(forced=True, calls="<|tool_calls_section_begin|>"),
    "minimax": ReasoningFormat(forced=True),
    "minimax-m3": ReasoningFormat("<mm:think>", "</mm:think>", calls="]<]minimax[>[<tool_call>"),
    "minimax-append-think": ReasoningFormat(forced=True, keeps=True),
    "mimo": ReasoningFormat(switch="enable_thinking", calls="\n<tool_call>"),
    "poolside_v1": ReasoningFormat(switch="enable_thinking", calls="<tool_call>"),
    "step3": ReasoningFormat(forced=True),
    "step3p5": ReasoningFormat(forced=True),
    "nemotron_3": ReasoningFormat(calls="<tool_call>"),
    "longcat": ReasoningFormat(
        "<longcat_think>", "</longcat_think>", switch="enable_thinking", calls="<longcat_tool_call>"
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat(calls="<|tool_call|>", answer=("<response>", "</response>")),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", calls="<|tool_call>", token="<|channel>"),
    "ernie45": ReasoningFormat(forced=True, calls="\n<tool_call>", answer=("<response>", "</response>")),
    "solar_open": ReasoningFormat(
        "<|think|>", "<|end|>", calls="<|tool_calls|>", answer=("<|content|>", "<|end|>"), turn="<|begin|>assistant"
    ),
    "seed_oss": ReasoningFormat(
        "<seed:think>", "</seed:think>", notes=("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")
    ),
    "cohere_command3": _cohere("RESPONSE"),
    "cohere_command4": _cohere("TEXT"),
    "hunyuan": _hunyuan(),
    "hunyuan_a13b": _hunyuan(),
    "hy_v3": _hunyuan(HY3_SUFFIX),
    "gpt-oss": ReasoningFormat(f"{CHANNEL}analysis{MESSAGE}", END, harmony=True),
}
REASONING_PARSERS = tuple(REASONING_FORMATS)


class ReasoningParser:
    """Text up to the end tag (`</think>`) is reasoning, the rest is content.

    Leading start tags are dropped. Leading white space of both parts and trailing white space of the reasoning are
    removed. Without an end tag everything is reasoning. In a stream, a possible tag prefix is held back.

    Args:
        inside: whether the output starts inside the reasoning (the prompt ended with an open `<think>`).
        stream_reasoning: False buffers the reasoning until it is complete.
        form: the tags.
    """

    def __init__(
        self, *, inside: bool, stream_reasoning: bool = True, form: ReasoningFormat = REASONING_FORMATS["deepseek-r1"]
    ) -> None:
        self._start_tag, self._end_tag, self._calls = form.start, form.end, form.calls
        self._inside, self._keeps = inside, form.keeps
        self._stream_reasoning = stream_reasoning
        self._state = "start"
        self._held = ""
        self._gathered: list[str] = []
        self._answer = AnswerTags(*form.answer, form.calls.lstrip(), form.turn) if form.answer else None

    def push(self, text: str) -> tuple[str, str]:
        """Adds text; returns the new reasoning and the new content."""
        self._held += text
        if self._state == "start":
            self._start()
        reasoning = self._reason() if self._state == "reasoning" else ""
        content = ""
        if self._state == "gap":  # white space between the tag and the content
            self._held = self._held.lstrip()
            if self._held:
                self._state = "content"
        if self._state == "content":
            content, self._held = self._held, ""
            content = content if self._answer is None else self._answer.push(content)
        return self._gather(reasoning), content

    def finish(self, beginnings: Beginnings | None = None) -> tuple[str, str]:
        """Text held back; call after the last text. `beginnings`: as of `without_cut_mark`."""
        self._held = without_cut_mark(self._held, (self._start_tag, self._end_tag, self._calls), beginnings)
        reasoning, content = self._rest()
        if self._answer is None:
            return reasoning, content
        return reasoning, self._answer.push(content) + self._answer.finish(beginnings)

    def _rest(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        self._stream_reasoning = True
        if self._state == "start" and self._inside and self._keeps:
            return "", self._start_tag + held.lstrip()
        if self._state == "reasoning" or (self._state == "start" and self._inside):
            return self._gather(held.strip() if self._state == "start" else held.rstrip()), ""
        return self._gather(""), held if self._state == "start" else ""

    def _start(self) -> None:
        text = self._held.lstrip()
        while text.startswith(self._start_tag):
            self._held = text = text[len(self._start_tag) :].lstrip()
            self._inside = True
        if not (self._inside or self._keeps) and text.startswith(self._end_tag):  # no reasoning (MiniMax-M3)
            self._held, self._state = text[len(self._end_tag) :], "gap"
            return
        other = self._calls.lstrip() if self._inside else self._end_tag
        if not text or any(tag != text and tag.startswith(text) for tag in (self._start_tag, other)):
            return
        calls = self._calls.lstrip() if self._inside else ""
        if self._inside and self._keeps:
            self._held, self._state = self._start_tag + text, "content"
        elif self._inside:
            self._held, self._state = text, "gap" if calls and text.startswith(calls) else "reasoning"
        else:
            self._state = "content"

    def _reason(self) -> str:
        at = self._held.find(self._end_tag)
        calls = self._held.find(self._calls) if self._calls else -1
        if at >= 0 or calls >= 0:
            ends_by_tag = calls < 0 or 0 <= at < calls
            end = at if ends_by_tag else calls
            reasoning = self._held[:end].rstrip()
            self._held, self._state = self._held[end + len(self._end_tag) * ends_by_tag :], "gap"
            self._stream_reasoning = True
            return reasoning
        kept = max(overlap(self._held, tag) for tag in (self._end_tag, self._calls) if tag)
        safe = self._held[: len(self._held) - kept].rstrip()
        self._held = self._held[len(safe) :]
        return safe

    def _gather(self, reasoning: str) -> str:
        if self._stream_reasoning:
            if self._gathered:
                reasoning = "".join(self._gathered) + reasoning
                self._gathered.clear()
            return reasoning
        if reasoning:
            self._gathered.append(reasoning)
        return ""


def reasoning_parser(
    form: ReasoningFormat, *, inside: bool, stream_reasoning: bool = True
) -> ReasoningParser | HarmonyReasoning | XtmlReasoning:
    """The parser of a format; arguments as of `ReasoningParser`."""
    if form.xtml:
        return XtmlReasoning(inside=inside, stream_reasoning=stream_reasoning)
    if form.harmony:
        return HarmonyReasoning(stream_reasoning=stream_reasoning)
    return ReasoningParser(inside=inside, stream_reasoning=stream_reasoning, form=form)


def starts_inside(parser: str, prompt: str, template_kwargs: Mapping[str, Any], continued: bool = False) -> bool:
    """Whether the output for a rendered prompt starts inside the reasoning.

    Args:
        continued: the prompt ends with the beginning of an answer; its last tag decides, if it has one.
    """
    form = REASONING_FORMATS[parser]
    if continued and (last := max(prompt.rfind(form.start), prompt.rfind(form.end))) >= 0:
        return prompt.startswith(form.start, last)
    ends = (form.start, form.start + form.notes[0]) if form.notes else form.start
    if prompt.rstrip().endswith(ends):
        return True
    switched = bool(form.switch and template_kwargs.get(form.switch)) and not prompt.rstrip().endswith(form.end)
    return form.forced or switched


def free_reasoning(
    parser: str, prompt: str, template_kwargs: Mapping[str, Any], continued: bool = False
) -> FreeReasoning | None:
    """The reasoning before a constrained output; None if the rendered prompt leaves no place for reasoning. Arguments
    as of `starts_inside`."""
    form = REASONING_FORMATS[parser]
    if form.harmony:
        return FreeReasoning(form.start, form.free_end, inside=True)
    inside = starts_inside(parser, prompt, template_kwargs, continued)
    if not inside and (form.switch or continued or prompt.rstrip().endswith((form.end, xtml.RESPONSE))):
        return None
    return FreeReasoning(form.start, form.free_end if form.xtml else form.end, inside)
