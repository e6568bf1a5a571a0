"""The values that pass between server, scheduler and worker. Standard library only.

Ownership: the scheduler owns every `Request`; it makes a `StepPlan` a step; the worker answers with a `StepResult`.
Plans and results are values: nobody changes one after it was handed over.

Legend: R requests in a step, T tokens in a step, V vocabulary.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moe_engine.errors import InputError

GREEDY_TEMPERATURE = 1e-6
"""Below this temperature a request is decoded greedily."""

MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024
MAX_N = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a request ends. Names, defaults and ranges are SGLang's.

    `max_new_tokens` None means up to the context length. `top_k` -1 means the whole vocabulary. `sampling_seed` fixes
    the draws of this request whatever runs beside it.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None
    stream_interval: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    def check_vocab(self, vocab_size: int, *, prefix: str = "sampling_params") -> None:
        """Raises InputError when a token id named by the parameters is outside the vocabulary."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", [t for t, _ in self.logit_bias])):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InputError(
                        f"{prefix}.{name}: token id {token} is outside the vocabulary [0, {vocab_size})",
                        field=f"{prefix}.{name}",
                    )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding, resolved. Legend: a draft tree has the last token as its root and drafts below it.

    `method` names the drafter: ``nextn`` (the checkpoint's own MTP layers), ``standalone`` (a small model of the same
    vocabulary) or ``ngram`` (prompt lookup, no weights). `num_steps` is the depth of the tree, `topk` its width (1: a
    chain), `num_draft_tokens` its nodes with the root, so a chain has `num_steps` + 1. With `auto_depth` the engine
    chooses the depth of each step between 0 and `num_steps`. Thresholds below 1 accept more than the target's own
    choice (SGLang's lossy acceptance); 1 is lossless.
    """

    method: str
    num_steps: int
    topk: int = 1
    num_draft_tokens: int = 0
    auto_depth: bool = False
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
    draft_model_path: str | None = None
    ngram_min_match: int = 1
    ngram_max_match: int = 12

    def __post_init__(self) -> None:
        if self.topk == 1 or not self.num_draft_tokens:
            nodes = self.num_steps + 1 if self.topk == 1 else self.num_steps * self.topk + 1
            object.__setattr__(self, "num_draft_tokens", nodes)

    @property
    def has_thresholds(self) -> bool:
        """Whether drafts are accepted that are not the target's own choice."""
        return self.accept_threshold_single < 1 or self.accept_threshold_acc < 1

    def num_nodes(self, depth: int) -> int:
        """Tokens that a request brings to a step with drafts of this depth, the last token included."""
        if depth == 0 or self.topk == 1:
            return depth + 1
        candidates = self.topk + (depth - 1) * self.topk**2
        return min(self.num_draft_tokens, candidates + 1)

    def num_slots(self, depth: int) -> int:
        """Slots that such a step needs for the request: the tree, or what the drafter tries on the way to it."""
        return max(self.num_nodes(depth), max(depth - 1, 0) * self.topk + 1)


PAD_TOKENS = 8
"""Positions a row may run past the context length: an overlapped decode whose result is dropped."""


def row_width(context_len: int, num_drafts: int = 0) -> int:
    """Columns of the worker's tables, by position of a request's tokens.

    Args:
        num_drafts: slots that a step takes for drafts; two steps can be under way.
    """
    return -(-(context_len + PAD_TOKENS + 2 * num_drafts) // 16) * 16


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """Which steps are recorded as CUDA graphs before the first request.

    `sizes`: requests of a decode step, ascending; none: nothing is recorded. `counts`: tokens of each request, more
    than one where drafts are verified. Without `pad` only steps of exactly these sizes are replayed.
    """

    sizes: tuple[int, ...] = ()
    counts: tuple[int, ...] = (1,)
    pad: bool = True

    def size_for(self, num_requests: int) -> int | None:
        """The size that a step of so many requests is replayed with, if any."""
        place = bisect.bisect_left(self.sizes, num_requests)
        if place == len(self.sizes) or not (self.pad or self.sizes[place] == num_requests):
            return None
        return self.sizes[place]

    def up_to(self, num_requests: int) -> GraphSettings:
        """Without the sizes that no step will have."""
        return GraphSettings(tuple(size for size in self.sizes if size <= num_requests), self.counts, self.pad)

    @property
    def num_graphs(self) -> int:
        return len(self.sizes) * len(self.counts)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest recorded step."""
        return max(self.sizes, default=0) * max(self.counts)


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """Which steps torch compiles: decodes of up to `max_tokens`; 0: none. `folder` keeps compiled code, empty: that of
    the environment, or the engine's own."""

    max_tokens: int = 0
    folder: str = ""


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended, as SGLang words it: type ``stop``, ``length`` or ``abort``."""

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
    """Which log-probabilities a request wants.

    `start` is the first prompt position whose token gets one (None: outputs only). `top` is how many best tokens are
    reported at each position; `token_ids` are reported at each position whatever their rank.
    """

    start: int | None = None
    top: int = 0
    token_ids: tuple[int, ...] = ()


class PackedLogprobs(NamedTuple):
    """Log-probabilities (natural log, of the softmax of the raw logits) of P tokens in order, and at each of them those
    of the K best tokens and of the J asked for (`LogprobSpec.token_ids`).

    A few objects, however many numbers they hold: this form travels from the worker to the front end, and only there
    it becomes Python objects or JSON.

    Arrays in native byte order. Where `values` is NaN nothing was computed (for the first token of a prompt, and for
    one at the end of a cached prefix), and the other numbers mean nothing.
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
        """Of the tokens [start, stop); both within [0, P]."""
        count = self.num_tokens
        if stop - start == count:
            return self
        return PackedLogprobs(*(data[len(data) // count * start : len(data) // count * stop] for data in self))

    @staticmethod
    def join(parts: Sequence[PackedLogprobs]) -> PackedLogprobs:
        """Of the tokens of all parts, at least one, in order."""
        return parts[0] if len(parts) == 1 else PackedLogprobs(*map(b"".join, zip(*parts)))


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. Owned and changed by the scheduler alone.

    `slots[i]` is the KV slot of token i for every i < `num_computed`; `num_computed` counts tokens whose KV is in the
    pool or will be once the step in flight has run. `row` is its row in the worker's tables, -1 while it waits.
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
    """Of the draws: the client's, or one drawn by the front end."""

    # -- state of the scheduler
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    row: int = -1
    slots: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    """Tokens that steps in flight will append to `output_ids` at least (a step with drafts may bring more)."""
    num_maybe: int = 0
    """Drafts in flight: so many tokens beyond `num_computed` may turn out to be computed too."""
    followed: bool = True
    """The drafter has seen all of its tokens that were computed here, so that it can draft for it."""
    spec_verify_ct: int = 0
    """Steps that brought drafts for it; `spec_proposed` counts drafts, `spec_accepted[i]` those accepted i at once."""
    spec_proposed: int = 0
    spec_accepted: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when first scheduled."""
    first_scheduled: float | None = None
    retractions: int = 0
    failed_steps: int = 0
    """Failed steps that it shared with others, where none of them has been found to be the cause."""
    to_abort: FinishReason | None = None
    finish_reason: FinishReason | None = None
    tree_node: Any = None
    """The radix node this request holds a lock on (scheduler.radix_cache.Node), or None."""
    num_in_tree: int = 0
    """Leading slots owned by the radix tree (shared); the rest are private to the request."""
    seq: int = 0
    """Order of arrival at the scheduler; kept over retractions."""
    queued_at: float = 0.0
    """When the scheduler took it, by the scheduler's clock; so `first_scheduled` and `first_token_at`."""
    first_token_at: float | None = None
    end_ids: frozenset[int] = frozenset()
    """Tokens that end it: EOS and stop_token_ids, or none with ignore_eos."""

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt and outputs."""
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request entering the worker (also after a retraction): all the worker needs of it, once."""

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
    """Tokens, prompt and outputs, with which the request ends; None if the worker need not know."""


@dataclass(frozen=True, slots=True)
class RowWrite:
    """Re-points tokens [start, start + len(slots)) of a row at other slots that hold the same KV."""

    row: int
    start: int
    slots: list[int]


@dataclass(frozen=True, slots=True)
class Speculation:
    """The speculative part of a plan. How many tokens a step in flight will confirm is not known when the next one is
    planned, so with this part the plan's decodes begin where the worker's own count says (`starts` are the least it can
    be), at the slots that the row's table names there; the plan's `slots` and `input_ids` are the prompts' alone.

    `depth` levels of drafts are made for the decodes whose count is above 1. `reserved` extends the tables first.
    With `follow` the drafter takes in the tokens of this step, prompts included.
    """

    depth: int = 0
    follow: bool = False
    reserved: list[RowWrite] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the schedulers that share a step's collectives tell each other of it. Sums over one attention group.

    Attributes:
        num_tokens: tokens of the target's forward; `num_logits`: those whose logits are needed.
        prefills: whether it computes prompts.
        num_drafting: decodes that drafts are made for, `depth` of them in a row.
        prompt_logprobs: whether log-probabilities of prompt tokens may be wanted from this step.
        first_half: tokens of the first half where the step can be cut in two; 0 where it cannot.
        num_running: requests that decode, in this step or as soon as they get a turn.
        num_waiting: requests with prompt tokens that are not in this step.
        leaving: nothing runs here and nothing will: when all say so, all end.
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

    @classmethod
    def of(cls, plan: StepPlan, **more: Any) -> StepFacts:
        """Of one group's plan; `more` fields are those that the plan does not tell."""
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
    """What one step computes; may be empty. Lists run over the R requests of the step, decodes first.

    Request i computes tokens [starts[i], starts[i] + counts[i]) of row rows[i] and writes their KV to the next
    counts[i] entries of `slots`. The first `num_decodes` requests take their first token from the device (the one last
    sampled for the row); the others' tokens stand in `input_ids`, flat. If samples[i], the last token's logits yield a
    new token. `finished_rows` may be forgotten by the worker, before `new_rows` are written. `speculation` changes how
    decodes are read; see there. With DP attention `dp_facts` holds the facts of all groups' parts of the step.
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

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: for each request of the plan that samples, in plan order, its accepted tokens.

    `logprobs[i]` are those of tokens[i], None where the request asked for none; `prompt_logprobs[row]` those of prompt
    tokens computed in this step.
    """

    number: int
    rows: list[int]
    tokens: list[list[int]]
    logprobs: list[PackedLogprobs | None] | None = None
    prompt_logprobs: dict[int, PackedLogprobs] | None = None
    seconds: float = 0.0
    """How long the step took on the device, drafting included."""
    draft_seconds: float = 0.0
    """The part of `seconds` in which drafts were made; so `follow_seconds`, in which the drafter followed, and
    `model_seconds`, in which the model ran (0 where not measured apart)."""
    follow_seconds: float = 0.0
    model_seconds: float = 0.0
    cuda_graph: bool = False
    """Whether the model's forward was replayed from a recording."""
