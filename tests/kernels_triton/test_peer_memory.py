"""Kernels that write to peers, outside the interpreter; what they compute is tested over ranks, tests/parallel."""

from __future__ import annotations

import json

from tests.kernels_triton.test_aot import outside


def test_the_size_of_a_launch_does_not_choose_the_kernel(tmp_path):
    """One kernel of each for any number of tokens and any offsets, and it is the one compiled ahead of time."""
    done = outside("tests.kernels_triton.outside_peers", str(tmp_path), cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    num_cases, launched, num_cached = json.loads(done.stdout)
    assert len(launched) == num_cached == num_cases == 5
