"""Checkpoints are found and their files checked before weights are loaded."""

from __future__ import annotations

import errno
import json
import os

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.checkpoint_names import names as checkpoint_names
from moe_engine.models.config_sections.fields import read_json
from moe_engine.planning.inputs.checkpoint import locate, sums
from moe_engine.planning.prepare import prepare
from tests.config.conftest import machine, write_safetensors


def test_headers_are_summed(tmp_path):
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "model.embed_tokens.weight": ([8, 4], "BF16", 2),
            "model.layers.0.mlp.up_proj.weight": ([4, 4], "F8_E4M3", 1),
            "model.layers.0.mlp.up_proj.weight_scale_inv": ([1, 1], "F32", 4),
            "model.layers.1.eh_proj.weight": ([4, 8], "BF16", 2),
        },
    )
    facts = sums(read_checkpoint(tmp_path), num_layers=1)
    assert facts.num_files == 1
    assert facts.num_elements == 32 + 16 and facts.stored_bytes == 64 + 16 + 4 + 64
    assert not read_checkpoint(tmp_path / "nothing")


def test_the_names_of_a_file_are_changed_once(tmp_path, monkeypatch):
    """Published checkpoints have 90,000 tensors: a second loop over those of a file would take minutes."""
    changed = []
    with_names = checkpoint_names._with_names
    monkeypatch.setattr(
        checkpoint_names, "_with_names", lambda file, names: changed.append(file.path.name) or with_names(file, names)
    )
    for number in range(3):
        names = [f"language_model.model.layers.{number}.self_attn.{name}_proj.weight" for name in "qkvo"]
        write_safetensors(tmp_path / f"{number}.safetensors", dict.fromkeys(names, ([2, 2], "BF16", 2)))
    files = read_checkpoint(tmp_path)
    assert sorted(changed) == ["0.safetensors", "1.safetensors", "2.safetensors"]
    assert files["model.layers.2.self_attn.o_proj.weight"].tensors.keys() == {
        f"model.layers.2.self_attn.{name}_proj.weight" for name in "qkvo"
    }


def test_missing_truncated_and_damaged_files(tmp_path):
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(tmp_path / "one.safetensors", {"a": ([8], "BF16", 2)})
    with pytest.raises(CheckpointError, match=r"two.safetensors of 2 weight files missing"):
        read_checkpoint(tmp_path)
    write_safetensors(tmp_path / "two.safetensors", {"b": ([8], "BF16", 2)}, cut=3)
    with pytest.raises(CheckpointError, match="truncated"):
        read_checkpoint(tmp_path)
    for garbage in (b"", b"12345678", b"\x05" + bytes(7) + b"{nope", b"\x04" + bytes(7) + b"null"):
        (tmp_path / "two.safetensors").write_bytes(garbage)
        with pytest.raises(CheckpointError, match=r"two\.safetensors"):
            read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="index"):
        read_checkpoint(tmp_path)


def test_locate(tmp_path):
    assert locate(str(tmp_path)) == tmp_path
    assert locate(None).name == "checkpoint"
    for path in ("/no/such/folder", "./folder", "../folder"):
        with pytest.raises(ConfigError, match="no such folder, and not a hub id"):
            locate(path)
    with pytest.raises(ConfigError, match="--revision"):
        locate(str(tmp_path), revision="main")


def test_a_folder_of_the_hubs_cache_names_its_checkpoints(tmp_path):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"no such file; .*, for instance one in {snapshot.parent}$"):
        read_json(snapshot.parents[1] / "config.json")


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    """Root may read every folder: the system's answers are replaced."""

    def refused(path, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    for name, answer in (("access", lambda *arguments: False), ("stat", refused)):
        with monkeypatch.context() as patched, pytest.raises(ConfigError, match=r"--model-path .* no permission"):
            patched.setattr(os, name, answer)
            locate(str(tmp_path))


def test_prepare_without_weights(model_dir):
    folder = model_dir()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        prepare(EngineArgs.from_kwargs(model_path=str(folder)), machine())
    config = prepare(EngineArgs.from_kwargs(model_path=str(folder), load_format="dummy"), machine())
    assert config.model_path == str(folder) and config.random_seed >= 0
    overridden = EngineArgs.from_kwargs(
        model_path=str(folder), load_format="dummy", json_model_override_args='{"max_position_embeddings": 512}'
    )
    assert prepare(overridden, machine()).context_len == 512


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({}, None),
        ({"max_position_embeddings": 512}, None),
        ({"router_jitter_noise": 0.1, "max_position_embeding": 512}, "max_position_embeding, router_jitter_noise"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "foo": 1}, "foo"),
    ],
)
def test_overrides_that_no_parser_reads_are_named(model_dir, overrides, named):
    args = EngineArgs.from_kwargs(
        model_path=str(model_dir()), load_format="dummy", json_model_override_args=json.dumps(overrides)
    )
    notes = [note for note in prepare(args, machine()).notes if "--json-model-override-args" in note]
    wanted = f"--json-model-override-args: no effect of {named}: config.json has no such field"
    assert notes == ([] if named is None else [wanted])


def test_named_backend_that_cannot_run_is_refused(model_dir):
    args = EngineArgs.from_kwargs(
        model_path=str(model_dir()), load_format="dummy", dtype="float16", attention_backend="cpu"
    )
    with pytest.raises(ConfigError, match=r"--attention-backend cpu: .*float16"):
        prepare(args, machine())


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "--download-dir"),
        (PermissionError(errno.EACCES, "Permission denied"), "--download-dir"),
        (OSError("401: access to this repository is restricted"), "hf auth login"),
        (LocalEntryNotFoundError("Got: ConnectError"), "network"),
        (OfflineModeIsEnabled("offline mode is enabled"), "network"),
    ],
    ids=["full disk", "no permission", "gated", "no connection", "offline"],
)
def test_a_failed_download_names_the_fix(error, fix, monkeypatch):
    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(ConfigError, match=rf"owner/name: .* the download from the hub failed \(.*\); .*{fix}"):
        locate("owner/name")
