"""Recorder settings. Imports no torch.

Legend: L layers, E logical experts, P physical experts, G expert-parallel ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError

MODES = ("stat", "stat_approx", "per_pass", "per_token")
SOURCES = ("router", "dispatcher")
DIRECTORY_VARIABLE = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
MAX_TOP_K = 8
"""Columns of `topk_ids_of_layer` in the per_token format."""


def recorder_directory(environment: Mapping[str, str]) -> Path:
    """Dump directory: the operator's variable, or the system's temporary directory. Never set by a request."""
    return Path(environment.get(DIRECTORY_VARIABLE) or tempfile.gettempdir())


@dataclass(frozen=True)
class RecorderConfig:
    """Sizes and settings of one rank's recorder.

    Args:
        mode: ``--expert-distribution-recorder-mode``.
        num_layers, num_experts, num_physical: L, E, P.
        directory: dump directory of a rank in the modes per_pass and per_token.
        source: what is counted: the ``router``'s choices, or tokens received per slot from the ``dispatcher``.
        buffer_size: passes stored in mode stat (``--expert-distribution-recorder-buffer-size``); -1 keeps all.
        rank: rank in names and contents of dumps.
        counts_here: True if this rank's choices count. If all ranks route the same tokens, only one rank counts.
        ep_rank, ep_size: G and this rank's index; its slots start at ep_rank * P/G.
        report_balancedness: compute balancedness after each pass, with an all_reduce of the counts.
        device: torch device of ids and counts.

    Raises:
        ConfigError: with the flag and the fix.
    """

    mode: str
    num_layers: int
    num_experts: int
    num_physical: int
    directory: Path
    source: str = "router"
    buffer_size: int = 1000
    rank: int = 0
    counts_here: bool = True
    ep_rank: int = 0
    ep_size: int = 1
    top_k: int = 1
    report_balancedness: bool = False
    device: Any = "cpu"

    def __post_init__(self) -> None:
        check_mode(self.mode, self.top_k, self.buffer_size)
        if self.source not in SOURCES:
            raise ConfigError(f"recorder source {self.source}: unknown; choose from {', '.join(SOURCES)}")
        if self.mode == "per_token" and self.source == "dispatcher":
            raise ConfigError(
                "--expert-distribution-recorder-mode per_token does not support the dispatcher source: it records "
                "router choices; use stat"
            )
        if self.num_physical % self.ep_size:
            raise ConfigError(f"{self.num_physical} physical experts are not a multiple of --ep-size {self.ep_size}")


def check_mode(mode: str, top_k: int, buffer_size: int) -> None:
    """Raises ConfigError for a mode that is unknown or does not support this model, and for an empty buffer."""
    flag = f"--expert-distribution-recorder-mode {mode}"
    if mode not in MODES:
        raise ConfigError(f"{flag}: unknown; choose from {', '.join(MODES)}")
    if mode == "per_token" and top_k > MAX_TOP_K:
        raise ConfigError(f"{flag} supports {MAX_TOP_K} experts per token, this model has {top_k}; use per_pass")
    if buffer_size != -1 and buffer_size < 1:
        raise ConfigError(
            f"--expert-distribution-recorder-buffer-size {buffer_size}: give a number of passes, or -1 for all"
        )
