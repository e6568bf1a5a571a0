"""Images from addresses, with limits: against a server on this machine."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from moe_engine.media import addresses
from moe_engine.media.addresses import MAX_REDIRECTS, MediaError, fetch, is_public
from moe_engine.media.read import read_media
from moe_engine.media.settings import MediaSettings

LOCAL = MediaSettings(allow_private_media_urls=True, max_media_mb=1, media_fetch_timeout=60.0)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kind = self.path.strip("/")
        self.send_response({"away": 302, "loop": 301, "elsewhere": 302, "inside": 302, "absent": 404}.get(kind, 200))
        if kind in ("away", "loop", "elsewhere", "inside"):
            other = f"http://localhost:{self.server.server_address[1]}/image"
            places = {"away": "/image", "loop": "/loop", "elsewhere": other, "inside": "http://127.0.0.2:9/image"}
            self.send_header("Location", places[kind])
        if kind == "announced":
            self.send_header("Content-Length", str(1 << 30))
        self.end_headers()
        if kind == "large":
            self.wfile.write(bytes(2 << 20))
        while kind == "slow":
            self.wfile.write(b".")
            time.sleep(0.05)
        self.wfile.write(b"pixels")

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):  # the client has enough
            super().handle()


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        web.daemon_threads = True
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_address[1]}"
        web.shutdown()


def test_images_and_redirects(root: str) -> None:
    assert (
        fetch(f"{root}/image", LOCAL) == fetch(f"{root}/away", LOCAL) == read_media(f"{root}/image", LOCAL) == b"pixels"
    )


def test_only_named_hosts_are_read(root: str) -> None:
    here = replace(LOCAL, allowed_media_domains="cdn.example.com 127.0.0.1")
    assert fetch(f"{root}/image", here) == fetch(f"{root}/away", here) == b"pixels"
    for address in (f"{root}/elsewhere", "http://example.com/a.png", "https://cdn.example.com.evil.net/a.png"):
        with pytest.raises(MediaError, match="--allowed-media-domains"):
            fetch(address, here)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("loop", f"redirects more than {MAX_REDIRECTS} times"),
        ("absent", "answers with status 404"),
        ("large", "more than 1 MB"),
        ("announced", "more than 1 MB"),
    ],
)
def test_refused(root: str, path: str, words: str) -> None:
    with pytest.raises(MediaError, match=words):
        fetch(f"{root}/{path}", LOCAL)


def test_a_slow_host(root: str) -> None:
    with pytest.raises(MediaError, match=r"did not send the image within 0.3 s"):
        fetch(f"{root}/slow", MediaSettings(allow_private_media_urls=True, media_fetch_timeout=0.3))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://localhost/x", "private address"),
        ("http://169.254.169.254/latest", "private address"),
        ("http://[::1]/x", "private address"),
        ("http://host:0/x", "not a valid address"),
        ("http://user@127.0.0.1/x", "not a valid address"),
        ("http:///x", "not a valid address"),
        ("data:image/png", "needs a comma"),
        ("data:audio/wav;base64,AAAA", "audio input is not supported"),
        ("file://other/x.png", "has no host"),
        ("/etc/hostname", "does not read files"),
    ],
)
def test_refused_sources(address: str, words: str) -> None:
    with pytest.raises(MediaError, match=words):
        read_media(address, MediaSettings())


def test_public_addresses() -> None:
    private = (
        "64:ff9b::7f00:1",
        "10.1.2.3",
        "127.0.0.1",
        "::ffff:192.168.0.1",
        "fe80::1%eth0",
        "fd00::1",
        "0.0.0.0",
        "224.0.0.1",
        "2002:0a00:1::",
    )
    assert not any(map(is_public, private))
    assert all(map(is_public, ("1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8")))


def test_a_redirect_to_a_private_address(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host is public, its redirect names another one."""
    monkeypatch.setattr(addresses, "is_public", lambda place: place == "127.0.0.1")
    public = MediaSettings(media_fetch_timeout=60.0)
    assert fetch(f"{root}/away", public) == b"pixels"
    with pytest.raises(MediaError, match=r"127\.0\.0\.2 is a private address.*--allow-private-media-urls"):
        fetch(f"{root}/inside", public)


def test_data() -> None:
    for source in ("data:image/png;base64,cGl4ZWxz", "data:,pixels", "cGl4ZWxz"):
        assert read_media(source, MediaSettings()) == b"pixels"
