"""Options of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_engine.kernels.backends import LaunchKernels
from moe_engine.kernels.vendors.warming import StepShapes
from moe_engine.models import step_memory
from moe_engine.models.config import ModelConfig
from moe_engine.models.eagle_config import HeadConfig
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.types import SpeculationConfig
from moe_engine.types.step_settings import CompileSettings, GraphSettings, LoraSettings, StorageSettings


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker; every "auto" is resolved.

    A field with the name of a flag, or of a resolved value, has that value (`executor.make_worker.worker_options`).

    Args:
        dtype: name of the activation dtype; `kv_cache_dtype`: of the KV cache (`kv_format`), ``auto`` for the same.
        num_slots: tokens of the KV pool, in whole pages.
        num_snapshots: snapshots of states in the prefix cache.
        host_snapshots: states that the host-RAM tier can hold.
        host_window_slots: tokens of the host-RAM tier's pool of windowed layers.
        num_window_slots: tokens of the pool of windowed layers; 0: the KV of these layers is not bounded by the window.
        max_rows: max running requests.
        kernels: rows of the kernel families, for the model and its draft model.
        cpu_threads: threads of torch's operators; None: one per physical core this process may use.
        enable_deterministic_inference: a token is computed the same way alone and in a chunk (see `MLAFormPolicy`).
        draft_model: config of the model in `speculation.draft_model_path`, if there is one.
        draft_head: the EAGLE head in that folder, whose layer is `draft_model`.
        experts: placement, EPLB and expert distribution recording.
        graphs: steps that are captured as CUDA graphs.
        compiled: steps that torch.compile compiles.
        shapes: the largest sizes of a step, for kernels that compile at first use.
        logits_rows: max rows of logits at once; a step with more computes several passes.
        dummy_seed: seed of the random weights of load_format ``dummy``; not a flag.
        host_tier_tokens: tokens of the host-RAM tier of the KV cache.
        hicache_mem_layout, hicache_io_backend: form of the tier's host memory and copies (`worker.kv_cache.kv_copies`).
        storage: storage below the host-RAM tier, or None.
        lora: LoRA adapters; None without --enable-lora.
        offloaded_layers: layers whose weights wait in host memory.
        image_cache_bytes: results of the vision tower that are kept.
        mm_enable_dp_encoder: the ranks of an attention group divide the images of a step.
        kv_connector: name or path of its class (`moe_engine.kv_connectors`).
        absorbed_break_even: measured value of `MLAFormPolicy`; None derives it from the model's widths. Not a flag.
    """

    model_path: str
    model: ModelConfig
    kernels: LaunchKernels
    dtype: str
    num_slots: int
    context_len: int
    max_rows: int
    device: str = "cpu"
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    weight_loader_prefetch_checkpoints: bool = False
    weight_loader_prefetch_num_threads: int = 4
    weight_loader_drop_cache_after_load: bool = False
    cpu_threads: int | None = None
    enable_deterministic_inference: bool = False
    disable_shared_experts_fusion: bool = False
    speculation: SpeculationConfig | None = None
    draft_model: ModelConfig | None = None
    draft_head: HeadConfig | None = None
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    graphs: GraphSettings = field(default_factory=GraphSettings)
    compiled: CompileSettings = field(default_factory=CompileSettings)
    shapes: StepShapes = field(default_factory=lambda: StepShapes(0))
    logits_rows: int = step_memory.MAX_LOGITS_ROWS
    dummy_seed: int = 0
    absorbed_break_even: float | None = None
    host_tier_tokens: int = 0
    num_window_slots: int = 0
    num_snapshots: int = 0
    host_snapshots: int = 0
    host_window_slots: int = 0
    kv_connector: str = "host"
    hicache_mem_layout: str = "page_first"
    hicache_io_backend: str = "direct"
    storage: StorageSettings | None = None
    lora: LoraSettings | None = None
    image_cache_bytes: int = 0
    mm_enable_dp_encoder: bool = False
    offloaded_layers: tuple[int, ...] = ()

    @property
    def kv_dtype(self) -> str:
        """Data type of the KV cache."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
