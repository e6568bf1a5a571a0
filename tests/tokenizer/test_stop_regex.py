"""Stop patterns: the automaton against Python's `re`, in any split of the text."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_engine.errors import InputError
from moe_engine.tokenizer.stop_regex import RegexMatcher, compiled
from tests.examples import examples

ONE = st.sampled_from(["a", "b", r"\d", ".", "[ab1]", "[^a]", r"\w", r"\s", "é", r"[\d_]"])
PATTERNS = st.recursive(
    ONE,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "+?", "{0,2}?"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=5,
)
TEXTS = st.text("ab1 é_\n", max_size=14)


def first_end(pattern: str, text: str) -> int | None:
    """The shortest beginning of the text that a match ends."""
    ends = (end for end in range(len(text) + 1) if re.search(f"(?:{pattern})\\Z", text[:end]))
    return next(ends, None)


@settings(max_examples=examples(150))
@given(st.lists(PATTERNS, min_size=1, max_size=2), TEXTS, st.integers(1, 4))
def test_an_output_ends_where_a_match_ends_first(patterns, text, size):
    assume(all(re.match(f"(?:{pattern})\\Z", "") is None for pattern in patterns))
    matcher, shown = RegexMatcher(tuple(patterns)), ""
    for begin in range(0, len(text), size):
        shown += matcher.push(text[begin : begin + size])
        if matcher.matched is not None:
            break
    found = [(end, number) for number, pattern in enumerate(patterns) if (end := first_end(pattern, text)) is not None]
    if found:
        end, number = min(found)
        assert (shown, matcher.matched) == (text[:end], patterns[number])
    else:
        assert (shown, matcher.matched) == (text, None)


def test_a_pattern_that_python_needs_ages_for():
    matcher = RegexMatcher((r"(a|aa)+b", r"(\w+\s?)+!"))
    assert matcher.push("a" * 5000 + "c") == "a" * 5000 + "c" and matcher.matched is None


def test_flags_in_front_count():
    matcher = RegexMatcher(("(?i)stop",))
    assert matcher.push("please STOP here") == "please STOP"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "is not a regular expression: missing"),
        ("a*", "matches the empty text"),
        (r"(a)\1", "a backreference"),
        ("(?=a)b", "a lookahead"),
        ("(?<!a)b", "a negative lookahead"),
        ("a$", "an anchor"),
        (r"\bx", "an anchor"),
        ("(?>a)b", "an atomic group"),
        ("a++", "a possessive repeat"),
        ("(?i:a)", "flags of a group"),
        ("(a{50}){50}", "more than 512 states"),
        ("a{5000}", "more than 512 states"),
    ],
)
def test_what_is_refused(pattern, words):
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        compiled(pattern, "sampling_params.stop_regex")
    assert caught.value.field == "sampling_params.stop_regex"
