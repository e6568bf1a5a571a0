"""Parsed files of the source, for the tests that read all of them; these run in one process (`forked_run`)."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SHARED = "source trees"


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))
