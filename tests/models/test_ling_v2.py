"""Ling 2.0: logits equal transformers' GLM-4.5 with the same tensors, drafts those of GLM-4.5's MTP layer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from moe_engine.errors import ConfigError
from moe_engine.models.config_file import load_model_config
from tests.models import random_shapes
from tests.models.checkpoints import make_checkpoint
from tests.models.ling_v2 import LIKE, as_ling_v2, like, make_ling_v2
from tests.models.rows import all_rows
from tests.models.test_mtp import Drafter


def test_random_shapes(tmp_path: Path) -> None:
    """Groups of experts, several shared experts, biases of q, k and v, parts of heads rotated, YaRN."""

    def drawn(rng: random.Random) -> random_shapes.Shape:
        shape = random_shapes.draw(LIKE, rng)
        shape.fields |= {"use_qk_norm": True, "norm_topk_prob": True, "routed_scaling_factor": rng.choice((1.0, 2.5))}
        shape.stored = {"dtype": "float32"}
        return shape

    def check(shape: random_shapes.Shape, folder: Path, rng: random.Random) -> None:
        try:
            source = make_checkpoint(LIKE, folder / "like", 3, tokenizer=False, **shape.fields, **shape.stored)
            tokens, want = random_shapes.reference(source, 3, shape.fields["vocab_size"])
        except Exception as error:
            raise random_shapes.Refused(str(error)) from error
        got = random_shapes.logits(as_ling_v2(source, folder / "ling", False), shape.row, 3, tokens)
        assert random_shapes.difference(got, want) < random_shapes.TOLERANCE

    random_shapes.check_draws(tmp_path, 20, drawn, check)


@pytest.mark.parametrize("row", all_rows())
def test_drafts(tmp_path: Path, row: str) -> None:
    path = make_ling_v2(tmp_path / "ling", 5, tokenizer=False, num_mtp_layers=1)
    tokens = torch.randint(0, 256, (41,), generator=torch.Generator().manual_seed(6)).tolist()
    own, want = (Drafter(folder, row).step(tokens, 0, 40) for folder in (path, like(path)))
    assert own.equal(want)


def test_a_shared_expert_of_another_width(tmp_path: Path) -> None:
    path = make_ling_v2(tmp_path / "ling", 5, tokenizer=False)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"moe_shared_expert_intermediate_size": 48}))
    assert (moe := load_model_config(path).moe) is not None and moe.shared_width == 48


@pytest.mark.parametrize(
    ("field", "value"), [("use_qk_norm", False), ("use_bias", True), ("score_function", "softmax")]
)
def test_other_settings_are_refused(tmp_path: Path, field: str, value: object) -> None:
    path = make_ling_v2(tmp_path / "ling", 5, tokenizer=False)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=field):
        load_model_config(path)
