"""Every form of parallelism with every other feature: the tokens of a single rank.

A case is one value of each factor below. It serves requests on a tiny random checkpoint with several ranks, compared
with the same requests on one rank, without drafts, chunks, limits or aborts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_engine import Engine
from tests.distributed.engine.near_ties import possible_tokens
from tests.models.checkpoints import make_checkpoint
from tests.speculation.agreeing import agreeing_checkpoint

Case = Mapping[str, Any]

DISPATCHERS = ("allgather", "all_to_all", "shared_memory")
FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (2, 4, 8),
    "attention": ("tp", "dp", "groups of 2"),  # heads over all ranks; one group per rank; both
    "experts": ("cut", "ep", "ep of 2", *DISPATCHERS),  # by width, over all ranks, both, and with dispatch
    "overlapped": ("none", "two", "single"),  # batches, during dispatch
    "replicas": (1, 2),
    "model": ("deepseek_v3", "qwen3_moe", "qwen3", "llama"),
    "lm_head": ("all", "group"),
    "dense": ("cut", "whole"),
    "drafts": ("none", "nextn", "ngram"),
    "chunk": (-1, 16),
    "mixed": (False, True),
    "page": (1, 4, 16),
    "radix": (True, False),
    "overlap": (True, False),
    "pool": ("ample", "tiny"),
}
HEADS: dict[str, Any] = {"num_attention_heads": 8}
LOGPROB_TOLERANCE = 1e-4
ORDINARY = 250  # token ids from here on are special
LONGEST_PROMPT, RUNNING = 32, 16
SERVE_SECONDS = 240.0


def allowed(case: Case) -> bool:
    """True if a partial case can be completed."""
    attention, experts = case.get("attention", "tp"), case.get("experts", "cut")
    tp_size = case.get("ranks", 8) // case.get("replicas", 1)
    if tp_size == 1 and (attention, experts, case.get("dense", "cut")) != ("tp", "cut", "cut"):
        return False
    if tp_size < 4 and (attention == "groups of 2" or experts == "ep of 2"):
        return False
    if case.get("model", "deepseek_v3") in ("qwen3", "llama") and experts != "cut":
        return False
    drafts = case.get("drafts", "none")
    if drafts == "nextn" and case.get("model", "deepseek_v3") != "deepseek_v3":
        return False
    if case.get("overlapped", "none") != "none":
        if case.get("experts", "allgather") not in DISPATCHERS or not allowed({**case, "overlapped": "none"}):
            return False
        return allowed({**case, "overlapped": "none", "experts": "allgather"})
    if case.get("lm_head") == "group" and (case.get("attention") == "tp" or tp_size == 1):
        return False
    return not (case.get("mixed") and case.get("chunk") == -1)


def flags_of(case: Case, tiny_pool: int) -> dict[str, Any]:
    """The engine flags of a case."""
    tp_size = case["ranks"] // case["replicas"]
    groups = {"tp": 1, "dp": tp_size, "groups of 2": tp_size // 2}[case["attention"]]
    flags: dict[str, Any] = {"tp_size": tp_size, "dp_size": case["replicas"], "attn_dp_size": groups}
    experts = case["experts"]
    if experts in DISPATCHERS:
        flags["moe_a2a_backend"] = experts
    else:
        flags["ep_size"] = {"cut": 1, "ep": tp_size, "ep of 2": 2}[experts]
    if case["overlapped"] != "none":
        flags[f"enable_{case['overlapped']}_batch_overlap"] = True
    if case["dense"] == "whole":
        flags["moe_dense_tp_size"] = 1
    if case["drafts"] != "none":
        flags |= {"speculative_algorithm": case["drafts"].upper(), "speculative_num_steps": 2}
        if case["drafts"] == "nextn":
            flags |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
    chunk, page = case["chunk"], case["page"]
    flags |= {
        "enable_dp_lm_head": case["lm_head"] == "group" and groups > 1,
        "chunked_prefill_size": chunk if chunk == -1 else chunk * groups,  # shared by the groups
        "enable_mixed_chunk": case["mixed"],
        "page_size": page,
        "disable_radix_cache": not case["radix"],
        "disable_overlap_schedule": not case["overlap"],
    }
    if case["pool"] == "tiny":  # and admits far too many requests
        running = min(RUNNING, tiny_pool // page)
        flags |= {"max_total_tokens": tiny_pool, "schedule_conservativeness": 0.0, "max_running_requests": running}
    return flags


@dataclass(frozen=True)
class Wanted:
    """A request; `aborted_after`: number of tokens before its abort. `late`: sent alone, after all others have
    ended."""

    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    prompt_logprobs: bool = False
    aborted_after: int | None = None
    late: bool = False


@dataclass
class Answer:
    """Log-probabilities of the tokens, and of the prompt's tokens except the first."""

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    finish: str


@dataclass
class Outcome:
    """Result of a case. `differences`: description by request id."""

    differences: dict[str, str]
    retractions: int
    aborted: int
    used_schedulers: int
    """Schedulers that served at least one request."""
    tokens_drafted: int
    largest_logprob_error: float
    problems: list[Any] = field(default_factory=list)
    """Integrity problems of the schedulers at the end."""
    rebalances: int = 0


class Forms:
    """The checkpoints, the requests, and the answers of one rank, shared by cases."""

    def __init__(self, folder: Path, num_prompts: int, num_tokens: int, seed: int) -> None:
        self._folder, self._seed = folder, seed
        a_request = num_tokens + LONGEST_PROMPT + 24  # the longest request, with a margin
        self._tiny_pool = round(max(1.5, num_prompts // 16) * a_request / 16) * 16
        self._expected: dict[str, dict[str, Answer]] = {}
        self._requests = make_requests(num_prompts, num_tokens, seed)

    def run(self, case: Case, **more: Any) -> Outcome:
        """Args: more: further flags of the engine."""
        model = case["model"]
        expected = self._alone(model)
        with self._engine(model, **flags_of(case, self._tiny_pool), **more) as engine:
            found = asyncio.run(serve(engine, self._requests))
            states = engine.get_server_info()["internal_states"]
            problems = engine._loop.run(engine._frontend.client.call("check_integrity"))
        differences, error = compare(self._requests, found, expected, lambda *draw: self._near_tie(model, *draw))
        speculation = [state["speculation"] for state in states if state.get("speculation")]
        return Outcome(
            differences,
            retractions=sum(state["num_retractions_total"] for state in states),
            aborted=sum(answer.finish == "abort" for answer in found.values()),
            used_schedulers=sum(state["generation_tokens_total"] > 0 for state in states),
            tokens_drafted=sum(sum(state["proposed"]) for state in speculation),
            largest_logprob_error=error,
            problems=[problem for part in problems for problem in part],
            rebalances=sum(state.get("eplb", {}).get("rebalances", 0) for state in states),
        )

    def _near_tie(self, model: str, want: Wanted, before: list[int], tokens: set[int]) -> bool:
        return tokens <= possible_tokens(self._folder / model, want.prompt + before, want.sampling)

    def _alone(self, model: str) -> dict[str, Answer]:
        if model not in self._expected:
            whole = [Wanted(want.rid, want.prompt, want.sampling, want.prompt_logprobs) for want in self._requests]
            with self._engine(model) as engine:
                self._expected[model] = asyncio.run(serve(engine, whole))
        return self._expected[model]

    def _engine(self, model: str, **flags: Any) -> Engine:
        path = self._folder / model
        if not path.exists():
            if model == "deepseek_v3":  # MTP drafts that are often accepted
                agreeing_checkpoint(model, path, self._seed, num_mtp_layers=2, num_key_value_heads=8, **HEADS)
            else:
                make_checkpoint(model, path, self._seed, **HEADS)
        plain = {"max_total_tokens": 8192, "max_running_requests": RUNNING, "dtype": "float32"}
        return Engine(str(path), **{**plain, **flags}, cpu_threads=1, skip_tokenizer_init=True)


def make_requests(num_prompts: int, num_tokens: int, seed: int) -> list[Wanted]:
    """Prompts of all lengths, some with a common prefix; greedy and sampled; some are aborted, one runs alone."""
    rng = random.Random(seed)
    prefix = [rng.randrange(ORDINARY) for _ in range(LONGEST_PROMPT // 2)]
    requests = []
    for i in range(num_prompts):
        own = [rng.randrange(ORDINARY) for _ in range(rng.randint(1, LONGEST_PROMPT // 2))]
        own = (own + own)[: LONGEST_PROMPT // 2]  # a repetition for n-gram drafts
        sampling: dict[str, Any] = {
            "max_new_tokens": num_tokens if i % 4 else rng.randint(1, num_tokens), "ignore_eos": i % 4 > 0,
        }  # fmt: skip
        if i % 2:
            sampling |= {"temperature": 0.9, "top_p": rng.choice([1.0, 0.9]), "sampling_seed": rng.getrandbits(40)}
        else:
            sampling["temperature"] = 0.0
        aborted = None
        if i % 8 == 5:
            aborted = rng.randint(1, num_tokens // 4)
            sampling |= {"max_new_tokens": num_tokens + LONGEST_PROMPT // 4, "ignore_eos": True}
        prompt = prefix + own if i % 3 == 0 else own
        requests.append(Wanted(f"r{i}-", prompt, sampling, i % 5 == 0, aborted, late=i == num_prompts - 1))
    return requests


async def serve(engine: Engine, requests: list[Wanted]) -> dict[str, Answer]:
    """Serves all requests concurrently, then the late ones."""
    async with asyncio.timeout(SERVE_SECONDS):
        answers: list[Answer] = []
        for late in (False, True):
            answers += await asyncio.gather(*(_serve_one(engine, want) for want in requests if want.late == late))
    order = [want.rid for late in (False, True) for want in requests if want.late == late]
    return dict(zip(order, answers))


async def _serve_one(engine: Engine, want: Wanted) -> Answer:
    request: dict[str, Any] = {"rid": want.rid, "input_ids": want.prompt, "sampling_params": want.sampling}
    request |= {"return_logprob": True, "logprob_start_len": 0 if want.prompt_logprobs else -1}
    if want.aborted_after is None:
        return _answer(await engine.async_generate(**request))
    last: Any = None
    asked = False
    async for last in await engine.async_generate(**request, stream=True):  # type: ignore[union-attr]
        if len(last["output_ids"]) >= want.aborted_after and not asked:
            asked = True
            engine.abort_request(want.rid)
    return _answer(last)


def _answer(output: Any) -> Answer:
    meta = output["meta_info"]
    prompt = [entry[0] for entry in meta.get("input_token_logprobs") or []][1:]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    return Answer(output["output_ids"], logprobs, prompt, meta["finish_reason"]["type"])


def compare(
    requests: list[Wanted],
    found: dict[str, Answer],
    expected: dict[str, Answer],
    near_tie: Callable[[Wanted, list[int], set[int]], bool],
) -> tuple[dict[str, str], float]:
    """Differences by request id, and the largest difference of a log-probability. A near tie ends the comparison of
    its request: the tokens after it have other contexts."""
    differences, largest = {}, 0.0
    for want in requests:
        got, right = found[want.rid], expected[want.rid]
        count = len(got.tokens) if got.finish == "abort" and want.aborted_after is not None else len(right.tokens)
        other = next((i for i, (a, b) in enumerate(zip(got.tokens, right.tokens)) if a != b), count)
        if other < count and near_tie(want, right.tokens[:other], {got.tokens[other], right.tokens[other]}):
            got, count = Answer(got.tokens[:other], got.logprobs[:other], got.prompt_logprobs, got.finish), other
        pairs = [*zip(got.logprobs, right.logprobs[:count]), *zip(got.prompt_logprobs, right.prompt_logprobs)]
        error = max((abs(a - b) for a, b in pairs), default=0.0)
        if got.tokens != right.tokens[:count]:
            differences[want.rid] = f"{got.tokens} is not {right.tokens[:count]}: token {other}"
        elif len(got.logprobs) != count or len(got.prompt_logprobs) != len(right.prompt_logprobs):
            differences[want.rid] = f"{len(got.logprobs)} and {len(got.prompt_logprobs)} log-probabilities"
        elif want.prompt_logprobs and len(got.prompt_logprobs) != len(want.prompt) - 1:
            differences[want.rid] = f"{len(got.prompt_logprobs)} of {len(want.prompt) - 1} prompt log-probabilities"
        elif error > LOGPROB_TOLERANCE:
            differences[want.rid] = f"a log-probability differs by {error:.2e}"
        else:
            largest = max(largest, error)
    return differences, largest
