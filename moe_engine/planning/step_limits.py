"""Step limits: the largest step of an attention group, in tokens and requests.

The scheduler's budget, the dispatcher's capacity, CUDA graph sizes, the warm-up and the memory ledger all use these
values. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from moe_engine.models.config import ModelConfig
from moe_engine.types import SpeculationConfig
from moe_engine.types.row_sizes import row_width

LowLatency = Literal["never", "decode", "always"]
"""Which steps use low-latency dispatch (fixed capacity)."""


@dataclass(frozen=True)
class StepLimits:
    """The parameters of the largest step. Sizes are tokens of one attention group unless "of a rank" is stated.

    Attributes:
        chunk: size of a prefill chunk; -1: whole prompts.
        running: max requests of a step; `running_reason` if slot tables or a dispatch bound them.
        request_tokens: tokens of a running request in a step: its last token and its drafts.
        drafting_tokens: tokens of a request in one forward of the drafter. A tree recomputes all its levels so far.
        draft_slots: KV slots for drafts of a request during a step.
        followed_again: tokens of each request that the MTP layers recompute in a draft extend in addition to the step's
        own tokens.
        choices: rows of logits of a request while drafting or verifying.
        ranks: attention TP size; these ranks share the tokens of the group.
        low_latency: steps that use low-latency dispatch.
        num_snapshots: snapshots of states in the prefix cache.
        dispatch_limit: max tokens of a rank in a low-latency dispatch, a multiple of `dispatch_multiple`; 0 without
        one.
    """

    chunk: int
    max_prefill_tokens: int
    running: int
    context_len: int
    request_tokens: int = 1
    drafting_tokens: int = 1
    draft_slots: int = 0
    followed_again: int = 0
    choices: int = 1
    ranks: int = 1
    low_latency: LowLatency = "never"
    dispatch_limit: int = 0
    dispatch_multiple: int = 1
    num_snapshots: int = 0
    running_reason: str = ""

    @classmethod
    def of_speculation(cls, speculation: SpeculationConfig | None, model: ModelConfig) -> dict[str, Any]:
        """The fields that depend on speculative decoding."""
        if speculation is None:
            return {}
        again = model.num_nextn_predict_layers - 1 if speculation.method == "nextn" else 0
        if again:  # the accepted path of a tree may be longer than the number of verified nodes
            again += max(0, speculation.num_steps + 1 - speculation.num_draft_tokens)
        slots = speculation.num_slots(speculation.num_steps)
        return {
            "request_tokens": speculation.num_draft_tokens,
            "drafting_tokens": slots if speculation.topk > 1 else 1,
            "draft_slots": slots,
            "followed_again": again,
            "choices": max(speculation.num_draft_tokens, speculation.topk),
        }

    @property
    def drafts(self) -> bool:
        return self.request_tokens > 1

    @property
    def prompt_tokens(self) -> int:
        """Max prompt tokens of a step."""
        return max(self.max_prefill_tokens, self.context_len) if self.chunk == -1 else self.chunk

    @property
    def decode_tokens(self) -> int:
        """Max tokens of the running requests of a step, drafts included."""
        return self.running * self.request_tokens

    @property
    def num_tokens(self) -> int:
        """Max tokens of a plan. Decodes that are mixed with a chunk count against it."""
        return max(self.prompt_tokens, self.decode_tokens)

    @property
    def num_logits(self) -> int:
        """Max rows of logits of a step."""
        return self.running * self.choices

    @property
    def row_width(self) -> int:
        """Columns (positions) of the worker's tables."""
        return row_width(self.context_len, self.draft_slots)

    @property
    def tokens_each(self) -> int:
        """Max tokens of a running request in any forward of the model's layers."""
        return max(self.request_tokens + self.followed_again, self.drafting_tokens)

    @property
    def forward_tokens(self) -> int:
        """Max tokens of any forward of the model's layers: a plan, its drafts, a draft extend of the MTP layers."""
        again = self.running * self.followed_again
        return max(self.prompt_tokens + again, self.running * self.tokens_each)

    @property
    def dispatch_tokens(self) -> int:
        """Max tokens of a rank in any dispatch."""
        return self.of_a_rank(self.forward_tokens)

    @property
    def low_latency_tokens(self) -> int:
        """Max tokens of a rank in a low-latency dispatch, the size of its buffers; 0 without one."""
        if self.low_latency == "never":
            return 0
        always = self.low_latency == "always"
        wanted = self.dispatch_tokens if always else self.of_a_rank(self.running * self.tokens_each)
        return min(self.dispatch_limit, wanted + -wanted % self.dispatch_multiple)

    def of_a_rank(self, num_tokens: int) -> int:
        """Tokens of the rank with the largest share of `num_tokens` of a group."""
        return -(-num_tokens // self.ranks)

    def problem_of(self, num_tokens: int, num_requests: int) -> str | None:
        """Why a plan exceeds the limits, or None."""
        if num_tokens > self.num_tokens:
            return f"{num_tokens} tokens in a step; the limit is {self.num_tokens}"
        if num_requests > self.running:
            return f"{num_requests} requests in a step; the limit is {self.running}"
        return None


def kept_window(model: ModelConfig, limits: StepLimits) -> int:
    """Positions up to a token whose KV layers with a window keep: the window, and tokens that MTP layers with a window
    compute again. 0: no layer has a window."""
    return model.longest_window + (limits.followed_again if model.windowed_drafts else 0)
