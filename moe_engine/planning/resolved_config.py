"""The resolved configuration of one engine: every value in force, with a reason for each "auto"."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF
from moe_engine.config.logging import LoggingArgs
from moe_engine.config.scheduling import SchedulingArgs
from moe_engine.config.server import SECRETS, ServerArgs
from moe_engine.kernels.backends import LaunchKernels
from moe_engine.models.config import ModelConfig
from moe_engine.models.eagle_config import HeadConfig
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.planning.flags.resolve_storage import resolve_write_policy
from moe_engine.planning.flags.validate_server import HIDDEN
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.memory.ledger import MemoryLedger
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan
from moe_engine.planning.resolution_log import Decision
from moe_engine.planning.speculation.resolve_speculation import speculative_values
from moe_engine.planning.step_limits import StepLimits, kept_window
from moe_engine.types import SpeculationConfig
from moe_engine.types.step_settings import CompileSettings, GraphSettings, LoraSettings, StorageSettings

T = TypeVar("T")
INPUT_MARGIN = 5
"""Tokens that a prompt must leave free (SGLang's margin)."""


@dataclass(frozen=True)
class ResolvedConfig:
    """The resolved, frozen configuration of one engine; it is pickled to the engine's processes.

    `args` are the flags as given; their `scheduling`, `logging` and `server` parts need no resolution and are used
    directly. `chunked_prefill_size` -1 means no chunking. Sizes are tokens. With several ranks, memory sizes and the
    ledger are per rank, and counts of requests per attention group.
    """

    args: EngineArgs
    parallel: ParallelPlan
    model: ModelConfig
    machine: Machine
    model_path: str
    tokenizer_path: str
    served_model_name: str
    device: str
    dtype: str
    kv_cache_dtype: str
    context_len: int
    kernels: LaunchKernels
    chunked_prefill_size: int
    max_prefill_tokens: int
    max_running_requests: int
    schedule_conservativeness: float
    mem_fraction_static: float
    random_seed: int
    cpu_threads: int
    ledger: MemoryLedger
    limits: StepLimits
    """The largest step: bounds the scheduler's plans; dispatcher, CUDA graphs and ledger are sized for it."""
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]
    speculation: SpeculationConfig | None = None
    """None: no speculative decoding."""
    draft_model: ModelConfig | None = None
    """Config of the model in the folder `speculation.draft_model_path`, if there is one."""
    draft_head: HeadConfig | None = None
    """The EAGLE head in that folder, whose layer is `draft_model`."""
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    """Placement, EPLB and expert distribution recording."""
    graphs: GraphSettings = field(default_factory=GraphSettings)
    """Steps that are captured as CUDA graphs."""
    compiled: CompileSettings = field(default_factory=CompileSettings)
    """Steps that torch.compile compiles."""
    lora: LoraSettings | None = None
    """LoRA adapters; None: not enabled."""
    offloaded_layers: tuple[int, ...] = ()
    """Layers whose weights wait in host memory."""
    storage: StorageSettings | None = None
    """Storage below the host-RAM tier; None: not enabled."""

    @property
    def page_size(self) -> int:
        return self.kernels.page_size

    @property
    def max_total_num_tokens(self) -> int:
        """KV slots for requests; the pool's dummy page is not counted."""
        return self.ledger.num_tokens

    @property
    def num_snapshots(self) -> int:
        """Snapshots of states in the prefix cache; 0: a model without states, or no prefix cache."""
        return self.limits.num_snapshots

    @property
    def num_window_slots(self) -> int:
        """Tokens of the pool of windowed layers; 0: the KV of these layers is not bounded by their window."""
        return self.ledger.num_window_slots

    @property
    def window(self) -> int:
        """The window that bounds the KV of windowed layers; 0: no bound."""
        return kept_window(self.model, self.limits) if self.num_window_slots else 0

    @property
    def lora_slots(self) -> int:
        """Different LoRA adapters of a batch; 0: not enabled."""
        return 0 if self.lora is None else self.lora.num_slots

    @property
    def image_cache_bytes(self) -> int:
        """Results of the vision tower that each rank keeps."""
        return self.args.multimodal.vlm_cache_size_mb << 20

    @property
    def load_balance_method(self) -> str:
        """How the frontend chooses the scheduler of a request."""
        asked = self.args.parallel.load_balance_method
        if asked != "auto":
            return asked
        return "total_tokens" if self.scheduling.disable_radix_cache else "cache_aware"

    @property
    def host_tier_tokens(self) -> int:
        """Tokens of the host-RAM tier of the KV cache; 0: none."""
        return self.ledger.host_tier_tokens

    @property
    def host_snapshots(self) -> int:
        """States of cached prefixes in the host-RAM tier; 0: none."""
        return self.ledger.host_snapshots

    @property
    def host_window_slots(self) -> int:
        """Tokens of the pool of windowed layers in the host-RAM tier; 0: none."""
        return self.ledger.host_window_slots

    @property
    def kv_connector(self) -> str:
        """Name or path of the tier's class."""
        mode = self.args.disaggregation.disaggregation_mode
        return self.args.memory.kv_connector if mode == OFF else mode

    @property
    def hicache_write_policy(self) -> str:
        return resolve_write_policy(self.args)

    @property
    def max_req_len(self) -> int:
        """Max length of prompt plus answer."""
        return min(self.context_len - 1, self.max_total_num_tokens - 1)

    @property
    def max_req_input_len(self) -> int:
        return self.max_req_len - INPUT_MARGIN

    @property
    def scheduling(self) -> SchedulingArgs:
        return self.args.scheduling

    @property
    def logging(self) -> LoggingArgs:
        return self.args.logging

    @property
    def server(self) -> ServerArgs:
        return self.args.server

    def flat(self) -> dict[str, Any]:
        """All flags by name with their resolved values, as SGLang's /server_info shows them. Keys are hidden."""
        values = self.args.flat()
        values.update({decision.name: decision.value for decision in self.decisions})
        values.update(max_total_tokens=self.max_total_num_tokens, model_path=self.model_path)
        if self.speculation is not None:
            values.update(speculative_values(self.speculation))
        for name in SECRETS:
            values[name] = HIDDEN if values[name] else None
        return values

    def select(self, options: type[T], **own: Any) -> T:
        """An instance of a dataclass, filled by name: from `own`, else this configuration, else the flags as given.

        A flag reaches a component when the component's options class has a field of its name.
        """
        names = [item.name for item in dataclasses.fields(options)]  # type: ignore[arg-type]
        resolved = {name: getattr(self, name) for name in names if hasattr(self, name)}
        values = self.args.flat() | resolved
        return options(**{name: values[name] for name in names if name in values} | own)
