"""Parallelism flags: valid sizes resolve, others are refused with the flags and the valid sizes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.cluster.control_server import ControlServer
from moe_engine.config.args import EngineArgs
from moe_engine.config.parallel import ParallelArgs
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.executor.messages import Hello
from moe_engine.executor.options import RankGroupOptions
from moe_engine.executor.sharded_worker import fingerprint, rank_group_options
from moe_engine.kernels.device import Device
from moe_engine.kernels.symm_mem.regions import Regions
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.parallel.dispatch.deepep import generation
from moe_engine.planning.inputs.checkpoint import embedded_model
from moe_engine.planning.inputs.cluster_env import ClusterPlace, find_place
from moe_engine.planning.inputs.code_identity import code_identity
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.parallelism.resolve_parallel import SINGLE_PROCESS, ParallelPlan, even_groups, resolve_parallel
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolution_log import Record
from tests.config.conftest import SMALL, machine
from tests.examples import examples
from tests.models.published import V3

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "max_position_embeddings": 2048,
    "vocab_size": 1280,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
EIGHT = {**SMALL, "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    found = {}
    for name, config in (("small", SMALL), ("eight", EIGHT), ("llama", LLAMA)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        found[name] = load_model_config(folder)
    return found


def machine_with(device: str, **more: Any) -> Machine:
    return Machine(Device(device, device), 0, 0, 1, **more)


def plan_of(model: ModelConfig, place: ClusterPlace | None = None, device: str = "cpu", **flags: Any) -> ParallelPlan:
    return resolve_parallel(EngineArgs.from_kwargs(**flags), model, machine_with(device), place, Record())


# -- which GPUs


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ({}, 1),
        ({"base_gpu_id": 2}, 3),
        ({"tp_size": 4}, 4),
        ({"tp_size": 2, "dp_size": 2, "base_gpu_id": 1, "gpu_id_step": 2}, 8),
        ({"tp_size": 4, "nnodes": 2, "node_rank": 1, "dist_init_addr": "h:1"}, 2),
    ],
)
def test_every_rank_has_a_gpu(models, flags: dict[str, Any], needed: int) -> None:
    args = EngineArgs.from_kwargs(**flags)
    for seen in (None, needed):
        resolve_parallel(args, models["eight"], machine_with("cuda", num_devices=seen), None, Record())
    with pytest.raises(ConfigError, match=f"this machine has {needed - 1}"):
        resolve_parallel(args, models["eight"], machine_with("cuda", num_devices=needed - 1), None, Record())


# -- flags without effect


@pytest.mark.parametrize(
    ("flags", "device", "why"),
    [
        ({}, "cpu", "a model on one rank"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "h:1"}, "cuda", "GPUs use NCCL: plain pointers work inside"),
        ({"tp": 2}, "cuda", None),
        ({"dp": 2}, "cpu", "a model on one rank"),
        ({"tp": 2}, "cpu", None),
    ],
)
def test_remark_on_disable_custom_all_reduce(models, flags: dict[str, Any], device: str, why: str | None) -> None:
    record = Record()
    args = EngineArgs.from_kwargs(disable_custom_all_reduce=True, **flags)
    resolve_parallel(args, models["small"], machine_with(device), None, record)
    if why is None:
        assert not record.remarks
    else:
        (note,) = record.remarks
        assert note.startswith("--disable-custom-all-reduce: no effect (") and why in note


# -- all-reduce of GPUs


def test_gpus_of_one_host_have_a_custom_all_reduce(models) -> None:
    def chosen(unlinked: str | None = None, **flags: Any) -> tuple[bool, str]:
        record = Record()
        machine = machine_with("cuda", unlinked=unlinked)
        plan = resolve_parallel(EngineArgs.from_kwargs(**flags), models["eight"], machine, None, record)
        noted = [(each.value, each.reason) for each in record.decisions if each.name == "disable_custom_all_reduce"]
        decides = flags.get("tp", 1) > 1 and "disable_custom_all_reduce" not in flags
        assert noted == ([(not plan.all_reduce.is_custom, plan.all_reduce.reason)] if decides else [])
        return plan.all_reduce.is_custom, plan.all_reduce.reason

    assert chosen(tp=8)[0]
    assert chosen(tp=8, disable_custom_all_reduce=True) == (False, "--disable-custom-all-reduce")
    for reason, found in {
        "GPU 0 cannot": chosen("GPU 0 cannot reach GPU 1", tp=2), "one rank": chosen(),
        "2 nodes": chosen(tp=2, nnodes=2, dist_init_addr="h:1"), "DP attention": chosen(tp=4, attn_dp_size=2),
    }.items():  # fmt: skip
        assert not found[0] and reason in found[1]
    assert not plan_of(models["eight"], tp=2).all_reduce.is_custom


# -- valid launches


def test_one_process_unless_asked(models) -> None:
    assert plan_of(models["small"]) == SINGLE_PROCESS
    assert SINGLE_PROCESS.num_ranks == SINGLE_PROCESS.num_groups == SINGLE_PROCESS.ranks_per_node == 1


def test_two_spellings_of_attention_groups(models) -> None:
    record = Record()
    old = resolve_parallel(
        EngineArgs.from_cli(["--tp", "4", "--dp", "2", "--enable-dp-attention"]), models["small"], machine_with("cpu"),
        None, record,
    )  # fmt: skip
    assert old == plan_of(models["small"], tp=4, attn_dp_size=2)
    assert old.num_replicas == 1 and old.num_groups == 2 and old.num_ranks == 4
    assert [decision.reason for decision in record.decisions] == ["--dp-size with --enable-dp-attention"]
    replicas = plan_of(models["small"], tp=2, dp=3, attn_dp_size=2)
    assert (replicas.num_replicas, replicas.num_groups, replicas.num_ranks, replicas.ranks_per_node) == (3, 6, 6, 6)


@pytest.mark.parametrize(
    ("flags", "ep_size", "backend"),
    [
        ({"tp": 4}, 1, None),
        ({"tp": 4, "ep": 2}, 2, None),
        ({"tp": 4, "enable_ep_moe": True}, 4, None),
        ({"tp": 4, "ep": 4, "enable_ep_moe": True}, 4, None),
        ({"tp": 4, "moe_a2a_backend": "allgather"}, 4, "allgather"),
        ({"tp": 4, "moe_a2a_backend": "auto"}, 4, "shared_memory"),
        ({"tp": 1, "moe_a2a_backend": "all_to_all"}, 1, None),
    ],
)
def test_ep_size_from_the_flags(models, flags, ep_size, backend) -> None:
    plan = plan_of(models["small"], **flags)
    assert plan.topology.ep_size == ep_size
    assert (plan.dispatch.row.name if plan.dispatch else None) == backend


def test_modes_of_dispatch(models) -> None:
    travels = {"tp": 2, "moe_a2a_backend": "all_to_all"}
    auto = plan_of(models["small"], **travels).dispatch
    assert auto is not None and auto.modes == {"prefill": "normal", "decode": "low_latency"}
    normal = plan_of(models["small"], **travels, deepep_mode="normal").dispatch
    assert normal is not None and set(normal.modes.values()) == {"normal"}
    assert plan_of(models["small"], **travels, moe_dispatch_dtype="fp8").dispatch_fp8


def test_deepep_of_many_choices(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first DeepEP has no low latency for LongCat's top-12: refused from the config, and not taken by auto."""
    monkeypatch.setattr(generation, "why_not", lambda *place: None)
    small = replace(models["small"], hidden_size=6144)
    many, flags = replace(small, moe=replace(small.moe, top_k=12)), {"tp": 2, "deepep_version": "1"}
    for model, taken in ((small, "deepep"), (many, "symm_mem")):
        found = plan_of(model, device="cuda", moe_a2a_backend="auto", **flags).dispatch
        assert found is not None and found.row.name == taken
    with pytest.raises(ConfigError, match=r"--moe-a2a-backend deepep: .* not top-12; use --deepep-mode normal or"):
        plan_of(many, device="cuda", moe_a2a_backend="deepep", **flags)
    assert plan_of(many, device="cuda", moe_a2a_backend="deepep", deepep_mode="normal", **flags).dispatch is not None


def test_node_flags_override_the_launcher(models) -> None:
    place = ClusterPlace(2, 1, "node0:20001", 3, "SLURM_* of job 7")
    plan = plan_of(models["small"], place, tp=4)
    assert (plan.topology.num_nodes, plan.node_rank, plan.leader_address) == (2, 1, "node0:20001")
    assert plan.local_rank == 3 and plan.ranks_per_node == 2
    given = plan_of(models["small"], place, tp=4, nnodes=4, node_rank=2, dist_init_addr="[::1]:5000")
    assert (given.topology.num_nodes, given.node_rank, given.leader_address) == (4, 2, "[::1]:5000")
    assert plan_of(models["small"], place, tp=4, dist_init_addr="other:1").leader_address == "other:1"
    one = plan_of(models["small"], tp=2, dist_init_addr="node0:20000", dist_timeout=60)
    assert one.leader_address is None and one.start_seconds == 60.0


def test_nodes_from_the_launcher_equal_flags(models) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
             "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[1-2]"}  # fmt: skip
    torchrun = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
                "LOCAL_RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}  # fmt: skip
    plans = [plan_of(models["small"], find_place(environ), tp=4) for environ in (slurm, torchrun)]
    by_flags = plan_of(models["small"], tp=4, nnodes=2, node_rank=1, dist_init_addr=plans[0].leader_address)
    assert plans[0] == by_flags and plans[1].leader_address == "node1:29501"
    assert replace(plans[1], leader_address=by_flags.leader_address) == by_flags


# -- refusals

REFUSALS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("small", {"tp": 0}, ["--tp-size 0", "at least one rank"]),
    ("small", {"tp": 3}, ["4 attention heads", "--tp-size / --attn-dp-size", "2 or 4 can", "--attn-dp-size 3"]),
    ("small", {"tp": 16}, ["4 attention heads", "16 ranks", "4 can", "with --tp-size 16: --attn-dp-size 4"]),
    ("small", {"tp": 4, "attn_dp_size": 3}, ["--attn-dp-size 3", "--tp-size 4", "2 or 4 would"]),
    ("small", {"tp": 4, "attn_dp_size": 0}, ["--attn-dp-size 0", "--tp-size 4", "1 would"]),
    ("small", {"tp": 2, "dp": 4, "enable_dp_attention": True},
     ["--enable-dp-attention --dp-size 4 with --tp-size 2", "use --tp-size 4"]),
    ("small", {"tp": 4, "ep": 3}, ["--ep-size 3", "--tp-size 4", "2 or 4 would"]),
    ("small", {"dp": 8, "enable_dp_attention": True},
     ["--enable-dp-attention --dp-size 8 with --tp-size 1", "8 attention groups", "add --tp-size 8"]),
    ("small", {"tp": 4, "dp": 3, "enable_dp_attention": True}, ["--dp-size 3 does not divide --tp-size 4"]),
    ("small", {"tp": 8, "dp": 1, "enable_dp_attention": True}, ["8 ranks (--tp-size / --dp-size)", "--dp-size 2"]),
    ("small", {"attn_dp_size": 2}, ["--attn-dp-size 2 with --tp-size 1", "add --tp-size 2"]),
    ("small", {"ep": 2}, ["--ep-size 2 with --tp-size 1", "add --tp-size 2"]),
    ("small", {"nnodes": 2}, ["--nnodes 2 with --tp-size 1", "add --tp-size 2"]),
    ("small", {"tp": 2, "nnodes": 4}, ["--nnodes 4 with --tp-size 2", "use --tp-size 4"]),
    ("small", {"tp": 4, "nnodes": 3, "dist_init_addr": "a:1"}, ["--nnodes 3", "--tp-size 4", "2 or 4 would"]),
    ("small", {"tp": 4, "moe_dense_tp_size": 2}, ["--moe-dense-tp-size 2", "omit the flag, or 4", "(1)"]),
    ("small", {"tp": 2, "enable_dp_lm_head": True}, ["--enable-dp-lm-head", "--attn-dp-size above 1"]),
    ("small", {"tp": 4, "ep": 2, "moe_a2a_backend": "all_to_all"},
     ["--moe-a2a-backend all_to_all", "--ep-size must be --tp-size 4, not 2", "--moe-a2a-backend none"]),
    ("small", {"tp": 4, "ep": 2, "enable_ep_moe": True}, ["--enable-ep-moe", "--tp-size", "contradicts --ep-size 2"]),
    ("small", {"tp": 4, "dp": 2, "attn_dp_size": 4, "enable_dp_attention": True},
     ["--enable-dp-attention", "--dp-size 2", "contradicts --attn-dp-size 4"]),
    ("small", {"tp": 2, "enable_deepep_moe": True, "moe_a2a_backend": "allgather"},
     ["--enable-deepep-moe", "--moe-a2a-backend allgather", "drop one"]),
    ("small", {"tp": 2, "moe_a2a_backend": "deepep"}, ["--moe-a2a-backend deepep", "the device is cpu"]),
    ("small", {"tp": 2, "enable_deepep_moe": True}, ["--moe-a2a-backend deepep", "the device is cpu"]),
    ("small", {"tp": 2, "moe_a2a_backend": "two_hop"}, ["--moe-a2a-backend two_hop", "one node"]),
    ("llama", {"tp": 2, "moe_a2a_backend": "allgather"}, ["--moe-a2a-backend allgather", "LlamaForCausalLM"]),
    ("small", {"tp": 4, "nnodes": 2}, ["--nnodes 2", "--dist-init-addr HOST:PORT"]),
    ("small", {"tp": 4, "nnodes": 2, "node_rank": 2, "dist_init_addr": "a:1"}, ["--node-rank 2", "--nnodes 2", "0 to"]),
    ("small", {"node_rank": 1}, ["--node-rank 1", "--nnodes 1"]),
    ("small", {"tp": 2, "dist_init_addr": "node0"}, ["--dist-init-addr node0", "HOST:PORT"]),
    ("small", {"tp": 2, "dist_init_addr": "node0:99999"}, ["--dist-init-addr node0:99999", "HOST:PORT"]),
    ("small", {"dp": 0}, ["--dp-size 0", "at least one replica"]),
    ("small", {"tp": 2, "dp": 2, "nnodes": 2, "dist_init_addr": "a:1"},
     ["--dp-size 2", "--nnodes 2", "one machine", "router", "--enable-dp-attention"]),
    ("small", {"tp": 2, "enable_two_batch_overlap": True}, ["--enable-two-batch-overlap", "add --moe-a2a-backend"]),
    ("small", {"tp": 2, "enable_single_batch_overlap": True}, ["--enable-single-batch-overlap", "--moe-a2a-backend"]),
    (
        "small",
        {
            "tp": 2, "moe_a2a_backend": "all_to_all", "enable_single_batch_overlap": True,
            "disable_shared_expert_overlap": True,
        },
        ["drop one"],
    ),
    ("small", {"tbo_token_distribution_threshold": 0.7}, ["--tbo-token-distribution-threshold 0.7", "0 and 0.5"]),
    ("small", {"tp": 2, "moe_dispatch_dtype": "fp8"}, ["--moe-dispatch-dtype fp8", "--moe-a2a-backend"]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "flags", "words"), REFUSALS, ids=[str(flags) for _, flags, _ in REFUSALS])
def test_refusals_name_the_flags_and_the_fix(models, model, flags, words) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_of(models[model], **flags)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_too_many_nodes_of_a_launcher_name_the_launcher(models) -> None:
    place = ClusterPlace(2, 1, "node0:20001", 0, "SLURM_* of job 7")
    with pytest.raises(ConfigError) as refusal:
        plan_of(models["small"], place)
    assert "2 nodes (SLURM_* of job 7)" in str(refusal.value) and "add --tp-size 2" in str(refusal.value)
    assert "--nnodes" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({"n_routed_experts": 12}, {"tp": 8, "ep": 8}, ["12 experts", "8 ranks", "--ep-size", "6 or 12 can"]),
        ({"moe_intermediate_size": 130}, {"tp": 4}, ["experts of width 130", "4 ranks", "2 or 5 can", "--ep-size"]),
        ({"intermediate_size": 514}, {"tp": 4}, ["dense layers of width 514", "2 or 257", "--moe-dense-tp-size 1"]),
        ({"hidden_size": 200}, {"tp": 2, "moe_a2a_backend": "all_to_all", "moe_dispatch_dtype": "fp8"},
         ["--moe-dispatch-dtype fp8", "128 channels", "hidden size 200"]),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_sharded_is_refused(model_dir, changes, flags, words) -> None:
    model = load_model_config(model_dir(EIGHT, **changes))
    with pytest.raises(ConfigError) as refusal:
        plan_of(model, **flags)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_redundant_experts_complete_a_multiple_of_the_ranks(model_dir) -> None:
    model = load_model_config(model_dir(EIGHT, n_routed_experts=12))
    assert plan_of(model, tp=8, ep=8, ep_num_redundant_experts=4).topology.ep_size == 8


def test_kv_heads_are_shared_or_repeated(model_dir) -> None:
    shared = {**LLAMA, "num_attention_heads": 12, "hidden_size": 384}
    six = load_model_config(model_dir({**shared, "num_key_value_heads": 6}))
    assert plan_of(six, tp=3).num_ranks == 3 and plan_of(six, tp=12).num_ranks == 12
    with pytest.raises(ConfigError, match=r"6 KV heads .* over 4 ranks .* nor replicated .*; 3 or 6 divide"):
        plan_of(six, tp=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dp_size", 0), ("dp_size", -1), ("gpu_id_step", 0), ("base_gpu_id", -1), ("dist_timeout", 0),
     ("max_dispatch_tokens_per_rank", 0)],
)  # fmt: skip
def test_values_out_of_range(resolved, name, value) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {value}: must be at least"):
        resolved(**{name: value})


def test_unsupported_dispatchers_are_refused() -> None:
    with pytest.raises(NotAvailableYet, match="--moe-a2a-backend mooncake: not supported yet"):
        EngineArgs.from_kwargs(moe_a2a_backend="mooncake")
    assert EngineArgs.from_kwargs(load_balance_method="shortest_queue").parallel.load_balance_method == "total_requests"
    assert EngineArgs.from_kwargs().parallel == ParallelArgs()


# -- any sizes


def fits(tp: int, attn_dp: int, ep: int, dense: int | None, backend: str, lm_head: bool) -> bool:
    """The expected rule, for 8 heads, 16 experts, and widths that are powers of two."""
    if tp % attn_dp or tp % ep or 8 % (tp // attn_dp) or 16 % ep or 128 % (tp // ep):
        return False
    if dense not in (None, 1, tp) or (dense != 1 and 512 % tp):
        return False
    travels = backend != "none" and tp > 1
    if ep != tp if travels else 128 % tp:  # shared experts are sharded by width unless tokens are dispatched
        return False
    return not lm_head or attn_dp > 1


@settings(max_examples=examples(80))
@given(
    tp=st.integers(1, 8),
    attn_dp=st.integers(1, 8),
    ep=st.integers(1, 8),
    dense=st.sampled_from([None, 1, 2, 8]),
    backend=st.sampled_from(["none", "allgather", "all_to_all"]),
    lm_head=st.booleans(),
    replicas=st.integers(1, 3),
)
def test_exactly_the_sizes_that_fit_resolve(models, tp, attn_dp, ep, dense, backend, lm_head, replicas) -> None:
    flags = {
        "tp": tp, "attn_dp_size": attn_dp, "ep": ep, "moe_dense_tp_size": dense, "moe_a2a_backend": backend,
        "enable_dp_lm_head": lm_head, "dp": replicas,
    }  # fmt: skip
    flags = {name: value for name, value in flags.items() if value is not None}
    if not fits(tp, attn_dp, ep, dense, backend, lm_head):
        with pytest.raises(ConfigError, match="--"):
            plan_of(models["eight"], **flags)
        return
    plan = plan_of(models["eight"], **flags)
    topology = plan.topology
    assert (topology.tp_size, topology.attn_dp_size, topology.ep_size) == (tp, attn_dp, ep)
    assert topology.attn_tp_size * attn_dp == topology.moe_tp_size * ep == tp
    assert plan.num_ranks == tp * replicas and plan.num_groups == attn_dp * replicas
    assert (plan.dispatch is not None) == (backend != "none" and tp > 1)


# -- sizes per rank


def test_activations_of_attention_are_those_of_the_own_group(resolved) -> None:
    """The groups' tokens meet in the experts and in the residual; attention of one group is the largest part here."""
    model = {**SMALL, "num_attention_heads": 64, "num_key_value_heads": 64}
    flags = {"max_running_requests": 8, "context_length": 256, "dtype": "float32"}
    one = resolved(model, chunked_prefill_size=128, **flags)
    two = resolved(
        model, tp=2, dp=2, enable_dp_attention=True, chunked_prefill_size=256, **flags | {"max_running_requests": 16}
    )
    assert one.limits.forward_tokens == two.limits.forward_tokens == 128
    first, second = (
        next(row.num_bytes for row in config.ledger.rows if row.name == "activations") for config in (one, two)
    )
    assert second - first == 3 * 128 * one.model.hidden_size * 4


@pytest.mark.parametrize(
    "flags",
    [
        {"tp": 2}, {"tp": 4, "ep": 2}, {"tp": 4, "ep": 4}, {"tp": 4, "attn_dp_size": 2}, {"tp": 4, "attn_dp_size": 4},
        {"tp": 4, "attn_dp_size": 4, "enable_dp_lm_head": True, "moe_dense_tp_size": 1},
        {"tp": 4, "moe_a2a_backend": "all_to_all"},
    ],
)  # fmt: skip
def test_weights_of_all_ranks_cover_the_model_and_replicas(resolved, flags) -> None:
    weights = lambda **flags: resolved(**flags).ledger.weight_bytes  # noqa: E731
    assert weights() / flags["tp"] <= weights(**flags) < weights()
    if "attn_dp_size" in flags:  # every group has the attention weights
        assert weights(**flags) > weights(tp=flags["tp"])


def test_kv_of_a_rank(resolved) -> None:
    """Every rank of a group has MLA's latent; KV heads are divided, or replicated if there are more ranks."""
    per_token = lambda config, **flags: resolved(config, **flags).ledger.bytes_per_token  # noqa: E731
    assert per_token(SMALL) == per_token(SMALL, tp=4) == per_token(SMALL, tp=4, attn_dp_size=2)
    alone = per_token(LLAMA)
    assert per_token(LLAMA, tp=2) == per_token(LLAMA, tp=8) == alone // 2
    assert per_token(LLAMA, tp=4, attn_dp_size=2) == alone // 2 and per_token(LLAMA, tp=4, attn_dp_size=4) == alone


def test_a_hosts_memory_and_cores_are_shared_and_gpus_are_not(resolved) -> None:
    alone, four = resolved(on=machine(40, 48)), resolved(on=machine(40, 48), tp=2, dp=2)
    assert four.machine == alone.machine and four.cpu_threads == 1 and alone.cpu_threads == 4
    assert four.ledger.limit_bytes == alone.ledger.limit_bytes // 4
    gpu = machine(100, 141, "cuda")
    assert resolved(on=gpu, tp=4).ledger.limit_bytes == resolved(on=gpu).ledger.limit_bytes
    with pytest.raises(ConfigError, match="shared by 4 ranks"):
        resolved(V3, on=machine(500, 512), tp=4)


def test_attention_groups_share_a_chunk_and_conservativeness_is_lower(resolved) -> None:
    config = resolved(tp=4, attn_dp_size=4, chunked_prefill_size=100, page_size=4)
    assert config.chunked_prefill_size == 24 and config.schedule_conservativeness == pytest.approx(0.3)
    assert resolved(tp=4, attn_dp_size=4, chunked_prefill_size=4, page_size=4).chunked_prefill_size == 4
    assert resolved(tp=4, attn_dp_size=4, chunked_prefill_size=-1).chunked_prefill_size == -1
    assert resolved(tp=4).schedule_conservativeness == 1.0


def test_dispatch_buffers_are_counted(resolved) -> None:
    """Low-latency buffers of devices hold all tokens at every expert; buffers of CPUs have exact sizes."""

    def buffers(kind: str, **flags: Any) -> int:
        config = resolved(on=machine(100, 141, "cuda") if kind == "cuda" else None, tp=4, **flags)
        return sum(row.num_bytes for row in config.ledger.rows if row.name == "dispatch buffers")

    travels = {"moe_a2a_backend": "all_to_all"}
    for kind in ("cuda", "cpu"):
        assert not buffers(kind, moe_a2a_backend="none")
        few = buffers(kind, **travels, max_dispatch_tokens_per_rank=2)
        assert buffers(kind, **travels, deepep_mode="normal") < few < buffers(kind, **travels)
        assert (
            buffers(kind, **travels) < buffers(kind, **travels, moe_dispatch_dtype="fp8") < 2 * buffers(kind, **travels)
        )
    assert buffers("cpu", **travels) < buffers("cuda", **travels) / 2


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_the_own_exchange_is_counted(resolved, dtype: str) -> None:
    """Memory of each further token of a rank: its regions in symmetric memory, and rows of every expert."""

    def counted(tokens: int) -> tuple[int, int]:
        config = resolved(
            on=machine(100, 141, "cuda"), tp=4, moe_a2a_backend="symm_mem", moe_dispatch_dtype=dtype,
            max_dispatch_tokens_per_rank=tokens,
        )  # fmt: skip
        moe, hidden, fp8 = config.model.moe, config.model.hidden_size, config.parallel.dispatch_fp8
        assert fp8 == (dtype == "fp8")
        local = moe.num_experts // config.parallel.topology.ep_size
        regions = Regions(4, local, tokens, moe.top_k, hidden, 2, fp8)
        allocated = regions.num_bytes(2) + 2 * local * regions.capacity * hidden * 2
        ledger = sum(row.num_bytes for row in config.ledger.rows if row.name == "dispatch buffers")
        return ledger, allocated

    (ledger, allocated), (more, needed) = counted(16), counted(48)
    assert needed - allocated <= more - ledger <= 1.1 * (needed - allocated)


# -- from a plan to ranks


def test_ranks_of_a_plan(resolved) -> None:
    assert rank_group_options(resolved()) is None
    options = rank_group_options(resolved(tp=4, attn_dp_size=2))
    assert options is not None and options.size == 4 and options.group_size == 2
    assert [place.name for place in options.places] == ["DP0 TP0", "DP0 TP1", "DP1 TP2", "DP1 TP3"]
    assert [place.leads for place in options.places] == [True, False, True, False]
    config = resolved(tp=2, dp=2, gpu_id_step=2, base_gpu_id=1, on=machine(100, 141, "cuda"))
    replicas = [rank_group_options(config, replica) for replica in (0, 1)]
    names = [[(place.name, place.device) for place in options.places] for options in replicas if options is not None]
    assert names[0] == [("DP0 TP0", "cuda:1"), ("DP0 TP1", "cuda:3")]
    assert names[1] == [("DP1 TP0", "cuda:5"), ("DP1 TP1", "cuda:7")]
    single = rank_group_options(resolved(dp=2), 1)
    assert single is not None and [place.name for place in single.places] == ["DP1"]


def test_nodes_with_other_flags_have_other_fingerprints(resolved) -> None:
    prints = [
        fingerprint(resolved(**flags))
        for flags in ({"tp": 4}, {"tp": 4, "ep": 2}, {"tp": 4, "page_size": 2}, {"tp": 4, "dtype": "float32"},
                      {"tp": 4, "attn_dp_size": 2}, {"tp": 4, "moe_a2a_backend": "all_to_all"})
    ]  # fmt: skip
    assert len({tuple(found.items()) for found in prints}) == len(prints)
    assert fingerprint(resolved(tp=4)) == fingerprint(resolved(tp=4, port=1, log_level="debug"))


def test_a_flag_that_differs_is_named_once(resolved) -> None:
    one, other = (fingerprint(resolved(tp=4, context_length=length)) for length in (512, 1024))
    assert [name for name in one if one[name] != other[name] and "context" in name] == ["limits.context_len"]


def test_nodes_with_other_files_have_other_checkpoints(tmp_path: Path) -> None:
    """Copies in other folders are the same; a changed weight, or number of config.json, is not."""
    copies = [tmp_path / name for name in ("a", "b", "c", "d")]
    for copy in copies:
        shutil.copytree(embedded_model(), copy)
    shard = copies[2] / "model-00002-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    shard.write_bytes(content[:-4096] + bytes(4096))
    config = json.loads((copies[3] / "config.json").read_text())
    (copies[3] / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    found = []
    for copy in copies:
        flags = {"tp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:5000", "model_path": str(copy)}
        options = rank_group_options(prepare(EngineArgs.from_kwargs(**flags)))
        assert options is not None
        found.append(options.checkpoint)
    assert found[0] == found[1] and len(set(found)) == 3


def test_nodes_compare_their_code(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"tp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:5000", "load_format": "dummy"}
    of_node = fingerprint(prepare(EngineArgs.from_kwargs(**flags)))
    assert of_node.items() >= code_identity().items() >= {("torch", metadata.version("torch"))}
    sources, copies = tmp_path / "kernels", [tmp_path / name for name in "abc"]
    sources.mkdir()
    (sources / "x.py").write_text("1")
    for copy in copies:  # a checkout links its folders, an installed package has them
        copy.mkdir()
        (copy / "report.md").write_text(copy.name)
    (copies[0] / "kernels").symlink_to(sources)
    shutil.copytree(sources, copies[1] / "kernels")
    shutil.copytree(sources, copies[2] / "kernels")
    (copies[2] / "kernels" / "x.py").write_text("2")
    first, same, other = (code_identity(copy)["moe-engine's code"] for copy in copies)
    assert first == same != other


@pytest.mark.parametrize(
    ("fingerprint", "checkpoint", "words"),
    [
        ({"dtype": "a"}, "b", ""),
        ({"dtype": "x"}, "b", "flags or versions different from rank 0's (dtype x, not a): use"),
        ({"dtype": "a", "page_size": "1"}, "b", "(page_size 1, not none)"),
        ({}, "b", "(dtype none, not a)"),
        ({"dtype": "a"}, "x", "copy one checkpoint to all nodes"),
    ],
)
def test_ranks_of_other_flags_or_files_are_refused(fingerprint: dict[str, str], checkpoint: str, words: str) -> None:
    server: Any = ControlServer.__new__(ControlServer)
    refusals: list[str] = []

    def give_up(message: str, *, config_error: bool) -> None:
        assert config_error  # exit code 2: no supervisor starts it again
        refusals.append(message)

    server._uninvited, server._options = set(), RankGroupOptions(2, print, fingerprint={"dtype": "a"}, checkpoint="b")
    server._detector = SimpleNamespace(joined=print, describe=lambda rank: f"TP{rank}", give_up=give_up)
    server._on_hello(Hello(1, "there", 9, fingerprint, checkpoint=checkpoint))
    assert len(refusals) == bool(words) and all(words in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("width", "tp", "flags", "device", "ep_size"),
    [
        (1536, 8, {}, "cuda", 2),  # 12 blocks: three on each of four ranks
        (1408, 8, {}, "cuda", 2),  # 11 blocks: at most three of 2.75
        (768, 8, {}, "cuda", 4),  # 6 blocks: fewer than ranks
        (2048, 8, {}, "cuda", 1),
        (1536, 4, {}, "cuda", 1),
        (1536, 8, {"ep": 1}, "cuda", 1),
        (1536, 8, {}, "cpu", 1),  # dequantized: any columns
    ],
)
def test_ranks_hold_even_parts_of_experts_in_blocks(
    tmp_path: Path, width: int, tp: int, flags: dict[str, Any], device: str, ep_size: int
) -> None:
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    sizes = {"moe_intermediate_size": width, "n_routed_experts": 8, "hidden_size": 1024, "intermediate_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps({**EIGHT, **sizes, "quantization_config": blocks}))
    record = Record()
    args = EngineArgs.from_kwargs(tp=tp, **flags)
    plan = resolve_parallel(args, load_model_config(tmp_path), machine_with(device), None, record)
    assert plan.topology.ep_size == ep_size
    reasons = [decision.reason for decision in record.decisions if decision.name == "ep_size"]
    assert len(reasons) == (ep_size > 1)
    assert even_groups(load_model_config(tmp_path), 1) == 1
