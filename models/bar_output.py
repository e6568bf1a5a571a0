"""Standard error for progress bars. A full disk below it, or a closed pipe, does not end the work that a bar shows."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


class BarOutput:
    """The `file` of a tqdm bar."""

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)
