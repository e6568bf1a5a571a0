"""The time of a recorded step by a device's constants, by section, against its roofline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.step_costs import roofline
from benchmarks.step_costs.hardware import Hardware
from benchmarks.step_costs.layers import bytes_of, names_of
from benchmarks.step_costs.models import shortened
from benchmarks.step_costs.recorder import DRAFT, NGRAMS, OUTSIDE, Line
from benchmarks.step_costs.schedule import Span, all_prefetches, length_of, message_us, schedule
from benchmarks.step_costs.session import Case, Recorded

LAYER = "layer "
"""Prefix of a layer's section."""


@dataclass(frozen=True)
class Section:
    """A part of a step that runs `repeats` times: ``dense layer``, ``MoE layer``, ``head``, ``outside``."""

    name: str
    repeats: int
    spans: Sequence[Span]

    @property
    def lines(self) -> list[Line]:
        return [span.line for span in self.spans]

    @property
    def microseconds(self) -> float:
        """Time of one run."""
        return length_of(self.spans)

    def messages_us(self, hardware: Hardware) -> float:
        """Time of one run that its messages take beyond what other streams do meanwhile."""
        alone = sum(span.microseconds for span in self.spans)
        messages = sum(message_us(span, hardware) for span in self.spans)
        return max(0.0, messages - (alone - self.microseconds))

    @property
    def launches(self) -> int:
        return sum(line.cost.launches for line in self.lines)

    @property
    def prefetched_bytes(self) -> float:
        """Bytes that launches of one run request for the L2 cache."""
        return sum(sum(line.cost.prefetched.values()) + line.cost.requests_own * line.early for line in self.lines)

    def total(self, value: str) -> float:
        """Sum of ``bytes``, ``total_flops``, ``nvlink`` or ``network``, of one run."""
        return float(sum(getattr(line.cost, value) for line in self.lines))


@dataclass(frozen=True)
class Summary:
    case: Case
    sections: Sequence[Section]
    waits: Sequence[tuple[int, Any]]
    """Number of occurrences, and one `HostWait`."""
    rows: dict[str, str]
    least: roofline.Roofline

    @property
    def device_us(self) -> float:
        return sum(part.microseconds * part.repeats for part in self.sections)

    @property
    def num_early(self) -> int:
        """Launches of the step that start while the launch before them ends."""
        return sum(part.repeats * sum(line.early for line in part.lines) for part in self.sections)

    @property
    def host_us(self) -> float:
        """Host time of eager launches and of waits: the host's work for a step whose layers are not captured."""
        hardware = self.case.hardware
        eager = sum(part.repeats * sum(not line.graph for line in part.lines) for part in self.sections)
        return float(eager * hardware["host_launch_us"] + self.num_waits * hardware["wait_us"])

    @property
    def allowed_us(self) -> float:
        """The roofline's work at the rates that the constants give, with the messages of this step and nothing else: no
        gap, norm, padding or head. Messages count for what neither their launch's products nor other streams hide."""
        hardware, least = self.case.hardware, self.least
        flops = least.product_flops / hardware["product_flops"]["fp8" if bytes_of(self.case.config)[1] == 1 else "bf16"]
        weights = max(least.weight_bytes / hardware["product_bytes_per_s"], flops)
        computed = least.attention_flops / hardware["attention_flops"]
        attention = max(least.kv_bytes / hardware["attention_bytes_per_s"], computed)
        messages = sum(part.repeats * part.messages_us(hardware) for part in self.sections)
        return (weights + attention) * 1e6 + messages

    @property
    def allowed(self) -> float:
        """The roofline's share of `allowed_us`: no build reaches more with these constants, messages and streams."""
        return min(1.0, self.least.microseconds / self.allowed_us)

    @property
    def num_waits(self) -> int:
        return sum(times for times, _ in self.waits)

    @property
    def microseconds(self) -> float:
        """The host prepares a step while the previous one runs; a wait prevents this overlap."""
        if not self.num_waits:
            return max(self.device_us, self.host_us)
        return max(self.device_us + self.num_waits * self.case.hardware["wait_us"], self.host_us)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of a GPU; one token per request and step, without accepted drafts."""
        tokens = self.case.prefill or self.case.batch
        return tokens / (self.case.form.tp * self.microseconds) * 1e6

    @property
    def fraction(self) -> float:
        """The roofline's share of the time."""
        return self.least.microseconds / self.microseconds

    def launches_of(self, kind: str) -> int:
        """Most launches in a layer of a kind: ``dense layer`` or ``MoE layer``, of any attention."""
        return max((part.launches for part in self.sections if part.name.endswith(kind)), default=0)

    @property
    def launches_a_layer(self) -> dict[str, int]:
        """By kind; of the layer that represents most layers."""
        return {part.name: part.launches for part in self.sections if part.name.endswith("layer")}

    def dearest(self, count: int = 10) -> list[tuple[float, str]]:
        """The launches with the most time over the step, as (microseconds, name and place)."""
        times: dict[str, float] = defaultdict(float)
        for part in self.sections:
            for span in part.spans:
                name = f"{span.line.name}  {span.line.place}  ({part.name})"
                times[name] += span.microseconds * part.repeats
        return sorted(((us, name) for name, us in times.items()), reverse=True)[:count]


def summarize(case: Case, recorded: Recorded) -> Summary:
    kinds = names_of(shortened(case.config)[0])
    parts: dict[str, list[Line]] = {}
    for line in recorded.lines:
        parts.setdefault(line.section, []).append(line)
    sections, prefetches = [], all_prefetches(case.hardware)
    for name, lines in parts.items():  # in the order of the step: a layer may request weights of the next
        repeats, shown = times_of(name, recorded.repeats), name
        if name.startswith(LAYER):
            shown = kinds[int(name.removeprefix(LAYER))]
        elif name.startswith(NGRAMS):
            shown = NGRAMS
        sections.append(Section(shown, repeats, schedule(lines, case.hardware, prefetches)))
    waits = [(times_of(wait.section, recorded.repeats), wait) for wait in recorded.waits]
    order = [*dict.fromkeys(kinds), NGRAMS, "head", DRAFT, OUTSIDE]
    sections.sort(key=lambda part: order.index(part.name))
    return Summary(case, sections, waits, recorded.rows, least_of(case, recorded.kv_dtype))


def times_of(section: str, repeats: Sequence[int]) -> int:
    """Number of occurrences in the model of a section that ran once."""
    return repeats[int(section.removeprefix(LAYER))] if section.startswith(LAYER) else 1


def least_of(case: Case, kv_dtype: str) -> roofline.Roofline:
    if case.prefill is not None:
        return roofline.prefill(case.config, case.form, case.hardware, case.prefill)
    width = {"fp8_e4m3": 656 / 576, "fp8_ds_mla": 656 / 576, "fp8_per_tensor": 1, "fp8_e5m2": 1}.get(kv_dtype, 2)
    return roofline.decode(case.config, case.form, case.hardware, case.batch, case.context, case.nodes, width)


def values(summary: Summary) -> dict[str, Any]:
    """For a result file."""
    case, least = summary.case, summary.least
    return {
        "case": case.name, "rows": summary.rows, "batch": case.batch, "context": case.context, "mtp": case.mtp,
        "us": round(summary.microseconds, 1), "roofline_us": round(least.microseconds, 1),
        "fraction": round(summary.fraction, 4), "allowed": round(summary.allowed, 4),
        "tokens_per_s_per_gpu": round(summary.tokens_per_s, 1),
        "host_waits": summary.num_waits, "host_us": round(summary.host_us, 1),
        "launches_outside": sum(part.launches * part.repeats for part in summary.sections if part.name == OUTSIDE),
        "early_launches": summary.num_early,
        "launches_a_dense_layer": summary.launches_of("dense layer"),
        "launches_a_moe_layer": summary.launches_of("MoE layer"), "launches_a_layer": summary.launches_a_layer,
        "bytes": round(sum(part.total("bytes") * part.repeats for part in summary.sections)),
        "prefetched_bytes": round(sum(part.prefetched_bytes * part.repeats for part in summary.sections)),
        "nvlink_bytes": round(sum(part.total("nvlink") * part.repeats for part in summary.sections)),
        "network_bytes": round(sum(part.total("network") * part.repeats for part in summary.sections)),
        "dearest_us": [[round(us, 1), name] for us, name in summary.dearest()],
    }  # fmt: skip
