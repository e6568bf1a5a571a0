"""The doctor on the log of a real server that triggers a rule, and on the server after the recommended change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moe_engine.cli.main import main
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.usefixtures("forked_processes")
TEXTS = [f"The capital of country {number} is" for number in range(12)]
SAMPLING = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


def load(folder: Path, *flags: str) -> tuple[Path, list[str]]:
    """The log of a server under a load, and the texts of its answers."""
    folder.mkdir()
    with ServerProcess(
        folder, "--decode-log-interval", "2", "--cpu-threads", "1", "--dtype", "float32", *flags
    ) as server:
        with server.client() as client:
            answers = client.post("/generate", json={"text": TEXTS, "sampling_params": SAMPLING}).json()
        assert main(["doctor", "--url", server.url, "--window", "60"]) in (0, 1)
        server.wait_idle()
        log = folder / "kept.log"
        log.write_text(server.log)
    return log, [answer["text"] for answer in answers]


def test_advice_from_a_real_log_is_followed(tmp_path, capsys):
    log, texts = load(tmp_path / "before", "--max-running-requests", "1")
    assert "demo, the last 1 minutes: " in capsys.readouterr().out, "the server's own diagnosis"
    assert main(["doctor", "--log", str(log), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (finding,) = (one for one in found["findings"] if one["name"] == "running_limit")
    assert (found["engine"], found["num_broken"], finding["flag"]) == ("moe-engine", 0, "--max-running-requests")
    assert finding["line"] in log.read_text() and "#running-req: 1," in finding["line"]
    assert finding["value"] > 1 and finding["memory_bytes"] > 0 and "KV cache +" in finding["memory"]
    assert "no_cuda_graph" not in {one["name"] for one in found["findings"]}, "server_args names the CPU"
    log, again = load(tmp_path / "after", finding["flag"], str(finding["value"]))
    capsys.readouterr()
    main(["doctor", "--log", str(log), "--json"])
    assert json.loads(capsys.readouterr().out)["num_broken"] == 0
    assert max(map(int, re.findall(r"#running-req: (\d+)", log.read_text()))) > 1
    assert again == texts
