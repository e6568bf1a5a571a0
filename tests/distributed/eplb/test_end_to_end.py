"""A server in a separate process: experts are recorded, viewed and dumped; the dump places experts at the next start.

The server has two replicas with one common dump.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.usefixtures("forked_processes")


def test_record_see_dump_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = tmp_path / "dumps"
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(dumps))
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}  # an unforeseen end takes one more pass
    ask = {"text": "The capital of France is", "sampling_params": sampling}
    recording = ("--expert-distribution-recorder-mode", "stat", "--dp", "2", "--cpu-threads", "1")
    with ServerProcess(tmp_path, *recording) as server, server.client() as client:
        assert client.get("/experts/data").json()["recording"] is False
        assert client.post("/start_expert_distribution_record").status_code == 200
        answers = [client.post("/generate", json=ask | {"routed_dp_rank": rank}).json() for rank in (0, 1)]
        seen = client.get("/experts/data").json()
        assert client.post("/stop_expert_distribution_record").status_code == 200
        assert client.post("/dump_expert_distribution_record").status_code == 200
        log = server.log
    (path,) = dumps.iterdir()
    assert f"wrote the expert distribution to {path}" in log
    counts = torch.load(path, weights_only=True)["logical_count"]
    assert counts.shape[0] == 1000 and counts.sum(0).tolist() == seen["counts"]
    passes = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert int((counts.sum((1, 2)) > 0).sum()) == max(passes), "passes of the replicas side by side"
    tokens = sum(answer["meta_info"]["prompt_tokens"] - 1 for answer in answers) + sum(passes)
    by_layer = counts.sum((0, 2)).tolist()
    assert by_layer[0] == 0 and set(by_layer[1:]) == {tokens * 4}, "a dense layer, and 4 experts a token in the others"
    flags = ("--init-expert-location", str(path), "--ep-num-redundant-experts", "8")
    with ServerProcess(tmp_path, *flags) as server, server.client() as client:
        placed = client.post("/generate", json=ask).json()
        refused = client.post("/start_expert_distribution_record")
    assert placed["text"] == answers[0]["text"]
    assert refused.status_code == 400 and "--expert-distribution-recorder-mode" in refused.text
