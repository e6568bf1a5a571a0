"""Measurements of a request by a client, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Answer:
    """Result of a request. Times in seconds; `ttft` 0 if no token arrived. `started` is on the monotonic clock."""

    prompt_len: int
    output_len: int = 0
    success: bool = False
    error: str = ""
    text: str = ""
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    started: float = 0.0
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    """Cached prompt tokens by tier: ``device``, ``host``, ``storage``; empty if the server does not report tiers."""
    output_ids: list[int] = field(default_factory=list)
    """Empty if the server does not report them."""
    retractions: int = 0
    accept_length: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase (`moe_engine.tuning.phases`), where asked for."""
    cut_tokens: int = 0
    """Simulated: tokens of the recorded answer for which the context or the KV pool had no room."""

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for answers of one token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None
