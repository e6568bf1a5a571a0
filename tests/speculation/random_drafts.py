"""Random drafters on random targets with features of requests: ``python -m tests.speculation.random_drafts``.

EAGLE heads with chains and trees, DFlash and DSpark heads, MTP layers in the model's checkpoint and exported ones,
DSpark layers of DeepSeek V4 and V4.1. Requests are greedy and sampled, with penalties, biases, stop tokens, a regular
expression, log-probabilities, under drawn chunks, pages, memory and limits. Answers are those of the requests one by
one without drafts, up to the first token whose log-probability is that of another one (a tie).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moe_engine.errors import ConfigError
from tests.engine import random_served
from tests.engine.harness import Scripted
from tests.engine.random_forms import EXACT, MTP_KINDS, ORDINARY, REGEX, compare, serve
from tests.engine.test_exported_mtp import exported
from tests.models import random_shapes, random_sparse_shapes, v4_mtp
from tests.models.random_shapes import Refused, run_draws
from tests.models.v41_dspark import make_v41_dspark
from tests.speculation import eagle_shapes
from tests.speculation.agreeing import agreeing_checkpoint
from tests.speculation.block_heads import BlockForm
from tests.speculation.eagle_heads import Form, Target
from tests.speculation.eagle_pairs import reference

CHAINS = (
    "bailing_hybrid", "qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v32", "glm5_next", "minimax_m3", "gpt_oss",
    "mimo_v2_flash",
)  # fmt: skip
"""Targets whose drafts are chains."""
KINDS = ("head", "mtp", "exported", "v4 mtp", "v4 dspark", "v41 dspark")
VOCAB_SIZE = 320


@dataclass
class Drawn:
    """A target, its drafter and the flags: `common` also those of the requests alone; `features`: share of the requests
    that have one."""

    kind: str
    target: str
    fields: dict[str, Any]
    flags: dict[str, Any]
    head: Form | BlockForm | None = None
    common: dict[str, Any] = field(default_factory=lambda: {"dtype": "float32"})
    scheduling: dict[str, Any] = field(default_factory=dict)
    features: float = 0.5


def draw(kind: str, rng: random.Random) -> Drawn:
    drawn = _draw_target(kind, rng)
    compressed = drawn.target.startswith("deepseek_v4")
    page = rng.choice((16, 32) if compressed or drawn.target in random_sparse_shapes.KINDS else (1, 2, 4, 16))
    chunk = rng.choice((-1, 16, 32, 48))
    drawn.flags |= {
        "page_size": page, "chunked_prefill_size": chunk if chunk < 0 else -(-chunk // page) * page,
        "max_total_tokens": rng.choice((256, 512, 2048)), "max_running_requests": rng.choice((1, 3, 8)),
        "enable_mixed_chunk": chunk > 0 and rng.random() < 0.5, "disable_radix_cache": rng.random() < 0.2,
        "disable_overlap_schedule": rng.random() < 0.3,
    }  # fmt: skip
    if rng.random() < 0.4:
        drawn.scheduling = {"retract_decode_steps": 1, "schedule_conservativeness": 0.0, "clip_max_new_tokens": 2}
        drawn.scheduling |= {"num_slots": rng.choice((96, 128, 160))}
        drawn.flags["max_running_requests"] = 8
    drawn.features = rng.choice((0.0, 0.5, 0.8))
    return drawn


def _draw_target(kind: str, rng: random.Random) -> Drawn:
    if kind == "head":
        found = eagle_shapes.draw(rng.choice((*eagle_shapes.TARGETS, *eagle_shapes.MORE_TARGETS)), rng)
        branches = isinstance(found.form, Form) and found.kind not in CHAINS and not found.fields.get("sliding_window")
        flags = {"speculative_algorithm": found.form.algorithm} | _tree(rng, branches)
        if isinstance(found.form, BlockForm):
            flags = {"speculative_algorithm": found.form.algorithm, "speculative_num_steps": found.depth}
            flags |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": found.depth + 1}
        vocab_size = max(VOCAB_SIZE, found.fields["vocab_size"])  # a grammar needs the special tokens
        return Drawn(kind, found.kind, found.fields | {"vocab_size": vocab_size}, flags, found.form)
    if kind in ("mtp", "exported"):
        target = rng.choice(MTP_KINDS) if kind == "mtp" else "deepseek_v3"
        drawer = random_sparse_shapes if target in random_sparse_shapes.KINDS else random_shapes
        fields = drawer.draw(target, rng).fields | {"vocab_size": VOCAB_SIZE}
        if kind == "exported":
            fields["num_hidden_layers"] = 3
        return Drawn(kind, target, fields, {"speculative_algorithm": "NEXTN"} | _tree(rng, target not in CHAINS))
    if kind == "v41 dspark":
        fields = random_served._fields("deepseek_v41", rng)
        fields.pop("tower")
        return Drawn(kind, "deepseek_v41", fields, _blocks(rng))
    fields = random_sparse_shapes.draw("deepseek_v4", rng).fields | {"vocab_size": VOCAB_SIZE}
    make = v4_mtp.make_agreeing if kind == "v4 mtp" else random_served._dspark(rng, fields)
    flags = {"speculative_algorithm": "NEXTN"} | _tree(rng, False) if kind == "v4 mtp" else _blocks(rng)
    return Drawn(kind, "deepseek_v4", fields | {"make": make}, flags)


def _tree(rng: random.Random, branches: bool) -> dict[str, Any]:
    """Flags of a chain, or of a tree."""
    steps, topk = rng.choice((1, 2, 3, 5)), rng.choice((1, 2, 3, 4)) if branches else 1
    every = 1 + topk + (steps - 1) * topk**2 if topk > 1 else steps + 1
    nodes = every if topk == 1 else rng.randint(2, every)
    if rng.random() < 0.15 and topk == 1:
        return {"speculative_num_steps": "auto"}
    flags = {"speculative_num_steps": steps, "speculative_eagle_topk": topk}
    return flags | {"speculative_num_draft_tokens": min(nodes, 24)}


def _blocks(rng: random.Random) -> dict[str, Any]:
    return {"speculative_algorithm": "DSPARK"} | rng.choice(
        ({}, {"speculative_num_steps": rng.choice((1, 2, 3, "auto"))})
    )


def requests(drawn: Drawn, rng: random.Random) -> list[Scripted]:
    begin, script = [rng.randrange(ORDINARY) for _ in range(33)], []
    for i in range(rng.choice((3, 6, 10))):
        own = begin[: rng.choice((0, 0, 16, 33))] + [rng.randrange(ORDINARY) for _ in range(rng.choice((1, 2, 9, 30)))]
        sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": rng.random() < 0.5}
        if rng.random() < 0.4:
            sampling |= {"temperature": rng.choice((0.5, 0.9)), "top_p": rng.choice((1.0, 0.9))}
            sampling |= {"top_k": rng.choice((-1, 20)), "min_p": rng.choice((0.0, 0.02))}
        resolved: dict[str, Any] = {}
        most = rng.choice((14, 30, 30) if drawn.scheduling else (1, 2, 14, 30))
        if rng.random() < drawn.features:
            sampling |= _feature(rng, most, drawn.fields["vocab_size"])
        if rng.random() < drawn.features / 3 and "min_new_tokens" not in sampling:  # which is refused beside it
            resolved = {"constraint": {"kind": "regex", "source": REGEX}}
            sampling["ignore_eos"] = False
        script.append(
            Scripted(
                f"r{i}-", own, most, arrives=rng.randrange(3 if drawn.scheduling else 9), sampling=sampling,
                seed=rng.getrandbits(40), logprob=True, more={"top_logprobs": rng.choice((0, 3))}, resolved=resolved,
            )
        )  # fmt: skip
    return script


def _feature(rng: random.Random, most: int, vocab_size: int) -> dict[str, Any]:
    stop = rng.sample(range(vocab_size), 40)
    return rng.choice((
        {"frequency_penalty": 0.7, "presence_penalty": 0.4}, {"repetition_penalty": 1.4},
        {"logit_bias": {str(rng.randrange(vocab_size)): 6.0}}, {"stop_token_ids": stop},
        {"stop_token_ids": stop, "min_new_tokens": rng.randint(1, most)}, {"frequency_penalty": -0.5},
    ))  # fmt: skip


def make(drawn: Drawn, folder: Path, rng: random.Random) -> tuple[Path, dict[str, Any]]:
    """The target, and flags with the paths of its drafter."""
    seed = rng.randrange(1000)
    if drawn.target == "deepseek_v41":
        return make_v41_dspark(folder / "target", seed, **drawn.fields), {}
    if drawn.target == "deepseek_v4":
        fields = dict(drawn.fields)
        return fields.pop("make")(folder / "target", seed, **fields), {}
    mtp = int(drawn.head is None)
    path = agreeing_checkpoint(drawn.target, folder / "target", seed, num_mtp_layers=mtp, **drawn.fields)
    if drawn.kind == "exported":
        (parts := folder / "parts").mkdir()
        model, layer = exported(path, parts)
        (model / "tokenizer.json").write_text((path / "tokenizer.json").read_text())
        (model / "tokenizer_config.json").write_text((path / "tokenizer_config.json").read_text())
        return model, {"speculative_draft_model_path": str(layer)}
    if drawn.head is None:
        return path, {}
    target = Target(path)
    head = reference(drawn.head, target, seed)
    prompts = [[rng.randrange(ORDINARY) for _ in range(9 * i + 1)] for i in range(4)]
    head.distil([target.continued(prompt, 32) for prompt in prompts], 20)
    written = head.write(folder / "head")
    flags: dict[str, Any] = {"speculative_draft_model_path": str(written)}
    if isinstance(drawn.head, Form) and drawn.head.token_map:
        torch.save(list(drawn.head.token_map), written / "map.pt")
        flags["speculative_token_map"] = str(written / "map.pt")
    return path, flags


def check(drawn: Drawn, folder: Path, rng: random.Random) -> str:
    """What ran. Raises AssertionError for a difference, and Refused for a launch that is refused by name."""
    try:
        path, flags = make(drawn, folder, rng)
    except Exception as error:
        raise Refused(f"no checkpoint: {type(error).__name__}: {error}") from error
    script = requests(drawn, rng)
    try:
        found, drafts = serve(path, folder / "board", script, drawn.common | drawn.flags | flags, drawn.scheduling)
    except ConfigError as error:
        raise Refused(str(error)) from error
    alone, _ = serve(path, folder / "alone", [replace(one, arrives=0) for one in script], drawn.common | EXACT, {})
    for item in script:
        compare(item, found[item.rid], alone[item.rid])
    retractions = sum(answer.retractions for answer in found.values())
    return f"{drawn.kind}, {drawn.target}: {len(script)} requests, {drafts} drafts, {retractions} retractions"


def _check(drawn: Drawn, folder: Path, rng: random.Random, seed: int) -> str:
    return check(drawn, folder, rng)


if __name__ == "__main__":
    run_draws(__doc__, KINDS, 20, draw, _check)
