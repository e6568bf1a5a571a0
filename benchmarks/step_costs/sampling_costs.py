"""Costs of the Triton kernels of sampling, drafts and the inputs of decodes, by their arguments.

Legend: a argument namespace, s setting.
"""

from __future__ import annotations

from typing import Any

from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.costs import Setting, cost_of, size

SECTOR = 32
"""Bytes that a read of one number takes."""


@cost_of("greedy_kernel")
def greedy(a: Any, s: Setting) -> Cost:
    return Cost(size(a.logits), size(a.tokens), programs=a.grid[0] * a.grid[1])


@cost_of("decode_inputs_kernel")
def decode_inputs(a: Any, s: Setting) -> Cost:
    return Cost(size(a.packed, a.rows) + a.count * 8, a.count * (4 + 3 * 8 + 2 * 4))


@cost_of("keep_tokens_kernel")
def keep_tokens(a: Any, s: Setting) -> Cost:
    return Cost(size(a.tokens, a.rows), size(a.tokens))


@cost_of("chain_inputs_kernel", "chain_accept_kernel")
def chain(a: Any, s: Setting) -> Cost:
    """Reads a few numbers of each request."""
    return Cost(size(a.ids), size(a.ids))


@cost_of("tree_slots_kernel")
def tree_slots(a: Any, s: Setting) -> Cost:
    return Cost(size(a.real), size(a.positions, a.slots, a.lens, a.real))


@cost_of("tree_nodes_kernel")
def tree_nodes(a: Any, s: Setting) -> Cost:
    return Cost(size(a.parents, a.chain_uniform), size(a.positions, a.visible, a.uniform))


@cost_of("tree_walk_kernel")
def tree_walk(a: Any, s: Setting) -> Cost:
    return Cost(size(a.ids, a.parents, a.sampled), size(a.path, a.taken, a.sources, a.chain_ids, a.chain_sampled))


@cost_of("chain_runs_kernel")
def chain_runs(a: Any, s: Setting) -> Cost:
    return Cost(2 * size(a.positions) + size(a.cached), size(a.positions, a.slots, a.real, a.ids, a.sources, a.lens))


@cost_of("gather_states_kernel")
def gather_states(a: Any, s: Setting) -> Cost:
    return Cost(size(a.out) + size(a.sources), size(a.out))


@cost_of("match_kernel")
def match(a: Any, s: Setting) -> Cost:
    """The text of each request, once from memory."""
    return Cost(len(a.rows) * s.context * 4, size(a.best))


@cost_of("match_drafts_kernel")
def match_drafts(a: Any, s: Setting) -> Cost:
    return Cost(size(a.best, a.ids), size(a.ids))


@cost_of("chain_states_kernel")
def chain_states(a: Any, s: Setting) -> Cost:
    """Reads a row of each request."""
    moved = len(a.rows) * a.WIDTH * a.states.element_size()
    return Cost(moved, moved)


@cost_of("best_kernel")
def best_and_chunks(a: Any, s: Setting) -> Cost:
    """The best token of each row and of each chunk."""
    written = size(a.best_out, a.limit_out, a.last_out, a.total_out, a.reach_out, a.chunk_best)
    return Cost(size(a.logits, a.temperature), written, programs=a.grid[0] * a.grid[1])


@cost_of("limits_kernel")
def limits(a: Any, s: Setting) -> Cost:
    """Greedy rows only, as in all cases: their limits are known."""
    return Cost(size(a.temperature, a.total_out), 0, programs=a.grid[0] * a.grid[1])


@cost_of("draw_kernel")
def draw(a: Any, s: Setting) -> Cost:
    """Greedy rows only: reads the limits."""
    read = size(a.best_in, a.limit_in, a.last_in, a.total_in)
    return Cost(read, size(a.tokens), programs=a.grid[0] * a.grid[1])


@cost_of("look_up_kernel")
def look_up(a: Any, s: Setting) -> Cost:
    """A logit of each queried token, in a sector of its own."""
    return Cost(size(a.tokens) + a.tokens.numel() * SECTOR, size(a.found))
