"""Random fields of requests on engines with random flags: ``python -m tests.engine.random_requests --count 20``.

Copies, stops, constraints, allowed and bad words, custom logit processors, thinking limits, log-probabilities, hidden
states, experts, adapters, sessions, priorities and streams are drawn together. The answers of an engine with drawn
pages, chunks, memory, drafts, tiers and ranks are those of the requests one by one on a plain engine.
"""

from __future__ import annotations

import asyncio
import base64
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moe_engine import Engine
from moe_engine.errors import ConfigError, GenerationError, InputError
from moe_engine.frontend.grammar_checks import GrammarChecks
from tests.engine import random_forms
from tests.engine.random_forms import EXACT, MTP_KINDS, ORDINARY, TOLERANCE
from tests.engine.test_custom_processors import Counting
from tests.models import random_shapes
from tests.models.checkpoints import KINDS, MORE_KINDS
from tests.models.lora import make_adapter
from tests.models.random_shapes import EXPERTS, Refused, run_draws

SECONDS = 300.0
PLAIN: dict[str, Any] = {
    "dtype": "float32", "cpu_threads": 1, "context_length": 256, "random_seed": 1, "reasoning_parser": "deepseek-r1",
    "enable_custom_logit_processor": True, "device": "cpu",
}  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"regex": r"[a-d]{3,9}(xy|zab)[0-9]{2,30}"}, {"choice": ["abba", "abbey", "zz top"]},
    {"ebnf": 'root ::= "a" | "b" root'},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json_schema": {"enum": ["red", 1, None]}},
)  # fmt: skip


@dataclass
class Case:
    """A checkpoint, flags of an engine, `common` also those of the plain engine, and requests by session."""

    kind: str
    fields: dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    sessions: list[list[dict[str, Any]]] = field(default_factory=list)


def draw(kind: str, rng: random.Random) -> Case:
    fields = random_shapes.draw(kind, rng).fields | {"max_position_embeddings": 512, "vocab_size": 320}
    case = Case(kind, fields)
    page, chunk = rng.choice((1, 1, 2, 4, 16)), rng.choice((-1, 5, 16, 48))
    chunk = chunk if chunk < 0 else -(-chunk // page) * page
    case.flags = {
        "page_size": page, "chunked_prefill_size": chunk, "enable_mixed_chunk": chunk > 0 and rng.random() < 0.5,
        "max_running_requests": rng.choice((2, 5, 12)), "max_total_tokens": rng.choice((160, 192, 256, 2048)),
        "disable_radix_cache": rng.random() < 0.2, "disable_overlap_schedule": rng.random() < 0.3,
        "schedule_conservativeness": rng.choice((0.0, 0.0, 1.0)), "stream_interval": rng.choice((1, 1, 3)),
        "incremental_streaming_output": rng.random() < 0.3,
        "prefill_max_requests": rng.choice((None, None, 1, 2)),
    }  # fmt: skip
    returned = rng.choice(("", "hidden", "experts"))
    if kind in MTP_KINDS or rng.random() < 0.3:
        case.flags |= rng.choice(({}, _drafts(kind, rng))) if not returned else {}
    if returned == "hidden":
        case.common["enable_return_hidden_states"] = True
    elif returned == "experts" and kind in EXPERTS:
        case.common["enable_return_routed_experts"] = True
    if rng.random() < 0.3 and not case.flags["disable_radix_cache"] and returned != "experts":
        case.flags |= {"enable_hierarchical_cache": True, "hicache_ratio": rng.choice((2.0, 6.0))}
    if rng.random() < 0.3:
        threshold = rng.choice((0, 3))
        case.flags |= {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": threshold}
    elif not case.flags["disable_radix_cache"]:
        case.flags["schedule_policy"] = rng.choice(("fcfs", "lpm", "dfs-weight"))
    if rng.random() < 0.25:
        case.flags |= rng.choice(({"dp_size": 2}, {"tp_size": 2}, {"tp_size": 2, "attn_dp_size": 2}))
        if case.flags.get("attn_dp_size") and case.flags["chunked_prefill_size"] > 0:
            case.flags["chunked_prefill_size"] *= 2
        if case.flags.get("attn_dp_size") and case.common.get("enable_return_routed_experts"):
            case.flags["moe_a2a_backend"] = rng.choice(("allgather", "all_to_all"))
    if rng.random() < 0.25:
        case.adapters = tuple(rng.sample(("q_proj", "o_proj", "kv_b_proj", "gate_proj", "up_proj", "down_proj"), 3))
        case.flags["max_loras_per_batch"] = rng.choice((1, 2, 4))
    case.flags = {name: value for name, value in case.flags.items() if value is not None}
    case.sessions = _sessions(case, rng)
    return case


def _drafts(kind: str, rng: random.Random) -> dict[str, Any]:
    if kind not in MTP_KINDS or rng.random() < 0.2:
        return {"speculative_algorithm": "NGRAM", "speculative_num_steps": rng.choice((1, 3))}
    steps, topk = rng.choice((1, 2, 4)), rng.choice((1, 1, 2)) if kind.startswith("deepseek_v3") else 1
    own = {"speculative_algorithm": "NEXTN", "speculative_num_steps": steps, "speculative_eagle_topk": topk}
    return own | {"speculative_num_draft_tokens": 1 + topk + (steps - 1) * topk**2}


def _sessions(case: Case, rng: random.Random) -> list[list[dict[str, Any]]]:
    begin, sessions = [rng.randrange(ORDINARY) for _ in range(30)], []
    for session in range(rng.randint(2, 9)):
        turns, joined = [], rng.random() < 0.3
        for turn in range(rng.randint(1, 3)):
            prompt = begin[: rng.choice((0, 0, 7, 16, 30))] if not turn else []
            prompt = [*prompt, *(rng.randrange(ORDINARY) for _ in range(rng.choice((1, 2, 9, 25))))]
            request = {"rid": f"s{session}.{turn}", "input_ids": prompt, "sampling_params": _sampling(rng)}
            request |= {"stream": rng.random() < 0.5, "return_prompt_token_ids": True} | _returned(case, rng)
            if joined:
                request["sampling_params"].pop("n", None)
                request["session"] = rng.choice((None, None, {"drop_previous_output": True}, {"offset": 3}))
            if rng.random() < 0.15:
                request["require_reasoning"] = True
                request["sampling_params"]["max_thinking_tokens"] = rng.choice((0, 1, 4))
            if case.adapters:
                request["lora_path"] = rng.choice((None, "a", "b"))
            if "enable_priority_scheduling" in case.flags:
                request["priority"] = rng.choice((-3, 0, 4))
            request |= rng.choice(({}, {}, {}, {"extra_key": "x"}, {"cache_salt": "y"}))
            turns.append(request | {"joined": joined})
        sessions.append(turns)
    return sessions


def _returned(case: Case, rng: random.Random) -> dict[str, Any]:
    more: dict[str, Any] = {"return_logprob": True, "logprob_start_len": rng.choice((None, -1, 0))}
    more |= rng.choice(({}, {"top_logprobs_num": 3}, {"token_ids_logprob": [3, 65, 101]}))
    more["return_text_in_logprobs"] = rng.random() < 0.3
    for name in ("hidden_states", "routed_experts"):
        if case.common.get(f"enable_return_{name}") and rng.random() < 0.6:
            more[f"return_{name}"] = True
    return more


def _sampling(rng: random.Random) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": rng.choice((1, 5, 14, 40, 60))}
    if rng.random() < 0.4:
        sampling |= {"temperature": rng.choice((0.5, 0.9)), "sampling_seed": rng.getrandbits(30)}
        sampling |= rng.choice(({}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}))
    letters = [rng.choice(LETTERS) for _ in range(9)]
    ids = [rng.randrange(ORDINARY) for _ in range(40)]
    more: tuple[dict[str, Any], ...] = (
        {"frequency_penalty": 0.9}, {"presence_penalty": -0.7}, {"repetition_penalty": 1.3},
        {"logit_bias": {str(ids[0]): 4.0, str(ids[1]): -100.0}}, {"stop_token_ids": ids[:30]},
        {"min_new_tokens": rng.randint(1, sampling["max_new_tokens"])}, {"stop": letters},
        {"stop": "".join(letters[:2])},
        {"stop_regex": "[a-m]"}, {"allowed_token_ids": ids}, {"allowed_token_ids": [*range(65, 80), 257]},
        {"bad_words": [*letters, letters[0] + letters[1]]}, {"no_stop_trim": True}, {"skip_special_tokens": False},
        {"n": rng.choice((2, 3))}, {"ignore_eos": True},
        {"stream_interval": 4}, {"temperature": 0.9, "sampling_seed": 5, "n": 2},
        {"custom_logit_processor": Counting.to_str(), "custom_params": {"limit": rng.choice((60, 300))}},
    )  # fmt: skip
    for one in more:
        if rng.random() < 0.1:
            sampling |= one
    if rng.random() < 0.15:
        sampling |= rng.choice(CONSTRAINTS)
    return sampling


def make(case: Case, folder: Path, rng: random.Random) -> Path:
    path = random_forms._checkpoint(random_forms.Form(case.kind, case.fields, case.flags), folder / "model", rng)
    if case.adapters:
        made = [make_adapter(folder / name, path, case.adapters, 4, rng.randrange(1000)) for name in "ab"]
        case.common["lora_paths"] = [f"{one.name}={one}" for one in made]
    return path


async def ask(engine: Engine, request: dict[str, Any], incremental: bool) -> Any:
    """The answers of the copies, or the refusal."""
    if not request.get("stream"):
        try:
            found: Any = await engine.async_generate(**request)
        except (InputError, GenerationError) as error:
            return str(error)
        return found if isinstance(found, list) else [found]
    copies: dict[int, Any] = {}
    try:
        async for chunk in await engine.async_generate(**request):  # type: ignore[union-attr]
            index = chunk.get("index", 0)
            copies[index] = _joined(copies.get(index), chunk, incremental)
    except (InputError, GenerationError) as error:
        return str(error)
    return [copies[index] for index in sorted(copies)]


def _joined(before: Any, chunk: Any, incremental: bool) -> Any:
    if before is None:
        return chunk
    if not incremental:
        assert chunk["text"].startswith(before["text"]), (before, chunk)
        assert chunk["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        return chunk
    joined = chunk | {name: before[name] + chunk[name] for name in ("text", "output_ids")}
    meta = dict(chunk["meta_info"])
    for name, value in before["meta_info"].items():
        if name.startswith(("input_", "output_")) and isinstance(value, list):
            meta[name] = value + (meta.get(name) or [])
    return joined | {"meta_info": meta}


async def serve(engine: Engine, case: Case) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    engine._frontend._preparer.grammar_checks = GrammarChecks(None)  # which starts no process

    async def session(turns: list[dict[str, Any]]) -> None:
        opened, earlier = "", None
        for request in turns:
            request = dict(request)
            rid, joined, more = request["rid"], request.pop("joined"), request.pop("session", None)
            if joined:
                opened = opened or engine.open_session()
                request["session_params"] = {"id": opened, "rid": earlier} | (more or {})
            found = await ask(engine, request, case.flags["incremental_streaming_output"])
            answers[rid] = found
            if joined and not isinstance(found, str):
                if earlier is not None:
                    _check_prompt(answers[earlier][0], request, more or {}, found[0])
                earlier = rid

    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*map(session, case.sessions))
    return answers


def _check_prompt(earlier: Any, request: dict[str, Any], more: dict[str, Any], found: Any) -> None:
    before = earlier["prompt_token_ids"]
    if not more.get("drop_previous_output"):
        before = before + earlier["output_ids"]
    before = before[: more["offset"]] if more.get("offset") else before
    assert found["prompt_token_ids"] == before + request["input_ids"], (more, earlier, found)


async def one_by_one(engine: Engine, case: Case, answers: dict[str, Any]) -> dict[str, Any]:
    right: dict[str, Any] = {}
    engine._frontend._preparer.grammar_checks = GrammarChecks(None)
    for request in (request for turns in case.sessions for request in turns):
        request = {k: v for k, v in request.items() if k not in ("session", "joined", "stream", "priority")}
        found = answers[request["rid"]]
        if isinstance(found, str) and "KV cache" in found:  # the prompt of a session, too long for the drawn pool
            continue
        if not isinstance(found, str):
            request["input_ids"] = found[0]["prompt_token_ids"]
        right[request["rid"]] = await ask(engine, request, False)
    return right


def differs(found: Any, right: Any) -> str:
    if isinstance(found, str) or isinstance(right, str):
        return "" if found == right else f"{found}, alone {right}"
    if len(found) != len(right):
        return f"{len(found)} copies"
    return "; ".join(text for one, other in zip(found, right) if (text := _differs(one, other)))


def _differs(found: Any, right: Any) -> str:
    meta, wanted = found["meta_info"], right["meta_info"]
    names = sorted(name for name in wanted if name.endswith("_logprobs"))
    if names != sorted(name for name in meta if name.endswith("_logprobs")):
        return f"fields {sorted(meta)}, alone {names}"
    for name in names:
        if name.startswith("input_") and len(meta[name]) != len(wanted[name]):
            return f"{name}: {len(meta[name])}, alone {len(wanted[name])}"
    same = next((i for i, (a, b) in enumerate(zip(found["output_ids"], right["output_ids"])) if a != b), None)
    for name in names:
        count = None if same is None or name.startswith("input_") else same + 1
        for place, (one, other) in enumerate(zip(meta[name][:count], wanted[name][:count])):
            if text := _far(one, other):
                return f"{name}[{place}]: {text}"
    for name in ("hidden_states", "routed_experts"):
        if (name in meta) != (name in wanted):
            return f"{name}: {name in meta}, alone {name in wanted}"
    if same is not None:
        return ""  # a tie
    for name in ("output_ids", "text"):
        if found[name] != right[name]:
            return f"{name}: {found[name]!r}, alone {right[name]!r}"
    for name in ("finish_reason", "completion_tokens", "prompt_tokens", "reasoning_tokens"):
        if meta[name] != wanted[name]:
            return f"{name}: {meta[name]!r}, alone {wanted[name]!r}"
    if len(meta["output_token_logprobs"]) != len(found["output_ids"]):
        return f"{len(meta['output_token_logprobs'])} log-probabilities of {len(found['output_ids'])} tokens"
    if "routed_experts" in meta:
        one, other = (np.frombuffer(base64.b64decode(x["routed_experts"]), np.int32) for x in (meta, wanted))
        if one.shape != other.shape or (one != other).any():
            return (
                f"experts {one.shape} {other.shape}: {np.flatnonzero(one != other) if len(one) == len(other) else ''}"
            )
    if "hidden_states" in meta:
        one, other = (np.array(x["hidden_states"][0] + x["hidden_states"][1:]) for x in (meta, wanted))
        if one.shape != other.shape or np.abs(one - other).max() > 1e-3:
            return f"states {one.shape} {other.shape}"
    return ""


def _far(one: Any, other: Any) -> str:
    """Of (log-probability, token, text), or lists of those, in which equal ones may have another order."""
    if one is None or other is None:
        return "" if one is other else f"{one}, alone {other}"
    if not one or isinstance(one[0], (list, tuple)):
        if len(one) != len(other):
            return f"{one}, alone {other}"
        return next((text for a, b in zip(one, other) if (text := _near(a, b))), "")
    return _near(one, other)


def _near(one: Any, other: Any) -> str:
    if one[0] is None or other[0] is None:
        return "" if one[0] is other[0] else f"{one}, alone {other}"
    equal = one[1] != other[1] or one[2] == other[2]
    return "" if equal and (one[0] == other[0] or abs(one[0] - other[0]) < TOLERANCE) else f"{one}, alone {other}"


def check(case: Case, folder: Path, rng: random.Random, seed: int = 0) -> str:
    """What ran. Raises AssertionError for a difference, and Refused for a launch that is refused by name."""
    path = make(case, folder, rng)
    try:
        with Engine(str(path), **PLAIN | case.common | case.flags) as engine:
            found = asyncio.run(serve(engine, case))
            states = engine.get_server_info()["internal_states"]
            problems = engine._loop.run(engine._frontend.client.call("check_integrity"))
        more = {"max_loras_per_batch": 4} if case.adapters else {}
        with Engine(str(path), **PLAIN | case.common | EXACT | more) as engine:
            right = asyncio.run(one_by_one(engine, case, found))
    except ConfigError as error:
        raise Refused(str(error)) from error
    requests = {request["rid"]: request for turns in case.sessions for request in turns}
    wrong = {rid: (text, requests[rid]) for rid in right if (text := differs(found[rid], right[rid]))}
    assert not wrong and not any(problems), f"{wrong} {problems}"
    refused = [answer for answer in found.values() if isinstance(answer, str)]
    retractions = sum(state["num_retractions_total"] for state in states)
    return f"{case.kind}: {len(found)} requests, {len(refused)} refused, {retractions} retractions"


if __name__ == "__main__":
    run_draws(__doc__, [*KINDS, *MORE_KINDS], 20, draw, check)
