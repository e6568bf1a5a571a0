"""Seeds of sequences. The frontend draws them, because several schedulers would draw the same ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from moe_engine.frontend.prompts import Prompt

SEED_BITS = 63


class Seeds:
    """`random_seed`: of the draws."""

    def __init__(self, random_seed: int) -> None:
        self._random = random.Random(random_seed)

    def draw(self, prompts: Sequence[Prompt]) -> list[int]:
        """One seed per sequence, prompt-major. They depend only on the order of calls."""
        seeds = []
        for prompt in prompts:
            given = prompt.sampling.sampling_seed
            for copy in range(prompt.sampling.n):
                seeds.append(self._random.getrandbits(SEED_BITS) if given is None else seed_of_copy(given, copy))
        return seeds


def seed_of_copy(seed: int, copy: int) -> int:
    """Seed of a copy of a prompt. Copy 0 uses the client's seed itself; the others use 64-bit hashes of (seed, copy),
    which do not collide with copy 0 of a nearby seed such as seed + 1."""
    if copy == 0:
        return seed
    digest = hashlib.blake2b(f"{seed % 2**64} {copy}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
