"""Greedy tokens of the runner, under random scheduling, equal those of transformers' generate."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moe_engine.kernels.backends import FAMILIES, LaunchKernels, plan_kernels
from moe_engine.kernels.device import cpu_device
from moe_engine.models.config_file import load_model_config
from moe_engine.models.needs import need_of_model
from moe_engine.types import LogprobSpec, NewRow, SamplingParams, StepPlan
from moe_engine.worker.options import WorkerOptions
from moe_engine.worker.worker import Worker
from tests.models.checkpoints import make_checkpoint
from tests.worker.plan_driver import PlanDriver, Sequence_

KINDS = ("deepseek_v3", "deepseek_v2_lite", "qwen3_moe", "llama")
NUM_NEW = 12


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), tokenizer=False)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def worker(checkpoint: Path):
    config = load_model_config(checkpoint)
    options = WorkerOptions(
        model_path=str(checkpoint),
        model=config,
        kernels=LaunchKernels(
            plan_kernels(cpu_device(), need_of_model(config, "float32"), dict.fromkeys(FAMILIES, "torch"))
        ),
        dtype="float32",
        num_slots=1024,
        context_len=128,
        max_rows=6,
        cpu_threads=1,
        absorbed_break_even=6.0,
    )
    worker = Worker.create(options)
    yield worker
    worker.close()


def _prompts(seed: int, count: int) -> list[list[int]]:
    pick = random.Random(seed)
    return [[pick.randrange(256) for _ in range(pick.randint(1, 40))] for _ in range(count)]


def _generate(oracle, prompt: list[int], count: int = NUM_NEW) -> list[int]:
    with torch.no_grad():
        out = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def _greedy_continuation(oracle, prompt: list[int], outputs: list[int], eos: int) -> list[int]:
    """The greedy token after each prefix of prompt + outputs: equal to `outputs` only if every one is greedy."""
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + outputs])).logits[0, len(prompt) - 1 : -1]
    logits[:, eos] = -torch.inf
    return logits.argmax(-1).tolist()


def test_generates_what_transformers_generates(checkpoint: Path, oracle, worker: Worker) -> None:
    eos = frozenset(load_model_config(checkpoint).eos_token_ids)
    sampling = SamplingParams(temperature=0.0, min_new_tokens=NUM_NEW)
    sequences = [Sequence_(prompt, NUM_NEW, sampling, eos=eos) for prompt in _prompts(0, 8)]
    runner = worker.runner
    driver = PlanDriver(
        lambda plan: worker.execute(plan).result(), runner.kv_pool, 6, seed=1, retract=0.05, repoint=0.1
    )
    driver.run(sequences)
    assert sequences[0].outputs == _generate(oracle, sequences[0].prompt)
    for s in sequences:
        assert s.outputs == _greedy_continuation(oracle, s.prompt, s.outputs, *eos)


def test_logprobs_are_those_of_the_model(oracle, worker: Worker) -> None:
    spec = LogprobSpec(start=0, top=3, token_ids=(7, 300))
    sequences = [Sequence_(prompt, 4, logprobs=spec) for prompt in _prompts(3, 5)]
    driver = PlanDriver(lambda plan: worker.execute(plan).result(), worker.runner.kv_pool, 6, seed=2)
    driver.run(sequences)
    for s in sequences:
        with torch.no_grad():
            logprobs = oracle(torch.tensor([s.tokens])).logits[0].float().log_softmax(-1)
        entries = s.prompt_logprobs + s.output_logprobs
        assert [e.token_id for e in entries] == s.tokens
        assert entries[0].logprob is None and entries[0].top == ()
        for position, entry in enumerate(entries[1:], 1):
            row = logprobs[position - 1]
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=2e-3)
            assert [v for _, v in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=2e-3)
            assert entry.asked == pytest.approx([row[t].item() for t in spec.token_ids], abs=2e-3)


def test_steps_may_be_submitted_before_results(oracle, worker: Worker) -> None:
    """Decodes read their token on the device: five steps are queued before the first result is read."""
    prompt = _prompts(4, 1)[0]
    count = len(prompt)
    sampling = SamplingParams(temperature=0.0, min_new_tokens=NUM_NEW)
    new = NewRow(2, "r", prompt, count, [], sampling, 0, frozenset(worker.runner.model.config.eos_token_ids))
    plans = [StepPlan(0, [2], [0], [count], [True], list(range(9, 9 + count)), 0, prompt, [new])]
    plans += [StepPlan(i, [2], [count + i - 1], [1], [True], [500 + i], 1) for i in range(1, 6)]
    futures = [worker.execute(plan) for plan in plans]
    tokens = [token for future in futures for token in future.result().tokens[0]]
    assert tokens == _generate(oracle, prompt, 6)
