"""Experts in Triton's memory, also FP8 with scales, that move between the slots of two ranks: results do not change."""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_engine.kernels.experts.triton_experts import TritonExperts
from moe_engine.kernels.quantization import reference
from moe_engine.parallel.expert_tables import ExpertTables
from moe_engine.parallel.expert_transfer import ExpertTransfer, SlotMemory
from moe_engine.parallel.experts import LocalExperts
from moe_engine.parallel.overlap import CommThread
from moe_engine.parallel.placement.moves import plan_moves
from moe_engine.parallel.placement.placement import ExpertPlacement

EXPERTS, RANKS, SLOTS, HIDDEN, WIDTH = 4, 2, 3, 136, 40
OLD, NEW = [[0, 1, 2, 3, 0, 1]], [[0, 1, 3, 2, 0, 1]]
kernel = TritonExperts()


class Mailbox:
    """The connection between the ranks: a message arrives when its receiver waits for it."""

    def __init__(self) -> None:
        self.messages = {(sender, receiver): SimpleQueue() for sender in range(RANKS) for receiver in range(RANKS)}


class Link:
    """One rank's end of a `Mailbox`, in place of a `PeerLink`."""

    def __init__(self, box: Mailbox, rank: int) -> None:
        self._box, self._rank = box, rank

    def start(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        for peer, part in sends:
            assert part.is_contiguous()
            self._box.messages[self._rank, peer].put(part.clone())
        return list(receives)

    def wait(self, works: list[tuple[int, Tensor]]) -> None:
        for peer, part in works:
            part.copy_(self._box.messages[peer, self._rank].get(timeout=60.0))


def _load(weights, slot: int, parts) -> None:
    if isinstance(parts[0], Tensor):
        kernel.load_expert(weights, slot, *parts)
    else:
        kernel.load_expert_blocks(weights, slot, *parts)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_no_token_notices_that_experts_move(kind: str) -> None:
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    experts = [[torch.randn(n, k) * k**-0.5 for n, k in shapes] for _ in range(EXPERTS)]
    prepare = reference.quantize_weight if kind == "fp8" else Tensor.bfloat16
    experts = [[prepare(part) for part in parts] for parts in experts]

    def allocate(count: int):
        if kind == "fp8":
            return kernel.allocate_blocks(count, HIDDEN, WIDTH, "cpu")
        return kernel.allocate(count, HIDDEN, WIDTH, torch.bfloat16, "cpu")

    whole = allocate(EXPERTS)
    for expert, parts in enumerate(experts):
        _load(whole, expert, parts)
    old, new = (ExpertPlacement(np.array(table), EXPERTS, RANKS) for table in (OLD, NEW))
    tables = [ExpertTables(old, rank, "dynamic") for rank in range(RANKS)]
    weights, box = [allocate(SLOTS) for _ in range(RANKS)], Mailbox()
    for table, own in zip(tables, weights):
        for slot, expert in enumerate(table.held(0)):
            _load(own, slot, experts[expert])
    transfers = [
        ExpertTransfer(SlotMemory(kernel, {0: own}, 1), Link(box, rank), rank, SLOTS, CommThread())  # type: ignore[arg-type]
        for rank, own in enumerate(weights)
    ]
    x, topk_weights = torch.randn(5, HIDDEN).bfloat16(), torch.rand(5, 2)
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(5)]).int()
    want = kernel.run_routed(x, topk_weights, ids, whole).float()

    def check() -> None:
        found = torch.zeros_like(want)
        for rank, (table, own) in enumerate(zip(tables, weights)):
            slots = table.to_physical(0, ids)
            assert torch.equal(torch.tensor(table.placement.physical_to_logical[0])[slots.long()], ids)
            experts = LocalExperts(kernel, own, rank * SLOTS)
            found += experts.run(x, topk_weights, slots).float()
        torch.testing.assert_close(found, want, rtol=0, atol=1e-2 * float(want.abs().max()))

    received = 0
    for chunk in plan_moves(old, new):
        received += sum(transfer.begin([chunk]) for transfer in transfers)
        check()  # during the move: memory read by a step is unchanged
        for transfer in transfers:
            transfer.finish()
        for table in tables:
            table.update_layer(0, chunk.table)
    check()
    assert received >= 2 and all(messages.empty() for messages in box.messages.values())
    assert all(sorted(table.held(0)) == sorted(NEW[0][r * SLOTS : (r + 1) * SLOTS]) for r, table in enumerate(tables))
