"""A plan of a folder with weight files counts what their headers say, as `serve` does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.cli.main import main
from moe_engine.config.args import EngineArgs
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.hardware.table import parse_cluster
from tests.models.checkpoints import make_checkpoint

LOAD = ["--hardware", "2xH200", "--workload", "in=20,out=20", "--tp-size", "2", "--concurrency", "4", "--json"]


def odd_checkpoint(kind: str, folder: Path) -> Path:
    """With router weights in float32 or bfloat16, tied embeddings, in block FP8."""
    if kind == "tied":
        return make_checkpoint("qwen3", folder, tie_word_embeddings=True)
    path = make_checkpoint("deepseek_v3", folder, fp8=kind == "fp8")
    if kind == "routers":
        for file in path.glob("*.safetensors"):
            tensors = load_file(file)
            for name in tensors:
                wide = name.endswith("mlp.gate.weight") or "norm" in name
                tensors[name] = tensors[name].to(torch.float32 if wide else torch.bfloat16)
            save_file(tensors, file)
    return path


@pytest.mark.parametrize("kind", ["plain", "routers", "fp8", "tied"])
def test_the_ledger_is_that_of_the_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    folder = str(odd_checkpoint(kind, tmp_path))
    assert main(["plan", "--model-path", folder, *LOAD]) == 0, capsys.readouterr().err
    rows = json.loads(capsys.readouterr().out)["plans"][0]["memory"]["rows"]
    args = EngineArgs.from_kwargs(model_path=folder, tp_size=2, device="cuda")
    launch = prepare(args, parse_cluster("2xH200").machine)
    assert [row["num_bytes"] for row in rows] == [row.num_bytes for row in launch.ledger.all_rows()]
    assert "in 1 file" in rows[0]["detail"]


def test_a_truncated_file_is_refused_and_a_folder_without_files_is_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_checkpoint("deepseek_v3", tmp_path)
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    assert main(["plan", "--model-path", str(folder), *LOAD]) == 2
    err = capsys.readouterr().err
    assert file.name in err and len(err.strip().splitlines()) == 1
    file.unlink()
    assert main(["plan", "--model-path", str(folder), *LOAD]) == 0
