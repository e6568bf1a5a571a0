"""Identity of the code that a node runs, for comparison with other nodes: ranks of other code compute other tokens."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
SUFFIXES = (".py", ".cpp", ".h", ".toml")
LIBRARIES = ("torch", "triton")
"""Libraries whose versions must be equal: they compute."""


@cache
def code_identity(package: Path = PACKAGE) -> dict[str, str]:
    """The versions of `LIBRARIES`, and a digest of the package's files: checkouts of one version differ. A tenth of a
    second."""
    digest = hashlib.blake2b(digest_size=6)
    for folder, folders, files in os.walk(package, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith(SUFFIXES):
                path = Path(folder, name)
                digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    found = {name: item.version for name in LIBRARIES for item in metadata.distributions(name=name)}
    return {"moe-engine's code": digest.hexdigest(), **found}
