"""Monitored threads: an exception that ends a thread is logged and reported to the thread's owner.

Python only prints a thread's exception; the thread's work, such as heartbeats, then stops silently. So the engine
starts all threads here (enforced by tests/test_architecture.py), each with an owner to report to.
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
        on_failure: called from the thread, at most once, when `run` raises; with a sentence: the thread and the error.
            It must make the failure visible to clients, for instance by failing the rank group.
    """

    def watched() -> None:
        try:
            run()
        except BaseException as error:  # including SystemExit: the thread must not end unnoticed
            message = f'the thread "{name}" failed: {type(error).__name__}: {error}'
            logger.critical("%s\n%s", message, "".join(traceback.format_exception(error)))
            on_failure(message)

    thread = threading.Thread(target=watched, name=name, daemon=True)
    thread.start()
    return thread
