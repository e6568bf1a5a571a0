"""Flags of LoRA adapters. `planning.model.resolve_lora` makes `LoraSettings`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from moe_engine.config.field import flag
from moe_engine.config.values import parse_count
from moe_engine.errors import ConfigError

OTHER_BACKENDS = "other LoRA backends"


@dataclass(frozen=True)
class LoraArgs:
    enable_lora: bool = flag(
        False, "Serve LoRA adapters and the base model, several in one batch. --lora-paths implies it."
    )
    lora_paths: str | None = flag(
        None,
        "Adapters to load at start, as PEFT has saved them: NAME=PATH, PATH (its name is the path), or JSON such as "
        '\'{"lora_name": "fr", "lora_path": "/adapters/fr", "pinned": true}\'; in JSON a path may have spaces. A '
        "pinned adapter keeps its slot.",
        metavar="ADAPTER",
        many=True,
    )
    max_loras_per_batch: int = flag(
        8,
        "Different adapters in one batch: slots of adapters on the device. Requests of further adapters wait. The base "
        "model needs no slot.",
        parse=parse_count,
        metavar="N",
    )
    max_loaded_loras: int | None = flag(
        None,
        "Adapters in host memory at a time; to load more, unload one. Left out: no limit.",
        parse=parse_count,
        metavar="N",
    )
    max_lora_rank: int | None = flag(
        None,
        "Largest rank of an adapter; slots are allocated for it. Left out: that of --lora-paths.",
        parse=parse_count,
        metavar="RANK",
    )
    lora_target_modules: str | None = flag(
        None,
        "Modules that adapters may change, such as q_proj v_proj, or all. Left out: those of --lora-paths.",
        metavar="MODULE",
        many=True,
    )
    lora_backend: str | None = flag(
        None,
        "Kernels of the adapters' products. torch_native: plain torch; cpu: C++. Left out: triton on a GPU, cpu on a "
        "CPU.",
        choices=("triton", "cpu", "torch_native"),
        synonyms={"csgmv": "triton", "torch": "torch_native"},
        unsupported=dict.fromkeys(("flashinfer", "ascend", "triton_v2"), OTHER_BACKENDS),
    )


@dataclass(frozen=True)
class LoraEntry:
    """An adapter of --lora-paths."""

    name: str
    path: str
    pinned: bool = False


def lora_entries(text: str | None) -> list[LoraEntry]:
    """The adapters of --lora-paths. Raises ConfigError."""
    entries = [_entry(word) for word in _words(text or "")]
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--lora-paths: two adapters are named {name!r}; give each its own name: NAME=PATH")
    return entries


def _words(text: str) -> list[str | dict[str, Any]]:
    """The words of the flag: text without spaces, or JSON objects."""
    words: list[str | dict[str, Any]] = []
    decoder, rest = json.JSONDecoder(), text.strip()
    while rest:
        if not rest.startswith("{"):
            word, _, rest = rest.partition(" ")
            words.append(word)
        else:
            try:
                value, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"--lora-paths {rest:.80}: not valid JSON ({error})") from None
            words.append(value)
            rest = rest[end:]
        rest = rest.strip()
    return words


def _entry(word: str | dict[str, Any]) -> LoraEntry:
    if isinstance(word, str):
        name, equals, path = word.partition("=")
        entry = LoraEntry(name, path if equals else word)
    else:
        entry = _json_entry(word)
    if not entry.name or not PurePath(entry.path).parts:
        raise ConfigError(f"--lora-paths {word}: expected NAME=PATH, a path, or JSON")
    return entry


def _json_entry(word: dict[str, Any]) -> LoraEntry:
    unknown = set(word) - {"lora_name", "lora_path", "pinned"}
    name, path, pinned = word.get("lora_name"), word.get("lora_path"), word.get("pinned", False)
    if not unknown and isinstance(name, str) and isinstance(path, str) and isinstance(pinned, bool):
        return LoraEntry(name, path, pinned)
    raise ConfigError(
        f"--lora-paths {json.dumps(word):.200}: an adapter is an object with lora_name, lora_path (texts) and pinned "
        "(true or false)"
    )
