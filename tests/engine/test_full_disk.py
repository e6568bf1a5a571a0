"""Output on a full disk, and limits of memory: one line, and requests are not harmed."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, InputError
from moe_engine.frontend.weights import tensor_files
from moe_engine.models.bar_output import BarOutput
from moe_engine.planning.prepare import prepare
from moe_engine.processes import address_space
from moe_engine.processes.address_space import address_space_hint, check_address_space

needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@needs_full_disk
def test_a_progress_bar_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115  # its close fails too
    monkeypatch.setattr(sys, "stderr", full)
    with pytest.raises(OSError, match="No space left"):
        print("a line", file=sys.stderr, flush=True)
    assert list(tqdm(range(9), file=BarOutput(), mininterval=0)) == list(range(9))
    with pytest.raises(OSError, match="No space left"):
        full.close()


@needs_full_disk
def test_tensors_on_a_disk_that_fills_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"^tensors cannot be written to .*: No space left on device; set TMPDIR$"):
        tensor_files._write(tmp_path / "file", [b"x" * 100_000])


def test_a_small_address_space_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    endless, limits = resource.RLIM_INFINITY, {resource.RLIMIT_AS: 64 << 20}
    monkeypatch.setattr(address_space.resource, "getrlimit", lambda which: (limits.get(which, endless), endless))
    with pytest.raises(ConfigError, match=r"^ulimit -v: .* 64 MB .* run `ulimit -v unlimited` first"):
        prepare(EngineArgs.from_kwargs(device="cpu"))
    check_address_space(64 << 20)
    assert address_space_hint().startswith("; `ulimit -v` allows 64 MB of address space: run")
    limits[resource.RLIMIT_AS] = endless
    check_address_space(1 << 60)
    assert not address_space_hint()
