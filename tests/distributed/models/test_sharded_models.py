"""A model sharded over ranks gives the logits and the greedy tokens of the same model on one rank, which other tests
compare with transformers: every form of sharding, with prefill, decode and idle groups, on real processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moe_engine.parallel.context import SINGLE
from moe_engine.parallel.topology import Topology
from tests.distributed.dispatch.ranks import World
from tests.distributed.models import script
from tests.distributed.models.worlds import Case, load, run_cases
from tests.distributed.world_fixture import world_of
from tests.models.checkpoints import make_checkpoint
from tests.models.kimi_k3 import make_k3
from tests.models.mistral_native import make_mistral_large3_text
from tests.models.mxfp4 import mxfp4_copy
from tests.models.v4_checkpoints import make_v4
from tests.models.v4_quantized import quantized_copy

pytestmark = pytest.mark.drawn(12)

SEED = 11
TOLERANCE = 1e-4  # of the largest logit
FP8 = {
    "hidden_size": 192, "intermediate_size": 264, "moe_intermediate_size": 136, "kv_lora_rank": 144, "q_lora_rank": 72,
    "qk_nope_head_dim": 40, "v_head_dim": 24, "n_routed_experts": 8, "num_hidden_layers": 2, "fp8": True,
}  # fmt: skip
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_mtp_layers": 1, "vocab_size": 323},  # a vocabulary that no number of ranks divides
    "deepseek_v2_lite": {"num_hidden_layers": 2},
    "deepseek_v3-fp8": FP8,
    "qwen3": {"num_hidden_layers": 2, "attention_bias": True},  # with o_proj's bias, which counts once
    "qwen2": {"num_hidden_layers": 2, "vocab_size": 323},  # a tied head, biases
    "llama": {"num_hidden_layers": 2, "mlp_bias": True},  # one KV head, repeated
    "qwen3_moe": {},  # a dense layer between MoE layers
    "minimax_m2": {"num_hidden_layers": 2},  # norms over the heads of all ranks; two KV heads, repeated on four ranks
    "minimax_m3": {},  # selections of two KV heads, repeated on four ranks
    "mimo_v2_flash": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },  # one KV head and two
    "gpt_oss-mxfp4": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "intermediate_size": 160,
    },  # five groups of 32 columns: ranks hold different numbers of them
    "glm4_moe": {"num_hidden_layers": 2, "num_mtp_layers": 1},
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},  # states
    "qwen3_5_moe": {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_hidden_layers": 2},  # four projections
    "kimi_linear": {},  # states beside a latent cache, products of low rank
    "kimi_k3": {},  # sums of a latent space in front of its norm, blocks of the residual
    "bailing_hybrid": {
        "num_hidden_layers": 2,
        "layer_group_size": 2,
        "num_mtp_layers": 1,
        "expert_swiglu_limit_list": [0, 0.3],
    },  # gates, grouped experts, one layer's bounded
    # additive states, experts without gates, mixers without a feed-forward behind them
    "nemotron_h": {"n_groups": 4, "num_mtp_layers": 1},
    "longcat_flash": {
        "num_hidden_layers": 2,
        "num_mtp_layers": 1,
        "n_routed_experts": 16,
        "zero_expert_num": 4,
        "moe_topk": 12,
    },  # a shortcut over other tokens, zero experts
    "hunyuan_v1_moe": {"num_hidden_layers": 2},  # weights of norms after the rotation, a shared MLP
    "ernie4_5_moe": {"num_hidden_layers": 2, "num_mtp_layers": 1},  # a dense layer, one of experts, a dense MTP layer
    "mistral4": {"num_hidden_layers": 2},  # factors of queries by position
    "afmoe": {},  # norms of results, gates of channels
    "laguna": {"num_attention_heads_per_layer": [4, 8, 8]},  # gates by softplus, layers of different heads
    "step3p7": {
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "num_mtp_layers": 1,
        "vocab_size": 323,
    },  # gates, layers of different heads, bounded activations, experts in common tensors
    "mistral_large4": {"kv_source_layers": [0, 1, 0, 3]},  # factors of heads, layers without rotary channels or latents
    "mistral_large3": {"num_hidden_layers": 2},  # names of its own files, without a tower
    "hy_v3": {"num_hidden_layers": 2, "num_mtp_layers": 1},  # a shared MLP, an MTP layer with names of its own
    "phi3": {"num_hidden_layers": 2},  # matrices joined in the files
    "solar_open": {"num_hidden_layers": 2},
    "dots1": {"num_hidden_layers": 2},
    "hunyuan_v1_dense": {"num_hidden_layers": 2},  # weights of norms after the rotation
    "ernie4_5": {"num_hidden_layers": 2},
    "ministral3": {"num_hidden_layers": 2},
    "deepseek_v4": {"num_mtp_layers": 1},  # windows and entries, streams, experts by token id
    "deepseek_v4-fp4": {"hidden_size": 160, "moe_intermediate_size": 192},  # six groups of 32 columns
    "glm5_next": {"linear_attn_config": {"num_heads": 4, "head_dim": 12}},  # pools of index keys, states, streams
    "qwen4_exp": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "num_mtp_layers": 1,
    },  # gates of streams, n-grams with states, an MTP layer that reads all streams
    "glm_moe_dsa": {"num_mtp_layers": 1},  # contexts beyond the top-k, layers that share a selection
}
Checkpoint = Callable[[str], Path]

TWO = {
    "tp": Topology(2),
    "tp-dense1": Topology(2, moe_dense_tp_size=1),
    "ep": Topology(2, ep_size=2),
    "ep-allgather": Topology(2, ep_size=2, moe_a2a_backend="allgather"),
    "ep-all_to_all": Topology(2, ep_size=2, moe_a2a_backend="all_to_all"),
    "dp": Topology(2, attn_dp_size=2),
    "dp-head": Topology(2, attn_dp_size=2, enable_dp_lm_head=True),
    "dp-dense1": Topology(2, attn_dp_size=2, moe_dense_tp_size=1),
    "dp-ep": Topology(2, attn_dp_size=2, ep_size=2),
    "dp-ep-all_to_all": Topology(2, attn_dp_size=2, ep_size=2, moe_a2a_backend="all_to_all"),
    "dp-ep-shared_memory": Topology(2, 2, 2, moe_dense_tp_size=1, moe_a2a_backend="shared_memory"),
}
OWN: dict[str, Callable[..., Path]] = {
    "deepseek_v4": make_v4, "kimi_k3": make_k3, "mistral_large3": make_mistral_large3_text,
}  # fmt: skip
FOUR = {
    "tp": Topology(4),
    "tp2-ep2": Topology(4, ep_size=2),
    "ep-all_to_all": Topology(4, ep_size=4, moe_a2a_backend="all_to_all"),
    "dp2": Topology(4, attn_dp_size=2),
    "dp2-tp2-ep2-head": Topology(4, attn_dp_size=2, ep_size=2, enable_dp_lm_head=True),
    "dp2-ep-allgather": Topology(4, attn_dp_size=2, ep_size=4, moe_a2a_backend="allgather"),
    "dp2-ep-all_to_all-dense1": Topology(4, 2, 4, moe_dense_tp_size=1, moe_a2a_backend="all_to_all"),
    "dp4-ep-all_to_all": Topology(4, 4, 4, moe_a2a_backend="all_to_all"),
    "dp4": Topology(4, attn_dp_size=4),
    "dp2-ep-two_hop": Topology(4, 2, 4, moe_a2a_backend="two_hop", num_nodes=2),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("sharded")

    def make(name: str) -> Path:
        if name not in made:
            kind, _, form = name.partition("-")
            make_one = OWN.get(kind) or partial(make_checkpoint, kind)
            made[name] = make_one(folder / name, SEED, tokenizer=False, **CHECKPOINTS[name])
            if form == "mxfp4":
                made[name] = mxfp4_copy(made[name], folder / "copies")[0]
            if form == "fp4":
                made[name] = quantized_copy(made[name], folder / "v4", form)[0]
        return made[name]

    return make


world = world_of(2, 4)


@pytest.fixture(scope="module")
def alone() -> Callable[[Case], script.Trace]:
    """The results of one rank, computed once per model."""
    made: dict[tuple[Path, bool], script.Trace] = {}

    def run(case: Case) -> script.Trace:
        key = case.path, case.mtp
        if key not in made:
            stepper, mtp, _ = load(replace(case, topology=SINGLE.topology, row="torch"), SINGLE)
            made[key] = script.run(stepper, script.prompts(SEED, stepper.config.vocab_size), mtp=mtp)
        return made[key]

    return run


def check(case: Case, want: script.Trace, results: list[tuple[int, script.Trace]]) -> None:
    assert [group for group, _ in results] == [rank // case.topology.attn_tp_size for rank in range(len(results))]
    script.check_traces(results, want, case.topology.attn_dp_size, str(case), TOLERANCE)


def run_all(world: World, alone: Callable[[Case], script.Trace], cases: list[Case]) -> None:
    """In half of the cases with one attention group norms sum over the ranks."""
    cases = [
        replace(case, norms_sum=case.topology.attn_dp_size == 1 and random.random() < 0.5) for case in cases
    ]  # fmt: skip
    of_ranks = world.ranks.call(run_cases, cases, SEED, timeout_s=60.0)
    for number, case in enumerate(cases):
        results = [results[number] for results in of_ranks]
        check(case, alone(case), results)
        for rank, (group, trace) in enumerate(results):
            first = results[group * case.topology.attn_tp_size][1]  # ranks of a group must sample the same tokens
            for sequence, logits in trace.logits.items():
                assert logits.equal(first.logits[sequence]), (str(case), rank, sequence)


def topologies(world: World) -> dict[str, Topology]:
    return TWO if world.n == 2 else FOUR


def test_deepseek_v3_with_mtp(world: World, alone: Any, checkpoint: Checkpoint) -> None:
    path = checkpoint("deepseek_v3")
    run_all(world, alone, [Case(path, topology, mtp=True) for topology in topologies(world).values()])


def test_sparse_attention_with_mtp(world: World, alone: Any, checkpoint: Checkpoint) -> None:
    """All ranks of a group select the tokens of one rank."""
    some = ("tp", "dp-ep-all_to_all", "tp2-ep2", "dp2")
    path = checkpoint("glm_moe_dsa")
    run_all(world, alone, [Case(path, t, "cpu", mtp=True) for key, t in topologies(world).items() if key in some])


def test_shortcut_with_mtp(world: World, alone: Any, checkpoint: Checkpoint) -> None:
    """Experts and dense layers read the same tokens or others, in every form."""
    path = checkpoint("longcat_flash")
    run_all(world, alone, [Case(path, topology, "cpu", mtp=True) for topology in topologies(world).values()])


@pytest.mark.parametrize("name", ["glm4_moe", "hy_v3", "ernie4_5_moe", "bailing_hybrid"])
def test_families_with_mtp(world: World, alone: Any, checkpoint: Checkpoint, name: str) -> None:
    some = ("tp", "dp-ep-all_to_all", "tp2-ep2", "dp2", "dp2-ep-allgather")
    path = checkpoint(name)
    run_all(world, alone, [Case(path, t, "cpu", mtp=True) for key, t in topologies(world).items() if key in some])


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v2_lite", "deepseek_v3-fp8", "qwen3_moe", "minimax_m2", "gpt_oss-mxfp4", "qwen3_next", "qwen3_5_moe",
        "kimi_linear", "kimi_k3", "nemotron_h", "hunyuan_v1_moe", "mistral4", "mistral_large3", "solar_open", "dots1",
        "mimo_v2_flash", "step3p7", "laguna", "mistral_large4", "afmoe", "minimax_m3",
    ],
)  # fmt: skip
def test_mixtures(world: World, alone: Any, checkpoint: Checkpoint, name: str) -> None:
    """On the C++ kernels, if they run here: their code of experts and layers is different."""
    some = ("tp", "ep", "dp", "dp-ep-all_to_all", "tp2-ep2", "dp2", "dp2-ep-allgather", "ep-all_to_all")
    path, mtp = checkpoint(name), name in ("nemotron_h", "step3p7")  # with windows and heads of their own
    run_all(world, alone, [Case(path, t, "cpu", mtp=mtp) for key, t in topologies(world).items() if key in some])


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v4-fp4"])
def test_deepseek_v4(world: World, alone: Any, checkpoint: Checkpoint, name: str) -> None:
    """Ranks exchange the token ids that layers choose experts by; the MTP layer reads all streams."""
    some = ("tp", "ep", "dp", "dp-ep-all_to_all", "tp2-ep2", "dp2", "dp2-ep-allgather", "dp4")
    path, mtp = checkpoint(name), name == "deepseek_v4"
    cases = {key: Case(path, t, "cpu", mtp=mtp, page_size=16) for key, t in topologies(world).items()}
    run_all(world, alone, [cases[key] for key in some if key in cases])


@pytest.mark.parametrize("name", ["glm5_next", "qwen4_exp"])
def test_pools(world: World, alone: Any, checkpoint: Checkpoint, name: str) -> None:
    """All ranks of a group select the same pools; a page has whole pools."""
    some = ("tp", "ep", "dp", "dp-ep-all_to_all", "tp2-ep2", "dp2", "dp2-ep-allgather", "dp4")
    path, mtp = checkpoint(name), name == "qwen4_exp"
    cases = {key: Case(path, t, "cpu", mtp=mtp, page_size=4) for key, t in topologies(world).items()}
    run_all(world, alone, [cases[key] for key in some if key in cases])


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "hunyuan_v1_dense", "ernie4_5", "ministral3", "phi3"])
def test_dense(world: World, alone: Any, checkpoint: Checkpoint, name: str) -> None:
    some = ("tp", "tp-dense1", "dp", "dp-head", "dp2", "dp4", "dp2-tp2-ep2-head")
    run_all(world, alone, [Case(checkpoint(name), t) for key, t in topologies(world).items() if key in some])
