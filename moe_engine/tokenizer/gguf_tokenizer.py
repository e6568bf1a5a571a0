"""The tokenizer in the metadata of a GGUF file.

Byte-level vocabularies (``tokenizer.ggml.model`` gpt2) are built with the `tokenizers` library; SentencePiece
vocabularies (llama, gemma4), whose merges may follow from the scores, by transformers. Its conversion of byte-level
vocabularies is not used: it adds GPT-2's end of text as a further id, and encodes tokens such as DeepSeek's, whose
characters are outside the byte alphabet, as plain text. A file names its pre-tokenizer (``tokenizer.ggml.pre``);
unknown names are refused, because another split would silently give other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from moe_engine.errors import ConfigError
from moe_engine.gguf_container import read_container

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", ("llama", "gemma4")
_CONTROL, _USER_DEFINED = 3, 4
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
)
_QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
)
_QWEN_35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
)
_DIGITS = (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
"""Single digits, then GPT-2's."""
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _SUFFIX
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _SUFFIX
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (), "gpt-2": (), "llama-bpe": _LLAMA_3, "llama3": _LLAMA_3, "llama-v3": _LLAMA_3, "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2, "tekken": _TEKKEN, "gpt-4o": _GPT_4O, "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3, "qwen35": _QWEN_35, "refact": _DIGITS, "command-r": _DIGITS, "exaone4": (),
    **dict.fromkeys(("dbrx", "smaug-bpe", "pixtral", "glm4", "chatglm-bpe"), _LLAMA_3),
}  # fmt: skip
"""`tokenizer.ggml.pre` -> regular expressions, applied one after the other; (): GPT-2's. From the published
tokenizer.json of the models."""
_KEYS = {
    "tokenizer_type": "model", "tokens": "tokens", "scores": "scores", "token_type": "token_type", "merges": "merges",
    "add_prefix_space": "add_space_prefix",
}  # fmt: skip
"""transformers' names."""
_SPECIAL = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip


def load_gguf_tokenizer(path: Path) -> tuple[Any, dict[str, Any]]:
    """The `tokenizers.Tokenizer` of a GGUF file, and the fields of tokenizer_config.json, including its chat template.

    Raises:
        ConfigError: a vocabulary that is not supported. CheckpointError: a damaged file.
    """
    metadata = read_container(path).metadata
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind, tokens = own.get("model"), own.get("tokens")
    if kind not in (_BYTE_LEVEL, *_SENTENCEPIECE) or not isinstance(tokens, tuple) or not tokens:
        _refuse(path, f"tokenizer.ggml.model {kind!r:.40} is not supported; supported are gpt2, llama and gemma4")
    name = str(metadata.get("general.architecture"))
    made = _byte_level(path, own) if kind == _BYTE_LEVEL else _sentencepiece(path, own, name)
    if made.get_vocab_size() != len(tokens):
        _refuse(path, f"its vocabulary of {len(tokens)} tokens cannot be kept ({made.get_vocab_size()} found)")
    config: dict[str, Any] = {
        "add_bos_token": bool(own.get("add_bos_token", kind in _SENTENCEPIECE)),
        "add_eos_token": bool(own.get("add_eos_token", False)),
    }
    for name, key in _SPECIAL.items():
        number = own.get(key)
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[name] = tokens[number]
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return made, config


def _byte_level(path: Path, own: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    name, tokens, merges = own.get("pre", "default"), own["tokens"], own.get("merges")
    if name not in SPLITS:
        _refuse(path, f"tokenizer.ggml.pre {name!r:.40} is not supported; supported are {', '.join(SPLITS)}")
    if not isinstance(merges, tuple):
        _refuse(path, "has no tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab = {token: number for number, token in enumerate(tokens)}
    try:
        made = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # the library raises bare Exception
        _refuse(path, f"its merges do not fit its tokens ({error!s:.200})")
    splits: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[name]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    kinds = own.get("token_type") or ()
    added = [(token, kind == _CONTROL) for token, kind in zip(tokens, kinds) if kind in (_CONTROL, _USER_DEFINED)]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token, special in added if special])
    made.add_tokens([AddedToken(token, normalized=False) for token, special in added if not special])
    return made


def _sentencepiece(path: Path, own: Mapping[str, Any], name: str) -> Any:
    """name: the architecture. Gemma 3's merges follow from the order of the tokens; Phi-3 puts its space before a text
    otherwise."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
    except ImportError:
        _refuse(path, "its tokenizer needs transformers 5.23 or newer (pip install -U transformers)")
    found = {ours: own[name] for ours, name in _KEYS.items() if name in own}
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    try:
        made, _ = convert_gguf_tokenizer(name, lists)
    except Exception as error:  # the library raises bare Exception
        _refuse(path, f"transformers cannot convert its tokenizer ({error!s:.200})")
    return made


def _refuse(path: Path, complaint: str) -> NoReturn:
    raise ConfigError(
        f"{path}: {complaint}; give the folder of the model's tokenizer.json with --tokenizer-path, or serve token ids "
        "with --skip-tokenizer-init"
    )
