"""Log-probabilities from the worker to the frontend: packed, so that every step creates few objects."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_engine.core import deltas as core
from moe_engine.core import messages
from moe_engine.errors import InputError
from moe_engine.frontend import inbox
from moe_engine.frontend.dp_routing import Load
from moe_engine.frontend.frontend import Frontend, FrontendSettings
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.inbox import Inbox
from moe_engine.frontend.logprob_format import LogprobOptions, PythonLogprobs, extend
from moe_engine.scheduler import Scheduler, SchedulerConfig
from moe_engine.types import LogprobSpec, PackedLogprobs, Request, SamplingParams, StepPlan, StepResult
from moe_engine.worker.batch.request_rows import PromptLogprobs
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.logprobs import PendingLogprobs, prompt_logprobs, token_logprobs
from tests.logprobs import Entry, pack, unpack
from tests.server.fake_engine import FakeClient

STREAM = DeviceStream("cpu")
VOCAB = 3000


def num_objects(value: Any) -> int:
    """Number of Python objects in a value; bytes count as one."""
    if isinstance(value, (list, tuple, set)):
        return 1 + sum(map(num_objects, value))
    if isinstance(value, dict):
        return 1 + sum(num_objects(item) for pair in value.items() for item in pair)
    if dataclasses.is_dataclass(value):
        return 1 + sum(num_objects(getattr(value, item.name)) for item in dataclasses.fields(value))
    if hasattr(value, "__struct_fields__"):
        return 1 + sum(num_objects(getattr(value, name)) for name in value.__struct_fields__)
    return 1


def entries(rng: random.Random, count: int, best: int, asked: int) -> list[Entry]:
    def value() -> float:
        return -rng.randrange(1, 1 << 20) / 1024  # exact in float32

    return [
        Entry(
            rng.randrange(VOCAB),
            value(),
            tuple((rng.randrange(VOCAB), value()) for _ in range(best)),
            tuple(value() for _ in range(asked)),
        )
        for _ in range(count)
    ]


# -- packed blocks


@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_splitting_and_joining_blocks_is_lossless(count: int, best: int, asked: int, rng: random.Random) -> None:
    found = entries(rng, count, best, asked)
    block = pack(found)
    assert block.num_tokens == count and unpack(block) == found
    cuts = sorted(rng.sample(range(count + 1), rng.randrange(count + 1)))
    parts = [block.part(a, b) for a, b in zip([0, *cuts], [*cuts, count])]
    assert PackedLogprobs.join(parts) == block
    assert [entry for part in parts for entry in unpack(part)] == found


def test_uncomputed_entries_survive_split_and_join() -> None:
    block = pack([Entry(4, None), Entry(5, -1.0, ((1, -2.0),), (-3.0,))], best=1, num_asked=1)
    assert unpack(block) == [Entry(4, None), Entry(5, -1.0, ((1, -2.0),), (-3.0,))]
    assert unpack(block.part(1, 2)) == [Entry(5, -1.0, ((1, -2.0),), (-3.0,))]


# -- worker, scheduler, core: few objects


def step(best: int, asked: int, prompt: int) -> StepResult:
    """The worker's result of a step of two requests, one with its prompt's log-probabilities too."""
    generator = torch.Generator().manual_seed(best)
    spec = LogprobSpec(0, best, tuple(range(asked)))
    logits = torch.randn(2, VOCAB, generator=generator)
    packed = PendingLogprobs.start(token_logprobs(logits, torch.tensor([3, 4]), [spec] * 2, STREAM), [spec] * 2, STREAM)
    hidden, ids = torch.randn(prompt, 8, generator=generator), list(range(prompt))
    weights = torch.randn(8, VOCAB, generator=generator)
    wanted = PromptLogprobs(ids, spec, 0)
    pending = prompt_logprobs(0, wanted, 0, hidden, lambda h: h @ weights, len(ids), VOCAB, STREAM)
    assert pending is not None
    return StepResult(1, [0, 1], [[3], [4]], list(packed.take()), {0: pending.take()})


def deltas_of(result: StepResult, prompt: int) -> list[messages.RequestDelta]:
    """The core's messages for this result."""
    scheduler = Scheduler(SchedulerConfig(num_slots=4096, context_len=4096, max_rows=2, max_prefill_tokens=4096))
    for rid in ("a", "b"):
        scheduler.add(Request(rid, list(range(prompt)), SamplingParams(), 9, logprobs=LogprobSpec(0, 1)))
    plan = scheduler.schedule()
    assert isinstance(plan, StepPlan)
    return core.deltas_of(scheduler.update(dataclasses.replace(result, number=plan.number, rows=plan.rows)))


@pytest.mark.parametrize("what", ["best", "asked", "prompt"])
def test_number_of_objects_per_step_is_constant(what: str) -> None:
    counts, sizes = [], []
    for amount in (2, 1000):
        sized = {"best": 2, "asked": 2, "prompt": 20, what: amount}
        result = step(**sized)
        plain = num_objects(result)
        deltas = deltas_of(result, sized["prompt"])
        assert deltas[0].logprobs is not None and result.logprobs is not None
        assert all(delta.logprobs is block for delta, block in zip(deltas, result.logprobs))
        encoded = messages.encode(messages.StepOutput(deltas))
        counts.append((plain, num_objects(deltas), num_objects(messages.decode_from_core(encoded))))
        tokens = 2 + sized["prompt"]
        sizes.append(len(encoded) / (tokens * (8 + 8 * sized["best"] + 4 * sized["asked"])))
    assert counts[0] == counts[1] and max(counts[0]) < 70
    assert sizes[1] < 1.1  # bytes per number of a message: only the numbers


# -- the frontend's inbox


DELTAS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=20)


@given(DELTAS, st.integers(1, 40), st.integers(0, 5), st.randoms(use_true_random=False))
def test_inbox_returns_everything_in_order_and_in_bounded_parts(
    script: list[tuple[int, int]], limit: int, best: int, rng: random.Random
) -> None:
    """Tokens and prompt positions of each delta; the inbox is read at random times."""
    request = messages.AddRequest("r-1", [1], {}, 8, seed=0, return_logprob=True, top_logprobs=best)
    before, inbox.MAX_ENTRIES = inbox.MAX_ENTRIES, limit * (1 + best)

    async def run() -> None:
        box, sent, prompt, got, got_prompt, last = Inbox(request, 0, Load()), [], [], [], [], None  # type: ignore
        for number, (count, of_prompt) in enumerate(script):
            new, of_it = entries(rng, count, best, 0), entries(rng, of_prompt, best, 0)
            finish = {"type": "length"} if number == len(script) - 1 else None
            delta = messages.RequestDelta("r-1", [e.token_id for e in new], finish, cached_tokens=number)
            delta.logprobs = pack(new) if new else None
            delta.prompt_logprobs = pack(of_it) if of_it else None
            sent += new
            prompt += of_it
            box.put(delta)
            while box._parts and (number == len(script) - 1 or rng.random() < 0.3):
                last = await box.get()
                found = unpack(last.logprobs)
                assert [e.token_id for e in found] == last.token_ids
                assert last.prompt_logprobs is None or not last.token_ids
                assert max(len(last.token_ids), len(unpack(last.prompt_logprobs))) <= max(limit, 9)
                assert len(unpack(last.prompt_logprobs)) <= limit
                got += found
                got_prompt += unpack(last.prompt_logprobs)
                assert (last.finish is None) == bool(box._parts or number < len(script) - 1)
        assert (got, got_prompt) == (sent, prompt) and last is not None and last.cached_tokens == len(script) - 1

    try:
        asyncio.run(run())
    finally:
        inbox.MAX_ENTRIES = before


# -- limits


def ask(settings: FrontendSettings, **fields: Any) -> Any:
    client = FakeClient()
    return asyncio.run(Frontend(client, client.tokenizer, settings).generate(GenerateInput(text="x", **fields)))


@pytest.mark.parametrize("limit", [0, 5, 20])
@pytest.mark.parametrize(
    ("where", "fields"),
    [
        ("top_logprobs_num", lambda count: {"top_logprobs_num": count}),
        ("token_ids_logprob", lambda count: {"token_ids_logprob": [1] * count}),
    ],
)
def test_max_logprobs_bounds_what_a_request_may_ask(
    limit: int, where: str, fields: Callable[[int], dict[str, Any]]
) -> None:
    limited = FrontendSettings(max_logprobs=limit)
    assert ask(limited, return_logprob=True, **fields(limit))["meta_info"]["output_token_logprobs"]
    with pytest.raises(
        InputError, match=f"^{where}: {limit + 1} log-prob.* limit of {limit};.*--max-logprobs"
    ) as refused:
        ask(limited, return_logprob=True, **fields(limit + 1))
    assert refused.value.field == where
    many = ask(FrontendSettings(max_logprobs=-1), return_logprob=True, **fields(1500))["meta_info"]
    name = where.removesuffix("_num").removesuffix("_logprob") + ("" if where.endswith("_num") else "_logprobs")
    assert len(many[f"output_{name}"][0]) == 1500
    assert ask(limited, **fields(limit + 1))  # no effect without return_logprob


def test_default_max_logprobs_is_vllms() -> None:
    assert FrontendSettings().max_logprobs == 20


def test_sequences_and_prompt_tokens_of_one_request_are_bounded() -> None:
    client = FakeClient()

    async def prepared(settings: FrontendSettings, **fields: Any) -> int:
        frontend = Frontend(client, client.tokenizer, settings)
        return len((await frontend.prepare(GenerateInput(**fields))).generations)

    few = FrontendSettings(max_sequences=6, max_prompt_tokens=40)
    ids = {"input_ids": [[5] * 10, [6] * 10]}
    assert asyncio.run(prepared(few, **ids, sampling_params={"n": 2})) == 4
    with pytest.raises(InputError, match=r"^text: 8 sequences \(prompts times n\); send at most 6 in one request"):
        asyncio.run(prepared(few, text=["a", "b"], sampling_params={"n": 4}))
    with pytest.raises(InputError, match=r"^input_ids: 60 prompt tokens, counting .* n copies; send at most 40"):
        asyncio.run(prepared(few, **ids, sampling_params={"n": 3}))
    unlimited = FrontendSettings(max_sequences=None, max_prompt_tokens=None)  # as the offline engine has it
    assert asyncio.run(prepared(unlimited, **ids, sampling_params={"n": 100})) == 200


# -- Python objects


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.randoms(use_true_random=False))
def test_python_objects_are_those_of_the_numbers(
    count: int, best: int, asked: int, with_text: bool, rng: random.Random
) -> None:
    found = entries(rng, count, best, asked)
    unknown = rng.randrange(count + 1)
    found[:unknown] = [Entry(entry.token_id, None) for entry in found[:unknown]]
    ids = tuple(range(asked))
    form = PythonLogprobs(LogprobOptions(0, best, ids, with_text), str)
    block, whole = pack(found, best, asked), []  # type: ignore[var-annotated]
    cut = rng.randrange(count + 1)
    for part in (block.part(0, cut), block.part(cut, count)):
        if part.num_tokens:
            extend(whole, form.render(part))

    def entry(token: int, value: float | None) -> list[Any]:
        return [value, token, str(token) if with_text else None]

    expected: dict[str, Any] = {"token_logprobs": [entry(e.token_id, e.logprob) for e in found]}
    if best:
        expected["top_logprobs"] = [[entry(*pair) for pair in e.top] or None for e in found]
    if asked:
        expected["token_ids_logprobs"] = [[entry(*pair) for pair in zip(ids, e.asked)] or None for e in found]
    assert form.fields(whole) == expected
    assert all(values == [] for values in form.fields([]).values())
