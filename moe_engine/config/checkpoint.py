"""Finding a checkpoint and reading what its files promise: names, shapes and sizes of tensors, no tensor data."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moe_engine.errors import CheckpointError, ConfigError

MAX_HEADER_BYTES = 512 << 20
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


@dataclass(frozen=True)
class CheckpointFacts:
    """Sums over the safetensors headers. `num_elements` counts weights only: no FP8 scales, no MTP layers."""

    num_files: int
    num_tensors: int
    num_elements: int
    stored_bytes: int


def embedded_model() -> Path:
    """The small model that comes with the package."""
    from moe_engine.models import demo

    return Path(demo.CHECKPOINT_DIR)


def locate(path: str | None, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The local folder of a model: given, embedded (None), or a hub id, downloaded first.

    Raises:
        ConfigError: there is no such folder, or the hub does not deliver it.
    """
    if path is None:
        return embedded_model()
    folder = Path(path).expanduser()
    if folder.exists():
        for flag, value in (("--revision", revision), ("--download-dir", download_dir)):
            if value is not None:
                raise ConfigError(f"{flag} {value}: only for hub models, and --model-path {path} is a local folder")
        return folder
    if not HUB_ID.fullmatch(path):
        raise ConfigError(f"--model-path {path}: no such folder, and not a hub id like owner/name")
    return _download(path, revision, download_dir)


def _download(hub_id: str, revision: str | None, download_dir: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, revision=revision, cache_dir=download_dir, allow_patterns=HUB_PATTERNS))
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(
            f"--model-path {hub_id}: no such folder here, and the hub did not deliver it ({reason}); "
            "give a local folder, or log in with `hf auth login`"
        ) from None


def inspect(folder: Path, num_layers: int) -> CheckpointFacts | None:
    """Reads the headers of every safetensors file; None where the folder has none.

    Args:
        num_layers: layers of the model; tensors of layers beyond (MTP) are not counted as weights.

    Raises:
        CheckpointError: a file named by the index is missing, or a file is shorter than its header says.
    """
    files = _files(folder)
    if not files:
        return None
    num_tensors = num_elements = stored = 0
    for file in files:
        header = _read_header(file)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            num_tensors += 1
            stored += end - begin
            if not _is_scale(name) and not _is_beyond(name, num_layers):
                num_elements += _product(entry["shape"])
    return CheckpointFacts(len(files), num_tensors, num_elements, stored)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error!r})") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{folder}: {missing[0]}{more} of {len(names)} weight files missing; download the checkpoint again, "
            "or use --load-format dummy"
        )
    return [folder / name for name in names]


def _read_header(file: Path) -> dict[str, dict]:
    with file.open("rb") as opened:
        start = opened.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        if size > MAX_HEADER_BYTES:
            raise CheckpointError(f"{file}: not a safetensors file; download it again")
        try:
            header = json.loads(opened.read(size))
            header.pop("__metadata__", None)
            data = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{file}: its header is damaged; download it again") from None
    length = file.stat().st_size
    if length < 8 + size + data:
        raise CheckpointError(f"{file}: truncated, {length} of {8 + size + data} bytes are there; download it again")
    return header


def _is_scale(name: str) -> bool:
    return name.endswith(("_scale_inv", ".scale", "_scale"))


def _is_beyond(name: str, num_layers: int) -> bool:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= num_layers


def _product(shape: Iterable[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
