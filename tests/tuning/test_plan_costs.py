"""Step costs of the planner against parameter counts, published totals, measured kernels and a simulated load."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import GptOssConfig

from benchmarks.planner_points import FOLDER, facts_of
from benchmarks.step_costs.cases import expected
from benchmarks.step_costs.hardware import Hardware
from benchmarks.step_costs.models import MODELS
from moe_engine.models.config_file import load_model_config
from moe_engine.models.tensors.model import EMBEDDING, model_tensors
from moe_engine.tuning.costs.all_to_all import LOW_LATENCY_TOKENS, AllToAll
from moe_engine.tuning.costs.attention import Attention
from moe_engine.tuning.costs.collectives import Collectives
from moe_engine.tuning.costs.efficiency import Efficiency, load_efficiency
from moe_engine.tuning.costs.form import Form, Precision
from moe_engine.tuning.costs.imbalance import SHARES, SPREAD, VARIES, Popularity, busiest_active, expected_skew
from moe_engine.tuning.costs.model_facts import MLP, ROUTED, AttentionFacts, model_facts
from moe_engine.tuning.costs.overheads import quantizing_kernels
from moe_engine.tuning.costs.roofline import RooflineCost
from moe_engine.tuning.costs.step_cost import StepShape
from moe_engine.tuning.hardware.table import find_gpu, gpu_names, parse_cluster
from tests.models.checkpoints import make_checkpoint
from tests.models.published import V3
from tests.models.v4_checkpoints import FIELDS as V4_FIELDS
from tests.models.v4_checkpoints import PUBLISHED_RATES
from tests.tuning.plan_models import small_deepseek, small_grouped, write

FP8 = Precision("fp8", "fp8")


@pytest.mark.parametrize("draw", [small_deepseek, small_grouped])
def test_parameters_are_those_of_the_models_tensors(draw, tmp_path: Path):
    for number in range(4):
        raw = draw()
        config = load_model_config(write(tmp_path / str(number), raw))
        counted = sum(
            spec.num_elements * spec.copies
            for spec in model_tensors(config)
            if len(spec.shape) == 2 and spec.name != EMBEDDING
        )
        assert model_facts(raw).num_parameters == counted, raw


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "hunyuan_v1_moe", "qwen3_moe"])
def test_experts_are_those_of_the_models_tensors(kind: str, tmp_path: Path):
    """Also under the names of their families."""
    path = make_checkpoint(kind, tmp_path, tokenizer=False, tie_word_embeddings=False)
    facts, config = model_facts(json.loads((path / "config.json").read_text())), load_model_config(path)
    tensors = [spec for spec in model_tensors(config) if len(spec.shape) == 2 and spec.name != EMBEDDING]
    counted = sum(spec.num_elements * spec.copies for spec in tensors)
    assert facts.num_parameters == pytest.approx(counted, rel=1e-3)  # ERNIE's router biases are matrices
    assert config.moe is not None and facts.top_k == config.moe.top_k


V4_FLASH = {
    **V4_FIELDS, **PUBLISHED_RATES, "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43,
    "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8,
    "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 6, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
}  # fmt: skip


def test_deepseek_v4_has_the_weights_of_its_tensors_and_reads_windows_and_entries(tmp_path: Path):
    facts = model_facts(V4_FLASH)
    counted = sum(
        spec.num_elements * spec.copies
        for spec in model_tensors(load_model_config(write(tmp_path, V4_FLASH)))
        if len(spec.shape) == 2 and spec.name != EMBEDDING
    )
    assert facts.num_parameters == pytest.approx(counted, rel=5e-4)  # without the matrices of the streams
    assert facts.num_parameters == pytest.approx(284.3e9, rel=0.005)
    # 21 layers with entries of 4 tokens and index keys, 20 with entries of 128
    assert facts.kv_token_bytes(8, "bf16", windows=False) == 2 * (21 * (512 + 128) // 4 + 20 * 512 // 128)
    gpu = parse_cluster("8xh200").gpu
    attention = Attention(facts, Form(8), FP8, gpu, Efficiency("any"))
    context, bandwidth = 1 << 20, gpu.peak_bytes_per_s * Efficiency("any").attention_hbm
    seconds, _ = attention.seconds(StepShape(1, context, 0, 0, 0, 1))
    read = 43 * 128 * 512 + 21 * 512 * 512 + 20 * context // 128 * 512 + 21 * context // 4 * 128
    assert seconds * bandwidth == pytest.approx(2 * read)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("deepseek-ai/DeepSeek-V3", 671), ("moonshotai/Kimi-K2.5", 1026), ("Qwen/Qwen3-235B-A22B-FP8", 235),
        ("Qwen/Qwen3.5-397B-A17B", 397), ("MiniMaxAI/MiniMax-M2.5", 229), ("openai/gpt-oss-120b", 117),
        ("zhipuai/GLM-5", 744), ("Qwen/Qwen3-32B", 32.8),
    ],
)  # fmt: skip
def test_parameters_of_released_models(model: str, billions: float):
    facts = facts_of(model)
    assert (facts.num_parameters + facts.head) / 1e9 == pytest.approx(billions, rel=0.015)


def random_shape(groups: int) -> StepShape:
    rows, tokens = random.randint(0, 300), random.choice([0, random.randint(1, 16384)])
    context = rows * random.randint(1, 8000)
    drafts = random.randint(0, 3)
    own = rows * (1 + drafts) + tokens
    return StepShape(rows, context, drafts, tokens, tokens * (tokens + 1) // 2, own * groups)


FORMS = [
    Form(1), Form(8), Form(8, ep=8), Form(8, 8, 8), Form(16, 16, 16, True), Form(16, 4, 16, True, 16, True),
    Form(32, 32, 32, True, 32, True, True),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_more_work_takes_longer_and_resources_add_up(form: Form):
    share = load_efficiency(random.choice(["moe-engine", "sglang", "vllm", "trtllm"]))
    cluster = parse_cluster(f"{form.ranks}x{random.choice(gpu_names())}")
    cost = RooflineCost(model_facts(V3), form, FP8, cluster, share, random.uniform(0.7, 1.4))
    for _ in range(20):
        shape = random_shape(form.attn_dp)
        step = cost.step(shape)
        assert step.seconds == pytest.approx(sum(step.by_resource.values()))
        assert all(part >= 0 for part in step.by_resource.values())
        assert set(step.by_resource) == {"hbm", "flops", "all_to_all", "all_reduce", "launches", "host"}
        more = 1 + shape.drafts
        sent = -(-(shape.decode_rows * more + shape.prefill_tokens) // form.attn_tp)
        if form.travels and sent <= LOW_LATENCY_TOKENS < sent + 8 * more:
            continue  # normal mode of dispatch starts here
        longer = replace(
            shape, decode_rows=shape.decode_rows + 8, decode_context=shape.decode_context + 8 * 4096,
            global_tokens=shape.global_tokens + 8 * more * form.attn_dp,
        )  # fmt: skip
        assert cost.step(longer).seconds > step.seconds
        assert cost.step(replace(shape, expert_skew=5.0)).seconds >= step.seconds


def test_weights_in_host_memory_bound_a_step():
    """Copies overlap with the step: it takes the longer of both times."""
    facts, share, cluster = model_facts(V3), Efficiency("any"), parse_cluster("8xh200")
    shape = random_shape(1)
    plain = RooflineCost(facts, Form(8), FP8, cluster, share).step(shape)
    for factor in (0.5, 3.0):
        size = int(factor * plain.seconds * cluster.gpu.bus_bytes_per_s)
        found = RooflineCost(facts, Form(8, host_bytes=size), FP8, cluster, share).step(shape)
        assert found.seconds == pytest.approx(max(1.0, factor) * plain.seconds, rel=1e-6)
        assert sum(found.by_resource.values()) == pytest.approx(found.seconds)


def test_a_faster_gpu_is_never_slower():
    facts, share, form = model_facts(V3), Efficiency("any"), Form(8)
    costs = [RooflineCost(facts, form, FP8, parse_cluster(f"8x{name}"), share) for name in ("h100", "h200", "b200")]
    for _ in range(20):
        shape = random_shape(1)
        seconds = [cost.step(shape).seconds for cost in costs]
        assert seconds == sorted(seconds, reverse=True)


# aiconfigurator-core 0.12.0, deepep_h200_sxm_ll: dispatch + combine in us of a layer, 256 experts, top-8, 7168 channels
DEEPEP = [(1, 8, 16.05 + 14.37), (1, 128, 39.83 + 72.38), (2, 128, 102.1 + 186.17), (2, 256, 183.03 + 337.47),
          (4, 128, 142.97 + 263.27), (8, 128, 166.77 + 304.73), (8, 256, 301.13 + 579.53)]  # fmt: skip


@pytest.mark.parametrize(("nodes", "tokens", "measured"), DEEPEP)
def test_dispatch_and_combine_are_those_measured(nodes: int, tokens: int, measured: float):
    ranks = 8 * nodes
    exchange = AllToAll(model_facts(V3), Form(ranks, ranks, ranks, True), FP8, parse_cluster(f"{ranks}xh200"))
    assert exchange.seconds(tokens, 1.0) / 58 * 1e6 == pytest.approx(measured, rel=0.3)
    times = [exchange.seconds(count, 1.0) for count in range(1, 4 * LOW_LATENCY_TOKENS, 7)]
    assert times == sorted(times)  # also where the mode changes


@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_prompts_are_dispatched_in_normal_mode(ranks: int):
    """As `StepSizes.phase` says, whatever the number of their tokens: a line, without a bend at the size of the
    low-latency buffers. Its messages grow less with the tokens than those of decodes."""
    form = Form(ranks, ranks, ranks, True)
    exchange = AllToAll(model_facts(V3), form, FP8, parse_cluster(f"{ranks}xh200"))
    counts = [1, 2, 8, 100, LOW_LATENCY_TOKENS, LOW_LATENCY_TOKENS + 1, 4 * LOW_LATENCY_TOKENS]
    first, second, *times = (exchange.seconds(count, 1.0, prompts=True) for count in counts)
    each = second - first
    assert times == pytest.approx([first + (count - 1) * each for count in counts[2:]])
    few, many = exchange.seconds(2, 1.0), exchange.seconds(LOW_LATENCY_TOKENS, 1.0)
    assert 0 < each <= (many - few) / (LOW_LATENCY_TOKENS - 2) * (1 + 1e-9)
    cost = RooflineCost(model_facts(V3), form, FP8, parse_cluster(f"{ranks}xh200"), Efficiency("any"))
    for count in counts:
        step = cost.step(StepShape(0, 0, 0, count, count, count))
        assert step.by_resource["all_to_all"] == pytest.approx(
            exchange.seconds(count, expected_skew(model_facts(V3).num_experts, form), prompts=True)
        )


# aiconfigurator-core 0.12.0, allreduce_h200_sglang in a graph: GPUs, elements of 2 bytes, us
ALL_REDUCE = [(2, 65536, 3.12), (4, 65536, 4.30), (8, 65536, 6.70), (8, 1048576, 19.31), (8, 8388608, 107.6)]


@pytest.mark.parametrize(("ranks", "elements", "measured"), ALL_REDUCE)
def test_all_reduces_are_those_measured(ranks: int, elements: int, measured: float):
    facts = model_facts(V3)
    collectives = Collectives(
        facts, Form(ranks), parse_cluster(f"{ranks}xh200"), Efficiency("any", message=1, link=0.6)
    )
    a_layer = collectives.seconds(elements // facts.hidden, elements // facts.hidden) / facts.layers / 2
    assert a_layer * 1e6 == pytest.approx(measured, rel=0.35)


def test_attention_takes_the_time_of_flash_mla():
    """FlashMLA on H800: 660 TFLOPS with 128 heads, 128 requests of 4,096 tokens: 2 x 128 x (576 + 512) a pair."""
    share = Efficiency("any", attention_flops=660 / 989, attention_hbm=0.9)
    attention = Attention(model_facts(V3), Form(1), FP8, parse_cluster("1xh800").gpu, share)
    flops_s = attention.seconds(StepShape(128, 128 * 4096, 0, 0, 0, 128))[1]
    assert flops_s / 61 == pytest.approx(2 * 128 * (576 + 512) * 128 * 4096 / 660e12, rel=1e-3)


def test_sparse_attention_and_windows_bound_what_a_token_reads():
    for model, limit in (("zhipuai/GLM-5", 2048), ("openai/gpt-oss-120b", 128)):
        groups = [each for each in facts_of(model).attention if each.limit]
        assert [each.limit for each in groups] == [limit]
        facts = replace(
            facts_of(model), attention=tuple(replace(each, index_bytes=0, index_flops=0.0) for each in groups)
        )
        attention = Attention(facts, Form(1), FP8, parse_cluster("1xh200").gpu, Efficiency("any"))
        short, long = (attention.seconds(StepShape(4, 4 * length, 0, 0, 0, 4)) for length in (limit, 50 * limit))
        assert short == pytest.approx(long)


@pytest.mark.parametrize(("ranks", "redundant"), [(8, 0), (32, 0), (64, 0)])
def test_imbalance_is_that_of_drawn_popularities(ranks: int, redundant: int):
    """The mean over layers of the busiest rank's load, for log-normal popularities with this spread."""
    form, sigma = Form(ranks, ranks, ranks, True, redundant), math.sqrt(math.log(1 + SPREAD**2))
    held, loads = 256 // ranks, []
    for _ in range(300):
        popularity = [random.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(256)]
        mean = sum(popularity) / ranks
        loads.append(max(sum(popularity[r * held : (r + 1) * held]) for r in range(ranks)) / mean)
    assert expected_skew(256, form) == pytest.approx(math.fsum(loads) / len(loads), rel=0.35)
    assert expected_skew(256, replace(form, redundant=32)) < expected_skew(256, form)


def test_the_launch_simulation_has_the_constants_of_the_table() -> None:
    simulated, gpu = Hardware.named("H200"), find_gpu("h200")
    assert simulated["peak_bytes_per_s"] == gpu.peak_bytes_per_s
    assert {dtype: simulated["peak_flops"][dtype] for dtype in gpu.flops} == gpu.flops
    assert simulated["memory_bytes"] == gpu.memory_bytes


@pytest.mark.parametrize(
    ("model", "case", "layer", "beside"),
    [
        ("v3", "v3-dp8ep8-B128", "MoE layer", ROUTED + MLP),
        ("v3.2", "v3.2-dp8ep8-B8-C8192", "MoE layer", ROUTED + MLP),
        ("glm-4.6", "glm-4.6-tp8ep2-B8", "dense layer", MLP),
        ("glm-4.6", "glm-4.6-tp8ep2-B8", "MoE layer", ROUTED),  # shared experts are slots of the routed ones
        # the all-reduce of few tokens also combines the experts' rows
        ("gpt-oss-120b", "gpt-oss-120b-tp4-B8", "full MoE layer", ROUTED - 1),
        ("qwen3-next", "qwen3-next-tp4-B8", "full MoE layer", ROUTED),
        ("qwen3-next", "qwen3-next-tp4-B8", "linear MoE layer", ROUTED),
    ],
)
def test_kernels_of_a_layer_are_those_counted(model: str, case: str, layer: str, beside: int):
    def fits(group: AttentionFacts) -> bool:
        return bool(group.state_numbers) == layer.startswith("linear")

    attention = next(group for group in model_facts(MODELS[model]).attention if fits(group))
    messages, variants = 2, 2  # all-reduces, or dispatch and combine; quantization and gates by dtype and model
    counted = expected()[case]["launches_a_layer"][layer] - messages
    assert abs(attention.kernels + beside - counted) <= variants


def test_layers_with_more_kernels_take_longer_to_launch():
    v3 = model_facts(MODELS["v3"])
    sparse, dense = model_facts(MODELS["v3.2"]), model_facts(MODELS["v3"] | {"n_routed_experts": None})
    assert sparse.kernels() > v3.kernels() > dense.kernels()
    seconds = [
        RooflineCost(each, Form(8), Precision("fp8", "fp8"), parse_cluster("8xh200"), load_efficiency("vllm"))
        .step(StepShape(1, 100, 0, 0, 0, 1)).by_resource["launches"]
        for each in (v3, sparse)
    ]  # fmt: skip
    quantizing = quantizing_kernels(v3, Precision("fp8", "fp8"))
    assert quantizing == 61 * 3 + 3 * 2 + 58 * (2 + 2)  # MLA, dense layers, shared and routed experts
    assert math.isclose(seconds[1] / seconds[0], (sparse.kernels() + quantizing) / (v3.kernels() + quantizing))
    assert quantizing_kernels(v3, Precision("fp4", "bf16")) == 0


def test_linear_layers_follow_the_interval_of_a_file_without_layer_types():
    raw = MODELS["qwen3-next"]
    assert "layer_types" not in raw
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    assert model_facts(raw) == model_facts(raw | {"layer_types": kinds * 12})
    assert sorted(group.layers for group in model_facts(raw).attention) == [12, 36]


def test_windows_of_gpt_oss_without_layer_types():
    """transformers' defaults: windows of 128 tokens in every second layer, beginning with the first one."""
    raw = json.loads((FOLDER / "models.json").read_text())["openai/gpt-oss-120b"]
    kinds = GptOssConfig(num_hidden_layers=(layers := random.randint(2, 9))).layer_types
    short = {name: value for name, value in raw.items() if name not in ("layer_types", "sliding_window")}
    short |= {"model_type": "gpt_oss", "num_hidden_layers": layers}
    full = short | {"layer_types": kinds, "sliding_window": GptOssConfig().sliding_window}
    assert model_facts(short) == model_facts(full)
    assert {group.limit for group in model_facts(short).attention} == {0, 128}


@pytest.mark.parametrize(
    ("experts", "ranks", "top_k", "tokens"),
    [(128, 4, 4, 1), (128, 4, 4, 8), (256, 8, 8, 1), (256, 8, 8, 64), (256, 32, 8, 16), (512, 2, 10, 4), (16, 8, 1, 1)],
)
def test_the_busiest_rank_has_the_active_experts_of_drawn_tokens(experts: int, ranks: int, top_k: int, tokens: int):
    draw, most = np.random.default_rng(random.randrange(2**32)), []
    for _ in range(1500):
        active = np.zeros(experts, bool)
        for _ in range(tokens):
            active[draw.choice(experts, top_k, replace=False)] = True
        most.append(active.reshape(ranks, -1).sum(axis=1).max())
    share = 1 - (1 - top_k / experts) ** tokens
    found = float(np.interp(share, np.linspace(0, 1, SHARES), busiest_active(experts // ranks, ranks)))
    assert found == pytest.approx(np.mean(most), rel=0.06)


def test_experts_without_tokens_are_those_of_drawn_popularities():
    """Popularities by another distribution (gamma) of the same mean and deviation."""
    experts, top_k = random.choice([(256, 8), (128, 4), (512, 10)])
    mean, draw = top_k / experts, np.random.default_rng(random.randrange(1 << 30))
    chances = draw.gamma(1 / VARIES**2, mean * VARIES**2, 200_000)
    found = Popularity(mean)
    assert found.idle(0) == 1.0 and found.idle(1) == pytest.approx(1 - mean)
    for tokens in (2, 16, 64, 256, 4096):
        drawn = float(np.mean(np.maximum(0.0, 1.0 - chances) ** tokens))
        assert found.idle(tokens) == pytest.approx(drawn, rel=0.05, abs=2e-3)
        assert found.idle(tokens) > (1 - mean) ** tokens
    assert [Popularity(1.0).idle(tokens) for tokens in (0, 1, 9)] == [1.0, 0.0, 0.0]
    assert Popularity(0.0).idle(9) == pytest.approx(1.0, abs=1e-4)


def test_the_gini_coefficient_of_the_popularities_is_the_published_one():
    draw = np.random.default_rng(random.randrange(1 << 30))
    drawn = np.sort(draw.gamma(1 / VARIES**2, 1.0, 100_000))
    ranks = np.arange(1, len(drawn) + 1)
    assert 0.24 < 2 * (ranks * drawn).sum() / len(drawn) / drawn.sum() - 1 < 0.29


def test_all_experts_and_a_single_rank_leave_no_imbalance():
    for held, ranks in ((32, 8), (1, 256), (50_000, 2)):
        table = busiest_active(held, ranks)
        assert table[0] == 0 and table[-1] == pytest.approx(held) and list(table) == sorted(table)
    assert busiest_active(64, 1) == pytest.approx([64 * place / (SHARES - 1) for place in range(SHARES)])


def test_a_request_alone_reads_less_with_split_experts():
    """Without dispatch: of the four experts of a token one rank of four holds two on average, and reads them whole."""
    facts, cluster = facts_of("openai/gpt-oss-120b"), parse_cluster("4xh100")
    share, precision = Efficiency("any"), Precision("fp4", "bf16")
    split, whole = (RooflineCost(facts, Form(4, 1, ep), precision, cluster, share) for ep in (1, 4))
    for rows in (1, 8):
        shape = StepShape(rows, rows * 2000, 0, 0, 0, rows)
        assert whole.step(shape).by_resource["hbm"] > 1.05 * split.step(shape).by_resource["hbm"]
    shape = StepShape(2000, 2000 * 100, 0, 0, 0, 2000)
    assert whole.step(shape).seconds == pytest.approx(split.step(shape).seconds, rel=1e-4)


def test_weights_without_units_of_their_own_are_dequantized():
    """4-bit experts of a decode on an H200 take 1 / 0.68 of the time of their bytes; on a B200 they take that time."""
    facts, share, shape = facts_of("openai/gpt-oss-120b"), Efficiency("any"), StepShape(1, 1, 0, 0, 0, 1)
    bandwidth = {"h200": 4.8e12 * 0.68, "b200": 8e12}
    for gpu, rate in bandwidth.items():
        cluster = parse_cluster(f"1x{gpu}")
        narrow, wide = (
            RooflineCost(facts, Form(1), Precision(experts, "bf16"), cluster, share).step(shape).by_resource["hbm"]
            for experts in ("fp4", "bf16")
        )
        experts = 36 * 4 * facts.expert
        saved = experts / share.experts_hbm * (2 / cluster.gpu.peak_bytes_per_s - 0.5625 / rate)
        assert wide - narrow == pytest.approx(saved, rel=0.02)


def test_padded_experts_compute_all_rows():
    """Blocks of 128 rows of 128 experts, of which a token uses 8: operations of 2,048 tokens in every decode."""
    facts, share = facts_of("Qwen/Qwen3-235B-A22B-FP8"), Efficiency("any")
    cluster, shape = parse_cluster("2xh200"), StepShape(4, 4, 0, 0, 0, 4)
    plain, padded = (
        RooflineCost(facts, Form(2), Precision("fp8", "fp8", expert_rows=rows), cluster, share).step(shape).by_resource
        for rows in (0, 128)
    )
    rows = 2 * 128 * 128 * 94 * facts.expert / 2 / (1.979e15 * share.flops)
    assert padded["flops"] - plain["flops"] == pytest.approx(rows) and padded["hbm"] < plain["hbm"]
