"""The GPU suite has a case of every Triton kernel, and its cases run: in tiny sizes in the interpreter, on the inputs
of torch's rows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu_suite import cases, parity
from benchmarks.gpu_suite.launched import launches_of
from benchmarks.gpu_suite.rows import Rows, triton_row
from benchmarks.gpu_suite.setting import Setting
from benchmarks.kernel_cases import KernelCase, all_cases
from moe_engine.kernels.device import cpu_device
from moe_engine.kernels.ops.reference import TorchOps
from moe_engine.kernels.triton import modules

TINY = {case.name: case for case in cases.tiny_cases()}


@pytest.fixture
def poisoned() -> None:
    """Not here, and memory accesses are not checked: the kernels' own tests do both."""


@pytest.fixture
def checked() -> None:
    """As above."""


@pytest.fixture(scope="module")
def kernels() -> set[str]:
    """All kernels but those that other parts run."""
    return {case.kernel.fn.__name__ for case in modules.all_cases()} - cases.ELSEWHERE.keys()


def reached(asked: list[KernelCase]) -> set[str]:
    """The kernels that these cases launch, which all have work."""
    found = set()
    for case in asked:
        launches = launches_of(case)
        assert case.bytes > 0 or not launches, case.name
        found |= {launch.kernel for launch in launches}
    return found


@pytest.fixture(scope="module")
def by_named_shapes() -> set[str]:
    return reached(all_cases())


@pytest.mark.parametrize("own", [cases.parity_cases, cases.timed_cases, cases.tiny_cases])
def test_every_kernel_has_a_case_or_a_reason(own, kernels, by_named_shapes):
    """A new kernel needs a case in `benchmarks/gpu_suite`, or a line in `cases.ELSEWHERE`. Tiny ones, so that a dry run
    finds errors in each."""
    found = reached(own()) | (set() if own is cases.tiny_cases else by_named_shapes)
    assert (kernels - found, cases.ELSEWHERE.keys() & found) == (set(), set())


@pytest.mark.parametrize("own", [cases.parity_cases, cases.tiny_cases])
def test_experts_have_every_activation(own):
    """The forms of the first product that models have, not only SiLU's."""
    launches = [launch for case in own() if case.family == "experts" for launch in launches_of(case)]
    forms = [launch.arguments for launch in launches if launch.kernel == "gate_up_kernel"]
    names = ("BIASED", "CLAMP", "SITU", "SQUARED")
    assert {name for name in names for form in forms if getattr(form, name)} == set(names)


def test_names_are_unique():
    for own in (cases.parity_cases, cases.timed_cases):
        names = [case.name for case in [*own(), *all_cases()]]
        assert len(names) == len(set(names))
    assert len(TINY) == len(cases.tiny_cases())


@pytest.mark.drawn(12)
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_case_in_the_interpreter(name):
    rows, case = Rows(cpu_device(), asked=("torch",)), TINY[name]
    rows.kernels[case.family]["triton"] = triton_row(case.family)
    (line,) = parity.compare([case], rows, Setting.of("cpu", 600))["lines"]
    assert line["ok"] and "error" in line, line


class OtherBias(TorchOps):
    """A router with the biases of other experts; without biases, with the weight of its second choice twice."""

    def route(self, x: Any, gate: Any, bias: Any, *rest: Any) -> Any:
        weights, ids = super().route(x, gate, None if bias is None else bias.roll(1), *rest)
        if bias is None:
            weights[:, 0] = weights[:, 1]
        return weights, ids


@pytest.mark.parametrize("name", [name for name in TINY if "route" in name and "llama-4" not in name])
def test_a_wrong_router_is_found(name):
    """`llama-4` has one choice and no bias."""
    case, right = TINY[name], TorchOps()
    wrong, found = (parity.line_of(case, kernel, right, [], "cpu") for kernel in (OtherBias(), right))
    assert not wrong["ok"] and "the router" in wrong["failed"] and found["error"] == 0.0
