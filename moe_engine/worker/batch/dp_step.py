"""A step with DP attention on one rank: token counts of all attention groups, and idle batches.

With DP attention every group has its own requests and scheduler, but experts, dense layers and possibly the LM head are
shared by all ranks. All ranks therefore run each forward together, with the sizes that the schedulers exchanged
(`StepPlan.dp_facts`); a group without tokens runs an idle batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from moe_engine.models.batch import ForwardBatch, Model
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import StepFacts, StepPlan
from moe_engine.worker.batch.two_batches import find_cut, halves

DraftForwards = Callable[[int, int], Sequence[tuple[int, int]]]
"""A group's decodes with drafts and their depth -> tokens and rows of logits of each of its forwards."""


def chain_forwards(num_drafting: int, depth: int) -> Sequence[tuple[int, int]]:
    """`DraftForwards` of chains that are drafted token by token."""
    return [(num_drafting, num_drafting)] * depth


class DPSteps:
    """Sizes of steps for one rank, and its idle batches.

    Args:
        device: of tensors.
        kv: the KV cache of every layer, as `ForwardBatch.kv`.
    """

    def __init__(self, parallel: ParallelContext, device: torch.device, kv: Sequence[Any]) -> None:
        self.parallel = parallel
        self._device = device
        self._kv = kv

    @property
    def is_shared(self) -> bool:
        """Whether there are several attention groups."""
        return self.parallel.attn_dp_size > 1

    def for_all_groups(self, plan: StepPlan) -> StepPlan:
        """The plan of a step that is the same in all groups, without schedulers (warm-up)."""
        if not self.is_shared:
            return plan
        return replace(plan, dp_facts=(StepFacts.of(plan),) * self.parallel.attn_dp_size)

    def sizes(self, plan: StepPlan) -> StepSizes | None:
        """Sizes of the target model's forward; None with one group, whose batch has the sizes."""
        if not self.is_shared:
            return None
        facts = _facts(plan)
        tokens, logits = [group.num_tokens for group in facts], [group.num_logits for group in facts]
        return StepSizes.known(self.parallel, tokens, logits, any(group.prefills for group in facts))

    def even_sizes(self, num_tokens: int) -> StepSizes | None:
        """Sizes of a captured forward, for which every attention group is padded to `num_tokens`."""
        if not self.is_shared:
            return None
        tokens = [num_tokens] * self.parallel.attn_dp_size
        return StepSizes.known(self.parallel, tokens, tokens, False)

    def draft_sizes(self, plan: StepPlan, forwards: DraftForwards) -> list[StepSizes]:
        """Sizes of each draft forward over all groups. `forwards`: of a drafter."""
        if not self.is_shared:
            return []
        groups = [forwards(group.num_drafting, group.depth) for group in _facts(plan)]
        return [
            StepSizes.known(self.parallel, [tokens for tokens, _ in sizes], [logits for _, logits in sizes], False)
            for sizes in zip_longest(*groups, fillvalue=(0, 0))
        ]

    def exchange(self, num_tokens: int, num_logits: int = 0) -> StepSizes | None:
        """Sizes of a forward that do not follow from the plans; collective, the host waits. None with one group."""
        if not self.is_shared:
            return None
        return StepSizes.exchange(self.parallel, self.parallel.world, num_tokens, num_logits, False)

    def follows(self, plan: StepPlan) -> bool:
        """Whether a draft extend covers the step of any of several groups."""
        return self.is_shared and any(group.follows for group in _facts(plan))

    def all_follow(self, plan: StepPlan) -> bool:
        """Whether draft extends cover the steps of all groups with tokens."""
        if not self.is_shared:
            return plan.speculation is not None and plan.speculation.follow
        return all(group.follows for group in _facts(plan) if group.num_tokens)

    def halves(self, plan: StepPlan) -> list[tuple[StepPlan, StepSizes]] | None:
        """The two halves of a step for two-batch overlap, with their sizes; None if the step is not split.

        All groups must be able to split their batch; a group without tokens runs an idle batch in both halves.
        """
        overlap = self.parallel.overlap
        if overlap is None or not overlap.two_batches:
            return None
        cut = find_cut(plan, overlap.threshold)
        facts = plan.dp_facts or (StepFacts.of(plan, first_half=cut.num_tokens if cut is not None else 0),)
        if any(f.depth or f.prompt_logprobs or (f.num_tokens and not f.first_half) for f in facts):
            return None
        prefills = any(f.prefills for f in facts)
        sizes = [
            StepSizes.known(self.parallel, tokens, [0] * len(facts), prefills)
            for tokens in ([f.first_half for f in facts], [f.num_tokens - f.first_half for f in facts])
        ]
        parts = (plan, plan) if cut is None else halves(plan, cut)
        return list(zip(parts, sizes))

    def idle_batch(self, sizes: StepSizes) -> ForwardBatch:
        """The idle batch of a forward in which only other groups have tokens."""
        return ForwardBatch.nothing(self._kv, sizes, self._device)

    def prompt_head(self, model: Model, plan: StepPlan) -> PromptHead | None:
        """The LM head for prompt log-probabilities, if a step may need them and all groups share the head."""
        if not self.is_shared or self.parallel.topology.enable_dp_lm_head:
            return None
        return PromptHead(self, model) if any(group.prompt_logprobs for group in _facts(plan)) else None


class PromptHead:
    """The shared LM head for prompt log-probabilities: each group may call it any number of times, and all groups join
    each call until every group has finished.

    The number of prompt positions is not exchanged before the step, so each round exchanges its sizes first.
    """

    def __init__(self, steps: DPSteps, model: Model) -> None:
        self._steps = steps
        self._model = model

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [S, D], S > 0 -> [S, V] float32."""
        logits = self._round(hidden)
        assert logits is not None
        return logits

    def finish(self, like: Tensor) -> None:
        """Joins the rounds of other groups until all have finished."""
        while self._round(like[:0]) is not None:
            pass

    def _round(self, hidden: Tensor) -> Tensor | None:
        sizes = self._steps.exchange(len(hidden), len(hidden))
        return None if sizes is None or sizes.is_idle else self._model.logits(hidden, sizes)


def _facts(plan: StepPlan) -> tuple[StepFacts, ...]:
    if plan.dp_facts is None:
        raise ValueError(f"plan {plan.number} has no facts of the other attention groups (dp_facts)")
    return plan.dp_facts
