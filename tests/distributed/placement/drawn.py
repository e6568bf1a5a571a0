"""Random layouts and counts, as hypothesis strategies."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moe_engine.parallel.placement.layout import ExpertLayout


@st.composite
def layouts(draw: st.DrawFn) -> ExpertLayout:
    """Up to 16 ranks on up to 4 nodes; slots divide evenly, expert groups often divide by the nodes."""
    num_nodes = draw(st.sampled_from((1, 2, 4)))
    num_ranks = num_nodes * draw(st.integers(1, 4))
    num_groups = draw(st.sampled_from((1, num_nodes, 2 * num_nodes)))
    num_experts = num_groups * draw(st.integers(1, 6))
    redundant = -num_experts % num_ranks + num_ranks * draw(st.integers(0, 2))
    return ExpertLayout(num_experts, num_ranks, redundant, num_nodes, num_groups)


@st.composite
def counts_for(draw: st.DrawFn, layout: ExpertLayout, num_layers: int | None = None) -> np.ndarray:
    """[L, E]: flat, skewed, mostly zero or all zero."""
    num_layers = num_layers or draw(st.integers(1, 3))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from((0.0, 0.5, 2.0)))
    counts = generator.lognormal(3.0, spread, (num_layers, layout.num_experts))
    counts *= generator.random(counts.shape) < draw(st.sampled_from((1.0, 1.0, 0.3, 0.0)))
    return counts.astype(np.int64)
