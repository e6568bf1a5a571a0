"""Weight updates while clients stream: every answer belongs to one checkpoint, in every form of engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moe_engine import Engine
from moe_engine.frontend.weights.weight_updates import Updated, WeightUpdates
from tests.models.checkpoints import make_checkpoint
from tests.models.deepseek_v41 import make_v41
from tests.speculation.agreeing import agreeing_checkpoint

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(4)]

PREFIX = [7, 8, 9, 10, 11, 12, 13, 14]
PROMPTS = [PREFIX + [20 + i] * (1 + 5 * i) for i in range(5)] + [[3, 4, 5]]
LENGTH = 16
SAMPLING = {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0}
DRAFTS = {"speculative_algorithm": "NEXTN"}
FORMS: dict[str, dict[str, Any]] = {
    "one rank": {**DRAFTS},
    "tp2": {"tp_size": 2, **DRAFTS},
    "dp2": {"tp_size": 2, "attn_dp_size": 2, **DRAFTS},
    "ep2": {
        "tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "allgather", "ep_num_redundant_experts": 2,
        "enable_eplb": True, "eplb_rebalance_num_iterations": 10, **DRAFTS,
    },
    "two replicas": {"dp_size": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("updates")
    for seed, name in enumerate(("old", "new")):
        agreeing_checkpoint("deepseek_v3", folder / name, 40 + seed, num_mtp_layers=1)
    return {name: folder / name for name in ("old", "new")}


def open_engine(path: Path, **flags: Any) -> Engine:
    sizes = {"max_total_tokens": 4096, "max_running_requests": 16, "chunked_prefill_size": 16}
    plain = {**sizes, "dtype": "float32", "cpu_threads": 1, "skip_tokenizer_init": True}
    return Engine(str(path), **{**plain, **flags})


def tokens(engine: Engine) -> list[list[int]]:
    outputs: Any = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
    return [output["output_ids"] for output in outputs]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], forked_processes: None) -> dict[str, list[list[int]]]:
    """The tokens of each checkpoint, by prompt, without drafts and updates."""
    found = {}
    for name, path in checkpoints.items():
        with open_engine(path) as engine:
            found[name] = tokens(engine)
    assert all(old != new for old, new in zip(found["old"], found["new"]))
    return found


def update(engine: Engine, path: Path, version: str | None = None, **options: Any) -> Updated:
    return engine._loop.run(WeightUpdates(engine._frontend).update(str(path), None, version, **options))


Answers = list[tuple[int, str, str, list[int]]]
"""Prompt, version, kind of end and tokens of every answer."""


async def under_load(engine: Engine, work: Callable[[Answers], Awaitable[None]]) -> Answers:
    """Runs `work` while clients stream. `work` reads the answers so far."""
    answers: Answers = []
    ending = False

    async def client(number: int) -> None:
        while not ending:
            stream: Any = await engine.async_generate(input_ids=PROMPTS[number], sampling_params=SAMPLING, stream=True)
            last = [chunk async for chunk in stream][-1]
            meta = last["meta_info"]
            answers.append((number, meta["weight_version"], meta["finish_reason"]["type"], last["output_ids"]))

    clients = [asyncio.create_task(client(number)) for number in range(len(PROMPTS))]
    await work(answers)
    ending = True
    await asyncio.wait_for(asyncio.gather(*clients), 120)
    return answers


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.exhaustive if form in ("dp2", "tp2") else []) for form in FORMS]
)
def test_no_answer_mixes_two_checkpoints(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]], form: str
) -> None:
    with open_engine(checkpoints["old"], weight_version="old", **FORMS[form]) as engine:
        updates, done = WeightUpdates(engine._frontend), []

        async def change(version: str, abort: bool, answers: Answers) -> None:
            path, count = str(checkpoints[version]), len(answers)
            while len(answers) < count + len(PROMPTS):
                await asyncio.sleep(0.01)
            done.append(
                await asyncio.wrap_future(engine._loop.submit(updates.update(path, None, version, abort=abort)))
            )

        async def work(answers: Answers) -> None:
            await change("new", False, answers)
            for version in ("old", "new") * 20:  # all clients may be between two requests during one update
                await change(version, True, answers)
                if "abort" in {end for _, _, end, _ in answers}:
                    break
            await change("old", False, answers)
            await change("new", False, answers)

        answers = asyncio.run(under_load(engine, work))
        assert all(found.success for found in done), done
        assert (engine._frontend.weights.version, engine._frontend.weights.model_path) == (
            "new",
            str(checkpoints["new"]),
        )
        assert not any(engine._loop.run(engine._frontend.client.call("check_integrity")))
        if FORMS[form].get("enable_eplb"):
            states = engine.get_server_info()["internal_states"]
            assert all(state["eplb"]["rebalances"] for state in states), "experts moved between the updates"
    for number, version, end, tokens in answers:
        right = expected[version][number]
        assert tokens == (right if end == "length" else right[: len(tokens)]), (form, number, version, end)
    ended = {version for _, version, end, _ in answers if end == "length"}
    assert ended == {"old", "new"} and "abort" in {end for _, _, end, _ in answers}


def broken(folder: Path, source: Path, how: str) -> Path:
    """An unusable copy of a checkpoint."""
    path = folder / how.replace(" ", "-")
    shutil.copytree(source, path)
    file = next(path.glob("*.safetensors"))
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif how == "unreadable":
        file.unlink()
        file.mkdir()
    elif how == "absent":
        shutil.rmtree(path)
    elif how == "other architecture":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 16}))
    else:
        tensors = load_file(file)
        name = "model.layers.1.self_attn.o_proj.weight"
        tensor = tensors.pop(name)
        if how == "wrong shape":
            tensors[name] = tensor[:, :-1].contiguous()
        elif how == "no number":
            tensor[-1, -1] = float("nan")
            tensors[name] = tensor
        save_file(tensors, file)
    return path


WHY = {
    "truncated": "truncated",
    "missing tensor": "o_proj.weight",
    "wrong shape": "has shape",
    "no number": "tensor model.layers.1.self_attn.o_proj.weight has values that are NaN",
    "unreadable": "is no regular file",
    "absent": "config.json",
    "other architecture": "not the architecture of the served model: moe",
}


def test_unusable_checkpoints_change_nothing_and_the_reason_names_the_ranks(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    with open_engine(checkpoints["old"], tp_size=2, **DRAFTS) as engine:
        for how, why in WHY.items():
            found = update(engine, broken(tmp_path, checkpoints["new"], how), "new")
            assert not found.success and why in found.message, (how, found)
            phase = "stage_weights: rank 1: " if how == "no number" else "check_weights: rank 0, rank 1: "
            assert phase in found.message, found
        outputs: Any = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
        assert [output["output_ids"] for output in outputs] == expected["old"]
        assert {output["meta_info"]["weight_version"] for output in outputs} == {"default"}
        updated = engine.update_weights_from_disk(str(checkpoints["new"]), weight_version="new")
        assert updated == (True, f"Succeeded to update model weights from {checkpoints['new']}."), "after failed ones"
        assert tokens(engine) == expected["new"]


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("qwen3", "auto"),
        ("qwen3_moe", "auto"),
        ("mixtral", "auto"),
        ("qwen3_moe", "torch"),
        ("qwen4_exp", "auto"),  # tables of n-grams, which stay in their files
        pytest.param("deepseek_v41", "auto", marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v2_lite", "auto", marks=pytest.mark.exhaustive),
    ],
)
def test_all_weights_of_a_family_are_replaced(tmp_path: Path, kind: str, row: str) -> None:
    make: Callable[..., Path] = make_v41 if kind == "deepseek_v41" else partial(make_checkpoint, kind, tokenizer=False)
    old, new = (make(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    rows: dict[str, Any] = {} if row == "auto" else {"linear_backend": "torch", "moe_runner_backend": "torch"}
    with open_engine(old, **rows) as engine:
        assert update(engine, new).success
        updated = tokens(engine)
    with open_engine(new, **rows) as engine:
        fresh = tokens(engine)
    assert updated == fresh


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_new_weights_are_quantized_as_those_of_the_launch(checkpoints: dict[str, Path], quantization: str) -> None:
    with open_engine(checkpoints["new"], quantization=quantization) as engine:
        expected = tokens(engine)
    with open_engine(checkpoints["old"], quantization=quantization, **DRAFTS) as engine:
        assert tokens(engine) != expected
        assert (updated := update(engine, checkpoints["new"])).success, updated.message
        assert tokens(engine) == expected
