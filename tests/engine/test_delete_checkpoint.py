"""--delete-ckpt-after-loading: weight files go, config and tokenizer stay, the engine answers; what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_engine import Engine
from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.frontend.weights.delete_checkpoint import remove
from moe_engine.planning.prepare import prepare
from tests.models.checkpoints import make_checkpoint

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}


@pytest.mark.usefixtures("forked_processes")
def test_weight_files_go_when_all_ranks_have_loaded_them(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model", max_shard_bytes=20_000, **SMALL)
    before = {file.name for file in path.iterdir()}
    other = path / "notes.bin"
    other.write_bytes(b"x")
    with Engine(
        model_path=str(path), dtype="float32", max_total_tokens=256, cpu_threads=1, delete_ckpt_after_loading=True
    ) as engine:
        left = {file.name for file in path.iterdir()}
        assert before - left == {name for name in before if "safetensors" in name} and len(before - left) > 2
        assert {"config.json", "tokenizer.json", other.name} <= left
        answer: Any = engine.generate("abc", {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True})
        assert len(answer["output_ids"]) == 3


def test_links_of_the_hubs_cache_go_with_their_blobs(tmp_path: Path) -> None:
    blobs, snapshot, own = (tmp_path / name for name in ("blobs", "snapshots", "own"))
    for folder in (blobs, snapshot, own):
        folder.mkdir()
    (blobs / "abc").write_bytes(b"12345")
    (own / "mine").write_bytes(b"123")
    (snapshot / "a.safetensors").symlink_to("../blobs/abc")
    (snapshot / "b.safetensors").symlink_to(own / "mine")
    (snapshot / "c.safetensors").write_bytes(b"1234")
    (snapshot / "d.safetensors").symlink_to("nowhere")
    size, errors = remove(sorted(snapshot.iterdir()))
    assert size == 9 and [Path(str(error.filename)).name for error in errors] == ["nowhere"]
    assert not list(blobs.iterdir()) and (own / "mine").is_file()
    assert [path.name for path in snapshot.iterdir()] == ["d.safetensors"]


def test_what_is_needed_again_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model", tokenizer=False, **SMALL)
    for flags, message in (
        ({"model_path": None}, "the embedded model belongs to this package"),
        ({"load_format": "dummy"}, "--load-format dummy: no files are loaded"),
    ):
        with pytest.raises(ConfigError, match=f"--delete-ckpt-after-loading.*{message}"):
            prepare(EngineArgs.from_kwargs(**{"model_path": str(path), "delete_ckpt_after_loading": True} | flags))
    from tests.models.test_gguf import write_both

    file, _ = write_both(tmp_path / "gguf", "llama")
    with pytest.raises(ConfigError, match="holds the tokenizer too"):
        prepare(EngineArgs.from_kwargs(model_path=str(file), delete_ckpt_after_loading=True))
    shutil.rmtree(tmp_path / "gguf")
