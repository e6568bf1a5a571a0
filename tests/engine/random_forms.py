"""Random forms of an engine on random shapes of all families: ``python -m tests.engine.random_forms --count 50``.

Sessions with common prefixes run under drawn limits of chunks, pages and memory, with drafts, the host-RAM tier, an FP8
KV cache, adapters, constraints, samples, penalties, priorities and aborts together. Tokens and log-probabilities, also
of prompts, are those of the requests one by one, without drafts, tier and prefix cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.structured_output.backend import GrammarSettings
from moe_engine.structured_output.compiler import GrammarCompiler
from moe_engine.structured_output.open_backend import open_backend
from moe_engine.tokenizer.tokenizer import load_tokenizer
from moe_engine.types.constraint import Constraint
from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.models import random_reference_shapes, random_shapes, random_sparse_shapes
from tests.models.checkpoints import KINDS, MORE_KINDS, make_checkpoint
from tests.models.kimi_k3 import make_k3
from tests.models.ling_v2_5 import make_ling
from tests.models.lora import make_adapter
from tests.models.random_shapes import Refused, run_draws
from tests.models.v4_checkpoints import make_v4
from tests.models.v41_dspark import make_v41_dspark
from tests.speculation.agreeing import agreeing_checkpoint

ORDINARY = 250
MTP_KINDS = (
    "deepseek_v3", "glm4_moe", "hy_v3", "ernie4_5_moe", "bailing_hybrid", "qwen3_next", "qwen3_5", "qwen3_5_moe",
    "deepseek_v32", "glm5_next", "minimax_m3",
)  # fmt: skip
FORMULAS = ("deepseek_v41", "kimi_k3", "ling_v2_5")
REGEX = r"[a-d]{3,9}(xy|zab)[0-9]{2,30}"
EXACT = {"max_running_requests": 1, "disable_radix_cache": True, "max_total_tokens": 1024, "context_length": 256}
TOLERANCE = 3e-4
"""Of a log-probability. Equal ones of two tokens are a tie."""


@dataclass
class Form:
    """A drawn checkpoint and the engine's flags; `common`: those that also the requests alone have. `adapters`:
    modules of LoRA adapters; `constrained`: share of the requests with a constraint."""

    kind: str
    fields: dict[str, Any]
    flags: dict[str, Any]
    common: dict[str, Any] = field(default_factory=dict)
    scheduling: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    constrained: float = 0.0


def draw(kind: str, rng: random.Random) -> Form:
    drawer: Any = random_sparse_shapes if kind in random_sparse_shapes.KINDS else random_shapes
    drawer = random_reference_shapes if kind in FORMULAS else drawer
    fields = drawer.draw(kind, rng).fields | {"max_position_embeddings": 512, "vocab_size": 320}
    form = Form(kind, fields, {"max_running_requests": rng.choice((2, 5, 12))}, {"dtype": "float32"})
    form.common["attention_backend"] = rng.choice(("cpu", "torch", None))
    form.common["kv_cache_dtype"] = rng.choice((None, None, "fp8_e4m3", "fp8_e5m2"))
    form.flags |= {
        "chunked_prefill_size": rng.choice((-1, 5, 16, 33, 48)), "page_size": rng.choice((1, 1, 2, 4, 16)),
        "max_total_tokens": rng.choice((192, 256, 400, 2048)), "enable_mixed_chunk": rng.random() < 0.5,
        "disable_radix_cache": rng.random() < 0.15, "schedule_policy": rng.choice(("fcfs", "lpm", "dfs-weight")),
        "disable_overlap_schedule": rng.random() < 0.3,
        "radix_eviction_policy": rng.choice(("lru", "lfu", "slru", "priority")),
    }  # fmt: skip
    if rng.random() < 0.25 and form.flags["schedule_policy"] == "fcfs":
        threshold = rng.choice((0, 3))
        form.flags |= {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": threshold}
    if kind in (*random_sparse_shapes.KINDS, *FORMULAS):
        form.flags["page_size"] = rng.choice((None, 16, 32))
        form.flags["chunked_prefill_size"] = rng.choice((-1, 16, 48))
    if form.flags["chunked_prefill_size"] > 0 and form.flags["page_size"]:
        page = form.flags["page_size"]
        form.flags["chunked_prefill_size"] = -(-form.flags["chunked_prefill_size"] // page) * page
    form.flags["enable_mixed_chunk"] &= form.flags["chunked_prefill_size"] > 0
    if form.flags["disable_radix_cache"]:
        form.flags["schedule_policy"], form.flags["radix_eviction_policy"] = "fcfs", None
    if rng.random() < 0.4 and not form.flags["disable_radix_cache"]:
        form.flags |= {"enable_hierarchical_cache": True, "hicache_ratio": rng.choice((2.0, 6.0))}
    drafts: list[dict[str, Any]] = [{}, {}, {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}]
    if kind in MTP_KINDS:
        steps, topk = rng.choice((1, 2, 4)), rng.choice((1, 1, 2))
        own = {"speculative_algorithm": "NEXTN", "speculative_num_steps": steps, "speculative_eagle_topk": topk}
        drafts += [own | {"speculative_num_draft_tokens": 1 + topk + (steps - 1) * topk**2}] * 2
    if kind == "ling_v2_5":
        own = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 1}
        drafts += [own | {"speculative_num_draft_tokens": 3}] * 2
    if kind == "deepseek_v41":
        drafts += [{"speculative_algorithm": "DSPARK"}] * 2
    form.flags |= rng.choice(drafts)
    if rng.random() < 0.5:
        form.scheduling = {"retract_decode_steps": 1, "schedule_conservativeness": 0.0, "clip_max_new_tokens": 2}
        form.scheduling |= {"num_slots": rng.choice((144, 160, 192))}
    if rng.random() < 0.25:
        form.adapters = tuple(rng.sample(("q_proj", "o_proj", "kv_b_proj", "gate_proj", "up_proj", "down_proj"), 3))
    form.constrained = rng.choice((0.0, 0.0, 0.3))
    if rng.random() < 0.2:
        form.common["enable_deterministic_inference"] = True
    form.flags = {name: value for name, value in form.flags.items() if value is not None}
    form.common = {name: value for name, value in form.common.items() if value is not None}
    return form


def sessions(form: Form, rng: random.Random) -> list[Scripted]:
    """Each turn repeats the session's prompt and adds to it, up to 90 tokens; some sessions begin alike."""
    begin, script = [rng.randrange(ORDINARY) for _ in range(30)], []
    for session in range(rng.randint(2, 5)):
        prompt = begin[: rng.choice((0, 0, 7, 16, 30))]
        for turn in range(rng.randint(1, 4)):
            prompt = [*prompt, *(rng.randrange(ORDINARY) for _ in range(rng.choice((1, 2, 9, 25))))][:90]
            more: dict[str, Any] = {"top_logprobs": 0}
            if form.adapters:
                more["lora_id"] = rng.randrange(3)
            resolved = {}
            if rng.random() < form.constrained:
                resolved = {"constraint": {"kind": "regex", "source": REGEX}}
            arrives = rng.randrange(5) + 9 * turn
            script.append(
                Scripted(
                    f"{session}.{turn}-", list(prompt), rng.choice((1, 5, 14, 30)), arrives=arrives,
                    sampling=_sampling(rng) | {"ignore_eos": not resolved}, logprob=True, more=more, resolved=resolved,
                    seed=rng.randrange(2**31), priority=rng.choice((None, -3, 4)),
                    logprob_start=rng.choice((None, None, rng.randrange(len(prompt)))),
                    aborted_at=arrives + rng.randrange(25) if rng.random() < 0.1 else None,
                )
            )  # fmt: skip
    return script


def _sampling(rng: random.Random) -> dict[str, Any]:
    sampling = rng.choice(({"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.5}))
    more: tuple[dict[str, Any], ...] = (
        {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}, {"frequency_penalty": 0.9}, {"presence_penalty": -0.7},
        {"repetition_penalty": 1.3}, {"logit_bias": {rng.randrange(ORDINARY): 4.0, rng.randrange(ORDINARY): -100.0}},
    )  # fmt: skip
    return sampling | {name: value for one in more if rng.random() < 0.15 for name, value in one.items()}


def check(form: Form, folder: Path, rng: random.Random) -> str:
    """What ran. Raises AssertionError for a difference, and Refused for a launch that is refused by name."""
    path = _checkpoint(form, folder / "model", rng)
    flags, script = form.common | form.flags, sessions(form, rng)
    if form.adapters:
        made = [make_adapter(folder / name, path, form.adapters, 4, rng.randrange(1000)) for name in "ab"]
        form.common |= {"lora_paths": [f"{one.name}={one}" for one in made]}
        flags |= {"lora_paths": form.common["lora_paths"], "max_loras_per_batch": rng.choice((1, 2, 4))}
    try:
        found, drafted = serve(path, folder / "board", script, flags, form.scheduling)
    except ConfigError as error:
        raise Refused(str(error)) from error
    each = [replace(one, arrives=0, aborted_at=None) for one in script]
    alone, _ = serve(path, folder / "alone", each, form.common | EXACT, {})
    retractions = sum(answer.retractions for answer in found.values())
    for item in script:
        compare(item, found[item.rid], alone[item.rid])
    cached = sum(answer.cached_tokens for answer in found.values())
    return f"{form.kind}: {len(script)} requests, {retractions} retractions, {cached} cached tokens, {drafted} drafts"


def _checkpoint(form: Form, path: Path, rng: random.Random) -> Path:
    seed = rng.randrange(2**31)
    try:
        if form.kind == "deepseek_v4":
            return make_v4(path, seed, num_mtp_layers=1, **form.fields)
        if form.kind in FORMULAS:
            layers = form.fields["num_hidden_layers"]
            if form.kind == "kimi_k3":
                return make_k3(path, seed, **form.fields)
            if form.kind == "ling_v2_5":
                mtp = int(form.flags.get("speculative_algorithm") == "NEXTN")
                return make_ling(path, seed, num_mtp_layers=mtp, **form.fields)
            own = {"dspark_target_layer_ids": [rng.randrange(layers)]}
            return make_v41_dspark(path, seed, agreeing=True, **form.fields, **own)
        mtp = int(form.flags.get("speculative_algorithm") == "NEXTN")
        maker = agreeing_checkpoint if mtp else make_checkpoint
        return maker(form.kind, path, seed, num_mtp_layers=mtp, **form.fields)
    except Exception as error:
        raise Refused(f"no checkpoint: {type(error).__name__}: {error}") from error


def serve(
    path: Path, board: Path, script: list[Scripted], flags: dict[str, Any], scheduling: dict[str, Any]
) -> tuple[dict[str, Answer], int]:
    """The answers, and the number of accepted drafts."""
    engine = InProcessEngine(path, board, **flags)
    try:
        tokenizer, eos = load_tokenizer(path), tuple(sorted(engine.config.model.eos_token_ids))
        grammars = GrammarCompiler(
            lambda: open_backend(GrammarSettings(), tokenizer, engine.config.model.vocab_size, eos)
        )
        grammars.get(Constraint("regex", REGEX)).exception()
        overlap = not flags.get("disable_overlap_schedule", False)
        answers = engine.run(script, overlap=overlap, grammars=grammars, **scheduling)
        drafts = engine.scheduler.stats().speculation
        return answers, 0 if drafts is None else sum(drafts.accepted)
    finally:
        engine.close()


def compare(item: Scripted, found: Answer, alone: Answer) -> None:
    assert found.finish is not None and alone.finish is not None
    if found.finish["type"] == "abort":  # longer than the pool: refused by name
        assert item.aborted_at is not None or found.finish.get("status_code") == 400, found.finish
        return
    assert len(found.prompt_logprobs) == len(alone.prompt_logprobs)
    pairs = [*zip(found.prompt_logprobs, alone.prompt_logprobs), *zip(found.logprobs, alone.logprobs)]
    for place, (one, other) in enumerate(pairs, -len(alone.prompt_logprobs)):
        if one.logprob is None and other.logprob is None:
            continue  # of the prompt's first token
        assert one.logprob is not None and other.logprob is not None
        distance = abs(one.logprob - other.logprob)
        where = f"{item.rid} token {place} behind {len(item.prompt_ids)}"
        assert distance < TOLERANCE, f"{where}: {one[:2]}, alone {other[:2]}"
        if one.token_id != other.token_id:
            return  # a tie
    assert found.token_ids == alone.token_ids, (item.rid, found.token_ids, alone.token_ids)
    assert found.finish == alone.finish, (item.rid, found.finish, alone.finish)


def _check(form: Form, folder: Path, rng: random.Random, seed: int) -> str:
    return check(form, folder, rng)


if __name__ == "__main__":
    run_draws(__doc__, [*KINDS, *MORE_KINDS, *random_sparse_shapes.KINDS, *FORMULAS], 20, draw, _check)
