"""What the scheduler and the worker exchange for each step: `StepPlan` and `StepResult`, immutable once sent.

Standard library only. Legend: R requests in a step, T tokens in a step, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moe_engine.types.image_tokens import ImageTokens
from moe_engine.types.kv_ops import KVOps, StateOps
from moe_engine.types.logprobs import LogprobSpec, PackedLogprobs
from moe_engine.types.prefill_delay import DelayFacts
from moe_engine.types.request import NO_LORA_SLOT, FinishReason
from moe_engine.types.sampling_params import SamplingParams


# Classes of which every step makes new objects are not frozen: constructors of frozen classes take three times as long.
@dataclass(slots=True)
class NewRow:
    """A request entering the worker (also after a retraction): everything the worker needs, sent once."""

    row: int
    rid: str
    token_ids: list[int]
    """All tokens known on the host: the prompt, and earlier outputs after a retraction."""
    num_prompt: int
    slots: list[int]
    """KV slots of the cached prefix, tokens [0, len(slots))."""
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    logprobs: LogprobSpec | None = None
    max_length: int | None = None
    """Length, prompt and outputs, at which the request ends; None if the worker does not need it."""
    lora_slot: int = NO_LORA_SLOT
    """Slot of its LoRA adapter."""
    returns_positions: bool = False
    """Whether `StepResult.positions` has its tokens."""
    snapshot: int = -1
    """Snapshot of its state after the cached prefix; -1: the state begins with zeros, or the model has no states."""
    images: tuple[ImageTokens, ...] = ()
    """Images of the prompt; without pixels if all of their tokens are in the cached prefix."""


@dataclass(frozen=True, slots=True)
class RowWrite:
    """Maps tokens [start, start + len(slots)) of a row to other slots that hold the same KV."""

    row: int
    start: int
    slots: list[int]


@dataclass(frozen=True, slots=True)
class Speculation:
    """The speculative part of a plan. The next step is planned before the step in flight reports how many tokens it
    accepted. With this part, decodes therefore start at the worker's own token count (`starts` are lower bounds) and
    use the slots in the row's table; the plan's `slots` and `input_ids` cover prompts only.

    `depth` levels of drafts are made for decodes whose count is above 1. `reserved` extends the tables first. With
    `follow` the drafter updates its cache with the tokens of this step, prompts included.
    """

    depth: int = 0
    follow: bool = False
    reserved: list[RowWrite] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One attention group's part of a DP attention step, exchanged by the schedulers that share its collectives.

    Attributes:
        num_tokens: tokens of the target's forward; `num_logits`: tokens whose logits are needed.
        prefills: whether the step computes prompts.
        num_drafting: decodes that get drafts; `depth`: levels of drafts for each.
        prompt_logprobs: whether prompt log-probabilities may be requested in this step.
        first_half: tokens of the first half for two-batch overlap; 0 if the step cannot be split.
        num_running: decoding requests, in this step or waiting for their next one.
        num_waiting: requests with prompt tokens that are not in this step.
        leaving: this group is idle and shutting down. Ranks exit once every group sets it.
        delay: with ``--enable-prefill-delayer``.
        follows: whether a draft extend covers the step, see `Speculation.follow`.
    """

    num_tokens: int = 0
    num_logits: int = 0
    prefills: bool = False
    num_drafting: int = 0
    depth: int = 0
    prompt_logprobs: bool = False
    first_half: int = 0
    num_running: int = 0
    num_waiting: int = 0
    leaving: bool = False
    delay: DelayFacts | None = None
    follows: bool = False

    @classmethod
    def of(cls, plan: StepPlan, **more: Any) -> StepFacts:
        """Facts of one group's plan; `more`: fields that cannot be derived from the plan."""
        speculation, num = plan.speculation, plan.num_decodes
        decodes = plan.counts[:num]
        num_logits = sum(plan.samples) if speculation is None else sum(decodes) + sum(plan.samples[num:])
        depth = speculation.depth if speculation is not None else 0
        drafting = sum(count > 1 for count in decodes) if depth else 0
        return cls(
            num_tokens=plan.num_tokens,
            num_logits=num_logits,
            prefills=num < len(plan.rows),
            num_drafting=drafting,
            depth=depth if drafting else 0,
            follows=speculation is not None and speculation.follow,
            **more,
        )


@dataclass(slots=True)
class StepPlan:
    """What one step computes; may be empty. Lists are indexed by the R requests of the step, decodes first.

    Request i computes tokens [starts[i], starts[i] + counts[i]) of row rows[i] and writes their KV to the next
    counts[i] entries of `slots`. The first `num_decodes` requests take their first token from the device (the token
    last sampled for the row); the tokens of the others are in `input_ids`, flat. If samples[i], a new token is sampled
    from the last token's logits. The worker frees `finished_rows` before it writes `new_rows`. `speculation` changes
    the meaning of decodes; see `Speculation`. With DP attention `dp_facts` holds the facts of all groups. Rows `masked`
    sample after their masks have arrived (`token_masks`).
    """

    number: int
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_decodes: int = 0
    input_ids: list[int] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    row_writes: list[RowWrite] = field(default_factory=list)
    finished_rows: list[int] = field(default_factory=list)
    speculation: Speculation | None = None
    dp_facts: tuple[StepFacts, ...] | None = None
    kv_ops: KVOps | None = None
    masked: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    """New mappings of KV pages to pages of the windowed layers' pool: page, window page, page, ... (first slots). They
    are applied before `new_rows` and `row_writes`."""
    lora_loads: list[tuple[int, int]] = field(default_factory=list)
    """LoRA adapters to load into slots before this step: (slot, adapter)."""
    state_ops: StateOps | None = None
    """Snapshots of states; None: the step stores none."""

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def is_pure_decode(self) -> bool:
        """One token per request, all ids on the device, all sampled; False for lists of unequal lengths."""
        rows, starts, counts, slots = len(self.rows), len(self.starts), len(self.counts), len(self.slots)
        return self.num_decodes == rows == starts == counts == slots == len(self.samples) and all(self.samples)


class PositionRows(NamedTuple):
    """A row of bytes for each of `num` tokens of a request from `start` on: its final hidden state, or its
    experts."""

    start: int
    num: int
    data: bytes


@dataclass(slots=True)
class StepResult:
    """Output of a step: the accepted tokens of each request of the plan that samples, in plan order.

    `logprobs[i]` belong to tokens[i], None where not requested; `prompt_logprobs[row]` to the step's prompt tokens.
    """

    number: int
    rows: list[int]
    tokens: list[list[int]]
    logprobs: list[PackedLogprobs | None] | None = None
    prompt_logprobs: dict[int, PackedLogprobs] | None = None
    seconds: float = 0.0
    """Device time of the step, drafting included."""
    draft_seconds: float = 0.0
    """Drafting's part of `seconds`; `follow_seconds`: the drafter's cache update; `model_seconds`: the model's forward
    (0 where not measured separately)."""
    follow_seconds: float = 0.0
    model_seconds: float = 0.0
    cuda_graph: bool = False
    """Whether the model's forward was a CUDA-graph replay."""
    kv_done: tuple[int, ...] = ()
    """Loads of `StepPlan.kv_ops` that are complete. Later completions are reported by `Worker.on_kv_done`."""
    errors: dict[int, FinishReason] | None = None
    """By row: the reason why logits processors made a token invalid; it may belong to a draft that is not accepted."""
    vectors: dict[int, bytes] | None = None
    """Of a pooled model: the vectors of requests that end, float32, by row."""
    positions: dict[int, PositionRows] | None = None
    """By row that returns them: hidden states (float32) of the step's tokens, or the experts of these and, the first
    time, of its cached prefix (int16)."""
