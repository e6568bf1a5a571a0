"""What server, scheduler and worker exchange: requests, step plans and results, and the settings that they share.

Ownership: the scheduler owns every `Request`. It makes one `StepPlan` per step; the worker returns a `StepResult`.
Standard library only.
"""

from moe_engine.types.image_tokens import ImageTokens
from moe_engine.types.kv_ops import KVBackup, KVFetch, KVLoad, KVOps, KVReport, StateOps
from moe_engine.types.logprobs import LogprobSpec, PackedLogprobs
from moe_engine.types.request import NO_LORA, NO_LORA_SLOT, FinishReason, Request, Status
from moe_engine.types.sampling_params import SamplingParams
from moe_engine.types.speculation import SpeculationConfig
from moe_engine.types.step import NewRow, PositionRows, RowWrite, Speculation, StepFacts, StepPlan, StepResult

__all__ = [
    "NO_LORA", "NO_LORA_SLOT", "FinishReason", "ImageTokens", "KVBackup", "KVFetch", "KVLoad", "KVOps", "KVReport",
    "LogprobSpec", "NewRow", "PackedLogprobs", "PositionRows", "Request", "RowWrite", "SamplingParams", "Speculation",
    "SpeculationConfig", "StateOps", "Status", "StepFacts", "StepPlan", "StepResult",
]  # fmt: skip
