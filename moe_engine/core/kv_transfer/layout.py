"""Which ranks of two servers exchange KV, when their attention groups have different sizes.

A rank has one of `num_shares` equal shares of a token's KV heads; neighboring ranks have the same share if there are
more ranks than shares. MLA's latent is one share, which every rank has. A decode rank takes each head from one prefill
rank that has it; decode ranks are spread over these prefill ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.core.kv_transfer.rows import RowPart


@dataclass(frozen=True)
class Layout:
    """The attention groups of a server.

    Args:
        num_heads: KV heads of the model; 0: the latent, which is not divided.
    """

    num_ranks: int = 1
    num_shares: int = 1
    num_heads: int = 0

    def __post_init__(self) -> None:
        numbers = (self.num_ranks, self.num_shares, max(1, self.num_heads))
        if min(numbers) < 1 or self.num_ranks % self.num_shares or numbers[2] % self.num_shares:
            raise ValueError(f"{self}: the ranks do not have equal shares")

    @property
    def values(self) -> list[int]:
        """The arguments, for messages."""
        return [self.num_ranks, self.num_shares, self.num_heads]

    def share_of(self, rank: int) -> int:
        return rank * self.num_shares // self.num_ranks

    def heads_of(self, rank: int) -> range:
        size = self.num_heads // self.num_shares
        begin = self.share_of(rank) * size
        return range(begin, begin + size)

    @property
    def num_copies(self) -> int:
        """Ranks with the same share."""
        return self.num_ranks // self.num_shares


def sources_of(rank: int, decode: Layout, prefill: Layout) -> list[int]:
    """The prefill ranks from which a decode rank takes its KV, ascending."""
    mine = decode.heads_of(rank)
    copy = rank % prefill.num_copies
    chosen = range(copy, prefill.num_ranks, prefill.num_copies)
    if not decode.num_heads:
        return [copy]
    return [other for other in chosen if _overlap(mine, prefill.heads_of(other))]


def consumers_of(rank: int, decode: Layout, prefill: Layout) -> list[int]:
    """The decode ranks that take KV from a prefill rank, ascending."""
    return [other for other in range(decode.num_ranks) if rank in sources_of(other, decode, prefill)]


def parts(decode_rank: int, decode: Layout, prefill_rank: int, prefill: Layout) -> tuple[RowPart, RowPart]:
    """(part of the prefill rank's rows, part of the decode rank's rows) that they exchange."""
    if not decode.num_heads:
        return RowPart(), RowPart()
    ours, theirs = prefill.heads_of(prefill_rank), decode.heads_of(decode_rank)
    common = _overlap(ours, theirs)
    return tuple(  # type: ignore[return-value]
        RowPart(common.start - heads.start, common.stop - heads.start, len(heads)) for heads in (ours, theirs)
    )


def _overlap(a: range, b: range) -> range:
    begin = max(a.start, b.start)
    return range(begin, max(begin, min(a.stop, b.stop)))
