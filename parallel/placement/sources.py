"""Values of ``--init-expert-location``: ``trivial``, a .pt or .json file, or JSON itself; a map or recorded counts.

Legend: L layers, P slots, E logical experts, S passes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.policies import plan_placement
from moe_engine.parallel.placement.torch_file import load_tensors

FLAG = "--init-expert-location"
MAP, COUNTS = "physical_to_logical_map", "logical_count"


def from_any(value: str, layout: ExpertLayout, num_layers: int, policy: str = "auto") -> ExpertPlacement:
    """The placement given by a flag's value.

    Args:
        value: ``trivial``; the path of a .pt or .json file, or JSON text, that holds `physical_to_logical_map` [L, P]
            (used as it is) or `logical_count` [L, E] or [S, L, E] (planned with EPLB; a stat dump is such a file).
        layout: required sizes.
        num_layers: L, all layers of the model; dense ones included, unused.
        policy: the EPLB policy for counts.

    Raises:
        ConfigError: with the flag or the file, the error, and the required value.
    """
    if value == "trivial":
        return ExpertPlacement.trivial(layout, num_layers)
    source, data = _load(value)
    if MAP in data:
        table = _array(data[MAP], f"{source}: {MAP}")
        if table.shape != (num_layers, layout.num_physical):
            raise ConfigError(
                f"{source}: {MAP} has shape {list(table.shape)}; {num_layers} layers and {layout.num_experts} experts "
                f"with --ep-num-redundant-experts {layout.num_redundant} need [{num_layers}, {layout.num_physical}]"
            )
        if table.min() < 0:  # only lost ranks have empty slots
            raise ConfigError(f"{source}: {MAP} holds {table.min()}; experts are 0 to {layout.num_experts - 1}")
        return _named(source, lambda: ExpertPlacement(table, layout.num_experts, layout.num_ranks)).require_complete(
            source
        )
    if COUNTS in data:
        counts = _array(data[COUNTS], f"{source}: {COUNTS}")
        if counts.ndim not in (2, 3) or counts.shape[-2] != num_layers:
            raise ConfigError(
                f"{source}: {COUNTS} has shape {list(counts.shape)}; needed: [{num_layers}, {layout.num_experts}], "
                "or passes in front"
            )
        return _named(source, lambda: plan_placement(counts, layout, policy))
    raise ConfigError(f"{source}: holds neither {MAP} nor {COUNTS}, but {', '.join(map(str, data)) or 'nothing'}")


def _load(value: str) -> tuple[str, Mapping[str, Any]]:
    """The source's name for errors, and the mapping in it."""
    if value.lstrip().startswith("{"):
        return FLAG, _parse(value, FLAG)
    path = Path(value)
    if path.suffix not in (".pt", ".json"):
        raise ConfigError(f"{FLAG} {value}: give trivial, a .pt or .json file, or JSON that starts with {{")
    source = f"{FLAG} {value}"
    if path.suffix == ".pt":
        return source, _mapping(load_tensors(path, source), source)
    try:
        return source, _parse(path.read_text(), source)
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror or error}") from error


def _parse(text: str, source: str) -> Mapping[str, Any]:
    try:
        return _mapping(json.loads(text), source)
    except ValueError as error:
        raise ConfigError(f"{source}: not JSON: {error}") from error


def _mapping(data: Any, source: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: holds a {type(data).__name__}; expected an object with {MAP} or {COUNTS}")
    return data


def _array(value: Any, source: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ConfigError(f"{source}: rows of unequal length") from error
    if not np.issubdtype(array.dtype, np.number) or not array.size:
        raise ConfigError(f"{source}: expected a table of numbers")
    if np.issubdtype(array.dtype, np.floating) and (array != np.floor(array)).any():
        raise ConfigError(f"{source}: holds fractions; expected integers")
    return array


def _named(source: str, make: Any) -> ExpertPlacement:
    """`make()`, with the source as prefix of its errors."""
    try:
        placement = make()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    assert isinstance(placement, ExpertPlacement)
    return placement
