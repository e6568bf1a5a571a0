"""Formats of tool calls by the name of `--tool-call-parser`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_engine.tokenizer import xtml
from moe_engine.tokenizer.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from moe_engine.tokenizer.harmony import MARKERS as HARMONY_MARKERS
from moe_engine.tokenizer.reasoning import HY3_SUFFIX
from moe_engine.tokenizer.tool_calls import nested
from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait
from moe_engine.tokenizer.tool_calls.gemma import BEGIN as GEMMA_BEGIN
from moe_engine.tokenizer.tool_calls.gemma import CALL as GEMMA_CALL
from moe_engine.tokenizer.tool_calls.gemma import END as GEMMA_END
from moe_engine.tokenizer.tool_calls.gemma import QUOTE, parse_gemma
from moe_engine.tokenizer.tool_calls.harmony import parse_harmony
from moe_engine.tokenizer.tool_calls.name_lines import TURN, parse_name_lines
from moe_engine.tokenizer.tool_calls.named import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    SEPARATOR,
    SOLAR_OPEN,
)
from moe_engine.tokenizer.tool_calls.objects import (
    ACTION_BEGIN,
    ACTION_END,
    LIST_BEGIN,
    LLAMA_BEGIN,
    MINIMAX_BEGIN,
    MINIMAX_END,
    MISTRAL_ARGUMENTS,
    MISTRAL_BEGIN,
    MISTRAL_ID,
    NEMOTRON_BEGIN,
    NEMOTRON_END,
    PHI_BEGIN,
    PHI_END,
    QWEN_BEGIN,
    QWEN_END,
    parse_cohere,
    parse_granite,
    parse_llama,
    parse_minimax_m1,
    parse_mistral,
    parse_nemotron,
    parse_qwen,
)
from moe_engine.tokenizer.tool_calls.pythonic import BEGIN as PYTHON_BEGIN
from moe_engine.tokenizer.tool_calls.pythonic import END as PYTHON_END
from moe_engine.tokenizer.tool_calls.pythonic import (
    LINES_BEGIN,
    LINES_END,
    TAGGED_BEGIN,
    TAGGED_END,
    parse_lines,
    parse_pythonic,
    parse_tagged_list,
)
from moe_engine.tokenizer.tool_calls.tagged import (
    DOTS,
    DSML,
    GLM45,
    KIMI_K3,
    LONGCAT,
    MIMO,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    dsml,
    hunyuan,
)

DEEPSEEK_MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
KIMI_MARKERS = (KIMI_K2.begin, KIMI_K2.end, KIMI_K2.call_begin, KIMI_K2.after_name, KIMI_K2.call_end)
SOLAR_MARKERS = (
    SOLAR_OPEN.begin, SOLAR_OPEN.end, SOLAR_OPEN.call_begin, SOLAR_OPEN.after_id, SOLAR_OPEN.after_name,
    SOLAR_OPEN.call_end,
)  # fmt: skip
QWEN_MARKERS = (QWEN_BEGIN, QWEN_END)


NAME = "\0name"
"""Stands for the name of a parameter."""


@dataclass(frozen=True)
class ParameterSyntax:
    """Arguments written one by one: `before`, name, `after_name`, value, `after`; `between` separates them.

    `after` may contain `NAME`, which is the parameter's name. Values are JSON; plain texts (`is_plain_text`) follow
    `before_text` unchanged, with `after_text` before `after`; None: they are JSON too. `value_end`: end of a text, as
    read by the parser. `trims`: the parser removes line ends at a text's beginning and end. `reserved`: characters
    that names do not contain.
    """

    before: str
    after_name: str
    before_text: str | None
    after: str
    value_end: str = ""
    between: str = ""
    trims: bool = False
    after_text: str = ""
    reserved: str = '<>"'

    def end_of(self, name: str, is_text: bool = False) -> str:
        """The text after the value of one parameter."""
        return (self.after_text if is_text else "") + self.after.replace(NAME, name)


@dataclass(frozen=True)
class CallSyntax:
    """Text around calls, for grammars: `begin` (a special token of many models), `after_begin`, calls separated by
    `between`, `end`. A call is text around its arguments, a JSON object or `parameters`. `numbered`: its name ends with
    a colon and a number."""

    begin: str
    after_begin: str
    end: str
    between: str
    before_name: str
    after_name: str
    after_arguments: str
    numbered: bool = False
    parameters: ParameterSyntax | None = None
    also_begins: str = ""
    """Another text that the parser reads as the beginning of a call: free text must not contain it."""

    def before_arguments(self, name: str) -> str:
        number = ":0" if self.numbered else ""
        return f"{self.before_name}{name}{number}{self.after_name}"


@dataclass(frozen=True)
class ToolFormat:
    """
    `markers`: texts that may be special tokens, which outputs must keep. `syntax`: of enforced calls.
    `enforces_strict`: calls of strict functions can be enforced even if the output may be text. `reasoning_end`: end
    of the reasoning before enforced calls, if it differs from that before text. `counts_ids`: ids of calls are numbers
    in the whole conversation (`counted_ids.py`).
    """

    parse: Callable[[CallReader], Wait[None]]
    markers: tuple[str, ...]
    syntax: CallSyntax
    enforces_strict: bool = True
    reasoning_end: str = ""
    counts_ids: bool = False


def _object_syntax(begin: str, after_begin: str, end: str, between: str, arguments: str, after: str = "") -> CallSyntax:
    return CallSyntax(begin, after_begin, end, between, '{"name": "', f'", "{arguments}": ', "}" + after)


_GLM_MARKERS = (*QWEN_MARKERS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_QWEN = ToolFormat(
    parse_qwen,
    QWEN_MARKERS,
    _object_syntax(QWEN_BEGIN, "\n", "", f"\n{QWEN_BEGIN}\n", "arguments", f"\n{QWEN_END}"),
)
_LONGCAT = ToolFormat(
    LONGCAT.parse,
    (LONGCAT.begin, LONGCAT.end, LONGCAT.key_begin, LONGCAT.key_end, LONGCAT.value_begin, LONGCAT.value_end),
    _object_syntax(LONGCAT.begin, "\n", "", f"\n{LONGCAT.begin}\n", "arguments", f"\n{LONGCAT.end}"),
)
_COHERE = ToolFormat(
    parse_cohere,
    (ACTION_BEGIN, ACTION_END),
    CallSyntax(
        ACTION_BEGIN, "[\n    ", f"\n]{ACTION_END}", ",\n    ", '{"tool_call_id": "0", "tool_name": "',
        '", "parameters": ', "}",
    ),
)  # fmt: skip
_GLM = ToolFormat(
    GLM45.parse,
    _GLM_MARKERS,
    CallSyntax(
        QWEN_BEGIN, "", "", f"\n{QWEN_BEGIN}", "", "\n", QWEN_END,
        parameters=ParameterSyntax(
            "<arg_key>", "</arg_key>\n<arg_value>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_value>"
        ),
    ),
)  # fmt: skip
_QWEN3_CODER = ToolFormat(
    QWEN3_CODER.parse,
    QWEN_MARKERS,
    CallSyntax(
        QWEN_BEGIN, "\n", "", f"\n{QWEN_BEGIN}\n", "<function=", ">\n", f"</function>\n{QWEN_END}",
        parameters=ParameterSyntax("<parameter=", ">\n", ">\n", "\n</parameter>\n", "</parameter>"),
    ),
)  # fmt: skip
_MIMO = ToolFormat(
    MIMO.parse,
    QWEN_MARKERS,
    replace(
        _QWEN3_CODER.syntax,
        parameters=ParameterSyntax("<parameter=", ">", ">", "</parameter>\n", "</parameter>"),
    ),
)
_SEED_OSS = ToolFormat(
    SEED_OSS.parse,
    (SEED_OSS.begin, SEED_OSS.end),
    replace(
        _MIMO.syntax,
        begin=SEED_OSS.begin,
        between=f"\n{SEED_OSS.begin}\n",
        after_arguments=f"</function>\n{SEED_OSS.end}",
    ),
)
_MINIMAX_M1 = ToolFormat(
    parse_minimax_m1,
    (MINIMAX_BEGIN, MINIMAX_END),
    _object_syntax(MINIMAX_BEGIN, "\n", f"\n{MINIMAX_END}", "\n", "arguments"),
)
_MINIMAX_M2 = ToolFormat(
    MINIMAX_M2.parse,
    (MINIMAX_M2.begin, MINIMAX_M2.end),
    CallSyntax(
        MINIMAX_M2.begin, "\n", MINIMAX_M2.end, "", '<invoke name="', '">\n', "</invoke>\n",
        also_begins='<invoke name="',
        parameters=ParameterSyntax(
            '<parameter name="', '">', '">', "</parameter>\n", "</parameter>", trims=True
        ),
    ),
)  # fmt: skip
_MINIMAX_M3 = ToolFormat(
    nested.parse_nested,
    (nested.MARK, nested.BEGIN, nested.END),
    CallSyntax(
        nested.BEGIN, "\n", nested.END, "", nested.INVOKE, nested.NAME_END, f"{nested.INVOKE_END}\n",
        also_begins=nested.INVOKE,
        parameters=ParameterSyntax(f"{nested.MARK}<", ">", ">", f"{nested.MARK}</{NAME}>", nested.MARK),
    ),
)  # fmt: skip
_GEMMA4 = ToolFormat(
    parse_gemma,
    (GEMMA_BEGIN, GEMMA_END, QUOTE),
    CallSyntax(
        GEMMA_BEGIN, "", "", GEMMA_BEGIN, GEMMA_CALL, "{", "}" + GEMMA_END,
        parameters=ParameterSyntax(
            "", ":", f":{QUOTE}", "", QUOTE, between=",", after_text=QUOTE, reserved='<>":,{}[]'
        ),
    ),
)  # fmt: skip
_PYTHONIC = ToolFormat(
    parse_pythonic,
    (PYTHON_BEGIN, PYTHON_END),
    CallSyntax("[", "", "]", ", ", "", "(", ")", parameters=ParameterSyntax("", "=", None, "", between=", ")),
)
_OLMO3 = ToolFormat(
    parse_lines,
    (LINES_BEGIN, LINES_END),
    replace(_PYTHONIC.syntax, begin=LINES_BEGIN, after_begin="\n", end=f"\n{LINES_END}", between="\n"),
)
_LFM2 = ToolFormat(
    parse_tagged_list,
    (TAGGED_BEGIN, TAGGED_END),
    replace(_PYTHONIC.syntax, begin=TAGGED_BEGIN, after_begin="[", end=f"]{TAGGED_END}"),
)


def _dsml(block: str, mark: str = DSML) -> ToolFormat:
    syntax = CallSyntax(
        f"<{mark}{block}>", "\n", f"</{mark}{block}>", "", f'<{mark}invoke name="', '">\n', f"</{mark}invoke>\n",
        also_begins=f'<{mark}invoke name="',
        parameters=ParameterSyntax(
            f'<{mark}parameter name="', '" string="false">', '" string="true">', f"</{mark}parameter>\n",
            f"</{mark}parameter>",
        ),
    )  # fmt: skip
    return ToolFormat(dsml(block, mark).parse, (DSML,), syntax)


def _kimi_k3() -> ToolFormat:
    form = KIMI_K3
    parameters = ParameterSyntax(
        form.key_begin, '" type="object"' + xtml.SEP, '" type="string"' + xtml.SEP, form.value_end, form.value_end
    )
    syntax = CallSyntax(
        form.begin, "", form.end, "", form.call_begin, '" index="1"' + xtml.SEP, form.call_end, parameters=parameters,
        also_begins=form.call_begin,
    )  # fmt: skip
    return ToolFormat(form.parse, xtml.MARKERS, syntax)


def _hunyuan(suffix: str = "", *, as_json: bool = False) -> ToolFormat:
    """Args: as_json: enforced calls are written as by Hunyuan-A13B. Both are read."""
    form = hunyuan(suffix)
    tags = (
        form.begin, form.end, form.call_begin, form.call_end, form.name_ends[0], form.key_begin, form.key_end,
        form.value_begin, form.value_end,
    )  # fmt: skip
    if as_json:
        return ToolFormat(form.parse, tags, _object_syntax(form.begin, "[", f"]{form.end}", ", ", "arguments"))
    before = f"{form.key_end}\n{form.value_begin}"
    parameters = ParameterSyntax(form.key_begin, before, before, f"{form.value_end}\n", form.value_end)
    syntax = CallSyntax(
        form.begin, "\n", f"\n{form.end}", "\n", form.call_begin, f"{form.name_ends[0]}\n", form.call_end,
        parameters=parameters, also_begins=form.call_begin,
    )  # fmt: skip
    return ToolFormat(form.parse, tags, syntax)


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
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "deepseekv41": _dsml("calls", f"{DSML} "),
    "qwen": _QWEN,
    "qwen25": _QWEN,
    "hermes": _QWEN,
    "longcat": _LONGCAT,
    "qwen3_coder": _QWEN3_CODER,
    "step3p5": _QWEN3_CODER,
    "mimo": _MIMO,
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
        counts_ids=True,
    ),
    "kimi_k3": _kimi_k3(),
    "glm": _GLM,
    "glm4": ToolFormat(parse_name_lines, (TURN,), CallSyntax("", "", "", TURN, "", "\n", ""), enforces_strict=False),
    "glm45": _GLM,
    "glm47": _GLM,
    "poolside_v1": _GLM,
    "ling3": _GLM,
    "seed_oss": _SEED_OSS,
    "minimax_m1": _MINIMAX_M1,
    "minimax-m2": _MINIMAX_M2,
    "minimax-m3": _MINIMAX_M3,
    "dots": ToolFormat(DOTS.parse, (DOTS.begin, DOTS.end), replace(_MINIMAX_M2.syntax, begin=DOTS.begin, end=DOTS.end)),
    "solar_open": ToolFormat(
        SOLAR_OPEN.parse,
        SOLAR_MARKERS,
        CallSyntax(
            SOLAR_OPEN.begin,
            "",
            "",
            "",
            f"{SOLAR_OPEN.call_begin}0{SOLAR_OPEN.after_id}",
            SOLAR_OPEN.after_name,
            SOLAR_OPEN.call_end,
        ),
        reasoning_end="<|end|><|begin|>assistant",
    ),
    "ernie45": _QWEN,
    "hunyuan": _hunyuan(),
    "hunyuan_a13b": _hunyuan(as_json=True),
    "hy_v3": _hunyuan(HY3_SUFFIX),
    "gpt-oss": ToolFormat(
        parse_harmony,
        HARMONY_MARKERS,
        CallSyntax(
            CHANNEL,
            "",
            "",
            f"{END}{START}assistant{CHANNEL}",
            "commentary to=functions.",
            f" {CONSTRAIN}json{MESSAGE}",
            "",
        ),
        enforces_strict=False,
        reasoning_end=f"{END}{START}assistant",
    ),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "pythonic": _PYTHONIC,
    "gemma4": _GEMMA4,
    "olmo3": _OLMO3,
    "lfm2": _LFM2,
    "granite": ToolFormat(
        parse_granite, (LIST_BEGIN, *QWEN_MARKERS), _object_syntax(LIST_BEGIN, "[", "]", ", ", "arguments")
    ),
    "nemotron_json": ToolFormat(
        parse_nemotron,
        (NEMOTRON_BEGIN, NEMOTRON_END),
        _object_syntax(NEMOTRON_BEGIN, "[", f"]{NEMOTRON_END}", ", ", "arguments"),
    ),
    "phi4_mini_json": ToolFormat(
        parse_granite, (LIST_BEGIN, PHI_END), _object_syntax(f"{PHI_BEGIN}[", "", "]", ", ", "arguments")
    ),
}
