"""Settings of the HTTP server, filled from the launch flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from moe_engine.errors import ConfigError, InputError
from moe_engine.frontend.frontend import FrontendSettings
from moe_engine.sampling_checks import parse_sampling

DEFAULT_MAX_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ServerSettings:
    """Names and defaults are SGLang's flags'.

    Args:
        served_model_name: name in /v1/models; None: the engine's.
        sampling_defaults: sampling fields of the model's generation_config.json, defaults of the OpenAI endpoints
            (`--sampling-defaults model`).
        frontend: settings for every request, from HTTP or Python.
        server_args: all launch flags, shown by /server_info.
        max_body_bytes: larger request bodies are refused with 413.
        watchdog_timeout: seconds; a longer step with queued work makes /health fail.
        health_timeout: seconds that /health_generate waits for its token.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    admin_api_key: str | None = None
    served_model_name: str | None = None
    tokenizer_path: str | None = None
    chat_template: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    enable_metrics: bool = False
    enable_cache_report: bool = False
    log_requests: bool = False
    log_requests_level: int = 2
    log_level: str = "info"
    log_level_http: str | None = None
    skip_tokenizer_init: bool = False
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    watchdog_timeout: float = 300.0
    health_timeout: float = 20.0
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    frontend: FrontendSettings = field(default_factory=FrontendSettings)
    server_args: Mapping[str, Any] = field(default_factory=dict)


_GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_sampling_defaults(model_dir: str | Path) -> dict[str, Any]:
    """Sampling fields of a checkpoint's generation_config.json, checked; empty without one.

    Raises:
        ConfigError: the file is not a JSON object, or a value is out of range.
    """
    path = Path(model_dir) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        values = {name: config[name] for name in _GENERATION_FIELDS if config.get(name) is not None}
        if values.get("top_k") == 0:  # in transformers: the whole vocabulary
            values["top_k"] = -1
        parse_sampling(values, "")
    except (msgspec.MsgspecError, InputError) as exc:
        raise ConfigError(f"{path}: {exc}; fix the file, or start with --sampling-defaults openai") from None
    return values
