"""Servers with several ranks: the parts that ranks exchange, joined reports, bytes between groups of different
sizes."""

from __future__ import annotations

import itertools
import random
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.core.kv_transfer import decode_agent, group_link
from moe_engine.core.kv_transfer.agent import AgentSetup
from moe_engine.core.kv_transfer.decode_agent import DecodeAgent
from moe_engine.core.kv_transfer.directory import Home
from moe_engine.core.kv_transfer.group_link import FollowerLink, GroupLink
from moe_engine.core.kv_transfer.joint import JointTransfers
from moe_engine.core.kv_transfer.layout import Layout, consumers_of, parts, sources_of
from moe_engine.core.kv_transfer.prefill_agent import PrefillAgent
from moe_engine.core.kv_transfer.transports.table import open_transport
from moe_engine.scheduler.tiers.transfer_link import TransferLink
from tests.disaggregation.agents import SCHEMA, Rows, Side
from tests.examples import examples
from tests.waiting import until

SIZES = (1, 2, 4, 8)


def layout(num_ranks: int, heads: int) -> Layout:
    return Layout(num_ranks, min(num_ranks, heads) if heads else 1, heads)


@pytest.mark.parametrize("heads", [0, 1, 2, 4, 8])
def test_every_head_comes_from_one_rank_that_has_it(heads: int) -> None:
    for decode, prefill in ((layout(d, heads), layout(p, heads)) for d in SIZES for p in SIZES):
        for rank in range(decode.num_ranks):
            sources = sources_of(rank, decode, prefill)
            assert all(rank in consumers_of(source, decode, prefill) for source in sources)
            if not heads:
                assert len(sources) == 1
                continue
            taken = []
            for source in sources:
                theirs, ours = parts(rank, decode, source, prefill)
                found = prefill.heads_of(source)[theirs.begin : theirs.end]
                assert list(found) == list(decode.heads_of(rank)[ours.begin : ours.end])
                taken += found
            assert sorted(taken) == list(decode.heads_of(rank))


@pytest.mark.parametrize("wrong", [(0, 1, 0), (4, 3, 0), (2, 2, 3), (1, 1, -1)])
def test_unequal_shares_are_refused(wrong: tuple[int, int, int]) -> None:
    if wrong[2] >= 0:
        with pytest.raises(ValueError, match="equal shares"):
            Layout(*wrong)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_tensors_of_different_widths_are_cut_alike(ranks: tuple[int, int]) -> None:
    """Keys and values of MiMo-V2-Flash: layers with 4 and with 8 KV heads, 6 bytes of a key, 4 of a value. MiniMax-M3's
    index keys are after those of the first layer, whole on every rank."""
    tensors = [np.random.randint(0, 256, (5, heads, width), np.uint8) for heads in (4, 8, 8) for width in (6, 4)]
    index = np.random.randint(0, 256, (5, 3), np.uint8)

    def held(rank: int, count: int) -> Rows:
        own = [tensor.reshape(5, count, -1)[:, rank] for tensor in tensors]
        own.insert(2, index)
        rows = Rows(5, 1, 1, sum(part.shape[1] for part in own))
        rows.row_widths, rows.undivided = [part.shape[1] for part in own], {2}
        rows.write(list(range(5)), np.concatenate(own, 1))
        return rows

    places, (decode, prefill) = [4, 0, 2], (layout(count, 8) for count in ranks)
    for rank in range(ranks[0]):
        want, got = held(rank, ranks[0]), held(rank, ranks[0])
        got.array[:] = 0
        for source in sources_of(rank, decode, prefill):
            theirs, ours = parts(rank, decode, source, prefill)
            sent = np.zeros(3 * ours.bytes_of(got), np.uint8)
            theirs.read_into(held(source, ranks[1]), places, sent)
            ours.write(got, places, sent)
        assert np.array_equal(got.read(places), want.read(places)) and not got.read([1, 3]).any()


class Rank:
    """A rank of a prefill server: sends the reports of its thread, in any order that the protocol allows."""

    def __init__(self, limit: int) -> None:
        self.limit, self.state, self.sent, self.staged, self.all_staged = limit, "meeting", 0, 0, False

    def possible(self) -> list[str]:
        if self.state == "meeting":
            return ["granted", "fail"]
        if self.state == "sending":
            names = ["fail"]
            if self.sent < self.staged:
                names.append("sent")
            if self.all_staged and self.sent == self.staged:
                names.append("end")
            return names
        return []


@settings(max_examples=examples(60))
@given(st.data(), st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from([0, 2, 4]), st.booleans())
def test_reports_of_a_prefill_group_are_joined(data: Any, p: int, d: int, heads: int, fails: bool) -> None:
    """One end for the scheduler, after all other reports; places are free only after every rank has read them."""
    mine, peers, limit = layout(p, heads), layout(d, heads), 8
    joint = JointTransfers(mine, sends=True)
    ranks = {rank: Rank(limit) for rank in range(p)}
    used = {rank for rank in ranks if consumers_of(rank, peers, mine)}
    seen: list[tuple[Any, ...]] = []
    staged = 0

    def deliver(forwards: list[tuple[int, tuple[Any, ...]]]) -> None:
        for rank, (name, _, *values) in forwards:
            other = ranks[rank]
            if name == "send":
                other.staged = values[0]
            elif name == "done":
                other.all_staged = True
            elif name == "drop":
                assert rank not in used
                other.state = "dropped"
            elif name == "end" and other.state in ("meeting", "sending"):
                other.state = "ended"
                late.append((rank, ("ended", 1, values[0])))

    late: list[tuple[int, tuple[Any, ...]]] = []
    deliver(joint.command(("offer", 1, b"d")))
    for _ in range(400):
        choices = [
            (rank, name)
            for rank, other in ranks.items()
            for name in other.possible()
            if name != "granted" or rank in used
        ]
        choices = [choice for choice in choices if choice[1] != "fail" or fails]
        granted = any(report[0] == "granted" for report in seen)
        if granted and staged < limit:
            choices.append((-1, "stage"))
        if late:
            choices.append((-1, "late"))
        if not choices:
            break
        rank, name = data.draw(st.sampled_from(choices))
        if name == "stage":
            staged += 4
            deliver(joint.command(("send", 1, staged, [], 0)))
            if staged == limit:
                deliver(joint.command(("done", 1)))
            continue
        if name == "late":
            rank, report = late.pop(0)
        else:
            other = ranks[rank]
            if name == "granted":
                other.state, report = "sending", ("granted", 1, 0, limit, peers.values)
            elif name == "sent":
                other.sent += 4
                report = ("sent", 1, other.sent)
            else:
                other.state, report = "ended", ("ended", 1, "" if name == "end" else "made up")
        reports, forwards = joint.report(rank, report)
        for found in reports:
            if found[0] == "sent":
                assert all(ranks[other].sent >= found[2] for other in used)
            if found[0] == "ended":
                assert (all(ranks[other].state in ("ended", "dropped") for other in used) and not late) or not fails
        seen += reports
        deliver(forwards)
    assert [report[0] for report in seen].count("ended") == 1 and seen[-1][0] == "ended"
    assert joint.num_transfers == 0
    if not fails:
        assert seen[-1][2] == "" and ("sent", 1, limit) in seen


def bootstrap(server: Server) -> PrefillAgent:
    return server.agents[0]


class Server:
    """The threads of all ranks of one attention group, and their rows; `side` is the group's scheduler. `groups`:
    number of groups of a prefill server, and the group's index, of which the first owns `port`."""

    def __init__(
        self,
        stack: ExitStack,
        made: Layout,
        sends: bool,
        values: np.ndarray,
        tmp: str,
        port: int = 0,
        groups: tuple[int, int] = (1, 0),
    ) -> None:
        self.side, self.port = Side(), port
        self.agents: list[Any] = []
        num_places, tensors, _, head_bytes = values.shape
        heads = len(made.heads_of(0)) if made.num_heads else 1
        self.rows = [Rows(num_places, tensors, heads, head_bytes) for _ in range(made.num_ranks)]
        for rank, rows in enumerate(self.rows):
            rows.array[:] = values[:, :, made.heads_of(rank)] if made.num_heads else values
        links, wakes, threads = [self.side.link], [lambda: None], []
        if made.num_ranks > 1:
            Path(tmp).mkdir(exist_ok=True)
            group = GroupLink(self.side.link, made, sends, f"ipc://{tmp}/{'p' if sends else 'd'}", None, lambda: None)
            followers = [FollowerLink(rank, group.address, None) for rank in range(1, made.num_ranks)]
            links = [group.own, *(follower.own for follower in followers)]
            wakes = [group.wake, *(follower.wake for follower in followers)]
            threads = [group, *followers]
        for rank, (link, wake) in enumerate(zip(links, wakes)):
            tcp = partial(open_transport, "tcp", "127.0.0.1")
            setup = AgentSetup(link, self.rows[rank], SCHEMA, None, wake, tcp, made)
            if sends:
                home = Home(*groups, rank, f"tcp://127.0.0.1:{self.port}" if self.port else "")
                agent = PrefillAgent(setup, "tcp://127.0.0.1:*", home)
                self.port = self.port or int(agent.address.rpartition(":")[2])
            else:
                agent = DecodeAgent(setup, self.port, rank)
            self.agents.append(agent)
            stack.callback(agent.close)
            if rank:
                threads[rank].start()
        for thread in threads:
            stack.callback(thread.close)


@pytest.mark.parametrize(
    ("prefill", "decode", "heads"), [(1, 1, 2), (2, 1, 0), (1, 2, 0), (2, 2, 4), (4, 2, 4), (1, 4, 2), (4, 2, 2)]
)
def test_bytes_between_groups_of_different_sizes(prefill: int, decode: int, heads: int, tmp_path: Any) -> None:
    values = np.frombuffer(random.randbytes(600 * 2 * max(1, heads) * 8), np.uint8).reshape(600, 2, max(1, heads), 8)
    with ExitStack() as stack:
        sender = Server(stack, layout(prefill, heads), True, values, str(tmp_path))
        receiver = Server(stack, layout(decode, heads), False, values * 0, str(tmp_path), sender.port)
        for room in range(3):
            source, target = random.sample(range(600), 300), random.sample(range(600), 300)
            for rows in receiver.rows:
                rows.array[:] = 0
            receiver.side.link.command("want", room, "127.0.0.1", sender.port, b"d", 0, 300, 0, target)
            sender.side.link.command("offer", room, b"d")
            sender.side.wait(room, "granted")
            for begin, end in ((0, 256), (256, 300)):
                sender.side.link.command("send", room, end, source[begin:end], 0)
            sender.side.link.command("done", room)
            assert receiver.side.wait(room, "filled", "failed") == ("filled", room, 300)
            assert sender.side.wait(room, "ended")[2] == ""
            whole = Layout() if not heads else layout(decode, heads)
            for rank, rows in enumerate(receiver.rows):
                expected = values[source][:, :, whole.heads_of(rank)] if heads else values[source]
                assert np.array_equal(rows.array[target], expected)
        sender.side.link.command("offer", 9, b"d")
        receiver.side.link.command("want", 9, "127.0.0.1", sender.port, b"d", 0, 300, 0, list(range(300)))
        sender.side.wait(9, "granted")
        sender.side.link.command("end", 9, "aborted")
        assert "aborted" in receiver.side.wait(9, "failed")[2]
        reason = sender.side.wait(9, "ended")[2]
        assert "aborted" in reason or "cancelled" in reason  # its own end, or the answer of the other side


@pytest.mark.parametrize(("ranks", "heads"), [(2, 2), (2, 1), (4, 2)])
def test_a_rank_receives_the_rows_of_the_rank_with_its_number(ranks: int, heads: int, tmp_path: Any) -> None:
    """Between groups of one size, also where ranks have the same heads: states are divided otherwise than heads."""
    values = np.zeros((60, 2, heads, 8), np.uint8)
    with ExitStack() as stack:
        sender = Server(stack, layout(ranks, heads), True, values, str(tmp_path))
        receiver = Server(stack, layout(ranks, heads), False, values, str(tmp_path), sender.port)
        for rows in sender.rows:
            rows.array[:] = np.frombuffer(random.randbytes(rows.array.nbytes), np.uint8).reshape(rows.array.shape)
        source, target = random.sample(range(60), 40), random.sample(range(60), 40)
        asked = Asked(1, sender, receiver, target)
        assert asked.transfer(source) == ("filled", 1, 40)
        for ours, theirs in zip(receiver.rows, sender.rows):
            assert np.array_equal(ours.array[target], theirs.array[source])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_waits_for_all_groups_of_a_prefill_server(ranks: int, tmp_path: Any) -> None:
    """Whichever group has computed its prompt."""
    values, places = np.ones((40, 2, 2, 8), np.uint8), list(range(40))
    made = layout(ranks, 2)
    with ExitStack() as stack:
        first, second = (str(tmp_path / name) for name in ("first", "second"))
        sender = Server(stack, made, True, values, first, groups=(2, 0))
        receiver = Server(stack, layout(1, 2), False, values * 0, "", sender.port)
        asked = Asked(0, sender, receiver, places)
        until(lambda: bootstrap(sender)._peers)
        assert not receiver.side.of(0) and not sender.side.of(0)
        Server(stack, made, True, values, second, sender.port, groups=(2, 1))
        assert asked.transfer(places) == ("filled", 0, 40)
        assert (receiver.rows[0].array == 1).all()


class Asked:
    """A request with both halves."""

    def __init__(self, room: int, sender: Server, receiver: Server, places: list[int]) -> None:
        self.room, self.sender, self.receiver, self.limit = room, sender, receiver, len(places)
        sender.side.link.command("offer", room, b"d")
        receiver.side.link.command("want", room, "127.0.0.1", sender.port, b"d", 0, self.limit, 0, places)

    def _received(self) -> tuple[Any, ...] | None:
        return next((report for report in self.receiver.side.of(self.room)), None)

    def transfer(self, places: list[int]) -> tuple[Any, ...]:
        """The decode server's report, once the places were sent or it has failed before."""
        sent = self.sender.side
        until(lambda: self._received() or any(report[0] == "granted" for report in sent.of(self.room)))
        if self._received() is None:
            sent.link.command("send", self.room, self.limit, places, 0)
            sent.link.command("done", self.room)
        return until(self._received)  # type: ignore[return-value]


def test_prefill_ranks_beyond_the_limit_of_open_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their transfers fail by name, those of other ranks go on, and a lost rank makes room."""
    monkeypatch.setattr(decode_agent, "max_peers", lambda: 2)
    values, places, rooms = np.ones((40, 2, 2, 8), np.uint8), list(range(40)), itertools.count()
    with ExitStack() as stack, ExitStack() as lost:
        one = Server(lost, layout(1, 2), True, values, "")
        two = Server(stack, layout(2, 2), True, values, str(tmp_path))
        third = Server(stack, layout(1, 2), True, values, "")
        until(lambda: bootstrap(two)._directory.groups())
        receiver = Server(stack, layout(1, 2), False, values * 0, "", one.port)

        def ask(sender: Server) -> tuple[Any, ...]:
            return Asked(next(rooms), sender, receiver, places).transfer(places)

        assert ask(one) == ("filled", 0, 40)
        for sender in (two, third):  # its second rank, its first
            _, _, reason = ask(sender)
            assert "connections to 2 prefill ranks are the most for ulimit -n" in reason
        assert ask(one) == ("filled", 3, 40)
        lost.close()
        until(lambda: ask(third)[0] == "filled", "sockets of a lost rank are free again")
        assert (receiver.rows[0].array == 1).all()


def test_a_killed_follower_is_named_after_the_failure_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The detector says which signal killed it: the link must not fail before."""
    link = TransferLink()
    group = GroupLink(link, layout(2, 0), True, f"ipc://{tmp_path}/link", None, lambda: None)
    follower = FollowerLink(1, group.address, None)
    follower.start()
    until(lambda: not group._waiting)
    follower.close()

    def is_lost() -> bool:
        link.command("drop", 1)
        return bool(group._lost)

    until(is_lost)
    assert not link.broken
    monkeypatch.setattr(group_link, "LOST_SECONDS", 0.0)
    until(lambda: link.broken)
    assert link.broken == "KV transfers: the connection to rank 1 of the group is lost"
    group.close()
