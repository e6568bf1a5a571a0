"""The configuration of speculative decoding. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding, resolved. Legend: the root of a draft tree is the last token; its other nodes are drafts.

    `method` names the drafter: ``nextn`` (the checkpoint's own MTP layers), ``eagle`` (an EAGLE head), ``block``
    (layers that fill in blocks, of a head or of the checkpoint), ``standalone`` (a small model of the same vocabulary)
    or ``ngram`` (prompt lookup, no weights). `num_steps` is the depth of the tree, `topk` its width (1: a chain),
    `num_draft_tokens` its nodes with the root, so a chain has `num_steps` + 1; `auto_depth`: each step has a depth of 0
    to `num_steps`. Thresholds below 1 accept more than the target's own choice (SGLang's lossy acceptance); 1 is
    lossless.
    `simulated_accept_length`: drafts are accepted at random.
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
        """Whether the drafter reads the target's hidden states, and runs a draft extend after each step."""
        return self.method in ("nextn", "eagle", "block")

    @property
    def uses_own_layers(self) -> bool:
        """Whether draft layers of the model's checkpoint draft, or MTP layers exported from it."""
        return self.method == "nextn" or (self.method == "block" and self.draft_model_path is None)

    @property
    def reads_next_token(self) -> bool:
        """Whether the drafter's KV of a token also depends on the token after it."""
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
