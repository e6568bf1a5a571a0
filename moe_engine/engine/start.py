"""From flags to a running engine: shared by the server and the offline API."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from moe_engine.config.resolve import ResolvedConfig
from moe_engine.engine.client_api import EngineInfo
from moe_engine.engine.core_process import CoreProcess
from moe_engine.engine.frontend import FrontendSettings
from moe_engine.engine.rank_worker import rank_group_options
from moe_engine.tokenizer.tokenizer import Tokenizer, load_tokenizer


def engine_info(facts: dict[str, Any]) -> EngineInfo:
    """The facts a core sent when it was ready, typed."""
    known = {field.name for field in dataclasses.fields(EngineInfo)}
    return msgspec.convert({key: value for key, value in facts.items() if key in known}, EngineInfo)


def start_cores(config: ResolvedConfig) -> list[CoreProcess]:
    """Starts the core process of each replica and returns at once; `wait_ready` tells when one serves."""
    replicas = config.parallel.num_replicas
    names = ["engine core"] if replicas == 1 else [f"engine core DP{i}" for i in range(replicas)]
    return [CoreProcess(config, name=name, ranks=rank_group_options(config, i)) for i, name in enumerate(names)]


def wait_ready(cores: Sequence[CoreProcess]) -> EngineInfo:
    """Blocks until all serve; their facts are alike. Raises as `CoreProcess.poll_ready`, whichever fails first."""
    facts: dict[int, dict[str, Any]] = {}
    while len(facts) < len(cores):
        for i, core in enumerate(cores):
            if i not in facts and (found := core.poll_ready()) is not None:
                facts[i] = found
    return engine_info(facts[0])


def stop_cores(cores: Sequence[CoreProcess], grace: float = 0.0) -> None:
    """Ends what still runs of them."""
    for core in cores:
        core.expect_exit()
    for core in cores:
        core.stop(grace)


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
