"""`benchmarks.step_costs`: expected counts of a step, cost functions by hand, the roofline by another formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.step_costs import (
    blackwell,
    elastic,
    family_costs,
    libraries,
    mega_moe,
    roofline,
    sampling_costs,
    triton_costs,
)
from benchmarks.step_costs.cases import CHECKED, CaseFailed, Group, expected, held, run
from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.costs import KERNELS, Routing, Setting, UnknownKernel, kernel_cost, size
from benchmarks.step_costs.hardware import Announcement, Hardware
from benchmarks.step_costs.layers import layers_of, names_of, num_experts
from benchmarks.step_costs.models import MODELS, shortened
from benchmarks.step_costs.recorder import DRAFT, OUTSIDE, Line, Recorder, operator_cost
from benchmarks.step_costs.schedule import all_prefetches, length_of, schedule
from benchmarks.step_costs.session import Case, _settings
from benchmarks.step_costs.summary import Section, Summary
from tests.fork_server import ForkServer
from tests.simulated_cuda.install import require

H200, B200 = Hardware.named("H200x8"), Hardware.named("B200x8")
aten = torch.ops.aten
UPDATE = "python -m benchmarks.step_costs --update-expected"


def time_of(lines: Iterable[Line], hardware: Hardware) -> float:
    return length_of(schedule(lines, hardware))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


PROGRAM = "benchmarks.step_costs.__main__"
PRELOADED = (
    PROGRAM, *(f"benchmarks.step_costs.{name}" for name in ("exchange_costs", "one_rank", "steps", "summary")),
    "benchmarks.step_driver", "tests.kernels.triton.interpreter", "torch._dynamo",
)  # fmt: skip
STEP_COSTS_SERVER = ForkServer({"TRITON_INTERPRET": "1"}, PRELOADED)


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], tuple[int, str]]:
    """Starts the program in processes that have imported its modules; they install their devices themselves."""

    def start(arguments: Sequence[str]) -> tuple[int, str]:
        folder = tmp_path_factory.mktemp("step_costs")
        code, _, errors = STEP_COSTS_SERVER.run([PROGRAM, *arguments], folder, 250.0)
        return code, errors

    return start


@pytest.mark.drawn(3)
@pytest.mark.parametrize("group", CHECKED, ids=lambda group: group.name)
def test_a_step_launches_reads_and_waits_as_expected(group, forked) -> None:
    """Exact counts. The command above writes an intended change to the file."""
    require()
    known = expected()
    for values in run(group, start=forked):
        assert held(values) == known[values["case"]], f"{values['case']} differs: {UPDATE}"
        assert group.prefill or values["host_waits"] == 0
        assert values["fraction"] <= values["allowed"]


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(CaseFailed, match=r"nowhere tp1 .*'nowhere' is neither of v2-lite, v3, .* nor a folder"):
        run(Group("nowhere", "tp1", (1,)))


# -- the roofline


@pytest.mark.parametrize("batch,rate", [(1, 967), (32, 4830), (128, 15695), (256, 25978)])
def test_the_roofline_of_v2_lite(batch: int, rate: int) -> None:
    """Two bytes of each weight used (13.76 M of attention a layer, 8.65 M an expert), 31,104 bytes a context token."""
    touched = 64 * (1 - (1 - 6 / 64) ** batch)
    weights = 2 * (27 * 13.76e6 + 26 * (touched * 8.65e6 + 17.3e6 + 0.131e6) + 67.2e6 + 209.7e6)
    seconds = (weights + batch * 2048 * 31104) / 4.8e12
    found = roofline.decode(MODELS["v2-lite"], roofline.FORMS["tp1"], H200, batch, 2048).microseconds / 1e6
    assert found == pytest.approx(seconds, rel=0.01)
    assert batch / found == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("batch,rate", [(32, 1390), (128, 4210), (256, 6400)])
def test_the_roofline_of_v3_on_eight_gpus(batch: int, rate: int) -> None:
    """98.8 GB of weights at 4.8 TB/s, attention of 111 us a layer at 128 requests, 152 KB sent a token and layer."""
    found = roofline.decode(MODELS["v3"], roofline.FORMS["dp8ep8"], H200, batch, 2048)
    assert found.weight_bytes == pytest.approx(98.8e9, rel=0.01)
    assert found.attention_us / 61 == pytest.approx(111 * batch / 128, rel=0.01)
    assert found.nvlink_bytes / 58 / batch == pytest.approx(152_000, rel=0.01)
    assert batch / found.microseconds * 1e6 == pytest.approx(rate, rel=0.02)


def test_a_prompt_is_bound_by_operations() -> None:
    found = roofline.prefill(MODELS["v2-lite"], roofline.FORMS["tp1"], H200, 8192)
    active = 27 * 13.76e6 + 26 * (6 * 8.65e6 + 17.3e6) + 67.2e6
    assert found.weights_us == pytest.approx(2 * 8192 * active / 989e12 * 1e6, rel=0.01)
    pairs = 8192 * 8193 / 2
    assert found.attention_us == pytest.approx(2 * 27 * 16 * 320 * pairs / 660e12 * 1e6, rel=0.001)


# -- costs


SETTING = Setting(2048, Routing(tokens=128, top_k=8, num_experts=256, local=32))


def test_uniform_routing() -> None:
    assert SETTING.routing.rows == 128
    assert SETTING.routing.touched == pytest.approx(32 * (1 - (248 / 256) ** 128))


def test_unknown_kernels_are_errors() -> None:
    with pytest.raises(UnknownKernel, match="new_kernel has no cost function"):
        kernel_cost("new_kernel", SimpleNamespace(), SETTING)
    assert all(callable(function) for function in KERNELS.values())


def test_a_view_that_repeats_an_element_counts_it_once() -> None:
    assert size(meta(4, 1).expand(4, 8), None) == 8
    assert size(meta(2, 3, 5)) == 60


def test_programs_without_a_tile_take_time() -> None:
    """32 experts of about 4 rows: 32 row tiles of 16 rows, with 7,168 / 128 columns each."""
    down = SimpleNamespace(
        x=meta(4096, 2048, dtype=torch.float8_e4m3fn), weight=meta(32, 7168, 2048, dtype=torch.float8_e4m3fn),
        weight_scales=meta(32, 56, 16, dtype=torch.float32), out=meta(4096, 7168), NUM_EXPERTS=32, K=2048, WIDTH=7168,
        BLOCK_M=16, BLOCK_N=128, BLOCK_K=128, FP8=True, FORM="", PAIRS=False, num_stages=5, num_warps=4,
    )  # fmt: skip
    setting = Setting(2048, Routing(tokens=128, top_k=8, num_experts=256, local=32), H200)
    tiles = setting.routing.touched * 56
    places = 132 * 3  # stages of 18 KiB, four of them of 227 KiB
    for grid, without in ((256 * 56, 256 * 56 - tiles), (132, 0)):
        found = triton_costs.down(SimpleNamespace(grid=(grid,), **vars(down)), setting)
        assert found.empty_us == pytest.approx(without / places * H200["empty_program_us"])
    assert H200.microseconds("product", found, True) < H200.microseconds("product", replace(found, empty_us=1.0), True)


def test_a_fused_exchange_hides_messages_behind_products() -> None:
    """V3 on 8 ranks: 32 experts of 44 MB; a rank sends 7/8 of its pairs, 7,392 bytes each, and gets bf16 back."""
    weights = [
        (meta(32, n, k, dtype=torch.float8_e4m3fn), meta(32, n // 128, k // 128, dtype=torch.float32))
        for n, k in ((4096, 7168), (7168, 2048))
    ]
    latency, rate = 15.3 + 12.2, H200["product_bytes_per_s"]
    for tokens in (16, 2048):
        routing = Routing(tokens=8 * tokens, top_k=8, num_experts=256, local=32)
        cost = mega_moe.call_cost(H200, routing, *weights, 8 * tokens, 8)
        assert cost.nvlink == pytest.approx(tokens * 7 * (7168 + 224 + 2 * 7168))
        products = max(cost.bytes / rate, cost.total_flops / H200["product_flops"]["fp8"]) * 1e6
        messages = (tokens * 7 * 7392 / 265e9 + tokens * 7 * 14336 / 213e9) * 1e6
        assert cost.link_us == pytest.approx(latency + max(products, messages))
    assert cost.flops["fp8"] == 6 * 8 * tokens * 7168 * 2048


def test_operators_read_inputs_and_write_results_once() -> None:
    a, b, out = meta(4, 8), meta(8, 16), meta(4, 16)
    assert operator_cost(aten.mm.default, [a, b], [], [out]) == Cost(64 + 256, 128, {"bf16": 2 * 4 * 8 * 16})
    assert operator_cost(aten.mm.out, [a, b, out], [out], []) == Cost(64 + 256, 128, {"bf16": 2 * 4 * 8 * 16})
    assert operator_cost(aten.add_.Tensor, [a, a], [a], []) == Cost(128, 64)
    assert operator_cost(aten.add.out, [a, b[:4, :8], a], [a], []) == Cost(128, 64)
    assert operator_cost(aten.copy_.default, [out, meta(4, 16)], [out], []) == Cost(128, 128)
    index = meta(4, dtype=torch.int64)
    assert operator_cost(aten.index_select.default, [meta(1000, 8), index], [], [a]) == Cost(32 + 64, 64)
    assert operator_cost(aten.index_copy_.default, [meta(1000, 8), index, a], [b], []) == Cost(32 + 64, 64)


def test_latent_attention_reads_each_record_once() -> None:
    """32 requests, 16 heads, 576 channels: 302 MB for 128 requests, and the operations of the roofline."""
    given = SimpleNamespace(
        rows=meta(128), q=meta(128, 16, 576), out=meta(128 * 16, 512), cache=meta(300_000, 576),
        partial=meta(64, 1, 16, 512, dtype=torch.float32), table=meta(128, 4096),
        LATENT=512, ROTARY=64, TURNED=0, SHARES=1, BLOCK_M=16, BLOCK_N=64, grid=(120,),
    )  # fmt: skip
    found = triton_costs.latent(given, SETTING)
    assert found.read == 128 * 16 * 576 * 2 + 128 * 2048 * (576 * 2 + 4)
    assert found.written == 128 * 16 * 512 * 2
    assert found.flops == {"bf16": 2 * 128 * 16 * 2048 * (576 + 512)}
    given.table = meta(128, 1024)  # of a selection
    assert triton_costs.latent(given, SETTING).flops == {"bf16": 2 * 128 * 16 * 1024 * (576 + 512)}


def test_split_contexts_write_and_merge_results_of_two_tiles_each() -> None:
    """A request of 2,048 tokens has at most 16 pieces of two tiles of 64 tokens, however large the buffer is; the
    merge does not know the tile and assumes 32 tokens. The weight of the values is read once."""
    one = meta(264, 1, 16, 512, dtype=torch.float32)
    given = SimpleNamespace(
        rows=meta(1), q=meta(1, 16, 576), out=meta(16, 512), cache=meta(3000, 576), partial=one, table=meta(1, 4096),
        LATENT=512, ROTARY=64, TURNED=0, SHARES=1, BLOCK_M=16, BLOCK_N=64, grid=(133,),
    )  # fmt: skip
    assert triton_costs.latent(given, SETTING).written == 16 * 512 * 2 + 16 * 16 * 513 * 4
    merge = SimpleNamespace(partial=one, merges=meta(132, 8), out=meta(1, 16, 512), PER_GROUP=16, BLOCK_M=16)
    assert triton_costs.merge_partials(merge, SETTING).read == 32 * 16 * 512 * 4
    selected = replace(SETTING, seen=640)  # of V4-Flash: a window of 128 and 512 entries
    assert triton_costs.merge_partials(merge, selected).read == 10 * 16 * 512 * 4
    values = SimpleNamespace(
        mixed=meta(1, 16, 512), partial=one, merges=meta(132, 8), weight=meta(16, 128, 512), out=meta(1, 16, 128),
        HEADS=16, LATENT=512, VALUE=128, BLOCK_M=16,
    )  # fmt: skip
    found = triton_costs.merge_values(values, SETTING)
    assert found.read == 32 * 16 * 512 * 4 + 16 * 128 * 512 * 2
    assert found.flops == {"bf16": 2 * 16 * 128 * 512}


def test_layers_see_the_records_of_their_kind() -> None:
    """V4-Flash: windows of 128; with 512 of 2,048 selected entries, or 64 entries of 128 tokens."""
    found = _settings(Case("v4-flash", MODELS["v4-flash"], roofline.FORMS["tp8"], H200, 32, 8192))
    assert [found[f"layer {i}"].records for i in range(6)] == [128, 128, 640, 192, 640, 192]
    assert {found[name].records for name in (OUTSIDE, DRAFT)} == {8192}


@pytest.mark.parametrize("rate", [1, 4])
def test_an_indexer_scores_a_key_for_each_entry(rate: int) -> None:
    """64 heads of 128 channels in bfloat16 for 32 requests after 2,048 tokens, of which an entry has `rate`."""
    entries, tokens = 2048 // rate, 32
    given = SimpleNamespace(
        q=meta(tokens, 64, 128), weights=meta(tokens, 64, dtype=torch.float32), rows=meta(tokens), NUM_HEADS=64,
        cache=meta(100_000, 1, 128), WIDTH=128, FP8=False, RATE=rate,
    )  # fmt: skip
    found = family_costs.index_scores(given, SETTING)
    assert found.read == tokens * (64 * (128 * 2 + 4) + entries * 128 * 2 + 2048 * 4)
    assert (found.written, found.flops) == (tokens * entries * 4, {"bf16": 2 * tokens * 64 * entries * 128})
    scores = meta(tokens, 3000, dtype=torch.float32)
    chosen = SimpleNamespace(scores=scores, TOP_K=1024, RATE=rate, width=1024)
    read = tokens * (entries + min(entries, 1024)) * 4
    assert family_costs.index_select(chosen, SETTING) == Cost(read, tokens * 1024 * 4)


@pytest.mark.parametrize("tokens", [1, 32, 256])
def test_an_entry_is_read_by_one_program(tokens: int) -> None:
    """Entries of 128 tokens: values and gates of 512 channels in bfloat16, one entry in 128 tokens; the biases of gates
    are read from memory at most once. Kept projections are copied."""
    numbers = [meta(tokens, dtype=torch.int64)] * 4 + [meta(tokens, dtype=torch.int32)]
    given = SimpleNamespace(
        **dict(zip(("positions", "starts", "slots", "places", "rows"), numbers)), projected=meta(tokens, 1024),
        bias=meta(128, 512, dtype=torch.float32), norm=meta(512, dtype=torch.float32), RATE=128, SERIES=1, WIDTH=512,
        ROTARY=64, KEEP=True, out=meta(9, 512),
    )  # fmt: skip
    found, part = family_costs.compress(given, replace(SETTING, hardware=H200)), tokens / 128
    values, constants, copied = 128 * 2 * 512 * 2, 129 * 512 * 4, tokens * 1024 * 2
    once = min(1, part)
    assert found.read == pytest.approx(part * (values + 64 * 4) + once * constants + copied + tokens * 36)
    assert found.written == pytest.approx(part * 512 * 2 + copied)
    assert found.link_us == pytest.approx(once * (values + constants) / 112e9 * 1e6)
    given.KEEP, given.places = False, None
    apart = family_costs.compress(given, replace(SETTING, hardware=H200))
    assert found.bytes - apart.bytes == 2 * copied + tokens * 8


@pytest.mark.parametrize(("rows", "tile"), [(1, 16), (9, 16), (40, 64)])
def test_a_program_of_a_product_reads_its_rows_and_weights(rows: int, tile: int) -> None:
    """The shared expert of Kimi K2 on 8 ranks: 32 programs, fewer than multiprocessors."""
    given = SimpleNamespace(
        x=meta(rows, 7168), weight=meta(512, 7168), out=meta(rows, 512), following=None, FOLLOWING=0, later=None,
        LATER=0, BLOCK_M=tile, BLOCK_N=16, K=7168, N=512, num_rows=rows, AHEAD=0, grid=(32, 1),
    )  # fmt: skip
    found = triton_costs.fixed_gemm(given, replace(SETTING, hardware=H200))
    assert found.link_us == pytest.approx((rows + 16) * 7168 * 2 / 112e9 * 1e6)
    rest = {"x_scales": None, "norm": None, "weight_scales": meta(4, 56)}
    weight = given.weight.to(torch.float8_e4m3fn)
    for x, split in ((given.x, 1), (given.x.to(torch.float8_e4m3fn), 4)):  # rows that the launch quantizes; parts of K
        product = SimpleNamespace(**vars(given) | rest | {"x": x, "weight": weight, "SPLIT": split})
        found = triton_costs.block_gemm(product, replace(SETTING, hardware=H200))
        read = (rows * x.element_size() + 16) * 7168 / split
        assert found.link_us == pytest.approx(read / 112e9 * 1e6)


def test_few_programs_read_slowly() -> None:
    """A row of 129,280 logits by one program, and by 32."""
    logits, tokens = meta(1, 129280, dtype=torch.float32), meta(1, dtype=torch.int64)
    times = []
    for programs in (1, 32):
        found = sampling_costs.greedy(SimpleNamespace(logits=logits, tokens=tokens, grid=(1, programs)), SETTING)
        times.append(H200.microseconds("stream", found, False) - H200["eager_gap_us"])
    assert times == pytest.approx([(129280 * 4 + 8) / 112e9 * 1e6, H200["kernel_floor_us"]])


def test_rows_in_tiles_are_those_of_drawn_choices() -> None:
    """Also of two shared experts, which every token uses."""
    routing, draws, rng = Routing(300, 4, 16, 8, shared=2), 400, np.random.default_rng(0)
    for tile in (16, 64, 128):
        found = []
        for _ in range(draws):
            chosen = rng.random((300, 16)).argsort(1)[:, :4]
            counts = np.append(np.bincount(chosen.flatten(), minlength=16)[:8], [300, 300])
            found.append((-(-counts // tile) * tile).sum())
        spread = np.std(found) / draws**0.5
        assert abs(np.mean(found) - routing.rows_in_tiles(tile)) < 5 * spread + 1e-6 * tile
    assert Routing(4096, 8, 256, 32).rows_in_tiles(1) == pytest.approx(4096)
    assert Routing(5, 2, 2, 2).rows_in_tiles(4) == 16


def test_grouped_products_read_experts_with_tokens_and_whole_tiles() -> None:
    a, scales = meta(32, 1024, 7168, dtype=torch.float8_e4m3fn), meta(32, 1024, 56, dtype=torch.float32)
    b, b_scales = meta(32, 4096, 7168, dtype=torch.float8_e4m3fn), meta(32, 32, 56, dtype=torch.float32)
    found = libraries.grouped_cost((a, scales), (b, b_scales), meta(32, 1024, 4096), SETTING.routing, 64)
    share = 1 - (248 / 256) ** 128
    rows = 32 * share * 64  # a tile each: experts have four rows
    assert found.read == pytest.approx(share * (32 * 4096 * 7168 + 4 * 32 * 32 * 56) + rows * (7168 + 4 * 56))
    assert found.written == pytest.approx(rows * 4096 * 2)
    assert found.flops["fp8"] == pytest.approx(2 * rows * 4096 * 7168)


def test_quantization_of_a_padded_buffer_reads_all_of_it() -> None:
    rows = meta(32 * 1024, 4096)
    out, scales = meta(32 * 1024, 2048, dtype=torch.float8_e4m3fn), meta(16, 32 * 1024, dtype=torch.float32)
    found = triton_costs.silu_mul_quantize(SimpleNamespace(gate_up=rows, out=out, scales=scales), SETTING)
    assert found.bytes == 32 * 1024 * (2 * 4096 + 2048 + 4 * 16)


def test_messages_leave_the_rank_and_the_node() -> None:
    """128 tokens of 8 choices in FP8: 7 of 8 leave; of two nodes half of the copies cross the network."""
    one = libraries.message_cost(H200, "low_latency", "dispatch", 1024, 7392, 8, 1)
    assert (one.nvlink, one.network) == (1024 * 7392 * 7 / 8, 0)
    assert one.link_us == pytest.approx(39.8, rel=0.05)  # measured
    two = libraries.message_cost(H200, "low_latency", "combine", 1024, 14336, 16, 2)
    assert (two.nvlink, two.network) == (1024 * 14336 * 7 / 16, 1024 * 14336 / 2)
    assert two.link_us == pytest.approx(188, rel=0.05)  # measured
    assert libraries.targets_of(8, 4) == pytest.approx(3.6, rel=0.01)


def test_deepep_2_sends_a_token_once_to_a_rank() -> None:
    """128 tokens of 8 choices on 4 ranks: 3.6 rows each in FP8, copied to 1,024 rows of experts; results in bf16 are
    summed before they return."""
    calls: dict[str, Cost] = {}
    routing = SimpleNamespace(rows=1024)
    recorder = SimpleNamespace(setting=SimpleNamespace(routing=routing))
    made = SimpleNamespace(call=lambda name, cost: calls.update({name: cost}), _recorder=recorder)
    buffer = elastic.elastic_buffer(made, H200, 1, 4.0)(
        SimpleNamespace(size=lambda: 8), num_max_tokens_per_rank=256, hidden=7168
    )
    x = meta(128, 7168, dtype=torch.float8_e4m3fn), meta(128, 56, dtype=torch.float32)
    (rows, scales), _, weights, handle, _ = buffer.dispatch(
        x, topk_idx=meta(128, 8, dtype=torch.int64), topk_weights=meta(128, 8, dtype=torch.float32), num_experts=256,
        num_max_tokens_per_rank=256, expert_alignment=128, do_cpu_sync=False, do_handle_copy=False, do_expand=True,
        use_tma_aligned_col_major_sf=True, num_sms=24,
    )  # fmt: skip
    copies = 128 * 4 * (1 - 0.75**8)
    assert calls["elastic_dispatch"].nvlink == pytest.approx(copies * 7392 * 7 / 8)
    assert calls["elastic_dispatch_copy"] == Cost(copies * 7392, 1024 * 7392)
    assert (
        len(rows) == len(scales) == len(weights) == 8 * 256 * 8 + 32 * 128
    )  # the worst case: up to 127 rows of padding each, rounded up
    assert scales.stride(0) == 1 and handle.psum_num_recv_tokens_per_expert.shape == (32,)
    buffer.combine(rows.bfloat16(), handle)
    assert calls["elastic_combine"].nvlink == pytest.approx(copies * 14336 * 7 / 8)
    assert calls["elastic_combine"].read == 1024 * 14336
    assert calls["elastic_combine_sum"] == Cost(copies * 14336, 128 * 14336)


def test_collectives_take_their_measured_time() -> None:
    assert H200.nccl_us("all_reduce", 1, 8) == H200.nccl_us("all_reduce", 256, 8)
    low, high = (H200.nccl_us("all_reduce", size, 8) for size in (1 << 20, 1 << 22))
    assert low < H200.nccl_us("all_reduce", 2 << 20, 8) < high
    assert H200.nccl_us("all_reduce", 2 << 29, 8) == pytest.approx(2 * H200.nccl_us("all_reduce", 1 << 29, 8))
    assert H200.nccl_us("all_gather", 1 << 20, 2) == H200.nccl_us("all_gather", 1 << 20, 4)
    assert H200.nccl_us("all_gather", 1 << 20, 16) == H200.nccl_us("all_gather", 1 << 20, 8)


@pytest.mark.parametrize("gpu", [H200, Hardware.named("B200x8")])
@pytest.mark.parametrize(("operation", "rounds"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_large_collectives_move_bytes_near_the_rate_of_nvlink(gpu: Hardware, operation: str, rounds: int) -> None:
    """A size in other units than bytes would move half or twice the rate. In-switch sums may pass a link's rate."""
    for ranks in (4, 8):
        sent = rounds * (1 << 28) * (ranks - 1) / ranks
        rate = sent / gpu.nccl_us(operation, 1 << 28, ranks) * 1e6
        assert 0.6 < rate / gpu["nvlink_bytes_per_s"] < 1.3


def test_an_all_reduce_reads_the_rows_of_all_ranks() -> None:
    """Four rows of V3 on eight ranks, followed by the norm: its launch takes the measured time. Experts' rows are read
    in addition, by one program for each token."""
    rows, setting = meta(4, 7168), Setting(2048, SETTING.routing, H200)
    given = SimpleNamespace(
        x=rows, residual=rows, weight=meta(7168, dtype=torch.float32), out=rows, quantized=None, scales=None, RANKS=8,
        TOP_K=0,
    )  # fmt: skip
    one, two = triton_costs.one_shot(given, setting), triton_costs.two_shot(given, setting)
    assert (one.read, one.written) == (10 * 4 * 14336 + 4 * 7168, 2 * 4 * 14336)
    assert (one.nvlink, two.nvlink) == (7 * 4 * 14336, 7 / 4 * 4 * 14336)
    took = H200.microseconds("stream", one, True)
    assert took == pytest.approx(H200.custom_all_reduce_us(4 * 14336, 8) + H200["graph_node_us"])
    assert 4.15 < took < 4.95 and took < H200.nccl_us("all_reduce", 4 * 14336, 8) / 3
    experts = {
        "x": meta(9, 7168), "positions": meta(4, 2, dtype=torch.int32), "router_weights": meta(4, 2), "add": rows,
        "TOP_K": 2, "WIDTH": 7168, "num_rows": 4, "grid": (4,),
    }  # fmt: skip
    routing = replace(SETTING.routing, tokens=4, top_k=2, num_experts=8, local=8, shared=0)
    summed = triton_costs.one_shot(SimpleNamespace(**vars(given) | experts), Setting(2048, routing, H200))
    more = (8 + 4) * 14336 + 4 * 2 * (4 + 2)
    assert summed.read - one.read == more - 4 * 14336
    assert summed.link_us - one.link_us == pytest.approx(more / 4 / H200["program_bytes_per_s"] * 1e6)


def test_time_of_a_launch() -> None:
    gap, floor = H200["graph_node_us"], H200["kernel_floor_us"]
    assert H200.microseconds("stream", Cost(), True) == gap + floor
    assert H200.microseconds("stream", Cost(read=4.32e6), True) == pytest.approx(gap + 1)
    assert H200.microseconds("product", Cost(flops={"fp8": 1350e7}), True) == pytest.approx(gap + 10)
    assert H200.microseconds("stream", Cost(link_us=20), False) == H200["eager_gap_us"] + 20
    with pytest.raises(ValueError, match="H200x8"):
        Hardware.named("A100x8")


def test_a_dependent_launch_has_a_shorter_gap() -> None:
    """The shorter, the earlier the launch before announced it."""
    plain, first, late = (
        H200.microseconds("stream", Cost(), True, announced)
        for announced in (Announcement.NONE, Announcement.FIRST, Announcement.LATE)
    )
    assert plain - first == pytest.approx(H200["graph_node_us"] - H200["dependent_node_us"]) and first > 1
    assert first < late < plain
    assert H200.microseconds("stream", Cost(), False, Announcement.FIRST) == H200.microseconds("stream", Cost(), False)
    gaps = [Announcement.NONE, Announcement.FIRST, Announcement.LATE]
    lines = [Line("", "", "", 1, True, Cost(), tick, {}, announced) for tick, announced in enumerate(gaps, 1)]
    assert time_of(lines, H200) == pytest.approx(plain + first + late)


def test_a_launch_is_early_behind_one_of_its_stream_that_announces_it() -> None:
    """A kernel that waits for another stream in between, or follows a library, is not."""
    recorder, graph = Recorder({}), object()
    none, first, late = Announcement.NONE, Announcement.FIRST, Announcement.LATE

    def launch(stream: int, dependent: bool, announces: Announcement, **others: int) -> Announcement:
        clock = {int(name.removeprefix("s")): tick for name, tick in others.items()} | {stream: launch.ticks}
        launch.ticks += 1
        given = SimpleNamespace(graph=graph, tick=1, stream=SimpleNamespace(number=stream, clock=clock))
        recorder._add(given, "", Cost(), dependent, announces)
        return recorder._graphs[id(graph)][-1].announced

    launch.ticks = 1
    assert launch(1, True, first) is none
    assert launch(1, True, first) is first and launch(2, True, first) is none and launch(1, True, none) is first
    assert launch(1, True, late) is none and launch(1, False, none) is none and launch(1, True, late) is none
    assert launch(1, True, first) is late, "after its last wait"
    assert launch(1, True, first, s2=3) is none and launch(1, True, first, s2=3) is first


def test_a_prefetch_uses_idle_memory_and_what_it_delays_is_counted() -> None:
    """3.9 MB a microsecond; a launch beside it that reads takes up to twice as long."""
    megabyte, first = 1e6, Announcement.FIRST

    def line(tick: int, read: float, announced: Announcement = Announcement.NONE, **more: Any) -> Line:
        return Line("", "", "", 1, True, Cost(read=read * megabyte, flops={"bf16": 1}, **more), tick, {}, announced)

    def times(*lines: Line) -> list[float]:
        return [span.microseconds for span in schedule(lines, H200)]

    gap, early, small = H200["graph_node_us"], H200["dependent_node_us"], H200["kernel_floor_us"]
    stream = replace(line(1, 0), cost=Cost(read=432e6))
    assert times(stream) == pytest.approx([gap + 100]), "at its own rate, without prefetches"
    plain = times(line(1, 0), line(2, 39, weights=7))
    assert plain == pytest.approx([gap + small, gap + 10])
    found = times(line(1, 0, prefetched={7: 1.95e6}), line(2, 39, weights=7))
    assert found == pytest.approx([gap + small, gap + 9.5]), "0.5 us of its bytes are there"
    found = times(line(1, 0, prefetched={7: 39e6}), line(2, 78, weights=7))
    assert found == pytest.approx([gap + small, gap + 20 - small - gap]), "those of the first launch and of the gap"
    found = times(line(1, 0, prefetched={7: 39e6}), line(2, 39, weights=7))
    assert found[1] == pytest.approx(gap + 39 / 4.86), "L2 is not much faster"
    shared = times(line(1, 0, prefetched={7: 39e6}), line(2, 7.8), line(3, 390, weights=7))
    assert shared == pytest.approx([gap + small, gap + 4, gap + 100 - small - gap - 2 - gap])
    others = times(line(1, 0, prefetched={5: 39e6}), line(2, 39, weights=7))
    assert others[1] == pytest.approx(gap + 20 - small - gap), "of another weight"
    last = {"prefetched": {7: 39e6}, "requests_last": True}
    found = times(line(1, 390, **last), line(2, 78, weights=7))
    assert found == pytest.approx([gap + 100, gap + 20 - gap]), "requested at its end: those of the gap"
    streams = all_prefetches(H200)
    schedule([line(1, 390, **last)], H200, streams)
    (carried,) = schedule([line(2, 78, weights=7)], H200, streams)
    assert carried.microseconds == pytest.approx(20), "from one section to the next"
    # its own weights, before it waits: after a launch that leaves the memory idle, then after one that does not
    own = line(2, 39, first, weights=7, requests_own=39e6)
    assert times(line(1, 0), own)[1] == pytest.approx(early + 10 - small)
    assert times(line(1, 39), own)[1] == pytest.approx(early + 10 - early)
    assert times(line(1, 0), replace(own, announced=Announcement.NONE))[1] == pytest.approx(gap + 10)


def test_constants_of_others() -> None:
    other = H200.with_constants(["graph_node_us=2.5", "kernel_floor_us=0.5"])
    assert (other["graph_node_us"], other["kernel_floor_us"], other["late_node_us"]) == (2.5, 0.5, H200["late_node_us"])
    assert other.gap_us(Cost(), True) == 2.5 and H200["graph_node_us"] != 2.5
    for wrong in ("product_flops=1", "gaps=1", "graph_node_us"):
        with pytest.raises(ValueError):
            H200.with_constants([wrong])


def test_the_data_sheet_has_one_owner() -> None:
    facts = B200.facts
    assert (B200["memory_bytes"], B200["peak_bytes_per_s"]) == (facts.memory_bytes, 8e12)
    assert B200["peak_flops"] == {"bf16": 2.25e15, "fp8": 4.5e15, "fp4": 9e15}
    assert B200["nvlink_bytes_per_s"] == pytest.approx(0.9 * 9e11) and B200["multiprocessors"] == 148
    assert B200["wait_us"] == H200["wait_us"] and str(B200) == "B200x8"


@pytest.mark.parametrize("batch", [128, 256])
def test_the_roofline_of_v3_on_blackwell(batch: int) -> None:
    """The bytes of eight H200, at 8 TB/s, the best measured rate of attention, and 810 GB/s of NVLink."""
    case = MODELS["v3"], roofline.FORMS["dp8ep8"]
    hopper, found = (roofline.decode(*case, hardware, batch, 2048) for hardware in (H200, B200))
    assert found.weight_bytes == hopper.weight_bytes and found.kv_bytes == hopper.kv_bytes
    assert found.weights_us == pytest.approx(found.weight_bytes / 8e12 * 1e6)
    read = found.kv_bytes / 8e12
    assert found.attention_us == pytest.approx(max(read, found.attention_flops / 1.46e15) * 1e6)
    assert found.links_us == pytest.approx(hopper.links_us / 2)


def test_fused_experts_of_blackwell_read_experts_with_tokens() -> None:
    fp8 = torch.float8_e4m3fn
    first = meta(32, 56, 4096, 128, dtype=fp8), meta(32, 32, 56, dtype=torch.float32)
    second = meta(32, 16, 7168, 128, dtype=fp8), meta(32, 56, 16, dtype=torch.float32)
    x, ids = meta(128, 7168, dtype=fp8), meta(128, 8, dtype=torch.int32)
    found = dict(blackwell.experts_costs(SETTING.routing, x, ids, (first, second), meta(128, 7168)))
    share = 1 - (248 / 256) ** 128
    weights = share * (size(*first) + size(*second))
    products = found["trtllm_gate_up"], found["trtllm_down"]
    assert sum(cost.read for cost in products) == pytest.approx(weights, rel=0.01)
    computed = 32 * share * blackwell.TILE
    assert products[0].flops["fp8"] == pytest.approx(2 * computed * 4096 * 7168)
    assert products[1].flops["fp8"] == pytest.approx(2 * computed * 2048 * 7168)
    assert len(found) == 5 and found["trtllm_finalize"].written == 128 * 7168 * 2


def test_streams_overlap_between_the_events_that_they_wait_for() -> None:
    """A dispatch on stream 2 after the first launch of stream 1; the last launch of stream 1 after the dispatch."""

    def line(stream: int, tick: int, us: float, graph: bool = True, **behind: int) -> Line:
        gap = H200["graph_node_us" if graph else "eager_gap_us"]
        clock = {int(name.removeprefix("s")): last for name, last in behind.items()}
        return Line("", "", "", stream, graph, Cost(link_us=us - gap), tick, clock)

    router, dispatch, shared = line(1, 5, 10), line(2, 1, 30, s1=5), line(1, 6, 20)
    experts = line(1, 7, 40, s2=1)
    assert time_of([router, dispatch, shared, experts], H200) == pytest.approx(10 + 30 + 40)
    assert time_of([router, dispatch, line(1, 6, 35), experts], H200) == pytest.approx(10 + 35 + 40)
    assert time_of([router, line(2, 1, 30), shared], H200) == pytest.approx(30), "nothing is waited for"
    assert time_of([router, line(1, 1, 7, graph=False)], H200) == pytest.approx(17), "around a graph"


def test_layers_that_run_stand_for_the_others() -> None:
    for name in MODELS:
        short, repeats = shortened(MODELS[name])
        assert len(repeats) == short["num_hidden_layers"] <= (11 if name == "v41-flash" else 6)
        assert sum(repeats) == MODELS[name]["num_hidden_layers"]
        assert set(names_of(short)) == set(names_of(MODELS[name]))
    assert shortened(MODELS["v3"])[1] == [1, 2, 1, 57]
    assert shortened(MODELS["v2-lite"])[1] == [1, 1, 25]
    assert shortened(MODELS["gpt-oss-120b"])[1] == [1, 1, 17, 17]
    assert shortened(MODELS["qwen3-next"])[1] == [1, 35, 1, 11]
    assert shortened(MODELS["v4-flash"])[1] == [1, 1, 1, 1, 20, 19]
    assert shortened(MODELS["v41-flash"])[1] == [1, 1, 1, 1, 14, 2, 1, 1, 14, 1, 3]
    assert shortened(MODELS["minimax-m3"])[1] == [1, 2, 1, 56]
    assert shortened(MODELS["glm-5.3-flash"])[1] == [1, 2, 1, 1, 30, 10]


@pytest.mark.parametrize(
    ("name", "active", "total"),
    [
        ("v2-lite", 2.4e9, 15.7e9),
        ("v3", 37e9, 671e9),
        ("gpt-oss-120b", 5.1e9, 117e9),
        ("qwen3-next", 3e9, 80e9),
        ("kimi-k2", 32e9, 1.03e12),
        ("v4-flash", 13e9, 284e9),
        ("v4-pro", 49e9, 1.6e12),
        ("llama-8b-row-fp8", 7.5e9, 8.03e9),
    ],
)
def test_layers_have_the_published_numbers_of_parameters(name: str, active: float, total: float) -> None:
    """Of the model cards, which round; one of the two tables of embeddings is active."""
    config = MODELS[name]
    table = config["vocab_size"] * config["hidden_size"]
    used = held = 0.0
    for count, layer in layers_of(config):
        each = layer.attention + layer.dense + layer.gate
        used += count * (each + config.get("num_experts_per_tok", 0) * layer.expert)
        held += count * (each + num_experts(config) * layer.expert)
    assert held + 2 * table == pytest.approx(total, rel=0.03)
    assert used + table == pytest.approx(active, abs=0.6e9)


def test_the_roofline_of_selected_blocks() -> None:
    """By hand: 32 requests of MiniMax-M3 after 8,192 tokens on 4 ranks, with a KV head and an index head each."""
    four = roofline.FORMS["tp4"]
    found = roofline.decode(MODELS["minimax-m3"], four, H200, 32, 8192)
    seen = 3 * 8192 + 57 * 16 * 128
    assert found.kv_bytes == 32 * (seen * 2 * 128 * 2 + 57 * 8192 * 128 * 2)
    assert found.attention_flops == 32 * (seen * 4 * 16 * 128 + 57 * 8192 * 2 * 128)
    touched = 128 * (1 - (124 / 128) ** 32)
    mlps = 3 * 3 * 6144 * 12288 / 4 + 57 * 3 * 6144 * 3072 * (touched + 1) / 4
    attention = 60 * 6144 * 128 * (2 * 64 + 2 * 4) / 4 + 57 * 6144 * 128 * 5 / 4
    assert found.weight_bytes == pytest.approx(mlps + attention + (57 * 128 * 6144 + 200064 * 6144 / 4) * 2)


def test_the_roofline_of_windows_states_and_selections() -> None:
    """By hand: 32 requests after 8,192 tokens on 4 ranks (gpt-oss, Qwen3-Next), and on 8 (V3.2, V4)."""
    four, eight = roofline.FORMS["tp4"], roofline.FORMS["dp8ep8"]
    oss = roofline.decode(MODELS["gpt-oss-120b"], four, H200, 32, 8192)
    assert oss.kv_bytes == 18 * 32 * (128 + 8192) * 2 * 2 * 64 * 2  # two of eight KV heads
    touched = 128 * (1 - (124 / 128) ** 32)
    experts = 36 * touched / 4 * 3 * 2880 * 2880 * 17 / 32
    others = 36 * (2880 * 64 * (2 * 64 + 2 * 8) / 4 + 128 * 2880) * 2 + 201088 * 2880 / 4 * 2
    assert oss.weight_bytes == pytest.approx(experts + others)
    state = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    # KV heads are fewer than ranks
    qwen = roofline.decode(MODELS["qwen3-next"], four, H200, 32, 8192)
    assert qwen.kv_bytes == 12 * 32 * 8192 * 2 * 256 * 2 + 36 * 32 * 2 * state / 4
    sparse = roofline.decode(MODELS["v3.2"], eight, H200, 32, 8192)
    assert sparse.kv_bytes == 61 * 32 * (2048 * 576 * 2 + 8192 * 132)
    assert sparse.attention_flops == 61 * 32 * (2048 * 2 * 128 * 1088 + 8192 * 2 * 64 * 128)
    with_less = roofline.decode(MODELS["v3.2"], eight, H200, 32, 1024)
    whole = roofline.decode(MODELS["v3"], eight, H200, 32, 1024)
    assert with_less.kv_bytes - whole.kv_bytes == 61 * 32 * 1024 * 132
    added = 1536 * 64 * 128 + 7168 * (128 + 64)
    assert with_less.weight_bytes - whole.weight_bytes == 61 * added
    # V4-Flash: a window of 128 in 43 layers, 512 entries of 4 tokens and their index keys in 21, 64 of 128 tokens in 20
    entries = roofline.decode(MODELS["v4-flash"], eight, H200, 32, 8192)
    rows = 43 * 128 + 21 * 512 + 20 * 64
    assert entries.kv_bytes == 32 * (rows * 512 * 2 + 21 * 8192 / 4 * 128 * 2)
    assert entries.attention_flops == 32 * (rows * 64 * 4 * 512 + 21 * 8192 / 4 * 64 * 2 * 128)
    few = roofline.decode(MODELS["v4-flash"], eight, H200, 32, 1024)
    assert few.kv_bytes == 32 * ((43 * 128 + 21 * 256 + 20 * 8) * 512 * 2 + 21 * 1024 / 4 * 128 * 2)


def test_the_roofline_of_n_gram_tables() -> None:
    """V4.1: before two layers, 24 rows of 256 numbers become four keys and a value in FP8, on 8 ranks."""
    eight, model = roofline.FORMS["tp8"], MODELS["v41-flash"]
    with_tables, without = (
        roofline.decode(config, eight, H200, 32, 8192) for config in (model, model | {"engram_layer_ids": []})
    )
    assert with_tables.weight_bytes - without.weight_bytes == 2 * 24 * 256 * 5 * 5120 / 8
    assert with_tables.kv_bytes == without.kv_bytes


def test_the_roofline_of_pools_and_channel_decays() -> None:
    """GLM-5.3-Flash by hand: 32 requests after 8,192 tokens on 8 ranks; a pool's key for each four tokens."""
    eight, model = roofline.FORMS["tp8"], MODELS["glm-5.3-flash"]
    found = roofline.decode(model, eight, H200, 32, 8192)
    state = 64 * 128 * 128 * 4 + 3 * 64 * 128 * 3 * 2
    assert found.kv_bytes == 11 * 32 * (2051 * 512 * 2 + 8192 / 4 * 128 * 2) + 34 * 32 * 2 * state / 8
    index = 1536 * 32 * 128 + 4096 * (2 * 128 + 32)
    latent = 4096 * (1536 + 512) + 1536 * 64 * 256 + 512 * 64 * 512 + 64 * 256 * 4096 + index
    delta = 4096 * (4 * 8192 + 64) + 2 * 128 * 8192
    plain = 45 * 2 * 24 * 4 * 4096 * 2 + 34 * 2 * 4096 * 128 + 42 * 288 * 4096
    touched, expert = 288 * (1 - (280 / 288) ** 32), 3 * 4096 * 2048
    mlps = 3 * 3 * 4096 * 12288 + 42 * expert * (touched + 1)
    weights = (11 * latent + 34 * delta + mlps + 154880 * 4096) / 8 + plain
    assert found.weight_bytes == pytest.approx(2 * weights)


def test_the_roofline_of_row_fp8_is_that_of_blocks() -> None:
    models = (MODELS[name] for name in ("v3-row-fp8", "v3"))
    rows, blocks = (roofline.decode(model, roofline.FORMS["tp8"], H200, 8, 2048) for model in models)
    assert rows == blocks


def test_the_constants_allow_the_rooflines_work_at_their_rates() -> None:
    """Of V3 on 8 ranks at 128 requests: 25.4 ms of weights, 9.0 of attention, and messages."""
    case = Case("v3", MODELS["v3"], roofline.FORMS["dp8ep8"], H200, 128, 2048)
    least = roofline.decode(case.config, case.form, H200, 128, 2048)
    weights = least.weight_bytes / 3.9e12 * 1e6
    attention = least.attention_flops / 497e12 * 1e6
    alone = Cost(nvlink=1, link_us=100.0)
    hidden = Cost(read=3.9e8, flops={"fp8": 1.0}, nvlink=1, link_us=130.0)  # products of 100 us and their gap
    lines = [Line("", "layer 3", "", 1, True, cost) for cost in (alone, hidden, Cost(read=1e9))]
    found = summary_of(case, lines, 58)
    gap = H200["graph_node_us"]
    assert found.allowed_us == pytest.approx(weights + attention + 58 * (100 + 30 - gap))
    assert found.allowed == pytest.approx(found.least.microseconds / found.allowed_us)


def summary_of(case: Case, lines: Sequence[Line], repeats: int) -> Summary:
    least = roofline.decode(case.config, case.form, case.hardware, case.batch, case.context)
    return Summary(case, [Section("MoE layer", repeats, schedule(lines, case.hardware))], [], {}, least)


def beside_a_dispatch(us: float) -> list[Line]:
    """A dispatch of 30 us on stream 2 beside products of stream 1, and a combine of 20 us after both."""
    gap, rate = H200["graph_node_us"], H200["product_bytes_per_s"]
    dispatch, combine = (Cost(nvlink=1, link_us=time - gap) for time in (30.0, 20.0))
    shared = Cost(read=(us - gap) * rate / 1e6, flops={"fp8": 1.0})
    return [
        Line("", "layer 3", "", 2, True, dispatch, 1, {1: 0}),
        Line("", "layer 3", "", 1, True, shared, 1, {}),
        Line("", "layer 3", "", 2, True, combine, 2, {1: 1}),
    ]


@pytest.mark.parametrize(("shared_us", "added"), [(10.0, 40.0), (50.0, 20.0)])
def test_messages_beside_other_work_do_not_lower_what_the_constants_allow(shared_us: float, added: float) -> None:
    """The 10 us of products that run during the dispatch are in the roofline already; longer ones hide all of it."""
    case, gap = Case("kimi-k2", MODELS["kimi-k2"], roofline.FORMS["dp8ep8"], H200, 32, 2048), H200["graph_node_us"]
    alone, beside = summary_of(case, [], 60), summary_of(case, beside_a_dispatch(shared_us), 60)
    assert beside.allowed_us - alone.allowed_us == pytest.approx(60 * (added - 2 * gap))


def test_a_launch_that_awaits_messages_ends_after_their_arrival() -> None:
    """Sent at 10 us, they arrive at 25; work on another stream hides a part of the wait, which `allowed` counts."""
    gap, floor = H200["graph_node_us"], H200["kernel_floor_us"]
    send = Line("", "layer 3", "", 2, True, Cost(nvlink=1, link_us=10 - gap, travel_us=15.0), 1, {})
    receive = Line("", "layer 3", "", 1, True, Cost(awaits=True), 2, {2: 1})

    def found(shared_us: float) -> list[Line]:
        return [send, Line("", "layer 3", "", 1, True, Cost(link_us=shared_us - gap), 1, {}), receive]

    assert time_of(found(12.0), H200) == pytest.approx(25 + floor)
    assert time_of(found(40.0), H200) == pytest.approx(40 + gap + floor), "they have arrived"
    case = Case("v3", MODELS["v3"], roofline.FORMS["dp8ep8"], H200, 128, 2048)
    alone, waiting = (summary_of(case, lines, 58) for lines in ([], [send, receive]))
    assert waiting.allowed_us - alone.allowed_us == pytest.approx(58 * (10 - gap + 15 - gap))
    assert waiting.sections[0].microseconds == pytest.approx(25 + floor)


def test_exchanged_counts_are_messages_without_bytes() -> None:
    """DeepEP's `notify_dispatch` in a prefill."""
    case = Case("v3", MODELS["v3"], roofline.FORMS["dp8ep8"], H200, 128, 2048)
    notify = Line("", "layer 3", "", 1, False, Cost(link_us=20.0))
    alone, counted = (summary_of(case, lines, 58) for lines in ([], [notify]))
    assert counted.allowed_us - alone.allowed_us == pytest.approx(58 * 20)
