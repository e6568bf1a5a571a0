"""Settings that change while an engine runs, on all schedulers or on none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from moe_engine import Engine
from moe_engine.errors import InputError
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.mark.parametrize("flags", [{}, {"tp_size": 2, "attn_dp_size": 2}], ids=["one rank", "dp2"])
def test_settings_change_on_every_scheduler(tmp_path: Path, flags: dict[str, Any]) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, 5, tokenizer=False)
    prompts = [[random.randrange(3, 300) for _ in range(random.randint(1, 40))] for _ in range(6)]
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    sizes: dict[str, Any] = {"max_total_tokens": 1024, "max_running_requests": 8, "chunked_prefill_size": 32}
    with Engine(str(path), dtype="float32", cpu_threads=1, skip_tokenizer_init=True, **sizes, **flags) as engine:
        before: Any = engine.generate(input_ids=prompts, sampling_params=sampling)
        shown = engine.get_internal_state()
        count = 2 if flags else 1
        assert len(shown) == count and shown[0]["bounds"]["max_running_requests"] == [1, 8 // count]
        changes = {"max_running_requests": 1, "chunked_prefill_size": 5, "schedule_conservativeness": 0.25}
        for values in engine.set_internal_state(**changes):
            assert values.items() >= changes.items()
        after: Any = engine.generate(input_ids=prompts, sampling_params=sampling)
        assert [one["output_ids"] for one in after] == [one["output_ids"] for one in before]
        with pytest.raises(InputError, match=r"server_args\.max_running_requests: expected an integer"):
            engine.set_internal_state(schedule_conservativeness=1.0, max_running_requests=9)
        for state in engine.get_server_info()["internal_states"]:
            assert state.items() >= changes.items()
