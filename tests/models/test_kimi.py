"""Kimi K2.5: the language model of a checkpoint for images and text, as transformers saves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from tests.models import stepper
from tests.models.checkpoints import hub_fields, write_tensors
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_parity import assert_close

VISION = {
    "patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 2, "num_hidden_layers": 1,
    "hidden_size": 16, "intermediate_size": 16,
}  # fmt: skip
LAYERS = "language_model.model.layers"
Made = tuple[Path, list[int], Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A random checkpoint, a prompt, and transformers' logits."""
    import transformers

    fields = {
        key: value for key, value in hub_fields("deepseek_v3").items() if key not in ("topk_method", "scoring_func")
    }
    fields |= {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.827}
    text = transformers.DeepseekV3Config(**fields).to_dict()
    config = transformers.Kimi_K25Config(
        text_config=text, vision_config=VISION, projection_hidden_size=16, tie_word_embeddings=False
    )
    torch.manual_seed(random_seed := int(torch.randint(0, 1 << 30, ())))
    model = transformers.Kimi_K25ForConditionalGeneration(config).float().eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "language_model" in name and "norm" in name:
            tensor.data = 1 + 0.2 * torch.randn_like(tensor)
        elif name.endswith("e_score_correction_bias"):
            tensor.data = 0.1 * torch.randn_like(tensor)
    path = tmp_path_factory.mktemp(f"kimi{random_seed}")
    model.save_pretrained(path)
    # transformers undoes the vision tower's renaming of blocks in the language model too
    saved = load_file(path / "model.safetensors")
    write_tensors(path, {name.replace("language_model.model.blocks", LAYERS): saved[name] for name in saved})
    tokens = torch.randint(0, 256, (90,)).tolist()
    with torch.no_grad():
        return path, tokens, model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("row", all_rows())
def test_logits_equal_transformers(made: Made, row: str) -> None:
    path, tokens, want = made
    model = stepper.load(path, row)
    got = [model.step([Chunk(0, tokens[:70], False)])[0], model.step([Chunk(0, tokens[70:], True)])[0]]
    assert_close(torch.cat(got), want)


@pytest.mark.parametrize("architecture", ["KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration", None])
def test_names_and_config(made: Made, tmp_path: Path, architecture: str | None) -> None:
    path = made[0]
    raw = json.loads((path / "config.json").read_text())
    raw["architectures"] = None if architecture is None else [architecture]
    if architecture is None:  # as published: the text's own architecture
        raw["text_config"] |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, files = load_model_config(tmp_path), read_checkpoint(path)
    assert config.moe is not None and config.moe.scale == 2.827 and config.num_layers == 3
    assert "model.layers.0.self_attn.o_proj.weight" in files and not any("vision" in name for name in files)
    check_headers(path, files, config)
    del files["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head.weight .* is missing"):
        check_headers(path, files, config)
