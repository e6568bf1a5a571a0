"""``moe-engine generate``: text for one prompt, without a server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moe_engine.config.args import build_parser
from moe_engine.config.flags import parse_flags
from moe_engine.errors import ConfigError, InputError
from moe_engine.sampling_checks import parse_sampling
from moe_engine.validation import check_unicode

if TYPE_CHECKING:
    from moe_engine.planning.resolved_config import ResolvedConfig
    from moe_engine.tokenizer.tokenizer import Tokenizer


def main(argv: Sequence[str], prog: str) -> int:
    """Runs one prompt on the offline engine; text on stdout, everything else on stderr."""
    description = "Generates text for one prompt. Applies the chat template unless --raw is given."
    usage = f"{prog} PROMPT [--model-path PATH] [flags]"
    parser = build_parser(prog, serves=False, description=description, usage=usage)
    group = parser.add_argument_group("prompt and sampling")
    group.add_argument("words", nargs="?", metavar="PROMPT", default=argparse.SUPPRESS, help="the prompt")
    group.add_argument("--prompt", metavar="TEXT", help="the prompt, as a flag (default: read from standard input)")
    group.add_argument("--raw", action="store_true", help="do not apply the chat template")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="maximum number of new tokens (128)")
    group.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (0: greedy, the default)")
    group.add_argument("--top-p", type=float, metavar="P", help="top-p sampling (nucleus)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop string; may be repeated")
    group.add_argument("--json", action="store_true", help="print the output with meta_info as JSON")
    values = {"prompt": None, "raw": False, "json": False, **parse_flags(parser, argv)}
    prompt, raw, as_json = (values.pop(name) for name in ("prompt", "raw", "json"))
    sampling = {"temperature": 0.0}
    for name in ("max_new_tokens", "temperature", "top_p", "stop"):
        if (value := values.pop(name, None)) is not None:
            sampling[name] = value
    if (word := values.pop("words", None)) is not None:
        if prompt is not None:
            raise ConfigError(f"{word:.80}: --prompt is given too; give one prompt")
        prompt = word
    if prompt is None and not sys.stdin.isatty():
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input: the prompt is not UTF-8 text: {error}") from None
    if not prompt:
        raise ConfigError("the prompt is empty; give it in quotes, as --prompt TEXT or on standard input")
    check_unicode(prompt, "--prompt")  # an argument that the locale cannot decode has surrogates
    _check_sampling(sampling)
    from moe_engine.frontend.engine import Engine

    ids: list[int] | None = None

    class PromptEngine(Engine):
        """Renders the prompt while the model loads: a broken template fails early."""

        def _while_loading(self, tokenizer: Tokenizer | None) -> None:
            nonlocal ids
            if tokenizer is None:
                raise ConfigError("--skip-tokenizer-init: generate needs the tokenizer")
            ids = None if raw else _chat_prompt(self.config, tokenizer, prompt)

    with PromptEngine(**values) as engine:
        answer = engine.generate(prompt if ids is None else None, sampling, ids)
    assert isinstance(answer, dict)
    print(json.dumps(answer, indent=2, ensure_ascii=False) if as_json else answer["text"])
    return 0


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raises InputError with the name of the flag, before a model is loaded."""
    try:
        parse_sampling(sampling, "")
    except InputError as error:
        name = (error.field or "").partition("[")[0]
        raise InputError(f"--{name.replace('_', '-')}{str(error).removeprefix(name)}") from None


def _chat_prompt(config: ResolvedConfig, tokenizer: Tokenizer, prompt: str) -> list[int] | None:
    """Token ids of the prompt rendered as a user message; None if the model has no chat template."""
    from moe_engine.tokenizer.chat_template import load_chat_template

    template = load_chat_template(
        config.args.model.chat_template, tokenizer.chat_template, tokenizer.special_tokens, tokenizer.folder
    )
    if template is None:
        return None
    text = template.render([{"role": "user", "content": prompt}])
    return tokenizer.encode(text, add_special_tokens=False)
