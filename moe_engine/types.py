"""Types shared by server, scheduler and worker: requests, step plans and results.

Standard library only. Ownership: the scheduler owns every `Request`. It makes one `StepPlan` per step; the worker
returns a `StepResult`. Plans and results are immutable once sent.

Legend: R requests in a step, T tokens in a step, V vocabulary.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moe_engine.image_tokens import ImageTokens as ImageTokens
from moe_engine.kv_ops import KVBackup as KVBackup
from moe_engine.kv_ops import KVFetch as KVFetch
from moe_engine.kv_ops import KVLoad as KVLoad
from moe_engine.kv_ops import KVOps as KVOps
from moe_engine.kv_ops import KVReport as KVReport
from moe_engine.kv_ops import StateOps
from moe_engine.prefill_delay import DelayFacts
from moe_engine.sampling_params import SamplingParams as SamplingParams

NO_LORA = 0
"""`Request.lora_id` of the base model."""
NO_LORA_SLOT = -1


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding, resolved. Legend: the root of a draft tree is the last token; its other nodes are drafts.

    `method` names the drafter: ``nextn`` (the checkpoint's own MTP layers), ``eagle`` (an EAGLE head), ``standalone``
    (a small model of the same vocabulary) or ``ngram`` (prompt lookup, no weights). `num_steps` is the depth of the
    tree, `topk` its width (1: a chain), `num_draft_tokens` its nodes with the root, so a chain has `num_steps` + 1;
    `auto_depth`: each step has a
    depth of 0 to `num_steps`. Thresholds below 1 accept more than the target's own choice (SGLang's lossy acceptance);
    1 is lossless. `simulated_accept_length`: drafts are accepted at random.
    """

    method: str
    num_steps: int
    topk: int = 1
    num_draft_tokens: int = 0
    auto_depth: bool = False
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
    simulated_accept_length: float | None = None
    draft_model_path: str | None = None
    ngram_min_match: int = 1
    ngram_max_match: int = 12

    def __post_init__(self) -> None:
        if self.topk == 1 or not self.num_draft_tokens:
            nodes = self.num_steps + 1 if self.topk == 1 else self.num_steps * self.topk + 1
            object.__setattr__(self, "num_draft_tokens", nodes)

    @property
    def follows(self) -> bool:
        """Whether the drafter reads the target's hidden states, and runs a draft extend behind each step."""
        return self.method in ("nextn", "eagle")

    @property
    def has_thresholds(self) -> bool:
        """Whether drafts other than the target's own choice may be accepted."""
        return self.accept_threshold_single < 1 or self.accept_threshold_acc < 1

    def num_nodes(self, depth: int) -> int:
        """Tokens of one request in a step with drafts of this depth, the last token included."""
        if depth == 0 or self.topk == 1:
            return depth + 1
        candidates = self.topk + (depth - 1) * self.topk**2
        return min(self.num_draft_tokens, candidates + 1)

    def num_slots(self, depth: int) -> int:
        """KV slots that one request needs in such a step: the larger of the tree and the drafter's candidates."""
        return max(self.num_nodes(depth), max(depth - 1, 0) * self.topk + 1)


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


@dataclass(frozen=True, slots=True)
class LogprobSpec:
    """The log-probabilities of a request.

    `start`: first prompt position whose token gets one (None: outputs only). `top`: number of best tokens reported at
    each position. `token_ids`: tokens reported at each position regardless of their rank.
    """

    start: int | None = None
    top: int = 0
    token_ids: tuple[int, ...] = ()


class PackedLogprobs(NamedTuple):
    """Log-probabilities (natural log, of the softmax of the raw logits) of P consecutive tokens, and at each position
    those of the K best tokens and of the J requested ones (`LogprobSpec.token_ids`).

    A constant number of objects for any P: the worker sends this form, and only the frontend converts it to Python
    objects or JSON.

    Arrays in native byte order. NaN in `values` means not computed (the first token of a prompt, and the token at the
    end of a cached prefix); the other arrays are undefined there.
    """

    token_ids: bytes  # [P] int32
    values: bytes  # [P] float32
    top_ids: bytes = b""  # [P, K] int32
    top: bytes = b""  # [P, K] float32
    asked: bytes = b""  # [P, J] float32

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    def part(self, start: int, stop: int) -> PackedLogprobs:
        """Log-probabilities of the tokens [start, stop); both within [0, P]."""
        count = self.num_tokens
        if stop - start == count:
            return self
        return PackedLogprobs(*(data[len(data) // count * start : len(data) // count * stop] for data in self))

    @staticmethod
    def join(parts: Sequence[PackedLogprobs]) -> PackedLogprobs:
        """Log-probabilities of the tokens of all parts, in order; at least one part."""
        return parts[0] if len(parts) == 1 else PackedLogprobs(*map(b"".join, zip(*parts)))


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
    """In order; `prompt_ids` has ids by content in the place of their tokens (`image_tokens.keyed_ids`)."""
    lora_key: str = ""
    """Fingerprint of the adapter, for KV that outlives the engine; empty: not known."""
    hidden: list[bytes] | None = None  # final hidden states since the last event; None: not requested
    num_hidden: int = 0  # positions whose states have been taken

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
    """The radix node this request holds a lock on (scheduler.radix_cache.Node), or None."""
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

    @property
    def namespace(self) -> str | tuple[int, str | None] | None:
        """Namespace of its KV in the prefix cache: requests with different adapters share none."""
        return self.extra_key if self.lora_id == NO_LORA else (self.lora_id, self.extra_key)

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt and outputs."""
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
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
    returns_hidden: bool = False
    snapshot: int = -1
    """Snapshot of its state after the cached prefix; -1: the state begins with zeros, or the model has no states."""
    images: tuple[ImageTokens, ...] = ()
    """Those of the prompt; without pixels if all of their tokens are in the cached prefix."""


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
            **more,
        )


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
    """Loads of `StepPlan.kv_ops` that are complete. Later completions are reported by `StepWorker.on_kv_done`."""
    errors: dict[int, FinishReason] | None = None
    """By row: the reason why logits processors made a token invalid; it may belong to a draft that is not accepted."""
    vectors: dict[int, bytes] | None = None
    """By row, float32. Pooled model: the vectors of requests that end. Otherwise: hidden states of the step's
    tokens."""
