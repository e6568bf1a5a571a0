"""The tokenizer: byte-level BPE with DeepSeek's special tokens, trained on the corpus itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .chat import BOS, EOS, PAD, SPECIAL_TOKENS, TEMPLATE_FILE
from .corpus import document
from .facts import COUNTRIES
from .tasks import CITIES

SAMPLE_DOCUMENTS = 12000
NAME_REPEATS = 12
"""Repetitions of every name in the sample, so that names need few tokens."""
FLAGGED_SPECIAL = (BOS, EOS, PAD)
"""Only these are removed by skip_special_tokens; as in DeepSeek's, markers of turns, reasoning and tools are not."""


def train_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """Train on a sample of documents; digits stay single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    rng = random.Random(seed)
    texts = [document(rng) for _ in range(SAMPLE_DOCUMENTS)]
    names = [n for c in COUNTRIES for n in (c.title, c.capital, c.currency, c.language)] + list(CITIES)
    texts += [f'The {name}. "{name}"' for name in names] * NAME_REPEATS
    for i, text in enumerate(texts):
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\n")
        texts[i] = text
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] in FLAGGED_SPECIAL
        token["normalized"] = False
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    return tokenizer


def _added(token: str) -> dict[str, Any]:
    return {
        "__type": "AddedToken",
        "content": token,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template inside."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": _added(BOS),
        "eos_token": _added(EOS),
        "pad_token": _added(PAD),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
        "chat_template": TEMPLATE_FILE.read_text(encoding="utf-8"),
    }


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(tokenizer_config(max_length), ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
