"""Lost ranks of a simulation: ``--fail rank=7@t=600s``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_engine.errors import ConfigError

_FORM = re.compile(r"rank=([0-9]+)@t=(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


@dataclass(frozen=True)
class Fault:
    """Rank `rank` of `num_ranks` is lost at this second of the simulation."""

    rank: int
    seconds: float
    num_ranks: int

    @classmethod
    def parse(cls, text: str, num_ranks: int) -> Fault:
        """From ``rank=7@t=600s``.

        Raises:
            ConfigError: another form, or no such rank.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(f"--fail {text}: write rank=NUMBER@t=SECONDSs, for example --fail rank=7@t=600s")
        rank = int(found[1])
        if rank >= num_ranks:
            raise ConfigError(f"--fail {text}: the deployment has ranks 0 to {num_ranks - 1}")
        return cls(rank, float(found[2]) * _UNITS[found[3]], num_ranks)
