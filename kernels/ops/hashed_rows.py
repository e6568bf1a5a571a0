"""Rows of large tables in host memory, chosen by hashes of n-grams (DeepSeek V4.1).

Legend: T tokens, N tokens of the longest n-gram, C rows that a token chooses, W numbers of a row.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels import host_calls
from moe_engine.kernels.cpu.library import LibraryError, load
from moe_engine.kernels.ops.ngram_rows import IN_TORCH, NgramValues

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_LONE_SPACE = "\ue000"


def token_map(tokenizer_file: Path) -> tuple[list[int], int]:
    """The id of each token's text, and their number: texts that are equal without accents and case, with spaces as one
    space, have one id. Tokens that are a part of a character have ids of their own.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    from tokenizers import Regex, Tokenizer, normalizers

    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex("^ $"), _LONE_SPACE),
            normalizers.Strip(), normalizers.Replace(_LONE_SPACE, " "),
        ]
    )  # fmt: skip
    tokenizer = Tokenizer.from_str(tokenizer_file.read_text())
    ids, found = dict[str, int](), []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else normalizer.normalize_str(text) or text
        found.append(ids.setdefault(str(key), len(ids)))
    return found, len(ids)


class TextIds:
    """The map of `token_map` on a device; `pad` is the id before the first token."""

    def __init__(self, ids: Sequence[int], vocab_size: int, pad: int, device: torch.device) -> None:
        self.pad = ids[pad]
        whole = [*ids, *[self.pad] * (vocab_size - len(ids))]
        self.map = torch.tensor(whole, dtype=torch.int32, device=device)
        """[V] int32."""


_SIZES = ("row_bytes", "row_stride", "scale_bytes", "scale_stride")


class _Struct(ctypes.Structure):
    """`moe::HashedRows` of hashed_rows.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "longest", "heads", *_SIZES, "part_rows")),
        *(
            (name, ctypes.c_void_p)
            for name in ("parts", "scales", "sizes", "firsts", "multipliers", "ids", "rows", "row_scales")
        ),
    )


@dataclass(frozen=True)
class _Buffers:
    """Host memory of a read: ids [T, N] int32, bytes of rows and of their scales [T, C, bytes]."""

    ids: Tensor
    rows: Tensor
    scales: Tensor | None


class HashedRows:
    """A table, mapped into host memory.

    Rows are copied by a C++ function, which a GPU's stream calls between two copies: neither captured steps nor eager
    ones wait for them on the host.

    Args:
        table: [rows, bytes of a row] uint8. scales: [rows, W / 32] uint8, exponents; None: without.
        dtype: of the numbers.
        primes, multipliers: of `EngramConfig`, of this layer.
        values: of the device that reads the rows.
        more: the rows after those of `table`, in tables of as many rows each; the last one may have fewer.
    """

    def __init__(
        self, table: Tensor, dtype: torch.dtype, scales: Tensor | None, primes: Sequence[int],
        multipliers: Sequence[int], values: NgramValues = IN_TORCH.values, more: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        assert not more or scales is None
        self._parts = (table, *more)
        self._addresses = torch.tensor([part.data_ptr() for part in self._parts])
        self._table, self._dtype, self._scales, self._values = table, dtype, scales, values
        self._sizes = torch.tensor(primes, dtype=torch.int64)
        self._first = self._sizes.cumsum(0) - self._sizes
        self._multipliers = torch.tensor(multipliers, dtype=torch.int64)
        self._pinned: list[_Buffers] = []  # launches keep the addresses of older ones
        self._structs, self._kept = dict[int, _Struct](), list[_Struct]()

    @cached_property
    def _function(self) -> Any:
        """None: no compiler."""
        try:
            return load().moe_hashed_rows
        except LibraryError as error:
            logger.warning("rows of n-gram tables are read in torch: %s", error)
            return None

    @property
    def layout(self) -> tuple[object, ...]:
        """What launches know of the table in addition to its addresses."""
        scales = None if self._scales is None else (self._scales.shape, self._scales.stride())
        return self._dtype, [(part.shape, part.stride()) for part in self._parts], scales

    def follow(self, other: HashedRows) -> None:
        """Reads the table of `other`, of the same layout, from now on; captured steps too."""
        self._parts, self._table, self._scales = other._parts, other._table, other._scales
        self._addresses.copy_(other._addresses)
        for struct in self._kept:
            struct.scales = None if self._scales is None else self._scales.data_ptr()

    @property
    def in_order(self) -> bool:
        """Whether a GPU's stream reads rows without a wait on the host."""
        return self._function is not None

    def rows_of(self, ids: Tensor) -> Tensor:
        """Ids of n-grams [T, N] on the host, the last token's first -> numbers of rows [T, C] int64."""
        products = ids.long() * self._multipliers
        mixed, found = products[:, 0], []
        for i, sizes in enumerate(self._sizes.view(len(self._multipliers) - 1, -1)):
            mixed = mixed ^ products[:, i + 1]
            found.append(mixed.unsqueeze(1) % sizes)
        return torch.cat(found, 1) + self._first

    def read(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Ids of n-grams [T, N] int32 -> the rows side by side, [T, C W] of this dtype."""
        if ids.is_meta:  # compilation without values
            each = len(ids), len(self._sizes)
            rows, scales = (
                None if part is None else part.new_empty((*each, part.shape[1]), device="meta")
                for part in (self._table, self._scales)
            )
            assert rows is not None
            return self._values(rows.view(self._dtype), scales, dtype)
        if self._function is None:
            flat = self.rows_of(ids.cpu()).flatten()
            each = len(ids), len(self._sizes)
            found = self._rows(flat), None if self._scales is None else self._scales.index_select(0, flat)
            rows, scales = (None if part is None else part.unflatten(0, each).to(ids.device) for part in found)
            assert rows is not None
            return self._values(rows.view(self._dtype), scales, dtype)
        if ids.device == _HOST:
            buffers = self._buffers(len(ids), ids.contiguous())
            self._function(ctypes.byref(self._struct(len(ids), buffers)))
            return self._values(buffers.rows.view(self._dtype), buffers.scales, dtype)
        return self._read_in_order(ids, dtype)

    def _rows(self, numbers: Tensor) -> Tensor:
        """[R] -> [R, bytes of a row]."""
        out, size = self._table.new_empty((len(numbers), self._table.shape[1])), len(self._table)
        for number, part in enumerate(self._parts):
            own = (numbers // size == number).nonzero().squeeze(1)
            out[own] = part[numbers[own] - number * size]
        return out

    def _read_in_order(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        count = len(ids)
        if not self._pinned or len(self._pinned[-1].ids) < count:
            self._pinned.append(self._buffers(count, torch.empty(ids.shape, dtype=torch.int32, pin_memory=True)))
            self._structs.clear()
        buffers = self._pinned[-1]
        struct = self._structs.get(count)
        if struct is None:
            struct = self._structs[count] = self._struct(count, buffers)
            self._kept.append(struct)
        buffers.ids[:count].copy_(ids, non_blocking=True)
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        host_calls.call_in_order(address, ctypes.addressof(struct), ids.device)
        rows, scales = (
            None if part is None else part[:count].to(ids.device, non_blocking=True)
            for part in (buffers.rows, buffers.scales)
        )
        assert rows is not None
        return self._values(rows.view(self._dtype), scales, dtype)

    def _buffers(self, count: int, ids: Tensor) -> _Buffers:
        """Memory for `count` tokens, pinned if that of the ids is."""
        pinned, columns = ids.is_pinned(), len(self._sizes)
        rows, scales = (
            None if part is None else torch.empty((count, columns, part.shape[1]), dtype=torch.uint8, pin_memory=pinned)
            for part in (self._table, self._scales)
        )
        assert rows is not None
        return _Buffers(ids, rows, scales)

    def _struct(self, count: int, buffers: _Buffers) -> _Struct:
        longest, scales = len(self._multipliers), self._scales
        assert buffers.scales is not None or scales is None
        return _Struct(
            count, longest, len(self._sizes) // (longest - 1), self._table.shape[1], self._table.stride(0),
            0 if scales is None else scales.shape[1], 0 if scales is None else scales.stride(0), len(self._table),
            self._addresses.data_ptr(), None if scales is None else scales.data_ptr(), self._sizes.data_ptr(),
            self._first.data_ptr(), self._multipliers.data_ptr(), buffers.ids.data_ptr(), buffers.rows.data_ptr(),
            None if buffers.scales is None else buffers.scales.data_ptr(),
        )  # fmt: skip
