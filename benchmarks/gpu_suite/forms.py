"""Forms of kernels: the constants of a launch without its sizes, and the optional arguments that it has. A case of the
suite stands for all launches of its form.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from benchmarks.gpu_suite.launched import Launch, launches_of, recorded
from benchmarks.gpu_suite.served_models import PUBLISHED, forms_of, launch_of, run_steps
from benchmarks.kernel_cases import KernelCase
from moe_engine.kernels.triton.absent_device import absent_device

Form = tuple[str, tuple[tuple[str, Any], ...]]
"""A kernel, and its switches by name."""
NUMBERED = ("KV_FORMAT", "GROUP_SCORE")
"""Constants whose numbers are names of forms; of others only zero is a form of its own."""


def form_of(launch: Launch) -> Form:
    """Constants are in capital letters."""
    switches = []
    for name, value in sorted(vars(launch.arguments).items()):
        if name.isupper():
            number = isinstance(value, int | float) and name not in NUMBERED
            switches.append((name, bool(value) if number else value if isinstance(value, str | int) else repr(value)))
        elif name.islower() and (value is None or isinstance(value, Tensor)):
            switches.append((name, value is not None))
    return launch.kernel, tuple(switches)


def of_cases(cases: Iterable[KernelCase]) -> set[Form]:
    return {form_of(launch) for case in cases for launch in launches_of(case)}


def of_models(names: Iterable[str] = PUBLISHED) -> dict[Form, list[str]]:
    """The forms that the steps of these models launch on an H200, and the launches."""
    found: dict[Form, list[str]] = {}
    for model in names:
        for form in forms_of(model):
            with TemporaryDirectory() as folder:
                config = launch_of(Path(folder), model, form)
                with absent_device(90), recorded() as launches:
                    run_steps(config)
            for own in {form_of(launch) for launch in launches}:
                found.setdefault(own, []).append(f"{model} {form}")
    return found


def difference(form: Form, known: Iterable[Form]) -> str:
    """The switches in which a form differs from the nearest known one of its kernel."""
    switches = set(form[1])
    others = [sorted(switches - set(other)) for kernel, other in known if kernel == form[0]]
    return " ".join(f"{name}={value}" for name, value in min(others, key=len, default=sorted(switches)))
