"""Starts the engine cores from resolved flags; shared by the server and the offline API."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

from moe_engine.elastic.policy import surviving
from moe_engine.executor.options import RankGroupOptions
from moe_engine.executor.sharded_worker import rank_group_options
from moe_engine.frontend.client_api import EngineInfo
from moe_engine.frontend.core_process import CoreProcess
from moe_engine.frontend.settings import FrontendSettings
from moe_engine.media.settings import MediaSettings
from moe_engine.planning.flags.image_flags import max_images, pixel_bounds
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.processes.dist_secret import SECRET_VARIABLE
from moe_engine.processes.open_files import check_limit
from moe_engine.structured_output.backend import GrammarSettings
from moe_engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from moe_engine.tokenizer.tokenizer_files import check_tokenizer

logger = logging.getLogger("moe_engine")

ROOM = ("max_total_num_tokens", "max_req_input_len", "max_running_requests", "context_len")
"""Facts that depend on available memory."""


def start_cores(config: ResolvedConfig) -> list[CoreProcess]:
    """Starts the core process of each replica without waiting; see `wait_ready`.

    Raises:
        ConfigError: the address for the other nodes cannot be bound, too few files may be open, or the tokenizer's
            files are missing or truncated.
    """
    check_limit()
    if not config.args.model.skip_tokenizer_init:
        check_tokenizer(config.tokenizer_path, config.args.model.tokenizer_mode)
    plan = config.parallel
    if plan.num_nodes > 1 and plan.secret is None:
        logger.warning("%s", _open_ports(plan))
    if plan.num_replicas == 1:
        return [CoreProcess(config, ranks=_ranks(config))]
    return [CoreProcess(config, name=f"engine core DP{i}", ranks=_ranks(config, i)) for i in range(plan.num_replicas)]


def _ranks(config: ResolvedConfig, replica: int = 0) -> RankGroupOptions | None:
    options, coverage = rank_group_options(config, replica), config.parallel.coverage
    if options is None or coverage is None:
        return options
    return surviving(options, coverage)


def _open_ports(plan: ParallelPlan) -> str:
    assert plan.leader_address is not None
    host = plan.leader_address.rpartition(":")[0]
    return (
        f"Sockets between nodes have no secret: a host that reaches {plan.leader_address}, or the engine's other TCP "
        f"ports (ephemeral, at {host} and at the other nodes' addresses on that network), can send requests past "
        f"--api-key and stop the engine. Set the same secret in {SECRET_VARIABLE} or --dist-secret-file FILE on every "
        "node (`openssl rand -hex 32` generates one); see docs/security.md"
    )


def wait_ready(cores: Sequence[CoreProcess]) -> EngineInfo:
    """Blocks until all cores are ready. Facts that depend on memory (`ROOM`) may differ between cores: the minimum
    applies. Raises like `CoreProcess.poll_ready` for the first core that fails."""
    found: dict[int, EngineInfo] = {}
    while len(found) < len(cores):
        for i, core in enumerate(cores):
            if i not in found and (info := core.poll_ready()) is not None:
                found[i] = info
    room: dict[str, Any] = {name: min(getattr(info, name) for info in found.values()) for name in ROOM}
    return dataclasses.replace(next(iter(found.values())), **room)


def stop_cores(cores: Sequence[CoreProcess], grace: float = 0.0) -> None:
    """Stops the cores that still run."""
    for core in cores:
        core.expect_exit()
    for core in cores:
        core.stop(grace)


def kill_cores(cores: Sequence[CoreProcess]) -> None:
    """Kills the cores without a wait; their ranks end with them. Callable in a signal handler."""
    for core in cores:
        core.expect_exit()
        core.kill("a second signal has come")


def open_tokenizer(config: ResolvedConfig) -> Tokenizer | None:
    """The tokenizer of the flags; None with ``--skip-tokenizer-init``."""
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
    """The flags that apply to every request, from HTTP or Python."""
    preferred = json.loads(config.server.preferred_sampling_params)
    grammars = config.select(GrammarSettings)
    media = config.select(MediaSettings, max_images=max_images(config.args), **pixel_bounds(config.args))
    more = {"grammars": grammars, "media": media, "uses_priority": config.scheduling.uses_priority}
    return config.select(FrontendSettings, preferred_sampling_params=preferred, **more)
