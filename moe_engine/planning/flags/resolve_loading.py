"""Threads that read weight files, by SGLang's ``--model-loader-extra-config``."""

from __future__ import annotations

import dataclasses
import json

from moe_engine.config.args import EngineArgs
from moe_engine.config.model import ModelArgs
from moe_engine.config.values import refuse_unsupported
from moe_engine.errors import ConfigError
from moe_engine.planning.resolution_log import Record

EXTRA_CONFIG = "--model-loader-extra-config"
SETTINGS = ("enable_multithread_load", "num_threads")
DEFAULT_THREADS = 8
"""SGLang's."""
MOST_THREADS = 256


def loader_threads(model: ModelArgs) -> int | None:
    """The number of threads in the flag; None without ``enable_multithread_load``.

    Raises:
        ConfigError: a wrong value. NotAvailableYet: a setting of another loader.
    """
    settings = json.loads(model.model_loader_extra_config)
    for name in settings:
        if name not in SETTINGS:
            raise refuse_unsupported(f"{EXTRA_CONFIG} with {name}", "settings of other loaders", "leave it out")
    enabled, threads = settings.get("enable_multithread_load", False), settings.get("num_threads", DEFAULT_THREADS)
    if not isinstance(enabled, bool):
        raise ConfigError(f"{EXTRA_CONFIG}: enable_multithread_load is true or false, not {enabled!r}")
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise ConfigError(f"{EXTRA_CONFIG}: num_threads is a whole number from 1 to {MOST_THREADS}, not {threads!r}")
    return threads if enabled else None


def with_loader_threads(args: EngineArgs, record: Record) -> EngineArgs:
    """The same threads by the engine's own flags."""
    threads = loader_threads(args.model)
    if threads is None:
        if json.loads(args.model.model_loader_extra_config):
            record.remark(f"{EXTRA_CONFIG}: no effect without enable_multithread_load true")
        return args
    if args.model.load_format == "dummy":
        record.remark(f"{EXTRA_CONFIG}: no effect with --load-format dummy, which reads no files")
        return args
    record.note("weight_loader_prefetch_num_threads", threads, f"{EXTRA_CONFIG}, enable_multithread_load")
    model = dataclasses.replace(
        args.model, weight_loader_prefetch_checkpoints=True, weight_loader_prefetch_num_threads=threads
    )
    return dataclasses.replace(args, model=model)
