"""One server of the embedded model for each file, with an API key, which clients expect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server_process import ServerProcess

KEY = "sk-test"
COMMON = ("--api-key", KEY, "--cpu-threads", "1", "--max-total-tokens", "8192", "--max-running-requests", "16")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, forked_processes: None) -> Iterator[str]:
    """Base URL of the OpenAI endpoints, with `/v1`."""
    with ServerProcess(tmp_path_factory.mktemp("server"), *COMMON, "--enable-cache-report") as server:
        yield server.url + "/v1"


@pytest.fixture(scope="module")
def vectors_url(tmp_path_factory: pytest.TempPathFactory, forked_processes: None) -> Iterator[str]:
    """Base URL of an embedding server."""
    with ServerProcess(tmp_path_factory.mktemp("vectors"), *COMMON, "--is-embedding") as server:
        yield server.url + "/v1"
