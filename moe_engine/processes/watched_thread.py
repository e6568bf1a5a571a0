"""Threads whose failure is reported: a thread that ends by an exception is logged and named to its owner.

Python prints the exception of a thread and goes on. The work of such a thread, such as heartbeats, then stops in
silence. So the engine starts its threads here (tests/test_architecture.py holds that), and each names an owner.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable

logger = logging.getLogger("moe_engine")


def start_watched(name: str, run: Callable[[], None], on_failure: Callable[[str], None]) -> threading.Thread:
    """Starts a daemon thread.

    Args:
        on_failure: called from the thread, at most once, when `run` raises; with a sentence that names the thread and
            the error. It must make the failure visible to clients, for instance by a verdict on the rank group.
    """

    def watched() -> None:
        try:
            run()
        except BaseException as error:  # SystemExit, too: the thread must not end unnoticed
            message = f'the thread "{name}" failed: {type(error).__name__}: {error}'
            logger.critical("%s\n%s", message, "".join(traceback.format_exception(error)))
            on_failure(message)

    thread = threading.Thread(target=watched, name=name, daemon=True)
    thread.start()
    return thread
