"""Layers with a state for each request in the configuration: memory, the radix cache, and excluded flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models.config_file import load_model_config
from moe_engine.models.config_sections.state import StateGroup, StatePart
from moe_engine.models.widths import local_heads
from moe_engine.planning.output.explain import explain_text
from moe_engine.planning.resolve import resolve
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.planning.speculation.draft_model import DraftModel
from tests.config.conftest import SMALL, machine

PARTS = (StatePart((4, 10, 10), "float32", sharded=0), StatePart((3, 40), sharded=1))
BYTES = 4 * 400 + 2 * 120
GROUP = StateGroup((1, 3), PARTS)


@pytest.fixture
def with_states(model_dir: Callable[..., Any]) -> Callable[..., ResolvedConfig]:
    def make(group: StateGroup = GROUP, device: str = "cpu", drafts: bool = False, **flags: Any) -> ResolvedConfig:
        path = model_dir(SMALL)
        usual = load_model_config(path)
        model = dataclasses.replace(usual, state_groups=(group,))
        args = EngineArgs.from_kwargs(**flags)
        target, draft = (usual, DraftModel(str(path), model)) if drafts else (model, None)
        on = machine(60, 80, device) if device == "cuda" else machine()
        return resolve(args, target, on, model_path=str(path), draft=draft)

    return make


def test_the_ledger_has_the_states_and_kv_of_the_other_layers(with_states, resolved) -> None:
    config, usual = with_states(max_running_requests=7), resolved(max_running_requests=7)
    assert config.ledger.bytes_of("request states") == (7 + 1) * 2 * BYTES
    assert config.ledger.bytes_per_token * 2 == usual.ledger.bytes_per_token
    assert usual.ledger.bytes_of("request states") == 0
    assert config.model.cache_groups[0].layers == (0, 2)
    text = explain_text(config)
    assert "request states" in text and f"7 requests x {2 * BYTES} B in 2 layers" in text


def test_a_rank_has_its_part_of_a_state(with_states) -> None:
    config = with_states(max_running_requests=7, tp_size=2)
    assert config.ledger.bytes_of("request states") == (7 + 1) * BYTES
    assert [part.shape for part in local_heads(config.model, 2).state_groups[0].parts] == [(2, 10, 10), (3, 20)]
    replicated = dataclasses.replace(GROUP, parts=(StatePart((3, 5)),))
    assert with_states(replicated, max_running_requests=7, tp_size=2).ledger.bytes_of("request states") == 8 * 2 * 30


def test_more_states_than_memory_are_refused_with_a_smaller_number_of_requests(with_states) -> None:
    large = dataclasses.replace(GROUP, parts=(StatePart((64, 1024, 1024), "float32"),))
    with pytest.raises(ConfigError, match=r"request states 32\.50 GB.*fits with .*--max-running-requests \d"):
        with_states(large, max_running_requests=64)


def test_the_radix_cache_is_disabled_with_its_reason(with_states) -> None:
    config = with_states()
    assert config.scheduling.disable_radix_cache and config.flat()["disable_radix_cache"] is True
    (reason,) = [decision.reason for decision in config.decisions if decision.name == "disable_radix_cache"]
    assert "state for each request" in reason
    assert not [d for d in with_states(disable_radix_cache=True).decisions if d.name == "disable_radix_cache"]


def test_decodes_are_captured(with_states) -> None:
    config = with_states(device="cuda")
    assert config.graphs.sizes and config.kernels.uncaptured is None


def test_a_model_without_attention(with_states) -> None:
    """KV slots are numbers without memory: as many as the requests can use."""
    group = dataclasses.replace(GROUP, layers=(0, 1, 2, 3))
    for device in ("cpu", "cuda"):
        config = with_states(group, device, max_running_requests=3)
        assert config.ledger.kv_bytes == 0 and config.max_total_num_tokens == 3 * config.context_len


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM: .*rejected drafts.*leave it out"),
        ({"speculative_algorithm": "NEXTN"}, "--speculative-algorithm NEXTN"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache: .*no prefix is cached.*leave it out"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill: .*no prefix is cached.*leave it out"),
        ({"enable_two_batch_overlap": True, "tp_size": 2, "moe_a2a_backend": "all_to_all", "ep_size": 2},
         "--enable-two-batch-overlap: .*leave it out"),
        ({"enable_torch_compile": True}, "--enable-torch-compile: .*leave it out"),
        ({"schedule_policy": "lpm"}, "--schedule-policy lpm: .*use fcfs"),
        ({"group": dataclasses.replace(GROUP, parts=(StatePart((3,), "float8"),))}, "a state of float8: use float32"),
        ({"drafts": True, "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "x"},
         "--speculative-draft-model-path: .*use another draft model"),
    ],
)  # fmt: skip
def test_excluded_flags_are_refused_by_name(with_states, flags, message) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        with_states(**flags)
    assert "config.json has layers with a state for each request" in str(error.value)


def test_a_state_that_ranks_cannot_divide_is_refused(with_states) -> None:
    group = dataclasses.replace(GROUP, parts=(StatePart((3,), sharded=0),))
    with pytest.raises(ConfigError) as error:
        with_states(group, tp_size=2)
    assert str(error.value) == (
        "3 channels or heads of a state cannot be split evenly over 2 ranks (--tp-size / --attn-dp-size); 1 or 3 can; "
        "with --tp-size 2: --attn-dp-size 2"
    )


CACHED = dataclasses.replace(GROUP, stores_any=True)


def test_snapshots_for_cached_prefixes(with_states) -> None:
    config = with_states(CACHED, max_running_requests=7)
    assert not config.scheduling.disable_radix_cache and config.num_snapshots == 7
    assert config.ledger.bytes_of("request states") == (7 + 1 + 7) * 2 * BYTES
    assert "7 requests, 7 snapshots x" in explain_text(config)
    assert with_states(CACHED, max_running_requests=7, max_mamba_cache_size=9).num_snapshots == 2
    assert with_states(CACHED, max_running_requests=7, schedule_policy="lpm").num_snapshots == 7
    without = with_states(CACHED, max_running_requests=7, disable_radix_cache=True, max_mamba_cache_size=9)
    assert without.num_snapshots == 0 and any("--max-mamba-cache-size: no effect" in note for note in without.notes)
    with pytest.raises(ConfigError, match=r"--max-mamba-cache-size 7: 7 requests run.*give 8 or more"):
        with_states(CACHED, max_running_requests=7, max_mamba_cache_size=7)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_by_default_states_leave_memory_for_kv(with_states, device) -> None:
    """States of 64 MiB; the whole default number of requests would not fit."""
    wide = dataclasses.replace(CACHED, parts=(StatePart((8, 1024, 1024), "float32"),))
    config = with_states(wide, device)
    running, ledger = config.max_running_requests, config.ledger
    beside = ledger.limit_bytes - ledger.weight_bytes
    assert 0.2 * beside < ledger.bytes_of("request states") < 0.5 * beside
    assert 1 < running < 256 and config.num_snapshots == running
    assert "states of 0.12 GB for each request take a third of the memory" in explain_text(config)
    alone = with_states(wide, device, disable_radix_cache=True).max_running_requests
    assert running == alone // 2
    drafting = with_states(wide, device, speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)
    assert alone // 6 - 1 <= drafting.max_running_requests <= alone // 6
    assert with_states(wide, device, max_running_requests=running + 9).max_running_requests == running + 9


def test_fewer_requests_that_fit_have_fewer_snapshots(with_states) -> None:
    wide = dataclasses.replace(CACHED, parts=(StatePart((8, 1024, 1024), "float32"),))
    with pytest.raises(ConfigError, match=r"it fits with .*--max-running-requests 64") as error:
        with_states(wide, "cuda", max_running_requests=600)
    assert "--chunked-prefill-size 512" in str(error.value)
    fits = with_states(wide, "cuda", chunked_prefill_size=512, max_running_requests=64)
    assert fits.num_snapshots == 64


def test_the_host_tier_has_states_in_proportion(with_states) -> None:
    tier = {"enable_hierarchical_cache": True, "max_running_requests": 7, "max_total_tokens": 800}
    config = with_states(CACHED, hicache_ratio=3, **tier)
    assert (config.host_tier_tokens, config.host_snapshots) == (2400, 21)
    assert config.ledger.bytes_of("host tier of states") == 21 * 2 * BYTES
    assert "host_snapshots" in explain_text(config)
    each = config.ledger.bytes_per_token
    sized = with_states(CACHED, hicache_size=1, **tier)
    used = sized.host_tier_tokens * each + sized.host_snapshots * 2 * BYTES
    assert 0.999e9 < used <= 1e9 and sized.host_tier_tokens / sized.host_snapshots == pytest.approx(800 / 7, rel=1e-3)
    with pytest.raises(ConfigError, match=r"--kv-connector .*only the connector host stores states"):
        with_states(CACHED, kv_connector="tests.engine.test_host_tier:OwnTier", **tier)


def test_drafts_have_a_state_for_each_position(with_states) -> None:
    config = with_states(CACHED, max_running_requests=7, speculative_algorithm="NGRAM", speculative_num_steps=3)
    assert config.ledger.bytes_of("request states") == (7 + 1 + 7 + 7 * 4) * 2 * BYTES
    assert "28 draft positions" in explain_text(config)
