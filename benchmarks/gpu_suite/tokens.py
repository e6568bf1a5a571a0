"""Greedy tokens of the embedded model on the GPU against the CPU: an end-to-end check. Tokens must be equal in float32;
in bfloat16 each token must be near the best by the CPU's float32 model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu_suite.setting import Setting

PROMPTS = (
    "The capital of Japan is", "The capital of Peru is", "2 + 3 =", "Once upon a time", "A long line of people",
    "Water boils at", "The opposite of hot is", "List three colours:",
)  # fmt: skip
TOKENS = 32
SMALL = {"context_length": 32, "max_total_tokens": 512, "chunked_prefill_size": 16}

MOST_REGRET = 0.5
"""Max nats by which a token may be less likely than the best. In bfloat16, FP8 weights are multiplied with activations
of 3 fraction bits, which changes logits of about 10 by a few percent."""


def measure(setting: Setting) -> dict[str, Any]:
    """Each prompt alone, and all at once, in either order; `wrong` counts answers that differ anywhere in float32, or
    have a token beyond `MOST_REGRET` in bfloat16."""
    count, flags = (4, SMALL) if setting.dry else (TOKENS, {})
    expected, found = (greedy(device, count, "float32", flags) for device in ("cpu", setting.kind))
    lines: list[dict[str, Any]] = [
        {"prompt": prompt, "how": how, "same": _agree(want, got), "of": len(want)}
        for how in expected
        for prompt, want, got in zip(PROMPTS, expected[how], found[how], strict=True)
    ]
    worst = regrets(greedy(setting.kind, count, "bfloat16", flags)["together"])
    wrong = sum(line["same"] < line["of"] for line in lines) + sum(regret > MOST_REGRET for regret in worst)
    return {"lines": lines, "bfloat16_regrets": worst, "wrong": wrong}


def greedy(device: str, count: int, dtype: str, flags: Mapping[str, int]) -> dict[str, list[list[int]]]:
    """Token ids by submission mode of the prompts."""
    from moe_engine import Engine

    ask = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
    with Engine(device=device, dtype=dtype, max_running_requests=len(PROMPTS), **flags) as engine:  # type: ignore[arg-type]
        alone = [engine.generate(prompt, ask)["output_ids"] for prompt in PROMPTS[:3]]  # type: ignore[call-overload, index]
        together = [answer["output_ids"] for answer in engine.generate(list(PROMPTS), ask)]  # type: ignore[index]
    return {"alone": [*alone, *together[3:]], "together": together}


def regrets(answers: list[list[int]]) -> list[float]:
    """Per prompt: by how many nats the answer's worst token is less likely than the best one at its position, according
    to the CPU's float32 model given the preceding tokens."""
    from moe_engine import Engine

    found = []
    with Engine(device="cpu", dtype="float32", max_running_requests=len(PROMPTS)) as engine:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            ids = [*engine.tokenize(prompt), *answer]
            result = engine.generate(
                input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": 1}, return_logprob=True,
                logprob_start_len=len(ids) - len(answer) - 1, top_logprobs_num=1,
            )  # fmt: skip
            meta: dict[str, Any] = result["meta_info"]  # type: ignore[call-overload, index]
            own = meta["input_token_logprobs"][-len(answer) :]
            best = meta["input_top_logprobs"][-len(answer) :]
            assert [entry[1] for entry in own] == answer
            found.append(max(rival[0][0] - entry[0] for entry, rival in zip(own, best, strict=True)))
    return found


def _agree(want: list[int], got: list[int]) -> int:
    """Number of tokens before the first difference."""
    return next((place for place, (a, b) in enumerate(zip(want, got)) if a != b), min(len(want), len(got)))


def as_text(values: dict[str, Any]) -> str:
    equal = sum(line["same"] == line["of"] for line in values["lines"])
    worst = min(values["lines"], key=lambda line: line["same"])
    text = f"{equal} of {len(values['lines'])} answers have the CPU's greedy tokens"
    if worst["same"] < worst["of"]:
        text += f"; {worst['prompt']!r} only the first {worst['same']}"
    most = max(values["bfloat16_regrets"])
    return f"{text}; in bfloat16 the worst token is {most:.2f} nats below the best (at most {MOST_REGRET})"
