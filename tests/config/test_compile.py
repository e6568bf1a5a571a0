"""--enable-torch-compile: its settings, and the flags with which it is refused, by name."""

from __future__ import annotations

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.planning.output.explain import explain_text
from moe_engine.types.step_settings import CompileSettings


def test_compiled_families_use_torch(resolved):
    assert resolved().compiled == CompileSettings() and resolved().kernels.model.asked["ops"] == "auto"
    config = resolved(enable_torch_compile=True, torch_compile_cache_dir="/somewhere")
    assert config.compiled == CompileSettings(32, "/somewhere")
    assert config.kernels.model.asked == dict.fromkeys(("attention", "experts", "sampling"), "auto") | dict.fromkeys(
        ("linear", "ops"), "torch"
    )
    lines = [line for line in explain_text(config).splitlines() if "linear_backend" in line or "ops_backend" in line]
    assert len(lines) == 2 and all("torch" in line and "--enable-torch-compile" in line for line in lines)


def test_no_more_tokens_than_a_step_can_have(resolved):
    assert resolved(enable_torch_compile=True, max_running_requests=5).compiled.max_tokens == 5
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3, "max_running_requests": 6}
    assert resolved(enable_torch_compile=True, torch_compile_max_bs=4, **drafts).compiled.max_tokens == 16


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
        ({"ops_backend": "cpu"}, "--ops-backend cpu"),
        ({"linear_backend": "triton"}, "--linear-backend triton"),
        ({"tp_size": 2}, "--tp-size 2"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_both_names(resolved, flags, words):
    with pytest.raises(ConfigError, match=f"--enable-torch-compile with {words}"):
        resolved(enable_torch_compile=True, **flags)
    with pytest.raises(ConfigError, match="--torch-compile-max-bs 0: must be at least 1"):
        resolved(enable_torch_compile=True, torch_compile_max_bs=0)


def test_flags_without_effect_are_remarked(resolved):
    assert any("--torch-compile-max-bs has no effect" in note for note in resolved(torch_compile_max_bs=8).notes)
    assert not EngineArgs.from_kwargs().backends.enable_torch_compile
