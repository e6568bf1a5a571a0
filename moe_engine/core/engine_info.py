"""Facts of a ready engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_engine.models.config_sections.pooling import PoolingConfig
from moe_engine.models.config_sections.vision import VisionConfig


@dataclass(frozen=True)
class EngineInfo:
    """Facts of a ready engine; constant over its lifetime. A core sends them once, in `messages.CoreReady`.

    A field with the name of a value of `ResolvedConfig` has that value (`ResolvedConfig.select`).
    """

    model_path: str
    served_model_name: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    context_len: int
    max_total_num_tokens: int
    max_req_input_len: int
    max_running_requests: int
    eos_token_ids: tuple[int, ...]
    page_size: int
    dtype: str
    tokenizer_path: str = ""
    hidden_size: int = 0
    experts_width: int = 0
    """Layers times experts per token."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    host_tier_tokens: int = 0
    """Tokens of the host-RAM tier of the KV cache; 0 without one."""
    num_window_slots: int = 0
    """Tokens of the pool of windowed layers; 0: these layers have no pool of their own."""
    graph_bytes: int = 0
    """The memory ledger's entry for CUDA graphs; 0 without graphs."""
    backends: dict[str, str] = field(default_factory=dict)
    """Backend name by kernel family."""
    hicache_storage_backend: str | None = None
    """Storage below the host-RAM tier of the KV cache; None without one."""
    disaggregation_mode: str = "null"
    pooling: PoolingConfig | None = None
    """Pooling of a model that serves vectors; None for text generation."""
    vision: VisionConfig | None = None
    """Vision tower of a model that takes images; None for others."""
