"""The memory ledger's arithmetic, DeepSeek-V3's numbers, and refusals that name the sum and the sizes that fit."""

from __future__ import annotations

import dataclasses
import re

import pytest

from moe_engine import kv_connectors
from moe_engine.core.setup import scheduler_config
from moe_engine.errors import ConfigError
from moe_engine.kv_connectors import METHODS, connector_class
from moe_engine.planning.memory.ledger import (
    GB,
    SLOT_TOKEN_BYTES,
    LedgerRow,
    MemoryLedger,
    gb,
    slot_table_bytes,
    tokens_that_fit,
)
from moe_engine.scheduler.kv_cache.kv_connector import KVConnector
from tests.config.conftest import SMALL, machine
from tests.models.published import V3

V2_LITE = {
    **V3, "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 102400,
    "num_nextn_predict_layers": 0, "quantization_config": None, "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
}  # fmt: skip


def refusal(resolved, *args, **flags) -> str:
    with pytest.raises(ConfigError) as error:
        resolved(*args, **flags)
    return str(error.value)


def test_bytes_per_token(resolved):
    assert resolved(V3, on=machine(1800, 2048)).ledger.bytes_per_token == 70272
    assert resolved(V2_LITE, on=machine(60, 64)).ledger.bytes_per_token == 31104
    assert resolved(V2_LITE, on=machine(100, 128), dtype="float32").ledger.bytes_per_token == 2 * 31104


def test_v3_weights_are_counted_as_loaded(resolved):
    ledger = resolved(V3, on=machine(1800, 2048)).ledger
    parameters = 671.0e9
    kv_b_copy = 61 * 128 * 256 * 512 * 2
    assert ledger.weight_bytes == pytest.approx(parameters * 2 + kv_b_copy, rel=0.002)
    detail = ledger.rows[0].detail
    assert "671.03 B parameters" in detail and "dequantized" in detail


def test_gpu_rows_without_fp8_hold_dequantized_weights(resolved):
    """Each kernel family by its own row."""
    gpu = machine(140, 141, "cuda", capability=(9, 0))
    fp8 = SMALL | {"quantization_config": V3["quantization_config"]}

    def counted(model, linear, experts):
        flags = {"linear_backend": linear, "moe_runner_backend": experts, "attention_backend": "torch"}
        return resolved(model, on=gpu, **flags).ledger.weight_bytes

    plain = counted(SMALL, "torch", "torch")
    assert counted(fp8, "torch", "torch") == plain
    saved = [plain - counted(fp8, *rows) for rows in (("triton", "torch"), ("torch", "triton"), ("triton", "triton"))]
    assert min(saved) > 0.05 * plain and saved[0] + saved[1] == saved[2]


def test_sum_and_rest(resolved):
    modest = resolved(V2_LITE, on=machine(60, 64))
    assert modest.ledger.kv_bytes == pytest.approx(0.1 * 60 * GB, abs=31104)
    reason = {d.name: d.reason for d in modest.decisions}["max_total_tokens"]
    most = int(reason.split("--max-total-tokens ")[1].rstrip(")"))
    config = resolved(V2_LITE, on=machine(60, 64), max_total_tokens=most)
    ledger = config.ledger
    assert ledger.total_bytes == sum(row.num_bytes for row in ledger.all_rows())
    assert 0 <= ledger.spare_bytes < ledger.bytes_per_token + SLOT_TOKEN_BYTES
    assert {row.name: row.num_bytes for row in ledger.rows}["tokens of slots"] == 4 * (config.max_total_num_tokens + 1)
    assert ledger.limit_bytes == int(0.8 * 60 * GB)
    assert ledger.kv_bytes == (config.max_total_num_tokens + 1) * 31104
    static = (ledger.weight_bytes + ledger.kv_bytes) / (64 * GB)
    assert config.mem_fraction_static == pytest.approx(static, abs=1e-4)


def test_mem_fraction_is_weights_and_kv(resolved):
    ledger = resolved(V2_LITE, on=machine(60, 64), mem_fraction_static=0.6).ledger
    assert ledger.weight_bytes + ledger.kv_bytes == pytest.approx(0.6 * 64 * GB, abs=31104)
    assert resolved(mem_fraction_static=0.5).max_total_num_tokens == 256 * 2048


def test_mem_fraction_above_free_memory_is_refused(resolved):
    text = refusal(resolved, V2_LITE, on=machine(40, 64), mem_fraction_static=0.8)
    assert "--mem-fraction-static 0.8 asks for 51.20 GB of 64.00 GB" in text and "40.00 GB are free" in text
    most = float(re.findall(r"use at most ([\d.]+)", text)[0])
    assert resolved(V2_LITE, on=machine(40, 64), mem_fraction_static=most).mem_fraction_static == most


def test_tokens_that_fit():
    assert tokens_that_fit(1000, 10, 1) == 99
    assert tokens_that_fit(1000, 10, 16) == 80
    assert tokens_that_fit(5, 10, 1) == 0 and tokens_that_fit(-5, 10, 1) == 0
    assert slot_table_bytes(256, 2064) == 256 * 2064 * 4


def test_table_is_aligned():
    rows = (LedgerRow("weights", 14 * GB, "a"), LedgerRow("slot tables", 3 << 20, "b"))
    lines = MemoryLedger(rows, 16 * GB, "a test", 1024, 1000, 16).lines()
    assert lines[0].startswith("weights      14.00 GB  a")
    assert {line.index("B  ") for line in lines if "B  " in line} == {lines[0].index("B  ")}
    assert [line.split("  ")[0] for line in lines] == [
        "weights",
        "slot tables",
        "KV cache",
        "sum",
        "limit",
        "left over",
    ]
    assert gb(GB) == "1.00 GB" and gb(1 << 20) == "1.0 MB"


def test_too_large_a_model_names_the_sum(resolved):
    text = refusal(resolved, V3, on=machine(20, 24))
    assert re.search(r"weights 12\d\d\.\d\d GB \+ activations .* = 12\d\d\.\d\d GB", text)
    assert "this machine offers 16.00 GB (80% of 20.00 GB available" in text and "no flag changes that" in text


def test_a_machine_with_more_gpus_than_ranks_names_tp_size(resolved):
    eight = dataclasses.replace(machine(140, 141, "cuda"), num_devices=8)
    text = refusal(resolved, V3, on=eight, load_format="dummy")
    assert "this launch uses 1 of 8 GPUs; divide them with --tp-size 8, or let `moe-engine plan --workload`" in text
    text = refusal(resolved, V3, on=dataclasses.replace(eight, num_devices=1), load_format="dummy")
    assert "but a GPU offers" in text and "need a GPU with more than" in text
    assert "no flag changes that" in text and "--tp-size" not in text


def test_too_large_a_host_tier_names_a_size_that_fits(resolved):
    tier = {"enable_hierarchical_cache": True}
    text = refusal(resolved, V2_LITE, on=machine(60, 64), hicache_size=100, **tier)
    (size,) = re.findall(r"it fits with --hicache-size (\d+)$", text)
    assert resolved(V2_LITE, on=machine(60, 64), hicache_size=int(size), **tier).max_total_num_tokens > 4096


def test_too_many_tokens_names_what_fits(resolved):
    text = refusal(resolved, V2_LITE, on=machine(60, 64), max_total_tokens="4M")
    assert "--max-total-tokens 4000000 needs 115.87 GB of KV (31104 B a token)" in text
    fits = int(re.findall(r"use --max-total-tokens (\d+)", text)[0])
    assert resolved(V2_LITE, on=machine(60, 64), max_total_tokens=fits).max_total_num_tokens == fits
    refusal(resolved, V2_LITE, on=machine(60, 64), max_total_tokens=fits + 1)


def test_the_largest_chunk_that_fits_is_named(resolved):
    text = refusal(resolved, V2_LITE, on=machine(48, 64), chunked_prefill_size=1 << 17)
    chunk = int(re.findall(r"it fits with --chunked-prefill-size (\d+)", text)[0])
    assert 512 < chunk < 1 << 17
    resolved(V2_LITE, on=machine(48, 64), chunked_prefill_size=chunk)
    refusal(resolved, V2_LITE, on=machine(48, 64), chunked_prefill_size=2 * chunk)


@pytest.mark.parametrize("flags", [{"chunked_prefill_size": -1}, {}, {"max_running_requests": 4096}])
def test_nearest_flags_that_fit_do_fit(resolved, flags):
    text = refusal(resolved, V2_LITE, on=machine(38.2, 64), **flags)
    offered = re.findall(r"--[a-z-]+ [\d.]+(?: --[a-z-]+ [\d.]+)*", text.split("it fits with")[1])
    assert offered
    for way in offered:
        words = way.split()
        names = [name[2:].replace("-", "_") for name in words[::2]]
        config = resolved(V2_LITE, on=machine(38.2, 64), **{**flags, **dict(zip(names, words[1::2]))})
        assert config.max_total_num_tokens >= 128


def test_whole_prompts_need_room_for_a_whole_context(resolved):
    chunked = resolved(SMALL).ledger
    whole = resolved(SMALL, chunked_prefill_size=-1).ledger
    assert whole.rows[1].num_bytes > chunked.rows[1].num_bytes and "16384 tokens" in whole.rows[1].detail
    mixed = resolved(SMALL, enable_mixed_chunk=True).ledger
    assert "2048 tokens" in mixed.rows[1].detail  # mixed decodes count toward the chunk


def test_gpu_limit_keeps_a_reserve(resolved):
    ledger = resolved(on=machine(138, 141, "cuda")).ledger
    assert ledger.limit_bytes == 138 * GB - int(0.04 * 141 * GB)
    assert "processes" not in [row.name for row in ledger.rows]


def test_the_host_tier_shares_the_memory_of_a_cpu(resolved):
    alone = resolved(V2_LITE, on=machine(60, 64), mem_fraction_static=0.6)
    tiered = resolved(V2_LITE, on=machine(60, 64), mem_fraction_static=0.6, enable_hierarchical_cache=True)
    assert alone.host_tier_tokens == 0
    assert tiered.host_tier_tokens == 2 * tiered.max_total_num_tokens
    assert tiered.max_total_num_tokens == pytest.approx(alone.max_total_num_tokens / 3, rel=0.001)
    assert tiered.ledger.bytes_of("host KV tier") == tiered.host_tier_tokens * 31104
    assert tiered.ledger.bytes_of("transfer window") == 0
    transferring = resolved(V2_LITE, on=machine(60, 64), disaggregation_mode="decode", max_total_tokens=1000)
    assert transferring.ledger.bytes_of("transfer window") == 8 * 256 * 31104
    assert tiered.ledger.total_bytes <= tiered.ledger.limit_bytes
    sized = resolved(
        V2_LITE,
        on=machine(60, 64),
        mem_fraction_static=0.6,
        enable_hierarchical_cache=True,
        hicache_size=3,
        page_size=4,
    )
    assert sized.host_tier_tokens == 3 * 10**9 // 31104 // 4 * 4


def test_flags_of_the_host_tier(resolved):
    assert "--disable-radix-cache" in refusal(resolved, enable_hierarchical_cache=True, disable_radix_cache=True)
    assert "--hicache-ratio 0" in refusal(resolved, enable_hierarchical_cache=True, hicache_ratio=0.0)
    storage = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
    assert resolved(enable_hierarchical_cache=True).hicache_write_policy == "write_back"
    found = resolved(**storage)
    assert found.hicache_write_policy == "write_through" and found.page_size == 64
    assert resolved(page_size=16, hicache_write_policy="write_back", **storage).page_size == 16
    assert scheduler_config(resolved(chunked_prefill_size=48, **storage)).page_size == 16
    assert scheduler_config(resolved(max_total_tokens=36, max_running_requests=1, **storage)).page_size == 32
    for given, why in [
        ({"hicache_storage_backend": "file"}, "add --enable-hierarchical-cache"),
        ({**storage, "hicache_storage_backend": "files"}, "unknown; use file, nixl, mooncake, or the path"),
        ({**storage, "hicache_storage_size": -1.0}, "must not be negative"),
        ({**storage, "hicache_storage_backend_extra_config": "[1]"}, "not a JSON object"),
        ({**storage, "hicache_storage_backend_extra_config": "@/no/such"}, "give a JSON object, or @FILE"),
        ({**storage, "hicache_storage_backend_extra_config": '{"prefetch_threshold": "x"}'}, "must be a number"),
        ({**storage, "hicache_storage_backend_extra_config": '{"directory": "/x"}'}, "directory: unknown"),
    ]:
        assert why in refusal(resolved, **given)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lmcache", "--kv-connector 'lmcache': unknown; use host, or the path of a class as package.module:Class"),
        ("no_such_package.tier:Tier", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'"),
        ("moe_engine.scheduler.tiers.host_tier:Tier", "cannot be loaded: AttributeError"),
        ("moe_engine.scheduler.tiers.host_tier:MIN_LOAD", "not a class"),
        ("collections:OrderedDict", "OrderedDict has no method get_num_new_matched_tokens, start_load"),
        ("moe_engine.scheduler.kv_cache.kv_connector:KVConnector", "KVConnector has no attribute copies"),
    ],
)
def test_unusable_kv_connectors_are_refused(resolved, name, words):
    assert words in refusal(resolved, enable_hierarchical_cache=True, kv_connector=name)


def test_the_connector_of_the_host_tier_has_a_name(resolved):
    assert resolved(enable_hierarchical_cache=True, kv_connector="host").host_tier_tokens
    assert set(METHODS) < set(vars(KVConnector))
    with pytest.raises(ConfigError, match="HostTier has no method start"):
        kv_connectors._check(connector_class("host"), kv_connectors.WORKER_METHODS)


def test_the_host_tier_beside_a_gpu_fits_into_host_memory(resolved):
    roomy = dataclasses.replace(machine(140, 141, "cuda", capability=(9, 0)), host_bytes=1 << 50)
    small = dataclasses.replace(roomy, host_bytes=40 * GB)
    tier = {"enable_hierarchical_cache": True, "linear_backend": "torch", "moe_runner_backend": "torch"}
    tier |= {"attention_backend": "torch"}

    def tier_of(on, **more) -> tuple[int, str]:
        found = resolved(V2_LITE, on=on, **tier, **more)
        (note,) = (decision for decision in found.decisions if decision.name == "hicache_ratio")
        return sum(row.num_bytes for row in found.ledger.host_rows), note.reason

    whole, reason = tier_of(roomy)
    assert whole > 40 * GB and reason == "the default"
    for share in (0.8, 0.25):
        used, reason = tier_of(small, hicache_host_memory_fraction=share)
        assert share * 39.5 * GB < used <= share * 40 * GB
        assert f"{share:g} of the available host memory: 40.00 GB" in reason
    for name, value in (("hicache_ratio", 2.0), ("hicache_size", 60)):
        message = refusal(resolved, V2_LITE, on=small, **tier, **{name: value})
        assert re.search(
            rf"--{name.replace('_', '-')}: the host-RAM tier needs .* and 40.00 GB of host memory", message
        )
    wrong = tier | {"hicache_host_memory_fraction": 1.5}
    assert "--hicache-host-memory-fraction 1.5" in refusal(resolved, V2_LITE, on=small, **wrong)
