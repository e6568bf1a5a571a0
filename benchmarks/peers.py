"""The two sides of `side_by_side`: this engine, and transformers in its fastest mode.

No command; used by `benchmarks.side_by_side`. Both take token ids, decode greedily, ignore the end of
sequence, and keep their weights in memory between runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.workloads import Workload
from moe_engine.tuning.stats import mean, median

EXPERTS = ("grouped_mm", "batched_mm", "eager")
ATTENTIONS = ("sdpa", "eager")
CACHES = ("dynamic", "static")
FACTS = (
    "dtype", "device", "context_len", "max_total_num_tokens", "chunked_prefill_size", "max_prefill_tokens",
    "attention_backend", "moe_runner_backend", "linear_backend", "ops_backend",
)  # fmt: skip
CHECK = Workload("check", num_streams=8, own_len=32, output_len=8)
"""Prompts whose float32 answers must agree on both sides."""


@dataclass(frozen=True)
class Run:
    """One run of a workload: total seconds, seconds to the first token (median over requests), and the outputs."""

    seconds: float
    first_token_seconds: float
    outputs: list[list[int]]


class EngineSide:
    """`moe_engine.Engine`, with its core in a separate process, as in normal use."""

    def __init__(self, model_path: Path, flags: dict[str, Any]) -> None:
        from moe_engine import Engine

        self._engine = Engine(model_path=str(model_path), **flags)

    def run(self, prompts: list[list[int]], output_len: int) -> Run:
        sampling = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True}
        began = time.perf_counter()
        answers = self._engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - began
        assert isinstance(answers, list)
        first = [answer["meta_info"].get("first_token_latency") or seconds for answer in answers]
        outputs = [list(answer["output_ids"]) for answer in answers]
        short = [len(tokens) for tokens in outputs if len(tokens) != output_len]
        if short:
            raise RuntimeError(f"{len(short)} of {len(prompts)} answers are not {output_len} tokens long: {short[:5]}")
        return Run(seconds, median(first), outputs)

    def facts(self) -> dict[str, Any]:
        """The engine's flags and sizes."""
        info = self._engine.get_server_info()
        return {key: info[key] for key in FACTS if key in info}

    def close(self) -> None:
        self._engine.shutdown()


@dataclass(frozen=True)
class Mode:
    """A mode of transformers' `generate`."""

    experts: str = "grouped_mm"
    attention: str = "sdpa"
    cache: str = "dynamic"

    def __str__(self) -> str:
        return f"experts {self.experts}, attention {self.attention}, {self.cache} cache"


class TransformersSide:
    """`AutoModelForCausalLM.generate`, all prompts in one batch (they are equally long: no padding).

    Continuous batching is not a candidate: release 5.23 cannot run it on MLA models (the paged cache has the width of
    a head, not of the latent).
    """

    def __init__(self, model_path: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
        self._model = model.to(device).eval()
        self._model.generation_config.eos_token_id = None  # the end of sequence is ignored
        self._device = device
        self.modes: dict[str, Mode] = {}
        self.probes: dict[str, dict[str, float]] = {}

    def choose(self, workload: Workload, vocab_size: int) -> Mode:
        """The fastest mode for this workload, found by short probes, one property at a time."""
        probe = workload.probe()
        prompts = probe.prompts(vocab_size, seed=-1)
        best = Mode() if self._has_experts() else Mode(experts="none")
        seconds: dict[str, float] = {}

        def seconds_of(mode: Mode) -> float:
            if str(mode) not in seconds:
                gathered = self._gathered_bytes(prompts, mode)
                if gathered > psutil.virtual_memory().available // 2:
                    seconds[str(mode)] = float("inf")
                    print(f"  transformers with {mode} would gather {gathered / 1e9:.0f} GB of weights: left out")
                    return seconds[str(mode)]
                try:
                    seconds[str(mode)] = min(self._generate(prompts, probe.output_len, mode).seconds for _ in range(2))
                except Exception as error:  # modes that this version does not support are skipped
                    seconds[str(mode)] = float("inf")
                    print(f"  transformers cannot run with {mode}: {type(error).__name__}: {str(error)[:100]}")
            return seconds[str(mode)]

        for field, choices in (("experts", EXPERTS), ("attention", ATTENTIONS), ("cache", CACHES)):
            if field == "experts" and not self._has_experts():
                continue
            best = min((replace(best, **{field: choice}) for choice in choices), key=seconds_of)
        self.modes[workload.name], self.probes[workload.name] = best, seconds
        return best

    def _gathered_bytes(self, prompts: list[list[int]], mode: Mode) -> int:
        """Expert weights that a prefill copies: ``batched_mm`` gathers those of each token and expert."""
        if mode.experts != "batched_mm":
            return 0
        config, tokens = self._model.config, sum(map(len, prompts))
        weights = 3 * config.hidden_size * config.moe_intermediate_size
        return tokens * config.num_experts_per_tok * weights * self._model.dtype.itemsize

    def run(self, prompts: list[list[int]], output_len: int, workload: str) -> Run:
        return self._generate(prompts, output_len, self.modes.get(workload, Mode()))

    def run_with_shared_prefix(self, prompts: list[list[int]], shared_len: int, output_len: int, workload: str) -> Run:
        """A manual shared-prefix implementation: computes the prefix once, then copies its KV to every row."""
        from transformers import DynamicCache

        self._enter(self.modes.get(workload, Mode()))
        ids = torch.tensor(prompts, device=self._device)
        clock = _Clock()
        with torch.no_grad():
            cache = DynamicCache(config=self._model.config)
            self._model(ids[:1, :shared_len], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(len(prompts))
            outputs = self._call(ids, output_len, clock, past_key_values=cache)
        return clock.run(outputs, output_len)

    def experts_touched(self, workload: Workload, vocab_size: int) -> float | None:
        """Mean number of distinct experts per layer in a decode step of this workload; None for dense models."""
        probe = workload.probe()
        if not self._has_experts() or probe.output_len < 2:
            return None
        with self._count_experts() as counts:
            self._generate(probe.prompts(vocab_size, seed=-1), probe.output_len, self.modes.get(workload.name, Mode()))
        decodes = [distinct for tokens, distinct in counts if tokens == probe.num_streams]
        return mean(decodes) if decodes else None

    def _generate(self, prompts: list[list[int]], output_len: int, mode: Mode) -> Run:
        self._enter(mode)
        options = {"cache_implementation": "static"} if mode.cache == "static" else {}
        clock = _Clock()
        with torch.no_grad():
            outputs = self._call(torch.tensor(prompts, device=self._device), output_len, clock, **options)
        return clock.run(outputs, output_len)

    def _call(self, ids: Tensor, output_len: int, clock: _Clock, **options: Any) -> Tensor:
        return self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_len,
            do_sample=False,
            use_cache=True,
            stopping_criteria=[clock],
            **options,
        )

    def _enter(self, mode: Mode) -> None:
        self._model.set_attn_implementation(mode.attention)
        if self._has_experts():
            self._model.set_experts_implementation(mode.experts)

    def _has_experts(self) -> bool:
        return bool(getattr(self._model.config, "n_routed_experts", None))

    @contextmanager
    def _count_experts(self) -> Iterator[list[tuple[int, int]]]:
        """Collects (tokens, distinct experts) of every router call."""
        counts: list[tuple[int, int]] = []

        def note(module: Any, inputs: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            chosen = next(part for part in parts if part.dtype == torch.int64)
            counts.append((chosen.shape[0], chosen.unique().numel()))

        handles = [
            module.register_forward_hook(note)
            for module in self._model.modules()
            if type(module).__name__.endswith("TopkRouter")
        ]
        try:
            yield counts
        finally:
            for handle in handles:
                handle.remove()


class _Clock:
    """A stopping criterion that never stops, and records each token's time."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first: float | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self._first is None:
            self._first = time.perf_counter() - self._began
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def run(self, outputs: Tensor, output_len: int) -> Run:
        tokens = outputs[:, outputs.shape[1] - output_len :].tolist()
        seconds = time.perf_counter() - self._began
        return Run(seconds, seconds if self._first is None else self._first, tokens)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, float]:
    """Similarity of two sets of answers: share of equal first tokens, and mean length of the common prefix."""

    def common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

    lengths = [common(a, b) for a, b in zip(ours, theirs)]
    return {
        "same_first_token": mean([float(n > 0) for n in lengths]),
        "mean_common_tokens": mean(list(map(float, lengths))),
    }


def float32_agreement(model_path: Path, flags: dict[str, Any], device: str, vocab_size: int) -> dict[str, float]:
    """`agreement` of both sides in float32, on a few short prompts. In bf16, rounding makes greedy answers of random
    weights diverge; in float32 the sides must agree."""
    prompts = CHECK.prompts(vocab_size, seed=-3)
    engine = EngineSide(model_path, flags | {"dtype": "float32"})
    try:
        ours = engine.run(prompts, CHECK.output_len)
    finally:
        engine.close()
    theirs = TransformersSide(model_path, device, torch.float32).run(prompts, CHECK.output_len, CHECK.name)
    return agreement(ours.outputs, theirs.outputs)
