"""Random texts that a backend's masks allow, without a model.

A model's samples seldom contain escapes, numbers with exponents and repeated keys. A walk prefers tokens of one or two
characters with a meaning in JSON, so that strings end and escapes occur.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np

from benchmarks.structured_output.battery import Outcome
from benchmarks.structured_output.schemas import Drawn
from benchmarks.structured_output.validity import problem_of
from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.structured_output.backend import CompiledGrammar, GrammarBackend, GrammarError, GrammarSettings
from moe_engine.structured_output.open_backend import open_backend
from moe_engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from moe_engine.types.constraint import Constraint

VOCAB_SIZE, EOS = 1280, 1
MEANINGFUL = set('"\\{}[],:0123456789.-+eEabcdfu/')


class Walker:
    def __init__(self, backend: str) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(CHECKPOINT_DIR)
        settings = GrammarSettings(grammar_backend=backend)
        self.backend: GrammarBackend = open_backend(settings, self.tokenizer, VOCAB_SIZE, (EOS,))
        spelled = [self.tokenizer.exact_bytes(i) for i in range(VOCAB_SIZE)]
        self._spelled = spelled
        texts = [part.decode(errors="replace") for part in spelled]
        self._preferred = {i for i, text in enumerate(texts) if 0 < len(text) <= 2 and set(text) <= MEANINGFUL}
        self._closing = {i for i, text in enumerate(texts) if text and set(text) <= set('"}],')}

    def walk(self, grammar: CompiledGrammar, rng: random.Random, limit: int = 400) -> str | None:
        """A complete text; None if it did not end within `limit` tokens."""
        state, ids = grammar.matcher(), list[int]()
        mask = np.empty(VOCAB_SIZE // 32, dtype=np.uint32)
        while len(ids) < limit:
            mask.fill(0xFFFFFFFF)
            state.fill(mask)
            allowed = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
            if not allowed:
                raise GrammarError(f"no token is allowed after {self.text(ids)!r}")
            if EOS in allowed and (allowed == {EOS} or rng.random() < 0.3):
                return self.text(ids)
            some = allowed - {EOS}
            draw = rng.random()
            if draw < 0.2 or len(ids) > limit // 2:
                some = some & self._closing or some
            elif draw < 0.7:
                some = some & self._preferred or some
            ids.append(rng.choice(sorted(some)))
            state.accept(ids[-1])
        return None

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(self._spelled[i] for i in ids).decode(errors="replace")


def run_walks(backend: str, schemas: Sequence[Drawn], seed: int, per_schema: int) -> Outcome:
    """Compiles each schema with the backend, and validates random texts of it."""
    found, walker, rng = Outcome("walks"), Walker(backend), random.Random(seed)
    for drawn in schemas:
        try:
            source = json.dumps(drawn.schema, ensure_ascii=False)
            grammar = walker.backend.compile(Constraint("json_schema", source))
        except GrammarError as error:
            found.reasons[f"{drawn.feature}: {str(error)[:160]}"] += 1
            continue
        for _ in range(per_schema):
            try:
                text = walker.walk(grammar, rng)
            except GrammarError as error:
                found.fault(drawn, str(error))
                continue
            if text is None:
                found.cut += 1
                continue
            found.finished += 1
            problem = problem_of(text, drawn.schema)
            if problem is not None:
                found.fault(drawn, problem, text)
    return found
