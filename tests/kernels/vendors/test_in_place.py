"""Recorded attention over plans that stay in place: replayed for other steps, Python asleep, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention.latent_records import FP8_GROUPS, pack
from moe_engine.kernels.attention.protocol import RenewablePlan
from moe_engine.kernels.attention.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.vendors.fa3 import FA3GQA, FA3MLA
from moe_engine.kernels.attention.vendors.flashinfer_gqa import FlashInferGQA
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
from moe_engine.kernels.attention.vendors.flashmla import FlashMLA
from tests.kernels.cpu.formulas import attend, close, normal
from tests.kernels.vendors import fa3_emulator, flash_mla_emulator, flashinfer_emulator
from tests.kernels.vendors.contract import ContractBroken
from tests.kernels.vendors.tape import Tape, TapeGraphs

BF16 = torch.bfloat16
LATENT, WIDTH = 512, 576
CONTEXT = 200
SIZE = 4


def flash_mla(plans_itself: bool) -> FlashMLA:
    return FlashMLA(flash_mla_emulator.module(9, plans_itself), expanded=TorchMLA())


MLA = {
    "flashinfer": (lambda: FlashInferMLA(flashinfer_emulator.module(9), 9), 1),
    "flashinfer on Blackwell": (lambda: FlashInferMLA(flashinfer_emulator.module(10), 10), 16),
    "fa3": (lambda: FA3MLA(fa3_emulator.module()), 16),
    "flashmla": (lambda: flash_mla(True), 128),
    "flashmla of 2025": (lambda: flash_mla(False), 64),
}
GQA = {
    "flashinfer": (lambda: FlashInferGQA(flashinfer_emulator.module()), 4),
    "fa3": (lambda: FA3GQA(fa3_emulator.module()), 1),
}


class Static:
    """The static side of a recording: queries over buffers, as `worker.step_graphs` makes them."""

    def __init__(self, count: int, page_size: int, size: int = SIZE, device: str = "cpu") -> None:
        self.size, self.count, self.page_size = size, count, page_size
        pages = -(-CONTEXT // page_size)
        slots = (torch.randperm((size + 1) * pages).view(size + 1, pages, 1) + 1) * page_size + torch.arange(page_size)
        self.table = slots.flatten(1).int().to(device)  # page 0 belongs to nobody
        self.num_slots = ((size + 1) * pages + 1) * page_size
        self.lens = torch.full((size,), count, dtype=torch.int32, device=device)
        self.rows = torch.zeros(size, dtype=torch.int32, device=device)
        starts = torch.arange(0, size * count + 1, count, dtype=torch.int32, device=device)
        self.queries = PagedQueries(
            [count] * size, [count] * size, self.rows, starts, self.lens, self.table, page_size
        )  # fmt: skip

    @property
    def batch(self) -> AttentionBatch:
        return AttentionBatch(self.queries, None)

    def step(self, live: int) -> None:
        """Other requests: `live` of them at random, the rest as padding."""
        contexts = torch.randint(self.count, CONTEXT + 1, (live,)).tolist() + [self.count] * (self.size - live)
        rows = torch.randperm(self.size + 1)[:live].tolist() + [0] * (self.size - live)
        self.queries.context_lens[:] = contexts
        self.lens.copy_(torch.tensor(contexts))
        self.rows.copy_(torch.tensor(rows))

    def slots(self, request: int) -> Tensor:
        return self.table[int(self.rows[request]), : self.queries.context_lens[request]].long()


def planned(backend: Any, static: Static) -> RenewablePlan:
    plan = backend.capabilities.plan_in_place(static.batch)
    assert plan is not None
    return plan


@pytest.mark.parametrize("name", MLA)
@pytest.mark.parametrize("count", [1, 3])
def test_absorbed_replayed_equals_float64(name: str, count: int) -> None:
    backend, page_size, heads, scale = MLA[name][0](), MLA[name][1], 3, WIDTH**-0.5
    static = Static(count, page_size)
    cache = normal(static.num_slots, WIDTH, dtype=BF16)
    q, out = normal(SIZE * count, heads, WIDTH, dtype=BF16), torch.zeros(SIZE * count, heads, LATENT, dtype=BF16)

    def layers(plan: Any) -> None:
        for factor in (1.0, 0.5):  # two layers share a plan; the second's result is the one that is looked at
            out.copy_(backend.absorbed(q * factor, cache, static.queries, scale, plan, LATENT))

    layers(backend.plan(static.batch))
    layers(planned(backend, static))
    plan = planned(backend, static)
    tape = TapeGraphs().capture(lambda: layers(plan))
    for live in (SIZE, 1, 3, 2):
        static.step(live)
        q.copy_(normal(*q.shape, dtype=BF16))
        plan.renew()
        tape.replay()
        for i in range(SIZE):
            tokens, keys = slice(i * count, (i + 1) * count), cache[static.slots(i)].double()[:, None]
            keys = keys.expand(-1, heads, -1)
            close(out[tokens], attend(q[tokens] * 0.5, keys, keys[..., :LATENT], scale))


@pytest.mark.parametrize("name", GQA)
@pytest.mark.parametrize("count", [1, 3])
def test_gqa_replayed_equals_float64(name: str, count: int) -> None:
    backend, page_size, heads, groups, width = GQA[name][0](), GQA[name][1], 6, 2, 64
    static = Static(count, page_size)
    keys, values = (normal(static.num_slots, groups, width, dtype=BF16) for _ in "kv")
    q, scale = normal(SIZE * count, heads, width, dtype=BF16), width**-0.5
    out = torch.zeros_like(q)

    def layer(plan: Any) -> None:
        out.copy_(backend.paged(q, keys, values, static.queries, scale, plan))

    layer(backend.plan(static.batch))
    plan = planned(backend, static)
    tape = TapeGraphs().capture(lambda: layer(plan))
    for live in (SIZE, 1, 3):
        static.step(live)
        q.copy_(normal(*q.shape, dtype=BF16))
        plan.renew()
        tape.replay()
        for i in range(SIZE):
            tokens, slots = slice(i * count, (i + 1) * count), static.slots(i)
            k, v = (x[slots].repeat_interleave(heads // groups, 1) for x in (keys, values))
            close(out[tokens], attend(q[tokens], k, v, scale), scale=2)


@pytest.mark.parametrize("name", MLA)
def test_smaller_recordings_share_the_room_of_the_largest(name: str) -> None:
    """Replayed in turns, whoever was last."""
    backend, page_size, scale = MLA[name][0](), MLA[name][1], 0.04
    made = []
    for size in (4, 2):
        static = Static(1, page_size, size)
        cache, q = normal(static.num_slots, WIDTH, dtype=BF16), normal(size, 2, WIDTH, dtype=BF16)
        out = torch.zeros(size, 2, LATENT, dtype=BF16)

        def layer(plan: Any, static=static, cache=cache, q=q, out=out) -> None:
            out.copy_(backend.absorbed(q, cache, static.queries, scale, plan))

        layer(backend.plan(static.batch))
        plan = planned(backend, static)
        made.append((static, cache, q, out, plan, TapeGraphs().capture(lambda: layer(plan))))  # noqa: B023
    for turn in (0, 1, 0, 1, 1):
        static, cache, q, out, plan, tape = made[turn]
        static.step(static.size)
        plan.renew()
        tape.replay()
        for i in range(static.size):
            keys = cache[static.slots(i)].double()[:, None].expand(-1, 2, -1)
            close(out[i : i + 1], attend(q[i : i + 1], keys, keys[..., :LATENT], scale))


@pytest.mark.parametrize("name", MLA)
def test_a_plan_that_is_not_renewed_is_noticed(name: str) -> None:
    """The test of the tests above: replaying old plans gives other results, or is refused."""
    backend, page_size = MLA[name][0](), MLA[name][1]
    static = Static(1, page_size)
    cache, q = normal(static.num_slots, WIDTH, dtype=BF16), normal(SIZE, 2, WIDTH, dtype=BF16)
    out = torch.zeros(SIZE, 2, LATENT, dtype=BF16)

    def layer(plan: Any) -> None:
        out.copy_(backend.absorbed(q, cache, static.queries, 0.04, plan))

    layer(backend.plan(static.batch))
    plan = planned(backend, static)
    tape = TapeGraphs().capture(lambda: layer(plan))
    static.step(SIZE)
    static.rows.copy_(torch.arange(1, SIZE + 1))
    tape.replay()
    keys = cache[static.slots(3)].double()[:, None].expand(-1, 2, -1)
    want = attend(q[3:], keys, keys[..., :LATENT], 0.04)
    assert (out[3:].double() - want).abs().max() > 0.05 * want.abs().max()


def test_eager_plans_cannot_be_recorded() -> None:
    """What the tape and the emulators refuse, the GPU would get wrong in silence."""
    for backend, page_size in ((MLA["flashinfer"][0](), 1), (flash_mla(True), 64)):
        static = Static(1, page_size)
        cache, q = normal(static.num_slots, WIDTH, dtype=BF16), normal(SIZE, 2, WIDTH, dtype=BF16)
        plan = backend.plan(static.batch)

        def layer(backend=backend, q=q, cache=cache, static=static, plan=plan) -> Tensor:
            return backend.absorbed(q, cache, static.queries, 0.04, plan)

        layer()
        with pytest.raises(ContractBroken):
            tape = TapeGraphs().capture(layer)
            static.step(SIZE)
            tape.replay()


def test_layers_that_differ_are_refused_while_recorded() -> None:
    backend, static = FlashInferMLA(flashinfer_emulator.module(), 9), Static(1, 1)
    cache, q = normal(static.num_slots, WIDTH, dtype=BF16), normal(SIZE, 2, WIDTH, dtype=BF16)
    backend.absorbed(q, cache, static.queries, 0.04, backend.plan(static.batch))
    plan = planned(backend, static)
    with pytest.raises(RuntimeError, match="layers differ"):
        backend.absorbed(q, cache, static.queries, 0.05, plan)


def test_what_cannot_be_planned_in_place_says_so() -> None:
    static = Static(1, 64)
    prompts = AttentionBatch(None, static.queries)
    for make, _ in (*MLA.values(), *GQA.values()):
        backend = make()
        assert backend.plan_in_place(prompts) is None
        if not isinstance(backend, (FA3MLA, FA3GQA)):
            assert backend.plan_in_place(static.batch) is None, "no layer has run: its numbers are not known"


def over_records(arch: int) -> FlashMLA:
    return FlashMLA(flash_mla_emulator.module(arch), expanded=TorchMLA(), major=arch)


@pytest.mark.parametrize("count", [1, 3])
def test_flashmla_over_fp8_records_replayed_on_blackwell(count: int) -> None:
    """Lists as wide as any context, of which each token's length counts; behind it lies what other steps left."""
    backend, heads, scale = over_records(10), 3, WIDTH**-0.5
    made = []
    for size in (SIZE, 2):  # recordings share the room
        static = Static(count, 16, size)
        records = pack(normal(static.num_slots, WIDTH, dtype=BF16), LATENT, FP8_GROUPS)
        q, out = normal(size * count, heads, WIDTH, dtype=BF16), torch.zeros(size * count, heads, LATENT, dtype=BF16)

        def layers(plan: Any, static=static, records=records, q=q, out=out) -> None:
            for factor in (1.0, 0.5):  # two layers share lists and schedule
                out.copy_(backend.absorbed(q * factor, records, static.queries, scale, plan, LATENT))

        layers(backend.plan(static.batch))
        layers(planned(backend, static))
        plan = planned(backend, static)
        made.append((static, records, q, out, plan, TapeGraphs().capture(lambda: layers(plan))))  # noqa: B023
    for turn, live in ((0, SIZE), (1, 1), (0, 2), (1, 2), (0, 3)):
        static, records, q, out, plan, tape = made[turn]
        static.step(live)
        q.copy_(normal(*q.shape, dtype=BF16))
        plan.renew()
        tape.replay()
        exact = flash_mla_emulator.unpack(records)
        for i in range(static.size):
            tokens, keys = slice(i * count, (i + 1) * count), exact[static.slots(i)][:, None].expand(-1, heads, -1)
            close(out[tokens], attend(q[tokens] * 0.5, keys, keys[..., :LATENT], scale))


def test_flashmla_over_fp8_records_stays_eager_on_hopper() -> None:
    """Its kernel takes no lengths there: a recording would read lists of the longest context there may be."""
    backend, static = over_records(9), Static(1, 64)
    records = torch.zeros(static.num_slots, 656, dtype=torch.uint8)
    backend.absorbed(normal(SIZE, 2, WIDTH, dtype=BF16), records, static.queries, 0.04, None)
    assert backend.plan_in_place(static.batch) is None


def test_a_tape_replays_without_python() -> None:
    """It reruns launches on their memory: not the host's decisions, and no reading of values."""
    x, out, asked = torch.ones(3), torch.zeros(3), []

    def run() -> None:
        asked.append(len(asked))
        out.copy_(x * 2 if len(asked) == 1 else x * 100)

    tape = TapeGraphs().capture(run)
    x.fill_(5)
    tape.replay()
    assert out.tolist() == [10.0] * 3 and asked == [0] and tape.count == 1
    with pytest.raises(RuntimeError, match="a value is read"):
        TapeGraphs().capture(lambda: x[0].item())
    assert Tape.current is None
