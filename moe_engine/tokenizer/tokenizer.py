"""Tokenizer of a checkpoint: `tokenizer.json` through the `tokenizers` library, anything else through transformers.

transformers takes seconds to import and is loaded only if needed: checkpoints without a `tokenizer.json`,
`--tokenizer-mode slow`, and names of the Hugging Face hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec

from moe_engine.errors import ConfigError
from moe_engine.gguf_container import find_gguf
from moe_engine.tokenizer import slices
from moe_engine.tokenizer.byte_alphabet import byte_alphabet
from moe_engine.tokenizer.detokenizer import PROMPT_TAIL_TOKENS, ByteDetokenizer, Detokenizer, WindowDetokenizer
from moe_engine.tokenizer.gguf_tokenizer import load_gguf_tokenizer
from moe_engine.tokenizer.tokenizer_files import FIX

_NOTHING: frozenset[int] = frozenset()
_RULES = ("add_bos_token", "add_eos_token")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Backend(Protocol):
    """The underlying library. Ids and texts only, no policy."""

    special_ids: frozenset[int]
    vocab_size: int

    def encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]: ...
    def encode_pairs(self, pairs: list[tuple[str, str]], *, add_special_tokens: bool) -> list[list[int]]: ...
    def decode(self, ids: list[int]) -> str: ...
    def token(self, token_id: int) -> str | None: ...
    def id(self, token: str) -> int | None: ...
    def max_token_chars(self) -> int: ...


class FastBackend:
    """The Rust library.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tok = tokenizer
        self._tok.no_truncation()
        self._tok.no_padding()
        added = self._tok.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = self._tok.get_vocab_size()

    def encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        # not `encode`, even for one text: `encode` holds the GIL for its whole run
        return [e.ids for e in self._tok.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]

    def encode_pairs(self, pairs: list[tuple[str, str]], *, add_special_tokens: bool) -> list[list[int]]:
        return [e.ids for e in self._tok.encode_batch_fast(pairs, add_special_tokens=add_special_tokens)]

    def decode(self, ids: list[int]) -> str:
        return self._tok.decode(ids, skip_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        return self._tok.id_to_token(token_id)

    def id(self, token: str) -> int | None:
        return self._tok.token_to_id(token)

    def max_token_chars(self) -> int:
        return max(map(len, self._tok.get_vocab()), default=1)


class TransformersBackend:
    """Everything else, through transformers."""

    def __init__(self, path: str, *, use_fast: bool, trust_remote_code: bool, revision: str | None) -> None:
        from transformers import AutoTokenizer

        try:
            self.hf: Any = AutoTokenizer.from_pretrained(
                path, use_fast=use_fast, trust_remote_code=trust_remote_code, revision=revision
            )
        except Exception as exc:
            reason = " ".join(str(exc).split())
            raise ConfigError(
                f"--tokenizer-path {path}: transformers cannot load a tokenizer from it ({reason:.200}); {FIX}"
            ) from exc
        self.special_ids = frozenset(self.hf.all_special_ids)
        self.vocab_size = len(self.hf)

    def encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [self.hf.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def encode_pairs(self, pairs: list[tuple[str, str]], *, add_special_tokens: bool) -> list[list[int]]:
        return [self.hf.encode(*pair, add_special_tokens=add_special_tokens) for pair in pairs]

    def decode(self, ids: list[int]) -> str:
        return self.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token(self, token_id: int) -> str | None:
        return self.hf.convert_ids_to_tokens(token_id)

    def id(self, token: str) -> int | None:
        found = self.hf.convert_tokens_to_ids(token)
        return None if found is None or found == self.hf.unk_token_id else int(found)

    def max_token_chars(self) -> int:
        return max(map(len, self.hf.get_vocab()), default=1)


class ByteTable(dict[int, bytes]):
    """Bytes of every token of a byte-level vocabulary, computed on first use."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self._alphabet = byte_alphabet()
        self.texts = TokenTexts(self)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.token(token_id) or ""
        try:
            value = bytes([self._alphabet[c] for c in token])
        except KeyError:  # an added token with characters outside the alphabet is literal text
            value = token.encode()
        self[token_id] = value
        return value


class TokenTexts(dict[int, str | None]):
    """Text of every token whose bytes are whole characters, else None; computed on first use."""

    def __init__(self, table: ByteTable) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        try:
            value: str | None = self._table[token_id].decode()
        except UnicodeDecodeError:
            value = None
        self[token_id] = value
        return value


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of `tokenizer.json`, also one made of a GGUF file, and of the files beside it."""

    file: Path
    tokenizer_json: bytes
    config: dict[str, Any]
    chat_template: str | dict[str, str] | None

    def parse(self) -> Any:
        """A `tokenizers.Tokenizer`. Raises ConfigError: names the file."""
        import tokenizers

        try:
            return tokenizers.Tokenizer.from_buffer(self.tokenizer_json)
        except Exception as exc:  # the library raises bare Exception
            raise ConfigError(f"{self.file}: cannot be read as a tokenizer.json: {exc}; {FIX}") from exc


@dataclass(frozen=True)
class TokenizerSource:
    """Arguments of `load_tokenizer`, so that another process can load the same tokenizer.

    Attributes:
        files: what is loaded, of a source that was read.
    """

    path: str
    mode: str
    trust_remote_code: bool
    revision: str | None
    files: TokenizerFiles | None = None

    def read(self) -> TokenizerSource:
        """The same source with its files, if it has a `tokenizer.json` or is a GGUF file: it can be loaded when the
        folder was replaced or is gone.

        Raises:
            ConfigError: names the file at fault.
        """
        file = Path(self.path)
        if (gguf := find_gguf(file)) is not None:
            file = gguf.parent
        file = file if file.is_file() else file / "tokenizer.json"
        if self.mode != "auto":
            return self
        if file.is_file():
            return replace(self, files=_read_files(file))
        return self if gguf is None else replace(self, files=_read_gguf(gguf))

    def load(self) -> Tokenizer:
        """Raises as `load_tokenizer`."""
        if self.files is not None:
            return Tokenizer(
                FastBackend(self.files.parse()),
                self.files.config,
                byte_level=_is_byte_level(self.files.tokenizer_json),
                chat_template=self.files.chat_template,
                source=self,
            )
        gguf = find_gguf(self.path)
        slow = TransformersBackend(
            self.path if gguf is None else str(gguf.parent),
            use_fast=self.mode != "slow",
            trust_remote_code=self.trust_remote_code,
            revision=self.revision,
        )
        names = {n: getattr(slow.hf, n) for n in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return Tokenizer(slow, names, chat_template=getattr(slow.hf, "chat_template", None), source=self)


class Tokenizer:
    """Encodes and decodes with one checkpoint's tokenizer.

    Args:
        backend: the underlying library.
        config: contents of `tokenizer_config.json`.
        byte_level: whether every token is a byte string.
        chat_template: the checkpoint's own template, or several by name.
        source: arguments of `load_tokenizer`; None for a tokenizer built from parts, which other processes cannot load.
    """

    def __init__(
        self,
        backend: Backend,
        config: dict[str, Any] | None = None,
        *,
        byte_level: bool = False,
        chat_template: str | dict[str, str] | None = None,
        source: TokenizerSource | None = None,
    ) -> None:
        config = config or {}
        self.source = source
        self._backend = backend
        self._beginnings: dict[str, frozenset[str]] = {}
        self.max_token_chars = backend.max_token_chars()
        """Characters of the longest token: a text has at least `len(text) / max_token_chars` tokens."""
        self._table = ByteTable(backend) if byte_level else None
        self.chat_template = chat_template
        self.special_tokens = {
            name: content
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (content := _content(name, config.get(name))) is not None
        }
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_id = backend.id(self.bos_token) if self.bos_token else None
        self.eos_id = backend.id(self.eos_token) if self.eos_token else None
        self.special_ids = backend.special_ids
        # As in transformers 4's Llama tokenizers (DeepSeek): either field, if set, overrides the post-processor.
        # Qwen's tokenizers ignore both: the post-processor of an embedding model adds EOS.
        is_qwen = str(config.get("tokenizer_class")).startswith("Qwen2")
        explicit = isinstance(backend, FastBackend) and not is_qwen and not config.keys().isdisjoint(_RULES)
        self._add_bos = bool(config.get("add_bos_token")) if explicit else None
        self._add_eos = bool(config.get("add_eos_token")) if explicit else None

    @property
    def folder(self) -> Path | None:
        """The checkpoint's folder on this machine; None for a hub name, or a tokenizer built from parts."""
        path = None if self.source is None else Path(self.source.path)
        if path is not None and path.is_file():
            path = path.parent
        return path if path is not None and path.is_dir() else None

    @property
    def vocab_size(self) -> int:
        return self._backend.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A text that already starts with BOS (a rendered chat) does not get a second one."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text. Memory beyond the ids is bounded for any texts.

        Raises:
            InputError: 413, a text of megabytes that cannot be split; see `slices`.
        """
        batch: list[list[int]] = [[] for _ in texts]
        for index, ids in self.encode_parts(texts, add_special_tokens):
            batch[index] = batch[index] + ids if batch[index] else ids
        return batch

    def encode_pairs(self, pairs: list[tuple[str, str]]) -> list[list[int]]:
        """Token ids of each pair of texts, with the special tokens of a pair."""
        if self._add_bos is None:
            return self._backend.encode_pairs(pairs, add_special_tokens=True)
        ids = self._encode_group([text for pair in pairs for text in pair], True)  # each text has its own
        return [first + second for first, second in zip(ids[::2], ids[1::2])]

    def encode_parts(self, texts: list[str], add_special_tokens: bool) -> Iterator[tuple[int, list[int]]]:
        """`encode_batch` in parts: the index of a text and its next ids; at least one part per text."""
        first = 0
        for group in slices.groups(texts):
            if len(group[0]) > slices.SLICE_CHARS:
                for ids in self._encode_long(group[0], add_special_tokens):
                    yield first, ids
            else:
                yield from enumerate(self._encode_group(group, add_special_tokens), first)
            first += len(group)

    def _encode_long(self, text: str, add_special_tokens: bool) -> Iterator[list[int]]:
        before, behind = self._ends if add_special_tokens else ([], [])
        for number, piece in enumerate(slices.slices(text, self._encode_plain)):
            ids = self._encode_plain([piece])[0]
            yield self._with_one_bos(before + ids) if number == 0 and add_special_tokens else ids
        yield behind

    def _encode_group(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        by_rule = self._add_bos is not None
        batch = self._backend.encode(texts, add_special_tokens=add_special_tokens and not by_rule)
        if add_special_tokens:
            for ids in batch:
                if self._add_bos and self.bos_id is not None:
                    ids.insert(0, self.bos_id)
                if self._add_eos and self.eos_id is not None:
                    ids.append(self.eos_id)
                self._with_one_bos(ids)
        return batch

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Removes a duplicate BOS in place: a rendered chat already starts with the BOS that was prepended."""
        if len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            del ids[0]
        return ids

    def _encode_plain(self, texts: list[str]) -> list[list[int]]:
        return self._encode_group(texts, False)

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """Special tokens before and after every text."""
        plain, whole = self._encode_group(["a"], False)[0], self._encode_group(["a"], True)[0]
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return whole[:at], whole[at + len(plain) :]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, keep: Set[int] = _NOTHING) -> str:
        """Text of a whole sequence; special tokens in `keep` are shown even if the others are skipped."""
        detokenizer = self.detokenizer(skip_special_tokens, keep)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(
        self, skip_special_tokens: bool = True, keep: Set[int] = _NOTHING, prompt_ids: Sequence[int] = ()
    ) -> Detokenizer:
        """A new incremental decoder for an output that follows `prompt_ids`."""
        skip = (self.special_ids - keep if keep else self.special_ids) if skip_special_tokens else _NOTHING
        if self._table is not None:
            return ByteDetokenizer(self._table, skip)
        return WindowDetokenizer(self._backend.decode, skip, prompt_ids[-PROMPT_TAIL_TOKENS:])

    def token_id(self, token: str) -> int | None:
        """The id of exactly this token, or None."""
        return self._backend.id(token)

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id without a token."""
        return self._backend.token(token_id) or ""

    def beginnings(self, text: str) -> frozenset[str]:
        """The proper beginnings of a text that end with one of its tokens."""
        if text not in self._beginnings:
            ids = self.encode(text, add_special_tokens=False)
            found = (self.decode(ids[:count], skip_special_tokens=False) for count in range(1, len(ids)))
            self._beginnings[text] = frozenset(one for one in found if one and one != text and text.startswith(one))
        return self._beginnings[text]

    def token_text(self, token_id: int) -> str:
        """Text of a single token; bytes of an incomplete character become U+FFFD."""
        if self._table is not None:
            return self._table[token_id].decode("utf-8", "replace")
        return self._backend.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, exact for byte-level vocabularies."""
        return self._table[token_id] if self._table is not None else self.token_text(token_id).encode()

    def exact_bytes(self, token_id: int) -> bytes:
        """Bytes of one token in the middle of a text, exact for byte-level and SentencePiece vocabularies."""
        if self._table is not None:
            return self._table[token_id]
        piece = self._backend.token(token_id) or ""
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()


def load_tokenizer(
    path: str | Path, *, mode: str = "auto", trust_remote_code: bool = False, revision: str | None = None
) -> Tokenizer:
    """Loads the tokenizer of a checkpoint folder (or hub name, or GGUF file without a tokenizer.json next to it).

    Raises:
        ConfigError: names the file at fault.
    """
    if mode not in ("auto", "slow"):
        raise ConfigError(f"--tokenizer-mode {mode}: choose auto or slow")
    return TokenizerSource(str(path), mode, trust_remote_code, revision).read().load()


def _read_files(file: Path) -> TokenizerFiles:
    folder = file.parent
    config = _read_json(folder / "tokenizer_config.json")
    for name, value in _read_json(folder / "special_tokens_map.json").items():
        config.setdefault(name, value)
    template = _own_template(folder, config)
    return TokenizerFiles(file, file.read_bytes(), config, template)


def _read_gguf(path: Path) -> TokenizerFiles:
    made, config = load_gguf_tokenizer(path)
    return TokenizerFiles(path, made.to_str().encode(), config, _own_template(path.parent, config))


def _own_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    jinja = folder / "chat_template.jinja"
    if (text := _read(jinja)) is not None:
        return text
    template = config.get("chat_template")
    if template is None:
        template = _read_json(folder / "chat_template.json").get("chat_template")
    try:
        if isinstance(template, list):
            template = {str(entry["name"]): entry["template"] for entry in template}
        texts = template.values() if isinstance(template, dict) else [template]
        if all(text is None or isinstance(text, str) for text in texts):
            return template
    except (KeyError, TypeError):
        pass
    raise ConfigError(f"{folder}: chat_template must be text, or a list of objects with a name and a template")


def _read_json(path: Path) -> dict[str, Any]:
    if (text := _read(path)) is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path}: not a JSON object: {exc}") from exc


def _read(file: Path) -> str | None:
    """The text of an optional file, without a byte order mark; None if there is no such name."""
    if not os.path.lexists(file):
        return None
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file}: not a regular file; copy it from the checkpoint, or remove it")
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{file}: a link to a missing file; copy the whole checkpoint, or remove it") from None
    except OSError as exc:
        raise ConfigError(f"{file}: cannot be read ({exc.strerror}); check its permissions") from None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file}: cannot be read as text: {exc}") from None


class _DecoderOnly(msgspec.Struct):
    """The only field of tokenizer.json that determines detokenization; the rest is skipped without parsing."""

    decoder: dict[str, Any] | None = None


def _is_byte_level(tokenizer_json: bytes) -> bool:
    try:
        decoder = msgspec.json.decode(tokenizer_json, type=_DecoderOnly).decoder
    except msgspec.DecodeError:
        return False
    while decoder and decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return bool(decoder) and decoder.get("type") == "ByteLevel"  # type: ignore[union-attr]


def _content(name: str, token: Any) -> str | None:
    """A special token's text: the value itself, or the `content` of an object."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"tokenizer_config.json: {name} must be text, found {text!r:.80}")
    return text
