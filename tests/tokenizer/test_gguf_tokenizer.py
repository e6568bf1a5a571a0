"""Tokenizers in the metadata of GGUF files, against the original tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from moe_engine.errors import ConfigError
from moe_engine.tokenizer.gguf_tokenizer import SPLITS
from moe_engine.tokenizer.tokenizer import load_tokenizer
from tests.models.gguf import tokenizer_metadata, write_container

TEXTS = (
    "The capital of France is Paris. 1234567 + 89 = x;\n\n  def f(a):\n\treturn a['b']  ",
    "<|im_start|>user\nGrüße, 東京は日本の首都です。 “quoted” <｜User｜>— naïve café 👩‍🔬<|im_end|><think>hm</think>",
    "",
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def trained(folder: Path, splits: tuple[str, ...]) -> Path:
    """A byte-level BPE tokenizer in hub layout with this pre-tokenizer."""
    made = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    made.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)]
    )
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in ("<|im_start|>", "<|im_end|>", "<｜User｜>")]
    )
    made.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    made.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def written(folder: Path, metadata: dict[str, Any], **more: Any) -> Path:
    own = folder / "gguf"
    own.mkdir(exist_ok=True)
    data = {"general.architecture": "qwen2"} | metadata | {f"tokenizer.ggml.{k}": v for k, v in more.items()}
    return write_container(own / "model.gguf", data, {})


def test_splits_are_those_of_transformers() -> None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    common = SPLITS.keys() & theirs.GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert len(common) >= 6
    assert {name: SPLITS[name] for name in common} == {
        name: (theirs.GGUF_PRE_TOKENIZER_SPLITS[name],) for name in common
    }


@pytest.mark.parametrize("name", ["default", "qwen2", "deepseek-v3", "gpt-4o", "qwen35", "refact", "glm4"])
def test_ids_and_texts_are_those_of_the_original(tmp_path: Path, name: str) -> None:
    original = load_tokenizer(trained(tmp_path, SPLITS[name]))
    found = load_tokenizer(written(tmp_path, tokenizer_metadata(tmp_path, name)))
    assert found.chat_template == TEMPLATE and found.vocab_size == original.vocab_size
    assert (found.bos_id, found.eos_id, found.special_ids) == (original.bos_id, original.eos_id, original.special_ids)
    for text in TEXTS:
        ids = original.encode(text)
        assert found.encode(text) == ids
        assert found.decode(ids) == original.decode(ids) and found.decode(ids, False) == text
        assert [found.token_bytes(i) for i in ids] == [original.token_bytes(i) for i in ids]
    for file in tmp_path.rglob("*.gguf"):
        file.unlink()
    assert found.source is not None and found.source.load().encode(TEXTS[0]) == original.encode(TEXTS[0])


def test_sentencepiece_vocabularies(tmp_path: Path) -> None:
    """Llama 2's: merges follow from the scores, unknown characters are bytes, BOS is added."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁a", "ab", "▁ab", "▁", "a", "b"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(words)
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -1e9, -1e9, -1e9]
    found = load_tokenizer(
        written(
            tmp_path,
            {"general.architecture": "llama"},
            model="llama",
            tokens=pieces + words,
            scores=scores,
            token_type=kinds,
            bos_token_id=1,
            eos_token_id=2,
            unknown_token_id=0,
        )
    )
    number = {token: i for i, token in enumerate(pieces + words)}
    assert found.encode("ab") == [1, number["▁ab"]]
    assert found.encode("a é", add_special_tokens=False) == [
        number["▁a"], number["▁"], number["<0xC3>"], number["<0xA9>"],
    ]  # fmt: skip
    assert found.decode([number["▁ab"], number["<0xC3>"], number["<0xA9>"]]) == "abé"


def test_vocabularies_of_gemma_3(tmp_path: Path) -> None:
    """Merges follow from the order of the tokens, not from their scores; runs of spaces are stored as spaces; no space
    is put before a text. The original is built as the published tokenizer.json."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", "▁▁▁", "▁▁▁▁"]
    tokens += ["ab", "▁a", "abc", "▁ab", "bc", "▁abc", "▁", "a", "b", "c", "é"]
    number = {token: i for i, token in enumerate(tokens)}
    merges = [
        (token[:at], token[at:])
        for token in tokens[len(special) + 256 :]
        for at in range(1, len(token))
        if {token[:at], token[at:]} <= number.keys()
    ]
    original = Tokenizer(models.BPE(number, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    original.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")  # type: ignore[assignment]
    original.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    stored = [" " * len(token) if set(token) == {"▁"} and len(token) > 1 else token for token in tokens]
    kinds = [3] * len(special) + [6] * 256 + [1] * (len(tokens) - len(special) - 256)
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    scores, more = [-1e3] * len(tokens), {"add_space_prefix": False, "add_bos_token": True}
    metadata = {"general.architecture": "gemma3"}
    more |= {"model": "llama", "tokens": stored, "scores": scores, "token_type": kinds, **ids}
    found = load_tokenizer(written(tmp_path, metadata, **more))
    for text in ("abc", " abc ab", "a   b    abcab\n", "<start_of_turn>ab é 東 abc", "     ", "bcab" * 3):
        assert found.encode(text, add_special_tokens=False) == original.encode(text, add_special_tokens=False).ids
        assert found.decode(found.encode(text, add_special_tokens=False), False) == text
    assert found.encode("ab")[0] == 2


def test_vocabularies_of_gemma_4(tmp_path: Path) -> None:
    """The file has merges; spaces in tokens are those of the hub; some marks are no control tokens. The original is
    built as the published tokenizer.json."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>"]
    marks = ["<|tool_call>", '<|"|>']
    tokens = [*special, *marks, *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", "▁a", "ab", "▁ab", "bc", "▁abc"]
    tokens += ["▁", "a", "b", "c", "é"]
    number = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "▁"), ("a", "b"), ("▁", "a"), ("▁a", "b"), ("b", "c"), ("▁ab", "c")]
    original = Tokenizer(models.BPE(number, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    original.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")  # type: ignore[assignment]
    original.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    original.add_tokens([AddedToken(token, normalized=False) for token in marks])
    kinds = [3] * len(special) + [4] * len(marks) + [6] * 256 + [1] * (len(tokens) - len(special) - len(marks) - 256)
    more: dict[str, Any] = {
        "model": "gemma4", "tokens": tokens, "scores": [-1e3] * len(tokens), "token_type": kinds,
        "merges": [" ".join(pair) for pair in merges], "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3,
        "padding_token_id": 0, "add_space_prefix": False, "add_bos_token": True,
    }  # fmt: skip
    found = load_tokenizer(written(tmp_path, {"general.architecture": "gemma4"}, **more))
    for text in ("abc", " abc ab", "a   b    abcab\n", '<|turn>ab <|tool_call><|"|>é 東 abc<|"|>', "     ", "bcab" * 3):
        assert found.encode(text, add_special_tokens=False) == original.encode(text, add_special_tokens=False).ids
        assert found.decode(found.encode(text, add_special_tokens=False), False) == text
    assert found.encode("ab")[0] == 2


def test_vocabularies_of_phi_3(tmp_path: Path) -> None:
    """One more space is put before each text, also before one that begins with a space; marks are control tokens."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁▁", "▁a", "ab", "▁ab", "▁", "a", "b"]
    tokens = [*pieces, *words, "<|user|>", "<|end|>"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(words) + [3, 3]
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -1e9, -1e9, -1e9, -1e3, -1e3]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    more: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, **ids}
    found = load_tokenizer(written(tmp_path, {"general.architecture": "phi3"}, **more, add_bos_token=False))
    number = {token: i for i, token in enumerate(tokens)}
    for text, want in (("ab", ["▁ab"]), (" ab", ["▁▁", "ab"]), ("<|user|>ab<|end|>", ["<|user|>", "▁ab", "<|end|>"])):
        assert found.encode(text) == [number[token] for token in want], text
    assert {number["<|user|>"], number["<|end|>"]} <= set(found.special_ids)


def test_what_would_split_texts_in_another_way_is_refused(tmp_path: Path) -> None:
    metadata = tokenizer_metadata(trained(tmp_path, ()), "deepseek-llm")
    for more, message in (
        ({}, r"tokenizer\.ggml\.pre 'deepseek-llm' is not supported; .*--tokenizer-path"),
        ({"model": "bert"}, r"tokenizer\.ggml\.model 'bert' is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(written(tmp_path, metadata, **more))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.ggml\.merges"):
        del metadata["tokenizer.ggml.merges"]
        load_tokenizer(written(tmp_path, metadata, pre="default"))
    beside = tmp_path / "beside.gguf"
    write_container(beside, {"general.architecture": "qwen2"}, {})
    assert load_tokenizer(beside).encode("The capital") == load_tokenizer(tmp_path).encode("The capital")
