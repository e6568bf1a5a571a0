"""Shared secret of a server's nodes (--dist-secret-file), from a file or the environment."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from moe_engine.errors import ConfigError

SECRET_VARIABLE = "MOE_ENGINE_DIST_SECRET"
LEAST_CHARACTERS = 16
_MAKE_ONE = "`openssl rand -hex 32` generates one"


class DistSecret:
    """Equal on all nodes of a server. Its repr hides the value; it is sent only to child processes."""

    __slots__ = ("value",)

    def __init__(self, value: bytes) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "DistSecret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistSecret) and hmac.compare_digest(self.value, other.value)

    def __hash__(self) -> int:
        return hash(DistSecret)


def find_secret(environ: Mapping[str, str], path: str | None) -> DistSecret | None:
    """The secret of ``--dist-secret-file``, else of the environment, else None.

    Raises:
        ConfigError: the file cannot be read, or the secret is too short.
    """
    if path is not None:
        origin = f"--dist-secret-file {path}"
        try:
            text = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"{origin}: cannot be read: {error.strerror}") from None
    elif SECRET_VARIABLE in environ:
        origin, text = SECRET_VARIABLE, environ[SECRET_VARIABLE].strip().encode(errors="surrogateescape")
    else:
        return None
    if len(text) < LEAST_CHARACTERS:
        raise ConfigError(f"{origin}: a secret needs at least {LEAST_CHARACTERS} characters; {_MAKE_ONE}")
    return DistSecret(text)


def open_to_others(path: str) -> str | None:
    """A warning if other users of the machine may read the file, else None."""
    mode = Path(path).stat().st_mode & 0o777
    if not mode & 0o077:
        return None
    return f"--dist-secret-file {path} can be read by other users (mode {mode:o}): chmod 600 {path}"
