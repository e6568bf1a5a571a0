"""Published systems against the planner's cost model, with the constants fitted on other measurements.

    python -m benchmarks.planner_published

Rates are tokens a second of a GPU. Sources are in `SYSTEMS`; assumptions that a report does not state are in `remark`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks import report
from benchmarks.planner_points import facts_of
from moe_engine.tuning.costs.efficiency import load_efficiency
from moe_engine.tuning.costs.form import Form, Precision
from moe_engine.tuning.costs.roofline import RooflineCost
from moe_engine.tuning.costs.step_cost import StepCost, StepShape
from moe_engine.tuning.hardware.table import parse_cluster
from moe_engine.tuning.planner.steady import Load, steady_state

FP8, FP4 = Precision("fp8", "fp8"), Precision("fp4", "fp8", "fp8")
WIDE, WIDER = Form(32, 32, 32, True, 32, True, True), Form(72, 72, 72, True, 32, True, True)
NVL = Form(48, 48, 48, True, 32, False, True)


@dataclass(frozen=True)
class System:
    """A published rate, and the step or the load for the comparison."""

    name: str
    published: float
    engine: str
    hardware: str
    form: Form
    work: Callable[[System], float]
    precision: Precision = FP8
    remark: str = ""

    @property
    def predicted(self) -> float:
        return self.work(self)

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    def cost(self) -> RooflineCost:
        cluster = parse_cluster(self.hardware)
        facts = facts_of("deepseek-ai/DeepSeek-V3")
        return RooflineCost(facts, self.form, self.precision, cluster, load_efficiency(self.engine))


def prompts(tokens: int, length: int) -> Callable[[System], float]:
    """Prompt tokens a second of a GPU: `tokens` of an attention group in a step, prompts of `length`."""

    def rate(system: System) -> float:
        pairs = tokens // length * length * (length + 1) // 2
        groups = system.form.attn_dp
        step = system.cost().step(StepShape(0, 0, 0, tokens, pairs, tokens * groups))
        return tokens * groups / system.form.ranks / step.seconds

    return rate


def answers(rows: int, context: int) -> Callable[[System], float]:
    """Output tokens a second of a GPU: `rows` requests of an attention group after `context` tokens."""

    def rate(system: System) -> float:
        groups = system.form.attn_dp
        step: StepCost = system.cost().step(StepShape(rows, rows * context, 0, 0, 0, rows * groups))
        return rows * groups / system.form.ranks / step.seconds

    return rate


def closed(prompt: int, output: int, requests: int) -> Callable[[System], float]:
    """Output tokens a second of a GPU with both phases in one engine and `requests` at once."""

    def rate(system: System) -> float:
        share = load_efficiency(system.engine)
        state = steady_state(system.cost(), system.form, Load(prompt, prompt, output), requests, share)
        return state.output_per_s / system.form.ranks

    return rate


H100, LMSYS = "96xh100", "LMSYS 2025-05-05"
SYSTEMS = (
    System(f"96xH100 prefill 2K ({LMSYS})", 52_300 / 8, "sglang", H100, WIDE, prompts(16384, 2048)),
    System("  prompts of 1K", 57_674 / 8, "sglang", H100, WIDE, prompts(16384, 1024)),
    System("  prompts of 4K", 50_302 / 8, "sglang", H100, WIDE, prompts(16384, 4096)),
    System("  without two-batch overlap", 52_300 / 8 / 1.31, "sglang", H100, replace(WIDE, overlap=False),
           prompts(16384, 2048), remark="27 to 35 % less with the same tokens"),
    System("  without EPLB", 52_300 / 8 / 1.49, "sglang", H100, replace(WIDE, redundant=0), prompts(16384, 2048)),
    System(f"96xH100 decode 2K, 256 a GPU ({LMSYS})", 22_282 / 8, "sglang", H100, WIDER, answers(256, 2050)),
    System("  without two-batch overlap", 22_282 / 8 / 1.255, "sglang", H100, replace(WIDER, overlap=False),
           answers(256, 2050)),
    System("  without EPLB", 22_282 / 8 / 2.54, "sglang", H100, replace(WIDER, redundant=0), answers(256, 2050)),
    System("vLLM 2.2k a H200 (2025-12-17)", 2_200, "vllm", "32xh200", WIDE, answers(128, 2500),
           remark="requests a GPU are not published: 128"),
    System("Ant 8xH20 prefill TP8 4K (2025-09-26)", 16_500 / 8, "sglang", "8xh20", Form(8), prompts(16384, 4096)),
    System("Ant 16xH20 decode EP16", 5_700 / 8, "sglang", "16xh20", Form(16, 16, 16, True, 16, False, True),
           answers(48, 4864), remark="48 requests a GPU: the number that fits in the KV cache of 96 GB"),
    System("8xH200 DEP8 1K/1K offline (perf-overview)", 1_627, "trtllm", "8xh200", Form(8, 8, 8, True, 0, False, True),
           closed(1000, 1000, 8 * 256), Precision("fp8", "fp8", "fp8"), "requests are not published: 256 a GPU"),
    System("8xH200 DEP8 1K/8K offline", 1_218, "trtllm", "8xh200", Form(8, 8, 8, True, 0, False, True),
           closed(1000, 8000, 8 * 64), Precision("fp8", "fp8", "fp8"), "requests are not published: 64 a GPU"),
    System("GB200 decode FP8 2K (2025-06-16)", 7_583, "sglang", "48xgb200", NVL, answers(768, 2050),
           remark="first port to Blackwell; 9,087 three months later with 1,408 requests"),
    System("GB200 decode FP8 2K (2025-09-25)", 9_087, "sglang", "48xgb200", NVL, answers(1408, 2050)),
    System("GB200 decode NVFP4 2K (2025-09-25)", 13_386, "sglang", "48xgb200", NVL, answers(1408, 2050), FP4,
           "combine overlaps the down projection there"),
    System("GB200 prefill FP8 2K (2025-09-25)", 18_471, "sglang", "4xgb200", Form(4, 4, 4, True), prompts(16384, 2048)),
    System("GB200 prefill NVFP4 2K (2025-09-25)", 26_156, "sglang", "4xgb200", Form(4, 4, 4, True),
           prompts(16384, 2048), FP4, "dispatch in NVFP4 there"),
)  # fmt: skip


def main() -> None:
    parser = report.command_parser("planner_published", __doc__)
    report.add_result_options(parser)
    args = parser.parse_args()
    rows = []
    for system in SYSTEMS:
        print(
            f"{system.name:<46} {system.published:>8,.0f} published {system.predicted:>8,.0f} predicted "
            f"{system.error:+5.0%}  {system.remark}".rstrip()
        )
        names = ("name", "published", "predicted", "error", "remark")
        rows.append({name: getattr(system, name) for name in names})
    report.write_if_asked(args, "planner_published", {"systems": rows})


if __name__ == "__main__":
    main()
