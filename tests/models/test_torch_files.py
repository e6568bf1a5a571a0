"""Files of torch.save are read like safetensors files, and never run code."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint.torch_file import read_torch_header
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.weights import WeightReader

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
          torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)  # fmt: skip


def drawn() -> dict[str, torch.Tensor]:
    """A tensor of each dtype; two that share memory, one with an offset."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    tensors = {f"t.{i}": torch.randint(0, 2, (3, i + 1), generator=generator).to(d) for i, d in enumerate(DTYPES)}
    whole = torch.randn(6, 4, generator=generator)
    return tensors | {"whole": whole, "rows": whole[2:5], "scalar": torch.tensor(3.5), "none": torch.zeros(0, 2)}


@pytest.mark.parametrize("wrapped", [False, True])
def test_tensors_are_those_that_were_saved(tmp_path: Path, wrapped: bool) -> None:
    tensors = drawn()
    tensors["parameter"] = torch.nn.Parameter(torch.randn(2, 3), requires_grad=False)
    torch.save({"state_dict": tensors, "epoch": 3} if wrapped else tensors, tmp_path / "pytorch_model.bin")
    reader = WeightReader(tmp_path, torch.float32, read=lambda path: read_checkpoint(path, "pt"))
    for name, tensor in tensors.items():
        read = reader._files[name].read(name)
        assert read.dtype == tensor.dtype and torch.equal(read.float(), tensor.data.float()), name


def test_shards_and_choice_of_files(tmp_path: Path) -> None:
    first, second = {"a.weight": torch.ones(2)}, {"b.weight": torch.ones(3)}
    for i, tensors in enumerate((first, second)):
        torch.save(tensors, tmp_path / f"pytorch_model-0000{i + 1}-of-00002.bin")
    torch.save({"step": 1}, tmp_path / "training_args.bin")
    assert set(read_checkpoint(tmp_path)) == {"a.weight", "b.weight"}
    index = {
        "weight_map": {"a.weight": "pytorch_model-00001-of-00002.bin", "b.weight": "pytorch_model-00002-of-00002.bin"}
    }
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert {name: file.path.name for name, file in read_checkpoint(tmp_path).items()} == index["weight_map"]
    assert read_checkpoint(tmp_path, "safetensors") == {}
    save_file({"c.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert set(read_checkpoint(tmp_path)) == {"c.weight"} and set(read_checkpoint(tmp_path, "pt")) == {
        "a.weight",
        "b.weight",
    }


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch attacked",)


def test_nothing_but_tensors_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": Attack()}, file)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: it needs posix\.system, .* without running code"):
        read_torch_header(file)
    assert not (tmp_path / "attacked").exists()
    torch.save({"a": torch.ones(3, 4).t()}, file)
    with pytest.raises(CheckpointError, match="tensor a was saved as a view that is not contiguous"):
        read_torch_header(file)
    torch.save([1, 2], file)
    with pytest.raises(CheckpointError, match="holds a list"):
        read_torch_header(file)
    torch.save({"a": torch.ones(3)}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"saved before torch 1\.6"):
        read_torch_header(file)
    torch.save({"a": torch.ones(3000)}, file)
    file.write_bytes(file.read_bytes()[:6000])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: not a ZIP archive: truncated"):
        read_torch_header(file)
