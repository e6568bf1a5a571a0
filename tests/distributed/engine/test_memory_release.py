"""Memory that the processes of an engine release and allocate again: measured by the system, with unchanged tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_engine.errors import InputError
from tests.distributed.engine.test_tensor_updates import weights
from tests.distributed.engine.test_weight_updates import (  # noqa: F401
    FORMS,
    LENGTH,
    PROMPTS,
    SAMPLING,
    checkpoints,
    expected,
    open_engine,
    tokens,
)
from tests.fork_server import children
from tests.models.checkpoints import make_checkpoint
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(1)]

MIB = 1 << 20
BIG = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 16384, "num_hidden_layers": 3}


def resident() -> int:
    """Bytes of the engine's processes in memory."""
    infos = [process.memory_info() for process in children(psutil.Process(), recursive=True)]
    return sum(info.rss - info.shared for info in infos)


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_system_gets_the_memory(tmp_path: Path, tp_size: int) -> None:
    path = make_checkpoint("llama", tmp_path, 3, tokenizer=False, num_key_value_heads=2, **BIG)
    with open_engine(
        path, tp_size=tp_size, max_total_tokens=1 << 15, enable_memory_saver=True, context_length=256
    ) as engine:
        before = tokens(engine)
        held, info = resident(), engine.info
        assert info.weight_bytes > 50 * MIB and info.kv_bytes > 20 * MIB, "the test measures something"
        for tag, size in (("kv_cache", info.kv_bytes), ("weights", info.weight_bytes)):
            assert engine.release_memory_occupation([tag])[0]
            less = held - resident()
            assert 0.9 * tp_size * size < less, (tag, less, size)
            with pytest.raises(InputError, match="is released; call /resume_memory_occupation first") as refused:
                tokens(engine)
            assert refused.value.status == 503
            assert engine.health().alive
            assert engine.resume_memory_occupation([tag]) == (True, f"Resumed {tag}.")
            assert tokens(engine) == before
            held = resident()
        assert engine.release_memory_occupation()[0] and engine.resume_memory_occupation()[0]
        assert tokens(engine) == before


@pytest.mark.parametrize("form", ["ep2", pytest.param("two replicas", marks=pytest.mark.exhaustive)])
def test_a_training_loop(
    checkpoints: dict[str, Path],  # noqa: F811
    expected: dict[str, list[list[int]]],  # noqa: F811
    form: str,
) -> None:
    """Weights are resumed, then replaced, then the KV cache is resumed; also with paused requests."""
    new = [pair for pair in weights(checkpoints["new"]).items() if form != "two replicas" or "layers.3." not in pair[0]]
    with open_engine(checkpoints["old"], enable_memory_saver=True, **FORMS[form]) as engine:
        assert tokens(engine) == expected["old"]
        assert engine.release_memory_occupation()[0]
        assert engine.release_memory_occupation(["weights"])[1].endswith("0.000 GiB on 2 ranks."), "twice is once"
        done, why = engine.update_weights_from_tensor(new)
        assert not done and "the weights are released; call /resume_memory_occupation first" in why
        with pytest.raises(InputError, match="the weights are released"):
            engine.get_weights_by_name("model.norm.weight")
        assert engine.resume_memory_occupation(["weights"])[0]
        assert engine.update_weights_from_tensor(new)[0]
        with pytest.raises(InputError, match="kv_cache is released"):
            tokens(engine)
        assert engine.resume_memory_occupation(["kv_cache"])[0]
        assert tokens(engine) == expected["new"]
        longer = SAMPLING | {"max_new_tokens": 100}  # it runs at the pause

        def running() -> Any:
            """A stream whose first output is not its last one, as it may be on a busy machine."""
            stream: Any = engine.generate(input_ids=PROMPTS[3], sampling_params=longer, stream=True)
            return None if next(stream)["meta_info"]["finish_reason"] else stream

        stream = until(running)
        done, why = engine.release_memory_occupation()
        assert not done and "1 requests run" in why
        assert engine.pause_generation("in_place") == 1
        assert engine.release_memory_occupation()[0]
        with pytest.raises(InputError, match="kv_cache and weights is released"):
            engine.continue_generation()
        assert engine.resume_memory_occupation()[0]
        engine.continue_generation()
        last = [chunk["output_ids"] for chunk in stream][-1]
        assert last[:LENGTH] == expected["new"][3] and len(last) == 100
        assert not any(engine._loop.run(engine._frontend.client.call("check_integrity")))


def test_refusals(checkpoints: dict[str, Path]) -> None:  # noqa: F811
    with open_engine(checkpoints["old"]) as engine, pytest.raises(InputError, match="start with --enable-memory-saver"):
        engine.release_memory_occupation()
    with open_engine(checkpoints["old"], enable_memory_saver=True) as engine:
        for tag, words in (("cuda_graph", "not available yet"), ("kv", "use kv_cache or weights")):
            with pytest.raises(InputError, match=words):
                engine.release_memory_occupation([tag])
