"""Storage below the host-RAM tier through HTTP: a restarted server reuses its pages, on one rank and on several."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_process import ServerProcess
from tests.e2e.test_host_tier import COMMON, FORMS, answer, flush
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(2)]

STORAGE = "--page-size 16 --hicache-storage-backend file --hicache-storage-prefetch-policy wait_complete"
EXTRA = '{"prefetch_threshold": 16}'


def written(folder: Path, atleast: int) -> int:
    """Waits until the servers have written so many pages."""

    def count() -> int:
        return len(list(folder.rglob("*.kvpage")))

    until(lambda: count() >= atleast, "the pages are not written")
    return count()


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.exhaustive if form in ("one rank", "ep2") else []) for form in FORMS]
)
def test_a_restarted_server_finds_its_storage(form: str, tmp_path: Path) -> None:
    """tp2 stores MLA's latent once; the groups of dp2 share it."""
    rng = random.Random(7)
    texts = [[rng.randrange(20, 200) for _ in range(120)] for _ in range(3)]
    flags = [*COMMON.split(), *FORMS[form].split(), *STORAGE.split(), "--hicache-storage-dir", str(tmp_path / "pages"),
             "--hicache-storage-backend-extra-config", EXTRA]  # fmt: skip
    with ServerProcess(tmp_path, *flags) as server, server.client() as client:
        first = [answer(client, text) for text in texts]
        assert written(tmp_path / "pages", 3 * 7) <= 3 * 8  # one file for each page of 16 tokens
        assert all(got["meta_info"]["cached_tokens_details"]["storage"] == 0 for got in first)
    with ServerProcess(tmp_path, *flags) as server, server.client() as client:
        for text, before in zip(texts, first):
            got = answer(client, text)
            assert got["output_ids"] == before["output_ids"]
            assert got["meta_info"]["cached_tokens_details"] == {
                "device": 0, "host": 0, "storage": 112, "storage_backend": "file",
            }  # fmt: skip
        check_clearing(client, texts[0], tmp_path / "pages")


def check_clearing(client: httpx.Client, text: list[int], folder: Path) -> None:
    again = answer(client, text)["meta_info"]["cached_tokens_details"]
    assert again["device"] + again["storage"] == 112  # another group may have to load it
    assert "cleared" in client.post("/clear_hicache_storage_backend").raise_for_status().text
    assert not list(folder.rglob("*.kvpage"))
    flush(client)
    assert answer(client, text)["meta_info"]["cached_tokens"] == 0
