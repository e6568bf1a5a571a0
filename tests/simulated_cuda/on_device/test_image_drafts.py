"""Drafts after images on a simulated GPU: captured steps compute positions after images on the device, without waits;
tokens and log-probabilities of the CPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import Scripted
from tests.engine.test_image_speculation import target_of
from tests.models.vision_checkpoints import Oracle, make_checkpoint, random_pixels
from tests.simulated_cuda.on_device.test_compressed_engines import NGRAM, with_image
from tests.simulated_cuda.on_device.test_engines import CHAIN, FEW, GREEDY, TREE, compared
from tests.speculation.eagle_heads import LAYERS, Form, ReferenceHead

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "n-grams": ("qwen2_5_vl", NGRAM), "MTP layer": ("qwen3_5", CHAIN),
    "n-grams beside experts": ("glm4v_moe", NGRAM),
    "tree of a head": ("qwen3_vl", TREE | {"speculative_algorithm": "EAGLE3"}),
}  # fmt: skip


def made(kind: str, path: Path, seed: int) -> Path:
    """A checkpoint whose next token depends mostly on the last one, in cycles of four: some drafts are right."""
    layers = {"layer_types": ["linear_attention", "full_attention"]} if kind == "qwen3_5" else {}
    count = 2 if layers else LAYERS
    make_checkpoint(kind, path, seed, num_mtp_layers=int(kind == "qwen3_5"), num_hidden_layers=count, **layers)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".visual." not in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.1
    (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    embedding *= 2
    last = torch.arange(256)
    tensors["lm_head.weight"][last // 4 * 4 + (last + 1) % 4] = embedding[last] * 2
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.drawn(2, group="engines on a device")
@pytest.mark.parametrize("way", WAYS)
def test_steps_behind_images_are_captured(way: str, tmp_path: Path) -> None:
    (kind, flags), seed = WAYS[way], random.randrange(1000)
    path = made(kind, tmp_path / "model", seed)
    if "head" in way:
        head = ReferenceHead(Form(), target_of(Oracle(path)), seed).write(tmp_path / "head")
        flags = flags | {"speculative_draft_model_path": str(head)}
    prefix = [*range(40, 44), 5, 6, 7, 5, random.randrange(200)]
    text = [
        Scripted("text", [9, 8, 11, 8], 4, 0, sampling=GREEDY, logprob=True),
        Scripted("r0", [*prefix, 80, 82], 7, 0, sampling=GREEDY, logprob=True),
        Scripted("r1", [*prefix, 80, 82], 5, 6, sampling=GREEDY, logprob=True),
    ]
    image = random_pixels(2, 3, torch.Generator().manual_seed(seed))
    requests = [text[0], *(with_image(request, 4, image) for request in text[1:])]
    both = {"page_size": 1, "context_length": 40, "max_running_requests": 3, "max_total_tokens": 160} | flags
    found = compared(path, tmp_path, requests, both, cuda_graph_bs_decode="2", **FEW)
    replayed = [step for step in found.steps if step.cuda_graph]
    assert found.num_graphs and not any(step.waits for step in replayed)
    assert sum(bool(step.plan.speculation and step.plan.speculation.depth) for step in replayed) > 1
