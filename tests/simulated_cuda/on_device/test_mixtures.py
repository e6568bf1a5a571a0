"""Mixtures whose files or layers differ from those of other engine tests: the tokens of the CPU on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_engine.kernels.delta import triton_delta
from moe_engine.kernels.ops import triton_short_conv
from tests.engine.harness import Scripted
from tests.models import gemma3_images
from tests.models.checkpoints import make_checkpoint
from tests.models.ling_v2_5 import make_ling
from tests.models.llama4_images import make_llama4, picture
from tests.models.mistral_native import make_mistral_large3_text
from tests.simulated_cuda.on_device.test_compressed_engines import with_image
from tests.simulated_cuda.on_device.test_engines import FEW, GREEDY, compared, kernels, script, sometimes_warm

MADE: dict[str, Callable[[Path], Path]] = {
    "mistral_large3": lambda path: make_mistral_large3_text(path, 5, num_hidden_layers=2),
    "mistral_large4": lambda path: make_checkpoint("mistral_large4", path, 5, kv_source_layers=[0, 1, 0, 3]),
    "afmoe": lambda path: make_checkpoint("afmoe", path, 5, sliding_window=6),
    "gemma4": lambda path: make_checkpoint("gemma4", path, 5, sliding_window=6),
    "gemma3": lambda path: make_checkpoint("gemma3", path, 5, sliding_window=6),
    "gemma2": lambda path: make_checkpoint("gemma2", path, 5, sliding_window=6),
    "cohere2": lambda path: make_checkpoint("cohere2", path, 5, sliding_window=6),
    "cohere2_moe": lambda path: make_checkpoint("cohere2_moe", path, 5, sliding_window=6),
    "axk1": lambda path: make_checkpoint("axk1", path, 5),
    "granite_swa": lambda path: make_checkpoint("granite_swa", path, 5, sliding_window=6),
    "granitemoe_swa": lambda path: make_checkpoint("granitemoe_swa", path, 5, sliding_window=6),
    "exaone4": lambda path: make_checkpoint("exaone4", path, 5, sliding_window=6),
    "flint": lambda path: make_checkpoint("flint", path, 5, sliding_window=6),
    "flex_olmo": lambda path: make_checkpoint("flex_olmo", path, 5),
    "mellum": lambda path: make_checkpoint("mellum", path, 5, sliding_window=6),
    "granitemoeshared": lambda path: make_checkpoint("granitemoeshared", path, 5),
    "llama4": lambda path: make_checkpoint("llama4", path, 5, attention_chunk_size=6),
    "phimoe": lambda path: make_checkpoint("phimoe", path, 5),
    "qwen2_moe": lambda path: make_checkpoint("qwen2_moe", path, 5),
    "laguna": lambda path: make_checkpoint("laguna", path, 5, sliding_window=6),
    "step3p7": lambda path: make_checkpoint("step3p7", path, 5, sliding_window=6),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", MADE)
def test_decodes_are_captured(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, a prefix of the cache, replayed decodes, no waits."""
    sometimes_warm(monkeypatch)
    path = MADE[kind](tmp_path / "model")
    kernels.launches.clear()
    more = {"cuda_graph_max_bs": 2, "chunked_prefill_size": 4, **FEW, "ops_backend": "triton"}
    found = compared(path, tmp_path, script([GREEDY, GREEDY]), {}, **more)
    assert found.num_graphs == 2 and found.waits == []
    assert any(step.cuda_graph for step in found.steps)


@pytest.mark.drawn(1, group="lightning attention on a device")
@pytest.mark.parametrize("kind", ["minimax", "ling_v2_5"])
def test_captured_steps_of_lightning_attention(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniMax-Text-01: states in chunks and in replayed decodes, without convolution and norm. Ling 2.6: with norms and
    rotation of q and k, and norms of groups of heads."""
    sometimes_warm(monkeypatch)
    monkeypatch.setattr(triton_delta, "SHORT", 3)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3}
    if kind == "minimax":
        path = make_checkpoint(kind, tmp_path / "model", 5, num_local_experts=4)
    else:
        path = make_ling(tmp_path / "model", 5, **sizes)
    requests = [Scripted(f"r{i}", [*range(5, 11), 20, i], 3, 3 * i, sampling=GREEDY) for i in range(2)]
    both = {"max_mamba_cache_size": 8, "max_running_requests": 3, "context_length": 24, "chunked_prefill_size": 4}
    kernels.launches.clear()
    more = FEW if kind == "minimax" else FEW | {"ops_backend": "triton"}
    found = compared(path, tmp_path, requests, both, cuda_graph_bs_decode="2", **more)
    assert found.num_graphs and found.waits == []
    launched = set(kernels.launches)
    assert launched >= {"delta_kernel", "additive_kernel", "states_kernel"}
    assert not launched & {"conv_update_kernel", "conv_kernel", "group_norm_kernel"}
    assert kind == "minimax" or {"grouped_rows_kernel", "gate_heads_kernel"} <= launched


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
def test_captured_steps_of_convolutions(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States in chunks, of which a prefix is cached, and in replayed decodes; runs of both kinds."""
    sometimes_warm(monkeypatch)
    monkeypatch.setattr(triton_short_conv, "SHORT", 3)
    path = make_checkpoint(kind, tmp_path / "model", 5)
    requests = [Scripted(f"r{i}", [*range(5, 11), 20, i], 3, 3 * i, sampling=GREEDY) for i in range(2)]
    both = {"max_mamba_cache_size": 8, "max_running_requests": 3, "context_length": 24, "chunked_prefill_size": 4}
    kernels.launches.clear()
    found = compared(path, tmp_path, requests, both, cuda_graph_bs_decode="2", **FEW | {"ops_backend": "triton"})
    assert found.num_graphs and found.waits == []
    assert found.answers["r1"].cached_tokens > 0
    assert set(kernels.launches) >= {"short_conv_kernel", "long_conv_kernel", "conv_states_kernel"}


@pytest.mark.drawn(1)
def test_decodes_behind_tiles_are_captured(tmp_path: Path) -> None:
    """Images of several tiles and of one: the tower on the device, embeddings of the text among their tokens."""
    torch.manual_seed(5)
    path, images = make_llama4(tmp_path / "model", 5, attention_chunk_size=16).path, [picture(1, 2), picture(1, 1)]
    text = [Scripted(f"r{i}", [9, 8, 11, 7, 5], 4, 3 * i, sampling=GREEDY, logprob=True) for i in range(3)]
    requests = [with_image(text[0], 2, images[0]), with_image(text[1], 3, images[1]), with_image(text[2], 2, images[0])]
    sizes = {"page_size": 1, "context_length": 48, "max_running_requests": 3, "max_total_tokens": 160}
    found = compared(path, tmp_path, requests, sizes, cuda_graph_bs_decode="2", **FEW)
    assert found.num_graphs and any(step.cuda_graph for step in found.steps)
    assert not any(step.waits for step in found.steps if step.cuda_graph)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("window", [7, 40])
def test_decodes_behind_whole_images_are_captured(window: int, tmp_path: Path) -> None:
    """Gemma 3: tokens of an image attend to later ones in Triton's rows, within a window and beyond it."""
    torch.manual_seed(5)
    path = gemma3_images.make_gemma3(tmp_path / "model", 5, sliding_window=window).path
    images = [gemma3_images.picture(), gemma3_images.picture()]
    text = [Scripted(f"r{i}", [9, 8, 11, 7, 5], 4, 3 * i, sampling=GREEDY, logprob=True) for i in range(3)]
    requests = [with_image(text[0], 2, images[0]), with_image(text[1], 3, images[1]), with_image(text[2], 2, images[0])]
    sizes = {"page_size": 1, "context_length": 48, "max_running_requests": 3, "max_total_tokens": 160}
    sizes |= {"chunked_prefill_size": 16}
    found = compared(path, tmp_path, requests, sizes, cuda_graph_bs_decode="2", **FEW)
    assert found.num_graphs and any(step.cuda_graph for step in found.steps)
    assert not any(step.waits for step in found.steps if step.cuda_graph)
