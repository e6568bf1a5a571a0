"""Train the demonstration model: `python -m moe_engine.demo.training.train --seed 0 --out DIR --minutes 50`.

The number of steps is fixed by --minutes (for the speed of a two-core machine) or given by --steps, so a run does not
depend on the speed of the machine. Every few minutes the state is saved to DIR/state.pt, which `export.py` reads.
The batch is split over single-threaded worker processes, which synchronize only once per step.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from .corpus import EVERYTHING, FACTS_FIRST, FINISH, Mixture, Packer, held_out
from .model import DemoConfig, DemoModel, count_parameters
from .optim import make_optimizers, matrices, split
from .vocabulary import train_tokenizer, write_tokenizer

STEPS_PER_MINUTE = 75
"""Steps per minute on two cores of a current server processor."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a run, except the model's."""

    steps: int
    seed: int = 0
    lr: float = 3e-3
    warmup: int = 100
    decay_steps: int = 1400
    rows: int = 4
    row_length: int = 512
    long_rows: int = 2
    long_row_length: int = 2048
    long_every: int = 20
    mtp_weight: float = 0.3
    mtp_every: int = 2
    chain_every: int = 4
    first_steps: int = 1000
    last_steps: int = 1000
    balance_rates: tuple[float, float] = (1e-3, 4e-3)

    def learning_rate(self, step: int) -> float:
        """Warm-up, plateau, linear decay to nearly zero."""
        return self.lr * max(0.01, min(1.0, (step + 1) / self.warmup, (self.steps - step) / self.decay_steps))

    def mixture(self, step: int) -> Mixture:
        """The data mixture of this step's rows."""
        if step >= self.steps - self.last_steps:
            return FINISH
        return EVERYTHING if step >= self.first_steps else FACTS_FIRST


def weighted_loss(model: DemoModel, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy under per-token weights; the head only runs where the weight is not zero."""
    where = weights > 0
    each = F.cross_entropy(model.logits(hidden[where]).float(), targets[where], reduction="none")
    return (each * weights[where]).sum() / weights.sum()


def losses(model: DemoModel, ids: Tensor, weights: Tensor, mtp_steps: int) -> list[Tensor]:
    """Loss of the main head, then of `mtp_steps` steps of the MTP head (each recycling the state of the one before)."""
    n = ids.shape[1] - 2
    state = model.hidden(ids[:, :n])
    out = [weighted_loss(model, state, ids[:, 1 : n + 1], weights[:, 1 : n + 1])]
    for j in range(1, mtp_steps + 1):
        state = model.mtp_hidden(ids[:, j : n + 1], state[:, : n + 1 - j])
        out.append(weighted_loss(model, state, ids[:, j + 1 :], weights[:, j + 1 :]))
    return out


@torch.no_grad()
def average(model: DemoModel) -> None:
    """Averages gradients and router loads over all workers."""
    tensors = [p.grad for p in model.parameters() if p.grad is not None] + [r.load for r in model.routers()]
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(mean.view_as(tensor))


@torch.no_grad()
def quick_score(model: DemoModel, packer: Packer) -> dict[str, float]:
    """Exact-match accuracy on a few held-out items of every task (greedy answers, by teacher forcing)."""
    from .evaluate import exact_matches

    by_task: dict[str, list[bool]] = {}
    items = list(held_out())
    chosen = []
    for task in dict.fromkeys(e.task for e in items):
        group = [e for e in items if e.task == task]
        chosen += group[:: max(1, len(group) // 48)]
    for example, good in zip(chosen, exact_matches(model, packer.tokenizer, chosen)):
        by_task.setdefault(example.task, []).append(good)
    return {task: round(sum(v) / len(v), 3) for task, v in by_task.items()}


@torch.no_grad()
def exchange(shares: list[list[nn.Parameter]]) -> None:
    """Broadcasts each worker's updated matrices to the others."""
    for owner, share in enumerate(shares):
        flat = torch.cat([p.flatten() for p in share])
        dist.broadcast(flat, owner)
        if owner != dist.get_rank():
            for p, value in zip(share, flat.split([p.numel() for p in share])):
                p.copy_(value.view_as(p))


def write(content: dict[str, Any], path: Path) -> None:
    """Saves atomically, so that a reader never sees a partial file."""
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary)
    temporary.replace(path)


def save(
    model: DemoModel, optimizers: list[torch.optim.Optimizer], packer: Packer, folder: Path, step: int, rank: int
) -> None:
    """Saves the state for --resume: each worker its optimizers, the first worker everything else."""
    write({"step": step, "optimizers": [opt.state_dict() for opt in optimizers]}, folder / f"optimizer-{rank}.pt")
    if rank == 0:
        data = {"rng": packer.rng.getstate(), "waiting": packer.waiting}
        write(
            {"config": model.cfg.to_dict(), "state": model.state_dict(), "step": step, "data": data},
            folder / "state.pt",
        )


def load(model: DemoModel, optimizers: list[torch.optim.Optimizer], packer: Packer, folder: Path, rank: int) -> int:
    """Resumes from a saved state; returns the first step."""
    content = torch.load(folder / "state.pt", weights_only=False)
    model.load_state_dict(content["state"])
    mine = torch.load(folder / f"optimizer-{rank}.pt", weights_only=False)
    if mine["step"] != content["step"]:
        raise SystemExit(f"{folder} has files of different steps: start again without --resume")
    for opt, state in zip(optimizers, mine["optimizers"]):
        opt.load_state_dict(state)
    packer.rng.setstate(content["data"]["rng"])
    packer.waiting = content["data"]["waiting"]
    return content["step"]


@dataclass(frozen=True)
class Run:
    """Output folder, intervals and workers of a run."""

    folder: Path
    workers: int = 2
    threads: int = 1
    save_every: int = 0
    score_every: int = 0
    resume: bool = False


def train(cfg: DemoConfig, recipe: Recipe, run: Run) -> None:
    """Run the recipe in `run.workers` processes."""
    run.folder.mkdir(parents=True, exist_ok=True)
    if not run.resume:
        write_tokenizer(train_tokenizer(cfg.vocab_size, recipe.seed), run.folder, cfg.max_position_embeddings)
    rendezvous = run.folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    torch.multiprocessing.spawn(work, (cfg, recipe, run, rendezvous), nprocs=run.workers)


def work(rank: int, cfg: DemoConfig, recipe: Recipe, run: Run, rendezvous: Path) -> None:
    """One worker: every worker packs the same rows, processes its share, and applies the same update."""
    torch.set_num_threads(run.threads)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=run.workers)
    torch.manual_seed(recipe.seed)
    packer = Packer(Tokenizer.from_file(str(run.folder / "tokenizer.json")), recipe.seed + 1)
    model = DemoModel(cfg)
    shares = split(matrices(model), run.workers)
    optimizers = make_optimizers(model, recipe.lr, shares, rank)
    first = load(model, optimizers, packer, run.folder, rank) if run.resume else 0
    log = (run.folder / "log.jsonl").open("a" if run.resume else "w", encoding="utf-8") if rank == 0 else None
    if rank == 0:
        print(f"{count_parameters(model) / 1e6:.2f} M parameters, steps {first} to {recipe.steps}", flush=True)
    began, bar = (
        time.monotonic(),
        tqdm(range(first, recipe.steps), mininterval=10, dynamic_ncols=True, disable=rank > 0),
    )
    mtp_loss = float("nan")
    for step in bar:
        second = step >= recipe.first_steps
        packer.mix = recipe.mixture(step)
        long = step % recipe.long_every == recipe.long_every - 1
        if long:
            rows, weights = packer.rows(recipe.long_row_length, recipe.long_rows, long)
        else:
            rows, weights = packer.rows(recipe.row_length, recipe.rows)
        rate = recipe.learning_rate(step)
        model.zero_grad(set_to_none=True)
        for opt in optimizers:
            for group in opt.param_groups:
                group["lr"] = rate
        mtp_steps = 2 if step % recipe.chain_every == 0 else int(step % recipe.mtp_every == 0)
        ids, share = torch.from_numpy(rows.astype("int64")), slice(rank, None, run.workers)
        main, *mtp = losses(model, ids[share], torch.from_numpy(weights)[share], mtp_steps)
        (main + sum(mtp) * recipe.mtp_weight).backward()
        average(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in optimizers:
            opt.step()
        exchange(shares)
        for router in model.routers()[: None if mtp else -1]:
            router.balance(recipe.balance_rates[second] * rate / recipe.lr)
        mtp_loss = mtp[0].item() if mtp else mtp_loss
        if run.save_every and step % run.save_every == run.save_every - 1:
            save(model, optimizers, packer, run.folder, step + 1, rank)
        if log is None:
            continue
        if step % 25 == 0 or step == recipe.steps - 1:
            worst = max(float(r.load.max() / r.load.mean()) for r in model.routers())
            record = {
                "step": step,
                "loss": main.item(),
                "mtp": mtp_loss,
                "imbalance": worst,
                "seconds": time.monotonic() - began,
            }
            if not math.isfinite(record["loss"]):
                raise SystemExit(f"the loss is {record['loss']} at step {step}")
            if run.score_every and step and step % run.score_every == 0:
                scores = quick_score(model, packer)
                bar.write(json.dumps(scores))
                record |= scores
            log.write(json.dumps(record) + "\n")
            log.flush()
            bar.set_postfix(loss=f"{main.item():.3f}", mtp=f"{mtp_loss:.3f}", imbalance=f"{worst:.2f}")
    save(model, optimizers, packer, run.folder, recipe.steps, rank)
    if rank == 0:
        print(f"{(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for state.pt, the tokenizer and log.jsonl")
    parser.add_argument("--minutes", type=float, default=50, help="size of the run, for two cores")
    parser.add_argument("--steps", type=int, help="number of steps, instead of --minutes")
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--workers", type=int, default=2, help="processes that share every batch")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument("--resume", action="store_true", help="resume from DIR/state.pt")
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--score-every", type=int, default=250)
    args = parser.parse_args()
    steps = args.steps or round(args.minutes * STEPS_PER_MINUTE)
    recipe = Recipe(steps=steps, seed=args.seed, lr=args.lr)
    train(
        DemoConfig(), recipe, Run(args.out, args.workers, args.threads, args.save_every, args.score_every, args.resume)
    )


if __name__ == "__main__":
    main()
