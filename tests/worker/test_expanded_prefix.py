"""Decodes with a shared prefix attend to its expanded keys and values: the same tokens, and never a stale copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_engine.kernels.decoder.shared_prefix import BLOCK
from moe_engine.kernels.queries import PagedQueries, SharedRun
from moe_engine.worker.batch.expanded_prefix import LEAST_MEMBERS, ExpandedPrefix, Layers
from moe_engine.worker.memory_release import MemoryRelease, ReleaseArgs
from moe_engine.worker.weight_update import CheckpointArgs
from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint

WIDE = {"kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
"""Widths with a latent wide enough for the expanded form."""


class Engine:
    """An engine that notes the lengths and the members of the prefixes of its decode steps."""

    def __init__(self, path: Path, folder: Path, **flags: Any) -> None:
        settings = {"dtype": "float32", "cpu_threads": 1, "max_total_tokens": 4096, "max_running_requests": 32}
        self.engine = InProcessEngine(path, folder / "board", **settings | flags)
        self.fused = self.engine.worker.runner.fused
        if self.fused is None:
            self.engine.close()
            pytest.skip("no kernel here runs a decoder in one call (no C++ compiler)")
        self.prefixes = self.fused.prefixes
        self.used: list[tuple[int, int]] = []
        self.expanded: list[int] = []
        self.known: list[int] = []
        """Lengths that were expanded for decodes, and those that prompts knew."""
        if self.prefixes is not None:
            of, expand, of_prompts = self.prefixes.of, self.prefixes._expand, self.prefixes.of_prompts

            def expanding(slots: np.ndarray) -> Any:
                self.expanded.append(len(slots))
                return expand(slots)

            def knowing(prompts: Any) -> Any:
                found = of_prompts(prompts)
                if found is not None and found.run is not None:
                    self.known.append(found.length)
                return found

            def noted(rows: np.ndarray, positions: np.ndarray) -> Any:
                prefix = of(rows, positions)
                self.used.append((0, 0) if prefix is None else (prefix.length, len(prefix._requests)))
                return prefix

            self.prefixes.of, self.prefixes._expand = noted, expanding  # type: ignore[method-assign]
            self.prefixes.of_prompts = knowing  # type: ignore[method-assign]

    def run(self, script: list[Scripted], expanded: bool = True, **limits: Any) -> dict[str, list[int]]:
        assert self.fused is not None
        self.fused.prefixes, self.fused._shares, self.used = self.prefixes if expanded else None, False, []
        return {rid: answer.token_ids for rid, answer in self.engine.run(script, **limits).items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expanded") / "model"
    return make_checkpoint("deepseek_v3", folder, seed=5, max_position_embeddings=1024, **WIDE)


@pytest.fixture
def engine(path: Path, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(path, tmp_path)
    yield made
    made.engine.close()


def _script(lengths: list[int], seed: int, new: int = 12, **more: Any) -> list[Scripted]:
    """Two requests that compute the prefix first; then one for each of `lengths`, its tokens of the common text."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(20, 250, (count,), generator=generator).tolist()

    common = draw(max(lengths))
    first = [Scripted(rid="first-", prompt_ids=common + draw(3), max_new_tokens=4 * new, seed=0)]
    return first + [
        Scripted(
            rid=f"r{i}-", prompt_ids=common[:length] + draw(2 + i % 5), max_new_tokens=new + 3 * (i % 4),
            arrives=3 + i // 6 * 2, seed=i + 1,
        )
        for i, length in enumerate(lengths)
    ]  # fmt: skip


@pytest.mark.parametrize("lengths", [[140] * 17, [128] * 20, [130] * 4 + [200] * 17, [600] * 16 + [20] * 4], ids=str)
def test_tokens_are_those_of_transformers(lengths: list[int], path: Path, engine: Engine) -> None:
    """Requests join and leave; some are not members."""
    from transformers import AutoModelForCausalLM

    script = _script(lengths, seed=sum(lengths))
    found = engine.run(script)
    assert max(engine.used)[0] >= min(lengths) // BLOCK * BLOCK and max(n for _, n in engine.used) >= LEAST_MEMBERS
    assert found == engine.run(script, expanded=False)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for item in script:
        tokens = found[item.rid]  # equal to the best token after each prefix only if all are greedy
        with torch.no_grad():
            logits = oracle(torch.tensor([item.prompt_ids + tokens[:-1]])).logits[0, len(item.prompt_ids) - 1 :]
        assert tokens == logits.argmax(-1).tolist(), item.rid


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_fp8_cache(dtype: str, path: Path, tmp_path: Path) -> None:
    made = Engine(path, tmp_path, dtype=dtype, kv_cache_dtype="fp8_e4m3", max_running_requests=24)
    found, want = (made.run(_script([140] * 18, seed=3), expanded) for expanded in (True, False))
    made.engine.close()
    if dtype == "float32":
        assert found == want
    assert found.keys() == want.keys()


def test_reused_slots_are_expanded_again(engine: Engine) -> None:
    """New prefixes in the slots of older ones, with a KV pool that evicts and retracts."""
    for seed in range(6):
        script = _script([128 + 10 * (seed % 3)] * 19, seed=100 + seed, new=30)
        limits = {"num_slots": 480} if seed % 2 else {}
        assert engine.run(script, **limits) == engine.run(script, expanded=False, **limits), seed


def test_new_weights_expand_a_prefix_again(engine: Engine, tmp_path: Path) -> None:
    """Requests may go on while the weights are replaced, or the KV cache is given back."""
    other = make_checkpoint("deepseek_v3", tmp_path / "other", seed=6, max_position_embeddings=1024, **WIDE)
    weights, script = engine.engine.worker.weights, _script([128] * 18, seed=2)
    assert weights is not None and engine.prefixes is not None
    for change in ("weights", "kv_cache"):
        engine.run(script)
        assert engine.prefixes.prefix is not None and engine.prefixes._layers
        if change == "weights":
            weights.stage(CheckpointArgs(str(other)))
            weights.commit()
        else:
            MemoryRelease(engine.engine.worker.runner, weights).release(ReleaseArgs(["kv_cache"]))
        assert engine.prefixes.prefix is None and not engine.prefixes._layers


def test_the_ledger_has_the_largest_prefix(engine: Engine) -> None:
    (row,) = [row for row in engine.engine.config.ledger.rows if row.name == "expanded prefix"]
    engine.run(_script([600] * 17, seed=1))
    assert engine.fused is not None and engine.prefixes is not None
    prefix = engine.prefixes.prefix
    assert prefix is not None and prefix.length == 600 // BLOCK * BLOCK
    held = sum(part.nbytes for layer in prefix.layers for part in layer)
    limit = min(engine.prefixes._most, engine.engine.config.context_len // BLOCK * BLOCK)
    assert row.num_bytes == held // prefix.length * limit


def test_deterministic_inference_keeps_one_form(path: Path, tmp_path: Path) -> None:
    made = Engine(path, tmp_path, enable_deterministic_inference=True)
    assert made.prefixes is None
    assert "expanded prefix" not in [row.name for row in made.engine.config.ledger.rows]
    made.engine.close()


class _Rows:
    def __init__(self, table: np.ndarray) -> None:
        self.slots_on_host = table
        self.owners = np.zeros(len(table), dtype=np.int64)


def test_a_prefix_lives_as_long_as_a_request_of_its_last_use() -> None:
    table = np.arange(32 * 200, dtype=np.int32).reshape(32, 200)
    table[:, :130] = table[0, :130]
    made: list[np.ndarray] = []
    rows = _Rows(table)

    def expand(slots: np.ndarray) -> Layers:
        made.append(slots)
        return {0: (torch.zeros(len(slots), 2, 4), torch.zeros(len(slots), 1))}

    prefixes = ExpandedPrefix(rows, expand, 1024, 1)  # type: ignore[arg-type]

    def use(listed: list[int]) -> list[int] | None:
        found = prefixes.of(np.array(listed), np.full(len(listed), 150))
        return None if found is None else found._requests.tolist()

    assert use(list(range(20))) == list(range(20)) and len(made[0]) == 128
    assert use([25, *range(2, 22)]) == list(range(21)) and len(made) == 1, "others joined, some left"
    assert use([3, 4]) is None, "too few members"
    assert use(list(range(3, 23))) is not None and len(made) == 1, "the copy was kept by those two"
    rows.owners += 1  # all requests have ended; the same slots may hold other tokens
    assert use(list(range(20))) is not None and len(made) == 2
    assert use([24, *range(22)]) is not None and len(made) == 2
    table[23] += 1000
    assert use([23]) is None and use([22, *range(20)]) is not None and len(made) == 2, "a step without its requests"
    table[:, 0] += 1000
    assert use(list(range(20))) is not None and len(made) == 3, "its requests have moved to other slots"


def _prompts(rows: list[int], length: int, shared: Sequence[SharedRun] = ()) -> PagedQueries:
    count, ints = len(rows), torch.tensor(rows, dtype=torch.int32)
    return PagedQueries([4] * count, [length] * count, ints, ints, ints, ints[None], 1, shared=shared)


def test_a_lone_prompt_is_kept_for_requests_that_share_it() -> None:
    table = np.arange(32 * 200, dtype=np.int32).reshape(32, 200)
    table[:, :130] = table[0, :130]
    rows = _Rows(table)
    prefixes = ExpandedPrefix(rows, lambda slots: pytest.fail("expanded again"), 160, 1)  # type: ignore[arg-type]
    layer = torch.randn(150, 2, 4), torch.randn(150, 1)

    def keep(row: int, length: int = 150) -> bool:
        found = prefixes.of_prompts(_prompts([row], length))
        if found is not None:
            assert found.run is None and not found.layers
            found.layers[0] = layer
        return found is not None

    run = SharedRun(0, 20, 130)
    assert keep(20) and not keep(21, 161) and not keep(21, 63)
    found = prefixes.of_prompts(_prompts(list(range(20)), 150, [run]))
    assert found is not None and (found.run, found.length) == (run, 130) and found.layers[0] is layer
    used = prefixes.of(np.arange(21), np.full(21, 150))
    assert used is not None and used.length == 128 and used.layers[0][0].data_ptr() == layer[0].data_ptr()
    assert not keep(22), "decodes read the prefix"
    rows.owners[:21] += 1
    assert prefixes.of_prompts(_prompts(list(range(20)), 150, [run])) is None, "all its requests have ended"
    assert keep(22) and prefixes.of_prompts(_prompts([25], 150)) is not None, "a later prompt takes its place"
    assert prefixes.of_prompts(_prompts(list(range(20)), 150, [run])) is None, "the step of that prompt failed"
    table[5:20, 129] += 1000
    assert keep(22)
    found = prefixes.of_prompts(_prompts(list(range(20)), 150, [SharedRun(0, 20, 129)]))
    assert found is not None and found.length == 129


def test_prompts_know_the_prefix_of_the_first_one(path: Path, engine: Engine) -> None:
    """Neither the prompts after the first one nor their decodes expand its tokens again."""
    script = _script([200] * 18, seed=8)
    found = engine.run(script)
    assert engine.known and set(engine.known) == {200} and not engine.expanded and (128, 19) in engine.used
    assert found == engine.run(script, expanded=False)
