"""Tokens and log-probabilities of whole engines against transformers': ``python -m tests.models.family_parity``.

For each family a random float32 checkpoint serves 24 prompts of 1 to 600 tokens (with images, where the model takes
them) under each form below; every answer (greedy, with log-probabilities) is compared with one forward pass of
transformers over prompt and answer. ``--write`` writes the cells into docs/parity.md; other cells stay.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_engine import Engine
from tests.models.checkpoints import PHI_ROPE
from tests.models.parity_families import OWN_FAMILIES, Family, Prompt, qwen_family, text_family

NUM_PROMPTS, NUM_TOKENS, LONGEST = 24, 12, 600
TIE = 1e-5
"""Two best logits closer than this (relative) are a tie: both tokens are correct."""
TOLERANCE = 3e-4
"""Of a log-probability."""
FORMS: dict[str, dict[str, Any]] = {
    "together": {},
    "alone": {"max_running_requests": 1},
    "cached": {},
    "chunked": {"chunked_prefill_size": 48, "enable_mixed_chunk": True, "page_size": 16},
    "tp 2": {"tp_size": 2},
    "dp 2": {"tp_size": 2, "attn_dp_size": 2},
    "ep 2": {"tp_size": 2, "ep_size": 2},
    "ep 2, dp 2, all-to-all": {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
    "n-gram drafts": {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
    "MTP drafts": {
        "speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 3,
    },
    "DSpark drafts": {"speculative_algorithm": "DSPARK"},
}  # fmt: skip
EXPERT_FORMS = ("ep 2", "ep 2, dp 2, all-to-all")
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 70},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {},
    "deepseek_v2": {},
    "deepseek_v2_lite": {},
    "deepseek_v3": {"num_mtp_layers": 1},
    "deepseek_v32": {"num_mtp_layers": 1},
    "glm_moe_dsa": {"num_mtp_layers": 1, "num_hidden_layers": 4},
    "glm5_next": {"num_mtp_layers": 1},
    "deepseek_v4": {"num_mtp_layers": 1},
    "deepseek_v41": {"dspark": True},
    "deepseek_v41_fp4": {"dspark": True},
    "ministral": {},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {},
    "exaone4": {},
    "exaone_moe": {},
    "flint": {},
    "mellum": {},
    "axk1": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "cohere2": {},
    "cohere2_moe": {},
    "cohere2_vision": {},
    "granite": {},
    "granitemoe": {},
    "granite_swa": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {},
    "granitemoeshared": {},
    "glm": {},
    "glm4": {},
    "olmoe": {},
    "flex_olmo": {"num_experts": 8},
    "seed_oss": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "minimax": {},
    "minimax_m2": {},
    "minimax_m3": {"num_mtp_layers": 1},
    "mimo": {"num_mtp_layers": 1},
    "mimo_v2_flash": {},
    "step3p7": {"num_mtp_layers": 3},
    "laguna": {},
    "lfm2": {},
    "lfm2_moe": {},
    "llama4": {},
    "afmoe": {},
    "gemma2": {},
    "gemma3": {},
    "gemma3_vision": {},
    "gemma4": {},
    "glm4_moe": {"num_mtp_layers": 1},
    "glm4_moe_lite": {"num_mtp_layers": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "gpt_oss": {},
    "qwen3_next": {"num_mtp_layers": 1},
    "qwen3_5_text": {"num_mtp_layers": 1},
    "qwen3_5": {"num_mtp_layers": 1},
    "qwen3_5_moe": {"num_mtp_layers": 1},
    "qwen4_exp": {"num_mtp_layers": 1},
    "kimi_linear": {},
    "kimi_k3": {},
    "bailing_hybrid": {"num_mtp_layers": 1},
    "ling_v2": {"num_mtp_layers": 1},
    "ling_v2_5": {"num_mtp_layers": 1},
    "nemotron_h": {"num_mtp_layers": 1, "num_hidden_layers": 6},
    "longcat_flash": {"num_mtp_layers": 1, "num_hidden_layers": 4},
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "glm4v": {},
    "glm4v_moe": {},
    "kimi_k25": {},
    "mistral3": {},
    "pixtral": {},
    "mistral_large3": {},
    "mistral_large4": {},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"num_mtp_layers": 1},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {"num_mtp_layers": 1},
    "ministral3": {},
    "mistral4": {},
    "phi3": {},
    "phimoe": {"rope_scaling": PHI_ROPE | {"short_mscale": 1.3}},  # one factor, as published: that of all positions
    "solar_open": {},
    "youtu": {},
}
"""Options of the checkpoints of the table."""
IMAGE_KINDS = ("qwen3_5", "qwen3_5_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe")
DENSE = (
    "qwen3_5_text", "qwen3_5", "llama", "mistral", "qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "ernie4_5",
    "hunyuan_v1_dense", "ministral3", "mistral3", "phi3", "seed_oss", "glm", "glm4", "gemma2", "gemma3", "cohere2",
    "granite_swa",
    "lfm2", "ministral", "olmo2", "olmo3", "smollm3", "exaone4", "granite", "mimo", "youtu",
    "pixtral", "glm4v", "cohere2_vision", "gemma3_vision",
)  # fmt: skip
"""Families without experts."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"


@dataclass
class Result:
    """The result of one form: compared tokens, ties among them, tokens that differ, the largest difference of a
    log-probability, and tokens that rounding decides, which are not compared."""

    tokens: int = 0
    ties: int = 0
    wrong: int = 0
    error: float = 0.0
    unsure: int = 0

    @property
    def cell(self) -> str:
        ties = f", {self.ties} ties" if self.ties else ""
        unsure = f", {self.unsure} by rounding" if self.unsure else ""
        return f"{self.tokens - self.wrong} of {self.tokens}{ties}{unsure}; {self.error:.0e}"

    @property
    def in_table(self) -> str:
        """Without the number of tokens, if it is that of the page and all are equal."""
        return self.cell.removeprefix(f"{NUM_PROMPTS * NUM_TOKENS} of {NUM_PROMPTS * NUM_TOKENS}").lstrip(",; ")


def serve(path: Path, asked: list[Prompt], num_tokens: int, form: str) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each answer."""
    flags = {"max_total_tokens": 32768, "max_running_requests": 32} | FORMS[form]
    answers, cached, page = serve_flags(path, asked, num_tokens, flags, again=form == "cached")
    if form == "cached":
        assert all(cached[i] for i, prompt in enumerate(asked) if len(prompt.whole) > page), cached
    return answers


def serve_flags(
    path: Path, asked: list[Prompt], num_tokens: int, flags: dict[str, Any], again: bool = False
) -> tuple[list[tuple[list[int], list[float]]], list[int], int]:
    """Tokens and log-probabilities of each answer, cached tokens of each prompt, and the page size. again: prompts are
    asked twice, and the last answers count."""
    sampling = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    request: Any = {"sampling_params": sampling, "return_logprob": True}

    async def all_answers(engine: Engine) -> list[Any]:
        return list(await asyncio.gather(*(
            engine.async_generate(input_ids=prompt.ids, image_data=prompt.data or None, **request) for prompt in asked
        )))  # fmt: skip

    with Engine(str(path), **{"dtype": "float32"} | flags, cpu_threads=1, skip_tokenizer_init=True) as engine:
        for _ in range(1 + again):
            found = asyncio.run(all_answers(engine))
        page = engine.config.page_size
    infos = [answer["meta_info"] for answer in found]
    logprobs = [[entry[0] for entry in info["output_token_logprobs"]] for info in infos]
    answers = list(zip((answer["output_ids"] for answer in found), logprobs))
    return answers, [info["cached_tokens"] for info in infos], page


def compare(family: Family, asked: list[Prompt], answers: list[tuple[list[int], list[float]]]) -> Result:
    result = Result()
    for prompt, (tokens, logprobs) in zip(asked, answers):
        found = _compare_answer(family, prompt, tokens, logprobs)
        result.tokens += found.tokens
        result.ties += found.ties
        result.wrong += found.wrong
        result.unsure += found.unsure
        result.error = max(result.error, found.error)
    assert result.unsure <= 2 + result.tokens // 5, f"rounding decides {result.unsure} of {result.tokens} tokens"
    return result


def _compare_answer(family: Family, prompt: Prompt, tokens: list[int], logprobs: list[float]) -> Result:
    """Of one answer. If it differs, tokens that also differ between runs of the oracle are not compared."""
    whole, first = prompt.whole + tokens[:-1], len(prompt.whole) - 1
    logits = family.logits(whole, prompt.images)[first:].float()
    result, moved = _compare_rows(logits, tokens, logprobs, range(len(tokens))), None
    if result.wrong or result.error > TOLERANCE:
        moved = family.moved(whole, prompt.images)[first:]
        sure = [row for row in range(len(tokens)) if moved[row] < TOLERANCE]
        result = _compare_rows(logits, tokens, logprobs, sure)
        result.unsure = len(tokens) - len(sure)
    return result


def _compare_rows(logits: Tensor, tokens: list[int], logprobs: list[float], rows: Iterable[int]) -> Result:
    result, expected = Result(), logits.log_softmax(-1)
    for row in rows:
        token, best = tokens[row], int(logits[row].argmax())
        gap = float((logits[row, best] - logits[row, token]) / logits[row].abs().max())
        result.tokens += 1
        result.ties += token != best and gap <= TIE
        result.wrong += gap > TIE
        result.error = max(result.error, abs(logprobs[row] - float(expected[row, token])))
    return result


def make_family(kind: str, path: Path, seed: int) -> Family:
    if kind in OWN_FAMILIES:
        return OWN_FAMILIES[kind](kind, path, seed)
    return (qwen_family if kind in IMAGE_KINDS else text_family)(kind, path, seed, **KINDS[kind])


def run_family(
    kind: str, folder: Path, seed: int, forms: list[str], count: int = NUM_PROMPTS, longest: int = LONGEST
) -> dict[str, Result]:
    """The results of a family by form."""
    family = make_family(kind, folder / kind, seed)
    asked = family.prompts(seed, count, longest)
    return {form: compare(family, asked, serve(family.path, asked, NUM_TOKENS, form)) for form in forms}


def forms_of(kind: str) -> list[str]:
    """The forms that a family's checkpoint supports."""
    unsupported = EXPERT_FORMS if kind in DENSE else ()
    unsupported += ("tp 2", "ep 2") if kind == "granitemoehybrid" else ()  # one group of Mamba2 on one rank
    unsupported += () if KINDS[kind].get("num_mtp_layers") else ("MTP drafts",)
    unsupported += () if KINDS[kind].get("dspark") else ("DSpark drafts",)
    unsupported += ("chunked",) if kind == "gemma3_vision" else ()  # a page may not cut an image
    return [form for form in FORMS if form not in unsupported]


def write(found: dict[str, dict[str, Result]]) -> None:
    """Replaces these cells in docs/parity.md; rows and columns are in the order of `KINDS` and `FORMS`."""
    text, begin, lines = DOCUMENT.read_text().partition("| family |")
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (begin + lines).splitlines()]
    cells = {(row[0], form): cell for row in rows for form, cell in zip(head[1:], row[1:])}
    cells |= {(kind, form): one.in_table for kind, results in found.items() for form, one in results.items()}
    kinds = [kind for kind in KINDS if any((kind, form) in cells for form in FORMS)]
    made = [["family", *FORMS], ["---"] * (1 + len(FORMS))]
    made += [[kind, *(cells.get((kind, form), "") for form in FORMS)] for kind in kinds]
    DOCUMENT.write_text(text + "".join(f"| {' | '.join(row)} |\n" for row in made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--forms", nargs="*", choices=list(FORMS))
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, dict[str, Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in asked.kinds:
            found[kind] = run_family(kind, Path(folder), asked.seed, asked.forms or forms_of(kind))
            print("\n".join(f"{kind}, {form}: {result.cell}" for form, result in found[kind].items()), flush=True)
            if asked.write:
                write(found)
    wrong = sum(result.wrong for results in found.values() for result in results.values())
    print(f"seed {asked.seed}: {wrong} tokens differ")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
