"""The host-RAM tier through HTTP: multi-turn sessions of twice the KV cache, on one rank and on several."""

from __future__ import annotations

import random
import re
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_process import ServerProcess
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(1)]

POOL = 512
COMMON = (
    "--enable-hierarchical-cache --hicache-ratio 4 --dtype float32 --context-length 256 --chunked-prefill-size 64 "
    f"--max-total-tokens {POOL} --max-running-requests 4 --enable-metrics --cpu-threads 1"
)
NEXTN = (
    "--speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 3"
)
FORMS = {
    "one rank": NEXTN,
    "tp2": f"--tp-size 2 {NEXTN}",
    "dp2": f"--tp-size 2 --attn-dp-size 2 {NEXTN}",
    "ep2": f"--tp-size 2 --attn-dp-size 2 --ep-size 2 --moe-a2a-backend all_to_all {NEXTN}",
}


def answer(client: httpx.Client, prompt: list[int]) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling}).raise_for_status().json()


def flush(client: httpx.Client) -> None:
    until(lambda: client.post("/flush_cache").status_code == 200, "requests still run")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.exhaustive if form in ("one rank", "dp2") else []) for form in FORMS]
)
def test_returning_turns_hit_the_tier(form: str, tmp_path: Path) -> None:
    """One rank: tests/engine/test_host_tier.py."""
    rng = random.Random(7)
    num = 2 * 2 * POOL // 160 if "attn-dp" in FORMS[form] else 2 * POOL // 160
    texts = [[rng.randrange(20, 200) for _ in range(120)] for _ in range(num)]
    seen: list[tuple[list[int], list[int], int]] = []
    with ServerProcess(tmp_path, *COMMON.split(), *FORMS[form].split()) as server, server.client() as client:
        for text in texts * 3:
            got = answer(client, text)
            seen.append((list(text), got["output_ids"], got["meta_info"]["cached_tokens"]))
            text += [*got["output_ids"], *(rng.randrange(20, 200) for _ in range(6))]
        page = client.get("/metrics").text
        hits = re.findall(r"^sglang:hicache_host_hit_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)
        assert sum(map(float, hits)) > num * 100
        assert sum(cached > 100 for _, _, cached in seen[num:]) > num
        for prompt, tokens, _ in seen[-num::4]:
            flush(client)
            again = answer(client, prompt)
            assert again["meta_info"]["cached_tokens"] == 0 and again["output_ids"] == tokens
        states = client.get("/server_info").json()["internal_states"]
        assert all(state["host_total_tokens"] >= 4 * POOL for state in states)
