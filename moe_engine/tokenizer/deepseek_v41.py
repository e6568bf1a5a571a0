"""Prompts of DeepSeek V4.1, for checkpoints without a Jinja template: the layout of the vendor's message encoder.

That of DeepSeek V4 but for these: `<｜System｜>` stands before system texts and, in thinking mode, before a line with
the effort as a number, which comes first. A system message after the first turn is a prompt. Names of tags have
a space before them. Tools follow the system text of the first turn. Parts of a content have an empty line between them;
an image is a part.

Source: `encoding/encoding.py` in the checkpoint of DeepSeek V4.1 and SGLang's `encoding_dsv41.py`, for the layout;
the texts that explain the tools and the effort, and the numbers of efforts, are read from the checkpoint's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_engine.errors import InputError
from moe_engine.tokenizer.deepseek_messages import BOS, EOS, vendor_texts
from moe_engine.tokenizer.deepseek_v4 import OWN_TOOLS_TEXT, DeepseekV4Chat
from moe_engine.tokenizer.tool_calls.tagged import DSML

SYSTEM = "<｜System｜>"
IMAGE = "<｜deepseek_image｜>"
_ENCODER_FILE = Path("encoding", "encoding.py")
_TOOLS_NAME, _EFFORT_NAME = "TOOLS_TEMPLATE", "REASONING_EFFORT_TEMPLATE"
_EFFORTS_NAME, _DEFAULT_NAME = "REASONING_EFFORT_MAPPINGS", "DEFAULT_REASONING_EFFORT"
_BUDGET = "{budget}"
_MOST = 100
"""The highest effort."""
_NAMES = {
    "{tc_block_name}": " calls", "{tool_call_tag_name}": " invoke", "{tool_parameter_tag_name}": " parameter",
}  # fmt: skip
"""Placeholders of the vendor's text for the names of tags."""
# for folders without the vendor's file: the same facts in other words
_OWN_TOOLS_TEXT = OWN_TOOLS_TEXT.replace("}tool_calls", "}calls").replace("{dsml_token}", "{dsml_token} ")
_OWN_EFFORT = f"Reasoning Effort: {_BUDGET} (of {_MOST})\n\n"
_OWN_EFFORTS = {"low": 50, "high": 75, "max": 100}
_OWN_DEFAULT = "high"


@dataclass(frozen=True)
class DeepseekV41Chat(DeepseekV4Chat):
    """
    Args:
        efforts: numbers from 1 to 100, by the name of an effort; the template argument `reasoning_effort` is a name or
        a number. Other names are `default_effort`.
        effort_text: with the placeholder `{budget}`.
    """

    tools_text: str = _OWN_TOOLS_TEXT
    efforts: Mapping[str, Any] = field(default_factory=lambda: _OWN_EFFORTS)
    effort_text: str = _OWN_EFFORT
    default_effort: str = _OWN_DEFAULT
    reads_parts = True
    model = "DeepSeek V4.1"
    parsers = ("deepseek-v41", "deepseekv41")
    calls_tag = "calls"
    mark = f"{DSML} "
    system_asks = True

    def turns(
        self, messages: Sequence[Mapping[str, Any]], thinking: bool, has_tools: bool
    ) -> tuple[list[dict[str, Any]], int]:
        if has_tools and (not messages or messages[0].get("role") not in ("system", "developer")):
            messages = [{"role": "system", "content": ""}, *messages]
        return super().turns([_joined(message) for message in messages], thinking, has_tools)

    def begin(self, turns: Sequence[Mapping[str, Any]], thinking: bool, kwargs: Mapping[str, Any] | None) -> str:
        effort = self._effort((kwargs or {}).get("reasoning_effort")) if thinking else ""
        return f"{SYSTEM}{effort}" if effort or (turns and turns[0]["role"] == "system") else ""

    def prompt(self, turns: Sequence[Mapping[str, Any]], i: int) -> tuple[str, str | None]:
        text, opening = super().prompt(turns, i)
        return (f"{SYSTEM}{turns[i]['content']}" if turns[i]["role"] == "system" else text), opening

    def _effort(self, asked: Any) -> str:
        if isinstance(asked, int) and not isinstance(asked, bool):
            if not 1 <= asked <= _MOST:
                where = "chat_template_kwargs.reasoning_effort"
                raise InputError.at(where, f"{asked} is not from 1 to {_MOST}")
            return self.effort_text.replace(_BUDGET, str(asked))
        budget = self.efforts.get(str(asked), self.efforts.get(self.default_effort))
        return "" if budget is None else self.effort_text.replace(_BUDGET, str(budget))


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with the parts of its content as one text, images as placeholders."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    return {**message, "content": "\n\n".join(IMAGE if part["type"] == "image" else part["text"] for part in parts)}


def load_deepseek_v41(folder: Path | None, special_tokens: Mapping[str, str]) -> DeepseekV41Chat:
    """The encoder for a checkpoint's folder, with the vendor's texts if the folder has them.

    Raises:
        ConfigError: the vendor's file cannot be read.
    """
    bos, eos = special_tokens.get("bos_token", BOS), special_tokens.get("eos_token", EOS)
    texts = vendor_texts(folder, _ENCODER_FILE, _TOOLS_NAME, DeepseekV41Chat.model)
    if texts is None:
        return DeepseekV41Chat(bos=bos, eos=eos)
    tools = texts[_TOOLS_NAME]
    for placeholder, name in _NAMES.items():
        tools = tools.replace(placeholder, name)
    efforts, text, default = (texts.get(name) for name in (_EFFORTS_NAME, _EFFORT_NAME, _DEFAULT_NAME))
    if isinstance(efforts, dict) and isinstance(text, str) and isinstance(default, str):
        return DeepseekV41Chat(tools, bos, eos, efforts, text, default)
    return DeepseekV41Chat(tools, bos, eos)
