"""The live page in a real browser, if installed: it polls the server and draws the response."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moe_engine.frontend.client_api import GroupAnswers
from moe_engine.server.live_pages import page
from tests.distributed.eplb.test_server import VIEW, RecordingClient, group
from tests.server.harness import real_server

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
WAIT_MS = 3500  # of the page's clock


class GrowingClient(RecordingClient):
    """A running recording: each request of the page adds ten tokens for one expert."""

    async def ask_ranks(self, method: str, args: Any = None, deadline: float = 1.0) -> list[GroupAnswers]:
        self.called.append(method)
        counts = [[0, 0], [10 * len(self.called), 10]]
        return [group({**VIEW, "counts": counts, "pass": len(self.called)})]


def text_of(page: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>([^<]*)<', page)
    assert found is not None, page[-2000:]
    return found[1]


@pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: {', '.join(BROWSERS)}")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    assert BROWSER is not None
    client = GrowingClient()
    with real_server(client) as url:
        picture = tmp_path / "page.png"
        command = [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"),
            *(f"--virtual-time-budget={WAIT_MS}", "--dump-dom", f"{url}/experts"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        shot = [*command[:-2], "--window-size=800,600", f"--screenshot={picture}", f"{url}/experts"]
        subprocess.run(shot, capture_output=True, timeout=60)
    asked = len(client.called)
    assert done.returncode == 0, done.stderr[-2000:]
    assert asked >= 3, "the page asks again and again"
    assert text_of(done.stdout, "state") == "on" and text_of(done.stdout, "trouble") == ""
    number = int(text_of(done.stdout, "pass"))
    assert 2 <= number <= asked
    assert text_of(done.stdout, "choices") == str(10 * number + 10)
    assert text_of(done.stdout, "imbalance") == f"{10 * number / (5 * number + 5):.2f}"
    assert '<canvas id="map"' in done.stdout and re.search(r'width="2"[^>]*height="1"', done.stdout)
    assert re.search(r'id="launch"[^>]*>tiny · one rank · EPLB off', done.stdout)
    assert re.search(r'id="rows"><tr[^>]*><td[^>]*>2</td>', done.stdout), "what EPLB would gain on two ranks"
    assert re.search(r'id="layer-rows"><tr[^>]*><td[^>]*>1</td>', done.stdout), "the layer's own number"
    assert re.search(r'id="empty" hidden', done.stdout) and not re.search(r'id="heat" hidden', done.stdout)
    colors = pixels(picture)
    assert len(colors) > 20, "the heat map and its scale are drawn in many colors"


EMPTY_STATES = {
    "Recording is off": None,
    "Nothing is recorded yet": {**VIEW, "counts": [[0, 0], [0, 0]], "recording": False},
    "Waiting for tokens": {**VIEW, "counts": [[0, 0], [0, 0]]},
}


@pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: {', '.join(BROWSERS)}")
@pytest.mark.parametrize("title", EMPTY_STATES)
def test_an_empty_page_says_what_to_do(tmp_path: Path, title: str) -> None:
    assert BROWSER is not None
    with real_server(RecordingClient(view_experts=[EMPTY_STATES[title]])) as url:
        command = [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"),
            *(f"--virtual-time-budget={WAIT_MS}", "--dump-dom", f"{url}/experts"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert text_of(done.stdout, "empty-title") == title and re.search(r'id="heat" hidden', done.stdout)
    assert text_of(done.stdout, "trouble") == ""
    assert ('id="start" class="main" disabled' in done.stdout) == (title != "Nothing is recorded yet")


def test_the_script_asks_for_elements_that_exist() -> None:
    text = page("experts_live")
    names = set(re.findall(r'\bid="([\w-]+)"', text))
    assert set(re.findall(r'\bfind\("([\w-]+)"', text)) <= names
    assert not re.findall(r"https?:|//\w+\.|<link|@import|<img|\bsrc=|innerHTML", text)


def pixels(picture: Path) -> set[Any]:
    image = pytest.importorskip("PIL.Image").open(picture).convert("RGB")
    return {color for _, color in image.getcolors(image.width * image.height)}
