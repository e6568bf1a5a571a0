"""The memory ledger of a candidate: by `planning.resolve`, as in `serve`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from moe_engine.config.args import EngineArgs
from moe_engine.errors import MoeEngineError
from moe_engine.kernels.vendors.probe import remembering
from moe_engine.models.config import ModelConfig
from moe_engine.planning.memory.ledger import MemoryLedger, gb
from moe_engine.planning.model.resolve_dtype import stated_kv_dtype
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning.costs.form import Form, Held, precision_of
from moe_engine.tuning.costs.model_facts import ModelFacts
from moe_engine.tuning.hardware.table import Cluster
from moe_engine.tuning.planner.candidate import Candidate
from moe_engine.tuning.planner.given_space import decided, profile_flags
from moe_engine.tuning.planner.launch import Subject, form_of, held_by, plain, resolve_for
from moe_engine.tuning.planner.space import CHUNKS
from moe_engine.types import SpeculationConfig


@dataclass(frozen=True)
class Room:
    """The result of `serve` for a candidate: the ledger of a rank, or the refusal with its sum.

    Attributes:
        tokens: KV slots of an attention group. running: requests that a launch admits, of one attention group.
        ledger: None: refused, or an estimate for a model that this engine does not serve.
        refusal: empty if it fits.
        depths: drafts of a step, of which the launch chooses one for each step.
    """

    tokens: int = 0
    running: int = 0
    ledger: MemoryLedger | None = None
    refusal: str = ""
    chunk: int = 8192
    """Prompt tokens of a step of an attention group; -1: any number."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags of the launch by field name: the user's and the candidate's."""
    depths: tuple[int, ...] = (0,)


class RoomOf(Protocol):
    """The room of a candidate."""

    @property
    def model(self) -> ModelConfig | None:
        """The served model; None: not known."""

    def of(self, candidate: Candidate) -> Room: ...

    def held(self, form: Form) -> Held | None:
        """The kernels of a form; None: not known."""

    def as_given(self) -> Room:
        """The ledger of the user's own flags."""


class Memory:
    """Ledgers of candidates by their flags; each is computed once."""

    def __init__(self, subject: Subject, cluster: Cluster, given: EngineArgs) -> None:
        self._subject, self._cluster, self._given = subject, cluster, given
        self._found: dict[Candidate, Room] = {}
        self._held: dict[Form, Held] = {}
        self._modules: dict[str, bool] = {}
        self._decided = decided(given)

    def with_profile(self) -> tuple[EngineArgs, Memory]:
        """The user's flags with those of --workload-profile that the search would otherwise choose, and their
        ledgers."""
        return self._with(profile_flags(self._given, self._subject.model))

    def with_stated_kv_dtype(self) -> tuple[EngineArgs, Memory]:
        """The user's flags with the type of the KV cache that the checkpoint states, and their ledgers."""
        dtype = stated_kv_dtype(self._subject.model)
        if self._given.memory.kv_cache_dtype != "auto" or dtype == "auto":
            return self._given, self
        return self._with({"kv_cache_dtype": dtype})

    def _with(self, more: Mapping[str, Any]) -> tuple[EngineArgs, Memory]:
        if not more:
            return self._given, self
        args = self._given.replace(**more)
        return args, Memory(self._subject, self._cluster, args)

    @property
    def model(self) -> ModelConfig:
        return self._subject.model

    def of(self, candidate: Candidate) -> Room:
        if candidate not in self._found:
            self._found[candidate] = self._resolve(candidate)
        return self._found[candidate]

    def held(self, form: Form) -> Held | None:
        if plain(form) not in self._held:
            self.of(Candidate(form, 1, "bf16", CHUNKS[0], 1))
        return self._held.get(plain(form))

    def _resolve(self, candidate: Candidate) -> Room:
        flags = candidate.flags(self._cluster)
        fixed = {name: value for name, value in flags.items() if name not in self._decided or name == "model_path"}
        return self._room(fixed)

    def as_given(self) -> Room:
        return self._room({})

    def _room(self, flags: dict[str, Any]) -> Room:
        try:
            with remembering(self._modules):
                config = resolve_for(self._given.replace(**flags), self._subject, self._cluster)
        except MoeEngineError as error:
            return Room(refusal=str(error))
        if (form := form_of(config)) not in self._held:
            self._held[form] = held_by(config)
        return room_of(config, flags)


def room_of(config: ResolvedConfig, flags: Iterable[str] = ()) -> Room:
    """The room of a launch. `flags`: names of those that its command shows first."""
    args = config.args
    values = args.flat()
    first = ("model_path", *(name for name in flags if name != "model_path"))
    names = (*first, *sorted(args.given - {*first, "device"}))
    shown = {name: values[name] for name in names if values[name] is not None and values[name] is not False}
    return Room(
        config.max_total_num_tokens, config.max_running_requests, config.ledger, "", config.chunked_prefill_size,
        shown, _depths(config.speculation),
    )  # fmt: skip


def _depths(speculation: SpeculationConfig | None) -> tuple[int, ...]:
    if speculation is None:
        return (0,)
    return tuple(range(speculation.num_steps + 1)) if speculation.auto_depth else (speculation.num_steps,)


BESIDE_WEIGHTS = 0.5
"""Share of the memory beside the weights that KV gets at least: launches whose weights barely fit raise the share."""

MOST_WEIGHTS = 0.94
"""Share of the memory that weights can take."""

MOST_RUNNING = 4096


class EstimatedMemory:
    """An estimate (weights and KV alone) for models that this engine does not serve and that have no ledger."""

    model: ModelConfig | None = None

    def __init__(self, facts: ModelFacts, cluster: Cluster, dtype: str, share: float) -> None:
        """share: of the memory, for weights and KV."""
        self._facts, self._memory, self._dtype, self._share = facts, cluster.gpu.memory_bytes, dtype, share

    def of(self, candidate: Candidate) -> Room:
        facts, form = self._facts, candidate.form
        precision = precision_of(self._dtype, candidate.kv, not facts.num_experts)
        experts = facts.moe_layers * (facts.num_experts + form.redundant) * facts.expert / form.ranks
        attention = sum(each.layers * (each.sharded / form.attn_tp + each.replicated) for each in facts.attention)
        beside = facts.dense_layers * facts.dense + facts.moe_layers * facts.shared + 2 * facts.head
        other = attention + beside / (1 if form.dense_whole else form.ranks)
        weights = experts * precision.expert_weights.num_bytes + other * precision.other_weights.num_bytes
        per_token = facts.kv_token_bytes(form.attn_tp, precision.kv, windows=False)
        if weights > (most := self._memory * MOST_WEIGHTS):
            return Room(refusal=f"weights {gb(weights)} (estimate), but {gb(most)} of a GPU are left for them")
        left = max(self._memory * self._share - weights, (self._memory - weights) * BESIDE_WEIGHTS)
        return Room(int(left / per_token), MOST_RUNNING)

    def held(self, form: Form) -> Held | None:
        return None

    def as_given(self) -> Room:
        """Sizes without a form, of which only the chunk and the drafts count."""
        return Room(MOST_RUNNING, MOST_RUNNING)
