"""config.json with fields of two dialects, and with null flags."""

from __future__ import annotations

from pathlib import Path

from tests.models.published import KIMI_LINEAR, LING_FLASH, LLAMA
from tests.models.test_config import parse


def test_rotary_settings_of_both_dialects_in_a_file(tmp_path: Path) -> None:
    """As transformers reads them: `rope_scaling` first, and the length before scaling beside it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    both = {"rope_scaling": yarn, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    found = parse(tmp_path, LLAMA | {"rope_theta": 7e5} | both).rope
    assert (found.kind, found.theta, found.original_max_position) == ("yarn", 7e5, 64)
    assert parse(tmp_path, LLAMA | both | {"original_max_position_embeddings": 32}).rope.original_max_position == 32
    assert parse(tmp_path, LLAMA | both | {"rope_scaling": {}}).rope.kind == "linear"


def test_a_flag_of_renormalized_weights_that_is_null_is_false(tmp_path: Path) -> None:
    for published, name in ((KIMI_LINEAR, "moe_renormalize"), (LING_FLASH, "norm_topk_prob")):
        absent = {key: value for key, value in published.items() if key != name}
        for fields, wanted in ((absent, True), (absent | {name: None}, False), (absent | {name: True}, True)):
            moe = parse(tmp_path, fields).moe
            assert moe is not None and moe.renormalize == wanted, (name, fields.get(name))
