"""Frames that arrive on a socket: decoded, or dropped without ending the loop that reads them."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.core import messages
from moe_engine.processes import frames
from moe_engine.processes.frames import FrameReader

CALL = messages.encode(messages.Call(id=7, method="flush_cache"))


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """(sending socket, receiving socket)."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    reading, sending = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    address = f"inproc://frames-{random.getrandbits(64)}"
    reading.bind(address)
    sending.connect(address)
    yield sending, reading
    sending.close(0)
    reading.close(0)


@given(st.lists(st.one_of(st.none(), st.lists(st.binary(max_size=40), min_size=1, max_size=4)), max_size=40))
@settings(max_examples=60)
def test_valid_messages_pass_among_arbitrary_frames(script: list[list[bytes] | None]) -> None:
    """None in the script is a valid message."""
    reader: FrameReader[messages.ToCore] = FrameReader("test", messages.decode_to_core)
    right = 0
    for item in script:
        message = reader.take([CALL] if item is None else item)
        if item is None:
            assert message == messages.Call(id=7, method="flush_cache")
            right += 1
        elif len(item) != 1:
            assert message is None
        else:  # random bytes that can be decoded are a message
            assert message is None or isinstance(message, msgspec.Struct)
    assert right == script.count(None)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 20000 + b"\x90",
        b"\x82\xa4kind\xa3add\xa3rid\xa2\xff\xfe",
        CALL[:-1],
        CALL + b"\x00",
        b"\x81\xa4kind\xa7unknown",
    ],
    ids=["empty", "invalid code", "length bomb", "deep", "not UTF-8", "cut", "trailing byte", "unknown kind"],
)
def test_no_frame_raises(frame: bytes) -> None:
    reader = FrameReader("test", messages.decode_to_core)
    assert reader.take([frame]) is None and reader.num_dropped == 1
    assert reader.take([CALL]) is not None


def test_drain_continues_after_drops_and_is_bounded(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sending, reading = pair
    reader = FrameReader("test", messages.decode_to_core)
    for parts in ([CALL], [b"\xc1"], [CALL, CALL], [b"", b"", b""], [CALL]):
        sending.send_multipart(parts)
    assert reading.poll(60_000)
    assert [message.id for message in reader.drain(reading) if isinstance(message, messages.Call)] == [7, 7]
    assert reader.num_dropped == 3
    monkeypatch.setattr(frames, "MAX_DRAIN", 10)
    for _ in range(25):
        sending.send(b"\xc1")
    sending.send(CALL)
    turns = 0
    while not list(reader.drain(reading)):
        turns += 1
    assert turns == 2 and reader.num_dropped == 28


def test_warnings_are_rate_limited_and_contain_the_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("moe_engine")
    monkeypatch.setattr(logger, "propagate", True)  # as set by other tests
    monkeypatch.setattr(logger, "handlers", [])
    now = 0.0
    reader = FrameReader("the reader of this test", messages.decode_to_core, lambda: now)

    def warnings() -> list[str]:
        """Warnings without those of readers of other tests."""
        return [text for text in caplog.messages if text.startswith("the reader of this test")]

    with caplog.at_level(logging.WARNING, "moe_engine"):
        for _ in range(1000):
            reader.take([b"\xc1"])
        (only,) = warnings()
        assert "dropped a message: 1 bytes" in only
        now = frames.WARNING_SECONDS
        reader.drop("an answer of rank 99, which does not exist")
    _, second = warnings()
    assert "rank 99, which does not exist (1001 dropped so far)" in second
