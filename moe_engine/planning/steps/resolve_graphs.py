"""Resolves the batch sizes of decode steps that are captured as CUDA graphs; logs the reason if there are none."""

from __future__ import annotations

from moe_engine.config.args import EngineArgs
from moe_engine.config.field import option_of
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.memory.ledger import GB
from moe_engine.planning.model import resolve_lora, resolve_pooling
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.step_limits import StepLimits
from moe_engine.types import SpeculationConfig
from moe_engine.types.step_settings import GraphSettings

# GPU memory in GB (below) -> largest captured batch size, on fewer than 4 ranks and on more: SGLang's numbers
MAX_SIZES = ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512))
LARGEST = 512

BY_FLAG = "disabled by a flag"
NO_LAUNCHES = "a CPU has no kernel launches to save"
CAPTURED_EXACTLY = 32
"""Without padding every size up to this one is captured."""


def resolve_graphs(
    args: EngineArgs,
    machine: Machine,
    parallel: ParallelPlan,
    speculation: SpeculationConfig | None,
    limits: StepLimits,
    why: str | None,
    trees: bool,
    record: Record,
) -> GraphSettings:
    """Pure. `note_graphs` logs the result, when the number of running requests is known.

    Args:
        why: the reason against capturing: `why_not_captured`, or a kernel row's.
        trees: steps with draft trees may be captured.

    Raises:
        ConfigError: flags that contradict each other.
    """
    flags = args.graphs
    if flags.cuda_graph_bs_decode is not None and flags.cuda_graph_max_bs_decode is not None:
        largest = int(flags.cuda_graph_bs_decode.split()[-1])
        if largest != flags.cuda_graph_max_bs_decode:
            raise ConfigError(
                f"--cuda-graph-bs-decode up to {largest} with --cuda-graph-max-bs-decode "
                f"{flags.cuda_graph_max_bs_decode}: drop one"
            )
    if why is not None:
        wanted = sorted(args.given & set(vars(flags)))
        if machine.on_cpu and wanted:
            record.remark(f"{', '.join(map(option_of, wanted))}: no effect ({NO_LAUNCHES})")
        elif not machine.on_cpu and why != BY_FLAG:
            record.remark(f"no CUDA graphs: {why}")
        record.note("cuda_graph_backend_decode", "disabled", why)
        return GraphSettings()
    if flags.cuda_graph_backend_decode is None:
        record.note("cuda_graph_backend_decode", "full", "one launch per step costs less than one per kernel")
    counts = _counts(speculation, trees)
    most, _ = _most(limits, counts, limits.running)
    sizes = tuple(size for size in _sizes(args, machine, parallel, limits, most) if size <= most)
    hidden = speculation is not None or args.server.enable_return_hidden_states
    return GraphSettings(sizes, counts, not flags.disable_cuda_graph_padding, trees, hidden)


def note_graphs(
    args: EngineArgs, graphs: GraphSettings, machine: Machine, limits: StepLimits, running: int, record: Record
) -> None:
    """Logs the captured sizes and the reason of the largest, with a remark on flags with larger values.

    Args:
        graphs: without sizes that no step can have.
        running: max requests of a step.
    """
    if not graphs.sizes:
        return
    flags, largest = args.graphs, graphs.sizes[-1]
    most, bound = _most(limits, graphs.counts, running)
    asked = flags.cuda_graph_max_bs_decode
    if flags.cuda_graph_bs_decode is not None:
        asked = int(flags.cuda_graph_bs_decode.split()[-1])
    if asked is not None and asked > most:
        name = "cuda_graph_max_bs_decode" if flags.cuda_graph_bs_decode is None else "cuda_graph_bs_decode"
        record.remark(f"{option_of(name)}: no size above {largest} is captured, {bound}")
    if flags.cuda_graph_bs_decode is not None:
        if asked is not None and asked > most:
            record.note("cuda_graph_bs_decode", " ".join(map(str, graphs.sizes)), f"as given up to {largest}: {bound}")
        return
    if asked is None or asked > most:
        reason = bound if largest == most else f"{machine.total_bytes / GB:.0f} GB, {running} requests run"
        record.note("cuda_graph_max_bs_decode", largest, reason)
    listed = f"SGLang's list up to {largest}" + (f", {bound}" if largest == most else "")
    record.note("cuda_graph_bs_decode", " ".join(map(str, graphs.sizes)), listed)


def _most(limits: StepLimits, counts: tuple[int, ...], running: int) -> tuple[int, str]:
    """Requests of the largest step that can be captured, and its bound: captured steps are decodes, padded to a size,
    whose tokens fit one low-latency dispatch."""
    if limits.low_latency != "never":
        fits = limits.low_latency_tokens * limits.ranks // max(counts)
        if fits < running:
            each = f" of {max(counts)} tokens" if max(counts) > 1 else ""
            return fits, (
                f"as a low-latency dispatch holds {limits.low_latency_tokens} tokens a rank, {fits} requests{each} "
                "(--max-dispatch-tokens-per-rank)"
            )
    return running, f"as at most {running} requests run"


def why_not_captured(
    args: EngineArgs, machine: Machine, parallel: ParallelPlan, experts: ExpertSettings, model: ModelConfig
) -> str | None:
    """Why decodes are not captured whatever their kernels are, or None."""
    if args.graphs.disable_cuda_graph or args.graphs.cuda_graph_backend_decode == "disabled":
        return BY_FLAG
    if machine.on_cpu:
        return NO_LAUNCHES
    if parallel.dispatch is not None and parallel.dispatch.modes["decode"] != "low_latency":
        return (
            f"decodes use the normal mode of {parallel.dispatch.row.name}: the host waits for the sizes of its messages"
        )
    if experts.rebalance is not None:
        return "--enable-eplb records the experts of every step and moves experts between steps"
    if experts.recorder_mode is not None and parallel.topology.tp_size > 1:
        return "recorded experts of several ranks: all ranks must leave the graphs in the same step"
    if model.pooling is not None:
        return resolve_pooling.NOT_CAPTURED
    return resolve_lora.why_not_captured(args, parallel.topology)


def captures_trees(speculation: SpeculationConfig | None, model: ModelConfig) -> bool:
    """Whether drafts are trees that may be captured: of layers that `draft_setup` does not refuse."""
    if speculation is None or speculation.topk == 1 or speculation.has_thresholds:
        return False
    return speculation.method == "eagle" or (speculation.method == "nextn" and model.num_nextn_predict_layers == 1)


def _counts(speculation: SpeculationConfig | None, trees: bool) -> tuple[int, ...]:
    """Tokens of a request: of a chain or tree of drafts, and one without drafts."""
    if speculation is None or (speculation.topk > 1 and not trees):
        return (1,)
    if trees:
        return (1, speculation.num_nodes(speculation.num_steps))
    if speculation.auto_depth:
        return tuple(range(1, speculation.num_steps + 2))
    return (1, speculation.num_steps + 1)


def _sizes(
    args: EngineArgs, machine: Machine, parallel: ParallelPlan, limits: StepLimits, most: int
) -> tuple[int, ...]:
    flags = args.graphs
    if flags.cuda_graph_bs_decode is not None:
        return tuple(map(int, flags.cuda_graph_bs_decode.split()))
    largest = min(largest_size(args, machine, parallel), most)
    if largest < 1:
        return ()
    known = graph_sizes(largest, limits.drafts)
    if flags.disable_cuda_graph_padding:
        known |= set(range(1, min(largest, CAPTURED_EXACTLY) + 1))
    return tuple(sorted(known))


def largest_size(args: EngineArgs, machine: Machine, parallel: ParallelPlan) -> int:
    """Largest batch size to capture, regardless of the number of running requests."""
    flags = args.graphs
    if flags.cuda_graph_bs_decode is not None:
        return int(flags.cuda_graph_bs_decode.split()[-1])
    if flags.cuda_graph_max_bs_decode is not None:
        return flags.cuda_graph_max_bs_decode
    many = parallel.topology.tp_size >= 4
    return next((row[1 + many] for row in MAX_SIZES if machine.total_bytes < row[0] * GB), LARGEST)


def graph_sizes(largest: int, drafts: bool) -> set[int]:
    """SGLang's list of batch sizes, and the largest itself; with drafts the sizes are closer together."""
    if drafts:
        parts = (range(1, 9), range(10, 33, 2), range(40, 65, 4), range(72, 257, 8), range(272, largest + 1, 16))
    else:
        parts = (
            (1, 2, 4, 8, 12), range(16, 257, 8), range(272, 497, 16), range(512, largest + 1, 32)
        )  # type: ignore[assignment]  # fmt: skip
    return {size for part in parts for size in part if size < largest} | {largest}
