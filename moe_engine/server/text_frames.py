"""Frames between the server and a large-body process, over a socket pair: kind, length, payload."""

from __future__ import annotations

import enum
import struct

HEADER = struct.Struct(">BI")
FRAME_BYTES = 2**18
"""Approximate payload size, small enough to keep the reader responsive."""


class Kind(enum.IntEnum):
    """To the process: SPEC once, then for each body JOB with the endpoint's name, BODY parts, BODY_END.

    Back, for each JOB: READY; then either PROBLEM, or HEAD (a `Plan`) with its PROMPTS, or PARTs of the response; END.
    PROBLEM may also replace all remaining frames. Payloads other than BODY, JOB and PART are pickles.
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
