"""Greedy tokens of the embedded model on the GPU against those of the CPU, both in float32: the whole engine agrees."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_suite.setting import Setting

PROMPTS = (
    "The capital of Japan is", "The capital of Peru is", "2 + 3 =", "Once upon a time", "A long line of people",
    "Water boils at", "The opposite of hot is", "List three colours:",
)  # fmt: skip
TOKENS = 32


def measure(setting: Setting) -> dict[str, Any]:
    """Alone and all at once, in either order; `wrong` counts answers that differ anywhere."""
    count = 4 if setting.dry else TOKENS
    expected, found = (greedy(device, count) for device in ("cpu", setting.kind))
    lines: list[dict[str, Any]] = [
        {"prompt": prompt, "how": how, "same": _agree(want, got), "of": len(want)}
        for how in expected
        for prompt, want, got in zip(PROMPTS, expected[how], found[how], strict=True)
    ]
    return {"lines": lines, "wrong": sum(line["same"] < line["of"] for line in lines)}


def greedy(device: str, count: int) -> dict[str, list[list[int]]]:
    """Token ids by how the prompts were handed over."""
    from moe_engine import Engine

    ask = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
    with Engine(device=device, dtype="float32", max_running_requests=len(PROMPTS)) as engine:
        alone = [engine.generate(prompt, ask)["output_ids"] for prompt in PROMPTS[:3]]  # type: ignore[call-overload, index]
        together = [answer["output_ids"] for answer in engine.generate(list(PROMPTS), ask)]  # type: ignore[index]
    return {"alone": [*alone, *together[3:]], "together": together}


def _agree(want: list[int], got: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((place for place, (a, b) in enumerate(zip(want, got)) if a != b), min(len(want), len(got)))


def as_text(values: dict[str, Any]) -> str:
    equal = sum(line["same"] == line["of"] for line in values["lines"])
    worst = min(values["lines"], key=lambda line: line["same"])
    text = f"{equal} of {len(values['lines'])} answers have the CPU's greedy tokens"
    return text if not values["wrong"] else f"{text}; {worst['prompt']!r} only the first {worst['same']}"
