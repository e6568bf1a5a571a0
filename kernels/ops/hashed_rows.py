"""Rows of large tables in host memory, chosen by hashes of n-grams (DeepSeek V4.1).

Legend: T tokens, N tokens of the longest n-gram, C rows that a token chooses, W numbers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_LONE_SPACE = "\ue000"
SCALED = 32
"""Numbers of a row in FP8 with a common scale."""


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
        self._map = torch.tensor(whole, dtype=torch.int32, device=device)

    def of(self, tokens: Tensor) -> Tensor:
        """Token ids [T] -> int32."""
        return self._map[tokens]


class HashedRows:
    """A table, mapped into host memory.

    Args:
        table: [rows, bytes of a row] uint8. scales: [rows, W / 32] uint8, exponents; None: without.
        dtype: of the numbers.
        primes, multipliers: of `EngramConfig`, of this layer.
    """

    def __init__(
        self, table: Tensor, dtype: torch.dtype, scales: Tensor | None, primes: Sequence[int],
        multipliers: Sequence[int], device: torch.device,
    ) -> None:  # fmt: skip
        self._table, self._dtype, self._scales = table, dtype, scales
        longest = len(multipliers)
        sizes = torch.tensor(primes, dtype=torch.int64, device=device)
        self._first = sizes.cumsum(0) - sizes
        self._sizes = sizes.view(longest - 1, -1)
        self._multipliers = torch.tensor(multipliers, dtype=torch.int64, device=device)

    def rows_of(self, ids: Tensor) -> Tensor:
        """Ids of n-grams [T, N], the last token's first -> numbers of rows [T, C] int64."""
        products = ids.long() * self._multipliers
        mixed, found = products[:, 0], []
        for i, sizes in enumerate(self._sizes):
            mixed = mixed ^ products[:, i + 1]
            found.append(mixed.unsqueeze(1) % sizes)
        return torch.cat(found, 1) + self._first

    def read(self, ids: Tensor) -> Tensor:
        """Ids of n-grams [T, N] -> the rows side by side, [T, C W] float32."""
        rows = self.rows_of(ids)
        flat = rows.flatten().cpu()
        values = self._table.index_select(0, flat).view(self._dtype).float()
        if self._scales is not None:
            exponents = self._scales.index_select(0, flat).float() - 127
            values = (values.unflatten(1, (-1, SCALED)) * exponents.exp2().unsqueeze(2)).flatten(1)
        return values.view(len(rows), -1).to(ids.device)
