"""The page at `/`: the response for browsers, and its behavior in a browser if one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moe_engine.server import live_pages, pages_api
from moe_engine.server.live_pages import POLICY, page
from tests.server.fake_engine import FakeClient
from tests.server.harness import get, real_server
from tests.server.test_schema import CALLS, PARSERS

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: {', '.join(BROWSERS)}")
NODE = shutil.which("node")
FROM_BROWSERS = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize("settings", [{}, {"api_key": "k"}])
def test_browsers_get_the_page_and_programs_the_list(settings):
    found = get(FakeClient(), "/", headers=FROM_BROWSERS, **settings)
    assert found.headers["content-type"].startswith("text/html") and "accept" in found.headers["vary"]
    assert found.headers["content-security-policy"] == POLICY
    for headers in ({}, {"Accept": "application/json"}):
        assert "/v1/chat/completions" in get(FakeClient(), "/", headers=headers, **settings).json()["endpoints"]


def test_the_page_needs_nothing_from_elsewhere():
    text = page("status_page")
    assert not re.findall(r"https?:|//\w+\.|<link|@import|<img|\bsrc=", text)
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text and "innerHTML" not in text


def test_pages_share_one_style():
    shared = ":root { color-scheme: light dark;"
    for name in ("status_page", "experts_live", "doctor_page"):
        text = " ".join(page(name).split())
        assert text.count(shared) == 1 and "page_style.css" not in text and text.count("<style>") == 1


def names_of(text: str) -> set[str]:
    return set(re.findall(r'\bid="([\w-]+)"', text))


def test_the_script_asks_for_elements_that_exist():
    text = page("status_page")
    used = set(re.findall(r'\b(?:get|show)\("([\w-]+)"', text))
    assert used <= names_of(text) and len(used) > 20
    assert set(re.findall(r'aria-(?:controls|labelledby)="([\w-]+)"', text)) <= names_of(text)


@pytest.mark.parametrize("name", ["status_page", "experts_live", "doctor_page"])
@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_scripts_have_no_syntax_errors(name):
    (script,) = re.findall(r"<script>(.*?)</script>", page(name), re.DOTALL)
    assert NODE is not None
    done = subprocess.run([NODE, "--check", "-"], input=script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def in_browser(client: FakeClient, actions: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings) -> str:
    """The page's elements after `actions`, JavaScript that runs in the page."""
    assert BROWSER is not None
    whole = page("status_page").replace("</body>", f"<script>{actions}</script></body>")
    monkeypatch.setattr(pages_api, "page", lambda name: whole)
    with real_server(client, **settings) as url:
        command = [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"),
            *("--virtual-time-budget=6000", "--dump-dom", f"{url}/"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def text_of(dom: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>([^<]*)<', dom)
    assert found is not None, dom[-2000:]
    return found[1]


@needs_browser
def test_state_and_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The answer streams as reasoning, text and a tool call."""
    actions = """
    get("question").value = "hi <b>you</b>";
    get("tools").value = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]';
    get("max-tokens").value = "90";
    send();
    """
    dom = in_browser(FakeClient(CALLS), actions, tmp_path, monkeypatch, **PARSERS)
    assert text_of(dom, "health") == "serving" and text_of(dom, "trouble") == ""
    assert text_of(dom, "running") == "0" and text_of(dom, "ranks") == "1 of 1"
    assert re.search(r'<polyline id="line" points="[\d., ]+"', dom)
    assert 'turn user">hi &lt;b&gt;you&lt;/b&gt;<' in dom
    assert re.search(r"<summary[^>]*>reasoning</summary><div[^>]*>why<", dom)
    assert re.search(r'class="text">ok <', dom) and 'class="call">f({"a": 1})<' in dom
    assert re.search(r'class="note">\d+ \+ \d+ tokens, .* tool_calls<', dom)


class GeneratingClient(FakeClient):
    """Short requests end between two polls of the page: none runs when it asks, and the tokens have grown."""

    async def call(self, method: str, **args: Any) -> Any:
        self.state["generation_tokens_total"] = self.state.get("generation_tokens_total", 0) + 500
        return await super().call(method, **args)


@needs_browser
def test_throughput_counts_short_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dom = in_browser(GeneratingClient(), "", tmp_path, monkeypatch)
    assert text_of(dom, "running") == "0" and float(text_of(dom, "throughput")) > 10
    assert int(text_of(dom, "most")) > 10


@needs_browser
def test_a_schema_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    actions = 'get("tab-schema").click(); get("fill").click();'
    dom = in_browser(FakeClient('{"city": "Lima", "population": 5}'), actions, tmp_path, monkeypatch)
    assert '"city": "Lima"' in text_of(dom, "filled") and "tokens" in text_of(dom, "fill-note")
    assert re.search(r'<section id="chat"[^>]*hidden', dom) and 'id="tab-schema"' in dom


@needs_browser
def test_a_server_with_a_key_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dom = in_browser(FakeClient(), "", tmp_path, monkeypatch, api_key="k")
    assert text_of(dom, "health") == "no data" and "API key" in text_of(dom, "trouble")
    assert not re.search(r'<form id="ask-key"[^>]*hidden', dom)
    actions = 'get("key").value = "k"; get("ask-key").requestSubmit();'
    dom = in_browser(FakeClient(), actions, tmp_path, monkeypatch, api_key="k")
    assert text_of(dom, "health") == "serving" and re.search(r'<form id="ask-key"[^>]*hidden', dom)


def test_pages_are_read_once():
    assert live_pages.page("status_page") is page("status_page")


def test_pages_of_a_tab_share_one_key_and_link_to_each_other():
    for name, others in (
        ("status_page", "experts doctor"),
        ("experts_live", "./ doctor"),
        ("doctor_page", "./ experts"),
    ):
        text = page(name)
        assert 'sessionStorage.getItem("api-key")' in text
        assert {*others.split(), "docs"} <= set(re.findall(r'<a href="([\w./]+)"', text))
