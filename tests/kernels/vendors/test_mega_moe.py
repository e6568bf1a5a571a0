"""MegaMoE on Hopper, with an emulator of the library over ranks that are threads, against float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.backends import plan_kernels
from moe_engine.kernels.device import Device, ExpertWidths, Need
from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.mega_moe import MegaMoe
from moe_engine.kernels.quantization import reference as fp8
from moe_engine.kernels.vendors import probe
from moe_engine.kernels.weight_forms import FP8_BLOCKS
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.build import Groups, PhasedDispatcher, build
from moe_engine.parallel.dispatch.mega_moe import make_buffer
from moe_engine.parallel.dispatch.protocol import DispatchShape
from moe_engine.parallel.dispatch.symm_mem.availability import MULTICAST
from moe_engine.parallel.dispatch.symm_mem.memory import TorchSymmetricMemory
from moe_engine.parallel.dispatch.tables import Place, choose
from moe_engine.parallel.experts import DispatchedExperts
from tests.kernels.cpu.formulas import gated, normal
from tests.kernels.vendors.contract import ContractBroken
from tests.kernels.vendors.mega_moe_emulator import MegaMoeEmulator, World
from tests.kernels.vendors.test_deep_gemm import near, weight

BF16 = torch.bfloat16
HIDDEN, WIDTH, EXPERTS, TOP_K = 512, 256, 4, 2
SHAPE = DispatchShape(EXPERTS, 2, TOP_K, HIDDEN, 8, BF16, width=WIDTH)
H200 = Device("cuda", "H200", (9, 0))
WIDTHS = ExpertWidths(7168, 2048, 8, form=FP8_BLOCKS, dispatched=True, fused=True)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All libraries are installed, and GPUs access each other's memory."""
    monkeypatch.setattr(probe, "_found", lambda name: True)
    monkeypatch.setattr("moe_engine.parallel.dispatch.symm_mem.why_not", lambda *place: None)


def dispatcher(library: Any, world: World, rank: int) -> PhasedDispatcher:
    groups = Groups(cast(Group, None), process_group=world.group(rank), deep_gemm=library)
    return build(choose(Place(H200, 2), "megamoe"), SHAPE, 4, groups)


def on_ranks(function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, range(2)))


def test_tokens_of_two_ranks_equal_float64(installed) -> None:
    """Prefill and decode, an idle rank, dropped choices, and counted rows."""
    emulator, world = MegaMoeEmulator(), World(2)
    parts = [(weight(WIDTH, HIDDEN), weight(WIDTH, HIDDEN), weight(HIDDEN, WIDTH)) for _ in range(EXPERTS)]
    sizes = {"prefill": (5, 8), "decode": (0, 3)}
    x = {phase: [normal(n, HIDDEN, dtype=BF16) for n in counts] for phase, counts in sizes.items()}
    ids = {
        phase: [torch.rand(n, EXPERTS).argsort(1)[:, :TOP_K].int() for n in counts] for phase, counts in sizes.items()
    }
    ids["prefill"][0][1, 0] = -1
    scores = {phase: [torch.rand(n, TOP_K) for n in counts] for phase, counts in sizes.items()}
    counted: dict[int, list[Tensor]] = {0: [], 1: []}

    def one(rank: int) -> dict[str, Tensor]:
        kernel = MegaMoe(emulator.module)
        weights = kernel.allocate_blocks(2, HIDDEN, WIDTH, "cpu")
        for slot in range(2):
            kernel.load_expert_blocks(weights, slot, *parts[2 * rank + slot])
        experts = DispatchedExperts(dispatcher(emulator.module, world, rank), kernel, weights)
        experts.on_arrival = counted[rank].append
        return {
            phase: experts.run(x[phase][rank], scores[phase][rank], ids[phase][rank], phase=phase)  # type: ignore[arg-type]
            for phase in sizes
        }

    found = on_ranks(one)
    for phase in sizes:
        for rank in range(2):
            want = torch.zeros(len(x[phase][rank]), HIDDEN, dtype=torch.float64)
            for token, chosen in enumerate(ids[phase][rank].tolist()):
                for slot, e in enumerate(chosen):
                    if e >= 0:
                        one_token = x[phase][rank][token : token + 1]
                        share = float(scores[phase][rank][token, slot])
                        want[token] += share * gated(one_token, *map(fp8.dequantize_weight, parts[e]))[0]
            assert found[rank][phase].dtype == BF16
            if len(want):
                near(found[rank][phase], want)
    assert sorted(emulator.calls) == [(0, 4), (3, 4), (5, 8), (8, 8)]
    for phase, number in (("prefill", 0), ("decode", 1)):
        got = torch.cat([counted[rank][number] for rank in range(2)])
        assert got.tolist() == [sum(int((i == e).sum()) for i in ids[phase]) for e in range(EXPERTS)]


def test_a_batch_beyond_the_buffer_is_refused(installed) -> None:
    emulator, world = MegaMoeEmulator(), World(2)
    made = on_ranks(lambda rank: dispatcher(emulator.module, world, rank))
    ids = torch.zeros(9, TOP_K).int()
    with pytest.raises(ValueError, match="9 tokens, MegaMoE's buffer was made for 8"):
        made[0].dispatch(normal(9, HIDDEN, dtype=BF16), ids, ids.float(), "prefill")
    with pytest.raises(ValueError, match="bfloat16 tokens"):
        make_buffer(emulator.module, world.group(0), replace(SHAPE, dtype=torch.float16))


def test_ranks_without_shared_memory_get_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's rendezvous fails; multicast, which no kernel uses, is off before it, unless the user has set it."""
    seen = []

    def fails(*sizes: Any) -> None:
        seen.append(os.environ[MULTICAST])
        raise RuntimeError("CUDA driver error: invalid argument\nException raised from rendezvous")

    library = SimpleNamespace(get_symm_buffer_for_sm90_mega_moe=fails)
    for given, wanted in ((None, "1"), ("0", "0")):
        monkeypatch.delenv(MULTICAST, raising=False)
        if given is not None:
            monkeypatch.setenv(MULTICAST, given)
        with pytest.raises(ValueError, match="cannot be made: CUDA driver error: invalid argument; use"):
            make_buffer(library, None, SHAPE)
        assert seen.pop() == wanted
    monkeypatch.delenv(MULTICAST)
    TorchSymmetricMemory(None)
    assert os.environ[MULTICAST] == "1"


def test_experts_that_it_cannot_run() -> None:
    kernel = MegaMoe(MegaMoeEmulator().module)
    weights: ExpertWeights = kernel.allocate_blocks(1, HIDDEN, WIDTH, "cpu")
    with pytest.raises(ValueError, match="takes the tokens of --moe-a2a-backend megamoe"):
        kernel.run(ExpertBatch("padded", normal(1, 2, HIDDEN, dtype=BF16), counts=torch.ones(1).int()), weights)
    with pytest.raises(ValueError, match="takes the tokens of --moe-a2a-backend megamoe"):
        kernel.run_routed(normal(1, HIDDEN, dtype=BF16), torch.ones(1, 1), torch.zeros(1, 1).int(), weights)
    with pytest.raises(ValueError, match="multiplies block-FP8 experts"):
        kernel.allocate(1, HIDDEN, WIDTH, BF16, "cpu")
    with pytest.raises(ImportError, match="fp8_mega_moe"):
        MegaMoe(object())


def test_the_emulator_refuses_what_the_library_refuses() -> None:
    library, group = MegaMoeEmulator().module, World(1).group(0)
    make = library.get_symm_buffer_for_sm90_mega_moe
    for sizes in ((3, 8, 2, 640, 256), (4, 8, 2, 512, 128), (4, 8, 33, 512, 256), (4, 8, 2, 512, 4352)):
        with pytest.raises(ContractBroken):
            make(group, *sizes)
    buffer = make(group, 2, 8, 1, 512, 256)
    assert buffer.num_max_tokens_per_rank == 128
    x, ids = normal(3, 512, dtype=BF16), torch.zeros(3, 1).int()
    targets = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    with pytest.raises(ContractBroken):
        library.mega_moe_pre_dispatch_sm90(x, ids.long(), ids.float(), *targets, num_tokens=3)
    first = torch.zeros(2, 512, 512).to(torch.float8_e4m3fn), torch.ones(2, 4, 4)
    second = torch.zeros(2, 512, 256).to(torch.float8_e4m3fn), torch.ones(2, 4, 2)
    library.fp8_mega_moe(x, first, second, buffer, num_tokens_bound=8)
    for bad in ({"num_tokens_bound": 2}, {"num_tokens_bound": 129}, {"recipe": (1, 1, 32)}):
        with pytest.raises(ContractBroken):
            library.fp8_mega_moe(x, first, second, buffer, **bad)


@pytest.mark.parametrize(
    ("device", "widths", "text"),
    [
        (Device("cuda", "B200", (10, 0)), WIDTHS, "MegaMoE has kernels for sm_90"),
        (H200, replace(WIDTHS, form=None), "not in FP8 blocks of 128 x 128"),
        (H200, replace(WIDTHS, hidden=2304), "hidden sizes of 512 n"),
        (H200, replace(WIDTHS, top_k=40), "at most 32 experts"),
    ],
)
def test_experts_without_such_a_kernel_are_refused(device, widths, text, installed) -> None:
    with pytest.raises(ValueError, match=text):
        plan_kernels(device, Need("bfloat16", page_size=64, experts=widths))


def test_it_is_chosen_with_its_dispatcher_only(installed) -> None:
    fused = plan_kernels(H200, Need("bfloat16", page_size=64, experts=WIDTHS))
    assert fused.row("experts").name == "mega_moe"
    with pytest.raises(ValueError, match="does not run with --moe-a2a-backend megamoe"):
        plan_kernels(H200, fused.need, {"experts": "triton"})
    with pytest.raises(ValueError, match="runs only with --moe-a2a-backend megamoe"):
        plan_kernels(H200, replace(fused.need, experts=replace(WIDTHS, fused=False)), {"experts": "mega_moe"})
    assert plan_kernels(H200, Need("bfloat16", page_size=64)).row("experts").name == "deep_gemm"
