"""The flags of /server_info: all are resolved, and a launch with them resolves to the same configuration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moe_engine.config.absent_flags import absent_flags
from moe_engine.config.args import PARTS, EngineArgs
from moe_engine.config.field import fields_of
from moe_engine.core.setup import engine_info
from moe_engine.errors import ConfigError
from moe_engine.frontend.client_api import kernel_flags
from moe_engine.models.config_file import load_model_config
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.output.launch_flags import launch_flags
from moe_engine.planning.resolve import resolve
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.worker.startup.build_runner import WorkerInfo
from tests.config.conftest import machine
from tests.config.sglang_flags import MACHINE, SERVER_ARGS
from tests.config.test_parallel import EIGHT, LLAMA
from tests.examples import examples
from tests.models.published import V3

MODES = {"deepep_mode", "eplb_algorithm", "tokenizer_mode", "moe_dispatch_dtype"}
"""Flags whose ``auto`` is a separate mode."""
CHOSEN_AGAIN = ("args", "decisions", "notes", "ledger", "machine")
"""Fields of the configuration that also depend on the form of the flags."""

CHOICES: dict[str, list[Any]] = {
    "tp_size": [1, 2, 4, 8],
    "dp_size": [1, 2],
    "attn_dp_size": [1, 2, 4],
    "enable_dp_attention": [True],
    "ep_size": [1, 2, 4],
    "enable_ep_moe": [True],
    "moe_a2a_backend": ["auto", "shared_memory", "two_hop"],
    "deepep_mode": ["normal", "low_latency"],
    "enable_two_batch_overlap": [True],
    "moe_dispatch_dtype": ["fp8", "bf16"],
    "enable_dp_lm_head": [True],
    "ep_num_redundant_experts": [4, 8, 16],
    "enable_eplb": [True],
    "eplb_algorithm": ["deepseek"],
    "expert_distribution_recorder_mode": ["stat", "per_pass"],
    "page_size": [1, 16],
    "chunked_prefill_size": [-1, 512, 1000, 4096],
    "max_running_requests": [3, 16, 100],
    "max_total_tokens": [512, 4096, "64k"],
    "mem_fraction_static": [0.5, 0.8],
    "context_length": [512, 2048],
    "kv_cache_dtype": ["fp8_e4m3"],
    "schedule_conservativeness": [0.3, 1.2],
    "schedule_policy": ["lpm"],
    "enable_mixed_chunk": [True],
    "disable_radix_cache": [True],
    "disable_cuda_graph": [True],
    "disable_cuda_graph_padding": [True],
    "cuda_graph_max_bs": [8, 300],
    "cuda_graph_bs": [[1, 2, 40]],
    "enable_torch_compile": [True],
    "enable_deterministic_inference": [True],
    "speculative_algorithm": ["NEXTN", "EAGLE", "NGRAM"],
    "speculative_num_steps": ["auto", 3],
    "speculative_eagle_topk": [1],
    "speculative_num_draft_tokens": [4],
    "skip_tokenizer_init": [True],
    "load_balance_method": ["auto", "shortest_queue"],
    "dtype": ["float32"],
    "preferred_sampling_params": ['{"temperature": 0}'],
    "incremental_streaming_output": [True],
    "cpu_threads": [2],
    "log_requests_level": [3],
    "nnodes": [1],
    "host": ["0.0.0.0"],
}
MACHINES = {
    "cpu": machine(40, 48),
    "gpu": machine(140, 141, "cuda", capability=(9, 0)),
}


@st.composite
def launches(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(CHOICES)), unique=True, max_size=8))
    return {name: draw(st.sampled_from(CHOICES[name])) for name in names}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in (("moe", EIGHT), ("dense", LLAMA)):
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "config.json").write_text(json.dumps(config))
    return found


def resolved_on(where: Machine, folder: Path, seed: int, flags: dict[str, Any]) -> ResolvedConfig:
    args = EngineArgs.from_kwargs(**{"model_path": str(folder), **flags})
    return resolve(args, load_model_config(folder), where, model_path=str(folder), drawn_seed=seed)


def shown(config: ResolvedConfig) -> dict[str, Any]:
    """The flags of /server_info, through JSON."""
    backends = {choice.family: choice.row.name for choice in config.kernels.model.choices}
    return json.loads(json.dumps(launch_flags(config) | kernel_flags(backends)))


def _settled(config: ResolvedConfig, name: str) -> Any:
    """A field; for kernels and the dispatcher only the chosen rows, not whether a flag named them."""
    if name == "kernels":
        return config.page_size, [choice.row.name for choice in config.kernels.model.choices]
    value, dispatch = getattr(config, name), config.parallel.dispatch
    if name != "parallel" or dispatch is None:
        return value
    topology = dataclasses.replace(value.topology, moe_a2a_backend=dispatch.row.name)
    return dataclasses.replace(value, topology=topology, dispatch=None), dispatch.row.name, dispatch.modes


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.filter_too_much])
@given(launches(), st.sampled_from(["moe", "dense"]), st.sampled_from(["cpu", "gpu"]))
@example({"tp_size": 2, "deepep_mode": "normal", "moe_a2a_backend": "auto"}, "moe", "cpu")
def test_flags_given_again_resolve_to_the_same(folders, flags, model, device):
    try:
        first = resolved_on(MACHINES[device], folders[model], 7, flags)
        dump = shown(first)
    except ConfigError:
        return  # the launch itself is refused
    again = resolved_on(MACHINES[device], folders[model], 8, dump)
    assert shown(again) == dump
    for field in dataclasses.fields(ResolvedConfig):
        if field.name not in CHOSEN_AGAIN:
            assert _settled(again, field.name) == _settled(first, field.name), field.name
    assert again.ledger.num_tokens == first.ledger.num_tokens
    left_open = {name for name, value in dump.items() if value == "auto"} - MODES - set(absent_flags().flags)
    assert left_open <= {"speculative_num_steps", "deepep_version"}


def test_many_random_launches_are_accepted(folders):
    """The property above covers accepted launches, not only refused ones."""
    one_by_one = [{name: value} for name, values in CHOICES.items() for value in values]
    accepted = 0
    for flags in one_by_one:
        try:
            resolved_on(MACHINES["cpu"], folders["moe"], 7, flags)
            accepted += 1
        except ConfigError:
            pass
    assert accepted > len(one_by_one) // 2


def test_every_flag_of_sglang_is_shown(resolved):
    dump = shown(resolved())
    fields = {info.name for part in PARTS.values() for info in fields_of(part)}
    fields |= {"cuda_graph_max_bs", "cuda_graph_bs", "stream_output"}  # names changed by SGLang
    absent = absent_flags()
    assert fields | set(absent.flags) | set(absent.no_effect) | {"use_mla_backend"} == set(dump)
    assert SERVER_ARGS.keys() - dump.keys() == set()
    true = {
        "is_embedding": False, "disaggregation_mode": "null", "grammar_backend": "llguidance", "use_mla_backend": True,
        "disable_cuda_graph": True, "cuda_graph_max_bs": None, "attention_backend": "cpu", "sampling_backend": "cpu",
        "page_size": 1, "chunked_prefill_size": 2048, "load_balance_method": "cache_aware", "lora_paths": None,
        "load_format": "safetensors", "device": "cpu", "stream_output": False, "torchao_config": "",
    }  # fmt: skip
    assert {name: dump[name] for name in true} == true


def test_shared_sizes_are_shown_as_sums_over_groups(resolved):
    flags = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True, "max_running_requests": 40}
    config = resolved(EIGHT, **flags, chunked_prefill_size=2048)
    dump = launch_flags(config)
    assert (config.chunked_prefill_size, config.max_running_requests) == (512, 10)
    assert (dump["chunked_prefill_size"], dump["max_running_requests"], dump["attn_dp_size"]) == (2048, 40, 4)
    assert (config.schedule_conservativeness, dump["schedule_conservativeness"]) == (0.3, 1.0)


def test_graphs_are_shown_with_their_sizes(folders):
    config = resolved_on(MACHINES["gpu"], folders["moe"], 7, {"max_running_requests": 6})
    dump = launch_flags(config)
    assert dump["cuda_graph_bs"] == [1, 2, 4, 6] == dump["cuda_graph_bs_decode"] and dump["cuda_graph_max_bs"] == 6
    assert not dump["disable_cuda_graph"] and dump["cuda_graph_backend_decode"] == "full"


def test_flags_given_again_in_a_file(folders, tmp_path):
    flags = shown(resolved_on(MACHINES["gpu"], folders["moe"], 7, {"tp_size": 2}))
    file = tmp_path / "serve.yaml"
    file.write_text(json.dumps(flags))
    assert EngineArgs.from_cli(["--config", str(file)]) == EngineArgs.from_kwargs(**flags)


@pytest.mark.parametrize("num_graphs", [0, 4])
def test_memory_of_graphs_is_reported_once_they_exist(folders, num_graphs):
    config = resolved_on(MACHINES["gpu"], folders["moe"], 7, {"max_running_requests": 6})
    info = engine_info(config, SimpleNamespace(info=WorkerInfo(num_graphs=num_graphs)))
    (row,) = (row for row in config.ledger.rows if row.name == "CUDA graphs")
    assert info.graph_bytes == (row.num_bytes if num_graphs else 0)


def test_every_flag_of_the_newest_sglang_is_known(resolved):
    """Release 0.5.23: a launch with all its flags at SGLang's defaults starts."""
    newest = json.loads(Path(__file__).with_name("sglang_0_5_23.json").read_text())
    config = resolved(V3, on=machine(2000, 2048), **{k: v for k, v in newest.items() if k not in MACHINE})
    assert config.speculation is None and config.scheduling.schedule_policy == "fcfs"


def test_sglangs_own_dump_is_accepted(resolved):
    """SGLang's ServerArgs with defaults, which has every flag."""
    config = resolved(V3, on=machine(2000, 2048), **{k: v for k, v in SERVER_ARGS.items() if k not in MACHINE})
    assert config.page_size == 1 and config.speculation is None
    (note,) = (note for note in config.notes if note.startswith("no effect"))
    assert "--triton-attention-num-kv-splits" in note
    assert "--lora-backend has no effect without --enable-lora" in config.notes and config.lora is None


@pytest.mark.parametrize("name", absent_flags().flags)
def test_defaults_of_absent_flags_are_accepted(name):
    for value in (None, *absent_flags().flags[name].accepted):
        for spelled in (value, str(value) if value is not None else None, [value]):
            assert not EngineArgs.from_kwargs(**{name: spelled}).given


def test_two_spellings_of_a_flag_must_agree():
    assert EngineArgs.from_kwargs(tp=2, tp_size=2).parallel.tp_size == 2
    with pytest.raises(ConfigError, match="--tp-size and --tp are one flag"):
        EngineArgs.from_kwargs(tp_size=2, tp=4)
