"""Random pairs of a prefill and a decode engine, on CPUs or simulated GPUs:
``python -m tests.disaggregation.random_pairs --count 20``, with ``SIMULATED_CUDA_DEVICES=4`` on four such GPUs.

Forms, sessions and events are those of `tests.distributed.engine.random_ranks`; ranks, pages, chunks, memory and
transport are drawn for each side. Every request goes to both engines, as from a router; some are aborted before their
transfer ends, and a cut connection or a killed engine may end all transfers. Tokens and log-probabilities are those of
the requests one by one on one rank of a CPU; at the end the pools of the living engines are whole and no transfer is
left.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from moe_engine import Engine
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.media.images import Images
from moe_engine.processes.addresses import free_port
from tests.disaggregation.faulty import Cable
from tests.distributed.engine import random_ranks
from tests.distributed.engine.random_ranks import PLAIN, Case
from tests.distributed.engine.rank_events import EVENTS, REPLACING, Event
from tests.fork_server import children

LOSSES = ("kill prefill", "kill decode", "cut")
EARLY = "early"
"""Of an abort before the transfer ends."""
MEETING_SECONDS = 40.0
"""A prefill engine keeps a request for so long if its decode engine does not ask."""
OF_RANKS = (
    "tp_size", "dp_size", "attn_dp_size", "ep_size", "moe_a2a_backend", "enable_two_batch_overlap", "enable_eplb",
    "enable_single_batch_overlap", "enable_dp_lm_head", "ep_num_redundant_experts", "eplb_rebalance_num_iterations",
    "eplb_rebalance_layers_per_chunk", "moe_dense_tp_size",
)  # fmt: skip
MADE = ("speculative_draft_model_path", "speculative_token_map", "hicache_storage_dir")
"""Flags of files of a case."""


@dataclass
class PairCase(Case):
    """A case whose `flags` are those of the decode engine; `other`: those of the prefill engine."""

    other: dict[str, Any] = field(default_factory=dict)


# -- draws


def draw(kind: str, rng: random.Random) -> PairCase:
    return draw_pair(kind, *random_ranks.device_and_ranks(), rng)


def draw_pair(kind: str, device: str, most: int, rng: random.Random) -> PairCase:
    """`most`: ranks of an engine."""
    form = random_ranks.draw_form(kind, device, most, rng)
    while form.is_pooled or "elastic_ep" in form.flags:
        form = random_ranks.draw_form(kind, device, most, rng)
    case = PairCase(**vars(form))
    tp_size = case.flags.get("tp_size", 1)
    case.other = {name: value for name, value in case.flags.items() if name not in OF_RANKS}
    if alike := rng.random() < 0.35:  # as states need it
        case.other |= {name: case.flags[name] for name in OF_RANKS if name in case.flags}
    elif (size := rng.choice([n for n in (1, 1, 2, 4, 8) if n <= tp_size])) > 1 or rng.random() < 0.3:
        case.other |= random_ranks.ranks(kind, size, rng)
    if case.flags.get("speculative_eagle_topk", 1) > 1:
        case.other.pop("attn_dp_size", None)  # not with trees
    groups = case.other.get("attn_dp_size", 1)
    if case.adapters and groups > 1:
        case.other["moe_dense_tp_size"] = 1
    case.other |= random_ranks.limits(kind, groups, rng)
    if alike:
        case.other |= {name: case.flags[name] for name in ("page_size", "chunked_prefill_size", "enable_mixed_chunk")}
    if case.head is None and rng.random() < 0.2:
        case.other = {name: value for name, value in case.other.items() if not name.startswith("speculative_")}
    backend = rng.choice(("tcp", "tcp", "shm"))
    for flags in (case.flags, case.other):
        flags |= {"disable_radix_cache": False, "disaggregation_transfer_backend": backend}
    if rng.random() < 0.5:
        case.flags, case.other = case.other, case.flags
    case.event = rng.choice(("", "", *EVENTS, *LOSSES))
    for turns in case.sessions:
        before = [rng.randrange(random_ranks.ORDINARY) for _ in range(rng.choice((0, 20, 50)))]
        for request in turns:
            request["input_ids"] = before + request["input_ids"]
    for request in itertools.chain(*case.sessions):
        if rng.random() < 0.1:
            request["aborted"] = EARLY
        if case.event in (*LOSSES, "abort") or request["aborted"]:
            request["logprob_start_len"] = -1  # those of prompts are the prefill engine's
        if case.event == "kill decode":
            request.pop("items", None)
    return case


# -- the engines, in a process that may have simulated devices


class Pair:
    """A prefill and a decode engine as one engine: the requests of a router."""

    def __init__(self, prefill: Engine, decode: Engine, port: int, early: set[str]) -> None:
        self.prefill, self.decode, self._port, self._early = prefill, decode, port, early
        self.lost: Engine | None = None
        self.num_pieces = 0
        """Of all answers."""

    @property
    def engines(self) -> list[Engine]:
        return [engine for engine in (self.prefill, self.decode) if engine is not self.lost]

    async def async_generate(self, *, rid: str, **fields: Any) -> AsyncIterator[Any]:
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._port, "bootstrap_room": random.getrandbits(63)}
        return self._both({"rid": rid} | fields | room)

    async def _both(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        half = asyncio.create_task(self._last(self.prefill, request))
        if request["rid"] in self._early:
            asyncio.get_running_loop().call_later(random.random() * 0.2, self.abort_request, request["rid"])
        if random.random() < 0.3:
            await asyncio.sleep(random.random() * 0.1)
        answer: Any = None
        if self.decode is self.lost:
            await half
            return
        try:
            async for answer in await self.decode.async_generate(**request):  # type: ignore[union-attr]
                self.num_pieces += 1
                yield answer
        except EngineDeadError:
            assert self.decode is self.lost
        first = await half
        if answer is not None and first is not None and "input_token_logprobs" in first["meta_info"]:
            answer["meta_info"]["input_token_logprobs"] = first["meta_info"]["input_token_logprobs"]
            yield answer

    async def _last(self, engine: Engine, request: dict[str, Any]) -> Any:
        try:
            return await engine.async_generate(**request | {"stream": False})
        except EngineDeadError:
            assert engine is self.lost
        return None

    async def async_score(self, *arguments: Any) -> Any:
        return await self.decode.async_score(*arguments)

    def abort_request(self, rid: str) -> None:
        for engine in self.engines:
            engine.abort_request(rid)


class PairEvent:
    """An event of one of the engines or of both, or a loss."""

    def __init__(self, path: Path, case: PairCase, cable: Cable) -> None:
        self._name, self._cable = case.event, cable
        self._one = random.randrange(2)
        common = "" if case.event in LOSSES else case.event
        sizes = [flags.get("tp_size", 1) * flags.get("dp_size", 1) for flags in (case.other, case.flags)]
        self.events = [Event(common, path, size) for size in sizes]
        self.first = self.events[0].first

    def close(self) -> None:
        for event in self.events:
            event.__exit__()

    async def strike(self, pair: Pair, work: asyncio.Future[Any]) -> None:
        if self._name not in LOSSES:
            engines = (pair.prefill, pair.decode)
            chosen = (0, 1) if self._name in (*REPLACING, "update") else (self._one,)
            for i in chosen:
                await self.events[i].strike(engines[i], work)
            return
        if self._name == "cut":
            while not work.done():
                self._cable.on_bytes = lambda count: None
                begin, limit = self._cable.num_bytes, random.randrange(1, 60_000)
                while self._cable.num_bytes < begin + limit and not work.done():
                    await asyncio.sleep(0.002)
                self._cable.cut()
            return
        lost = pair.decode if self._name.endswith("decode") else pair.prefill
        begin = random.randrange(25)
        while pair.num_pieces < begin and not work.done():
            await asyncio.sleep(0.001)
        await asyncio.sleep(random.random() * 0.1)
        pair.lost = lost
        kill_ranks(lost)


def kill_ranks(engine: Engine) -> None:
    for core in engine._cores:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(core.pid)
            for each in (*children(process), process):
                with suppress(psutil.NoSuchProcess):
                    each.kill()


def run(case: PairCase, path: Path) -> dict[str, Any]:
    Images.load = random_ranks.drawn_images  # type: ignore[method-assign]
    port = free_port()
    common = PLAIN | case.common | {"disaggregation_bootstrap_port": port}
    with ExitStack() as stack:
        cable = stack.enter_context(closing(Cable(port)))
        event = stack.enter_context(closing(PairEvent(path, case, cable)))
        engines = []
        try:
            for flags, mode in ((case.other, "prefill"), (case.flags, "decode")):
                engines.append(Engine(str(event.first), **common | flags | {"disaggregation_mode": mode}))
                stack.callback(engines[-1].shutdown)
        except ConfigError as error:
            return {"refused": str(error)}
        early = {one["rid"] for one in itertools.chain(*case.sessions) if one["aborted"] == EARLY}
        pair = Pair(engines[0], engines[1], cable.port if case.event == "cut" else port, early)
        for engine, own in zip(engines, event.events):
            own.begin(engine)
        found = asyncio.run(random_ranks.serve(pair, case, event))  # type: ignore[arg-type]
        problems = [problem for engine in pair.engines for problem in random_ranks.left_over(engine, MEETING_SECONDS)]
        states = [state for engine in pair.engines for state in engine.get_server_info()["internal_states"]]
    right = random_ranks.served_alone(case, path)
    ended = [rid for rid in right if case.event != "kill decode" or _has_ended(found.get(rid))]
    return {
        "differences": {
            rid: text for rid in ended if (text := random_ranks.differs(case, rid, found[rid], right[rid]))
        },
        "problems": problems,
        "ended": f"{len(ended)} of {len(right)}",
        "retractions": sum(state["num_retractions_total"] for state in states),
        "transferred": sum(state["transferred_tokens_total"] for state in states),
        "failed": sum(state["failed_transfers_total"] for state in states),
    }


def _has_ended(answer: Any) -> bool:
    return isinstance(answer, list) or bool(answer and answer["meta_info"].get("finish_reason"))


# -- in the process of the command


def check(case: PairCase, folder: Path, rng: random.Random, seed: int = 0) -> str:
    """What ran. Raises AssertionError for a difference, and Refused for a refused launch."""
    path = random_ranks.make(case, folder, rng)
    case.other |= {name: case.flags[name] for name in MADE if name in case.flags}
    found, errors = random_ranks.run_apart("tests.disaggregation.random_pairs", case, path, folder)
    found["problems"] += re.findall(".*repaired.*", errors)
    assert not found["differences"] and not found["problems"], found
    reasons = Counter(re.findall(r"Transfer of KV for \S+ failed: (.*); its prompt", errors))
    return f"{case.kind}: {found} {dict(reasons)} {case.other} | {case.flags | case.common} {case.event}"


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        fields, path = json.loads(Path(sys.argv[2]).read_text())
        print(json.dumps(run(PairCase(**fields), Path(path))))
        sys.stdout.flush()
        return 0
    from tests.models.random_shapes import run_draws

    run_draws(__doc__, random_ranks.kinds(), 20, draw, check)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
