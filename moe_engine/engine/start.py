"""From flags to a running engine: shared by the server and the offline API."""

from __future__ import annotations

import dataclasses
from typing import Any

from moe_engine.config.resolve import ResolvedConfig
from moe_engine.engine.client_api import EngineInfo
from moe_engine.engine.core_process import CoreProcess


def engine_info(facts: dict[str, Any]) -> EngineInfo:
    """The facts a core sent when it was ready, typed."""
    known = {field.name for field in dataclasses.fields(EngineInfo)}
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items() if key in known}
    return EngineInfo(**values)


def start_core(config: ResolvedConfig) -> CoreProcess:
    """Starts the core process and returns at once; `wait_ready` tells when it serves."""
    return CoreProcess(config)
