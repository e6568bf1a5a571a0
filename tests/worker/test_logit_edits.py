"""Penalties, biases and forbidden end tokens against a naive computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.models import step_memory
from moe_engine.types import NewRow, RowWrite, SamplingParams
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling import logits_processors as logit_edits
from moe_engine.worker.sampling import penalties
from moe_engine.worker.sampling.penalties import TreeText
from moe_engine.worker.speculation.drafts import ancestor_masks
from tests.examples import examples
from tests.memory_meter import MemoryMeter

VOCAB, CONTEXT, NUM_SLOTS = 40, 30, 700
EOS = frozenset({3})


def naive(logits: list[float], prompt: list[int], outputs: list[int], p: SamplingParams) -> list[float]:
    out = []
    for token, value in enumerate(logits):
        if token in prompt or token in outputs:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * outputs.count(token)
        value -= p.presence_penalty * (token in outputs)
        value += sum(v for t, v in p.logit_bias if t == token)
        if len(outputs) < p.min_new_tokens and (token in EOS or token in p.stop_token_ids):
            value = -float("inf")
        out.append(value)
    return out


KINDS = [
    SamplingParams(frequency_penalty=0.7),
    SamplingParams(presence_penalty=-0.4),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.8, frequency_penalty=0.3, presence_penalty=0.2, min_new_tokens=3),
    SamplingParams(logit_bias=((5, 2.0), (6, -100.0))),
    SamplingParams(frequency_penalty=-0.6, logit_bias=((0, 1.0), (39, 2.0))),
    SamplingParams(min_new_tokens=2, stop_token_ids=(7, 8)),
    SamplingParams(),
]


class Life:
    """Rows that are added, compute tokens, sample, share prefixes, switch slots, are retracted and resume.

    `texts[row]`: parameters, prompt, outputs; the last output is not computed. Rejected drafts follow them.
    """

    def __init__(self, seed: int) -> None:
        self.pick = np.random.default_rng(seed)
        self.rows = RequestRows(12, CONTEXT, VOCAB, DeviceStream("cpu"), num_drafts=8)
        self.rows.keep_tokens(NUM_SLOTS)
        self.texts: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
        self.slots: dict[int, list[int]] = {}
        self.free = self.pick.permutation(np.arange(1, NUM_SLOTS)).tolist()

    def tokens(self, count: int) -> list[int]:
        return self.pick.integers(0, VOCAB, count).tolist()

    def enter(self, row: int, p: SamplingParams, prompt: list[int], outputs: list[int], cached: list[int]) -> None:
        """`cached`: slots of a prefix computed by another request, with or without stored tokens."""
        new = NewRow(row, "r", prompt + outputs, len(prompt), cached, p, 0, EOS)
        self.rows.apply([], [new], [])
        self.texts[row], self.slots[row] = (p, prompt, list(outputs)), list(cached)
        self.compute(row, (prompt + outputs)[len(cached) :])

    def compute(self, row: int, tokens: list[int]) -> None:
        """Appends tokens to the row's next slots."""
        fresh = [self.free.pop() for _ in tokens]
        begin = len(self.slots[row])
        self.rows.slot_table[row, begin : begin + len(fresh)] = torch.tensor(fresh, dtype=torch.int32)
        self.slots[row] += fresh
        self.rows.note_tokens(torch.tensor(fresh), torch.tensor(tokens))

    def leave(self, row: int) -> tuple[SamplingParams, list[int], list[int]]:
        self.rows.apply([row], [], [])
        self.give_back(self.slots.pop(row))
        return self.texts.pop(row)

    def give_back(self, slots: list[int]) -> None:
        """Releases a row; returns its slots."""
        held = {slot for own in self.slots.values() for slot in own}
        self.free = [slot for slot in slots if slot not in held] + self.free

    def point_elsewhere(self, row: int) -> None:
        """Moves the row's tokens to other slots, without stored tokens."""
        begin, end = sorted(self.pick.integers(0, len(self.slots[row]) + 1, 2).tolist())
        fresh = [self.free.pop() for _ in range(end - begin)]
        self.rows.apply([], [], [RowWrite(row, begin, fresh)])
        old, self.slots[row][begin:end] = self.slots[row][begin:end], fresh
        self.give_back(old)

    def step(self, number: int) -> None:
        pick, row = self.pick, int(self.pick.integers(12))
        if row in self.texts and (pick.random() < 0.5 or len(self.slots[row]) > CONTEXT - 8):
            p, prompt, outputs = self.leave(row)
            if pick.random() < 0.5 and len(prompt + outputs) < CONTEXT - 8:
                self.enter(row, p, prompt, outputs, [])
        elif row not in self.texts:
            prompt, cached = self.tokens(5), []
            others = [r for r in self.texts if len(self.texts[r][1]) >= 2]
            if others and pick.random() < 0.5:  # a prefix computed by another row
                other = int(pick.choice(others))
                prompt = self.texts[other][1][:3] + prompt
                cached = self.slots[other][: min(3, len(self.texts[other][1]))]
                prompt[: len(cached)] = self.texts[other][1][: len(cached)]
            self.enter(row, KINDS[number % len(KINDS)], prompt, [], cached)
        for row in self.texts:
            if pick.random() < 0.2:
                self.point_elsewhere(row)

    def some(self) -> np.ndarray:
        live = [row for row in self.texts if len(self.slots[row]) < CONTEXT - 8]
        return self.pick.permutation(live)[: self.pick.integers(1, len(live) + 1)].astype(np.int64)

    def expected(self, logits: torch.Tensor, row: int, drafts: list[int]) -> list[float]:
        p, prompt, outputs = self.texts[row]
        return naive(logits.tolist(), prompt, outputs + drafts, p)


def random_logits(pick: np.random.Generator, count: int) -> torch.Tensor:
    return torch.from_numpy(pick.normal(0, 1, (count, VOCAB)).astype(np.float32))


@pytest.mark.parametrize("scratch", [penalties.EDIT_BYTES, 3000])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.each_value
def test_against_naive_over_a_random_life(monkeypatch: pytest.MonkeyPatch, scratch: int, seed: int) -> None:
    """One token per step: rows are added, sample, are retracted and resume with their outputs."""
    monkeypatch.setattr(penalties, "EDIT_BYTES", scratch)
    monkeypatch.setattr(logit_edits, "EDIT_BYTES", scratch // 20)
    life = Life(seed)
    for number in range(120):
        life.step(number)
        if not life.texts or not any(len(s) < CONTEXT - 8 for s in life.slots.values()):
            continue
        rows = life.some()
        logits = random_logits(life.pick, len(rows))
        before, lengths = logits.clone(), np.array([len(life.slots[row]) for row in rows])
        life.rows.edits.apply(logits, rows, lengths, life.rows.slot_tokens)
        for i, row in enumerate(rows.tolist()):
            assert logits[i].tolist() == pytest.approx(life.expected(before[i], row, []), abs=1e-5)
            token = life.tokens(1)
            life.texts[row][2].extend(token)
            life.compute(row, token)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.each_value
def test_nodes_of_drafts_against_naive(seed: int, tree: bool) -> None:
    """At each node the path above counts, rejected drafts do not, and prompts in the same step are unaffected."""
    life = Life(seed)
    for number in range(60):
        life.step(number)
        if not life.texts or not any(len(s) < CONTEXT - 8 for s in life.slots.values()):
            continue
        rows, pick = life.some(), life.pick
        num = int(pick.integers(0, len(rows) + 1))  # these get drafts, the others are prompts
        nodes = 6
        parents = torch.full((num, nodes), -1)
        for node in range(1, nodes):
            parents[:, node] = torch.from_numpy(pick.integers(0, node, num)) if tree else node - 1
        drafts = pick.integers(0, VOCAB, (num, nodes))
        ends = {row: len(life.slots[row]) for row in rows.tolist()}
        drafted, lengths, paths = [], [], []
        for d, row in enumerate(rows[:num].tolist()):
            life.compute(row, drafts[d].tolist())  # the root and its drafts, in the next slots
            for node in range(nodes):
                path, at = [], node
                while at >= 0:
                    path.append(int(drafts[d, at]))
                    at = int(parents[d, at])
                drafted.append(row)
                lengths.append(ends[row] + len(path))
                paths.append(path)
        for row in rows[num:].tolist():
            drafted.append(row)
            lengths.append(ends[row])
            paths.append([])
        text = None
        if tree and num:
            begins = np.repeat([ends[row] for row in rows[:num].tolist()], nodes)
            text = TreeText(begins, ancestor_masks(parents).flatten(), nodes)
        logits = random_logits(pick, len(drafted))
        before = logits.clone()
        life.rows.edits.apply(logits, np.array(drafted), np.array(lengths), life.rows.slot_tokens, text)
        for i, row in enumerate(drafted):
            assert logits[i].tolist() == pytest.approx(life.expected(before[i], row, paths[i]), abs=1e-5)
        for d, row in enumerate(rows[:num].tolist()):  # the root is kept, its drafts are rejected
            life.texts[row][2].append(int(drafts[d, 0]))
            rejected = life.slots[row][ends[row] + 1 :]
            del life.slots[row][ends[row] + 1 :]
            life.give_back(rejected)


@pytest.mark.parametrize("vocab", [1000, 50_000])
@pytest.mark.parametrize("tree", [False, True])
def test_scratch_memory_is_what_the_ledger_holds(monkeypatch: pytest.MonkeyPatch, tree: bool, vocab: int) -> None:
    """For any number of rows with penalties and any lengths; a single row takes the memory for its own length."""
    num_rows, length, allowed = 12, 9000, 4 << 20
    monkeypatch.setattr(penalties, "EDIT_BYTES", allowed)
    rows = RequestRows(num_rows, length + 8, vocab, DeviceStream("cpu"))
    rows.keep_tokens(length + 1)
    slots, text = list(range(1, length + 1)), list(range(length))
    for row in range(num_rows):
        token_ids = [token % vocab for token in text]
        rows.apply([], [NewRow(row, "r", [*token_ids, 5], 20, slots, KINDS[3], 0, EOS)], [])
    nodes = TreeText(np.full(num_rows, length - 6), torch.full((num_rows,), 0b111011), 6) if tree else None
    logits, which = torch.randn(num_rows, vocab), np.arange(num_rows)
    for chosen in (which, which[:1]):
        with MemoryMeter() as meter:
            rows.edits.apply(logits[: len(chosen)], chosen, np.full(len(chosen), length), rows.slot_tokens, nodes)
        own = len(chosen) * (4 * vocab + step_memory.PENALTY_TOKEN_BYTES * length)
        assert min(own, allowed) / 2 < meter.peak <= min(own, allowed)
        nodes = nodes if nodes is None else nodes.part(0, 1)


@settings(max_examples=examples(20))
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=8), most=st.integers(1, 7), banned=st.booleans())
def test_biases_come_in_pieces_that_are_bounded(counts: list[int], most: int, banned: bool) -> None:
    edits = [(row, np.arange(count), np.full(count, row, dtype=np.float32)) for row, count in enumerate(counts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logit_edits, "EDIT_BYTES", most * logit_edits.ENTRY_BYTES)
        pieces = list(logit_edits._pieces(edits))
    found = [(int(r), int(t), float(v)) for some in pieces for r, t, v in zip(*some)]
    assert found == [(row, token, float(row)) for row, count in enumerate(counts) for token in range(count)]
    assert all(len(rows) <= max(most, *counts) for rows, _, _ in pieces)


def test_a_row_without_processors_costs_nothing() -> None:
    rows = RequestRows(4, CONTEXT, VOCAB, DeviceStream("cpu"))
    rows.apply([], [NewRow(1, "r", [1], 1, [], SamplingParams(), 0, EOS)], [])
    assert not rows.edits.active and not rows.edits.penalties.active
    rows.note_tokens(torch.tensor([1]), torch.tensor([5]))  # no storage is allocated or needed


def test_nothing_grows_with_requests_that_have_penalties() -> None:
    """For any number of rows, no memory stays allocated."""
    rows = RequestRows(64, CONTEXT, VOCAB, DeviceStream("cpu"))
    rows.keep_tokens(NUM_SLOTS)

    def held() -> set[int]:
        parts = (vars(rows), vars(rows.edits), vars(rows.edits.penalties), vars(rows.slot_tokens))
        return {v.data_ptr() for some in parts for v in some.values() if isinstance(v, torch.Tensor)}

    before = held()
    for row in range(64):
        rows.apply([], [NewRow(row, "r", [1, 2, 2], 1, [5, 6], KINDS[row % 6], 0, EOS)], [])
    assert rows.edits.penalties.active and held() == before
    rows.apply(list(range(64)), [], [])
    assert not rows.edits.active and not rows.edits.penalties.active
