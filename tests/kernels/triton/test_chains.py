"""Chains of drafts in Triton, under the interpreter: the same memory contents as with the torch row."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.speculation.protocol import ChainBuffers, SimulatedAcceptance
from moe_engine.kernels.speculation.reference import TorchChains
from moe_engine.worker.sampling.sampling_state import mix64
from tests.kernels.reference.chains import drawn_chain, drawn_tables

triton_chains = pytest.importorskip("moe_engine.kernels.speculation.triton_chains", reason="needs triton")


def copied(tables: RowTables, chain: ChainBuffers) -> tuple[RowTables, ChainBuffers]:
    values = {field.name: getattr(chain, field.name).clone() for field in fields(chain)}
    return RowTables(*(table.clone() for table in tables)), ChainBuffers(**values)


@pytest.mark.parametrize("real,padded,drafts", [(3, 2, 3), (1, 0, 1), (0, 2, 2), (2, 1, 0), (4, 0, 4)])
@pytest.mark.parametrize("length", [None, 1.0, 2.5])
def test_a_step_leaves_the_same_memory(real: int, padded: int, drafts: int, length: float | None) -> None:
    generator = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())
    simulated = None if length is None else SimulatedAcceptance(length, mix64(1))
    tables, chain = drawn_tables(generator), drawn_chain(generator, real, padded, drafts)
    other_tables, other = copied(tables, chain)
    hidden = torch.randn(chain.ids.numel(), tables.states.shape[1])
    for kernels, own, memory in ((TorchChains(), tables, chain), (triton_chains.TritonChains(), other_tables, other)):
        kernels.inputs(own, memory)
        kernels.accept(own, memory, simulated)
        kernels.keep_states(own.states, hidden, memory)
    for field in fields(chain):
        assert getattr(other, field.name).equal(getattr(chain, field.name)), field.name
    assert all(a.equal(b) for a, b in zip(other_tables, tables))
