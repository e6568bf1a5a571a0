"""Masks of several states in one call are those of each state; prepared constraints are the same grammars."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.structured_output.backend import PREPARED, GrammarSettings
from moe_engine.structured_output.compiler import GrammarCompiler
from moe_engine.structured_output.mask_batch import MaskBatch
from moe_engine.structured_output.open_backend import open_backend
from moe_engine.tokenizer.tokenizer import load_tokenizer
from moe_engine.types.constraint import Constraint, FreeReasoning
from tests.structured_output.schemas import draw_schemas
from tests.structured_output.test_llguidance_backend import EOS, SIZE, allowed


@pytest.mark.parametrize("threads", [1, 2])
def test_masks_of_a_batch(threads: int) -> None:
    rng = random.Random(random.randrange(1 << 30))
    backend = open_backend(GrammarSettings(), load_tokenizer(CHECKPOINT_DIR), SIZE, (EOS,), threads)
    think = FreeReasoning("<think>", "</think>", False)
    states = []
    for schema in draw_schemas(rng.randrange(1 << 30), 12):
        grammar = backend.compile(Constraint("json_schema", json.dumps(schema)))
        states += [grammar.matcher(), grammar.matcher(think)]
    lengths = [0] * len(states)
    for _ in range(12):
        batch = MaskBatch(np.full((len(states), SIZE // 32), 0xFFFFFFFF, dtype=np.uint32))
        for place, state in enumerate(states):
            state.fill_later(batch, place)
        batch.run()
        for i, state in enumerate(states):
            state.check()
            found = np.flatnonzero(np.unpackbits(batch.tables[i].view(np.uint8), bitorder="little"))
            assert set(found.tolist()) == allowed(state)
            if rng.random() < 0.2 and lengths[i]:
                back = rng.randint(1, lengths[i])
                state.rollback(back)
                lengths[i] -= back
            elif len(some := sorted(set(found.tolist()) - {EOS})):
                state.accept(rng.choice(some))
                lengths[i] += 1


def test_prepared_constraints() -> None:
    backend = open_backend(GrammarSettings(), load_tokenizer(CHECKPOINT_DIR), SIZE, (EOS,))
    rng = random.Random(random.randrange(1 << 30))
    given = [Constraint("json_schema", json.dumps(schema)) for schema in draw_schemas(rng.randrange(1 << 30), 8)]
    given += [Constraint("regex", "[ab]{3}"), Constraint("choice", '["x","yz"]'), Constraint("grammar", 'root ::= "a"')]
    for constraint in given:
        prepared = backend.prepare(constraint)
        assert prepared.kind == PREPARED and backend.prepare(prepared) == prepared
        own, same = backend.compile(constraint).matcher(), GrammarCompiler(lambda: backend).get(prepared)
        other = same.result().matcher()
        for _ in range(10):
            some = allowed(own)
            assert some == allowed(other)
            if some <= {EOS}:
                break
            token = rng.choice(sorted(some - {EOS}))
            own.accept(token)
            other.accept(token)
