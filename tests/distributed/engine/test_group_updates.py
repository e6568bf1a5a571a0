"""Weights that a trainer in another process broadcasts, in every form of engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from moe_engine.processes.addresses import free_port
from tests.distributed.engine.test_tensor_updates import weights
from tests.distributed.engine.test_weight_updates import (  # noqa: F401
    FORMS,
    PROMPTS,
    SAMPLING,
    checkpoints,
    expected,
    open_engine,
    tokens,
)
from tests.distributed.engine.trainer import ADDRESS, TrainerProcess

pytestmark = pytest.mark.usefixtures("forked_processes")

RANKS = {"one rank": 1, "tp2": 2, "dp2": 2, "two replicas": 2}


def described(path: Path, names: list[str]) -> tuple[list[str], list[str], list[list[int]]]:
    tensors = weights(path)
    return names, [str(tensors[name].dtype) for name in names], [list(tensors[name].shape) for name in names]


def names_of(path: Path, form: str) -> list[str]:
    """Names in a random order. Two replicas run without drafts."""
    names = [name for name in weights(path) if form != "two replicas" or "layers.3." not in name]
    return random.sample(names, len(names))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=[] if form in ("tp2", "dp2") else pytest.mark.exhaustive) for form in RANKS],
)
def test_broadcast_weights_serve(
    checkpoints: dict[str, Path],  # noqa: F811
    expected: dict[str, list[list[int]]],  # noqa: F811
    form: str,
) -> None:
    size = RANKS[form]
    names = names_of(checkpoints["new"], form)
    cut = random.randint(1, len(names) - 1)
    with TrainerProcess(1 + size) as trainer, open_engine(checkpoints["old"], **FORMS[form]) as engine:
        assert tokens(engine) == expected["old"]
        joined = engine.init_weights_update_group(ADDRESS, trainer.port, 1, 1 + size, backend="gloo", timeout=60)
        assert joined[0] and trainer.answer() == "joined", joined
        for part in (names[:cut], names[cut:]):
            trainer.send(checkpoints["new"], part)
            done = engine.update_weights_from_distributed(*described(checkpoints["new"], part), weight_version="7")
            assert done == (True, "Succeeded to update model weights from the group weight_update_group.")
            assert trainer.answer() == "sent"
        assert tokens(engine) == expected["new"]
        output: Any = engine.generate(input_ids=PROMPTS[0], sampling_params=SAMPLING)
        assert output["meta_info"]["weight_version"] == "7"
        assert engine.destroy_weights_update_group() == (
            True, "Succeeded to destroy the weights update group weight_update_group.",
        )  # fmt: skip
        assert not engine.destroy_weights_update_group()[0]


def test_failures_leave_weights_and_engine(
    checkpoints: dict[str, Path],  # noqa: F811
    expected: dict[str, list[list[int]]],  # noqa: F811
) -> None:
    path = checkpoints["new"]
    names = names_of(path, "tp2")
    with open_engine(checkpoints["old"], **FORMS["tp2"]) as engine:

        def join(trainer: TrainerProcess) -> None:
            assert engine.init_weights_update_group(ADDRESS, trainer.port, 1, 3, backend="gloo", timeout=60)[0]
            assert trainer.answer() == "joined"

        def fails(words: str, **fields: Any) -> None:
            asked = dict(zip(("names", "dtypes", "shapes"), described(path, names))) | fields
            done, why = engine.update_weights_from_distributed(**asked)
            assert not done and words in why, why
            assert tokens(engine) == expected["old"]
            assert "does not exist" in engine.update_weights_from_distributed(*described(path, names))[1]

        assert "the engine has 2 ranks" in engine.init_weights_update_group(ADDRESS, 1, 2, 3, backend="gloo")[1]
        done, why = engine.init_weights_update_group(ADDRESS, free_port(), 1, 3, backend="gloo", timeout=1)
        assert not done and "rank 0, rank 1: no group with the trainer" in why, why
        done, why = engine.init_weights_update_group(ADDRESS, free_port(), 1, 3, backend="nccl", timeout=1)
        assert not done and "no GPU; use gloo" in why
        with TrainerProcess(3) as trainer:
            join(trainer)
            assert "exists" in engine.init_weights_update_group(ADDRESS, trainer.port, 1, 3, backend="gloo")[1]
            wrong = described(path, names)[2]
            wrong[5] = [*wrong[5], 1]
            fails(f"{names[5]} has shape", shapes=wrong)
        with TrainerProcess(3) as trainer:
            join(trainer)
            trainer.send(path, names[: len(names) // 2])
            fails(f"tensor {len(names) // 2 + 1} of {len(names)}", timeout=5)
        with TrainerProcess(3) as trainer:
            join(trainer)
            trainer.kill()
            fails(f"tensor 1 of {len(names)}, {names[0]}: the trainer has sent nothing, or is lost")
