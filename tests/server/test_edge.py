"""Web pages of other origins, and the server's own pages."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from moe_engine.server.auth import changes_engine
from moe_engine.server.endpoints import REFUSED_PATHS
from tests.server.fake_engine import FakeClient
from tests.server.harness import get, make_app, talk

PAGE = {"Origin": "http://evil.example"}
IMAGE = {"Sec-Fetch-Site": "cross-site"}
FOREIGN = [PAGE, IMAGE, {"Origin": "null"}, {"Origin": "http://test:3000"}, {"Sec-Fetch-Site": "same-site"}]
OWN = [
    {},
    {"Origin": "http://test"},
    {"Origin": "http://TEST"},
    {"Sec-Fetch-Site": "same-origin", "Origin": "https://behind.a.proxy"},
    {"Sec-Fetch-Site": "none"},
]
PATHS = sorted({path for endpoint in make_app(FakeClient()).state.endpoints for path in endpoint.shown_paths})
CHANGES = sorted(filter(changes_engine, PATHS))


def statuses(requests, client=None, **settings):
    """Status codes of (path, headers, method, content), all from one application."""

    async def session(http):
        return [
            (await http.request(method, path, content=content, headers=headers)).status_code
            for path, headers, method, content in requests
        ]

    return talk(client or FakeClient(), session, **settings)


def status(path, headers, method="GET", content=b"", **settings):
    return statuses([(path, headers, method, content)], **settings)[0]


def test_what_changes_the_engine():
    assert CHANGES == [
        "/abort_request",
        "/clear_hicache_storage_backend",
        "/configure_logging",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/dump_expert_distribution_record",
        "/flush_cache",
        "/freeze_gc",
        "/get_weights_by_name",
        "/hicache/storage-backend/clear",
        "/init_weights_update_group",
        "/load_lora_adapter",
        "/pause_generation",
        "/release_memory_occupation",
        "/reset_prefix_cache",
        "/resume_memory_occupation",
        "/set_internal_state",
        "/start_expert_distribution_record",
        "/start_profile",
        "/stop_expert_distribution_record",
        "/stop_profile",
        "/unload_lora_adapter",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
    ]


@pytest.mark.parametrize("path", [*CHANGES, *(path for path in REFUSED_PATHS if changes_engine(path))])
def test_pages_of_other_origins_change_nothing(path):
    client = FakeClient()
    foreign = [(path, headers, method, b"") for headers in FOREIGN for method in ("GET", "POST")]
    assert set(statuses(foreign, client)) == {403}
    words = get(client, path, headers=PAGE).json()["error"]["message"]
    assert words.startswith(f"{path}: refused to web pages of other origins") and "--api-key" in words
    assert client.requests == client.aborts == []
    assert 403 not in statuses([(path, headers, "POST", b'{"rid": "a"}') for headers in OWN])


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/tokenize"])
def test_pages_of_other_origins_send_json_or_nothing(path):
    """The preflight request of JSON is allowed: chat pages on other ports work, as with SGLang."""
    body = b'{"text": "x", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}'
    if path == "/tokenize":
        body = b'{"prompt": "x"}'
    kinds = ("text/plain", "text/plain; charset=utf-8", "application/x-www-form-urlencoded", "multipart/form-data")
    types = [{}, *({"Content-Type": kind} for kind in kinds)]
    for origins, expected in ((FOREIGN, 403), (OWN, 200)):
        requests = [(path, headers | origin, "POST", body) for headers in types for origin in origins]
        assert set(statuses(requests)) == {expected}
    assert status(path, PAGE | {"Content-Type": "application/json"}, "POST", body) == 200
    asks = PAGE | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    assert status(path, asks, "OPTIONS") == 200


def test_read_endpoints_are_open_to_all_origins():
    paths = ("/v1/models", "/health", "/server_info", "/docs", "/")
    assert set(statuses([(path, PAGE, "GET", b"") for path in paths])) == {200}


def test_a_key_is_enough():
    """A page of another origin does not have the key."""
    key = {"Authorization": "Bearer k"}
    assert status("/flush_cache", PAGE | key, "POST", api_key="k") == 200
    assert status("/flush_cache", PAGE, "POST", api_key="k") == 401
    assert (
        status("/generate", PAGE | {"Content-Type": "text/plain"}, "POST", b'{"text": "x"}', admin_api_key="a") == 403
    )


def test_no_redirects():
    """A path that ends with a slash is served as it is: the address of a redirect would come from a request header."""
    for path, status_code in (("/health/", 200), ("/docs/", 200), ("/v1/chat/completions/", 405), ("/none/", 404)):
        response = get(FakeClient(), path, headers={"Host": "evil.example"})
        assert response.status_code == status_code and "location" not in response.headers


# -- pages


@pytest.mark.parametrize("settings", [{}, {"api_key": "k", "admin_api_key": "a"}])
def test_the_pages_need_neither_key_nor_internet(settings):
    root = get(FakeClient(), "/", **settings).json()
    assert root["docs"] == "/docs" and "/v1/chat/completions" in root["endpoints"]
    response = get(FakeClient(), "/docs", **settings)
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"<script|<img|<link|@import|url\(", response.text)
    assert "curl http://test/v1/chat/completions" in response.text

    class Cells(HTMLParser):
        cells: list[str] = []  # noqa: RUF012

        def handle_data(self, data):
            self.cells.append(data.strip())

    page = Cells()
    page.feed(response.text)
    assert set(PATHS) <= set(page.cells)
    assert {"max_completion_tokens", "tool_choice", "stop_token_ids"} <= set(re.findall(r"\w+", response.text))
    page_for_other_host = get(FakeClient(), "/docs", headers={"Host": "<b>"}, **settings).text
    assert "<b>/v1" not in page_for_other_host
