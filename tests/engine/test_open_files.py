"""The limit of open files: raised up to the hard limit, refused by name if it is too small."""

from __future__ import annotations

import resource

import pytest

from moe_engine.errors import ConfigError
from moe_engine.processes import open_files
from moe_engine.processes.open_files import LEAST, WANTED, check_limit, raise_limit

ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(("soft", "hard", "raised"), [
    (1024, 2**20, WANTED), (1024, 4096, 4096), (1024, 1024, 1024), (1024, ENDLESS, WANTED), (2**20, 2**20, 2**20),
    (ENDLESS, ENDLESS, ENDLESS), (64, 64, 64), (64, LEAST, LEAST),
])  # fmt: skip
def test_limit_is_raised_as_far_as_the_user_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda which, new: limits.append(new))
    raise_limit()
    assert limits[-1] == (raised, hard)
    if raised != ENDLESS and raised < LEAST:
        with pytest.raises(ConfigError, match=rf"^ulimit -n: .* {soft} files .* at least {LEAST}, .*-n {WANTED}"):
            check_limit()
    else:
        check_limit()
