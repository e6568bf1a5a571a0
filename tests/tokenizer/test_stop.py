"""Stop strings: the cut depends only on the text, and a stream never emits text that is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.tokenizer.assembler import TextAssembler
from moe_engine.tokenizer.stop import StopMatcher, overlap
from tests.tokenizer.tiny_tokenizer import make_tokenizer

TOK = make_tokenizer()


def reference(text, stops, trim):
    """Character by character: the stop string that ends first, the longest of these."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            best = max(hits, key=len)
            return text[: end - len(best)] if trim else text[:end], best
    return text, None


def pieces_of(text, sizes):
    at, turn = 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        yield text[at : at + size]
        at, turn = at + size, turn + 1


SHORT = st.text(alphabet="ab", min_size=1, max_size=4)


@settings(max_examples=400)
@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(SHORT, min_size=1, max_size=3),
    st.lists(st.integers(1, 6), min_size=1, max_size=30),
    st.booleans(),
)
def test_any_split_gives_the_same_cut(text, stops, sizes, trim):
    matcher = StopMatcher(tuple(stops), trim=trim)
    want, matched = reference(text, stops, trim)
    out = ""
    for piece in pieces_of(text, sizes):
        out += matcher.push(piece)
        assert want.startswith(out)
        if matcher.matched:
            break
    out += matcher.flush()
    assert (out, matcher.matched) == (want, matched)


@settings(max_examples=150)
@given(
    st.text(alphabet="aé你😀 ", min_size=1, max_size=12),
    st.text(alphabet="aé你😀 ", min_size=1, max_size=2),
    st.integers(1, 4),
)
def test_the_completing_token_does_not_depend_on_the_steps(text, stop, per_step):
    ids = TOK.encode(text, False)

    def run(size):
        assembler = TextAssembler(TOK, stops=(stop,))
        out, used = "", 0
        for at in range(0, len(ids), size):
            piece, took = assembler.push(ids[at : at + size])
            out, used = out + piece, used + took
            if assembler.matched:
                return out, used, assembler.matched
        return out + assembler.flush(), used, None

    assert run(per_step) == run(1)
    out, used, matched = run(1)
    assert (out, matched) == reference(text, [stop], True)
    if matched:
        assert stop in TOK.decode(ids[:used])
        assert stop not in TOK.decode(ids[: used - 1])


def test_stop_string_that_is_a_skipped_special_token():
    ids = TOK.encode("Hello<｜User｜>world", False)
    assembler = TextAssembler(TOK, stops=("<｜User｜>",))
    text, used = assembler.push(ids)
    assert (text, assembler.matched) == ("Hello", "<｜User｜>")
    assert used == len(TOK.encode("Hello<｜User｜>", False))


def test_overlap():
    assert overlap("abc<thi", "<think>") == 4
    assert overlap("abc", "<think>") == 0
    assert overlap("aaab", "aabaab") == 3
    assert overlap("<think>", "<think>") == 0
