"""From flags to a running engine: shared by the server and the offline API."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec

from moe_engine.config.resolve import ResolvedConfig
from moe_engine.engine.client_api import EngineInfo
from moe_engine.engine.core_process import CoreProcess
from moe_engine.engine.frontend import FrontendSettings
from moe_engine.tokenizer.tokenizer import Tokenizer, load_tokenizer


def engine_info(facts: dict[str, Any]) -> EngineInfo:
    """The facts a core sent when it was ready, typed."""
    known = {field.name for field in dataclasses.fields(EngineInfo)}
    return msgspec.convert({key: value for key, value in facts.items() if key in known}, EngineInfo)


def start_core(config: ResolvedConfig) -> CoreProcess:
    """Starts the core process and returns at once; `wait_ready` tells when it serves."""
    return CoreProcess(config)


def open_tokenizer(config: ResolvedConfig) -> Tokenizer | None:
    """The tokenizer the flags name; None with ``--skip-tokenizer-init``."""
    model = config.args.model
    if model.skip_tokenizer_init:
        return None
    return load_tokenizer(
        config.tokenizer_path,
        mode=model.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
    )


def frontend_settings(config: ResolvedConfig) -> FrontendSettings:
    """The part of the flags that holds for every request, from HTTP or from Python."""
    server = config.server
    return FrontendSettings(
        stream_interval=config.scheduling.stream_interval,
        incremental_streaming_output=server.incremental_streaming_output,
        allow_auto_truncate=server.allow_auto_truncate,
        preferred_sampling_params=json.loads(server.preferred_sampling_params),
    )
