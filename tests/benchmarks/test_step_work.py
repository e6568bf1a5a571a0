"""The formulas of the limits against numbers computed by hand, and against limits measured elsewhere."""

import pytest

from benchmarks.checkpoints import SHAPES
from benchmarks.step_work import MachineLimits, ModelWork, StepWork
from benchmarks.workloads import WORKLOADS

# 1 dense and 1 MoE layer, hidden 8, 2 heads of 4 + 2 / 3, q rank 5, latent 6, 4 experts of width 3, 2 a token.
SMALL_MOE = {
    "vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 2, "first_k_dense_replace": 1, "intermediate_size": 10,
    "moe_intermediate_size": 3, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "num_attention_heads": 2, "q_lora_rank": 5, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
    "v_head_dim": 3, "torch_dtype": "bfloat16",
}  # fmt: skip
# q_a 8*5, q_b 5*12, kv_a 8*8, kv_b 6*14, o 6*8
ATTENTION = 40 + 60 + 64 + 84 + 48
EXPERT = 3 * 8 * 3
LAYERS = 2 * ATTENTION + 3 * 8 * 10 + EXPERT + 4 * 8  # with the dense MLP, the shared expert and the router
HEAD = 32 * 8


def test_counts_of_a_small_moe():
    work = ModelWork.from_config(SMALL_MOE)
    assert work.layer_weights == LAYERS
    assert work.head_weights == HEAD
    assert work.expert_weights == EXPERT
    assert work.active_weights == LAYERS + 2 * EXPERT + HEAD
    assert work.kv_bytes_per_token == 2 * (6 + 2) * 2
    assert work.prefill_flops_per_pair == 2 * 2 * 2 * (4 + 2 + 3)
    assert work.decode_flops_per_pair == 2 * 2 * 2 * (6 + 2 + 6)


def test_experts_touched():
    work = ModelWork.from_config(SMALL_MOE)
    assert work.experts_touched(1) == pytest.approx(2)
    assert work.experts_touched(2) == pytest.approx(3)  # 4 * (1 - 1/4)
    assert work.experts_touched(1000) == pytest.approx(4)


def test_decode_step_reads_weights_once_and_every_context():
    work = ModelWork.from_config(SMALL_MOE)
    step = work.decode_step([10, 20])
    assert step.bytes_read == pytest.approx(2 * (LAYERS + HEAD + 3 * EXPERT) + 30 * work.kv_bytes_per_token)
    assert step.flops == 2 * work.active_weights * 2 + 30 * work.decode_flops_per_pair


def test_prefill_counts_causal_pairs_and_the_cached_prefix():
    work = ModelWork.from_config(SMALL_MOE)
    step = work.prefill([(4, 0), (2, 10)])
    pairs = 4 * 5 // 2 + (2 * 3 // 2 + 2 * 10)
    body = work.active_weights - HEAD
    assert step.flops == 2 * body * 6 + 2 * HEAD * 2 + pairs * work.prefill_flops_per_pair
    assert step.bytes_read >= 10 * work.kv_bytes_per_token


def test_a_step_is_bound_by_the_slower_of_memory_and_arithmetic():
    machine = MachineLimits(bytes_per_second=100, flops_per_second=10)
    assert StepWork(bytes_read=200, flops=10).seconds(machine) == 2
    assert StepWork(bytes_read=200, flops=50).seconds(machine) == 5


def test_grouped_query_model():
    work = ModelWork.from_config(SHAPES["dense-101m"])
    attention = 768 * (12 + 2 * 4 + 12) * 64
    assert work.layer_weights == 12 * (attention + 3 * 768 * 2048)
    assert work.kv_bytes_per_token == 12 * 2 * 4 * 64 * 2
    assert work.experts_touched(5) == 0
    assert 100e6 < work.layer_weights + 2 * work.head_weights < 102e6


@pytest.mark.parametrize(
    "shape, name, published",
    [
        ("moe-390m", "W1", 81), ("moe-390m", "W2", 406), ("moe-390m", "W3", 553), ("moe-390m", "W4", 6848),
        ("dense-101m", "W1", 84), ("dense-101m", "W2", 947), ("dense-101m", "W4", 7947),
    ],
)  # fmt: skip
def test_limits_of_the_workloads_as_the_targets_were_taken(shape, name, published):
    """The peers' fractions are relative to these limits, at 15 GB/s and 1500 GFLOP/s: ours must have the same
    definition."""
    limit = WORKLOADS[name].limit(ModelWork.from_config(SHAPES[shape]), MachineLimits(15e9, 1500e9))
    assert limit == pytest.approx(published, rel=0.01)


def test_the_moe_shape_has_the_parameters_it_is_named_after():
    work = ModelWork.from_config(SHAPES["moe-390m"])
    experts = work.num_moe_layers * work.num_experts * work.expert_weights
    assert work.layer_weights + experts + 2 * work.head_weights == pytest.approx(390e6, rel=0.005)
    assert work.active_weights == pytest.approx(90e6, rel=0.01)
