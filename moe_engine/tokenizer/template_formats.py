"""Formats of reasoning and tool calls by the marks in a chat template (`--reasoning-parser auto`,
`--tool-call-parser auto`)."""

from __future__ import annotations

import re

from moe_engine.tokenizer.reasoning import THINK_END, THINK_START

_TOOLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt-oss", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>call:",)),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("solar_open", ("<|tool_call:begin|>",)),
    ("minimax-m3", ("]<]minimax[>[", "<tool_call>")),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("deepseekv41", ("｜DSML｜ calls",)),
    ("deepseekv4", ("｜DSML｜", "<tool_result>")),
    ("deepseekv32", ("｜DSML｜",)),
    ("deepseekv3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseekv31", ("<｜tool▁calls▁begin｜>",)),
    ("hunyuan", ("<tool_sep", "<arg_key")),
    ("minimax_m1", ("<tool_calls>", "<beginning_of_sentence>")),
    ("hunyuan_a13b", ("<tool_calls>",)),
    ("dots", ("<dots_function_call>",)),
    ("glm", ("<arg_key>",)),
    ("glm4", ("# 可用工具", "'metadata'")),
    ("glm4", ("# 可用工具", '"metadata"')),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("longcat", ("<longcat_tool_call>",)),
    ("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("phi4_mini_json", ("<|tool_call|>", "<|/tool_call|>")),
    ("phi4_mini_json", ("functools[",)),
    ("granite", ("<|tool_call|>",)),
    ("granite", ("<tool_call> followed by a JSON list",)),
    ("olmo3", ("<function_calls>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("keep_past_thinking", "List of tools: [")),
    ("ernie45", ("<tool_call>", "<response>")),
    ("qwen25", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
)
"""Parser and its marks. The first whose marks are all in the template: some have the marks of a later one too."""
_OF_TOOLS = {
    "gpt-oss": "gpt-oss", "kimi_k2": "kimi_k2", "minimax-m2": "minimax", "glm": "glm45", "ernie45": "ernie45",
    "hunyuan": "hunyuan", "hunyuan_a13b": "hunyuan_a13b", "lfm2": "qwen3",
}  # fmt: skip
_SWITCH = re.compile(r"\bthinking\b")


def tool_format(template: str) -> str | None:
    """The `--tool-call-parser` of the calls that a template writes; None: it writes none in a known format."""
    return next((name for name, marks in _TOOLS if all(mark in template for mark in marks)), None)


def reasoning_format(template: str) -> str | None:
    """The `--reasoning-parser` of the answers to a template's prompts; None: they have no reasoning in a known
    format."""
    tools = tool_format(template)
    if tools in ("gpt-oss", "kimi_k3", "solar_open", "cohere_command3", "cohere_command4"):
        return tools
    if tools == "gemma4":
        return tools if "<|channel>thought" in template else None
    if tools == "granite":
        return tools if "<response>" in template else None
    if tools == "minimax-m3":
        return tools if "</mm:think>" in template else None
    if "</longcat_think>" in template:
        return "longcat"
    if "</seed:think>" in template:
        return "seed_oss"
    if "◁think▷" in template:
        return "kimi"
    if "[THINK]" in template and "[/THINK]" in template:
        return "mistral"
    if THINK_END not in template and not (tools == "hunyuan" and "</think" in template):
        return None
    if tools in _OF_TOOLS:
        return _OF_TOOLS[tools]
    if "enable_thinking" in template:
        return "qwen3"
    if tools is not None and tools.startswith("deepseek") and _SWITCH.search(template):
        return {"deepseekv4": "deepseek-v4", "deepseekv41": "deepseek-v41"}.get(tools, "deepseek-v3")
    opens = THINK_START in template[template.rfind("add_generation_prompt") :]
    if not opens:
        return None
    return "qwen3-thinking" if tools in ("qwen25", "qwen3_coder") else "deepseek-r1"
