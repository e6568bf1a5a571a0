"""Servers with several ranks, of different sizes on both sides: the tokens of one server, with KV transferred instead
of computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.disaggregation.pair import FLAGS, Pair
from tests.e2e.server_process import ServerProcess
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

DP = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tp2 to tp1": (("--tp-size", "2"), ()),
    "tp1 to tp2": ((), ("--tp-size", "2")),
    "tp2 to tp2": (("--tp-size", "2"), ("--tp-size", "2")),
    "dp attention to tp1": (DP, ()),
    "tp1 to dp attention": ((), DP),
    "tp2 to dp attention": (("--tp-size", "2"), DP),
    "dp attention to tp2": (DP, ("--tp-size", "2")),
    "replicas to tp1": (("--dp-size", "2"), ()),
}
QUICK = "tp2 to dp attention"


def bodies(count: int) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": [random.randrange(20, 1000) for _ in range(300)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True},
        }
        for _ in range(count)
    ]


def check_pair(folder: Path, form: str, *flags: str, count: int = 4, cached: int = 297) -> None:
    prefill, decode = FORMS[form]
    asked = bodies(count)
    with ServerProcess(folder, *FLAGS, *flags) as one:
        expected = [httpx.post(one.url + "/generate", json=body, timeout=180).json() for body in asked]
    with Pair(folder, *flags, prefill=prefill, decode=decode) as pair:
        for body, single in zip(asked, expected):
            got = pair.post("/generate", body).json()
            assert got["output_ids"] == single["output_ids"], pair.decode.log
            assert got["meta_info"]["cached_tokens"] >= cached, pair.decode.log + pair.prefill.log
        for server in (pair.prefill, pair.decode):
            server.wait_free()
            assert "repaired" not in server.log


def test_servers_of_two_sizes(tmp_path: Path) -> None:
    check_pair(tmp_path, QUICK)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", [form for form in FORMS if form != QUICK])
def test_servers_of_all_sizes(form: str, tmp_path: Path) -> None:
    check_pair(tmp_path, form)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["tp2 to tp1", "tp1 to tp2", "dp attention to tp2"])
def test_heads_are_divided_and_joined(form: str, tmp_path: Path) -> None:
    """Grouped-query attention: a rank has some of the KV heads."""
    model = make_checkpoint("qwen3", tmp_path / "model", seed=3, num_key_value_heads=4, vocab_size=1024)
    check_pair(tmp_path, form, "--model-path", str(model))


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["tp2 to tp1", "tp1 to tp2"])
def test_layers_with_different_heads_are_divided_alike(form: str, tmp_path: Path) -> None:
    """MiMo-V2-Flash: two KV heads, four in layers with a window, and values narrower than keys."""
    fields = {"num_key_value_heads": 2, "vocab_size": 1024}
    model = make_checkpoint("mimo_v2_flash", tmp_path / "model", random.randrange(2**31), **fields)
    check_pair(tmp_path, form, "--model-path", str(model), count=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["tp2 to tp1", "tp1 to tp2"])
def test_index_keys_are_whole_beside_divided_heads(form: str, tmp_path: Path) -> None:
    """MiniMax-M3."""
    model = make_checkpoint("minimax_m3", tmp_path / "model", random.randrange(2**31), vocab_size=1024)
    check_pair(tmp_path, form, "--model-path", str(model), count=2)


@pytest.mark.exhaustive
def test_states_are_transferred_between_ranks(tmp_path: Path) -> None:
    """Qwen3-Next: each rank has some of the channels of a state, and the KV of some heads."""
    model = make_checkpoint("qwen3_next", tmp_path / "model", random.randrange(2**31), vocab_size=1024)
    check_pair(tmp_path, "tp2 to tp2", "--model-path", str(model), "--page-size", "4", count=2, cached=296)


@pytest.mark.exhaustive
def test_drafts_continue_between_servers_of_two_sizes(tmp_path: Path) -> None:
    """The KV of MTP layers is transferred too."""
    drafts = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1")
    check_pair(tmp_path, "tp2 to dp attention", *drafts, "--speculative-num-draft-tokens", "3")
