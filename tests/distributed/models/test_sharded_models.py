"""A model sharded over ranks gives the logits and the greedy tokens of the same model on one rank, which other tests
compare with transformers: every form of sharding, with prefill, decode and idle groups, on real processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.widths import widths_of
from moe_engine.parallel.context import SINGLE
from moe_engine.parallel.topology import Topology
from tests.distributed.dispatch.ranks import World
from tests.distributed.models import script
from tests.distributed.models.worlds import Case, load, run_cases
from tests.distributed.world_fixture import world_of
from tests.examples import examples
from tests.models.checkpoints import make_checkpoint
from tests.models.deepseek_v41 import make_v41
from tests.models.kimi_k3 import make_k3
from tests.models.ling_v2 import make_ling_v2
from tests.models.ling_v2_5 import make_ling
from tests.models.mimo import make_mimo
from tests.models.mistral_native import make_mistral_large3_text
from tests.models.mxfp4 import mxfp4_copy
from tests.models.v4_checkpoints import make_v4
from tests.models.v4_quantized import quantized_copy

pytestmark = pytest.mark.drawn(12)

SEED, NUM_FORMS = 11, 4
TOLERANCE = 1e-4  # of the largest logit
FP8 = {
    "hidden_size": 192, "intermediate_size": 264, "moe_intermediate_size": 136, "kv_lora_rank": 144, "q_lora_rank": 72,
    "qk_nope_head_dim": 40, "v_head_dim": 24, "n_routed_experts": 8, "num_hidden_layers": 2, "fp8": True,
}  # fmt: skip
STATES = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_mtp_layers": 1, "vocab_size": 323},  # a vocabulary that no number of ranks divides
    "deepseek_v2": {"num_hidden_layers": 2},
    "deepseek_v2_lite": {"num_hidden_layers": 2},
    "deepseek_v32": {"num_mtp_layers": 1},
    "deepseek_v3-fp8": FP8,
    "qwen3": {"num_hidden_layers": 2, "attention_bias": True},  # with o_proj's bias, which counts once
    "qwen2": {"num_hidden_layers": 2, "vocab_size": 323},  # a tied head, biases
    "mistral": {"num_hidden_layers": 2},
    "llama": {"num_hidden_layers": 2, "mlp_bias": True},  # one KV head, repeated
    "qwen2_moe": {},  # a gated shared expert, biases
    "qwen3_moe": {},  # a dense layer between MoE layers
    "minimax_m2": {"num_hidden_layers": 2},  # norms over the heads of all ranks; two KV heads, repeated on four ranks
    "mixtral": {"num_hidden_layers": 2},
    "minimax_m3": {"num_mtp_layers": 1},  # selections of two KV heads, repeated on four ranks
    "mimo": {"num_hidden_layers": 2, "num_mtp_layers": 1},  # an MTP layer that reads the residual
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
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_mtp_layers": 1},
    "qwen3_next": {**STATES, "num_mtp_layers": 1},
    "qwen3_5": STATES,
    "qwen3_5_moe": {**STATES, "num_hidden_layers": 2, "num_mtp_layers": 1},  # four projections
    "kimi_linear": {},  # states beside a latent cache, products of low rank
    "kimi_k3": {},  # sums of a latent space in front of its norm, blocks of the residual
    "bailing_hybrid": {
        "num_hidden_layers": 2,
        "layer_group_size": 2,
        "num_mtp_layers": 1,
        "expert_swiglu_limit_list": [0, 0.3],
    },  # gates, grouped experts, one layer's bounded
    "ling_v2": {"num_hidden_layers": 2, "num_mtp_layers": 1},  # q, k and v joined in the files
    # lightning attention: norms of groups of heads on several ranks, and of whole groups on each
    "ling_v2_5": {"num_attention_heads": 12, "num_kv_heads_for_linear_attn": 12, "num_mtp_layers": 1},
    "ling_v2_5-groups": {"num_attention_heads": 8, "num_kv_heads_for_linear_attn": 8, "group_norm_size": 4},
    # additive states, experts without gates, mixers without a feed-forward after them
    "nemotron_h": {"n_groups": 4, "num_mtp_layers": 1},
    "lfm2": {},  # channels of convolutions
    "lfm2_moe": {},
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
    "llama4": {},  # chunks, scaled inputs of experts, dense layers between
    "laguna": {"num_attention_heads_per_layer": [4, 8, 8]},  # gates by softplus, layers of different heads
    "step3p7": {
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "num_mtp_layers": 1,
        "vocab_size": 323,
    },  # gates, layers of different heads, bounded activations, experts in common tensors
    "mistral_large4": {"kv_source_layers": [0, 1, 0, 3]},  # factors of heads, layers without rotary channels or latents
    "mistral_large3": {"num_hidden_layers": 2},  # names of its own files, without a tower
    "hy_v3": {"num_hidden_layers": 2, "num_mtp_layers": 1},  # a shared MLP, an MTP layer with names of its own
    "olmoe": {"num_hidden_layers": 2},  # norms over the heads of all ranks
    "flex_olmo": {"num_hidden_layers": 2},  # experts whose result is normed, and whose input is not
    "exaone_moe": {},  # layers without positions beside windows, grouped experts
    "flint": {},  # sinks and norms of heads in layers without positions
    "mellum": {},  # windows with a rotary embedding of their own
    "seed_oss": {"num_hidden_layers": 2},  # a bias of o_proj, which counts once
    "glm4": {"num_hidden_layers": 2},  # norms of results, gate and up joined in the files
    "gemma4": {},  # norms of experts and MLP, values that are keys, other heads in layers with a window
    "axk1": {"mlp_layer_types": ["dense", "sparse", "sparse"]},  # norms of results of layers with experts alone
    "cohere2": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},  # parts in parallel
    "cohere2_moe": {},  # a mean with shared experts
    "granite_swa": {},  # sinks in layers without positions and in those with a window
    "granitemoe_swa": {},
    "gemma2": {"num_hidden_layers": 2},  # bounded scores
    "gemma3": {},  # norms of results, GELU, windows with a rotary embedding of their own
    "olmo2": {"num_hidden_layers": 2},  # norms of results alone, norms over the heads of all ranks
    "granitemoeshared": {"num_hidden_layers": 2},  # factors of embeddings and logits, experts in common tensors
    "phi3": {"num_hidden_layers": 2},  # matrices joined in the files
    "minimax": {},  # lightning attention, norms whose results are the residual
    "phimoe": {"num_hidden_layers": 2, "vocab_size": 323},  # LayerNorms, a head with a bias
    "solar_open": {"num_hidden_layers": 2},
    "youtu": {"num_hidden_layers": 2},  # MLA without experts
    "dots1": {"num_hidden_layers": 2},
    "hunyuan_v1_dense": {"num_hidden_layers": 2},  # weights of norms after the rotation
    "ernie4_5": {"num_hidden_layers": 2},
    "ministral3": {"num_hidden_layers": 2},
    "deepseek_v4": {"num_mtp_layers": 1},  # windows and entries, streams, experts by token id
    "deepseek_v4-fp4": {"hidden_size": 160, "moe_intermediate_size": 192},  # six groups of 32 columns
    "deepseek_v41": {},  # entries that layers share, n-grams
    "glm5_next": {"num_mtp_layers": 1},  # pools of index keys, states, streams
    "qwen4_exp": {**STATES, "num_mtp_layers": 1},  # gates of streams, n-grams with states, MTP that reads all streams
    "glm_moe_dsa": {"num_mtp_layers": 1},  # contexts beyond the top-k, layers that share a selection
}
OWN: dict[str, Callable[..., Path]] = {
    "deepseek_v4": make_v4,
    "deepseek_v41": lambda path, seed, tokenizer: make_v41(path, seed),
    "kimi_k3": make_k3,
    "ling_v2": make_ling_v2,
    "mimo": make_mimo,
    "ling_v2_5": make_ling,
    "mistral_large3": make_mistral_large3_text,
}
Checkpoint = Callable[[str], Path]
BACKENDS = "none", "allgather", "all_to_all", "shared_memory", "two_hop"


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
                torch.manual_seed(SEED)  # as the other checkpoints: one in some hundred draws has a near tie of experts
                made[name] = quantized_copy(made[name], folder / "v4", form)[0]
        return made[name]

    return make


world = world_of(2, 4)


def check(case: Case, want: script.Trace, results: list[tuple[int, script.Trace]]) -> None:
    assert [group for group, _ in results] == [rank // case.topology.attn_tp_size for rank in range(len(results))]
    script.check_traces(results, want, case.topology.attn_dp_size, str(case), TOLERANCE)
    for rank, (group, trace) in enumerate(results):
        first = results[group * case.topology.attn_tp_size][1]  # ranks of a group must sample the same tokens
        for sequence, logits in trace.logits.items():
            assert logits.equal(first.logits[sequence]), (str(case), rank, sequence)


def able(config: ModelConfig, num_ranks: int) -> list[Topology]:
    """All topologies of the CPU that the model accepts."""
    sizes, found = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0], []
    for dp, ep, dense, head, backend in product(sizes, sizes, (None, 1), (False, True), BACKENDS):
        nodes = 2 if backend == "two_hop" else 1
        with suppress(ConfigError):
            topology = Topology(num_ranks, dp, ep, dense, head, backend, nodes)
            topology.check(widths_of(config))
            if (config.is_moe or ep == 1) and num_ranks > nodes:
                found.append(topology)
    return found


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_drawn_forms(world: World, checkpoint: Checkpoint, name: str) -> None:
    """Drawn topologies, rows, page sizes; with MTP layers, or with hidden states after each layer, which ranks gather;
    with one attention group also norms that sum over the ranks."""
    path = checkpoint(name)
    config = load_model_config(path)
    cases, forms = [], able(config, world.n)
    for topology in random.sample(forms, min(len(forms), examples(NUM_FORMS))):
        row, page_size = random.choice(("torch", "cpu")), config.page_multiple * random.choice((1, 4))
        drafts, sums, taps = (random.random() < 0.5 for _ in range(3))
        drafts &= config.num_nextn_predict_layers > 0
        sums &= topology.attn_dp_size == 1
        cases.append(Case(path, topology, row, drafts, page_size, sums, taps and not drafts))
    of_ranks = world.ranks.call(run_cases, cases, SEED, timeout_s=60.0)
    alone: dict[Any, script.Trace] = {}
    for number, case in enumerate(cases):
        key = case.mtp, case.taps
        if key not in alone:
            stepper, mtp, _ = load(replace(case, topology=SINGLE.topology, row="torch", norms_sum=False), SINGLE)
            alone[key] = script.run(stepper, script.prompts(SEED, config.vocab_size), mtp=mtp)
        check(case, alone[key], [results[number] for results in of_ranks])
