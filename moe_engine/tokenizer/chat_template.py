"""Chat templates: renders conversations with a checkpoint's Jinja template, with transformers' sandbox and helpers."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moe_engine.errors import ConfigError, InputError
from moe_engine.tokenizer import gme_qwen2_vl
from moe_engine.tokenizer.chat_messages import (
    BUILT_IN_TEMPLATES,
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    GME_QWEN2_VL,
    KIMI_K3,
    ChatEncoder,
    prepare_message,
    refuse_reserved,
)
from moe_engine.tokenizer.deepseek_v4 import load_deepseek_v4
from moe_engine.tokenizer.deepseek_v32 import load_deepseek_v32
from moe_engine.tokenizer.deepseek_v41 import load_deepseek_v41
from moe_engine.tokenizer.kimi_k3 import load_kimi_k3
from moe_engine.tokenizer.message_forms import continued_fields, message_forms
from moe_engine.tokenizer.template_formats import reasoning_format, tool_format
from moe_engine.tokenizer.tool_calls.name_lines import with_observations

_LOOPS_OVER_CONTENT = re.compile(r"\{%-?\s*for\s[^%]*?\bin\s([^%]*?(\.content|\[['\"]content['\"]\])|content\s*-?%)")

_ENCODERS: dict[str | None, Callable[[Path | None, Mapping[str, str]], ChatEncoder]] = {
    DEEPSEEK_V32: load_deepseek_v32, DEEPSEEK_V4: load_deepseek_v4, DEEPSEEK_V41: load_deepseek_v41,
    KIMI_K3: load_kimi_k3,
}  # fmt: skip
"""Encoders of models whose checkpoints have no template, by name."""
_ENCODER_OF = {
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "deepseek_v41": DEEPSEEK_V41,
    "kimi_k3": KIMI_K3,
}
"""Loaders by `model_type`."""
_CONTINUED = "<|moe-engine-continues-here|> "
"""Marks the place at which a message is continued. The space shows whether the template trims the message."""


RENDER_SECONDS, MESSAGE_SECONDS = 2.0, 1e-4
"""Processor time of a rendering, and more for each message. A template that loops without end would block the server's
event loop. 100,000 messages take less than a second."""
_DEADLINE = ContextVar("_DEADLINE", default=float("inf"))
"""End of the running rendering, in seconds of `time.thread_time`."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks responses for training; here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate(ChatEncoder):
    """A compiled template, or several by name ("default", and "tool_use" for requests with tools).

    Args:
        source: Jinja source, or a dict of name to source.
        special_tokens: template variables bos_token, eos_token, ...
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            raise ConfigError(f"chat template: none is named 'default' among {sorted(sources)}; give --chat-template")
        try:
            self._templates = {name: _compiled(text) for name, text in sources.items()}
        except jinja2.TemplateSyntaxError as exc:
            raise ConfigError(f"chat template, line {exc.lineno}: {exc.message}") from exc
        self._wants_parts = {name: bool(_LOOPS_OVER_CONTENT.search(text)) for name, text in sources.items()}
        self._knows_developer = {name: "developer" in text for name, text in sources.items()}
        self._observes = {name: tool_format(text) == "glm4" for name, text in sources.items()}
        self._sources = sources
        self._special_tokens = dict(special_tokens or {})

    @property
    def source(self) -> str:
        """Jinja source of the template for requests without tools."""
        return self._sources["default"]

    @property
    def reads_parts(self) -> bool:
        return all(self._wants_parts.values())

    @property
    def parsers(self) -> tuple[str | None, str | None]:
        text = "\n".join(self._sources.values())
        return reasoning_format(text), tool_format(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self._sources, self._special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        refuse_reserved(kwargs)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        context = {
            **self._special_tokens,
            **(kwargs or {}),
            "tools": list(tools) if tools else None,
            "documents": (kwargs or {}).get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        if not self._knows_developer[name]:
            messages = [_as_system(m) for m in messages]
        prepared = [prepare_message(m, keep_parts=self._wants_parts[name]) for m in messages]
        if self._observes[name]:
            prepared = with_observations(prepared)
        template, failure = self._templates[name], None
        _DEADLINE.set(time.thread_time() + RENDER_SECONDS + MESSAGE_SECONDS * len(prepared))
        try:
            for form in message_forms(prepared):
                try:
                    return template.render(messages=form, **context)
                except (jinja2.TemplateError, TypeError) as exc:
                    failure = failure or exc
            assert failure is not None
            raise failure
        except jinja2.TemplateError as exc:
            raise InputError.at("messages", f"the chat template refuses them: {exc}") from exc
        except (
            TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError
        ) as exc:  # fmt: skip
            raise InputError.at(
                "messages", f"the chat template cannot render them ({type(exc).__name__}: {exc})"
            ) from exc

    def render_continued(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """As transformers: the rendered conversation up to the end of the last message's text. If the template leaves
        that text out, it follows the prompt of the messages before."""
        *before, last = messages
        marked = {name: f"{last[name]}{_CONTINUED}" for name in continued_fields(last)}
        try:
            found = self.render([*before, {**last, **marked}], tools=tools, add_generation_prompt=False, kwargs=kwargs)
        except InputError:
            found = ""
        whole, mark, after = found.rpartition(_CONTINUED.rstrip())
        if not mark:
            return super().render_continued(messages, tools=tools, kwargs=kwargs)
        return whole if after.startswith(" ") else whole.rstrip()


@lru_cache(8)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def load_chat_template(
    chosen: str | None,
    own: str | Mapping[str, str] | None,
    special_tokens: Mapping[str, str],
    folder: Path | None = None,
) -> ChatEncoder | None:
    """The template of `--chat-template` (a built-in name, a file, or Jinja source), else the checkpoint's own, else
    the built-in one of the checkpoint's model type, else None.

    Args:
        folder: of the checkpoint's config.json, if there is one.

    Raises:
        ConfigError: names the flag and the problem.
    """
    encoder = chosen
    if chosen is None and not own and folder is not None:
        encoder = _ENCODER_OF.get(_model_type(folder))
    if encoder in _ENCODERS:
        return _ENCODERS[encoder](folder, special_tokens)
    if chosen == GME_QWEN2_VL:
        return ChatTemplate(gme_qwen2_vl.TEMPLATE, special_tokens)
    if chosen is None:
        return _template(own, special_tokens, str(folder or "the checkpoint")) if own else None
    if "{%" in chosen or "{{" in chosen:
        return _template(chosen, special_tokens, "--chat-template")
    path = Path(chosen)
    if not os.path.isfile(path):
        raise ConfigError(
            f"--chat-template {chosen:.200}: no such file; give a .jinja file, or a built-in name: "
            f"{', '.join(BUILT_IN_TEMPLATES)}"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--chat-template {chosen}: cannot be read as text; give a .jinja or .json file") from None
    if path.suffix == ".json":
        try:
            text = json.loads(text)["chat_template"]
        except (ValueError, KeyError, TypeError):
            text = ""
        if not isinstance(text, str) or not text:
            raise ConfigError(f"--chat-template {chosen}: a .json file must hold a 'chat_template' string") from None
    return _template(text, special_tokens, f"--chat-template {chosen}")


def _template(source: str | Mapping[str, str], special_tokens: Mapping[str, str], where: str) -> ChatTemplate:
    try:
        return ChatTemplate(source, special_tokens)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _model_type(folder: Path) -> str:
    """`model_type` of config.json; empty if the file cannot be read: it is refused when the model is loaded."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return ""
    return str(config.get("model_type")) if isinstance(config, dict) else ""


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI's "developer" role becomes "system": templates without this role would silently drop the message."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that start with an underscore, which would allow sandbox escapes."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no parameter "self": a template may pass it as a keyword
        self, given = args[0], args[1:]
        attrs = dict(*given, **kwargs)
        for name in attrs:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attrs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r} on a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Environment(ImmutableSandboxedEnvironment):
    """Iterations of loops and calls of macros check the deadline, by a test: a call would pass the sandbox, which takes
    longer than the iteration."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        repeated: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in repeated:
            check = nodes.Test(nodes.Const(None), "in_time", [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(check).set_lineno(node.lineno))
        return tree


@jinja2.pass_context  # evaluated while rendering, not while compiling
def _in_time(context: jinja2.runtime.Context, value: None) -> bool:
    if time.thread_time() > _DEADLINE.get():
        raise jinja2.TemplateError(f"it takes more than {RENDER_SECONDS:g} s of processor time")
    return True


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.tests["in_time"] = _in_time
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    return environment
