"""A worker of a model's true shapes on a simulated device, and the launches of its steps.

A process has one worker: simulated devices are installed for a whole process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.step_costs.hardware import Hardware
from benchmarks.step_costs.layers import layers_of, names_of, num_experts, num_fused
from benchmarks.step_costs.models import draft_model, shortened
from benchmarks.step_costs.roofline import Form

ELASTIC = "deepep2"
"""Of `Case.dispatch`: DeepEP with its second generation, which is the newest in the library then."""
SPARE = 16
"""KV slots of a request beyond its context."""


@dataclass(frozen=True)
class Case:
    """The step to run. `config`: the whole config.json. vendors: True if vendor libraries are installed.

    dispatch: backend of expert parallelism. mtp: draft tokens of a decode step, or the depth of trees; 0: none.
    drafter: "mtp" as the model has it, "mtp2" with two MTP layers, "ngram", or "standalone" (`models.DRAFT_MODEL`).
    attention: a requested row, or "auto". topk: children of a node of a draft tree, which has 2 * topk nodes; 1:
    chains. threshold: of acceptance. kv: --kv-cache-dtype. prefill: tokens of a prompt; None: a decode step of `batch`
    requests after `context` tokens. flags: further flags of the engine, ``name`` or ``name=value``.
    """

    model: str
    config: dict[str, Any]
    form: Form
    hardware: Hardware
    batch: int
    context: int
    vendors: bool = True
    mtp: int = 0
    prefill: int | None = None
    dispatch: str = "deepep"
    drafter: str = "mtp"
    attention: str = "auto"
    topk: int = 1
    threshold: float = 1.0
    kv: str = "auto"
    flags: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """Tokens of a request in a decode step."""
        return self.mtp + 1 if self.topk == 1 else 2 * self.topk

    @property
    def name(self) -> str:
        work = f"B{self.batch}" if self.prefill is None else f"prefill{self.prefill}"
        rows = "" if self.vendors else "-triton"
        rows += f"-{self.dispatch}" if self.form.travels and self.dispatch != "deepep" else ""
        work += f"-{self.drafter}{'x' * (self.drafter == 'mtp2')}{self.mtp}" if self.mtp else ""
        work += f"-tree{self.topk}" if self.topk > 1 else ""
        work += f"-threshold{self.threshold}" if self.threshold < 1 else ""
        rows += f"-{self.attention}" if self.attention != "auto" else ""
        work += f"-C{self.context}" if self.prefill is None and self.context != 2048 else ""
        rows += f"-{self.kv}" if self.kv != "auto" else ""
        rows += f"-{self.hardware.name}" if self.hardware.name != "H200" else ""
        rows += "".join(f"-{flag}" for flag in self.flags)
        return f"{self.model}-{self.form.name}-{work}{rows}"


@dataclass(frozen=True)
class Recorded:
    """A recorded step. `repeats`: number of layers that each executed layer represents. waits: waits of the host,
    `recorder.HostWait`."""

    lines: Sequence[Any]
    repeats: Sequence[int]
    waits: Sequence[Any]
    rows: dict[str, str]
    kv_dtype: str = "auto"


class Session:
    """Runs steps of up to `case.batch` requests, with all other fields from `case`."""

    def __init__(self, case: Case) -> None:
        self.case = case
        short, self._repeats = shortened(case.config)
        if case.drafter == "mtp2":
            short["num_nextn_predict_layers"] = 2
        with tempfile.TemporaryDirectory(prefix="moe-engine-step-costs-") as folder:  # read at the start only
            self._recorder, self._config, self._worker = _start(case, short, Path(folder))
        if case.drafter == "standalone":
            self._worker.runner.speculation.drafter.model.is_draft = True

    def run(self, batch: int) -> tuple[Case, Recorded]:
        """Returns the case with `batch` requests, and its recorded step."""
        from benchmarks.step_costs.steps import Steps

        case, config = replace(self.case, batch=batch), self._config
        recorder = self._recorder
        recorder.settings = _settings(case)
        recorder.forget_graphs()
        if config.kernels.model.need.index is not None:  # graphs of a selection need a step with one before them
            before = Steps(self._worker, batch, case.context, config.page_size, SPARE, case.form.dp)
            before.enter()
            before.leave()
        _capture(self._worker, batch, case)
        steps = Steps(self._worker, batch, case.context, config.page_size, SPARE, case.form.dp)
        if case.prefill is not None:
            action = lambda: steps.prefill(case.prefill)  # noqa: E731
        else:
            follow = bool(case.mtp) and case.drafter.startswith("mtp")
            steps.enter(drafts=follow)
            action = steps.decode if not case.mtp else lambda: steps.decode_drafted(case.mtp, case.nodes, follow=follow)
        action()  # one-time work, such as the probe of a library, is not part of a step
        recorder.waits.clear()
        recorder.lines = []
        action()
        lines, recorder.lines = recorder.lines, None
        waits = [wait for wait in recorder.waits if wait.thread.startswith("worker-steps")]
        steps.leave()
        rows = {choice.family: choice.row.name for choice in config.kernels.model.choices}
        return case, Recorded(lines, self._repeats, waits, rows, config.kv_cache_dtype)

    def close(self) -> None:
        self._worker.close()


def _settings(case: Case) -> dict[str, Any]:
    """Settings of the model's sections, and of drafting, whose forwards have one token per request. Layers of a decode
    step see what their kind of attention does."""
    from benchmarks.step_costs.costs import Routing, Setting
    from benchmarks.step_costs.recorder import DRAFT, OUTSIDE

    experts, top_k = num_experts(case.config), case.config.get("num_experts_per_tok") or 0
    shared = num_fused(case.config)  # fused into the routed ones
    if case.form.travels or 8 * shared * (case.form.ep - 1) > top_k:  # as `MoEConfig.num_shared_slots`
        shared = 0

    def with_tokens(tokens: int) -> Setting:
        local = experts // case.form.ep
        routing = Routing(tokens * case.form.dp, top_k, experts, local, shared, _target_ranks(case))
        return Setting(case.context, routing, case.hardware)

    found = {OUTSIDE: with_tokens(case.prefill or case.batch * case.nodes), DRAFT: with_tokens(case.batch)}
    if case.prefill is None:
        seen = {layer.name: int(layer.seen(case.context)) for _, layer in layers_of(case.config)}
        for index, name in enumerate(names_of(shortened(case.config)[0])):
            found[f"layer {index}"] = replace(found[OUTSIDE], seen=seen[name])
    return found


def _start(case: Case, short: dict[str, Any], folder: Path) -> tuple[Any, Any, Any]:
    os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.step_costs import exchange_costs, family_costs, sampling_costs, triton_costs  # noqa: F401
    from benchmarks.step_costs.libraries import Libraries
    from benchmarks.step_costs.recorder import Recorder
    from tests.simulated_cuda import install, memory, observer

    if install.installed():
        raise RuntimeError("this process has simulated devices already: a session needs a separate process")
    recorder = Recorder(_settings(case))
    os.environ[install.COUNT] = str(min(case.form.ranks, case.hardware.per_node))
    install.MULTIPROCESSORS, install.CAPABILITY = case.hardware["multiprocessors"], case.hardware.facts.capability
    memory.MEMORY.total = int(case.hardware["memory_bytes"])
    observer.observer = recorder
    install.install()
    if case.vendors:
        libraries = Libraries(recorder, case.hardware, case.form.nodes(case.hardware), _target_ranks(case))
        libraries.install(folder if case.kv != "auto" else None, folder if case.dispatch == ELASTIC else None)
    _watch_layers(recorder)
    _without_compiling()
    _with_one_expert()
    from moe_engine.config.args import EngineArgs
    from moe_engine.planning.prepare import prepare

    (folder / "config.json").write_text(json.dumps(short))
    config = prepare(EngineArgs.from_cli([str(x) for x in _flags(case, folder)]))
    if case.form.ranks > 1:
        from benchmarks.step_costs import one_rank

        return recorder, config, one_rank.create_worker(config, case.hardware)
    from benchmarks.step_driver import create_worker

    return recorder, config, create_worker(config)


def _target_ranks(case: Case) -> float:
    """Number of ranks of a token's experts: the ranks of its selected expert groups."""
    config = case.config
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    return case.form.ep * chosen / groups


def _flags(case: Case, folder: Path) -> list[Any]:
    most, per_request = case.batch, case.prefill or case.context
    page = 128 if case.config["model_type"] == "deepseek_v4" else 64  # or a divisor of it
    tokens = most * (-(-(per_request + SPARE) // page) * page + page)
    form = case.form
    flags = [
        "--model-path", folder, "--load-format", "dummy", "--device", "cuda", "--skip-tokenizer-init",
        "--max-running-requests", most * form.dp, "--max-total-tokens", tokens, "--context-length",
        per_request + 2048, "--chunked-prefill-size", (case.prefill or max(page, most)) * form.dp,
        "--disable-cuda-graph",
    ]  # fmt: skip
    if case.prefill:
        flags += ["--max-prefill-tokens", case.prefill * form.dp]
    if case.mtp:
        algorithm = {"ngram": "NGRAM", "standalone": "STANDALONE"}.get(case.drafter, "NEXTN")
        flags += [
            "--speculative-algorithm", algorithm, "--speculative-num-steps", case.mtp, "--speculative-eagle-topk",
            case.topk, "--speculative-num-draft-tokens", case.nodes,
        ]  # fmt: skip
        if case.drafter == "standalone":
            flags += ["--speculative-draft-model-path", draft_model(folder, case.config)]
        if case.threshold < 1:
            flags += ["--speculative-accept-threshold-single", case.threshold]
    if case.kv != "auto":
        flags += ["--kv-cache-dtype", case.kv]
    if case.attention != "auto":
        flags += ["--attention-backend", case.attention]
    if form.ranks > 1:
        flags += ["--tp-size", form.ranks, "--ep-size", form.ep]
    if form.dp > 1:
        flags += ["--enable-dp-attention", "--dp-size", form.dp]
    if form.travels:
        flags += ["--moe-a2a-backend", "deepep" if case.dispatch == ELASTIC else case.dispatch]
    flags += [f"--{flag}" for flag in case.flags]
    if (nodes := form.nodes(case.hardware)) > 1:
        flags += ["--nnodes", nodes, "--node-rank", 0, "--dist-init-addr", "127.0.0.1:30999"]
    return flags


def _capture(worker: Any, batch: int, case: Case) -> None:
    """Captures the graph of this size with the engine's own code."""
    if case.prefill is not None:
        return
    from moe_engine.types.step_settings import GraphSettings
    from moe_engine.worker.startup.graph_setup import capture_graphs

    runner = worker.runner
    counts = (case.nodes,) if case.mtp else (1,)
    settings = GraphSettings((batch,), counts=counts, trees=case.topk > 1, hidden=bool(case.mtp))
    runner.forward.graphs = None
    if not worker.call(lambda: capture_graphs(runner, settings)).result():
        raise RuntimeError("the decode step was not captured")


def _without_compiling() -> None:
    """Skips steps that only compile kernels before READY, because no kernel is compiled here, and most of the random
    weights, because nothing is computed."""
    from moe_engine.kernels.triton import guard
    from moe_engine.models import dummy_weights
    from moe_engine.worker.startup import build_runner

    guard.ready = lambda: None  # first launches after it are no surprise

    reader = dummy_weights.DummyReader
    fill, most = reader._fill, dummy_weights._POOL
    reader._fill = lambda self, flat, *how: fill(self, flat[:most], *how)  # type: ignore[method-assign]
    build_runner.warm_sizes = lambda runner, most, top_k: 0  # type: ignore[assignment, misc]
    build_runner.compile_kernels = lambda backends, shapes: 0  # type: ignore[assignment]


def _with_one_expert() -> None:
    """Fills one expert of a layer. Experts have no values here; packed codes are integers, which the device computes:
    those of all experts would take minutes, and as much memory as on a GPU."""
    from moe_engine.models.layers.feed_forward.stored_experts import StoredExperts

    fill = StoredExperts.fill

    def fill_first(self: Any, reader: Any, weights: Any, slots: Any) -> None:
        fill(self, reader, weights, dict([next(iter(slots.items()))]))

    StoredExperts.fill = fill_first  # type: ignore[method-assign]


def _watch_layers(recorder: Any) -> None:
    """Sets the recorder's section, the place of a launch in the decoder or in drafting."""
    from benchmarks.step_costs.recorder import DRAFT, NGRAMS, OUTSIDE
    from moe_engine.models.drafts.mtp import MTPLayers
    from moe_engine.models.layers.decoder import Decoder
    from moe_engine.models.layers.residual.engram import EngramNorm

    place = "_at_layer"

    def drafts(decoder: Any) -> bool:
        return getattr(decoder, "is_draft", False)

    def enter(self: Any, index: int) -> None:
        if hasattr(self, place) and not drafts(self):  # otherwise it is under construction
            recorder.section = f"layer {index}"
        setattr(self, place, index)

    def within(section: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, recorder.section = recorder.section, DRAFT if drafts(args[0]) else section
            try:
                return function(*args, **kwargs)
            finally:
                recorder.section = before

        return call

    def of_table(function: Any) -> Any:
        return lambda self, *args: within(f"{NGRAMS} behind {recorder.section}", function)(self, *args)

    Decoder.at_layer = property(lambda self: getattr(self, place), enter)  # type: ignore[assignment]
    Decoder.forward = within(OUTSIDE, Decoder.forward)  # type: ignore[method-assign]
    Decoder.logits = within("head", Decoder.logits)  # type: ignore[method-assign]
    EngramNorm._add_rows = of_table(EngramNorm._add_rows)  # type: ignore[method-assign]
    MTPLayers.forward = within(DRAFT, MTPLayers.forward)  # type: ignore[method-assign]
    MTPLayers.logits = within(DRAFT, MTPLayers.logits)  # type: ignore[method-assign]
