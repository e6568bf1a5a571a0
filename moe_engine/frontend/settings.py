"""Settings of the frontend for all requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_engine.media.settings import MediaSettings
from moe_engine.structured_output.backend import GrammarSettings
from moe_engine.types.step_settings import LoraSettings


@dataclass(frozen=True)
class FrontendSettings:
    """Settings for all requests. A field with the name of a flag has that flag's value (`ResolvedConfig.select`)."""

    stream_interval: int = 1
    incremental_streaming_output: bool = False
    allow_auto_truncate: bool = False
    weight_version: str = "default"
    preferred_sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of /generate's sampling_params."""
    max_logprobs: int = 20
    """Max log-probabilities per token, top or by id; -1: no limit."""
    max_sequences: int | None = 16384
    """Max sequences (prompts times n) of one request; None: no limit."""
    max_prompt_tokens: int | None = 2**24
    """Max prompt tokens of one request, counting each copy: about 40 bytes each in the engine core. None: no limit."""
    enable_custom_logit_processor: bool = False
    """Whether requests may bring code that changes their logits."""
    enable_memory_saver: bool = False
    uses_priority: bool = False
    """Whether the priority of requests has an effect (`SchedulingArgs.uses_priority`)."""
    abort_on_priority_when_disabled: bool = False
    enable_return_hidden_states: bool = False
    enable_return_routed_experts: bool = False
    random_seed: int = 0
    """Seed of the generator that draws seeds for requests without one."""
    grammars: GrammarSettings = field(default_factory=GrammarSettings)
    disaggregation_mode: str = "null"
    lora: LoraSettings | None = None
    media: MediaSettings = field(default_factory=MediaSettings)
    """Images of requests."""
    reasoning_parser: str | None = None
    """The reasoning parser, for requests with `require_reasoning`."""
