"""Loading needs little more memory than the weights, and its threads report errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.models.checkpoint.load_threads import for_each
from tests.models.checkpoints import make_checkpoint

SCRIPT = """
import resource, sys
import torch
from moe_engine.models import load_model_config
from moe_engine.models.loader import LoadOptions, load_model
from tests.models.stepper import make_backends

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(2)
config = load_model_config(sys.argv[1])
backends = make_backends(config, dtype="bfloat16")
load_model(sys.argv[2], load_model_config(sys.argv[2]), LoadOptions("bfloat16"), backends)  # imports and pools
before = peak()
model = load_model(sys.argv[1], config, LoadOptions("bfloat16"), backends)
print((peak() - before) / model.weight_bytes)
"""


@pytest.mark.slow
def test_peak_memory_while_loading(tmp_path: Path) -> None:
    wide: dict[str, Any] = {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "n_routed_experts": 96,
        "n_group": 1,
        "topk_group": 1,
    }
    large = make_checkpoint("deepseek_v3", tmp_path / "large", dtype="bfloat16", max_shard_bytes=30 << 20, **wide)
    small = make_checkpoint("deepseek_v3", tmp_path / "small", dtype="bfloat16")
    arguments = [sys.executable, "-c", SCRIPT, str(large), str(small)]
    done = subprocess.run(arguments, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.15


def test_for_each_covers_all_and_raises() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        done: list[int] = []
        for_each(50, list, lambda i, state: done.append(i))
        assert sorted(done) == list(range(50)) and torch.get_num_threads() == 3

        def fail(i: int, state: object) -> None:
            if i == 7:
                raise ValueError("seven")

        with pytest.raises(ValueError, match="seven"):
            for_each(50, lambda: None, fail)
        for_each(0, lambda: None, fail)
    finally:
        torch.set_num_threads(threads)
