"""What a recorder is made from. Imports no torch.

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
    """Where dumps go: the operator's variable, or the system's temporary directory. Never a request's choice."""
    return Path(environment.get(DIRECTORY_VARIABLE) or tempfile.gettempdir())


@dataclass(frozen=True)
class RecorderConfig:
    """Sizes and choices of one rank's recorder.

    Args:
        mode: ``--expert-distribution-recorder-mode``.
        num_layers, num_experts, num_physical: L, E, P.
        directory: where a rank of the modes per_pass and per_token writes its dumps.
        source: who counts: the ``router`` by its choices, or the ``dispatcher`` by what arrived for this rank's slots.
        buffer_size: passes that stat keeps (``--expert-distribution-recorder-buffer-size``); -1 keeps all.
        rank: this rank's number, in names and contents of dumps.
        counts_here: whether this rank's choices count. Where all ranks route the same tokens only one rank's do.
        ep_rank, ep_size: G and this rank's place among them; its slots are numbers ep_rank * P/G and on.
        report_balancedness: compute it after each pass, which sums the counts over the ranks.
        device: of ids and counts, as torch takes it.

    Raises:
        ConfigError: names the flag and the fix.
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
            raise ConfigError(f"recorder source {self.source}: unknown; there are {', '.join(SOURCES)}")
        if self.mode == "per_token" and self.source == "dispatcher":
            raise ConfigError(
                "--expert-distribution-recorder-mode per_token cannot count by the dispatcher: it records what the "
                "router chooses"
            )
        if self.num_physical % self.ep_size:
            raise ConfigError(f"{self.num_physical} physical experts are not a multiple of --ep-size {self.ep_size}")


def check_mode(mode: str, top_k: int, buffer_size: int) -> None:
    """Raises ConfigError for a mode that is unknown or cannot record this model, and for a buffer of no passes."""
    flag = f"--expert-distribution-recorder-mode {mode}"
    if mode not in MODES:
        raise ConfigError(f"{flag}: unknown; there are {', '.join(MODES)}")
    if mode == "per_token" and top_k > MAX_TOP_K:
        raise ConfigError(f"{flag} holds {MAX_TOP_K} experts a token, this model has {top_k}; use per_pass")
    if buffer_size != -1 and buffer_size < 1:
        raise ConfigError(
            f"--expert-distribution-recorder-buffer-size {buffer_size}: give a number of passes, or -1 for all"
        )
