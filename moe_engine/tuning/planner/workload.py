"""Workloads and service-level objectives of a plan, as text and as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.values import did_you_mean, parse_count
from moe_engine.errors import ConfigError
from moe_engine.tuning.planner.steady import Load

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Workload:
    """Mean lengths in tokens. `prompt`: new tokens of a turn; `shared`: prefix of all requests; `turns` of a
    conversation, each of which sees the turns before."""

    prompt: int
    output: int
    shared: int = 0
    turns: int = 1

    @property
    def load(self) -> Load:
        """The mean turn: its shared prefix and its earlier turns are cached."""
        before = (self.turns - 1) / 2 * (self.prompt + self.output)
        return Load(float(self.prompt), self.shared + before + self.prompt, float(self.output))

    @property
    def longest(self) -> int:
        """Tokens of the last turn with its answer."""
        return self.shared + self.turns * (self.prompt + self.output)

    @property
    def text(self) -> str:
        more = (f",shared={self.shared}" if self.shared else "") + (f",turns={self.turns}" if self.turns > 1 else "")
        return f"in={self.prompt},out={self.output}{more}"


@dataclass(frozen=True)
class Slo:
    """Upper limits of the medians, in seconds; None: any."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def missed(self, ttft_s: float, itl_s: float) -> float:
        """The largest ratio of a prediction to its limit; at most 1 if all are met."""
        ratios = [got / limit for got, limit in ((ttft_s, self.ttft_s), (itl_s, self.itl_s)) if limit]
        return max(ratios, default=0.0)


def parse_workload(text: str) -> Workload:
    """``in=2000,out=100[,shared=512,turns=4]``. Raises ConfigError."""
    pairs = _pairs("--workload", text, ("in", "out", "shared", "turns"), "in=2000,out=100")
    values = {}
    for name, value in pairs.items():
        try:
            values[name] = parse_count(value)
        except (ValueError, OverflowError):
            raise ConfigError(f"--workload {name}={value}: give a number of tokens, as in {name}=2000") from None
        least = 0 if name == "shared" else 1
        if not least <= values[name] <= MOST_TOKENS:
            raise ConfigError(f"--workload {name}={value}: must be between {least} and {MOST_TOKENS}")
    if missing := [name for name in ("in", "out") if name not in values]:
        raise ConfigError(f"--workload {text}: {missing[0]}= is missing; give both, as in in=2000,out=100")
    return Workload(values["in"], values["out"], values.get("shared", 0), values.get("turns", 1))


def parse_slo(text: str | None) -> Slo:
    """``ttft=2s,itl=50ms``. Raises ConfigError."""
    if text is None:
        return Slo()
    found = {
        name: _seconds(name, value)
        for name, value in _pairs("--slo", text, ("ttft", "itl"), "ttft=2s,itl=50ms").items()
    }
    return Slo(found.get("ttft"), found.get("itl"))


def _pairs(flag: str, text: str, names: tuple[str, ...], example: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not value:
            raise ConfigError(f"{flag} {text}: {part!r} is not name=value; write {flag} {example}")
        if name not in names:
            raise ConfigError(f"{flag} {text}: unknown name {name}{did_you_mean(name, names)}; use {', '.join(names)}")
        if name in found:
            raise ConfigError(f"{flag} {text}: {name} is given twice; drop one")
        found[name] = value
    return found


def _seconds(name: str, text: str) -> float:
    unit = next((unit for unit in ("us", "ms", "s") if text.endswith(unit)), None)
    try:
        value = float(text.removesuffix(unit)) * UNITS[unit] if unit else float("nan")
    except ValueError:
        value = float("nan")
    if not 0 < value < 1e6:
        raise ConfigError(f"--slo {name}={text}: give a time above 0 with its unit, as in {name}=2s or {name}=50ms")
    return value
