"""The largest step of an attention group: the one place that says how many tokens a step may bring.

The scheduler's budget, the dispatcher's capacity, the sizes of recorded steps, the warm-up and the memory ledger all
read the same value. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from moe_engine.models.config import ModelConfig
from moe_engine.types import SpeculationConfig, row_width

LowLatency = Literal["never", "decode", "always"]
"""Which steps a dispatcher of fixed capacity serves."""


@dataclass(frozen=True)
class StepLimits:
    """What decides the largest step. Sizes are tokens of one attention group unless they say "of a rank".

    Attributes:
        chunk: of a prefill chunk; -1: whole prompts.
        running: most requests of a step; `running_reason` where a dispatch bounds them.
        request_tokens: of a running request in a step: its last token, and its drafts.
        drafting_tokens: of a request in one forward of the drafter. A tree runs all levels so far again.
        draft_slots: KV slots that a step takes for drafts of a request, while they are tried.
        followed_again: of each request, that the MTP layers compute beside a step's own when they follow it.
        choices: rows of logits of a request while it is drafted for, or verified.
        ranks: that share the tokens of the group (attention TP).
        low_latency: steps that travel to their experts in a dispatch of fixed capacity.
        dispatch_limit: of a rank in such a dispatch at most, a multiple of `dispatch_multiple`; 0 where there is none.
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
    running_reason: str = ""

    @classmethod
    def of_speculation(cls, speculation: SpeculationConfig | None, model: ModelConfig) -> dict[str, Any]:
        """The fields that follow from drafts."""
        if speculation is None:
            return {}
        again = model.num_nextn_predict_layers - 1 if speculation.method == "nextn" else 0
        if again:  # the path of a tree may be longer than the nodes that are verified are many
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
        """Of the prompts of a step."""
        return max(self.max_prefill_tokens, self.context_len) if self.chunk == -1 else self.chunk

    @property
    def decode_tokens(self) -> int:
        """Of the running requests of a step, drafts included."""
        return self.running * self.request_tokens

    @property
    def num_tokens(self) -> int:
        """Of a plan. Decodes that ride along with a chunk count against it."""
        return max(self.prompt_tokens, self.decode_tokens)

    @property
    def num_logits(self) -> int:
        """Rows of logits."""
        return self.running * self.choices

    @property
    def row_width(self) -> int:
        """Columns of the worker's tables, by position."""
        return row_width(self.context_len, self.draft_slots)

    @property
    def tokens_each(self) -> int:
        """Of a running request in any forward of the model's layers."""
        return max(self.request_tokens + self.followed_again, self.drafting_tokens)

    @property
    def forward_tokens(self) -> int:
        """Of any forward of the model's layers: a plan, what is drafted for it, what the MTP layers follow."""
        again = self.running * self.followed_again
        return max(self.prompt_tokens + again, self.running * self.tokens_each)

    @property
    def dispatch_tokens(self) -> int:
        """Of a rank, in any dispatch."""
        return self.of_a_rank(self.forward_tokens)

    @property
    def low_latency_tokens(self) -> int:
        """Of a rank in a dispatch of fixed capacity, whose buffers have this size; 0 where there is none."""
        if self.low_latency == "never":
            return 0
        always = self.low_latency == "always"
        wanted = self.dispatch_tokens if always else self.of_a_rank(self.running * self.tokens_each)
        return min(self.dispatch_limit, wanted + -wanted % self.dispatch_multiple)

    def of_a_rank(self, num_tokens: int) -> int:
        """The largest share of so many tokens of a group."""
        return -(-num_tokens // self.ranks)

    def problem_of(self, num_tokens: int, num_requests: int) -> str | None:
        """Why a plan of these sizes must not run, or None."""
        if num_tokens > self.num_tokens:
            return f"{num_tokens} tokens in a step; its parts were made for {self.num_tokens}"
        if num_requests > self.running:
            return f"{num_requests} requests in a step; its parts were made for {self.running}"
        return None
