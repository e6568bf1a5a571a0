"""Settings of the HTTP server: the launch flags and values derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, InputError
from moe_engine.frontend.settings import FrontendSettings
from moe_engine.sampling_checks import SamplingRequest, given, parse_sampling, plain_numbers
from moe_engine.validation import checked

DEFAULT_MAX_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ServerSettings:
    """
    Args:
        args: the launch flags, read by the endpoints directly.
        frontend: settings for every request, from HTTP or Python.
        sampling_defaults: sampling fields of the model's generation_config.json, defaults of the OpenAI endpoints
            (`--sampling-defaults model`).
        server_args: all launch flags with their resolved values, shown by /server_info.
        max_body_bytes: larger request bodies are refused with 413.
        health_timeout: seconds that /health_generate waits for its token.
    """

    args: EngineArgs = field(default_factory=EngineArgs)
    frontend: FrontendSettings = field(default_factory=FrontendSettings)
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    server_args: Mapping[str, Any] = field(default_factory=dict)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    health_timeout: float = 20.0

    def without_keys(self) -> ServerSettings:
        """A copy for other processes: no keys of clients."""
        server = replace(self.args.server, api_key=None, admin_api_key=None, ssl_keyfile_password=None)
        return replace(self, args=replace(self.args, server=server), server_args={})


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
        return given(checked(plain_numbers(values), SamplingRequest))
    except (msgspec.MsgspecError, InputError) as exc:
        raise ConfigError(f"{path}: {exc}; fix the file, or start with --sampling-defaults openai") from None
