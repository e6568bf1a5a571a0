"""Every auto is resolved with a reason; contradictions name both flags."""

from __future__ import annotations

import os
import pickle

import pytest

from moe_engine.config.args import PARTS, EngineArgs
from moe_engine.config.experts import ExpertArgs
from moe_engine.config.field import fields_of
from moe_engine.config.graphs import GraphArgs
from moe_engine.config.lora import LoraArgs
from moe_engine.config.parallel import ParallelArgs
from moe_engine.config.speculative import SpeculativeArgs
from moe_engine.errors import ConfigError
from moe_engine.kernels.device import cpu_device
from moe_engine.planning.flags.validate import LEAST, MOST
from moe_engine.planning.prepare import prepare
from tests.config.conftest import SMALL, machine
from tests.models.published import V3

FP8 = ("fp8_e4m3", "fp8_e5m2")


def reasons(config):
    return {decision.name: decision.reason for decision in config.decisions}


def test_more_threads_than_cores_are_noted(resolved):
    assert resolved(cpu_threads=4).notes == resolved().notes
    (note,) = set(resolved(cpu_threads=5).notes) - set(resolved().notes)
    assert note.startswith("--cpu-threads 5: 4 physical cores this process may use")


def test_cpu_defaults(resolved):
    config = resolved()
    assert config.device == "cpu" and config.dtype == config.kv_cache_dtype == "bfloat16"
    assert config.page_size == 1 and config.chunked_prefill_size == 2048 and config.max_prefill_tokens == 16384
    assert config.context_len == 2048 and config.max_running_requests == 256
    assert config.max_total_num_tokens == 256 * 2048
    assert config.max_req_len == 2047 and config.max_req_input_len == 2042
    assert config.cpu_threads == 4
    assert config.scheduling.schedule_policy == "fcfs"
    assert config.kernels.model.asked == dict.fromkeys(("attention", "experts", "linear", "ops", "sampling"), "auto")
    why = reasons(config)
    assert "256 requests of 2048 tokens" in why["max_total_tokens"]
    assert "on a CPU" in why["max_running_requests"] and "on a CPU" in why["chunked_prefill_size"]
    assert all(why.values())


def test_nothing_stays_auto(resolved):
    config = resolved()
    decided = reasons(config)
    may_stay = {"revision", "download_dir", "chat_template", "api_key", "admin_api_key", "reasoning_parser",
                "tool_call_parser", "log_level_http", "max_queued_requests", "prefill_max_requests", "model_path",
                "quantization", "torch_compile_cache_dir", "timeout_graceful_shutdown",
                "constrained_json_whitespace_pattern", "ssl_certfile", "ssl_keyfile", "bucket_time_to_first_token",
                "bucket_inter_token_latency", "bucket_e2e_request_latency", "prompt_tokens_buckets",
                    "generation_tokens_buckets", "workload_profile", "slo", "kv_events_config", "completion_template",
                "hicache_storage_backend", "hicache_storage_dir", "hicache_storage_backend_extra_config",
                "request_waiting_timeout", "request_running_timeout", "max_mamba_cache_size",
                "session_hold", "disaggregation_ib_device", "allowed_local_media_path", "default_priority_value",
                    "otlp_service_name", "ssl_keyfile_password",
                "prefill_delayer_token_usage_low_watermark", "prefill_delayer_queue_min_ratio",
                "prefill_delayer_max_delay_ms", "prefill_delayer_forward_passes_buckets",
                "prefill_delayer_wait_seconds_buckets"}  # fmt: skip
    for part in (SpeculativeArgs, ParallelArgs, ExpertArgs, GraphArgs, LoraArgs):  # they request nothing
        may_stay |= {info.name for info in fields_of(part)}
    for part in PARTS.values():
        for info in fields_of(part):
            open_ended = info.default is None or (info.default == "auto" and "backend" not in info.name)
            if open_ended and info.name not in may_stay and info.name not in ("tokenizer_mode", "load_format"):
                assert info.name in decided, info.name


def test_fp8_cache_holds_more_tokens(resolved):
    few = {"mem_fraction_static": 0.02, "max_running_requests": 4096}  # limited by memory
    plain, scaled, bare = (resolved(kv_cache_dtype=name, **few) for name in ("auto", *FP8))
    assert plain.ledger.bytes_per_token == 2 * bare.ledger.bytes_per_token > scaled.ledger.bytes_per_token
    assert 1.99 < bare.max_total_num_tokens / plain.max_total_num_tokens < 2.01
    assert plain.max_total_num_tokens < scaled.max_total_num_tokens < bare.max_total_num_tokens
    assert (scaled.kv_cache_dtype, bare.kv_cache_dtype) == FP8 and scaled.dtype == "bfloat16"
    assert any("two mantissa bits" in note for note in bare.notes) and not any("fp8" in note for note in scaled.notes)


def test_given_values_are_kept(resolved):
    config = resolved(
        page_size=16, chunked_prefill_size=64, max_running_requests=3, max_total_tokens=1000, context_length=512,
        random_seed=7, dtype="float32", served_model_name="name", cpu_threads=2,
    )  # fmt: skip
    assert config.page_size == 16 and config.chunked_prefill_size == 64 and config.max_running_requests == 3
    assert config.max_total_num_tokens == 992 and config.context_len == 512 and config.random_seed == 7
    assert config.dtype == "float32" and config.served_model_name == "name" and config.cpu_threads == 2
    assert not {"page_size", "chunked_prefill_size", "random_seed", "dtype"} & set(reasons(config))
    assert config.max_req_len == 511


def test_requests_end_with_the_cache(resolved):
    config = resolved(max_total_tokens=1000)
    assert config.max_req_len == 999 and config.max_req_input_len == 994
    assert config.max_running_requests == 256
    assert "1000 tokens" in config.notes[0] and "2048" in config.notes[0]
    assert resolved(max_total_tokens=100).max_running_requests == 50


def test_pure_frozen_and_picklable(resolved):
    config = resolved(page_size=4)
    assert config == resolved(page_size=4)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError):
        config.page_size = 1


def test_flat_shows_resolved_values(resolved):
    flat = resolved(api_key="secret", page_size=16).flat()
    assert flat["page_size"] == 16 and flat["chunked_prefill_size"] == 2048 and flat["dtype"] == "bfloat16"
    assert flat["max_total_tokens"] == 256 * 2048 and flat["device"] == "cpu" and flat["port"] == 30000
    assert flat["api_key"] == "***" and flat["admin_api_key"] is None


def test_float16_checkpoints(resolved):
    assert resolved({**SMALL, "torch_dtype": "float16"}).dtype == "bfloat16"
    assert resolved({**SMALL, "torch_dtype": "float32"}).dtype == "float32"
    assert resolved(dtype="float16").dtype == "float16"


def test_gpu_chunk_by_memory(resolved):
    for total, chunk in ((16, 2048), (24, 4096), (48, 4096), (141, 8192), (180, 16384)):
        config = resolved(on=machine(total - 1, total, "cuda"))
        assert config.chunked_prefill_size == chunk and config.device == "cuda"


def test_v3_on_a_large_machine(resolved):
    config = resolved(V3, on=machine(1800, 2048))
    assert config.dtype == "bfloat16" and reasons(config)["quantization"] == "from config.json"
    assert config.context_len == 163840
    assert "would fit" in reasons(config)["max_total_tokens"]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("scaling", "default", "longest"),
    [
        (None, 2048, 2048),
        (YARN, 2048, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 8192, 8192),
        ({"type": "linear", "factor": 2.0}, 4096, 4096),
        (YARN | {"original_max_position_embeddings": 512}, 2048, 2048),
        (YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 2048, 2048),
    ],
)
def test_context_length_of_scaled_rotary_embeddings(resolved, scaling, default, longest):
    """The default is SGLang's (`get_context_length`); the flag may ask for all positions of the scaling, as in vLLM."""
    model = SMALL | {"rope_scaling": scaling}
    assert resolved(model).context_len == default
    asked = resolved(model, context_length=longest)
    assert asked.context_len == asked.model.context_length == longest
    with pytest.raises(ConfigError, match=f"use at most {longest}"):
        resolved(model, context_length=longest + 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"chunked_prefill_size": 8, "page_size": 16}, ["--chunked-prefill-size 8", "--page-size 16", "smaller"]),
        ({"chunked_prefill_size": 100, "page_size": 16}, ["--chunked-prefill-size 100", "--page-size 16", "96 or 112"]),
        ({"max_total_tokens": 8, "page_size": 16}, ["--max-total-tokens 8", "--page-size 16"]),
        ({"max_total_tokens": 1}, ["--max-total-tokens 1", "at least 2"]),
        ({"max_prefill_tokens": 8, "page_size": 16}, ["--max-prefill-tokens 8", "--page-size 16"]),
        ({"max_running_requests": 64, "max_total_tokens": 32}, ["--max-running-requests 64", "--max-total-tokens 32"]),
        ({"schedule_policy": "lpm", "disable_radix_cache": True}, ["--schedule-policy lpm", "--disable-radix-cache"]),
        ({"schedule_policy": "dfs-weight", "disable_radix_cache": True}, ["dfs-weight", "--disable-radix-cache"]),
        ({"schedule_policy": "lpm", "enable_priority_scheduling": True}, ["--enable-priority-sched", "not with lpm"]),
        ({"schedule_low_priority_values_first": True}, ["--schedule-low-priority", "--enable-priority-scheduling"]),
        ({"radix_eviction_policy": "lfu", "disable_radix_cache": True}, ["--radix-eviction", "--disable-radix-cache"]),
        ({"radix_eviction_policy_config": {"threshold": 9}}, ["--radix-eviction-policy-config", "threshold", "lru"]),
        ({"enable_mixed_chunk": True, "chunked_prefill_size": -1}, ["--enable-mixed-chunk", "-size -1"]),
        ({"skip_tokenizer_init": True, "reasoning_parser": "deepseek-r1"}, ["--reasoning-parser", "--skip-tokenizer"]),
        ({"context_length": 4096}, ["--context-length 4096", "2048", "max_position_embeddings"]),
        ({"kv_cache_dtype": "float32"}, ["--kv-cache-dtype float32", "--dtype"]),
        ({"mem_fraction_static": 1.5}, ["--mem-fraction-static 1.5", "between 0 and 1"]),
        ({"mem_fraction_static": 0}, ["--mem-fraction-static 0"]),
        ({"mem_fraction_static": float("nan")}, ["finite"]),
        ({"api_key": " "}, ["--api-key is empty"]),
        ({"api_key": "secret\n"}, ["--api-key: begins or ends with a blank or line break"]),
        ({"model_path": os.fsdecode(b"/models/caf\xe9")}, ["--model-path '/models/caf\\udce9'", "is not UTF-8"]),
        ({"admin_api_key": " secret"}, ["--admin-api-key: begins or ends"]),
        ({"port": 70000}, ["--port 70000", "65535"]),
        ({"page_size": 0}, ["--page-size 0", "at least 1"]),
        ({"chunked_prefill_size": 0}, ["--chunked-prefill-size 0", "-1"]),
        ({"chunked_prefill_size": -2}, ["--chunked-prefill-size -2"]),
        ({"schedule_conservativeness": -1}, ["--schedule-conservativeness"]),
        ({"watchdog_timeout": 0}, ["--watchdog-timeout 0"]),
        ({"timeout_keep_alive": 0}, ["--timeout-keep-alive 0", "at least 1"]),
        ({"timeout_graceful_shutdown": -1}, ["--timeout-graceful-shutdown -1", "at least 0"]),
        ({"log_requests_level": 4}, ["--log-requests-level 4", "at most 3"]),
        ({"served_model_name": "a:b"}, ["--served-model-name", "colon"]),
        ({"chat_template": "/no/such.jinja"}, ["--chat-template /no/such.jinja"]),
        ({"context_length": 4}, ["--context-length 4", "at least 8"]),
        ({"random_seed": 2**63}, ["--random-seed 9223372036854775808", "at most"]),
        ({"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 9999}, ["--speculative-eagle-topk 9999", "64"]),
        ({"preferred_sampling_params": '{"temperatur": 0}'}, ["--preferred-sampling-params.temperatur", "unknown"]),
        ({"preferred_sampling_params": {"top_p": 7}}, ["--preferred-sampling-params.top_p", "<= 1", "7"]),
        ({"tokenizer_path": "/no/such"}, ["--tokenizer-path /no/such: no such folder"]),
    ],
)  # fmt: skip
def test_contradictions_and_ranges(resolved, flags, words):
    with pytest.raises(ConfigError) as refusal:
        resolved(**flags)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_remarks_on_flags_without_effect(resolved):
    assert "--log-requests-level has no effect without --log-requests" in resolved(log_requests_level=1).notes
    assert any("--api-key" in note for note in resolved(host="0.0.0.0").notes)
    assert not resolved(host="0.0.0.0", api_key="k").notes
    assert resolved(disable_cuda_graph=True).notes
    pytest.importorskip("dill")
    for host, key, warned in (
        ("0.0.0.0", None, True), ("10.0.0.7", None, True), ("node7", None, True), ("10.0.0.7", "k", False),
        ("127.0.0.1", None, False), ("localhost", None, False), ("::1", None, False),
    ):  # fmt: skip
        notes = resolved(host=host, api_key=key, enable_custom_logit_processor=True).notes
        assert any("can run its own Python code in the engine" in note for note in notes) is warned, host


def test_an_end_outside_of_the_vocabulary_is_remarked(resolved):
    def notes(tokens):
        return [note for note in resolved(SMALL | {"eos_token_id": tokens}).notes if "eos_token_id" in note]

    assert not notes([1, 2])
    assert notes([1, 10**9]) and "eos_token_id 1000000000: no token" in notes([1, 10**9])[0]


def test_ranges_name_real_fields():
    names = {info.name for part in PARTS.values() for info in fields_of(part)}
    assert set(LEAST) <= names and set(MOST) <= names


def test_embedded_model_knows_its_formats():
    config = prepare(EngineArgs.from_kwargs(), machine())
    assert config.server.reasoning_parser == "deepseek-v3" and config.server.tool_call_parser == "deepseekv31"
    assert reasons(config)["reasoning_parser"] == "the embedded model's format"
    given = prepare(EngineArgs.from_kwargs(reasoning_parser="deepseek-r1"), machine())
    assert given.server.reasoning_parser == "deepseek-r1" and "reasoning_parser" not in reasons(given)
    ids_only = prepare(EngineArgs.from_kwargs(skip_tokenizer_init=True), machine())
    assert ids_only.server.reasoning_parser is None


def test_limits_of_determinism_are_remarked(model_dir):
    def notes(**flags):
        flags = {"model_path": str(model_dir()), "load_format": "dummy", "enable_deterministic_inference": True} | flags
        return [note for note in prepare(EngineArgs.from_kwargs(**flags), machine()).notes if "deterministic" in note]

    torch_rows = {"linear_backend": "torch", "moe_runner_backend": "torch", "dtype": "float32"}
    assert "torch kernels for linear, experts" in notes(**torch_rows)[0]
    assert not notes(enable_deterministic_inference=False, **torch_rows)
    if cpu_device().compiler:
        assert not notes(dtype="float32") and "guaranteed in float32" in notes(dtype="bfloat16")[0]
