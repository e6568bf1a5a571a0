"""Names of pages depend on the `repr` of the model's config, which must be equal in all processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moe_engine

CONFIG = Path(moe_engine.__file__).parent / "demo" / "checkpoint" / "config.json"
CODE = "import sys; from moe_engine.models.config_file import load_model_config; print(load_model_config(sys.argv[1]))"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def described(folder: Path, seed: str) -> str:
    """The config's `repr` in a process with this seed of string hashes."""
    environ = os.environ | {"PYTHONHASHSEED": seed}
    return subprocess.run(
        [sys.executable, "-c", CODE, str(folder)], env=environ, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.mark.parametrize("section", [None, AWQ])
def test_a_config_is_described_equally_in_every_process(section: dict[str, Any] | None, tmp_path: Path) -> None:
    """The two seeds order a set of the two kernel families differently."""
    shutil.copy(CONFIG, tmp_path)
    if section is not None:
        fields = json.loads(CONFIG.read_text())
        (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": section}))
    first, second = (described(tmp_path, seed) for seed in "01")
    assert first and first == second
