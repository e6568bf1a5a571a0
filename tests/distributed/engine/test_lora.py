"""LoRA adapters on several ranks and with drafts: the greedy tokens of transformers with merged weights; loading and
unloading while requests run."""

from __future__ import annotations

import random
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moe_engine import Engine
from moe_engine.errors import ConfigError, InputError
from tests.distributed.engine.near_ties import possible_tokens
from tests.engine.harness import Answer, Scripted
from tests.engine.test_lora import DENSE, MLA, NUM_TOKENS, Served
from tests.models.lora import make_adapter, merge
from tests.speculation.agreeing import agreeing_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NUM_TOKENS}
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 8, "chunked_prefill_size": 48,
    "skip_tokenizer_init": True,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "dp attention": {
        "tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "shared_memory",
        "moe_dense_tp_size": 1, "max_running_requests": 16, "chunked_prefill_size": 96,
    },
    "tokens that travel": {"tp_size": 2, "moe_a2a_backend": "allgather"},
    "drafts": {"speculative_algorithm": "NEXTN"},
    "drafts, tp": {"speculative_algorithm": "NEXTN", "tp_size": 2},
    "trees, tp": {
        "tp_size": 2, "speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 5,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served("deepseek_v3", tmp_path_factory.mktemp("lora"), num_mtp_layers=1)


def prompts(count: int) -> list[list[int]]:
    return [[random.randrange(250) for _ in range(random.choice((1, 5, 20, 70)))] for _ in range(count)]


def compare(served: Served, engine: Engine, names: list[str | None], numbers: list[int]) -> None:
    asked = prompts(len(names))
    outputs = engine.generate(input_ids=asked, sampling_params=GREEDY, lora_path=names)
    assert isinstance(outputs, list)
    for prompt, output, number in zip(asked, outputs, numbers):
        served.check(Scripted("r", prompt), Answer(output["output_ids"], finish={}), number)


@pytest.mark.parametrize("form", FORMS)
def test_forms(served: Served, form: str) -> None:
    names = [None, *(adapter.name for adapter in served.adapters)]
    flags = FLAGS | FORMS[form]
    with Engine(str(served.path), lora_paths=served.lora_paths, max_loras_per_batch=2, **flags) as engine:
        compare(served, engine, names * 3, [0, 1, 2, 3] * 3)
        if form == "tp":
            change_while_requests_run(served, engine)


@pytest.mark.parametrize(("kind", "targets"), [("deepseek_v3", MLA), ("glm4_moe", DENSE)])
def test_accepted_drafts(kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Tokens of a batch of the base model and two adapters, greedy and sampled, are those without drafts, up to a token
    that rounding decides."""
    path = agreeing_checkpoint(kind, tmp_path / "base", random.randrange(1 << 20), num_mtp_layers=1)
    adapters = [make_adapter(tmp_path / name, path, targets, 4, seed) for seed, name in enumerate("ab", 1)]
    merged = cache(lambda name: merge(path, tmp_path / name, tmp_path / f"merged {name}"))
    names, asked = [None, "a", "b"] * 4, prompts(1) * 12
    sampling = [
        {"temperature": 0.7 * (i % 2), "sampling_seed": i // 6, "ignore_eos": True, "max_new_tokens": 24}
        for i in range(12)
    ]
    flags = FLAGS | {"lora_paths": [f"{a.name}={a}" for a in adapters], "max_loras_per_batch": 2}
    wanted: list[list[int]] = []
    for form in ({}, FORMS["drafts, tp"], FORMS["trees, tp"] | {"tp_size": 1}):
        with Engine(str(path), **flags, **form) as engine:
            outputs: Any = engine.generate(input_ids=asked, sampling_params=sampling, lora_path=names)
        found = [output["output_ids"] for output in outputs]
        if not form:
            wanted = found
            assert len({tuple(tokens) for tokens in wanted[:3]}) == 3, "adapters change the answers"
            continue
        for ours, theirs, own, name in zip(found, wanted, sampling, names, strict=True):
            if ours != theirs:
                at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
                model = merged(name) if name else path
                assert {ours[at], theirs[at]} <= possible_tokens(model, asked[0] + theirs[:at], own)
        lengths = [output["meta_info"]["spec_accept_length"] for output, name in zip(outputs, names) if name]
        assert max(lengths) > 1, "drafts of the base model are accepted with adapters"


def change_while_requests_run(served: Served, engine: Engine) -> None:
    """No request of an adapter is lost when the adapter is unloaded; another adapter may then have its name."""
    asked, outputs = prompts(3), []
    long = GREEDY | {"max_new_tokens": 60}
    stream = engine.generate(input_ids=asked[0], sampling_params=long, lora_path="a", stream=True)
    chunks = [next(stream)]  # type: ignore[arg-type]
    unloading = threading.Thread(target=lambda: outputs.append(engine.unload_lora_adapter("a")), daemon=True)
    unloading.start()
    chunks += stream  # type: ignore[arg-type]  # none if the first one has all tokens, as on a busy machine
    last = chunks[-1]
    unloading.join(120)
    assert last["meta_info"]["finish_reason"]["type"] == "length" and len(last["output_ids"]) == 60
    assert outputs[0].success and set(outputs[0].adapters) == {"b", "c"}
    with pytest.raises(InputError, match=r"no LoRA adapter of this name is loaded \(loaded: b, c\)"):
        engine.generate(input_ids=asked[1], sampling_params=GREEDY, lora_path="a")
    assert engine.load_lora_adapter("a", str(served.adapters[1])).success
    compare(served, engine, ["a", "b", None], [2, 2, 0])
    wrong = engine.load_lora_adapter("d", str(served.path))
    assert not wrong.success and "adapter_config.json" in wrong.message
    compare(served, engine, ["c"], [3])


def test_groups_compute_no_tokens_of_others(served: Served) -> None:
    with pytest.raises(ConfigError, match=r"--moe-dense-tp-size 1 and an --moe-a2a-backend"):
        Engine(str(served.path), lora_paths=served.lora_paths, tp_size=2, dp_size=2, enable_dp_attention=True, **FLAGS)


def test_paths(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-lora-rank 3: an adapter of --lora-paths has rank 6"):
        Engine(str(served.path), lora_paths=served.lora_paths, max_lora_rank=3, **FLAGS)
