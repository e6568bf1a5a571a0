"""What a recorder is made from.

Legend: L layers, E logical experts, P physical experts, G expert-parallel ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

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
        directory: where dumps are written.
        source: who counts: the ``router`` by its choices, or the ``dispatcher`` by what arrived for this rank's slots.
        buffer_size: passes that stat keeps (``--expert-distribution-recorder-buffer-size``); -1 keeps all.
        rank, world_size: of the ranks whose counts are summed.
        ep_rank, ep_size: G and this rank's place among them; its slots are numbers ep_rank * P/G and on.
        padded: ids may hold -1 for rows that are no token; costs one operator a layer.
        report_balancedness: compute it after each pass, which sums the counts over the ranks.
        device: of ids and counts.

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
    world_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    top_k: int = 1
    padded: bool = False
    report_balancedness: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        flag = f"--expert-distribution-recorder-mode {self.mode}"
        if self.mode not in MODES:
            raise ConfigError(f"{flag}: unknown; there are {', '.join(MODES)}")
        if self.source not in SOURCES:
            raise ConfigError(f"recorder source {self.source}: unknown; there are {', '.join(SOURCES)}")
        if self.source == {"stat_approx": "router", "per_token": "dispatcher"}.get(self.mode):
            raise ConfigError(
                f"{flag} cannot count by the {self.source}: stat_approx takes what DeepEP's normal mode "
                "reports, per_token what the router chooses; stat and per_pass take either"
            )
        if self.mode == "per_token" and self.top_k > MAX_TOP_K:
            raise ConfigError(f"{flag} holds {MAX_TOP_K} experts a token, this model has {self.top_k}; use per_pass")
        if self.buffer_size != -1 and self.buffer_size < 1:
            raise ConfigError(
                f"--expert-distribution-recorder-buffer-size {self.buffer_size}: give a number of passes, or -1 for all"
            )
        if self.num_physical % self.ep_size:
            raise ConfigError(f"{self.num_physical} physical experts are not a multiple of --ep-size {self.ep_size}")
