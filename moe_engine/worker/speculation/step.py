"""Speculative step (SGLang: speculative worker): draft, verify in one forward with prompts, accept, draft extend.

Legend: D decodes, P prompts that sample, N max tokens of a decode, K = depth + 1, S rows of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.decoder.drafting import VerifiedChains
from moe_engine.models.batch import ForwardBatch
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import Speculation, SpeculationConfig, StepPlan
from moe_engine.types.token_masks import DraftTree
from moe_engine.worker.batch.batch_builder import BatchBuilder
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.step_batch import StepBatch
from moe_engine.worker.batch.token_buffer import TokenBuffer
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool
from moe_engine.worker.sampling.penalties import TreeText
from moe_engine.worker.sampling.sampler import SampledRows, Sampler
from moe_engine.worker.sampling.sampling_state import Draw, uniforms
from moe_engine.worker.speculation.acceptance import Accepted, accept, accept_at_random, accept_chains, force
from moe_engine.worker.speculation.draft_batch import DraftBatches, places_in_runs
from moe_engine.worker.speculation.drafter import Computed, Drafter
from moe_engine.worker.speculation.drafts import Drafts, DraftTask
from moe_engine.worker.speculation.fused_spec_step import FusedStep
from moe_engine.worker.speculation.verification import Verification, VerificationBatches
from moe_engine.worker.step_sampling import Drawn

FORCE_SALT = 1
"""Salt of the random numbers for thresholds, to be independent of those for sampling."""


class SpeculativeStep:
    """The parts of a speculative step around the target's forward, for one rank.

    Attributes:
        verifications: builds the batches of drafts and prompts.

    Args:
        batches: builds batches over the target's KV cache, for runs that differ from the step's batch.
        fused: runs decode-only steps with chains in one call.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        drafter: Drafter,
        rows: RequestRows,
        builder: BatchBuilder,
        sampler: Sampler,
        kv_pool: KVPool,
        batches: DraftBatches,
        stream: DeviceStream,
        fused: FusedStep | None = None,
    ) -> None:
        assert rows.history is not None
        self.config = config
        self.drafter = drafter
        self._rows = rows
        self._history: TokenBuffer = rows.history
        self._sampler = sampler
        self._kv_pool = kv_pool
        self._batches = batches
        self.verifications = VerificationBatches(rows, builder, stream)
        self._stream = stream
        self._thresholds = config.has_thresholds
        self._fused = fused

    def enter(self, plan: StepPlan) -> None:
        """Adds the plan's new rows, also in a step without speculation."""
        for new in plan.new_rows:
            self.drafter.enter(new)

    # -- before the target runs

    def reserve(self, speculation: Speculation) -> None:
        """Writes the slots that a plan reserves for future tokens."""
        self._rows.reserve(speculation.reserved)

    def without_ended(self, plan: StepPlan) -> tuple[StepPlan, list[tuple[int, int]]]:
        """The plan without decodes of rows that ended in the last step; their indices in the plan, with their rows.

        Their tokens are not needed: the scheduler ends these requests when it gets the last step's result.
        """
        ended = self._history.ends.ended
        left_out = [(i, row) for i, row in enumerate(plan.rows[: plan.num_decodes]) if ended[row]]
        if not left_out:
            return plan, []
        kept = [i for i in range(len(plan.rows)) if i >= plan.num_decodes or not ended[plan.rows[i]]]
        rest = replace(
            plan,
            rows=[plan.rows[i] for i in kept],
            starts=[plan.starts[i] for i in kept],
            counts=[plan.counts[i] for i in kept],
            samples=[plan.samples[i] for i in kept],
            num_decodes=plan.num_decodes - len(left_out),
        )
        return rest, left_out

    def run_fused(self, plan: StepPlan, speculation: Speculation) -> VerifiedChains | None:
        """Runs a step of a single attention group, from draft to draft extend, in one call; None, without a step, if it
        cannot be fused. The result is valid until the next step."""
        if self._fused is None or not speculation.follow or len(plan.rows) != plan.num_decodes:
            return None
        decodes = self.verifications.decodes_of(plan)
        if not decodes.is_even or not self._fused.takes(decodes.plan_rows, decodes.rows, sum(plan.counts)):
            return None
        return self._fused.run(decodes.rows, decodes.most - 1)

    def draft_idle(self, sizes: Sequence[StepSizes]) -> None:
        """Runs idle batches in draft forwards of other attention groups."""
        if sizes:
            self.drafter.join(sizes)

    def draft(self, plan: StepPlan, speculation: Speculation, sizes: Sequence[StepSizes] = ()) -> Verification:
        """Drafts for the decodes of a plan; `sizes` as in `DraftTask`."""
        decodes = self.verifications.decodes_of(plan)
        rows, starts = decodes.rows, self._history.read_lengths(decodes.rows)
        roots = self._rows.last_tokens_of(decodes.rows_device)
        if decodes.most == 1:
            self.draft_idle(sizes)
            self.drafter.skip(rows)
            return Verification(decodes, starts, roots[:, None], None, 0)
        depth, topk, with_drafts = speculation.depth, self.config.topk, decodes.with_drafts
        if len(with_drafts) == len(rows):
            drafts = self.drafter.propose(
                DraftTask(rows, starts, decodes.rows_device, roots, depth, topk, decodes.most, sizes)
            )
        else:
            self.drafter.skip(rows[decodes.counts == 1])
            index = self._stream.from_array(with_drafts)
            some, lengths = rows[with_drafts], starts[with_drafts]
            task = DraftTask(some, lengths, decodes.rows_device[index], roots[index], depth, topk, decodes.most, sizes)
            drafts = _spread(self.drafter.propose(task), index, roots)
        return Verification(decodes, starts, drafts.tokens, drafts.parents, depth)

    def read_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Computed tokens of rows [D]; synchronizes with an accelerator."""
        return self._history.read_lengths(rows)

    def report_drafts(self, plan: StepPlan, verification: Verification) -> None:
        """Reports the draft trees of masked rows to the host; synchronizes with an accelerator."""
        self.report(plan, verification.rows, verification.counts, verification.tokens, verification.parents)

    def report(
        self, plan: StepPlan, rows: np.ndarray, counts: np.ndarray, drafts: Tensor, trees: Tensor | None = None
    ) -> None:
        """The same for rows [D] with counts [D] nodes each: drafts [D, N], trees [D, N] (parents)."""
        launched = self._rows.edits.masks.launched
        if launched is None or not launched.reports_drafts:
            return
        tokens = self._stream.read(drafts)
        parents = None if trees is None else self._stream.read(trees)
        found, masked = {}, set(plan.masked)
        for i, (row, count) in enumerate(zip(rows.tolist(), counts.tolist())):
            if row in masked:
                above = None if parents is None else parents[i, :count].tolist()
                found[row] = DraftTree(tokens[i, :count].tolist(), above)
        launched.report(found)

    # -- after the target has run

    def tree_text(self, batch: StepBatch, verification: Verification) -> TreeText | None:
        """Context tokens of tree nodes, for logits processors; None for chains: all tokens before a node."""
        if verification.parents is None or not self._rows.edits.keeps_tokens:
            return None
        decodes, queries = verification.decodes, batch.attention.decode
        assert queries is not None and queries.visible is not None
        begins = np.repeat(verification.starts, decodes.counts)
        return TreeText(begins, queries.visible[: len(begins)], decodes.most)

    def drafts_below(self, sampled: SampledRows, verification: Verification) -> Tensor | None:
        """[S, J]: the drafts below each row of logits, -1: none; None without thresholds."""
        if not self._thresholds or not verification.depth:
            return None
        tokens, parents, decodes = verification.tokens, verification.parents, verification.decodes
        if parents is None:
            below = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], -1)), 1)[:, :, None]  # [D, N, 1]
        else:
            node = torch.arange(tokens.shape[1], device=tokens.device)
            below = torch.where(parents[:, None, :] == node[:, None], tokens[:, None, :], -1)  # [D, N, N]
        out = below.new_full((len(sampled.rows), below.shape[-1]), -1)
        out[: decodes.num_nodes] = below.flatten(0, 1).index_select(
            0, self._stream.from_array(np.flatnonzero(decodes.real))
        )
        return out

    def accept(self, drawn: Drawn, sampled: SampledRows, verification: Verification) -> tuple[Accepted, Tensor]:
        """Verifies the trees against the token sampled at each row of logits [S]. Returns also the prompts' tokens."""
        nodes, tokens, parents = verification.nodes, verification.tokens, verification.parents
        prompts = drawn.tokens[verification.decodes.num_nodes :]
        if self.config.simulated_accept_length is not None and verification.depth:
            return self._accept_at_random(drawn.tokens[nodes], verification), prompts
        if parents is None and drawn.chances is None:
            on_nodes, drafts, nodes = self._stream.arrays(drawn.tokens, tokens, nodes)
            return accept_chains(on_nodes[nodes], drafts, verification.depth), prompts
        forced = None if drawn.chances is None else self._forced(drawn.chances, sampled, verification)
        return accept(drawn.tokens[nodes], tokens, parents, verification.depth, forced), prompts

    def advance(self, plan: StepPlan, verification: Verification, accepted: Accepted, prompts: Tensor) -> None:
        """Updates lengths and tokens of every row, and moves the KV of accepted drafts to their positions' slots."""
        if len(verification.rows):
            if verification.parents is not None:
                self._move(verification, accepted)
            if self._rows.states is not None:
                self._rows.states.accept(verification.rows_device, accepted.counts)
            rows, starts, tokens, counts = self._stream.arrays(
                verification.rows_device, self._stream.from_array(verification.starts), accepted.tokens, accepted.counts
            )
            tokens = tokens * (tokens > 0)  # 0 for invalid logits
            self._history.advance(rows, starts, starts + counts, tokens)
            # entries after the last new token repeat it
            self._rows.set_last_tokens(rows, tokens[:, -1])
            if not self._stream.asynchronous:  # reading would stall an accelerator
                self._history.ends.note(rows, starts + 1, tokens, counts)
        self.advance_prompts(plan, prompts)

    def advance_prompts(self, plan: StepPlan, tokens: Tensor) -> None:
        """Updates lengths of the plan's prompts; tokens [P] were sampled for the prompts that sample."""
        chunks = range(plan.num_decodes, len(plan.rows))
        self._computed(plan, chunks)
        ready = [i for i in chunks if plan.samples[i]]
        if ready:
            rows = self._stream.from_list([plan.rows[i] for i in ready], torch.int64)
            lengths = self._stream.from_list([plan.starts[i] + plan.counts[i] for i in ready], torch.int64)
            tokens = tokens.clamp_min(0)
            self._history.append(rows, lengths, tokens)
            self._rows.set_last_tokens(rows, tokens)

    def _computed(self, plan: StepPlan, chunks: Sequence[int]) -> None:
        """Updates computed lengths of some prompts of a plan."""
        self._history.set_lengths([plan.rows[i] for i in chunks], [plan.starts[i] + plan.counts[i] for i in chunks])

    def advance_plain(self, plan: StepPlan, sampled: SampledRows, tokens: Tensor) -> None:
        """The same for a step without speculation; tokens [S] >= 0 are the sampled ones."""
        self._computed(plan, [i for i in range(plan.num_decodes, len(plan.rows)) if not plan.samples[i]])
        self.drafter.skip(sampled.rows)
        self._history.append(
            *self._stream.arrays(sampled.rows_device, self._stream.from_array(sampled.lengths), tokens)
        )

    def advance_decodes(self, rows: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> None:
        """The same for a fused step of decodes, see `fused_decode.Advance`."""
        self.drafter.skip(rows)
        self._history.append(rows, lengths, tokens)

    def update_cache(
        self,
        plan: StepPlan,
        batch: StepBatch,
        forward: ForwardBatch,
        hidden: Tensor,
        verification: Verification,
        accepted: Accepted,
    ) -> None:
        """Runs the draft extend over the step's tokens."""
        num, offsets = plan.num_decodes, batch.offsets
        rows, counts, starts = verification.rows, verification.counts, verification.starts
        kept = accepted.counts
        if num < len(plan.rows):
            rows, counts = np.array(plan.rows, dtype=np.int64), np.array(plan.counts, dtype=np.int64)
            starts = np.concatenate((starts, np.array(plan.starts[num:], dtype=np.int64)))
            kept = torch.cat((kept, self._stream.from_array(counts[num:])))
        if verification.parents is not None:  # the accepted path of each tree becomes a run
            path = self._stream.from_array(offsets[:num])[:, None] + accepted.path
            paths = np.where(counts[:num] > 1, path.shape[1], 1)  # without drafts there is only one slot
            counts = np.concatenate((paths, counts[num:]))
            path = path.flatten().index_select(
                0, self._stream.from_array(np.flatnonzero(np.arange(path.shape[1]) < counts[:num, None]))
            )
            own = [np.arange(o, o + c) for o, c in zip(offsets[num:].tolist(), counts[num:].tolist())]
            chunks = self._stream.from_array(np.concatenate([np.zeros(0, dtype=np.int64), *own]))
            batch, forward = self._batches.runs(rows, starts, counts, num_decodes=num)
            offsets = batch.offsets
            in_runs = torch.cat((path, chunks))
            hidden = hidden.index_select(0, in_runs[self._stream.from_array(places_in_runs(offsets, counts))])
        self.drafter.update_cache(Computed(rows, starts, counts, kept, offsets, hidden, batch, forward))

    # -- helpers

    def _accept_at_random(self, on_nodes: Tensor, verification: Verification) -> Accepted:
        assert self.config.simulated_accept_length is not None
        seeds = self._rows.sampling.mixed_seed[verification.rows]
        numbers = self._stream.from_array(uniforms(seeds, verification.starts, FORCE_SALT))
        return accept_at_random(on_nodes, verification.tokens, self.config.simulated_accept_length, numbers)

    def _forced(self, chances: Tensor, sampled: SampledRows, verification: Verification) -> Tensor:
        """[D, N]: drafts that the thresholds accept. chances [S, J]: probabilities of `drafts_below`."""
        config, decodes, parents = self.config, verification.decodes, verification.parents
        count, num_nodes = verification.tokens.shape
        node = torch.arange(num_nodes, device=chances.device)
        above = (node - 1).expand(count, -1) if parents is None else parents
        at = verification.nodes.gather(1, above.clamp_min(0))  # the row of logits above each node
        chance = chances[at, 0 if parents is None else node]
        rows = np.repeat(verification.rows[:, None], num_nodes, 1)
        lengths = sampled.lengths[decodes.host_nodes] - 1  # lengths of the rows above
        seeds = self._rows.sampling.mixed_seed[rows]
        # siblings get independent numbers
        columns = [uniforms(seeds[:, n], lengths[:, n], FORCE_SALT + n) for n in range(num_nodes)]
        numbers = self._stream.from_array(np.stack(columns, 1))
        drawn = self._stream.from_array(self._rows.sampling.draw[verification.rows] != Draw.GREEDY)
        return force(chance, numbers, config.accept_threshold_single, config.accept_threshold_acc) & drawn[:, None]

    def _move(self, verification: Verification, accepted: Accepted) -> None:
        """Moves the KV of accepted nodes to the slots of their positions. Rejected nodes move onto themselves."""
        width = accepted.path.shape[1]
        step = torch.arange(width, device=accepted.path.device)
        inside = step < accepted.counts[:, None]
        base = self._stream.from_array(verification.rows * self._rows.width + verification.starts)[:, None]
        target = self._rows.slots_at((base + torch.where(inside, step, 0)).flatten())
        source = self._rows.slots_at((base + torch.where(inside, accepted.path, 0)).flatten())
        self._kv_pool.move(source, target)
        if self._rows.edits.keeps_tokens:
            assert self._rows.slot_tokens is not None
            self._rows.slot_tokens.move(source, target)


def _spread(drafts: Drafts, index: Tensor | slice, roots: Tensor) -> Drafts:
    """Drafts of some decodes -> of all decodes; the other decodes have only their root."""
    tokens = drafts.tokens.new_full((len(roots), drafts.num_nodes), -1)
    tokens[:, 0] = roots
    tokens[index] = drafts.tokens
    if drafts.parents is None:
        return Drafts(tokens)
    parents = drafts.parents.new_zeros(tokens.shape)
    parents[:, 0] = -1
    parents[index] = drafts.parents
    return Drafts(tokens, parents)
