"""Encoding, the BOS rule, decoding and the incremental decoders."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from moe_engine.errors import ConfigError
from moe_engine.tokenizer import load_tokenizer
from moe_engine.tokenizer.detokenizer import WindowDetokenizer
from moe_engine.tokenizer.tokenizer_files import check_tokenizer
from tests.tokenizer.tiny_tokenizer import LINES, SPECIALS, make_tokenizer, save_tokenizer

TOK = make_tokenizer()
BACKEND: Any = TOK._backend


def id_of(token: str) -> int:
    found = TOK.token_id(token)
    assert found is not None
    return found


BOS, EOS = SPECIALS[0], SPECIALS[1]


@pytest.mark.parametrize("line", LINES)
def test_round_trip(line):
    assert TOK.decode(TOK.encode(line)) == line


def test_bos_once():
    assert TOK.encode("Hello") == [0, *TOK.encode("Hello", False)]
    assert TOK.encode(BOS + "Hello") == TOK.encode("Hello")
    assert TOK.encode("", True) == [0]


def test_config_overrides_add_bos(tmp_path):
    tok = load_tokenizer(save_tokenizer(tmp_path, add_bos_token=False, add_eos_token=True))
    assert tok.encode("Hello")[0] != 0
    assert tok.encode("Hello")[-1] == tok.eos_id == 1


def test_qwens_post_processor_stays(tmp_path):
    """Qwen's embedding models set add_bos_token, and their post-processor adds EOS. The oracle is transformers."""
    save_tokenizer(tmp_path, add_bos_token=False, add_eos_token=False, tokenizer_class="Qwen2Tokenizer")
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    eos, first, second = (
        {"SpecialToken": {"id": EOS, "type_id": 0}},
        *({"Sequence": {"id": name, "type_id": 0}} for name in "AB"),
    )
    tokens = {EOS: {"id": EOS, "ids": [1], "tokens": [EOS]}}
    template = {"single": [first, eos], "pair": [first, eos, second, eos], "special_tokens": tokens}
    file.write_text(json.dumps(content | {"post_processor": {"type": "TemplateProcessing", **template}}))
    tok, oracle = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tok.encode("Hello") == oracle.encode("Hello") == [*TOK.encode("Hello", False), 1]
    assert tok.encode_pairs([("Hello", "world")]) == [oracle.encode("Hello", "world")]


def test_pairs_of_texts_with_bos():
    hello, world = TOK.encode("Hello", False), TOK.encode("world", False)
    assert TOK.encode_pairs([("Hello", "world")] * 2) == [[0, *hello, 0, *world]] * 2


def test_special_tokens_skipped_kept_and_picked():
    ids = TOK.encode(f"a<｜User｜>b{EOS}", False)
    assert TOK.decode(ids) == "ab"
    assert TOK.decode(ids, False) == f"a<｜User｜>b{EOS}"
    assert TOK.decode(ids, keep={id_of("<｜User｜>")}) == "a<｜User｜>b"
    assert TOK.decode(TOK.encode("<think>x</think>", False)) == "<think>x</think>"


def test_token_text_and_bytes():
    ids = TOK.encode("🙂", False)
    assert b"".join(TOK.token_bytes(i) for i in ids).decode() == "🙂"
    assert TOK.token_text(id_of(EOS)) == EOS
    assert TOK.token_text(TOK.vocab_size + 5) == ""


TEXTS = st.text(alphabet=st.sampled_from("ab é你😀🙂‍👩\n<|｜▁"), max_size=40) | st.text(max_size=30)


@settings(max_examples=150)
@given(TEXTS, st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_any_split_decodes_the_same(text, sizes):
    ids = TOK.encode(text, False)
    for detokenizer in (TOK.detokenizer(False), WindowDetokenizer(BACKEND.decode, frozenset())):
        out, at, turn = "", 0, 0
        while at < len(ids):
            size = sizes[turn % len(sizes)]
            piece = detokenizer.push(ids[at : at + size])
            assert "\ufffd" not in piece or "\ufffd" in text
            out, at, turn = out + piece, at + size, turn + 1
        assert out + detokenizer.flush() == text


@settings(max_examples=150)
@given(st.lists(st.integers(0, TOK.vocab_size - 1), max_size=30), st.booleans())
def test_any_tokens_decode_as_the_library_does(ids, skip):
    """Also ids that are not valid UTF-8."""
    detokenizer = TOK.detokenizer(skip)
    out = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
    assert out == BACKEND._tok.decode(ids, skip_special_tokens=skip) == TOK.decode(ids, skip)


def test_window_keeps_the_leading_space_of_an_answer():
    words = {1: "Hello", 2: "▁big", 3: "▁world"}

    def decode(ids):  # as in SentencePiece: the first blank of a text is dropped
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = WindowDetokenizer(decode, frozenset(), prompt_tail=[1])
    assert [detokenizer.push([i]) for i in (2, 3, 2)] == [" big", " world", " big"]


@pytest.mark.parametrize("tail", [[], [9], [1], [9, 1], [1, 9], [9, 9, 2, 9]])
def test_special_tokens_of_the_prompt_are_skipped_too(tail):
    """An answer after `<s>` alone starts like any text of the library: without the blank of its first word."""
    words = {1: "▁Hello", 2: "▁big", 9: "<s>"}

    def decode(ids):
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = WindowDetokenizer(decode, frozenset({9}), prompt_tail=tail)
    shown = "".join(detokenizer.push([i]) for i in (2, 9, 1))
    plain = [i for i in tail if i != 9]
    assert decode(plain) + shown == decode([*plain, 2, 1])


def test_window_emits_invalid_characters():
    detokenizer = WindowDetokenizer(lambda ids: "\ufffd" * len(ids), frozenset())
    out = "".join(detokenizer.push([1]) for _ in range(100))
    assert len(out) > 90
    assert len(detokenizer._window) <= 17


def test_a_folder_without_tokenizer_says_what_to_add(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    with pytest.raises(ConfigError, match=r"^--tokenizer-path .* copy the model's tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_or_broken_files_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is a pointer of Git LFS.*git lfs pull"):
        check_tokenizer(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="--tokenizer-mode"):
        load_tokenizer(tmp_path, mode="quick")


def test_a_source_that_was_read_needs_no_files(tmp_path):
    """Another process loads the tokenizer of the server, though the folder was replaced meanwhile."""
    folder = save_tokenizer(tmp_path, add_bos_token=False, add_eos_token=True)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    tok = load_tokenizer(folder)
    for file in folder.iterdir():
        file.write_text("{")
    found = pickle.loads(pickle.dumps(tok.source)).load()
    assert found.encode(LINES[0]) == tok.encode(LINES[0]) and found.encode(LINES[0])[-1] == tok.eos_id
    assert found.chat_template == "{{ messages }}" and found.special_tokens == tok.special_tokens


def test_chat_template_file_wins_over_config(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(tmp_path).chat_template == "from file"
    (tmp_path / "chat_template.jinja").write_text("from file", encoding="utf-8-sig")
    assert load_tokenizer(tmp_path).chat_template == "from file"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_name_without_its_file_is_refused(tmp_path, name):
    """Like the links of a hub folder that was copied without its blobs: prompts would silently lack the template."""
    save_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "blobs")
    with pytest.raises(ConfigError, match=f"{name}: a link to a missing file; copy the whole checkpoint"):
        load_tokenizer(tmp_path)
    os.mkfifo(tmp_path / "blobs")
    with pytest.raises(ConfigError, match=f"{name}: not a regular file"):
        load_tokenizer(tmp_path)


def test_nothing_heavy_is_imported():
    code = (
        "import sys, moe_engine.server.app, moe_engine.server.serve, moe_engine.tokenizer;"
        "import moe_engine.frontend.frontend;"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
