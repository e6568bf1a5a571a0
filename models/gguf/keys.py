"""Metadata of the architecture of a GGUF file, and its rotary settings. Imports no torch."""

from __future__ import annotations

import math
import struct
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.gguf_container import Container

FREQUENCIES = "rope_freqs.weight"
ROTARY = (FREQUENCIES, "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors with factors of frequencies."""
_LOW, _HIGH = 1.0, 4.0
"""`low_freq_factor` and `high_freq_factor` of every published Llama 3."""


class Keys:
    """Metadata of the architecture, checked for presence and kind."""

    def __init__(self, container: Container, architecture: str) -> None:
        self.container, self.architecture = container, architecture
        self.path, self.metadata = container.path, container.metadata

    def get(self, name: str, default: Any = None) -> Any:
        found = self.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(found, tuple):
            values = set(found)
            if len(values) != 1:
                raise ConfigError(f"{self.path}: {self.architecture}.{name} differs between layers: not supported")
            found = values.pop()
        return found

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.metadata

    def most(self, name: str) -> Any:
        """The largest number of all layers. Raises ConfigError: there is none."""
        found = self.metadata.get(f"{self.architecture}.{name}")
        return max(found) if isinstance(found, tuple) and found else self.need(name)

    def by_layer(self, name: str, layers: int) -> list[Any]:
        """A number for each layer."""
        found = self.metadata.get(f"{self.architecture}.{name}", 0)
        values = list(found) if isinstance(found, tuple) else [found] * layers
        if len(values) < layers:
            raise ConfigError(f"{self.path}: {self.architecture}.{name} has {len(values)} values for {layers} layers")
        return values[:layers]

    def need(self, name: str) -> Any:
        found = self.get(name)
        if found is None:
            raise ConfigError(
                f"{self.path}: has no {self.architecture}.{name}; convert the model again with a current llama.cpp"
            )
        return found


def windows(keys: Keys, layers: int, every: int) -> dict[str, Any]:
    """`sliding_window` and `layer_types`: of a list or a period in the file, else every n-th layer has no window."""
    name, window = f"{keys.architecture}.attention.sliding_window_pattern", keys.get("attention.sliding_window") or None
    pattern = keys.metadata.get(name, every)
    if not isinstance(pattern, int | tuple) or not pattern:
        raise ConfigError(f"{keys.path}: {name} {pattern!r:.60} is no period of layers and no list of them")
    windowed = pattern if isinstance(pattern, tuple) else [(i + 1) % pattern != 0 for i in range(layers)]
    kinds = ["sliding_attention" if own and window else "full_attention" for own in windowed]
    return {"sliding_window": window, "layer_types": kinds}


def scaling(keys: Keys) -> dict[str, Any] | None:
    """`rope_scaling` from the metadata."""
    kind, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor")
    if kind in (None, "none") or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{keys.path}: {keys.architecture}.rope.scaling.type {kind!r} is not supported")
    found: dict[str, Any] = {"rope_type": kind, "factor": keys.need("rope.scaling.factor")}
    if kind == "linear":
        return found
    found["original_max_position_embeddings"] = keys.need("rope.scaling.original_context_length")
    kinds = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
    for ours, theirs in kinds.items():
        if (value := keys.get(f"rope.scaling.yarn_{theirs}")) is not None:
            found[ours] = value
    if multiplier := keys.get("rope.scaling.yarn_log_multiplier"):
        found["mscale"] = found["mscale_all_dim"] = round(10 * multiplier, 6)
    return found


def llama3(keys: Keys, theta: float, width: int) -> dict[str, Any] | None:
    """Llama 3's settings from the factors by which the file's tensor divides frequencies.

    A frequency with w tokens a turn is kept for w < original / 4, divided by `factor` for w > original, and
    interpolated between them: one interpolated factor gives `original`, and all others must agree.
    """
    factors = factors_of(keys.container)
    if factors is None:
        return None
    factor = max(factors)
    if factor == 1.0:
        return None
    turns = [2 * math.pi * theta ** (2 * i / width) for i in range(width // 2)]
    original = None
    for found, turn in zip(factors, turns):
        if 1.0 < found < factor:
            smooth = (1 / found - 1 / factor) / (1 - 1 / factor)
            original = round(turn * (_LOW + smooth * (_HIGH - _LOW)))
            break
    if original is not None and len(factors) == len(turns):
        wanted = [_factor_of(turn, factor, original) for turn in turns]
        if all(abs(a - b) <= 2e-3 * b for a, b in zip(factors, wanted)):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    raise ConfigError(
        f"{keys.path}: the factors in {FREQUENCIES} are not those of Llama 3's rotary embedding, the only one that is "
        "served; use the model's safetensors"
    )


def longrope(keys: Keys) -> dict[str, Any] | None:
    """Phi-3's settings: a list of factors for long contexts, and one for others."""
    lists = {name: factors_of(keys.container, f"rope_factors_{name}.weight") for name in ("long", "short")}
    if lists["long"] is None:
        return None
    original = keys.need("rope.scaling.original_context_length")
    found = {f"{name}_factor": None if factors is None else list(factors) for name, factors in lists.items()}
    return {"rope_type": "longrope", "original_max_position_embeddings": original, **found}


def _factor_of(turn: float, factor: float, original: int) -> float:
    if turn < original / _HIGH:
        return 1.0
    if turn > original / _LOW:
        return factor
    smooth = (original / turn - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - smooth) / factor + smooth)


def factors_of(container: Container, name: str = FREQUENCIES) -> tuple[float, ...] | None:
    info = next((info for info in container.tensors if info.name == name), None)
    if info is None:
        return None
    if info.type != 0 or len(info.shape) != 1:
        raise ConfigError(f"{container.path}: {name} must be a vector of type F32")
    with container.path.open("rb") as file:
        file.seek(info.start)
        data = file.read(4 * info.shape[0])
    if len(data) < 4 * info.shape[0]:
        raise ConfigError(f"{container.path}: truncated in {name}; download it again")
    return struct.unpack(f"<{info.shape[0]}f", data)
