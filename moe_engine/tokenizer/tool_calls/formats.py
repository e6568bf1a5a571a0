"""Formats of tool calls by the name of `--tool-call-parser`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait
from moe_engine.tokenizer.tool_calls.named import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    SEPARATOR,
)
from moe_engine.tokenizer.tool_calls.objects import (
    LLAMA_BEGIN,
    MISTRAL_ARGUMENTS,
    MISTRAL_BEGIN,
    MISTRAL_ID,
    QWEN_BEGIN,
    QWEN_END,
    parse_llama,
    parse_mistral,
    parse_qwen,
)
from moe_engine.tokenizer.tool_calls.pythonic import BEGIN as PYTHON_BEGIN
from moe_engine.tokenizer.tool_calls.pythonic import END as PYTHON_END
from moe_engine.tokenizer.tool_calls.pythonic import parse_pythonic
from moe_engine.tokenizer.tool_calls.tagged import DSML, GLM45, MINIMAX_M2, QWEN3_CODER, dsml

DEEPSEEK_MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
KIMI_MARKERS = (KIMI_K2.begin, KIMI_K2.end, KIMI_K2.call_begin, KIMI_K2.after_name, KIMI_K2.call_end)
QWEN_MARKERS = (QWEN_BEGIN, QWEN_END)


@dataclass(frozen=True)
class CallSyntax:
    """Text around calls, for grammars: `begin` (a special token of many models), `after_begin`, calls separated by
    `between`, `end`. A call is text around its arguments. `numbered`: its name ends with a colon and a number."""

    begin: str
    after_begin: str
    end: str
    between: str
    before_name: str
    after_name: str
    after_arguments: str
    numbered: bool = False

    def before_arguments(self, name: str) -> str:
        number = ":0" if self.numbered else ""
        return f"{self.before_name}{name}{number}{self.after_name}"


@dataclass(frozen=True)
class ToolFormat:
    """
    `markers`: texts that may be special tokens, which outputs must keep. `syntax`: None if no grammar enforces calls of
    the format.
    """

    parse: Callable[[CallReader], Wait[None]]
    markers: tuple[str, ...] = ()
    syntax: CallSyntax | None = None


def _object_syntax(begin: str, after_begin: str, end: str, between: str, arguments: str, after: str = "") -> CallSyntax:
    return CallSyntax(begin, after_begin, end, between, '{"name": "', f'", "{arguments}": ', "}" + after)


_GLM_MARKERS = (*QWEN_MARKERS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_QWEN = ToolFormat(
    parse_qwen,
    QWEN_MARKERS,
    _object_syntax(QWEN_BEGIN, "\n", "", f"\n{QWEN_BEGIN}\n", "arguments", f"\n{QWEN_END}"),
)
_GLM = ToolFormat(GLM45.parse, _GLM_MARKERS)
TOOL_FORMATS = {
    "deepseekv3": ToolFormat(
        DEEPSEEK_V3.parse,
        DEEPSEEK_MARKERS,
        CallSyntax(
            CALLS_BEGIN, "", CALLS_END, "\n", f"{CALL_BEGIN}function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}"
        ),
    ),
    "deepseekv31": ToolFormat(
        DEEPSEEK_V31.parse,
        DEEPSEEK_MARKERS,
        CallSyntax(CALLS_BEGIN, "", CALLS_END, "", CALL_BEGIN, SEPARATOR, CALL_END),
    ),
    "deepseekv32": ToolFormat(dsml("function_calls").parse, (DSML,)),
    "deepseekv4": ToolFormat(dsml("tool_calls").parse, (DSML,)),
    "qwen": _QWEN,
    "qwen25": _QWEN,
    "hermes": _QWEN,
    "qwen3_coder": ToolFormat(QWEN3_CODER.parse, QWEN_MARKERS),
    "llama3": ToolFormat(parse_llama, (LLAMA_BEGIN,), _object_syntax(LLAMA_BEGIN, "", "", "; ", "parameters")),
    "mistral": ToolFormat(
        parse_mistral,
        (MISTRAL_BEGIN, MISTRAL_ARGUMENTS, MISTRAL_ID),
        _object_syntax(MISTRAL_BEGIN, " [", "]", ", ", "arguments"),
    ),
    "kimi_k2": ToolFormat(
        KIMI_K2.parse,
        KIMI_MARKERS,
        CallSyntax(
            KIMI_K2.begin,
            "",
            KIMI_K2.end,
            "",
            f"{KIMI_K2.call_begin}functions.",
            KIMI_K2.after_name,
            KIMI_K2.call_end,
            numbered=True,
        ),
    ),
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": _GLM,
    "minimax-m2": ToolFormat(MINIMAX_M2.parse, (MINIMAX_M2.begin, MINIMAX_M2.end)),
    "pythonic": ToolFormat(parse_pythonic, (PYTHON_BEGIN, PYTHON_END)),
}
