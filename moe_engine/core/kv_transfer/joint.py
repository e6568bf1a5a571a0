"""Combines the transfers of an attention group's ranks into one transfer, which the leader reports to the scheduler.

Without sockets and clocks. The scheduler gives a command once and gets each report once; every rank of the group moves
its own part of the KV. A part that fails ends the others; a transfer is over when all of its parts are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_engine.core.kv_transfer.layout import Layout, consumers_of
from moe_engine.scheduler.tiers.transfer_link import Command

Forward = tuple[int, Command]
"""(rank, command)."""


@dataclass
class Transfer:
    """
    Args:
        ranks: ranks that have a part. On a prefill server: all, until the first grant names the decode server's ranks.
    """

    ranks: set[int]
    over: dict[int, str] = field(default_factory=dict)
    """Rank -> reason, empty for a part that is complete."""
    granted: dict[int, tuple[int, int]] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    filled: dict[int, int] = field(default_factory=dict)
    reported_sent: int = -1
    is_granted: bool = False
    reason: str = ""

    @property
    def is_over(self) -> bool:
        return self.ranks <= self.over.keys()


class JointTransfers:
    """
    Args:
        layout: the group's ranks.
        sends: of a prefill server.
    """

    def __init__(self, layout: Layout, sends: bool) -> None:
        self._layout, self._sends = layout, sends
        self._all = set(range(layout.num_ranks))
        self._transfers: dict[int, Transfer] = {}

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    def command(self, command: Command) -> list[Forward]:
        """A command of the scheduler."""
        name, room, *values = command
        begins = name == "offer" if self._sends else name == "want" and bool(values[-1])
        if begins:
            self._transfers[room] = Transfer(set(self._all))
        transfer = self._transfers.get(room)
        ranks = self._all if transfer is None else transfer.ranks
        return [(rank, command) for rank in sorted(ranks)]

    def report(self, rank: int, report: Command) -> tuple[list[Command], list[Forward]]:
        """A report of a rank. Returns (reports for the scheduler, commands for ranks)."""
        name, room, *values = report
        transfer = self._transfers.get(room)
        if transfer is None or rank not in transfer.ranks or rank in transfer.over:
            return [], []
        if name == "granted":
            return self._granted(rank, room, transfer, *values)
        if name == "sent":
            transfer.sent[rank] = values[0]
            return self._sent(room, transfer), []
        reason = "" if name == "filled" else values[0]
        if name == "filled":
            transfer.filled[rank] = values[0]
        return self._over(rank, room, transfer, reason)

    def _granted(
        self, rank: int, room: int, transfer: Transfer, begin: int, limit: int, peers: list[int]
    ) -> tuple[list[Command], list[Forward]]:
        forwards: list[Forward] = []
        if not transfer.granted:
            used = {other for other in self._all if consumers_of(other, Layout(*peers), self._layout)}
            forwards = [(other, ("drop", room)) for other in sorted(self._all - used)]
            transfer.ranks &= used
        transfer.granted[rank] = begin, limit
        if len(set(transfer.granted.values())) > 1:
            return [], [*forwards, *self._end(room, transfer, "the ranks of the decode server want different tokens")]
        reports: list[Command] = []
        if transfer.ranks <= transfer.granted.keys() and not transfer.is_granted and not transfer.reason:
            transfer.is_granted = True
            reports.append(("granted", room, begin, limit, peers))
        more, further = self._finish(room, transfer)
        return [*reports, *more], [*forwards, *further]

    def _sent(self, room: int, transfer: Transfer) -> list[Command]:
        if not transfer.ranks <= transfer.sent.keys():
            return []
        end = min(transfer.sent[rank] for rank in transfer.ranks)
        if end <= transfer.reported_sent:
            return []
        transfer.reported_sent = end
        return [("sent", room, end)]

    def _over(self, rank: int, room: int, transfer: Transfer, reason: str) -> tuple[list[Command], list[Forward]]:
        transfer.over[rank] = reason
        forwards = self._end(room, transfer, reason) if reason and not transfer.reason else []
        reports, more = self._finish(room, transfer)
        return reports, [*forwards, *more]

    def _end(self, room: int, transfer: Transfer, reason: str) -> list[Forward]:
        """Ends the parts that are not over."""
        transfer.reason = reason
        command: Command = ("end", room, reason) if self._sends else ("cancel", room)
        return [(rank, command) for rank in sorted(transfer.ranks - transfer.over.keys())]

    def _finish(self, room: int, transfer: Transfer) -> tuple[list[Command], list[Forward]]:
        if not transfer.is_over:
            return [], []
        del self._transfers[room]
        if self._sends:
            return [("ended", room, transfer.reason)], []
        if transfer.reason:
            return [("failed", room, transfer.reason)], []
        return [("filled", room, min(transfer.filled.values()))], []
