"""Kernels that write to peers: all ranks in this process, phase by phase. Over processes
that wait for each other they are tested in tests/distributed/dispatch/test_symm_mem.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_suite.exchange import Load, RanksHere, error_of

SMALL = Load(num_ranks=3, num_local=2, top_k=3, hidden=128, tokens=4, dtype=torch.float32, fp8=False)


@pytest.mark.parametrize(
    ("load", "bound"),
    [(SMALL, 1e-6), (replace(SMALL, dtype=torch.bfloat16, fp8=True, hidden=256), 6e-2)],
    ids=["float32", "fp8"],
)
def test_what_the_gpu_suite_runs(load, bound):
    """Every phase's launch may come again, as its timing does; slots take turns."""
    ranks = RanksHere(load, "cpu")
    for number in (0, 1):

        def twice(name, call):
            call()
            return call()

        found = ranks.run(number, twice if number else None)
        assert error_of(found, ranks.expected()) <= bound
        chosen = torch.bincount(ranks.ids.flatten(), minlength=6)
        assert torch.cat(ranks.counts).tolist() == chosen.tolist()
    assert not ranks.lost.any()
