"""Compiled decodes have the tokens of eager decodes, no compilation happens after READY, and none twice on one machine.

One test compiles with inductor, in separate processes with a folder for compiled code. It compiles a matrix product,
which needs no C++ compiler. In the other tests Dynamo traces regions and runs torch's operators.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.errors import ConfigError
from moe_engine.kernels import torch_regions
from moe_engine.kernels.torch_regions import CompiledRegions
from moe_engine.kernels.triton import guard
from moe_engine.models.layers.compiled_layer import CompiledLayer
from moe_engine.types.step_settings import CompileSettings, GraphSettings
from moe_engine.worker.startup import compile_setup as region_setup
from moe_engine.worker.startup.graph_setup import capture_graphs
from tests.engine.harness import InProcessEngine, Scripted
from tests.speculation.agreeing import agreeing_checkpoint
from tests.worker.repeated_calls import RepeatedCalls, ReplayableTorch

MAX_BS = 4
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(region_setup, "CompiledRegions", partial(CompiledRegions, backend="eager"))
    monkeypatch.setenv(torch_regions.CACHE_VARIABLE, str(tmp_path / "compiled"))


def _script(seed: int) -> list[Scripted]:
    numbers = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(1, most, (), generator=numbers))

    return [Scripted(f"r{i}", [draw(250) for _ in range(draw(20))], draw(16), draw(12)) for i in range(9)]


def _traced() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_folder_that_cannot_be_created_is_named_with_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "compiled"
    with pytest.raises(ConfigError, match=rf"^{folder}: .* \(Not a directory\); .* --torch-compile-cache-dir"):
        region_setup.start_regions(CompileSettings(4, str(folder)))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("kind", "drafts", "regions"), [("deepseek_v3", 2, 6), ("qwen3 drafted by llama", 2, 6)])
def test_compiled_decodes_make_the_same_tokens(
    kind: str, drafts: int, regions: int, traced_only: None, tmp_path: Path
) -> None:
    """Also with steps above the compiled size, prompts, and steps captured as graphs."""
    kind, _, small = kind.partition(" drafted by ")
    path = agreeing_checkpoint(kind, tmp_path / "model", 3, **({} if small else {"num_mtp_layers": 1}))
    flags: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch", "moe_runner_backend": "torch"}
    flags |= {"max_total_tokens": 2048, "max_running_requests": 7, "cpu_threads": 1}
    flags |= {"speculative_algorithm": "STANDALONE" if small else "NEXTN", "speculative_num_steps": drafts}
    flags |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": drafts + 1}
    if small:
        flags["speculative_draft_model_path"] = str(agreeing_checkpoint(small, tmp_path / "small", 3))
    inside = {"linear_backend": "torch", "ops_backend": "torch"}
    plain = InProcessEngine(path, tmp_path / "board", **flags, **inside)
    try:
        expected = plain.run(_script(5))
    finally:
        plain.close()
    before = _traced()
    engine = InProcessEngine(path, tmp_path / "board", enable_torch_compile=True, torch_compile_max_bs=MAX_BS, **flags)
    try:
        made = _traced() - before
        assert regions <= made <= 2 * regions  # with 1 token and with several; drafters may differ
        compiled = [layer for layer in engine.worker.runner.model.layers if isinstance(layer, CompiledLayer)]
        assert len(compiled) == 3 and engine.worker.info.choices[0].row.name == "torch"
        runner = engine.worker.runner
        for recorded in (False, True):
            if recorded:
                runner.forward.attention = ReplayableTorch(runner.forward.attention)
                settings = GraphSettings((1, 3, 6), counts=(1, drafts + 1))
                assert capture_graphs(runner, settings, backend=RepeatedCalls()) == settings.num_graphs
            found = engine.run(_script(5))
            assert {rid: answer.token_ids for rid, answer in found.items()} == {
                rid: answer.token_ids for rid, answer in expected.items()
            }
        assert guard.compilations_after_ready() == 0 and _traced() - before == made
    finally:
        engine.close()


def test_a_late_compilation_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    regions = CompiledRegions(8, backend="eager")
    double = regions.compile(_double, (0,))
    assert regions.compile(_double, (0,)) is double
    torch_regions.watch()
    torch_regions.watch()
    guard.reset()
    try:
        for count in (1, 3):
            assert torch.equal(double(torch.ones(count, 4)), torch.full((count, 4), 2.0))
        assert guard.compilations_after_ready() == 0
        regions.sealed = True
        guard.ready()
        for count in (1, 2, 5, 8):
            double(torch.ones(count, 4))
        assert guard.compilations_after_ready() == 0
        with caplog.at_level("WARNING"):
            double(torch.ones(5, 7))  # another width
        assert guard.compilations_after_ready() == 1 and "torch.compile region" in caplog.text
    finally:
        guard.reset()


def _double(x: torch.Tensor) -> torch.Tensor:
    return x + x


_START = """
import dataclasses, json, sys, torch
import torch._inductor.cpu_vec_isa as isa
from moe_engine.kernels import torch_regions
from tests.models import stepper
isa.valid_vec_isa_list = list  # trying which instructions the compiler knows takes eight seconds
torch._inductor.config.cpp_cache_precompile_headers = False  # pays from ten graphs on
path, folder = sys.argv[1:]
torch_regions.keep_compiled_code(folder)
config = stepper.load_model_config(path)
plain = stepper.make_backends(config)
kept = []
with torch.inference_mode():
    for kernels in (plain, dataclasses.replace(plain, regions=torch_regions.CompiledRegions(4))):
        model = stepper.load_model(path, config, stepper.LoadOptions("float32"), kernels)
        steps = stepper.Stepper(model, config, kernels)
        steps.step([stepper.Chunk(0, [5, 6, 7], False)])
        kept.append(steps.step([stepper.Chunk(0, [8], True)])[0])
torch.testing.assert_close(*kept, rtol=1e-4, atol=1e-5)
print(json.dumps(torch_regions.loaded_and_compiled()))
"""


_TWICE = """
import os, sys, torch, torch._inductor.compile_fx
for _ in range(2):
    if process := os.fork():
        assert os.waitpid(process, 0)[1] == 0
        continue
    exec(sys.argv.pop(1), {})
    sys.stdout.flush()
    os._exit(0)
"""
"""Two consecutive processes, which need not import inductor."""
_START_OF_A_FUNCTION = """
import json, sys, torch
import torch._inductor.cpu_vec_isa as isa
from moe_engine.kernels import torch_regions
isa.valid_vec_isa_list = list  # trying which instructions the compiler knows takes eight seconds
torch_regions.keep_compiled_code(sys.argv[2])
weight = torch.eye(4) * 2
def double(x):
    return x @ weight
compiled = torch_regions.CompiledRegions(4).compile(double, (0,))
with torch.inference_mode():
    assert torch.equal(compiled(torch.ones(1, 4)), torch.full((1, 4), 2.0))
print(json.dumps(torch_regions.loaded_and_compiled()))
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("start", "regions"),
    [(_START_OF_A_FUNCTION, 1), pytest.param(_START, 2, marks=pytest.mark.exhaustive)],
    ids=["function", "model"],
)
def test_a_second_start_compiles_nothing(start: str, regions: int, tmp_path: Path) -> None:
    path = agreeing_checkpoint("qwen3", tmp_path / "model", 3) if start is _START else ""
    done = subprocess.run(
        [sys.executable, "-c", _TWICE, start, str(path), str(tmp_path / "kept")],
        capture_output=True, text=True, timeout=200, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found == [[0, regions], [regions, 0]]  # of a model: before and after attention, for one token
