"""MiMo-7B: logits equal transformers' Qwen2 with the same tensors, the MTP layer vLLM's formula with Qwen2's layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.mimo import MimoOracle, make_mimo
from tests.models.rows import all_rows
from tests.models.stepper import Chunk, load
from tests.models.test_parity import assert_close
from tests.models.test_step_mtp import ResidualDrafter

LENGTH = 70
every_row = pytest.mark.parametrize("row", all_rows())


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MimoOracle, list[int]]:
    path = make_mimo(tmp_path_factory.mktemp("mimo") / "own", 5, tokenizer=False)
    return path, MimoOracle(path), torch.randint(0, 256, (LENGTH + 1,)).tolist()


@every_row
def test_logits(oracle: tuple[Path, MimoOracle, list[int]], row: str) -> None:
    path, reference, tokens = oracle
    model = load(path, row, seed=1)
    got = [model.step([Chunk(0, tokens[:40], False)])[0]]
    got += [model.step([Chunk(0, [token], True)])[0] for token in tokens[40:50]]
    with torch.no_grad():
        want = reference.model(torch.tensor([tokens[:50]])).logits[0]
    assert_close(torch.cat(got), want)


@every_row
def test_drafts(oracle: tuple[Path, MimoOracle, list[int]], row: str) -> None:
    """In chunks, single tokens, and several at once as after a verification."""
    path, reference, tokens = oracle
    drafter, found = ResidualDrafter(path, row, page_size=16, seed=1), []
    for start, stop, decode in [
        (0, 37, False),
        *((i, i + 1, True) for i in range(37, 43)),
        (43, 47, True),
        (47, LENGTH, False),
    ]:
        batch, states = drafter.states(tokens[start:stop], decode)
        found.append(drafter.draft(batch, tokens[start + 1 : stop + 1], states))
    v, logits = reference.layer(tokens[1:], reference.states(tokens[:LENGTH]))
    got = torch.cat(found)
    assert_close(got, v)
    assert_close(drafter.mtp.logits(got), logits)
