"""Options of the worker, the scheduler and the frontend are filled by name, without code for each flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moe_engine.core.setup import engine_info, scheduler_config
from moe_engine.executor.make_worker import worker_options
from moe_engine.frontend.start import frontend_settings
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.worker.startup.build_runner import WorkerInfo


def info_of_engine(config: ResolvedConfig) -> Any:
    worker: Any = SimpleNamespace(info=WorkerInfo())
    return engine_info(config, worker)


NOT_FLAGS: dict[Callable[..., Any], set[str]] = {
    worker_options: {"dummy_seed", "absorbed_break_even"},
    scheduler_config: {
        "init_new_token_ratio", "min_new_token_ratio_factor", "new_token_ratio_decay_steps", "retract_decode_steps",
        "clip_max_new_tokens", "lpm_fallback_queue", "in_batch_check_threshold", "in_batch_deprioritize_threshold",
        "least_chunk", "max_overtakes",
    },
    frontend_settings: {"max_sequences", "max_prompt_tokens"},
    info_of_engine: set(),
}  # fmt: skip
"""Fields that keep their default."""


@pytest.mark.parametrize("fill", NOT_FLAGS)
def test_every_other_field_has_a_value_of_the_configuration(fill, resolved, monkeypatch):
    """A misspelled field would silently keep its default."""
    config = resolved()
    monkeypatch.setattr(ResolvedConfig, "select", lambda self, options, **own: (options, own))
    options, own = fill(config)
    names = {item.name for item in dataclasses.fields(options)}
    assert own.keys() <= names
    unfilled = {name for name in names - own.keys() if name not in config.args.flat() and not hasattr(config, name)}
    assert unfilled == NOT_FLAGS[fill]


def test_a_resolved_value_comes_before_the_flag_as_given(resolved):
    config = resolved(dtype="auto", load_format="dummy", max_queued_requests=3)
    options, scheduler = worker_options(config), scheduler_config(config)
    assert config.args.memory.page_size is None and options.kernels.page_size == scheduler.page_size == config.page_size
    assert options.dtype == config.dtype != config.args.model.dtype
    assert options.load_format == "dummy" and scheduler.max_queued_requests == 3


@pytest.mark.parametrize(
    ("device", "flags", "cadence"),
    [
        ("cpu", {}, (1, 48 * 2048)),
        ("cpu", {"chunked_prefill_size": 1024}, (32, None)),
        ("cpu", {"autopilot": True}, (32, None)),
        ("cuda", {}, (32, None)),
    ],
)
def test_prompts_alternate_with_decodes_on_a_cpu(resolved, device, flags, cadence):
    scheduler = scheduler_config(replace(resolved(load_format="dummy", **flags), device=device))
    assert (scheduler.max_consecutive_prefills, scheduler.max_delayed_tokens) == cadence


def test_an_unknown_value_and_a_missing_one_are_errors(resolved):
    @dataclasses.dataclass
    class Options:
        page_size: int
        no_flag: int

    config = resolved()
    assert config.select(Options, no_flag=4) == Options(config.page_size, 4)
    with pytest.raises(TypeError, match="no_flag"):
        config.select(Options)
    with pytest.raises(TypeError, match="other"):
        config.select(Options, no_flag=4, other=5)


@pytest.mark.parametrize(
    ("flags", "in_force"),
    [({}, False), ({"enable_priority_scheduling": True}, True), ({"schedule_policy": "priority"}, True)],
)
def test_one_rule_says_whether_priorities_have_an_effect(resolved, flags, in_force):
    config = resolved(**flags)
    assert scheduler_config(config).uses_priority is frontend_settings(config).uses_priority is in_force
