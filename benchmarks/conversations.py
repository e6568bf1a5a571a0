"""Conversations of several turns for the serving benchmark (``--gsp-num-turns``). No command.

A turn is sent after the previous answer; its prompt is the conversation so far, with the server's own answers.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from moe_engine.tuning.answer import Answer
from moe_engine.tuning.datasets import BenchRequest, Vocabulary


def with_turns(
    requests: Sequence[BenchRequest], num_turns: int, question_len: int, vocabulary: Vocabulary, seed: int
) -> list[BenchRequest]:
    """The requests as first turns of conversations with `num_turns`, each of a random question."""
    rng = random.Random(f"{seed} turns")
    return [
        replace(
            request,
            questions=tuple(tuple(rng.choices(vocabulary.plain_ids, k=question_len)) for _ in range(num_turns - 1)),
        )
        for request in requests
    ]


async def converse(
    request: BenchRequest, ask: Callable[[BenchRequest], Awaitable[Answer]], encode: Callable[[str], list[int]]
) -> list[Answer]:
    """Answers of all turns; a failed one is the last.

    Args:
        encode: tokens of an answer, for backends that report text only.
    """
    answers = [await ask(request)]
    prompt = list(request.prompt) if not isinstance(request.prompt, str) else encode(request.prompt)
    for question in request.questions:
        last = answers[-1]
        if not last.success:
            break
        prompt += (last.output_ids or encode(last.text))[: request.output_len]
        prompt += question
        answers.append(await ask(replace(request, prompt=list(prompt), prompt_len=len(prompt), questions=())))
    return answers
