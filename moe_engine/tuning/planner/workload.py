"""Workloads of a plan, as text and as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.slo import name_values
from moe_engine.config.values import parse_count
from moe_engine.errors import ConfigError
from moe_engine.tuning.planner.steady import Load

MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Workload:
    """Mean lengths in tokens. `prompt`: new tokens of a turn; `shared`: prefix of all requests; `turns` of a
    conversation, each of which contains the earlier turns. `equal`: all requests have these lengths."""

    prompt: int
    output: int
    shared: int = 0
    turns: int = 1
    equal: bool = False

    def load(self, cached: bool = True) -> Load:
        """The mean turn: its shared prefix and its earlier turns are cached unless the cache is disabled."""
        prompt = self.shared + (self.turns - 1) / 2 * (self.prompt + self.output) + self.prompt
        return Load(float(self.prompt) if cached else prompt, prompt, float(self.output), self.equal)

    @property
    def longest(self) -> int:
        """Tokens of the last turn with its answer."""
        return self.shared + self.turns * (self.prompt + self.output)

    @property
    def text(self) -> str:
        more = (f",shared={self.shared}" if self.shared else "") + (f",turns={self.turns}" if self.turns > 1 else "")
        return f"in={self.prompt},out={self.output}{more}{',equal=1' if self.equal else ''}"


def parse_workload(text: str) -> Workload:
    """``in=2000,out=100[,shared=512,turns=4,equal=1]``. Raises ConfigError."""
    pairs = name_values("--workload", text, ("in", "out", "shared", "turns", "equal"), "in=2000,out=100")
    values = {}
    for name, value in pairs.items():
        try:
            values[name] = parse_count(value)
        except (ValueError, OverflowError):
            raise ConfigError(f"--workload {name}={value}: give a number of tokens, as in {name}=2000") from None
        least, most = (0 if name in ("shared", "equal") else 1), (1 if name == "equal" else MOST_TOKENS)
        if not least <= values[name] <= most:
            raise ConfigError(f"--workload {name}={value}: must be between {least} and {most}")
    equal = bool(values.get("equal"))
    if equal and values.get("turns", 1) > 1:
        raise ConfigError(f"--workload {text}: the turns of a conversation have different lengths; drop equal or turns")
    if missing := [name for name in ("in", "out") if name not in values]:
        raise ConfigError(f"--workload {text}: {missing[0]}= is missing; give both, as in in=2000,out=100")
    return Workload(values["in"], values["out"], values.get("shared", 0), values.get("turns", 1), equal)
