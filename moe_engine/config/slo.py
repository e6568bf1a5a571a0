"""Service level objectives: ``--slo ttft=2s,itl=50ms``."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.numbers import real_number
from moe_engine.errors import ConfigError, did_you_mean

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Slo:
    """Upper limits in seconds: of the median TTFT, and of the gap between tokens, median and mean. None: no limit."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def missed(self, ttft_s: float, itl_s: float, tpot_s: float) -> float:
        """The largest ratio of a prediction to its limit; at most 1 if all are met."""
        pairs = ((ttft_s, self.ttft_s), (max(itl_s, tpot_s), self.itl_s))
        ratios = [got / limit for got, limit in pairs if limit]
        return max(ratios, default=0.0)


def parse_slo(text: str | None) -> Slo:
    """``ttft=2s,itl=50ms``. Raises ConfigError."""
    if text is None:
        return Slo()
    found = {
        name: _seconds(name, value)
        for name, value in name_values("--slo", text, ("ttft", "itl"), "ttft=2s,itl=50ms").items()
    }
    return Slo(found.get("ttft"), found.get("itl"))


def name_values(flag: str, text: str, names: tuple[str, ...], example: str) -> dict[str, str]:
    """``name=value,...`` of a flag. Raises ConfigError: unknown names, or text of another form."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
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
        value = real_number(text.removesuffix(unit)) * UNITS[unit] if unit else float("nan")
    except ValueError:
        value = float("nan")
    if not 0 < value < 1e6:
        raise ConfigError(f"--slo {name}={text}: give a time above 0 with its unit, as in {name}=2s or {name}=50ms")
    return value
