"""Grammars by llguidance: derivatives of regular expressions below an Earley parser, without tables per grammar.

Compilation takes milliseconds, releases the GIL and has limits of its own. llguidance refuses keywords of JSON Schema
that it does not enforce.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import llguidance
import numpy as np

from moe_engine.structured_output.backend import PREPARED, GrammarError, GrammarSettings, Matcher
from moe_engine.structured_output.error_places import readable, without_line, wrong_part
from moe_engine.structured_output.gbnf import is_lark_syntax, to_lark
from moe_engine.structured_output.llguidance_gaps import enforceable
from moe_engine.structured_output.mask_batch import Entries, MaskBatch
from moe_engine.structured_output.reasoning import EndTags, ReasoningMatcher
from moe_engine.structured_output.structural_tags import lark_of_tags
from moe_engine.structured_output.tool_call_grammar import lark_of_calls
from moe_engine.structured_output.vocabulary import Vocabulary
from moe_engine.types.constraint import Constraint, FreeReasoning

ANY_WHITESPACE = r"[ ]|\r?\n[ \t]{0,20}"
"""A space, or a line end with an indentation. Bounded: a model may otherwise repeat white space up to its limit."""
MAX_TEXTS, MAX_TEXT_CHARS = 4096, 256
"""Max texts whose tokens are cached: masks need those of a grammar's fixed texts repeatedly."""
_NO_MASK = np.zeros(0, dtype=np.uint32)
JsonOptions = dict[str, Any]


class _Tokens:
    """The vocabulary in the form that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special_ids)
        self.tokens = [
            b"<special %d>" % i if i in vocabulary.special_ids else token for i, token in enumerate(vocabulary.tokens)
        ]
        self._special_ids = vocabulary.special_ids
        self._tokenizer = vocabulary.tokenizer
        self._short = lru_cache(MAX_TEXTS)(self._all)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens with these bytes. llguidance allows only these where a grammar allows one text."""
        if isinstance(text, bytes):
            text = text.decode()
        return self._short(text) if len(text) <= MAX_TEXT_CHARS else self._all(text)

    def _all(self, text: str) -> list[int]:
        return [part for i in self._encode(text) for part in self._plain(i)]

    def _plain(self, token: int) -> list[int]:
        """The token itself; for a special token, which is not text, the tokens of its text."""
        if token not in self._special_ids:
            return [token]
        text = self._tokenizer.token_text(token)
        return self._encode(text[:1]) + self._encode(text[1:])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class LLGuidance:
    """Implements `GrammarBackend`."""

    def __init__(self, vocabulary: Vocabulary, settings: GrammarSettings, threads: int) -> None:
        size = len(vocabulary.tokens)
        wrapper = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=list(vocabulary.eos_ids))
        self._eos_ids = frozenset(vocabulary.eos_ids)
        self._json_options = _json_options(settings)
        self._end_tags = EndTags(vocabulary)
        self._special_ids = {vocabulary.tokenizer.token_text(i): i for i in vocabulary.tokenizer.special_ids}
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._masks = _Masks(size, threads)

    def prepare(self, constraint: Constraint) -> Constraint:
        return replace(constraint, kind=PREPARED, source=self._grammar(constraint))

    def compile(self, constraint: Constraint) -> LLGrammar:
        try:
            matcher, first = self._matcher(self._grammar(constraint))
            reason = readable(matcher.get_error()) if matcher.is_error() else None
            if reason is not None and not is_client_text(constraint):
                reason = without_line(reason)
        except GrammarError as error:
            reason = str(error)
        if reason is not None:
            raise GrammarError(self._with_place(constraint, reason))
        if constraint.reasoning is not None:
            self._end_tags.get(constraint.reasoning.end)
        return LLGrammar(matcher, first, self._eos_ids, self._end_tags, self._masks)

    def _matcher(self, grammar: str) -> tuple[llguidance.LLMatcher, np.ndarray]:
        """A state before the first token, and that token's mask [W]; both without the GIL."""
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            return matcher, _NO_MASK
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)  # raises if the grammar is too complex
        return matcher, mask[: len(self._masks.scratch)]  # llguidance's may end with an empty word

    def _with_place(self, constraint: Constraint, reason: str) -> str:
        """The reason against a constraint, with the part that is wrong."""
        if constraint.kind == "json_schema":
            return self._in_schema(json.loads(constraint.source)) or reason
        for call in json.loads(constraint.source)["calls"] if constraint.kind == "tool_calls" else ():
            wrong = self._in_schema(call["schema"])
            if wrong is not None:
                return f"parameters of function {call['name']!r:.80}: {wrong}"
        return reason

    def _in_schema(self, schema: Any) -> str | None:
        """The reason against a schema, after the JSON pointer of its invalid part."""
        reason = self._problem(schema)
        pointer = "" if reason is None else wrong_part(schema, reason, self._problem)
        return f"at {pointer}: {reason}" if pointer else reason

    def _problem(self, schema: Any) -> str | None:
        try:
            matcher, _ = self._matcher(self._json_grammar(json.dumps(schema)))
        except GrammarError as error:
            return str(error)
        return readable(matcher.get_error()) if matcher.is_error() else None

    def _json_grammar(self, schema: str) -> str:
        schema = json.dumps(enforceable(json.loads(schema)), ensure_ascii=False)
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=self._json_options)  # type: ignore[arg-type]

    def _grammar(self, constraint: Constraint) -> str:
        kind, source = constraint.kind, constraint.source
        if kind == PREPARED:
            return source
        if kind == "json_schema":
            return self._json_grammar(source)
        if kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(source)
        if kind == "choice":
            choices = dict.fromkeys(json.loads(source))
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            return f"start: CHOICE\nCHOICE: {texts}"  # one lexeme: rules of the parser may have 2000 alternatives
        if kind == "structural_tag":
            return lark_of_tags(source, self._json_options)
        if kind == "tool_calls":
            return lark_of_calls(json.loads(source), self._json_options, self._special_ids)
        return to_lark(source)


class _Masks:
    """Computes masks. A single mask is written to memory whose address is read once: reading it takes as long as a
    small mask.

    Args:
        threads: for the masks of a step. 1: the calling thread computes them one by one, which costs less than a pool.
    """

    def __init__(self, vocab_size: int, threads: int) -> None:
        self.scratch = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        self._address = self.scratch.ctypes.data
        self._pool = llguidance.LLExecutor(threads) if threads > 1 else None

    def compute(self, matcher: llguidance.LLMatcher) -> np.ndarray:
        """The mask [W] of a state, until the next call."""
        matcher.unsafe_compute_mask_ptr(self._address, self.scratch.nbytes)
        return self.scratch

    def fill_all(self, entries: Entries, tables: np.ndarray) -> None:
        """`mask_batch.FillAll` of matchers."""
        address, one = tables.ctypes.data, tables.strides[0]
        if self._pool is not None and len(entries) > 1:
            self._pool.unsafe_compute_mask_ptr(entries, address, one, len(tables))
            return
        for matcher, place in entries:
            matcher.unsafe_compute_mask_ptr(address + place * one, one)


class LLGrammar:
    """Implements `CompiledGrammar`. The matchers of a backend are used by one thread.

    Args:
        first: [W] uint32, the mask of the first token, which all requests with the grammar share.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        first: np.ndarray,
        eos_ids: frozenset[int],
        end_tags: EndTags,
        masks: _Masks,
    ) -> None:
        self._matcher = matcher
        self._first = first
        self._eos_ids = eos_ids
        self._end_tags = end_tags
        self._masks = masks

    def matcher(self, reasoning: FreeReasoning | None = None) -> Matcher:
        state = LLState(self._matcher, self._first, self._eos_ids, self._masks)
        return state if reasoning is None else ReasoningMatcher(reasoning, self._end_tags, state)


class LLState:
    """Implements `PositionMasks`. An end token, after which no token is sampled, is not passed to llguidance.

    Args:
        initial: a state before the first token, which is not changed. It is copied for the first accepted token: the
            first mask of a request, which is known, then waits for no copy.
    """

    def __init__(
        self, initial: llguidance.LLMatcher, first: np.ndarray, eos_ids: frozenset[int], masks: _Masks
    ) -> None:
        self._initial = initial
        self._copy: llguidance.LLMatcher | None = None
        self._first = first
        self._eos_ids = eos_ids
        self._accepted = 0
        self._past_end = 0
        self._masks = masks

    @property
    def _matcher(self) -> llguidance.LLMatcher:
        if self._copy is None:
            self._copy = self._initial.deep_copy()
        return self._copy

    def accept(self, token: int) -> None:
        if self._past_end or token in self._eos_ids:
            self._past_end += 1
        elif self._matcher.consume_token(token):
            self._accepted += 1
        else:
            self.check()

    def fill(self, mask: np.ndarray) -> None:
        if self._past_end:
            return
        if not self._accepted:
            mask &= self._first
            return
        found = self._masks.compute(self._matcher)
        self.check()
        mask &= found

    def fill_later(self, batch: MaskBatch, place: int) -> None:
        if self._accepted and not self._past_end:
            batch.add(self._masks.fill_all, self._matcher, place)
        else:
            self.fill(batch.tables[place])

    def forced(self) -> list[int]:
        return [] if self._past_end else self._matcher.compute_ff_tokens()

    def check(self) -> None:
        if self._copy is not None and self._copy.is_error():
            raise GrammarError(readable(self._copy.get_error()))

    def rollback(self, count: int) -> None:
        ended = min(count, self._past_end)
        self._past_end -= ended
        if count > ended:
            self._accepted -= count - ended
            if not self._matcher.rollback(count - ended):
                raise GrammarError(readable(self._matcher.get_error()))


def is_client_text(constraint: Constraint) -> bool:
    """Whether llguidance reads the client's own text, so that its lines and columns are those of the client."""
    return constraint.kind == "regex" or (constraint.kind == "grammar" and is_lark_syntax(constraint.source))


def _json_options(settings: GrammarSettings) -> JsonOptions:
    """These options override the `x-guidance` of a schema: a client cannot make unenforced keywords pass."""
    strict: JsonOptions = {"lenient": False, "coerce_one_of": False}
    if settings.constrained_json_disable_any_whitespace:
        return {**strict, "whitespace_flexible": False}
    return {**strict, "whitespace_pattern": settings.constrained_json_whitespace_pattern or ANY_WHITESPACE}
