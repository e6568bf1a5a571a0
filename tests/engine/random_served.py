"""Random shapes in whole engines of random forms against the oracles:
``python -m tests.engine.random_served --count 20``.

DeepSeek V4 and V4.1, Kimi K3, Kimi K2.5 and Pixtral, with images and quantized weights where they have them: on several
ranks, with drawn pages, chunks and memory, with drafts, prompts that end at borders of pages and windows, prompts that
repeat. Tokens and log-probabilities are those of the oracle, as in docs/parity.md.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.planning.prepare import prepare
from tests.models import random_images, random_reference_shapes, random_sparse_shapes, v4_dspark, v4_mtp
from tests.models.family_parity import TOLERANCE, compare, serve_flags
from tests.models.parity_families import OWN_FAMILIES, Family, Prompt
from tests.models.random_shapes import Refused, run_draws

KINDS = ("deepseek_v4", "deepseek_v41", "deepseek_v41_fp4", "kimi_k3", "kimi_k25", "pixtral")
RANKS: tuple[dict[str, Any], ...] = (
    {}, {}, {"tp_size": 2}, {"tp_size": 2, "attn_dp_size": 2}, {"tp_size": 2, "ep_size": 2},
    {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
)  # fmt: skip
NUM_TOKENS, LONGEST = 14, 110


@dataclass
class Form:
    """Fields of a checkpoint and its tower, flags of an engine; `again`: prompts are asked twice."""

    kind: str
    fields: dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)
    again: bool = False


def draw(kind: str, rng: random.Random) -> Form:
    form = Form(kind, _fields(kind, rng), dict(rng.choice(RANKS)), rng.random() < 0.4)
    if kind == "pixtral":
        form.flags.pop("ep_size", None)
        form.flags.pop("moe_a2a_backend", None)
    if "tp_size" in form.flags and rng.random() < 0.9:
        _divide(form.fields)
    page = rng.choice((None, 16, 32, 64) if "deepseek" in kind else (None, 1, 2, 16, 48))
    chunk = rng.choice((None, -1, 16, 48, 64))
    if page and chunk and chunk > 0:
        chunk = -(-chunk // page) * page
    form.flags |= {
        "page_size": page, "chunked_prefill_size": chunk, "enable_mixed_chunk": bool(chunk and chunk > 0) or None,
        "max_running_requests": rng.choice((1, 2, 5, 8)), "max_total_tokens": rng.choice((512, 768, 4096)),
        "disable_overlap_schedule": rng.random() < 0.3, "disable_radix_cache": rng.random() < 0.15,
    }  # fmt: skip
    if rng.random() < 0.25 and not form.flags["disable_radix_cache"]:
        form.flags |= {"enable_hierarchical_cache": True, "hicache_ratio": 3.0}
    form.flags |= rng.choice(({}, _drafts(form, rng)))
    form.flags = {name: value for name, value in form.flags.items() if value is not None}
    return form


def _fields(kind: str, rng: random.Random) -> dict[str, Any]:
    if kind == "deepseek_v4":
        fields = random_sparse_shapes.draw(kind, rng).fields
        return fields | {"vocab_size": 320, "make": rng.choice((v4_mtp.make_agreeing, _dspark(rng, fields)))}
    if kind.startswith("deepseek_v41"):
        own = random_reference_shapes.draw(kind, rng).fields | {"vocab_size": 320, "agreeing": True}
        layers = own["num_hidden_layers"]
        own["dspark_target_layer_ids"] = sorted(rng.sample(range(layers), rng.randint(1, min(3, layers))))
        own |= {"dspark_block_size": rng.choice((2, 4, 5)), "dspark_num_experts_per_tok": rng.choice((1, 3))}
        return own | ({"tower": random_images.draw(kind, rng).tower} if kind == "deepseek_v41" else {})
    if kind == "kimi_k3":
        return random_reference_shapes.draw(kind, rng).fields | {"vocab_size": 320}
    fixed = {"patch_size", "merge_kernel_size", "image_size"}
    shape = random_images.draw(kind, rng)
    tower = {name: value for name, value in shape.tower.items() if name not in fixed}
    text = random_reference_shapes.draw("kimi_k25_int4", rng).fields if kind == "kimi_k25" else shape.text
    return text | {"vocab_size": 320, "tower": tower}


def _divide(fields: dict[str, Any]) -> None:
    """Makes sizes even, which two ranks share."""
    heads = ("num_attention_heads", "num_key_value_heads", "o_groups", "moe_intermediate_size", "intermediate_size")
    experts = ("n_routed_experts", "num_experts")
    for name in (*heads, *(name for name in experts if fields.get(name, 0) % 2)):
        if name in fields:
            fields[name] *= 2
    if "linear_attn_config" in fields:
        fields["linear_attn_config"]["num_heads"] *= 2


def _dspark(rng: random.Random, fields: dict[str, Any]) -> Any:
    layers = fields["num_hidden_layers"]
    taps = tuple(sorted(rng.sample(range(layers), rng.randint(1, min(3, layers)))))
    return partial(v4_dspark.make_dspark, agreeing=True, taps=taps)


def _drafts(form: Form, rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.25 or not form.kind.startswith("deepseek"):
        return {"speculative_algorithm": "NGRAM", "speculative_num_steps": rng.choice((1, 3, 5))}
    if form.fields.get("make") is v4_mtp.make_agreeing:
        steps = rng.choice((1, 2, 4))
        own = {"speculative_algorithm": "NEXTN", "speculative_num_steps": steps, "speculative_eagle_topk": 1}
        return own | {"speculative_num_draft_tokens": steps + 1}
    return {"speculative_algorithm": "DSPARK"} | rng.choice(({}, {"speculative_num_steps": rng.choice((1, 2, 3))}))


def prompts(family: Family, form: Form, seed: int) -> list[Prompt]:
    """Some of the family; texts that end at borders of pages and windows, and repeat each other's begin."""
    rng = random.Random(seed)
    found = family.prompts(seed, 4, LONGEST)
    page, window = form.flags.get("page_size", 16), form.fields.get("sliding_window") or 16
    text = [rng.randrange(250) for _ in range(LONGEST)]
    for border in (page, 2 * page, window, window + page):
        length = min(LONGEST, max(1, border + rng.choice((-1, 0, 1))))
        own = [*text[: rng.choice((0, length // 2, length - 1))]]
        own += [rng.randrange(250) for _ in range(length - len(own))]
        found.append(Prompt(own, own))
    return found


def check(form: Form, folder: Path, seed: int) -> str:
    """What ran. Raises AssertionError for a difference, and Refused for a launch that is refused by name."""
    try:
        family = OWN_FAMILIES[form.kind](form.kind, folder / "model", seed, **form.fields)
    except Exception as error:
        raise Refused(f"no checkpoint: {type(error).__name__}: {error}") from error
    try:
        prepare(
            EngineArgs.from_kwargs(model_path=str(family.path), device="cpu", skip_tokenizer_init=True, **form.flags)
        )
    except ConfigError as error:  # before the oracle runs
        raise Refused(str(error)) from error
    asked = prompts(family, form, seed)
    try:
        answers, cached, _ = serve_flags(family.path, asked, NUM_TOKENS, form.flags, form.again)
    except ConfigError as error:
        raise Refused(str(error)) from error
    result = compare(family, asked, answers)
    assert not result.wrong and result.error < TOLERANCE, result
    return f"{form.kind}: {result.cell}, {sum(cached)} cached tokens, {form.flags}"


def _check(form: Form, folder: Path, rng: random.Random, seed: int) -> str:
    return check(form, folder, seed)


if __name__ == "__main__":
    run_draws(__doc__, KINDS, 10, draw, _check)
