"""The transfer threads of both sides over each transport: correct bytes, ends, no resources in use afterwards."""

from __future__ import annotations

import random
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.decode_agent import CLOSED
from moe_engine.core.kv_transfer.open import with_transfers
from moe_engine.errors import EngineDeadError
from moe_engine.processes.dist_secret import DistSecret
from moe_engine.scheduler.tiers.transfer_link import TransferLink
from tests.disaggregation.agents import SCHEMA, AgentPair, nothing_is_held
from tests.disaggregation.transport_names import each_transport
from tests.waiting import until


@pytest.mark.parametrize("transport", each_transport())
def test_bytes_arrive_at_the_places(transport: str) -> None:
    with AgentPair(transport) as pair:
        pair.prefill_rows.array[:] = np.frombuffer(random.randbytes(pair.prefill_rows.array.nbytes), np.uint8).reshape(
            pair.prefill_rows.array.shape
        )
        free = random.sample(range(2000), 2000)
        for room, length in enumerate((700, 1, 300, 900)):
            begin = random.choice([0, 0, 17])
            source, target = random.sample(range(2000), length), [free.pop() for _ in range(length)]
            halves = [
                lambda r=room, b=begin, n=length, t=target: pair.want(r, b, b + n, t),
                lambda r=room: pair.prefill.link.command("offer", r, b"d"),
            ]
            for half in random.sample(halves, 2):
                half()
            pair.send_all(room, source, pieces=random.choice([1, 4]))
            assert pair.decode.wait(room, "filled", "failed") == ("filled", room, begin + length)
            assert np.array_equal(pair.decode_rows.array[target], pair.prefill_rows.array[source])
            assert pair.prefill.wait(room, "ended") == ("ended", room, "")
            assert [report[2] for report in pair.prefill.of(room) if report[0] == "sent"][-1] == begin + length
        untouched = pair.decode_rows.array[free[:50]]
        assert not untouched.any() or len(free) < 50
        nothing_is_held(pair)


def test_a_late_half_is_answered_at_once() -> None:
    with AgentPair() as pair:
        pair.prefill.link.command("offer", 1, b"d")
        pair.prefill.link.command("end", 1, "aborted on the prefill server")
        assert pair.prefill.wait(1, "ended")[2] == "aborted on the prefill server"
        pair.want(1, 0, 10, list(range(10)))
        assert pair.decode.wait(1, "failed")[2] == "aborted on the prefill server"
        pair.want(2, 0, 10, [])  # its prompt is cached on the decode server
        until(lambda: pair.sender._rooms.get(2))
        pair.prefill.link.command("offer", 2, b"d")
        assert "cancelled" in pair.prefill.wait(2, "ended")[2]
        until(lambda: not pair.sender._rooms)
        nothing_is_held(pair)


@pytest.mark.parametrize("secrets", ["ab", "a-", "-a", "dead"])
def test_a_connection_closed_in_the_handshake_names_its_causes(secrets: str) -> None:
    """Other secrets on either side, and a proxy that accepts connections to a dead server: these look alike."""
    keys = (None, None) if secrets == "dead" else [None if c == "-" else DistSecret(c.encode() * 40) for c in secrets]
    with AgentPair(cabled=True, secrets=(keys[0], keys[1])) as pair:
        if secrets == "dead":
            with socket.create_server(("127.0.0.1", 0)) as unused:
                pair.cable.target = unused.getsockname()[1]
        pair.want(1, 0, 10, list(range(10)))
        assert pair.decode.wait(1, "filled", "failed")[2] == f"tcp://127.0.0.1:{pair.port}: {CLOSED}"
        nothing_is_held(pair)


def test_pieces_are_written_behind_the_copies_to_their_places() -> None:
    """Also for a request that ends before: its prefill server gets a message."""
    with AgentPair() as pair:
        pair.prefill_rows.array[:] = 7
        for room in (1, 2, 3):
            pair.prefill.link.command("offer", room, b"d")
        pair.want(1, 0, 10, list(range(10)), after=4)
        pair.want(2, 0, 10, list(range(10, 20)), after=5)
        pair.want(3, 0, 10, list(range(20, 30)), after=5)
        pair.decode.link.command("cancel", 3)
        assert "cancelled" in pair.prefill.wait(3, "ended")[2]
        assert not pair.prefill.of(1) and not pair.prefill.of(2)
        pair.decode_rows.stored = 4
        pair.send_all(1, list(range(10)), 1)
        assert pair.decode.wait(1, "filled", "failed") == ("filled", 1, 10)
        assert not pair.prefill.of(2)
        pair.decode.link.command("settled", -1, 5)  # the step with these copies has failed
        pair.send_all(2, list(range(10)), 1)
        assert pair.decode.wait(2, "filled", "failed") == ("filled", 2, 10)
        assert (pair.decode_rows.array[:20] == 7).all() and not pair.decode_rows.array[20:].any()
        nothing_is_held(pair)


def test_a_room_in_use_stays_with_its_request() -> None:
    with AgentPair() as pair:
        pair.want(1, 0, 10, list(range(10)))
        pair.want(1, 0, 0, [])
        pair.prefill.link.command("offer", 1, b"d")
        pair.send_all(1, list(range(10)), 1)
        assert pair.decode.wait(1, "filled", "failed") == ("filled", 1, 10)
        nothing_is_held(pair)


def test_ends_of_either_side_are_messages() -> None:
    with AgentPair() as pair:
        places = list(range(300))
        for room, end in enumerate(("prefill", "decode", "digest")):
            pair.prefill.link.command("offer", room, b"d")
            pair.want(room, 0, 300, places, b"other" if end == "digest" else b"d")
            if end == "digest":
                assert "tokenizers" in pair.decode.wait(room, "failed")[2]
                assert "tokenizers" in pair.prefill.wait(room, "ended")[2]
                continue
            pair.prefill.wait(room, "granted")
            pair.prefill.link.command("send", room, 256, places[:256], 0)
            until(lambda r=room: any(report[0] == "sent" for report in pair.prefill.of(r)))
            if end == "prefill":
                pair.prefill.link.command("end", room, "a step failed")
                assert pair.decode.wait(room, "failed")[2] == "a step failed"
            else:
                pair.decode.link.command("cancel", room)
                assert pair.decode.wait(room, "failed")[2] == "the request ended"
            pair.prefill.wait(room, "ended")
        nothing_is_held(pair)


@pytest.mark.parametrize(
    ("how", "reason"), [("killed", "its connection is closed"), ("silent", "no message for 2 s"), ("refused", "")]
)
def test_the_prefill_server_names_a_lost_decode_rank(
    how: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with the transfers that end; not one that it refuses, which connects again for each request."""
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 2.0)
    schemas = (SCHEMA, {"cache": "other"} if how == "refused" else SCHEMA)
    with AgentPair(cabled=True, schemas=schemas) as pair:
        for room in (1, 2):
            pair.want(room, 0, 10, list(range(10)))
            pair.prefill.link.command("offer", room, b"d")
        if how == "refused":
            assert "cache" in pair.decode.wait(1, "failed")[2]
            pair.kill_decode()
            until(lambda: not pair.sender._peers)
            assert "is lost" not in caplog.text
            return
        for room in (1, 2):
            pair.prefill.wait(room, "granted")
        if how == "killed":
            pair.kill_decode()
        else:
            pair.cable.stop()
        assert [pair.prefill.wait(room, "ended")[2] for room in (1, 2)] == [reason] * 2
        line = f"rank 0 of the decode server at 127.0.0.1 is lost: {reason}; transfers ended: 2"
        assert caplog.text.count(line) == caplog.text.count("is lost") == 1, caplog.text
        pair.cable.go_on()
        nothing_is_held(pair)


def test_the_core_plans_at_once_what_a_report_changes() -> None:
    """Reports are applied before the core's wait of 0.2 s."""
    woken, applied = [], []
    tier = SimpleNamespace(link=TransferLink(), exchange=lambda step: applied.append(tier.link.reports.popleft()))
    scheduler = SimpleNamespace(kv_cache=SimpleNamespace(step=3))
    check = with_transfers(lambda: None, tier, scheduler, lambda: woken.append(len(applied)))  # type: ignore[arg-type]
    tier.link.reports.append(("filled", 1, 2))
    check()
    assert applied == [("filled", 1, 2)] and woken == [1]
    tier.exchange = lambda step: None
    check()
    assert woken == [1]
    tier.link.broken = "the thread has ended"
    with pytest.raises(EngineDeadError, match="has ended"):
        check()
