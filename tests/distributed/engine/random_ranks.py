"""Random forms of an engine on several ranks, on CPUs or simulated GPUs:
``python -m tests.distributed.engine.random_ranks --count 20``, with ``SIMULATED_CUDA_DEVICES=4`` on four such GPUs.

A family, a form of parallelism, drafts, formats of the cache and of weights, chunks, pages, tiers, adapters, experts
that move, graphs and overlap are drawn. Sessions of texts, images, constraints and scores run with aborts and
retractions, and with an event in the middle (`rank_events`). Tokens and log-probabilities are those of the requests one
by one on one rank of a CPU; at the end the pools are whole, and no repair of them was logged.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moe_engine import Engine
from moe_engine.errors import ConfigError
from moe_engine.media.images import Images, Picture
from moe_engine.media.settings import ImageSource
from moe_engine.types.image_tokens import image_key
from tests.distributed.engine.rank_events import EVENTS, REPLACING, Event
from tests.examples import FACTOR
from tests.fork_server import ENGINE_SERVER, ForkServer

ORDINARY = 250
SECONDS, STUCK = 900.0, 600.0
"""Limits of a case, and of its requests."""
TOLERANCE, COARSE = 3e-4, 0.06
"""Of a log-probability; with FP8 caches, whose roundings depend on the order of sums."""
PLAIN: dict[str, Any] = {
    "dtype": "float32", "cpu_threads": 1, "context_length": 256, "log_level": "warning", "random_seed": 1,
    "skip_tokenizer_init": True,
}  # fmt: skip
ALONE: dict[str, Any] = {"max_running_requests": 1, "disable_radix_cache": True, "max_total_tokens": 1024}
TORCH: dict[str, Any] = {
    "attention_backend": "torch", "moe_runner_backend": "torch", "sampling_backend": "pytorch",
    "linear_backend": "torch", "ops_backend": "torch",
}  # fmt: skip
WITH_IMAGES = " with images"
IMAGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe")
"""Kinds of `vision_checkpoints`."""
POOLED = ("llama", "qwen2", "qwen3")
REGEX = r"[a-d]{3,9}(xy|zab)[0-9]{2,30}"
PLACE = [270, 271, 273]
"""Tokens of an image: START, IMAGE, END of `vision_checkpoints`."""
DISPATCHERS = ("allgather", "all_to_all", "all_to_all", "all_to_all", "all_to_all", "auto")


@dataclass
class Case:
    """`common`: flags of both engines. `sessions`: turns of each. `event`: in the middle of the requests. `head`: of a
    draft model. `copy`: format of a quantized copy, because ranks that quantize while loading scale their own parts of
    a matrix. `is_pooled`: vectors instead of answers."""

    kind: str
    fields: dict[str, Any]
    flags: dict[str, Any]
    common: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    sessions: list[list[dict[str, Any]]] = field(default_factory=list)
    event: str = ""
    tolerance: float = TOLERANCE
    head: Any = None
    copy: str = ""
    is_pooled: bool = False

    @property
    def exact(self) -> bool:
        return self.tolerance == TOLERANCE


# -- draws


def draw(kind: str, rng: random.Random) -> Case:
    return draw_form(kind, *device_and_ranks(), rng)


def device_and_ranks() -> tuple[str, int]:
    """Of the command's engines."""
    devices = os.environ.get("SIMULATED_CUDA_DEVICES")
    return "cuda" if devices else "cpu", int(devices or 4)


def draw_form(kind: str, device: str, most: int, rng: random.Random) -> Case:
    """`most`: ranks of a replica."""
    from tests.engine.random_forms import FORMULAS, MTP_KINDS
    from tests.engine.random_served import _divide
    from tests.models import random_reference_shapes, random_shapes, random_sparse_shapes
    from tests.models.random_shapes import MLA
    from tests.speculation import eagle_shapes

    fields: dict[str, Any] = {"max_position_embeddings": 512, "vocab_size": 320}
    tp_size = rng.choice([n for n in (1, 2, 2, 2, 2, 4, 8) if n <= most])
    drawn = None
    if kind in (*eagle_shapes.TARGETS, *eagle_shapes.MORE_TARGETS) and rng.random() < 0.3:
        while drawn is None or drawn.ranks not in ("tp 2", "dp 2"):  # sizes are even
            drawn = eagle_shapes.draw(kind, rng)
        fields = drawn.fields | fields
        for _ in range(tp_size.bit_length() - 2):
            _divide(fields)
    elif WITH_IMAGES not in kind and (_selects(kind) or rng.random() < 0.5):
        drawer: Any = random_sparse_shapes if kind in random_sparse_shapes.KINDS else random_shapes
        drawer = random_reference_shapes if kind in FORMULAS else drawer
        fields = drawer.draw(kind, rng).fields | fields
        for _ in range(tp_size.bit_length() - 1):
            _divide(fields)
    case = Case(kind, fields, {"device": device})
    case.flags |= ranks(kind, tp_size, rng)
    groups = case.flags.get("attn_dp_size", 1)
    case.flags |= limits(kind, groups, rng)
    if rng.random() < 0.35 and not case.flags["disable_radix_cache"]:
        case.flags |= {"enable_hierarchical_cache": True, "hicache_ratio": rng.choice((2.0, 6.0))}
        case.flags |= rng.choice(({}, {"hicache_write_policy": "write_back"}, {"hicache_storage_backend": "file"}))
    if drawn is None:
        case.flags |= _drafts(kind, case, rng, MTP_KINDS)
    else:
        case.head = drawn.form
        case.flags |= _head_drafts(case, drawn.depth, rng)
    if rng.random() < 0.2:
        case.common["kv_cache_dtype"] = rng.choice(("fp8_e4m3", "fp8_e5m2"))
        case.tolerance = COARSE
    if rng.random() < 0.2:
        case.copy = rng.choice(("int8", "int4"))
    if rng.random() < 0.25 and "enable_two_batch_overlap" not in case.flags:
        names = ("o_proj", "gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj")
        case.adapters = ("o_proj", *rng.sample(names[1 : 4 if kind in MLA else 7], 2))
        case.flags["max_loras_per_batch"] = rng.choice((1, 2, 4))
        if groups > 1:
            case.flags["moe_dense_tp_size"] = 1
    if device == "cuda":
        case.flags |= TORCH
        case.flags |= rng.choice(({}, {"disable_cuda_graph": True}, {"cuda_graph_max_bs": rng.choice((1, 2, 4))}))
        if rng.random() < 0.15:
            case.flags["cpu_offload_gb"] = 1.0
        if rng.random() < 0.2:
            case.flags[rng.choice(("sampling_backend", "ops_backend"))] = "triton"
    if kind in POOLED and rng.random() < 0.25:
        _make_pooled(case)
    elif rng.random() < 0.2:
        case.common["skip_tokenizer_init"] = False  # of grammars
    case.event = rng.choice(("", "", *(name for name in EVENTS if name not in REPLACING or not case.is_pooled)))
    whole = case.flags.get("attn_dp_size", 1) == tp_size > 1 and device == "cpu" and _has_experts(kind)
    if whole and rng.random() < 0.25:
        _make_elastic(case, rng)
    case.sessions = _sessions(case, rng)
    return case


def _selects(kind: str) -> bool:
    from tests.engine.random_forms import FORMULAS
    from tests.models import random_sparse_shapes

    return kind in (*random_sparse_shapes.KINDS, *FORMULAS)


def limits(kind: str, groups: int, rng: random.Random) -> dict[str, Any]:
    """Flags of pages, chunks and memory, for attention groups."""
    page = rng.choice((16, 32) if _selects(kind) else (1, 1, 4, 16))
    chunk = rng.choice((-1, 16, 32, 48))
    chunk = chunk if chunk < 0 else -(-chunk // page) * page * groups
    return {
        "page_size": page, "chunked_prefill_size": chunk, "max_running_requests": rng.choice((2, 4, 8)) * groups,
        "max_total_tokens": rng.choice((160, 192, 256, 1024)), "enable_mixed_chunk": chunk > 0 and rng.random() < 0.5,
        "disable_overlap_schedule": rng.random() < 0.2, "disable_radix_cache": rng.random() < 0.15,
        "schedule_conservativeness": rng.choice((0.0, 0.0, 1.0)),
    }  # fmt: skip


def _make_pooled(case: Case) -> None:
    drafts = [name for name in case.flags if name.startswith("speculative_")]
    for name in (*drafts, "enable_hierarchical_cache", "hicache_ratio", "hicache_write_policy"):
        case.flags.pop(name, None)
    case.flags.pop("hicache_storage_backend", None)
    case.head, case.adapters, case.is_pooled = None, (), True
    case.flags["is_embedding"] = case.common["is_embedding"] = True


def _make_elastic(case: Case, rng: random.Random) -> None:
    from tests.models.random_shapes import EXPERTS

    case.event = f"kill {rng.randrange(case.flags['tp_size'])}"
    for name in ("enable_two_batch_overlap", "enable_single_batch_overlap", "ep_size"):
        case.flags.pop(name, None)
    if case.flags.get("moe_a2a_backend", "auto") == "auto":
        case.flags["moe_a2a_backend"] = "all_to_all"
    case.flags |= {"elastic_ep": True, "enable_dp_lm_head": True, "moe_dense_tp_size": 1}
    experts, ranks = case.fields.get(EXPERTS.get(case.kind, "n_routed_experts"), 16), case.flags["tp_size"]
    case.flags["ep_num_redundant_experts"] = -(-experts // (ranks - 1)) * ranks - experts


def ranks(kind: str, tp_size: int, rng: random.Random) -> dict[str, Any]:
    if tp_size == 1:
        return {"dp_size": 2}
    flags: dict[str, Any] = {"tp_size": tp_size}
    flags["attn_dp_size"] = rng.choice([n for n in (1, 2, 4, 8, tp_size) if n <= tp_size])
    if not _has_experts(kind) or rng.random() < 0.3:
        return flags
    if rng.random() < 0.3:
        return flags | {"ep_size": tp_size}
    flags["moe_a2a_backend"] = rng.choice(DISPATCHERS)
    flags[rng.choice(("enable_two_batch_overlap", "enable_single_batch_overlap", "enable_dp_lm_head"))] = True
    if flags.get("enable_dp_lm_head") and flags["attn_dp_size"] == 1:
        flags.pop("enable_dp_lm_head")
    if rng.random() < 0.4:
        flags |= {"enable_eplb": True, "ep_num_redundant_experts": tp_size}
        flags |= {"eplb_rebalance_num_iterations": rng.choice((2, 5))}
        if rng.random() < 0.5:
            flags["eplb_rebalance_layers_per_chunk"] = 1
    return flags


def _has_experts(kind: str) -> bool:
    from tests.models.random_shapes import EXPERTS

    kind = kind.removesuffix(WITH_IMAGES)
    known = ("deepseek", "kimi", "ling", "glm5", "glm_moe", "minimax_m", "qwen4", "qwen3_vl_moe", "glm4v_moe")
    return kind in EXPERTS or kind.startswith(known)


def _drafts(kind: str, case: Case, rng: random.Random, mtp: Any) -> dict[str, Any]:
    kind = kind.removesuffix(WITH_IMAGES)
    if kind == "deepseek_v41":
        return {"speculative_algorithm": "DSPARK"} if rng.random() < 0.7 else {}
    if rng.random() < 0.4:
        return {}
    if kind not in (*mtp, "ling_v2_5") or rng.random() < 0.2:
        return {"speculative_algorithm": "NGRAM", "speculative_num_steps": rng.choice((1, 3))}
    trees = kind.startswith("deepseek_v3") and case.flags.get("attn_dp_size") == 1
    steps, topk = rng.choice((1, 2, 4)), rng.choice((1, 2)) if trees else 1
    own = {"speculative_algorithm": "NEXTN", "speculative_num_steps": steps, "speculative_eagle_topk": topk}
    return own | {"speculative_num_draft_tokens": 1 + topk + (steps - 1) * topk**2}


def _head_drafts(case: Case, depth: int, rng: random.Random) -> dict[str, Any]:
    from tests.speculation.eagle_heads import Form
    from tests.speculation.random_drafts import CHAINS

    branches = isinstance(case.head, Form) and case.kind not in CHAINS and not case.fields.get("sliding_window")
    topk = rng.choice((1, 2, 3)) if branches and case.flags.get("attn_dp_size") == 1 else 1
    most = 1 + topk + (depth - 1) * topk**2 if topk > 1 else depth + 1
    nodes = rng.randint(3, most) if topk > 1 else most
    return {
        "speculative_algorithm": case.head.algorithm, "speculative_num_steps": depth, "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }  # fmt: skip


def _sessions(case: Case, rng: random.Random) -> list[list[dict[str, Any]]]:
    begin, sessions = [rng.randrange(ORDINARY) for _ in range(30)], []
    lengths = (1, 5, 14, 14) if case.flags["device"] == "cpu" else (1, 4, 7)  # a simulated step takes seconds
    for session in range(rng.randint(2, 4)):
        prompt, turns, images = begin[: rng.choice((0, 0, 7, 16, 30))], [], []
        if WITH_IMAGES in case.kind and rng.random() < 0.7:
            images = [f"{rng.randint(1, 3)} {rng.randint(1, 4)} {rng.choice((1, 2))}"]
            prompt = [*prompt, *PLACE]
        for turn in range(rng.randint(1, 2)):
            prompt = [*prompt, *(rng.randrange(ORDINARY) for _ in range(rng.choice((1, 2, 9, 25))))][:90]
            sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": rng.choice(lengths)}
            if case.exact and rng.random() < 0.3:
                sampling |= {"temperature": 0.9, "sampling_seed": rng.getrandbits(30)}
                sampling |= rng.choice(({}, {"top_p": 0.8}, {"top_k": 7}))
            if rng.random() < 0.15:
                sampling |= rng.choice(({"frequency_penalty": 0.9}, {"repetition_penalty": 1.3}))
            sampling["ignore_eos"] = True
            if "skip_tokenizer_init" in case.common and rng.random() < 0.5:
                sampling |= {"regex": REGEX, "ignore_eos": False}
            request: dict[str, Any] = {"rid": f"s{session}.{turn}-", "input_ids": list(prompt)}
            request |= {"sampling_params": sampling, "return_logprob": True}
            request["logprob_start_len"] = rng.choice((-1, 0))
            if images:
                request["image_data"] = images
            if rng.random() < 0.1:
                request["items"] = [[rng.randrange(ORDINARY) for _ in range(n)] for n in (1, 4)]
            if case.adapters:
                request["lora_path"] = rng.choice((None, "a", "b"))
            turns.append(request | {"aborted": rng.random() < 0.1})
        sessions.append(turns)
    return sessions


def _checkpoint(case: Case, path: Path, rng: random.Random) -> Path:
    from tests.engine import random_forms
    from tests.models import vision_checkpoints

    if WITH_IMAGES in case.kind:
        kind, fields = case.kind.removesuffix(WITH_IMAGES), {k: v for k, v in case.fields.items() if k != "vocab_size"}
        mtp = int(case.flags.get("speculative_algorithm") == "NEXTN")
        return vision_checkpoints.make_checkpoint(kind, path, rng.randrange(2**31), mtp, **fields)
    form = random_forms.Form(case.kind, dict(case.fields), case.flags)
    form.fields.setdefault("num_hidden_layers", 3)
    if case.kind not in random_forms.FORMULAS and "head_dim" not in case.fields and len(case.fields) == 2:
        form.fields.pop("num_hidden_layers")
    return random_forms._checkpoint(form, path, rng)


def _copy(case: Case, path: Path) -> Path:
    """In the place of the checkpoint."""
    from moe_engine.models.quantized_copy.checkpoint import quantize_checkpoint
    from moe_engine.models.quantized_copy.target import Target
    from tests.models.random_shapes import Refused

    if case.copy:
        source = path.rename(path.with_name(f"{path.name} in floats"))
        try:
            quantize_checkpoint(source, path, Target(case.copy, 32), lambda _: None)
        except ConfigError as error:
            raise Refused(str(error)) from error
    return path


def _head(case: Case, path: Path, folder: Path, rng: random.Random) -> dict[str, Any]:
    """Flags of a draft model, which is trained."""
    import torch

    from tests.speculation.eagle_heads import Target
    from tests.speculation.eagle_pairs import reference

    target, flags = Target(path), {"speculative_draft_model_path": str(folder / "head")}
    head = reference(case.head, target, rng.randrange(1000))
    prompts = [[rng.randrange(ORDINARY) for _ in range(9 * i + 1)] for i in range(4)]
    head.distil([target.continued(prompt, 32) for prompt in prompts], 20)
    written = head.write(folder / "head")
    if token_map := getattr(case.head, "token_map", ()):
        torch.save(list(token_map), written / "map.pt")
        flags["speculative_token_map"] = str(written / "map.pt")
    return flags


def make(case: Case, folder: Path, rng: random.Random) -> Path:
    """The checkpoint, and its adapters in the flags."""
    from tests.models.checkpoints import headless
    from tests.models.lora import make_adapter
    from tests.models.random_shapes import Refused

    path = _checkpoint(case, folder / "model", rng)
    if case.is_pooled:
        path = headless(path, folder / "pooled")
    if case.event in REPLACING:
        _copy(case, _checkpoint(case, folder / "before", rng))
    if case.head is not None:
        try:
            case.flags |= _head(case, path, folder, rng)
        except Exception as error:
            raise Refused(f"no head: {type(error).__name__}: {error}") from error
    if case.adapters:
        made = [make_adapter(folder / name, path, case.adapters, 4, rng.randrange(1000)) for name in "ab"]
        case.common["lora_paths"] = [f"{one.name}={one}" for one in made]
    if case.flags.get("hicache_storage_backend"):
        case.flags["hicache_storage_dir"] = str(folder / "storage")
    return _copy(case, path)


# -- the engines, in a process that may have simulated devices


async def serve(engine: Engine, case: Case, event: Event | None = None) -> dict[str, Any]:
    """Without an event: one request at a time."""
    answers: dict[str, Any] = {}

    async def one(request: dict[str, Any]) -> None:
        request = dict(request)
        aborted, rid = request.pop("aborted") and event is not None, request["rid"]
        if case.is_pooled:
            answers[rid] = await engine.async_encode(rid=rid, input_ids=request["input_ids"])
            return
        if (items := request.pop("items", None)) and "image_data" not in request:
            answers[rid] = (await engine.async_score(request["input_ids"], items, [3, 65, 101])).scores
            return
        last: Any = None
        async for last in await engine.async_generate(**request, stream=True):  # type: ignore[union-attr]
            if aborted and len(last["output_ids"]) > 2:
                engine.abort_request(rid)
        answers[rid] = last

    async def session(turns: list[dict[str, Any]]) -> None:
        for request in turns:
            await one(request)

    async with asyncio.timeout(STUCK):
        if event is None:
            for turns in case.sessions:
                await session(turns)
        else:
            work = asyncio.gather(*map(session, case.sessions))
            await asyncio.gather(work, event.strike(engine, work))
    return answers


def run(case: Case, path: Path) -> dict[str, Any]:
    Images.load = drawn_images  # type: ignore[method-assign]
    with Event(case.event, path, case.flags.get("tp_size", 1) * case.flags.get("dp_size", 1)) as event:
        try:
            engine = Engine(str(event.first), **PLAIN | case.common | case.flags)
        except ConfigError as error:
            return {"refused": str(error)}
        with engine:
            event.begin(engine)
            found = asyncio.run(serve(engine, case, event))
            event.end(engine)
            problems = left_over(engine)
            states = engine.get_server_info()["internal_states"]
    right = served_alone(case, path)
    drafts = [state["speculation"] for state in states if state.get("speculation")]
    return {
        "differences": {rid: text for rid in right if (text := differs(case, rid, found[rid], right[rid]))},
        "problems": problems,
        "retractions": sum(state["num_retractions_total"] for state in states),
        "cached": sum(a["meta_info"].get("cached_tokens", 0) for a in found.values() if isinstance(a, dict)),
        "accepted": sum(sum(state["accepted"]) for state in drafts),
        "rebalances": sum(state.get("eplb", {}).get("rebalances", 0) for state in states),
        "used_schedulers": sum(state["generation_tokens_total"] > 0 for state in states),
    }


def served_alone(case: Case, path: Path) -> dict[str, Any]:
    """The answers of one rank of a CPU to the requests one by one."""
    alone: dict[str, Any] = {"device": "cpu"}
    if case.kind != "deepseek_v41" and case.kind.startswith("deepseek_v4"):
        alone["page_size"] = case.flags["page_size"]
    with Engine(str(path), **PLAIN | case.common | ALONE | alone) as engine:
        return asyncio.run(serve(engine, case))


async def drawn_images(self: Images, sources: Sequence[ImageSource]) -> list[Picture]:
    """The text of a source is rows, columns and a seed."""
    import torch

    from tests.models.vision_checkpoints import random_pixels

    found = []
    for source in sources:
        rows, columns, seed = map(int, source.text.split())
        one = random_pixels(rows, columns, torch.Generator().manual_seed(seed))
        data = one.values.numpy().tobytes()
        found.append(Picture(image_key(data, one.grid), one.grid, data))
    return found


def left_over(engine: Engine, seconds: float = 5.0) -> list[str]:
    """What is wrong in the pools of an engine without requests, within `seconds`: aborted ones may still end."""
    deadline = time.monotonic() + seconds
    while True:
        states = engine.get_server_info()["internal_states"]
        held = [state["num_slots"] - state["num_free"] - state["num_evictable"] for state in states]
        transfers = [state["num_incoming_transfers"] + state["num_outgoing_transfers"] for state in states]
        if time.monotonic() > deadline or not any(held + transfers):
            break
        time.sleep(0.05)
    call = engine._loop.run(engine._frontend.client.call("check_integrity"))
    found = [problem for part in call for problem in part]
    found += [f"{held} tokens are held"] if any(held) else []
    return found + ([f"{transfers} transfers are left"] if any(transfers) else [])


def differs(case: Case, rid: str, found: Any, right: Any) -> str:
    if isinstance(right, list) or case.is_pooled:  # scores, vectors
        one, other = (np.array(x if isinstance(x, list) else x["embedding"]) for x in (found, right))
        near = one.shape == other.shape and np.abs(one - other).max() < case.tolerance
        return "" if near else f"{one}, alone {other}"
    meta, wanted = found["meta_info"], right["meta_info"]
    finish = meta["finish_reason"]
    aborted = finish["type"] == "abort"
    may = case.event == "abort" or any(request["aborted"] for turns in case.sessions for request in turns)
    if aborted and not may and finish.get("status_code") != 400:
        return f"aborted: {finish}"
    sizes = [len(x.get("input_token_logprobs") or []) for x in (meta, wanted)]
    if sizes[0] != sizes[1] and not aborted:
        return f"{sizes} log-probabilities of the prompt"
    pairs = [*zip(meta.get("input_token_logprobs") or [], wanted.get("input_token_logprobs") or [])]
    pairs += [*zip(meta["output_token_logprobs"], wanted["output_token_logprobs"])]
    for place, (one, other) in enumerate(pairs, -sizes[0]):
        if one[0] is None or other[0] is None:
            if one[0] is not other[0]:
                return f"token {place}: {one}, alone {other}"
            continue
        if abs(one[0] - other[0]) > case.tolerance:
            return f"token {place}: {one[:2]}, alone {other[:2]}, {finish}"
        if one[1] != other[1]:
            return ""
    if aborted:
        return ""
    if found["output_ids"] != right["output_ids"] or finish != wanted["finish_reason"]:
        return f"{found['output_ids']} {finish}, alone {right['output_ids']} {wanted['finish_reason']}"
    return ""


# -- in the process of the command

_device_server: ForkServer | None = None


def _server_of(device: str) -> ForkServer:
    global _device_server
    if device == "cpu":
        return ENGINE_SERVER
    from tests.simulated_cuda.conftest import DEVICES, PRELOADED

    if _device_server is None:
        _device_server = ForkServer(DEVICES, (*PRELOADED[1:], "tests.distributed.engine.random_ranks"))
    return _device_server


def check(case: Case, folder: Path, rng: random.Random, seed: int = 0) -> str:
    """What ran. Raises AssertionError for a difference, and Refused for a refused launch."""
    path = make(case, folder, rng)
    found, errors = run_apart("tests.distributed.engine.random_ranks", case, path, folder)
    found["problems"] += re.findall(".*repaired.*", errors)
    assert not found["differences"] and not found["problems"], found
    return f"{case.kind}: {found} {case.flags | case.common} {case.event}"


def run_apart(module: str, case: Case, path: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """What the module's `run` found in a process of its own, and the process's log."""
    from tests.models.random_shapes import Refused

    (folder / "case").write_text(json.dumps([vars(case) | {"head": None}, str(path)]))
    code, out, errors = _server_of(case.flags["device"]).run([module, "--run", str(folder / "case")], folder, SECONDS)
    assert code == 0, errors[-6000:]
    found = json.loads(out.splitlines()[-1])
    if "refused" in found:
        raise Refused(found["refused"])
    return found, errors


def can_compare(case: Case) -> bool:
    """Whether a test checks a case. Roundings that depend on the order of sums may choose other experts; training a
    head and starting grammars take longer than the case."""
    takes_long = case.head is not None or "skip_tokenizer_init" in case.common
    return case.tolerance <= TOLERANCE and not (FACTOR == 1 and takes_long)


def kinds() -> list[str]:
    from tests.engine.random_forms import FORMULAS
    from tests.models import random_sparse_shapes
    from tests.models.checkpoints import KINDS, MORE_KINDS

    images = [kind + WITH_IMAGES for kind in IMAGES]
    return [*KINDS, *MORE_KINDS, *random_sparse_shapes.KINDS, *FORMULAS, *images]


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        fields, path = json.loads(Path(sys.argv[2]).read_text())
        print(json.dumps(run(Case(**fields), Path(path))))
        sys.stdout.flush()
        return 0
    from tests.models.random_shapes import run_draws

    run_draws(__doc__, kinds(), 20, draw, check)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
