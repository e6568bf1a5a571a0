"""A fake scheduler: plans random steps over a few requests, with every variation allowed by the contract.

Slots are shuffled, prompts are prefilled in random chunks between decodes of other requests, requests are retracted and
resume with a cached prefix, and row writes switch slots to copies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moe_engine.types import LogprobSpec, NewRow, RowWrite, SamplingParams, StepPlan, StepResult
from moe_engine.worker.kv_cache.kv_pool import KVPool
from tests.logprobs import Entry, unpack

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Sequence_:
    prompt: list[int]
    max_new: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    logprobs: LogprobSpec | None = None
    eos: frozenset[int] = frozenset()
    outputs: list[int] = field(default_factory=list)
    output_logprobs: list[Entry] = field(default_factory=list)
    prompt_logprobs: list[Entry] = field(default_factory=list)
    row: int = -1
    slots: list[int] = field(default_factory=list)
    num_computed: int = 0
    entered: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs

    @property
    def done(self) -> bool:
        return len(self.outputs) >= self.max_new


class PlanDriver:
    """Runs sequences to completion with `execute`, one step at a time, with random choices from `seed`."""

    def __init__(
        self,
        execute: Callable[[StepPlan], StepResult],
        pool: KVPool,
        max_rows: int,
        seed: int,
        *,
        retract: float = 0.0,
        repoint: float = 0.0,
        max_chunk: int = 9,
    ) -> None:
        self._execute = execute
        self._pool = pool
        self._random = random.Random(seed)
        self._retract, self._repoint, self._max_chunk = retract, repoint, max_chunk
        self._free_slots = list(range(pool.page_size, pool.num_slots + pool.page_size))
        self._random.shuffle(self._free_slots)
        self._free_rows = list(range(max_rows))
        self._random.shuffle(self._free_rows)
        self._finished: list[int] = []
        self.number = 0

    def run(self, sequences: Sequence[Sequence_]) -> None:
        while not all(s.done for s in sequences):
            self._step(sequences)

    def _step(self, sequences: Sequence[Sequence_]) -> None:
        pick = self._random
        new_rows, writes = [], []
        decodes, chunks = [], []
        for s in sequences:
            if s.done:
                continue
            if s.row < 0:
                if not self._free_rows or pick.random() < 0.3:
                    continue
                new_rows.append(self._enter(s))
            elif s.num_computed and pick.random() < self._retract:
                self._leave(s, keep=pick.randrange(s.num_computed))
                continue
            if s.num_computed and pick.random() < self._repoint:
                writes.append(self._copy(s))
            if pick.random() < 0.2:
                continue
            is_decode = s.outputs and s.num_computed == len(s.tokens) - 1 and s.entered
            (decodes if is_decode else chunks).append(s)
        pick.shuffle(decodes)
        pick.shuffle(chunks)
        result_of = self._plan(decodes, chunks, new_rows, writes)
        self._take(*result_of)

    def _plan(
        self, decodes: list[Sequence_], chunks: list[Sequence_], new_rows: list[NewRow], writes: list[RowWrite]
    ) -> tuple[list[Sequence_], StepResult]:
        plan = StepPlan(
            number=self.number,
            num_decodes=len(decodes),
            new_rows=new_rows,
            row_writes=writes,
            finished_rows=self._finished,
        )
        self._finished = []
        sampling = []
        for s in decodes + chunks:
            left = len(s.tokens) - s.num_computed
            count = min(left, self._random.randint(1, self._max_chunk))
            samples = count == left
            fresh = [self._free_slots.pop() for _ in range(count)]
            plan.rows.append(s.row)
            plan.starts.append(s.num_computed)
            plan.counts.append(count)
            plan.samples.append(samples)
            plan.slots.extend(fresh)
            if s not in decodes:
                plan.input_ids.extend(s.tokens[s.num_computed : s.num_computed + count])
            s.slots.extend(fresh)
            s.num_computed += count
            if samples:
                sampling.append(s)
        self.number += 1
        return sampling, self._execute(plan)

    def _take(self, sampling: list[Sequence_], result: StepResult) -> None:
        assert result.rows == [s.row for s in sampling]
        for i, s in enumerate(sampling):
            s.outputs.extend(result.tokens[i])
            s.entered = True
            if result.logprobs is not None:
                s.output_logprobs.extend(unpack(result.logprobs[i]))
        by_row = {s.row: s for s in self._live}
        for row, entries in (result.prompt_logprobs or {}).items():
            by_row[row].prompt_logprobs.extend(unpack(entries))
        for s in sampling:
            if s.done:
                self._leave(s, keep=0)

    # -- rows and slots

    @property
    def _live(self) -> list[Sequence_]:
        return self.__dict__.setdefault("live", [])

    def _enter(self, s: Sequence_) -> NewRow:
        s.row = self._free_rows.pop()
        s.num_computed = len(s.slots)
        s.entered = False
        self._live.append(s)
        return NewRow(
            row=s.row,
            rid=f"r{id(s)}",
            token_ids=list(s.tokens),
            num_prompt=len(s.prompt),
            slots=list(s.slots),
            sampling=s.sampling,
            seed=s.seed,
            eos_token_ids=s.eos,
            logprobs=s.logprobs,
        )

    def _leave(self, s: Sequence_, keep: int) -> None:
        self._free_slots.extend(s.slots[keep:])
        self._random.shuffle(self._free_slots)
        del s.slots[keep:]
        self._finished.append(s.row)
        self._free_rows.insert(0, s.row)
        self._live.remove(s)
        s.row, s.num_computed = -1, 0

    def _copy(self, s: Sequence_) -> RowWrite:
        """Copies the KV of a few tokens to other slots and switches the row to these."""
        start = self._random.randrange(s.num_computed)
        end = self._random.randint(start + 1, s.num_computed)
        old, new = s.slots[start:end], [self._free_slots.pop() for _ in range(end - start)]
        for layer in self._pool.layers:
            for tensor in layer if isinstance(layer, tuple) else (layer,):
                tensor[new] = tensor[old]
                tensor[old] = 1e4
        s.slots[start:end] = new
        self._free_slots.extend(old)
        return RowWrite(s.row, start, new)
