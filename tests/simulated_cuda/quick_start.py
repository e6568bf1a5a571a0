"""Workers of this process start without steps of every size. Those steps compile kernels on a real GPU; interpreted
kernels need no compilation, and these steps are most of the computation of an engine on a simulated device.

`tests/worker/test_before_ready.py` tests them; engines of `on_device` that call `sometimes_warm` run them in a third of
the runs.
"""

from __future__ import annotations

from moe_engine.worker.startup import build_runner

warm_sizes = build_runner.warm_sizes
build_runner.warm_sizes = lambda runner, num_tokens, top_k: 0
