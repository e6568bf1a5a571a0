"""Free lists: no id is lost, allocated twice, or allocated early."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from moe_engine.scheduler.kv_cache.slot_allocator import DeferredFreePool, SlotAllocator


def test_pools_that_share_ids_take_what_others_take_and_keep_no_ids_that_none_took() -> None:
    ids = range(16, 16 << 24, 16)  # sixteen million
    pools = [DeferredFreePool(ids) for _ in range(3)]
    for pool in pools[1:]:
        pool.share()
    held: list[list[int]] = [[], [], []]
    for step in range(300):
        count, freed = random.randint(1, 300), random.randint(0, 200)
        taken = [pool.take(count) for pool in pools]
        assert taken[0] == taken[1] == taken[2] and len(taken[0]) == count
        assert all(one is other for one, other in zip(taken[1], taken[2]))
        for pool, mine, more in zip(pools, held, taken):
            given, kept = (mine + more)[:freed], (mine + more)[freed:]
            pool.give(given, step)
            mine[:] = kept
        for pool in pools:
            pool.retire(step + 1)
    pools[1].reset()
    assert pools[1].take(40_000) == list(ids[:40_000])
    assert len(pools[1]._shared) <= 120_000 and pools[1].num_free == len(ids) - 40_000


@pytest.mark.parametrize("page", [1, 4, 16])
def test_slots_are_conserved_under_random_operations(page: int) -> None:
    rng = random.Random(page)
    num_slots = 64 * page
    pool = SlotAllocator(num_slots, page)
    held: list[tuple[list[int], int]] = []  # slots of a sequence with private pages
    waiting: list[tuple[int, list[int]]] = []  # (after_step, pages): the oracle of pages that must not be allocated
    step = retired = 0
    in_use: set[int] = set()
    for _ in range(35_000):
        action = rng.random()
        if action < 0.4:
            count = rng.randint(1, 3 * page)
            if held and rng.random() < 0.5:
                slots, _ = held[rng.randrange(len(held))]
                more = pool.alloc(count, slots[-1], len(slots))
            else:
                slots = []
                more = pool.alloc(count)
            if more is None:
                assert pool.num_free < count + page
                continue
            assert len(more) == count
            bases = {s for s in more if s % page == 0}
            assert bases.isdisjoint(in_use) and all(page <= s < num_slots + page for s in more)
            assert all(b == s + 1 or b % page == 0 for s, b in pairwise(more))
            in_use |= bases
            if not slots:
                held.append((slots, 0))
            slots += more
        elif action < 0.7 and held:
            slots, _ = held.pop(rng.randrange(len(held)))
            after = rng.choice([retired, step, step + 1])
            pool.free(slots, after)
            if after > retired:
                waiting.append((after, slots[::page]))
            else:
                in_use -= set(slots[::page])
        elif action < 0.85:
            step += 1
        elif retired < step:
            retired += 1
            pool.retire(retired)
            for _, pages in [w for w in waiting if w[0] <= retired]:
                in_use -= set(pages)
            waiting = [w for w in waiting if w[0] > retired]
        assert pool.num_free + len(in_use) * page == num_slots
        assert pool.num_pending == sum(len(pages) for _, pages in waiting) * page
    pool.retire(step + 1)
    for slots, _ in held:
        pool.free(slots, 0)
    assert sorted(pool.pages.free_ids()) == list(range(page, num_slots + page, page))


def test_a_freed_id_waits_for_its_step() -> None:
    pool = DeferredFreePool(range(2))
    ids = pool.take(2)
    assert ids is not None and pool.take(1) is None
    pool.give(ids, after_step=3)
    assert pool.retire(2) == 0 and pool.take(1) is None
    assert pool.retire(3) == 2 and pool.take(2) is not None


def test_a_batch_is_all_or_nothing() -> None:
    pool = SlotAllocator(8, 4)
    assert pool.alloc(9) is None and pool.num_free == 8
    assert pool.alloc(5) == [4, 5, 6, 7, 8]
    assert pool.alloc(2, last_slot=8, used=5) == [9, 10]
    assert pool.alloc(2, last_slot=10, used=7) is None


def test_rebuild_repairs_lost_and_double_ids() -> None:
    pool = DeferredFreePool(range(5))
    taken = pool.take(3)
    assert taken is not None
    pool.give(taken[:1] * 2, 0)
    pool.give([taken[1]], after_step=9)
    pool.rebuild(owned={taken[2]})
    assert sorted(pool.free_ids()) == sorted(set(range(5)) - {taken[1], taken[2]})
    assert pool.num_pending == 1
