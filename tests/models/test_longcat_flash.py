"""LongCat-Flash beyond the logits of its main layers: its MTP layer against transformers' modules, tokens that choose
zero experts only, FP8 as published, weights by their names, recorded choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.footprint import weights_of
from moe_engine.models.layers.shortcut import ShortcutStart
from moe_engine.models.tensors.model import factor, model_tensors
from moe_engine.models.weights import WeightReader
from tests.models import stepper
from tests.models.checkpoints import dequantized_copy, make_checkpoint, write_tensors
from tests.models.conftest import reference_logits
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_mtp import Drafter
from tests.models.test_parity import assert_close

KIND = "longcat_flash"
every_row = pytest.mark.parametrize("row", all_rows())


class MtpOracle:
    """The MTP layer of a checkpoint from modules of transformers, and its main model."""

    def __init__(self, path: Path) -> None:
        import transformers
        from transformers.models.longcat_flash import modeling_longcat_flash as modules

        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = transformers.LongcatFlashForCausalLM.from_pretrained(path, **options).eval()
        config, tensors = self.model.config, load_file(path / "model.safetensors")
        layer = "model.mtp.layers.0."

        def filled(module: torch.nn.Module, prefix: str) -> torch.nn.Module:
            own = {name.removeprefix(prefix): t.float() for name, t in tensors.items() if name.startswith(prefix)}
            module.load_state_dict(own)
            return module.eval()

        def norm(name: str) -> torch.nn.Module:
            return filled(modules.LongcatFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps), f"{name}.")

        self.enorm, self.hnorm = norm(f"{layer}enorm.m"), norm(f"{layer}hnorm.m")
        self.norms = norm(f"{layer}input_layernorm"), norm(f"{layer}post_attention_layernorm")
        self.last = norm("model.mtp.norm")
        self.attention = filled(modules.LongcatFlashMLA(config, 0), f"{layer}self_attn.")
        self.mlp = filled(modules.LongcatFlashMLP(config), f"{layer}transformer_layer.mlp.")
        self.project = tensors[f"{layer}eh_proj.weight"].float()

    @torch.no_grad()
    def layer(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """v of all tokens but the last, and its logits."""
        own, ids = self.model.model, torch.tensor([tokens])
        hidden = own(ids[:, :-1]).last_hidden_state
        x = torch.cat((self.enorm(own.embed_tokens(ids[:, 1:])), self.hnorm(hidden)), -1) @ self.project.T
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        rotary = own.rotary_emb(x, torch.arange(length)[None])
        x = x + self.attention(self.norms[0](x), position_embeddings=rotary, attention_mask=mask)[0]
        v = self.last(x + self.mlp(self.norms[1](x)))[0]
        return v, self.model.lm_head(v)


@every_row
def test_mtp_layer(row: str, tmp_path: Path) -> None:
    path = make_checkpoint(KIND, tmp_path, 3, num_mtp_layers=1)
    tokens = torch.randint(0, 256, (70,)).tolist()
    drafter = Drafter(path, row)
    steps = [(0, 40, False), (40, 60, False), *((i, i + 1, True) for i in range(60, 69))]
    v = torch.cat([drafter.step(tokens, start, stop, decode) for start, stop, decode in steps])
    want, logits = MtpOracle(path).layer(tokens)
    assert_close(v, want)
    assert_close(drafter.mtp.logits(v), logits)


@every_row
def test_tokens_of_zero_experts_alone(row: str, tmp_path: Path) -> None:
    """In one layer all choices are zero experts, in the other none is."""
    path = make_checkpoint(KIND, tmp_path, 4, tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    for layer, favored in ((0, slice(16, None)), (1, slice(0, 16))):
        tensors[f"model.layers.{layer}.mlp.router.e_score_correction_bias"][favored] += 10.0
    write_tensors(path, tensors)
    tokens, want = reference_logits(path, 4)
    model = stepper.load(path, row)
    assert_close(model.step([Chunk(0, tokens, False)])[0], want)
    first, second = model.model.moes
    x = torch.randn(9, 64)
    assert (first._choose(x, None, "prefill")[1] == -1).all() and (second._choose(x, None, "prefill")[1] >= 0).all()


@every_row
def test_fp8_as_published(row: str, tmp_path: Path) -> None:
    """Blocks with scales of projections and experts; router, norms, embedding and head are not quantized."""
    sizes = {"hidden_size": 160, "ffn_hidden_size": 264, "expert_ffn_hidden_size": 136, "kv_lora_rank": 144}
    path = make_checkpoint(KIND, tmp_path / "fp8", 5, fp8=True, num_mtp_layers=1, tokenizer=False, **sizes)
    scaled = {name for name in load_file(path / "model.safetensors") if name.endswith("_scale_inv")}
    parts = ("self_attn.1.kv_b_proj", "mlps.0.up_proj", "mlp.experts.3.down_proj")
    assert {f"model.layers.0.{part}.weight_scale_inv" for part in parts} <= scaled
    assert not [name for name in scaled if "classifier" in name]
    config = load_model_config(path)
    assert config.weight_format.name == "fp8"
    tokens, want = reference_logits(dequantized_copy(path, tmp_path / "plain"), 5)
    got = stepper.load(path, row).step([Chunk(0, tokens, False)])[0]
    assert_close(got, want, 1e-4 if row == "torch" else 2e-2)


def test_names_of_two_layers(tmp_path: Path) -> None:
    """Published layer 1 is layers 2 and 3; transformers' zero experts have no place."""
    path = make_checkpoint(KIND, tmp_path, 6, num_mtp_layers=1, tokenizer=False)
    config, files = load_model_config(path), read_checkpoint(path)
    stored = {name: file.stored_name(name) for name, file in files.items()}
    for name, published in (
        ("model.layers.2.self_attn.q_b_proj.weight", "model.layers.1.self_attn.0.q_b_proj.weight"),
        ("model.layers.3.mlp.up_proj.weight", "model.layers.1.mlps.1.up_proj.weight"),
        ("model.layers.3.input_layernorm.weight", "model.layers.1.input_layernorm.1.weight"),
        ("model.layers.2.moe.experts.9.gate_proj.weight", "model.layers.1.mlp.experts.9.gate_proj.weight"),
        ("model.layers.2.moe.router.classifier.weight", "model.layers.1.mlp.router.classifier.weight"),
        ("model.layers.4.mlp.down_proj.weight", "model.mtp.layers.0.transformer_layer.mlp.down_proj.weight"),
        ("model.layers.4.enorm.weight", "model.mtp.layers.0.enorm.m.weight"),
        ("model.layers.4.shared_head.norm.weight", "model.mtp.norm.weight"),
    ):
        assert stored[name] == published
    wanted = {name for spec in model_tensors(config, include_mtp=True) for name in spec.names()}
    assert wanted <= set(stored)
    assert all("experts" in name or "embed_tokens" in name for name in set(stored) - wanted)


def test_modules_hold_each_weight_once(tmp_path: Path) -> None:
    """What weight updates replace: every tensor is one module's, which is built alike from its file."""
    path = make_checkpoint(KIND, tmp_path, 7, tokenizer=False)
    decoder = stepper.load(path, "torch").model
    reader = WeightReader(path, torch.float32)
    seen: set[int] = set()
    names = {name for spec in model_tensors(decoder.config) for name in spec.names()}
    for module in decoder.modules():
        names -= {name for name in names if name.startswith(module.prefixes)}
        pairs = list(zip(weights_of(module.module), weights_of(module.build(reader)), strict=True))
        assert all(torch.equal(kept, built) for kept, built in pairs)
        assert not {tensor.data_ptr() for tensor, _ in pairs} & seen
        seen |= {tensor.data_ptr() for tensor, _ in pairs}
    assert not names
    norm = "model.layers.1.self_attn.kv_a_layernorm.weight"
    assert factor(decoder.config, norm) == 2**0.5 and factor(decoder.config, "model.norm.weight") == 1.0


def test_recorded_choices_are_without_zero_experts(tmp_path: Path) -> None:
    """Counts of routed experts; a choice of a zero expert is -1, as of padding."""
    model = stepper.load(make_checkpoint(KIND, tmp_path, 8, tokenizer=False), "cpu")

    class Counter:
        counting = True

        def __init__(self) -> None:
            self.found: dict[int, Tensor] = {}

        def on_select(self, layer_index: int, topk_ids: Tensor) -> None:
            self.found[layer_index] = topk_ids

    counter, tokens = Counter(), torch.randint(0, 256, (60,)).tolist()
    want = model.step([Chunk(0, tokens, False)])[0]
    for moe in model.model.moes:
        moe.count(counter)
    assert torch.equal(model.step([Chunk(1, tokens, False)])[0], want)
    assert sorted(counter.found) == [0, 2]
    for layer, ids in counter.found.items():
        half = model.model.layers[layer].feed_forward
        assert isinstance(half, ShortcutStart) and half.moe.layer_index == layer
        assert ids.shape == (60, 5) and ids.min() >= -1 and ids.max() < 16 and 0 < (ids < 0).sum() < ids.numel()
