"""States of a transfer of KV from a prefill to a decode server: the whole protocol, without sockets, memory or clocks.

A transfer moves tokens [begin, limit) of one prompt in order. Messages of a transfer, as tuples of name and values:

    decode -> prefill   want(digest, begin, limit)   got(end)   cancel()
    prefill -> decode   data(begin, end)   done(end)   nack(reason)

| side | state | left by |
|---|---|---|
| decode | RECEIVING | done, nack, cancel by the scheduler, loss of the peer |
| decode | FILLED, FAILED | final: the places belong to the scheduler again |
| prefill | MEETING: request or want is missing | the other half, end of the request, cancel, deadline, lost peer |
| prefill | SENDING | last got, end of the request, cancel, loss of the peer |
| prefill | ENDED | final: the transfer holds no places |

Every end on one side is sent to the other as a message; only a lost connection ends both sides without a message. Bytes
are used only in FILLED, which needs every token of [begin, end) in order. `tests/scheduler/test_transfer_model.py`
explores every interleaving of a small instance.
"""

from __future__ import annotations

import enum
from typing import Any

Message = tuple[Any, ...]
PROMPT_BYTES = 16
"""Length of the end of a digest, behind the name of the weights."""
WINDOW = 4
"""Max pieces sent without an acknowledgement: bounds the data in the sockets."""


class State(enum.Enum):
    MEETING = "meeting"
    SENDING = "sending"
    ENDED = "ended"
    RECEIVING = "receiving"
    FILLED = "filled"
    FAILED = "failed"


class Receiving:
    """The decode side: waits for tokens [begin, limit) whose places it owns."""

    def __init__(self, digest: bytes, begin: int, limit: int) -> None:
        self.state = State.RECEIVING
        self.digest = digest
        self.begin, self.end, self.limit = begin, begin, limit
        self.reason = ""

    def open(self) -> list[Message]:
        return [("want", self.digest, self.begin, self.limit)]

    def accepts(self, begin: int, end: int) -> bool:
        """Whether bytes of these tokens may be written to their places now."""
        return self.state is State.RECEIVING and begin == self.end and begin < end <= self.limit

    def handle(self, message: Message) -> list[Message]:
        """Handles a message of the sender; the bytes of ``data`` were written if `accepts`. Returns the answers."""
        if self.state is not State.RECEIVING:
            return []  # sent before this side's cancel arrived
        name = message[0]
        if name == "data":
            begin, end = message[1:]
            if not self.accepts(begin, end):
                return self.fail(f"tokens {begin} to {end} arrived, and {self.end} were next")
            self.end = end
            return [("got", end)]
        if name == "done":
            if message[1] != self.end:
                return self.fail(f"the sender ended at token {message[1]}, and {self.end} have arrived")
            self.state = State.FILLED
            return []
        self._fail(str(message[1]) if name == "nack" else f"unknown message {name}")
        return []

    def fail(self, reason: str) -> list[Message]:
        """Ends the transfer from this side: wrong bytes, an abort, the deadline."""
        if self.state is not State.RECEIVING:
            return []
        self._fail(reason)
        return [("cancel",)]

    def lost(self, reason: str) -> None:
        """Handles the end of the connection: no further message will arrive."""
        if self.state is State.RECEIVING:
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        self.state, self.reason = State.FAILED, reason


class Sending:
    """The prefill side: sends the KV that its request computes to the peer that asked for it."""

    def __init__(self) -> None:
        self.state = State.MEETING
        self.digest: bytes | None = None
        """Digest of the request's tokens; None until the request has arrived."""
        self.wanted: tuple[bytes, int, int] | None = None
        self.sent = self.limit = 0
        self._unacked: list[int] = []
        self._done = False
        self.reason = ""

    @property
    def may_send(self) -> bool:
        return self.state is State.SENDING and not self._done and len(self._unacked) < WINDOW

    def offer(self, digest: bytes) -> list[Message]:
        """Handles the arrival of the request."""
        self.digest = digest
        return self._meet()

    def handle(self, message: Message) -> list[Message]:
        """Handles a message of the receiver. Returns the answers."""
        name = message[0]
        if self.state is State.ENDED:
            return [("nack", self.reason or "the transfer has ended")] if name == "want" else []
        if name == "want" and self.wanted is None:
            self.wanted = message[1:]  # type: ignore[assignment]
            return self._meet()
        if name == "got" and self._unacked and self._unacked[0] == message[1]:
            del self._unacked[0]
            if self._done and not self._unacked:
                self._end("")
            return []
        self._end("cancelled by the decode server" if name == "cancel" else f"unexpected message {name}")
        return []

    def data(self, end: int) -> list[Message]:
        """The next tokens, up to `end`; `may_send` must hold."""
        assert self.may_send and self.sent < end <= self.limit
        begin, self.sent = self.sent, end
        self._unacked.append(end)
        return [("data", begin, end)]

    def done(self) -> list[Message]:
        """All tokens were sent."""
        if self.state is not State.SENDING or self._done:
            return []
        self._done = True
        if not self._unacked:
            self._end("")
        return [("done", self.sent)]

    def fail(self, reason: str) -> list[Message]:
        """Ends the transfer from this side: the request failed or was aborted, or the deadline has passed."""
        if self.state is State.ENDED:
            return []
        answers: list[Message] = [("nack", reason)] if self.wanted is not None and not self._done else []
        self._end(reason)
        return answers

    def lost(self, reason: str) -> None:
        """Handles the end of the connection to the receiver."""
        if self.state is State.SENDING or self.wanted is not None:
            self._end(reason)

    def _meet(self) -> list[Message]:
        if self.state is not State.MEETING or self.digest is None or self.wanted is None:
            return []  # the peer may be lost already
        digest, self.sent, self.limit = self.wanted
        if digest != self.digest:
            return self.fail(_difference(self.digest, digest))
        self.state = State.SENDING
        return []

    def _end(self, reason: str) -> None:
        self.state, self.reason = State.ENDED, reason
        self._unacked = []


def _difference(ours: bytes, theirs: bytes) -> str:
    """Between the digests of a prefill and a decode server, in words."""
    names = [digest[:-PROMPT_BYTES].decode(errors="replace") or "those of its start" for digest in (ours, theirs)]
    if names[0] != names[1]:
        return f"weights: prefill server {names[0]}, decode server {names[1]}"
    return (
        "the prompts of the two servers differ: their tokenizers, chat templates or files of the LoRA adapter are not "
        "the same"
    )
