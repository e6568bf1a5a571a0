from __future__ import annotations

from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.simulated_cuda.install import COUNT, require

ROOT = Path(__file__).parents[2]
DEVICES = {
    "PYTHONPATH": f"{ROOT}/tests/simulated_cuda/site:{ROOT}", COUNT: "8", "OMP_NUM_THREADS": "1",
    "TRITON_INTERPRET": "1",
}  # fmt: skip
"""Variables of processes with simulated devices. Triton reads its variable at each launch too."""
PRELOADED = (
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "tests.simulated_cuda.engine_of_two",
    "tests.simulated_cuda.tensor_parallel_engine",
    "tests.simulated_cuda.quick_start",
    "torch._dynamo",  # imported by composite operators, which takes one CPU second per process
)
DEVICE_SERVER = ForkServer(DEVICES, PRELOADED)


@pytest.fixture(autouse=True, scope="session")
def devices() -> None:
    require()


@pytest.fixture(scope="session")
def device_server(devices: None) -> ForkServer:
    """Forks processes with simulated devices, and the processes of their engines."""
    return DEVICE_SERVER
