"""The values that the search tries in each dimension: those that may pay off, or the one that a flag gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.costs.model_facts import ModelFacts
from moe_engine.tuning.planner.candidate import Candidate

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CHUNKS = (2048, 8192)
WHOLE = 1 << 24
"""A chunk that holds every prompt."""
BALANCED_FROM = 16
"""Ranks from which redundant experts are tried: fewer ranks hold enough experts to balance."""

MOST_DRAFTS = 3
"""TensorRT-LLM's optimum for DeepSeek-R1 at batch 1 (tech blog 1)."""
OPTIONS = ("overlap", "redundant")
"""Fields of a form that leave its ranks unchanged."""


@dataclass(frozen=True)
class Space:
    """The dimensions of a search. None, or no entry: all values that may pay off.

    Attributes:
        form: given fields of `Form`. kept: further condition on forms.
        replicas: given engines of one launch.
        kv: dtypes of the KV cache.
        chunk: given prompt tokens of a step of all attention groups of an engine; -1: whole prompts. prompts: most
        prompt tokens of a step with several prompts.
        running: given running requests of all attention groups of an engine.
        drafts: given depths. auto_depth: the launch chooses one of them for each step.
        separate: prefill and decode on separate engines are tried too. caches: prefixes are cached.
        fixed_by: flags that fix a form, for messages.
    """

    form: Mapping[str, Any] = field(default_factory=dict)
    kept: Callable[[Form], bool] = lambda form: True
    replicas: int | None = None
    kv: Sequence[str] = ("bf16", "fp8")
    chunk: int | None = None
    prompts: int = WHOLE
    running: int | None = None
    drafts: Sequence[int] | None = None
    auto_depth: bool = False
    separate: bool = True
    fixed_by: Sequence[str] = ()
    caches: bool = True

    def forms(self, facts: ModelFacts, gpus: int) -> Iterator[tuple[Form, int]]:
        """Forms of an engine, with the number of engines; all GPUs are used."""
        for ranks in self._sizes("ranks", gpus):
            if self.replicas is not None and gpus // ranks % self.replicas:
                continue
            for dp in self._sizes("attn_dp", ranks):
                narrow = dp in (1, ranks) or ranks // dp <= 8 or "attn_dp" in self.form
                if narrow and not facts.num_heads % (ranks // dp):
                    for form in self._experts(facts, ranks, dp):
                        if self.kept(form) and self.variants(form):
                            yield form, gpus // ranks

    def _sizes(self, name: str, whole: int) -> Iterator[int]:
        """Divisors of `whole`: powers of two, or the one given for this field."""
        asked = self.form.get(name)
        sizes = [1 << power for power in range(whole.bit_length())] if asked is None else [asked]
        return (size for size in sizes if whole % size == 0)

    def _experts(self, facts: ModelFacts, ranks: int, dp: int) -> list[Form]:
        """Divisions of the experts, without the options of a form."""
        if not facts.num_experts:
            found = [Form(ranks, dp)]
        elif dp == 1:
            found = [Form(ranks), Form(ranks, ep=ranks)]
        else:
            found = [Form(ranks, dp, ranks, travels=True, dense_whole=True), Form(ranks, dp, ranks)]
        given = {name: value for name, value in self.form.items() if name not in OPTIONS}
        if given.get("travels") is False:
            found = [replace(form, dense_whole=False) for form in found]
        found = list(dict.fromkeys(replace(form, **given) for form in found))
        return [form for form in found if self._divides(facts, form)]

    def _divides(self, facts: ModelFacts, form: Form) -> bool:
        """Whether experts and ranks divide each other; a dispatch spans all ranks."""
        slots = facts.num_experts + int(self.form.get("redundant", 0))
        return not (form.ranks % form.ep or slots % form.ep or (form.travels and not 1 < form.ep == form.ranks))

    def variants(self, form: Form) -> list[Form]:
        """The form with and without two-batch overlap and redundant experts."""
        found = [form]
        if form.travels:
            found.append(replace(form, overlap=True))
        if form.travels and form.ranks >= BALANCED_FROM:
            found += [replace(variant, redundant=form.ranks) for variant in list(found)]
        given = {name: value for name, value in self.form.items() if name in OPTIONS}
        found = list(dict.fromkeys(replace(variant, **given) for variant in found))
        return [each for each in found if (form.travels or not each.overlap) and (form.ep > 1 or not each.redundant)]

    def depths(self, facts: ModelFacts) -> Sequence[int]:
        """MTP depths."""
        return range(min(1, facts.mtp_layers) * MOST_DRAFTS + 1) if self.drafts is None else self.drafts

    def chunks(self, form: Form, usual: Sequence[int] = CHUNKS) -> Sequence[int]:
        """Prompt tokens of a step of one attention group."""
        if self.chunk is None:
            return usual
        return (WHOLE if self.chunk == -1 else max(1, self.chunk // form.attn_dp),)

    def rows(self, form: Form) -> Sequence[int]:
        """Running requests of one attention group."""
        return ROWS if self.running is None else (max(1, self.running // form.attn_dp),)

    def options(self, facts: ModelFacts, form: Form, model_path: str, replicas: int) -> Iterator[Candidate]:
        """Everything but the number of requests."""
        for variant in self.variants(form):
            for dtype in self.kv:
                for chunk in self.chunks(form):
                    for drafts in self.depths(facts):
                        yield Candidate(
                            variant, replicas, dtype, chunk, 1, drafts, model_path, auto_depth=self.auto_depth
                        )


EVERYTHING = Space()
