"""``moe-engine plan --workload``: searches the forms of parallelism for any hardware, or predicts the form given by the
flags."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_engine.cli.plan_measured import measured_launch, plan_measured
from moe_engine.config.args import EngineArgs
from moe_engine.config.numbers import real_number, whole_number
from moe_engine.config.slo import Slo, parse_slo
from moe_engine.errors import ConfigError, MoeEngineError
from moe_engine.planning.flags.validate import check_ranges
from moe_engine.tuning.costs.efficiency import engines, load_efficiency
from moe_engine.tuning.costs.form import WEIGHTS
from moe_engine.tuning.costs.model_facts import ModelFacts, model_facts
from moe_engine.tuning.hardware.table import Cluster, gpu_names, link_names, parse_cluster
from moe_engine.tuning.planner.candidate import Candidate
from moe_engine.tuning.planner.given_form import OURS, given_form, host_bytes
from moe_engine.tuning.planner.given_space import check_mode, given_space, kv_of
from moe_engine.tuning.planner.launch import config_of, subject_of
from moe_engine.tuning.planner.memory import EstimatedMemory, Memory, RoomOf
from moe_engine.tuning.planner.plot import check_plot, plot_front
from moe_engine.tuning.planner.predict import Predictor
from moe_engine.tuning.planner.report import json_of, text_of
from moe_engine.tuning.planner.search import Found, Plan, Search
from moe_engine.tuning.planner.space import WHOLE
from moe_engine.tuning.planner.workload import Workload, parse_workload

OWN = (
    "workload", "slo", "interconnect", "concurrency", "like", "top", "plot", "weight_dtype", "mtp_acceptance",
    "cost_file",
)  # fmt: skip
FOR_GPUS = ("interconnect", "like", "weight_dtype")
FORM_FLAGS = (
    "tp_size", "attn_dp_size", "ep_size", "moe_a2a_backend", "dp_size", "enable_dp_attention", "enable_ep_moe",
    "enable_deepep_moe",
)  # fmt: skip
FITTED_CHUNK = 16384
"""Chunk with which the other engines' constants were fitted."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The planner's flags in addition to those of `serve`."""
    group = parser.add_argument_group("planning for a workload (with --hardware or --cost-file)")

    def add(name: str, text: str, **options: Any) -> None:
        group.add_argument(name, help=text, default=argparse.SUPPRESS, **options)

    lengths = "mean lengths in tokens: in=2000,out=100[,shared=512,turns=4,equal=1]; starts the search"
    add("--workload", lengths, metavar="TEXT")
    add("--cost-file", "instead of --hardware: step costs of this machine, of `moe-engine calibrate`", metavar="FILE")
    add("--interconnect", f"network between nodes: {', '.join(link_names())}, or a TOML file", metavar="NAME|FILE")
    add(
        "--concurrency",
        "concurrent requests; with a form given by flags (--tp-size ...) only that form is predicted",
        metavar="N",
    )
    add("--like", f"take the efficiency of an engine: {', '.join(engines())} (default: {OURS})", metavar="ENGINE")
    add("--top", "number of plans to print (default: 3)", metavar="N")
    add("--plot", "draw the Pareto front (needs matplotlib)", metavar="FILE.svg|png")
    add(
        "--weight-dtype",
        f"dtype of the experts, if not that of config.json: {', '.join(WEIGHTS)}",
        metavar="DTYPE",
    )
    add("--mtp-acceptance", "chance that a draft token is accepted after accepted ones (default: 0.8)", metavar="P")


def take_flags(values: dict[str, Any]) -> dict[str, Any]:
    """Removes the planner's flags from those of `serve`, and returns them. Raises ConfigError: one is missing."""
    served = {"slo"} if "workload" not in values and values.get("autopilot") else set[str]()
    own = {name: values.pop(name) for name in OWN if name in values and name not in served}
    if own and "workload" not in own:
        name = next(iter(own)).replace("_", "-")
        raise ConfigError(f"--{name} belongs to --workload; add --workload in=2000,out=100")
    if "cost_file" in own:
        if named := [name for name in FOR_GPUS if name in own] + ["hardware"] * (values.get("hardware") is not None):
            name = named[0].replace("_", "-")
            raise ConfigError(f"--{name} with --cost-file, which has the costs of this machine; drop one of them")
    elif own and values.get("hardware") is None:
        raise ConfigError(
            "--workload needs --hardware, as in --hardware 16xH200, or --cost-file of this machine; known: "
            f"{', '.join(gpu_names())}"
        )
    return own


def plan_workload(own: Mapping[str, Any], args: EngineArgs, hardware: str | None, as_json: bool) -> int:
    """Prints plans. Raises ConfigError as the parts do."""
    workload, slo = parse_workload(own["workload"]), parse_slo(own.get("slo"))
    plot = Path(own["plot"]) if "plot" in own else None
    if plot is not None:
        check_plot(plot)
    if hardware is None:
        cluster, found = None, _of_this_machine(own, args, workload, slo)
    else:
        cluster = parse_cluster(hardware, own.get("interconnect"))
        found = _of_hardware(own, args, cluster, workload, slo)
    if plot is not None:
        title = f"{args.model.model_path} on {hardware or 'this machine'}, {workload.text}"
        plot_front(found.front, title, plot)
    print(json.dumps(json_of(found, cluster), indent=2) if as_json else text_of(found, cluster))
    return 0


def _of_this_machine(own: Mapping[str, Any], args: EngineArgs, workload: Workload, slo: Slo) -> Found:
    file, config = measured_launch(own["cost_file"], args)
    _check_length(workload, config.context_len)
    concurrency, top = _count(own, "concurrency", None), _count(own, "top", 1)
    acceptance = _acceptance(own) if "mtp_acceptance" in own else None
    return plan_measured(file, config, workload, slo, concurrency, top or 1, acceptance)


def _of_hardware(own: Mapping[str, Any], args: EngineArgs, cluster: Cluster, workload: Workload, slo: Slo) -> Found:
    check_ranges(args)
    check_mode(args)
    concurrency, top = _count(own, "concurrency", None), _count(own, "top", 3)
    predictor, memory = _predictor(own, args, cluster, workload)
    if isinstance(memory, Memory):
        args, memory = memory.with_stated_kv_dtype()
    if args.given.intersection(FORM_FLAGS) and concurrency is not None:
        return _one(predictor, memory, args, workload, slo, concurrency)
    if isinstance(memory, Memory):
        args, memory = memory.with_profile()
    progress = _Progress()
    kv = ("bf16", "fp8") if predictor.share.engine == OURS else (predictor.share.kv,)
    space = given_space(args, cluster, kv)
    search = Search(predictor, memory, workload, slo, space, concurrency, progress.show)
    found = search.run(cluster.num_gpus, args.model.model_path or "MODEL", top or 3)
    progress.done()
    return found


def _predictor(
    own: Mapping[str, Any], args: EngineArgs, cluster: Cluster, workload: Workload
) -> tuple[Predictor, RoomOf]:
    like = own.get("like", OURS)
    share = load_efficiency(like)
    folder, fields, file = config_of(args)
    facts = model_facts(fields, file)
    dtype = own.get("weight_dtype", facts.stored_dtype)
    if dtype not in WEIGHTS:
        raise ConfigError(f"--weight-dtype {dtype}: use one of {', '.join(WEIGHTS)}")
    if like == OURS and dtype != facts.stored_dtype:
        raise ConfigError(
            f"--weight-dtype {dtype}: {OURS} holds weights as config.json or --quantization says; give the config.json "
            "of such a checkpoint, or another engine (--like)"
        )
    _check_experts(args, facts, file)
    memory: RoomOf
    try:
        subject = subject_of(args, folder)
        _check_length(workload, args.model.context_length or subject.model.context_length)
        if dtype == facts.stored_dtype:
            memory = Memory(subject, cluster, args)
        else:
            memory = EstimatedMemory(facts, cluster, dtype, share.memory)
            print(f"note: the weights of {file} are not {dtype}; memory is estimated as for {like}", file=sys.stderr)
    except MoeEngineError as error:
        if like == OURS or isinstance(error, _TooLongError):
            raise
        memory = EstimatedMemory(facts, cluster, dtype, share.memory)
        print(f"note: {OURS} does not serve this model; memory is estimated as for {like}", file=sys.stderr)
    held = memory.held if like == OURS else None
    mixed = args.scheduling.enable_mixed_chunk
    return Predictor(facts, cluster, share, dtype, _acceptance(own), host_bytes(args), held, mixed), memory


class _TooLongError(ConfigError):
    """A server would refuse the requests of the workload."""


def _check_length(workload: Workload, longest: int) -> None:
    if workload.longest > longest:
        raise _TooLongError(
            f"--workload {workload.text}: a request has up to {workload.longest} tokens, and the context length is "
            f"{longest}; lower in, out, shared or turns"
        )


def _check_experts(args: EngineArgs, facts: ModelFacts, file: str) -> None:
    if not facts.num_experts and (args.parallel.ep_size > 1 or args.parallel.moe_a2a_backend != "none"):
        raise ConfigError(f"{file}: the model has no experts; drop --ep-size and --moe-a2a-backend")


def _acceptance(own: Mapping[str, Any]) -> float:
    text = own.get("mtp_acceptance", "0.8")
    try:
        value = real_number(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"--mtp-acceptance {text}: give a share between 0 and 1, as 0.8")
    return value


def _count(own: Mapping[str, Any], name: str, default: int | None) -> int | None:
    if name not in own:
        return default
    try:
        value = whole_number(own[name])
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"--{name} {own[name]}: give a whole number above 0")
    return value


def _one(
    predictor: Predictor, memory: RoomOf, args: EngineArgs, workload: Workload, slo: Slo, concurrency: int
) -> Found:
    """The prediction for the form given by the flags."""
    form, replicas = given_form(args, predictor.cluster, predictor.share.engine, memory.model)
    load = workload.load(not args.scheduling.disable_radix_cache)
    rows = -(-concurrency // (form.attn_dp * replicas))
    ours, room = predictor.share.engine == OURS, memory.as_given()
    chunk = room.chunk if room.chunk > 0 else WHOLE
    if not ours and "chunked_prefill_size" not in args.given:
        chunk = FITTED_CHUNK
    candidate = Candidate(
        form, replicas, kv_of(args) if "kv_cache_dtype" in args.given else predictor.share.kv, chunk, rows,
        room.depths[0], args.model.model_path or "MODEL", requests=concurrency,
    )  # fmt: skip
    if isinstance(memory, EstimatedMemory):
        room = memory.of(candidate)
    if room.refusal and ours:
        raise ConfigError(room.refusal)
    if ours and room.tokens < load.held:
        raise ConfigError(
            f"--workload: a request has {load.held:.0f} tokens, and the KV cache of this form {room.tokens}; use a "
            "smaller --chunked-prefill-size, a larger --tp-size or shorter requests"
        )
    clients, most = 1.0, max(1, min(room.running, int(room.tokens / load.held)))
    if not room.refusal and most < rows:
        print(f"note: {most} of {rows} requests of an attention group run at once, the others wait", file=sys.stderr)
        candidate, clients = candidate.with_rows(most), rows / most
    predictions = {depth: predictor.predict(candidate.with_drafts(depth), load, clients) for depth in room.depths}
    depth = max(predictions, key=lambda depth: predictions[depth].output_per_s)
    candidate, prediction = candidate.with_drafts(depth), predictions[depth]
    if (ratio := slo.missed(prediction.ttft_s, prediction.itl_s, prediction.tpot_s)) > 1:
        print(f"note: --slo is missed by a factor of {ratio:.2f}", file=sys.stderr)
    refused = {candidate.text: room.refusal} if room.refusal else {}
    return Found((Plan(candidate, prediction, (room,)),), ((candidate, prediction),), refused, 1)


class _Progress:
    """One line on stderr: rewritten on a terminal, else only the last."""

    def __init__(self) -> None:
        self._start, self._last = time.monotonic(), ""

    def show(self, text: str) -> None:
        self._last = text
        if sys.stderr.isatty():
            print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if sys.stderr.isatty():
            print("\r" + " " * 78 + "\r", end="", file=sys.stderr, flush=True)
        print(f"{self._last}: done in {time.monotonic() - self._start:.1f} s", file=sys.stderr)
