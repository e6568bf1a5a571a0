"""`TreeKernels` in Triton: a program for each request.

Legend: as in `trees.py`.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton import next_power_of_2

from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.speculation.protocol import ChainBuffers
from moe_engine.kernels.speculation.trees import LevelBuffers, TreeBuffers
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs


@dependent_jit(do_not_specialize=["width"])
def tree_slots_kernel(
    rows, starts, shifts, table, positions, slots, lens, real, width, COUNT: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """See `TreeKernels.spread`, for the tree or one level. EACH: nodes of a level; 0: `positions` are not written."""
    wait_for_inputs()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    start = tl.load(starts + request, row >= 0, 0)
    place = tl.arange(0, BLOCK).to(tl.int64)
    inside, has_row = place < COUNT, place * 0 + row >= 0
    at = request * COUNT + place
    column = tl.minimum(start + place, width - 1)
    slot = tl.load(table + tl.maximum(row, 0) * width + column, inside & has_row, 0)
    tl.store(slots + at, slot.to(tl.int64), inside)
    tl.store(real + at, has_row.to(tl.int32), inside)
    tl.store(lens + request, (start + COUNT).to(tl.int32))
    if EACH > 0:
        shift = tl.load(shifts + request)
        tl.store(positions + at, tl.where(has_row, start + place // EACH, 0) + shift, inside)


@dependent_jit
def tree_nodes_kernel(
    rows, starts, shifts, chain_uniform, parents, positions, visible, uniform,
    N: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """See `TreeKernels.enter`. Masks and levels pass from parents to children, a level further each time."""
    wait_for_inputs()
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    inside, at = node < N, request * N + node
    parent = tl.load(parents + at, inside, -1)
    is_parent = parent[:, None] == node[None, :]
    own = tl.full([BLOCK], 1, tl.int64) << node.to(tl.int64)
    mask, level = own, tl.zeros([BLOCK], tl.int64)
    for _ in range(DEPTH):
        mask = own | tl.sum(tl.where(is_parent, mask[None, :], 0), 1)
        level = tl.where(parent < 0, 0, tl.sum(tl.where(is_parent, level[None, :], 0), 1) + 1)
    has_row = level * 0 + tl.load(rows + request) >= 0
    tl.store(visible + at, mask, inside)
    position = tl.where(has_row, tl.load(starts + request) + level, 0) + tl.load(shifts + request)
    tl.store(positions + at, position, inside)
    numbers = tl.load(chain_uniform + request * (DEPTH + 1) + level, inside, 0.0)
    tl.store(uniform + at, numbers, inside)


@dependent_jit
def tree_walk_kernel(
    ids, parents, slots, sampled, chain_ids, chain_sampled, path, taken, sources, N: tl.constexpr, BLOCK: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """See `TreeKernels.walk`."""
    wait_for_inputs()
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK).to(tl.int64)
    inside = place < N
    draft = tl.load(ids + request * N + place, inside, -1)
    parent = tl.load(parents + request * N + place, inside, -2)
    node, going = request * 0, request * 0 + 1
    for step in range(K):
        token = tl.load(sampled + request * N + node)
        at = request * K + step
        tl.store(path + at, node)
        tl.store(taken + at, request * N + node)
        tl.store(sources + at, tl.load(slots + request * N + tl.where(going > 0, node, step)))
        tl.store(chain_sampled + at, token)
        good = (parent == node) & (draft == token) & (token >= 0) & inside
        found, child = tl.max(good.to(tl.int64), 0), tl.sum(tl.where(good, place, 0), 0)
        going = going * found
        tl.store(chain_ids + at + 1, tl.where(going > 0, token, -1), step < K - 1)
        node = tl.where(going > 0, child, node)


class TritonTrees:
    """`TreeKernels` on a GPU."""

    name = "triton"

    def spread(self, tables: RowTables, chain: ChainBuffers, tree: TreeBuffers) -> None:
        each = tree.levels[0].slots.shape[1] if tree.levels else 0
        every: list[tuple[TreeBuffers | LevelBuffers, int]] = [(tree, 0), *((level, each) for level in tree.levels)]
        for nodes, level in every:
            count = nodes.slots.shape[1]
            tree_slots_kernel[(len(chain.rows),)](
                chain.rows, chain.starts, chain.shifts, tables.slots, nodes.positions, nodes.slots, nodes.lens,
                nodes.real, tables.slots.shape[1], COUNT=count, BLOCK=next_power_of_2(count), EACH=level, num_warps=1,
            )  # fmt: skip

    def enter(self, chain: ChainBuffers, tree: TreeBuffers) -> None:
        count = tree.ids.shape[1]
        tree_nodes_kernel[(len(chain.rows),)](
            chain.rows, chain.starts, chain.shifts, chain.uniform, tree.parents, tree.positions, tree.visible,
            tree.uniform, N=count, BLOCK=next_power_of_2(count), DEPTH=chain.num_drafts, num_warps=4,
        )  # fmt: skip

    def walk(self, chain: ChainBuffers, tree: TreeBuffers) -> None:
        count = tree.ids.shape[1]
        tree_walk_kernel[(len(chain.rows),)](
            tree.ids, tree.parents, tree.slots, tree.sampled, chain.ids, chain.sampled, tree.path, tree.taken,
            tree.sources, N=count, BLOCK=next_power_of_2(count), K=chain.num_drafts + 1, num_warps=1,
        )  # fmt: skip


def aot_cases() -> list[AotCase]:
    """Trees of 8 and of 64 nodes."""
    kinds = dict.fromkeys(("table", "lens", "real"), "*i32") | {"width": "i32"}
    kinds |= dict.fromkeys(("chain_uniform", "uniform"), "*fp32")

    def case(name: str, kernel: Any, warps: int, **constants: int) -> AotCase:
        names = [name for name in kernel.arg_names if name not in constants]
        return AotCase(name, kernel, {name: kinds.get(name, "*i64") for name in names}, constants, warps, 3, False)

    cases = []
    for count, depth in ((8, 3), (64, 8)):
        size = {"N": count, "BLOCK": count}
        cases.append(case(f"tree_slots_{count}", tree_slots_kernel, 1, COUNT=count, BLOCK=count, EACH=4))
        cases.append(case(f"tree_nodes_{count}", tree_nodes_kernel, 4, DEPTH=depth, **size))
        cases.append(case(f"tree_walk_{count}", tree_walk_kernel, 1, K=depth + 1, **size))
    return cases
