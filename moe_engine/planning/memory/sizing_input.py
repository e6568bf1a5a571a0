"""The inputs of the memory ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_engine.kernels.backends import LaunchKernels
from moe_engine.models import sizes, step_memory
from moe_engine.models.config import ModelConfig
from moe_engine.models.eagle_config import HeadConfig
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.widths import local_heads
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.planning.inputs.checkpoint import CheckpointFacts
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.memory.weight_offload import NONE, WeightOffload
from moe_engine.planning.parallelism.resolve_parallel import SINGLE_PROCESS, ParallelPlan
from moe_engine.planning.step_limits import StepLimits
from moe_engine.types.step_settings import GraphSettings, LoraSettings

MIN_USEFUL_TOKENS = 128
KEEP_GATES = ("cpu", "triton")
"""Rows of ops that read a router's weight in bfloat16; the torch row keeps it in float32."""
PACKS_HEAD = ("cpu",)
"""Rows of linear that keep a tied head in a layout of their own, in addition to the embedding."""


@dataclass(frozen=True)
class SizingInput:
    """Everything the ledger depends on; `mem_fraction` and `max_total_tokens` None mean auto.

    `uses_mtp`: the checkpoint's MTP layers draft; `draft`: the draft model. Either holds KV for the same slots.
    """

    model: ModelConfig
    machine: Machine
    dtype: str
    dtype_bytes: int
    kv_dtype: str
    kernels: LaunchKernels
    limits: StepLimits
    mem_fraction: float | None
    max_total_tokens: int | None
    running_is_auto: bool
    checkpoint: CheckpointFacts | None = None
    uses_mtp: bool = False
    draft: ModelConfig | None = None
    head: HeadConfig | None = None
    """The EAGLE head whose layer `draft` is, with this rank's attention heads."""
    parallel: ParallelPlan = SINGLE_PROCESS
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    graphs: GraphSettings = field(default_factory=GraphSettings)
    tier_ratio: float = 0.0
    """Tokens of the host-RAM tier over those of the KV cache, unless `tier_bytes` is its size; both 0: no tier."""
    tier_bytes: int = 0
    tier_fraction: float | None = None
    """Share of the host memory of a machine with GPUs to which a larger tier is reduced; None: it must fit as it is."""
    windows_in_tier: bool = False
    """Whether the tier can keep windowed layers in a pool of their own."""
    transfers: bool = False
    """Whether KV is transferred between servers (`--disaggregation-mode`)."""
    swa_ratio: float = 0.8
    """Slots of windowed layers over those of other layers if memory is scarce; 0: no pool of their own."""
    num_window_slots: int = 0
    """Tokens of the pool of windowed layers; 0: these layers have no pool of their own."""
    lora: LoraSettings | None = None
    offload: WeightOffload = NONE
    image_cache_bytes: int = 0
    """Results of the vision tower that are kept."""
    divides_images: bool = False
    """Whether the ranks of an attention group divide the images of a step."""

    @property
    def page_size(self) -> int:
        return self.kernels.page_size

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of a token on one rank, without those of windowed layers that have a pool of their own."""
        drafted = self.draft.kv_bytes_per_token(self.kv_dtype) if self.draft is not None else 0
        windowed = self.window_bytes_per_token if self.num_window_slots else 0
        experts = 2 * self.returned_numbers if self.experts.returned and self.machine.on_cpu else 0
        return self.model_bytes_per_token + drafted - windowed + experts

    @property
    def returned_numbers(self) -> int:
        """Experts of a token in all layers, which the host keeps by KV slot with `ExpertSettings.returned`."""
        return 0 if self.model.moe is None else self.model.num_layers * self.model.moe.top_k

    @property
    def window_bytes_per_token(self) -> int:
        """KV bytes of a token in all `windowed_layers`, on one rank."""
        return self.local_model.kv_bytes_of(self.windowed_layers, self.kv_dtype, self.limits.draft_slots)

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """The layers with a window, those of the drafter's MTP layers included."""
        model = self.model
        return (*model.windowed_layers, *(model.windowed_drafts if self.uses_mtp else ()))

    @property
    def model_bytes_per_token(self) -> int:
        """KV bytes of a token in all layers of the model, on one rank, with those of windowed layers."""
        return self.local_model.kv_bytes_per_token(self.kv_dtype, self.uses_mtp, self.limits.draft_slots)

    @property
    def weight_format(self) -> WeightFormat:
        """The format in which the device's kernels hold the weights."""
        return self.model.weight_format.held_by(self.kernels.model.multiplied)

    def bf16_gates(self, mtp: bool = False) -> int:
        """Elements of the routers' weights that the ops keep in bfloat16, as stored; every rank has all of them. `mtp`:
        those of the MTP layers, else those of the model."""
        if self.model.moe is None or self.kernels.model.row("ops").name not in KEEP_GATES:
            return 0
        if self.checkpoint is not None:
            return self.checkpoint.mtp_bf16_gates if mtp else self.checkpoint.bf16_gates
        if self.dtype != "bfloat16":
            return 0
        own = sizes.num_gate_elements(self.model)
        return sizes.num_gate_elements(self.model, include_mtp=True) - own if mtp else own

    @property
    def tied_head_bytes(self) -> int:
        """Bytes of a head tied to the embedding that is not the embedding's tensor: packed, or sharded differently."""
        model, topology = self.model, self.parallel.topology
        spans = topology.attn_dp_size > 1 and not topology.enable_dp_lm_head
        packed = self.kernels.model.row("linear").name in PACKS_HEAD
        if not model.tie_word_embeddings or model.pooling is not None or not (packed or spans):
            return 0
        parts = topology.tp_size if spans else topology.attn_tp_size
        return -(-model.vocab_size // parts) * model.hidden_size * self.dtype_bytes

    @property
    def local_model(self) -> ModelConfig:
        """The model with the attention heads of one rank."""
        return local_heads(self.model, self.parallel.topology.attn_tp_size)

    @property
    def uses_ngrams(self) -> bool:
        """Drafts come from neither MTP layers nor a draft model."""
        return self.drafts and not self.uses_mtp and self.draft is None

    @property
    def drafts(self) -> bool:
        return self.limits.drafts

    @property
    def logits_rows(self) -> int:
        """Max rows of logits at once."""
        return step_memory.logits_rows(self.model.vocab_size, self.limits.num_logits)

    @property
    def min_tokens(self) -> int:
        """Minimum KV slots of a useful engine."""
        wanted = self.max_total_tokens or min(self.limits.context_len, MIN_USEFUL_TOKENS)
        return -(-wanted // self.page_size) * self.page_size
