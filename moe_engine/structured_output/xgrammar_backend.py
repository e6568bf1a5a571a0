"""Grammars by xgrammar: pushdown automata with token masks prepared at compilation.

`xgrammar_limits.py` refuses constraints that xgrammar accepts and does not enforce.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import numpy as np

from moe_engine.structured_output.backend import GrammarError, GrammarSettings, Matcher
from moe_engine.structured_output.mask_batch import FilledAtOnce
from moe_engine.structured_output.reasoning import EndTags, ReasoningMatcher
from moe_engine.structured_output.vocabulary import Vocabulary
from moe_engine.structured_output.xgrammar_limits import check_regex, check_schema
from moe_engine.types.constraint import Constraint, FreeReasoning

if TYPE_CHECKING:
    import xgrammar  # which imports torch: loaded with the first grammar

MAX_WHITESPACE = 20
MAX_MESSAGE = 400
MAX_THREADS = 2
_PLACE = re.compile(r"^\[[0-9:]+\] \S+?:\d+: ")


class XGrammar:
    """Implements `GrammarBackend`."""

    def __init__(self, vocabulary: Vocabulary, settings: GrammarSettings) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            vocabulary.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=list(vocabulary.eos_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=MAX_THREADS, cache_enabled=False)
        self._eos_ids = frozenset(vocabulary.eos_ids)
        self._end_tags = EndTags(vocabulary)
        self._words = -(-len(vocabulary.tokens) // 32)
        self._any_whitespace = not settings.constrained_json_disable_any_whitespace

    def prepare(self, constraint: Constraint) -> Constraint:
        return constraint

    def compile(self, constraint: Constraint) -> XCompiled:
        try:
            grammar = self._grammar(constraint)
        except GrammarError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:  # classes of the library's errors
            raise GrammarError(_reason(str(error))) from None
        if constraint.reasoning is not None:
            self._end_tags.get(constraint.reasoning.end)
        return XCompiled(grammar, self._eos_ids, self._end_tags, self._words)

    def _grammar(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        kind, source = constraint.kind, constraint.source
        if kind == "json_schema":
            check_schema(json.loads(source))
            return self._compiler.compile_json_schema(
                source,
                any_whitespace=self._any_whitespace,
                separators=None if self._any_whitespace else (",", ":"),
                max_whitespace_cnt=MAX_WHITESPACE if self._any_whitespace else None,
                strict_mode=False,
            )
        if kind == "regex":
            check_regex(source)
            return self._compiler.compile_regex(source)
        if kind == "choice":
            choices = dict.fromkeys(json.loads(source))
            return self._compiler.compile_grammar("root ::= " + " | ".join(map(_quoted, choices)))
        if kind == "grammar":
            return self._compiler.compile_grammar(source)
        name = "the grammar of tool calls" if kind == "tool_calls" else kind
        raise GrammarError(f"{name} is not available with --grammar-backend xgrammar; use llguidance")


class XCompiled:
    """Implements `CompiledGrammar`."""

    def __init__(
        self, grammar: xgrammar.CompiledGrammar, eos_ids: frozenset[int], end_tags: EndTags, words: int
    ) -> None:
        self._grammar = grammar
        self._eos_ids = eos_ids
        self._end_tags = end_tags
        self._words = words

    def matcher(self, reasoning: FreeReasoning | None = None) -> Matcher:
        import xgrammar

        state = XState(xgrammar.GrammarMatcher(self._grammar), self._eos_ids, self._words)
        return state if reasoning is None else ReasoningMatcher(reasoning, self._end_tags, state)


class XState(FilledAtOnce):
    """Implements `PositionMasks`. An end token, after which no token is sampled, is not passed to xgrammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, eos_ids: frozenset[int], words: int) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._past_end = 0
        self._found = np.empty((1, words), dtype=np.int32)

    def accept(self, token: int) -> None:
        if self._past_end or token in self._eos_ids:
            self._past_end += 1
        elif not self._matcher.accept_token(token):
            raise GrammarError(f"token {token} does not continue the grammar")

    def fill(self, mask: np.ndarray) -> None:
        if self._past_end:
            return
        if self._matcher.fill_next_token_bitmask(self._found):
            mask &= self._found[0].view(np.uint32)

    def forced(self) -> list[int]:
        return []

    def rollback(self, count: int) -> None:
        ended = min(count, self._past_end)
        self._past_end -= ended
        if count > ended:
            self._matcher.rollback(count - ended)


def _quoted(text: str) -> str:
    """A text as a literal of GBNF."""
    return '"' + "".join(char if char.isalnum() else f"\\U{ord(char):08x}" for char in text) + '"'


def _reason(message: str) -> str:
    """xgrammar's message on one line, without its location in the library's code."""
    return _PLACE.sub("", " ".join(message.split("\n\n")[0].split()))[:MAX_MESSAGE] or "unknown reason"
