"""Damaged, foreign and misplaced weight files: errors that name the file and the fix, before a weight is read."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models.checkpoint_files import INDEX_FILE, read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from tests.examples import examples
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint
from tests.models.test_gguf import write_both

NAME, OTHER = "model.norm.weight", "lm_head.weight"


def checked(path: Path) -> None:
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config)


def rewritten(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edits the JSON header of a safetensors file."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = edit(header)
    made = (text if isinstance(text, str) else json.dumps(header)).encode()
    file.write_bytes(len(made).to_bytes(8, "little") + made + content[8 + length :])


HEADERS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda h: h[NAME].update(dtype="F4"), f"dtype 'F4' of tensor '{NAME}' is not supported"),
    (lambda h: h[NAME].update(dtype=["F32"]), "broken safetensors header"),
    (lambda h: h[NAME].update(dtype="F64"), f"tensor '{NAME}' of shape .* and dtype F64 does not fill"),
    (lambda h: h[NAME].update(dtype="I32"), "has dtype I32, not one of"),
    (lambda h: h[NAME].update(shape=[-1, -64]), f"tensor '{NAME}' has the shape"),
    (lambda h: h[NAME].update(shape=[64.0]), f"tensor '{NAME}' has the shape"),
    (lambda h: h[NAME].update(shape="ab"), f"tensor '{NAME}' has the shape"),
    (lambda h: h[NAME].update(data_offsets=[0]), "broken safetensors header"),
    (lambda h: h.update({NAME: h[OTHER] | {"shape": [1]}}), "does not fill"),
    (lambda h: h.update({"again": dict(h[NAME])}), "overlap in the file"),
    (lambda h: h.update({NAME: 3}), "broken safetensors header"),
    (lambda h: json.dumps(h)[:-1] + f', "{NAME}": {json.dumps(h[NAME])}}}', f"'{NAME}' is there twice"),
    (lambda h: "[]", "broken safetensors header"),
    (lambda h: "[" * 100_000, "broken safetensors header"),
]


@pytest.mark.parametrize(("edit", "words"), HEADERS, ids=[str(i) for i in range(len(HEADERS))])
def test_a_header_that_is_not_true(tmp_path: Path, edit: Callable[[dict[str, Any]], object], words: str) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1, tokenizer=False)
    rewritten(path / "model.safetensors", edit)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{words}"):
        checked(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "a", num_hidden_layers=1, tokenizer=False)
    file = path / "model.safetensors"
    content = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for wrong, words in (
        (b"", "truncated or not a safetensors file"),
        (b"<!DOCTYPE html><html>not found</html>", "truncated or not a safetensors file"),
        (pointer, "pointer of Git LFS.*git lfs pull"),
        ((1 << 40).to_bytes(8, "little") + content[8:], f"header of {1 << 40} bytes"),
        ((len(content) - 8).to_bytes(8, "little") + content[8:], "broken safetensors header"),
    ):
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{words}"):
            checked(path)
    file.unlink()
    os.mkfifo(path / "pipe.safetensors")  # not waited for
    with pytest.raises(CheckpointError, match=r"pipe\.safetensors: is no regular file"):
        checked(path)
    (path / "pipe.safetensors").unlink()
    file.symlink_to("../blobs/0123")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*No such file.*a link to \.\./blobs/0123"):
        checked(path)


def test_a_tensor_of_two_files(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1, tokenizer=False)
    (path / "model.safetensors").rename(path / "a.safetensors")
    save_file({NAME: torch.ones(64)}, path / "b.safetensors")
    with pytest.raises(CheckpointError, match=rf"b\.safetensors: tensor {NAME} is in a\.safetensors too"):
        checked(path)


INDEXES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda m: m.clear(), "lists no tensors"),
    (
        lambda m: m.update({NAME: "../other.safetensors"}),
        r"names '\.\./other\.safetensors', which is not in its folder",
    ),
    (lambda m: m.update({NAME: "/etc/passwd"}), "which is not in its folder"),
    (lambda m: m.update({NAME: 5}), "broken index .it has no weight_map, an object of file names"),
    (lambda m: m.update({NAME: None}), "broken index .it has no weight_map"),
    (lambda m: m.update({NAME: ["a"]}), "broken index .it has no weight_map"),
    (lambda m: m.update({"ghost": m[NAME]}), "lists ghost in .* does not have it .no file has it."),
    (
        lambda m: m.update({NAME: m[OTHER], OTHER: m[NAME]}),
        r"does not have it .model-0000\d-of-0000\d.safetensors has it",
    ),
    (lambda m: m.pop(NAME), f"{NAME}.* is missing"),
]


@pytest.mark.parametrize(("edit", "words"), INDEXES, ids=[str(i) for i in range(len(INDEXES))])
def test_an_index_that_is_not_true(tmp_path: Path, edit: Callable[[dict[str, Any]], object], words: str) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1, tokenizer=False, max_shard_bytes=50_000)
    index = json.loads((path / INDEX_FILE).read_text())
    assert index["weight_map"][NAME] != index["weight_map"][OTHER]
    edit(index["weight_map"])
    (path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        checked(path)


def test_links_of_the_hub_cache_in_a_folder_without_write_permission(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "x", num_hidden_layers=1, tokenizer=False, max_shard_bytes=50_000)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(source.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    before = {file.name: file.stat().st_mtime_ns for file in blobs.iterdir()}
    snapshot.chmod(0o500)
    try:
        checked(snapshot)
        stepper.load(snapshot)
    finally:
        snapshot.chmod(0o700)
    assert before == {file.name: file.stat().st_mtime_ns for file in blobs.iterdir()}


def damaged(content: bytes, head: int) -> bytes:
    """The content with a few other bytes in its first `head` bytes, cut off, or with bytes left out."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4))):
        place = random.randrange(head)
        data[place] = random.choice((0, 1, 48 + random.randrange(10), 0x7F, 0x80, 0xFF, random.randrange(256)))
    if random.random() < 0.2:
        del data[random.randrange(len(data)) :]
    if random.random() < 0.2:
        place = random.randrange(len(data) + 1)
        del data[place : place + random.randrange(40)]
    return bytes(data)


def write(folder: Path, kind: str) -> tuple[Path, Path]:
    """(model path, weight file)."""
    if kind == "gguf":
        path, _ = write_both(folder, random.choice(("llama", "deepseek_v3")))
        return path, path
    path = make_checkpoint("llama", folder, num_hidden_layers=1, tokenizer=False)
    file = path / "model.safetensors"
    if kind == "safetensors":
        return path, file
    torch.save(load_file(file), path / "pytorch_model.bin")
    file.unlink()
    return path, path / "pytorch_model.bin"


@pytest.mark.parametrize("kind", ["safetensors", "pt", "gguf"])
def test_any_damage_is_read_or_named(tmp_path: Path, kind: str) -> None:
    path, file = write(tmp_path, kind)
    content = file.read_bytes()
    head = {"safetensors": 8 + int.from_bytes(content[:8], "little")}.get(kind, min(len(content), 4000))
    tail = kind == "pt"  # a ZIP archive has its directory at the end
    for _ in range(examples(60)):
        if tail and random.random() < 0.7:
            file.write_bytes(damaged(content[::-1], 3000)[::-1])
        else:
            file.write_bytes(damaged(content, head))
        try:
            checked(path)
        except (CheckpointError, ConfigError) as error:
            assert file.name in str(error) or path.name in str(error)
