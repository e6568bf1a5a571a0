"""Custom logit processors in an engine: every draft position gets its own tokens, and an error ends only its
request."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from moe_engine import custom_logit_processor
from moe_engine.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor, load
from tests.engine.harness import InProcessEngine, Scripted
from tests.speculation.agreeing import agreeing_checkpoint

VOCAB_SIZE, ORDINARY = 320, 250
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
    "tree": {"speculative_algorithm": "NEXTN", **TREE},
}


class Counting(CustomLogitProcessor):
    """Allows the tokens below `limit` except those that the sum of all earlier tokens forbids."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        assert custom_param_list is not None and len(custom_param_list) == len(logits)
        for row, params in enumerate(custom_param_list):
            request = params["__req__"]
            logits[row, params["limit"] :] = -float("inf")
            logits[row, forbidden(request.origin_input_ids, request.output_ids) :: 3] = -float("inf")
        return logits


class Failing(CustomLogitProcessor):
    """Raises at the fourth output of requests with `fails`."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        for params in custom_param_list or ():
            if params["fails"] and len(params["__req__"].output_ids) == 3:
                raise ZeroDivisionError("fourth output")
        return logits


def forbidden(prompt: list[int], outputs: list[int]) -> int:
    return (sum(prompt) + 7 * sum(outputs)) % 3


@pytest.fixture(autouse=True)
def plain_pickle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Classes of importable modules, for which pickle and dill write the same bytes."""
    monkeypatch.setattr(custom_logit_processor, "_dill", lambda: pickle)
    load.cache_clear()
    yield
    load.cache_clear()


@pytest.fixture(scope="module", params=FORMS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessEngine]:
    folder = tmp_path_factory.mktemp(request.param)
    path = agreeing_checkpoint("deepseek_v3", folder / "model", random.randrange(1 << 20), num_mtp_layers=1)
    limits = {"dtype": "float32", "page_size": 4, "max_total_tokens": 2048, "max_running_requests": 8}
    engine = InProcessEngine(path, Path(folder / "board"), cpu_threads=1, **limits, **FORMS[request.param])
    yield engine
    engine.close()


def make_script(processor: type[CustomLogitProcessor], params: dict[str, Any]) -> list[Scripted]:
    """Every second request has the processor."""
    rng = random.Random(random.getrandbits(64))
    script = []
    for i in range(6):
        own = [rng.randrange(ORDINARY) for _ in range(rng.randint(1, 30))]
        fields = {"custom_logit_processor": processor.to_str(), "custom_params": params} if i % 2 else {}
        sampling = {"temperature": 0.0, "ignore_eos": True, **fields}
        script.append(Scripted(f"r{i}-", own * 2, max_new_tokens=20, arrives=rng.randint(0, 6), sampling=sampling))
    return script


def without(script: list[Scripted]) -> list[Scripted]:
    return [replace(item, sampling={"temperature": 0.0, "ignore_eos": True}) for item in script]


def test_each_position_sees_its_tokens(engine: InProcessEngine) -> None:
    script = make_script(Counting, {"limit": 5})
    found = engine.run(script, chunked_prefill_size=16)
    if engine.scheduler.speculator is not None:
        assert sum(engine.scheduler.stats().speculation.accepted) > 0
    plain = engine.run(without(script))
    for item in script:
        tokens = found[item.rid].token_ids
        if "custom_params" not in item.sampling:
            assert tokens == plain[item.rid].token_ids
            continue
        for i, token in enumerate(tokens):
            assert token < 5 and (token - forbidden(item.prompt_ids, tokens[:i])) % 3


def test_cached_prefixes_are_read(engine: InProcessEngine) -> None:
    script = make_script(Counting, {"limit": 9})
    cold = engine.run(script)
    warm = engine.run(without(script) + [replace(item, rid=f"w{item.rid}", arrives=60) for item in script])
    assert any(warm[f"w{item.rid}"].cached_tokens for item in script)
    for item in script:
        assert warm[f"w{item.rid}"].token_ids == cold[item.rid].token_ids


def test_an_error_ends_its_request_only(engine: InProcessEngine) -> None:
    script = make_script(Failing, {"fails": True})
    script[1].sampling["custom_params"] = {"fails": False}
    found, plain = engine.run(script), engine.run(without(script))
    for i, item in enumerate(script):
        answer = found[item.rid]
        if i in (3, 5):
            assert answer.finish is not None and answer.finish["status_code"] == 400
            assert "Failing raised ZeroDivisionError: fourth output" in answer.finish["message"]
            assert answer.token_ids == plain[item.rid].token_ids[:3]
        else:
            assert answer.token_ids == plain[item.rid].token_ids


def test_fields_that_forbid_every_token_together_are_named(engine: InProcessEngine) -> None:
    """Not the checkpoint, whose NaN would yield the same invalid token."""
    script = make_script(Counting, {"limit": 5})
    script[1].sampling["allowed_token_ids"] = [9, 11]
    script[2].sampling |= {"stop_token_ids": [9, 11], "allowed_token_ids": [9, 11], "min_new_tokens": 2}
    found, plain = engine.run(script), engine.run(without(script))
    for i, names in ((1, "allowed_token_ids, custom_logit_processor"), (2, "allowed_token_ids, min_new_tokens")):
        finish = found[script[i].rid].finish
        assert finish is not None and finish["status_code"] == 400
        assert finish["message"].startswith(f"no token can be sampled: {names} of the request forbid every token")
    for i in (0, 4):
        assert found[script[i].rid].token_ids == plain[script[i].rid].token_ids


def test_processors_that_cannot_be_loaded(engine: InProcessEngine) -> None:
    script = make_script(DisallowedTokensLogitsProcessor, {"token_ids": [1]})
    script[1].sampling["custom_logit_processor"] = '{"callable": "80"}'
    script[3].sampling["custom_logit_processor"] = '{"callable": "%s"}' % pickle.dumps(len).hex()  # noqa: UP031
    found = engine.run(script)
    messages = [found[script[i].rid].finish["message"] for i in (1, 3)]
    assert "could not be loaded" in messages[0] and "expected a subclass of CustomLogitProcessor" in messages[1]
    assert len(found[script[5].rid].token_ids) == 20


def test_classes_made_for_sglang_load() -> None:
    own = pickle.dumps(DisallowedTokensLogitsProcessor, protocol=0)
    theirs = own.replace(custom_logit_processor.__name__.encode(), custom_logit_processor.SGLANG_MODULE.encode())
    assert theirs != own
    assert load('{"callable": "%s"}' % theirs.hex()) is DisallowedTokensLogitsProcessor  # noqa: UP031


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"callable": "xy"}', '{"callable": 5}'])
def test_other_texts_are_refused_before_anything_is_executed(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected CustomLogitProcessor.to_str"):
        custom_logit_processor.pickled_bytes(text)
