"""Writes a trained state as a checkpoint: `python -m moe_engine.demo.training.export --state DIR [--out DIR]`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from moe_engine.demo import CHECKPOINT_DIR

from .checkpoint import write_checkpoint
from .model import DemoConfig, DemoModel, count_parameters
from .vocabulary import write_tokenizer


def load_state(folder: Path) -> tuple[DemoModel, int]:
    """The model of DIR/state.pt (float32 weights) and the step it was saved at."""
    content = torch.load(folder / "state.pt", weights_only=False)
    model = DemoModel(DemoConfig(**content["config"]), torch.float32)
    model.load_state_dict(content["state"])
    return model.eval(), content["step"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the --out folder of a training run")
    parser.add_argument("--out", type=Path, default=CHECKPOINT_DIR)
    args = parser.parse_args()
    model, step = load_state(args.state)
    write_checkpoint(model, args.out)
    write_tokenizer(
        Tokenizer.from_file(str(args.state / "tokenizer.json")), args.out, model.cfg.max_position_embeddings
    )
    size = sum(f.stat().st_size for f in args.out.iterdir())
    print(f"step {step}: {count_parameters(model) / 1e6:.2f} M parameters, {size / 2**20:.2f} MiB in {args.out}")


if __name__ == "__main__":
    main()
