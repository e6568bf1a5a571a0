"""Measure a checkpoint: `python -m moe_engine.demo.training.evaluate [--state DIR] [--check-transformers]`.

Accuracy is exact match of the greedy answer on phrasings and sums that are not in the training data. Agreement is the
rate at which the MTP head, drafting four tokens from its own recycled state, matches the model's own continuation.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from moe_engine.demo import CHECKPOINT_DIR

from .chat import PAD
from .checkpoint import dequantize, load_checkpoint, read_tensors
from .corpus import Example, held_out
from .model import DemoModel

DRAFTS = 4


def _padded(rows: list[list[int]], pad: int | None) -> Tensor:
    """Rows of different lengths as one padded matrix; causal attention ignores the padding."""
    out = torch.full((len(rows), max(map(len, rows))), pad or 0)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


@torch.no_grad()
def exact_matches(model: DemoModel, tokenizer: Tokenizer, examples: list[Example]) -> list[bool]:
    """True if the greedy answer equals the expected one: every expected token is the argmax."""
    pad = tokenizer.token_to_id(PAD)
    prompts = [tokenizer.encode(e.prompt, add_special_tokens=False).ids for e in examples]
    whole = [p + tokenizer.encode(e.answer, add_special_tokens=False).ids for p, e in zip(prompts, examples)]
    good = [False] * len(examples)
    order = sorted(range(len(examples)), key=lambda i: len(whole[i]))
    for start in range(0, len(order), 64):
        chunk = order[start : start + 64]
        ids = _padded([whole[i] for i in chunk], pad)
        choice = model.logits(model.hidden(ids[:, :-1])).argmax(-1)
        for row, i in enumerate(chunk):
            first, end = len(prompts[i]), len(whole[i])
            good[i] = bool((choice[row, first - 1 : end - 1] == ids[row, first:end]).all())
    return good


def accuracy(model: DemoModel, tokenizer: Tokenizer, examples: list[Example], title: str) -> dict[str, float]:
    """Share of exact matches per task."""
    hits: dict[str, list[bool]] = {e.task: [] for e in examples}
    for start in tqdm(range(0, len(examples), 512), desc=title, mininterval=2):
        chunk = examples[start : start + 512]
        for example, good in zip(chunk, exact_matches(model, tokenizer, chunk)):
            hits[example.task].append(good)
    return {task: round(sum(v) / len(v), 4) for task, v in hits.items()}


@torch.no_grad()
def greedy(model: DemoModel, prompt: list[int], eos: int, limit: int) -> list[int]:
    """Prompt and greedy continuation, without a cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        ids.append(int(model.logits(model.hidden(torch.tensor([ids]))[0, -1]).argmax()))
        if ids[-1] == eos:
            break
    return ids


@torch.no_grad()
def draft(model: DemoModel, ids: list[int], first: int) -> Tensor:
    """Drafts [anchor, DRAFTS] for anchors t = first .. n-2.

    At anchor t the model has just sampled token t + 1; the first draft is token t + 2. Later drafts feed the drafted
    token and the recycled state to the MTP layer, whose earlier positions keep the model's own hidden states.
    """
    tokens = torch.tensor([ids])
    hidden = model.hidden(tokens)
    z = model.mtp.combine(model.embed_tokens(tokens[:, 1:]), hidden[:, :-1], model.dtype)
    anchors = torch.arange(first, len(ids) - 1)
    rows = torch.cat((z, torch.zeros(1, DRAFTS, z.shape[-1])), 1).expand(len(anchors), -1, -1).clone()
    each, drafts = torch.arange(len(anchors)), []
    cos, sin = model.cos[: rows.shape[1]], model.sin[: rows.shape[1]]
    for j in range(DRAFTS):
        state = model.mtp.shared_head["norm"](model.mtp(rows, cos, sin, model.dtype), model.dtype)[each, anchors + j]
        drafts.append(model.logits(state).argmax(-1))
        if j + 1 < DRAFTS:
            rows[each, anchors + j + 1] = model.mtp.combine(model.embed_tokens(drafts[-1]), state, model.dtype)
    return torch.stack(drafts, 1)


def agreement(model: DemoModel, tokenizer: Tokenizer, examples: list[Example], limit: int = 64) -> dict[str, Any]:
    """Per draft position: acceptance rate of it and all before it, and conditional rate given those before it."""
    accepted, reached, tried = [0] * DRAFTS, [0] * DRAFTS, [0] * DRAFTS
    for example in tqdm(examples, desc="drafting", mininterval=2):
        prompt = tokenizer.encode(example.prompt, add_special_tokens=False).ids
        ids = greedy(model, prompt, 1, limit)
        for row, anchor in zip(draft(model, ids, len(prompt) - 1), range(len(prompt) - 1, len(ids) - 1)):
            good = True
            for j in range(DRAFTS):
                if anchor + 2 + j >= len(ids):
                    break
                tried[j] += 1
                reached[j] += good
                good = good and int(row[j]) == ids[anchor + 2 + j]
                accepted[j] += good
    return {
        "accepted": [round(a / t, 4) for a, t in zip(accepted, tried)],
        "accepted_given_previous": [round(a / max(r, 1), 4) for a, r in zip(accepted, reached)],
        "tokens_per_step": round(1 + sum(a / t for a, t in zip(accepted, tried)), 3),
        "anchors": tried[0],
    }


@torch.no_grad()
def transformers_difference(folder: Path, prompts: list[list[int]]) -> float:
    """Largest difference between this model's logits and those of transformers on the dequantized weights."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    mtp = f"model.layers.{config['num_hidden_layers']}."
    tensors = {n: t.contiguous() for n, t in dequantize(read_tensors(folder)).items() if not n.startswith(mtp)}
    with tempfile.TemporaryDirectory() as temporary:
        save_file(tensors, Path(temporary) / "model.safetensors", metadata={"format": "pt"})
        DeepseekV3Config(**config).save_pretrained(temporary)
        other = DeepseekV3ForCausalLM.from_pretrained(temporary, dtype=torch.float32, attn_implementation="eager")
    model = load_checkpoint(folder)
    worst = 0.0
    for ids in prompts:
        tokens = torch.tensor([ids])
        worst = max(worst, float((other(tokens).logits - model.logits(model.hidden(tokens))).abs().max()))
    return worst


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT_DIR)
    parser.add_argument("--state", type=Path, help="also measure the unquantized weights of this training folder")
    parser.add_argument("--check-transformers", action="store_true", help="compare logits with transformers")
    parser.add_argument("--drafts", type=int, default=8, help="prompts per task for the MTP agreement")
    parser.add_argument("--every", type=int, default=1, help="use every n-th item only")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", type=Path, help="default: report.json next to the checkpoint's files")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    model = load_checkpoint(args.checkpoint)
    examples = list(held_out())[:: args.every]
    report: dict[str, Any] = {"items": len(examples), "accuracy": accuracy(model, tokenizer, examples, "FP8 weights")}
    if args.state:
        from .export import load_state

        master, report["steps"] = load_state(args.state)
        report["accuracy_unquantized"] = accuracy(master, tokenizer, examples, "float32 weights")
    chosen = []
    for task in dict.fromkeys(e.task for e in examples):
        group = [e for e in examples if e.task == task]
        chosen += group[:: max(1, len(group) // args.drafts)][: args.drafts]
    report["mtp"] = agreement(model, tokenizer, chosen)
    if args.check_transformers:
        prompts = [tokenizer.encode(e.prompt + e.answer, add_special_tokens=False).ids for e in chosen[::6]]
        report["transformers_max_difference"] = transformers_difference(args.checkpoint, prompts)
    text = json.dumps(report, indent=2)
    (args.report or args.checkpoint / "report.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
