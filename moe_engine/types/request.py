"""A request of the scheduler, and the reason of its end. Standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from moe_engine.types.image_tokens import ImageTokens
from moe_engine.types.logprobs import LogprobSpec
from moe_engine.types.sampling_params import SamplingParams

NO_LORA = 0
"""`Request.lora_id` of the base model."""
NO_LORA_SLOT = -1


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    WAITING_FOR_KV = 3
    """In the queue while KV of its prefix is loaded into the pool."""


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended, in SGLang's form: type ``stop``, ``length`` or ``abort``."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None

    def to_dict(self) -> dict[str, Any]:
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.type == "length":
            return {"type": "length", "length": self.length}
        return {"type": "abort", "message": self.message, "status_code": self.status_code, "err_type": None}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. Owned and modified by the scheduler only.

    `slots[i]` is the KV slot of token i for every i < `num_computed`. `num_computed` counts tokens whose KV is in the
    pool or will be after the step in flight. `row` is its row in the worker's tables, -1 while waiting.
    """

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    priority: int | None = None
    arrival: float = 0.0
    logprobs: LogprobSpec | None = None
    extra_key: str | None = None
    seed: int = 0
    """Sampling seed: the client's, or one drawn by the frontend."""
    lora_id: int = NO_LORA
    """Number of its LoRA adapter; `lora_pinned`: the adapter keeps its slot."""
    lora_pinned: bool = False
    bootstrap: tuple[str, int, int] | None = None  # host, port, room of a transfer of its prompt's KV
    images: tuple[ImageTokens, ...] = ()
    """In order; `prompt_ids` has ids by content instead of their tokens (`image_tokens.keyed_ids`)."""
    lora_key: str = ""
    """Fingerprint of the adapter, for KV that outlives the engine; empty: not known."""
    positions: list[bytes] | None = None  # `PositionRows` since the last event; None: not requested
    num_positions: int = 0  # positions whose rows have been taken
    computes_all: bool = False  # no token may come from the prefix cache: `positions` are hidden states

    # -- scheduler state
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    row: int = -1
    slots: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    """Minimum number of tokens that steps in flight append to `output_ids` (a step with drafts may append more)."""
    num_maybe: int = 0
    """Drafts in flight: up to this many tokens beyond `num_computed` may be computed too."""
    followed: bool = True
    """Whether the drafter's cache covers all computed tokens of the request, so that it can draft for it."""
    spec_verify_ct: int = 0
    """Verify steps of the request; `spec_proposed` counts drafts, `spec_accepted[i]` steps that accepted i drafts."""
    spec_proposed: int = 0
    spec_accepted: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when first scheduled."""
    loaded_host: int = 0
    """Tokens of its prefix that were loaded for it from the connector's memory; `loaded_storage`: those read from
    storage."""
    loaded_storage: int = 0
    tiers: tuple[int, int, str] | None = None
    """Tokens among `cached_tokens` from host memory and from storage, and the storage's name; None without a KV
    tier."""
    first_scheduled: float | None = None
    retractions: int = 0
    failed_steps: int = 0
    """Failed steps that it shared with other requests and whose cause was not isolated."""
    to_abort: FinishReason | None = None
    finish_reason: FinishReason | None = None
    tree_node: Any = None
    """The radix node this request holds a lock on (scheduler.kv_cache.radix_cache.Node), or None."""
    state_from: int = -1
    """Snapshot with which its state begins (`NewRow.snapshot`)."""
    num_in_tree: int = 0  # leading slots owned by the radix tree (shared); the rest are private
    window_start: int = 0
    """Leading pages whose KV in windowed layers the request no longer needs (`windowed_kv_cache.py`)."""
    seq: int = 0  # order of arrival at the scheduler; kept over retractions
    queued_at: float = 0.0
    """Time of arrival on the scheduler's clock; `first_scheduled` and `first_token_at` likewise."""
    first_token_at: float | None = None
    end_ids: frozenset[int] = frozenset()
    """Tokens that end it: EOS and stop_token_ids, or none with ignore_eos."""
    lora_slot: int = NO_LORA_SLOT
    """The adapter's slot while the request holds a row."""
    lora_waits_since: int = -1
    """Admissions of requests with adapters before it first waited for a slot; -1: it never waited."""
    ends_by_text: bool = False
    """The frontend may end it at any token, by a stop string."""
    paused_seconds: float = 0.0
    """Pauses of generation since `clock_began`, which the time limits do not count."""

    @property
    def clock_began(self) -> float:
        """Begin of the time that a limit applies to: its first step, or its arrival while it waits for that."""
        return self.queued_at if self.first_scheduled is None else self.first_scheduled

    @property
    def namespace(self) -> str | tuple[int, str | None] | None:
        """Namespace of its KV in the prefix cache: requests with different adapters share none."""
        return self.extra_key if self.lora_id == NO_LORA else (self.lora_id, self.extra_key)

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt and outputs."""
        return len(self.prompt_ids) + len(self.output_ids)
