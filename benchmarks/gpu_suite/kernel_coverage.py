"""``python -m benchmarks.gpu_suite.kernel_coverage`` lists all Triton kernels with the cases that launch them."""

from __future__ import annotations

from benchmarks.gpu_suite import cases
from benchmarks.gpu_suite.launched import launches_of
from benchmarks.report import table
from moe_engine.kernels.triton import modules


def main() -> None:
    """Prints each kernel with the number of its cases and the first ones, or with the reason why it has none."""
    found: dict[str, list[str]] = {case.kernel.fn.__name__: [] for case in modules.all_cases()}
    for case in {
        case.name: case for case in [*cases.parity_cases(), *cases.timed_cases(), *cases.all_cases()]
    }.values():
        for kernel in {launch.kernel for launch in launches_of(case)}:
            found[kernel].append(case.name)
    rows = [
        (kernel, str(len(names)), ", ".join(names[:3]) or cases.ELSEWHERE.get(kernel, "-"))
        for kernel, names in sorted(found.items())
    ]
    print(table(("kernel", "cases", "the first ones"), rows))


if __name__ == "__main__":
    main()
