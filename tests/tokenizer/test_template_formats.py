"""Parsers by the marks of a chat template: the shapes of the published templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.planning.flags.template_parsers import with_template_parsers
from moe_engine.tokenizer.reasoning import REASONING_FORMATS
from moe_engine.tokenizer.template_formats import reasoning_format, tool_format
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS
from tests.models.byte_tokenizer import write_tokenizer

ASK = "{%- if add_generation_prompt %}"
BACK = "{{ content.split('</think>')[-1] }}"
"""How templates leave earlier reasoning out."""
SWITCHED = BACK + ASK + "{%- if enable_thinking is false %}<think>\n\n</think>\n\n{%- endif %}{%- endif %}"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
HERMES = '<tool_call>\n{"name": {{ name }}}</tool_call>'
CODER = "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>"
TEMPLATES: dict[str, tuple[str, str | None, str | None]] = {
    "DeepSeek V3": (DEEPSEEK + "function\n```json", None, "deepseekv3"),
    "DeepSeek R1": (DEEPSEEK + "\n```json" + BACK + ASK + "<｜Assistant｜><think>\\n", "deepseek-r1", "deepseekv3"),
    "DeepSeek V3.1": (
        BACK + DEEPSEEK + ASK + "{%- if thinking %}<think>{% else %}</think>",
        "deepseek-v3",
        "deepseekv31",
    ),
    "DeepSeek V4": (
        BACK + "<｜DSML｜tool_calls><tool_result>" + ASK + "{%- if thinking %}<think>{% else %}</think>",
        "deepseek-v4",
        "deepseekv4",
    ),
    "DeepSeek V4.1": (
        BACK + "<｜DSML｜ calls><tool_result>" + ASK + "{%- if thinking %}<think>{% else %}</think>",
        "deepseek-v41",
        "deepseekv41",
    ),
    "Kimi K2": ("<|tool_calls_section_begin|>", None, "kimi_k2"),
    "Kimi K2 Thinking": (BACK + "<|tool_calls_section_begin|>" + ASK + "<think>", "kimi_k2", "kimi_k2"),
    "Qwen2.5": (HERMES + ASK + "<|im_start|>assistant\n", None, "qwen25"),
    "Qwen3": (HERMES + SWITCHED, "qwen3", "qwen25"),
    "Qwen3 Thinking": (HERMES + BACK + ASK + "<|im_start|>assistant\n<think>\n", "qwen3-thinking", "qwen25"),
    "Qwen3-Coder": (CODER + ASK, None, "qwen3_coder"),
    "Qwen3.5": (CODER + SWITCHED, "qwen3", "qwen3_coder"),
    "GLM-4.5": ("<tool_call>{{ name }}\n<arg_key>" + SWITCHED, "glm45", "glm"),
    "LongCat-Flash-Chat": ("<longcat_tool_call>\n" + ASK + " ASSISTANT:", None, "longcat"),
    "LongCat-Flash-Thinking": (
        "<longcat_tool_call><longcat_arg_key>{{ past.split('</longcat_think>') }}" + ASK + "<longcat_think>\n",
        "longcat",
        "longcat",
    ),
    "MiniMax-M1": (
        '<beginning_of_sentence><tool_calls>\n{"name": <tool-name>, "arguments": <args-json-object>}' + ASK,
        None,
        "minimax_m1",
    ),
    "Seed-OSS": (
        "{%- set think_end_token = '</seed:think>' -%}<seed:tool_call>\n<function=f>\n<parameter=a>x</parameter>" + ASK,
        "seed_oss",
        "seed_oss",
    ),
    "MiniMax-M2": ("<minimax:tool_call>" + BACK + ASK + "<think>", "minimax", "minimax-m2"),
    "MiniMax-M3": (
        "{%- set ns = ']<]minimax[>[' -%}{{ ns ~ '<tool_call>' }}<mm:think></mm:think>" + ASK,
        "minimax-m3",
        "minimax-m3",
    ),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "gpt-oss", "gpt-oss"),
    "Mistral": ("[AVAILABLE_TOOLS][TOOL_CALLS]", None, "mistral"),
    "Ministral 3 Reasoning": ("[AVAILABLE_TOOLS][THINK]{{ block }}[/THINK][TOOL_CALLS]", "mistral", "mistral"),
    "ERNIE 4.5 Thinking": (HERMES + "<response>" + BACK + ASK + "<think>\n", "ernie45", "ernie45"),
    "Hunyuan-A13B": ("<tool_calls>[{{ calls }}]</tool_calls>" + BACK + "<answer>", "hunyuan_a13b", "hunyuan_a13b"),
    "Hy3": ("{{ '<tool_sep' + s + '>' }}{{ '<arg_key' + s + '>' }}{{ '</think' + s + '>' }}", "hunyuan", "hunyuan"),
    "Solar Open": ("<|think|><|end|><|tool_calls|><|tool_call:begin|>", "solar_open", "solar_open"),
    "dots": ("<dots_function_call>", None, "dots"),
    "Llama 3.1": ("<|start_header_id|><|python_tag|>", None, "llama3"),
    "Llama 3.2": ('<|start_header_id|>{"name": function, "parameters": {}}', None, "llama3"),
    "Granite 3.1": (
        "<|start_of_role|>respond with <tool_call> followed by a JSON list of tools used" + ASK,
        None,
        "granite",
    ),
    "Granite 3.3": (
        "respond only with <|tool_call|> followed by a JSON list<think></think><response></response>" + ASK,
        "granite",
        "granite",
    ),
    "Command A": ("<|START_THINKING|><|START_ACTION|>[]<|END_ACTION|><|START_RESPONSE|>", *["cohere_command3"] * 2),
    "Command A+": (
        "<|START_THINKING|>{{ plan }}<|END_THINKING|><|START_ACTION|>[]<|END_ACTION|><|START_TEXT|>" + ASK,
        "cohere_command4",
        "cohere_command4",
    ),
    "Nemotron Nano 2": (
        "<AVAILABLE_TOOLS><TOOLCALL>[]</TOOLCALL>" + BACK + ASK + "<think>",
        "deepseek-r1",
        "nemotron_json",
    ),
    "Phi-4-mini": ("functools[{{ calls }}]", None, "phi4_mini_json"),
    "OLMo 3": ("<function_calls>\n{{ calls }}</function_calls>" + ASK, None, "olmo3"),
    "OLMo 3 Think": ("<function_calls>{{ calls }}" + BACK + ASK + "<think>", "deepseek-r1", "olmo3"),
    "GLM-4-0414": ('# 可用工具 {{ message.get("metadata", "") }}<|observation|>' + ASK, None, "glm4"),
    "LFM2": ('"List of tools: <|tool_list_start|>["{{ tools }}<|tool_list_end|>' + ASK, None, "lfm2"),
    "LFM2.5": (
        'keep_past_thinking = keep_past_thinking "List of tools: [" content.split("</think>")[-1]' + ASK,
        "qwen3",
        "lfm2",
    ),
    "LFM2.5 with calls": ("<|tool_call_start|>[{{ calls }}]<|tool_call_end|>" + ASK, None, "lfm2"),
    "Gemma 4": ("<|tool_call>call:{{ name }}<|channel>thought\n<channel|>" + ASK, "gemma4", "gemma4"),
    "plain": ("{{ messages }}", None, None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_of_published_templates(name: str) -> None:
    template, reasoning, tools = TEMPLATES[name]
    assert (reasoning_format(template), tool_format(template)) == (reasoning, tools)
    assert {reasoning} <= {None, *REASONING_FORMATS} and {tools} <= {None, *TOOL_FORMATS}


@pytest.mark.parametrize(
    ("template", "flags", "expected"),
    [
        (HERMES, {}, (None, "qwen25")),
        (HERMES, {"chat_template": "deepseek-v32"}, ("deepseek-v3", "deepseekv32")),
        (HERMES, {"chat_template": "deepseek-v4"}, ("deepseek-v4", "deepseekv4")),
        (HERMES, {"chat_template": "deepseek-v41"}, ("deepseek-v41", "deepseekv41")),
        (HERMES, {"skip_tokenizer_init": True}, (None, None)),
        (None, {}, (None, None)),
        (None, {"reasoning_parser": "glm45"}, ("glm45", None)),
        (TEMPLATES["Hy3"][0], {}, ("hunyuan", "hunyuan")),
        (None, {"reasoning_parser": "hy_v3", "tool_call_parser": "hunyuan"}, ("hunyuan", "hunyuan")),
    ],
)
def test_auto(
    template: str | None, flags: dict[str, Any], expected: tuple[str | None, str | None], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config | ({"chat_template": template} if template else {})))
    asked = {"reasoning_parser": "auto", "tool_call_parser": "auto"} | flags
    args = EngineArgs.from_kwargs(model_path=str(tmp_path), **asked)
    found, remarks = with_template_parsers(args, tmp_path)
    assert (found.server.reasoning_parser, found.server.tool_call_parser) == expected
    changed = [value for value, name in zip(asked.values(), expected) if value != name]
    assert len(remarks) == len(changed) and all(f"{value}:" in remark for value, remark in zip(changed, remarks))
    assert with_template_parsers(found, tmp_path) == (found, ())


@pytest.mark.parametrize("asked", ["auto", "hunyuan", "hy_v3"])
def test_hy3_by_its_vocabulary(asked: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "tokenizer.json"
    text = json.loads(file.read_text())
    added = {"content": "<tool_calls:opensource>", "id": 400, "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    text["added_tokens"].append(added)
    file.write_text(json.dumps(text))
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATES["Hy3"][0]}))
    args = EngineArgs.from_kwargs(model_path=str(tmp_path), reasoning_parser=asked, tool_call_parser=asked)
    found, remarks = with_template_parsers(args, tmp_path)
    assert (found.server.reasoning_parser, found.server.tool_call_parser) == ("hy_v3", "hy_v3")
    assert len(remarks) == 2 * (asked != "hy_v3")
