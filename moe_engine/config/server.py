"""Flags of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.config.values import parse_json_object

MORE_PARSERS = "more output parsers"
SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Fields that no log and no response shows."""


def _reasoning_parsers() -> tuple[str, ...]:
    from moe_engine.tokenizer.reasoning import REASONING_PARSERS

    return ("auto", *REASONING_PARSERS)


def _completion_templates() -> tuple[str, ...]:
    from moe_engine.tokenizer.fill_in_middle import FORMS

    return tuple(FORMS)


def _tool_call_parsers() -> tuple[str, ...]:
    from moe_engine.tokenizer.tool_calls import TOOL_FORMATS

    return ("auto", *TOOL_FORMATS)


@dataclass(frozen=True)
class ServerArgs:
    host: str = flag(
        "127.0.0.1", "Address to listen on. 0.0.0.0 also serves other machines: set --api-key then.", metavar="ADDRESS"
    )
    port: int = flag(30000, "Port to listen on; 0 takes a free one.", metavar="PORT")
    api_key: str | None = flag(
        None, "Key that clients must send as `Authorization: Bearer KEY`. Left out: no key.", metavar="KEY"
    )
    admin_api_key: str | None = flag(
        None, "Key of the endpoints that change the engine, such as /flush_cache. Left out: --api-key.", metavar="KEY"
    )
    ssl_certfile: str | None = flag(
        None, "Certificate chain (PEM) for HTTPS; needs --ssl-keyfile. Left out: HTTP.", metavar="FILE"
    )
    ssl_keyfile: str | None = flag(None, "Private key (PEM) of --ssl-certfile.", metavar="FILE")
    ssl_keyfile_password: str | None = flag(
        None, "Password of an encrypted --ssl-keyfile. Left out: the key has none.", metavar="TEXT"
    )
    fastapi_root_path: str = flag(
        "",
        "Prefix under which a proxy publishes this server, for instance /engine. Requests are served with and without "
        "it; /openapi.json names it.",
        metavar="PATH",
    )
    enable_cache_report: bool = flag(
        False, "Report in `usage.prompt_tokens_details.cached_tokens` how many prompt tokens came from the cache."
    )
    return_input_ids: bool = flag(
        False,
        "Add the prompt's token ids to every chat answer, in `sglext.input_ids`, as `return_input_ids_in_sglext`.",
    )
    return_output_ids: bool = flag(
        False,
        "Add the output's token ids to every chat answer, in `sglext.output_ids`, as `return_output_ids_in_sglext`.",
    )
    enable_return_hidden_states: bool = flag(
        False, "Allows `return_hidden_states` in requests: the final hidden states of prompt and output tokens."
    )
    enable_return_routed_experts: bool = flag(
        False, "Allows `return_routed_experts` in requests: the experts of each token, for routing replay in training."
    )
    completion_template: str | None = flag(
        None,
        "Special tokens around `suffix` in /v1/completions (fill in the middle). Left out: those of the vocabulary.",
        choices=_completion_templates,
    )
    reasoning_parser: str | None = flag(
        None,
        "Parser that moves the model's reasoning into `reasoning_content`; auto: the one of the chat template. Left "
        "out: reasoning stays in the text; the embedded model gets its own parser.",
        choices=_reasoning_parsers,
        unsupported=dict.fromkeys(
            ("apertus2509", "beam", "dots", "k2_horizon", "muse",
             "nanbeige", "granite_thinking_parser", "interns1", "inkling", "iquest_q1",
             "gigachat35", "response_template"),
            MORE_PARSERS,
        ),
    )  # fmt: skip
    tool_call_parser: str | None = flag(
        None,
        "Parser that turns the model's tool calls into `tool_calls`, by format; auto: the one of the chat template. "
        "Left out: tool calls stay in the text; the embedded model gets its own parser.",
        choices=_tool_call_parsers,
        unsupported=dict.fromkeys(
            ("step3",
             "apertus2509", "beam", "k2_horizon", "minicpm5",
             "muse", "spark25", "nanbeige", "trinity", "interns1", "gigachat3",
             "gigachat35", "inkling", "iquest_q1", "response_template"),
            MORE_PARSERS,
        ),
    )  # fmt: skip
    grammar_backend: str = flag(
        "llguidance",
        "Library that enforces constraints of requests (json_schema, regex, ebnf, structural tags). xgrammar "
        "needs the extra xgrammar and enforces fewer schemas. outlines selects llguidance. none: such "
        "requests are refused.",
        choices=("llguidance", "xgrammar", "none"),
        synonyms={"outlines": "llguidance"},
    )
    constrained_json_whitespace_pattern: str | None = flag(
        None,
        "Regular expression of the white space between parts of constrained JSON, such as '[ ]?'. Left out: a space, "
        "or a line end and up to 20 spaces or tabs.",
        metavar="REGEX",
    )
    constrained_json_disable_any_whitespace: bool = flag(
        False, "Constrained JSON has no white space between its parts."
    )
    default_chat_template_kwargs: str = flag(
        "{}",
        "JSON object with arguments of the chat template for every conversation, for instance "
        "'{\"enable_thinking\": false}'. `chat_template_kwargs` of a request take precedence.",
        parse=parse_json_object,
        metavar="JSON",
    )
    stream_response_default_include_usage: bool = flag(
        False, "Streams of the OpenAI endpoints end with the usage, unless `stream_options.include_usage` is false."
    )
    incremental_streaming_output: bool = flag(
        False,
        "Stream on /generate only the new text of each chunk instead of all text so far.",
        old=("--stream-output",),
    )
    sampling_defaults: str = flag(
        "model",
        "Defaults of sampling fields on the OpenAI endpoints. model: generation_config.json of the checkpoint; openai: "
        "OpenAI's own defaults.",
        choices=("model", "openai"),
    )
    preferred_sampling_params: str = flag(
        "{}",
        "JSON object with defaults for the sampling_params of /generate, for instance '{\"temperature\": 0}'.",
        parse=parse_json_object,
        metavar="JSON",
    )
    max_logprobs: int = flag(
        20,
        "Max log-probabilities per token that a request may ask for, top ones or by token id. -1: no limit.",
        metavar="COUNT",
    )
    enable_custom_logit_processor: bool = flag(
        False,
        "Accept `custom_logit_processor` of requests: Python code of the client, which runs in the engine. For trusted "
        "clients only.",
    )
    allow_auto_truncate: bool = flag(False, "Truncate prompts that are too long instead of refusing them.")
    weight_version: str = flag(
        "default",
        "Name of the weights in the `meta_info` and `metadata` of answers and in /model_info.",
        metavar="NAME",
    )
    watchdog_timeout: float = flag(
        300.0, "Seconds after which a hanging step is reported and the engine is stopped.", metavar="SECONDS"
    )
    timeout_keep_alive: int = flag(60, "Seconds that an idle connection stays open.", metavar="SECONDS")
    timeout_graceful_shutdown: int | None = flag(
        None,
        "Seconds that running requests may still run after SIGTERM before they are cancelled. Left out: no limit. A "
        "second SIGTERM cancels them immediately.",
        metavar="SECONDS",
    )
