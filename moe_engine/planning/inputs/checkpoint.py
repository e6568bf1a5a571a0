"""Locates a checkpoint, and sums over its safetensors headers."""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from moe_engine.errors import ConfigError
from moe_engine.models.checkpoint.tensor_header import WeightFile
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.formats.table import format_in_headers
from moe_engine.models.tensors.model import LATENT_SCALES, ROUTERS, layer_index, mtp_layers

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
"""Reasons why nothing can be written into the folder of downloads."""


@dataclass(frozen=True)
class CheckpointFacts:
    """Sums over the safetensors headers. `num_elements` counts weights only: no scales, no MTP layers. `latent_scales`:
    by layer the scale of the latent (k_scale), NaN for a tensor that is not one number. `bf16_gates`: elements of the
    routers' weights that are stored in bfloat16, `mtp_bf16_gates`: of the MTP layers' routers."""

    num_files: int
    num_elements: int
    stored_bytes: int
    latent_scales: Mapping[int, float] = field(default_factory=dict)
    bf16_gates: int = 0
    mtp_bf16_gates: int = 0


def embedded_model() -> Path:
    """Folder of the small model embedded in the package."""
    from moe_engine import demo

    return Path(demo.CHECKPOINT_DIR)


def locate(
    path: str | None, revision: str | None = None, download_dir: str | None = None, flag: str = "--model-path",
    weights: bool = True,
) -> Path:  # fmt: skip
    """The local folder of a model: a folder, the embedded model (None), or a downloaded hub id. `flag`: for messages.
    `weights`: of a hub model also the weight files are downloaded.

    Raises:
        ConfigError: there is no such folder, or it cannot be read, or the download fails.
    """
    if path is None:
        return embedded_model()
    if not path:
        raise ConfigError(f"{flag} is empty: give a folder, a GGUF file or a hub id, or leave it out")
    folder = Path(os.path.expanduser(path))
    if _exists(folder, flag):
        for option, value in (("--revision", revision), ("--download-dir", download_dir)):
            if value is not None:
                raise ConfigError(f"{option} {value}: only for hub models, and {flag} {path} is a local folder")
        return folder
    if not HUB_ID.fullmatch(path):
        raise ConfigError(f"{flag} {path}: no such folder, and not a hub id like owner/name")
    return _download(path, revision, download_dir, flag, HUB_PATTERNS if weights else HUB_PATTERNS[:1])


def _exists(folder: Path, flag: str) -> bool:
    """Raises ConfigError: this process may not read the folder, or not search one above it."""
    try:
        if os.access(folder, os.R_OK | os.X_OK if stat.S_ISDIR(os.stat(folder).st_mode) else os.R_OK):
            return True
    except PermissionError:
        pass
    except (OSError, ValueError):  # also a name that is too long
        return False
    raise ConfigError(f"{flag} {folder}: no permission to read it; run `chmod -R a+rX` on it as its owner")


def _download(hub_id: str, revision: str | None, download_dir: str | None, flag: str, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, revision=revision, cache_dir=download_dir, allow_patterns=patterns))
    except Exception as error:
        reason, fix = (str(error).strip() or repr(error)).splitlines()[0], "or log in with `hf auth login`"
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            fix = "or another folder for downloads with --download-dir"
        elif isinstance(error, (ConnectionError, FileNotFoundError)):  # no answer, or HF_HUB_OFFLINE, and no copy
            fix = "or check this machine's network, its proxy and HF_ENDPOINT"
        raise ConfigError(
            f"{flag} {hub_id}: no such folder here, and the download from the hub failed ({reason}); "
            f"give a local folder, {fix}"
        ) from None


def sums(
    files: Mapping[str, WeightFile], num_layers: int, declared: WeightFormat = PLAIN, without: str | None = None
) -> CheckpointFacts:
    """Sums over a checkpoint's headers.

    Args:
        num_layers: layers of the model; tensors of layers beyond (MTP) are not counted as weights.
        declared: the weight format in config.json.
        without: beginning of the names of tensors that are not loaded.
    """
    format = format_in_headers(declared, files)
    num_elements = stored = 0
    gates = [0, 0]  # of the model, of MTP layers
    mtp = mtp_layers(files)
    for name, file in files.items():
        if without is not None and name.startswith(without):
            continue
        tensor = file.tensors[name]
        stored += tensor.num_bytes
        layer = layer_index(name)
        if not format.is_scale(name) and layer < num_layers:
            num_elements += prod(tensor.shape)
        if name.endswith(ROUTERS) and tensor.dtype == "BF16" and (layer < num_layers or layer in mtp):
            gates[layer >= num_layers] += prod(tensor.shape)
    num_files = len({file.path for file in files.values()})
    return CheckpointFacts(num_files, num_elements, stored, latent_scales(files), *gates)


def latent_scales(files: Mapping[str, WeightFile]) -> dict[int, float]:
    """`CheckpointFacts.latent_scales`."""
    return {layer_index(name): _number(file, name) for name, file in files.items() if name.endswith(LATENT_SCALES)}


def _number(file: WeightFile, name: str) -> float:
    """The value of a tensor of one element, NaN for other shapes and types."""
    tensor = file.tensors[name]
    if prod(tensor.shape) != 1 or tensor.dtype not in ("F32", "F16", "BF16"):
        return float("nan")
    with file.path.open("rb") as stream:
        stream.seek(tensor.start)
        data = stream.read(tensor.num_bytes)
    if tensor.dtype == "BF16":  # the upper half of a float32
        data = bytes(2) + data
    value: float = struct.unpack("<e" if tensor.dtype == "F16" else "<f", data)[0]
    return value
