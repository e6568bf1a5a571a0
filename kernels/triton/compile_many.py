"""Compiles many ahead-of-time cases in several processes; a failed case is reported and the rest continues."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_engine.kernels.triton.aot import AotCase, AotReport, compile_case


@dataclass(frozen=True)
class AotFailure:
    """A case that failed to compile."""

    name: str
    arch: int
    error: str

    def problems(self) -> list[str]:
        return [self.error]


Result = AotReport | AotFailure
Job = tuple[AotCase, int]


def compile_many(jobs: Sequence[Job], processes: int) -> Iterator[Result]:
    """Results in the order of the jobs, (case, architecture) each, as they complete.

    The processes are forked, since kernels cannot be pickled: call it before torch or Triton start threads.
    """
    if processes <= 1 or len(jobs) <= 1:
        yield from map(_compile, jobs)
        return
    with multiprocessing.get_context("fork").Pool(processes, _inherit, (jobs,)) as pool:
        yield from pool.imap(_compile_inherited, range(len(jobs)))


_inherited: Sequence[Job] = ()


def _inherit(jobs: Sequence[Job]) -> None:
    global _inherited
    _inherited = jobs


def _compile_inherited(index: int) -> Result:
    return _compile(_inherited[index])


def _compile(job: Job) -> Result:
    case, arch = job
    try:
        return compile_case(case, arch)
    except Exception as error:
        return AotFailure(case.name, arch, f"{type(error).__name__}: {_last_line(error)}")


def _last_line(error: Any) -> str:
    """The last non-empty line: compiler errors are long, the cause is at the end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def one_of_each(cases: Sequence[AotCase]) -> list[AotCase]:
    """The first case of every kernel, and the last of those with matrix products: small and large tiles."""
    found: dict[Any, AotCase] = {}
    for case in cases:
        found.setdefault((id(case.kernel), "first"), case)
        if case.matrix:
            found[id(case.kernel), "last"] = case
    return list({case.name: case for case in found.values()}.values())
