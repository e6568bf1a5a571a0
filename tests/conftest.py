"""Settings of all tests: one computing thread per process, because two test processes share the cores, and threads that
spin while they wait for each other are slower than one on a busy machine. Tests of threading set their own counts.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import inspect
import os
import signal
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import httpx
import httpx._transports.default as http_transport
import pytest
from hypothesis import HealthCheck, settings

from tests.examples import left_out
from tests.fork_server import (  # noqa: F401
    READ_IN_IMPORTS,
    fork_server,
    forked_processes,
)
from tests.forked_run import pytest_addoption, pytest_configure, pytest_runtestloop, several  # noqa: F401
from tests.random_seed import (  # noqa: F401
    pytest_fixture_setup,
    pytest_report_header,
    pytest_runtest_call,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the servers the tests start
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in engine processes: an engine's threads in this process sleep


TIMEOUT = inspect.signature(httpx.get).parameters["timeout"].default
TIMEOUT.connect = TIMEOUT.read = TIMEOUT.write = TIMEOUT.pool = 120.0
"""httpx's default of all calls without an own time limit. Its 5 s are too short on a busy machine."""
http_transport.create_ssl_context = lru_cache(http_transport.create_ssl_context)  # type: ignore[attr-defined]
"""Each client and each call of `httpx.get` loads all certificates anew: 30 ms of processor time."""

# test processes share the cores: times of examples say nothing; a second attempt has new examples, not the stored ones
settings.register_profile("of all tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.load_profile("of all tests")


@pytest.fixture(scope="module", autouse=True)
def variables_of_the_module() -> Iterator[None]:
    """Removes variables that libraries set in a test module: `CUDA_HOME` of DeepEP, folders of compilers. Otherwise
    engines of later modules would start interpreters, because a forked process has already read the variables."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        if name.startswith(READ_IN_IMPORTS):
            del os.environ[name]


STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.fixture(scope="module", autouse=True)
def nothing_of_the_module_acts_later() -> Iterator[None]:
    """Neither a timer nor a handler of a stop signal: they would act on tests of later modules in the same process. A
    timer once ended the process nine minutes later, in another module's test."""
    threads, handlers = threading.enumerate(), list(map(signal.getsignal, STOPS))
    yield
    timers = [
        thread for thread in threading.enumerate() if isinstance(thread, threading.Timer) and thread not in threads
    ]
    for timer in timers:
        timer.join(60)  # a canceled one ends when it gets a core
    assert not [timer.function for timer in timers if timer.is_alive()], "the module leaves timers"
    assert list(map(signal.getsignal, STOPS)) == handlers, "the module leaves handlers of signals"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs an `async def` test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


gc.disable()  # during the collection of tests: there is no garbage, but a million objects to scan


def pytest_collection_finish(session: pytest.Session) -> None:
    """Objects of all test modules exist until the end: later collections skip them."""
    gc.freeze()
    if several(session.config):  # with the interpreter's values collections take 6 % of the processor time
        gc.set_threshold(10_000, 20, 20)
    gc.enable()


atexit.register(gc.unfreeze)
"""Triton's bindings report remaining objects at the exit. Not before: pytest collects garbage several times at its
end."""


LONG = (
    "simulated_cuda/test_on_device.py",
    "kernels/triton/test_aot.py",
    "slurm/test_serve.py",
    "simulated_cuda/test_ranks.py",
    "slurm/test_smoke.py",
    "slurm/test_scripts.py",
    "disaggregation/test_pair.py",
    "distributed/engine/test_forms.py",
    "benchmarks/test_step_costs.py",
    "e2e/test_structured_output.py",
    "distributed/elastic/test_survival.py",
    "distributed/engine/test_weight_updates.py",
    "server/test_bodies.py",
    "worker/test_torch_compile.py",
    "worker/test_expanded_prefix.py",
    "distributed/engine/test_pauses.py",
    "engine/test_structured_output.py",
    "slurm/test_cluster_check.py",
    "distributed/engine/test_faults.py",
    "distributed/engine/test_listening.py",
    "speculation/test_memory_of_a_life.py",
    "distributed/models/test_sharded_models.py",
    "soak/test_soak.py",
    "test_docs.py",
    "test_architecture.py",
    "test_random_seed.py",
    "tuning/test_simulator_input.py",
    "tuning/test_plan_search.py",
    "tuning/test_expert_load.py",
    "tuning/test_simulator.py",
    "tuning/test_autopilot_week.py",
)
"""The longest files, and those of the last folders with more than three seconds of work. Several processes start them
first, so that no long file runs alone at the end."""


INTERPRETED = Path(__file__).parent / "kernels" / "triton"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` reads only files with such tests. The folder of interpreted kernels would import Triton's interpreter,
    in which the kernels of these tests would run, too, on the CPU."""
    if config.getoption("markexpr") != "gpu":
        return None
    if collection_path.is_dir():
        return True if collection_path == INTERPRETED else None
    return True if "mark.gpu" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the files. Tests marked `gpu` are skipped, with the reason, without a CUDA device."""
    if leaving := left_out(items):
        items[:] = [item for item in items if item not in leaving]
        config.hook.pytest_deselected(items=list(leaving))
    if several(config):
        order = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
        items.sort(key=lambda item: order.get(item.path, len(LONG)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    from tests.kernels.triton import on_gpu

    if on_gpu.is_there() if several(config) else torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none")
    for item in marked:
        item.add_marker(skip)
