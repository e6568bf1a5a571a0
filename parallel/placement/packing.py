"""The two steps of EPLB, batched over problems: replicas per expert, then packing of replicas onto ranks or nodes.

In addition to the published greedy, copies of one expert share a pack only if unavoidable, and exchanges between the
heaviest pack and the others follow until none improves.

Legend: N independent problems (layers, or layers x nodes), E experts, M items (copies), B packs (ranks or nodes).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IdArray = NDArray[np.int64]

MAX_EXCHANGES = 200
"""Max exchanges per problem; further gains are small, and planning must end in a fraction of a second."""


def replicate(counts: FloatArray, num_slots: int, max_copies: int) -> IdArray:
    """Assigns spare slots, one by one, to the expert with the most tokens per copy.

    Args:
        counts: [N, E] tokens of each expert.
        num_slots: copies in all, at least E.
        max_copies: of one expert, the number of packs; exceeded only if all experts have that many.

    Returns:
        [N, num_slots] experts: one copy of each, then the added ones.
    """
    num_problems, num_experts = counts.shape
    # unused experts get a small weight, so that spare slots of a layer without tokens are distributed evenly
    floor = 1e-6 * (counts.mean(axis=1, keepdims=True) + 1.0)
    copies = np.ones((num_problems, num_experts), dtype=np.int64)
    slots = np.empty((num_problems, num_slots), dtype=np.int64)
    slots[:, :num_experts] = np.arange(num_experts)
    rows = np.arange(num_problems)
    for slot in range(num_experts, num_slots):
        cap = max(max_copies, slot // num_experts + 1)
        hottest = np.where(copies < cap, (counts + floor) / copies, -1.0).argmax(axis=1)
        slots[:, slot] = hottest
        copies[rows, hottest] += 1
    return slots


def pack(weights: FloatArray, owners: IdArray, num_packs: int) -> IdArray:
    """Distributes items over packs of equal size and nearly equal weight.

    Args:
        weights: [N, M]; M is a multiple of `num_packs`.
        owners: [N, M] ids from 0; items of one owner go to different packs if it has at most `num_packs`.

    Returns:
        [N, M] the items, ordered by pack.
    """
    order = np.lexsort((owners, -weights))  # heaviest first, equal items of an owner adjacent
    heavy = np.take_along_axis(weights, order, axis=1)
    owner = np.take_along_axis(owners, order, axis=1)
    packs = _lightest_first(heavy, owner, num_packs)
    clashing = _clashes(packs, owner, num_packs)
    packs[clashing] = np.arange(heavy.shape[1]) % num_packs  # round-robin by owner: no clash possible
    by_owner = np.argsort(owner[clashing], axis=1, kind="stable")
    packs[clashing] = np.take_along_axis(packs[clashing], np.argsort(by_owner, axis=1), axis=1)
    items = np.take_along_axis(order, np.argsort(packs, axis=1, kind="stable"), axis=1)
    return exchange(items, weights, owners, num_packs)


def _lightest_first(weights: FloatArray, owners: IdArray, num_packs: int) -> IdArray:
    """[N, M] the pack of each item: the lightest with free space, if possible without an item of the same owner."""
    num_problems, num_items = weights.shape
    rows = np.arange(num_problems)
    loads = np.zeros((num_problems, num_packs))
    room = np.full((num_problems, num_packs), num_items // num_packs)
    holds = np.zeros((num_problems, num_packs, int(owners.max()) + 1), dtype=bool)
    clash_cost = weights.sum(axis=1, keepdims=True) + 1.0  # more than any load
    packs = np.empty((num_problems, num_items), dtype=np.int64)
    for item in range(num_items):
        cost = loads + clash_cost * holds[rows, :, owners[:, item]]
        chosen = np.where(room > 0, cost, np.inf).argmin(axis=1)
        packs[:, item] = chosen
        loads[rows, chosen] += weights[:, item]
        room[rows, chosen] -= 1
        holds[rows, chosen, owners[:, item]] = True
    return packs


def _clashes(packs: IdArray, owners: IdArray, num_packs: int) -> NDArray[np.bool_]:
    """[N]: True if two items of an owner share a pack."""
    pairs = np.sort(owners * num_packs + packs, axis=1)
    return (pairs[:, 1:] == pairs[:, :-1]).any(axis=1)


def exchange(items: IdArray, weights: FloatArray, owners: IdArray, num_packs: int) -> IdArray:
    """Exchanges items of the heaviest pack with items of other packs while the heavier of the two becomes lighter.

    Args:
        items: [N, M] a packing from `pack`. Introduces no duplicate owners in a pack.
        weights: [N, M] by item.
        owners: [N, M] by item.

    Returns:
        [N, M] the improved packing.
    """
    size = items.shape[1] // num_packs
    settled = items.copy()
    active = np.arange(len(items))  # problems improved in the last round
    for _ in range(MAX_EXCHANGES):
        items = settled[active]
        weight = np.take_along_axis(weights[active], items, axis=1)  # [N, M] by position
        owner = np.take_along_axis(owners[active], items, axis=1)
        first, second, better = _best_exchange(weight, owner, num_packs, size)
        active, first, second, items = active[better], first[better], second[better], items[better]
        if not len(active):
            break
        rows = np.arange(len(active))
        settled[active, first], settled[active, second] = items[rows, second], items[rows, first]
    return settled


def _best_exchange(
    weight: FloatArray, owner: IdArray, num_packs: int, size: int
) -> tuple[IdArray, IdArray, NDArray[np.bool_]]:
    """[N] positions in the heaviest pack, [N] positions elsewhere, and [N] whether exchanging them improves."""
    num_problems, num_items = weight.shape
    rows = np.arange(num_problems)
    pack_of = np.repeat(np.arange(num_packs), size)  # of each position
    loads = weight.reshape(num_problems, num_packs, size).sum(axis=2)
    heaviest = loads.argmax(axis=1)
    places = heaviest[:, None] * size + np.arange(size)  # [N, size]
    moved = np.take_along_axis(weight, places, axis=1)[:, :, None] - weight[:, None, :]  # [N, size, M] off the heaviest
    top = loads[rows, heaviest]
    heavier = np.maximum(top[:, None, None] - moved, loads[:, None, pack_of] + moved)
    same = np.take_along_axis(owner, places, axis=1)[:, :, None] == owner[:, None, :]
    there = same.reshape(num_problems, size, num_packs, size).any(axis=3)[:, :, pack_of]  # outgoing: a copy is there
    here = same.any(axis=1, keepdims=True)  # incoming: a copy is here
    own_pack = (pack_of == heaviest[:, None])[:, None, :]
    heavier = np.where(there | here | own_pack, np.inf, heavier).reshape(num_problems, -1)
    best = heavier.argmin(axis=1)
    better = heavier[rows, best] < top * (1 - 1e-9)
    return places[rows, best // num_items], best % num_items, better
