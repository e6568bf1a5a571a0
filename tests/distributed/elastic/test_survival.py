"""Ranks of a real engine are killed and stopped: every output equals that of a single undisturbed rank."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from moe_engine.custom_logit_processor import DisallowedTokensLogitsProcessor
from moe_engine.errors import EngineDeadError
from moe_engine.frontend.expert_records import ExpertRecords
from tests import random_seed
from tests.distributed.elastic.survival import Stream, Struck, alone, draw, finish, struck
from tests.distributed.ranks.drill import ended
from tests.models.checkpoints import make_checkpoint
from tests.models.lora import make_adapter
from tests.speculation.agreeing import agreeing_checkpoint
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(2)]

SEED = int(random_seed.seed()) % 1_000_003
NUM_EXPERTS, TOP_K = 16, 4
LONG = 90
"""Tokens of a request whose rank is lost while it runs."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an MTP layer that is not served."""
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("model") / "plain", SEED, num_mtp_layers=1)


def check(streams: list[Stream], expected: list[list[int]]) -> None:
    """Outputs are complete and correct, and cached_tokens never changes."""
    assert [stream.error for stream in streams] == [""] * len(streams)
    for stream, tokens in zip(streams, expected, strict=True):
        assert stream.tokens[: stream.comparable] == tokens[: stream.comparable]
        assert len(stream.tokens) == len(tokens)
    assert all(len(stream.cached) == 1 for stream in streams)
    assert all(len(stream.meta["output_token_logprobs"]) == len(stream.tokens) for stream in streams)
    assert all(len(stream.meta["input_token_logprobs"]) == len(stream.prompt) for stream in streams)


def test_kills_in_decode_and_prefill_until_experts_are_not_covered(checkpoint: Path) -> None:
    """Four ranks, of which any two have slots for all experts, over sockets."""
    decoding, late = draw(SEED, 8, LONG, [0, 1, 2, 3]), draw(SEED + 1, 3, 20, [1, 2, 3])
    prefilling = draw(SEED + 2, 24, 12, [1, 2, 3], length=300)
    expected = alone(checkpoint, [*decoding, *late, *prefilling])
    with struck(checkpoint, 4, NUM_EXPERTS, moe_a2a_backend="all_to_all", chunked_prefill_size=256) as running:
        engine = running.engine
        for stream in decoding:
            stream.begin(engine)
        until(lambda: all(len(stream.tokens) > 3 for stream in decoding), "no decodes")
        running.strike(0)
        finish(decoding)
        check(decoding, expected[:8])
        assert all(0 <= stream.meta["num_retractions"] <= 1 for stream in decoding)
        assert not any(stream.meta["num_retractions"] and stream.meta["dp_rank"] == 0 for stream in decoding)
        running.wait_alive(3)
        assert not running.problems()

        with pytest.raises(EngineDeadError, match=r"DP0 TP0 .* killed by SIGKILL"):
            engine.generate(input_ids=[1, 2], routed_dp_rank=0)
        for stream in late:
            stream.begin(engine)
        finish(late)
        check(late, expected[8:11])

        for stream in prefilling:
            stream.begin(engine)
        until(lambda: engine._frontend.client.healths()[1].num_running > 0, "no prefill")
        running.strike(1)
        finish(prefilling)
        check(prefilling, expected[11:])
        running.wait_alive(2)
        assert not running.problems()

        last = [stream.begin(engine) for stream in draw(SEED + 3, 4, 400, [2, 3])]
        until(lambda: all(len(stream.tokens) > 3 for stream in last), "no decodes")
        running.strike(3)
        finish(last)
        assert all("DP3 TP3" in stream.error and "SIGKILL" in stream.error for stream in last)
        assert all("--ep-num-redundant-experts 48 would have covered the loss" in stream.error for stream in last)
        until(lambda: not running.supervisor.is_running(), "the supervisor did not exit")


def test_two_killed_at_once_while_experts_move(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shared memory and rebalancing every few passes."""
    streams = draw(SEED + 4, 8, LONG, [0, 1, 2, 3])
    expected = alone(checkpoint, streams)
    flags = {"moe_a2a_backend": "shared_memory", "page_size": 4}
    flags |= {"enable_eplb": True, "eplb_rebalance_num_iterations": 3}
    flags |= {"expert_distribution_recorder_mode": "stat", "expert_balancedness_report_mode": "prometheus"}
    flags |= {"expert_distribution_recorder_buffer_size": -1}
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path))
    with struck(checkpoint, 4, NUM_EXPERTS, **flags) as running:
        for stream in streams:
            stream.begin(running.engine)
        until(lambda: all(len(stream.tokens) > 3 for stream in streams), "no decodes")
        running.strike(0)
        running.strike(3)
        finish(streams)
        check(streams, expected)
        running.wait_alive(2)
        assert not running.problems()
        check_counts(running, tmp_path)


@pytest.mark.parametrize(
    "drafts",
    [pytest.param({}, marks=pytest.mark.exhaustive), {"speculative_algorithm": "NEXTN"}],
    ids=["plain", "drafts"],
)
def test_masked_requests_continue(tmp_path: Path, drafts: dict[str, Any]) -> None:
    """Late and static masks, logit biases and custom processors, on the lost rank and on the others."""
    pytest.importorskip("dill")
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "agreeing", SEED, num_mtp_layers=1)
    flags: dict[str, Any] = {"skip_tokenizer_init": False, "enable_custom_logit_processor": True}
    streams = draw(SEED + 7, 10, LONG, [0, 1])
    free = alone(path, streams, **flags)
    letters = Tokenizer.from_file(str(path / "tokenizer.json")).encode("abcd", add_special_tokens=False).ids
    assert len(letters) == 4
    for i, stream in enumerate(streams):
        common = sorted(set(free[i]))
        if i // 2 == 0:
            stream.sampling |= {"allowed_token_ids": letters, "bad_words": ["ab", "bc", "bda", "dd", "ac", "cc"]}
        elif i // 2 == 1:
            stream.sampling["allowed_token_ids"] = common[::2] + [3, 5]
        elif i // 2 == 2:
            stream.sampling["logit_bias"] = {str(token): -100.0 for token in common[:3]}
        elif i // 2 == 3:
            stream.sampling["custom_params"] = {"token_ids": common[:3]}
            stream.more["custom_logit_processor"] = DisallowedTokensLogitsProcessor.to_str()
    expected = alone(path, streams, **flags)
    assert sum(one != other for one, other in zip(free, expected)) >= 5
    with struck(path, 2, NUM_EXPERTS, moe_a2a_backend="allgather", **flags, **drafts) as running:
        for stream in streams:
            stream.begin(running.engine)
        until(lambda: all(len(stream.tokens) > 3 for stream in streams), "no decodes")
        running.strike(0)
        finish(streams)
        check(streams, expected)
        running.wait_alive(1)
        assert not running.problems()
        again = [Stream(stream.prompt, stream.sampling, 1, stream.more).begin(running.engine) for stream in streams]
        finish(again)
        check(again, expected)
        for stream in streams[:2]:
            assert set(stream.tokens) <= set(letters)
            assert not {(letters[0], letters[1]), (letters[3], letters[3])} & set(pairwise(stream.tokens))
        (state,) = running.engine.get_server_info()["internal_states"]
        assert not state["num_running"] and not state["num_waiting"]


def check_counts(running: Struck, folder: Path) -> None:
    """The records contain each computed token once, in passes with the same numbers on all ranks."""
    records = ExpertRecords(running.engine._frontend.client)
    running.engine._loop.run(records.start())
    streams = draw(SEED + 5, 6, 9, [1, 2])
    for stream in streams:
        stream.begin(running.engine)
    finish(streams)
    (path,) = running.engine._loop.run(records.dump()).paths
    assert Path(path).parent == folder
    counted = torch.load(path, weights_only=True)["logical_count"].sum(2)  # [S, L]
    computed = sum(len(stream.prompt) - stream.meta["cached_tokens"] + 9 - 1 for stream in streams)
    by_layer = counted.sum(0)
    moe = by_layer > 0
    assert moe.any() and (by_layer[moe] == computed * TOP_K).all()
    for state in running.engine.get_server_info()["internal_states"]:
        assert 0.0 < state["balancedness"]["current"] <= 1.0


def test_stopped_rank_with_mtp_drafts(tmp_path: Path) -> None:
    """The one remaining rank has all experts in the end, also those of MTP layers."""
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "agreeing", SEED, num_mtp_layers=1)
    streams = draw(SEED, 6, LONG, [0, 1])
    expected = alone(path, streams)
    flags = {"speculative_algorithm": "NEXTN"}
    with struck(path, 2, NUM_EXPERTS, moe_a2a_backend="allgather", **flags) as running:
        for stream in streams:
            stream.begin(running.engine)
        until(lambda: all(len(stream.tokens) > 3 for stream in streams), "no decodes")
        running.strike(0, signal.SIGSTOP)
        finish(streams)
        check(streams, expected)
        running.wait_alive(1)
        assert not running.problems()
        states = running.engine.get_server_info()["internal_states"]
        assert sum(sum(state["speculation"]["accepted"]) for state in states) > 0
        until(lambda: ended(running.ranks[0]), "the rank must not return")

        running.supervisor.suspend()  # ranks stop without the supervisor: consecutive requests soon fail
        errors: list[str] = []

        def fails() -> bool:
            (stream,) = draw(SEED + 6, 1, 400, [1])
            finish([stream.begin(running.engine)])
            errors.append(stream.error)
            return bool(stream.error)

        until(fails, "the ranks continue without a supervisor")
        assert f"the rank supervisor (pid {running.supervisor.pid}) silent for" in errors[-1]
        running.supervisor.kill()


def test_adapters_continue(tmp_path: Path) -> None:
    """With drafts, on the lost rank and on the others; adapters are loaded and unloaded after the loss."""
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "agreeing", SEED, num_mtp_layers=1)
    modules = ("o_proj", "kv_b_proj", "gate_proj", "down_proj")
    adapters = {name: str(make_adapter(tmp_path / name, path, modules, 4, SEED + i)) for i, name in enumerate("abc")}
    flags = {"max_loras_per_batch": 2, "speculative_algorithm": "NEXTN"}
    streams = draw(SEED + 8, 8, LONG, [0, 1])
    for i, stream in enumerate(streams):
        stream.more = {"lora_path": (None, "a", "b")[i % 3]}
    later = draw(SEED + 9, 3, 12, [1])
    for stream, name in zip(later, "abc"):
        stream.more = {"lora_path": name}
    paths = [f"{name}={folder}" for name, folder in adapters.items()]
    expected = alone(path, [*streams, *later], lora_paths=paths, max_loras_per_batch=3)
    with struck(path, 2, NUM_EXPERTS, lora_paths=paths[:2], **flags) as running:
        for stream in streams:
            stream.begin(running.engine)
        until(lambda: all(len(stream.tokens) > 3 for stream in streams[:2]), "no decodes")
        running.strike(0)
        finish(streams)
        check(streams, expected[:8])
        running.wait_alive(1)
        loaded = running.engine.load_lora_adapter("c", adapters["c"])
        assert loaded.success, loaded.message
        for stream in later:
            stream.begin(running.engine)
        finish(later)
        check(later, expected[8:])
        assert running.engine.unload_lora_adapter("a").success
        assert not running.problems()
