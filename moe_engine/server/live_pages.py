"""Pages that show the running engine: `GET /` and `GET /doctor` in a browser, and `GET /experts`. Imports no torch."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
"""Content-Security-Policy of the pages: they load only this server's data."""
HEADERS = {"content-security-policy": POLICY, "cache-control": "no-cache"}


def wants_page(accept: str) -> bool:
    """Whether a request accepts HTML, as those of browsers do."""
    return "text/html" in accept


@lru_cache
def page(name: str) -> str:
    """A whole HTML document: status_page, experts_live or doctor_page, each with the rules of page_style.css."""
    folder = resources.files(__package__)
    text, style = (folder.joinpath(file).read_text(encoding="utf-8") for file in (f"{name}.html", "page_style.css"))
    return text.replace("  /* page_style.css */\n", style)
