"""Step costs of a cost file, which `moe-engine calibrate` measures on a running server."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from moe_engine.config.field import option_of
from moe_engine.errors import ConfigError
from moe_engine.tuning.costs.step_cost import StepCost, StepShape

VERSION = 2
STEP_FLAGS = (
    "model_path", "device", "dtype", "quantization", "kv_cache_dtype", "page_size", "tp_size", "dp_size",
    "attn_dp_size", "enable_dp_attention", "ep_size", "moe_a2a_backend", "attention_backend", "moe_runner_backend",
    "linear_backend", "cpu_threads", "cpu_offload_gb", "enable_mixed_chunk", "speculative_algorithm",
    "speculative_num_steps",
)  # fmt: skip
"""Flags that change what a step costs."""
LONE_TOKENS = 64
"""Prompt tokens of requests that find the server idle, in the measurement of `idle_seconds`."""


@dataclass(frozen=True)
class Curve:
    """Seconds at measured counts, ascending; linear in between. Beyond the last count on the line through it and the
    last one of at most its half: adjacent ones may be so close that their noise would grow with the distance."""

    counts: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, count: float) -> float:
        counts, seconds = self.counts, self.seconds
        if len(counts) == 1 or count <= counts[0]:
            return seconds[0]
        above = min(max(bisect_left(counts, count), 1), len(counts) - 1)
        below = above - 1 if count <= counts[-1] else max(bisect_right(counts, counts[-1] / 2) - 1, 0)
        x0, x1, y0, y1 = counts[below], counts[above], seconds[below], seconds[above]
        return max(y0 + (count - x0) * (y1 - y0) / (x1 - x0), 0.0)


@dataclass(frozen=True)
class CostFile:
    """Measured costs of one launch. Seconds.

    Attributes:
        decode: step seconds over the number of requests, by drafts each; short contexts.
        context_second: seconds of each context token of a decoding request, beyond `context_base` a request.
        prefill: step seconds over the number of prompt tokens, without a cached prefix.
        behind: step seconds over the number of prompt tokens if all prompts have a longer cached prefix, without the
            seconds of the cached tokens; None: those of `prefill`. Beyond the last count as much more or less than
            `prefill` as there.
        cached_second: seconds of each cached token before the new tokens of a prompt.
        pair_second: seconds of each pair of a new token with a cached one.
        split_second: seconds that each pair of tokens saves which are in different prompts of a step, against one
        prompt; None: `pair_second`.
        answer_seconds: time of an answer outside the engine's steps: HTTP, tokenization, detokenization.
        entry_seconds, reply_seconds: its parts until the frontend has read the request, and from the token at the
            frontend until the client has it. 0: unknown.
        request_seconds, results_seconds, token_seconds: work of frontend and client for a request, for the results of
        a step, and for the tokens that a request gets in it. `answer_seconds` contains one of each.
        arrival_seconds, end_seconds, sent_seconds: time that the arrival of a request, its end, and its tokens of the
        step before add to the steps that run meanwhile: the part of the work outside the steps that takes cores from
        them, and planning. `decode` and `prefill` are without it.
        step_spread: relative standard deviation of a step under load from what equal steps take.
        idle_seconds: additional time of an answer to a request that finds the engine idle.
        busy_seconds: additional time until a request is read while steps take the cores of the frontend.
        acceptance: chance that a draft at each position is accepted if those before it are.
        launch: flags of the server that was measured.
        ledger: bytes by row: predicted and allocated.
        conditions: of the measurement (`moe_engine.tuning.disturbance`).
    """

    decode: dict[int, Curve]
    prefill: Curve
    context_second: float = 0.0
    context_base: float = 0.0
    cached_second: float = 0.0
    pair_second: float = 0.0
    split_second: float | None = None
    behind: Curve | None = None
    answer_seconds: float = 0.0
    entry_seconds: float = 0.0
    reply_seconds: float = 0.0
    arrival_seconds: float = 0.0
    end_seconds: float = 0.0
    sent_seconds: float = 0.0
    step_spread: float = 0.0
    request_seconds: float = 0.0
    results_seconds: float = 0.0
    token_seconds: float = 0.0
    idle_seconds: float = 0.0
    busy_seconds: float = 0.0
    acceptance: tuple[float, ...] = ()
    launch: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, dict[str, int]] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)

    @property
    def disturbed(self) -> str:
        """Why the costs may be wrong; empty if nothing is known against them."""
        return str(self.conditions.get("disturbed", ""))

    @property
    def disturbances(self) -> dict[str, Any]:
        """How steps under load differ from their costs, as arguments of the simulator's `ReplicaSpec`."""
        names = ("arrival_seconds", "end_seconds", "sent_seconds", "step_spread")
        return {name: getattr(self, name) for name in names}

    @property
    def frontend_times(self) -> dict[str, Any]:
        """Work and waits of the frontend, as arguments of the simulator's `FleetSpec`."""
        names = ("request_seconds", "results_seconds", "token_seconds", "busy_seconds", "way_seconds")
        return {name: getattr(self, name) for name in names}

    @property
    def way_seconds(self) -> float:
        """`entry_seconds` without the work of frontend and client."""
        return max(self.entry_seconds - self.request_seconds, 0.0)

    @property
    def delivery_seconds(self) -> float:
        """`answer_seconds` without the work of frontend and client, and without `way_seconds`."""
        work = self.request_seconds + self.results_seconds + self.token_seconds
        return max(self.answer_seconds - work - self.way_seconds, 0.0)

    def beside_seconds(self, steps: float) -> float:
        """What a request whose answer takes this number of steps adds to all steps."""
        return self.arrival_seconds + self.end_seconds + steps * self.sent_seconds

    def slower(self, decode: Curve, prefill: float) -> CostFile:
        """With decodes and prompts that take times as long; answers to lone requests take as long as before, as far as
        their `idle_seconds` allow it.

        Args:
            decode: the factor over the number of requests; constant beyond the last one.
        """

        def decodes(curve: Curve) -> Curve:
            known = decode.counts[-1]
            values = [second * decode.at(min(count, known)) for count, second in zip(curve.counts, curve.seconds)]
            return Curve(curve.counts, tuple(accumulate(values, max)))

        def prompts(curve: Curve) -> Curve:
            return Curve(curve.counts, tuple(second * prefill for second in curve.seconds))

        fewer = prompts(self.prefill)
        idle = self.idle_seconds + self.prefill.at(LONE_TOKENS) - fewer.at(LONE_TOKENS)
        return replace(
            self,
            decode={drafts: decodes(curve) for drafts, curve in self.decode.items()},
            context_second=self.context_second * decode.seconds[0],
            prefill=fewer,
            behind=prompts(self.behind) if self.behind is not None else None,
            cached_second=self.cached_second * prefill,
            pair_second=self.pair_second * prefill,
            split_second=self.split_second * prefill if self.split_second is not None else None,
            idle_seconds=max(idle, 0.0),
        )

    def beside_steps(self, factor: float) -> CostFile:
        """With work of frontend and client that takes `factor` times as long; answers to lone requests take as long as
        before, as far as their `idle_seconds` allow it."""
        request, results, token = (
            factor * seconds for seconds in (self.request_seconds, self.results_seconds, self.token_seconds)
        )
        added = 1 - 1 / factor
        more = added * (request + results + token)
        return replace(
            self,
            request_seconds=request,
            results_seconds=results,
            token_seconds=token,
            entry_seconds=self.entry_seconds + added * request,
            answer_seconds=self.answer_seconds + more,
            idle_seconds=max(self.idle_seconds - more, 0.0),
        )

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def load(cls, path: str) -> CostFile:
        """Raises ConfigError: not a cost file, or one of another version."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--cost-file {path}: cannot read it: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--cost-file {path}: not JSON: {error}") from None
        if not isinstance(values, dict) or "version" not in values:
            raise ConfigError(f"--cost-file {path}: not a cost file; `moe-engine calibrate --output FILE` writes one")
        if (version := values.pop("version")) != VERSION:
            raise ConfigError(
                f"--cost-file {path}: has version {version!r}, and this release reads {VERSION}; run `moe-engine "
                "calibrate` again"
            )
        try:
            if missing := [name for name in ("decode", "prefill") if name not in values]:
                raise ValueError(f"{missing[0]} is missing")
            values["decode"] = {int(drafts): _curve(curve) for drafts, curve in values["decode"].items()}
            values["prefill"] = _curve(values["prefill"])
            values["behind"] = _curve(values["behind"]) if values.get("behind") else None
            values["acceptance"] = tuple(map(float, values.get("acceptance", ())))
            if not values["decode"] or not all(0 <= chance <= 1 for chance in values["acceptance"]):
                raise ValueError("decode needs a curve, and each acceptance a number from 0 to 1")
            for name in ("launch", "machine", "ledger", "conditions"):
                if not isinstance(values.get(name, {}), dict):
                    raise ValueError(f"{name} must be an object")
            kinds = {each.name: str(each.type) for each in fields(cls) if str(each.type).startswith("float")}
            for name in kinds.keys() & values.keys():
                value = values[name]
                unknown = value is None and kinds[name].endswith("None")
                if not unknown and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                    raise ValueError(f"{name} is {value}: it must be a number from 0")
            return cls(**values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"--cost-file {path}: damaged: {error}; run `moe-engine calibrate` again") from None


def _curve(values: dict[str, Any]) -> Curve:
    counts, seconds = tuple(map(float, values["counts"])), tuple(map(float, values["seconds"]))
    positive = all(0 < second < math.inf for second in seconds)
    if not counts or len(counts) != len(seconds) or list(counts) != sorted(set(counts)) or not positive:
        raise ValueError("counts must ascend, with positive seconds for each")
    return Curve(counts, seconds)


class MeasuredCosts:
    """`StepCostModel` of a cost file."""

    def __init__(self, file: CostFile) -> None:
        self._file = file
        self._depths = sorted(file.decode)
        curves = [file.prefill, file.decode[self._depths[0]], *([file.behind] if file.behind is not None else [])]
        self._least = min(curve.seconds[0] for curve in curves)

    def step(self, shape: StepShape) -> StepCost:
        """A step with prompts and decodes costs both, without the fixed part of one of them."""
        parts: dict[str, float] = {}
        if shape.decode_rows:
            parts["decode"] = self._decode(shape)
        if shape.prefill_tokens:
            parts["prefill"] = self._prefill(shape)
        if not parts:
            return StepCost(self._least, {"host": self._least})
        seconds = sum(parts.values()) - (self._least if len(parts) > 1 else 0.0)
        return StepCost(max(seconds, self._least), parts)

    def _prefill(self, shape: StepShape) -> float:
        file, count = self._file, shape.prefill_tokens
        own, cached = own_and_cached_pairs(count, shape.prefill_cached, shape.prefill_pairs)
        split = file.pair_second if file.split_second is None else file.split_second
        seconds = self._of_tokens(shape) - (count * (count + 1) / 2 - own) * split
        seconds += shape.prefill_cached * file.cached_second + cached * file.pair_second
        return max(seconds, self._least)

    def _of_tokens(self, shape: StepShape) -> float:
        """Seconds without those of cached tokens."""
        prefill, behind, count = self._file.prefill, self._file.behind, shape.prefill_tokens
        if behind is None or not shape.prefill_cached or shape.prefill_fresh:
            return prefill.at(count)
        last = behind.counts[-1]
        return behind.at(count) if count <= last else prefill.at(count) + behind.seconds[-1] - prefill.at(last)

    def _decode(self, shape: StepShape) -> float:
        file, rows = self._file, shape.decode_rows
        context = max(shape.decode_context - rows * file.context_base, 0.0)
        return self._of_depth(shape.drafts, rows) + context * file.context_second

    def _of_depth(self, drafts: int, rows: int) -> float:
        """Seconds at a draft depth; linear between the measured depths."""
        depths = self._depths
        if drafts in self._file.decode or len(depths) == 1:
            return self._file.decode.get(drafts, self._file.decode[depths[0]]).at(rows)
        above = min(max(bisect_left(depths, drafts), 1), len(depths) - 1)
        low, high = depths[above - 1], depths[above]
        y0, y1 = self._file.decode[low].at(rows), self._file.decode[high].at(rows)
        return max(y0 + (drafts - low) * (y1 - y0) / (high - low), 0.0)


def other_launch(measured: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Flags with which the steps of a cost file were measured, as far as those of this launch differ; empty if none."""
    pairs = {name: (measured.get(name), given.get(name)) for name in STEP_FLAGS}
    other = [f"{option_of(name)} {_value(a)} (here {_value(b)})" for name, (a, b) in pairs.items() if a != b]
    return ", ".join(other)


def _value(value: Any) -> str:
    return "not given" if value is None else str(value)


def own_and_cached_pairs(tokens: int, cached: int, pairs: int) -> tuple[float, float]:
    """Splits the `pairs` of a step's new `tokens` with themselves and the tokens before them in their prompts: pairs
    among new tokens, and pairs with `cached` tokens. Several prompts have equal shares of both."""
    prompts = max((tokens * cached + tokens * tokens / 2) / max(pairs - tokens / 2, 0.5), 1.0)
    own = min(tokens * (tokens / prompts + 1) / 2, float(pairs))
    return own, pairs - own
