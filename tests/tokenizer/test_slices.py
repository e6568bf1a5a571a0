"""Long texts are split into slices: the tokens of the whole text, in bounded memory."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.errors import InputError
from moe_engine.tokenizer import Tokenizer, load_tokenizer, slices
from moe_engine.tokenizer.tokenizer import FastBackend
from tests.examples import examples
from tests.tokenizer.tiny_tokenizer import LINES, SPECIALS, make_tokenizer

PATTERNS = {
    "gpt2": r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    "llama3": r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"""
    r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    "deepseek": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"""[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
}


@lru_cache
def built(kind: str) -> Tokenizer:
    """A tokenizer of each family, trained on a few lines."""
    if kind == "tiny":
        return make_tokenizer()
    if kind == "demo":
        return load_tokenizer(CHECKPOINT_DIR)
    tok = tokenizers.Tokenizer(models.BPE(byte_fallback=kind == "llama2"))
    specials = [AddedToken(s, special=True, normalized=False) for s in SPECIALS]
    if kind in PATTERNS:
        tok.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(PATTERNS[kind]), "isolated")
        tok.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        tok.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "metaspace":
        tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        alphabet = []
    else:  # a blank before every text, and no words
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=alphabet, special_tokens=specials
    )
    tok.train_from_iterator(LINES * 4, trainer)
    tok.add_tokens([AddedToken("<lstrip>", lstrip=True, rstrip=True, normalized=True), AddedToken("two words")])
    bos, eos = SPECIALS[:2]
    tok.post_processor = processors.TemplateProcessing(single=f"{bos} $A {eos}", special_tokens=[(bos, 0), (eos, 1)])
    backend = FastBackend.__new__(FastBackend)
    backend._tok = tok
    backend.special_ids, backend.vocab_size = frozenset(range(len(SPECIALS))), tok.get_vocab_size()
    return Tokenizer(backend, {"bos_token": bos, "eos_token": eos})


KINDS = ["tiny", "demo", *PATTERNS, "metaspace", "llama2"]
WORDS = st.sampled_from(
    ["Hello", "world", "a", "é", "你好。", "123", "1", "12345", "_", "'s", "'", "\n", " ", "  ", "\t", "\r\n", "-",
     "🙂", "\u200d", "\u0301", "two words", "two", "words", "<lstrip>", *SPECIALS[:3]]
)  # fmt: skip
TEXTS = st.lists(st.tuples(WORDS, st.sampled_from(["", " ", " ", "\n"])), max_size=60).map(
    lambda pairs: "".join(a + b for a, b in pairs)
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(15))
@given(text=TEXTS, size=st.integers(4, 40), special=st.booleans())
@example(text=SPECIALS[0] * 3 + "Hello world " * 20, size=30, special=True)
def test_slices_have_the_tokens_of_the_whole(kind, text, size, special):
    tok = built(kind)
    whole = tok._encode_group([text], special)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SLICE_CHARS", size)
        assert tok.encode(text, special) == whole
        assert tok.encode_batch([text, "a", "b c", text], special)[::3] == [whole, whole]


@pytest.mark.parametrize("kind", [*PATTERNS, "tiny", "demo", "metaspace"])
def test_long_texts_are_cut(kind):
    """Checks that the test above covers slices."""
    tok: Any = built(kind)
    seen = []
    encode = tok._backend.encode
    rng = random.Random(3)
    text = " ".join(rng.choice(["Hello", "world", "12", "fox."]) for _ in range(8000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SLICE_CHARS", slices.SLICE_CHARS // 10)

        def watched(texts: list[str], **options: Any) -> list[list[int]]:
            seen.append(sum(map(len, texts)))
            return encode(texts, **options)

        patch.setattr(tok._backend, "encode", watched)
        tok.encode(text)
        tok.encode_batch(["Hello world"] * 4000)
        assert max(seen) <= slices.SLICE_CHARS < len(text)


def test_unsplittable_text_has_a_limit(monkeypatch):
    monkeypatch.setattr(slices, "SLICE_CHARS", 64)
    monkeypatch.setattr(slices, "MAX_UNCUT_CHARS", 1024)
    for kind, text in (("llama2", "Hello world " * 100), ("demo", "x" * 2000), ("demo", "a b " * 100 + "-" * 1100)):
        with pytest.raises(InputError, match="1024 characters of the text cannot be split") as caught:
            built(kind).encode(text)
        assert caught.value.status == 413
    assert built("demo").encode("a b " * 100 + "-" * 900)
