"""Prefill and decode on two servers: the tokens of one server; requests are answered after faults."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moe_engine.media.image_process import load_processor
from moe_engine.processes.addresses import free_port
from tests.disaggregation.pair import FLAGS, Pair
from tests.e2e.server_process import ServerProcess
from tests.models.checkpoints import make_checkpoint as make_text_checkpoint
from tests.models.lora import make_adapter
from tests.models.parity_families import address
from tests.models.v4_checkpoints import make_v4
from tests.models.vision_checkpoints import IMAGE, START, Oracle, Pixels, make_checkpoint, random_picture
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(4)]

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
NEXTN = (
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "3"),
)


def prompts(count: int, length: int = 150) -> list[list[int]]:
    return [[random.randrange(20, 1000) for _ in range(length + i)] for i in range(count)]


def body(ids: list[int] | list[list[int]], **more: object) -> dict:
    return {"input_ids": ids, "sampling_params": GREEDY, **more}


def idle_and_free(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        server.wait_free()


@pytest.fixture(params=[(), NEXTN], ids=["plain", "nextn"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Pair(tmp_path, *request.param) as made:
        made.flags = request.param  # type: ignore[attr-defined]
        yield made


def test_tokens_are_those_of_one_server(pair: Pair, tmp_path: Path) -> None:
    asked = prompts(3)
    with ServerProcess(tmp_path, *FLAGS, *pair.flags) as one:  # type: ignore[attr-defined]
        expected = [httpx.post(one.url + "/generate", json=body(ids), timeout=180).json() for ids in asked]
    for ids, single in zip(asked, expected):
        got = pair.post("/generate", body(ids)).json()
        assert got["output_ids"] == single["output_ids"]
        assert got["meta_info"]["cached_tokens"] >= len(ids) - 2, got["meta_info"]  # it was transferred
    answers = pair.post("/generate", body(asked), pair.rooms(len(asked))).json()
    assert [answer["output_ids"] for answer in answers] == [single["output_ids"] for single in expected]
    turn = [*asked[0], *expected[0]["output_ids"], *range(20, 90)]  # only the end is transferred
    got = pair.post("/generate", body(turn)).json()
    assert got["meta_info"]["cached_tokens"] >= len(turn) - 2
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    chat = pair.post("/v1/chat/completions", question).json()
    assert "Paris" in chat["choices"][0]["message"]["content"]
    idle_and_free(pair)


def test_images(tmp_path: Path) -> None:
    """After text, at the end of the prompt, and the same image again: tokens of transformers; KV is transferred."""
    pytest.importorskip("PIL", reason="images need pillow: pip install -e '.[vision]'")
    path = make_checkpoint("qwen3_vl_moe", tmp_path / "model", random.randrange(1000))
    oracle, processor = Oracle(path), load_processor(str(path))
    pictures = [random_picture(90, 130, random.randrange(1000)) for _ in range(2)]
    images = []
    for picture in pictures:
        made = processor(images=[picture], return_tensors="pt")
        images.append(Pixels(tuple(made["image_grid_thw"][0].tolist()), made["pixel_values"]))
    text = [random.randrange(250) for _ in range(40)]
    with Pair(tmp_path, "--model-path", str(path)) as pair:
        for chosen in ([0], [0, 1], [1], [0]):
            ids = text + [token for i in chosen for token in (i, START, IMAGE)]
            whole = text + [token for i in chosen for token in (i, START, *[IMAGE] * images[i].num_tokens)]
            data = [address(pictures[i]) for i in chosen]
            answer = pair.post("/generate", body(ids, image_data=data)).json()
            found = answer["output_ids"]
            expected = [token for token, _ in oracle.greedy(whole, [images[i] for i in chosen], 12, found)]
            assert found[: len(expected)] == expected
            meta = answer["meta_info"]
            assert meta["prompt_tokens"] == len(whole) and meta["cached_tokens"] >= len(whole) - 2
        idle_and_free(pair)


def test_states_of_layers_without_kv(tmp_path: Path) -> None:
    """Qwen3-Next: the state after the prompt is transferred after its KV."""
    path = make_text_checkpoint("qwen3_next", tmp_path / "model", random.randrange(2**31))
    flags = ("--model-path", str(path), "--page-size", "4")
    asked = [[random.randrange(250) for _ in range(150 + i)] for i in range(2)]
    with ServerProcess(tmp_path, *FLAGS, *flags) as one:
        expected = [httpx.post(one.url + "/generate", json=body(ids), timeout=180).json() for ids in asked]
    with Pair(tmp_path, *flags) as pair:
        for ids, single in zip(asked, expected):
            got = pair.post("/generate", body(ids)).json()
            assert got["output_ids"] == single["output_ids"]
            assert got["meta_info"]["cached_tokens"] >= len(ids) - 4, got["meta_info"]
        turn = [*asked[0], *expected[0]["output_ids"], *range(20, 90)]
        assert pair.post("/generate", body(turn)).json()["meta_info"]["cached_tokens"] >= len(turn) - 4
        idle_and_free(pair)
        assert "its prompt is computed here" not in pair.decode.log


def test_compressed_entries(tmp_path: Path) -> None:
    """DeepSeek V4, on servers with other pages and ranks: whole pages are transferred, with the entries in them."""
    path = make_v4(tmp_path / "model", random.randrange(2**31))
    flags = ("--model-path", str(path))
    asked = [[random.randrange(5, 250) for _ in range(150 + i)] for i in range(2)]
    with ServerProcess(tmp_path, *FLAGS, *flags) as one:
        expected = [httpx.post(one.url + "/generate", json=body(ids), timeout=180).json() for ids in asked]
    with Pair(tmp_path, *flags, decode=("--page-size", "32", "--tp-size", "2")) as pair:
        for ids, single in zip(asked, expected):
            got = pair.post("/generate", body(ids)).json()
            assert got["output_ids"] == single["output_ids"]
            assert got["meta_info"]["cached_tokens"] >= len(ids) - 32, got["meta_info"]
        idle_and_free(pair)


def test_adapters_of_one_name_with_other_files(tmp_path: Path) -> None:
    """Their KV is not transferred; that of the base model and of equal adapters is."""
    path = make_text_checkpoint("qwen3", tmp_path / "model", random.randrange(2**31))
    files = [make_adapter(tmp_path / name, path, ("o_proj", "q_proj"), 4, i) for i, name in enumerate("abc")]
    sides = [("--lora-paths", f"x={files[i]}", f"same={files[2]}") for i in range(2)]
    flags, ids = ("--model-path", str(path)), [random.randrange(250) for _ in range(150)]
    names = ("x", "same", None)
    with ServerProcess(tmp_path, *FLAGS, *flags, *sides[1]) as one:
        asked = [body(ids, lora_path=name) for name in names]
        expected = [httpx.post(one.url + "/generate", json=each, timeout=180).json()["output_ids"] for each in asked]
    with Pair(tmp_path, *flags, prefill=sides[0], decode=sides[1]) as pair:
        for each, tokens in zip(asked, expected):
            got = pair.post("/generate", each).json()
            assert got["output_ids"] == tokens
            assert got["meta_info"]["cached_tokens"] == (0 if each["lora_path"] == "x" else len(ids) - 1)
        idle_and_free(pair)
        assert pair.decode.log.count("files of the LoRA adapter are not the same") == 1


def test_answers_of_a_decode_server_are_stored_for_the_next_turn(tmp_path: Path) -> None:
    """Another prefill server reads prompt and answer from the storage."""
    storage = (
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--page-size", "16"),
        *("--hicache-storage-dir", str(tmp_path / "pages")),
        *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}'),
    )
    (ids,) = prompts(1)
    with Pair(tmp_path, *storage) as pair:
        longer = body(ids) | {"sampling_params": {**GREEDY, "max_new_tokens": 40}}
        answer = pair.post("/generate", longer).json()["output_ids"]
        until(lambda: len(list((tmp_path / "pages").rglob("*.kvpage"))) >= 11, "eleven pages")  # of 189 tokens
        idle_and_free(pair)
    mode = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(free_port()))
    with ServerProcess(tmp_path, *FLAGS, *storage, *mode) as later:
        turn = [*ids, *answer, *range(20, 60)]
        meta = httpx.post(later.url + "/generate", json=body(turn), timeout=180).json()["meta_info"]
        assert meta["cached_tokens_details"]["storage"] == 176, meta


def test_prompt_logprobs_and_streams(tmp_path: Path) -> None:
    (ids,) = prompts(1)
    with Pair(tmp_path) as pair:
        asked = body(ids, return_logprob=True, logprob_start_len=0)
        meta = pair.post("/generate", asked).json()["meta_info"]
        assert len(meta["output_token_logprobs"]) == 12 and meta["cached_tokens"] >= 149
        rooms = pair.rooms()
        seen = httpx.post(pair.decode.url + "/generate", json=body(ids, stream=True) | rooms, timeout=180)
        assert seen.text.rstrip().endswith("data: [DONE]")  # no prefill server has the room
        refused = httpx.post(pair.decode.url + "/generate", json=body([ids, ids]) | pair.rooms(), timeout=180)
        assert refused.status_code == 400 and "bootstrap_room" in refused.text
        idle_and_free(pair)
        path = httpx.get(pair.decode.url + "/get_model_info").json()["model_path"]
        update = {"model_path": path, "weight_version": "step 7"}
        names = ("step 7", "those of its start"), ("step 7", "step 7")
        for server, (decode, prefill) in zip((pair.decode, pair.prefill), names):
            answer = httpx.post(server.url + "/update_weights_from_disk", json=update, timeout=180)
            assert answer.json()["success"], answer.text
            (ids,) = prompts(1)
            cached = pair.post("/generate", body(ids)).json()["meta_info"]["cached_tokens"]
            assert cached == 0 if decode != prefill else cached >= 149
        assert "weights: prefill server those of its start, decode server step 7" in pair.decode.log


def test_a_lost_prefill_server_is_replaced_by_prefill_on_the_decode_server(tmp_path: Path) -> None:
    """Absent, killed during a transfer, and stopped: each request gets its answer."""
    asked = prompts(4, 400)
    with Pair(tmp_path) as pair:
        expected = [pair.post("/generate", body(ids)).json()["output_ids"] for ids in asked[:1]]
        unreachable = pair.rooms() | {"bootstrap_port": 1}
        got = httpx.post(pair.decode.url + "/generate", json=body(asked[1]) | unreachable, timeout=180).json()
        assert len(got["output_ids"]) == 12
        assert pair.post("/generate", body(asked[0])).json()["output_ids"] == expected[0]
        for process in [pair.prefill.process, *pair.prefill.children()]:
            process.send_signal(signal.SIGSTOP)
        got = httpx.post(pair.decode.url + "/generate", json=body(asked[2]) | pair.rooms(), timeout=180).json()
        assert len(got["output_ids"]) == 12
        for process in [*pair.prefill.children(), pair.prefill.process]:
            process.kill()
        got = httpx.post(pair.decode.url + "/generate", json=body(asked[3]) | pair.rooms(), timeout=180).json()
        assert len(got["output_ids"]) == 12
        pair.decode.wait_free()
        assert "its prompt is computed here" in pair.decode.log and "repaired" not in pair.decode.log


def test_servers_with_other_caches_refuse_each_other(tmp_path: Path) -> None:
    (ids,) = prompts(1)
    with Pair(tmp_path, decode=("--dtype", "bfloat16")) as pair:
        assert len(pair.post("/generate", body(ids)).json()["output_ids"]) == 12
        assert "--kv-cache-dtype: prefill server float32, decode server bfloat16" in pair.decode.log


def test_another_secret_is_named(tmp_path: Path) -> None:
    (ids,) = prompts(1)
    (tmp_path / "a").write_text("a" * 40)
    (tmp_path / "b").write_text("b" * 40)
    for file in ("a", "b"):
        (tmp_path / file).chmod(0o600)
    first, second = (("--dist-secret-file", str(tmp_path / name)) for name in "ab")
    with Pair(tmp_path, prefill=first, decode=second) as pair:
        assert len(pair.post("/generate", body(ids)).json()["output_ids"]) == 12
        assert "its prompt is computed here" in pair.decode.log
    with Pair(tmp_path, *first) as pair:
        assert pair.post("/generate", body(ids)).json()["meta_info"]["cached_tokens"] >= 149


def test_aborts_free_everything(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        aborted = 0
        for delay in (0.0, 0.02, 0.1, 0.3):
            (ids,) = prompts(1, 400)
            rooms = pair.rooms()
            longer = body(ids) | {"sampling_params": {**GREEDY, "max_new_tokens": 100}}
            for server, request in ((pair.prefill, body(ids)), (pair.decode, longer)):
                try:  # a server may answer before a client without a core notices its limit
                    httpx.post(server.url + "/generate", json=request | rooms, timeout=0.01 + delay / 10)
                except httpx.TimeoutException:
                    aborted += 1
                time.sleep(delay)
        assert aborted
        (ids,) = prompts(1)
        assert pair.post("/generate", body(ids)).json()["meta_info"]["cached_tokens"] >= 149
        idle_and_free(pair)
        assert "repaired" not in pair.decode.log + pair.prefill.log
