"""The frames between the server and a process that works on large bodies: kind, length, payload. Over a socket pair."""

from __future__ import annotations

import enum
import struct

HEADER = struct.Struct(">BI")
FRAME_BYTES = 2**18
"""About the size of a payload: a reader is never busy with one for long."""


class Kind(enum.IntEnum):
    """To the process: SPEC once, then for each body JOB with the endpoint's name, BODY parts, BODY_END.

    Back, for each JOB: READY; then either PROBLEM, or HEAD (a `Plan`) with its PROMPTS, or PARTs of the answer; END.
    PROBLEM may also take the place of anything that was still to come. Payloads but BODY, JOB and PART are pickles.
    """

    SPEC = 0
    JOB = 1
    BODY = 2
    BODY_END = 3
    READY = 4
    PROBLEM = 5
    HEAD = 6
    PROMPTS = 7
    PART = 8
    END = 9


def frame(kind: Kind, payload: bytes | bytearray | memoryview = b"") -> bytes:
    return HEADER.pack(kind, len(payload)) + payload
