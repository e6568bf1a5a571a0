"""Log-probabilities as JSON, in the three formats of the server's responses (see `frontend.logprob_format`).

The JSON of a token's text and bytes is cached; only numbers are encoded each time. An entry costs a look-up and a
concatenation, a twentieth of the cost with Python dictionaries and lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import msgspec

from moe_engine.frontend.logprob_format import Columns, LogprobOptions, floats_of, ids_of, named, rows_of
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types import PackedLogprobs

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
NULL = b"null"


class _Fragments(dict[int, bytes]):
    """Cache of a token's JSON, made on first use."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> bytes:
        self[token] = value = self._make(token)
        return value


class TokenJson:
    """JSON fragments of one tokenizer's tokens; shared by all responses.

    Args:
        tokenizer: None with `--skip-tokenizer-init`: no texts.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.texts = _Fragments(self._text)
        """`"text"`"""
        self.heads = _Fragments(self._head)
        """`{"token":"text","bytes":[...],"logprob":`"""

    def _text(self, token: int) -> bytes:
        return NULL if self._tokenizer is None else _encode(self._tokenizer.token_text(token))

    def _head(self, token: int) -> bytes:
        assert self._tokenizer is not None
        spelled = _encode(list(self._tokenizer.token_bytes(token)))
        return b'{"token":' + self.texts[token] + b',"bytes":' + spelled + b',"logprob":'

    def chat(self, options: LogprobOptions) -> ChatLogprobs:
        return ChatLogprobs(self)

    def completion(self, options: LogprobOptions) -> CompletionLogprobs:
        return CompletionLogprobs(self)

    def native(self, options: LogprobOptions) -> NativeLogprobs:
        return NativeLogprobs(self, options)


class TokenIdJson(TokenJson):
    """Tokens named by their ids, as with vLLM's `return_tokens_as_token_ids`; bytes remain the text's."""

    def _text(self, token: int) -> bytes:
        return b'"token_id:%d"' % token


class ChatLogprobs:
    """`logprobs` of a chat choice: {"content": [{token, bytes, logprob, top_logprobs}]}."""

    def __init__(self, tokens: TokenJson) -> None:
        self._heads = tokens.heads

    def render(self, block: PackedLogprobs) -> Columns:
        heads, values = self._heads, _numbers(block.values)
        alternatives = _alternatives(
            [heads[i] + value for i, value in zip(ids_of(block.top_ids), _numbers(block.top))], block
        )
        return [
            [
                heads[token] + value + b',"top_logprobs":[' + (b"},".join(row) + b"}" if row else b"") + b"]}"
                for token, value, row in zip(ids_of(block.token_ids), values, alternatives)
            ]
        ]

    def fields(self, columns: Columns) -> dict[str, msgspec.Raw]:
        return {"content": _array(columns[0] if columns else [])}


class CompletionLogprobs:
    """`logprobs` of a plain completion: parallel lists. Offsets are -1, as in SGLang."""

    def __init__(self, tokens: TokenJson) -> None:
        self._texts = tokens.texts

    def render(self, block: PackedLogprobs) -> Columns:
        texts, values = self._texts, _numbers(block.values)
        pairs = [(texts[token], value) for token, value in zip(ids_of(block.top_ids), _numbers(block.top))]
        # several tokens may have the same text, such as U+FFFD, but names in a JSON object must be unique
        tops = [
            b"{" + b",".join([name + b":" + value for name, value in dict(row).items()]) + b"}" if row else NULL
            for row in _alternatives(pairs, block)
        ]
        return [[texts[token] for token in ids_of(block.token_ids)], values, tops]

    def fields(self, columns: Columns) -> dict[str, msgspec.Raw]:
        tokens, values, tops = columns or [[], [], []]
        offsets = [b"-1"] * len(tokens)
        return {
            "tokens": _array(tokens),
            "token_logprobs": _array(values),
            "top_logprobs": _array(tops),
            "text_offset": _array(offsets),
        }


class NativeLogprobs:
    """SGLang's `meta_info`: an entry is [logprob, token id, text]; alternatives are a list of entries, or null."""

    def __init__(self, tokens: TokenJson, options: LogprobOptions) -> None:
        self._texts = tokens.texts
        self._options = options

    def render(self, block: PackedLogprobs) -> Columns:
        top = self._entries(ids_of(block.top_ids), block.top)
        asked = self._entries(list(self._options.token_ids * block.num_tokens), block.asked)
        return [
            self._entries(ids_of(block.token_ids), block.values),
            *(
                [b"[" + b",".join(row) + b"]" if row else NULL for row in _alternatives(flat, block)]
                for flat in (top, asked)
            ),
        ]

    def _entries(self, ids: list[int], values: bytes) -> list[bytes]:
        pairs = zip(ids, _numbers(values))
        if not self._options.with_text:
            return [b"[%b,%d,null]" % (value, token) for token, value in pairs]
        texts = self._texts
        return [b"[%b,%d,%b]" % (value, token, texts[token]) for token, value in pairs]

    def fields(self, columns: Columns) -> dict[str, msgspec.Raw]:
        return named(self._options, [_array(column) for column in columns or [[], [], []]])


def _numbers(data: bytes) -> list[bytes]:
    """float32 numbers as JSON; non-finite ones are null."""
    return _encode(floats_of(data))[1:-1].split(b",") if data else []


def _alternatives(flat: list[T], block: PackedLogprobs) -> list[list[T]]:
    """The alternatives of each token; empty where none were computed."""
    values = floats_of(block.values)
    return [[] if math.isnan(value) else row for row, value in zip(rows_of(flat, len(values)), values)]


def _array(items: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(items) + b"]")
