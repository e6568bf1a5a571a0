"""First uses of a type by several threads at once, in a process that may crash."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

TWO_THREADS = """
    import sys, threading
    import msgspec
    from moe_engine.server.http_io import decode_body, decode_body_and_rest
    from moe_engine.validation import checked

    gathering, used = threading.Event(), threading.Event()

    def gathered_slowly():
        gathering.set()
        used.wait(0.5)  # the first thread gathers the fields of Inner, and those of Outer after it
        return int

    class Inner(msgspec.Struct):
        count: "gathered_slowly()"

    class Outer(msgspec.Struct):
        inner: Inner
        other: Inner | None = None

    body = b'{"inner": {"count": 1}, "other": {"count": 2}}'
    uses = {
        "checked": lambda: checked(msgspec.json.decode(body), Outer),
        "decode_body": lambda: decode_body(body, Outer),
        "decode_body_and_rest": lambda: decode_body_and_rest(body, Outer)[0],
    }
    use = uses[sys.argv[1]]
    found = []
    first = threading.Thread(target=lambda: found.append(use()))
    first.start()
    gathering.wait()
    found.append(use())
    used.set()
    first.join()
    assert found == [Outer(Inner(1), Inner(2))] * 2, found
"""


@pytest.mark.parametrize("use", ["checked", "decode_body", "decode_body_and_rest"])
def test_threads_may_use_a_type_while_its_fields_are_gathered(use: str) -> None:
    code = textwrap.dedent(TWO_THREADS)
    done = subprocess.run([sys.executable, "-c", code, use], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
