"""Tokens of a fixed trace, to compare two builds of the engine: ``python -m tests.token_trace --json FILE``.

The trace serves the same requests (greedy, sampled, penalties, log-probabilities, copies, stop strings, shared prefix)
on seeded float32 checkpoints of several families under several parallel forms and drafters. ``--against FILE`` compares
with the file of another build on the same machine, and exits with 1 on a difference. Only the public API is used, so
that the command runs on builds with other file names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from moe_engine import Engine
from tests.models.checkpoints import make_checkpoint

ORDINARY = 250
"""Token ids from here on are special."""
FORMS: dict[str, dict[str, Any]] = {
    "one": {},
    "chunked": {"chunked_prefill_size": 16, "enable_mixed_chunk": True, "page_size": 4},
    "no radix": {"disable_radix_cache": True, "disable_overlap_schedule": True},
    "tp": {"tp_size": 2},
    "dp": {"tp_size": 2, "attn_dp_size": 2},
    "replicas": {"dp_size": 2},
    "ep": {"tp_size": 2, "ep_size": 2},
    "allgather": {"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "allgather"},
    "all_to_all": {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
    "low latency": {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all", "deepep_mode": "low_latency"},
    "overlap": {"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "all_to_all", "enable_two_batch_overlap": True},
}
NEXTN = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 1}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "nextn": {**NEXTN, "speculative_num_draft_tokens": 3},
    "tree": {**NEXTN, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
}
MODELS = ("deepseek_v3", "deepseek_v2_lite", "qwen3_moe", "qwen3", "llama")


def cases() -> list[tuple[str, str, str]]:
    """(model, form, drafter): every form of V3 with every possible drafter, the other models in fewer forms."""
    found = [("deepseek_v3", form, drafter) for form in FORMS for drafter in DRAFTERS]
    found = [case for case in found if case[1] in ("one", "tp") or case[2] != "tree"]
    for model in MODELS[1:]:
        forms = ["one", "chunked", "tp", "dp"]
        if model in ("deepseek_v2_lite", "qwen3_moe"):
            forms += ["ep", "all_to_all"]
        found += [(model, form, "none") for form in forms]
        found.append((model, "one", "ngram"))
    return found


def trace() -> list[dict[str, Any]]:
    """Keyword arguments of `Engine.generate`, one dictionary per call."""
    draw = random.Random(20)
    shared = [draw.randrange(ORDINARY) for _ in range(40)]

    def prompt(length: int) -> list[int]:
        return [draw.randrange(ORDINARY) for _ in range(length)]

    plain = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    sampled = {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "ignore_eos": True}
    calls: list[dict[str, Any]] = [{"input_ids": prompt(n), "sampling_params": plain} for n in (1, 7, 33, 90)]
    calls += [{"input_ids": shared + prompt(n), "sampling_params": plain} for n in (3, 9)]
    for seed in (1, 2, 3):
        calls.append({"input_ids": prompt(11 * seed), "sampling_params": {**sampled, "sampling_seed": seed}})
    penalized = {**plain, "frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2}
    calls.append({"input_ids": prompt(20), "sampling_params": penalized})
    calls.append({"input_ids": prompt(12), "sampling_params": {**plain, "min_new_tokens": 8, "ignore_eos": False}})
    calls.append({"input_ids": prompt(9), "sampling_params": {**plain, "stop": ["a", "e"]}})
    calls.append({"input_ids": prompt(14), "sampling_params": {**sampled, "sampling_seed": 5, "n": 2}})
    calls.append({"input_ids": prompt(16), "sampling_params": {**plain, "logit_bias": {"65": 4.0, "66": -100.0}}})
    calls.append(
        {"input_ids": prompt(10), "sampling_params": plain, "return_logprob": True, "top_logprobs_num": 2}
        | {"logprob_start_len": 0}
    )
    return calls


def serve(path: Path, flags: dict[str, Any]) -> list[Any]:
    """Tokens of every call of the trace, called one after the other, then all greedy calls together."""
    engine = Engine(model_path=str(path), dtype="float32", device="cpu", log_level="error", random_seed=1, **flags)
    try:
        outputs = []
        for call in trace():
            answer = engine.generate(**call)
            outputs.append([one["output_ids"] for one in (answer if isinstance(answer, list) else [answer])])
        greedy = [call for call in trace() if call["sampling_params"]["temperature"] == 0.0][:6]
        batch = engine.generate(
            input_ids=[call["input_ids"] for call in greedy],
            sampling_params=[call["sampling_params"] for call in greedy],
        )
        outputs.append([one["output_ids"] for one in batch])
        return outputs
    finally:
        engine.shutdown()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.token_trace", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="output file of the tokens")
    parser.add_argument("--against", type=Path, metavar="FILE", help="tokens of another build, for the comparison")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name contains TEXT")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for started processes
    other = json.loads(args.against.read_text()) if args.against else {}
    found: dict[str, Any] = {}
    different = []
    with tempfile.TemporaryDirectory() as folder:
        for index, (model, form, drafter) in enumerate(cases()):
            name = f"{model}, {form}, {drafter}"
            if args.only not in name:
                continue
            path = Path(folder, model)
            if not path.exists():
                mtp = 1 if model == "deepseek_v3" else 0
                make_checkpoint(model, path, seed=7, num_mtp_layers=mtp)
            found[name] = serve(path, FORMS[form] | DRAFTERS[drafter])
            same = not other or other.get(name) == found[name]
            different += [] if same else [name]
            print(f"{index + 1:3} of {len(cases())}  {name}{'' if same else ': DIFFERENT'}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")
    if other:
        print(f"{len(found)} cases, {len(different)} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
