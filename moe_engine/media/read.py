"""The encoded bytes of an image: a data address, base64, a file under the allowed folder, or an address."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from moe_engine.media.addresses import MediaError, fetch
from moe_engine.media.settings import MediaSettings

JPEG_IN_BASE64 = "/9j/"
"""The first characters of a JPEG in base64, which could look like a path."""
_NOT_IMAGES = re.compile(r"data:(video|audio)/", re.IGNORECASE)
SHOWN = 80


def read_media(source: str, settings: MediaSettings) -> bytes:
    """Blocking. Raises MediaError."""
    if kind := _NOT_IMAGES.match(source):
        raise MediaError(f"{kind[1].lower()} input is not supported; send images")
    if source[:5].lower() == "data:":
        return _limited(_of_data_address(source, settings), settings)
    if source[:8].lower().startswith(("http://", "https://")):
        return fetch(source, settings)
    if source[:7].lower() == "file://":
        parts = urlsplit(source)
        if parts.netloc not in ("", "localhost"):
            raise MediaError("a file address has no host: file:///folder/image.png")
        return _of_file(unquote(parts.path), settings)
    if source.startswith("/") and not source.startswith(JPEG_IN_BASE64):
        return _of_file(source, settings)
    try:
        return _limited(_of_base64(source, settings), settings)
    except MediaError:
        if len(source) > SHOWN:
            raise
        words = "is neither an address (data, http, https, file), nor an absolute path, nor base64"
        raise MediaError(f"{source!r} {words}") from None


def _of_data_address(source: str, settings: MediaSettings) -> bytes:
    head, comma, data = source.partition(",")
    if not comma:
        raise MediaError("a data address needs a comma before its data: data:image/png;base64,...")
    if head.lower().endswith(";base64"):
        return _of_base64(unquote(data) if "%" in data else data, settings)
    return unquote_to_bytes(data)


def _of_base64(data: str, settings: MediaSettings) -> bytes:
    if len(data) * 3 // 4 > settings.max_bytes + 2:
        raise _too_large(settings)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"is not valid base64 ({error})") from None


def _of_file(path: str, settings: MediaSettings) -> bytes:
    root = settings.allowed_local_media_path
    if root is None:
        raise MediaError(
            "this server does not read files for requests (--allowed-local-media-path); send the image itself"
        )
    real, top = os.path.realpath(path), os.path.realpath(root)
    if os.path.commonpath((real, top)) != top:
        raise MediaError(f"{path!r:.80} is outside the folder of --allowed-local-media-path")
    try:
        file = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(file, "rb") as opened:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise MediaError(f"{path!r:.80} is not a file")
            if found.st_size > settings.max_bytes:
                raise _too_large(settings)
            return _limited(opened.read(settings.max_bytes + 1), settings)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise MediaError(f"{path!r:.80} cannot be read ({reason})") from None


def _limited(data: bytes, settings: MediaSettings) -> bytes:
    if len(data) > settings.max_bytes:
        raise _too_large(settings)
    return data


def _too_large(settings: MediaSettings) -> MediaError:
    return MediaError(f"the image has more than {settings.max_media_mb} MB (--max-media-mb)")
