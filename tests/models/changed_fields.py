"""Single changes of config.json against transformers: ``python -m tests.models.changed_fields --count 2000``.

A field that is read wrongly, or not at all, changes transformers' logits and not the engine's. Each draw changes one
field of a random checkpoint, by itself or in a section of rotary settings: either the config is refused, or the logits
are those of transformers with the same change. Values that transformers does not load are passed over.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.errors import MoeEngineError
from tests.models import random_shapes
from tests.models.checkpoints import KINDS, MORE_KINDS, make_checkpoint
from tests.models.random_shapes import TOLERANCE, Refused, run_draws

VOCAB = 200
PASSED_OVER = {
    "architectures", "model_type", "transformers_version", "dtype", "id2label", "label2id", "vocab_size",
    "tie_word_embeddings",  # a stored head that differs is refused by the check of headers
}  # fmt: skip
KNOWN = {
    ("deepseek_v2", "norm_topk_prob"): "DeepSeek's code reads it, transformers does not",
    ("deepseek_v2_lite", "norm_topk_prob"): "the same",
    ("", "scoring_func"): "some classes of transformers have one function",
    ("longcat_flash", "mla_scale_q_lora"): "Meituan's code reads it, transformers does not",
    ("longcat_flash", "mla_scale_kv_lora"): "the same",
    ("nemotron_h", "time_step_min"): "transformers' bound of the steps; published kernels: time_step_limit",
    ("nemotron_h", "time_step_limit"): "the same",
    ("phimoe", "long_factor"): "transformers' class takes short_factor at any length",
    ("phimoe", "short_factor"): "the same",
    ("phimoe", "original_max_position_embeddings"): "the same",
}
"""Differences of transformers from the published code, by kind (empty: all) and field."""
WORDS = (
    "silu", "gelu", "gelu_pytorch_tanh", "relu", "sigmoid", "softmax", "greedy", "group_limited_greedy", "noaux_tc",
    "linear", "dynamic", "yarn", "default", "full_attention", "sliding_attention",
)  # fmt: skip
Field = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    kind: str
    seed: int


def draw(kind: str, rng: random.Random) -> Change:
    return Change(kind, rng.randrange(2**31))


def check(change: Change, folder: Path, seed: int) -> float:
    """The largest relative error of a token's logits; 0 if the config is refused. Raises Refused: transformers does not
    load the change, or differs from the published code; AssertionError: a difference, with the field."""
    rng = random.Random(seed)
    path = make_checkpoint(change.kind, folder, change.seed, tokenizer=False, dialect="transformers")
    file = path / "config.json"
    config = json.loads(file.read_text())
    config = {**_all_fields(path), **config}
    name, value = rng.choice([*_fields(config)])
    for known in (("", name[-1]), (change.kind, name[-1])):
        if known in KNOWN:
            raise Refused(KNOWN[known])
    other = rng.choice(_others(value, rng))
    section = config
    for part in name[:-1]:
        section = section[part]
    section[name[-1]] = other
    file.write_text(json.dumps(config))
    text = f"{change.kind} {'.'.join(name)}: {value!r} -> {other!r}"
    try:
        tokens, want = random_shapes.reference(path, change.seed, VOCAB)
    except Exception as error:
        raise Refused(f"{text}: {error}") from error
    if not want.isfinite().all():
        raise Refused(text)
    try:
        got = random_shapes.logits(path, "torch", change.seed, tokens)
    except MoeEngineError:
        return 0.0
    error = random_shapes.difference(got, want)
    assert error < TOLERANCE, (text, error)
    return error


def _all_fields(path: Path) -> dict[str, Any]:
    """Also those that have transformers' defaults."""
    import transformers

    found: dict[str, Any] = json.loads(transformers.AutoConfig.from_pretrained(path).to_json_string(use_diff=False))
    return found


def _fields(section: Mapping[str, Any], before: Field = ()) -> Iterator[tuple[Field, Any]]:
    for name, value in section.items():
        if name in PASSED_OVER:
            continue
        if isinstance(value, Mapping):
            yield from _fields(value, (*before, name))
        elif not isinstance(value, list) or value:
            yield (*before, name), value


def _others(value: Any, rng: random.Random) -> list[Any]:
    """Other values of the kind of this one."""
    if value is None:
        return [True, 1, 2, 0.5]
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, max(value - 1, 0), 2 * value + 1, None]
    if isinstance(value, float):
        return [1.7 * value + 0.1, 0.0, None]
    if isinstance(value, str):
        return [word for word in WORDS if word != value]
    changed = list(value)
    place = rng.randrange(len(value))
    changed[place] = rng.choice(value)
    return [value[::-1], changed, None]


def _check(change: Change, folder: Path, rng: random.Random, seed: int) -> str:
    check(change, folder, seed)
    return ""


if __name__ == "__main__":
    run_draws(__doc__, [*KINDS, *MORE_KINDS], 500, draw, _check)
