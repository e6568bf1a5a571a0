"""An engine around a toy model: real scheduler, runner and speculative step, toy target model and drafters.

The target's logits are a random table over the last two tokens, so that the distribution of every position is known
exactly. It reads both from its KV cache, through slot table and tree masks, and checks that a token attends to each
earlier position exactly once and to no other.

Legend: T tokens, R requests, C slots of a row, D requests with drafts, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionCapabilities
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.models.batch import ForwardBatch
from moe_engine.scheduler import NEEDS_RESULT, Scheduler, SchedulerConfig
from moe_engine.types import NewRow, Request, SamplingParams, SpeculationConfig, StepPlan, StepResult
from moe_engine.types.step_settings import GraphSettings
from moe_engine.worker.batch.batch_builder import BatchBuilder
from moe_engine.worker.batch.dp_step import chain_forwards
from moe_engine.worker.batch.mla_form import MLAFormPolicy
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.token_buffer import TokenBuffer
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.sampling.sampler import SampledRows
from moe_engine.worker.speculation.draft_batch import DraftBatches
from moe_engine.worker.speculation.drafter import Computed, Drafter
from moe_engine.worker.speculation.drafts import Drafts, DraftTask
from moe_engine.worker.speculation.mtp import MTPDrafter
from moe_engine.worker.speculation.standalone import StandaloneDrafter
from moe_engine.worker.speculation.step import SpeculativeStep
from moe_engine.worker.speculation.tree import grow
from moe_engine.worker.startup.graph_setup import capture_graphs
from tests.worker.repeated_calls import OnDevice, RepeatedCalls

MAX_ROWS, CONTEXT_LEN = 64, 40
MAX_LAYERS = 4  # layers of the cache: the target's and those of MTP
MakeDrafter = Callable[[ModelRunner, np.random.Generator], Drafter]


@dataclass(frozen=True)
class Seen:
    """Context of the tokens of a step in a toy KV cache, whose slots hold (token, position)."""

    rows: np.ndarray  # [T] row of each token
    tokens: np.ndarray  # [T, C] int64
    positions: np.ndarray  # [T, C] int64
    mask: np.ndarray  # [T, C] bool
    real: np.ndarray  # [T] bool: not padding

    def token_at(self, positions: np.ndarray) -> np.ndarray:
        """[T]: the context token of each at one position; positions below 0 count as 0."""
        there = (self.positions == positions.clip(0)[:, None]) & self.mask
        return np.take_along_axis(self.tokens, there.argmax(1)[:, None], 1)[:, 0]


def write_and_look(batch: ForwardBatch, layer: int, ids: Tensor) -> Iterator[tuple[slice, Seen]]:
    """Writes the step's tokens into the KV cache of a layer; then yields, by group, the tokens and their context.

    Checks that a token attends to every position up to its own exactly once, and to no other.
    """
    cache = batch.kv[layer]
    cache[batch.slots, 0], cache[batch.slots, 1] = ids.float(), batch.positions.float()
    begin = 0
    for queries in (batch.attention.decode, batch.attention.prefill):
        if queries is not None:
            group = slice(begin, begin + sum(queries.query_lens))
            real = np.ones(group.stop - begin, dtype=bool) if batch.real is None else batch.real[group].numpy() > 0
            yield group, _look(queries, cache.numpy().astype(np.int64), batch.positions[group].numpy(), real)
            begin = group.stop


def _look(queries: PagedQueries, cache: np.ndarray, positions: np.ndarray, real: np.ndarray) -> Seen:
    """`real` [T]: tokens that are not padding of a captured step."""
    lens, contexts = np.array(queries.query_lens), queries.context_lens_device.numpy().astype(np.int64)
    owner = np.repeat(np.arange(len(lens)), lens)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(lens) - lens, lens)
    columns = np.arange(int(contexts.max()))
    rows = queries.rows.numpy()[owner]
    slots = queries.slot_table.numpy()[rows, : len(columns)]  # [T, C]
    base = (contexts - lens)[owner, None]
    if queries.visible is None:
        mask = columns <= base + within[:, None]
    else:
        bits = queries.visible.numpy()[: len(owner), None] >> np.clip(columns - base, 0, 62) & 1
        mask = (columns < base) | ((columns < contexts[owner, None]) & (bits == 1))
    seen = Seen(rows, cache[slots, 0], cache[slots, 1], mask, real)
    assert (mask.sum(1) == positions + 1)[real].all(), "a token does not attend to all earlier tokens"
    assert (seen.positions == mask.cumsum(1) - 1)[mask & real[:, None]].all(), "a token attends to other text"
    return seen


class MarkovTarget:
    """Logits table[before, last] of the last two tokens; implements `Model`. Position 0 uses itself as the previous
    token."""

    def __init__(self, table: Tensor) -> None:
        self.table = table  # [V, V, V]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[T, 2]: the previous token, and the token."""
        out = []
        for group, seen in write_and_look(batch, 0, batch.input_ids):
            at = batch.positions[group].numpy()
            out.append(np.stack([seen.token_at(at - 1), seen.token_at(at)], 1))
        return torch.from_numpy(np.concatenate(out))

    def logits(self, hidden: Tensor, sizes: object = None, out: Tensor | None = None) -> Tensor:
        found = self.table[hidden[:, 0], hidden[:, 1]]
        return found if out is None else out.copy_(found)


class ExactMTP:
    """MTP layers that predict the target exactly if they are called correctly: each returns its last two input tokens.
    The KV cache contains, for each position, the last token of the hidden state and the input token, in one number;
    both must match the known text.

    Replaces `models.drafts.mtp.MTPLayers`.
    """

    fuses_drafts = False
    shares_selection = False
    attends_to_extend = False
    windowed = False
    ids = None

    def __init__(self, table: Tensor, num_layers: int, history: TokenBuffer) -> None:
        self.num_layers = num_layers
        self._table, self._history = table, history

    def forward(
        self, layer: int, input_ids: Tensor, hidden: Tensor, batch: ForwardBatch, selection: None = None
    ) -> Tensor:
        self.remember(layer, input_ids, hidden, batch)
        return torch.stack([hidden[:, 1], input_ids], 1)

    def remember(self, layer: int, input_ids: Tensor, hidden: Tensor, batch: ForwardBatch) -> None:
        vocab = self._table.shape[0]
        for _, seen in write_and_look(batch, 1 + layer, input_ids * vocab + hidden[:, 1]):
            if layer:  # a deeper layer's KV at the end of a shared prefix depends on tokens that may not be shared
                continue
            known = seen.mask & seen.real[:, None] & (seen.positions < self._history.lengths.numpy()[seen.rows, None])
            text = self._history.tokens.numpy()[seen.rows]  # [T, width]
            here = np.take_along_axis(text, np.where(known, seen.positions, 0), 1)
            behind = np.take_along_axis(text, np.where(known, seen.positions + 1, 0), 1)
            assert (seen.tokens == behind * vocab + here)[known].all(), "the layer got another text"

    def prepare(self, states: Tensor) -> Tensor:
        return states

    def logits(self, v: Tensor, sizes: object = None, layer: int = 0) -> Tensor:
        return self._table[v[:, 0], v[:, 1]]


class NoAttention:
    """No plans: the toy model reads its KV cache itself."""

    name = "none"
    capabilities = AttentionCapabilities()

    def plan(self, batch: AttentionBatch) -> Any:
        return None

    def paged(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class ToyDrafter:
    """Stateless base; implements `Drafter`. `table` [V, V]: the drafter's logits after a token, different from the
    target's."""

    def __init__(self, runner: ModelRunner, rng: np.random.Generator) -> None:
        vocab = runner.rows.vocab_size
        self.table = torch.from_numpy(rng.normal(0, 1.5, (vocab, vocab)).astype(np.float32))
        self.sampler, self.rng = runner.sampler, rng

    def enter(self, new: NewRow) -> None:
        return None

    def skip(self, rows: np.ndarray) -> None:
        return None

    def forwards(self, num_drafting: int, depth: int) -> Sequence[tuple[int, int]]:
        return chain_forwards(num_drafting, depth)

    def join_extend(self) -> None:
        return None

    def update_cache(self, computed: Computed) -> None:
        return None

    def propose(self, task: DraftTask) -> Drafts:
        raise NotImplementedError


class CoupledChain(ToyDrafter):
    """Samples with the target's random numbers."""

    def propose(self, task: DraftTask) -> Drafts:
        tokens = [task.roots]
        for step in range(task.depth):
            at = SampledRows(task.rows, task.lengths + 1 + step, task.rows_device)
            tokens.append(self.sampler.sample(self.table[tokens[-1]], at))
        return Drafts(torch.stack(tokens, 1))


class FixedChain(ToyDrafter):
    """Always its most likely token."""

    def propose(self, task: DraftTask) -> Drafts:
        tokens = [task.roots]
        for _ in range(task.depth):
            tokens.append(self.table[tokens[-1]].argmax(1))
        return Drafts(torch.stack(tokens, 1))


def itself(logits: Tensor, sizes: object = None) -> Tensor:
    """The LM head of a model whose hidden states are logits."""
    return logits


class GrownTree(ToyDrafter):
    """Trees built like those of drafters with a model."""

    def propose(self, task: DraftTask) -> Drafts:
        def expand(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
            return self.table[tokens.flatten()]

        return grow(task, itself, self.table[task.roots], expand, self.sampler)


class RandomTree(ToyDrafter):
    """Random shapes and tokens; children of a node differ."""

    def propose(self, task: DraftTask) -> Drafts:
        count, vocab = len(task.rows), self.table.shape[0]
        parents = np.full((count, task.num_nodes), -1)
        tokens = np.full((count, task.num_nodes), -1)
        tokens[:, 0] = task.roots.numpy()
        for d in range(count):
            levels, below = [0], [list(self.rng.permutation(vocab))]
            for node in range(1, task.num_nodes):
                parent = int(self.rng.choice([n for n in range(node) if levels[n] < task.depth and below[n]]))
                parents[d, node], tokens[d, node] = parent, below[parent].pop()
                levels.append(levels[parent] + 1)
                below.append(list(self.rng.permutation(vocab)))
        return Drafts(torch.from_numpy(tokens), torch.from_numpy(parents))


def exact_standalone(runner: ModelRunner, rng: np.random.Generator) -> StandaloneDrafter:
    """The engine's `StandaloneDrafter`, with the target as draft model and a separate KV cache."""
    rows, stream, page_size = runner.rows, runner.stream, runner.kv_pool.page_size
    pool = KVPool(KVSpec.mla(1, 2, 0, torch.float32), runner.kv_pool.num_slots, page_size, stream)
    attention: Any = runner.forward.attention
    batches = DraftBatches(BatchBuilder(rows, page_size, MLAFormPolicy(), stream), attention, pool.layers, stream)
    assert isinstance(runner.model, MarkovTarget) and rows.history is not None
    model = MarkovTarget(runner.model.table)
    return StandaloneDrafter(model, batches, rows.history, runner.sampler, stream, rows.max_rows)


def exact_mtp(num_layers: int) -> MakeDrafter:
    """The engine's `MTPDrafter` with `ExactMTP` layers."""

    def make(runner: ModelRunner, rng: np.random.Generator) -> MTPDrafter:
        assert isinstance(runner.model, MarkovTarget) and runner.rows.history is not None
        layers: Any = ExactMTP(runner.model.table, num_layers, runner.rows.history)
        batches = DraftBatches(runner.forward.builder, runner.forward.attention, runner.kv_pool.layers, runner.stream)
        return MTPDrafter(layers, batches, runner.rows, runner.sampler, runner.stream, runner.shared, hidden=2)

    return make


@dataclass(frozen=True)
class Step:
    """A plan and its result."""

    plan: StepPlan
    result: StepResult


class ToyEngine:
    """Runs requests with a drafter, or without one, and keeps their outputs.

    Args:
        table: the target's logits [V, V, V].
        make_drafter: not used with `speculation` None.
        limits: further fields of the SchedulerConfig.
        captured: steps of up to this many requests are captured, with their drafts; 0: none.
    """

    def __init__(
        self,
        table: Tensor,
        speculation: SpeculationConfig | None = None,
        make_drafter: MakeDrafter | None = None,
        *,
        page_size: int = 1,
        seed: int = 0,
        captured: int = 0,
        **limits: Any,
    ) -> None:
        vocab, stream = table.shape[0], DeviceStream("cpu")
        limits = {"num_slots": MAX_ROWS * 64, "max_rows": MAX_ROWS} | limits
        self.config = SchedulerConfig(
            context_len=CONTEXT_LEN, page_size=page_size, vocab_size=vocab, speculation=speculation, **limits
        )
        num_drafts = speculation.num_slots(speculation.num_steps) if speculation else 0
        pool = KVPool(KVSpec.mla(MAX_LAYERS, 2, 0, torch.float32), self.config.num_slots, page_size, stream)
        rows = RequestRows(self.config.max_rows, CONTEXT_LEN, vocab, stream, num_drafts=num_drafts)
        attention: Any = OnDevice(NoAttention()) if captured else NoAttention()
        self.runner = runner = ModelRunner(MarkovTarget(table), pool, rows, attention, stream)
        if speculation is not None and make_drafter is not None:
            self.drafter = make_drafter(runner, np.random.default_rng(seed))
            batches = DraftBatches(runner.forward.builder, attention, pool.layers, stream)
            runner.speculation = SpeculativeStep(
                speculation, self.drafter, rows, runner.forward.builder, runner.sampler, pool, batches, stream
            )
        if captured:
            self._capture(captured, speculation or SpeculationConfig("ngram", 0))

    def _capture(self, most: int, config: SpeculationConfig) -> None:
        if isinstance(self.drafter, MTPDrafter):  # as a draft extend leaves them
            rows, layers = self.runner.rows.max_rows, self.drafter.layers.num_layers
            self.drafter.states = torch.zeros(rows, 2, dtype=torch.int64)
            self.drafter.last_states = torch.zeros(rows, layers - 1, 2, dtype=torch.int64)
        settings = GraphSettings((1, 3, most), counts=(1, config.num_nodes(config.num_steps)), trees=config.topk > 1)
        assert capture_graphs(self.runner, settings, backend=RepeatedCalls()) == settings.num_graphs
        assert self.runner.drafted is not None

    def run(self, requests: Sequence[Request]) -> list[Step]:
        """Runs all steps until the last request has ended, one planned ahead; outputs are in the requests."""
        self.scheduler = scheduler = Scheduler(self.config)
        steps: list[Step] = []
        flying: deque[StepPlan] = deque()
        for request in requests:
            scheduler.add(request)
        while True:
            plan = scheduler.schedule()
            if isinstance(plan, StepPlan):
                flying.append(plan)
            if not flying:
                assert scheduler.is_idle() and scheduler.check_integrity() == []
                return steps
            if len(flying) > 1 or plan is None or plan is NEEDS_RESULT:
                plan = flying.popleft()
                steps.append(Step(plan, self.runner.execute(plan)))
                scheduler.update(steps[-1].result)


def make_requests(
    count: int, prompt: Sequence[int], max_new: int, sampling: SamplingParams, seed: int = 0
) -> list[Request]:
    """Requests that differ only in their seeds."""
    rng = np.random.default_rng(seed)
    return [
        Request(f"r{i}", list(prompt), sampling, max_new, seed=int(rng.integers(1 << 40))) for i in range(count)
    ]  # fmt: skip


def random_table(vocab: int, seed: int, spread: float = 1.5) -> Tensor:
    """Logits [V, V, V] of a target."""
    return torch.from_numpy(np.random.default_rng(seed).normal(0, spread, (vocab, vocab, vocab)).astype(np.float32))


def distribution(logits: Tensor, sampling: SamplingParams) -> np.ndarray:
    """The sampling distribution for logits [V] by definition, in float64: temperature, top_k, top_p."""
    scaled = logits.double().numpy() / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    kept = weights[order]
    if sampling.top_k > 0:
        kept[sampling.top_k :] = 0
    kept /= kept.sum()
    kept[np.cumsum(kept) - kept >= sampling.top_p] = 0
    out = np.zeros_like(kept)
    out[order] = kept / kept.sum()
    return out
