"""``moe-engine simulate --log-file``: the server's log that the simulated launch would write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from moe_engine import logs
from moe_engine.cli.output_file import writing
from moe_engine.planning.output.explain import start_lines
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning.simulator.rank_log import RankLog, messages_to


@contextlib.contextmanager
def simulated_log(path: str | None, config: ResolvedConfig) -> Iterator[RankLog | None]:
    """The log in the file `path`, with the lines of the start, which `moe-engine doctor --log` reads. None: no file."""
    if path is None:
        yield None
        return
    with writing("--log-file", path), open(path, "w", encoding="utf-8") as stream:
        log = RankLog(stream, _names(config), config.logging.decode_log_interval)
        for line in [*start_lines(config), _startup_line(config), logs.READY_LINE]:
            log.write(line)
        with messages_to(log):
            yield log


def _names(config: ResolvedConfig) -> list[str]:
    """Names of the ranks that lead the attention groups, as in a server's log."""
    plan = config.parallel
    size, groups = plan.topology.tp_size, plan.topology.attn_dp_size
    if size == plan.num_replicas == 1:
        return [""]
    has_groups = plan.num_replicas * groups > 1
    return [
        logs.rank_name(group * size // groups, size, replica * groups + group if has_groups else None)
        for replica in range(plan.num_replicas)
        for group in range(groups)
    ]


def _startup_line(config: ResolvedConfig) -> str:
    return logs.startup_line(
        config.max_total_num_tokens,
        config.chunked_prefill_size,
        config.max_prefill_tokens,
        config.max_running_requests,
        config.context_len,
        (config.machine.available_bytes - config.ledger.total_bytes) / (1 << 30),
    )
