"""Makes the repository root importable, for `tests.models.checkpoints`."""

import sys
from pathlib import Path

import torch

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

torch.set_num_threads(1)  # tiny tensors, and several test processes share a machine
