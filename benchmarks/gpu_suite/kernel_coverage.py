"""Lists all Triton kernels with the cases that launch them, or the forms that models launch and no case does.

python -m benchmarks.gpu_suite.kernel_coverage [--missing [MODEL ...]]
"""

from __future__ import annotations

import argparse

from benchmarks.gpu_suite import cases
from benchmarks.gpu_suite.launched import launches_of
from benchmarks.kernel_cases import KernelCase
from benchmarks.report import table
from moe_engine.kernels.triton import modules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--missing", nargs="*", metavar="MODEL", help="forms of these models, or of all")
    models = parser.parse_args().missing
    compared = [*cases.parity_cases(), *cases.all_cases()]
    print(kernels([*compared, *cases.timed_cases()]) if models is None else missing(compared, models))


def kernels(own: list[KernelCase]) -> str:
    """Each kernel with the number of its cases and the first ones, or with the reason why it has none."""
    found: dict[str, list[str]] = {case.kernel.fn.__name__: [] for case in modules.all_cases()}
    for case in {case.name: case for case in own}.values():
        for kernel in {launch.kernel for launch in launches_of(case)}:
            found[kernel].append(case.name)
    rows = [
        (kernel, str(len(names)), ", ".join(names[:3]) or cases.ELSEWHERE.get(kernel, "-"))
        for kernel, names in sorted(found.items())
    ]
    return table(("kernel", "cases", "the first ones"), rows)


def missing(compared: list[KernelCase], models: list[str]) -> str:
    """Each form without a case of parity, by its difference from the nearest one with a case; and the numbers of
    forms."""
    from benchmarks.gpu_suite import forms

    known, launched = forms.of_cases(compared), forms.of_models(models or forms.PUBLISHED)
    lacking = sorted(form for form in launched.keys() - known if form[0] not in cases.ELSEWHERE)
    rows = [(form[0], forms.difference(form, known), ", ".join(launched[form][:3])) for form in lacking]
    return f"{table(('kernel', 'form', 'models'), rows)}\n{len(launched)} forms, {len(lacking)} without a case"


if __name__ == "__main__":
    main()
