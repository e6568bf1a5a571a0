"""Random tiny checkpoints whose drafts are sometimes accepted, although every token depends on the whole context.

`tests.models.checkpoints` writes independent layers, so that drafts of MTP layers are never accepted. Here the outputs
of attention and feed-forward are scaled down until the last token dominates, and MTP layers pass the embedding of their
token through. Acceptance then depends on the text, as with real models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import make_checkpoint

BRANCH_GAIN = 0.2
PASSED_ON = 3.0
NOISE = 0.3
_BRANCHES = (
    ".o_proj.weight", ".down_proj.weight", ".experts.down_proj", ".moe.down_proj", ".ple.value_proj.weight",
    ".mixer.out_proj.weight",
)  # fmt: skip


def agreeing_checkpoint(kind: str, directory: Path, seed: int, **fields: Any) -> Path:
    """Like `make_checkpoint`; equal seeds give the same embedding and LM head, for any kind and number of layers."""
    path = make_checkpoint(kind, directory, seed, **fields)
    file = path / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(seed)
    vocab_size, width = next(
        tensor.shape for name, tensor in tensors.items() if name.endswith(("embed_tokens.weight", ".embeddings.weight"))
    )
    embedding = torch.randn(vocab_size, width, generator=generator)
    head = torch.randn(vocab_size, width, generator=generator) * 3 * width**-0.5
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", ".embeddings.weight")):
            tensors[name] = embedding.clone()
        elif name.endswith(("lm_head.weight", "shared_head.head.weight")):
            tensors[name] = head.clone()
        elif name.endswith("shared_head.output.weight"):  # a head of the layer's own
            tensor.add_(head)
        elif name.endswith(_BRANCHES):
            tensor.mul_(BRANCH_GAIN)
        elif name.endswith(".fc_hidden.weight"):
            tensor.mul_(NOISE)
        elif name.endswith((".eh_proj.weight", ".fc_embedding.weight")):
            tensor.mul_(NOISE)[:, :width].diagonal().add_(PASSED_ON)
    save_file(tensors, file, metadata={"format": "pt"})
    return path
