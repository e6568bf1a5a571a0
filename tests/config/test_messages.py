"""Notes and errors name the flag as typed, its effect and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError, NotAvailableYet
from moe_engine.planning.prepare import prepare
from moe_engine.planning.remarks import DEPENDENTS, unread_variables
from tests.config.conftest import SMALL, machine
from tests.config.test_parallel import EIGHT, LLAMA

# -- flags without effect

TWO_RANKS = {"tp_size": 2}
ANOTHER: dict[str, Any] = {
    "log_requests_level": 1,
    "log_requests_format": "json",
    "log_requests_target": "stdout",
    "otlp_service_name": "engine",
    "extra_metric_labels": '{"pool": "blue"}',
    "disable_priority_preemption": True,
    "default_priority_value": 3,
    "priority_scheduling_preemption_threshold": 3,
    "torch_compile_max_bs": 8,
    "torch_compile_cache_dir": "/cache",
    "tbo_token_distribution_threshold": 0.3,
    "eplb_rebalance_layers_per_chunk": 2,
    "eplb_min_rebalancing_utilization_threshold": 0.9,
    "expert_distribution_recorder_buffer_size": 7,
    "hicache_ratio": 3.0,
    "hicache_host_memory_fraction": 0.5,
    "kv_connector": "a:B",
    "hicache_size": 2,
    "hicache_write_policy": "write_through",
    "hicache_mem_layout": "layer_first",
    "hicache_io_backend": "kernel",
    "hicache_storage_dir": "/pages",
    "hicache_storage_size": 2.0,
    "hicache_storage_prefetch_policy": "best_effort",
    "hicache_storage_backend_extra_config": "{}",
    "prefill_decode_interval_min_bs": 2,
    "prefill_delayer_max_delay_passes": 5,
    "prefill_delayer_token_usage_low_watermark": 0.5,
    "prefill_delayer_queue_min_ratio": 0.5,
    "prefill_delayer_forward_passes_buckets": "1 2",
    "prefill_delayer_wait_seconds_buckets": "0.5 2",
    "prefill_delayer_max_delay_ms": 50.0,
}
"""A value that is not the default, of each dependent flag."""


@pytest.mark.parametrize("name", DEPENDENTS)
def test_flags_that_need_another_are_noted(resolved, name):
    option, needed = ("--" + word.replace("_", "-") for word in (name, DEPENDENTS[name]))
    notes = resolved(**{name: ANOTHER[name]}).notes
    assert [note for note in notes if option in note] == [f"{option} has no effect without {needed}"]
    default = EngineArgs().flat()[name]
    assert not any(option in note for note in resolved(**{name: default}).notes)


def test_the_policy_priority_needs_no_other_flag(resolved):
    flags = {"default_priority_value": 3, "disable_priority_preemption": True}
    assert not [note for note in resolved(schedule_policy="priority", **flags).notes if "priority" in note]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"base_gpu_id": 1}, "--base-gpu-id 1: no effect"),
        ({"gpu_id_step": 2}, "--gpu-id-step 2: no effect"),
        ({"deepep_mode": "normal"}, "--deepep-mode normal: no effect"),
        ({"deepep_mode": "normal", **TWO_RANKS}, "--deepep-mode normal: no effect"),
        ({"max_dispatch_tokens_per_rank": 64, **TWO_RANKS}, "--max-dispatch-tokens-per-rank 64: no effect"),
        ({"enable_deepep_moe": True}, "--enable-deepep-moe: no effect"),
        ({"moe_a2a_backend": "all_to_all"}, "--moe-a2a-backend all_to_all: no effect"),
        ({"enable_ep_moe": True}, "--enable-ep-moe: no effect"),
        ({"disable_custom_all_reduce": True}, "--disable-custom-all-reduce: no effect"),
        ({"hicache_io_backend": "kernel", "enable_hierarchical_cache": True}, "--hicache-io-backend kernel: no effect"),
    ],
    ids=str,
)
def test_flags_of_absent_ranks_and_gpus_are_noted(resolved, flags, words):
    assert sum(words in note for note in resolved(EIGHT, **flags).notes) == 1


def test_flags_with_an_effect_are_not_noted(resolved):
    flags = {"deepep_mode": "normal", "moe_a2a_backend": "all_to_all", "max_dispatch_tokens_per_rank": 64}
    assert not any("no effect" in note for note in resolved(EIGHT, **flags, **TWO_RANKS).notes)


def test_variables_of_sglang_that_are_not_read():
    environ = {
        "SGL_ENABLE_JIT_DEEPGEMM": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "1",
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "256",
        "SGLANG_SOMETHING": "1",
        "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": "/dumps",
        "PATH": "/bin",
    }
    found = unread_variables(environ)
    assert len(found) == 4 and not any("RECORDER" in line or "PATH" in line for line in found)
    assert sum("DeepGEMM" in line and "--moe-runner-backend" in line for line in found) == 2
    assert any("--max-dispatch-tokens-per-rank" in line for line in found)


def test_a_start_notes_the_variables(model_dir, monkeypatch):
    monkeypatch.setenv("SGL_ENABLE_JIT_DEEPGEMM", "1")
    config = prepare(EngineArgs.from_kwargs(model_path=str(model_dir()), load_format="dummy"), machine())
    assert any("SGL_ENABLE_JIT_DEEPGEMM" in note for note in config.notes)


# -- refusals


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_damaged_files_of_torch_save_are_named(model_dir, name):
    folder: Path = model_dir()
    (folder / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"{name}: not a ZIP archive: truncated, or saved before torch 1.6"):
        prepare(EngineArgs.from_kwargs(model_path=str(folder)), machine())


@pytest.mark.parametrize("name", ["weights.npz", "weights.ckpt"])
def test_weights_of_another_format_are_named(model_dir, name):
    folder: Path = model_dir()
    (folder / name).write_bytes(b"x")
    with pytest.raises(NotAvailableYet) as refusal:
        prepare(EngineArgs.from_kwargs(model_path=str(folder)), machine())
    text = str(refusal.value)
    assert name in text and "not supported yet" in text and "convert" in text


def test_the_name_of_a_checkpoint_format_is_refused_for_plain_weights(model_dir):
    with pytest.raises(ConfigError) as refusal:
        prepare(EngineArgs.from_kwargs(model_path=str(model_dir()), quantization="awq"), machine())
    assert str(refusal.value).count("config.json") == 1 and "use int4, int8 or fp8" in str(refusal.value)


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "eagle"])
def test_the_drafter_is_named_as_it_was_typed(resolved, model_dir, algorithm):
    with pytest.raises(ConfigError) as refusal:
        resolved(LLAMA, speculative_algorithm=algorithm)
    text = str(refusal.value)
    assert f"--speculative-algorithm {algorithm.upper()}:" in text and "EAGLE head" in text and "NGRAM" in text


def test_a_separate_head_for_a_model_without_mtp_layers(model_dir):
    head = model_dir(LLAMA, name="head")
    target = model_dir(LLAMA, name="target")
    flags = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(head), "load_format": "dummy"}
    with pytest.raises(
        ConfigError, match=r"a complete model; --speculative-algorithm EAGLE .* or with an EAGLE head; use"
    ):
        prepare(EngineArgs.from_kwargs(model_path=str(target), **flags), machine())


def test_a_hidden_key_is_no_key(resolved):
    shown = json.loads(json.dumps(resolved(SMALL, api_key="secret").flat()))
    assert shown["api_key"] == "***"
    with pytest.raises(ConfigError, match="/server_info hides a key"):
        resolved(SMALL, api_key=shown["api_key"])
