"""Live page of `GET /experts`: a heat map of the experts that polls ``experts/data``. Imports no torch."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
"""Content-Security-Policy of the page: it loads only its own data."""


@lru_cache
def live_page() -> str:
    """The whole HTML document."""
    return resources.files(__package__).joinpath("experts_live.html").read_text(encoding="utf-8")
