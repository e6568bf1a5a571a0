"""A real byte-level BPE tokenizer, trained on a few lines, with DeepSeek's special tokens and chat template."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from moe_engine.tokenizer import Tokenizer, load_tokenizer
from moe_engine.tokenizer.tool_calls.formats import DEEPSEEK_MARKERS

SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    *DEEPSEEK_MARKERS,
)
PLAIN_ADDED = ("<think>", "</think>")

LINES = [
    "Hello world, how are you today? I am fine, thank you.",
    "The quick brown fox jumps over the lazy dog. 0123456789",
    '{"city": "Paris", "unit": "celsius"} function get_weather ```json',
    "héllo wörld, größe, señor, naïve café",
    "你好，世界。今天天气怎么样？",
    "emoji 😀😁🎉👩‍👩‍👧‍👦 and more 🙂",
]

TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<｜Assistant｜>' }}"
    "{% if m['content'] is not none %}{{ m['content'] }}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function']['name'] + ':' + call['function']['arguments'] }}"
    "{% endfor %}{{ eos_token }}"
    "{% elif m['role'] == 'tool' %}{{ '[' + m['content'] + ']' }}"
    "{% else %}{{ raise_exception('unknown role ' + m['role']) }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% if thinking %}{{ '<think>' }}{% endif %}{% endif %}"
)


def save_tokenizer(folder: Path, **config: object) -> Path:
    """Trains the tokenizer and writes its files, as in a checkpoint."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIALS],
    )
    tok.train_from_iterator(LINES * 4, trainer)
    tok.add_tokens([AddedToken(s, special=False, normalized=False) for s in PLAIN_ADDED])
    tok.save(str(folder / "tokenizer.json"))
    values = {
        "bos_token": {"__type": "AddedToken", "content": SPECIALS[0]},
        "eos_token": SPECIALS[1],
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": TEMPLATE,
    } | config
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


@lru_cache(maxsize=1)
def make_tokenizer() -> Tokenizer:
    folder = tempfile.mkdtemp()  # other processes also load it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return load_tokenizer(save_tokenizer(Path(folder)))
