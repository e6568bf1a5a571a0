"""DeepSeek V4.1: logits equal the formulas in float64 in every form of a step; sizes; config.json."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import stepper
from tests.models.deepseek_v41 import V41Reference, make_v41
from tests.models.rows import all_rows
from tests.models.test_parity import assert_close, whole

every_row = pytest.mark.parametrize("row", all_rows())
PAGE = 16
TIE = 1e-4


class Made:
    """A checkpoint with the logits of some tokens; rounding decides no selection of entries or experts."""

    def __init__(self, path: Path, **fields: Any) -> None:
        self.path = path
        for _ in range(50):
            make_v41(path, random.randrange(2**31), tokenizer=False, **fields)
            self.tokens = [random.randrange(5, 250) for _ in range(110)]
            reference = V41Reference(path)
            self.logits: Tensor = reference.logits(self.tokens)
            if reference.margin > TIE:
                return
        raise AssertionError("no clear draw")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("v41"))


@every_row
def test_logits_equal_the_formulas(made: Made, row: str) -> None:
    """A whole prompt; chunks that end inside of entries, decodes, several tokens of a decode."""
    tokens = made.tokens
    assert_close(whole(stepper.load(made.path, row, page_size=PAGE), tokens), made.logits)
    model = stepper.load(made.path, row, seed=1, page_size=2 * PAGE)
    got = [whole(model, tokens[:3]), whole(model, tokens[3:36]), whole(model, tokens[36:60])]
    got += [whole(model, [token], decode=True) for token in tokens[60:80]]
    got += [whole(model, tokens[80:85], decode=True), whole(model, tokens[85:])]
    assert_close(torch.cat(got), made.logits)
